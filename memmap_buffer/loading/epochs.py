"""In which order a loader draws, which part of it this process gives, and where it stands.

An epoch goes round the items that exist when it begins (`OrderedSampler`), or has as many batches drawn by priority
(`PrioritizedSampler`). The first kind is fixed by (seed, epoch) and these episodes: every item of it has a number in
its order, from which `Order` computes its position; so any part of it can be drawn without what comes before.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from memmap_buffer.choices import OnStale, Tail, check_choice
from memmap_buffer.choices import Shuffle as ShuffleChoice
from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.host import host_name
from memmap_buffer.items.epoch import Epoch, EpochSnapshot, Handing, folder_states, require_same
from memmap_buffer.items.index import Index
from memmap_buffer.items.rank_partition import RankPartition, Ranks
from memmap_buffer.items.shuffle import BLOCKS, BlockShuffle, Order, Quota, Shuffle
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.prioritized import PrioritizedDraws
from memmap_buffer.loading.read_ahead import Readahead
from memmap_buffer.loading.samplers import folder_bounds
from memmap_buffer.loading.shuffle_window import CacheUse, smallest_bound, steps_of, traffic_of
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.folders import Folders

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK = 1 << 14  # items that are drawn together: numpy's cost per call vanishes in it
WINDOW_BYTES = 256 << 20  # items that `shuffle="block"` shuffles together unless told otherwise take so many
SMALLER = (
    "%s: cache_bytes=%d has room for windows of %d items: shuffle='block' mixes so many, from %d places, and not %d "
    "from %d; give more to mix more"
)
log = logging.getLogger("memmap_buffer")
AnyEpoch = TypeVar("AnyEpoch", bound=Handing)


class EpochSampler(Generic[AnyEpoch]):
    """A PyTorch batch sampler of `Anchors`, shared by ranks; of which items its epochs are, each kind says.

    Args:
        folders: that are read.
        batch_size: items a batch.
        drop_last: leave out an incomplete last batch.
        seed: fixes every epoch; None: a state that is loaded has it.
        ranks: the processes that share each epoch.
        tail: how items are shared that do not divide by the ranks, see `RankPartition`.

    Attributes:
        epoch: the number of the next one.

    Raises:
        SchemaError: options that contradict each other.
    """

    shuffle: bool | str = True

    def __init__(
        self,
        folders: Folders,
        *,
        batch_size: int,
        drop_last: bool,
        seed: int | None,
        ranks: Ranks | None = None,
        tail: str = "pad",
    ) -> None:
        check_choice("tail", tail, Tail)
        self._folders = folders
        self.batch_size, self.drop_last, self.seed = batch_size, drop_last, seed
        self.ranks, self.tail = ranks or Ranks(), tail
        self.epoch = 0
        self._loaded: AnyEpoch | None = None
        self._begun: AnyEpoch | None = None
        self._ready = False

    # What an epoch is, of each kind

    def _new(self) -> AnyEpoch:
        """The next epoch, of what there is now."""
        raise NotImplementedError

    def _batches_of(self, epoch: AnyEpoch) -> Iterator[Any]:
        """The batches of an epoch, which counts from the first on: a DataLoader drops the first of two iterators."""
        raise NotImplementedError

    def _state_of(self, epoch: AnyEpoch | None) -> dict[str, Any]:
        """Where an epoch stands; None: the next one, which is not begun."""
        raise NotImplementedError

    def _parsed(self, state: Mapping[str, Any]) -> Any:
        """The values of a state. Raises TypeError, ValueError, KeyError or AttributeError: it is none."""
        raise NotImplementedError

    def _load(self, parsed: Any, on_stale: str) -> None:
        """Take over a state, or nothing of it. Raises as `load_state_dict`."""
        raise NotImplementedError

    def _asked(self, epoch: AnyEpoch) -> Any:
        """The options of an epoch that was made here which all ranks are to know, beside its state."""

    def _state_for_ranks(self, epoch: AnyEpoch) -> dict[str, Any]:
        return self._state_of(epoch)

    def _of_rank_0(self, epoch: AnyEpoch, state: dict[str, Any], asked: Sequence[Any]) -> AnyEpoch:
        """The epoch of which rank 0 told, or this rank's own where that is the same; asked: `_asked` of each rank."""
        raise NotImplementedError

    def _folder_states(self) -> Any:
        """The folders as this rank reads them."""
        return folder_states(self._folders)

    def _require_same(self, ranks: Sequence[tuple[str, Any]]) -> None:
        """Raise SchemaError where a rank reads other data; of each its host, and `_folder_states`."""
        require_same(ranks, self._folders)

    # What is the same for each

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

    def __iter__(self) -> Iterator[Any]:
        epoch = self._begun if self._ready else None
        epoch, self._ready = epoch or self.begin(), False
        yield from self._batches_of(epoch)

    def whole(self) -> Iterator[Any]:
        """All batches of the next epoch, for a trainer that shares them among the ranks itself.

        What it covers is fixed at once, as `begin` does, and all ranks must call it. `state_dict` does not count them.
        """
        epoch = self._next(self.ranks.now())
        epoch.partition = self._split(epoch, Ranks())
        self._begun, self._ready = None, False
        return self._batches_of(epoch)

    def complete(self, batch_size: int, drop_last: bool) -> Self:
        """Another of the same order of which no item is left out or repeated, to predict with."""
        other = copy.copy(self)
        other.batch_size, other.drop_last, other.tail = batch_size, drop_last, "uneven"
        other._begun, other._ready = None, False
        return other

    def begin(self) -> AnyEpoch:
        """Fix what the next iteration draws.

        A loader does so at once, and not when its first batch is drawn: the ranks talk here, another thread may draw,
        and with workers a DataLoader asks for two iterators, of which it uses one.

        Raises:
            SchemaError: a rank reads other data, or gives no batches.
        """
        ranks = self.ranks.now()
        epoch = self._next(ranks)
        epoch.partition = self._split(epoch, ranks)
        self._begun, self._ready = epoch, True
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in numbers, strings and lists: the items handed out, and what tells the rest of the epoch.

        The items are counted over all ranks, which are taken to be equally far.
        """
        epoch = self._begun or self._loaded
        return self._state_of(None if epoch is None or epoch.over else epoch)

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Let the next epoch be the rest of the one that `state_dict` told of, in any process.

        For the same number of ranks it is the same batches, for another the same items. Episodes published since are
        no part of it. By priority it is as many batches, drawn by the priorities and from the episodes of then.

        Args:
            on_stale: "raise", or "redraw": items of episodes that are gone are drawn from what there is.

        Raises:
            StaleEpisodeError: episodes of that epoch are gone.
            SchemaError: it is no such state, or one of other options or folders.
        """
        check_choice("load_state_dict: on_stale", on_stale, OnStale)
        try:
            parsed = self._parsed(state)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            text = f"load_state_dict: got {state!r}, expected what state_dict gave ({error!r})"
            raise SchemaError(text) from error
        self._load(parsed, on_stale)
        self._begun, self._ready = None, False

    def _split(self, epoch: AnyEpoch, ranks: Ranks) -> RankPartition:
        return RankPartition(epoch.items, epoch.begun, self.batch_size, ranks, self.drop_last, self.tail)

    def _next(self, ranks: Ranks) -> AnyEpoch:
        """The next epoch, or the one of rank 0 where that is another. All ranks raise if one cannot give its part."""
        ranks.require_seed(self.seed)
        if not ranks.connected:
            return self._loaded or self._new()
        try:
            return self._agreed(ranks)
        except Exception:  # of all ranks, so all try again: a writer or a shard came or went in this moment
            return self._agreed(ranks)

    def _agreed(self, ranks: Ranks) -> AnyEpoch:
        epoch, stands = self._loaded, None
        failed: Exception | None = None
        try:
            epoch = epoch or self._new()
            stands = host_name(), self._folder_states(), None if self._loaded else self._asked(epoch)
        except Exception as error:  # an OSError or one of a user's filter, too: the others wait for this rank
            epoch, failed = None, error
        state = ranks.agree({} if epoch is None else self._state_for_ranks(epoch))
        everywhere = ranks.gather(stands)
        with all_or_none(ranks):
            if failed is not None:
                raise failed
            if None not in everywhere:
                self._require_same([(host, states) for host, states, _ in everywhere])
        assert epoch is not None
        with all_or_none(ranks):
            epoch = self._of_rank_0(epoch, state, [asked for *_, asked in everywhere])
        ranks.require_equal(0 if self.tail == "uneven" else len(self._split(epoch, ranks)))
        return epoch


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
        seed, number, delivered, window = (whole_number(state[key]) for key in ("seed", "epoch", "delivered", "window"))
        shuffle = Shuffle(state["shuffle"], window, whole_number(state.get("blocks", BLOCKS), 1))
        return cls(seed, number, delivered, shuffle, EpochSnapshot.from_state(state))


class OrderedSampler(EpochSampler[Epoch]):
    """Epochs that go round all items; each sees the episodes published since.

    Args:
        reader: reads the batches.
        shuffle: False; True: without replacement, in an order of (seed, epoch); "block": see `BlockShuffle`.
        window: with "block", how many items are shuffled together; None: as many as take 256 MiB.
        weights: one per folder: each batch has exactly these shares, every folder going round in an order of its own;
            an epoch has as many items as without.
        how: the others of `EpochSampler`.

    Raises:
        SchemaError: options that contradict each other.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        shuffle: bool | str,
        weights: Sequence[float] | None = None,
        window: int | None = None,
        **how: Any,
    ) -> None:
        super().__init__(reader.folders, **how)
        _check_shuffle(shuffle, window, reader.selection.weight_by)
        self.reader, self.shuffle, self.weights, self.window = reader, shuffle, weights, window
        self._on_stale = reader.on_stale
        self._has_told = False

    def begin(self) -> Epoch:
        epoch = super().begin()
        epoch.traffic = traffic_of(self._folders)
        return epoch

    def _state_of(self, epoch: Epoch | None) -> dict[str, Any]:
        if epoch is None:
            return {"seed": self.seed, "epoch": self.epoch, "delivered": 0, "shuffle": self.shuffle, "folders": None}
        return epoch.state()

    def _parsed(self, state: Mapping[str, Any]) -> tuple[object, EpochState | None, int, int]:
        epoch = None if state["folders"] is None else EpochState.of(state)
        return state["shuffle"], epoch, whole_number(state["seed"]), whole_number(state["epoch"])

    def _load(self, parsed: tuple[object, EpochState | None, int, int], on_stale: str) -> None:
        kind, epoch, seed, number = parsed
        if kind != self.shuffle:
            raise SchemaError(
                f"load_state_dict: the epoch has shuffle={kind!r}, this loader {self.shuffle!r}; give that"
            )
        self._loaded = epoch and self._rebuilt(epoch, on_stale)
        self.seed, self.epoch, self._on_stale = seed, number, on_stale

    def _rebuilt(self, state: EpochState, on_stale: str) -> Epoch:
        """The rest of an epoch that a state tells of."""
        index = state.snapshot.index(self.reader.selection, self.reader.folders, on_stale)
        use = self._cache_use(index)
        if use is not None:
            use.require(state.shuffle, "the epoch was begun with these")
        return Epoch(state.seed, state.number, state.shuffle, index, snapshot=state.snapshot, begun=state.delivered)

    def _new(self) -> Epoch:
        index = self.reader.index(refresh=True)
        seed = self.seed or 0  # of one without a seed the batches are counted, and no more
        if self.shuffle != "block":
            return Epoch(seed, self.epoch, Shuffle(self.shuffle), index)
        asked = Shuffle("block", self.window or _default_window(self.reader, index))
        return Epoch(seed, self.epoch, self._fitted(asked, self._cache_use(index)), index)

    def _cache_use(self, index: Index) -> CacheUse | None:
        """The use that an epoch in blocks makes of the cache; None where nothing is given back."""
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
        shuffle = use.fitted(asked)
        if shuffle != asked and not self._has_told:
            self._has_told = True
            where = self.reader.folders.storages[0].where
            log.warning(SMALLER, where, use.limit, shuffle.window, shuffle.blocks, asked.window, asked.blocks)
        return shuffle

    def _asked(self, epoch: Epoch) -> Shuffle:
        return epoch.shuffle

    def _of_rank_0(self, epoch: Epoch, state: dict[str, Any], asked: Sequence[Shuffle | None]) -> Epoch:
        if asked[0] is not None:  # a new epoch, whose windows the smallest cache must hold
            windows = [shuffle for shuffle in asked if shuffle is not None]
            state |= min(windows, key=lambda shuffle: shuffle.window).state()
        if state != epoch.state():
            epoch = self._rebuilt(EpochState.of(state), self._on_stale)
        self.seed = epoch.seed
        return epoch

    def _batches_of(self, epoch: Epoch) -> Iterator[Anchors]:
        self.epoch, self._loaded, self._on_stale = epoch.number + 1, None, self.reader.on_stale
        for anchors, size in self._chunks(epoch, self.order_of(epoch)):
            for at in range(0, anchors.size, size):
                yield anchors.where(slice(at, at + size))

    def order_of(self, epoch: Epoch) -> Order:
        """The order of the items of an epoch."""
        bounds: Sequence[int] = ()
        quota = None
        if self.weights is not None:
            bounds, quota = folder_bounds(self.reader, epoch.index, len(self.weights)), Quota(self.weights)
        return Order(epoch.index, bounds, epoch.shuffle, quota, epoch.seed, epoch.number)

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


class PrioritizedEpoch(Handing):
    """As many batches drawn by priority as one epoch has.

    Args:
        number, begun, items: see `Handing`.
        first: how many batches were handed out before it began here, by which β rises.

    Attributes:
        drawn: how many batches were drawn here; some of them may be thrown away.
        counts: whether batches count when they are handed out, not when they are drawn.
    """

    def __init__(self, number: int, begun: int, items: int, first: int) -> None:
        super().__init__(number, begun, items)
        self.first = first
        self.drawn = 0
        self.counts = False

    @property
    def num_drawn(self) -> int:
        """How many batches count, by which β rises."""
        return self.first + (self.batches if self.counts else self.drawn)

    def delivering(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.counts = True
        return super().delivering(batches)


class PrioritizedSampler(EpochSampler[PrioritizedEpoch]):
    """Epochs of batches that are drawn by priority, as many as of one that goes round; every batch is full.

    Ranks draw as many batches as they would have of such an epoch, each by random numbers of its own, from priorities
    that are the same on all of them. Nothing but the seed and the number of batches is fixed before a batch is drawn,
    as priorities change.

    Args:
        draws: gives the anchors.
        how: the others of `EpochSampler`: of items that do not divide by the ranks, "drop" counts them for no batch.
    """

    def __init__(self, draws: PrioritizedDraws, **how: Any) -> None:
        super().__init__(draws.reader.folders, **how)
        self.draws = draws
        self.tail = "drop" if self.tail == "drop" else "pad"  # every rank has as many
        self._first = 0  # batches before the first epoch

    def whole(self) -> Iterator[Anchors]:
        """See `EpochSampler.whole`; a part of them is drawn by priority too, and β rises by them."""
        epoch = self.begin()
        epoch.partition, self._ready = self._split(epoch, Ranks()), False
        return self._batches_of(epoch)

    def complete(self, batch_size: int, drop_last: bool) -> PrioritizedSampler:
        """Another of the same draws."""
        other = super().complete(batch_size, drop_last)
        other.tail, other.epoch, other._first, other._loaded = self.tail, 0, self._num_drawn, None
        return other

    def begin(self) -> PrioritizedEpoch:
        self.draws.share(self.ranks.now())
        return super().begin()

    def _new(self) -> PrioritizedEpoch:
        return PrioritizedEpoch(self.epoch, 0, len(self.draws), self._num_drawn)

    @property
    def _num_drawn(self) -> int:
        """Batches that count, by which β rises."""
        return self._first if self._begun is None else self._begun.num_drawn

    def _state_of(self, epoch: PrioritizedEpoch | None) -> dict[str, Any]:
        if epoch is None or not (epoch.counts or epoch is self._loaded):
            number, delivered, items = self.epoch, 0, 0
        else:
            number, delivered, items = epoch.number, epoch.delivered, epoch.items
        progress = {"epoch": number, "delivered": delivered, "items": items}
        return {"seed": self.seed, **progress, "num_drawn": self._num_drawn}

    def _parsed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        later = {name: state.get(name, 0) for name in ("num_drawn", "delivered", "items")}
        return {"seed": state["seed"], "epoch": state["epoch"], **later}

    def _load(self, parsed: dict[str, int], on_stale: str) -> None:
        for name, value in parsed.items():
            check_count(f"load_state_dict: {name}", value, 0)
        self.seed, self.epoch, self._first, begun, items = parsed.values()
        self._loaded = PrioritizedEpoch(self.epoch, begun, items, self._first) if items else None

    def _state_for_ranks(self, epoch: PrioritizedEpoch) -> dict[str, Any]:
        here = {"number": epoch.number, "begun": epoch.begun, "items": epoch.items}
        return {"seed": self.seed, "first": self._num_drawn, **here}

    def _of_rank_0(self, epoch: PrioritizedEpoch, state: dict[str, Any], asked: Sequence[Any]) -> PrioritizedEpoch:
        self.seed = state.pop("seed")
        return PrioritizedEpoch(**state)

    def _batches_of(self, epoch: PrioritizedEpoch) -> Iterator[Anchors]:
        assert epoch.partition is not None
        part = () if epoch.begun == 0 else (epoch.begun,)  # the rest does not repeat the chance of the beginning
        ranks = self.ranks.now()
        rng = np.random.default_rng((ranks.require_seed(self.seed), epoch.number, ranks.rank, *part))
        self.epoch, self._loaded = epoch.number + 1, None
        for _ in range(len(epoch.partition)):
            drawn, _ = self.draws.draw(self.batch_size, rng, number=epoch.first + epoch.drawn)
            epoch.drawn += 1
            yield drawn


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """Where the block raises on one rank, all of them raise."""
    try:
        yield
    except Exception as error:
        ranks.require_equal(0, error)
        raise
    ranks.require_equal(0)


def whole_number(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number from {least}")
    return value


def _default_window(reader: BatchReader, index: Index) -> int:
    """The number of items whose fields take `WINDOW_BYTES`."""
    row = sum(field.itemsize for field in reader.folders.schema.fields.values())
    return max(1, WINDOW_BYTES * len(index) // max(1, steps_of(index) * row))


def _check_shuffle(shuffle: object, window: object, weight_by: object) -> None:
    check_choice("shuffle", shuffle, ShuffleChoice)
    if not isinstance(shuffle, (bool, str)):  # 1 equals True, and is none
        raise SchemaError(f"shuffle: got {shuffle!r}, expected False, True or 'block'")
    if window is not None and (shuffle != "block" or type(window) is not int or window < 1):
        raise SchemaError(
            f"shuffle_window: got {window!r} with shuffle={shuffle!r}, expected how many items shuffle='block' "
            "shuffles together"
        )
    if weight_by is not None and shuffle is not True:
        raise SchemaError(f"weight_by={weight_by!r} draws at random, with replacement; give shuffle=True to the loader")
