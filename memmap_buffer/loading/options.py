"""Options of `dataset`, `dataloader` and `sample`: what each means, which exclude each other, which view they name."""

from __future__ import annotations

import difflib
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.items.selection import Selection
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.schema import DECLARED, Schema
from memmap_buffer.views.hindsight import Hindsight
from memmap_buffer.views.n_step import NStep
from memmap_buffer.views.windows import RandomCrop, Timestep, Trajectory, View, names_of

if TYPE_CHECKING:
    Names = Iterable[str]

Batch = dict[str, Any]
Transform: TypeAlias = Callable[..., Batch]
NUMBERS = frozenset({"n_step_lens", "_return", "_discount", "_weights", "_probabilities"})


class ReadOptions(TypedDict, total=False):
    """Keyword options of `dataset`, `dataloader` and `sample`; `Options` says what each does."""

    view: View
    n_steps: int
    timestep_level: bool
    window_length: int
    fields: Names
    current_fields: Names
    next_fields: Names
    sequence_fields: Names
    gamma: float
    reward: str
    terminated: str | None
    stack: Mapping[str, int]
    padding: str
    timeline: bool
    filter_meta: Mapping[str, Any]
    filter_fields: Mapping[str, Any]
    min_episode_len: int
    top_k: tuple[str, int]
    weight_by: str
    split: Mapping[str, float]
    part: str
    split_seed: int
    include_metadata: bool
    return_indices: bool
    return_mask: bool
    return_episode_lens: bool
    slice_by_episode_len: bool
    fieldname_map: Mapping[str, str]
    to_named_tuple: Iterable[str]
    expand_scalars: bool
    ragged: bool
    transform: Transform | Sequence[Transform]
    hindsight: Hindsight
    on_stale: str
    prioritized: Prioritized | bool


@dataclass(frozen=True)
class Options:
    """How to read.

    Args:
        view: a view object; or else
        n_steps: n-step transitions (`NStep`), with current_fields, next_fields, sequence_fields, gamma, reward,
            terminated, stack, padding and timeline; timestep_level: single timesteps; window_length: one random crop
            per episode; none of these: whole episodes, with return_mask, return_episode_lens, and
            slice_by_episode_len=False to pad all to max_timesteps.
        fields: which fields; default all.
        filter_meta, filter_fields, min_episode_len, top_k, weight_by, split, part, split_seed: see `Selection`.
        include_metadata: add the meta fields to each item.
        return_indices: add `_index` (serial) to whole episodes, `_indices` (serial, t) to all else; a ConcatBuffer
            puts the number of the source before.
        fieldname_map: stored or prefixed name -> the key wanted. to_named_tuple: give each batch, and each item, as
            a named tuple of these keys, leading underscores dropped; a word of Python's gets one behind: `return_`.
        expand_scalars: what is one number an item or a step gets a last axis of length 1, (B, 1) or (B, T, 1): fields, meta
            fields, returns, discounts, lengths of transitions, weights and probabilities; not text, nor indices and
            masks.
        ragged: give whole episodes, windows, `seq_` and the `next_` of a timeline without their padding, as jagged
            nested tensors, (B, j, *field) of each item's own j, whose `unbind()` is a list; text as lists.
        transform: called with each gathered batch, a dict of tensors under its final keys, where it was gathered (a
            worker process, a prefetching thread); returns a dict, which may be the same. Of several each gets what the
            one before it gave. One that has a parameter `rng` gets a numpy Generator of this batch, fixed by the seed,
            the epoch and the batch's place, for any number of workers. To be sent to workers that are spawned it must
            pickle.
        hindsight: give items a goal that was achieved; see `Hindsight`.
        on_stale: what to do when an episode is overwritten before its rows were read: "redraw" or "raise".
        prioritized: draw by priority, with replacement; see `Prioritized`.
    """

    view: View | None = None
    n_steps: int | None = None
    timestep_level: bool = False
    window_length: int | None = None
    fields: Names | None = None
    current_fields: Names | None = None
    next_fields: Names | None = None
    sequence_fields: Names | None = None
    gamma: float | None = None
    reward: str = "reward"
    terminated: str | None = DECLARED
    stack: Mapping[str, int] | None = None
    padding: str = "zero"
    timeline: bool = False
    filter_meta: Mapping[str, Any] | None = None
    filter_fields: Mapping[str, Any] | None = None
    min_episode_len: int = 1
    top_k: tuple[str, int] | None = None
    weight_by: str | None = None
    split: Mapping[str, float] | None = None
    part: str | None = None
    split_seed: int = 0
    include_metadata: bool = True
    return_indices: bool = False
    return_mask: bool = False
    return_episode_lens: bool = True
    slice_by_episode_len: bool = True
    fieldname_map: Mapping[str, str] | None = None
    to_named_tuple: Iterable[str] | None = None
    expand_scalars: bool = False
    ragged: bool = False
    transform: Transform | Sequence[Transform] | None = None
    hindsight: Hindsight | None = None
    on_stale: str = "redraw"
    prioritized: Prioritized | bool | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Options from keywords; None is the default, but of `terminated` it says that nothing ends.

        Raises: SchemaError: an option that there is not; the closest one is named.
        """
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown_option(name, known)
        given = {name: value for name, value in given.items() if value is not None or name == "terminated"}
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        for name, kind, expected in _KINDS:
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise SchemaError(f"{name}: got {given!r}, expected {expected}")
        kinds = [k for k in ("view", "n_steps", "window_length") if getattr(self, k) is not None]
        kinds += ["timestep_level"] * self.timestep_level
        steps = (
            self.view is not None or self.n_steps is not None or self.timestep_level or self.window_length is not None
        )
        rules = {
            f"{' and '.join(kinds)} exclude each other; give one": len(kinds) > 1,
            "fields and to_named_tuple exclude each other; to_named_tuple picks the fields": (
                self.fields is not None and self.to_named_tuple is not None
            ),
            "fields says nothing to n_steps; use current_fields, next_fields and sequence_fields": (
                self.fields is not None and self.n_steps is not None
            ),
            "fields says nothing to a view object; give them to the view": self.fields is not None
            and self.view is not None,
            "return_mask is for whole episodes; windows and offsets have masks of their own": self.return_mask
            and steps,
            "slice_by_episode_len=False needs return_episode_lens, or the padding cannot be told": (
                not self.slice_by_episode_len and not self.return_episode_lens
            ),
            f"transform: got {self.transform!r}, expected a function from batch to batch, or several": not (
                self.transform is None
                or callable(self.transform)
                or (isinstance(self.transform, (list, tuple)) and all(map(callable, self.transform)))
            ),
            "on_stale: expected 'redraw' or 'raise'": self.on_stale not in ("redraw", "raise"),
        }
        for text, broken in rules.items():
            if broken:
                raise SchemaError(f"options: {text}")
        only = ("gamma", "current_fields", "next_fields", "sequence_fields", "stack", "padding", "timeline")
        if self.n_steps is None and any(getattr(self, name) != getattr(Options, name) for name in only):
            raise SchemaError(f"options: {', '.join(only)} go with n_steps")

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The functions of `transform`."""
        given = self.transform
        return () if given is None else (given,) if callable(given) else tuple(given)

    def make_view(self, max_timesteps: int) -> View:
        """The view that these options name."""
        if self.view is not None:
            return self.view
        if self.n_steps is not None:
            names = self.current_fields, self.next_fields, () if self.sequence_fields is None else self.sequence_fields
            ends, stack = (self.reward, self.terminated), self.stack or {}
            return NStep(self.n_steps, *names, self.gamma, *ends, stack, self.padding, self.timeline)
        if self.window_length is not None:
            return RandomCrop(self.window_length, self.fields)
        if self.timestep_level:
            return Timestep(self.fields)
        length = None if self.slice_by_episode_len else max_timesteps
        return Trajectory(self.fields, self.return_mask, self.return_episode_lens, length)

    def select(self, schema: Schema, max_timesteps: int) -> Selection:
        """What is wanted of the episodes. Raises SchemaError for what the schema does not have."""
        view, how = self.make_view(max_timesteps), self.hindsight
        if how is not None:
            how.check(schema)
            if view.per_episode:
                raise SchemaError("hindsight needs a view of timesteps, with a goal for each item; give n_steps, say")
        selection = Selection(
            view,
            filter_meta=_flat(schema, self.filter_meta),
            filter_fields=_flat(schema, self.filter_fields),
            min_episode_len=self.min_episode_len,
            top_k=self.top_k,
            weight_by=self.weight_by,
            split=self.split,
            part=self.part,
            split_seed=self.split_seed,
            random=view.random or how is not None or any(map(takes_rng, self.transforms)),
            mixes=how is not None and how.strategy == "random",
        ).excluding(schema)
        selection.check(schema)
        return selection


@dataclass(frozen=True)
class Output:
    """The keys of a batch, in order, and what they are called.

    Args:
        meta: the meta fields that are added. indices: "_index", "_indices" or "".
        rename: key -> the key wanted. tuple_names: keys of the named tuple, or ().
        transforms: functions of the user's, and whether each wants `rng`.
        widened: keys that get one more axis.
        ragged: key -> the key of the lengths to which it is cut. nested: whether some key names a group.
    """

    meta: tuple[str, ...]
    indices: str
    rename: Mapping[str, str] = field(default_factory=dict)
    tuple_names: tuple[str, ...] = ()
    transforms: tuple[tuple[Transform, bool], ...] = ()
    widened: frozenset[str] = frozenset()
    ragged: Mapping[str, str] = field(default_factory=dict)
    nested: bool = False

    @classmethod
    def of(cls, options: Options, view: View, schema: Schema) -> Output:
        """Raises SchemaError where two keys coincide, or a name is none of the batch's."""
        meta = tuple(schema.meta_fields) if options.include_metadata else ()
        by_priority = Prioritized.parse(options.prioritized, schema) is not None
        wanted_indices = options.return_indices or by_priority
        indices = "" if not wanted_indices else "_index" if view.per_episode else "_indices"
        keys = [*view.keys(schema), *meta, *[indices] * bool(indices), *["_weights", "_probabilities"] * by_priority]
        keys += ["_goal"] * (options.hindsight is not None)
        rename = dict(options.fieldname_map or {})
        for name, new in rename.items():
            if name not in keys:
                raise schema.unknown(name, "fieldname_map", keys)
            if not isinstance(new, str):
                raise SchemaError(f"fieldname_map: {name!r} is to be {new!r}, expected a name")
        wanted = [rename.get(key, key) for key in keys]
        twice = sorted({key for key in wanted if wanted.count(key) > 1})
        if twice:
            raise SchemaError(
                f"two keys of the batch would be {twice[0]!r}; leave one out, or rename it by fieldname_map"
            )
        widened = frozenset(
            rename.get(key, key) for key in keys if options.expand_scalars and _is_number(key, view, schema)
        )
        transforms = tuple((transform, takes_rng(transform)) for transform in options.transforms)
        ragged = {rename.get(k, k): rename.get(n, n) for k, n in view.sequences(schema).items() if options.ragged}
        if options.ragged and not ragged:
            raise SchemaError(
                f"ragged: {type(view).__name__} gives no sequences that differ in length, or not how long they are; "
                "leave it out, or ask for whole episodes, windows, sequence_fields or timeline=True"
            )
        named, nested = names_of("to_named_tuple", options.to_named_tuple) or (), any("." in key for key in wanted)
        _check_tuple_names(named)
        output = cls(meta, indices, rename, named, transforms, widened, ragged, nested)
        groups = {key.split(".")[0] for key in wanted}
        for name in output.tuple_names:
            if name not in wanted and name not in groups and not output.transforms:
                raise schema.unknown(name, "to_named_tuple", sorted({*wanted, *groups}))
        return output

    def transformed(self, batch: Batch, rng: Callable[[], np.random.Generator]) -> Batch:
        """The batch as the user's transforms make it. Raises SchemaError where one gives no batch."""
        if not self.transforms:
            return batch
        random = rng() if any(by_chance for _, by_chance in self.transforms) else None
        for transform, by_chance in self.transforms:
            batch = transform(batch, rng=random) if by_chance else transform(batch)
            if not isinstance(batch, dict):
                raise SchemaError(f"transform: it returned {type(batch).__name__}, expected a dict; return the batch")
        return batch


_KINDS: tuple[tuple[str, type, str], ...] = (
    ("view", View, "a view, such as Timestep() or Window(16)"),
    ("hindsight", Hindsight, "Hindsight(...)"),
    ("fieldname_map", Mapping, "a dict: key of the batch -> the key wanted"),
)


def takes_rng(transform: Transform) -> bool:
    """Whether a transform has a parameter for chance."""
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # some that are written in C do not tell
        return False


def _is_number(key: str, view: View, schema: Schema) -> bool:
    """Whether a key of a batch holds one number an item or a step."""
    key = getattr(view, "reward", key) if key in ("_return", "_discount") else key  # they have its axes
    name = key if key in schema.all else key.removeprefix("next_").removeprefix("seq_")
    field = schema.all.get(name)
    return key in NUMBERS if field is None else not field.shape and field.storage.kind != "U"


def unknown_option(name: str, known: Sequence[str]) -> SchemaError:
    """The error for an option that does not exist."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    return SchemaError(f"option {name!r} is unknown; {hint}")


def _flat(schema: Schema, conditions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Conditions by dotted name; a tuple is a range, not a group."""
    out: dict[str, Any] = {}
    if not isinstance(conditions, Mapping | None):
        raise SchemaError(f"filter: got {conditions!r}, expected a dict of field names and conditions")
    for name, condition in (conditions or {}).items():
        nested = isinstance(condition, Mapping) and name not in schema.all
        out |= {f"{name}.{k}": v for k, v in _flat(schema, condition).items()} if nested else {name: condition}
    return out


class NamedBatch(tuple[Any, ...]):
    """The base of batches as named tuples: pickles by its names, so a worker of any start method can send one."""

    _fields: tuple[str, ...] = ()
    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return make_tuple, (self._fields, tuple(self))


@lru_cache(maxsize=64)
def tuple_type(keys: tuple[str, ...]) -> Any:
    """The named tuple of these keys."""
    base = namedtuple("Batch", [tuple_name(key) for key in keys])  # type: ignore[misc]
    return type("Batch", (NamedBatch, base), {"__slots__": (), "_fields": base._fields})


def make_tuple(keys: tuple[str, ...], values: Iterable[Any]) -> Any:
    """A batch as a named tuple."""
    return tuple_type(keys)._make(values)


def tuple_name(key: str) -> str:
    """What a key is called in a named tuple: no leading underscores, and Python's own words get one behind."""
    name = key.lstrip("_").replace(".", "_")
    return f"{name}_" if iskeyword(name) else name


def _check_tuple_names(keys: tuple[str, ...]) -> None:
    """Raise SchemaError where a key gives no name, or two the same."""
    names = [tuple_name(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if not name.isidentifier():
            raise SchemaError(f"to_named_tuple: {key!r} is no name that a tuple can have; rename it by fieldname_map")
        if names.count(name) > 1:
            same = [k for k, n in zip(keys, names, strict=True) if n == name]
            raise SchemaError(
                f"to_named_tuple: {same} would all be {name!r}; leave all but one out, or rename them by fieldname_map"
            )
