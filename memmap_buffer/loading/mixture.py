"""Batches of items of several unlike sources, each with a reader of its own: their epochs, and how they are joined."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memmap_buffer.dtypes import Array, to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.items.epoch import Epoch, FolderState, Handing, folder_states, require_same
from memmap_buffer.items.shuffle import Permutation, Quota
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.batches import Batch, finished, form_of, rng_of
from memmap_buffer.loading.distributed import anchors_of
from memmap_buffer.loading.epochs import CHUNK, EpochSampler, EpochState, OrderedSampler, whole_number
from memmap_buffer.schema import flatten, nest
from memmap_buffer.views.anchors import Anchors, MixedAnchors

if TYPE_CHECKING:
    from typing_extensions import Self

PRESENT = "_present_"  # before a key: where each item has it
SOURCE = "_source"  # the number of each item's source
OF_NO_STEP = ("_steps", "_indices", "_index")  # keys that name episodes: -1 where there is none
MAX_ITEMS = 2**62


# Epochs


class Chances:
    """The source of each item by chance: exact shares in a random order, so that no source repeats an item too early.

    Args:
        weights: (S,) positive.
        items: how many the epoch has; those beyond follow in exact shares.
        seed: whole numbers that choose the order.
    """

    def __init__(self, weights: Sequence[float], items: int, *seed: int) -> None:
        self._quota, self._items, self._seed = Quota(weights), items, seed

    def turns(self, i: IntArray) -> tuple[IntArray, IntArray]:
        """The source of each item number (B,), and the number of the item in the order of that source."""
        source, item = self._quota.turns(i)
        block = np.where(i < self._items, i // CHUNK, -1)
        for number in np.unique(block[block >= 0]).tolist():
            first, mine = number * CHUNK, np.flatnonzero(block == number)
            size = min(CHUNK, self._items - first)
            sources = self._quota.turns(first + Permutation(size, *self._seed, number)(np.arange(size)))[0]
            is_of = sources == np.arange(self._quota.folders)[:, None]
            items = self._quota.num_given(first)[:, None] + np.cumsum(is_of, axis=1) - 1
            within = i[mine] - first
            source[mine] = sources[within]
            item[mine] = items[source[mine], within]
        return source, item


class MixtureEpoch(Handing):
    """An epoch of several sources.

    Args:
        seed, number: its order.
        parts: the epoch of each source, of which it gives as many items as are its share.
        items: how many it has.
        begun: how many of them were handed out before, by another process.
    """

    def __init__(self, seed: int, number: int, parts: Mapping[str, Epoch], items: int, begun: int = 0) -> None:
        super().__init__(number, begun, items)
        self.seed, self.parts = seed, parts

    def state(self) -> dict[str, Any]:
        """Where it stands, in numbers, strings and lists."""
        position = {"seed": self.seed, "epoch": self.number, "delivered": self.delivered, "items": self.items}
        return {**position, "sources": {name: part.state() for name, part in self.parts.items()}}


class MixtureState(NamedTuple):
    """The state of a mixture: its seed, the number of its epoch, and of one that is begun how far it is."""

    seed: int
    number: int
    delivered: int
    items: int
    parts: Mapping[str, EpochState] | None
    shares: Mapping[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> MixtureState:
        """As a sampler told it. Raises TypeError, ValueError, KeyError or AttributeError for anything else."""
        parts = state["sources"]
        parts = None if parts is None else {name: EpochState.of(part) for name, part in parts.items()}
        seed, number, delivered, items = (whole_number(state[name]) for name in ("seed", "epoch", "delivered", "items"))
        return cls(seed, number, delivered, items, parts, {name: state[name] for name in ("shares", "weights")})


class MixtureSampler(EpochSampler[MixtureEpoch]):
    """Epochs in which each source has its share of every batch, and goes round in an order of its own.

    Args:
        members: name -> the sampler of a source, of which the order is taken.
        weights: (S,) the shares.
        exact: whether every run of items has the shares; else each item is of a source by chance.
        length: how long an epoch is: until the "longest" or "shortest" source was gone round once, or so many items.
        how: the others of `EpochSampler`.
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
        super().__init__(next(iter(members.values())).reader.folders, **how)
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
        """How many items an epoch of sources of these sizes has."""
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
        """A batch whose items have their random numbers, where there is a use for them."""
        members = zip(self.members.values(), batch.parts, epoch.parts.values(), strict=True)
        cropped = [member.reader.crop(part, partial(of.generator, first)) for member, part, of in members]
        return MixedAnchors(batch.source, tuple(cropped))

    # Where it stands

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
        """The rest of an epoch that a state tells of."""
        assert state.parts is not None
        if [*state.parts] != [*self.members]:
            raise SchemaError(f"load_state_dict: the epoch is of {[*state.parts]}, this mixture of {[*self.members]}")
        if state.shares != self._shares:
            raise SchemaError(f"load_state_dict: the epoch has {state.shares}, this mixture {self._shares}; give those")
        parts = {name: member._rebuilt(state.parts[name], on_stale) for name, member in self.members.items()}
        return MixtureEpoch(state.seed, state.number, parts, state.items, state.delivered)

    def _of_rank_0(self, epoch: MixtureEpoch, state: dict[str, Any], asked: Sequence[Any]) -> MixtureEpoch:
        if state != self._state_of(epoch):
            epoch = self._rebuilt(MixtureState.of(state), "raise")
        self.seed = epoch.seed
        return epoch

    def _folder_states(self) -> dict[str, dict[int, FolderState]]:
        return {name: folder_states(member.reader.folders) for name, member in self.members.items()}

    def _require_same(self, ranks: Sequence[tuple[str, Any]]) -> None:
        others = [[*states] for _, states in ranks if [*states] != [*self.members]]
        if others:
            raise SchemaError(f"this rank mixes {[*self.members]}, another {others[0]}; give all the same sources")
        for name, member in self.members.items():
            require_same([(host, states[name]) for host, states in ranks], member.reader.folders)


def _seed_of(seed: int, number: int) -> int:
    """The seed of a source, whole."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])


# Joining


class Column(NamedTuple):
    """A key of the joined batch.

    Attributes:
        shape: of an item, the most of any source along each axis.
        dtype: that holds the values of all.
        unlike: which axes are longer in one source than in another; None where all have the key, of one shape.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unlike: tuple[bool, ...] | None


class MixtureDataset:
    """Items of several sources, read by the anchors that a `MixtureSampler` gives.

    Args:
        readers: name -> what reads the items of a source, as arrays.
        format: "torch" or "numpy".

    Attributes:
        names: of the sources, by their numbers.

    Raises:
        SchemaError: a key has other axes in another source.
        NotEnoughDataError: a source is empty.
    """

    def __init__(self, readers: Mapping[str, BatchReader], format: str) -> None:
        self.names = tuple(readers)
        self._readers, self._format = [*readers.values()], format
        self._columns = self._all_columns()

    def __len__(self) -> int:
        return sum(len(reader.index()) for reader in self._readers)

    def by_anchors(self) -> Self:
        """A copy for processes that take no positions: it pickles without the indices."""
        other = copy.copy(self)
        other._readers = [reader.by_anchors() for reader in self._readers]
        return other

    def __getitems__(self, batch: Any) -> Batch:
        """The batch at some anchors."""
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
        """The items of one source: key -> (n, …), as its transforms leave them."""
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
        """The items of a source. Raises SchemaError: its transform gave other keys than for the first item."""
        axes = {key: values.ndim for key, values in columns.items()}
        if axes != self._axes[number]:
            raise SchemaError(
                f"source {self.names[number]!r}: got keys of {axes} axes, and {self._axes[number]} for its first item; "
                "let its transform give the same for all"
            )
        return columns

    def _all_columns(self) -> dict[str, Column]:
        """The keys of the joined batch, found by one item of each source."""
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
        groups = {key[:at] for key in keys for at, character in enumerate(key) if character == "."}
        for key in keys:
            if key in own or key in groups:
                also = "a group of another" if key in groups else "made by the mixture"
                raise SchemaError(f"{key!r} is a key of one source, and {also}; rename it in a transform")
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
        """The columns of all sources, zeros where an item has less, and which entries each item has."""
        for key, (shape, dtype, unlike) in self._columns.items():
            each = [(rows, part[key]) for rows, part in parts if key in part]
            longest = tuple(map(max, zip(shape, *(values.shape[1:] for _, values in each), strict=True)))
            dtype = common_dtype(key, [dtype, *(values.dtype for _, values in each)])  # texts may be longer than ever
            out = np.full((size, *longest), -1 if key in OF_NO_STEP else dtype.type(), dtype)
            for rows, values in each:
                out[_place(rows, values.shape[1:])] = values
            yield key, out
            if unlike is not None:
                present = np.zeros((size, *np.where(unlike, longest, 1)), np.bool_)
                for rows, values in each:
                    present[_place(rows, np.where(unlike, values.shape[1:], 1))] = True
                yield PRESENT + key, present


def common_dtype(key: str, dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype that holds the values of all. Raises SchemaError: numbers and texts, say, have none."""
    kinds = {dtype.kind for dtype in dtypes}
    dtype = np.result_type(*dtypes) if kinds <= {*"biufc"} or kinds == {"U"} else np.dtype(object)
    if dtype.kind == "O" or (dtype.kind == "f" and "f" not in kinds):  # int64 and uint64 have none that is exact
        names = [*dict.fromkeys(each.name for each in dtypes)]
        raise SchemaError(f"{key!r} is of {names}; give the sources a transform that makes them alike")
    return dtype


def _place(rows: IntArray, lengths: Iterable[int]) -> Any:
    """The index of so many entries along each axis of some items."""
    return rows, *map(slice, lengths)
