"""The options of reading: their meaning, which of them exclude each other, and what follows from them.

`BatchOptions` documents the options. `parse` checks them and fills in defaults; `selection_of` makes the `Selection` of
items, `Output.of` the keys of a batch. `BatchReader` calls all three.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from memmap_buffer.choices import Format, OnStale, Padding, StepBoundary, check_choice, closest, did_you_mean
from memmap_buffer.errors import SchemaError
from memmap_buffer.items.marked import Marked
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.weights import WeightBy
from memmap_buffer.paths import AnyPath, path_of
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.schema import DECLARED, LENGTHS, Schema
from memmap_buffer.views.hindsight import Hindsight
from memmap_buffer.views.n_step import NStep
from memmap_buffer.views.view import View, names_of
from memmap_buffer.views.windows import RandomCrop, Timestep, Trajectory

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Names = Iterable[str]
    TensorBatch: TypeAlias = dict[str, torch.Tensor]
    ArrayBatch: TypeAlias = dict[str, npt.NDArray[Any]]

Batch = dict[str, Any]
Parsed: TypeAlias = dict[str, Any]  # what `parse` returns: the given options, and the defaults of the others
Transform: TypeAlias = Callable[..., Any]
NUMBERS = frozenset({"n_step_lens", "_return", "_discount", "_weights", "_probabilities"})


class EpisodeOptions(TypedDict, total=False):
    """The options that choose episodes, for every way to read, `statistics` and `delete`.

    Args:
        filter_meta: meta field, "episode_lens", or "episode_time" (seconds since 1970) -> a condition on an episode: a
            scalar (equal), a set or list (member), (low, high) (low <= x < high, None is open), or a callable from the
            column to bools.
        min_episode_len: the length of the shortest episode that is read.
        top_k: (meta field, k): only the k episodes where the field is highest are read.
        mark: only episodes with this label are read (labels are set in `browse`): "good", say; "!bad": those without
            the label; "": those without any label; or several: at least one of the labels, and none of those with "!".
        marks: the file of the labels; default: the one in each folder.
        split: name -> fraction of the episodes; or name -> number of episodes, of the oldest, as many as all
            parts need; or a meta field, whose values name the parts.
        part: the name of the part of the split that is read.
        split_seed: decides which of these episodes each part gets.
    """

    filter_meta: Mapping[str, Any] | None
    min_episode_len: int | None
    top_k: tuple[str, int] | None
    mark: str | Collection[str] | None
    marks: AnyPath | None
    split: Mapping[str, float] | str | None
    part: Any
    split_seed: int | None


class BatchOptions(EpisodeOptions, total=False):
    """The options of every way to read batches, those of `EpisodeOptions` included; `Options` has two more.

    Items are whole episodes, unless `view`, `n_steps`, `timestep_level` or `window_length` says otherwise. An option
    that is None counts as left out.

    Args:
        view: how items are cut, such as `Window(16)`.
        n_steps: items are transitions over this many steps, as `NStep` cuts them.
        timestep_level: items are single timesteps.
        window_length: items are one random crop of this length from each episode.
        fields: the fields of an item; default: all.
        current_fields: with `n_steps`: the fields at the item's timestep; default: all.
        next_fields: with `n_steps`: the fields at the item's successor; default: all.
        sequence_fields: with `n_steps`: the fields at each of the n timesteps; default: none.
        gamma: with `n_steps`: the discount factor of `_return` and `_discount`.
        discount: with `gamma`: a field with a discount of each step, which multiplies all later rewards; see `NStep`.
        reward: the field of rewards.
        terminated: the field that is true where an episode terminated; default: the declared one. None: no episode
            terminates.
        stack: with `n_steps`: field -> how many successive timesteps are stacked for each one, the latest last.
        padding: with `stack`: the values of timesteps before the episode: "zero", "edge" or "default".
        timeline: with `n_steps`: `next_` holds every successor up to the n-th, (B, n, *field).
        boundary: with `n_steps`: "pad": an item at every timestep that has a successor; "drop": only where all n steps
            lie in the episode.
        filter_fields: field, or "_start" (the timestep itself) -> a condition on the timestep at which an item begins.
        weight_by: a meta field, "episode_lens" or "episode_time": items are drawn in proportion to it. Or (name, a
            function from its column to weights). Or a function from all columns to weights, such as `Balanced`: it gets
            a mapping with one entry for each episode that has items, of every meta field, "episode_lens",
            "episode_time", "serial", "age" (0 the newest) and "items" (the number of the episode's items).
        include_metadata: whether items have the meta fields.
        return_indices: add `_index` (serial) to whole episodes, and `_indices` (serial, timestep) to other items; a
            `ConcatBuffer` puts the number of the folder first.
        return_weights: add `_weights`, ones unless items are drawn by priority, so that one loss serves both.
        return_mask: add `_mask` to whole episodes: true for timesteps, false for padding.
        return_episode_lens: whether whole episodes have `_lens`.
        slice_by_episode_len: whether whole episodes are padded to the longest of the batch, or to `max_timesteps`.
        fieldname_map: key of the batch -> its new name.
        expand_scalars: keys with one number for each item or step get a last axis of length 1, (B, 1) or (B, T, 1); not
            text, indices or masks.
        ragged: whole episodes, windows, `seq_` and the `next_` of a timeline come without padding, as jagged nested
            tensors whose `unbind()` is a list. Text comes as lists, and with format="numpy" so do all these keys.
        transform: a function of the batch, or several, each called with the result of the one before. The first gets a
            dict of tensors (or arrays) under their final keys. They run where the batch was read (a worker process, a
            prefetching thread), and must pickle to be sent to a worker that is spawned. The result of the last is the
            batch: a dict, or anything else, such as a tuple of tensors. A parameter `rng` gets a numpy Generator that
            is fixed by the seed, the epoch and the batch's place, for any number of workers.
        hindsight: items get a goal that was achieved; see `Hindsight`.
        on_stale: if an episode is overwritten before its rows were read: "redraw" another item, or "raise".
        prioritized: items are drawn by priority, with replacement unless `Prioritized` says otherwise.
    """

    view: View | None
    n_steps: int | None
    timestep_level: bool | None
    window_length: int | None
    fields: Names | None
    current_fields: Names | None
    next_fields: Names | None
    sequence_fields: Names | None
    gamma: float | None
    discount: str | None
    reward: str | None
    terminated: str | None
    stack: Mapping[str, int] | None
    padding: Padding | None
    timeline: bool | None
    boundary: StepBoundary | None
    filter_fields: Mapping[str, Any] | None
    weight_by: WeightBy | None
    include_metadata: bool | None
    return_indices: bool | None
    return_weights: bool | None
    return_mask: bool | None
    return_episode_lens: bool | None
    slice_by_episode_len: bool | None
    fieldname_map: Mapping[str, str] | None
    expand_scalars: bool | None
    ragged: bool | None
    transform: Transform | Sequence[Transform] | None
    hindsight: Hindsight | None
    on_stale: OnStale | None
    prioritized: Prioritized | bool | None


class Options(BatchOptions, total=False):
    """The keyword options of `dataset`, `dataloader`, `sample`, `batch` and `batch_spec`: `BatchOptions`, and these.

    Args:
        to_named_tuple: batches and items are named tuples of these keys, without leading underscores; a Python keyword
            gets an underscore appended: `return_`.
        format: "torch": tensors, text as lists of str; or "numpy": arrays, bfloat16 as float32, without an import of
            torch.
    """

    to_named_tuple: Iterable[str] | None
    format: Format | None


class LoaderOptions(Options, total=False):
    """The keyword options of `dataloader`: `Options`, and arguments of `torch.utils.data.DataLoader`."""

    num_workers: int
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


DEFAULTS: Options = {
    "timestep_level": False,
    "reward": "reward",
    "terminated": DECLARED,
    "padding": "zero",
    "boundary": "pad",
    "timeline": False,
    "min_episode_len": 1,
    "split_seed": 0,
    "include_metadata": True,
    "return_indices": False,
    "return_weights": False,
    "return_mask": False,
    "return_episode_lens": True,
    "slice_by_episode_len": True,
    "expand_scalars": False,
    "format": "torch",
    "ragged": False,
    "on_stale": "redraw",
}
_OF_N_STEPS = (
    *("gamma", "discount", "current_fields", "next_fields", "sequence_fields", "stack", "padding", "boundary"),
    *("timeline", "reward", "terminated"),
)
_OF_VIEWS: dict[str, str] = {  # option -> the name of the same argument of a view
    **{name: name for name in ("fields", *_OF_N_STEPS, "return_mask")},
    "return_episode_lens": "return_lens",
    "slice_by_episode_len": "to_length",
}
_TYPES: tuple[tuple[str, type, str], ...] = (
    ("view", View, "a view, such as Timestep() or Window(16)"),
    ("hindsight", Hindsight, "Hindsight(...)"),
    ("fieldname_map", Mapping, "a dict: key of the batch -> the key wanted"),
)


def parse(options: Mapping[str, Any]) -> Parsed:
    """The options, checked, with the defaults of those that were left out.

    Raises:
        SchemaError: an option is unknown, of another type, or contradicts another.
    """
    require_known(options, Options.__annotations__)
    parsed = {**DEFAULTS, **{name: v for name, v in options.items() if v is not None or name == "terminated"}}
    _check(parsed)
    return parsed


def _check(options: Parsed) -> None:
    for name, kind, expected in _TYPES:
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            raise SchemaError(f"{name}: got {value!r}, expected {expected}")
    check_choice("on_stale", options["on_stale"], OnStale)
    check_choice("format", options["format"], Format)
    for objection in _objections(options):
        raise SchemaError(f"options: {objection}")


def _objections(options: Parsed) -> Iterator[str]:
    """Texts that say why some options cannot be given together, or with these values."""
    levels = [name for name in ("view", "n_steps", "window_length", "timestep_level") if options.get(name)]
    transform, by_n_steps = options.get("transform", ()), "n_steps" in options
    not_for_view = [name for name in _OF_VIEWS if _is_given(options, name)] if "view" in options else []
    if len(levels) > 1:
        yield f"{' and '.join(levels)} exclude each other; give one"
    if "fields" in options and "to_named_tuple" in options:
        yield "fields and to_named_tuple exclude each other; to_named_tuple picks the fields"
    if "fields" in options and by_n_steps:
        yield "fields says nothing to n_steps; use current_fields, next_fields and sequence_fields"
    if options["return_mask"] and levels and not isinstance(options.get("view"), Trajectory):
        yield "return_mask is for whole episodes; windows and offsets have masks of their own"
    for name in not_for_view:
        in_view = hasattr(options["view"], _OF_VIEWS[name])
        remedy = f"give {_OF_VIEWS[name]}=… to the view" if in_view else f"{type(options['view']).__name__} has none"
        yield f"{name} says nothing to a view object; {remedy}"
    if not options["slice_by_episode_len"] and not options["return_episode_lens"]:
        yield "slice_by_episode_len=False needs return_episode_lens, or the padding cannot be told"
    if not all(map(callable, transform if isinstance(transform, (list, tuple)) else [transform])):
        yield f"transform: got {transform!r}, expected a function from batch to batch, or several"
    if "marks" in options and "mark" not in options:
        yield "marks names the file of what mark chooses by; give mark, too"
    if not by_n_steps and any(_is_given(options, name) for name in _OF_N_STEPS):
        yield f"{', '.join(_OF_N_STEPS)} go with n_steps"


def _is_given(options: Parsed, name: str) -> bool:
    """Whether an option differs from its default."""
    value, default = options.get(name), DEFAULTS.get(name)
    return value is not default and not (isinstance(value, type(default)) and value == default)


def transforms_of(options: Parsed) -> tuple[Transform, ...]:
    """The functions of the option `transform`, in their order."""
    transform = options.get("transform", ())
    return (transform,) if callable(transform) else tuple(transform)


def view_of(options: Parsed, max_timesteps: int) -> View:
    """The view that the options name."""
    if "view" in options:
        view: View = options["view"]
        return view
    if "n_steps" in options:
        names = {*_OF_N_STEPS} & options.keys()
        return NStep(options["n_steps"], **{name: options[name] for name in names})
    if "window_length" in options:
        return RandomCrop(options["window_length"], options.get("fields"))
    if options["timestep_level"]:
        return Timestep(options.get("fields"))
    length = None if options["slice_by_episode_len"] else max_timesteps
    return Trajectory(options.get("fields"), options["return_mask"], options["return_episode_lens"], length)


def selection_of(options: Parsed, schema: Schema, max_timesteps: int) -> Selection:
    """The selection of the items that the options ask for.

    Raises:
        SchemaError: the options name a field that the schema lacks, or do not fit it.
    """
    view, hindsight = view_of(options, max_timesteps), options.get("hindsight")
    if hindsight is not None:
        hindsight.check(schema)
        if view.per_episode:
            raise SchemaError("hindsight needs a view of timesteps, with a goal for each item; give n_steps, say")
        if view.continues:
            raise SchemaError(
                "hindsight: goals are of one episode, and boundary='continue' goes on in others; use 'pad'"
            )
    by_field = isinstance(options.get("split"), str)
    selection = Selection(
        view,
        filter_meta=_flat(schema, options.get("filter_meta")) | _split_by_field(schema, options),
        filter_fields=_flat(schema, options.get("filter_fields")),
        min_episode_len=options["min_episode_len"],
        top_k=options.get("top_k"),
        mark=_marked(options),
        weight_by=options.get("weight_by"),
        split=None if by_field else options.get("split"),
        part=None if by_field else options.get("part"),
        split_seed=options["split_seed"],
        random=view.random or hindsight is not None or any(map(takes_rng, transforms_of(options))),
        mixes=hindsight is not None and hindsight.strategy == "random",
    ).excluding(schema)
    selection.check(schema)
    return selection


def selection_of_episodes(options: Mapping[str, Any], schema: Schema) -> Selection:
    """The selection of the episodes that `EpisodeOptions` choose, episodes that a ring has trimmed included.

    Raises:
        SchemaError: an option is none of `EpisodeOptions`, or names a field that the schema lacks.
    """
    require_known(options, EpisodeOptions.__annotations__)
    return selection_of(parse({**options, "timestep_level": True}), schema, 1)


def _marked(options: Parsed) -> Marked | None:
    if "mark" not in options:
        return None
    return Marked.parse(options["mark"], path_of(options["marks"]) if "marks" in options else None)


@dataclass(frozen=True)
class Output:
    """The keys that a batch has besides those of its view, their names, and the form that it takes.

    Args:
        meta: the meta fields that are added.
        indices: "_index", "_indices" or "" (none): the key of the items' indices.
        weights: whether `_weights` of 1 are added to items that are not drawn by priority.
        rename: key -> its new name. All keys below are new names.
        tuple_names: the keys of the named tuple, or ().
        transforms: (function of the user, whether it takes `rng`), in their order.
        widened: the keys that get one more axis, by `expand_scalars`.
        ragged: key that is cut to lengths -> key of these lengths.
        lists: the keys of fields of lists; jagged: whether their padding is cut off, too.
        nested: whether a key has a dot, so that the batch has groups.
        format: "torch" or "numpy".
    """

    meta: tuple[str, ...]
    indices: str
    weights: bool
    rename: Mapping[str, str]
    tuple_names: tuple[str, ...]
    transforms: tuple[tuple[Transform, bool], ...]
    widened: frozenset[str]
    ragged: Mapping[str, str]
    lists: tuple[str, ...]
    jagged: bool
    nested: bool
    format: str

    @classmethod
    def of(cls, options: Parsed, view: View, schema: Schema) -> Output:
        """The output that the options ask for. Raises SchemaError where two keys coincide, or one is unknown."""
        meta = tuple(schema.meta_fields) if options["include_metadata"] else ()
        by_priority = Prioritized.parse(options.get("prioritized"), schema) is not None
        wanted_indices = options["return_indices"] or by_priority
        indices = "" if not wanted_indices else "_index" if view.per_episode else "_indices"
        keys = [*view.keys(schema), *meta, *[indices] * bool(indices), *["_probabilities"] * by_priority]
        keys += ["_weights"] * (by_priority or options["return_weights"])
        keys += ["_goal"] * ("hindsight" in options)
        rename = dict(options.get("fieldname_map", {}))
        wanted = _renamed(keys, rename, schema)
        lists = tuple(rename.get(key, key) for key in keys if _is_list(key, schema))
        rename |= {LENGTHS + key: LENGTHS + name for key, name in rename.items() if name in lists}
        transforms = tuple((transform, takes_rng(transform)) for transform in transforms_of(options))
        ragged = {rename.get(k, k): rename.get(n, n) for k, n in view.sequences(schema).items() if options["ragged"]}
        if options["ragged"] and not (ragged or lists):
            raise SchemaError(
                f"ragged: {type(view).__name__} gives no sequences that differ in length, or not how long they are; "
                "leave it out, or ask for whole episodes, windows, sequence_fields or timeline=True"
            )
        tuple_names = names_of("to_named_tuple", options.get("to_named_tuple")) or ()
        _check_tuple_names(tuple_names)
        groups = {key.split(".")[0] for key in wanted}
        for name in tuple_names:
            if name not in wanted and name not in groups and not transforms:
                raise schema.unknown(name, "to_named_tuple", sorted({*wanted, *groups}))
        return cls(
            *(meta, indices, options["return_weights"], rename, tuple_names, transforms),
            widened=frozenset(
                rename.get(k, k) for k in keys if options["expand_scalars"] and _is_number(k, view, schema)
            ),
            ragged=ragged,
            lists=lists,
            jagged=options["ragged"],
            nested=any("." in key for key in wanted),
            format=options["format"],
        )

    def transformed(self, batch: Any, rng: Callable[[], np.random.Generator]) -> Any:
        """The batch that the user's transforms make of this one. Raises SchemaError where one returns None."""
        if not self.transforms:
            return batch
        generator = rng() if any(takes_generator for _, takes_generator in self.transforms) else None
        for transform, takes_generator in self.transforms:
            batch = transform(batch, rng=generator) if takes_generator else transform(batch)
            if batch is None:
                raise SchemaError(f"transform: {transform!r} returned None, expected the batch; return it")
        if self.tuple_names and not isinstance(batch, dict):
            raise SchemaError(
                f"transform: it returned {type(batch).__name__}, and to_named_tuple makes its tuple of a dict; leave "
                "one out"
            )
        return batch


def _renamed(keys: list[str], names: Mapping[Any, Any], schema: Schema) -> list[str]:
    """The keys of a batch under their new names. Raises SchemaError where two coincide, or one is unknown."""
    for key, name in names.items():
        if key not in keys:
            raise schema.unknown(key, "fieldname_map", keys)
        if not isinstance(name, str):
            raise SchemaError(f"fieldname_map: {key!r} is to be {name!r}, expected a name")
    new_names = [names.get(key, key) for key in keys]
    new_names += [LENGTHS + names.get(key, key) for key in keys if _is_list(key, schema)]
    twice = sorted({key for key in new_names if new_names.count(key) > 1})
    if twice:
        raise SchemaError(f"two keys of the batch would be {twice[0]!r}; leave one out, or rename it by fieldname_map")
    return new_names


def takes_rng(transform: Transform) -> bool:
    """Whether a transform has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # of some functions written in C the signature is unknown
        return False


def _is_list(key: str, schema: Schema) -> bool:
    """Whether a key of a batch is of a field of lists."""
    names = (key, *(key.removeprefix(prefix) for prefix in ("next_", "seq_")))
    return any(name in schema.fields and schema.fields[name].is_list for name in names)


def _is_number(key: str, view: View, schema: Schema) -> bool:
    """Whether a key of a batch has one number for each item or step."""
    key = getattr(view, "reward", key) if key in ("_return", "_discount") else key  # they have the axes of the reward
    name = key if key in schema.all else key.removeprefix("next_").removeprefix("seq_")
    field = schema.all.get(name)
    return key in NUMBERS if field is None else not field.shape and field.storage.kind != "U"


def require_known(options: Iterable[str], names: Collection[str], offered: Collection[str] = ()) -> None:
    """Raise SchemaError for an option that is none of `names`, with the closest of these, or of those `offered`."""
    for name in options:
        if name not in names:
            likely = [*(offered or names)]
            nearest = f"the closest are {', '.join(map(repr, closest(name, likely, 4, 0)))}"
            raise SchemaError(f"option {name!r} is unknown; {did_you_mean(name, likely) or nearest}")


def _split_by_field(schema: Schema, options: Parsed) -> dict[str, Any]:
    """The condition of `filter_meta` by which a split by a meta field chooses its part; {} for other splits."""
    name, part = options.get("split"), options.get("part")
    if not isinstance(name, str):
        return {}
    if name not in schema.meta_fields:
        raise schema.unknown(name, "split", schema.meta_fields)
    if part is None or name in (options.get("filter_meta") or {}):
        why = "no value of it as part" if part is None else "a filter_meta of it too"
        raise SchemaError(f"split: got the meta field {name!r} and {why}; give split={name!r}, part=value alone")
    return {name: part}


def _flat(schema: Schema, conditions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Conditions by the dotted names of fields, from a dict that may have a dict for each group."""
    flat: dict[str, Any] = {}
    if not isinstance(conditions, Mapping | None):
        raise SchemaError(f"filter: got {conditions!r}, expected a dict of field names and conditions")
    for name, condition in (conditions or {}).items():
        nested = isinstance(condition, Mapping) and name not in schema.all
        flat |= {f"{name}.{k}": v for k, v in _flat(schema, condition).items()} if nested else {name: condition}
    return flat


class NamedBatch(tuple[Any, ...]):
    """The base class of batches as named tuples. It pickles by its names, so any worker can send one."""

    _fields: tuple[str, ...] = ()
    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return make_tuple, (self._fields, tuple(self))


@lru_cache(maxsize=64)
def tuple_type(keys: tuple[str, ...]) -> Any:
    """The class of named tuples of these keys."""
    base = namedtuple("Batch", [tuple_name(key) for key in keys])  # type: ignore[misc]
    return type("Batch", (NamedBatch, base), {"__slots__": (), "_fields": base._fields})


def make_tuple(keys: tuple[str, ...], values: Iterable[Any]) -> Any:
    """A batch as a named tuple."""
    return tuple_type(keys)._make(values)


def tuple_name(key: str) -> str:
    """The name of a key in a named tuple: without leading underscores, and with one appended to a Python keyword."""
    name = key.lstrip("_").replace(".", "_")
    return f"{name}_" if iskeyword(name) else name


def _check_tuple_names(keys: tuple[str, ...]) -> None:
    """Raise SchemaError where a key gives no valid name, or two keys give the same."""
    names = [tuple_name(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if not name.isidentifier():
            raise SchemaError(f"to_named_tuple: {key!r} is no name that a tuple can have; rename it by fieldname_map")
        if names.count(name) > 1:
            same = [k for k, n in zip(keys, names, strict=True) if n == name]
            raise SchemaError(
                f"to_named_tuple: {same} would all be {name!r}; leave all but one out, or rename them by fieldname_map"
            )
