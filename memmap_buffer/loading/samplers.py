"""In which order a loader draws, which part of it this process gives, and where it stands.

An epoch is fixed by (seed, epoch) and the episodes that exist when it begins. Every item of it has a number in its
order, from which `Order` computes its position; so any part of it can be drawn without what comes before.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from memmap_buffer.errors import MemmapBufferError, NotEnoughDataError, SchemaError
from memmap_buffer.format.host import host_name
from memmap_buffer.items.epoch import Epoch
from memmap_buffer.items.epoch_snapshot import EpochSnapshot, require_same, standing
from memmap_buffer.items.index import Index
from memmap_buffer.items.rank_partition import RankPartition, Ranks, check_tail
from memmap_buffer.items.shuffle import BlockShuffle, Order, Permutation, Quota, Shuffle, draw
from memmap_buffer.loading.batch_reader import Reader
from memmap_buffer.loading.read_ahead import Readahead
from memmap_buffer.views.batch_builder import PlannedBatch
from memmap_buffer.views.folders import Anchors

CHUNK = 1 << 14  # items that are drawn together: numpy's cost per call vanishes in it
AHEAD, AHEAD_BYTES = 32, 2 << 20  # the most batches that are planned together, and what that may take
WINDOW_BYTES = 256 << 20  # what `shuffle="block"` shuffles together unless told otherwise
SHUFFLES = (False, True, "block")


class Ahead:
    """Batches that are planned together: one, then twice as many each time, as long as that takes little memory.

    With `verify="read"` it stays at one, as checksums are compared when a batch is planned.

    Attributes: count: how many next.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._most = AHEAD if reader.plans else 1
        self.count = 1

    def parts(self, anchors: Anchors, size: int) -> Iterator[PlannedBatch]:
        """Anchors planned together, `size` of them at a time."""
        plan = self._reader.plan(anchors, size)
        each = max(1, plan.nbytes * size // max(1, anchors.size))
        self.count = max(1, min(2 * self.count, self._most, AHEAD_BYTES // each))
        return iter([PlannedBatch(plan, slice(at, at + size)) for at in range(0, anchors.size, size)])

    def all(self, anchors: Anchors, size: int) -> Iterator[PlannedBatch]:
        """The same of many anchors, group by group."""
        at = 0
        while at < anchors.size:
            group = slice(at, at + self.count * size)
            yield from self.parts(anchors.where(group), size)
            at = group.stop


class EpochSampler:
    """A PyTorch batch sampler of `Anchors`, or parts of many; each epoch sees the episodes published since.

    Args:
        reader: what is drawn from.
        batch_size: items a batch. drop_last: leave out an incomplete last batch.
        shuffle: False; True: without replacement, in an order of (seed, epoch); "block": see `BlockShuffle`.
        window: with "block", how many items are shuffled together; None: what takes 256 MiB.
        seed: fixes every epoch.
        weights: one per source: each batch has exactly these shares, every source going round in an order of its own;
            an epoch has as many items as without.
        ranks: the processes that share each epoch. tail: what becomes of items that do not divide by them, see `RankPartition`.

    Attributes: plans: whether batches are worked out here, as far as they can be; of no use to worker processes.

    Raises: SchemaError: options that contradict each other.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        batch_size: int,
        shuffle: bool | str,
        drop_last: bool,
        seed: int,
        weights: Sequence[float] | None = None,
        window: int | None = None,
        ranks: Ranks | None = None,
        tail: str = "pad",
    ) -> None:
        check_tail(tail)
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
        self._ready = False

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
        """The same for any ranks; of the whole epoch for `Ranks()`."""
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
        epoch.split = self._split(epoch, Ranks())
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
        """Fix what the next iteration draws.

        A loader does so at once, and not when its first batch is drawn: the ranks talk here, another thread may draw,
        and with workers a DataLoader asks for two iterators, of which it uses one.
        """
        epoch = self._agreed()
        epoch.split = self._split(epoch, self.ranks.now())
        self._begun, self._ready = epoch, True
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in numbers, strings and lists: what was handed out, and what the epoch covers.

        The items are counted over all ranks, which are taken to be equally far.
        """
        epoch = self._begun or self._loaded
        if epoch is None or epoch.over:
            return {"seed": self.seed, "epoch": self.epoch, "delivered": 0, "shuffle": self.shuffle, "sources": None}
        return epoch.state()

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Let the next epoch be the rest of the one that `state_dict` told of, in any process.

        For the same number of ranks it is the same batches, for another the same items. Episodes published since are
        no part of it.

        Args: on_stale: "raise", or "redraw": items of episodes that are gone are drawn from what there is.

        Raises:
            StaleEpisodeError: episodes of that epoch are gone.
            SchemaError: it is no such state, or one of other options or folders.
        """
        if on_stale not in ("raise", "redraw"):
            raise SchemaError(f"load_state_dict: on_stale: got {on_stale!r}, expected 'raise' or 'redraw'")
        try:
            kind, epoch = state["shuffle"], None if state["sources"] is None else _told(state)
            seed, number = _whole(state["seed"]), _whole(state["epoch"])
        except (TypeError, ValueError, KeyError) as error:
            text = f"load_state_dict: got {state!r}, expected what state_dict gave ({error!r})"
            raise SchemaError(text) from error
        if kind != self.shuffle:
            raise SchemaError(
                f"load_state_dict: the epoch has shuffle={kind!r}, this loader {self.shuffle!r}; give that"
            )
        self._loaded = epoch and self._rebuilt(seed, number, *epoch, on_stale)
        self.seed, self.epoch, self._on_stale = seed, number, on_stale
        self._begun, self._ready = None, False

    def _rebuilt(self, seed: int, number: int, begun: int, window: int, extent: EpochSnapshot, on_stale: str) -> Epoch:
        index = extent.index(self.reader.selection, self.reader.sources, on_stale)
        return Epoch(seed, number, Shuffle(self.shuffle, window), index, extent=extent, begun=begun)

    def _new(self) -> Epoch:
        index = self.reader.index(refresh=True)
        window = (self.window or _default_window(self.reader, index)) if self.shuffle == "block" else 0
        tables = self.reader.numbered_tables
        sources = self.reader.sources
        of = dict(zip(sources.numbers.tolist(), sources.ids, strict=False))
        ids = [of[number] for number in tables]
        return Epoch(self.seed, self.epoch, Shuffle(self.shuffle, window), index, tables=tables, ids=ids)

    def _agreed(self) -> Epoch:
        """The next epoch, or the one of rank 0 where that is another. All ranks raise if one cannot give its part."""
        ranks = self.ranks.now()
        if not ranks.connected:
            return self._loaded or self._new()
        try:
            return self._agree(ranks)
        except MemmapBufferError:  # of all ranks, so all try again: a writer or a shard came or went in this moment
            return self._agree(ranks)

    def _agree(self, ranks: Ranks) -> Epoch:
        epoch, stands = self._loaded, None
        failed: MemmapBufferError | None = None
        try:
            epoch = epoch or self._new()
            stands = host_name(), standing(self.reader.sources)
        except MemmapBufferError as error:  # the others wait for this rank
            epoch, failed = None, error
        state, told = ranks.agree({} if epoch is None else epoch.state()), ranks.gather(stands)
        with _all_or_none(ranks):
            if failed is not None:
                raise failed
            if None not in told:
                require_same(told, self.reader.sources)
        assert epoch is not None
        with _all_or_none(ranks):
            if state != epoch.state():
                epoch = self._rebuilt(state["seed"], state["epoch"], *_told(state), self._on_stale)
        ranks.require_equal(0 if self.tail == "uneven" else len(self._split(epoch, ranks)))
        self.seed = epoch.seed
        return epoch

    def _split(self, epoch: Epoch, ranks: Ranks) -> RankPartition:
        return RankPartition(len(epoch.index), epoch.begun, self.batch_size, ranks, self.drop_last, self.tail)

    def _given(self, epoch: Epoch, plans: bool) -> Iterator[Anchors | PlannedBatch]:
        """The batches of an epoch, which counts from the first on: a DataLoader drops the first of two iterators."""
        self.epoch, self._loaded, self._on_stale = epoch.number + 1, None, self.reader.on_stale
        yield from self._draw(epoch, plans)

    def _draw(self, epoch: Epoch, plans: bool) -> Iterator[Anchors | PlannedBatch]:
        assert epoch.split is not None
        bounds: Sequence[int] = ()
        quota = None
        if self.weights is not None:
            bounds, quota = source_bounds(self.reader, epoch.index, len(self.weights)), Quota(self.weights)
        order = Order(epoch.index, bounds, epoch.shuffle, quota, epoch.seed, epoch.number)
        ahead, selection = self._ahead(epoch), self.reader.selection
        together = Ahead(self.reader) if plans and not (selection.random or selection.mixes) else None
        for numbers in epoch.split.chunks(CHUNK):
            if ahead is not None:
                ahead.before(int(numbers[0, 0]), int(numbers[-1, -1]))
            anchors, size = epoch.index.locate(order.positions(numbers.ravel())), numbers.shape[1]
            if together is not None:
                yield from together.all(anchors, size)
                continue
            for i, first in enumerate(numbers[:, 0].tolist()):
                part = anchors.where(slice(i * size, (i + 1) * size))
                yield self.reader.crop(part, partial(epoch.generator, first))

    def _ahead(self, epoch: Epoch) -> Readahead | None:
        """With "block", what asks for each window before its time; mixtures read as they go."""
        turn = epoch.shuffle.turn(len(epoch.index), epoch.seed, epoch.number, 0)
        if self.weights is not None or not isinstance(turn, BlockShuffle):
            return None
        return Readahead(self.reader.selection, self.reader.sources, epoch.index, turn)


@contextmanager
def _all_or_none(ranks: Ranks) -> Iterator[None]:
    """Where the block raises on one rank, all of them raise."""
    try:
        yield
    except MemmapBufferError as error:
        ranks.require_equal(0, error)
        raise
    ranks.require_equal(0)


def _told(state: Mapping[str, Any]) -> tuple[int, int, EpochSnapshot]:
    """How much of an epoch was given, its window and its extent. Raises TypeError, ValueError or KeyError."""
    return _whole(state["delivered"]), _whole(state["window"]), EpochSnapshot.from_state(state)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0")
    return value


def _check_shuffle(shuffle: object, window: object, weight_by: str | None) -> None:
    if shuffle not in SHUFFLES:
        raise SchemaError(f"shuffle: got {shuffle!r}, expected one of {', '.join(map(repr, SHUFFLES))}")
    if window is not None and (shuffle != "block" or type(window) is not int or window < 1):
        raise SchemaError(
            f"shuffle_window: got {window!r} with shuffle={shuffle!r}, expected how many items shuffle='block' "
            "shuffles together"
        )
    if weight_by is not None and shuffle is not True:
        raise SchemaError(f"weight_by={weight_by!r} draws at random, with replacement; give shuffle=True to the loader")


def _default_window(reader: Reader, index: Index) -> int:
    """How many items take `WINDOW_BYTES`, all fields of their episodes counted."""
    row = sum(field.itemsize for field in reader.sources.schema.fields.values())
    tables = reader.numbered_tables
    parts = index.parts(np.fromiter(tables, np.int64, len(tables)))
    steps = [int(table.length[part.slot].sum()) for table, part in zip(tables.values(), parts, strict=True)]
    return max(1, WINDOW_BYTES * len(index) // max(1, sum(steps) * row))


class UniformSampler:
    """Batches drawn with replacement, as `sample` gives them; the shares of weighted sources are exact."""

    def __init__(self, reader: Reader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self._quota = None if weights is None else Quota(weights)
        self._one_by_one = weights is not None or reader.selection.mixes
        self._drawn = 0
        self._of: tuple[Index, int] | None = None
        self._ahead = Ahead(reader)
        self._parts: Iterator[PlannedBatch] = iter(())
        self._turn = threading.Lock()  # threads share the batches that are planned

    def next(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> Anchors | PlannedBatch:
        """What one batch is of; `alone`: it owes nothing to those before. Raises NotEnoughDataError."""
        if alone or self._one_by_one:
            return self._drawn_now(batch_size, rng, alone)
        with self._turn:
            return self._next_part(batch_size, rng)

    def _drawn_now(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> Anchors:
        reader = self.reader
        index = reader.index(refresh=True)
        reader.require(index)
        if self._quota is None:
            return draw(reader.selection, reader.sources, index, batch_size, rng)
        begin = 0 if alone else self._drawn
        counts = self._quota.counts(begin, begin + batch_size)
        bounds = source_bounds(reader, index, len(counts))
        parts = [index.pick(rng.random(n), bounds[s], bounds[s + 1]) for s, n in enumerate(counts)]
        self._drawn += 0 if alone else batch_size
        return reader.crop(index.locate(np.concatenate(parts)), lambda: rng)

    def _next_part(self, batch_size: int, rng: np.random.Generator) -> PlannedBatch:
        """The next of the batches that are planned together."""
        index = self.reader.index(refresh=True)
        if self._of != (index, batch_size):
            self._of, self._ahead, self._parts = (index, batch_size), Ahead(self.reader), iter(())
        part = next(self._parts, None)
        if part is None:
            self._parts = self._ahead.parts(self._drawn_now(self._ahead.count * batch_size, rng), batch_size)
            part = next(self._parts)
        return part

    def distinct(self, batch_size: int, rng: np.random.Generator) -> Anchors:
        """The anchors of one batch, no item of it twice. Raises NotEnoughDataError: there are not so many."""
        reader = self.reader
        index = reader.index(refresh=True)
        reader.require(index)
        if self._quota is not None or index.mass is not None:
            raise SchemaError("replacement=False draws every item alike; leave out weights and weight_by")
        if batch_size > len(index):
            path = reader.sources.storages[0].path
            text = f"{path}: replacement=False: got batch_size {batch_size}, there are {len(index)} items; lower it"
            raise NotEnoughDataError(text, items=len(index))
        numbers = Permutation(len(index), int(rng.integers(2**63)))(np.arange(batch_size))
        return reader.crop(index.locate(numbers), lambda: rng)


def source_bounds(reader: Reader, index: Index, sources: int) -> list[int]:
    """Where each source's positions begin in an index; it lists them source by source.

    Raises: NotEnoughDataError: a source has none, so it cannot give its share.
    """
    bounds: list[int] = index.bounds(np.arange(sources + 1)).tolist()
    for number in range(sources if index.source is not None and len(index) else 0):
        if bounds[number] == bounds[number + 1]:
            path = reader.sources.storages[number].path
            raise NotEnoughDataError(f"{path}: source {number} has nothing to give its share of a batch", source=number)
    return bounds
