"""Pure functions from arrays to arrays, for the views and for users."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.values import Array

FloatArray = npt.NDArray[np.floating]


def n_step_return(
    rewards: Array, k: npt.NDArray[np.int64], terminated: npt.NDArray[np.bool_], gamma: float
) -> tuple[FloatArray, FloatArray]:
    """The n-step return and the discount of what follows it.

    R = r_t + γ r_{t+1} + … + γ^{k-1} r_{t+k-1}; target = R + discount · V(s_{t+k}), discount = γ^k, 0 if terminated.

    Args:
        rewards: (B, n, …) r_t … r_{t+n-1}; what stands beyond k does not count.
        k: (B,) how many rewards there are, 1 … n.
        terminated: (B,) whether step t + k - 1 ended the episode, so that nothing follows.
        gamma: γ, 0 … 1.

    Returns: (return (B, …), discount (B,)), float32, or float64 where the rewards are.

    Source: Sutton and Barto, Reinforcement Learning, 2nd ed., eq. 7.1.
    """
    dtype: np.dtype[np.floating] = np.dtype(np.float64 if rewards.dtype == np.float64 else np.float32)
    n = rewards.shape[1]
    powers = np.power(float(gamma), np.arange(n + 1)).astype(dtype)
    # What stands beyond k may be inf or nan, and is not 0 by a weight of 0.
    counted = np.where(_like(np.arange(n) < k[:, None], rewards), rewards, 0).astype(dtype, copy=False)
    returns = np.tensordot(counted, powers[:n], axes=(1, 0)) if counted.ndim > 2 else counted @ powers[:n]
    discount = np.where(terminated, dtype.type(0), powers.take(k))
    return np.asarray(returns, dtype), discount


def compute_importance_weights(probabilities: Any, num_items: int, beta: float) -> Any:
    """The weights that undo the bias of draws by priority: w = (N · P)^-β.

    Args:
        probabilities: (B,) P, an array or a tensor. num_items: N, the items that could be drawn.
        beta: β, 0 … 1; 1 undoes all of it.

    Returns: (B,), of the same kind.
    Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.4.
    """
    return (num_items * probabilities) ** -beta


def _like(mask: npt.NDArray[np.bool_], array: Array) -> npt.NDArray[np.bool_]:
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
