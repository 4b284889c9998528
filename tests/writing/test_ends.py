"""Which fields end an episode: declared once, kept in the folder, obeyed by all that writes and reads."""

import errno
import json
from contextlib import suppress

import numpy as np
import pytest
from damage import record_of
from fault_injection import system
from inside import storage_of
from specification import CUT, FINAL, OPEN, TERMINATED

from memmap_buffer import (
    ConcatBuffer,
    Field,
    Hindsight,
    NStep,
    Offsets,
    ReplayBuffer,
    Schema,
    SchemaError,
    SchemaMismatchError,
    Window,
    pack,
    repair,
    unpack,
    verify,
)

FIELDS = {"observation": Field("float", final=True), "reward": "float", "done": "bool", "timeout": ("bool", (), False)}
ENDS = {"terminated": "done", "truncated": "timeout"}


def make(folder, **options):
    return ReplayBuffer(folder, **{"max_episodes": 20, "max_timesteps": 50, "fields": FIELDS, **ENDS, **options})


def steps(*lengths, first=0.0, end="done"):
    """Episodes behind one another, as code that stores a stream has them; rewards tell the step."""
    ends = np.zeros(sum(lengths), bool)
    ends[np.cumsum(lengths) - 1] = True
    count = first + np.arange(sum(lengths))
    return {
        "observation": count,
        "reward": count + 100,
        "done": ends & (end == "done"),
        "timeout": ends & (end != "done"),
    }


def flags(buffer):
    table = storage_of(buffer).refresh()
    return table.flags[table.visible]


def schema_of(folder):
    return json.loads((folder / "schema.json").read_text())


# Declaring


def test_the_declared_ends_are_kept_in_the_folder_and_go_wherever_it_is_copied(tmp_path):
    with make(tmp_path / "a") as buffer:
        buffer.store_episode(**steps(3))
        buffer.snapshot(tmp_path / "snapshot")
    pack(tmp_path / "a", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "unpacked")
    for name in ("a", "snapshot", "packed", "unpacked"):
        assert schema_of(tmp_path / name)["ends"] == ENDS
        reader = ReplayBuffer.from_folder(tmp_path / name, read_only=True)
        assert (reader.schema.terminated, reader.schema.truncated) == ("done", "timeout")
        assert reader.batch(n_steps=1, gamma=0.5)["_discount"].tolist() == [0.5, 0.5, 0]
        assert flags(reader)[0] & TERMINATED
    assert make(tmp_path / "a", read_only=True).schema.ends == ("done", "timeout")


def test_a_schema_may_say_it_and_the_constructor_wins(tmp_path):
    schema = Schema(FIELDS, **ENDS)
    assert ReplayBuffer(tmp_path / "a", 1, 1, schema).schema.ends == ("done", "timeout")
    assert ReplayBuffer(tmp_path / "b", 1, 1, schema, truncated=None).schema.ends == ("done",)


def test_a_folder_that_says_nothing_ends_at_terminated_and_truncated(tmp_path):
    for number, fields in enumerate(
        ({"terminated": "bool"}, {"x": "int"}, {"terminated": ("float", 2), "truncated": "bool"})
    ):
        with ReplayBuffer(tmp_path / str(number), 1, 1, fields) as buffer:
            assert "ends" not in schema_of(tmp_path / str(number))
            assert buffer.schema.ends == tuple(name for name, spec in fields.items() if spec == "bool")


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ({"terminated": "dones"}, "terminated: got 'dones', which was not declared here; did you mean 'done'"),
        ({"truncated": "task"}, "truncated: got 'task'.*meta field"),
        (
            {"terminated": "observation"},
            r"terminated: field 'observation' is float32 \(2,\), expected one number or bool",
        ),
        ({"terminated": "text"}, "field 'text' is U3"),
    ],
)
def test_what_cannot_end_an_episode_is_refused(tmp_path, ends, text):
    fields = {"observation": ("float", 2), "done": "bool", "text": "U3"}
    with pytest.raises(SchemaError, match=text):
        ReplayBuffer(tmp_path / "a", 1, 1, fields, {"task": "int"}, **ends)
    assert not (tmp_path / "a").exists()


def test_opening_with_other_ends_lists_them(tmp_path):
    make(tmp_path).close()
    with pytest.raises(SchemaMismatchError, match="terminated: stored 'done', given None"):
        make(tmp_path, terminated=None)
    with pytest.raises(SchemaMismatchError, match="truncated: stored 'timeout', given 'truncated'"):
        ReplayBuffer(tmp_path, 20, 50, FIELDS, terminated="done")


@pytest.mark.parametrize(
    "ends", [[], {"terminated": "done"}, {"terminated": 1, "truncated": None}, {**ENDS, "x": None}]
)
def test_ends_that_a_stranger_wrote_are_looked_at(tmp_path, ends):
    make(tmp_path).close()
    (tmp_path / "schema.json").write_text(json.dumps({**schema_of(tmp_path), "ends": ends}))
    with pytest.raises(SchemaError, match="ends: got"):
        ReplayBuffer.from_folder(tmp_path)


def test_folders_that_end_otherwise_are_not_read_as_one(tmp_path):
    buffers = [make(tmp_path / "a"), make(tmp_path / "b", terminated=None)]
    with pytest.raises(SchemaMismatchError, match="terminated: stored 'done', given None"):
        ConcatBuffer(buffers)


def test_ends_follow_a_field_that_is_renamed_and_go_with_one_that_is_dropped(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(2))
        buffer.rename_field("done", "over")
        assert buffer.schema.ends == ("over", "timeout")
        assert buffer.batch(n_steps=1, gamma=0.5)["_discount"].tolist() == [0.5, 0]
        buffer.add_field("x", ("int", (), 0))
        assert buffer.schema.ends == ("over", "timeout")
        buffer.drop_field("over")
        assert buffer.schema.ends == ("timeout",)
        for name in ("terminated", "truncated"):
            if name in buffer.schema.declared_ends.values():
                with pytest.raises(SchemaError, match=f"add_field: '{name}' is also kept in the record"):
                    buffer.add_field(name, ("bool", (), False))
    assert ReplayBuffer.from_folder(tmp_path).schema.ends == ("timeout",)


def test_a_repaired_folder_keeps_its_ends(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(2))
    (tmp_path / "data" / "reward.npy").unlink()
    repair(tmp_path)
    assert ReplayBuffer.from_folder(tmp_path).schema.ends == ("done", "timeout")


# Writing


@pytest.mark.parametrize("how", [{}, {"publish": "step"}, {"stage": "disk"}], ids=str)
def test_add_ends_episodes_at_the_field_that_was_declared(tmp_path, how):
    with make(tmp_path, **how) as buffer:
        buffer.extend(**steps(3, 2))
        buffer.extend(**steps(4, end="timeout"))
        assert buffer.episode_lens.tolist() == [3, 2, 4]
        assert (flags(buffer) & TERMINATED != 0).tolist() == [True, True, False]


def test_store_after_a_declared_end_raises(tmp_path):
    with make(tmp_path) as buffer, buffer.one_episode() as episode:
        episode.store(observation=0, reward=0, done=True)
        with pytest.raises(RuntimeError, match="timestep 1: the episode ended at timestep 0 by `done`"):
            episode.store(observation=0, reward=0, done=False)


def test_an_updated_end_changes_how_the_episode_ended(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(3))
        buffer.update(0, done=[False, False, False])
        assert not flags(buffer)[0] & TERMINATED
        assert buffer.batch(n_steps=1, gamma=0.5)["_discount"].tolist() == [0.5, 0.5]


# Reading


def test_returns_without_a_declared_end_name_the_remedy(tmp_path):
    """The last reward and the end would be lost in silence."""
    with ReplayBuffer(tmp_path, 2, 9, FIELDS) as buffer:
        buffer.store_episode(**steps(3))
        for given in ({"n_steps": 2, "gamma": 0.5}, {"view": NStep(2, gamma=0.5)}):
            with pytest.raises(SchemaError, match=r"terminated='done'.*terminated=None"):
                buffer.batch(**given)
        assert buffer.batch(n_steps=2)["n_step_lens"].tolist() == [2, 1]
        assert buffer.batch(n_steps=2, gamma=0.5, terminated=None)["_discount"].tolist() == [0.25, 0.5]
        assert buffer.batch(n_steps=2, gamma=0.5, terminated="done")["_discount"].tolist() == [0.25, 0, 0]
        (batch,) = buffer.dataloader(9, n_steps=2, gamma=0.5, terminated=None)
        assert batch["_discount"].tolist() == [0.25, 0.5]


def test_none_that_was_declared_is_a_remedy_too(tmp_path):
    with make(tmp_path, terminated=None) as buffer:
        buffer.store_episode(**steps(3))
        assert buffer.batch(n_steps=2, gamma=0.5)["_discount"].tolist() == [0.25, 0.5]
        assert buffer.batch(n_steps=2, gamma=0.5, terminated="done")["_discount"].tolist() == [0.25, 0, 0]


def test_the_option_wins_over_what_was_declared(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(3))
        assert buffer.batch(n_steps=1, gamma=0.5, terminated=None)["_discount"].tolist() == [0.5, 0.5]
        assert buffer.batch(n_steps=1, gamma=0.5, terminated="timeout")["_discount"].tolist() == [0.5, 0.5]
        with pytest.raises(SchemaError, match=r"terminated: got 'dons'.*did you mean 'done'"):
            buffer.batch(n_steps=1, gamma=0.5, terminated="dons")


# Ends in the middle: what is stored as one is read as if each part had been stored by itself

VIEWS = {
    "timesteps": {"timestep_level": True},
    **{f"{n} steps": {"n_steps": n, "gamma": 0.5, "sequence_fields": ["reward"]} for n in (1, 2, 3, 9)},
    "timeline": {"n_steps": 3, "timeline": True},
    "stack": {"n_steps": 2, "gamma": 0.5, "stack": {"observation": 3}, "padding": "edge"},
    **{f"windows, {b}": {"view": Window(3, 2, boundary=b)} for b in ("pad", "shift", "drop", "repeat")},
    "offsets": {"view": Offsets(observation=(-2, -1, 0, 1), reward=(0, 1), padding="edge")},
    "offsets, drop": {"view": Offsets(observation=(-1, 0, 2), boundary="drop")},
    "offsets, shift": {"view": Offsets(observation=(-1, 0, 2), boundary="shift")},
}
GLUED = [[(3, "done"), (1, "timeout"), (1, "done"), (5, "timeout"), (2, "done")], [(4, "")], [(2, "timeout"), (6, "")]]


def parts_of(episode, first):
    """The parts of an episode, each as it would be stored by itself; the last one has its final observation."""
    parts = []
    for length, end in episode:
        parts.append(steps(length, first=first, end=end))
        if not end:
            parts[-1]["timeout"][:] = False
        first += length
    parts[-1]["observation"] = np.append(parts[-1]["observation"], 99.0)
    return parts


def glued(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def two_ways(folder):
    """A buffer of glued episodes, and one of their parts."""
    together, apart = make(folder / "together"), make(folder / "apart")
    for number, episode in enumerate(GLUED):
        parts = parts_of(episode, 20.0 * number)
        together.store_episode(**glued(parts))
        for part in parts:
            apart.store_episode(**part)
    return together, apart


def assert_alike(together, apart, **options):
    got, wanted = together.batch(**options), apart.batch(**options)
    assert got.keys() == wanted.keys()
    for key in got.keys() - {"_start", "_indices"}:
        np.testing.assert_array_equal(got[key], wanted[key], err_msg=key)


@pytest.mark.parametrize("view", VIEWS)
def test_no_item_reaches_across_an_end_in_the_middle(tmp_path, view):
    assert_alike(*two_ways(tmp_path), **VIEWS[view])


@pytest.mark.parametrize("view", VIEWS)
def test_nor_does_it_in_a_packed_folder_or_among_several(tmp_path, view):
    together, apart = two_ways(tmp_path)
    pack(together.folder, tmp_path / "packed")
    packed = ReplayBuffer.from_folder(tmp_path / "packed", read_only=True)
    assert_alike(packed, apart, **VIEWS[view])
    others = two_ways(tmp_path / "others")
    assert_alike(ConcatBuffer([packed, others[0]]), ConcatBuffer([apart, others[1]]), **VIEWS[view])


@pytest.mark.parametrize("view", VIEWS)
def test_nor_where_the_end_came_with_an_update(tmp_path, view):
    together, apart = two_ways(tmp_path)
    with make(tmp_path / "updated") as updated:
        for i in range(len(together)):
            episode = together.episode(i)
            whole = {name: episode[name] for name in FIELDS}
            updated.store_episode(**{**whole, "done": ~whole["done"], "timeout": np.zeros_like(whole["timeout"])})
            updated.update(i, done=whole["done"])
            updated.update(i, timeout=whole["timeout"])
        assert_alike(updated, apart, **VIEWS[view])


def test_returns_by_a_field_that_was_not_declared_stop_at_it_too(tmp_path):
    """As code does it that stores one stream, whose episodes end by `done`."""

    def plain(folder):
        return ReplayBuffer(folder, 20, 50, FIELDS)

    together, apart = plain(tmp_path / "together"), plain(tmp_path / "apart")
    parts = [steps(length, first=10 * i) for i, length in enumerate((3, 1, 5, 2))]
    together.store_episode(**glued(parts))
    for part in parts:
        apart.store_episode(**part)
    for n in (1, 2, 4, 300):
        options = {"n_steps": n, "gamma": 0.5, "sequence_fields": ["reward"], "terminated": "done"}
        assert_alike(together, apart, **options)
        assert_alike(together, apart, **options, stack={"observation": 3})


def test_a_transition_that_ends_in_the_middle_has_no_successor(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**glued(parts_of([(3, "done"), (3, "timeout"), (2, "")], 0.0)))
        batch = buffer.batch(n_steps=2, gamma=0.5, return_indices=True)
        assert batch["_indices"][:, 1].tolist() == [0, 1, 2, 3, 4, 6, 7]  # what follows 5 is not known
        assert batch["n_step_lens"].tolist() == [2, 2, 1, 2, 1, 2, 1]
        assert batch["_discount"].tolist() == [0.25, 0, 0, 0.25, 0.5, 0.25, 0.5]
        assert batch["next_observation"].tolist() == [2, 0, 0, 5, 5, 99, 99]


def test_whole_episodes_and_crops_of_them(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**glued(parts_of([(3, "done"), (3, "timeout"), (2, "")], 0.0)))
        assert buffer.episode(0)["observation"].tolist() == [*range(8), 99]
        assert buffer[0]["reward"].tolist() == [*range(100, 108)]
        crops = buffer.batch([0] * 200, window_length=3)
        last = crops["_start"] + crops["_lens"]
        assert {*zip(crops["_start"].tolist(), last.tolist(), strict=True)} == {
            (0, 3),
            (1, 3),
            (2, 3),
            (3, 6),
            (4, 6),
            (5, 6),
        }
        assert crops["_reaches_episode_end"].all()


def test_a_goal_is_of_the_same_part(tmp_path):
    part_of = np.repeat([0, 1, 2], (3, 4, 5))
    fields = {"x": Field("float", final=True), "goal": "float", "reward": "float", "done": "bool"}
    ends = np.append(part_of[1:] != part_of[:-1], True)
    with ReplayBuffer(tmp_path, 1, 300, fields, terminated="done") as buffer:
        buffer.store_episode(x=np.arange(12.0), goal=np.zeros(12), reward=np.zeros(12), done=ends)
        for strategy in ("future", "final", "episode", "geometric"):
            how = Hindsight(lambda got, goal, info: got - goal, "goal", "x", strategy=strategy, prob=1.0)
            batch = buffer.sample(300, n_steps=1, hindsight=how, return_indices=True, seed=0)
            t, goal = batch["_indices"][:, 1].numpy(), batch["_goal"][:, 1].numpy()
            given = goal >= 0
            assert given.any() and (part_of[t[given]] == part_of[goal[given]]).all()
            assert (batch["goal"].numpy()[given] == goal[given]).all()


def test_prioritised_items_and_loaders_stop_there_too(tmp_path):
    together, apart = two_ways(tmp_path)
    wanted = {
        tuple(row)
        for row in zip(*(apart.batch(n_steps=3, gamma=0.5)[k].tolist() for k in ("reward", "_return")), strict=True)
    }
    for options in ({"prioritized": True}, {"filter_fields": {"reward": (101, None)}}, {}):
        batch = together.sample(400, n_steps=3, gamma=0.5, seed=1, **options)
        got = {tuple(row) for row in zip(batch["reward"].tolist(), batch["_return"].tolist(), strict=True)}
        assert got <= wanted and (options or got == wanted)
    loader = together.dataloader(4, n_steps=3, gamma=0.5, shuffle=True, seed=0)
    got = [row for batch in loader for row in zip(batch["reward"].tolist(), batch["_return"].tolist(), strict=True)]
    assert sorted(got) == sorted(wanted)


# The last transition of what is cut


def transitions(buffer):
    """(observation, what came next) of every transition, in order."""
    batch = buffer.batch(n_steps=1)
    return sorted(zip(batch["observation"].tolist(), batch["next_observation"].tolist(), strict=True))


HOW = {"ram": {}, "disk": {"stage": "disk", "spare_slots": 2}, "step": {"publish": "step", "spare_slots": 2}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("end", ["end_episodes", "close"])
def test_the_end_of_a_stream_keeps_the_last_transition_of_each_environment(tmp_path, how, end):
    with make(tmp_path, **HOW[how]) as buffer:
        following = np.array([0.0, 10.0])
        for _ in range(3):
            seen = following.copy()
            following += 1  # as environments do that write into the same array again
            buffer.add(observation=seen, reward=[0, 0], done=[False, False], next_observation=following)
        following += 100
        getattr(buffer, end)()
    buffer = ReplayBuffer.from_folder(tmp_path)
    assert transitions(buffer) == [(t, t + 1) for t in (0, 1, 2, 10, 11, 12)]


@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_a_cut_episode_has_what_the_next_step_began_with(tmp_path, how, extend):
    seen = np.stack([np.arange(8.0), 10 + np.arange(8.0)], axis=1)
    done = np.zeros((8, 2), bool)
    done[5, 0] = True  # where the second of its parts is as long as it may be, too
    with make(tmp_path, max_timesteps=3, **HOW[how]) as buffer:
        if extend:
            buffer.extend(observation=seen, reward=seen, done=done)
        else:
            for t in range(8):
                buffer.add(observation=seen[t], reward=seen[t], done=done[t])
        buffer.end_episodes()
        wanted = [(t, t + 1) for t in (0, 1, 2, 3, 4, 6, 10, 11, 12, 13, 14, 15, 16)] + [(5, 0)]
        assert transitions(buffer) == sorted(wanted)
        assert sorted(buffer.episode_lens.tolist()) == [2, 2, 3, 3, 3, 3]


def test_a_cut_episode_is_seen_at_once_and_completed_where_it_still_stands(tmp_path):
    for name, sync_every in (("a", 1), ("b", 3)):
        options = {"max_timesteps": 2, "max_episodes": 2, "circular": True, "spare_slots": 3}
        how = {} if sync_every == 1 else {"durability": "power", "sync_every": sync_every}
        with make(tmp_path / name, **options, **how) as buffer:
            for t in range(2):
                buffer.add(observation=[t, 10 + t, 20 + t], reward=[0, 0, 0], done=[False] * 3)
            if sync_every == 1:
                assert buffer.episode_lens.tolist() == [2, 2]  # the third is in the place of the first
                assert transitions(buffer) == [(10, 11), (20, 21)]
            buffer.add(observation=[2, 12, 22], reward=[0, 0, 0], done=[False] * 3)
            assert transitions(buffer) == [(10, 11), (11, 12), (20, 21), (21, 22)]
            assert verify(buffer.folder) == []


def test_a_cut_episode_is_completed_by_the_call_after_one_that_failed(tmp_path):
    for at_operation in range(1, 60):
        with make(tmp_path / str(at_operation), max_timesteps=2) as buffer:
            buffer.extend(observation=[0, 1], reward=[0, 0], done=[False, False])
            with system(at_operation, error=errno.ENOSPC, only=("pwrite",)) as seen, suppress(OSError):
                buffer.add(observation=2, reward=0, done=False)
            buffer.add(observation=3, reward=0, done=False)
            assert transitions(buffer) == [(0, 1), (1, 2), (2, 3)]
            assert verify(buffer.folder) == []
        if seen.count < at_operation:
            break
    assert at_operation > 3


def test_a_cut_episode_without_final_fields_is_published_at_once(tmp_path):
    with ReplayBuffer(tmp_path, 9, 3, {"x": "int"}) as buffer:
        buffer.extend(x=np.arange(3))
        assert len(buffer) == 1


def test_a_step_that_ends_episodes_is_never_seen_without_their_end(tmp_path):
    ends = {0: FINAL | TERMINATED, 1: FINAL}  # of serials; the third goes on
    seen = []

    def look():
        for slot in range(6):
            record = record_of(tmp_path / "buffer", slot)
            if record["generation"] % 2 == 0 and record["stop"] == 3 and int(record["serial"]) in ends:
                assert int(record["flags"]) & (OPEN | FINAL | CUT | TERMINATED) == ends[int(record["serial"])]
                seen.append(int(record["serial"]))

    with make(tmp_path / "buffer", publish="step", spare_slots=3) as buffer:
        for t in range(4):
            x = np.full(3, t, np.float32)
            last = {"done": [t == 2, False, False], "timeout": [False, t == 2, False]}
            with system(before=look):
                buffer.add(observation=x, reward=x, **last, next_observation=x + 1)
    assert {*seen} == {*ends}
    assert verify(tmp_path / "buffer") == []
