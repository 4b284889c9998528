"""A schema laid out in a folder: its files with their shapes and headers, and `schema.json` to and from text. No I/O.

The text may come from a stranger: it is parsed strictly, and its sizes are checked before anything is allocated.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.codecs import codec_from_json, codec_to_json
from memmap_buffer.dtypes import check_count, is_dtype_name
from memmap_buffer.errors import CorruptBufferError, MemmapBufferError, NotABufferError, SchemaError
from memmap_buffer.format.records import RECORD, STATE
from memmap_buffer.format.syscalls import npy_header, random_bytes
from memmap_buffer.schema import ENDS, MAX_DIMENSIONS, MAX_FIELDS, Field, Schema

FORMAT, VERSION = "memmap-buffer", 1
MAX_SCHEMA_BYTES = 2**20
MAX_FILE_BYTES = 2**62
MAX_SLOTS = 2**24  # opening takes some 100 bytes of memory a slot, and the schema may be a stranger's
MAX_TIMESTEPS = 2**31
SPARE_COLUMNS = 16
MAX_DICTIONARY = 2**24  # bytes
KNOWN_SCHEMAS = 64  # parsed schemas that are kept: the shards of a root mostly share one
ID_BYTES = 16
# Defaults for a buffer with a capacity. A spare slot takes a hundred bytes of memory and no disk space until an episode
# is written to it, so there is one for each environment that has a hundred of the steps. An episode of ten is short.
FEWEST_SPARE_SLOTS, MOST_SPARE_SLOTS, STEPS_OF_AN_ENVIRONMENT = 64, 1 << 14, 100
FEWEST_EPISODES, STEPS_OF_A_SHORT_EPISODE = 1000, 10
MAX_DERIVED_BYTES = 2**43  # of one file, holes included: ext4 takes 2**44
_SIZES = ("max_episodes", "max_timesteps", "spare_slots", "circular", "capacity", "rows", "columns")
_KEYS = ("format", "version", "id", "layout", *_SIZES, "fields", "meta_fields")
_BYTE = np.dtype("|u1")
_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_ID_IN_TEXT = re.compile(rb'"id": "(%b)"' % _ID.pattern.encode())  # a key of text elsewhere is refused
NO_ID = "0" * 2 * ID_BYTES
_ENDS = dict(zip(ENDS, ENDS, strict=True))  # the fields that end episodes, where the schema names none
_LEFT_OUT = {"ends": _ENDS, "skips_resets": False}  # keys that are written only if they differ from these values
_FIELD_KEYS = ("dtype", "shape", "default", "final", "column")
_SIZES_OF_CODED = ("blobs", "dictionary")
_CODED_KEYS = ("codec", *_SIZES_OF_CODED)  # further keys, of a field that is compressed or of lists
BLOBS, DICTIONARY = "/blobs", "/dictionary"  # added to the name of such a field: the keys of its other files


def new_id() -> str:
    """An id for a new buffer."""
    return random_bytes(ID_BYTES).hex()


@dataclass(frozen=True)
class ArrayFile:
    """A `.npy` file of the folder: its name relative to the folder, its dtype and shape."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @cached_property
    def header(self) -> bytes:
        return npy_header(_descr(self.dtype), self.shape)

    @cached_property
    def size(self) -> int:
        return len(self.header) + math.prod(self.shape) * self.dtype.itemsize

    def offset(self, row: int) -> int:
        """Where row `row` of the first axis begins."""
        return len(self.header) + row * self.row_bytes

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class PlainFile(ArrayFile):
    """A file of bytes, without a header."""

    header = b""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, _BYTE, (size,))


@lru_cache(256)
def _descr(dtype: np.dtype[Any]) -> str:
    return repr(dtype.descr if dtype.names else dtype.str)


@dataclass(frozen=True)
class Layout:
    """The contents of `schema.json`.

    Args:
        schema: the fields.
        max_episodes: how many episodes are visible at most.
        max_timesteps: the longest episode.
        spare_slots: slots beyond `max_episodes`, so that the one being written is never a visible one.
        circular: publishing into a full buffer retires the oldest episode, instead of raising.
        capacity: the most timesteps that are visible, or None.
        rows: None for a grid; the total of all steps for a packed, read-only folder.
        columns: the number of columns of checksums.npy.
        column_of: field or meta field -> its column.
        blobs: compressed field -> bytes of its file of blobs in a packed folder.
        dictionaries: compressed field -> bytes of its dictionary, where it has one.
        id: the name of the buffer, the same in every copy of it; default: a new one.
        skips_resets: recording from environments leaves out the step after an episode's end, which is the reset.

    Raises:
        SchemaError: a size is out of bounds, or too large for any file.
    """

    schema: Schema
    max_episodes: int
    max_timesteps: int
    spare_slots: int = 1
    circular: bool = False
    capacity: int | None = None
    rows: int | None = None
    columns: int = 0
    column_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    blobs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dictionaries: Mapping[str, int] = dataclasses.field(default_factory=dict)
    id: str = dataclasses.field(default_factory=new_id)
    skips_resets: bool = False

    def __post_init__(self) -> None:
        if not self.column_of:
            object.__setattr__(self, "column_of", {name: i for i, name in enumerate(self.schema.all)})
        if not self.columns:
            object.__setattr__(self, "columns", len(self.schema.all) + SPARE_COLUMNS)
        self._check()

    @classmethod
    def derived(
        cls,
        schema: Schema,
        max_episodes: int | None,
        max_timesteps: int | None,
        *,
        spare_slots: int | None = None,
        circular: bool | None = None,
        capacity: int | None = None,
        skips_resets: bool = False,
    ) -> Layout:
        """A layout in which each size that is None is derived from the others.

        Raises:
            SchemaError: a size is out of bounds, or cannot be derived.
        """
        if max_timesteps is None:
            raise SchemaError(
                "max_timesteps: got None, expected the most timesteps of an episode; pass max_timesteps=…"
            )
        ring, spare = capacity is not None, spare_slots
        if spare is None:
            spare = 1 if capacity is None else spare_slots_of(schema, max_timesteps, capacity)
        if max_episodes is None:
            max_episodes = _most_episodes(schema, max_timesteps, capacity, spare)
        is_circular = ring if circular is None else bool(circular)
        return cls(schema, max_episodes, max_timesteps, spare, is_circular, capacity, skips_resets=skips_resets)

    def _check(self) -> None:
        packed = self.rows is not None
        bounds = {
            "max_episodes": (1, MAX_SLOTS),
            "max_timesteps": (1, MAX_TIMESTEPS),
            "spare_slots": (0 if packed else 1, MAX_SLOTS),
            "capacity": (1, 2**62),
            "rows": (1, 2**62),
            "columns": (1, 2 * MAX_FIELDS + SPARE_COLUMNS),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None or name not in ("capacity", "rows"):
                object.__setattr__(self, name, check_count(name, value, low, high))
        if self.slots > MAX_SLOTS or any(
            array.shape[0] * array.row_bytes > MAX_FILE_BYTES for array in self.arrays.values()
        ):
            raise SchemaError("the sizes multiply to more than any file can hold; lower max_episodes or max_timesteps")

    @cached_property
    def used_columns(self) -> int:
        """The number of columns of checksums.npy up to the highest that a field has, gaps included."""
        return 1 + max(self.column_of.values())

    @cached_property
    def checksum_format(self) -> str:
        """How `struct` packs a slot's row of checksums.npy."""
        return f"<{self.columns}I"

    @property
    def slots(self) -> int:
        return self.max_episodes + self.spare_slots

    @property
    def writable(self) -> bool:
        return self.rows is None

    @cached_property
    def arrays(self) -> dict[str, ArrayFile]:
        """Key -> array file: "/episodes", "/state", "/checksums", then each field and meta field by its name.

        A compressed field's other files have its name and `BLOBS` or `DICTIONARY` as keys.
        """
        files = {
            "/episodes": ArrayFile("episodes.npy", RECORD, (self.slots,)),
            "/state": ArrayFile("state.npy", STATE, (1,)),
            "/checksums": ArrayFile("checksums.npy", np.dtype("<u4"), (self.slots, self.columns)),
        }
        for name, field in self.schema.fields.items():
            lead = (self.slots, self.max_timesteps + field.final)
            rows = field.in_file
            if self.rows is not None:
                lead = (self.rows + self.slots * field.final,)  # type: ignore[assignment]
            files[name] = ArrayFile(f"data/{name}.npy", rows.storage, (*lead, *rows.shape))
            if field.is_coded:
                size = (self.slots, (self.max_timesteps + field.final) * field.blob_bytes)
                if self.rows is not None:
                    size = (self.blobs[name],)  # type: ignore[assignment]
                files[name + BLOBS] = ArrayFile(f"data/{name}.blobs.npy", _BYTE, size)
            if name in self.dictionaries:
                key, bytes_ = name + DICTIONARY, self.dictionaries[name]
                files[key] = ArrayFile(f"data/{name}.dictionary.npy", _BYTE, (bytes_,))
        for name, field in self.schema.meta_fields.items():
            files[name] = ArrayFile(f"meta/{name}.npy", field.storage, (self.slots, *field.shape))
        return files

    def grown_bytes(self, key: str) -> int:
        """The bytes of a file on the disk when the buffer is full.

        With a `capacity`, that many steps are visible, and the oldest episode may have as many as `max_timesteps` more.
        """
        size, field = self.arrays[key].size, self.schema.fields.get(key.removesuffix(BLOBS))
        if self.capacity is None or field is None:
            return size
        row_bytes = field.blob_bytes if key.endswith(BLOBS) else field.in_file.itemsize
        return min(size, (self.capacity + self.max_timesteps) * row_bytes)

    def rows_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a per-timestep field with its slots and timesteps as one axis of rows."""
        shape = self.arrays[name].shape
        return shape if self.rows is not None else (shape[0] * shape[1], *shape[2:])

    def row_offset(self, name: str, row: int) -> int:
        """Where a row of a per-timestep field begins in its file."""
        return len(self.arrays[name].header) + row * self.schema.fields[name].in_file.itemsize

    @cached_property
    def coded(self) -> dict[str, Field]:
        """The fields that are compressed, or of lists."""
        return {name: field for name, field in self.schema.fields.items() if field.is_coded}

    @cached_property
    def keys_of_steps(self) -> tuple[str, ...]:
        """The keys in `arrays` of the files of per-timestep fields, without dictionaries."""
        return (*self.schema.fields, *(name + BLOBS for name in self.coded))

    @cached_property
    def keys_of_episodes(self) -> tuple[str, ...]:
        """The keys in `arrays` of the files of all fields and meta fields, without dictionaries."""
        return (*self.keys_of_steps, *self.schema.meta_fields)

    def keys_of(self, name: str) -> tuple[str, ...]:
        """The keys in `arrays` of the files of a field."""
        return tuple(key for key in (name, name + BLOBS, name + DICTIONARY) if key in self.arrays)

    def region(self, name: str, slot: int) -> range:
        """The bytes that belong to a slot of a grid in a field's file of blobs, counted from the end of its header."""
        size = self.arrays[name + BLOBS].row_bytes
        return range(slot * size, (slot + 1) * size)

    def differences(self, other: Layout, derived: Collection[str] = ()) -> list[str]:
        """The points on which this layout (stored) and another (given) disagree, a line each.

        Args: derived: the names of sizes that the user did not give: they are not compared.
        """
        mine, theirs = json.loads(self.to_json()), json.loads(other.to_json())
        lines = [
            _differ(key, mine[key], theirs[key])
            for key in _KEYS
            if not isinstance(mine[key], dict) and key not in ("columns", "id", *derived)
        ]
        lines += self._field_lines(other, codecs=True, widths=True).values()
        lines += [_differ(key, *(repr(layout.schema.declared_ends[key]) for layout in (self, other))) for key in ENDS]
        return [line for line in lines if line]

    def field_differences(self, other: Layout, *, widths: bool = True) -> dict[str, str]:
        """The differences that forbid to read two layouts as one: by field, or way to end episodes, a line of text.

        Args: widths: whether the same text of another width is another field.
        """
        lines = self._field_lines(other, codecs=False, widths=widths)
        for key in ENDS:
            if getattr(self.schema, key) != getattr(other.schema, key):
                line = _differ(key, *(repr(layout.schema.declared_ends[key]) for layout in (self, other)))
                lines[key] = lines.get(key) or line
        return {name: line for name, line in lines.items() if line}

    def _field_lines(self, other: Layout, *, codecs: bool, widths: bool) -> dict[str, str]:
        """By name, how a field of this layout and that of another differ, "" where they do not."""
        mine, theirs = json.loads(self.to_json()), json.loads(other.to_json())
        lines: dict[str, str] = {}
        for group in ("fields", "meta_fields"):
            for name in dict.fromkeys([*mine[group], *theirs[group]]):
                both = (_spelling(layout[group].get(name), codecs, widths) for layout in (mine, theirs))
                lines[name] = "\n  ".join(filter(None, [lines.get(name), _differ(f"{group} {name!r}", *both)]))
        return lines

    def to_json(self) -> bytes:
        """The bytes of `schema.json`. Raises SchemaError: they are more than a reader accepts."""
        groups = {
            group: {
                name: {
                    "dtype": field.dtype,
                    "shape": list(field.shape),
                    "default": _default_to_json(field.default),
                    "final": field.final,
                    "column": self.column_of[name],
                    **self._coded_to_json(name, field),
                }
                for name, field in fields.items()
            }
            for group, fields in (("fields", self.schema.fields), ("meta_fields", self.schema.meta_fields))
        }
        head = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "layout": "grid" if self.rows is None else "packed",
            **{key: getattr(self, key) for key in _SIZES},
        }
        last = {"ends": self.schema.declared_ends, "skips_resets": bool(self.skips_resets)}
        extra = {key: value for key, value in last.items() if value != _LEFT_OUT[key]}
        data = json.dumps({**head, **groups, **extra}, indent=1, allow_nan=False).encode() + b"\n"
        if len(data) > MAX_SCHEMA_BYTES:
            raise SchemaError(
                f"schema.json: got {len(data)} bytes, expected at most {MAX_SCHEMA_BYTES}; give fewer fields, or "
                "defaults of one number"
            )
        return data

    def _coded_to_json(self, name: str, field: Field) -> dict[str, Any]:
        if not field.is_coded:
            return {}
        codec = None if field.codec is None else codec_to_json(field.codec)
        return dict(zip(_CODED_KEYS, (codec, self.blobs.get(name), self.dictionaries.get(name)), strict=True))

    @staticmethod
    def may_be_torn(data: bytes) -> bool:
        """Whether bytes that do not parse may be text of `to_json` of which a power cut lost some sectors."""
        begin = json.dumps({"format": FORMAT}, indent=1)[:-2].encode()
        return not data[:512].strip(b"\0") or begin.startswith(data) or data.startswith(begin)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Layout:
        """Parse `schema.json`.

        Args:
            data: its bytes.
            where: its path, for the errors.

        Raises:
            CorruptBufferError: it is no valid JSON, or too large.
            NotABufferError: it is of another format.
            SchemaError: an unknown version, key, dtype or name, or a size out of bounds.
        """
        if len(data) > MAX_SCHEMA_BYTES:  # as in a published head, which may be larger
            text = f"{where} has {len(data)} bytes, more than {MAX_SCHEMA_BYTES}; restore it from a copy"
            raise CorruptBufferError(text, path=where)
        if (id := _ID_IN_TEXT.search(data)) is not None:
            with suppress(MemmapBufferError):  # which is raised below, with where it is
                return _like(data[: id.start(1)], data[id.end(1) :]).of_id(id[1].decode())
        document = _parse(data, where)
        try:
            return _layout(document)
        except SchemaError as error:
            raise type(error)(f"{where}: {error}", path=where) from None

    def of_id(self, id: str) -> Layout:
        """This layout of another buffer: what follows from it is found once for all shards of a root."""
        _ = self.coded  # the copies share it, and `arrays`
        other = copy.copy(self)
        object.__setattr__(other, "id", id)
        return other

    def keeps(self, other: Layout) -> bool:
        """Whether this layout keeps all fields of `other` unchanged: files opened by `other` can still be read then."""
        mine, theirs = json.loads(self.to_json()), json.loads(other.to_json())
        groups = ("fields", "meta_fields")
        same = all(mine.get(key) == theirs.get(key) for key in (*_KEYS, *_LEFT_OUT) if key not in groups)
        return same and all(mine[group].get(name) == spec for group in groups for name, spec in theirs[group].items())

    def part_id(self, serials: Iterable[int]) -> str:
        """The id of a copy that has only the episodes `serials`: the same id for the same serials."""
        text = f"{self.id} {','.join(map(str, serials))}"
        import hashlib

        return hashlib.blake2b(text.encode(), digest_size=ID_BYTES).hexdigest()

    def without(self, names: Collection[str]) -> Layout:
        """This layout without some fields."""
        groups = (self.schema.fields, self.schema.meta_fields)
        fields, meta = ({name: field for name, field in group.items() if name not in names} for group in groups)
        column_of = {name: column for name, column in self.column_of.items() if name not in names}
        return self.with_fields(self.schema.with_fields(fields, meta), column_of)

    def with_fields(
        self, schema: Schema, column_of: Mapping[str, int], dictionaries: Mapping[str, int] | None = None
    ) -> Layout:
        """This layout, but with other fields."""
        columns = max(self.columns, 1 + max(column_of.values()))
        kept = self.dictionaries if dictionaries is None else dictionaries
        kept = {name: size for name, size in kept.items() if name in schema.fields}
        return replace(self, schema=schema, column_of=column_of, columns=columns, dictionaries=kept)


def _fitting_slots(schema: Schema, max_timesteps: int) -> int:
    """How many slots a buffer whose sizes are derived may have, by its largest file."""
    longest = check_count("max_timesteps", max_timesteps, 1, MAX_TIMESTEPS)
    largest = max(((longest + field.final) * field.blob_bytes for field in schema.fields.values()), default=0)
    return min(MAX_DERIVED_BYTES // max(1, largest), MAX_SLOTS)


def spare_slots_of(schema: Schema, max_timesteps: int, capacity: int) -> int:
    """The `spare_slots` of a `capacity`: one for every hundred steps, so that they follow the environments."""
    wanted = min(check_count("capacity", capacity) // STEPS_OF_AN_ENVIRONMENT, MOST_SPARE_SLOTS)
    return max(FEWEST_SPARE_SLOTS, min(wanted, _fitting_slots(schema, max_timesteps) // STEPS_OF_A_SHORT_EPISODE))


def _most_episodes(schema: Schema, max_timesteps: int, capacity: int | None, spare_slots: int) -> int:
    """A `max_episodes` for a `capacity`: enough episodes, unless they are very short or a file would be too large.

    `capacity` + `spare_slots` are always enough: each visible episode shows a step, but for open ones.
    """
    if capacity is None:
        raise SchemaError("max_episodes: got None, expected a number of episodes; pass max_episodes=…, or capacity=…")
    fitting, steps = _fitting_slots(schema, max_timesteps), check_count("capacity", capacity)
    spare = check_count("spare_slots", spare_slots, 1, MAX_SLOTS)
    wanted = min(max(FEWEST_EPISODES, -(-steps // STEPS_OF_A_SHORT_EPISODE)), steps + spare)
    return max(1, min(wanted, fitting - spare))


def _differ(key: str, stored: Any, other: Any) -> str:
    return "" if stored == other else f"{key}: stored {stored}, given {other}"


def _spelling(field: dict[str, Any] | None, codecs: bool, widths: bool) -> str | None:
    """A field as a user would write it, or as much of it as counts."""
    if field is None:
        return None
    dtype = field["dtype"] if widths or field["dtype"][0] != "U" else "U"
    extra = [f", {key}={field[key]!r}" for key in ("default", "final") if field[key] not in (None, False)]
    if codecs and field.get("codec") is not None:
        extra.append(f", codec={codec_from_json(field['codec'])!r}")
    return f"Field({dtype!r}, {tuple(field['shape'])}{''.join(extra)})"


def _default_to_json(default: Any) -> Any:
    if isinstance(default, list):
        return [_default_to_json(item) for item in default]
    if isinstance(default, complex):
        return {"real": _default_to_json(default.real), "imag": _default_to_json(default.imag)}
    return repr(default) if isinstance(default, float) and not math.isfinite(default) else default


def _default_from_json(value: Any, numeric: bool, depth: int = 0) -> Any:
    if isinstance(value, list) and depth < MAX_DIMENSIONS:
        return [_default_from_json(item, numeric, depth + 1) for item in value]
    if isinstance(value, dict) and value.keys() == {"real", "imag"}:
        parts = [_default_from_json(value[key], True) for key in ("real", "imag")]
        if all(isinstance(part, float) for part in parts):
            return complex(*parts)
    if numeric and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, (dict, list)) or (numeric and isinstance(value, str)):
        raise SchemaError(f"default: got {value!r}, expected a number")
    return value


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise CorruptBufferError(f"{where} is no valid schema ({error}); restore it from a copy", path=where) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NotABufferError(f"{where} does not describe a {FORMAT}; another program wrote it", path=where)
    return document


@lru_cache(KNOWN_SCHEMAS)
def _like(before: bytes, after: bytes) -> Layout:
    """The layout of a text but for its id, which stands between the two."""
    return _layout(_parse(before + NO_ID.encode() + after, ""))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice")
    return out


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is out of range")
    return value


def _layout(document: dict[str, Any]) -> Layout:
    if document.get("version") != VERSION or type(document.get("version")) is not int:
        raise SchemaError(
            f"version: got {document.get('version')!r}, this release reads {VERSION}; install a newer one"
        )
    document = {**_LEFT_OUT, **document}
    if set(document) != {*_KEYS, *_LEFT_OUT}:
        raise SchemaError(f"keys: {sorted(set(document) ^ {*_KEYS, *_LEFT_OUT})} are unknown or missing")
    kind = _typed(document, "layout", str)
    if kind not in ("grid", "packed") or (kind == "packed") != (document["rows"] is not None):
        raise SchemaError(f"layout: got {kind!r} with rows {document['rows']!r}")
    if not _ID.fullmatch(_typed(document, "id", str)):
        raise SchemaError(f"id: got {document['id']!r}, expected {2 * ID_BYTES} digits, 0 … 9 and a … f")
    _typed(document, "circular", bool)
    check_count("columns", document["columns"])
    schema, columns = _schema(document)
    blobs, dictionaries = _sizes(document["fields"], document["rows"] is not None)
    layout = Layout(
        schema,
        column_of=columns,
        blobs=blobs,
        dictionaries=dictionaries,
        id=document["id"],
        skips_resets=_typed(document, "skips_resets", bool),
        **{key: document[key] for key in _SIZES},
    )
    if len(set(columns.values())) != len(columns) or layout.used_columns > layout.columns:
        raise SchemaError("column: two fields share one, or it lies beyond `columns`")
    return layout


def _ends(document: dict[str, Any]) -> dict[str, str | None]:
    ends: dict[str, str | None] = _typed(document, "ends", dict)
    if set(ends) != set(ENDS) or not all(end is None or type(end) is str for end in ends.values()):
        raise SchemaError(
            f"ends: got {ends!r}, expected the keys {', '.join(ENDS)}, each with the name of a field or null"
        )
    return ends


def _schema(document: dict[str, Any]) -> tuple[Schema, dict[str, int]]:
    """The fields and their columns. The same text gives the same objects: the shards of a root share them."""
    groups = [_typed(document, group, dict) for group in ("fields", "meta_fields")]
    same = [{name: _without_sizes(spec) for name, spec in group.items()} for group in groups]
    try:
        return _schema_of(json.dumps([*same, _ends(document)]))
    except RecursionError:
        raise SchemaError("a default or a shape is nested too deeply") from None


def _without_sizes(spec: Any) -> Any:
    if not isinstance(spec, dict) or "codec" not in spec:
        return spec
    return {key: None if key in _SIZES_OF_CODED else value for key, value in spec.items()}


@lru_cache(KNOWN_SCHEMAS)
def _schema_of(text: str) -> tuple[Schema, dict[str, int]]:
    fields, meta_fields, ends = json.loads(text)
    columns: dict[str, int] = {}
    return Schema(_fields(fields, columns), _fields(meta_fields, columns), **ends), columns


def _fields(group: dict[str, Any], columns: dict[str, int]) -> dict[str, Field]:
    if len(group) > MAX_FIELDS:
        raise SchemaError(f"got {len(group)} fields, at most {MAX_FIELDS} are possible")
    out = {}
    for name, spec in group.items():
        keys = set(_FIELD_KEYS) | (set(_CODED_KEYS) if isinstance(spec, dict) and "codec" in spec else set())
        if not isinstance(spec, dict) or set(spec) != keys or re.search(r"[^A-Za-z0-9_.]", name):
            raise SchemaError(
                f"field {name!r}: expected exactly the keys {', '.join(_FIELD_KEYS)}, of one that is compressed "
                f"{', '.join(_CODED_KEYS)}, too"
            )
        dtype, shape = _typed(spec, "dtype", str), _typed(spec, "shape", list)
        if not is_dtype_name(dtype) or any(type(n) is not int for n in shape[shape[:1] == [None] :]):
            raise SchemaError(f"field {name!r}: dtype {dtype!r} or shape {shape!r} is none that can be stored")
        default = _default_from_json(spec["default"], not dtype.startswith("U"))
        try:
            codec = None if spec.get("codec") is None else codec_from_json(spec["codec"])
            out[name] = Field(dtype, tuple(shape), default, _typed(spec, "final", bool), codec)
            if out[name].is_coded != ("codec" in spec):
                raise SchemaError(f"codec: it stands with a list, or names how the field is compressed, got {spec!r}")
        except SchemaError as error:
            raise SchemaError(f"field {name!r}: {error}") from None
        columns[name] = _integer(spec, "column", 0, 2 * MAX_FIELDS + SPARE_COLUMNS)
    return out


def _sizes(fields: dict[str, Any], packed: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(field -> bytes of its file of blobs, field -> bytes of its dictionary), of the fields that have such a file."""
    blobs, dictionaries = dict[str, int](), dict[str, int]()
    for name, spec in fields.items():
        if "codec" not in spec:
            continue
        if packed != (spec["blobs"] is not None):
            raise SchemaError(
                f"field {name!r}: blobs: got {spec['blobs']!r}, expected the bytes of the blobs of a packed folder, "
                "else null"
            )
        try:
            if packed:
                blobs[name] = _integer(spec, "blobs", 0, MAX_FILE_BYTES)
            if spec["dictionary"] is not None:
                dictionaries[name] = _integer(spec, "dictionary", 1, MAX_DICTIONARY)
        except SchemaError as error:
            raise SchemaError(f"field {name!r}: {error}") from None
    return blobs, dictionaries


def _typed(document: dict[str, Any], key: str, kind: type) -> Any:
    if type(document[key]) is not kind:
        raise SchemaError(f"{key}: got {document[key]!r}, expected {kind.__name__}")
    return document[key]


def _integer(document: dict[str, Any], key: str, low: int, high: int) -> int:
    return check_count(key, _typed(document, key, int), low, high)
