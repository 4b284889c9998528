"""The values that options accept, as types: an editor completes them, and a type checker rejects any other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

from memmap_buffer.errors import SchemaError

Durability: TypeAlias = Literal["process", "power"]
Checksum: TypeAlias = Literal["crc32", None]
Publish: TypeAlias = Literal["episode", "step"]
Stage: TypeAlias = Literal["ram", "disk"]
Verify: TypeAlias = Literal["auto", "always", "read", "never"]
Shard: TypeAlias = Literal["auto"]
IfExists: TypeAlias = Literal["error", "resume", "overwrite"]
OnDamaged: TypeAlias = Literal["raise", "skip"]

Format: TypeAlias = Literal["torch", "numpy"]
Shuffle: TypeAlias = Literal[False, True, "block"]
Tail: TypeAlias = Literal["pad", "drop", "uneven"]
Shares: TypeAlias = Literal["exact", "chance"]
Length: TypeAlias = Literal["longest", "shortest"]
OnStale: TypeAlias = Literal["redraw", "raise"]
Padding: TypeAlias = Literal["zero", "edge", "default"]
Boundary: TypeAlias = Literal["pad", "shift", "drop"]
StepBoundary: TypeAlias = Literal["pad", "drop"]
WindowBoundary: TypeAlias = Literal[Boundary, "repeat", "continue"]
Strategy: TypeAlias = Literal["future", "final", "episode", "random", "geometric"]
Variant: TypeAlias = Literal["proportional", "rank"]
Ties: TypeAlias = Literal["shared", "own"]
Normalizer: TypeAlias = Literal["batch", "buffer", None]
Reduce: TypeAlias = Literal["first", "max", "mean", None]
System: TypeAlias = Literal["memorax", "reagent", "nnabla-rl"]
Scaling: TypeAlias = Literal["std", "range", "quantiles"]
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)  # the default of statistics


def closest(name: object, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most `count` of `names` that resemble `name`, the closest first."""
    import difflib

    return difflib.get_close_matches(str(name), [*names], count, cutoff)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The question "did you mean …?" with the closest of `names`; "" if none resembles `name`."""
    return "".join(f"did you mean {close!r}?" for close in closest(name, names))


def check_choice(name: str, value: object, choice: Any) -> None:
    """Check the value of an option.

    Args:
        name: the option, as the error calls it.
        value: any value.
        choice: a type of this module.

    Raises:
        SchemaError: the value is not one of the choice.
    """
    if value not in get_args(choice):
        expected = ", ".join(map(repr, get_args(choice)))
        raise SchemaError(f"{name}: got {value!r}, expected one of {expected}")
