"""The declaration of what a buffer stores: `Field` and `Schema`.

They are parsed from every accepted spelling; fields in nested dicts get dotted names. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.choices import did_you_mean
from memmap_buffer.codecs import parse_codec
from memmap_buffer.dtypes import Array, decode, dtype_name, encode, storage_dtype, to_numpy
from memmap_buffer.errors import SchemaError

MAX_FIELDS = 1024
MAX_DIMENSIONS = 16
MAX_NAME = 64
DEFAULT_BLOB = 2**32 - 1  # stored in place of a blob's length: the row is the field's default, or zeros without one
MAX_BLOB = DEFAULT_BLOB - 1
MEMBERS = 1024  # of a list, on average over the timesteps of an episode: its file has room for so many
ENDS = ("terminated", "truncated")
LENGTHS = "_lens_"  # before the key of padded lists: the key of their lengths
DECLARED = ""  # in place of the name of a field that ends episodes: the field that the schema declares
RESERVED = frozenset({"episode_lens", "n_step_lens", "keep_partial"})
DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))})
_PART = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Field:
    """The declaration of a field or a meta field.

    Args:
        dtype: "float" (float32), "int" (int64), a numpy or torch dtype or its name, or "U<n>" for text.
        shape: the shape of one entry; an int n means (n,). None as the first length: each timestep has a list of any
            length, of numbers (None,) or of arrays (None, *shape).
        default: the value for a step that leaves the field out: a scalar, or an array of `shape`. None: each step must
            give a value.
        final: whether an episode has one more entry than steps: the observation after the last action.
        codec: how each timestep is compressed: "zstd" or `Zstd(level=…)`, lossless; "jpeg" or `Jpeg(quality=…)`, lossy;
            None: not at all. Text and meta fields cannot be compressed.

    Raises:
        SchemaError: the dtype cannot be stored, the shape is not one, or the default or the codec does not fit.
    """

    dtype: Any
    shape: Any = ()
    default: Any = None
    final: bool = False
    codec: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "shape", _parse_shape(self.shape))
        if self.is_list and (self.dtype == "bfloat16" or self.entries.kind == "U" or self.codec is not None):
            raise SchemaError(
                f"shape {self.shape}: lists of {self.dtype}{' with a codec' if self.codec else ''} cannot be stored, "
                "those of other numbers without one can; declare another dtype, or a shape of whole numbers"
            )
        if self.codec is not None:
            object.__setattr__(self, "codec", self._parse_codec(self.codec))
        if self.default is not None:
            object.__setattr__(self, "default", self._parse_default(self.default))

    def _parse_default(self, default: Any) -> Any:
        try:
            if self.is_list:
                return self.encode(default).tolist()
            stored = encode(default, self.dtype, () if to_numpy(default).ndim == 0 else self.shape)
        except SchemaError as error:
            raise SchemaError(f"default {default!r}: {error}") from None
        return decode(stored, self.dtype).tolist()

    def _parse_codec(self, spec: Any) -> Any:
        codec: Any = parse_codec(spec)
        if self.storage.kind == "U" or not 0 < self.itemsize <= MAX_BLOB:
            raise SchemaError(
                f"codec: got {spec!r} for a field of {self.dtype} {self.shape}, expected a field of numbers, of at "
                f"most {MAX_BLOB:,} bytes a timestep; leave the codec out"
            )
        codec.require_fits(self.dtype, self.shape)
        return codec

    @classmethod
    def parse(cls, spec: Any) -> Field:
        """A field from any spelling of it.

        Args:
            spec: a `Field`, a dtype, or a tuple (dtype, shape[, default]).

        Raises:
            SchemaError: the spelling is not understood, or the field cannot be stored.
        """
        if isinstance(spec, Field):
            return spec
        if hint := _of_space(spec):
            raise SchemaError(f"got {spec!r}, expected a dtype, (dtype, shape) or (dtype, shape, default){hint}")
        if isinstance(spec, (tuple, list)):
            if not 1 <= len(spec) <= 3:
                raise SchemaError(f"got {spec!r}, expected a dtype, (dtype, shape) or (dtype, shape, default)")
            return cls(*spec)
        return cls(spec)

    @cached_property
    def is_list(self) -> bool:
        """Whether each timestep holds a list of any length."""
        return bool(self.shape[:1] == (None,))

    @cached_property
    def is_coded(self) -> bool:
        """Whether timesteps differ in length in the file: the field is compressed, or holds lists."""
        return self.codec is not None or self.is_list

    @cached_property
    def entries(self) -> np.dtype[Any]:
        """The numpy dtype of the numbers on disk."""
        return storage_dtype(self.dtype)

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The numpy dtype of stored values in memory: `entries`; of lists it is object, as each list is an array."""
        return np.dtype(object) if self.is_list else self.entries

    @cached_property
    def cell(self) -> tuple[int, ...]:
        """The shape of one stored value in memory: `shape`; for a list it is ()."""
        return () if self.is_list else self.shape

    @cached_property
    def direct(self) -> np.dtype[Any]:
        """The dtype of arrays that are stored without a cast.

        No array has that of bfloat16, "V1": a uint16 array that is given for bfloat16 holds numbers, not bits.
        """
        return np.dtype("V1") if self.dtype == "bfloat16" else self.storage

    @cached_property
    def fill(self) -> Array:
        """The stored entry in place of one that is missing: the default, else zeros or an empty list. Shape `cell`."""
        if self.is_list:
            out = np.empty((), object)
            out[()] = self.encode([] if self.default is None else self.default)
            return out
        if self.default is None:
            return np.zeros(self.shape, self.storage)
        row = encode(self.default, self.dtype, to_numpy(self.default).shape)
        return np.broadcast_to(row, self.shape).copy()

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one entry; for a list, of one of its members."""
        return int(np.prod(self.shape[self.is_list :], dtype=object)) * self.entries.itemsize

    @cached_property
    def blob_bytes(self) -> int:
        """Bytes that the file of blobs reserves for a timestep, on average over the timesteps of an episode."""
        return MEMBERS * self.itemsize if self.is_list else self.itemsize

    @cached_property
    def in_file(self) -> Field:
        """The field as `data/<field>.npy` holds it: itself, or for compressed timesteps and lists the index of blobs.

        A row of the index has two numbers: where the blob begins in the file of blobs; and the blob's length in the
        lower 32 bits, with the number of its dictionary in the upper 32. See `format`, "Blobs".
        """
        if not self.is_coded:
            return self
        return Field("uint64", (2,), [0, DEFAULT_BLOB] if self.default is not None else None, self.final)

    def encode(self, value: Any, lead: int = 0) -> Array:
        """A value as it is stored. A single list, `lead` 0, becomes an array (n, …), always a copy.

        Args:
            value: a tensor, array, list or scalar.
            lead: how many dimensions stand before those of an entry: 0 for one step, 1 for an episode or a batch.

        Returns:
            (*lead dimensions, *cell) of the dtype `storage`.

        Raises:
            SchemaError: a wrong shape, or a lossy cast.
        """
        if self.is_list:
            return self._encode_lists(value, lead)
        return encode(value, self.dtype, self.shape, lead)

    def _encode_lists(self, value: Any, lead: int) -> Array:
        if not lead:
            value = (
                value.item() if isinstance(value, np.ndarray) and value.dtype == object and not value.ndim else value
            )
            empty = (0, *self.shape[1:])
            array = np.empty(empty, self.entries) if isinstance(value, (list, tuple)) and not value else to_numpy(value)
            if array.ndim != len(self.shape):
                raise SchemaError(f"got shape {array.shape}, declared {self.shape}; store one list, of that many axes")
            return np.array(encode(array, self.dtype, self.shape[1:], 1), order="C")
        try:
            rows = list(value)
        except TypeError:
            raise SchemaError(f"got {value!r}, expected a list for each timestep") from None
        arrays = [self._encode_lists(row, lead - 1) for row in rows]
        out = np.empty((len(arrays), *(arrays[0].shape if lead > 1 and arrays else ())), object)
        for i, row in enumerate(arrays):
            out[i] = row
        return out


class Schema:
    """The fields (per timestep) and meta fields (per episode) of a buffer, by dotted name.

    Args:
        fields: name -> any spelling of a field, or a nested dict of them.
        meta_fields: the same, one value an episode.
        terminated: the field that is true where an episode ended and nothing follows; None: there is none.
        truncated: the field that is true where an episode was cut short, as by a time limit; None: there is none.
            Both are fields of one number or bool a timestep. A default name has no effect if no such field has it.

    Raises:
        SchemaError: a name is no identifier, is used twice, or a spelling is not understood.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        meta_fields: Mapping[str, Any] | None = None,
        *,
        terminated: str | None = "terminated",
        truncated: str | None = "truncated",
    ) -> None:
        leaves = _leaves(declared("fields", fields))
        meta_leaves = _leaves(declared("meta_fields", meta_fields or {}))
        if not leaves:
            raise SchemaError("fields: got none, expected at least one per-timestep field")
        _check_names([name for name, _ in [*leaves, *meta_leaves]])
        self.fields = {name: _parse_field("field", name, spec) for name, spec in leaves}
        self.meta_fields = {name: _parse_field("meta field", name, spec) for name, spec in meta_leaves}
        for name, field in self.meta_fields.items():
            for option in ("final", "codec", "is_list"):
                if getattr(field, option):
                    what = f"shape {field.shape}" if option == "is_list" else f"`{option}`"
                    raise SchemaError(f"meta field {name!r}: {what} is for per-timestep fields; drop it")
        self.declared_ends: dict[str, str | None] = dict(zip(ENDS, (terminated, truncated), strict=True))
        for key, end in self.declared_ends.items():
            if end is not None and end != key and not self._may_end(end, key):
                raise SchemaError(
                    f"{key}: field {end!r} is {self.fields[end].dtype} {self.fields[end].shape}, expected one number "
                    f"or bool a timestep; name another, or give {key}=None",
                    field=end,
                )

    def __repr__(self) -> str:
        return f"Schema({self.fields!r}, {self.meta_fields!r})"

    @classmethod
    def from_example(cls, step: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Schema:
        """The schema into which an example of a step fits.

        Args:
            step: name -> array, tensor, scalar or str; nested dicts; a tuple becomes `item0`, `item1`, …
            meta: the same for the meta fields, one value an episode.

        Raises:
            SchemaError: a name cannot be used, or a value cannot be stored.
        """
        return cls(_example(declared("step", step, 0.5)), _example(declared("meta", meta or {}, 0.5)))

    @cached_property
    def all(self) -> dict[str, Field]:
        """The fields, then the meta fields."""
        return {**self.fields, **self.meta_fields}

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest entry among the per-timestep fields; a list counts as one of its members."""
        return max(field.itemsize for field in self.fields.values())

    @cached_property
    def defaults(self) -> dict[str, Array]:
        """Name -> default, for the fields that a step may leave out. Read-only: all steps share the arrays."""
        return {name: _entry(field) for name, field in self.fields.items() if field.default is not None}

    @cached_property
    def zeros(self) -> dict[str, Array]:
        """Name -> an entry of zeros, or an empty list, for the fields without a default. Read-only, as `defaults`."""
        return {name: _entry(field) for name, field in self.fields.items() if field.default is None}

    @cached_property
    def terminated(self) -> str | None:
        """The field that says that an episode ended and nothing follows: one number or bool, true where not 0."""
        return self._end("terminated")

    @cached_property
    def truncated(self) -> str | None:
        """The field that says that an episode was cut short: one number or bool, true where not 0."""
        return self._end("truncated")

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The names of the fields that say that an episode ended, `terminated` first."""
        return tuple(dict.fromkeys(name for name in (self.terminated, self.truncated) if name is not None))

    def _end(self, key: str) -> str | None:
        name = self.declared_ends[key]
        return name if name is not None and (name in self.fields and self._may_end(name, key)) else None

    def _may_end(self, name: str, key: str) -> bool:
        """Whether a field is one number or bool a timestep. Raises SchemaError if no field has that name."""
        if name not in self.fields:
            raise self.unknown(name, key, self.fields)
        field = self.fields[name]
        return field.shape in ((), (1,)) and field.storage.kind in "biuf" and not field.is_coded

    def ending_by(self, terminated: str | None, truncated: str | None) -> Schema:
        """A schema of the same fields, in which other fields end episodes.

        Args:
            terminated: the field, or None; "terminated", the default name, keeps the field that is declared here.
            truncated: the field, or None; "truncated" keeps the field that is declared here.
        """
        ends = {key: end for key, end in zip(ENDS, (terminated, truncated), strict=True) if end != key}
        return Schema(self.fields, self.meta_fields, **{**self.declared_ends, **ends}) if ends else self

    def with_fields(
        self, fields: Mapping[str, Field], meta_fields: Mapping[str, Field], names: Mapping[str, str] | None = None
    ) -> Schema:
        """A schema of other fields, in which the same fields end episodes as here.

        A field that ends episodes here and is missing there ends none any more.

        Args:
            fields: name -> field.
            meta_fields: name -> meta field.
            names: old -> new name of the fields that were renamed.
        """
        new = {key: None if end is None else (names or {}).get(end, end) for key, end in self.declared_ends.items()}
        gone = {
            key: None if key in fields else key for key, end in new.items() if end is not None and end not in fields
        }
        return Schema(fields, meta_fields, **{**new, **gone})

    def only(self, names: Iterable[str]) -> Schema:
        """A schema of some fields and meta fields, groups expanded, and of the fields that end episodes."""
        chosen = {*self.require(names, "fields"), *self.ends}
        fields = {name: field for name, field in self.fields.items() if name in chosen}
        return self.with_fields(fields, {name: field for name, field in self.meta_fields.items() if name in chosen})

    def as_wide_as(self, others: Iterable[Schema]) -> Schema:
        """A schema whose texts are as wide as the widest of that name in some others."""
        texts = {name: field for name, field in self.all.items() if field.storage.kind == "U"}
        wider: dict[str, Field] = {}
        for name, field in [(name, other.all[name]) for other in others for name in texts if name in other.all]:
            if field.storage.kind == "U" and field.storage.itemsize > wider.get(name, texts[name]).storage.itemsize:
                wider[name] = replace(texts[name], dtype=field.dtype)
        fields, meta_fields = ({n: wider.get(n, each[n]) for n in each} for each in (self.fields, self.meta_fields))
        return self.with_fields(fields, meta_fields) if wider else self

    @cached_property
    def final_names(self) -> frozenset[str]:
        return frozenset(name for name, field in self.fields.items() if field.final)

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """The names of the per-timestep fields that hold lists."""
        return tuple(name for name, field in self.fields.items() if field.is_list)

    def flatten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values under the dotted names of their fields. Padded lists that come with their lengths lose their padding.

        Args:
            values: nested dicts of values; a tuple stands for `item0`, `item1`, …

        Raises:
            SchemaError: a field is given twice, in a group and by its dotted name.
        """
        fields = self.all.keys()
        if values.keys() <= fields:
            return dict(values)
        leaves = _leaves(values, fields=fields)
        flat = dict(leaves)
        if len(flat) < len(leaves):
            names = [name for name, _ in leaves]
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaError(f"field {twice!r} is given twice, in a group and by its dotted name", field=twice)
        for name in self.lists:
            if name in flat and LENGTHS + name in flat:
                flat[name] = _without_padding(name, flat[name], flat.pop(LENGTHS + name))
        return flat

    def encode_all(
        self, fields: Mapping[str, Field], values: Mapping[str, Any], lead: int, where: str = "", hint: str = ""
    ) -> dict[str, Array]:
        """Values of several fields as stored, in the order of `fields`.

        Args:
            fields: name -> field.
            values: name -> value; fields without a value are left out.
            lead: how many dimensions stand before those of an entry.
            where: the place of the values, for errors.
            hint: the end of errors.

        Raises:
            SchemaError: a wrong shape, or a lossy cast; the text names the field.
        """
        columns = {}
        try:
            for name, field in fields.items():
                if name in values:
                    value = values[name]
                    fits = type(value) is np.ndarray and value.dtype == field.direct
                    columns[name] = value if fits and value.shape[lead:] == field.shape else field.encode(value, lead)
        except SchemaError as error:
            kind = "meta field" if name in self.meta_fields else "field"
            raise SchemaError(f"{kind} {name!r}{where}: {error}{hint}", field=name) from None
        return columns

    def encode(self, name: str, value: Any, lead: int, where: str = "") -> Array:
        """The values of a field as stored, (*lead dimensions, *field); arguments and errors as of `encode_all`."""
        return self.encode_all({name: self.all[name]}, {name: value}, lead, where)[name]

    def require(self, names: Iterable[str], where: str, among: Collection[str] | None = None) -> tuple[str, ...]:
        """The names of fields, with groups expanded to their fields.

        Args:
            names: of fields or groups.
            where: the option that has the names, for errors.
            among: the names that are allowed; None: all fields and meta fields.

        Raises:
            SchemaError: a name is unknown; the text proposes the closest one.
        """
        choices = self.all if among is None else among
        if type(names) is tuple and len({*names}) == len(names) and all([name in choices for name in names]):
            return names
        fields: list[str] = []
        for name in names:
            members = [name] if name in choices else [k for k in choices if k.startswith(f"{name}.")]
            if not members:
                raise self.unknown(name, where, choices)
            fields += members
        return tuple(dict.fromkeys(fields))

    def require_fields(self, names: Iterable[str], where: str, among: Collection[str]) -> None:
        """Check names of fields, without groups.

        Args:
            names: of fields.
            where: the option that has the names, for errors.
            among: the names that are allowed.

        Raises:
            SchemaError: a name is not allowed; the text proposes the closest one.
        """
        for name in names:
            if name not in among:
                raise self.unknown(name, where, among)

    def unknown(self, name: object, where: str, among: Iterable[str] | None = None, other: str = "") -> SchemaError:
        """The error for a name of no field, or of a field that is not allowed in its place.

        Args:
            name: the name.
            where: the option that has the name.
            among: the names that are allowed; None: all fields and meta fields.
            other: the option that takes fields of the other kind; "": there is none.
        """
        names = list(self.all if among is None else among)
        listed = ", ".join(names) or "none"
        what = f"which was not declared here; {did_you_mean(name, names) or f'declared are {listed}'}"
        expected = f"expected {listed}"
        if members := [each for each in names if each.startswith(f"{name}.")]:
            what = f"which is a group: give a dict of its fields, or name them: {', '.join(members)}"
        if other and name in self.all:
            kind = "meta field" if name in self.meta_fields else "per-timestep field"
            what = f"which is a {kind}; {other} takes it"
        elif name in self.meta_fields:
            what = f"which is a meta field, one value an episode, and comes along with batches by itself; {expected}"
        elif name in self.fields:
            kind = "per-timestep field" + (" without final=True" if self.final_names >= set(names) else "")
            what = f"which is a {kind}; {expected}"
        return SchemaError(f"{where}: got {name!r}, {what}", field=name)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from a flat dict of dotted names, the reverse of `flatten`."""
    if not any("." in name for name in flat):
        return dict(flat)
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, leaf = name.split(".")
        place = out
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return out


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A flat dict of dotted names from nested dicts.

    Args:
        tree: nested dicts, such as a batch or the groups of an HDF5 file.
        prefix: stands before all names; it ends in a dot.
    """
    return dict(_leaves(tree, prefix))


def _without_padding(name: str, padded: Any, lengths: Any) -> Array:
    """The lists of an array (…, L, *member), cut to their lengths (…): objects (…), each the array of one list."""
    values, counts = to_numpy(padded), to_numpy(lengths)
    lead = counts.ndim
    if (
        counts.dtype.kind not in "iu"
        or values.ndim <= lead
        or values.shape[:lead] != counts.shape
        or ((counts < 0) | (counts > values.shape[lead])).any()
    ):
        raise SchemaError(
            f"{LENGTHS}{name}: got {counts.dtype} {counts.shape} beside {name!r} of shape {values.shape}, expected how "
            "long each of its lists is, as a batch has both; or give the lists alone, without padding",
            field=name,
        )
    out = np.empty(counts.shape, object)
    for place, count in np.ndenumerate(counts):
        out[place] = values[place][:count]
    return out


def _parse_field(kind: str, name: str, spec: Any) -> Field:
    try:
        return Field.parse(spec)
    except SchemaError as error:
        raise SchemaError(f"{kind} {name!r}: {error}", field=name) from None


def _parse_shape(shape: Any) -> tuple[int, ...]:
    dimensions = (shape,) if isinstance(shape, (int, np.integer)) and not isinstance(shape, bool) else shape
    if not isinstance(dimensions, (tuple, list)) or len(dimensions) > MAX_DIMENSIONS:
        raise SchemaError(f"shape: got {shape!r}, expected an int or a tuple of at most {MAX_DIMENSIONS} ints")
    for n in dimensions[dimensions[:1] in ((None,), [None]) :]:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n < 2**62:
            raise SchemaError(f"shape: got {shape!r}, expected whole numbers from 1")
    return tuple(None if n is None else int(n) for n in dimensions)  # type: ignore[misc]


def declared(where: str, declaration: Any, example: object = "float") -> Mapping[str, Any]:
    """`declaration` itself. Raises SchemaError unless it is a dict."""
    if not isinstance(declaration, Mapping):
        like = f"such as {{'reward': {example!r}}}"
        raise SchemaError(f"{where}: got {declaration!r}, expected a dict by name, {like}{_of_space(declaration)}")
    return declaration


def _of_space(declaration: Any) -> str:
    """For an error: how to declare the fields of a Gymnasium space; "" if the declaration is no space."""
    if not all(hasattr(declaration, name) for name in ("contains", "sample", "seed", "dtype")):
        return ""
    return (
        "; it is a space of Gymnasium: ReplayBuffer.for_env(env, …) declares the fields of an environment, and "
        "(space.dtype, space.shape) is one of them"
    )


def _leaves(tree: Mapping[str, Any], prefix: str = "", fields: Collection[str] | None = None) -> list[tuple[str, Any]]:
    """(dotted name, value) of nested dicts, in which a dotted name may come twice.

    Args:
        tree: nested dicts.
        prefix: stands before all names.
        fields: the names whose values are no groups; a tuple is a group, too. None: there are none, and it is a value.
    """
    out: list[tuple[str, Any]] = []
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if fields is not None and full not in fields and isinstance(value, tuple):
            value = {f"item{i}": item for i, item in enumerate(value)}
        is_group = isinstance(value, Mapping) and (fields is None or full not in fields)
        out += _leaves(value, f"{full}.", fields) if is_group else [(full, value)]
    return out


def _example(step: Mapping[str, Any]) -> dict[str, Field]:
    fields = {}
    for name, value in _leaves(step, fields=()):
        array = to_numpy(value)
        source = getattr(value, "dtype", array.dtype)
        spec: Any = str(source) if str(source).startswith("torch.") else array.dtype
        if array.dtype.kind == "U":
            spec = f"U{max(1, array.dtype.itemsize // 4)}"
        if isinstance(value, float) and not isinstance(value, np.generic):
            spec = "float"
        fields[name] = _parse_field("field", name, (spec, array.shape))
    return fields


def _entry(field: Field) -> Array:
    """The entry of a field that was left out, as it is read; read-only."""
    value = decode(field.fill, field.dtype)
    return np.broadcast_to(value, value.shape)


def _check_names(names: list[str]) -> None:
    if len(names) > MAX_FIELDS:
        raise SchemaError(f"got {len(names)} fields, at most {MAX_FIELDS} are possible")
    seen: set[str] = set()
    for name in names:
        parts = name.split(".")
        if len(name) > MAX_NAME or not all(_PART.fullmatch(part) for part in parts) or name in RESERVED:
            raise SchemaError(
                f"name {name!r}: expected dot-joined identifiers ([A-Za-z][A-Za-z0-9_]*) of at most {MAX_NAME} "
                f"characters, none of {', '.join(sorted(RESERVED))}",
                field=name,
            )
        if not DEVICES.isdisjoint(part.casefold() for part in parts):
            raise SchemaError(
                f"name {name!r}: Windows keeps {', '.join(sorted(DEVICES)[:3])} … for devices", field=name
            )
        if name.casefold() in seen:
            raise SchemaError(f"name {name!r} is used twice (case does not count); rename one", field=name)
        seen.add(name.casefold())
    for name in names:
        parts = name.casefold().split(".")
        for end in range(1, len(parts)):
            if ".".join(parts[:end]) in seen:
                raise SchemaError(
                    f"name {name!r} lies inside the field {'.'.join(parts[:end])!r}; rename one", field=name
                )
