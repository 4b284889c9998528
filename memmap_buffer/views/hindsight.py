"""`Hindsight`, the option that gives items other goals, and `HindsightBuilder`, the `BatchBuilder` that carries it out.

Read `HindsightBuilder.__init__` first: it chooses the goals; the `put` and `look` methods then replace the goal and the
reward wherever a view asks for them. The goals are rows of the same episodes, read in the same batch, so
`BatchBuilder.fresh` covers them. With the strategy "random" they are of other items: if the episode of one item is
gone, the whole batch is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memmap_buffer.choices import Strategy, check_choice
from memmap_buffer.dtypes import Array, check_number, decode
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Schema
from memmap_buffer.views.anchors import BoolArray
from memmap_buffer.views.batch_builder import BatchBuilder, Ends, array_of
from memmap_buffer.views.folders import Folders, Found
from memmap_buffer.views.gather import marked


@dataclass(frozen=True)
class Hindsight:
    """Give items a goal that was achieved later, and the rewards that they would have had for it.

    Step t of an episode leads to the achieved goal at t + 1. So new goals are taken from timesteps after a step, and
    the reward of step t is computed from the achieved goal at t + 1; the final observation counts, if it was stored
    (`final`). An item has one new goal: it replaces the field `goal` wherever the item has it, in `next_` and `seq_`,
    too; the rewards for it replace the field `reward`, and returns are made of these. All other fields stay, also those
    that tell how an episode ended. An item that reaches the last step of an episode without a final achieved goal is
    left as it is.

    A batch gains `_goal` (B, 2) int64: (serial, t) at which the new goal was achieved, -1 for items that kept their
    own; with a ConcatBuffer (B, 3), the number of the folder first. To read the other fields of that moment, take
    `next_` of (serial, t - 1) by `batch` with n_steps=1. The same seed chooses the same goals.

    Args:
        reward_fn: called with arrays: achieved goals (N, *goal), goals (N, *goal) and a dict of the fields `info`,
            name -> (N, *field), of the steps; returns the rewards (N, *reward). `env.unwrapped.compute_reward` of a
            goal environment is such a function. It must pickle, if workers are spawned.
        goal: the field, or meta field, that holds the goal.
        achieved: the field of the achieved goal, of the same shape and dtype.
        reward: the field of the reward.
        strategy: the timestep at which the goal of an item with anchor t was achieved, in an episode whose last entry
            is T: "future": t + 1 … T, with equal probability; "geometric": t + d with P ∝ gamma^d; "final": T;
            "episode": 1 … T, with equal probability; "random": the timestep after the anchor of another item of the
            batch, which must have at least two.
        prob: the probability that an item gets a new goal.
        gamma: γ of "geometric", 0 < γ < 1.
        info: fields for `reward_fn`.

    Raises:
        SchemaError: a value that is not allowed.

    Source: Andrychowicz et al. 2017, "Hindsight Experience Replay", sections 3 and 4.5; "geometric": Eysenbach et al.
        2022, "Contrastive Learning as Goal-Conditioned Reinforcement Learning".
    """

    reward_fn: Callable[[Any, Any, Any], Any]
    goal: str = "observation.desired_goal"
    achieved: str = "observation.achieved_goal"
    reward: str = "reward"
    strategy: Strategy = "future"
    prob: float = 0.8
    gamma: float = 0.99
    info: Iterable[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "info", (self.info,) if isinstance(self.info, str) else tuple(self.info))
        if not callable(self.reward_fn):
            raise SchemaError(
                f"reward_fn: got {self.reward_fn!r}, expected a function (achieved, goal, info) -> rewards"
            )
        check_choice("strategy", self.strategy, Strategy)
        check_number("prob", self.prob)
        check_number("gamma", self.gamma)
        if self.gamma in (0, 1):
            raise SchemaError(f"gamma: got {self.gamma!r}, expected a number between 0 and 1, and neither of them")

    def check(self, schema: Schema) -> None:
        """Raise SchemaError: a field is not declared, or an achieved goal has not the shape and dtype of a goal."""
        of_steps = {"achieved": [self.achieved], "reward": [self.reward], "info": self.info}
        for where, names in {"goal": [self.goal], **of_steps}.items():
            fields = schema.all if where == "goal" else schema.fields
            for name in names:
                if name not in fields:
                    raise schema.unknown(name, f"hindsight, {where}", fields)
        goal, achieved = schema.all[self.goal], schema.fields[self.achieved]
        if (goal.shape, goal.dtype) != (achieved.shape, achieved.dtype):
            raise SchemaError(
                f"hindsight: {self.goal!r} is {goal.dtype} {goal.shape}, {self.achieved!r} is {achieved.dtype} "
                f"{achieved.shape}; what was achieved can be a goal only where both are alike"
            )


class HindsightBuilder(BatchBuilder):
    """The builder of a batch whose items get achieved goals.

    Args:
        folders: the folders that are read.
        records: the anchors (B,) of the items, with `chance`, and the records of their episodes.
        ends: how episodes end for the view.
        how: the option: how goals are chosen.
        reach: the most timesteps from its anchor on of which an item has rewards.
        plan: the result of `View.plan`.
    """

    def __init__(
        self, folders: Folders, records: Found, ends: Ends, how: Hindsight, reach: int, plan: Any = None
    ) -> None:
        super().__init__(folders, records, ends, plan)
        self._how = how
        can_change = (self._entries > self.length) | (self.t + reach < self.length)
        item, t, has_goal = self._drawn()
        self._chosen = (self.anchors.uniform(1) < how.prob) & can_change & has_goal
        self._goal = self._stored_at(how.achieved, t)[item]
        columns = [self.anchors.serial, t + self.begin]
        columns = columns if self.anchors.folder is None else [self.anchors.folder, *columns]
        self.batch["_goal"] = np.where(self._chosen[:, None], np.stack(columns, axis=1)[item], -1)

    @property
    def _entries(self) -> IntArray:
        """(B,) the number of achieved goals in the episode of each item."""
        return self.limit(self.schema.fields[self._how.achieved].final)

    def _drawn(self) -> tuple[IntArray, IntArray, BoolArray]:
        """(the item whose episode gives the goal, the timestep in each item's own one, whether it has a goal): (B,)."""
        how, u, now, last = self._how, self.anchors.uniform(2), np.maximum(self.t, 0), self._entries - 1
        item, rest = np.arange(len(u)), np.maximum(last - now, 1)
        if how.strategy == "random":
            item = (item + 1 + (u * (len(u) - 1)).astype(np.int64)) % len(u)
            return item, np.minimum(now + 1, last), np.full(len(u), len(u) > 1)
        if how.strategy == "final":
            t = last
        elif how.strategy == "episode":
            t = 1 + (u * np.maximum(last, 1)).astype(np.int64)
        elif how.strategy == "future":
            t = now + 1 + (u * rest).astype(np.int64)
        else:  # the inverse of P(steps ≤ d) = (1 - γ^d) / (1 - γ^rest)
            steps = np.log1p(-u * -np.expm1(rest * np.log(how.gamma))) / np.log(how.gamma)
            t = now + 1 + np.minimum(steps.astype(np.int64), rest - 1)
        return item, np.clip(t, 0, last), last > now

    def put_at(self, names: Iterable[str], t: IntArray, *, prefix: str = "") -> None:
        for name in names:
            if not self._changes(name):
                super().put_at([name], t, prefix=prefix)
                continue
            limit = self.limit(self.schema.fields[name].final)
            # A new goal holds for the successor, too, whether or not an observation was stored there.
            exists = (t >= 0) & ((t < limit) | (self._chosen & (name == self._how.goal)))
            self.batch[prefix + name] = self._relabelled(name, np.clip(t, 0, limit - 1), exists)

    def put(
        self,
        names: Iterable[str],
        offsets: IntArray | range,
        *,
        prefix: str = "",
        limit: IntArray | None = None,
        padding: str = "zero",
    ) -> None:
        for name in names:
            if self._changes(name):
                self.batch[prefix + name] = self._with_goals_around(name, offsets, limit, padding)
            else:
                super().put([name], offsets, prefix=prefix, limit=limit, padding=padding)

    def look_at(self, name: str, t: IntArray) -> Array:
        field = self.schema.fields[name]
        if not self._changes(name):
            return super().look_at(name, t)
        return decode(self._relabelled(name, t, np.ones(len(t), np.bool_)), field.dtype)

    def look(self, name: str, offsets: range, limit: IntArray | None = None) -> Array:
        if not self._changes(name):
            return super().look(name, offsets, limit)
        self.require_size(name, len(offsets))
        return decode(self._with_goals_around(name, offsets, limit, "zero"), self.schema.fields[name].dtype)

    def put_meta(self, names: Iterable[str]) -> None:
        super().put_meta(names)
        name = self._how.goal
        if name in self.schema.meta_fields and name in self.batch:
            values = self.gather.meta(name)
            values[self._chosen] = self._goal[self._chosen]
            self.batch[name] = values

    def _changes(self, name: str) -> bool:
        """Whether the field is changed by new goals, and an item has one."""
        return name in (self._how.goal, self._how.reward) and bool(self._chosen.any())

    def _with_goals_around(self, name: str, offsets: IntArray | range, limit: IntArray | None, padding: str) -> Array:
        """A changed field at `t + offsets`, as stored, padded: (B, K, *field)."""
        steps = self.t[:, None] + array_of(offsets)
        limits = (self.limit(self.schema.fields[name].final) if limit is None else limit)[:, None]
        nearest = np.clip(steps, 0, limits - 1)
        return self._relabelled(name, nearest, (nearest == steps) | (padding == "edge"), padding)

    def _relabelled(self, name: str, t: IntArray, exists: BoolArray, padding: str = "zero") -> Array:
        """A changed field at timesteps t, (B,) or (B, K): the new goals, or the rewards for them.

        Args: exists: which of `t` exist, of the same shape; the others get the padding.
        """
        values, per_item = self._stored_at(name, t), (-1, *[1] * (t.ndim - 1))
        new = exists & self._chosen.reshape(per_item)
        if name == self._how.goal:
            values[new] = self._goal[new.nonzero()[0]]
        else:
            new &= t + 1 < self._entries.reshape(per_item)
            values[new] = self._rewards(t, new)
        values[~exists] = values.dtype.type() if padding == "zero" else self.schema.fields[name].fill
        return marked(self.schema.fields[name], values)

    def _rewards(self, t: IntArray, new: BoolArray) -> Array:
        """The rewards of the steps `t[new]` for the new goals of their items, as stored: (N, *reward)."""
        how, fields, item = self._how, self.schema.fields, new.nonzero()[0]
        dtype, field = fields[how.achieved].dtype, fields[how.reward]
        if not len(item):
            return np.empty((0, *field.shape), field.storage)
        t = np.where(new, t, 0)  # a step that every episode has
        info = {name: decode(self._stored_at(name, t)[new], fields[name].dtype) for name in how.info}
        achieved = decode(self._stored_at(how.achieved, t + new)[new], dtype)
        rewards = how.reward_fn(achieved, decode(self._goal[item], dtype), info)
        shape = np.shape(rewards)
        if shape != (len(item), *field.shape):
            raise SchemaError(
                f"hindsight: reward_fn gave shape {shape} for {len(item)} goals of shape {fields[how.achieved].shape}, "
                f"expected {(len(item), *field.shape)}; let it compute all rows at once"
            )
        return field.encode(rewards, lead=1)

    def _stored_at(self, name: str, t: IntArray) -> Array:
        """A field at timesteps t that exist, (B,) or (B, K), as stored."""
        first = self.first(self.schema.fields[name].final)
        return self.gather.copied(name, first.reshape(-1, *[1] * (t.ndim - 1)) + t)
