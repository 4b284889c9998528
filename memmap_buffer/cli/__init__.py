"""The command `memmap-buffer`: `command` is its entry point, `app` lists the commands, the others are a group each."""
