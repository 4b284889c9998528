"""Episodes in a browser: a table of all, one with its frames and curves, statistics, marks set by eye."""
