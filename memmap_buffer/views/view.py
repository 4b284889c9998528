"""`View`, the base class of all views: which anchors an episode has, and how an item is cut around its anchor.

The views are in `windows` and `n_step`. `items.selection` calls `anchors`, `loading.batch_reader` calls `cut`, with the
`BatchBuilder` of each batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Schema
from memmap_buffer.views.anchors import BoolArray, Runs
from memmap_buffer.views.batch_builder import BatchBuilder, Ends

Names: TypeAlias = Iterable[str] | None
FloatArray = npt.NDArray[np.float64]


class View(ABC):
    """How an item is cut around its anchor."""

    stride: int = 1  # timesteps between two anchors of a run
    per_episode: ClassVar[bool] = False  # whether each episode has one item
    random: ClassVar[bool] = False  # whether `crop` moves the anchors at random
    stream: str | None = None  # the meta field whose value episodes that follow one another share; see `continues`

    @abstractmethod
    def keys(self, schema: Schema) -> list[str]:
        """The keys of a batch, in order, without meta fields.

        Raises:
            SchemaError: the view names a field that was not declared.
        """

    @abstractmethod
    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        """The anchors of each episode: the timesteps around which an item may be cut.

        Args:
            schema: the schema of the folder.
            episodes: (E,) every timestep of each episode: `first` is 0, `count` the length.
            has_final: (E,) whether the episode has its final observation.
            terminated: (E,) whether the episode terminated, by the field that `ends` names.

        Returns:
            (E,) runs of the same episodes; a count of 0 leaves an episode out.
        """

    def plan(self, schema: Schema) -> Any:
        """A value that depends on the schema alone: made once per set of options, `cut` finds it in `builder.plan`."""
        return None

    @abstractmethod
    def cut(self, builder: BatchBuilder) -> None:
        """Put the columns of a batch into its builder, which knows the anchors."""

    def ends(self, schema: Schema) -> Ends:
        """The fields by which this view knows that an episode ended, and how far around an anchor its items extend."""
        return Ends.of(schema, before=self.before, after=self.reach)

    def crop(self, length: IntArray, u: FloatArray) -> IntArray:
        """(B,) int64 the timesteps to which the anchors are moved at random; called only if `random`.

        Args:
            length: (B,) int64 the lengths of the episodes.
            u: (B,) float64 random numbers in [0, 1).
        """
        raise NotImplementedError

    def sequences(self, schema: Schema) -> dict[str, str]:
        """Key of a column that is padded behind its end -> the key of the (B,) lengths of its items."""
        return {}

    @property
    def one_per_step(self) -> bool:
        """Whether an episode gets one more anchor with each step that is appended, and loses one with each dropped."""
        return False

    @property
    def reach(self) -> int:
        """The most timesteps that an item has from its anchor on; 0: the whole episode, across ends in its middle."""
        return 1

    @property
    def pads_to_longest(self) -> bool:
        """Whether the shape of a batch depends on its longest item, so that several batches cannot be read as one."""
        return False

    @property
    def before(self) -> int:
        """The most timesteps of its episode that an item has before its anchor."""
        return 0

    @property
    def repeats(self) -> bool:
        """Whether items of an episode may share an anchor."""
        return False

    @property
    def continues(self) -> int:
        """The number of timesteps of an item that runs on into the episodes that follow; 0: items stay in theirs."""
        return 0

    def _keep_names(self, *arguments: str) -> None:
        """Keep these arguments, which hold names, as tuples: views are compared and hashed as values."""
        for argument in arguments:
            object.__setattr__(self, argument, names_of(argument, getattr(self, argument)))


def described(value: object) -> str:
    """The text of a view, or of another value, with the arguments that are not their defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return getattr(value, "__qualname__", None) or repr(value)
    arguments = [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    defaults = {field.name: field.default for field in fields(value)}
    return f"{type(value).__name__}({', '.join(f'{n}={described(v)}' for n, v in arguments if v != defaults[n])})"


def names_of(where: str, names: Names) -> tuple[str, ...] | None:
    """Names as a tuple; a single name may stand alone. Raises SchemaError, about the argument `where`, for others."""
    if names is None or isinstance(names, str):
        return names if names is None else (names,)
    if not isinstance(names, Iterable):
        raise SchemaError(f"{where}: got {names!r}, expected a name, or several")
    return tuple(names)


def named(schema: Schema, names: Names, where: str) -> tuple[str, ...]:
    """The names of per-timestep fields, groups expanded; None for all. Raises SchemaError: a name is unknown."""
    return tuple(schema.fields) if names is None else schema.require(names, where, schema.fields)
