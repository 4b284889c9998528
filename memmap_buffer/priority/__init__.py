"""Priorities on the disk: the sum tree, its file, its owner, and what each anchor of a view weighs."""
