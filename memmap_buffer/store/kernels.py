"""The loops of the sum tree as machine code, where numba is installed; without it numpy goes the same steps.

Both give the same bits. numba is loaded and the loops are compiled (about a second) only by who asks for them, which
the tree does after some draws, so that a program that draws a batch or two does not wait for it.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, NamedTuple


class Kernels(NamedTuple):
    """`find` and `put`, compiled."""

    find: Any
    put: Any


@lru_cache(maxsize=1)
def compiled() -> Kernels | None:
    """The kernels, or None where numba is not installed."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None
    floats, integers = numba.float64[::1], numba.int64[::1]
    make = numba.njit
    return Kernels(
        make(numba.boolean(floats, floats, floats, integers, floats), nogil=True)(find),
        make(numba.void(floats, numba.int64, integers, floats), nogil=True)(put),
    )


def find(heap: Any, sums: Any, values: Any, nodes: Any, rest: Any) -> bool:
    """The leaf nodes at values of the cumulative sum; False where one of them has priority 0.

    Args: heap: (2 * capacity,). sums: (top + 1,) cumulative, from 0. values: (B,). nodes, rest: (B,) to be filled.
    """
    top, count = len(sums) - 1, len(values)
    last = top - 1
    while last and sums[last] == sums[top]:  # what rounding brought to the end belongs to the last that adds something
        last -= 1
    nodes[:] = 0
    step = top >> 1
    while (
        step
    ):  # step by step for all values, so that their cache misses overlap; products, as no branch can be foretold
        for i in range(count):
            nodes[i] += step * int(sums[nodes[i] + step] <= values[i])
        step >>= 1
    for i in range(count):
        nodes[i] = min(nodes[i], last)
        rest[i] = values[i] - sums[nodes[i]]
        nodes[i] += top
    width = 2 * top
    while width < len(heap):
        for i in range(count):
            left = heap[2 * nodes[i]]
            right = int(rest[i] >= left)
            rest[i] -= left * right
            nodes[i] = 2 * nodes[i] + right
        width *= 2
    positive = True
    for i in range(count):
        positive &= heap[nodes[i]] > 0
    return positive


def put(heap: Any, top: int, leaves: Any, priorities: Any) -> None:
    """Give leaves (B,) their priorities (B,) and recompute what lies above, down to the `top` nodes of one level."""
    capacity, count = len(heap) >> 1, len(leaves)
    for i in range(count):
        heap[capacity + leaves[i]] = priorities[i]
    shift, width = 0, capacity
    while width > top:
        shift += 1
        width >>= 1
        for i in range(count):
            node = (capacity + leaves[i]) >> shift
            heap[node] = heap[2 * node] + heap[2 * node + 1]
