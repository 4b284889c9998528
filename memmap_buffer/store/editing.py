"""What changes published episodes. `ReplayBuffer`'s words for `edits` and the writer; no logic of its own."""

from __future__ import annotations

from typing import Any

from memmap_buffer.errors import SchemaError
from memmap_buffer.store import edits
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.writer import Writer


class Editing:
    """The half of `ReplayBuffer` that changes what is published."""

    _storage: Storage
    _writer: Writer

    def update(self, indices: Any = None, **data: Any) -> None:
        """Overwrite data of published episodes in place; each episode changes at once or not at all.

        Args:
            indices: positions: an int, list, array, slice, or None for all.
            data: field -> (E, t, *field), the first t timesteps; meta field -> (E, *field); without the first axis
                for a single int; values broadcast.

        Raises: SchemaError, IndexError, EpisodeStateError.
        """
        if not data:
            raise SchemaError("update: no data was given; pass field=values")
        self._writer.begin()
        table = self._storage.refresh()
        positions, single = edits.positions_of(indices, len(table))
        slots = table.visible[positions]
        rows, meta = edits.changes(self._storage, slots, single, data)
        self._writer.update(slots, rows, meta)

    def store_datapoint(self, episode_index: int, timestep_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one timestep of one field of a published episode."""
        self._writer.begin()
        rows = edits.one_step(self._storage, episode_index, timestep_index, name, datapoint)
        self._writer.update(*rows, {})

    def store_meta_datapoint(self, episode_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one meta field of a published episode."""
        self._storage.layout.schema.require([name], "store_meta_datapoint", self._storage.layout.schema.meta_fields)
        self.update(int(episode_index), **{name: datapoint})

    def clear(self) -> None:
        """Remove every episode; the files keep their size."""
        self._writer.clear()

    reset_ = clear

    def delete(self, indices: Any) -> None:
        """Remove episodes: positions: an int, list, array or slice. Their serials are never used again."""
        self._writer.begin()
        table = self._storage.refresh()
        positions, _ = edits.positions_of(indices, len(table))
        self._writer.delete(table.visible[positions].tolist())
