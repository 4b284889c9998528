"""Batches with items of several unlike sources, each with a reader of its own: their epochs, and how they are joined.

`MixtureSampler` draws the items of an epoch from the sources, `MixtureDataset` reads and joins them; `api.mixture`
gives both to an `EpisodeLoader`. The items of a source that lacks a key, or has shorter ones, are padded with zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memmap_buffer.dtypes import Array, to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.items.epoch import Epoch, Handing
from memmap_buffer.items.shuffle import Permutation, Quota, Shuffle
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.batches import Batch, finished, form_of, rng_of
from memmap_buffer.loading.distributed import anchors_of
from memmap_buffer.loading.epochs import CHUNK, EpochSampler, EpochState, OrderedSampler, smallest_windows, whole_number
from memmap_buffer.schema import flatten, nest
from memmap_buffer.views.anchors import Anchors, MixedAnchors

if TYPE_CHECKING:
    from typing_extensions import Self

PRESENT = "_present_"  # prefix of a mask: which entries of the key each item has
SOURCE = "_source"  # the number of each item's source
OF_NO_STEP = ("_steps", "_indices", "_index")  # keys that name episodes or steps, padded with -1
MAX_ITEMS = 2**62


# Epochs


class Chances:
    """The source of each item in random order, with exact shares, so that no source repeats an item too early.

    Args:
        weights: (S,) the shares of the sources, positive.
        items: the number of items of the epoch. Items with higher numbers come in the order of `Quota`.
        seed: whole numbers that fix the order.
    """

    def __init__(self, weights: Sequence[float], items: int, *seed: int) -> None:
        self._quota, self._items, self._seed = Quota(weights), items, seed

    def turns(self, i: IntArray) -> tuple[IntArray, IntArray]:
        """For item numbers (B,): (B,) the source of each, and (B,) its number among the items of that source."""
        source, item = self._quota.turns(i)
        block = np.where(i < self._items, i // CHUNK, -1)
        for number in np.unique(block[block >= 0]).tolist():
            first, in_block = number * CHUNK, np.flatnonzero(block == number)
            size = min(CHUNK, self._items - first)
            sources = self._quota.turns(first + Permutation(size, *self._seed, number)(np.arange(size)))[0]
            is_of = sources == np.arange(self._quota.folders)[:, None]
            items = self._quota.num_given(first)[:, None] + np.cumsum(is_of, axis=1) - 1
            within = i[in_block] - first
            source[in_block] = sources[within]
            item[in_block] = items[source[in_block], within]
        return source, item


class MixtureEpoch(Handing):
    """An epoch over several sources.

    Args:
        seed, number: fix its order.
        parts: name -> the epoch of a source, of which as many items are given as its share has.
        items: the number of its items.
        begun: how many of them were handed out before, by another process.
    """

    def __init__(self, seed: int, number: int, parts: Mapping[str, Epoch], items: int, begun: int = 0) -> None:
        super().__init__(number, begun, items)
        self.seed, self.parts = seed, parts

    def state(self) -> dict[str, Any]:
        """The state of the epoch, in numbers, strings and lists."""
        position = {"seed": self.seed, "epoch": self.number, "delivered": self.delivered, "items": self.items}
        return {**position, "sources": {name: part.state() for name, part in self.parts.items()}}


class MixtureState(NamedTuple):
    """The parsed state of a `MixtureSampler`; `parts` is None before an epoch has begun."""

    seed: int
    number: int
    delivered: int
    items: int
    parts: Mapping[str, EpochState] | None
    shares: Mapping[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> MixtureState:
        """Parse the state of a sampler. Raises TypeError, ValueError, KeyError or AttributeError for anything else."""
        parts = state["sources"]
        parts = None if parts is None else {name: EpochState.of(part) for name, part in parts.items()}
        seed, number, delivered, items = (whole_number(state[name]) for name in ("seed", "epoch", "delivered", "items"))
        return cls(seed, number, delivered, items, parts, {name: state[name] for name in ("shares", "weights")})


class MixtureSampler(EpochSampler[MixtureEpoch]):
    """Epochs in which each source has its share of the items, and is gone over repeatedly in an order of its own.

    Args:
        members: name -> the sampler of a source, asked only for the order of its items.
        weights: (S,) the shares.
        exact: whether every run of items has the shares; else the source of each item is random.
        length: the length of an epoch: until the "longest" or "shortest" source was gone over once, or a number of
            items.
        how: the other arguments of `EpochSampler`.
    """

    def __init__(
        self,
        members: Mapping[str, OrderedSampler],
        weights: Sequence[float],
        *,
        exact: bool,
        length: str | int,
        **how: Any,
    ) -> None:
        super().__init__({name: member.reader.folders for name, member in members.items()}, **how)
        self.members, self._weights, self._exact, self._length = members, weights, exact, length
        self._shares = {"shares": "exact" if exact else "chance", "weights": [*weights]}
        self.shuffle = next(iter(members.values())).shuffle

    def _new(self) -> MixtureEpoch:
        for number, member in enumerate(self.members.values()):
            member.epoch, member.seed = self.epoch, _seed_of(self.seed or 0, number)
        parts = {name: member._new() for name, member in self.members.items()}
        for name, part in parts.items():
            self.members[name].reader.require(part.index)
        return MixtureEpoch(self.seed or 0, self.epoch, parts, self._items([part.items for part in parts.values()]))

    def _items(self, sizes: Sequence[int]) -> int:
        """The number of items of an epoch, from the number of items of each source."""
        if not isinstance(self._length, str):
            return self._length
        rounds = np.asarray(sizes) * (np.sum(self._weights) / np.asarray(self._weights))
        if not rounds.max() < MAX_ITEMS:
            raise SchemaError(
                f"weights: got {self._weights}, by which the source that takes longest is gone round once in "
                f"{rounds.max():.0e} items; leave out what has next to no share"
            )
        return int(np.ceil(rounds.max() - 1e-6) if self._length == "longest" else np.floor(rounds.min() + 1e-6))

    def _batches_of(self, epoch: MixtureEpoch) -> Iterator[Any]:
        self.epoch, self._loaded = epoch.number + 1, None
        assert epoch.partition is not None
        shares = Quota(self._weights) if self._exact else Chances(self._weights, epoch.items, epoch.seed, epoch.number)
        orders = [member.order_of(epoch.parts[name]) for name, member in self.members.items()]
        for numbers in epoch.partition.chunks(CHUNK):
            source, item = shares.turns(numbers.ravel())
            parts = []
            for i, (order, part) in enumerate(zip(orders, epoch.parts.values(), strict=True)):
                parts.append(part.index.locate(order.positions(item[source == i])))
            chunk = MixedAnchors(source, tuple(parts))
            for row, first in enumerate(numbers[:, 0].tolist()):
                size = numbers.shape[1]
                yield self._with_chance(chunk.where(slice(row * size, (row + 1) * size)), epoch, first)

    def _with_chance(self, batch: MixedAnchors, epoch: MixtureEpoch, first: int) -> MixedAnchors:
        """The anchors of a batch with their random numbers, where a source needs some.

        Args: first: the number, in the epoch, of the batch's first item.
        """
        members = zip(self.members.values(), batch.parts, epoch.parts.values(), strict=True)
        cropped = [
            member.reader.crop(part, partial(epoch_part.generator, first)) for member, part, epoch_part in members
        ]
        return MixedAnchors(batch.source, tuple(cropped))

    # Its state

    def _state_of(self, epoch: MixtureEpoch | None) -> dict[str, Any]:
        if epoch is None:
            position = {"seed": self.seed, "epoch": self.epoch, "delivered": 0, "items": 0, "sources": None}
        else:
            position = epoch.state()
        return {**position, **self._shares}

    def _parsed(self, state: Mapping[str, Any]) -> MixtureState:
        return MixtureState.of(state)

    def _load(self, parsed: MixtureState, on_stale: str) -> None:
        self._loaded = None if parsed.parts is None else self._rebuilt(parsed, on_stale)
        self.seed, self.epoch = parsed.seed, parsed.number

    def _rebuilt(self, state: MixtureState, on_stale: str) -> MixtureEpoch:
        """The rest of an epoch, from its state."""
        assert state.parts is not None
        if [*state.parts] != [*self.members]:
            raise SchemaError(f"load_state_dict: the epoch is of {[*state.parts]}, this mixture of {[*self.members]}")
        if state.shares != self._shares:
            raise SchemaError(f"load_state_dict: the epoch has {state.shares}, this mixture {self._shares}; give those")
        parts = {name: member._rebuilt(state.parts[name], on_stale) for name, member in self.members.items()}
        return MixtureEpoch(state.seed, state.number, parts, state.items, state.delivered)

    def _asked(self, epoch: MixtureEpoch) -> dict[str, Shuffle]:
        return {name: part.shuffle for name, part in epoch.parts.items()}

    def _of_rank_0(self, epoch: MixtureEpoch, state: dict[str, Any], asked: Sequence[Any]) -> MixtureEpoch:
        for name in self.members if asked[0] is not None else ():
            state["sources"][name] |= smallest_windows([shuffles and shuffles[name] for shuffles in asked])
        if state != self._state_of(epoch):
            epoch = self._rebuilt(MixtureState.of(state), "raise")
        self.seed = epoch.seed
        return epoch


def _seed_of(seed: int, number: int) -> int:
    """The seed of the source with this number, a whole number of 64 bits."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])


# Joining


class Column(NamedTuple):
    """A key of the joined batch.

    Attributes:
        shape: the shape of an item: along each axis, the greatest length of any source.
        dtype: a dtype that holds the values of all sources.
        unlike: for each axis whether its length differs between sources; None where the key gets no mask, because all
            sources have it in one shape, or because it begins with "_".
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unlike: tuple[bool, ...] | None


class MixtureDataset:
    """Items of several sources, read at the anchors that a `MixtureSampler` gives.

    Args:
        readers: name -> the reader of a source, of format "numpy".
        format: "torch" or "numpy".

    Attributes:
        names: the names of the sources, by their numbers.

    Raises:
        SchemaError: the number of axes of a key differs between sources.
        NotEnoughDataError: a source is empty.
    """

    def __init__(self, readers: Mapping[str, BatchReader], format: str) -> None:
        self.names = tuple(readers)
        self._readers, self._format = [*readers.values()], format
        self._columns = self._all_columns()

    def __len__(self) -> int:
        return sum(len(reader.index()) for reader in self._readers)

    def by_anchors(self) -> Self:
        """A copy for workers, which get anchors and no positions; it pickles without the indices."""
        other = copy.copy(self)
        other._readers = [reader.by_anchors() for reader in self._readers]
        return other

    def __getitems__(self, batch: Any) -> Batch:
        """The joined batch at some `MixedAnchors` (B,)."""
        anchors = anchors_of(batch)
        assert isinstance(anchors, MixedAnchors), "a mixture is read in the order of its own loader"
        parts = [
            (np.flatnonzero(anchors.source == i), self._as_before(i, self._read(i, part)))
            for i, part in enumerate(anchors.parts)
            if part.size
        ]
        data = form_of(self._format).make({**dict(self._joined(parts, anchors.size)), SOURCE: anchors.source})
        return Batch(nest(data), anchors.size)

    def _read(self, number: int, anchors: Anchors) -> dict[str, Array]:
        """The items of one source: key -> (n, …), as its transforms returned them."""
        reader = self._readers[number]
        batch = finished(reader, reader.read(anchors), partial(rng_of, anchors))
        if not isinstance(batch, dict):
            raise SchemaError(f"source {self.names[number]!r}: its transform gave {type(batch).__name__}, not a dict")
        columns = {key: to_numpy(value) for key, value in flatten(batch).items()}
        wrong = [key for key, values in columns.items() if values.shape[:1] != (anchors.size,)]
        if wrong:
            raise SchemaError(
                f"source {self.names[number]!r}: {wrong[0]!r} has shape {columns[wrong[0]].shape} for {anchors.size} "
                "items; let the transform give one entry an item"
            )
        return columns

    def _as_before(self, number: int, columns: dict[str, Array]) -> dict[str, Array]:
        """The columns as they are. Raises SchemaError: the source has other keys or axes than at its first item."""
        axes = {key: values.ndim for key, values in columns.items()}
        if axes != self._axes[number]:
            raise SchemaError(
                f"source {self.names[number]!r}: got keys of {axes} axes, and {self._axes[number]} for its first item; "
                "let its transform give the same for all"
            )
        return columns

    def _all_columns(self) -> dict[str, Column]:
        """The keys of the joined batch, found by reading the first item of each source."""
        samples = []
        for i, reader in enumerate(self._readers):
            index = reader.index(refresh=True)
            reader.require(index)
            item = reader.crop(index.locate(np.zeros(1, np.int64)), partial(np.random.default_rng, 0))
            samples.append(self._read(i, item))
        self._axes = [{key: values.ndim for key, values in sample.items()} for sample in samples]
        keys = dict.fromkeys(key for sample in samples for key in sample)
        columns = {key: self._column(key, [sample.get(key) for sample in samples]) for key in keys}
        own = [SOURCE, *(PRESENT + key for key, column in columns.items() if column.unlike is not None)]
        groups = {key[:dot] for key in keys for dot, character in enumerate(key) if character == "."}
        for key in keys:
            if key in own or key in groups:
                clash = "a group of another" if key in groups else "made by the mixture"
                raise SchemaError(f"{key!r} is a key of one source, and {clash}; rename it in a transform")
        return columns

    def _column(self, key: str, samples: Sequence[Array | None]) -> Column:
        values = {name: sample for name, sample in zip(self.names, samples, strict=True) if sample is not None}
        axes = {name: sample.ndim - 1 for name, sample in values.items()}
        if len({*axes.values()}) > 1:
            raise SchemaError(f"{key!r} has {axes} axes an item; give the sources a transform that makes them alike")
        sizes = [{*lengths} for lengths in zip(*(sample.shape[1:] for sample in values.values()), strict=True)]
        unlike = tuple(len(lengths) > 1 for lengths in sizes)
        is_mask = key.startswith("_") or not (any(unlike) or len(values) < len(samples))
        dtype = common_dtype(key, [sample.dtype for sample in values.values()])
        return Column(tuple(map(max, sizes)), dtype, None if is_mask else unlike)

    def _joined(self, parts: Sequence[tuple[IntArray, dict[str, Array]]], size: int) -> Iterator[tuple[str, Array]]:
        """(key, column) of the joined batch, zeros (-1 for `OF_NO_STEP`) where an item has no entry; and the masks.

        Args:
            parts: (rows (n,) of the batch, key -> (n, …)) of each source.
            size: B.
        """
        for key, (shape, dtype, unlike) in self._columns.items():
            of_key = [(rows, part[key]) for rows, part in parts if key in part]
            longest = tuple(map(max, zip(shape, *(values.shape[1:] for _, values in of_key), strict=True)))
            dtype = common_dtype(key, [dtype, *(values.dtype for _, values in of_key)])  # texts may be longer by now
            column = np.full((size, *longest), -1 if key in OF_NO_STEP else dtype.type(), dtype)
            for rows, values in of_key:
                column[_place(rows, values.shape[1:])] = values
            yield key, column
            if unlike is not None:
                present = np.zeros((size, *np.where(unlike, longest, 1)), np.bool_)
                for rows, values in of_key:
                    present[_place(rows, np.where(unlike, values.shape[1:], 1))] = True
                yield PRESENT + key, present


def common_dtype(key: str, dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype that holds all values of these dtypes. Raises SchemaError if none does, as for numbers and text."""
    kinds = {dtype.kind for dtype in dtypes}
    dtype = np.result_type(*dtypes) if kinds <= {*"biufc"} or kinds == {"U"} else np.dtype(object)
    if dtype.kind == "O" or (dtype.kind == "f" and "f" not in kinds):  # int64 and uint64 would become float64
        names = [*dict.fromkeys(dtype_of_source.name for dtype_of_source in dtypes)]
        raise SchemaError(f"{key!r} is of {names}; give the sources a transform that makes them alike")
    return dtype


def _place(rows: IntArray, lengths: Iterable[int]) -> Any:
    """The index of the first `lengths` entries along the axes of some rows."""
    return rows, *map(slice, lengths)
