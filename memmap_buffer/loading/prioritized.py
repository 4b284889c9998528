"""Draws by priority: anchors with their probabilities and importance weights, and what is learned of them.

The sampler draws in the process that owns the priorities; workers only gather. So the priorities that a batch was
drawn by are at most as old as the batches that wait for it (`prefetch_factor` times `num_workers`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, check_count
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import Index
from memmap_buffer.items.rank_partition import Ranks
from memmap_buffer.items.shuffle import Quota
from memmap_buffer.loading.batch_reader import Reader
from memmap_buffer.priority.anchor_weights import NOTHING, Found, Heap, Mass, Steps
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.priorities import Priorities
from memmap_buffer.priority.sum_tree import FloatArray, spread
from memmap_buffer.views.folders import Anchors, Folders


class Trees:
    """The priorities of one name, one tree a folder, each opened when it is first needed.

    Args: name, alpha, epsilon: see `Priorities.open`.
    """

    def __init__(self, sources: Folders, name: str, *, alpha: float, epsilon: float) -> None:
        self._sources, self._name, self._alpha, self._epsilon = sources, name, alpha, epsilon
        self._opened: dict[Storage, Priorities] = {}

    def of(self, storage: Storage) -> Priorities:
        """Those of a folder. Raises BufferLockedError: another process owns them. SchemaError, CorruptBufferError."""
        if storage not in self._opened:
            self._opened[storage] = Priorities.open(storage, self._name, alpha=self._alpha, epsilon=self._epsilon)
        return self._opened[storage]

    def open(self) -> None:
        """Open those of every folder, or none. Raises: as `of`."""
        try:
            for storage in self._sources.storages:
                if not storage.withdrawn:
                    self.of(storage)
        except BaseException:
            self.close()
            raise

    def numbered(self, number: int) -> Priorities | None:
        """Those of the source of that number, None where there is no such folder (any more)."""
        highest = int(self._sources.numbers.max())
        if not 0 <= number <= highest:
            raise SchemaError(f"update_priorities: got source {number}, expected one from 0 to {highest}")
        storage = self._sources.numbered(number)
        return None if storage is None or storage.withdrawn else self.of(storage)

    @property
    def by_source(self) -> bool:
        """Whether the indices of a batch begin with the number of the source."""
        return not self._sources.single

    def require(self, *, alpha: float, epsilon: float) -> None:
        """Raise SchemaError where α or ε are not these."""
        for one in self._opened.values():
            one.require(alpha=alpha, epsilon=epsilon)

    def checkpoint(self) -> None:
        """Wait until they are on the disk."""
        for one in self._opened.values():
            one.checkpoint()

    def close(self) -> None:
        """Bring them to the disk and let go."""
        while self._opened:
            self._opened.popitem()[1].close()

    def prune(self) -> None:
        """Let go of those of folders that were removed."""
        for storage in self._opened.keys() - set(self._sources.storages):
            self._opened.pop(storage).close()


class PrioritizedDraws:
    """Batches drawn by priority, with replacement.

    Args:
        reader: what is drawn from. how: see there. priorities: of its folders, None where a meta field is drawn by.
        weights: one per source: each batch has exactly these shares.

    Attributes: num_drawn: batches drawn so far, by which β rises.
    """

    def __init__(
        self,
        reader: Reader,
        how: Prioritized,
        priorities: Trees | None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.reader, self.how, self.num_drawn = reader, how, 0
        self._priorities = priorities
        self._weights = weights
        self._quota = None if weights is None else Quota(weights)
        self._shared = 0
        self._masses: dict[Storage, Steps | Heap] = {}
        self._followed: tuple[Index, IntArray, list[tuple[Mass, Index]]] | None = None
        self._lock = threading.Lock()

    def next(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> Anchors:
        """The anchors of one batch; `alone`: it owes nothing to those before, and β stays.

        Raises: NotEnoughDataError: there is nothing to draw.
        """
        with self._lock:
            numbers, masses = self._follow()
            totals = [mass.total for mass in masses]
            if not sum(totals) > 0:
                raise NotEnoughDataError(f"{self._path}: nothing to draw: every item has priority 0", episodes=0)
            sources, (slot, serial, t, mass), shares = self._draw(masses, totals, batch_size, rng, alone)
            probability = mass * shares[0 if sources is None else sources]
            weight = self._weigh(probability, masses, shares)
            self.num_drawn += not alone
        named = None if sources is None else numbers[sources]
        anchors = Anchors(named, slot, serial, t, weight.astype(np.float32), probability)
        return self.reader.crop(anchors, lambda: rng)

    def distinct(self, batch_size: int, rng: np.random.Generator) -> Anchors:
        """Raises SchemaError: draws by priority are with replacement."""
        raise SchemaError("replacement=False: draws by priority are with replacement; leave one out")

    def __len__(self) -> int:
        """The items that can be drawn."""
        return len(self.reader.index(refresh=True))

    @property
    def _path(self) -> object:
        return self.reader.sources.storages[0].path

    def _follow(self) -> tuple[IntArray, list[Mass]]:
        """The numbers of the sources, and what the anchors of each weigh, as of now."""
        index = self.reader.index(refresh=True)
        if self._followed is None or self._followed[0] is not index:
            self.reader.require(index)
            gone = self._masses.keys() - set(self.reader.sources.storages)
            if gone:
                self._masses = {storage: mass for storage, mass in self._masses.items() if storage not in gone}
                if self._priorities is not None:
                    self._priorities.prune()
            each = self.reader.sources.by_number(self.reader.tables)
            numbers = np.array([number for number, *_ in each])
            parts = [index] if index.source is None else [_part(index, *cut) for cut in index.ranges(numbers)]
            masses = [self._mass(*one[1:], part) for one, part in zip(each, parts, strict=True)]
            self._followed = index, numbers, list(zip(masses, parts, strict=True))
        _, numbers, followed = self._followed
        for mass, part in followed:
            mass.follow(part)
        return numbers, [mass for mass, _ in followed]

    def _mass(self, storage: Storage, table: EpisodeTable, index: Index) -> Mass:
        if storage.withdrawn:
            return NOTHING
        plain = self._plain and len(index) == table.steps
        mass = self._masses.get(storage)
        if mass is None or isinstance(mass, Steps) != plain:
            priorities = None if self._priorities is None else self._priorities.of(storage)
            if plain and priorities is not None:
                mass = Steps(priorities)
            else:
                mass = Heap(storage, priorities, self.how, self.reader.selection.view)
            self._masses[storage] = mass
        return mass

    @property
    def _plain(self) -> bool:
        """Whether an anchor weighs what its step's leaf says, and there is none before step 0."""
        view, how = self.reader.selection.view, self.how
        by_step = not view.per_episode and not getattr(view, "pad_before", 0) and how.over in (None, "first")
        return by_step and how.variant == "proportional" and how.meta is None

    def _draw(
        self, masses: list[Mass], each: list[float], batch_size: int, rng: np.random.Generator, alone: bool
    ) -> tuple[IntArray | None, Found, FloatArray]:
        """(the source of each or None, what was drawn, what a mass of 1 of each source is in probability)."""
        stratified = self.how.stratified
        if self.reader.sources.single:
            values = spread(batch_size, each[0], rng, stratified=stratified)
            return None, masses[0].find(values), np.array([1 / each[0]])
        totals = np.array(each)
        if self._weights is None:
            values = spread(batch_size, float(totals.sum()), rng, stratified=stratified)
            ends = np.cumsum(totals)
            sources = np.minimum(np.searchsorted(ends, values, side="right"), np.flatnonzero(totals)[-1])
            parts = [values[sources == s] - (ends[s] - totals[s]) for s in range(len(totals))]
            shares = np.full(len(totals), 1 / totals.sum())
        else:
            self._require_all(totals)
            begin = 0 if alone else self._shared
            self._shared += 0 if alone else batch_size
            counts = (self._quota or Quota(self._weights)).counts(begin, begin + batch_size)
            sources = np.repeat(np.arange(len(totals)), counts)
            drawn = zip(counts, totals, strict=True)
            parts = [spread(int(n), float(total), rng, stratified=stratified) for n, total in drawn]
            shares = np.asarray(self._weights, np.float64) / np.sum(self._weights) / totals
        found = [masses[s].find(np.clip(part, 0, totals[s])) for s, part in enumerate(parts) if len(part)]
        order = np.argsort(sources, kind="stable")
        slot, serial, t, mass = (_placed(columns, order) for columns in zip(*found, strict=True))
        return sources, (slot, serial, t, mass), shares

    def _require_all(self, totals: FloatArray) -> None:
        for number in np.flatnonzero(totals == 0).tolist():
            path = self.reader.sources.storages[number].path
            raise NotEnoughDataError(f"{path}: source {number} has nothing to give its share of a batch", source=number)

    def _weigh(self, probability: FloatArray, masses: list[Mass], shares: FloatArray) -> FloatArray:
        """Importance weights (B,), normalised as `how` says. Source: Schaul et al. 2016, section 3.4."""
        beta = self.how.beta_at(self.num_drawn)
        if self.how.normalize is None:
            count = sum(mass.count for mass in masses)
            return np.asarray((count * probability) ** -beta)
        # The number of items cancels out of a quotient of two weights.
        if self.how.normalize == "batch":
            lowest = float(np.minimum.reduce(probability))
        else:
            each = [mass.minimum() * share for mass, share in zip(masses, shares, strict=True) if mass.total > 0]
            lowest = min(each)
        return np.asarray((probability / lowest) ** -beta)


class PrioritizedSampler:
    """A PyTorch batch sampler that draws by priority; an epoch has as many batches as one that goes round.

    Args: draws: what is drawn. batch_size: items a batch, every batch is full. drop_last: one batch less where the
        items do not divide. seed: with the epoch's number, and that of the rank, fixes what chance does.
    """

    plans = False
    shuffle = True

    def __init__(self, draws: PrioritizedDraws, *, batch_size: int, drop_last: bool, seed: int, rank: int = 0) -> None:
        self.draws, self.batch_size, self.drop_last, self.seed, self.rank = draws, batch_size, drop_last, seed, rank
        self.epoch = 0

    def num_batches(self, ranks: Ranks) -> int:
        """As many for each rank, which draws for itself."""
        return len(self)

    def whole(self) -> Iterator[Anchors]:
        """The batches of an epoch; who takes some of them has drawn by priority too."""
        return iter(self)

    def complete(self, batch_size: int, drop_last: bool) -> PrioritizedSampler:
        """Another of the same draws; see `EpochSampler.complete`."""
        return PrioritizedSampler(
            self.draws, batch_size=batch_size, drop_last=drop_last, seed=self.seed, rank=self.rank
        )

    def begin(self) -> PrioritizedSampler:
        """Nothing is fixed before a batch is drawn, as priorities change; see `EpochSampler.begin`."""
        return self

    def delivering(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches as they are: an epoch is not counted, as there is nothing of it that would not come again."""
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Which epoch comes next, and how many batches were drawn, by which β rises. Priorities are in the folder."""
        return {"seed": self.seed, "epoch": self.epoch, "num_drawn": self.draws.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Go on with the epoch that `state_dict` told of, from its beginning, and with its β.

        Raises: SchemaError: it is no such state.
        """
        try:
            told = {"seed": state["seed"], "epoch": state["epoch"], "num_drawn": state.get("num_drawn", 0)}
        except (TypeError, KeyError, AttributeError) as error:
            text = f"load_state_dict: got {state!r}, expected what state_dict gave ({error!r})"
            raise SchemaError(text) from error
        for name, value in told.items():
            check_count(f"load_state_dict: {name}", value, 0)
        self.seed, self.epoch, self.draws.num_drawn = told.values()

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch; without it epochs count up by themselves."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(len(self.draws), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Anchors]:
        rng = np.random.default_rng((self.seed, self.epoch, self.rank))
        self.epoch += 1
        for _ in range(len(self)):
            yield self.draws.next(self.batch_size, rng)


def update_priorities(priorities: Trees, indices: Array, td_errors: Array) -> int:
    """Give the steps of items the priorities of their errors.

    Args:
        priorities: of the folders.
        indices: `_indices` (B, 2) or `_index` (B,) of a batch; with several sources one column more.
        td_errors: (B,), or (B, L) for the L steps from each item's first on; what lies beyond the episode is ignored.
            (B,) of whole episodes is given to every step.

    Returns: how many items were dropped because their episode is gone.
    Raises: SchemaError: shapes that do not fit, or an error that is no finite number.
    """
    columns = indices[:, None] if indices.ndim == 1 else indices
    by_source = priorities.by_source
    names = columns.shape[-1] - by_source if columns.ndim == 2 else 0
    if names not in (1, 2) or columns.dtype.kind not in "iu" or td_errors.shape[:1] != columns.shape[:1]:
        raise SchemaError(
            f"update_priorities: got indices {indices.dtype} {indices.shape} and errors {td_errors.shape}; give a "
            "batch's `_indices` or `_index` as they are, and an error for each"
        )
    if td_errors.ndim > 2 or td_errors.dtype.kind not in "fiu":
        raise SchemaError(f"update_priorities: got errors {td_errors.dtype} {td_errors.shape}, expected (B,) or (B, L)")
    columns, errors = np.asarray(columns, np.int64), np.asarray(td_errors, np.float64)
    if not by_source and (only := priorities.numbered(0)) is not None:
        return _update(only, columns, errors)
    dropped, numbers = 0, columns[:, 0]
    for number in np.unique(numbers).tolist():
        mine, found = numbers == number, priorities.numbered(number)
        if found is None:
            dropped += int(mine.sum())
        else:
            dropped += _update(found, columns[mine, 1:], errors[mine])
    return dropped


def _update(priorities: Priorities, columns: IntArray, errors: FloatArray) -> int:
    serials, whole = columns[:, 0], columns.shape[1] == 1
    start = np.zeros_like(serials) if whole else columns[:, 1]
    if errors.ndim == 1 and not whole:
        return priorities.update(serials, start, errors)
    lengths, here = priorities.lengths_of(serials)
    if errors.ndim == 1:
        serials = np.repeat(serials, lengths)
        t = np.arange(len(serials)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        priorities.update(serials, t, np.repeat(errors, lengths))
    else:
        t = start[:, None] + np.arange(errors.shape[1])
        inside = (t >= 0) & (t < lengths[:, None])
        priorities.update(np.broadcast_to(serials[:, None], t.shape)[inside], t[inside], errors[inside])
    return int((~here).sum())


def _part(index: Index, start: int, stop: int) -> Index:
    """Some runs of an index, as of one source."""
    last = None if index.last is None else index.last[start:stop]
    starts = index.starts[start : stop + 1] - index.starts[start]
    return Index(
        index.slot[start:stop], index.serial[start:stop], index.first[start:stop], starts, index.stride, None, last
    )


def _placed(columns: Sequence[Any], order: IntArray) -> Any:
    """What was drawn source by source, in the order of the batch."""
    joined = np.concatenate(columns)
    out = np.empty_like(joined)
    out[order] = joined
    return out
