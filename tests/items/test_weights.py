"""Weights by a function of all columns of the episodes; as many items of each value of a meta field."""

from __future__ import annotations

import numpy as np
import pytest
from inside import get_inside, set_inside

from memmap_buffer import (
    Balanced,
    ConcatBuffer,
    NotEnoughDataError,
    ReplayBuffer,
    SchemaError,
    Source,
    Window,
    mixture_loader,
)

FIELDS = {"x": "int", "terminated": "bool"}
META = {"task": "U5", "score": ("float", 1), "pair": ("int", 2)}
TASKS = ["stack", "push", "stack", "pull", "stack", "push", "stack", "stack"]
STEPS = {"timestep_level": True, "return_indices": True, "format": "numpy"}


def record(folder, tasks=TASKS):
    """Episodes of 2, 3, 4, … steps; their scores are their positions."""
    buffer = ReplayBuffer(folder, 20, 30, FIELDS, META)
    for i, task in enumerate(tasks):
        steps = {"x": np.arange(2 + i), "terminated": np.arange(2 + i) == 1 + i}
        buffer.store_episode(**steps, task=task, score=i, pair=[i, -i])
    return buffer


@pytest.fixture
def buffer(tmp_path):
    return record(tmp_path / "buffer")


def columns_of(source, **options):
    """What a function of all columns is given."""
    seen = {}

    def weigh(columns):
        seen.update(columns)
        return np.ones(len(columns["serial"]))

    source.sample(1, **{**STEPS, **options}, weight_by=weigh)
    return {name: column.tolist() for name, column in seen.items()}


def share_of(batch, chosen):
    return np.isin(batch["_indices"][:, -2], chosen).mean()


def test_a_function_is_given_every_column_with_an_entry_an_episode(buffer):
    columns = columns_of(buffer)
    assert columns.pop("episode_time") == buffer.episode_times.tolist()
    assert columns == {
        "task": TASKS,
        "score": [*range(8)],
        "pair": [[i, -i] for i in range(8)],
        "episode_lens": [*range(2, 10)],
        "serial": [*range(8)],
        "age": [*range(7, -1, -1)],
        "items": [*range(2, 10)],
    }


def test_the_columns_are_of_the_episodes_that_have_items_whatever_the_filters_leave_of_them(buffer):
    buffer.delete(1)
    odd = {"filter_fields": {"x": lambda column: column % 2 == 1}, "filter_meta": {"task": {"stack", "push"}}}
    columns = columns_of(buffer, **odd)
    assert columns["serial"] == [0, 2, 4, 5, 6, 7] and columns["age"] == [5, 4, 3, 2, 1, 0]
    assert columns["items"] == [1, 2, 3, 3, 4, 4] and columns["score"] == [0, 2, 4, 5, 6, 7]
    assert columns_of(buffer, timestep_level=False, view=Window(6, boundary="drop"))["items"] == [1, 2, 3, 4]
    seen = []
    by_score = ("score", lambda column: seen.append(column.tolist()) or column)
    buffer.sample(1, **STEPS, **odd, weight_by=by_score)
    assert seen == [[0, 2, 4, 5, 6, 7]]


def test_an_end_in_the_middle_of_an_episode_makes_no_two_of_it(tmp_path):
    buffer = ReplayBuffer(tmp_path, 3, 9, FIELDS, META)
    for _ in range(2):
        buffer.store_episode(x=np.arange(9), terminated=np.arange(9) % 3 == 2, task="a", score=1, pair=[0, 0])
    columns = columns_of(buffer, timestep_level=False, n_steps=3)
    assert columns["age"] == [1, 0] and columns["items"] == [9, 9]


def test_only_the_columns_that_are_asked_for_are_read(buffer, monkeypatch):

    read, column = [], get_inside("episode_column")
    set_inside(monkeypatch, episode_column=lambda *a: read.append(a[2]) or column(*a))
    buffer.sample(4, **STEPS, weight_by=lambda columns: columns["score"] * (columns["age"] < 3))
    assert read == ["score"]


def test_the_newest_quarter_of_the_episodes_is_drawn_with_a_probability(buffer):
    by_age = {"weight_by": lambda c: np.where(c["age"] < len(c["age"]) / 4, 0.7, 0.1) / c["items"]}
    batch = buffer.sample(20_000, **STEPS, **by_age, seed=0)
    assert abs(share_of(batch, [6, 7]) - 0.7) < 0.02 and abs(share_of(batch, [0]) - 0.05) < 0.01
    for _ in range(2):
        buffer.store_episode(x=[0, 1], terminated=[False, True], task="new", score=0, pair=[0, 0])
    buffer.delete([0, 1])
    batch = buffer.sample(20_000, **STEPS, **by_age, seed=0)
    assert abs(share_of(batch, [8, 9]) - 0.7) < 0.02


def test_the_age_in_several_folders_is_by_the_time_of_publication(tmp_path, monkeypatch):
    clock = [1000]
    monkeypatch.setattr("time.time", lambda: float(clock[0]))
    one, two = (ReplayBuffer(tmp_path / name, 9, 9, FIELDS, META) for name in ("one", "two"))
    for now, buffer in ((1000, one), (1001, two), (1002, one), (1002, two), (1001, one)):  # a clock that was set back
        clock[0] = now
        buffer.store_episode(x=[0], terminated=[True], task="a", score=now, pair=[0, 0])
    columns = columns_of(ConcatBuffer([one, two]))
    assert columns["score"] == [1000, 1002, 1001, 1001, 1002] and columns["age"] == [4, 1, 3, 2, 0]
    assert columns_of(one)["age"] == [2, 1, 0]  # in one folder by the order of publication


def test_a_meta_field_hides_a_column_of_its_name(tmp_path):
    buffer = ReplayBuffer(tmp_path, 3, 9, {"x": "int"}, {"age": "int"})
    for age in (5, 7):
        buffer.store_episode(x=[0], age=age)
    assert columns_of(buffer)["age"] == [5, 7]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("weight_by", [lambda c: c["score"] + 1, Balanced("task")], ids=["a lambda", "balanced"])
def test_the_function_is_called_in_this_process_and_loaders_resume(buffer, method, weight_by):
    how = {"timestep_level": True, "shuffle": True, "weight_by": weight_by}
    alone = [batch["x"].tolist() for batch in buffer.dataloader(5, seed=2, **how)]
    workers = buffer.dataloader(5, seed=2, num_workers=1, multiprocessing_context=method, **how)
    assert [batch["x"].tolist() for batch in workers] == alone
    loader = buffer.dataloader(5, seed=2, **how)
    next(iter(loader))
    resumed = buffer.dataloader(5, **how)
    resumed.load_state_dict(loader.state_dict())
    assert [batch["x"].tolist() for batch in resumed] == alone[1:]


@pytest.mark.parametrize(
    ("weigh", "error"),
    [
        (lambda c: c["scoer"], "weight_by: got 'scoer', which was not declared here; did you mean 'score'"),
        (lambda c: c["pair"], r"the function of '.*lambda.*' gave shape \(8, 2\), expected \(8,\)"),
        (lambda c: 1.0, r"gave shape \(\), expected \(8,\)"),
        (lambda c: c["score"] - 3.5, r"lambda.* of episode 0 is -3.5, expected a number from 0"),
        (Balanced("taks"), "got 'taks', which was not declared here; did you mean 'task'"),
    ],
    ids=["unknown", "pairs", "one number", "negative", "balanced"],
)
def test_a_function_that_gives_no_weight_for_each_episode_is_refused(buffer, weigh, error):
    with pytest.raises(SchemaError, match=error):
        buffer.sample(3, **STEPS, weight_by=weigh)


def test_where_no_episode_has_items_the_function_is_not_asked(buffer):
    with pytest.raises(NotEnoughDataError, match="filter_meta"):
        buffer.sample(3, **STEPS, filter_meta={"task": "none"}, weight_by=lambda c: 1 / c["age"].max())


@pytest.mark.parametrize(
    ("weight_by", "shares"),
    [
        (Balanced("task"), {"stack": 1 / 3, "push": 1 / 3, "pull": 1 / 3}),
        (Balanced("task", {"stack": 3, "push": 1}), {"stack": 0.75, "push": 0.25, "pull": 0}),
    ],
    ids=str,
)
def test_each_value_of_a_meta_field_has_its_share_of_the_items(buffer, weight_by, shares):
    batch = buffer.sample(20_000, **STEPS, weight_by=weight_by, seed=1)
    for task, share in shares.items():
        mine = batch["task"] == task
        assert abs(mine.mean() - share) < 0.02
        serials = [i for i, name in enumerate(TASKS) if name == task]
        steps = np.array([2 + i for i in serials])  # within a task all items alike
        found = np.array([(batch["_indices"][mine, 0] == serial).mean() for serial in serials]) if share else steps
        assert abs(found - steps / steps.sum()).max() < 0.02 or not share


def test_by_several_numbers_and_over_several_folders_values_are_balanced_too(buffer, tmp_path):
    both = ConcatBuffer([buffer, record(tmp_path / "other", ["lift"] * 3)])
    batch = both.sample(20_000, **STEPS, weight_by=Balanced("task"), seed=1)
    assert all(abs((batch["task"] == task).mean() - 0.25) < 0.02 for task in ("stack", "push", "pull", "lift"))
    batch = buffer.sample(16_000, **STEPS, weight_by=Balanced("pair"), seed=1)
    assert all(abs(share_of(batch, [serial]) - 1 / 8) < 0.02 for serial in range(8))


def test_one_source_a_value_gives_each_batch_exactly_as_many_items_of_each(buffer):
    sources = {
        task: Source(buffer, timestep_level=True, filter_meta={"task": task}) for task in ("stack", "push", "pull")
    }
    for batch in mixture_loader(sources, batch_size=6, seed=0, drop_last=True):
        assert sorted(batch["task"]) == ["pull", "pull", "push", "push", "stack", "stack"]
