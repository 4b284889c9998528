"""The changing half of `ReplayBuffer`: published episodes, and whole columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError, StaleEpisodeError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.maintenance import schema_changes
from memmap_buffer.progress import progress
from memmap_buffer.schema import Field, Schema
from memmap_buffer.writing import validation
from memmap_buffer.writing.commit import WriteHandles
from memmap_buffer.writing.writer import Writer

Compute: TypeAlias = Callable[[dict[str, Any]], Any]


class Editing:
    """The half of `ReplayBuffer` that changes published episodes."""

    _storage: Storage
    _writer: Writer
    _schema_changes = False

    @property
    def _turn(self) -> Any:
        """To be held, by `with`, by whatever writes."""
        if self._schema_changes and self._storage.schema_replaced:
            self._follow_schema()  # what was interrupted, even where it was about to
        return self._writer.turn

    def _reopen(self) -> None:
        """Open the folder again, whose schema is another one now."""
        raise NotImplementedError

    def update(self, indices: Any = None, **data: Any) -> None:
        """Overwrite data of published episodes in place; each episode changes at once or not at all.

        Args:
            indices: positions: an int, list, array, slice, or None for all.
            data: field -> (E, t, *field), the first t timesteps; meta field -> (E, *field); without the first axis
                for a single int; values broadcast.

        Raises:
            SchemaError: a name is unknown, or a value does not fit.
            EpisodeIndexError: there is no such episode; an IndexError.
            EpisodeStateError: an episode is shorter than its data.
            StaleEpisodeError: an episode fails its checksums, or another writer removed it.
        """
        if not data:
            raise SchemaError("update: no data was given; pass field=values")
        with self._turn:
            slots, single = self._slots_of(indices)
            rows, meta = validation.changes(self._storage, slots, single, data)
            self._writer.update(slots, rows, meta)

    def store_datapoint(self, episode_index: int, timestep_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one timestep of one field of a published episode.

        Args:
            episode_index: its position.
            timestep_index: the timestep.
            name: the field.
            datapoint: (*field).
        """
        with self._turn:
            slots, _ = self._slots_of([episode_index])
            rows = validation.one_step(self._storage, slots, timestep_index, name, datapoint)
            self._writer.update(slots, rows, {})

    def store_meta_datapoint(self, episode_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one meta field of a published episode.

        Args:
            episode_index: its position.
            name: the meta field.
            datapoint: (*field).
        """
        self._storage.layout.schema.require([name], "store_meta_datapoint", self._storage.layout.schema.meta_fields)
        self.update(int(episode_index), **{name: datapoint})

    def clear(self) -> None:
        """Remove every episode; the files keep their size."""
        with self._turn:
            self._writer.clear()

    reset_ = clear

    def delete(self, indices: Any) -> None:
        """Remove episodes; their serials are never used again.

        Args:
            indices: positions: an int, list, array or slice.

        Raises:
            EpisodeIndexError: there is no such episode; an IndexError.
            StaleEpisodeError: an episode fails its checksums, or another writer removed it.
        """
        with self._turn:
            self._writer.delete(self._slots_of(indices)[0].tolist())

    # Columns

    def add_field(
        self,
        name: str,
        spec: Any,
        compute: Compute | None = None,
        *,
        meta: bool = False,
        fields: Iterable[str] | None = None,
    ) -> None:
        """Add a field to the schema and to every episode: one new file, all others stay as they are.

        After an error or a kill either all episodes have it or none. Other open objects of the folder read on; to write
        they are opened again. Datasets and loaders made before do not give the field.

        Args:
            name: dotted for a field of a group.
            spec: any spelling of a field.
            compute: a function from an episode, as `episode` gives it, to (T, *field), with `final` one entry more
                where the episode has its final observation, or to the value of a meta field. None: the default of
                `spec`.
            meta: whether it is a meta field.
            fields: the fields of an episode that `compute` gets; default: all.

        Raises:
            SchemaError: the name is taken, there is no default, or a computed value does not fit.
            EpisodeStateError: an episode is open.
            OSError: the disk is full, say.
        """
        field = next(iter(Schema({name: spec}).fields.values()))
        if compute is None and field.default is None:
            raise SchemaError(
                f"add_field {name!r}: got no default for the episodes that are there; give one, or compute"
            )

        def change(files: WriteHandles) -> None:
            rows_of = None if compute is None else self._rows_of(f"add_field {name!r}", field, meta, compute, fields)
            schema_changes.add(files, name, field, meta=meta, rows_of=rows_of)

        self._change_schema("add_field", change)

    def drop_field(self, name: str) -> None:
        """Remove a field or meta field, or a group of them, and its files. Readers of it must be opened again.

        Args:
            name: dotted for a field of a group.

        Raises:
            SchemaError: there is no such field, or it is the last one.
            EpisodeStateError: an episode is open.
        """
        with self._turn:
            names = self._storage.layout.schema.require([name], "drop_field")
            self._change_schema("drop_field", lambda files: schema_changes.drop(files, names))

    def rename_field(self, name: str, new: str) -> None:
        """Give a field or meta field, or a group of them, another name. Readers of it must be opened again.

        Args:
            name: the name now.
            new: the name wanted.

        Raises:
            SchemaError: there is no such field, or the new name is taken.
            EpisodeStateError: an episode is open.
        """
        with self._turn:
            members = self._storage.layout.schema.require([name], "rename_field")
            names = {old: f"{new}{old.removeprefix(name)}" for old in members}
            self._change_schema("rename_field", lambda files: schema_changes.rename(files, names))

    def recompute(self, name: str, compute: Compute, *, fields: Iterable[str] | None = None) -> None:
        """Compute a field or meta field anew from each episode; each changes at once or not at all.

        Args:
            name: the field.
            compute: as for `add_field`.
            fields: as for `add_field`.

        Raises:
            SchemaError: a computed value does not fit; the episodes before it are changed.
            EpisodeStateError: an episode is open.
        """
        with self._turn:
            self._recompute(name, compute, fields)

    def _recompute(self, name: str, compute: Compute, fields: Iterable[str] | None) -> None:
        schema = self._storage.layout.schema
        schema.require([name], "recompute", list(schema.all))
        self._writer.begin()
        meta, field = name in schema.meta_fields, schema.all[name]
        rows_of = self._rows_of(f"recompute {name!r}", field, meta, compute, fields)
        for slot in progress(self._storage.refresh().visible.tolist(), f"recompute {name}"):
            value = {name: [rows_of(slot)]}
            self._writer.update(np.array([slot]), {} if meta else value, value if meta else {})

    def _slots_of(self, indices: Any) -> tuple[IntArray, bool]:
        """Take the lock; return the slots of positions, and whether it is a single one.

        Positions count as before the lock is taken: after a crash of the machine that may find damage, and retired
        episodes come back in front. Raises StaleEpisodeError where one of these episodes is damaged or gone.
        """
        if self._writer.begun:
            self._writer.begin()  # finishes an update of ours that failed half way: its episode was not seen meanwhile
        table = self._storage.refresh()
        positions, single = validation.positions_of(indices, len(table))
        slots = table.visible[positions]
        self._writer.begin()
        serials = table.serial[slots]
        gone = serials[~self._storage.refresh().shows(slots, serials)].tolist()
        if gone:
            raise StaleEpisodeError(
                f"{self._storage.path}: episodes {gone[:5]} fail their checksums, or another writer removed them; look "
                "at `serials` again",
                serials=gone,
            )
        return slots, single

    def _change_schema(self, what: str, change: Callable[[WriteHandles], None]) -> None:
        """Change the schema; whatever interrupts it, what goes on is the one that stands."""
        with self._turn:
            files = self._writer.begin_alone(what)
            try:
                self._schema_changes = True
                change(files)
                self._follow_schema()
            except BaseException:
                self._follow_schema()
                raise

    def _follow_schema(self) -> None:
        """Open the folder again where a change of its schema came so far that it stands."""
        with self._writer.turn:
            if self._storage.schema_replaced:
                self._reopen()
            self._schema_changes = False

    def _rows_of(
        self, where: str, field: Field, meta: bool, compute: Compute, fields: Iterable[str] | None
    ) -> Callable[[int], Array]:
        storage = self._storage
        schema = storage.layout.schema
        names = tuple(schema.all) if fields is None else schema.require(fields, where)

        def rows_of(slot: int) -> Array:
            episode = validation.episode_of(storage, slot, names)
            return validation.computed(storage, slot, where, field, meta, compute(episode))

        return rows_of
