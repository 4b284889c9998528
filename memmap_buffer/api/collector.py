"""`Collector`: rollouts in memory, for methods that learn from each of them once, such as PPO.

`ReplayBuffer.create_collector` makes one. Timesteps are collected, read in several orders as tensors, and then stored
into the buffer by one call, by the same `EpisodeStream` as those of `ReplayBuffer.add`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.dtypes import Array, check_count, decode, to_numpy
from memmap_buffer.errors import EpisodeStateError, NotEnoughDataError, SchemaError
from memmap_buffer.schema import Schema, nest
from memmap_buffer.writing.steps import NEXT, Steps
from memmap_buffer.writing.vector_env import EpisodeStream

if TYPE_CHECKING:
    from memmap_buffer.api.buffer import ReplayBuffer


class Collector:
    """Timesteps of G groups (environments) that run side by side, kept in memory as (T, G, *field).

    Reading gives nested tensors of all columns: fields, `next_<field>` if it was collected, and columns that were
    computed from them (`collector["advantage"] = …`).

    Args:
        replay_buffer: the buffer to which the timesteps are stored.
        num_groups: G.
        fieldnames: the fields that are collected; default: all.
        meta_fieldnames: the meta fields that are collected; default: all.
        strict: True: an unknown name raises. False: it is collected and read like the others, and not stored.
        complete: True: the first timestep must have every field. False: fields that it lacks are not collected, and
            stored as their defaults, or as zeros if they have none.

    Attributes:
        schema: the fields and meta fields that can be collected.
        strict: as given.
        num_groups: G.

    Raises:
        SchemaError: a name is unknown.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        num_groups: int,
        fieldnames: Sequence[str] | None = None,
        meta_fieldnames: Sequence[str] | None = None,
        strict: bool = True,
        *,
        complete: bool = True,
    ) -> None:
        schema = replay_buffer.schema
        fields, meta = schema.fields, schema.meta_fields
        chosen = schema.require(fields if fieldnames is None else fieldnames, "fieldnames", fields)
        meta_chosen = schema.require(meta if meta_fieldnames is None else meta_fieldnames, "meta_fieldnames", meta)
        self._new_stream = replay_buffer._new_stream
        self._collected = self.schema = schema.with_fields(
            {n: fields[n] for n in chosen}, {n: meta[n] for n in meta_chosen}
        )
        self.strict, self._complete = strict, complete
        self.num_groups = num_groups
        self._parts: dict[str, list[Array]] = {}
        self._length = 0
        # (G,) whether the last step of a group ended an episode; the same of the last step before those collected now
        self._over = self._over_before = np.zeros(num_groups, np.bool_)
        self._storing: tuple[EpisodeStream, Steps] | None = None  # a `store` that failed, and is to go on

    def __repr__(self) -> str:
        return f"<Collector of {self.num_groups} groups: {len(self)} steps, fields {', '.join(self._collected.fields)}>"

    def __len__(self) -> int:
        """T, the timesteps of each group."""
        return self._length

    # Collecting

    def append(self, **step: Any) -> None:
        """Append one timestep of every group.

        Args:
            step: field -> (G, *field); see `ReplayBuffer.add`.

        Raises:
            SchemaError: a value does not fit; nothing was appended.
        """
        self._extend(step, time=False)

    def extend(self, **steps: Any) -> None:
        """Append T timesteps of every group.

        Args:
            steps: field -> (T, G, *field).

        Raises:
            SchemaError: a value does not fit; nothing was appended.
        """
        self._extend(steps, time=True)

    def __setitem__(self, name: str, values: Any) -> None:
        """Set a computed column, (T, G, …); a column with the name of a field of the buffer is stored, too."""
        self._require_not_storing()
        array = np.array(to_numpy(values))
        if array.shape[:2] != (len(self), self.num_groups):
            wanted = f"({len(self)}, {self.num_groups}, …)"
            raise SchemaError(
                f"column {name!r}: got shape {array.shape}, expected {wanted}: time, then groups", field=name
            )
        self._parts = {key: parts for key, parts in self._parts.items() if key != name}
        self._parts[name] = [array]

    def clear(self) -> None:
        """Drop all that was collected, and the episodes that `store` could not publish."""
        if self._storing is not None:
            self._storing[0].abort()
        self._parts, self._length, self._storing, self._over_before = {}, 0, None, self._over

    def _require_not_storing(self) -> None:
        """Raise EpisodeStateError: a `store` failed half way."""
        if self._storing is not None:
            raise EpisodeStateError(
                "some of what was collected is not stored yet; call store() again once there is room, or clear()"
            )

    def _extend(self, values: dict[str, Any], *, time: bool) -> None:
        """Append timesteps: (T, G, *field) with `time`, else (G, *field)."""
        self._require_not_storing()
        if not self._complete and not len(self):
            self._collected = self._of_first(values)
        names = {name.split(".")[0] for name in self._collected.all}
        others = {n: v for n, v in values.items() if n.removeprefix(NEXT).split(".")[0] not in names and n not in names}
        field_values = values if self.strict else {name: value for name, value in values.items() if name not in others}
        steps = Steps(self._collected, field_values, time=time)
        if steps.num_envs != self.num_groups:
            raise SchemaError(f"got {steps.num_envs} groups, the collector was made for {self.num_groups}")
        count = len(steps.ends)
        following = {f"{NEXT}{name}": rows for name, rows in steps.following.items()}
        fields = self._collected.all
        columns = {
            name: decode(rows, fields[name if name in fields else name.removeprefix(NEXT)].dtype)
            for name, rows in {**steps.fields, **steps.meta, **following}.items()
        }
        for name, value in {} if self.strict else others.items():
            array = to_numpy(value)
            columns[name] = array if time else array[None]
        self._require_alike(columns, count)
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(np.array(column))
        self._length, self._over = self._length + count, steps.ends[-1]

    def _of_first(self, values: dict[str, Any]) -> Schema:
        """The schema of the fields that the first timestep has."""
        fields, meta = (
            {name: field for name, field in of_all.items() if not {name, name.split(".")[0]}.isdisjoint(values)}
            for of_all in (self.schema.fields, self.schema.meta_fields)
        )
        return self.schema.with_fields(fields, meta) if fields else self.schema

    def _require_alike(self, columns: dict[str, Array], count: int) -> None:
        """Raise SchemaError: the names differ from those collected before, or a column is not (count, G, …)."""
        if self._length and columns.keys() != self._parts.keys():
            differing = ", ".join(sorted(columns.keys() ^ self._parts.keys()))
            raise SchemaError(
                f"{differing}: collected for some timesteps only; give the same names each time, or clear()"
            )
        for name, column in columns.items():
            if column.shape[:2] != (count, self.num_groups):
                raise SchemaError(
                    f"column {name!r}: got shape {column.shape}, expected ({count}, {self.num_groups}, …)", field=name
                )

    # Reading

    @property
    def time_major(self) -> dict[str, Any]:
        """Name -> (T, G, *field)."""
        return self._tensors(self.columns)

    @property
    def env_major(self) -> dict[str, Any]:
        """Name -> (G, T, *field)."""
        return self._tensors({name: column.swapaxes(0, 1) for name, column in self.columns.items()})

    @property
    def groups(self) -> list[dict[str, Any]]:
        """A dict for each group: name -> (T, *field)."""
        columns = self.columns
        return [self._tensors({name: column[:, i] for name, column in columns.items()}) for i in range(self.num_groups)]

    @property
    def all_data(self) -> dict[str, Any]:
        """Name -> (T · G, *field), time before groups."""
        return self._tensors(self._flat())

    def minibatches(
        self,
        batch_size: int,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Batches of the T · G timesteps, each of which comes once in an epoch: name -> (B, *field).

        Args:
            batch_size: the number of timesteps in a batch.
            epochs: how often each timestep comes.
            shuffle: give the timesteps in a random order, another one in each epoch.
            seed: fixes the order.
            drop_last: leave out an incomplete last batch.

        Raises:
            NotEnoughDataError: nothing was collected.
            SchemaError: a batch size below 1, say.
        """
        check_count("batch_size", batch_size)
        check_count("epochs", epochs, 0)
        flat, count = self._flat(), len(self) * self.num_groups
        if not count:
            raise NotEnoughDataError("the collector is empty; append to it first", steps=0)
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(count) if shuffle else np.arange(count)
            for start in range(0, count - (batch_size - 1) * drop_last, batch_size):
                chosen = order[start : start + batch_size]
                yield self._tensors({name: column[chosen] for name, column in flat.items()})

    @property
    def columns(self) -> dict[str, Array]:
        """Dotted name -> (T, G, *field), the collector's own arrays: do not change them."""
        for name, parts in self._parts.items():
            if len(parts) > 1:
                self._parts[name] = [np.concatenate(parts)]
        return {name: parts[0] for name, parts in self._parts.items()}

    def _flat(self) -> dict[str, Array]:
        """Name -> (T * G, *field)."""
        return {name: column.reshape((-1, *column.shape[2:])) for name, column in self.columns.items()}

    def _tensors(self, columns: dict[str, Array]) -> dict[str, Any]:
        """Copies of columns as nested tensors."""
        from memmap_buffer.loading.tensors import to_tensors

        return to_tensors({name: np.array(column) for name, column in columns.items()})

    # Storing

    def store(self, **meta: Any) -> None:
        """Publish the timesteps as episodes, cut at each end in a group, and drop them from the collector.

        Args:
            meta: meta field -> (G, *field), or one value for all.

        Raises:
            NotEnoughDataError: nothing was collected.
            SchemaError: a value does not fit.
            BufferFullError: there is no room; call it again when there is, and it goes on where it stopped.
            OSError: the disk is full, say; call it again, too.
        """
        if self._storing is None:
            if not len(self):
                raise NotEnoughDataError("the collector is empty; append to it first", steps=0)
            stream = self._new_stream(self.num_groups)
            stream.over = self._over_before.copy()
            schema = stream.schema  # as of now: the buffer may have got or lost fields since the collector was made
            values = {**self._stored(schema), **self._meta(schema, meta)}
            self._storing = stream, Steps(schema, nest(values), time=True)
        stream, steps = self._storing
        stream.extend(steps)
        stream.publish(cut=bool(stream.schema.ends))
        self.clear()

    def _stored(self, schema: Schema) -> dict[str, Array]:
        """The columns that are stored, without `complete` also those of fields that were not collected."""
        names = {*schema.all, *(f"{NEXT}{name}" for name in schema.final_names)}
        stored = {name: column for name, column in self.columns.items() if name in names}
        zeros, lead = {} if self._complete else schema.zeros, (len(self), self.num_groups)
        return {**{name: np.broadcast_to(zero, (*lead, *zero.shape)) for name, zero in zeros.items()}, **stored}

    def _meta(self, schema: Schema, meta: dict[str, Any]) -> dict[str, Array]:
        """Meta fields repeated for each timestep: (T, G, *field)."""
        out = {}
        for name, value in schema.flatten(meta).items():
            schema.require([name], "meta", schema.meta_fields)
            array, shape = to_numpy(value), schema.meta_fields[name].shape
            out[name] = np.broadcast_to(array, (len(self), self.num_groups, *shape))
        return out
