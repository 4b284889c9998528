"""`View`: how an item is cut around its anchor; the views are its subclasses."""

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

    stride: int = 1
    per_episode: ClassVar[bool] = False
    random: ClassVar[bool] = False
    stream: str | None = None  # the meta field by which episodes follow one another; see `continues`

    @abstractmethod
    def keys(self, schema: Schema) -> list[str]:
        """The keys of a batch, in order, but for meta fields.

        Raises:
            SchemaError: a field that was not declared.
        """

    @abstractmethod
    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        """The timesteps of each episode at which an item may be cut.

        Args:
            schema: of the folder.
            episodes: (E,) every timestep of each episode: `first` is 0, `count` the length.
            has_final: (E,) whether the episode has its final observation.
            terminated: (E,) whether it ended by the field of its `ends`.

        Returns:
            (E,) runs of the same episodes; a count of 0 leaves one out.
        """

    def plan(self, schema: Schema) -> Any:
        """The value that `cut` finds in `builder.plan`, made once per set of options, as it follows from the schema."""
        return None

    @abstractmethod
    def cut(self, builder: BatchBuilder) -> None:
        """Put the columns of a batch into the builder of its anchors."""

    def ends(self, schema: Schema) -> Ends:
        """How it knows that an episode ended, and how far around its anchor it looks."""
        return Ends.of(schema, before=self.before, after=self.reach)

    def crop(self, length: IntArray, u: FloatArray) -> IntArray:
        """The timesteps to which chance moves the anchors of episodes; only if `random`.

        Args:
            length: (B,) of the episodes.
            u: (B,) random numbers in [0, 1).
        """
        raise NotImplementedError

    def sequences(self, schema: Schema) -> dict[str, str]:
        """The keys of a batch that are padded behind the end, and the key that says how long each item is."""
        return {}

    @property
    def one_per_step(self) -> bool:
        """Whether a step more or less of an episode is an anchor more or less."""
        return False

    @property
    def reach(self) -> int:
        """How many timesteps from the anchor on an item may have; 0: all of them, whatever ends in their middle."""
        return 1

    @property
    def pads_to_longest(self) -> bool:
        """Whether the shape of a batch follows from its items, so that several cannot be read as one."""
        return False

    @property
    def before(self) -> int:
        """How many timesteps before the anchor an item may have of the same episode."""
        return 0

    @property
    def repeats(self) -> bool:
        """Whether several items of an episode may have the same anchor."""
        return False

    @property
    def continues(self) -> int:
        """How many timesteps an item has, where it runs on into the episodes that follow; 0: it stays in its own."""
        return 0

    def _keep_names(self, *arguments: str) -> None:
        """Keep names as tuples, however they were given, so that views are values."""
        for argument in arguments:
            object.__setattr__(self, argument, names_of(argument, getattr(self, argument)))


def described(value: object) -> str:
    """A view, or another value, by the arguments that are not their defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return getattr(value, "__qualname__", None) or repr(value)
    arguments = [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    defaults = {field.name: field.default for field in fields(value)}
    return f"{type(value).__name__}({', '.join(f'{n}={described(v)}' for n, v in arguments if v != defaults[n])})"


def names_of(where: str, names: Names) -> tuple[str, ...] | None:
    """Names as a tuple; a single one may stand alone. Raises SchemaError where it is something else."""
    if names is None or isinstance(names, str):
        return names if names is None else (names,)
    if not isinstance(names, Iterable):
        raise SchemaError(f"{where}: got {names!r}, expected a name, or several")
    return tuple(names)


def named(schema: Schema, names: Names, where: str) -> tuple[str, ...]:
    """Per-timestep fields by name, groups expanded; None for all. Raises SchemaError for an unknown one."""
    return tuple(schema.fields) if names is None else schema.require(names, where, schema.fields)
