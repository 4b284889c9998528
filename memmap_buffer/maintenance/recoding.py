"""The timesteps of a field on their way to another folder: as they are, or compressed in another way.

Blobs of a field that keeps its codec are copied. Those of a field that changes it are decoded and encoded anew, some
timesteps at a time, so neither takes more memory for a larger field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

CHUNK = 4 << 20  # bytes read, summed and written at a time: they stay in the processor's cache
CODED_CHUNK = 16 << 20  # bytes of timesteps that are encoded or decoded at a time: several threads have some each
LEVEL = 12  # of "zstd" where it is written once and read often: a frame takes no longer to decode
MAX_DICTIONARY = 112_640  # bytes; what Zstandard itself trains by default
SAMPLES_A_BYTE = 100  # bytes of timesteps to train one byte of a dictionary, as Zstandard recommends
TRIED = 256  # timesteps by which a dictionary is tried that they did not train
FEWEST, MAX_SAMPLES = 16, 1 << 16  # timesteps to train a dictionary by
MOVED = 1 << 16  # rows of an index that are looked at together


class DamagedError(Exception):
    """An episode has a timestep that is none; the text tells of which field."""


@dataclass(frozen=True)
class Recoding:
    """How the fields of a copy are compressed.

    Args:
        schema: of the copy.
        anew: the fields that are decoded or encoded.
        dictionaries: those of the copy's blobs, by field.
    """

    schema: Schema
    anew: frozenset[str]
    dictionaries: Mapping[str, Dictionary]

    @classmethod
    def of(cls, source: Storage, codec: Mapping[str, Any] | None, slots: IntArray, *, dense: bool) -> Recoding:
        """The recoding that was asked for, with a trained dictionary for each field that Zstandard compresses anew.

        Args:
            source: what is copied.
            codec: field -> its codec in the copy; the others keep theirs.
            slots: of the episodes that are copied.
            dense: whether the copy is only read: then "zstd" is worth a higher level.

        Raises:
            SchemaError: there is no such field or codec, or it does not fit.
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
        """A layout of the copy; of a packed one, whose files of blobs have room for timesteps that do not shrink."""
        slots, coded = max_episodes + options["spare_slots"], self.schema.fields if rows is not None else {}
        return Layout(
            self.schema,
            max_episodes,
            max_timesteps,
            rows=rows,
            blobs={
                name: slots * _room(field, max_timesteps)
                if field.is_list
                else (int(rows or 0) + slots * field.final) * field.itemsize
                for name, field in coded.items()
                if field.is_coded
            },
            dictionaries={name: len(dictionary.content) for name, dictionary in self.dictionaries.items()},
            **options,
        )

    def write_dictionaries(self, layout: Layout, there: Mapping[str, int]) -> None:
        """Write the dictionaries of a copy."""
        for name, dictionary in self.dictionaries.items():
            key = name + DICTIONARY
            write_all(there[key], dictionary.content, layout.arrays[key].offset(0))


class Copied(NamedTuple):
    """The checksums of a field's rows: `before`, of the source, and `after`, of the copy."""

    before: int
    after: int


def copy_rows(
    source: Storage,
    name: str,
    rows: range,
    recoding: Recoding,
    layout: Layout,
    slot: int,
    row: int,
    there: Mapping[str, int],
) -> Copied:
    """Copy an episode's rows of a field; the blobs begin where those of timesteps that do not shrink would.

    Lists begin where they would if all episodes had all the room that there is.

    Args:
        source: where they are.
        name: the field.
        rows: of the source.
        recoding: how the copy is compressed.
        layout: of the copy.
        slot: of the copy.
        row: of the copy, of the first of them.
        there: the copy's open files.

    Raises:
        DamagedError: a timestep cannot be read.
        SchemaError: lists have more members than there is room for.
    """
    field, coded = layout.schema.fields[name], source.maps.coded.get(name)
    before = after = EMPTY
    is_raw, room = not field.is_coded and coded is None, _room(field, layout.max_timesteps)
    step = max(1, (CHUNK if is_raw else CODED_CHUNK) // field.itemsize)
    at = slot * room if field.is_list else row * field.itemsize
    for begin in range(rows.start, rows.stop, step):
        there_now = source.maps.rows[name][begin : min(begin + step, rows.stop)]
        stored = there_now if is_raw else there_now.copy()  # it may be written to meanwhile
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
                stored = index_of(field, blobs, at, dictionary)
            else:
                lengths = lengths_of(stored)
                stored[:, 0] = np.uint64(at) + np.cumsum(lengths) - lengths
            data = b"".join(blobs)
            if field.is_list and at + len(data) > (slot + 1) * room:
                raise SchemaError(
                    f"field {name!r}: max_timesteps={layout.max_timesteps} leaves too little room for the lists of an "
                    "episode; give more"
                )
            write_all(there[name + BLOBS], data, layout.arrays[name + BLOBS].offset(0) + at)
            write_all(there[name], stored, layout.row_offset(name, row))
            after, at = add_rows(after, contents_of(stored, blobs)), at + len(data)
        row += len(stored)
    return Copied(checksum_of(before), checksum_of(after))


def _room(field: Field, max_timesteps: int) -> int:
    """The bytes that the blobs of an episode have room for."""
    return (max_timesteps + field.final) * field.blob_bytes


def close_up(layout: Layout, there: Mapping[str, int]) -> Layout:
    """Move the blobs of a packed copy together, to lie end to end in the order of the rows; its layout with that size.

    None is moved behind where it was, so none is written over before it is read.
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
    """Move the blobs of one field together; their bytes."""
    count, index_fd, blobs_fd = layout.arrays[name].shape[0], there[name], there[name + BLOBS]
    first, end = layout.arrays[name + BLOBS].offset(0), 0
    for row in range(0, count, MOVED):
        offset, many = layout.row_offset(name, row), min(MOVED, count - row)
        index = np.frombuffer(read_at(index_fd, 16 * many, offset), np.uint64).reshape(-1, 2).copy()
        length = lengths_of(index)
        there_now = np.flatnonzero(length)
        begin, stop = index[there_now, 0], index[there_now, 0] + length[there_now]
        runs = np.flatnonzero(np.append(True, begin[1:] != stop[:-1])) if len(begin) else np.empty(0, np.int64)
        lasts = np.append(runs[1:], len(begin))[: len(runs)] - 1
        index[:, 0] = np.uint64(end) + np.cumsum(length) - length
        for a, b in zip(begin[runs].tolist(), stop[lasts].tolist(), strict=True):
            if a != end:
                _move(blobs_fd, first + a, first + end, b - a)
            end += b - a
        write_all(index_fd, index, offset)
    return end


def _move(fd: int, origin: int, target: int, size: int) -> None:
    for at in range(0, size, CHUNK):
        write_all(fd, read_at(fd, min(CHUNK, size - at), origin + at), target + at)


def _wanted(schema: Schema, codec: Mapping[str, Any], dense: bool) -> dict[str, Any]:
    """Field -> the codec that was asked for; a group's fields each have the one of the group."""
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
    """Whether a field for which a codec was asked stays as it is: to encode a lossy one again would lose again."""
    return old.codec == new.codec and (old.codec is None or old.codec.lossy)


def _decoded(source: Storage, name: str, index: Array) -> Array:
    try:
        return source.maps.coded[name].decode(index)
    except ValueError:
        raise DamagedError(f"has a blob of {name!r} that cannot be decoded") from None


# Dictionaries


def _trained(source: Storage, name: str, field: Field, slots: IntArray) -> Dictionary | None:
    """A dictionary for the blobs of a field, of a sample of all its timesteps; None if there are too few, or for less.

    Every eighth is left out of the training, and tells whether the dictionary saves more than its own size.
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
    dictionary, tried = Dictionary.of(content), rows[held_out][:: max(1, int(held_out.sum()) // TRIED)]
    without, with_it = (sum(map(len, encode_many(field, tried, candidate))) for candidate in (None, dictionary))
    return dictionary if (without - with_it) * total > len(content) * len(tried) else None


def _sample(source: Storage, name: str, slots: IntArray, steps: IntArray) -> Array:
    """Some timesteps (N, *field), counted through all episodes; one that cannot be read is of zeros."""
    slots, t = source.table.locate(slots, steps)
    rows = source.first_row(slots, source.layout.schema.fields[name].final) + t
    stored = source.maps.rows[name].take(rows, 0, None, "clip")
    coded = source.maps.coded.get(name)
    if coded is None:
        return stored
    out = np.empty((len(steps), *coded.field.shape), coded.field.storage)
    coded.decode_into(stored, out, np.arange(len(steps)))
    return out
