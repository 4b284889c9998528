"""`sample` and `batch` take what `dataloader` takes, and find what they made of it again, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_same
from inside import get_inside, set_inside

from memmap_buffer import (
    Advantages,
    Hindsight,
    Normalize,
    NStep,
    Offsets,
    RandomCrop,
    Returns,
    Scale,
    Timestep,
    Trajectory,
    Window,
)

STEPS = {"timestep_level": True}


@dataclass
class Plus:
    """A transform that can be changed, so it has no hash."""

    number: float

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"reward": batch["reward"] + self.number}


class Policy:
    """What an agent's code looks like: the function of each call is made anew in a method, and refers to `self`."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.scale = buffer, 2.0

    def batch(self) -> Any:
        return self.buffer.sample(4, transform=lambda batch: batch | {"s": batch["reward"] * self.scale}, **STEPS)


def plus(batch: dict[str, Any], number: float) -> dict[str, Any]:
    return batch | {"reward": batch["reward"] + number}


def normalize() -> Normalize:
    return Normalize({"observation": (np.arange(3.0), np.full(3, 2.0)), "reward": (np.array(1.0), np.array(2.0))})


def goals() -> Hindsight:
    reached = lambda achieved, goal, info: (achieved == goal).all(-1).astype(np.float32)  # noqa: E731
    return Hindsight(reached, goal="observation", achieved="observation", info=["t"], prob=0.0)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "Normalize": lambda: {"transform": normalize(), **STEPS},
    "Scale": lambda: {"transform": [Scale(["t"]), Scale("number", 2)], **STEPS},
    "Returns": lambda: {"transform": Returns(gamma=0.9)},
    "Advantages": lambda: {"transform": Advantages("reward", terminated=None)},
    "a lambda": lambda: {"transform": lambda batch: batch | {"twice": batch["reward"] * 2}, **STEPS},
    "a partial": lambda: {"transform": partial(lambda batch, number: plus(batch, number), number=3), **STEPS},
    "Timestep of a list": lambda: {"view": Timestep(["t", "reward"])},
    "Timestep of keys": lambda: {"view": Timestep({"t": 1, "reward": 2}.keys())},
    "Timestep of a name": lambda: {"view": Timestep("reward")},
    "Timestep of a generator": lambda: {"view": Timestep(name for name in ("t", "reward"))},
    "NStep of lists": lambda: {"view": NStep(2, ["t"], ["t"], ["reward"], 0.9, stack={"camera": 2})},
    "Window of a list": lambda: {"view": Window(3, fields=["t"], start_fields=["reward"], boundary="continue")},
    "Trajectory of a list": lambda: {"view": Trajectory(["t"], return_mask=True)},
    "Crop of a list": lambda: {"view": RandomCrop(20, ["t"])},
    "Offsets": lambda: {"view": Offsets(t=[-1, 0])},
    "a list of fields": lambda: {"fields": ["t"], **STEPS},
    "keys of fields": lambda: {"fields": {"t": 1}.keys(), **STEPS},
    "a filter": lambda: {"filter_fields": {"t": lambda t: t > 1}, "filter_meta": {"task_id": [0, 1]}, **STEPS},
    "Hindsight": lambda: {"hindsight": goals(), **STEPS},
    "None": lambda: dict.fromkeys(
        ("fields", "min_episode_len", "timestep_level", "on_stale", "padding", "expand_scalars")
    ),
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The readers that buffers make from now on."""
    readers, kind = list[Any](), get_inside("batch_reader")

    def make(*args: Any) -> Any:
        readers.append(kind(*args))
        return readers[-1]

    set_inside(monkeypatch, batch_reader=make)
    return readers


@each_option
def test_sample_and_batch_give_what_a_loader_gives_of_the_same_options(recorded, options):
    buffer = recorded()
    (want,) = buffer.dataloader(999, **options())
    assert_same(buffer.batch(**options()), want)
    assert buffer.sample(7, **options()).keys() == want.keys()


@each_option
def test_what_is_written_anew_at_each_call_is_read_by_one_reader(recorded, made, options):
    buffer = recorded()
    for _ in range(3):
        buffer.sample(4, **options())
        buffer.batch([0], **options())
    assert len(made) == 1


def test_the_function_that_a_method_makes_anew_is_read_by_one_reader(recorded, made):
    policy = Policy(recorded())
    for scale in (2.0, 2.0, 3.0):
        policy.scale = scale
        batch = policy.batch()
        assert torch.equal(batch["s"], batch["reward"] * scale)
    assert len(made) == 1


@pytest.mark.parametrize("numbers", [(1, 2), (1, 1.0, True, np.float32(1)), (0.0, -0.0), ("a", b"a"), ([1], [2])])
def test_functions_of_the_same_code_that_refer_to_something_else_are_kept_apart(recorded, numbers):
    buffer = recorded()
    for _ in range(2):
        for number in numbers:
            batch = buffer.sample(2, transform=lambda batch, given=number: batch | {"k": number, "g": given})  # noqa: B023
            for got in (batch["k"], batch["g"]):
                assert (type(got), str(got)) == (type(number), str(number))


def test_a_closure_that_changes_later_is_not_taken_for_what_it_was(recorded):
    buffer, changed = recorded(), []

    def sampled(number):
        def change(to):
            nonlocal number
            number = to

        changed.append(change)
        return buffer.sample(2, transform=lambda batch: batch | {"k": number})["k"]

    assert sampled(1) == 1
    changed[0](2)  # what the first function refers to
    assert [sampled(1), sampled(2), sampled(1)] == [1, 2, 1]


def test_a_filter_of_other_bounds_never_meets_what_another_one_chose(recorded):
    buffer = recorded()
    for low in (0, 2, 4, 0, 2, 4):
        kept = buffer.batch(filter_fields={"t": lambda t: t >= low}, **STEPS)  # noqa: B023
        assert int(kept["t"].min()) == low


def test_a_list_that_was_changed_is_another_option(recorded):
    buffer, names = recorded(), ["t"]
    assert set(buffer.sample(2, fields=names, include_metadata=False, **STEPS)) == {"t"}
    names.append("reward")
    assert set(buffer.sample(2, fields=names, include_metadata=False, **STEPS)) == {"t", "reward"}
    assert set(buffer.sample(2, fields=["t"], include_metadata=False, **STEPS)) == {"t"}


def test_a_dict_of_plain_values_is_found_without_making_a_key(recorded, monkeypatch):
    buffer, stack = recorded(), {"t": 2}
    for padding in ("zero", "edge", "zero"):
        assert buffer.sample(2, n_steps=1, stack=stack, padding=padding)["t"].shape == (2, 2)
    set_inside(monkeypatch, option_key=None)
    assert buffer.sample(2, n_steps=1, stack={"t": 2}, padding="edge")["t"].shape == (2, 2)


def test_a_dict_that_was_changed_is_another_option(recorded):
    buffer, stack = recorded(), {"t": 2}
    for steps in (2, 3, 2):
        stack["t"] = steps
        assert buffer.sample(4, n_steps=1, stack=stack)["t"].shape == (4, steps)
        assert buffer.sample(4, n_steps=1, stack={"t": 2})["t"].shape == (4, 2)


def test_a_transform_that_can_be_changed_is_called_as_it_is_now(recorded):
    buffer, transform = recorded(), Plus(0)
    plain = buffer.batch(**STEPS)["reward"]
    for number in (1, 2):
        transform.number = number
        assert torch.equal(buffer.batch(transform=transform, **STEPS)["reward"], plain + number)
    assert torch.equal(buffer.batch(transform=Plus(5), **STEPS)["reward"], plain + 5)


def test_options_that_are_their_own_key_are_found_without_making_one():
    options = {"view": Timestep(["t"]), "n_steps": 3, "fields": ("t",), "on_stale": "raise", "gamma": None}
    assert get_inside("option_key")(options) == tuple(options.items())


def test_views_are_equal_however_their_names_were_given():
    assert Timestep(["t"]) == Timestep(("t",)) == Timestep("t") == Timestep(iter(["t"]))
    assert len({NStep(1, ["t"], ("t",), "t"), NStep(1, "t", "t", ["t"])}) == 1
