"""The command `memmap-buffer`: `command` is the entry point, `app` lists the commands, others hold a group of them."""
