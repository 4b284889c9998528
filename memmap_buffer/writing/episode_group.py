"""Episodes of several synchronised environments, stored side by side, one row of each batch an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Field, Schema
from memmap_buffer.writing.block import Block, Held
from memmap_buffer.writing.episode import Episode, require_default


class EpisodeGroup(Block):
    """B open episodes that step together; `episodes` are its members, in the order of the batch axis.

    As a context manager it publishes all of them at the end of the block, and aborts all on any exception.

    Args: schema: the fields. episodes: the members. held: of the block that they were opened for, see `Block`.
    """

    def __init__(self, schema: Schema, episodes: Sequence[Episode], held: Held | None = None) -> None:
        self.schema = schema
        self.episodes = list(episodes)
        self.held, self.thread = held, get_ident()

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def state(self) -> str:
        """ "open" as long as one of them is, then "ended"."""
        return "open" if any(episode.state == "open" for episode in self.episodes) else "ended"

    def store(self, **batch: Any) -> None:
        """Append one timestep to every episode.

        Args: batch: field -> (B, *field).
        Raises: SchemaError, EpisodeStateError: as `Episode.store`; then no episode got the step.
        """
        where = f"timestep {self.episodes[0].length}"
        columns = self._encode(self.schema.flatten(batch), self.schema.fields, where)
        for name, field in self.schema.fields.items():
            if name not in columns:
                columns[name] = np.broadcast_to(require_default(field, name, where), (len(self), *field.shape))
        for episode in self.episodes:
            episode.require_room()
        for i, episode in enumerate(self.episodes):
            episode.store_rows({name: rows[i : i + 1] for name, rows in columns.items()})

    def final(self, **batch: Any) -> None:
        """Store every episode's observation after the last action: field -> (B, *field)."""
        columns = self._encode(self.schema.flatten(batch), self.schema.fields, "final")
        for i, episode in enumerate(self.episodes):
            episode.final(**{name: rows[i] for name, rows in columns.items()})

    def update(self, meta: Mapping[str, Any]) -> None:
        """Set meta fields: name -> (B, *field)."""
        columns = self._encode(self.schema.flatten(meta), self.schema.meta_fields, "meta")
        for i, episode in enumerate(self.episodes):
            episode.update({name: rows[i] for name, rows in columns.items()})

    def __setitem__(self, name: str, values: Any) -> None:
        self.update({name: values})

    def publish(self) -> None:
        """Publish the episodes, in the order of the batch axis."""
        for episode in self.episodes:
            if episode.state == "open":
                episode.publish()

    def abort(self) -> None:
        """Drop all that are open."""
        for episode in self.episodes:
            episode.abort()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The end of its block, as for each of its episodes."""
        try:
            for episode in self.episodes:
                episode.held = None  # none of them is over as long as this runs
            for episode in self.episodes:
                episode.leave(kind, error, trace)
        except Exception:
            raise
        except BaseException:
            for episode in self.episodes:
                episode.settle()
            raise

    def _encode(self, batch: Mapping[str, Any], known: Mapping[str, Field], where: str) -> dict[str, Array]:
        out: dict[str, Array] = {}
        for name, values in batch.items():
            if name not in known:
                raise self.schema.unknown(name, where, known)
            try:
                rows = known[name].encode(values, lead=1)
            except SchemaError as error:
                raise SchemaError(f"field {name!r}, {where}: {error}", field=name) from None
            if len(rows) != len(self):
                raise SchemaError(
                    f"field {name!r}, {where}: got a batch of {len(rows)}, expected {len(self)}", field=name
                )
            out[name] = rows
        return out
