"""Importance weights, which undo the bias of batches that are drawn by priority."""

from __future__ import annotations

from typing import Any

LOWEST = 1e-10  # probability: one of 0 has no finite weight


def compute_importance_weights(
    probabilities: Any, buffer_size: int, beta: float = 0.4, *, normalize: bool = True
) -> Any:
    """The weights that undo the bias of draws by priority: w = (N · P)^-β, divided by the highest of them.

    Args:
        probabilities: (B,) P, an array or a tensor of floats. Less than 10⁻¹⁰ counts as that; 0, as an item has that
            was drawn again, gives the weight 0.
        buffer_size: N, the number of items that could be drawn.
        beta: β, 0 … 1; 1 undoes all of the bias.
        normalize: False leaves the division out.

    Returns: (B,), of the same kind and dtype.
    Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.4; the arguments are memorax's.
    """
    weights = (buffer_size * probabilities.clip(LOWEST)) ** -beta * (probabilities > 0)
    if not normalize or not len(weights):
        return weights
    highest = weights.max()
    return weights / (highest if highest > 0 else 1)
