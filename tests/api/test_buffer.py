"""`ReplayBuffer`'s own words: whole episodes, batches, groups; opening, continuing, replacing, closing, pickling."""

import inspect
import pickle
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_injection import listing, operations_of, shown, system
from inside import layout_of_capacity, set_inside

from memmap_buffer import (
    BufferFullError,
    ConcatBuffer,
    CorruptBufferError,
    EpisodeStateError,
    Field,
    NotABufferError,
    ReadOnlyError,
    ReplayBuffer,
    Schema,
    SchemaError,
    SchemaMismatchError,
    pack,
    publish,
    pull,
    repair,
    unpack,
    verify,
)
from memmap_buffer.compat import step_spec, storage_spec

FIELDS = {"obs": Field("float", 2, final=True), "reward": "float", "terminated": ("bool", (), False)}
META = {"task": "int", "label": ("U8", (), "none")}


def make(folder, max_episodes=4, max_timesteps=5, fields=FIELDS, meta_fields=META, **options):
    return ReplayBuffer(folder, max_episodes, max_timesteps, fields, meta_fields, **options)


def whole(value, length=2, **more):
    return {"obs": np.full((length, 2), value), "reward": np.full(length, value), **more}


def rewards(source):
    return [episode["reward"] for _, episode in shown(source)]


@pytest.fixture
def buffer(tmp_path):
    with make(tmp_path / "buffer") as made:
        yield made


# Whole episodes


KINDS = {"tensor": torch.tensor, "array": np.array, "list": list, "fortran": np.asfortranarray}


@pytest.mark.parametrize("kind", [*KINDS.values(), lambda x: np.repeat(x, 2, axis=0)[::2]], ids=[*KINDS, "strided"])
def test_store_episode_publishes_a_whole_episode(buffer, kind):
    obs, reward = kind([[1, 2], [3, 4], [5, 6]]), kind([0.5, 1, 2])
    buffer.store_episode(obs=obs, reward=reward, task=3, label="left", terminated=[False, False, True])
    expected = {"obs": [[1, 2], [3, 4], [5, 6]], "reward": [0.5, 1, 2], "terminated": [False, False, True]}
    assert shown(buffer) == [(0, {**expected, "task": 3, "label": "left"})]


def test_store_episode_fills_defaults_and_takes_one_more_entry_of_final_fields(buffer):
    buffer.store_episode(obs=np.arange(6).reshape(3, 2), reward=[1, 2])
    found = shown(buffer)[0][1]
    assert found["obs"] == [[0, 1], [2, 3], [4, 5]] and found["reward"] == [1, 2]
    assert found["terminated"] == [False, False] and found["label"] == "none"


def test_the_final_observation_of_a_whole_episode_may_be_a_text(tmp_path):
    with make(tmp_path / "b", fields={"word": Field("U3", final=True), "x": "int"}, meta_fields=None) as texts:
        texts.store_episode(word=["a", "bc", "def"], x=[1, 2])
        assert texts.episode(0)["word"].tolist() == ["a", "bc", "def"]


def test_store_episode_within_an_open_one_is_an_episode_of_its_own(buffer):
    with buffer.one_episode(task=1):
        buffer.store(obs=[1, 1], reward=1)
        buffer.store_episode(**whole(2))
        buffer.store(obs=[3, 3], reward=3)
    assert rewards(buffer) == [[2, 2], [1, 3]]


BAD_EPISODES = {
    "unknown": (whole(1, rewad=[1, 1]), SchemaError, "'rewad'.*did you mean 'reward'"),
    "missing": ({"obs": [[1, 2]]}, SchemaError, "'reward'.*missing.*no default"),
    "only meta": ({"task": 1}, SchemaError, "no per-timestep field was given"),
    "no steps": ({"obs": np.zeros((0, 2)), "reward": []}, SchemaError, "length 0.*at least one timestep"),
    "lengths": ({"obs": [[1, 2]] * 2, "reward": [1]} | {"terminated": [False] * 2}, SchemaError, "lengths differ"),
    "two more": ({"obs": [[1, 2]] * 3, "reward": [1]}, SchemaError, "lengths differ.*obs: 3, reward: 1"),
    "no time": ({"obs": [1, 2], "reward": [1]}, SchemaError, "'obs'.*the first axis is time"),
    "shape": ({"obs": [[1, 2, 3]], "reward": [1]}, SchemaError, r"'obs'.*\(1, 3\).*first axis is time"),
    "lossy": (whole(1, terminated=[0, 7]), SchemaError, "'terminated'.*out of range 0 … 1"),
    "meta": (whole(1, task=0.5), SchemaError, "meta field 'task'.*not a whole number"),
    "too long": (whole(1, 6), EpisodeStateError, r"longer than max_timesteps \(5\)"),
}


@pytest.mark.parametrize("name", BAD_EPISODES)
def test_a_whole_episode_that_is_refused_leaves_nothing_open_and_changes_no_file(buffer, name):
    bad, kind, text = BAD_EPISODES[name]
    buffer.store_episode(**whole(1))
    with system() as seen, pytest.raises(kind, match=text):
        buffer.store_episode(**bad)
    assert seen.done == [] and rewards(buffer) == [[1, 1]]
    for i in range(3):
        buffer.store_episode(**whole(i))
    assert buffer.serials.tolist() == [0, 1, 2, 3]


def test_scalars_fit_fields_of_one_number_and_the_reverse(tmp_path):
    with make(tmp_path, fields={"one": ("float", 1), "none": "float"}, meta_fields={"m": ("int", 1)}) as loose:
        loose.store_episode(one=[1, 2], none=[[3], [4]], m=5)
        with loose.one_episode(m=[6]):
            loose.store(one=7, none=torch.tensor([8.0]))
        loose.update(0, one=[9.0, 9.0], m=1)
        assert shown(loose) == [
            (0, {"one": [[9], [9]], "none": [3, 4], "m": [1]}),
            (1, {"one": [[7]], "none": [8], "m": [6]}),
        ]


# Synchronised environments


def test_a_batch_of_environments_becomes_one_episode_each_in_the_order_of_the_batch(buffer):
    with buffer.batched_episode(3, task=[1, 2, 3]) as group:
        buffer.store_batch(obs=torch.zeros(3, 2), reward=[1, 2, 3])
        buffer.store_batch(obs=np.ones((3, 2)), reward=torch.tensor([4, 5, 6]))
        buffer.store_meta_batch(label=["a", "b", "c"])
        group["task"] = [7, 8, 9]
        group.final(obs=[[1, 1], [2, 2], [3, 3]])
        assert len(group) == 3 and len(buffer) == 0
    assert rewards(buffer) == [[1, 4], [2, 5], [3, 6]] and buffer.serials.tolist() == [0, 1, 2]
    found = [(episode["task"], episode["label"], episode["obs"][-1]) for _, episode in shown(buffer)]
    assert found == [(7, "a", [1, 1]), (8, "b", [2, 2]), (9, "c", [3, 3])]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_drops_the_whole_batch(buffer, kind):
    buffer.store_episode(**whole(1))
    with pytest.raises(kind, match="boom"), buffer.batched_episode(2, task=[8, 8]):
        buffer.store_batch(obs=np.zeros((2, 2)), reward=[2, 2])
        raise kind("boom")
    assert rewards(buffer) == [[1, 1]]
    buffer.store_episode(**whole(3))
    assert shown(buffer)[-1][1]["task"] == 0 and buffer.serials.tolist() == [0, 1]


def test_a_batch_step_that_is_refused_is_stored_in_no_episode(buffer):
    ok = {"obs": np.zeros((2, 2)), "reward": [1, 2]}
    bad = [
        ({**ok, "reward": [1, 2, 3]}, SchemaError, "'reward'.*timestep 1.*batch of 3, expected 2"),
        ({**ok, "reword": [1, 2]}, SchemaError, "'reword'.*did you mean 'reward'"),
        ({"obs": ok["obs"]}, SchemaError, "'reward'.*timestep 1.*missing"),
        ({**ok, "obs": np.zeros((2, 3))}, SchemaError, r"'obs', timestep 1: got shape \(2, 3\)"),
        ({**ok, "terminated": [0, 5]}, SchemaError, "'terminated'.*out of range"),
    ]
    with buffer.batched_episode(2) as group:
        buffer.store_batch(**ok)
        for values, kind, text in bad:
            with pytest.raises(kind, match=text):
                buffer.store_batch(**values)
        with pytest.raises(SchemaError, match=r"'tusk'.*did you mean 'task'"):
            buffer.store_meta_batch(tusk=[1, 2])
        with pytest.raises(SchemaError, match=r"'task'.*batch of 1, expected 2"):
            buffer.store_meta_batch(task=[1])
        buffer.store_batch(**ok, terminated=[False, True])
        with pytest.raises(EpisodeStateError, match="timestep 2: the episode ended at timestep 1 by `terminated`"):
            buffer.store_batch(**ok)
        assert [episode.length for episode in group.episodes] == [2, 2]
        with pytest.raises(EpisodeStateError, match="store_batch"):
            buffer.store(obs=[1, 1], reward=1)
    assert rewards(buffer) == [[1, 1], [2, 2]]


def test_a_batch_that_cannot_be_published_whole_is_refused_whole(buffer):
    buffer.store_episode(**whole(1))
    with pytest.raises(BufferFullError, match=r"is full: 1 of .*3 more are open"), buffer.batched_episode(4):
        pass
    with buffer.batched_episode(3):
        buffer.store_batch(obs=np.zeros((3, 2)), reward=[2, 3, 4])
    assert rewards(buffer) == [[1, 1], [2], [3], [4]]


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, "2"])
def test_a_batch_has_an_episode_at_least(buffer, batch_size):
    with pytest.raises(SchemaError, match="batch_size: got"), buffer.batched_episode(batch_size):
        pass
    assert len(buffer) == 0


def test_batch_calls_outside_a_batch_say_where_they_belong(buffer):
    for call in (buffer.store_batch, buffer.store_meta_batch):
        with pytest.raises(EpisodeStateError, match=r"no batch is open.*batched_episode"):
            call(reward=[1])


# Opening, continuing, replacing


def test_reopening_continues_where_it_stood(tmp_path):
    with make(tmp_path, 2, circular=True) as first:
        for i in range(3):
            first.store_episode(**whole(i))
    for open_again in (lambda: ReplayBuffer.from_folder(tmp_path), lambda: make(tmp_path, 2, circular=True)):
        with open_again() as again:
            before = shown(again)
            assert (again.circular, again.max_episodes, again.max_timesteps) == (True, 2, 5)
            again.store_episode(**whole(9))
            assert shown(again)[0] == before[-1] and again.serials[-1] == before[-1][0] + 1


def test_another_schema_is_refused_with_each_difference_and_nothing_is_touched(tmp_path):
    make(tmp_path).close()
    before = listing(tmp_path)
    fields = {"obs": Field("float64", 2, final=True), "reward": ("float", (), 1.0), "action": "int"}
    with pytest.raises(SchemaMismatchError, match="different configuration") as caught:
        make(tmp_path, 9, 6, fields, {"task": "int"}, circular=True, capacity=50)
    lines = "\n".join(caught.value.differences)
    assert str(caught.value).count("stored") == len(caught.value.differences) + str(caught.value).count("stored values")
    for name in ("max_episodes", "max_timesteps", "circular", "capacity", "obs", "reward", "action", "terminated"):
        assert name in lines
    assert "label" in lines and "task" not in lines and "spare_slots" not in lines
    assert "max_episodes: stored 4, given 9" in lines and listing(tmp_path) == before


def test_overwrite_removes_exactly_the_files_that_the_schema_lists(tmp_path):
    with make(tmp_path) as old:
        old.store_episode(**whole(1))
    foreign = {"notes.txt": b"mine", "data/reward.npy.bak": b"mine too", "metadata.pkl": b"not ours"}
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "own").mkdir()
    with make(tmp_path, fields={"state": "int"}, meta_fields=None, overwrite=True) as new:
        assert len(new) == 0 and new.serials.tolist() == []
        new.store_episode(state=[1])
    for name, content in foreign.items():
        assert (tmp_path / name).read_bytes() == content
    ours = {"schema.json", "episodes.npy", "state.npy", "checksums.npy", "data/state.npy", ".lock"}
    assert set(listing(tmp_path)) == ours | set(foreign) | {"own", "data", "meta"}


def test_overwrite_of_an_empty_folder_creates_and_of_a_foreign_file_in_the_way_is_refused(tmp_path):
    make(tmp_path / "new", overwrite=True).close()
    shutil.copytree(tmp_path / "new" / "data", tmp_path / "other" / "data")
    with pytest.raises(CorruptBufferError, match="in the way and is not ours"):
        make(tmp_path / "other", overwrite=True)
    assert not (tmp_path / "other" / "schema.json").exists()


def test_a_folder_without_a_buffer_is_no_buffer_and_stays_as_it_is(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, text in ((tmp_path, "is not a buffer.*create one"), (tmp_path / "missing", "no such folder")):
        with pytest.raises(NotABufferError, match=text):
            ReplayBuffer.from_folder(folder)
        with pytest.raises(NotABufferError, match=text):
            make(folder, read_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_schema_object_a_string_path_and_a_path_are_the_same(tmp_path):
    with ReplayBuffer(str(tmp_path / "a"), 4, 5, Schema(FIELDS, META)) as made:
        made.store_episode(**whole(1))
        assert made.folder == tmp_path / "a"
    assert rewards(make(tmp_path / "a")) == rewards(ReplayBuffer.from_folder(str(tmp_path / "a"))) == [[1, 1]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_episodes": 0}, "max_episodes: got 0"),
        ({"spare_slots": 0}, "spare_slots: got 0"),
        ({"capacity": 0}, "capacity: got 0"),
        ({"max_episodes": None}, "max_episodes: got None.*or capacity="),
        ({"max_timesteps": None}, "max_timesteps: got None"),
        ({"durability": "maybe"}, "durability: got 'maybe', expected one of 'process', 'power'"),
        ({"publish": "batch"}, "publish: got 'batch'"),
        ({"verify": "sometimes"}, "verify: got 'sometimes'"),
        ({"fields": {}}, "fields: got none"),
        ({"fields": {"x": "object"}}, "field 'x'.*dtype: got 'object'"),
        ({"meta_fields": {"reward": "int"}}, "'reward' is used twice"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name_before_anything_is_made_or_replaced(tmp_path, options, text):
    make(tmp_path / "old").close()
    before = listing(tmp_path)
    for name in ("new", "old"):
        with pytest.raises(SchemaError, match=text):
            make(tmp_path / name, overwrite=True, **options)
    assert listing(tmp_path) == before


# The sizes that follow from a capacity

LOW = {"x": "int"}


@pytest.mark.parametrize(
    ("capacity", "max_timesteps", "fields", "max_episodes", "spare_slots"),
    [
        (1_000_000, 1000, LOW, 100_000, 10_000),  # of ten steps, and an environment for every hundred
        (5_000, 1000, LOW, 1000, 64),  # a thousand at least, and 64
        (20, 50, LOW, 20 + 64, 64),  # each visible one has a step, but those that are open
        (1_000_000, 108_000, {"x": ("uint8", (84, 84))}, 2**43 // (108_000 * 84 * 84) * 9 // 10 + 1, 1154),  # of 8 TiB
        (1_000_000, 108_000, {"x": ("uint8", (840, 840))}, 115 - 64, 64),
        (10**9, 10, LOW, 2**24 - 2**14, 2**14),  # of all slots that there may be
    ],
)
def test_as_many_episodes_as_a_capacity_needs_and_a_file_takes(
    capacity, max_timesteps, fields, max_episodes, spare_slots
):
    layout = layout_of_capacity(Schema(fields), max_timesteps, capacity)
    assert (layout.max_episodes, layout.spare_slots, layout.circular) == (max_episodes, spare_slots, True)
    assert layout.arrays["x"].size <= 2**43 + 128


def test_every_size_has_its_attribute_and_its_place_in_the_repr(tmp_path):
    with ReplayBuffer(tmp_path / "a", capacity=20_000, max_timesteps=50, fields=LOW) as ring:
        sizes = {name: getattr(ring, name) for name in ("capacity", "max_episodes", "max_timesteps", "spare_slots")}
        assert sizes == {"capacity": 20_000, "max_episodes": 2000, "max_timesteps": 50, "spare_slots": 200}
        ring.store_episode(x=range(7))
        assert "1 of 2000 episodes, 7 of 20000 steps, max_timesteps 50, spare_slots 200, circular," in repr(ring)
    with ReplayBuffer(tmp_path / "b", 3, 5, LOW) as plain:
        assert (plain.capacity, plain.spare_slots, plain.circular) == (None, 1, False)
        assert "0 of 3 episodes, 0 steps, max_timesteps 5, spare_slots 1, until full," in repr(plain)


def test_what_follows_from_a_capacity_may_be_given_and_is_kept_when_it_is_not_given_again(tmp_path):
    given = {"max_episodes": 7, "spare_slots": 2}
    with ReplayBuffer(tmp_path, max_timesteps=5, fields=LOW, capacity=9, circular=False, **given) as full:
        full.store_episode(x=range(5))
        with pytest.raises(BufferFullError, match="5 timesteps are published, 5 more would pass capacity=9"):
            full.store_episode(x=range(5))
    with ReplayBuffer(tmp_path, max_timesteps=5, fields=LOW, capacity=9, circular=False) as again:
        assert (again.max_episodes, again.spare_slots, again.num_steps) == (7, 2, 5)
    with pytest.raises(SchemaMismatchError, match="circular: stored False, given True"):
        ReplayBuffer(tmp_path, max_timesteps=5, fields=LOW, capacity=9)
    with pytest.raises(SchemaMismatchError, match="max_episodes: stored 7, given 8"):
        ReplayBuffer(tmp_path, 8, 5, LOW, capacity=9, circular=False)


def test_a_ring_that_max_episodes_keeps_from_its_capacity_says_so_once(tmp_path, caplog):
    with ReplayBuffer(tmp_path, 3, 5, LOW, capacity=20) as ring:
        for _ in range(3):
            ring.store_episode(x=range(2))
        assert caplog.messages == []
        for _ in range(3):
            ring.store_episode(x=range(2))
    [said] = caplog.messages
    assert said.startswith(f"{tmp_path}: 6 steps are visible, not capacity=20: more than max_episodes=3 episodes")


def test_a_ring_whose_files_have_holes_warns_of_a_small_disk_by_what_it_takes(tmp_path, caplog):
    with ReplayBuffer(tmp_path / "a", capacity=1000, max_timesteps=10**6, fields={"x": ("uint8", 10**4)}):
        assert caplog.messages == []
    with ReplayBuffer(tmp_path / "b", capacity=5 * 10**6, max_timesteps=1000, fields={"x": ("uint8", 10**6)}):
        assert "the buffer may grow to 5001" in caplog.messages[0]


# Reading only, clearing, closing, pickling


def test_a_read_only_buffer_refuses_every_way_to_write(tmp_path):
    with make(tmp_path) as writer:
        writer.store_episode(**whole(1))
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        before = listing(tmp_path)
        calls = {
            "begin_episode": reader.begin_episode,
            "begin_batch": lambda: reader.begin_batch(2),
            "store_episode": lambda: reader.store_episode(**whole(1)),
            "update": lambda: reader.update(0, task=1),
            "store_datapoint": lambda: reader.store_datapoint(0, 0, "reward", 1.0),
            "store_meta_datapoint": lambda: reader.store_meta_datapoint(0, "task", 1),
            "clear": reader.clear,
            "one_episode": lambda: reader.one_episode().__enter__(),
            "batched_episode": lambda: reader.batched_episode(2).__enter__(),
        }
        for call in calls.values():
            with pytest.raises(ReadOnlyError, match="read_only=True"):
                call()
        with pytest.raises(ReadOnlyError, match="exclude each other"):
            make(tmp_path, overwrite=True, read_only=True)
        reader.flush(), reader.close()
        assert listing(tmp_path) == before and rewards(reader) == [[1, 1]]


def test_clear_shows_nothing_keeps_the_files_and_never_uses_a_serial_again(buffer):
    for i in range(3):
        buffer.store_episode(**whole(i))
    sizes = {name: size for name, (size, _, _) in listing(buffer.folder).items()}
    buffer.clear()
    assert shown(buffer) == [] and (buffer.num_episodes, buffer.num_steps) == (0, 0)
    assert {name: size for name, (size, _, _) in listing(buffer.folder).items()} == sizes
    buffer.reset_()
    for i in range(4):
        buffer.store_episode(**whole(10 + i))
    assert buffer.serials.tolist() == [3, 4, 5, 6] and rewards(buffer) == [[10 + i] * 2 for i in range(4)]


def test_an_open_episode_survives_a_clear(buffer):
    buffer.store_episode(**whole(1))
    with buffer.one_episode(task=5):
        buffer.store(obs=[2, 2], reward=2)
        buffer.clear()
        buffer.store(obs=[3, 3], reward=3)
    assert rewards(buffer) == [[2, 3]] and buffer.serials.tolist() == [1]


def test_closing_twice_is_fine_and_what_was_published_can_still_be_read(buffer):
    buffer.store_episode(**whole(1))
    for _ in range(2):
        buffer.close()
        assert rewards(buffer) == [[1, 1]]
    with pytest.raises(EpisodeStateError, match="the buffer was closed"):
        buffer.store_episode(**whole(2))
    assert operations_of(buffer.close) == operations_of(buffer.flush) == []


def test_a_buffer_pickles_as_its_folder_and_options(tmp_path):
    with make(tmp_path, 1000, 1000, publish="step") as original:
        original.store_episode(**whole(1))
        original.begin_episode()
        raw = pickle.dumps(original)
        copy = pickle.loads(raw)
        assert len(raw) < 1000 and shown(copy) == shown(original)
        assert copy.folder == original.folder and not copy.read_only
    with pickle.loads(raw) as copy, copy.one_episode():
        copy.store(obs=[2, 2], reward=2)
        assert rewards(copy) == [[1, 1], [2]]  # published by the step, as the original would
    assert pickle.loads(pickle.dumps(ReplayBuffer.from_folder(tmp_path, read_only=True))).read_only


def test_the_order_of_the_leading_arguments_is_that_of_memmap_replay_buffer(tmp_path):
    with ReplayBuffer(tmp_path, 2, 5, FIELDS, META, True, True, False, 10) as made:
        assert made.circular and made.max_episodes == 2 and not made.read_only


# Publishing in groups, staging on disk


def test_a_group_is_published_behind_one_set_of_barriers_and_together(tmp_path):
    with make(tmp_path, durability="power", sync_every=3, spare_slots=3) as writer:
        for i in range(3):
            assert rewards(writer) == rewards(tmp_path) == []
            with system() as seen:
                writer.store_episode(**whole(i))
        assert rewards(tmp_path) == [[i, i] for i in range(3)]
        one = [name for name, _ in seen.done].count("barrier")
        with make(tmp_path / "single", durability="power") as single:
            single.store_episode(**whole(1))
            with system() as seen:
                single.store_episode(**whole(2))
        assert one == [name for name, _ in seen.done].count("barrier")


@pytest.mark.parametrize("end", ["flush", "clear", "close"])
def test_an_incomplete_group_is_published_by_flush_and_close_and_cleared_by_clear(tmp_path, end):
    writer = make(tmp_path, 2, circular=True, durability="power", sync_every=2, spare_slots=2)
    for i in range(1, 8):
        writer.store_episode(**whole(i))
        getattr(writer, end)()
        serials = [] if end == "clear" else list(range(max(0, i - 2), i))
        assert ReplayBuffer.from_folder(tmp_path).serials.tolist() == serials
        if end == "close":
            writer = ReplayBuffer.from_folder(tmp_path, durability="power", sync_every=2)
    writer.close()


def test_an_episode_staged_on_disk_is_invisible_until_published_and_its_slot_is_used_again(tmp_path, monkeypatch):
    """Fault 8: aborted, killed, or after a wrap-around; memory holds one chunk of it at most."""
    set_inside(monkeypatch, staged_bytes=40)
    with make(tmp_path, 2, 50, circular=True, stage="disk") as writer:
        for i in range(4):
            episode = writer.begin_episode(task=i)
            for t in range(20):
                episode.store(obs=[t, t], reward=t)
                assert max(len(column) for column in episode.columns.values()) <= 4
            episode.abort() if i == 2 else episode.publish()
            assert all(reward == list(range(20)) for reward in rewards(tmp_path))
        assert [episode["task"] for _, episode in shown(writer)] == [1, 3]
        assert writer.serials.tolist() == [1, 2]


def test_a_batch_without_a_block_is_published_or_dropped_by_its_handle_and_opened_whole_or_not_at_all(tmp_path):
    with ReplayBuffer(tmp_path, 3, 4, {"x": "int"}, {"task": "int"}) as buffer:
        batch = buffer.begin_batch(2, task=[7, 8])
        batch.store(x=[1, 2])
        with pytest.raises(EpisodeStateError, match="no batch is open"):
            buffer.store_batch(x=[1, 2])
        with pytest.raises(BufferFullError, match="full"):
            buffer.begin_batch(2)
        batch.update({"task": [7, 9]})
        batch.publish()
        assert [(episode["x"], episode["task"]) for _, episode in shown(buffer)] == [([1], 7), ([2], 9)]
        buffer.begin_batch(1).abort()  # the room of the batch that did not fit is free
        buffer.store_episode(x=[3], task=1)
        assert len(buffer) == 3
        with pytest.raises(SchemaError, match="batch_size"):
            buffer.begin_batch(0)


def test_a_batch_whose_meta_fields_are_refused_takes_no_room(tmp_path):
    with ReplayBuffer(tmp_path, 2, 4, {"x": "int"}, {"task": "int"}) as buffer:
        kept = []  # errors, and with them the frames in which the episodes were opened
        for _ in range(3):
            with pytest.raises(SchemaError, match="task") as error:
                buffer.begin_batch(2, task=[1, 2, 3])
            kept.append(error)
        assert len(buffer.begin_batch(2).episodes) == 2


def test_the_open_episodes_are_those_that_store_could_mean(tmp_path):
    with ReplayBuffer(tmp_path, 9, 4, {"x": "int"}) as buffer:
        assert buffer.open_episodes == []
        first, second = buffer.begin_episode(), buffer.begin_episode()
        assert buffer.open_episodes == [first, second]
        second.abort()
        assert buffer.open_episodes == [first]
        with buffer.batched_episode(2) as batch:
            assert buffer.open_episodes == [batch]
            batch.store(x=[1, 2])
        assert buffer.open_episodes == [first]
    assert buffer.open_episodes == []
    assert ReplayBuffer.from_folder(tmp_path, read_only=True).open_episodes == []


def test_no_other_thread_writes_during_a_turn(tmp_path):
    with ReplayBuffer(tmp_path, 9, 4, {"x": "int"}) as buffer:
        buffer.store_episode(x=[1])
        other = threading.Thread(target=buffer.update, args=(0,), kwargs={"x": [5]})
        with buffer.turn:
            other.start()
            other.join(0.05)
            assert other.is_alive()
            buffer.update(0, x=buffer.episode(0)["x"] + 1)
            assert buffer.episode(0)["x"].tolist() == [2]
        other.join()
        assert buffer.episode(0)["x"].tolist() == [5]


def test_a_final_observation_may_be_given_in_any_memory_layout(tmp_path):
    fields = {"x": Field("float", (2, 3), final=True), "a": "int"}
    x = np.arange(24.0).reshape(3, 2, 4)[:, :, ::-1].transpose(2, 1, 0)
    with ReplayBuffer(tmp_path, 2, 4, fields) as buffer:
        buffer.store_episode(x=x, a=np.arange(3))
        buffer.store_episode(x=np.broadcast_to(x[0], x.shape), a=np.arange(3))
        np.testing.assert_array_equal(buffer.episode(0)["x"], x)
        np.testing.assert_array_equal(buffer.episode(1)["x"][3], x[0])


# What there is


def test_what_is_to_be_stored_and_where_it_lies_is_told(buffer):
    wanted, stored = step_spec(buffer), storage_spec(buffer)
    assert wanted == {
        "obs": ((2,), "float32", True, True, False),
        "reward": ((), "float32", True, False, False),
        "terminated": ((), "bool", False, False, False),
        "task": ((), "int64", False, False, True),
        "label": ((), "U8", False, False, True),
    }
    step = {name: np.ones(one.shape) for name, one in wanted.items() if one.required}
    with buffer.one_episode() as episode:
        episode.store(**step)
        for name in step:
            with pytest.raises(SchemaError, match=f"{name!r}.*missing"):
                episode.store(**{key: value for key, value in step.items() if key != name})
    for name, one in stored.items():
        array = np.load(one.path, mmap_mode="r")
        assert (array.shape, array.dtype, one.path.stat().st_size) == (one.shape, one.dtype, one.size), name


# Home folders


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder; the folder of now is an empty one beside it."""
    for name in ("home", "now"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "now")
    return tmp_path / "home"


def test_a_home_folder_that_is_named_relatively_is_that_of_the_moment_of_opening(home, monkeypatch):
    monkeypatch.setenv("HOME", "../home")
    with make("~/a") as buffer:
        monkeypatch.chdir("/")
        buffer.store_episode(**whole(1.0))
        buffer.flush()
    assert rewards(ReplayBuffer.from_folder(home / "a")) == [[1, 1]]


@pytest.mark.parametrize("spelled", [lambda text: text, Path], ids=["str", "Path"])
def test_a_path_that_begins_with_a_tilde_is_in_the_home_folder_everywhere(home, spelled):
    with make(spelled("~/a")) as buffer:
        assert buffer.folder == home / "a"
        buffer.store_episode(**whole(1.0))
        buffer.snapshot(spelled("~/b"))
        assert pickle.loads(pickle.dumps(buffer)).folder == home / "a"
    assert pack(spelled("~/a"), spelled("~/c")) == unpack(spelled("~/c"), spelled("~/d"), max_episodes=4) == []
    for name in "abcd":
        assert rewards(ReplayBuffer.from_folder(spelled(f"~/{name}"), read_only=True)) == [[1, 1]]
        assert verify(spelled(f"~/{name}")) == []
    repair(spelled("~/a"))
    with make(spelled("~/shards"), shard="auto") as shard:
        assert shard.folder == home / "shards" / "shard-00000"
        assert ConcatBuffer.from_root(spelled("~/shards")).folders == (shard.folder,)
    assert ConcatBuffer([spelled("~/b")]).num_episodes == 1
    assert list(Path.cwd().iterdir()) == []


def test_a_home_that_does_not_exist_is_refused_and_a_folder_of_such_a_name_can_be_given(home):
    with pytest.raises(SchemaError, match=r"~nobody.here/a: there is no home folder .*give '\./~nobody.here/a'"):
        make("~nobody.here/a")
    assert list(Path.cwd().iterdir()) == list(home.iterdir()) == []
    for name in ("./~nobody.here", "./~"):
        with make(name) as buffer:
            buffer.store_episode(**whole(1.0))
            assert buffer.folder == Path.cwd() / name
        assert len(ReplayBuffer.from_folder(name)) == 1
    assert list(home.iterdir()) == []


def test_every_public_member_stands_in_a_group_of_the_docstring():
    text = inspect.cleandoc(ReplayBuffer.__doc__ or "").partition("Args:")[0]
    groups = re.findall(r"^- (\w+): (.*(?:\n  .*)*)", text, re.MULTILINE)
    assert [name for name, _ in groups] == ["Opening", "Writing", "Reading", "Changing", "Looking"]
    named = {word for _, text in groups for word in re.findall(r"\w+", text)}
    assert {name for name in dir(ReplayBuffer) if not name.startswith("_")} <= named


# Where a folder was published to, and roots


def test_no_buffer_is_made_beside_the_shards_of_a_root(tmp_path):
    fields, root = {"x": "int"}, tmp_path / "root"
    with ReplayBuffer(root, 3, 3, fields, shard="auto") as shard:
        shard.store_episode(x=[1, 2])
    publish(shard.folder, str(tmp_path / "bucket"))
    before = listing(tmp_path)
    for make_one in (
        lambda: ReplayBuffer(root, 3, 3, fields),
        lambda: ReplayBuffer(root, 3, 3, fields, overwrite=True),
        lambda: shard.snapshot(root),
        lambda: pack(shard.folder, root),
        lambda: pull(f"file://{tmp_path}/bucket/shard-00000", root),
    ):
        with pytest.raises(NotABufferError, match=f"{root}: no buffer can be made here.*shard-00000.*another folder"):
            make_one()
    assert listing(tmp_path) == before
    with ReplayBuffer(root, 3, 3, fields, shard="auto") as again:
        assert again.folder == shard.folder


def test_no_buffer_is_made_where_a_folder_was_published_to(tmp_path):
    fields = {"x": "int"}
    with ReplayBuffer(tmp_path / "a", 3, 3, fields) as buffer:
        buffer.store_episode(x=[1, 2])
    root = tmp_path / "bucket" / "run"
    publish(tmp_path / "a", str(root))
    before = listing(tmp_path)
    for folder, url in ((root, f"ConcatBuffer.*'file://{root}'"), (root / "a", f"from_folder.*'file://{root}/a'")):
        for options in (
            {},
            {"overwrite": True},
            {"shard": "auto"},
            {"shard": "auto", "publish_to": str(tmp_path / "b")},
        ):
            with pytest.raises(NotABufferError, match=f"{folder}: no buffer can be made here.*{url}.*another folder"):
                ReplayBuffer(folder, 3, 3, fields, **options)
        for copy in (pack, unpack, lambda _, folder: pull(str(root), folder)):
            with pytest.raises(NotABufferError, match=f"{folder}: no buffer can be made here"):
                copy(tmp_path / "a", folder)
        with pytest.raises(NotABufferError, match=f"{folder} is not a buffer: .*{url}"):
            ReplayBuffer.from_folder(folder)
        with pytest.raises(NotABufferError, match=f"{folder}: no subfolder holds a buffer: .*{url}"):
            ConcatBuffer.from_root(folder)
    assert listing(tmp_path) == before
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "root.json").write_text("{}")  # of another program
    ReplayBuffer(tmp_path / "own", 3, 3, fields).close()


def test_who_opens_a_root_as_a_folder_is_told_what_reads_it(tmp_path):
    for name in ("b", "a"):
        make(tmp_path / "root" / name).close()
    text = f"root is not a buffer: it is a root of 2 folders, as a; ConcatBuffer.from_root.'{tmp_path}/root'. reads"
    with pytest.raises(NotABufferError, match=text):
        ReplayBuffer.from_folder(tmp_path / "root")
    (tmp_path / "root").rename(tmp_path / "published")
    for call in (ReplayBuffer.from_folder, verify, ConcatBuffer.from_root):
        with pytest.raises(NotABufferError, match=f"moved to {tmp_path}/published/a; .*ConcatBuffer.from_root.url."):
            call(tmp_path)
