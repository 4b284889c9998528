"""The leaves of one folder or of many, found and stored to by one call: a call for each would outweigh a batch.

Which folder an item is in is told by `of` (B,); it is None where there is one folder, and what else is an array for
each item is one number then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import FloatArray, all_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import address_of, memory
from memmap_buffer.priority.sum_tree import WIDTH, SumTree, by_tree, joined
from memmap_buffer.priority.tree_file import LOW

_STAMP, _PLACE = attrgetter("stamp"), attrgetter("place")
# (B,) of each episode its slot, which steps have a leaf, start … stop - 1, and whether it is there.
Looked: TypeAlias = tuple[IntArray, IntArray, IntArray, Any]
Drawn: TypeAlias = tuple[IntArray, IntArray, IntArray, FloatArray]  # (B,) slots, serials, t, priorities


class Place(NamedTuple):
    """Where the leaves of a folder lie, with addresses in words of eight bytes; of many folders (B,) of each.

    The loops of `kernels` know these by their order.

    Attributes:
        per_slot: leaves of a slot.
        before: how many of these lie before step 0.
        slots: how many there are.
        pairs: the address of (slots, 2) words: the serial + 1, 0 for none; which steps have a leaf, start | stop << 32.
        serials, order: the addresses of the serials of episodes, ascending, and of their slots.
        oldest, num_serials: the first of these serials, and how many there are.
    """

    per_slot: Any
    before: Any
    slots: Any
    pairs: Any
    serials: Any
    order: Any
    oldest: Any
    num_serials: Any


class Packed:
    """Where the leaves of a packed folder lie, whose slots have as many as their episodes have steps.

    Args:
        storage: the folder.
        before: leaves before step 0 of each slot.

    Attributes:
        first: (slots,) the first leaf of each.
    """

    def __init__(self, storage: Storage, before: int) -> None:
        slots = np.arange(storage.layout.slots)
        self.first = storage.first_row(slots, False) + slots * before
        visible = storage.table.visible
        self._order = visible[np.argsort(self.first[visible], kind="stable")]
        self._ascending = self.first[self._order]

    def slots_of(self, leaves: IntArray) -> IntArray:
        """(B,) in which slot each leaf is."""
        return self._order[np.maximum(np.searchsorted(self._ascending, leaves, side="right") - 1, 0)]


NO_EPISODES: IntArray = np.array([[-2], [0]])  # serials, and their slots: one that no episode has


@dataclass(frozen=True, eq=False)
class Row:
    """The leaves of a folder.

    Attributes:
        tree: their sums.
        per_slot, before: see `Place`.
        pairs: (2 * slots,) the words that lie at `Place.pairs`.
        serials, order: (num_serials,) of episodes, ascending, and their slots; some may be gone.
        packed: more, if the folder is packed.
        times: of each leaf the timestep of its item, where several items have the same one.
    """

    tree: SumTree
    per_slot: int
    before: int
    pairs: IntArray
    serials: IntArray
    order: IntArray
    packed: Packed | None = None
    times: Any = None

    @cached_property
    def place(self) -> Place:
        """The addresses of its arrays, which hold as long as these."""
        pairs, serials, order = (address_of(array) >> 3 for array in (self.pairs, self.serials, self.order))
        slots, count = len(self.pairs) // 2, len(self.serials)
        return Place(self.per_slot, self.before, slots, pairs, serials, order, self.serials.item(0), count)


NOWHERE = Row(SumTree.empty(WIDTH), 1, 0, np.zeros(2, np.int64), *NO_EPISODES)  # of a folder that is not there


class Leaves:
    """The leaves of one folder or of many, as they are now.

    Whoever reads holds the locks of these priorities. It keeps the arrays, so that their addresses stay theirs.

    Args: single: whether it is one folder, and never another.
    """

    def __init__(self, single: bool) -> None:
        self._single = single
        self._each: Sequence[Any] = ()
        self._stamps: list[int | None] = []
        self._rows: list[Row] = []
        self._places: IntArray = np.zeros((8, 0), np.int64)
        self._only: Place | None = None
        self._packed: dict[int, Packed] = {}
        self._from_step_0 = False  # whether no leaf lies before step 0 of its slot
        self._memory = memory().view(np.int64)
        self._joined: tuple[tuple[SumTree, ...], list[bool]] = (), []
        self.tree: SumTree

    def look(self, each: Sequence[Any], chosen: Iterable[int] | None = None) -> None:
        """Look at those folders again that changed.

        Args:
            each: the priorities of all folders, with a `row`, and a `stamp` that is another one whenever the row may
                be; None for one that is not there.
            chosen: which of them are looked at, as this thread holds their locks; None for all.
        """
        looked = range(len(each)) if chosen is None else list(chosen)
        stamps = [*map(_STAMP, map(each.__getitem__, looked))]
        before, seen = self._each, self._stamps
        same = each is before or each == before
        if same and stamps == (seen if chosen is None else [seen[i] for i in looked]):
            return
        self._each = ()  # until all is done
        if len(before) != len(each):
            before, seen = [None] * len(each), [None] * len(each)
            self._rows = [NOWHERE] * len(each)
        for i, folder in enumerate(each):
            if folder is not before[i]:
                self._rows[i], seen[i] = NOWHERE, None
        for i, stamp in zip(looked, stamps, strict=True):
            if stamp != seen[i]:
                self._rows[i], seen[i] = each[i].row(), stamp
        trees, places = tuple(row.tree for row in self._rows), [*map(_PLACE, self._rows)]
        looked_at = trees, [tree.minima for tree in trees]
        if self._single:
            self.tree = trees[0]
        elif looked_at != self._joined:
            # Of these sums are found one by one, so that draws of a seed stay what they are to the last bit.
            apart = any(row.packed is not None or row.times is not None for row in self._rows)
            self.tree, self._joined = joined(trees, apart=apart), looked_at
        self._from_step_0 = not any(place.before for place in places)
        self._packed = {i: row.packed for i, row in enumerate(self._rows) if row.packed is not None}
        self._places, self._only = np.array(places, np.int64).T.copy(), places[0] if self._single else None
        self._each, self._stamps = each, seen

    def place(self, of: IntArray | None) -> Place:
        """Where the leaves of the folders of items lie."""
        return self._only or Place(*self._places.take(of, axis=1))  # type: ignore[arg-type]

    def leaves(self, of: IntArray | None, slots: IntArray, t: IntArray) -> IntArray:
        """The leaves (B,) of steps."""
        place = self._only or self.place(of)
        leaves: IntArray = slots * place.per_slot
        if self._packed:
            for packed, mine in self._packed_ones(of):
                leaves[mine] = packed.first[slots[mine]]
        leaves += t
        return leaves if self._from_step_0 else leaves + place.before

    def _packed_ones(self, of: IntArray | None) -> Iterator[tuple[Packed, Any]]:
        for i, packed in self._packed.items():
            yield packed, slice(None) if of is None else np.flatnonzero(of == i)

    # From a value of the sum to a step

    def find(self, of: IntArray | None, values: FloatArray) -> Drawn | None:
        """The items (B,) at values (B,) of the cumulative sums of their folders.

        None where the sums of a folder were damaged, and were made anew: others are to be drawn, of other sums.
        """
        leaves, priorities = self.tree.find(values, of)
        slots, serials, t, there = self._located(of, leaves, priorities)
        if there is not None:
            self.mend(np.zeros(1, np.int64) if of is None else np.unique(of[~there]))
            return None
        if self._rows[0].times is not None:
            for i, (mine,) in by_tree(of, np.arange(len(t))):
                t[mine] = self._rows[i].times[leaves[mine]]
        return slots, serials, t, priorities

    def _located(
        self, of: IntArray | None, leaves: IntArray, priorities: FloatArray
    ) -> tuple[IntArray, IntArray, IntArray, Any]:
        """(slots, serials, t of leaves (B,); whether each is a step of priority, None where all are)."""
        loops, count = SumTree.loops, len(leaves)
        if loops is not None and not self._packed:
            slots, serials, t = np.empty((3, count), np.int64)
            folders = np.zeros(count, np.int64) if of is None else np.ascontiguousarray(of)
            if loops.locate(self._memory, self._places, folders, leaves, slots, serials, t) and all_of(priorities > 0):
                return slots, serials, t, None
        place = self._only or self.place(of)
        slots = np.minimum(leaves // place.per_slot, place.slots - 1)  # beyond, where damaged sums may lead
        first = slots * place.per_slot
        if self._packed:
            for packed, mine in self._packed_ones(of):
                slots[mine] = packed.slots_of(leaves[mine])
                first[mine] = packed.first[slots[mine]]
        t = leaves - first
        if not self._from_step_0:
            t -= place.before
        there = priorities > 0
        serials, start, stop = self._shown(place, slots)
        there &= (t if self._from_step_0 else np.maximum(t, 0)) >= start
        there &= t < stop
        return slots, serials, t, None if all_of(there) else there

    def mend(self, folders: IntArray) -> None:
        """Make the sums of some folders anew, which are damaged."""
        each = self._each
        for i in folders.tolist():
            each[i].mend()
        self.look(each)

    # From an episode to its slot

    def look_up(self, of: IntArray | None, serials: IntArray) -> Looked:
        """The episodes (B,) that have these serials."""
        place = self._only or self.place(of)
        near = np.minimum(np.maximum(serials - place.oldest, 0), place.num_serials - 1)
        slots = self._memory.take(near + place.order)  # where it is, if no serial was left out
        shown, start, stop = self._shown(place, slots)
        here = shown == serials
        if not all_of(here):
            others = np.flatnonzero(~here)
            for i, (mine, wanted) in by_tree(None if of is None else of[others], others, serials[others]):
                listed = self._rows[i].serials
                slots[mine] = self._rows[i].order[np.minimum(np.searchsorted(listed, wanted), len(listed) - 1)]
            shown, start, stop = self._shown(place, slots)
            here = shown == serials
        return slots, start, stop, here

    def _shown(self, place: Place, slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(B,) the serials of the episodes that have leaves in slots; start and stop of the steps of these."""
        words = 2 * slots
        words += place.pairs
        serials = self._memory.take(words)
        serials -= 1
        words += 1
        steps = self._memory.take(words)
        return serials, steps & LOW, steps >> 32 & LOW
