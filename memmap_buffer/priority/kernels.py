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
    find_in: Any
    put_in: Any


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
    words, begins = chosen, places
    signatures = {
        accumulate: numba.void(floats, floats),
        find: yes(floats, floats, values, integers, floats),
        put: numba.void(floats, integer, chosen, values),
        locate: yes(words, places, chosen, chosen, integers, integers, integers),
        leaves: yes(words, places, chosen, any_integers, any_integers, integers, integers),
        find_in: numba.void(floats, begins, integers, chosen, integers, floats),
        put_in: numba.void(floats, begins, integers, chosen, chosen, values),
    }
    log.info("the loops of draws by priority are loaded by numba; the first time they are compiled, for some seconds")
    return Kernels(*(_compiled(numba, signature, loop) for loop, signature in signatures.items()))


def _compiled(numba: Any, signature: Any, loop: Any) -> Any:
    try:
        return numba.njit(signature, nogil=True, cache=True)(loop)
    except (RuntimeError, OSError):  # there is no folder where it may be kept
        return numba.njit(signature, nogil=True)(loop)


def accumulate(nodes: Any, sums: Any) -> None:
    """0, then the sums of nodes (top,) up to each, into sums (top + 1,)."""
    total = 0.0
    sums[0] = total
    for i in range(len(nodes)):
        total += nodes[i]
        sums[i + 1] = total


def find(heap: Any, sums: Any, values: Any, nodes: Any, rest: Any) -> bool:
    """The leaves at values of the cumulative sum, and their priorities; False where one of these is 0.

    Args:
        heap: (2 * capacity,). sums: (top + 1,) cumulative, from 0. values: (B,).
        nodes, rest: (B,) to be filled: with leaves and priorities at last.
    """
    top, count, levels = len(sums) - 1, len(values), 0
    last = top - 1
    while last and sums[last] == sums[top]:  # what rounding brought to the end belongs to the last that adds something
        last -= 1
    nodes[:] = 0
    step = top >> 1
    while step:  # products, here and below, as no processor foretells such branches
        for i in range(count):
            nodes[i] += step * int(sums[nodes[i] + step] <= values[i])
        step >>= 1
    nodes[:] = np.minimum(nodes, last)
    rest[:] = values - sums[nodes]
    nodes += top
    while top << levels < len(heap) >> 1:
        levels += 3
    touched = 0.0
    for _ in range(levels // 3):
        # Nothing but reads, so that the processor has more of them under way than while it decides on each.
        for i in range(count):
            touched += heap[8 * nodes[i]]
        for i in range(count):
            node, value = 8 * nodes[i], rest[i]
            lower = (heap[node] + heap[node + 1]) + (heap[node + 2] + heap[node + 3])
            right = int(value >= lower)
            value -= lower * right
            node += 4 * right
            lower = heap[node] + heap[node + 1]
            right = int(value >= lower)
            value -= lower * right
            node += 2 * right
            lower = heap[node]
            right = int(value >= lower)
            rest[i] = value - lower * right
            nodes[i] = node + right
    are_positive = touched >= 0
    for i in range(count):
        rest[i] = heap[nodes[i]]
        nodes[i] -= len(heap) >> 1
        are_positive &= rest[i] > 0
    return are_positive


def put(heap: Any, top: int, leaves: Any, priorities: Any) -> None:
    """Give leaves (B,) their priorities (B,) and recompute the nodes above, down to the `top` nodes of one level."""
    capacity, count, levels = len(heap) >> 1, len(leaves), 0
    for i in range(count):
        heap[capacity + leaves[i]] = priorities[i]
    while top << levels < capacity:
        levels += 3
        for i in range(count):
            node = (capacity + leaves[i]) >> levels
            low, high = 8 * node, 8 * node + 4
            lower = (heap[low] + heap[low + 1]) + (heap[low + 2] + heap[low + 3])
            heap[node] = lower + ((heap[high] + heap[high + 1]) + (heap[high + 2] + heap[high + 3]))


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


def find_in(memory: Any, begins: Any, heights: Any, of: Any, nodes: Any, rest: Any) -> None:
    """The leaves at values of the cumulative sums of several trees, and their priorities: 0 only where a tree is empty.

    Args:
        memory: where all of them lie. begins: (levels, trees) where each level does, from the leaves up.
        heights: (trees,) how many levels each has. of: (B,) the tree of each value.
        nodes, rest: (B,) zeros and the values, to be filled: with leaves and priorities at last.
    """
    for level in range(len(begins) - 1, -1, -1):
        for i in range(len(of)):
            if level >= heights[of[i]]:
                continue
            node, value = begins[level, of[i]] + 8 * nodes[i], rest[i]
            lower = (memory[node] + memory[node + 1]) + (memory[node + 2] + memory[node + 3])
            beyond = (memory[node + 4] + memory[node + 5]) + (memory[node + 6] + memory[node + 7])
            right = int(value >= lower) * int(beyond > 0)
            value -= lower * right
            at = 4 * right
            lower, beyond = memory[node + at] + memory[node + at + 1], memory[node + at + 2] + memory[node + at + 3]
            right = int(value >= lower) * int(beyond > 0)
            value -= lower * right
            at += 2 * right
            lower = memory[node + at]
            right = int(value >= lower) * int(memory[node + at + 1] > 0)
            rest[i] = value - lower * right
            nodes[i] = 8 * nodes[i] + at + right
    for i in range(len(of)):
        rest[i] = memory[begins[0, of[i]] + nodes[i]]


def put_in(memory: Any, begins: Any, heights: Any, of: Any, leaves: Any, priorities: Any) -> None:
    """Give leaves (B,) of the trees `of` (B,) their priorities (B,), and recompute the nodes above; see `find_in`."""
    for i in range(len(of)):
        memory[begins[0, of[i]] + leaves[i]] = priorities[i]
    for level in range(1, len(begins)):
        for i in range(len(of)):
            if level >= heights[of[i]]:
                continue
            node = leaves[i] >> 3 * level
            low, high = begins[level - 1, of[i]] + 8 * node, begins[level - 1, of[i]] + 8 * node + 4
            lower = (memory[low] + memory[low + 1]) + (memory[low + 2] + memory[low + 3])
            right = (memory[high] + memory[high + 1]) + (memory[high + 2] + memory[high + 3])
            memory[begins[level, of[i]] + node] = lower + right
