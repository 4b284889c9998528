"""The command `memmap-buffer`: `command` begins, `app` lists what there is, the others are a group each."""
