"""The data of the cases: episodes in our folder, plain arrays over the same pages, and sparse folders of zeros."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memmap_buffer import ReplayBuffer, publish
from memmap_buffer.format.records import CHECK, RECORD, WORDS, check_of
from memmap_buffer.remote.layout import MERGED, Root, Shard, digest, head_object, version_of

Fields = Mapping[str, Any]
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

LOW: Fields = {"observation": ("float", 17), "action": ("float", 6), "reward": "float", "terminated": "bool"}
IMAGE: Fields = {"observation": ("uint8", (3, 64, 64)), "action": ("float", 6), "reward": "float", "terminated": "bool"}
SCHEMAS: dict[str, Fields] = {"low-dim": LOW, "image": IMAGE}
SHORTEST, LONGEST = 200, 1000  # steps of an episode
STEPS_OF_A_SHARD = 10_000  # of those that are only listed
TRANSITIONS: dict[str, Any] = {"n_steps": 1, "next_fields": ("observation",)}


def episode(fields: Fields, steps: int, rng: np.random.Generator) -> Arrays:
    """An episode of random numbers; every second one ends by `terminated`."""
    out: Arrays = {}
    for name, spec in fields.items():
        dtype, shape = (spec, ()) if isinstance(spec, str) else (spec[0], np.atleast_1d(spec[1]))
        if dtype == "uint8":
            out[name] = rng.integers(0, 256, (steps, *shape), np.uint8)
        elif dtype == "bool":
            out[name] = np.zeros((steps, *shape), np.bool_)
        else:
            out[name] = rng.standard_normal((steps, *shape), np.float32)
    out["terminated"][-1] = bool(rng.integers(2))
    return out


def episodes(fields: Fields, steps: int, seed: int = 0) -> Iterator[Arrays]:
    """Episodes of random lengths, about `steps` steps in all; the same for the same seed."""
    rng = np.random.default_rng(seed)
    for length in lengths(steps, seed):
        yield episode(fields, int(length), rng)


def lengths(steps: int, seed: int = 0) -> Array:
    count = max(2, 2 * steps // (SHORTEST + LONGEST))
    return np.random.default_rng((seed, 1)).integers(SHORTEST, LONGEST + 1, count)


@dataclass(frozen=True)
class Store:
    """A filled buffer, and the plain view of it that the bounds gather from: one tensor a field over the same pages."""

    buffer: ReplayBuffer
    fields: Fields

    @classmethod
    def fill(cls, folder: Path, kind: str, steps: int) -> Store:
        count = len(lengths(steps))
        buffer = ReplayBuffer(folder, count, LONGEST, SCHEMAS[kind])
        for arrays in episodes(SCHEMAS[kind], steps):
            buffer.store_episode(**arrays)
        buffer.flush()
        return cls(buffer, SCHEMAS[kind])

    @cached_property
    def plain(self) -> Arrays:
        """Field -> (slots * LONGEST, *field), private pages: torch wants writable memory, and nothing writes."""
        paths = {name: self.buffer.folder / "data" / f"{name}.npy" for name in self.fields}
        grids = {name: np.load(path, mmap_mode="c").view(np.ndarray) for name, path in paths.items()}
        return {name: grid.reshape(-1, *grid.shape[2:]) for name, grid in grids.items()}

    @cached_property
    def rows(self) -> dict[str, torch.Tensor]:
        """The same as tensors."""
        return {name: torch.from_numpy(array) for name, array in self.plain.items()}

    @cached_property
    def records(self) -> Array:
        """The records of the episodes, in the order of their serials and of their slots."""
        records: Array = np.load(self.buffer.folder / "episodes.npy")
        return records[records["length"] > 0]

    def starts(self, ahead: int) -> Array:
        """The row of every step that has `ahead` more steps behind it."""
        spans = self.records["length"].astype(np.int64) - ahead
        return np.concatenate([slot * LONGEST + np.arange(max(n, 0)) for slot, n in enumerate(spans)])

    def picks(self, size: int, ahead: int, batches: int = 512) -> Iterator[torch.Tensor]:
        """Endless batches of random rows for the bound."""
        starts, rng = self.starts(ahead), np.random.default_rng(2)
        drawn = [torch.from_numpy(rng.choice(starts, size)) for _ in range(batches)]
        while True:
            yield from drawn

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows of (serial, t) pairs."""
        return indices[:, 0] * LONGEST + indices[:, 1]

    def outputs(self, *lead: int, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        """Output memory, field -> (*lead, *field)."""
        return {
            n: torch.empty((*lead, *self.rows[n].shape[1:]), dtype=self.rows[n].dtype) for n in names or self.fields
        }


def forge(folder: Path, episodes: int, steps: int, fields: Fields) -> Path:
    """A folder of `episodes` published episodes of `steps` zeros each; only its records take disk space."""
    ReplayBuffer(folder, episodes, steps, fields).close()
    records = np.load(folder / "episodes.npy", mmap_mode="r+")
    count = np.arange(episodes, dtype=np.uint64)
    shown = records[:episodes]
    shown["generation"], shown["serial"], shown["length"] = 2, count, steps
    shown["stop"] = shown["length"]
    shown["first_row"], shown["term"] = count * np.uint64(steps), 1
    words = records.view(np.ndarray).view(np.uint64).reshape(-1, WORDS)
    words[:episodes, CHECK] = check_of(words[:episodes])
    assert records.dtype == RECORD
    state = np.load(folder / "state.npy", mmap_mode="r+")
    state["next"] = episodes
    state["changes"] += np.uint64(1)
    records.flush()
    state.flush()
    return folder


def forge_root(folder: Path, count: int, episodes: int = 10) -> Path:
    """A root of so many shards, of which the list and the heads are there: those of one with other ids."""
    place = folder.with_name(f"{folder.name}-one").resolve()
    with ReplayBuffer(place / "grid", episodes, STEPS_OF_A_SHARD // episodes, LOW) as buffer:
        for i in range(episodes):
            buffer.store_episode(**episode(LOW, STEPS_OF_A_SHARD // episodes, np.random.default_rng(i)))
    publish(place / "grid", f"file://{place}/far")
    shard = Root.from_json((place / "far" / "root.json").read_bytes(), "").shards["grid"]
    head = (place / "far" / head_object(shard.head[0])).read_bytes()
    shutil.rmtree(place)
    shards: dict[str, Shard] = {}
    heads: dict[str, int] = {}
    (folder / head_object("x")).parent.mkdir(parents=True)
    for first in range(0, count, MERGED):
        ids = [secrets.token_hex(16) for _ in range(first, min(count, first + MERGED))]
        each = [head.replace(shard.id.encode(), id.encode()) for id in ids]
        merged = b"".join(each)
        key, heads[digest(merged)] = digest(merged), len(merged)
        (folder / head_object(key)).write_bytes(merged)
        for i, (id, its) in enumerate(zip(ids, each, strict=True)):
            at = key, i * len(head), len(head)
            version = version_of(its, shard.blocks)
            shards[f"shard-{first + i:05}"] = replace(shard, id=id, version=version, head=at)
    (folder / "root.json").write_bytes(Root(shards, heads).to_json())
    return folder


@dataclass(frozen=True)
class Run:
    """The options of the command line, and the stores that were made so far.

    Args:
        root: a folder of our own. repeats: calls of each contender of a short case.
        steps: of the low-dimensional store; that of images has a twentieth. cold: bytes of the store that is read cold.
        top: the scale cases go up to 10^top steps. peers: whether to measure other libraries too.
        environment: where those are that are measured by an interpreter of their own; None: nowhere.
    """

    root: Path
    repeats: int
    steps: int
    cold: int
    top: int
    peers: bool
    environment: Path | None = None
    made: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def once(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called once a run."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def store(self, kind: str) -> Store:
        """The store of a kind."""
        store: Store = self.once(("store", kind), lambda: Store.fill(self.folder(kind), kind, self.steps_of(kind)))
        return store

    def steps_of(self, kind: str) -> int:
        return self.steps if kind == "low-dim" else self.steps // 20

    def folder(self, name: str) -> Path:
        """A path where nothing exists yet."""
        number = sum(1 for _ in self.root.glob(f"{name}*"))
        return self.root / f"{name}-{number}"
