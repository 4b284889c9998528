"""The copy of a field's timesteps to another folder: as they are, or compressed by another codec.

Blobs of a field that keeps its codec are copied. Timesteps of a field that gets another codec are decoded and encoded
anew, a few at a time, so that memory does not grow with the field. `pack` makes a `Recoding` (the codecs of the copy),
calls `copy_rows` for each episode and field, and at the end `close_up`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memmap_buffer.codecs import Zstd, parse_codec
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.format import syscalls
from memmap_buffer.format.blobs import Dictionary, contents_of, encode_many, index_of, lengths_of
from memmap_buffer.format.checksums import EMPTY, add_rows, checksum_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.layout import BLOBS, DICTIONARY, Layout
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import read_at, write_all
from memmap_buffer.schema import Field, Schema

CHUNK = 4 << 20  # bytes that are read, summed and written at a time: they stay in the processor's cache
CODED_CHUNK = 16 << 20  # bytes of timesteps that are encoded or decoded at a time, shared by several threads
LEVEL = 12  # the level of "zstd" in a packed folder, written once and read often: decoding takes no longer
MAX_DICTIONARY = 112_640  # the most bytes of a dictionary: Zstandard's own default
SAMPLES_A_BYTE = 100  # bytes of timesteps for each byte of a dictionary to be trained, as Zstandard recommends
TRIED = 256  # timesteps that a dictionary is tested with; it was not trained with them
FEWEST, MAX_SAMPLES = 16, 1 << 16  # the fewest and the most timesteps for the training of a dictionary
MOVED = 1 << 16  # rows of an index that are read at a time


class DamagedError(Exception):
    """A timestep of an episode cannot be read; the text names the field."""


@dataclass(frozen=True)
class Recoding:
    """How the fields of a copy are compressed.

    Args:
        schema: the schema of the copy.
        anew: the fields that are decoded or encoded.
        dictionaries: field -> the dictionary of its blobs in the copy.
    """

    schema: Schema
    anew: frozenset[str]
    dictionaries: Mapping[str, Dictionary]

    @classmethod
    def of(cls, source: Storage, codec: Mapping[str, Any] | None, slots: IntArray, *, dense: bool) -> Recoding:
        """The recoding that was asked for, with a trained dictionary for each field that Zstandard compresses anew.

        Args:
            source: the folder that is copied.
            codec: field -> its codec in the copy; fields that are not named keep theirs.
            slots: (E,) the slots of the episodes that are copied.
            dense: whether the copy is a packed, read-only folder: then "zstd" has a higher level.

        Raises:
            SchemaError: there is no such field or codec, or the codec does not fit the field.
            ImportError: the package of a codec is not installed.
        """
        schema, maps = source.layout.schema, source.maps
        wanted = _wanted(schema, codec or {}, dense)
        fields = {name: _recoded(name, field, wanted) for name, field in schema.fields.items()}
        anew = frozenset(name for name in wanted if not _is_kept(schema.fields[name], fields[name]))
        for name in anew:
            for field in (schema.fields[name], fields[name]):
                if field.codec is not None:
                    field.codec.load()
        kept = {name: coded.dictionary for name, coded in maps.coded.items() if name not in anew}
        trained = {name: _trained(source, name, fields[name], slots) for name in sorted(anew)}
        dictionaries = {name: dictionary for name, dictionary in {**kept, **trained}.items() if dictionary is not None}
        return cls(schema.with_fields(fields, schema.meta_fields), anew, dictionaries)

    def layout(self, max_episodes: int, max_timesteps: int, rows: int | None = None, **options: Any) -> Layout:
        """The layout of the copy. In a packed one, files of blobs have room for timesteps that do not get smaller.

        Args: rows: the number of timesteps of a packed copy; None: a grid. options: of `Layout`.
        """
        slots, fields = max_episodes + options["spare_slots"], self.schema.fields if rows is not None else {}
        return Layout(
            self.schema,
            max_episodes,
            max_timesteps,
            rows=rows,
            blobs={
                name: slots * blob_room(field, max_timesteps)
                if field.is_list
                else (int(rows or 0) + slots * field.final) * field.itemsize
                for name, field in fields.items()
                if field.is_coded
            },
            dictionaries={name: len(dictionary.content) for name, dictionary in self.dictionaries.items()},
            **options,
        )

    def write_dictionaries(self, layout: Layout, there: Mapping[str, int]) -> None:
        """Write the dictionaries to the files of a copy, `there`: key -> file descriptor."""
        for name, dictionary in self.dictionaries.items():
            key = name + DICTIONARY
            write_all(there[key], dictionary.content, layout.arrays[key].offset(0))


def copy_rows(
    source: Storage,
    name: str,
    rows: range,
    recoding: Recoding,
    layout: Layout,
    slot: int,
    row: int,
    there: Mapping[str, int],
) -> tuple[int, int]:
    """Copy an episode's rows of one field.

    Its blobs are written from the offset at which they would begin if no earlier timestep got smaller; for lists, if
    each earlier episode took all of its room.

    Args:
        source: the folder that is copied.
        name: the field.
        rows: the episode's rows in the source.
        recoding: how the copy is compressed.
        layout: the layout of the copy.
        slot: the episode's slot in the copy.
        row: the row of its first timestep in the copy.
        there: key -> file descriptor of the copy's files.

    Returns:
        The checksums of these rows: in the source, and in the copy.

    Raises:
        DamagedError: a timestep cannot be read.
        SchemaError: lists have more members than there is room for.
    """
    field, coded = layout.schema.fields[name], source.maps.coded.get(name)
    before = after = EMPTY
    is_raw, room = not field.is_coded and coded is None, blob_room(field, layout.max_timesteps)
    step = max(1, (CHUNK if is_raw else CODED_CHUNK) // field.itemsize)
    offset = slot * room if field.is_list else row * field.itemsize
    for begin in range(rows.start, rows.stop, step):
        rows_now = source.maps.rows[name][begin : min(begin + step, rows.stop)]
        stored = rows_now if is_raw else rows_now.copy()  # a writer may change the map meanwhile
        values, blobs = stored, list[bytes]()
        if coded is None:
            before = add_rows(before, stored)
        else:
            blobs = [blob for blob in coded.blobs(stored) if blob is not None]
            if len(blobs) < len(stored):
                raise DamagedError(f"has a blob of {name!r} that lies beyond its file")
            before = add_rows(before, contents_of(stored, blobs))
            if name in recoding.anew:
                values = _decoded(source, name, stored)
        if not field.is_coded:
            write_all(there[name], values, layout.row_offset(name, row))
            after = before if is_raw else add_rows(after, values)
        else:
            if name in recoding.anew:
                dictionary = recoding.dictionaries.get(name)
                blobs = encode_many(field, values, dictionary)
                stored = index_of(field, blobs, offset, dictionary)
            else:
                lengths = lengths_of(stored)
                stored[:, 0] = np.uint64(offset) + np.cumsum(lengths) - lengths
            data = b"".join(blobs)
            if field.is_list and offset + len(data) > (slot + 1) * room:
                raise SchemaError(
                    f"field {name!r}: max_timesteps={layout.max_timesteps} leaves too little room for the lists of an "
                    "episode; give more"
                )
            write_all(there[name + BLOBS], data, layout.arrays[name + BLOBS].offset(0) + offset)
            write_all(there[name], stored, layout.row_offset(name, row))
            after, offset = add_rows(after, contents_of(stored, blobs)), offset + len(data)
        row += len(stored)
    return checksum_of(before), checksum_of(after)


def blob_room(field: Field, max_timesteps: int) -> int:
    """The bytes that the blobs of one episode may take."""
    return (max_timesteps + field.final) * field.blob_bytes


def close_up(layout: Layout, there: Mapping[str, int]) -> Layout:
    """Close the gaps between the blobs of a packed copy, in the order of the rows; returns its smaller layout.

    Blobs only move towards the beginning of the file, so none is overwritten before it is read.
    """
    sizes = {name: _close_up(layout, name, there) for name in layout.coded}
    closed = replace(layout, blobs=sizes)
    for name in sizes:
        key = name + BLOBS
        old, new = layout.arrays[key], closed.arrays[key]
        assert len(old.header) == len(new.header)
        syscalls.system.truncate(there[key], new.size)
        write_all(there[key], new.header, 0)
    return closed


def _close_up(layout: Layout, name: str, there: Mapping[str, int]) -> int:
    """Close the gaps between the blobs of one field, and correct its index; returns the bytes of the blobs."""
    count, index_fd, blobs_fd = layout.arrays[name].shape[0], there[name], there[name + BLOBS]
    first, end = layout.arrays[name + BLOBS].offset(0), 0
    for row in range(0, count, MOVED):
        offset, num_rows = layout.row_offset(name, row), min(MOVED, count - row)
        index = np.frombuffer(read_at(index_fd, 16 * num_rows, offset), np.uint64).reshape(-1, 2).copy()
        length = lengths_of(index)
        with_blob = np.flatnonzero(length)
        begin, stop = index[with_blob, 0], index[with_blob, 0] + length[with_blob]
        runs = np.flatnonzero(np.append(True, begin[1:] != stop[:-1])) if len(begin) else np.empty(0, np.int64)
        lasts = np.append(runs[1:], len(begin))[: len(runs)] - 1
        index[:, 0] = np.uint64(end) + np.cumsum(length) - length
        for old_begin, old_end in zip(begin[runs].tolist(), stop[lasts].tolist(), strict=True):
            if old_begin != end:
                _move(blobs_fd, first + old_begin, first + end, old_end - old_begin)
            end += old_end - old_begin
        write_all(index_fd, index, offset)
    return end


def _move(fd: int, origin: int, target: int, size: int) -> None:
    for moved in range(0, size, CHUNK):
        write_all(fd, read_at(fd, min(CHUNK, size - moved), origin + moved), target + moved)


def _wanted(schema: Schema, codec: Mapping[str, Any], dense: bool) -> dict[str, Any]:
    """Field -> the codec that was asked for; a codec given for a group is that of all its fields."""
    wanted: dict[str, Any] = {}
    for field_or_group, spec in codec.items():
        for name in schema.require([field_or_group], "codec", schema.fields):
            wanted[name] = Zstd(level=LEVEL) if dense and spec == "zstd" else parse_codec(spec)
            if name in schema.ends and wanted[name] is not None:
                raise SchemaError(f"codec: field {name!r} tells where episodes end, so it is not compressed; drop it")
    return wanted


def _recoded(name: str, field: Field, wanted: Mapping[str, Any]) -> Field:
    try:
        return replace(field, codec=wanted[name]) if name in wanted else field
    except SchemaError as error:
        raise SchemaError(f"codec: field {name!r}: {error}", field=name) from None


def _is_kept(old: Field, new: Field) -> bool:
    """Whether a field is copied as it is though a codec was given: the same one, none or lossy (it would lose more)."""
    return old.codec == new.codec and (old.codec is None or old.codec.lossy)


def _decoded(source: Storage, name: str, index: Array) -> Array:
    try:
        return source.maps.coded[name].decode(index)
    except ValueError:
        raise DamagedError(f"has a blob of {name!r} that cannot be decoded") from None


# Dictionaries


def _trained(source: Storage, name: str, field: Field, slots: IntArray) -> Dictionary | None:
    """A dictionary for the blobs of a field, trained with a sample of timesteps; None if it is impossible or useless.

    Every eighth timestep of the sample is not used for the training, but to test whether the dictionary saves more
    bytes than it takes.
    """
    if field.codec is None or not field.codec.takes_dictionary:
        return None
    total = int(source.table.length[slots].sum())
    count = min(total, MAX_SAMPLES, MAX_DICTIONARY * SAMPLES_A_BYTE // field.itemsize)
    size = min(MAX_DICTIONARY, count * field.itemsize // SAMPLES_A_BYTE)
    if count < FEWEST or size < 1024:
        return None
    rows = _sample(source, name, slots, np.linspace(0, total, count, endpoint=False).astype(np.int64))
    held_out = np.arange(len(rows)) % 8 == 7
    content = field.codec.train(rows[~held_out], size)
    if content is None:
        return None
    dictionary, test_rows = Dictionary.of(content), rows[held_out][:: max(1, int(held_out.sum()) // TRIED)]
    plain, smaller = (sum(map(len, encode_many(field, test_rows, candidate))) for candidate in (None, dictionary))
    return dictionary if (plain - smaller) * total > len(content) * len(test_rows) else None


def _sample(source: Storage, name: str, slots: IntArray, steps: IntArray) -> Array:
    """Timesteps (N, *field), by their numbers `steps` (N,) across all episodes in `slots`; zeros if unreadable."""
    slots, t = source.table.locate(slots, steps)
    rows = source.first_row(slots, source.layout.schema.fields[name].final) + t
    stored = source.maps.rows[name].take(rows, 0, None, "clip")
    coded = source.maps.coded.get(name)
    if coded is None:
        return stored
    decoded = np.empty((len(steps), *coded.field.shape), coded.field.storage)
    coded.decode_into(stored, decoded, np.arange(len(steps)))
    return decoded
