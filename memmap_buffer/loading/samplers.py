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
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.choices import OnStale, Tail, check_choice
from memmap_buffer.errors import MemmapBufferError, NotEnoughDataError, SchemaError
from memmap_buffer.format.host import host_name
from memmap_buffer.format.syscalls import renew_after_fork
from memmap_buffer.items.epoch import Epoch, EpochSnapshot, folder_states, require_same
from memmap_buffer.items.index import Index
from memmap_buffer.items.live_index import LiveIndex
from memmap_buffer.items.rank_partition import RankPartition, Ranks
from memmap_buffer.items.shuffle import BLOCKS, BlockShuffle, Order, Permutation, Quota, Shuffle
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.read_ahead import Readahead
from memmap_buffer.loading.shuffle_window import CacheUse, smallest_bound, steps_of, traffic_of
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.batch_builder import Columns
from memmap_buffer.views.folders import Found, where_of

MOST = 32  # batches that are read as one: numpy's cost is calls, and there are as many for one batch as for all
MOST_BYTES = 3 << 19  # and their memory, so that they lie in the second cache until they are asked for
CHUNK = 1 << 14  # items that are drawn together: numpy's cost per call vanishes in it
WINDOW_BYTES = 256 << 20  # items that `shuffle="block"` shuffles together unless told otherwise take so many
SHUFFLES = (False, True, "block")
SMALLER = (
    "%s: cache_bytes=%d has room for windows of %d items: shuffle='block' mixes so many, from %d places, and not %d "
    "from %d; give more to mix more"
)
log = logging.getLogger("memmap_buffer")
_NBYTES = attrgetter("nbytes")


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
    """A PyTorch batch sampler of `Anchors`; each epoch sees the episodes published since.

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

    def __iter__(self) -> Iterator[Anchors]:
        epoch = self._begun if self._ready else None
        epoch, self._ready = epoch or self.begin(), False
        yield from self._batches_of(epoch)

    def whole(self) -> Iterator[Anchors]:
        """All batches of the next epoch, for a trainer that shares them among the ranks itself.

        What it covers is fixed at once, as `begin` does, and all ranks must call it. `state_dict` does not count them.
        """
        epoch = self._agreed()
        epoch.partition = self._split(epoch, Ranks())
        self._begun, self._ready = None, False
        return self._batches_of(epoch)

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

    def _batches_of(self, epoch: Epoch) -> Iterator[Anchors]:
        """The batches of an epoch, which counts from the first on: a DataLoader drops the first of two iterators."""
        self.epoch, self._loaded, self._on_stale = epoch.number + 1, None, self.reader.on_stale
        bounds: Sequence[int] = ()
        quota = None
        if self.weights is not None:
            bounds, quota = folder_bounds(self.reader, epoch.index, len(self.weights)), Quota(self.weights)
        order = Order(epoch.index, bounds, epoch.shuffle, quota, epoch.seed, epoch.number)
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


@dataclass
class Block:
    """Several batches that were read as one.

    Attributes:
        of: what they were drawn from, an index or a mark of the journal, and the items of a batch.
        columns: of all; let go of with the last batch.
        size: their items.
        at: those that were handed out.
        nbytes: of all.
        unread: the anchors of all, where they could not be read as one: each batch is then read in its turn.
    """

    of: tuple[object, int] | None = None
    columns: Columns = field(default_factory=dict)
    size: int = 0
    at: int = 0
    nbytes: int = 0
    unread: Anchors | None = None

    def next(self, batch_size: int) -> Columns:
        """The next batch."""
        first, self.at, columns = self.at, self.at + batch_size, self.columns
        if self.at == self.size:
            self.columns = {}
        return {key: values[first : self.at] for key, values in columns.items()}

    def next_count(self, batch_size: int) -> int:
        """How many batches the block after this one should have: twice as many, as long as that takes little memory."""
        most = MOST_BYTES * self.size // max(1, self.nbytes * batch_size)
        return max(1, min(2 * self.size // batch_size, MOST, most))


class UniformSampler:
    """Batches drawn with replacement, as `sample` gives them; the shares of weighted folders are exact.

    As long as nothing changes several are drawn and read as one, and handed out in turn: each is what it would be if it
    were read then.
    """

    def __init__(self, reader: BatchReader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self._quota = None if weights is None else Quota(weights)
        self._position = 0  # of the next item among all
        may_follow = weights is None and not reader.frozen
        self._may_follow = may_follow and LiveIndex.follows(reader.selection, reader.folders)
        self._one_by_one = not reader.reads_together
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Begin anew what threads share; in a forked child another one may have been in the middle."""
        self._turn = threading.RLock()
        self._live: LiveIndex | None = None
        self._block = Block()

    def next(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> Columns:
        """The next batch.

        Args:
            batch_size: items.
            rng: chance.
            alone: the batch does not depend on those before.

        Raises:
            NotEnoughDataError: there is nothing to draw.
            StaleEpisodeError: see `BatchReader.read`.
        """
        records: Found | Anchors
        with self._turn:
            live = self._followed() if self._may_follow else None
            source = self.reader.index(refresh=True) if live is None else live
            of, block, count = (source if live is None else live.mark, batch_size), self._block, 1
            if alone:
                records = self._draw(source, batch_size, rng, 0)
            elif block.of == of and block.at < block.size:
                if block.unread is None:
                    return block.next(batch_size)
                first, block.at, alone = block.at, block.at + batch_size, True
                records = block.unread.where(slice(first, block.at))
            else:
                count = 1 if block.of != of or self._one_by_one else block.next_count(batch_size)
                self._position -= block.size - block.at  # so that shares go on where they stood
                self._block = Block()
                records = self._draw(source, count * batch_size, rng, self._position)
                self._position += count * batch_size
            if self._quota is not None:  # in the turn of this thread, so that shares are exact over all
                return self._read(None if alone else of, records, count, batch_size)
        return self._read(None if alone else of, records, count, batch_size)

    def _read(self, of: tuple[object, int] | None, records: Found | Anchors, count: int, batch_size: int) -> Columns:
        """The first of some batches; the others are kept for as long as what they were drawn `of` stands."""
        size, first = count * batch_size, None
        try:
            columns = self.reader.read(records)
        except MemmapBufferError:  # perhaps of another of the batches: that one raises it in its turn
            if count == 1 or isinstance(records, Anchors):
                raise
            block = Block(of, size=size, at=batch_size, unread=records.anchors)
        else:
            if of is None:
                return columns
            nbytes = sum(map(_NBYTES, columns.values()))
            block = Block(of, columns, size, nbytes=nbytes) if count > 1 else Block(of, {}, size, size, nbytes)
            first = block.next(batch_size) if count > 1 else columns
        with self._turn:
            if self._block.of is None:  # else another thread has put one there
                self._block = block
        return self.reader.read(block.unread.where(slice(batch_size))) if first is None else first  # type: ignore[union-attr]

    def _draw(self, source: LiveIndex | Index, count: int, rng: np.random.Generator, position: int) -> Found:
        """Anchors with the records of their episodes; the first has this position among all that were drawn."""
        reader = self.reader
        if isinstance(source, LiveIndex):
            anchors = source.draw(count, rng)
            anchors = reader.crop(anchors, lambda: rng) if reader.selection.random else anchors
            return reader.folders.at(anchors, source.changes)
        reader.require(source)
        if self._quota is None:
            return reader.folders.find(reader.crop(source.draw(count, rng), lambda: rng))
        folder, _ = self._quota.turns(np.arange(position, position + count))
        chosen = np.empty(count, np.int64)
        for number, (low, high) in enumerate(pairwise(folder_bounds(reader, source, self._quota.folders))):
            mine = np.flatnonzero(folder == number)
            chosen[mine] = source.pick(rng.random(len(mine)), low, high)
        return reader.folders.find(reader.crop(source.locate(chosen), lambda: rng))

    def _followed(self) -> LiveIndex | None:
        """The anchors of the one folder, at the cost of what changed; None where there are none, or an index tells."""
        live, folders = self._live, self.reader.folders
        if live is None:
            folders.refresh()  # what is to be checked is told of the episodes that there are
            if not folders.storages[0].tells_by_counter:
                return None
            live = self._live = LiveIndex(self.reader.selection, folders)
        return live if live.follow() and live.num_anchors else None

    def distinct(self, batch_size: int, rng: np.random.Generator) -> Columns:
        """A batch, no item of which is there twice. Raises NotEnoughDataError: there are not so many."""
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
        return reader.read(reader.crop(index.locate(numbers), lambda: rng))


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
