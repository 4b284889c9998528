"""The choices that options have, as types: an editor completes them, a checker finds what is none of them."""

from __future__ import annotations

from typing import Literal, TypeAlias

Durability: TypeAlias = Literal["process", "power"]
Checksum: TypeAlias = Literal["crc32"] | None
Publish: TypeAlias = Literal["episode", "step"]
Stage: TypeAlias = Literal["ram", "disk"]
Verify: TypeAlias = Literal["auto", "always", "read", "never"]
Shard: TypeAlias = Literal["auto"]
OnDamaged: TypeAlias = Literal["raise", "skip"]

Format: TypeAlias = Literal["torch", "numpy"]
Shuffle: TypeAlias = bool | Literal["block"]
Tail: TypeAlias = Literal["pad", "drop", "uneven"]
OnStale: TypeAlias = Literal["redraw", "raise"]
Padding: TypeAlias = Literal["zero", "edge", "default"]
Boundary: TypeAlias = Literal["pad", "shift", "drop"]
WindowBoundary: TypeAlias = Literal[Boundary, "repeat"]
Strategy: TypeAlias = Literal["future", "final", "episode", "random", "geometric"]
Variant: TypeAlias = Literal["proportional", "rank"]
Normalizer: TypeAlias = Literal["batch", "buffer"] | None
Reduce: TypeAlias = Literal["first", "max", "mean"] | None
System: TypeAlias = Literal["memorax", "reagent", "nnabla-rl"]
Scaling: TypeAlias = Literal["std", "range", "quantiles"]
