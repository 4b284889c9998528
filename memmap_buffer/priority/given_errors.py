"""Errors that are given with steps: they wait until their steps are published, and then make their priorities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from memmap_buffer.dtypes import to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.priority.sum_tree import FloatArray

Give: TypeAlias = Callable[[str, IntArray, FloatArray], Any]  # a name, (B, 2) serials and steps, (B,) errors


class Recorded(Protocol):
    """An episode that is recorded; `serial` is its number, once it has one, else -1."""

    state: str
    serial: int


def errors_of(given: Any, shape: tuple[int, ...], axes: str) -> FloatArray:
    """Errors as they were given.

    Args:
        given: numbers.
        shape: that they must have; of one environment its axis may be left out.
        axes: what the axes are, for the error.

    Raises:
        SchemaError: another shape, or no finite numbers.
    """
    errors = to_numpy(given)
    alone = shape[:-1] if shape[-1] == 1 and axes.endswith("B)") else shape
    if errors.shape not in (shape, alone) or errors.dtype.kind not in "fiu" or not np.isfinite(errors).all():
        raise SchemaError(
            f"priority: got {errors.dtype} {errors.shape}, expected a finite number for the TD error of each step, "
            f"{axes} = {shape}"
        )
    return errors.astype(np.float64).reshape(shape)


class GivenErrors:
    """The errors of steps that are not published yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Recorded, list[tuple[Any, Any]]]] = {}

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def add(self, name: str, episodes: Sequence[Recorded], t: Sequence[Any], errors: Sequence[Any]) -> None:
        """Take errors for the priorities of a name: of each episode those of one step, or of several."""
        waiting = self._waiting.setdefault(name, {})
        for episode, at, error in zip(episodes, t, errors, strict=True):
            waiting.setdefault(episode, []).append((at, error))

    def settle(self, published: int, give: Give) -> None:
        """Give those of episodes that are published; those of episodes that were dropped are forgotten.

        Args:
            published: the serials below are.
            give: takes them.
        """
        for name, waiting in self._waiting.items():
            ready = [episode for episode in waiting if episode.state == "aborted" or 0 <= episode.serial < published]
            parts = [(episode.serial, *part) for episode in ready for part in waiting[episode] if episode.serial >= 0]
            if parts:
                serials, t, errors = zip(*parts, strict=True)
                counts = [np.size(at) for at in t]
                indices = np.stack(
                    [np.repeat(serials, counts), np.concatenate([np.atleast_1d(at) for at in t])], axis=1
                )
                give(name, indices, np.concatenate([np.atleast_1d(error) for error in errors]))
            for episode in ready:
                del waiting[episode]
