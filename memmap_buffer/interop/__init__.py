"""Neighbours: one file for each, each an optional extra, on the public names of this package alone."""
