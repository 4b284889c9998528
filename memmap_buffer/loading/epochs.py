"""The samplers of a loader: the order of an epoch, the part of it that this rank draws, and the loader's state.

`EpochSampler` holds what all kinds share; read it first. `EpisodeLoader` iterates over it once an epoch. An epoch goes
once over the items that exist when it begins (`OrderedSampler`), or has as many batches drawn by priority
(`PrioritizedSampler`). The first kind is fixed by (seed, epoch) and the episodes: `Order` computes the position of the
item with any number, so that any part of an epoch can be drawn without the part before it.
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

CHUNK = 1 << 14  # items that are drawn together: the overhead of numpy's calls is negligible then
RETRIES = 3  # of ranks that do not agree on an epoch: shards may be published more often than they look
WINDOW_BYTES = 256 << 20  # the default size of a window of `shuffle="block"`: the items that it shuffles together
SMALLER = (
    "%s: cache_bytes=%d has room for windows of %d items: shuffle='block' mixes so many, from %d places, and not %d "
    "from %d; give more to mix more"
)
log = logging.getLogger("memmap_buffer")
AnyEpoch = TypeVar("AnyEpoch", bound=Handing)


class EpochSampler(Generic[AnyEpoch]):
    """A PyTorch batch sampler that gives `Anchors`. Ranks share its epochs; subclasses say which items these have.

    Args:
        sources: name -> the folders that are read.
        batch_size: items a batch.
        drop_last: leave out an incomplete last batch.
        seed: fixes every epoch; None: a loaded state brings it.
        ranks: the processes that share each epoch.
        tail: what happens to items that do not divide by the ranks, see `RankPartition`.

    Attributes:
        epoch: the number of the next epoch.

    Raises:
        SchemaError: options that contradict each other.
    """

    shuffle: bool | str = True

    def __init__(
        self,
        sources: Mapping[str, Folders],
        *,
        batch_size: int,
        drop_last: bool,
        seed: int | None,
        ranks: Ranks | None = None,
        tail: str = "pad",
    ) -> None:
        check_choice("tail", tail, Tail)
        self._sources = sources
        self.batch_size, self.drop_last, self.seed = batch_size, drop_last, seed
        self.ranks, self.tail = ranks or Ranks(), tail
        self.epoch = 0
        self._loaded: AnyEpoch | None = None
        self._begun: AnyEpoch | None = None
        self._ready = False

    # To be defined by each kind

    def _new(self) -> AnyEpoch:
        """The next epoch, over the items of now."""
        raise NotImplementedError

    def _batches_of(self, epoch: AnyEpoch) -> Iterator[Any]:
        """The anchors of each batch. The epoch has begun with the first: a DataLoader drops one of two iterators."""
        raise NotImplementedError

    def _state_of(self, epoch: AnyEpoch | None) -> dict[str, Any]:
        """The state of an epoch, as `state_dict` returns it; None: of the next epoch, which has not begun."""
        raise NotImplementedError

    def _parsed(self, state: Mapping[str, Any]) -> Any:
        """The values of a state. Raises TypeError, ValueError, KeyError or AttributeError if it is no valid state."""
        raise NotImplementedError

    def _load(self, parsed: Any, on_stale: str) -> None:
        """Take over a parsed state; where it raises, as `load_state_dict` does, nothing is changed."""
        raise NotImplementedError

    def _asked(self, epoch: AnyEpoch) -> Any:
        """The options that this rank chose for an epoch it made, to be gathered from all ranks; see `_of_rank_0`."""

    def _state_for_ranks(self, epoch: AnyEpoch) -> dict[str, Any]:
        return self._state_of(epoch)

    def _of_rank_0(self, epoch: AnyEpoch, state: dict[str, Any], asked: Sequence[Any]) -> AnyEpoch:
        """The epoch that all ranks begin.

        Args:
            epoch: this rank's own, which is returned if it is the same.
            state: `_state_for_ranks` of rank 0.
            asked: of each rank `_asked`, None where it loaded a state.
        """
        raise NotImplementedError

    # The same for all kinds

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; without it epochs count up by themselves."""
        self.epoch = epoch
        if self._loaded is not None and self._loaded.number != epoch:
            self._loaded = None

    def __len__(self) -> int:
        """The number of this rank's batches in the next epoch, as of now: new episodes may change it.

        Of a resumed epoch all batches are counted, as PyTorch's stateful loaders do: Lightning's loop relies on it.
        """
        return self.num_batches(self.ranks.now())

    def num_batches(self, ranks: Ranks) -> int:
        """The number of batches of the next epoch for one of `ranks`; for `Ranks()`, of the whole epoch."""
        split = self._split(self._loaded or self._new(), ranks)
        return split.before + len(split)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._begun if self._ready else None
        epoch, self._ready = epoch or self.begin(), False
        yield from self._batches_of(epoch)

    def whole(self) -> Iterator[Any]:
        """All batches of the next epoch, for a trainer that shares them among the ranks itself.

        The epoch is fixed at once, as by `begin`; all ranks must call this. `state_dict` does not count its batches.
        """
        epoch = self._next(self.ranks.now())
        epoch.partition = self._split(epoch, Ranks())
        self._begun, self._ready = None, False
        return self._batches_of(epoch)

    def complete(self, batch_size: int, drop_last: bool) -> Self:
        """A sampler of the same order that leaves out and repeats no item, for prediction."""
        sampler = copy.copy(self)
        sampler.batch_size, sampler.drop_last, sampler.tail = batch_size, drop_last, "uneven"
        sampler._begun, sampler._ready = None, False
        return sampler

    def begin(self) -> AnyEpoch:
        """Fix the epoch that the next iteration draws.

        A loader calls this at once, not when the first batch is drawn: the ranks communicate here, a thread may draw,
        and with workers a DataLoader makes two iterators but uses one.

        Raises:
            SchemaError: a rank reads other data, or has no batches.
        """
        ranks = self.ranks.now()
        epoch = self._next(ranks)
        epoch.partition = self._split(epoch, ranks)
        self._begun, self._ready = epoch, True
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """The state, in numbers, strings and lists: how many items were handed out, and the epoch's order and episodes.

        Items are counted over all ranks, on the assumption that each has handed out as many batches.
        """
        epoch = self._begun or self._loaded
        return self._state_of(None if epoch is None or epoch.over else epoch)

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Make the next epoch the rest of the one in which `state_dict` was called, in this process or another.

        It has the same batches for the same number of ranks, else the same items. Episodes published since are not part
        of it. By priority it has as many batches, drawn by the priorities and from the episodes of when it goes on.

        Args:
            state: a result of `state_dict`.
            on_stale: "raise", or "redraw": in the place of items whose episodes are gone, others are drawn.

        Raises:
            StaleEpisodeError: episodes of that epoch are gone.
            SchemaError: it is no valid state, or it is of other options or folders.
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
        """The next epoch; with several ranks the one of rank 0. All ranks raise if one of them cannot begin it."""
        ranks.require_seed(self.seed)
        if not ranks.connected:
            return self._loaded or self._new()
        for _ in range(RETRIES):
            try:
                return self._agreed(ranks)
            except Exception:  # raised on all ranks, so all retry: a shard or episodes may have changed just then
                for folders in self._sources.values():
                    folders.look_anew()
        return self._agreed(ranks)

    def _require_same(self, ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise SchemaError where a rank reads other data. Args: ranks: (host, the states of its folders) of each."""
        others = [[*states] for _, states in ranks if [*states] != [*self._sources]]
        if others:
            raise SchemaError(f"this rank mixes {[*self._sources]}, another {others[0]}; give all the same sources")
        for name, folders in self._sources.items():
            require_same([(host, states[name]) for host, states in ranks], folders)

    def _agreed(self, ranks: Ranks) -> AnyEpoch:
        epoch, proposal = self._loaded, None
        failure: Exception | None = None
        try:
            epoch = epoch or self._new()
            states = {name: folder_states(folders) for name, folders in self._sources.items()}
            proposal = host_name(), states, None if self._loaded else self._asked(epoch)
        except Exception as error:  # any, even of a user's filter: the other ranks wait for this one
            epoch, failure = None, error
        state = ranks.agree({} if epoch is None else self._state_for_ranks(epoch))
        proposals = ranks.gather(proposal)
        with all_or_none(ranks):
            if failure is not None:
                raise failure
            if None not in proposals:
                self._require_same([(host, states) for host, states, _ in proposals])
        assert epoch is not None
        with all_or_none(ranks):
            epoch = self._of_rank_0(epoch, state, [asked for *_, asked in proposals])
        ranks.require_equal(0 if self.tail == "uneven" else len(self._split(epoch, ranks)))
        return epoch


class EpochState(NamedTuple):
    """The parsed state of an epoch that was begun: its order, the number of items handed out, and its episodes."""

    seed: int
    number: int
    delivered: int
    shuffle: Shuffle
    snapshot: EpochSnapshot

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> EpochState:
        """Parse the result of `Epoch.state`. Raises TypeError, ValueError or KeyError for anything else."""
        seed, number, delivered, window = (whole_number(state[key]) for key in ("seed", "epoch", "delivered", "window"))
        shuffle = Shuffle(state["shuffle"], window, whole_number(state.get("blocks", BLOCKS), 1))
        return cls(seed, number, delivered, shuffle, EpochSnapshot.from_state(state))


class OrderedSampler(EpochSampler[Epoch]):
    """Epochs that go once over all items; each includes the episodes published before it begins.

    Args:
        reader: reads the batches.
        shuffle: False: no shuffling; True: a random order, fixed by (seed, epoch); "block": see `BlockShuffle`.
        window: with "block", how many items are shuffled together; None: as many as take 256 MiB.
        weights: the share of each folder in every batch, exactly. Each folder has an order of its own, and is gone over
            repeatedly, until the epoch has as many items as without weights.
        how: the other arguments of `EpochSampler`.

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
        super().__init__({"": reader.folders}, **how)
        _check_shuffle(shuffle, window, reader.selection.weight_by)
        self.reader, self.shuffle, self.weights, self.window = reader, shuffle, weights, window
        self._on_stale = reader.on_stale
        self._has_told = False

    def begin(self) -> Epoch:
        epoch = super().begin()
        epoch.traffic = traffic_of(self.reader.folders)
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
        """The rest of an epoch, from its state."""
        index = state.snapshot.index(self.reader.selection, self.reader.folders, on_stale)
        use = self._cache_use(index)
        if use is not None:
            use.require(state.shuffle, "the epoch was begun with these")
        return Epoch(state.seed, state.number, state.shuffle, index, snapshot=state.snapshot, begun=state.delivered)

    def _new(self) -> Epoch:
        index = self.reader.index(refresh=True)
        seed = self.seed or 0  # without a seed only the number of batches is asked for
        if self.shuffle != "block":
            return Epoch(seed, self.epoch, Shuffle(self.shuffle), index)
        asked = Shuffle("block", self.window or _default_window(self.reader, index))
        return Epoch(seed, self.epoch, self._fitted(asked, self._cache_use(index)), index)

    def _cache_use(self, index: Index) -> CacheUse | None:
        """The room that an epoch with shuffle="block" takes in the cache; None where no cache has a bound."""
        bound = smallest_bound(self.reader.folders)
        if self.shuffle != "block" or bound is None:
            return None
        return CacheUse.of(self.reader, index, len(self.weights or [1]), bound)

    def _fitted(self, asked: Shuffle, use: CacheUse | None) -> Shuffle:
        """The shuffle that was asked for, or one with smaller windows, with a warning in the log once."""
        if use is None:
            return asked
        ranks = self.ranks.now()
        if ranks.world_size > 1 and not ranks.connected:  # caches may differ, but the order must not
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
        if asked[0] is not None:
            state |= smallest_windows(asked)
        if state != epoch.state():
            epoch = self._rebuilt(EpochState.of(state), self._on_stale)
        self.seed = epoch.seed
        return epoch

    def _batches_of(self, epoch: Epoch) -> Iterator[Anchors]:
        self.epoch, self._loaded, self._on_stale = epoch.number + 1, None, self.reader.on_stale
        for anchors, size in self._chunks(epoch, self.order_of(epoch)):
            for first in range(0, anchors.size, size):
                yield anchors.where(slice(first, first + size))

    def order_of(self, epoch: Epoch) -> Order:
        """The order of the items of an epoch."""
        bounds: Sequence[int] = ()
        quota = None
        if self.weights is not None:
            bounds, quota = folder_bounds(self.reader, epoch.index, len(self.weights)), Quota(self.weights)
        return Order(epoch.index, bounds, epoch.shuffle, quota, epoch.seed, epoch.number)

    def _chunks(self, epoch: Epoch, order: Order) -> Iterator[tuple[Anchors, int]]:
        """(the anchors of one batch or many, the number of items of a batch), until the epoch is over."""
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
        """The read-ahead of the windows of shuffle="block"; None for other orders, and with weights."""
        turn = epoch.shuffle.turn(len(epoch.index), epoch.seed, epoch.number, 0)
        if self.weights is not None or not isinstance(turn, BlockShuffle):
            return None
        return Readahead(self.reader.selection, self.reader.folders, epoch.index, turn)


class PrioritizedEpoch(Handing):
    """As many batches, drawn by priority, as an ordered epoch has.

    Args:
        number, begun, items: see `Handing`.
        first: the number of batches before this epoch, by which β rises.

    Attributes:
        drawn: how many batches were drawn in this process; some of them may never be used.
        counts: whether batches count for β when they are handed out, not when they are drawn.
    """

    def __init__(self, number: int, begun: int, items: int, first: int) -> None:
        super().__init__(number, begun, items)
        self.first = first
        self.drawn = 0
        self.counts = False

    @property
    def num_drawn(self) -> int:
        """The number of batches so far, by which β rises."""
        return self.first + (self.batches if self.counts else self.drawn)

    def delivering(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.counts = True
        return super().delivering(batches)


class PrioritizedSampler(EpochSampler[PrioritizedEpoch]):
    """Epochs of full batches drawn by priority, as many as an ordered epoch has.

    Each rank draws as many batches as its part of an ordered epoch has, by random numbers of its own, from priorities
    that are the same on all ranks. As priorities change, only the seed and the number of batches are fixed beforehand.

    Args:
        draws: draws the anchors.
        how: the other arguments of `EpochSampler`; with tail="drop", items that do not divide by the ranks do not count
            for the number of batches.
    """

    def __init__(self, draws: PrioritizedDraws, **how: Any) -> None:
        super().__init__({"": draws.reader.folders}, **how)
        self.draws = draws
        self.tail = "drop" if self.tail == "drop" else "pad"  # every rank has the same number of batches
        self._first = 0  # the number of batches before the first epoch of this sampler

    def whole(self) -> Iterator[Anchors]:
        """See `EpochSampler.whole`. All of them are drawn on this rank, by priority, and β rises by them."""
        epoch = self.begin()
        epoch.partition, self._ready = self._split(epoch, Ranks()), False
        return self._batches_of(epoch)

    def complete(self, batch_size: int, drop_last: bool) -> PrioritizedSampler:
        """A sampler of the same draws, see `EpochSampler.complete`; its β goes on from here."""
        sampler = super().complete(batch_size, drop_last)
        sampler.tail, sampler.epoch, sampler._first, sampler._loaded = self.tail, 0, self._num_drawn, None
        return sampler

    def begin(self) -> PrioritizedEpoch:
        self.draws.share(self.ranks.now())
        return super().begin()

    def _new(self) -> PrioritizedEpoch:
        return PrioritizedEpoch(self.epoch, 0, len(self.draws), self._num_drawn)

    @property
    def _num_drawn(self) -> int:
        """The number of batches so far, by which β rises."""
        return self._first if self._begun is None else self._begun.num_drawn

    def _state_of(self, epoch: PrioritizedEpoch | None) -> dict[str, Any]:
        if epoch is None or not (epoch.counts or epoch is self._loaded):
            number, delivered, items = self.epoch, 0, 0
        else:
            number, delivered, items = epoch.number, epoch.delivered, epoch.items
        progress = {"epoch": number, "delivered": delivered, "items": items}
        return {"seed": self.seed, **progress, "num_drawn": self._num_drawn}

    def _parsed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        optional = {name: state.get(name, 0) for name in ("num_drawn", "delivered", "items")}
        return {"seed": state["seed"], "epoch": state["epoch"], **optional}

    def _load(self, parsed: dict[str, int], on_stale: str) -> None:
        for name, value in parsed.items():
            check_count(f"load_state_dict: {name}", value, 0)
        self.seed, self.epoch, self._first, begun, items = parsed.values()
        self._loaded = PrioritizedEpoch(self.epoch, begun, items, self._first) if items else None

    def _state_for_ranks(self, epoch: PrioritizedEpoch) -> dict[str, Any]:
        progress = {"number": epoch.number, "begun": epoch.begun, "items": epoch.items}
        return {"seed": self.seed, "first": self._num_drawn, **progress}

    def _of_rank_0(self, epoch: PrioritizedEpoch, state: dict[str, Any], asked: Sequence[Any]) -> PrioritizedEpoch:
        self.seed = state.pop("seed")
        return PrioritizedEpoch(**state)

    def _batches_of(self, epoch: PrioritizedEpoch) -> Iterator[Anchors]:
        assert epoch.partition is not None
        part = () if epoch.begun == 0 else (epoch.begun,)  # else the rest would repeat the first random numbers
        ranks = self.ranks.now()
        rng = np.random.default_rng((ranks.require_seed(self.seed), epoch.number, ranks.rank, *part))
        self.epoch, self._loaded = epoch.number + 1, None
        for _ in range(len(epoch.partition)):
            drawn, _ = self.draws.draw(self.batch_size, rng, number=epoch.first + epoch.drawn)
            epoch.drawn += 1
            yield drawn


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """A block that raises on every rank if it raises on one."""
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


def smallest_windows(asked: Sequence[Shuffle | None]) -> dict[str, Any]:
    """The state of the shuffle that the cache of every rank holds; None for a rank that did not begin the epoch."""
    shuffles = [shuffle for shuffle in asked if shuffle is not None]
    return min(shuffles, key=lambda shuffle: shuffle.window).state()


def _default_window(reader: BatchReader, index: Index) -> int:
    """The number of items whose fields take `WINDOW_BYTES` together."""
    row = sum(field.itemsize for field in reader.folders.schema.fields.values())
    return max(1, WINDOW_BYTES * len(index) // max(1, steps_of(index) * row))


def _check_shuffle(shuffle: object, window: object, weight_by: object) -> None:
    check_choice("shuffle", shuffle, ShuffleChoice)
    if not isinstance(shuffle, (bool, str)):  # 1 passes the check above, as it equals True
        raise SchemaError(f"shuffle: got {shuffle!r}, expected False, True or 'block'")
    if window is not None and (shuffle != "block" or type(window) is not int or window < 1):
        raise SchemaError(
            f"shuffle_window: got {window!r} with shuffle={shuffle!r}, expected how many items shuffle='block' "
            "shuffles together"
        )
    if weight_by is not None and shuffle is not True:
        raise SchemaError(f"weight_by={weight_by!r} draws at random, with replacement; give shuffle=True to the loader")
