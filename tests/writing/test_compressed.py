"""Compressed fields hold what raw ones hold: however they are written, changed, copied and read."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_injection import KILLED, in_child, shown, state_of, system, without_barriers
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MEMORY

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    Hindsight,
    NStep,
    Offsets,
    RandomCrop,
    ReplayBuffer,
    Schema,
    Timestep,
    Trajectory,
    Window,
    verify,
)
from memmap_buffer.codecs import Jpeg, Zstd
from memmap_buffer.dtypes import NUMERIC
from memmap_buffer.writing import blob_column
from memmap_buffer.writing import episode as staging

LONGEST = 9
FIELDS = {
    "frame": Field("uint8", (12, 12), final=True, codec="zstd"),
    "state": Field("float32", (24,), final=True, codec=Zstd(level=1)),
    "half": Field("bfloat16", (40,), default=1.5, codec="zstd"),
    "number": Field("int64", codec="zstd"),
    "action": "int",
    "reward": "float",
    "terminated": ("bool", (), False),
}
RAW = {name: replace(field, codec=None) for name, field in Schema(FIELDS).fields.items()}
VIEWS = {
    "timestep": Timestep(),
    "n-step": NStep(3, sequence_fields=("reward", "half")),
    "zeros": Window(4, pad_before=2),
    "edges": Window(4, pad_before=2, padding="edge"),
    "defaults": Window(4, pad_before=2, padding="default"),
    "stacks": Offsets(frame=(-3, -2, -1, 0, 1), half=(0, 2), reward=(0,)),
    "trajectory": Trajectory(final_observation=True, return_mask=True),
    "crop": RandomCrop(3),
}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    without_barriers(monkeypatch)


def reward_for(achieved: Any, goal: Any, info: Any) -> Any:
    return -np.abs(achieved - goal).sum(axis=-1)


HINDSIGHT = Hindsight(achieved="state", goal="state", reward_fn=reward_for, prob=0.7)


def episode_of(number: int, length: int, final: bool = True) -> dict[str, Any]:
    """An episode whose blobs are of very different lengths: zeros, patterns, and noise that does not become shorter."""
    rng = np.random.default_rng(number)
    frame = np.zeros((length + final, 12, 12), np.uint8)
    for t in range(length + final):
        kind = rng.integers(4)
        frame[t] = rng.integers(0, 256, (12, 12)) if kind == 0 else t + number if kind < 3 else np.arange(12) * number
    steps = np.arange(length)
    return {
        "frame": frame,
        "state": np.repeat(np.arange(length + final)[:, None] + number, 24, 1).astype(np.float32),
        "half": np.repeat(steps[:, None] % 7 + 0.5, 40, 1).astype(np.float32),
        "number": steps + 100 * number,
        "action": steps,
        "reward": steps + number * 0.5,
        "terminated": (steps == length - 1) & (number % 3 == 0),
    }


class Pair:
    """A raw and a compressed buffer that are told the same."""

    def __init__(self, place: Path, **options: Any) -> None:
        sizes = {"max_episodes": 4, "max_timesteps": LONGEST, "circular": True, "spare_slots": 2, **options}
        self.how = {key: options[key] for key in ("publish", "stage", "durability") if key in options}
        self.both = [ReplayBuffer(place / name, fields=f, **sizes) for name, f in (("raw", RAW), ("coded", FIELDS))]

    @property
    def coded(self) -> ReplayBuffer:
        return self.both[1]

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        for buffer in self.both:
            getattr(buffer, name)(*arguments, **options)

    def store(self, number: int, length: int, final: bool, whole: bool) -> None:
        data = episode_of(number, length, final)
        for buffer in self.both:
            if whole:
                buffer.store_episode(**data)
                continue
            with buffer.one_episode() as episode:
                for t in range(length):
                    left_out = {"half"} if t % 3 == 1 else set()
                    episode.store(**{name: data[name][t] for name in FIELDS if name not in left_out})
                if final:
                    episode.final(frame=data["frame"][-1], state=data["state"][-1])

    def reopen(self) -> None:
        folders = [buffer.folder for buffer in self.both]
        for buffer in self.both:
            buffer.close()
        self.both = [ReplayBuffer.from_folder(folder, **self.how) for folder in folders]

    def check(self, *views: str) -> None:
        """Everything that is shown is the same, and so is every batch."""
        raw, coded = self.both
        assert shown(raw) == shown(coded)
        assert raw.serials.tolist() == coded.serials.tolist()
        for name in views if len(raw) else ():
            options = {"view": VIEWS[name], "return_indices": True}
            assert_same(*[buffer.sample(16, seed=1, **options) for buffer in self.both])
            loaders = [buffer.dataloader(5, shuffle=True, seed=2, **options) for buffer in self.both]
            for batches in zip(*loaders, strict=True):
                assert_same(*batches)


def assert_same(raw: Any, coded: Any) -> None:
    assert raw.keys() == coded.keys()
    for key, value in raw.items():
        assert value.dtype == coded[key].dtype and torch.equal(value, coded[key]), key


numbers = st.integers(0, 99)
LENGTHS = st.integers(1, LONGEST)
CHANGES = st.one_of(
    st.tuples(st.just("store"), numbers, LENGTHS, st.booleans(), st.booleans()),
    st.tuples(st.just("store"), numbers, LENGTHS, st.booleans(), st.booleans()),
    st.tuples(st.just("update"), st.sampled_from(["frame", "state", "half", "number"]), numbers, LENGTHS),
    st.tuples(st.just("datapoint"), numbers, numbers),
    st.tuples(st.just("recompute"), numbers),
    st.tuples(st.sampled_from(["delete", "clear", "reopen"]), numbers),
)
MODES = [{}, {"publish": "step"}, {"stage": "disk"}, {"durability": "power"}, {"capacity": 15}]


@settings(max_examples=25, deadline=None)
@given(st.lists(CHANGES, min_size=4, max_size=14), st.sampled_from(MODES), st.sampled_from([*VIEWS]))
def test_whatever_is_done_compressed_and_raw_fields_hold_the_same(
    tmp_path_factory: Any, changes: list[Any], mode: dict[str, Any], view: str
) -> None:
    place = Path(MEMORY or tmp_path_factory.getbasetemp()) / f"compressed-{os.getpid()}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blob_column, "PART_BYTES", 300)
            patch.setattr(staging, "CHUNK_BYTES", 2000)
            pair = Pair(place, **mode)
            for change in changes:
                do(pair, *change)
                pair.check()
            pair.check(view)
            if len(pair.coded):
                pair.coded.snapshot(place / "copy")
                assert shown(place / "copy") == shown(pair.coded)
            for buffer in pair.both:
                buffer.close()
            assert verify(place / "coded") == []
            assert len(shown(ReplayBuffer.from_folder(place / "coded", verify="always"))) == len(pair.coded)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def do(pair: Pair, what: str, *how: Any) -> None:
    count = len(pair.coded)
    if what in ("store", "reopen"):
        pair.store(*how) if what == "store" else pair.reopen()
    elif what == "clear":
        pair.tell("clear") if how[0] % 4 == 0 else None
    elif not count:
        return
    elif what == "update":
        name, number, steps = how
        position = number % count
        rows = episode_of(number, min(steps, int(pair.coded.episode_lens[position])))[name]
        pair.tell("update", position, **{name: rows[: int(pair.coded.episode_lens[position])]})
    elif what == "datapoint":
        position = how[0] % count
        t = how[1] % int(pair.coded.episode_lens[position])
        pair.tell("store_datapoint", position, t, "frame", episode_of(how[1], 1)["frame"][0])
    elif what == "recompute":
        add = how[0] % 5
        pair.tell("recompute", "frame", lambda episode: (episode["frame"] + add).astype(np.uint8))
    else:
        pair.tell("delete", how[0] % count)
