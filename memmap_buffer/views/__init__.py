"""One batch: its anchors, the folders that they point into, the view around each, and the copy of the rows."""
