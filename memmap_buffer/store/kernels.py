"""The loops of the sum tree as machine code, where numba is installed; without it numpy goes the same steps.

Both give the same bits. Each step is taken for all of a batch, so that their cache misses overlap.

numba is loaded and the loops are compiled (about a second) only by who asks for them, which the tree does after some
draws, so that a program that draws a batch or two does not wait for it.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


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
    for _ in range(levels // 3):
        for i in range(count):
            node, value = 8 * nodes[i], rest[i]
            left = (heap[node] + heap[node + 1]) + (heap[node + 2] + heap[node + 3])
            right = int(value >= left)
            value -= left * right
            node += 4 * right
            left = heap[node] + heap[node + 1]
            right = int(value >= left)
            value -= left * right
            node += 2 * right
            left = heap[node]
            right = int(value >= left)
            rest[i] = value - left * right
            nodes[i] = node + right
    return bool((heap[nodes] > 0).all())


def put(heap: Any, top: int, leaves: Any, priorities: Any) -> None:
    """Give leaves (B,) their priorities (B,) and recompute what lies above, down to the `top` nodes of one level."""
    capacity, count, levels = len(heap) >> 1, len(leaves), 0
    for i in range(count):
        heap[capacity + leaves[i]] = priorities[i]
    while top << levels < capacity:
        levels += 3
        for i in range(count):
            node = (capacity + leaves[i]) >> levels
            low, high = 8 * node, 8 * node + 4
            left = (heap[low] + heap[low + 1]) + (heap[low + 2] + heap[low + 3])
            heap[node] = left + ((heap[high] + heap[high + 1]) + (heap[high + 2] + heap[high + 3]))
