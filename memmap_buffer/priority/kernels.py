"""The loops over the items of a batch as machine code, where numba is installed; else numpy does the same.

Both give the same bits. A loop replaces a dozen calls of numpy, and for a batch of 256 the calls are the cost. Each
step is taken for all items of a batch, so that their cache misses overlap.

They are loaded when something is first drawn by priority. Their machine code is kept beside this file, or where
`NUMBA_CACHE_DIR` says, so that only the first process of an installation waits until they are compiled. Numba
compiles it anew when this file changes, and no other: whatever the loops go by must stand here.
"""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

log = logging.getLogger("memmap_buffer")


class Kernels(NamedTuple):
    """The functions of this module, compiled."""

    accumulate: Any
    find: Any
    put: Any
    locate: Any
    leaves: Any


@lru_cache(maxsize=1)
def compiled() -> Kernels | None:
    """The kernels, or None where numba is not installed."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None
    floats, integers, integer, yes = numba.float64[::1], numba.int64[::1], numba.int64, numba.boolean
    any_integers = integers.copy(layout="A", readonly=True)  # strided and read-only arrays too
    chosen, values, places = integers.copy(readonly=True), floats.copy(readonly=True), numba.int64[:, ::1]
    signatures = {
        accumulate: numba.void(floats, floats),
        find: numba.float64(floats, places, integer, values, chosen, values, integers, floats),
        put: numba.void(floats, places, integer, chosen, chosen, values),
        locate: yes(chosen, places, chosen, chosen, integers, integers, integers),
        leaves: yes(chosen, places, chosen, any_integers, any_integers, integers, integers),
    }
    log.info("the loops of draws by priority are loaded by numba; the first time they are compiled, for some seconds")
    return Kernels(*(_compiled(numba, signature, loop) for loop, signature in signatures.items()))


def _compiled(numba: Any, signature: Any, loop: Any) -> Any:
    try:
        return numba.njit(signature, nogil=True, cache=True)(loop)
    except (RuntimeError, OSError):  # there is no folder where it may be kept
        return numba.njit(signature, nogil=True)(loop)


def accumulate(nodes: Any, sums: Any) -> None:
    """0, then the sums of nodes (top,) up to each, into sums (top + 1,); NaN at the end where one is negative."""
    total = lowest = 0.0
    sums[0] = total
    for i in range(len(nodes)):
        total += nodes[i]
        lowest = min(lowest, nodes[i])
        sums[i + 1] = total
    if lowest < 0:
        sums[-1] = np.nan


def find(words: Any, offsets: Any, first: int, sums: Any, of: Any, values: Any, nodes: Any, rest: Any) -> float:
    """The leaves at values of the cumulative sums of trees, and their priorities; see `SumTree.find`.

    Args:
        words: where all trees lie. offsets: (levels, trees) what the places of nodes there are beyond their numbers.
        first: the number of the first leaf. sums: (top + 1,) cumulative, from 0, of the nodes of the highest level of
            one tree; of several trees (0,): the highest level of each is node 1.
        of: (B,) the tree of each value. values: (B,).
        nodes, rest: (B,) to be filled: with leaves and priorities at last.

    Returns: what is of no use, but that the reads are done.
    """
    count, top, levels = len(of), len(sums) - 1, len(offsets) - 1
    nodes[:] = 0
    rest[:] = values
    if top < 0:
        nodes += 1
    else:
        last = top - 1
        while last and sums[last] == sums[top]:  # what rounding brought to the end is of the last that adds something
            last -= 1
        step = top >> 1
        while step:  # products, here and below, as no processor foretells such branches
            for i in range(count):
                nodes[i] += step * int(sums[nodes[i] + step] <= values[i])
            step >>= 1
        nodes[:] = np.minimum(nodes, last)
        rest -= sums[nodes]
        nodes += top
    touched, beside = 0.0, int(levels > 0)  # where there is one level there may be fewer than eight leaves
    for level in range(levels - 1, -1, -1):
        # Nothing but reads, so that the processor has more of them under way than while it decides on each.
        for i in range(count):
            nodes[i] = 8 * nodes[i] + offsets[level, of[i]]
            touched += words[nodes[i]]
        for i in range(count):
            node, value = nodes[i], rest[i]
            lower = (words[node] + words[node + 1]) + (words[node + 2] + words[node + 3])
            beyond = (words[node + 4] + words[node + 5]) + (words[node + 6] + words[node + 7])
            right = int(value >= lower) * int(beyond > 0)
            value -= lower * right
            node += 4 * right
            lower, beyond = words[node] + words[node + 1], words[node + 2] + words[node + 3]
            right = int(value >= lower) * int(beyond > 0)
            value -= lower * right
            node += 2 * right
            lower = words[node]
            right = int(value >= lower) * int(words[node + 1] > 0)
            rest[i] = value - lower * right
            nodes[i] = node + right - offsets[level, of[i]]
    for i in range(count):
        leaf = offsets[0, of[i]] + nodes[i]
        priority, eight, above = words[leaf], leaf - nodes[i] % 8 * beside, nodes[i] >> 3 * beside
        sound = (rest[i] - priority <= 1e-9 * values[i]) & (priority <= words[offsets[beside, of[i]] + above])
        for other in range(8):
            sound &= words[eight + other * beside] >= 0
        rest[i] = priority * int(sound)
        nodes[i] -= first
    return touched


def put(words: Any, offsets: Any, first: int, of: Any, leaves: Any, priorities: Any) -> None:
    """Give leaves (B,) of the trees `of` (B,) their priorities (B,), and recompute the nodes above; see `find`."""
    for i in range(len(of)):
        words[offsets[0, of[i]] + first + leaves[i]] = priorities[i]
    for level in range(1, len(offsets)):
        for i in range(len(of)):
            node = (first + leaves[i]) >> 3 * level
            low = offsets[level - 1, of[i]] + 8 * node
            lower = (words[low] + words[low + 1]) + (words[low + 2] + words[low + 3])
            right = (words[low + 4] + words[low + 5]) + (words[low + 6] + words[low + 7])
            words[offsets[level, of[i]] + node] = lower + right


def locate(memory: Any, places: Any, of: Any, leaves: Any, slots: Any, serials: Any, t: Any) -> bool:
    """Whose steps leaves (B,) are; False where one is none.

    Args:
        memory: all words. places: (8, folders) the numbers of `leaves.Place`. of: (B,) in which folder each leaf is.
        slots, serials, t: (B,) to be filled.
    """
    for i in range(len(leaves)):
        per_slot, before, count, pairs = places[0, of[i]], places[1, of[i]], places[2, of[i]], places[3, of[i]]
        slot = leaves[i] // per_slot
        if slot < 0 or slot >= count:
            return False
        shown, at = memory[pairs + 2 * slot + 1], leaves[i] - slot * per_slot - before
        if max(at, 0) < (shown & 0xFFFFFFFF) or at >= (shown >> 32 & 0xFFFFFFFF):
            return False
        slots[i], serials[i], t[i] = slot, memory[pairs + 2 * slot] - 1, at
    return True


def leaves(memory: Any, places: Any, of: Any, serials: Any, t: Any, slots: Any, out: Any) -> bool:
    """The slots and leaves (B,) of steps; False where one is none, or serials do not follow one another.

    Args:
        memory, places, of: as for `locate`.
        slots, out: (B,) to be filled.
    """
    for i in range(len(serials)):
        pairs, shown, order = places[3, of[i]], places[4, of[i]], places[5, of[i]]
        oldest, num_serials = places[6, of[i]], places[7, of[i]]
        if (
            serials[i] < oldest
            or serials[i] - oldest >= num_serials
            or memory[shown + serials[i] - oldest] != serials[i]
        ):
            return False
        slot = memory[order + serials[i] - oldest]
        steps = memory[pairs + 2 * slot + 1]
        if (
            memory[pairs + 2 * slot] != serials[i] + 1
            or t[i] < (steps & 0xFFFFFFFF)
            or t[i] >= (steps >> 32 & 0xFFFFFFFF)
        ):
            return False
        slots[i], out[i] = slot, slot * places[0, of[i]] + places[1, of[i]] + t[i]
    return True
