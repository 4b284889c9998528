"""One-step transitions right after a written step are those that a builder puts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import Field, NStep, ReplayBuffer, Timestep
from memmap_buffer.dtypes import Array
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.views import one_step
from memmap_buffer.views.one_step import OneStep

FIELDS = {
    "observation": Field("float32", (2,), final=True),
    "goal": Field("uint8", (40, 40), final=True),  # 256 of them are too large to be taken without the pool
    "step": "int64",
    "reward": Field("float64", (1,)),
    "text": "U5",
    "terminated": "bool",
    "truncated": "bool",
}
KINDS: dict[str, dict[str, Any]] = {
    "everything": {"gamma": 0.9},
    "of the successor a field that has none at the end": {"next_fields": ("step", "observation", "text"), "gamma": 0.5},
    "chosen": {"current_fields": ("observation", "step"), "next_fields": ("observation",), "gamma": 0.9},
    "no end": {"gamma": 0.9, "terminated": None},
    "no return": {"current_fields": ("step",), "next_fields": ()},
    "the reward of another field": {"reward": "observation", "gamma": 0.3},
    "named": {"return_indices": True, "return_weights": True, "fieldname_map": {"step": "number"}, "gamma": 0.9},
    "numbers": {"expand_scalars": True, "gamma": 0.9, "current_fields": ("step", "reward")},
}


def written(folder: Path, num_envs: int = 3) -> ReplayBuffer:
    return ReplayBuffer(folder, 40, 12, FIELDS, capacity=60, publish="step", spare_slots=num_envs)


def step(call: int, done: Array, cut: Array, following: bool) -> dict[str, Any]:
    number = 1000 * np.arange(len(done)) + call
    told: dict[str, Any] = {
        "observation": np.stack([number, -number], 1).astype(np.float32),
        "goal": np.full((len(done), 40, 40), call % 256, np.uint8),
        "step": number,
        "reward": number[:, None] / 8,
        "text": [f"t{call}"] * len(done),
        "terminated": done,
        "truncated": cut,
    }
    if following:
        told |= {"next_observation": told["observation"] + 1, "next_goal": told["goal"] + 1}
    return told


@pytest.mark.parametrize("prioritized", [None, True], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_what_a_builder_puts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, prioritized: Any
) -> None:
    rng, fast, slow = np.random.default_rng(5), [], []
    columns = OneStep.columns
    reader: BatchReader

    def both(self: OneStep, anchors: Any, since: int) -> Any:
        found = columns(self, anchors, since)
        fast.append(found if found is None else {**found})  # the reader adds to what it is given
        slow.append(reader.build(anchors, since).copy())
        return found

    monkeypatch.setattr(OneStep, "columns", both)
    with written(tmp_path) as buffer:
        for call in range(150):
            chance = rng.random((2, 3)) < 0.08
            buffer.add(**step(call, chance[0], chance[1], call % 40 < 20))
            if call < 2:
                continue
            batch = buffer.sample(256, n_steps=1, prioritized=prioritized, **KINDS[kind])
            (sampler,) = buffer._samplers.values()
            reader = sampler.reader
            reader._disk.watches = False  # a slow moment of the machine
    assert len(fast) > 100
    ended, renamed = 0, KINDS[kind].get("fieldname_map", {})
    for got, expected in zip(fast, slow, strict=True):
        assert [renamed.get(key, key) for key in got] == [*expected][: len(got)]
        for column, wanted in zip(got.values(), expected.values(), strict=False):
            assert column.dtype == wanted.dtype
            assert np.array_equal(column, wanted)
        ended += int((got["_discount"] == 0).sum()) if "_discount" in got else 1
    assert ended or kind == "no end"
    assert [*batch] == [*slow[-1]]


def test_a_batch_during_which_something_was_written_is_put_together_by_a_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none, calls = np.zeros(3, np.bool_), iter(range(20, 200))
    taken, found = one_step.taken, []
    columns = OneStep.columns

    def written_to(stored: Array, rows: Any, pool: Any) -> Array:
        out = taken(stored, rows, pool)
        if stored.dtype == np.int64:
            for _ in range(30):  # all that was drawn has left the ring by then
                done = np.array([next(calls) % 4 == 0] * 3)
                buffer.add(**step(500, done, none, True))
        return out

    def noted(self: OneStep, anchors: Any, since: int) -> Any:
        found.append(columns(self, anchors, since))
        return found[-1]

    with written(tmp_path) as buffer:
        for call in range(20):
            buffer.add(**step(call, none, none, True))
            if call:
                buffer.sample(8, n_steps=1, gamma=0.9)
        (sampler,) = buffer._samplers.values()
        sampler.reader._disk.watches = False
        buffer.add(**step(20, none, none, True))
        monkeypatch.setattr(OneStep, "columns", noted)
        monkeypatch.setattr(one_step, "taken", written_to)
        batch = buffer.sample(64, n_steps=1, gamma=0.9)
        assert found == [None]
        assert (batch["step"] % 1000 == 500).all()


def test_what_the_records_do_not_tell_is_left_to_a_builder(tmp_path: Path) -> None:
    with written(tmp_path) as buffer:
        folders = buffer._folders
        assert OneStep.reads(NStep(1, gamma=0.9), folders)
        others = [Timestep(), NStep(2), NStep(1, stack={"observation": 2}), NStep(1, timeline=True)]
        others += [NStep(1, sequence_fields=("step",)), NStep(1, terminated="truncated")]
        assert not any(OneStep.reads(view, folders) for view in others)
