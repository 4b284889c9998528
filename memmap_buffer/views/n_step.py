"""`NStep`, the view of transitions over n steps, with returns and stacked frames; and n-step returns for `Window`.

The formulas of the returns are in `transforms.n_step_return`; here are the rows that they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from memmap_buffer.choices import Padding, StepBoundary, check_choice
from memmap_buffer.dtypes import FALSE, TRUE, Array, check_count, check_number
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import DECLARED, Schema
from memmap_buffer.views.anchors import BoolArray, Runs
from memmap_buffer.views.batch_builder import BatchBuilder, Ends
from memmap_buffer.views.transforms import n_step_return
from memmap_buffer.views.view import Names, View, named

FLAGS = ("done", "terminal")  # usual names of a field that means `terminated`, for the text of an error


@dataclass(frozen=True)
class NStep(View):
    """Transitions over n steps: the fields at t, the rewards until t + k, and the fields at t + k.

    k = min(n, length - t) if the episode has its final observation or terminated, so that its last step and reward are
    reached, else min(n, length - t - 1). A step with k = 0 has no successor and is not served. A successor that does
    not exist is zeros.

    A batch: current fields (B, *field), `next_` (B, *field), `seq_` (B, n, *field) zero from k on, `n_step_lens` (B,)
    int64 k; with `gamma` also `_return`, of the reward's shape, and `_discount`, which broadcasts with it: (B,), or
    (B, 1) for rewards of shape (1,); see `transforms.n_step_return`. A stacked field is (B, S, *field), of timesteps
    t - S + 1 … t, and its `next_` of t + k - S + 1 … t + k.

    Args:
        n: the most steps.
        current_fields: the fields at t; default: all, but a stored field `next_state`, say, gives way to the successor
            of `state`.
        next_fields: the fields at t + k; default all.
        sequence_fields: the fields at t … t + k - 1; default none.
        gamma: γ; None leaves return and discount out.
        discount: with `gamma`, the field of a discount d of every step, as dm_env gives it: R = Σ_{i<k} γ^i (Π_{j<i}
            d_{t+j}) r_{t+i}, and `_discount` = γ^k Π_{j<k} d_{t+j}. One number, or of the reward's shape. Then
            `terminated` is not needed, as d = 0 says the same; the last step is served if its final observation is
            stored.
        reward: the field of the rewards.
        terminated: the field that is true where nothing follows; default: the one that the buffer declared. None:
            nothing terminates, so every discount is γ^k.
        stack: field -> S: the last S timesteps stand for one, the latest last.
        padding: the values of stacked timesteps before the episode: "zero", "edge" (the first step) or "default".
        timeline: `next_` has every timestep until t + k: (B, n, *field), of t + 1 … t + k, zeros behind.
        boundary: "pad": an item at every step that has a successor; "drop": only where k = n.

    Raises:
        SchemaError: a value that is not allowed.
    """

    n: int
    current_fields: Names = None
    next_fields: Names = None
    sequence_fields: Names = ()
    gamma: float | None = None
    reward: str = "reward"
    terminated: str | None = DECLARED
    stack: Mapping[str, int] | Iterable[tuple[str, int]] = ()
    padding: Padding = "zero"
    timeline: bool = False
    boundary: StepBoundary = "pad"
    discount: str | None = None

    def __post_init__(self) -> None:
        self._keep_names("current_fields", "next_fields", "sequence_fields")
        if not isinstance(self.stack, (Mapping, tuple)):
            raise SchemaError(f"stack: got {self.stack!r}, expected a dict: field -> how many timesteps stand for one")
        object.__setattr__(self, "stack", tuple(dict(self.stack).items()))
        for name, steps in dict(self.stack).items():
            check_count(f"stack of {name!r}", steps)
        check_choice("padding", self.padding, Padding)
        check_choice("boundary", self.boundary, StepBoundary)
        if self.stack and self.timeline:
            raise SchemaError("stack and timeline exclude each other; cut windows by Offsets for both")
        check_count("n_steps", self.n)
        if self.gamma is not None:
            check_number("gamma", self.gamma)
        elif self.discount is not None:
            raise SchemaError("discount goes with gamma; give gamma=1.0 where the stored discounts have it already")

    def ends(self, schema: Schema) -> Ends:
        return Ends.of(schema, self.terminated, before=self.before, after=self.reach)

    def sequences(self, schema: Schema) -> dict[str, str]:
        _, following, sequences = self.plan(schema)
        keys = [f"next_{name}" for name in following if self.timeline]
        return dict.fromkeys([*keys, *(f"seq_{name}" for name in sequences)], "n_step_lens")

    @property
    def one_per_step(self) -> bool:
        return self.boundary == "pad"

    @property
    def reach(self) -> int:
        return self.n

    @property
    def before(self) -> int:
        return max([0, *(steps - 1 for steps in dict(self.stack).values())])

    def keys(self, schema: Schema) -> list[str]:
        if self.gamma is not None:
            require_returns(schema, self.reward, self.terminated, self.discount)
        if self.terminated:
            schema.require([self.terminated], "terminated", schema.fields)
        schema.require(dict(self.stack), "stack", schema.fields)
        current, following, sequences = self.plan(schema)
        return [
            *current,
            *[f"next_{name}" for name in following],
            *[f"seq_{name}" for name in sequences],
            "n_step_lens",
            *["_return", "_discount"] * (self.gamma is not None),
        ]

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        count = episodes.count - ~(has_final | terminated)
        return episodes.replaced(count=count if self.boundary == "pad" else np.maximum(count - (self.n - 1), 0))

    def plan(self, schema: Schema) -> tuple[tuple[str, ...], ...]:
        """(the fields at t, the fields at t + k, the fields at t … t + k - 1)."""
        current = named(schema, self.current_fields, "current_fields")
        following = named(schema, self.next_fields, "next_fields")
        if self.current_fields is None:
            taken = {f"next_{name}" for name in following}
            current = tuple(name for name in current if name not in taken)
        return current, following, named(schema, self.sequence_fields, "sequence_fields")

    def cut(self, builder: BatchBuilder) -> None:
        t, length, (current, following, sequences) = builder.t, builder.length, builder.plan
        k = np.empty(len(t), np.int64)
        k.fill(self.n)
        if self.n > 1 and FALSE in (t + k < length).tobytes():  # every step that is served has a successor
            np.clip(length - t - ~builder.goes_on, 1, self.n, out=k)
        successor = t + k
        put_at = partial(self._put_stacked, builder) if self.stack else builder.put_at
        put_at(current, t)
        if self.timeline:
            builder.put(following, range(1, self.n + 1), prefix="next_")
        else:
            put_at(following, successor, prefix="next_")
        if sequences:
            builder.put(sequences, range(self.n), prefix="seq_", limit=successor)
        builder.batch["n_step_lens"] = k
        if self.gamma is not None:
            self._put_return(builder, k, successor)

    def _put_return(self, builder: BatchBuilder, k: IntArray, successor: IntArray) -> None:
        """Put `_return` and `_discount`. Args: k, successor: (B,) the number of rewards, and t + k."""
        ended = successor == builder.length
        if self.n == 1:
            rewards = builder.look_at(self.reward, builder.t)[:, None]
        else:
            rewards = builder.look(self.reward, range(self.n), limit=successor)
        discounts = None
        if self.discount is not None:
            discounts = look_discounts(builder, self.discount, range(self.n), successor, rewards)
        if TRUE in ended.tobytes():
            last = ended.nonzero()[0]
            ended[last] = builder.terminated.take(last) | ~builder.has_final.take(last)
        returns = n_step_return(rewards, k, ended, self.gamma or 0.0, discounts)
        builder.batch["_return"], builder.batch["_discount"] = returns

    def _put_stacked(self, builder: BatchBuilder, names: tuple[str, ...], t: IntArray, prefix: str = "") -> None:
        """Put fields at t (B,), stacked fields with the timesteps before t."""
        require = builder.schema.require
        stacks = {name: size for group, size in dict(self.stack).items() for name in require([group], "stack")}
        builder.put_at([name for name in names if name not in stacks], t, prefix=prefix)
        for name in (name for name in names if name in stacks):
            before = range(1 - stacks[name], 1)
            offsets = before if t is builder.t else (t - builder.t)[:, None] + np.array(before)
            builder.put([name], offsets, prefix=prefix, padding=self.padding)


def require_returns(schema: Schema, reward: str, terminated: str | None, discount: str | None) -> None:
    """Raise SchemaError: a field that returns need is not declared, or the discount has a wrong shape or dtype."""
    schema.require([reward], "reward", schema.fields)
    if discount is None:
        require_terminated(schema, terminated)
    elif discount not in schema.fields:
        raise schema.unknown(discount, "discount", schema.fields)
    else:
        field, shape = schema.fields[discount], schema.fields[reward].shape
        if field.storage.kind not in "biuf" or field.shape not in ((), (1,), shape):
            raise SchemaError(
                f"discount: field {discount!r} is {field.dtype} of shape {field.shape}, expected one number, or those "
                f"of {reward!r}, {shape}"
            )


def look_discounts(builder: BatchBuilder, name: str, offsets: range, limit: IntArray, rewards: Array) -> Array:
    """The discounts at `t + offsets`, (B, K, …), with as many axes as `rewards` (B, K, …)."""
    values = builder.look(name, offsets, limit=limit)
    return values if values.shape == rewards.shape else values.reshape(*values.shape[:2], *[1] * (rewards.ndim - 2))


def require_terminated(schema: Schema, terminated: str | None) -> None:
    """Raise SchemaError: no field tells how episodes terminate, so their last rewards would be lost in silence."""
    if terminated == DECLARED and schema.terminated is None and schema.declared_ends["terminated"] is not None:
        of_agents = [name for name in schema.fields if name.split(".")[0] == "terminated"]
        if of_agents:
            raise SchemaError(
                "gamma: the discount is 0 where an episode terminated, which one number or bool tells, and there is "
                f"{', '.join(of_agents)} of shape {schema.fields[of_agents[0]].shape}; store a field of one bool, such "
                "as all(terminated), and name it, terminated='…', or give terminated=None if nothing ever terminates; "
                "here, or to ReplayBuffer, which keeps it"
            )
        flags = [name for name, field in schema.fields.items() if field.dtype == "bool" and field.shape in ((), (1,))]
        raise SchemaError(
            "gamma: the discount is 0 where an episode terminated, and there is no field `terminated`; name yours, "
            f"terminated={next((name for name in FLAGS if name in schema.fields), (flags or FLAGS)[0])!r}, or give "
            "terminated=None if nothing ever terminates; here, or to ReplayBuffer, which keeps it"
        )


def step_returns(
    builder: BatchBuilder, steps: range, n: int, gamma: float, reward: str, discount: str | None
) -> dict[str, Array]:
    """The returns of n steps from each of the K timesteps `t + steps` on, with the values that `NStep` gives there.

    Returns: `n_step_lens` (B, K), `_return` and `_discount` (B, K, …); 0 where a step has no successor, or does not
        exist.
    """
    t = builder.t[:, None] + np.arange(steps.start, steps.stop)
    rest = builder.length[:, None] - t - ~builder.goes_on[:, None]
    k = np.where(t < 0, 0, np.clip(rest, 0, n))
    reached = range(steps.start, steps.stop + n - 1)
    rewards = builder.look(reward, reached, limit=builder.length)
    discounts = None
    if discount is not None:
        discounts = _each_n(look_discounts(builder, discount, reached, builder.length, rewards), n)
    last = t + k == builder.length[:, None]
    ended = (builder.terminated | ~builder.has_final)[:, None] & last | (k == 0)
    returns, discount_of_returns = n_step_return(_each_n(rewards, n), k.ravel(), ended.ravel(), gamma, discounts)
    returns[k.ravel() == 0] = 0
    return {
        "n_step_lens": k,
        "_return": returns.reshape(*k.shape, *returns.shape[1:]),
        "_discount": discount_of_returns.reshape(*k.shape, *discount_of_returns.shape[1:]),
    }


def _each_n(values: Array, n: int) -> Array:
    """The n values from each of K steps on, (B * K, n, …), of `values` (B, K + n - 1, …)."""
    windows = np.moveaxis(np.lib.stride_tricks.sliding_window_view(values, n, axis=1), -1, 2)
    return windows.reshape(-1, *windows.shape[2:])
