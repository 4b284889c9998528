"""Rollouts in memory: every order of reading against one list of steps, and what one call to `store` publishes."""

import errno
from itertools import count

import numpy as np
import pytest
import torch
from fault_injection import flags_of, shown, system, without_barriers
from inside import place_of, set_inside
from interruptions import interrupted
from specification import CUT, FINAL, TERMINATED

from memmap_buffer import (
    BufferFullError,
    Collector,
    EpisodeStateError,
    Field,
    NotEnoughDataError,
    ReplayBuffer,
    SchemaError,
    adapters,
)
from memmap_buffer.memmap_replay_buffer import EpisodeCollector

FIELDS = {
    "observation": {"x": Field("float", 2, final=True)},
    "half": ("bfloat16", (), 0.0),
    "reward": "float",
    "log_prob": ("float", (), 0.0),
    "terminated": ("bool", (), False),
}
GROUPS, TIME = 3, 5


def make(folder, max_episodes=20, **options):
    return ReplayBuffer(folder, max_episodes, 8, FIELDS, {"task": "int"}, circular=True, **options)


def step(t, ends=()):
    x = np.stack([np.arange(GROUPS) + 10.0 * t, np.full(GROUPS, t)], -1)
    return {
        "observation": {"x": x},
        "next_observation": {"x": x + 0.5},
        "half": np.full(GROUPS, t / 2),
        "reward": torch.arange(GROUPS) + t / 4,
        "terminated": [i in ends for i in range(GROUPS)],
    }


@pytest.fixture
def buffer(tmp_path):
    with make(tmp_path) as made:
        yield made


@pytest.fixture
def collector(buffer):
    made = buffer.create_collector(GROUPS)
    for t in range(TIME):
        made.append(**step(t, ends=(1,) if t == 2 else ()), task=[7, 8, 9])
    return made


def at(t, i):
    """The slow definition of one timestep of one group."""
    return [10.0 * t + i, t], t / 2, i + t / 4


def check(data, where):
    """data: name -> tensors; where: index -> (t, group)."""
    for index, (t, i) in where.items():
        got = [data["observation"]["x"][index].tolist(), data["half"][index].item(), data["reward"][index].item()]
        assert got == list(at(t, i))
        assert data["next_observation"]["x"][index].tolist() == [10.0 * t + i + 0.5, t + 0.5]
        assert data["terminated"][index].item() == ((t, i) == (2, 1)) and data["task"][index].item() == 7 + i


EVERY = [(t, i) for t in range(TIME) for i in range(GROUPS)]


def test_every_order_of_reading_gives_the_same_timesteps(collector):
    assert len(collector) == TIME
    check(collector.time_major, {(t, i): (t, i) for t, i in EVERY})
    check(collector.env_major, {(i, t): (t, i) for t, i in EVERY})
    check(collector.all_data, {t * GROUPS + i: (t, i) for t, i in EVERY})
    for i, group in enumerate(collector.groups):
        check(group, {t: (t, i) for t in range(TIME)})
    assert collector.env_major["observation"]["x"].shape == (GROUPS, TIME, 2)


def test_a_block_is_as_its_timesteps_one_by_one(buffer, collector):
    other = buffer.create_collector(GROUPS)
    blocks = collector.time_major
    for part in (slice(0, 2), slice(2, 5)):
        cut = {key: value[part] for key, value in blocks.items() if not isinstance(value, dict)}
        nested = {key: {"x": blocks[key]["x"][part]} for key in ("observation", "next_observation")}
        other.extend(**cut, **nested)
    check(other.time_major, {(t, i): (t, i) for t, i in EVERY})


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 4, 3]), (True, [4, 4, 4])])
def test_minibatches_give_each_timestep_once_an_epoch_in_an_order_fixed_by_the_seed(collector, drop_last, sizes):
    collector["advantage"] = torch.arange(TIME * GROUPS).reshape(TIME, GROUPS)
    batches = list(collector.minibatches(4, epochs=2, seed=3, drop_last=drop_last))
    assert [len(batch["reward"]) for batch in batches] == 2 * sizes
    epochs = [
        torch.cat([b["advantage"] for b in part]).tolist() for part in (batches[: len(sizes)], batches[len(sizes) :])
    ]
    assert epochs[0] != epochs[1]
    for batch in batches:
        check(batch, {k: EVERY[number] for k, number in enumerate(batch["advantage"].tolist())})
    assert all(len(set(epoch)) == sum(sizes) for epoch in epochs)
    again = list(collector.minibatches(4, epochs=2, seed=3, drop_last=drop_last))
    assert all(torch.equal(a["reward"], b["reward"]) for a, b in zip(batches, again, strict=True))
    plain = list(collector.minibatches(4, shuffle=False))
    assert torch.cat([batch["advantage"] for batch in plain]).tolist() == list(range(TIME * GROUPS))
    for wrong in (0, -1, 2.5):
        with pytest.raises(SchemaError, match=f"batch_size: got {wrong}, expected a whole number"):
            next(collector.minibatches(wrong))


def test_one_call_to_store_publishes_an_episode_for_each_group_and_end(buffer, collector):
    collector["log_prob"] = np.arange(TIME * GROUPS).reshape(TIME, GROUPS)
    collector["advantage"] = np.zeros((TIME, GROUPS))  # no field of the buffer
    collector.store(task=[1, 2, 3])
    assert len(collector) == 0 and buffer.num_episodes == 4
    expected = [(1, 0, 3), (0, 0, TIME), (1, 3, TIME), (2, 0, TIME)]
    flags = [TERMINATED | FINAL, CUT | FINAL, CUT | FINAL, CUT | FINAL]
    for (i, start, stop), flag, (serial, episode) in zip(expected, flags, shown(buffer), strict=True):
        times = range(start, stop)
        assert episode["observation"]["x"] == [at(t, i)[0] for t in times] + [[10.0 * (stop - 1) + i + 0.5, stop - 0.5]]
        assert (episode["half"], episode["reward"]) == ([at(t, i)[1] for t in times], [at(t, i)[2] for t in times])
        assert episode["log_prob"] == [t * GROUPS + i for t in times] and episode["task"] == i + 1
        assert flags_of(buffer.folder)[serial] & (CUT | FINAL | TERMINATED) == flag


def test_groups_that_cannot_end_are_whole_episodes(tmp_path):
    with ReplayBuffer(tmp_path, 4, 8, {"reward": "float"}, {"task": "int"}) as buffer:
        collector = buffer.create_collector(2)
        for t in range(3):
            collector.append(reward=[t, 10 + t])
        collector.store(task=5)
        assert [(e["reward"], e["task"]) for _, e in shown(buffer)] == [([0, 1, 2], 5), ([10, 11, 12], 5)]
        assert not any(flags & CUT for flags in flags_of(tmp_path).values())
        with pytest.raises(NotEnoughDataError, match="the collector is empty"):
            collector.store()
        with pytest.raises(NotEnoughDataError, match="the collector is empty"):
            next(collector.minibatches(2))


def test_only_some_fields_are_collected_and_unknown_ones_are_kept_where_it_is_not_strict(buffer):
    collector = buffer.create_collector(2, ["reward"], [], strict=False)
    collector.append(reward=[1, 2], value=[[3, 4], [5, 6]])
    collector.append(reward=[3, 4], value=torch.zeros(2, 2))
    assert set(collector.time_major) == {"reward", "value"} and collector.time_major["value"].shape == (2, 2, 2)
    collector["observation.x"] = np.ones((2, 2, 2))
    collector.store()
    assert [e["reward"] for _, e in shown(buffer)] == [[1, 3], [2, 4]]


BAD = {
    "unknown": (lambda c: c.append(**step(1), value=[1, 2, 3]), "'value'.*not declared"),
    "groups": (lambda c: c.append(observation={"x": np.zeros((2, 2))}, reward=[1, 2]), "2 groups.*made for 3"),
    "names": (
        lambda c: c.append(observation={"x": np.zeros((3, 2))}, reward=[1, 2, 3]),
        "next_observation.x, task: .*some",
    ),
    "column": (
        lambda c: c.__setitem__("value", np.zeros((3, 5))),
        r"'value': got shape \(3, 5\), expected \(5, 3, …\)",
    ),
    "meta": (lambda c: c.store(tusk=[1, 2, 3]), "'tusk'.*did you mean 'task'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_and_nothing_is_lost(buffer, collector, name):
    call, text = BAD[name]
    with pytest.raises(SchemaError, match=text):
        call(collector)
    check(collector.time_major, {(t, i): (t, i) for t, i in EVERY})
    assert len(buffer) == 0
    with pytest.raises(SchemaError, match="fieldnames: got 'rewrad'"):
        buffer.create_collector(2, ["rewrad"])


def test_store_goes_on_where_a_full_disk_stopped_it(tmp_path):
    for at_operation in range(1, 80):
        with make(tmp_path / str(at_operation)) as buffer:
            collector = buffer.create_collector(GROUPS)
            for t in range(TIME):
                collector.append(**step(t, ends=(1,) if t == 2 else ()))
            failed = False
            with system(at_operation, error=errno.ENOSPC, only=("pwrite",)):
                try:
                    collector.store()
                except OSError as error:
                    failed = error.errno == errno.ENOSPC
            if failed:
                assert len(collector) == TIME
                collector.store()
            assert sorted(len(episode["reward"]) for _, episode in shown(buffer)) == [2, 3, 5, 5]
        if not failed:
            break
    assert at_operation > 10


def test_a_full_buffer_refuses_and_clear_forgets_what_was_collected(tmp_path):
    with ReplayBuffer(tmp_path, 2, 8, {"reward": "float"}) as buffer:
        collector = buffer.create_collector(3)
        collector.append(reward=[1, 2, 3])
        with pytest.raises(BufferFullError, match="is full"):
            collector.store()
        collector.clear()
        assert len(collector) == 0 and len(buffer) == 0
        with buffer.one_episode():
            buffer.store(reward=4)
        assert [e["reward"] for _, e in shown(buffer)] == [[4]]


IN_PLACE = [{"stage": "disk"}, {"publish": "step"}, {"publish": "step", "durability": "power"}]


@pytest.mark.parametrize("how", IN_PLACE, ids=str)
def test_store_goes_on_where_a_full_disk_stopped_it_also_in_place(tmp_path, monkeypatch, how):
    set_inside(monkeypatch, staged_bytes=8)  # a few steps are staged, then they are written
    without_barriers(monkeypatch)
    for at_operation in range(1, 200):
        options = {"spare_slots": 3, **how}
        with ReplayBuffer(
            tmp_path / str(at_operation), 9, 8, {"x": "float", "terminated": "bool"}, **options
        ) as buffer:
            collector = buffer.create_collector(2)
            collector.extend(x=np.arange(12).reshape(6, 2), terminated=np.arange(12).reshape(6, 2) == 6)
            failed = False
            with system(at_operation, error=errno.ENOSPC, only=("pwrite",)):
                try:
                    collector.store()
                except OSError as error:
                    failed = error.errno == errno.ENOSPC
            if failed:
                collector.store()
            assert sorted(e["x"] for _, e in shown(buffer)) == [[0, 2, 4, 6], [1, 3, 5, 7, 9, 11], [8, 10]]
        if not failed:
            break
    assert at_operation > 10


INTERRUPTED = [("set_meta", 1), ("set_meta", 3), ("set_final", 0), ("set_final", 2), ("release", 0), ("release", 2)]
INTERRUPTED += [("publish", 0), ("publish", 1)]


@pytest.mark.parametrize(("where", "after"), INTERRUPTED, ids=str)
def test_store_goes_on_where_it_was_interrupted(buffer, collector, monkeypatch, where, after):
    calls, owner = [], place_of("publish_episode")[0] if where == "publish" else adapters.Episode
    real = getattr(owner, where)

    def interrupted(self, *arguments, **options):
        calls.append(self)
        if len(calls) == after + 1:
            raise KeyboardInterrupt("boom")
        real(self, *arguments, **options)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt, match="boom"):
        collector.store(task=[1, 2, 3])
    collector.store()
    got = [(e["reward"], e["task"], len(e["observation"]["x"])) for _, e in shown(buffer)]
    cuts = [(0, 0, TIME), (1, 0, 3), (1, 3, TIME), (2, 0, TIME)]
    expected = [([at(t, i)[2] for t in range(start, stop)], i + 1, stop - start + 1) for i, start, stop in cuts]
    assert sorted(got) == sorted(expected)


@pytest.mark.parametrize("stride", [61, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("publish", ["episode", "step"])
def test_store_goes_on_where_it_was_interrupted_at_any_line(tmp_path, publish, stride):
    numbers = np.arange(9)[:, None] + [0, 100]
    ends = np.isin(numbers, [3, 106, 7, 107])
    for at in count(0, stride):
        folder, fields = tmp_path / str(at), {"x": Field("int64", (), final=True), "terminated": "bool"}
        with ReplayBuffer(folder, 50, 3, fields, circular=True, publish=publish, spare_slots=3) as buffer:
            collector = buffer.create_collector(2)
            for t in range(9):
                collector.append(x=numbers[t], terminated=ends[t], next_x=numbers[t] + 1)
            error = interrupted(collector.store, at)
            if error is not None:
                collector.store()
        steps = [x for _, e in shown(folder) for x in e["x"][: len(e["terminated"])]]
        assert sorted(steps) == sorted(numbers.ravel().tolist()), error
        if error is None:
            break


def test_nothing_is_collected_while_some_of_it_waits_to_be_stored(tmp_path):
    with ReplayBuffer(tmp_path, 3, 8, {"x": "float"}) as buffer:
        buffer.store_episode(x=[0])
        collector = buffer.create_collector(3)
        collector.append(x=[1, 2, 3])
        with pytest.raises(BufferFullError, match="is full"):
            collector.store()
        for more in (lambda: collector.append(x=[4, 5, 6]), lambda: collector.__setitem__("x", [[4, 5, 6]])):
            with pytest.raises(EpisodeStateError, match=r"not stored yet; call store\(\) again"):
                more()
        buffer.delete(0)
        collector.store()
        collector.append(x=[4, 5, 6])
        assert [e["x"] for _, e in shown(buffer)] == [[1], [2], [3]] and len(collector) == 1


def test_what_was_collected_before_the_columns_changed_is_stored_by_the_schema_that_stands(tmp_path):
    with ReplayBuffer(tmp_path, 9, 8, {"x": "float", "z": ("int", (), 0)}) as buffer:
        collector = buffer.create_collector(2)
        collector.append(x=[1, 2], z=[3, 4])
        buffer.add_field("y", ("float", (), 5))
        buffer.drop_field("z")
        collector.store()
        assert [e for _, e in shown(buffer)] == [{"x": [1], "y": [5]}, {"x": [2], "y": [5]}]


def test_a_column_that_was_computed_is_kept_as_it_was_given(collector):
    column = torch.zeros(TIME, GROUPS)
    collector["advantage"] = column
    column += 1
    assert not collector.time_major["advantage"].any()


def test_a_collector_that_need_not_be_complete_stores_what_the_first_timestep_lacks_as_defaults_or_zeros(tmp_path):
    fields = {"x": "float", "left_out": ("int", 2), "five": ("int", (), 5)}
    with ReplayBuffer(tmp_path, 4, 6, fields, {"task": "int"}) as buffer:
        collector = Collector(buffer, 2, complete=False)
        collector.append(x=[1.0, 2.0])
        assert list(collector.columns) == ["x"] and collector.columns["x"].tolist() == [[1, 2]]
        with pytest.raises(SchemaError, match="five"):  # the same names each time
            collector.append(x=[1.0, 2.0], five=[1, 2])
        collector.store(task=[3, 4])
        collector.append(x=[3.0, 4.0], five=[6, 7])  # other names, once it is empty
        collector.store(task=0)
        data = buffer.get_all_data()
        assert data["x"][:, 0].tolist() == [1, 2, 3, 4]
        assert data["five"][:, 0].tolist() == [5, 5, 6, 7]
        assert data["left_out"][:, 0].tolist() == [[0, 0]] * 4
        with pytest.raises(SchemaError, match="left_out"):
            Collector(buffer, 2).append(x=[1.0, 2.0])


def test_a_collector_knows_its_fields_and_gives_arrays_by_dotted_names(tmp_path):
    with ReplayBuffer(tmp_path, 4, 6, {"obs": {"a": "float", "b": "int"}, "x": "float"}) as buffer:
        collector = buffer.create_collector(2, fieldnames=["obs.a", "obs.b"], strict=False)
        assert list(collector.schema.fields) == ["obs.a", "obs.b"] and not collector.strict
        for t in range(3):
            collector.append(obs={"a": [t, t + 1], "b": [t, t]})
        assert collector.columns["obs.a"].tolist() == [[0, 1], [1, 2], [2, 3]]
        ported = EpisodeCollector(buffer, 2)
        ported.append(obs={"a": [1.0, 2.0], "b": [3, 4]}, x=[5.0, 6.0])
        assert ported.time_major("obs.a").tolist() == [[1, 2]] and ported.env_major("obs.b").tolist() == [[3], [4]]
