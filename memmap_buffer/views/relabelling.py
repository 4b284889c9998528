"""A `BatchBuilder` whose items have another goal than was stored, and the rewards that follow from it.

The goals are rows of other timesteps of the same episodes, read in the same gather: so the look at the generations
after it covers them too. With the strategy "random" they are of other items of the same batch, which is read again as
a whole where one of them is gone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memmap_buffer.dtypes import Array, decode
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.views.batch_builder import BatchBuilder
from memmap_buffer.views.ends import Ends
from memmap_buffer.views.folders import Anchors, BoolArray, Folders
from memmap_buffer.views.hindsight import Hindsight


class Relabelling(BatchBuilder):
    """Items being cut, with goals that were achieved.

    Args:
        sources, ends, size: see `BatchBuilder`. anchors: (B,) where to cut, each with its chance. how: which goals.
        reach: how many timesteps from its anchor on an item may have rewards of.
    """

    def __init__(
        self, sources: Folders, anchors: Anchors, ends: Ends, size: int | None, how: Hindsight, reach: int
    ) -> None:
        super().__init__(sources, anchors, ends, size)
        self._how = how
        self._entries = self.limit(self.schema.fields[how.achieved].final)
        whole = (self._entries > self.length) | (self.t + reach < self.length)
        item, t, there = self._drawn()
        self._chosen = (self.anchors.uniform(1) < how.prob) & whole & there
        self._goal = self._rows_of(how.achieved, item, t)
        columns = [self.anchors.serial[item], t + np.broadcast_to(self.begin, t.shape)[item]]
        columns = columns if self.anchors.source is None else [self.anchors.source[item], *columns]
        self.batch["_goal"] = np.where(self._chosen[:, None], np.stack(columns, axis=1), -1)

    def _drawn(self) -> tuple[IntArray, IntArray, BoolArray]:
        """(of which item's episode, at which timestep, whether there is one) the goal of each item was achieved."""
        how, u, now, last = self._how, self.anchors.uniform(2), np.maximum(self.t, 0), self._entries - 1
        item, rest = np.arange(len(u)), np.maximum(last - now, 1)
        if how.strategy == "random":
            item = np.minimum((u * len(u)).astype(np.int64), len(u) - 1)
            return item, np.minimum(now + 1, last)[item], np.ones(len(u), np.bool_)
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
        names = tuple(names)
        super().put_at(names, t, prefix=prefix)
        for name in self._changing(names):
            limit = self.limit(self.schema.fields[name].final)
            # A new goal is that of what follows too, whether or not an observation was stored there.
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
        needed: IntArray | None = None,
    ) -> None:
        names = tuple(names)
        super().put(names, offsets, prefix=prefix, limit=limit, padding=padding, needed=needed)
        for name in self._changing(names):
            self.batch[prefix + name] = self._around(name, offsets, limit, padding)

    def look(self, name: str, offsets: range, limit: IntArray | None = None) -> Array:
        if not self._changing([name]):
            return super().look(name, offsets, limit)
        self._require_size(name, len(offsets))
        return decode(self._around(name, offsets, limit, "zero"), self.schema.fields[name].dtype)

    def put_meta(self, names: Iterable[str]) -> None:
        super().put_meta(names)
        name = self._how.goal
        if name in self.schema.meta_fields and name in self.batch:
            values = self.sources.take_meta(name, self.anchors)
            values[self._chosen] = self._goal[self._chosen]
            self.batch[name] = self._marked(name, values)

    def _changing(self, names: Iterable[str]) -> list[str]:
        """Those of the fields that a new goal changes, if any item has one."""
        return [name for name in names if name in (self._how.goal, self._how.reward)] if self._chosen.any() else []

    def _around(self, name: str, offsets: IntArray | range, limit: IntArray | None, padding: str) -> Array:
        """A field at `t + offsets`: (B, K, *field)."""
        steps = self.t[:, None] + (np.arange(offsets.start, offsets.stop) if isinstance(offsets, range) else offsets)
        below = (self.limit(self.schema.fields[name].final) if limit is None else limit)[:, None]
        nearest = np.clip(steps, 0, below - 1)
        return self._relabelled(name, nearest, (nearest == steps) | (padding == "edge"), padding)

    def _relabelled(self, name: str, t: IntArray, exists: BoolArray, padding: str = "zero") -> Array:
        """A field at timesteps t, (B,) or (B, K), with its items' goals or the rewards for them."""
        item = np.broadcast_to(np.arange(len(t)).reshape(-1, *[1] * (t.ndim - 1)), t.shape)
        values = self._rows_of(name, item.ravel(), t.ravel())
        new = np.flatnonzero((exists & self._chosen[item]).ravel())
        if name == self._how.goal:
            values[new] = self._goal[item.ravel()[new]]
        else:
            new = new[t.ravel()[new] + 1 < self._entries[item.ravel()[new]]]
            values[new] = self._rewards(item.ravel()[new], t.ravel()[new])
        values[~exists.ravel()] = values.dtype.type() if padding == "zero" else self.schema.fields[name].fill
        return self._marked(name, values.reshape(*t.shape, *values.shape[1:]))

    def _rewards(self, item: IntArray, t: IntArray) -> Array:
        """What steps (N,) of items bring for the goals of their items, as stored."""
        how, fields = self._how, self.schema.fields
        dtype, field = fields[how.achieved].dtype, fields[how.reward]
        if not len(item):
            return np.empty((0, *field.shape), field.storage)
        info = {name: decode(self._rows_of(name, item, t), fields[name].dtype) for name in how.info}
        achieved = decode(self._rows_of(how.achieved, item, t + 1), dtype)
        rewards = how.reward_fn(achieved, decode(self._goal[item], dtype), info)
        shape = np.shape(rewards)
        if shape != (len(item), *field.shape):
            raise SchemaError(
                f"hindsight: reward_fn gave shape {shape} for {len(item)} goals of shape {fields[how.achieved].shape}, "
                f"expected {(len(item), *field.shape)}; let it compute all rows at once"
            )
        return field.encode(rewards, lead=1)

    def _rows_of(self, name: str, item: IntArray, t: IntArray) -> Array:
        """Rows of a field as stored, (N, *field): timestep t of the episodes of some items."""
        source, first = self.anchors.source, self.first(self.schema.fields[name].final)
        return self.sources.take(name, None if source is None else source[item], first[item] + t)
