"""`Editing`: the part of `ReplayBuffer` that changes published episodes and whole columns.

Methods take the turn and the writer's lock, find slots, and check and encode values (`writing.new_values`). The writer
changes episodes, `maintenance.schema_changes` columns. `ReplayBuffer` inherits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from memmap_buffer.api.recording import Recording
from memmap_buffer.dtypes import Array, decode
from memmap_buffer.errors import SchemaError, StaleEpisodeError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import OPEN
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.filters import VALID
from memmap_buffer.loading.options import selection_of_episodes
from memmap_buffer.maintenance import schema_changes
from memmap_buffer.progress import progress
from memmap_buffer.schema import Field, Schema, nest
from memmap_buffer.views.folders import Folders
from memmap_buffer.writing.commit import WriteHandles
from memmap_buffer.writing.new_values import places_and_values, steps_at, steps_of_episodes, values_of
from memmap_buffer.writing.redo import Steps
from memmap_buffer.writing.validation import positions_of
from memmap_buffer.writing.writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.loading.options import EpisodeOptions

Compute: TypeAlias = Callable[[dict[str, Any]], Any]


class Editing(Recording):
    """The part of `ReplayBuffer` that changes published episodes."""

    def update(self, indices: Any = None, **data: Any) -> None:
        """Overwrite data of published episodes in place; each episode changes at once or not at all.

        Args:
            indices: positions: an int, list, array, slice, or None for all.
            data: field -> (E, t, *field), the first t timesteps; meta field -> (E, *field); without the first axis
                for a single int; values broadcast.

        Raises:
            SchemaError: a name is unknown, or a value does not fit.
            EpisodeIndexError: there is no such episode; an IndexError.
            EpisodeStateError: an episode is shorter than its data; or it is open, and its end will write the field.
            StaleEpisodeError: an episode fails its checksums, or another writer removed it.
        """
        if not data:
            raise SchemaError("update: no data was given; pass field=values")
        with self.turn:
            slots, single = self._slots_of(indices)
            self._writer.update(slots, *values_of(self._storage, slots, single, data))

    def write(self, indices: Any, **data: Any) -> int:
        """Overwrite single timesteps of fields, such as latents that were computed anew for a batch.

        Episodes may be open meanwhile; steps of an open episode can be overwritten as soon as they are published. Each
        episode changes at once or not at all: a reader gets all its steps as before, or all as after. A call takes a
        pass over each changed field of each changed episode, for its checksum; for a compressed field over its blobs.

        Args:
            indices: (B, 2) of (serial, timestep), `_indices` of a batch; or (B, L, 2), `_steps` of windows with
                `return_steps=True`, where -1 stands for no step.
            data: field -> (B, *field), or (B, L, *field). If a timestep comes twice, the last value counts. A single
                number stands for all.

        Returns:
            The number of timesteps that were not written, as they were overwritten, deleted or dropped meanwhile.

        Raises:
            SchemaError: there is no such field or timestep, or a value does not fit; nothing was written.
            EpisodeStateError: one of these episodes is open, and the field tells how episodes end.
            ReadOnlyError: the buffer only reads.
            OSError: the disk is full, say; the episodes before that are changed.
        """
        with self.turn:
            self._writer.begin()
            return self._write(indices, data, "write")

    def _write(self, indices: Any, data: dict[str, Any], where: str) -> int:
        """`write`, called `where` in errors, with the lock held."""
        places, values = places_and_values(self._storage, indices, data, where)
        self._writer.update(places.changed, places.steps(values), {})
        return places.num_gone

    def store_datapoint(self, episode_index: int, timestep_index: Any, name: str, datapoint: Any) -> None:
        """Overwrite one timestep of one field of a published episode, or several at once, as `write` does.

        Args:
            episode_index: its position.
            timestep_index: the timestep, or (n,) of them.
            name: the field.
            datapoint: (*field), or (n, *field).

        Raises:
            SchemaError: there is no such field or timestep, or a value does not fit.
            EpisodeIndexError: there is no such episode; an IndexError.
        """
        with self.turn:
            slots, _ = self._slots_of([episode_index])
            steps = steps_at(self._storage, slots[0], timestep_index, name, datapoint)
            self._writer.update(slots, {name: [steps]}, {})

    def store_meta_datapoint(self, episode_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one meta field of a published episode.

        Args:
            episode_index: its position.
            name: the meta field.
            datapoint: (*field).
        """
        self._storage.layout.schema.require([name], "store_meta_datapoint", self._storage.layout.schema.meta_fields)
        self.update(int(episode_index), **{name: datapoint})

    def set_valid(self, indices: Any, flag: Any = False) -> int:
        """Exclude timesteps from being drawn, or include them again, by the field `valid`.

        If the field is missing, it is added, a bool that is True for every timestep; then no episode may be open. Each
        episode changes at once.

        Args:
            indices: (n, 2) of (serial, timestep), as `_indices` of a batch, or (n,) serials, as `_index`.
            flag: a bool, or (n,) of them. If a timestep comes twice, the last flag counts.

        Returns:
            The number of entries of `indices` that had no effect, as the episode was overwritten or cleared meanwhile.

        Raises:
            SchemaError: there is no such timestep, or `valid` is a field of another kind.
            ReadOnlyError: the buffer only reads.
        """
        schema = self._storage.layout.schema
        if VALID not in schema.all:
            self.add_field(VALID, ("bool", (), True))
        elif schema.fields.get(VALID) is None or schema.fields[VALID].dtype != "bool" or schema.fields[VALID].shape:
            raise SchemaError(
                "set_valid: `valid` is no bool field of one value a timestep here; rename it", field=VALID
            )
        with self.turn:
            self._writer.begin()
            pairs, flags, num_gone = steps_of_episodes(self._storage.refresh(), indices, flag)
            return num_gone + self._write(pairs, {VALID: flags}, "set_valid")

    def clear(self) -> None:
        """Remove every episode; the files keep their size."""
        with self.turn:
            self._writer.clear()

    reset_ = clear
    """Another name of `clear`."""

    def delete(self, indices: Any = None, **options: Unpack[EpisodeOptions]) -> None:
        """Remove episodes; their serials are never used again.

        Args:
            indices: positions: an int, list, array or slice.
            options: those of `EpisodeOptions`, instead of positions: conditions, such as filter_meta={"success":
                False}. They also choose episodes that a `capacity` has trimmed, but no open ones, whose meta fields may
                be set later.

        Raises:
            EpisodeIndexError: there is no such episode; an IndexError.
            EpisodeStateError: an episode is open; `abort` drops it.
            StaleEpisodeError: an episode fails its checksums, or another writer removed it.
            SchemaError: both positions and options were given, or neither, or an option does not choose episodes.
        """
        with self.turn:
            by_position = indices is not None and not options
            self._writer.delete(self._slots_of(indices)[0] if by_position else self._slots_by(indices, options))

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

        After an error or a kill either all episodes have the field or none. Other open objects of the folder can still
        read; to write they must be opened again. Datasets and loaders made before do not have the field.

        Args:
            name: the name, dotted for a field of a group.
            spec: any form in which the constructor takes a field.
            compute: a function from an episode, as `episode` gives it, to (T, *field), or to the value of a meta field.
                With `final`, an episode that has its final observation needs T + 1 entries. None: the default of
                `spec`.
            meta: whether it is a meta field.
            fields: the fields of an episode that `compute` gets; default: all.

        Raises:
            SchemaError: the name is taken, there is no default, or a computed value does not fit.
            EpisodeStateError: an episode is open, or the lists of one have more members than there is room for.
            OSError: the disk is full, say.
        """
        field = next(iter(Schema({name: spec}).fields.values()))
        if compute is None and field.default is None:
            raise SchemaError(
                f"add_field {name!r}: got no default for the episodes that are there; give one, or compute"
            )

        def change(files: WriteHandles) -> None:
            rows_of = None if compute is None else self._computing("add_field", name, field, meta, compute, fields)
            schema_changes.add(files, name, field, meta=meta, rows_of=rows_of)

        self._change_schema("add_field", change)

    def drop_field(self, name: str) -> None:
        """Remove a field or meta field, or a group of them, and its files. Readers of it must be opened again.

        Args:
            name: the name, dotted for a field of a group.

        Raises:
            SchemaError: there is no such field, or it is the last one.
            EpisodeStateError: an episode is open.
        """
        with self.turn:
            names = self._storage.layout.schema.require([name], "drop_field")
            self._change_schema("drop_field", lambda files: schema_changes.drop(files, names))

    def rename_field(self, name: str, new: str) -> None:
        """Give a field or meta field, or a group of them, another name. Readers of it must be opened again.

        Args:
            name: the present name.
            new: the new name.

        Raises:
            SchemaError: there is no such field, or the new name is taken.
            EpisodeStateError: an episode is open.
        """
        with self.turn:
            members = self._storage.layout.schema.require([name], "rename_field")
            names = {old: f"{new}{old.removeprefix(name)}" for old in members}
            self._change_schema("rename_field", lambda files: schema_changes.rename(files, names))

    def recompute(self, name: str, compute: Compute, *, fields: Iterable[str] | None = None) -> None:
        """Compute a field or meta field anew from each episode; each episode changes at once or not at all.

        Args:
            name: the field.
            compute: as for `add_field`.
            fields: as for `add_field`.

        Raises:
            SchemaError: a computed value does not fit; the episodes before it are changed.
            EpisodeStateError: an episode is open.
        """
        with self.turn:
            schema = self._storage.layout.schema
            schema.require([name], "recompute", list(schema.all))
            self._writer.begin()
            rows_of = self._computing("recompute", name, schema.all[name], name in schema.meta_fields, compute, fields)
            for slot in progress(self._storage.refresh().visible.tolist(), f"recompute {name}"):
                values = rows_of(slot)
                if name in schema.meta_fields:
                    self._writer.update(np.array([slot]), {}, {name: [values]})
                else:
                    self._writer.update(np.array([slot]), {name: [Steps.from_first(values)]}, {})

    def _slots_of(self, indices: Any) -> tuple[IntArray, bool]:
        """Take the lock; returns the slots of positions, and whether `indices` is a single position.

        The positions are those before the lock is taken: after a crash of the machine, taking it may find damaged
        episodes, and retired ones are visible again in front. Raises StaleEpisodeError: one of the episodes is damaged
        or gone.
        """
        if self._writer.begun:
            self._writer.begin()  # completes an update of this writer that failed half way and hides its episode
        storage, journal = self._storage, self._storage.journal
        with journal.lock:
            whole = journal.whole(storage)
            positions, single = positions_of(indices, len(whole))
            slots = whole.slots_at(positions)
            serials, mark = whole.serial.take(slots), journal.mark
        self._writer.begin()
        gone = [] if journal.is_current(storage, mark) else serials[~journal.shows(storage, slots, serials)].tolist()
        if gone:
            raise StaleEpisodeError(
                f"{self._storage.path}: episodes {gone[:5]} fail their checksums, or another writer removed them; look "
                "at `serials` again",
                serials=gone,
            )
        return slots, single

    def _slots_by(self, indices: Any, options: EpisodeOptions) -> IntArray:
        """Take the lock; returns the slots of the episodes that the options choose, see `delete`."""
        selection = selection_of_episodes(options, self._storage.layout.schema)
        if indices is not None or (selection.takes_every_episode and selection.top_k is None):
            raise SchemaError(
                f"delete: got {indices!r} and {dict(options)!r}, expected positions, or conditions that not every "
                "episode passes; `clear` removes all"
            )
        self._writer.begin()
        table = self._storage.refresh()
        (slots,) = selection.slots([(0, self._storage, table)])
        return np.asarray(slots[table.flags[slots] & OPEN == 0])

    def _change_schema(self, what: str, change: Callable[[WriteHandles], None]) -> None:
        """Change the schema. After an interruption this object goes on with the schema that is on the disk."""
        with self.turn:
            files = self._writer.begin_alone(what)
            try:
                self._unfinished = self._follow_schema
                change(files)
                self._follow_schema()
            except BaseException:
                self._follow_schema()
                raise
            self._unfinished = None

    def _follow_schema(self) -> None:
        """Open the folder again if the change of its schema is on the disk."""
        if self._storage.schema_replaced:
            before, opened = self._writer, Storage.open(self._storage.folder, verify=self._storage.verify)
            self._read_from(Folders([opened]))
            self._begin(Writer(opened, before.lock, before.how))
            before.detach()
            self._unfinished = None

    def _computing(
        self, what: str, name: str, field: Field, meta: bool, compute: Compute, fields: Iterable[str] | None
    ) -> Callable[[int], Array]:
        """A function from a slot to the entries that `compute` gives for its episode, in the form that is stored."""
        storage, schema, where = self._storage, self._storage.layout.schema, f"{what} {name!r}"
        names = tuple(schema.all) if fields is None else schema.require(fields, where)

        def rows_of(slot: int) -> Array:
            episode = {name: decode(_stored(storage, slot, name), schema.all[name].dtype) for name in names}
            value, serial = compute(nest(episode)), int(storage.table.serial[slot])
            rows = storage.rows_of(slot, field.final)
            try:
                entries = field.encode(value, lead=0 if meta else 1)
            except SchemaError as error:
                raise SchemaError(f"{where}, episode {serial}: {error}", serial=serial) from None
            count = rows.stop - rows.start
            if not meta and len(entries) != count:
                last = "; the last one is of the final observation" if field.final else ""
                raise SchemaError(
                    f"{where}, episode {serial}: got {len(entries)} entries, expected {count}{last}; give one each",
                    serial=serial,
                )
            return np.ascontiguousarray(entries)

        return rows_of


def _stored(storage: Storage, slot: int, name: str) -> Array:
    """A copy of an episode's entries of a field, or of its value of a meta field, as stored.

    Raises: StaleEpisodeError: the episode fails its checksums.
    """
    if not storage.trust(np.array([slot])):
        raise StaleEpisodeError(f"{storage.path}: an episode fails its checksums; see `verify`")
    schema, maps = storage.layout.schema, storage.maps
    if name in schema.meta_fields:
        return np.array(maps.meta[name][slot])
    rows = storage.rows_of(slot, schema.fields[name].final)
    return storage.read_rows(name, rows, slot, storage.table.serial[slot]).copy()
