"""In which order a loader draws, which part of it this process gives, and where it stands.

An epoch is fixed by (seed, epoch) and the episodes that exist when it begins. Every item of it has a number in its
order, from which `Order` computes its position; so any part of it can be drawn without what comes before.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.choices import OnStale, Tail, check_choice
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.format.host import host_name
from memmap_buffer.format.syscalls import renew_after_fork
from memmap_buffer.items.epoch import Epoch, EpochSnapshot, folder_states, require_same
from memmap_buffer.items.index import Index
from memmap_buffer.items.live_index import LiveIndex
from memmap_buffer.items.rank_partition import RankPartition, Ranks
from memmap_buffer.items.shuffle import BLOCKS, BlockShuffle, Order, Permutation, Quota, Shuffle
from memmap_buffer.loading.batch_group import BatchGroup, CurrentBatch, PlannedBatch
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.read_ahead import Readahead
from memmap_buffer.loading.shuffle_window import CacheUse, smallest_bound, steps_of, traffic_of
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.folders import where_of

CALM = 8  # batches without a change in between, after which several are planned at once
CHUNK = 1 << 14  # items that are drawn together: numpy's cost per call vanishes in it
WINDOW_BYTES = 256 << 20  # items that `shuffle="block"` shuffles together unless told otherwise take so many
SHUFFLES = (False, True, "block")
SMALLER = (
    "%s: cache_bytes=%d has room for windows of %d items: shuffle='block' mixes so many, from %d places, and not %d "
    "from %d; give more to mix more"
)
log = logging.getLogger("memmap_buffer")


def grouped(reader: BatchReader, chunks: Iterator[tuple[Anchors, int]]) -> Iterator[PlannedBatch]:
    """Batches of so many items, in groups that grow as they are read."""
    count = 1
    for anchors, size in chunks:
        at = 0
        while at < anchors.size:
            group = BatchGroup(reader, anchors.where(slice(at, at + count * size)), size)
            yield from group.batches()
            at, count = at + count * size, group.next_count


class EpochState(NamedTuple):
    """The state of an epoch that was begun: its order, the items handed out of it, and the episodes that it covers."""

    seed: int
    number: int
    delivered: int
    shuffle: Shuffle
    snapshot: EpochSnapshot

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> EpochState:
        """As `Epoch.state` told it. Raises TypeError, ValueError or KeyError for anything else."""
        seed, number, delivered, window = (_whole(state[key]) for key in ("seed", "epoch", "delivered", "window"))
        shuffle = Shuffle(state["shuffle"], window, _whole(state.get("blocks", BLOCKS), 1))
        return cls(seed, number, delivered, shuffle, EpochSnapshot.from_state(state))


class EpochSampler:
    """A PyTorch batch sampler of `Anchors`, or parts of many; each epoch sees the episodes published since.

    Args:
        reader: reads the batches.
        batch_size: items a batch.
        drop_last: leave out an incomplete last batch.
        shuffle: False; True: without replacement, in an order of (seed, epoch); "block": see `BlockShuffle`.
        window: with "block", how many items are shuffled together; None: as many as take 256 MiB.
        seed: fixes every epoch; None: a state that is loaded has it.
        weights: one per folder: each batch has exactly these shares, every folder going round in an order of its own;
            an epoch has as many items as without.
        ranks: the processes that share each epoch.
        tail: how items are shared that do not divide by the ranks, see `RankPartition`.

    Attributes:
        plans: whether batches are planned in groups, which this process reads itself; worker processes get anchors.

    Raises:
        SchemaError: options that contradict each other.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        batch_size: int,
        shuffle: bool | str,
        drop_last: bool,
        seed: int | None,
        weights: Sequence[float] | None = None,
        window: int | None = None,
        ranks: Ranks | None = None,
        tail: str = "pad",
    ) -> None:
        check_choice("tail", tail, Tail)
        _check_shuffle(shuffle, window, reader.selection.weight_by)
        self.reader = reader
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.weights = weights
        self.window = window
        self.ranks = ranks or Ranks()
        self.tail = tail
        self.epoch = 0
        self.plans = False
        self._on_stale = reader.on_stale
        self._loaded: Epoch | None = None
        self._begun: Epoch | None = None
        self._ready = self._has_told = False

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch; without it epochs count up by themselves."""
        self.epoch = epoch
        if self._loaded is not None and self._loaded.number != epoch:
            self._loaded = None

    def __len__(self) -> int:
        """Batches of the next epoch, as far as it can be told now.

        Of one that is gone on with all are counted, as PyTorch's stateful loaders do, by which Lightning ends its loop.
        """
        return self.num_batches(self.ranks.now())

    def num_batches(self, ranks: Ranks) -> int:
        """Batches of the next epoch that any rank gives; all batches for `Ranks()`."""
        split = self._split(self._loaded or self._new(), ranks)
        return split.before + len(split)

    def __iter__(self) -> Iterator[Anchors | PlannedBatch]:
        epoch = self._begun if self._ready else None
        epoch, self._ready = epoch or self.begin(), False
        yield from self._given(epoch, self.plans)

    def whole(self) -> Iterator[Anchors | PlannedBatch]:
        """All batches of the next epoch, for a trainer that shares them among the ranks itself.

        What it covers is fixed at once, as `begin` does, and all ranks must call it. `state_dict` does not count them.
        """
        epoch = self._agreed()
        epoch.partition = self._split(epoch, Ranks())
        self._begun, self._ready = None, False
        # Of several ranks each throws away what the others take.
        return self._given(epoch, self.plans and self.ranks.now().world_size == 1)

    def complete(self, batch_size: int, drop_last: bool) -> EpochSampler:
        """Another of the same order of which no item is left out or repeated, to predict with."""
        other = copy.copy(self)
        other.batch_size, other.drop_last, other.tail = batch_size, drop_last, "uneven"
        other._begun, other._ready = None, False
        return other

    def begin(self) -> Epoch:
        """Fix the items that the next iteration draws.

        A loader does so at once, and not when its first batch is drawn: the ranks talk here, another thread may draw,
        and with workers a DataLoader asks for two iterators, of which it uses one.
        """
        epoch = self._agreed()
        epoch.partition = self._split(epoch, self.ranks.now())
        epoch.traffic = traffic_of(self.reader.folders)
        self._begun, self._ready = epoch, True
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in numbers, strings and lists: the items handed out, and the episodes of the epoch.

        The items are counted over all ranks, which are taken to be equally far.
        """
        epoch = self._begun or self._loaded
        if epoch is None or epoch.over:
            return {"seed": self.seed, "epoch": self.epoch, "delivered": 0, "shuffle": self.shuffle, "folders": None}
        return epoch.state()

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Let the next epoch be the rest of the one that `state_dict` told of, in any process.

        For the same number of ranks it is the same batches, for another the same items. Episodes published since are
        no part of it.

        Args:
            on_stale: "raise", or "redraw": items of episodes that are gone are drawn from what there is.

        Raises:
            StaleEpisodeError: episodes of that epoch are gone.
            SchemaError: it is no such state, or one of other options or folders.
        """
        check_choice("load_state_dict: on_stale", on_stale, OnStale)
        try:
            kind, told = state["shuffle"], None if state["folders"] is None else EpochState.of(state)
            seed, number = _whole(state["seed"]), _whole(state["epoch"])
        except (TypeError, ValueError, KeyError) as error:
            text = f"load_state_dict: got {state!r}, expected what state_dict gave ({error!r})"
            raise SchemaError(text) from error
        if kind != self.shuffle:
            raise SchemaError(
                f"load_state_dict: the epoch has shuffle={kind!r}, this loader {self.shuffle!r}; give that"
            )
        self._loaded = told and self._rebuilt(told, on_stale)
        self.seed, self.epoch, self._on_stale = seed, number, on_stale
        self._begun, self._ready = None, False

    def _rebuilt(self, told: EpochState, on_stale: str) -> Epoch:
        """The rest of an epoch that a state tells of."""
        index = told.snapshot.index(self.reader.selection, self.reader.folders, on_stale)
        use = self._cache_use(index)
        if use is not None:
            use.require(told.shuffle, "the epoch was begun with these")
        return Epoch(told.seed, told.number, told.shuffle, index, snapshot=told.snapshot, begun=told.delivered)

    def _new(self) -> Epoch:
        index = self.reader.index(refresh=True)
        seed = self.seed or 0  # of one without a seed the batches are counted, and no more
        if self.shuffle != "block":
            return Epoch(seed, self.epoch, Shuffle(self.shuffle), index)
        asked = Shuffle("block", self.window or _default_window(self.reader, index))
        return Epoch(seed, self.epoch, self._fitted(asked, self._cache_use(index)), index)

    def _cache_use(self, index: Index) -> CacheUse | None:
        """What an epoch in blocks takes in the cache; None where nothing is given back."""
        bound = smallest_bound(self.reader.folders)
        if self.shuffle != "block" or bound is None:
            return None
        return CacheUse.of(self.reader, index, len(self.weights or [1]), bound)

    def _fitted(self, asked: Shuffle, use: CacheUse | None) -> Shuffle:
        """The shuffle that was asked for, or one of smaller windows, of which the log tells once."""
        if use is None:
            return asked
        ranks = self.ranks.now()
        if ranks.world_size > 1 and not ranks.connected:  # each has a cache of its own, and all need one order
            use.require(asked, "ranks that are given cannot agree on smaller ones; initialise torch.distributed")
            return asked
        found = use.fitted(asked)
        if found != asked and not self._has_told:
            self._has_told = True
            where = where_of(self.reader.folders.storages[0])
            log.warning(SMALLER, where, use.limit, found.window, found.blocks, asked.window, asked.blocks)
        return found

    def _agreed(self) -> Epoch:
        """The next epoch, or the one of rank 0 where that is another. All ranks raise if one cannot give its part."""
        ranks = self.ranks.now()
        ranks.require_seed(self.seed)
        if not ranks.connected:
            return self._loaded or self._new()
        try:
            return self._agree(ranks)
        except Exception:  # of all ranks, so all try again: a writer or a shard came or went in this moment
            return self._agree(ranks)

    def _agree(self, ranks: Ranks) -> Epoch:
        epoch, stands = self._loaded, None
        failed: Exception | None = None
        try:
            epoch = epoch or self._new()
            stands = host_name(), folder_states(self.reader.folders), None if self._loaded else epoch.shuffle
        except Exception as error:  # an OSError or one of a user's filter, too: the others wait for this rank
            epoch, failed = None, error
        state, told = ranks.agree({} if epoch is None else epoch.state()), ranks.gather(stands)
        with all_or_none(ranks):
            if failed is not None:
                raise failed
            if None not in told:
                require_same([(host, states) for host, states, _ in told], self.reader.folders)
        windows = [shuffle for *_, shuffle in told if shuffle is not None]
        if told[0][-1] is not None:  # a new epoch, whose windows the smallest cache must hold
            state |= min(windows, key=lambda shuffle: shuffle.window).state()
        assert epoch is not None
        with all_or_none(ranks):
            if state != epoch.state():
                epoch = self._rebuilt(EpochState.of(state), self._on_stale)
        ranks.require_equal(0 if self.tail == "uneven" else len(self._split(epoch, ranks)))
        self.seed = epoch.seed
        return epoch

    def _split(self, epoch: Epoch, ranks: Ranks) -> RankPartition:
        return RankPartition(len(epoch.index), epoch.begun, self.batch_size, ranks, self.drop_last, self.tail)

    def _given(self, epoch: Epoch, plans: bool) -> Iterator[Anchors | PlannedBatch]:
        """The batches of an epoch, which counts from the first on: a DataLoader drops the first of two iterators."""
        self.epoch, self._loaded, self._on_stale = epoch.number + 1, None, self.reader.on_stale
        bounds: Sequence[int] = ()
        quota = None
        if self.weights is not None:
            bounds, quota = folder_bounds(self.reader, epoch.index, len(self.weights)), Quota(self.weights)
        order = Order(epoch.index, bounds, epoch.shuffle, quota, epoch.seed, epoch.number)
        if plans and self.reader.reads_together:
            yield from grouped(self.reader, self._chunks(epoch, order))
            return
        for anchors, size in self._chunks(epoch, order):
            for at in range(0, anchors.size, size):
                yield anchors.where(slice(at, at + size))

    def _chunks(self, epoch: Epoch, order: Order) -> Iterator[tuple[Anchors, int]]:
        """The anchors of many batches at a time, and how many items each of these has."""
        assert epoch.partition is not None
        ahead = self._ahead(epoch)
        chunks = epoch.partition.chunks(CHUNK)
        for numbers in chunks if ahead is None else ahead.asked(chunks):
            anchors, size = epoch.index.locate(order.positions(numbers.ravel())), numbers.shape[1]
            if not self.reader.selection.random:
                yield anchors, size
                continue
            for i, first in enumerate(numbers[:, 0].tolist()):
                part = anchors.where(slice(i * size, (i + 1) * size))
                yield self.reader.crop(part, partial(epoch.generator, first)), size

    def _ahead(self, epoch: Epoch) -> Readahead | None:
        """With "block", the read-ahead of its windows; mixtures have none."""
        turn = epoch.shuffle.turn(len(epoch.index), epoch.seed, epoch.number, 0)
        if self.weights is not None or not isinstance(turn, BlockShuffle):
            return None
        return Readahead(self.reader.selection, self.reader.folders, epoch.index, turn)


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """Where the block raises on one rank, all of them raise."""
    try:
        yield
    except Exception as error:
        ranks.require_equal(0, error)
        raise
    ranks.require_equal(0)


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number from {least}")
    return value


def _default_window(reader: BatchReader, index: Index) -> int:
    """The number of items whose fields take `WINDOW_BYTES`."""
    row = sum(field.itemsize for field in reader.folders.schema.fields.values())
    return max(1, WINDOW_BYTES * len(index) // max(1, steps_of(index) * row))


def _check_shuffle(shuffle: object, window: object, weight_by: object) -> None:
    if shuffle not in SHUFFLES:
        raise SchemaError(f"shuffle: got {shuffle!r}, expected one of {', '.join(map(repr, SHUFFLES))}")
    if window is not None and (shuffle != "block" or type(window) is not int or window < 1):
        raise SchemaError(
            f"shuffle_window: got {window!r} with shuffle={shuffle!r}, expected how many items shuffle='block' "
            "shuffles together"
        )
    if weight_by is not None and shuffle is not True:
        raise SchemaError(f"weight_by={weight_by!r} draws at random, with replacement; give shuffle=True to the loader")


class UniformSampler:
    """Batches drawn with replacement, as `sample` gives them; the shares of weighted folders are exact."""

    def __init__(self, reader: BatchReader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self._quota = None if weights is None else Quota(weights)
        self._one_by_one = not reader.reads_together
        self._drawn = 0
        self._seen, self._calm = -1, CALM  # the change counter at the last batch; batches since it rose
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Begin anew what threads share; in a forked child another one may have been in the middle."""
        self._turn = threading.RLock()
        self._of: tuple[object, int] | None = None  # what the group was drawn from
        self._group: BatchGroup | None = None
        self._waiting: list[PlannedBatch] = []
        self._live: LiveIndex | None = None  # once the folder was seen to be written to

    def next(
        self, batch_size: int, rng: np.random.Generator, alone: bool = False
    ) -> Anchors | PlannedBatch | CurrentBatch:
        """The next batch to be read; `alone`: it does not depend on those before. Raises NotEnoughDataError."""
        if alone or self._one_by_one:
            return self._drawn_now(batch_size, rng, alone)
        with self._turn:
            live = self._followed()
            if live is not None and self._calm < CALM:
                return CurrentBatch(self.reader, live.draw(batch_size, rng), live.changes)
            of = (self._index() if live is None else live.changes), batch_size
            if self._of != of:
                self._drawn -= sum(batch.size for batch in self._waiting)  # so that shares go on where they stood
                self._of, self._group, self._waiting = of, None, []
            if not self._waiting:
                count = 1 if self._group is None else self._group.next_count
                self._group = BatchGroup(self.reader, self._drawn_now(count * batch_size, rng), batch_size)
                self._waiting = self._group.batches()[::-1]
            return self._waiting.pop()

    def _followed(self) -> LiveIndex | None:
        """What there is now, at the cost of what changed, since the one folder was first seen to be written to.

        None where only an index can tell, or where nothing is there.
        """
        reader = self.reader
        if self._quota is not None or not reader.folders.single:
            return None
        before, (self._seen,) = self._seen, reader.folders.changes
        self._calm = 0 if before not in (-1, self._seen) else self._calm + 1
        live = self._live
        if (live is None and self._calm >= CALM) or reader.frozen:
            return None
        if live is None or live.storage is not reader.folders.storages[0]:
            if not LiveIndex.follows(reader.selection, reader.folders):
                return None
            live = self._live = LiveIndex(reader.selection, reader.folders)
        return live if live.follow() and len(live) else None

    def _index(self) -> Index:
        """What there is now. Raises NotEnoughDataError."""
        index = self.reader.index(refresh=True)
        if not len(index):
            raise self.reader.nothing_to_read()
        return index

    def _drawn_now(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> Anchors:
        reader = self.reader
        with self._turn:
            live = self._followed()
            drawn = None if live is None else live.draw(batch_size, rng)
        if drawn is not None:
            return reader.crop(drawn, lambda: rng)
        index = self._index()
        if self._quota is None:
            anchors = index.draw(batch_size, rng)
            return reader.crop(anchors, lambda: rng) if reader.selection.random else anchors
        begin = 0 if alone else self._drawn
        folder, _ = self._quota.turns(np.arange(begin, begin + batch_size))
        chosen = np.empty(batch_size, np.int64)
        for number, (low, high) in enumerate(pairwise(folder_bounds(reader, index, self._quota.folders))):
            mine = np.flatnonzero(folder == number)
            chosen[mine] = index.pick(rng.random(len(mine)), low, high)
        self._drawn += 0 if alone else batch_size
        return reader.crop(index.locate(chosen), lambda: rng)

    def distinct(self, batch_size: int, rng: np.random.Generator) -> Anchors:
        """The anchors of one batch, no item of it twice. Raises NotEnoughDataError: there are not so many."""
        reader = self.reader
        index = reader.index(refresh=True)
        reader.require(index)
        if self._quota is not None or index.weight_sums is not None:
            raise SchemaError("replacement=False draws every item alike; leave out weights and weight_by")
        if batch_size > len(index):
            path = reader.folders.storages[0].path
            text = f"{path}: replacement=False: got batch_size {batch_size}, there are {len(index)} items; lower it"
            raise NotEnoughDataError(text, items=len(index))
        numbers = Permutation(len(index), int(rng.integers(2**63)))(np.arange(batch_size))
        return reader.crop(index.locate(numbers), lambda: rng)


def folder_bounds(reader: BatchReader, index: Index, num_folders: int) -> list[int]:
    """The positions in an index at which the items of each folder begin.

    Raises:
        NotEnoughDataError: a folder has none, so it cannot give its share.
    """
    bounds: list[int] = index.bounds(np.arange(num_folders + 1)).tolist()
    for number in range(num_folders if index.folder is not None and len(index) else 0):
        if bounds[number] == bounds[number + 1]:
            path = reader.folders.storages[number].path
            raise NotEnoughDataError(f"{path}: folder {number} has nothing to give its share of a batch", folder=number)
    return bounds
