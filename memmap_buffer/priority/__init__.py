"""Priorities on the disk: the sum tree, its file, its owner, the priorities of a view's anchors, importance weights."""
