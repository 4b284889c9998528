"""How batches are cut: which anchors exist, in which order they are drawn, and what is cut around them."""
