"""Priorities on the disk: the sum tree, its file, its owner, the priorities of a view's anchors, importance weights.

- `options`: what a user chooses, and the weights of items.
- `sum_tree`, `kernels`: sums of priorities, in NumPy and as compiled loops; they know nothing of episodes.
- `tree_file`: a tree in its files, and when these are trusted.
- `priorities`: the priorities of the steps of a folder, which follow its episodes; what reads and updates them.
- `leaves`: from a value of the sums to a step and from a step to its leaf, of one folder or of many.
- `anchor_priorities`: the priorities of a view's items: those of steps, or a second tree in memory.
"""
