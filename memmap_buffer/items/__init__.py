"""Which items exist, as runs of anchors chosen by filters and splits; and in which order an epoch gives them."""
