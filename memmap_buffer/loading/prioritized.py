"""Draws by priority: anchors with their probabilities and importance weights; and new priorities of steps.

The sampler draws in the process that owns the priorities; workers only read. So the priorities by which a batch was
drawn are at most as old as the batches that wait for it (`prefetch_factor` times `num_workers`, and `prefetch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, FloatArray, to_numpy
from memmap_buffer.errors import NotEnoughDataError, SchemaError, WriterLostError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.lock import Turn
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import Index
from memmap_buffer.items.rank_partition import Ranks
from memmap_buffer.items.shuffle import Quota
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.priority.anchor_priorities import AnchorPriorities, SeveralAnchors
from memmap_buffer.priority.leaves import Drawn
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.priorities import SCALE, Highest, Priorities, StepLeaves
from memmap_buffer.priority.sum_tree import DamagedSumsError, distinct, load_loops, spread
from memmap_buffer.views.anchors import Anchors, Runs
from memmap_buffer.views.folders import Folders, id_of
from memmap_buffer.views.gather import Columns

_SETTLED, _NUM_DAMAGED = attrgetter("settled"), attrgetter("num_damaged")  # of many folders, in half the time
LOOKS = 3  # see `PrioritizedDraws.draw`
_ONE = np.zeros(1, np.int64)  # the numbers of the folders where there is one


class NamedPriorities:
    """The priorities of one name, one tree a folder, each opened when it is first needed.

    Args:
        folders: the folders.
        name, alpha, epsilon: see `Priorities.open`.

    Attributes:
        opened: those that are open already.
        by_folder: whether the indices of a batch begin with the number of the folder.
        error_clip: see `Prioritized`.
        drawn: of what items batches were drawn: whether of whole episodes, False for those of steps.
        ranks: that draw by them, if there are several; new priorities of each are given to all.
    """

    def __init__(
        self, folders: Folders, name: str, *, alpha: float | None = None, epsilon: float | None = None
    ) -> None:
        self._folders, self._name, self._alpha, self._epsilon = folders, name, alpha, epsilon
        self.by_folder = not folders.single
        self.error_clip: tuple[float, float] | None = None
        self.drawn: set[bool] = set()
        self.ranks: Ranks | None = None
        self.opened: dict[Storage, Priorities] = {}
        self._leaves = StepLeaves(folders.single)
        self._highest = Highest()
        self._opening = Turn()  # threads open each once

    def of(self, storage: Storage) -> Priorities:
        """The priorities of a folder. Raises as `Priorities.open`."""
        with self._opening.lock:
            priorities = self.opened.get(storage)
            if priorities is None:
                how: dict[str, Any] = {"alpha": self._alpha, "epsilon": self._epsilon, "highest": self._highest}
                priorities = Priorities.open(storage, self._name, **how)
                self.opened[storage] = priorities
            return priorities

    def update(self, of_ranks: Sequence[tuple[IntArray, FloatArray]], own: int = 0) -> int:
        """Give steps the priorities of their errors, as `StepLeaves.update`; it may be called again with the same.

        Args:
            of_ranks: of each rank (columns, errors): of each item (the number of its folder,) the serial and, unless
                it is a whole episode, t; and its error (B,), or (B, L).
            own: the number of this rank among them.

        Returns:
            how many of this rank's items were dropped because their episode is gone.
        """
        dropped = [0] * len(of_ranks)
        for rank, (columns, errors) in enumerate(of_ranks):
            each, of = self._folders_of(columns)
            t = columns[:, -1] if columns.shape[1] - self.by_folder == 2 else None
            update = partial(self._leaves.update, of, columns[:, int(self.by_folder)], t, errors)
            dropped[rank] = self._leaves.over(each, of, update)
        return dropped[own]

    def get(self, columns: IntArray) -> FloatArray:
        """(B,) the priorities of steps, 0 where one is gone. Raises as `StepLeaves.get`."""
        each, of = self._folders_of(columns)
        return self._leaves.over(each, of, partial(self._leaves.get, of, columns[:, -2], columns[:, -1]))

    def _folders_of(self, columns: IntArray) -> tuple[Sequence[Priorities | None], IntArray | None]:
        """The priorities of folders, None for one that is not there; (B,) in which of them an item is."""
        if not self.by_folder:
            return [*self.opened.values()] or [self.of(self._folders.storages[0])], None
        places = self._folders.places(columns[:, 0])
        if places is not None:
            storages, of = places
            with self._opening.lock:
                each = [self.opened.get(storage) for storage in storages]
            if None not in [each[i] for i in np.flatnonzero(np.bincount(of)).tolist()]:
                return each, of
        numbers, of = np.unique(columns[:, 0], return_inverse=True)
        return [self._numbered(number) for number in numbers.tolist()], of

    def open(self) -> None:
        """Open the priorities of every folder, or of none. Raises as `of`."""
        storages = self._folders.storages
        there = [storage for storage in storages if not storage.withdrawn]
        try:
            for storage in there:
                self.of(storage)
        except BaseException as error:
            self.close()
            if not (isinstance(error, WriterLostError) and self._are_others_than(storages)):
                raise
            self.open()

    def move_to(self, folders: Folders) -> None:
        """Go on with the same folders, opened again as their columns were changed; other threads may be drawing."""
        with self._opening.lock:
            self._folders = folders
            self.open()
            self.prune()

    def require_episodes(self, indices: Array) -> None:
        """Raise SchemaError where numbers of one axis, which are serials, are rather positions of steps."""
        if self.drawn == {False}:
            raise SchemaError(
                f"update_priorities: got indices {indices.shape}, the serials of whole episodes, where only steps were "
                f"drawn by the priorities {self._name!r}; give `_indices` (B, 2) of the batch as they are, or serials "
                "as a column, serials[:, None], to give all steps of these episodes an error"
            )

    def require(self, numbers: IntArray) -> None:
        """Raise SchemaError for the number of a folder that there can never have been; a shard may have come since."""
        if self._folders.places(numbers) is not None:
            return
        for number in np.unique(numbers).tolist():
            if self._find(number) is None and not 0 <= number <= (highest := int(self._folders.numbers.max())):
                raise SchemaError(f"priorities: got folder {number}, expected one from 0 to {highest}")

    def _numbered(self, number: int) -> Priorities | None:
        """The priorities of the folder of that number, None if it was removed, or is not there yet."""
        storage = self._find(number)
        if storage is None or storage.withdrawn:
            return None
        try:
            return self.of(storage)
        except WriterLostError:
            if not self._are_others_than((storage,)):
                raise
            return self._numbered(number)

    def _are_others_than(self, storages: Sequence[Storage]) -> bool:
        """Whether some of the folders were removed, or made anew, since they were looked at."""
        self._folders.refresh()
        return not {*storages} <= {*self._folders.storages}

    def _find(self, number: int) -> Storage | None:
        storage = self._folders.numbered(number)
        if storage is None:
            self._folders.refresh()
            storage = self._folders.numbered(number)
        return storage

    def use(self, how: Prioritized) -> None:
        """Go on with another α or ε, see `Priorities.use`, and another clip of errors."""
        scale = self._alpha, self._epsilon = how.alpha, how.epsilon
        self.error_clip = how.error_clip
        for priorities in list(self.opened.values()):  # another thread may open more
            if SCALE(priorities) != scale:
                priorities.use(alpha=how.alpha, epsilon=how.epsilon)

    def checkpoint(self) -> None:
        """Wait until they are on the disk."""
        for priorities in self.opened.values():
            priorities.checkpoint()

    def close(self) -> None:
        """Bring all of them to the disk and close them."""
        while self.opened:
            self.opened.popitem()[1].close()

    def prune(self) -> None:
        """Close the priorities of folders that are not read any more."""
        for storage in self.opened.keys() - set(self._folders.storages):
            self.opened.pop(storage).close()


class PrioritizedDraws:
    """Batches drawn by priority, with replacement unless `Prioritized` says otherwise.

    Args:
        reader: reads the batches.
        how: the options of the draws.
        priorities: of its folders; None where batches are drawn by a meta field.
        weights: one per folder: each batch has exactly these shares.

    Attributes:
        num_drawn: batches drawn so far, by which β rises, unless they were numbered.
    """

    def __init__(
        self,
        reader: BatchReader,
        how: Prioritized,
        priorities: NamedPriorities | None,
        weights: Sequence[float] | None = None,
    ) -> None:
        load_loops()
        self.reader, self.how, self.num_drawn = reader, how, 0
        self._priorities = priorities
        self._weights = None if reader.folders.single else weights
        self._shared = 0
        self._by_storage: dict[Storage, AnchorPriorities] = {}
        self._leaves = SeveralAnchors(reader.folders.single)
        self._followed: tuple[Index, IntArray, list[tuple[Storage, Runs, bool]]] | None = None
        # The priorities of each folder, and that by which they were followed: without a change they need no look each.
        self._each: list[AnchorPriorities] = []
        self._current: tuple[Index, tuple[EpisodeTable, ...], list[int]] | None = None
        self._turn = Turn()
        self._only = reader.folders.storages[0] if reader.folders.single else None

    def next(
        self,
        batch_size: int,
        rng: np.random.Generator,
        alone: bool = False,
        distinct: bool = False,
        new_every: int | None = None,
    ) -> Columns:
        """The next batch; see `draw`.

        Raises:
            SchemaError: `new_every`: new steps have the highest priority, and no queue; `distinct`: `how` says with
                replacement.
        """
        if new_every is not None:
            raise SchemaError(
                "new_every and prioritized exclude each other; new steps have the highest priority there is"
            )
        if distinct and self.how.replacement:
            raise SchemaError(
                "replacement=False: draws by priority are with replacement; leave one out, or give "
                "prioritized=Prioritized(replacement=False, stratified=False)"
            )
        anchors, shown_at = self.draw(batch_size, rng, alone)
        folders = self.reader.folders
        return self.reader.read(folders.find(anchors) if shown_at is None else folders.at(anchors, shown_at))

    def draw(
        self,
        batch_size: int,
        rng: np.random.Generator,
        alone: bool = False,
        number: int | None = None,
        looks: int = LOOKS,
    ) -> tuple[Anchors, int | None]:
        """The anchors of the next batch, and the change counter at which all were shown, if that is known.

        Args:
            batch_size: items.
            rng: chance.
            alone: the batch does not depend on those before, and β stays.
            number: how many batches were before, by which β rises; None: those that were drawn.
            looks: how often it is looked for something to draw. A writer may give all slots to others between the look
                at the priorities of steps and that at the anchors, and then none has one.

        Raises:
            NotEnoughDataError: there is nothing to draw.
        """
        with self._turn.lock:
            selection, steps = self.reader.selection, None
            if self._priorities is not None:
                self._priorities.use(self.how)  # others of the name may have changed them
                self._priorities.drawn.add(selection.view.per_episode)
                if self._only is not None:
                    # What takes other locks, or long, comes first: items that no episode tells of, and the files.
                    if not selection.by_episode:
                        self.reader.index(refresh=True)
                    steps = self._priorities.opened.get(self._only) or self._priorities.of(self._only)
            try:
                if steps is None:  # the locks of several are taken together, see `SeveralAnchors`
                    numbers, each = self._follow()
                    draw = partial(self._draw, each, batch_size, rng, alone)
                    places, (slot, serial, t, priority), shares, shown_at = self._leaves.over(each, draw)
                else:
                    with steps.lock:  # what is drawn from must be what was followed: others add steps, and update them
                        numbers, each = self._follow(steps)
                        self._leaves.look(each)
                        places, (slot, serial, t, priority), shares, shown_at = self._draw(each, batch_size, rng, alone)
            except NotEnoughDataError:
                if looks == 1:
                    raise
                return self.draw(batch_size, rng, alone, number, looks - 1)
            probability = priority * shares[0 if places is None else places]
            beta = self.how.beta_at(self.num_drawn if number is None else number)
            weight = self._weigh(probability, beta, each, shares)
            self.num_drawn += not alone
            self._shared += 0 if alone else batch_size
        folder = None if places is None else numbers[places]
        anchors = Anchors(folder, slot, serial, t, weight.astype(np.float32), probability)
        if shown_at is not None:
            return anchors, shown_at
        return self.reader.crop(self.reader.index().followed(anchors), lambda: rng), None

    def share(self, ranks: Ranks) -> None:
        """Have these ranks draw by the same priorities from now on."""
        if self._priorities is not None:
            self._priorities.ranks = ranks if ranks.connected else None

    def __len__(self) -> int:
        """The items that can be drawn."""
        return len(self.reader.index(refresh=True))

    def _follow(self, steps: Priorities | None = None) -> tuple[IntArray, list[AnchorPriorities]]:
        """The numbers of the folders, and the priorities of the anchors of each, as of now; steps: of the only one."""
        if self._only is not None and self.reader.selection.by_episode:
            return _ONE, [self._followed_by(self._only, None, True, steps)]
        index = self.reader.index(refresh=True)
        if self._followed is None or self._followed[0] is not index:
            self._followed = self._look(index)
        _, places, followed = self._followed
        now = index, self.reader.folders.tables, [*map(_NUM_DAMAGED, self.reader.folders.storages)]
        alone = self._only is not None or self.reader.frozen
        if alone or now != self._current or not all(map(_SETTLED, self._each)):
            self._current = None
            try:
                self._each = [self._followed_by(*each, steps) for each in followed]
            except WriterLostError:
                if self.reader.index(refresh=True) is index:
                    raise
                return self._follow(steps)  # a shard was removed, or made anew, since it was looked at
            self._current = now
        return places, self._each

    def _look(self, index: Index) -> tuple[Index, IntArray, list[tuple[Storage, Runs, bool]]]:
        """The index, its folders by number, and of each the runs of its anchors and whether these are all steps."""
        self.reader.require(index)
        gone = self._by_storage.keys() - set(self.reader.folders.storages)
        for removed in gone:
            del self._by_storage[removed]
        if gone and self._priorities is not None:
            self._priorities.prune()
        numbers, there = [], []
        for (number, id, table), runs in index.by_folder():
            storage = self.reader.folders.numbered(number) if id else None
            if storage is not None and id_of(storage) == id:  # no other took its place meanwhile
                numbers.append(number)
                there.append((storage, runs, runs.count.sum() == table.steps))
        return index, np.array(numbers), there

    def _followed_by(
        self, storage: Storage, runs: Runs | None, every_step: bool, steps: Priorities | None
    ) -> AnchorPriorities:
        """The priorities of the anchors of a folder, as of now.

        Args:
            storage: the folder.
            runs: of its anchors; None where they are to be found slot by slot.
            every_step: each step is an anchor, where `runs` are given.
            steps: the priorities of its steps, if they are open; with a lock that is held nothing may be opened.
        """
        priorities = self._by_storage.get(storage)
        if priorities is None:
            if steps is None and self._priorities is not None:
                steps = self._priorities.of(storage)
            priorities = AnchorPriorities(storage, steps, self.how, self.reader.selection, by_slot=runs is None)
            self._by_storage[storage] = priorities
        priorities.follow(runs, every_step, later=runs is not None and self._only is None)
        return priorities

    def _draw(
        self, each: list[AnchorPriorities], batch_size: int, rng: np.random.Generator, alone: bool
    ) -> tuple[IntArray | None, Drawn, FloatArray, int | None]:
        """The draw.

        Returns: (the place of each item's folder, or None; the anchors; the probability of a priority of 1 in each
            folder; the change counter of the one folder at which all of them were shown, where it is known).
        """
        places: IntArray | None = None
        drawn: Drawn | None = None
        for _ in range(1 + len(each)):  # each time but the last one the damaged sums of a folder are made anew
            tree = self._leaves.tree
            totals = tree.totals()
            total = least = totals.item(0)
            if len(totals) > 1:
                total, least = float(np.add.reduce(totals)), np.minimum.reduce(totals)
            if not 0 <= least <= total < np.inf:
                self._leaves.mend(np.flatnonzero(~((totals >= 0) & (totals < np.inf))))
                continue
            if not total > 0:
                if not any(priorities.count for priorities in each):
                    raise self.reader.nothing_to_read()
                path = self.reader.folders.storages[0].path
                raise NotEnoughDataError(f"{path}: nothing to draw: every item has priority 0", episodes=0)
            if self._only is not None and self.how.replacement:
                values, shares = spread(batch_size, total, rng, stratified=self.how.stratified), 1 / totals
            else:
                try:
                    places, values, shares = self._choose(totals, total, batch_size, rng, alone)
                except DamagedSumsError as error:
                    self._leaves.mend(np.array([(tree.trees or (tree,)).index(*error.args)]))
                    continue
            drawn = self._leaves.find(places, values)
            if drawn is not None:
                break
        assert drawn is not None
        selection, shown_at = self.reader.selection, None
        if places is None and not (selection.random or selection.mixes) and each[0].storage.tells_by_counter:
            shown_at = each[0].shown_at
        return places, drawn, shares, shown_at

    def _choose(
        self, totals: FloatArray, total: float, batch_size: int, rng: np.random.Generator, alone: bool
    ) -> tuple[IntArray | None, FloatArray, FloatArray]:
        """(B,) in which folder each item is, (B,) at which value of its sum, and the third of `_draw`.

        Raises:
            DamagedSumsError: see `distinct`.
        """
        stratified, tree = self.how.stratified, self._leaves.tree
        trees = tree.trees or (tree,)
        if self._weights is None:
            if not self.how.replacement:
                places, values = distinct(trees, batch_size, rng)
                return None if self._only is not None else places, values, np.full(len(totals), 1 / total)
            values = spread(batch_size, total, rng, stratified=stratified)
            ends = totals.cumsum()
            places = np.minimum(ends.searchsorted(values, "right"), totals.nonzero()[0][-1])
            within = np.minimum(np.maximum(values - (ends - totals).take(places), 0), totals.take(places))
            return places, within, np.full(len(totals), 1 / total)
        for number in np.flatnonzero(totals == 0).tolist():
            path = self.reader.folders.storages[number].path
            raise NotEnoughDataError(f"{path}: folder {number} has nothing to give its share of a batch", folder=number)
        begin = 0 if alone else self._shared
        places, _ = Quota(self._weights).turns(np.arange(begin, begin + batch_size))
        values = np.empty(batch_size)
        for place, each in enumerate(totals):
            mine = np.flatnonzero(places == place)
            if self.how.replacement:
                values[mine] = spread(len(mine), float(each), rng, stratified=stratified)
            else:
                values[mine] = distinct(trees[place : place + 1], len(mine), rng)[1]
        shares = np.asarray(self._weights, np.float64) / np.sum(self._weights) / totals
        return places, np.minimum(values, totals[places]), shares

    def _weigh(
        self, probability: FloatArray, beta: float, each_folder: list[AnchorPriorities], shares: FloatArray
    ) -> FloatArray:
        """Importance weights (B,), normalised as `how` says. Source: Schaul et al. 2016, section 3.4."""
        if self.how.normalize is None:
            count = sum(priorities.count for priorities in each_folder)
            return np.asarray((count * probability) ** -beta)
        # The number of items cancels out of a quotient of two weights.
        if self.how.normalize == "batch":
            lowest = float(np.minimum.reduce(probability))
        else:
            each = [priorities.minimum() * share for priorities, share in zip(each_folder, shares, strict=True)]
            some = [least for least in each if least > 0]
            lowest = min(some, default=float(np.minimum.reduce(probability)))  # others may have set all to 0 since
        return np.asarray((probability / lowest) ** -beta)


def gathered_errors(
    priorities: NamedPriorities, indices: Any, td_errors: Any
) -> tuple[list[tuple[IntArray, FloatArray]], int]:
    """The items and errors of each rank, and the number of this one, as `NamedPriorities.update` takes them.

    Args:
        priorities: of the folders.
        indices: `_indices` (B, 2) or `_index` (B,) of a batch; with several folders one column more.
        td_errors: (B,), or (B, L) for the L steps from each item's first on; errors beyond the episode are ignored.
            (B,) of whole episodes is given to every step.

    Raises:
        SchemaError: shapes that do not fit, serials where only steps were drawn, or an error that is no finite number;
            where ranks share the priorities, on each of them, whatever failed on one.
    """
    ranks, own_errors, why = priorities.ranks, None, ""
    if ranks is None:
        return [_checked(priorities, indices, td_errors)], 0
    try:
        own_errors = _checked(priorities, indices, td_errors)
        if not np.isfinite(own_errors[1]).all():
            raise SchemaError("td_errors: got a number that is not finite")
    except Exception as error:  # the others wait for this rank
        why = str(error) or repr(error)
    answers = ranks.gather((own_errors, why))
    wrong = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if wrong:
        raise SchemaError(f"update_priorities: nothing was changed on any rank: {'; '.join(wrong)}")
    return [rank_errors for rank_errors, _ in answers], ranks.rank


def _checked(priorities: NamedPriorities, indices: Any, td_errors: Any) -> tuple[IntArray, FloatArray]:
    """The columns of items, and their errors as these count."""
    indices, td_errors = to_numpy(indices), to_numpy(td_errors)
    columns = _columns(priorities, indices, "update_priorities")
    if indices.ndim == 1:
        priorities.require_episodes(indices)
    if td_errors.shape[:1] != columns.shape[:1] or td_errors.ndim > 2 or td_errors.dtype.kind not in "fiu":
        raise SchemaError(
            f"update_priorities: got errors {td_errors.dtype} {td_errors.shape} of {len(columns)} items, expected (B,) "
            "or (B, L)"
        )
    errors = np.asarray(td_errors, np.float64)
    return columns, errors if priorities.error_clip is None else np.clip(errors, *priorities.error_clip)


def read_priorities(priorities: NamedPriorities, indices: Array) -> FloatArray:
    """The priorities p of steps.

    Args:
        priorities: of the folders.
        indices: `_indices` of a batch.

    Returns:
        (B,) float64, 0 where a step is gone.

    Raises:
        SchemaError: shapes that do not fit, or an episode has no such step.
    """
    columns = _columns(priorities, indices, "priorities")
    if columns.shape[1] - priorities.by_folder != 2:
        raise SchemaError(f"priorities: got indices of shape {indices.shape}, expected `_indices`, of steps")
    return priorities.get(columns)


def _columns(priorities: NamedPriorities, indices: Array, what: str) -> IntArray:
    """Indices as columns: (the folder,) the serial, the step unless they are of whole episodes."""
    columns = indices[:, None] if indices.ndim == 1 else indices
    names = columns.shape[-1] - priorities.by_folder if columns.ndim == 2 else 0
    if names not in (1, 2) or columns.dtype.kind not in "iu":
        raise SchemaError(
            f"{what}: got indices {indices.dtype} {indices.shape}; give a batch's `_indices` or `_index` as they are"
        )
    if priorities.by_folder:
        priorities.require(columns[:, 0])
    return np.asarray(columns, np.int64)
