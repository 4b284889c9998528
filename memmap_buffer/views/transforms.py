"""Returns, advantages and scaling: pure functions of arrays or tensors, and the transforms of batches made of them.

The views call `n_step_return`; users call the other functions, and give the classes as `transform=`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array, check_number
from memmap_buffer.errors import SchemaError

FloatArray = npt.NDArray[np.floating]


def n_step_return(
    rewards: Array,
    k: npt.NDArray[np.int64],
    terminated: npt.NDArray[np.bool_],
    gamma: float,
    discounts: Array | None = None,
) -> tuple[FloatArray, FloatArray]:
    """The n-step return R, and the discount of the value V(s_{t+k}) that follows: target = R + discount · V(s_{t+k}).

    R = r_t + γ r_{t+1} + … + γ^{k-1} r_{t+k-1}; discount = γ^k, 0 if terminated.
    With a discount d of every step, R = Σ_{i<k} γ^i (Π_{j<i} d_{t+j}) r_{t+i}, and discount = γ^k Π_{j<k} d_{t+j}.

    Args:
        rewards: (B, n, …) r_t … r_{t+n-1}; values from index k on do not count.
        k: (B,) the number of rewards, 1 … n.
        terminated: (B,) whether step t + k - 1 ended the episode, so that nothing follows.
        gamma: γ, 0 … 1.
        discounts: (B, n, …) d_t … d_{t+n-1}, with as many axes as the rewards, each as long or of length 1.

    Returns:
        (return (B, …), discount (B, …)): the further axes of the discount have length 1, or the length of those of
        `discounts`, so that both broadcast. float64 if the rewards are, else float32, torch's default; whole numbers
        are summed in float64 and rounded once.

    Source: Sutton and Barto, Reinforcement Learning, 2nd ed., eq. 7.1. With discounts: White 2017, "Unifying Task
        Specification in Reinforcement Learning"; as summed by Yarats et al. 2021, DrQ-v2, `replay_buffer.py`.
    """
    dtype: np.dtype[np.floating] = np.dtype(np.float64 if rewards.dtype == np.float64 else np.float32)
    n = rewards.shape[1]
    if n == 1 and discounts is None:
        returns = rewards[:, 0].astype(dtype)
        discount = np.empty(len(k), dtype)
        discount.fill(gamma)
        if np.count_nonzero(terminated):
            discount[np.asarray(terminated, np.bool_)] = 0
        return returns, discount if rewards.ndim == 2 else discount.reshape(len(k), *[1] * (rewards.ndim - 2))
    powers = np.power(float(gamma), np.arange(n + 1))
    # Rewards that do not count are set to 0 first: a weight of 0 would leave inf and nan as nan.
    counts = np.arange(n) < k[:, None]
    counted = np.where(_like(counts, rewards), rewards, 0)
    counted = counted.astype(dtype if rewards.dtype.kind == "f" else np.float64, copy=False)
    if discounts is not None:
        factors = np.where(_like(counts, discounts), float(gamma) * discounts.astype(np.float64), 1.0)
        products = np.concatenate([np.ones_like(factors[:, :1]), np.cumprod(factors, axis=1)], axis=1)
        discount = np.where(_like(terminated, products[:, n]), 0.0, products[:, n])
        return np.asarray((counted * products[:, :n]).sum(axis=1), dtype), discount.astype(dtype)
    weights = powers[:n].astype(counted.dtype)
    returns = np.tensordot(counted, weights, axes=(1, 0)) if counted.ndim > 2 else counted @ weights
    discount = np.where(terminated, 0.0, powers.take(k)).astype(dtype)
    return np.asarray(returns, dtype), discount.reshape(len(k), *[1] * (rewards.ndim - 2))


def discounted_returns(rewards: Any, gamma: float = 1.0, *, axis: int = 0) -> Any:
    """The return of every timestep until the end: R_t = r_t + γ r_{t+1} + γ² r_{t+2} + …; with γ = 1 returns-to-go.

    Args:
        rewards: an array or a tensor of numbers; behind the end of an episode there are zeros, as in padded batches.
        gamma: γ, 0 … 1.
        axis: the axis of time: 0 of an episode (T, …), 1 of a batch (B, T, …).

    Returns:
        an array or a tensor, as `rewards`, of the same shape; summed in float64, float64 if the rewards are, else
        float32.

    Raises:
        SchemaError: γ is no number from 0 to 1.

    Source: Sutton and Barto, Reinforcement Learning, 2nd ed., eq. 3.8; returns-to-go: Chen et al. 2021, "Decision
        Transformer".
    """
    check_number("gamma", gamma)
    rewards = rewards if hasattr(rewards, "dtype") else np.asarray(rewards)
    tensor = hasattr(rewards, "double")
    values: Any = rewards.double() * 1.0 if tensor else np.array(rewards, np.float64)
    over_time = values.swapaxes(0, axis)
    steps = 1  # the number of rewards that each entry sums so far; it doubles each time
    while steps < len(over_time):
        over_time[:-steps] += gamma**steps * over_time[steps:]
        steps *= 2
    if str(rewards.dtype).endswith("float64"):
        return values
    return values.float() if tensor else values.astype(np.float32)


@dataclass(frozen=True)
class Returns:
    """A transform that adds the discounted return of every timestep to batches of whole episodes.

    For windows it would be the return until the window's end: store the return as a field instead.

    Args:
        reward: the key of the rewards (B, T, …).
        gamma: γ, 1 for returns-to-go.
        name: the key that is added.

    Raises:
        SchemaError: when it is called: the batch has no key `reward`.
    """

    reward: str = "reward"
    gamma: float = 1.0
    name: str = "returns_to_go"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rewards = _padded(batch, self.reward)
        return {**batch, self.name: discounted_returns(rewards, self.gamma, axis=1)}


def advantages(
    rewards: Any, values: Any, terminated: Any, gamma: float = 0.99, lambda_: float = 0.95, *, lens: Any = None
) -> tuple[Any, Any]:
    """The generalised advantage estimate A of every timestep of whole episodes, and its TD(λ) return, A + V.

    δ_t = r_t + γ V_{t+1} (1 - d_t) - V_t; A_t = δ_t + γ λ (1 - d_t) A_{t+1}, from the last step back, in V's dtype.

    Args:
        rewards: an array or a tensor (B, T).
        values: V of the same timesteps (B, T), or (B, T + 1) with the V that follows the last step of each episode,
            which is else taken for 0.
        terminated: d (B, T), true where nothing follows.
        gamma: γ, 0 … 1.
        lambda_: λ, 0 … 1.
        lens: (B,) the number of timesteps of each episode, behind which both results are 0; default: T.

    Returns:
        (A, TD(λ) return), both (B, T).

    Raises:
        SchemaError: γ or λ is no number from 0 to 1, or the shapes do not fit.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16;
        TD(λ): Sutton and Barto, Reinforcement Learning, 2nd ed., eq. 12.2.
    """
    check_number("gamma", gamma)
    check_number("lambda_", lambda_)
    shapes = tuple(tuple(column.shape) for column in (rewards, values, terminated))
    extra = shapes[1][1] - shapes[0][1] if {len(shape) for shape in shapes} == {2} else -1
    if extra not in (0, 1) or shapes[0] != shapes[2] or shapes[0][0] != shapes[1][0]:
        raise SchemaError(
            "advantages: got rewards {}, values {} and terminated {}, expected (B, T), (B, T) or (B, T + 1), and "
            "(B, T)".format(*shapes)
        )
    rewards, values, ends = (_in_dtype_of(values, column).T for column in (rewards, values, terminated))
    estimates, returns, following = rewards * 1.0, rewards * 1.0, rewards[0] * 0.0
    for t in range(len(rewards) - 1, -1, -1):
        after = values[t + 1] * 1.0 if t + 1 < len(values) else values[0] * 0.0
        if lens is not None and not extra:
            after[t + 1 >= lens] = 0.0  # padding
        goes_on = 1.0 - ends[t]
        delta = rewards[t] + gamma * after * goes_on - values[t]
        following = delta + gamma * lambda_ * goes_on * following
        estimates[t], returns[t] = following, following + values[t]
        if lens is not None:
            for column in (following, estimates[t], returns[t]):
                column[t >= lens] = 0.0
    return estimates.T, returns.T


def _in_dtype_of(like: Any, column: Any) -> Any:
    """An array or tensor in the dtype of `like`, or in float32 if that dtype is no floating one."""
    if hasattr(column, "double"):
        return column.to(like.dtype) if like.is_floating_point() else column.float()
    return column.astype(like.dtype if like.dtype.kind == "f" else np.float32)


@dataclass(frozen=True)
class Advantages:
    """A transform that adds the advantages and the TD(λ) returns of all timesteps to batches of whole episodes.

    V is a field that was stored, or a key that an earlier transform adds. With `Trajectory(final_observation=True)` and
    V declared `final`, the V of the final observation follows the last step of an episode that was cut short; see
    `advantages`. Without, it counts as 0, and a UserWarning says so. With `expand_scalars=True` all columns have one
    more axis, of length 1.

    Args:
        value: the key of V, (B, T) or (B, T + 1).
        reward: the key of the rewards (B, T).
        terminated: the key that is true where nothing follows; None: nothing terminates.
        gamma: γ.
        lambda_: λ.
        name: the key for the advantages.
        returns: the key for the TD(λ) returns.

    Raises:
        SchemaError: a key is no string; or, when it is called: the batch lacks one of the keys, or has windows that end
            before their episode without the V that follows them.
    """

    value: str = "value"
    reward: str = "reward"
    terminated: str | None = "terminated"
    gamma: float = 0.99
    lambda_: float = 0.95
    name: str = "advantage"
    returns: str = "lambda_return"

    def __post_init__(self) -> None:
        for name in ("value", "reward", "terminated", "name", "returns"):
            key = getattr(self, name)
            if not isinstance(key, str) and (name, key) != ("terminated", None):
                raise SchemaError(f"Advantages: {name}: got {key!r}, expected a key; give γ and λ as gamma=, lambda_=")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rewards, values = (_padded(batch, key) for key in (self.reward, self.value))
        over = rewards * 0 if self.terminated is None else _padded(batch, self.terminated)
        widened = rewards.ndim == 3 and {column.shape[2:] for column in (rewards, values, over)} == {(1,)}
        if widened:
            rewards, values, over = rewards[..., 0], values[..., 0], over[..., 0]
        reaches_end = batch.get("_reaches_episode_end")
        if reaches_end is not None and not reaches_end.all() and values.shape[1] == rewards.shape[1]:
            raise SchemaError(
                f"Advantages: some windows end before their episode, and the {self.value!r} of the step behind is not "
                "there; take whole episodes, or give values (B, T + 1)"
            )
        lens, has_final = batch.get("_lens"), batch.get("_has_final")
        if lens is not None and has_final is not None and values.shape[1] > rewards.shape[1]:
            values = values * 1.0
            values[~has_final, lens[~has_final]] = 0.0  # padding, or the V that a network computed from it
        columns = advantages(rewards, values, over, self.gamma, self.lambda_, lens=lens)
        if self.terminated is not None and values.shape[1] == rewards.shape[1] and not (over != 0).any(1).all():
            warnings.warn(
                f"Advantages: an episode was cut short, and the {self.value!r} behind its last step is not there, so "
                "that counts as 0; declare it final=True, and read view=Trajectory(final_observation=True)",
                UserWarning,
                stacklevel=2,
            )
        if widened:
            columns = columns[0][..., None], columns[1][..., None]
        return {**batch, self.name: columns[0], self.returns: columns[1]}


@dataclass(frozen=True)
class Scale:
    """A transform that converts fields of whole numbers, such as images, to float32 and divides them by a number.

    Args:
        fields: keys of the batch, dotted within groups.
        by: the divisor.

    Raises:
        SchemaError: when it is called: the batch lacks one of the fields.
    """

    fields: Iterable[str]
    by: float = 255.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", (self.fields,) if isinstance(self.fields, str) else tuple(self.fields))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for name in self.fields:
            batch, _ = _changed(batch, name, lambda values: _scaled(values, self.by))
        return batch


def _padded(batch: dict[str, Any], name: str) -> Any:
    """The value of a key, dotted within groups. Raises SchemaError: it is ragged, not padded."""
    values = _changed(batch, name, lambda column: column)[1]
    if isinstance(values, list) or getattr(values, "is_nested", False):
        raise SchemaError(
            f"transform: {name!r} comes without padding; leave ragged=True out, `_lens` tells what exists"
        )
    return values


def _scaled(values: Any, by: float) -> Any:
    """A tensor or an array, or each of a list, as float32 and divided by `by`."""
    if isinstance(values, list):
        return type(values)(_scaled(rows, by) for rows in values)
    return (values.float() if hasattr(values, "float") else np.asarray(values, np.float32)) / by


def _changed(batch: dict[str, Any], name: str, change: Callable[[Any], Any]) -> tuple[dict[str, Any], Any]:
    """(a copy of the batch with `change` applied to one key, dotted within groups; the new value of that key).

    All other values are shared. Raises SchemaError: the batch has no such key.
    """
    key, _, rest = name.partition(".")
    if not isinstance(batch, dict) or key not in batch:
        keys = ", ".join(map(repr, batch)) if isinstance(batch, dict) else "no groups there"
        raise SchemaError(f"transform: the batch has no {name!r}; it has {keys}")
    value, new_value = _changed(batch[key], rest, change) if rest else (change(batch[key]),) * 2
    return {**batch, key: value}, new_value


def _like(mask: npt.NDArray[np.bool_], array: Array) -> npt.NDArray[np.bool_]:
    """The mask with axes of length 1 added, so that it broadcasts with the array."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
