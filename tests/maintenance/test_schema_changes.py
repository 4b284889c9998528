"""Whole columns: added, dropped, renamed, recomputed; every file operation failing or killed; who else has it open."""

import errno
import random
import shutil

import numpy as np
import pytest
from fault_injection import in_child, listing, shown, system, without_barriers
from inside import get_inside, set_inside
from power import boot, cuts, recording

from memmap_buffer import (
    CorruptBufferError,
    EpisodeStateError,
    Field,
    NotABufferError,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    pack,
    repair,
    unpack,
    verify,
)
from memmap_buffer.compat import set_valid

SPARE = 16  # columns of checksums

FIELDS = {
    "x": {"a": Field("float", 2, final=True), "b": ("int", (), 0)},
    "reward": "float",
    "terminated": ("bool", (), 0),
}
META = {"task": "int"}
LENGTHS = (3, 2, 4, 1)
BESIDE = {"schema.json", "state.npy", "checksums.npy", "episodes.npy"}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    without_barriers(monkeypatch)


def whole(value, length):
    return {
        "x": {"a": value + np.arange(2 * length + 2 * (value % 2)).reshape(-1, 2) / 16, "b": value + np.arange(length)},
        "reward": np.arange(length) + value,
        "task": value,
    }


def make(folder, **options):
    """Three episodes of four that were published; those of an odd value have their final observation."""
    buffer = ReplayBuffer(folder, 3, 4, FIELDS, META, circular=True, **options)
    for i, length in enumerate(LENGTHS):
        buffer.store_episode(**whole(11 * i, length))
    return buffer


@pytest.fixture
def buffer(tmp_path):
    with make(tmp_path / "buffer") as made:
        yield made


def to_go(episode):
    return np.cumsum(episode["reward"][::-1])[::-1]


def doubled(episode):
    return 2 * episode["x"]["a"]


CHANGES = {
    "add": lambda b: b.add_field("to_go", "float", to_go, fields=["reward"]),
    "add default": lambda b: b.add_field("valid", ("bool", (), True)),
    "add zeros": lambda b: b.add_field("more.zeros", ("int", 3, 0)),
    "add final": lambda b: b.add_field("twice", Field("float", 2, final=True), doubled),
    "add compressed": lambda b: b.add_field("twice", Field("float", 2, final=True, codec="zstd"), doubled),
    "add meta": lambda b: b.add_field("sum", "float", lambda episode: episode["reward"].sum(), meta=True),
    "drop": lambda b: b.drop_field("reward"),
    "drop group": lambda b: b.drop_field("x"),
    "drop meta": lambda b: b.drop_field("task"),
    "rename": lambda b: b.rename_field("reward", "r"),
    "rename group": lambda b: b.rename_field("x", "observation.state"),
    "rename meta": lambda b: b.rename_field("task", "task_id"),
}


def renamed(old, new):
    return lambda episode: episode.update({new: episode.pop(old)})


EFFECTS = {
    "add": lambda e: e.update(to_go=[sum(e["reward"][t:]) for t in range(len(e["reward"]))]),
    "add default": lambda e: e.update(valid=[True] * len(e["reward"])),
    "add zeros": lambda e: e.update(more={"zeros": [[0] * 3] * len(e["reward"])}),
    "add final": lambda e: e.update(twice=[[2 * a, 2 * b] for a, b in e["x"]["a"]]),
    "add compressed": lambda e: e.update(twice=[[2 * a, 2 * b] for a, b in e["x"]["a"]]),
    "add meta": lambda e: e.update(sum=sum(e["reward"])),
    "drop": lambda e: e.pop("reward"),
    "drop group": lambda e: e.pop("x"),
    "drop meta": lambda e: e.pop("task"),
    "rename": renamed("reward", "r"),
    "rename group": lambda e: e.update(observation={"state": e.pop("x")}),
    "rename meta": renamed("task", "task_id"),
}


def expected(name, before):
    """The slow definition: what each change does to one episode, as a dict of lists."""
    after = [(serial, dict(episode)) for serial, episode in before]
    for _, episode in after:
        EFFECTS[name](episode)
    return after


def goes_on(folder):
    """One more episode is published, of whatever fields there are, and everything agrees with its checksums."""
    with ReplayBuffer.from_folder(folder) as buffer:
        before = shown(buffer)
        with buffer.one_episode() as episode:
            episode.store(**{name: np.ones(field.shape) for name, field in buffer.schema.fields.items()})
        assert shown(buffer)[:-1] == before[1:]
    left = {name for name in listing(folder) if name.endswith((".new", ".old"))}
    named = {f"{kind}/{name}.npy" for kind, group in kinds(buffer) for name in group}
    named |= {f"data/{name}.blobs.npy" for name, field in buffer.schema.fields.items() if field.codec}
    assert not left and {name for name in listing(folder) if name.endswith(".npy") and "/" in name} == named
    assert verify(folder) == [] and shown(ReplayBuffer.from_folder(folder, verify="always")) == shown(buffer)


def kinds(buffer):
    return (("data", buffer.schema.fields), ("meta", buffer.schema.meta_fields))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_columns_touches_no_other_file_and_is_there_at_once(buffer, name):
    before, files, known = shown(buffer), listing(buffer.folder), set(buffer.schema.all)
    CHANGES[name](buffer)
    assert shown(buffer) == shown(ReplayBuffer.from_folder(buffer.folder, verify="always")) == expected(name, before)
    after = listing(buffer.folder)
    same = {path for path in files if path in after and path not in BESIDE and path.endswith(".npy")}
    assert {path: files[path][2] for path in same} == {path: after[path][2] for path in same}
    assert len(same) == len(known & set(buffer.schema.all)) and verify(buffer.folder) == []
    goes_on_here(buffer)
    buffer.close()
    goes_on(buffer.folder)


def goes_on_here(buffer):
    before = shown(buffer)
    with buffer.one_episode() as episode:
        episode.store(**{name: np.ones(field.shape) for name, field in buffer.schema.fields.items()})
    assert shown(buffer)[:-1] == before[1:]
    assert next(iter(buffer.dataloader(2, timestep_level=True))).keys() == {n.split(".")[0] for n in buffer.schema.all}


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5], ids=["each", "every fifth"])
@pytest.mark.parametrize(("name", "half"), [*((name, False) for name in CHANGES), ("add", True), ("rename", True)])
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_columns(tmp_path, name, half, stride):
    with make(tmp_path / "start") as buffer:
        before = shown(buffer)
    done = []
    for at in range(1 + half % stride, 200, stride):
        folder = shutil.copytree(tmp_path / "start", tmp_path / str(at))

        def work(tell, folder=folder, at=at):
            buffer = ReplayBuffer.from_folder(folder)
            buffer.begin_episode().abort()
            with system(at, kill=True, half=half):
                CHANGES[name](buffer)

        child = in_child(work)
        found = shown(folder)
        assert found in (before, expected(name, before)), at
        done.append(found != before)
        goes_on(folder)
        shutil.rmtree(folder)
        if child.status != 137:
            assert child.status == 0, child.told
            break
    assert done == sorted(done) and len(done) > 10 // stride and not done[0] and done[-1]


@pytest.mark.parametrize("name", CHANGES)
def test_a_full_disk_at_any_write_leaves_the_old_or_the_new_columns_and_the_object_goes_on(tmp_path, name):
    with make(tmp_path / "start") as buffer:
        before = shown(buffer)
    for at in range(1, 200):
        folder = shutil.copytree(tmp_path / "start", tmp_path / str(at))
        with ReplayBuffer.from_folder(folder) as buffer:
            buffer.begin_episode().abort()
            with system(at, error=errno.ENOSPC, only=("pwrite", "create", "truncate", "link")) as seen:
                try:
                    CHANGES[name](buffer)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
            assert shown(buffer) == shown(folder)
            assert shown(buffer) in (before, expected(name, before))
            if shown(buffer) == before:
                CHANGES[name](buffer)
            assert shown(buffer) == shown(folder) == expected(name, before)
        goes_on(folder)
        if seen.count < at:
            break
    assert at > 4


@pytest.mark.parametrize("name", CHANGES)
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_columns(tmp_path, name):
    with make(tmp_path / "start", durability="power") as buffer:
        before = shown(buffer)
    rng = random.Random(name)
    with boot(1), recording(tmp_path / "start") as recorder:
        with ReplayBuffer.from_folder(tmp_path / "start", durability="power") as buffer:
            buffer.begin_episode().abort()
            recorder.mark(False)
            CHANGES[name](buffer)
            recorder.mark(True)
        folder = recorder.folder(tmp_path / "start")
    seen = set()
    for i, disk in enumerate(cuts(recorder.log, 40, rng)):
        done = disk.marked  # then it lasts
        disk.cut(folder, rng).write(tmp_path / "cut")
        with boot(2):
            found = shown(ReplayBuffer.from_folder(tmp_path / "cut", verify="always"))
            assert found in ([] if done else [before]) + [expected(name, before)], i
            if i % 4 == 0:
                goes_on(tmp_path / "cut")
        seen.add(found == before)
        shutil.rmtree(tmp_path / "cut")
    assert seen == {False, True}


@pytest.mark.parametrize("at", range(1, 14))
def test_repair_after_a_kill_keeps_every_row(tmp_path, at):
    with make(tmp_path) as buffer:
        before = shown(buffer)

    def work(tell):
        buffer = ReplayBuffer.from_folder(tmp_path)
        buffer.begin_episode().abort()
        with system(at, kill=True):
            CHANGES["rename group"](buffer)

    in_child(work)
    repair(tmp_path)
    assert shown(tmp_path) in (before, expected("rename group", before))
    with ReplayBuffer.from_folder(tmp_path) as again:
        again.update(0, task=1)
    assert verify(tmp_path) == []


# What is computed


def test_recompute_replaces_a_column_episode_by_episode(buffer):
    before = shown(buffer)
    buffer.recompute("x.a", doubled)
    buffer.recompute("reward", lambda episode: -episode["reward"], fields=["reward"])
    buffer.recompute("task", lambda episode: len(episode["reward"]))
    for (serial, new), (_, old) in zip(shown(buffer), before, strict=True):
        assert np.array_equal(new["x"]["a"], 2 * np.array(old["x"]["a"])), serial  # with its final observation
        assert new["reward"] == [-r for r in old["reward"]] and new["task"] == len(old["reward"])
    assert verify(buffer.folder) == [] and buffer.serials.tolist() == [1, 2, 3]


def test_recomputing_what_an_episode_ended_by_changes_what_its_record_says(buffer):
    assert buffer.sample(8, n_steps=1, gamma=0.9, seed=0)["_discount"].min() > 0
    buffer.recompute("terminated", lambda episode: np.arange(len(episode["reward"])) == len(episode["reward"]) - 1)
    assert buffer.sample(64, n_steps=1, gamma=0.9, seed=0)["_discount"].min() == 0


def test_a_column_that_was_added_is_computed_for_what_is_visible_alone(buffer):
    seen = []
    buffer.add_field("seen", "float", lambda episode: seen.append(episode["task"]) or episode["reward"])
    assert [int(task) for task in seen] == [11, 22, 33] and sorted(buffer.episode(0)) == sorted(
        [*FIELDS, *META, "seen"]
    )
    buffer.delete(2)
    assert [episode["task"] for _, episode in shown(buffer)] == [11, 22]  # and the retired one does not come back


BAD = {
    "taken": (lambda b: b.add_field("reward", ("float", (), 0.0)), "'reward': there is one already"),
    "inside": (lambda b: b.add_field("reward.b", ("float", (), 0.0)), "'reward.b' lies inside the field 'reward'"),
    "no default": (lambda b: b.add_field("y", "float"), "'y': got no default for the episodes that are there"),
    "name": (lambda b: b.add_field("_y", ("float", (), 0)), "name '_y'"),
    "dtype": (lambda b: b.add_field("y", "object"), "dtype: got 'object'"),
    "short": (lambda b: b.add_field("y", "float", lambda e: [1.0]), "'y', episode 1: got 1 entries, expected 2"),
    "no final": (
        lambda b: b.add_field("y", Field("float", final=True), lambda e: e["reward"]),
        "episode 1: got 2 entries, expected 3; the last one is of the final observation",
    ),
    "shape": (lambda b: b.add_field("y", "float", lambda e: e["x"]["a"]), r"'y', episode 1: got shape \(3, 2\)"),
    "lossy": (lambda b: b.add_field("y", "int", lambda e: e["reward"] / 2), "episode 1.*not a whole number"),
    "meta shape": (lambda b: b.add_field("y", "int", lambda e: [1, 2], meta=True), r"episode 1: got shape \(2,\)"),
    "unknown": (lambda b: b.drop_field("rewrad"), "drop_field: got 'rewrad'.*did you mean 'reward'"),
    "unknown for compute": (lambda b: b.recompute("reward", to_go, fields=["r"]), "recompute 'reward': got 'r'"),
    "unknown to recompute": (lambda b: b.recompute("r", to_go), "recompute: got 'r'"),
    "rename onto": (lambda b: b.rename_field("reward", "terminated"), "rename_field: 'terminated' is also kept"),
    "rename twice": (lambda b: b.rename_field("x.a", "x.b"), "x.b would stand twice"),
    "rename inside": (lambda b: b.rename_field("x.a", "reward.a"), "lies inside the field 'reward'"),
    "terminated": (lambda b: b.add_field("terminated", ("bool", (), False)), "'terminated' is also kept in the record"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_change_that_is_refused_changes_nothing(buffer, name):
    change, text = BAD[name]
    before, files = shown(buffer), {path: data for path, (_, _, data) in listing(buffer.folder).items()}
    with pytest.raises(SchemaError, match=text):
        change(buffer)
    after = {path: data for path, (_, _, data) in listing(buffer.folder).items()}
    assert shown(buffer) == before and after.keys() == files.keys()
    assert all(after[path] == files[path] for path in files if path not in BESIDE) and verify(buffer.folder) == []
    goes_on_here(buffer)


def test_the_last_field_cannot_be_dropped(tmp_path):
    with ReplayBuffer(tmp_path, 2, 2, {"a": "int"}) as buffer, pytest.raises(SchemaError, match="got none"):
        buffer.drop_field("a")


def test_an_open_episode_is_ended_first(buffer):
    for change in (CHANGES["add"], CHANGES["drop"], CHANGES["rename"]):
        with buffer.one_episode(), pytest.raises(EpisodeStateError, match="1 episodes are open; end them first"):
            change(buffer)


def test_fields_can_come_and_go_until_the_columns_of_checksums_are_used_up(buffer, tmp_path):
    for i in range(SPARE + 4):  # a column is used again as long as no episode was published with it
        buffer.add_field("more", ("int", (), i))
        assert verify(buffer.folder) == []
        buffer.drop_field("more")
    for i in range(SPARE):
        buffer.add_field(f"more{i}", ("int", (), i))
    with pytest.raises(SchemaError, match=r"room for the checksums of 21 fields.*`pack` and `unpack`"):
        buffer.add_field("one_more", ("int", (), 1))
    buffer.store_episode(**whole(4, 2), more3=[7, 8])
    assert verify(buffer.folder) == [] and shown(buffer)[-1][1]["more3"] == [7, 8]
    pack(buffer.folder, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "again")
    with ReplayBuffer.from_folder(tmp_path / "again") as again:
        again.add_field("one_more", ("int", (), 1))
        assert shown(again)[0][1]["one_more"] == [1] * 4 or shown(again)[0][1]["one_more"][0] == 1


# Others that have it open


def test_an_open_reader_reads_on_beside_a_new_field_and_is_told_of_one_that_went(buffer):
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    dataset = reader.dataset(timestep_level=True)
    before = shown(reader)
    buffer.add_field("valid", ("bool", (), True))
    buffer.store_episode(**whole(4, 2))
    assert shown(reader)[:-1] == before[1:] and "valid" not in shown(reader)[-1][1] and len(dataset) > 0
    assert "valid" in shown(buffer)[-1][1]
    buffer.drop_field("reward")
    for read in (lambda: reader.num_episodes, lambda: next(iter(reader.dataloader(2, dataset=dataset)))):
        with pytest.raises(SchemaMismatchError, match=r"(?s)its schema was changed.*'reward': stored.*from_folder"):
            read()


def test_a_read_only_object_stays_one_where_another_changed_the_columns(buffer):
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    buffer.drop_field("task")
    for change in (lambda: reader.drop_field("reward"), lambda: reader.rename_field("reward", "gain")):
        with pytest.raises(ReadOnlyError, match="read_only=True"):
            change()
        assert reader.read_only


def test_a_reader_that_checks_every_read_is_served_open_episodes_with_a_field_that_it_does_not_know(tmp_path):
    with ReplayBuffer(tmp_path, 3, 4, {"x": "float"}, publish="step", spare_slots=2) as buffer:
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True, verify="read")
        assert len(reader) == 0
        buffer.add_field("y", ("float", (), 3))
        with buffer.one_episode():
            buffer.store(x=1)
            buffer.store(x=2)
            assert reader.episode(0)["x"].tolist() == [1, 2] and len(reader) == 1
        assert reader.episode(0)["x"].tolist() == [1, 2]
    assert verify(tmp_path) == []


def test_a_reader_reads_on_what_it_has_open_of_a_folder_that_was_deleted_and_nobody_opens_it(buffer):
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    buffer.delete(0)
    buffer.close()
    left = reader.episodes()["reward"].tolist()
    shutil.rmtree(buffer.folder)
    assert reader.episodes()["reward"].tolist() == left
    with pytest.raises(NotABufferError, match="there is no such folder"):
        ReplayBuffer.from_folder(buffer.folder, read_only=True)


def test_another_object_cannot_write_by_the_old_schema_and_takes_the_lock_from_nobody(buffer):
    other = ReplayBuffer.from_folder(buffer.folder)
    buffer.add_field("valid", ("bool", (), True))
    with pytest.raises(SchemaMismatchError, match=r"(?s)its schema was changed.*'valid'"):
        other.store_episode(**whole(4, 2))
    buffer.store_episode(**whole(4, 2))
    buffer.close()
    with pytest.raises(SchemaMismatchError, match="its schema was changed"):
        other.store_episode(**whole(4, 2))
    with ReplayBuffer.from_folder(buffer.folder) as again:
        again.store_episode(**whole(4, 2))


@pytest.mark.parametrize("name", ["drop", "rename group"])
def test_a_folder_whose_schema_is_replaced_while_it_is_opened_is_opened_by_the_new_one(buffer, monkeypatch, name):
    before, mapped, left = shown(buffer), get_inside("map_arrays"), [1]

    def interrupted(self, *arguments):
        if left:
            left.pop()
            CHANGES[name](buffer)
        return mapped(self, *arguments)

    set_inside(monkeypatch, map_arrays=interrupted)
    assert shown(buffer.folder) == expected(name, before) and not left


@pytest.mark.parametrize("name", ["schema.json.new", "schema.json.old"])
def test_what_is_left_of_another_schema_keeps_nobody_from_writing_and_costs_nothing(tmp_path, name):
    make(tmp_path).close()
    (tmp_path / "data" / "mine.npy").write_bytes(b"mine")
    for text in (b"", b"{", b"garbage", b'{"format": "other"}'):
        (tmp_path / name).write_bytes(text)
        with ReplayBuffer.from_folder(tmp_path) as buffer:
            before = shown(buffer)
            buffer.store_episode(**whole(6, 2))
            assert shown(buffer)[:-1] == before[1:]
            torn = text in (b"", b"{")
            assert (tmp_path / name).exists() != torn and (tmp_path / "data" / "mine.npy").exists()
            if not torn:
                with pytest.raises((CorruptBufferError, SchemaError), match=name):
                    buffer.add_field("more", ("int", (), 1))
                assert shown(buffer)[:-1] == before[1:]
        (tmp_path / name).unlink(missing_ok=True)


def test_loaders_made_after_a_change_give_the_new_field_in_workers_too(buffer):
    buffer.add_field("to_go", "float", to_go)
    torch = pytest.importorskip("torch")
    loader = buffer.dataloader(8, timestep_level=True, num_workers=1)
    batch = next(iter(loader))
    alone = next(iter(buffer.dataloader(8, timestep_level=True)))
    assert torch.equal(batch["to_go"], alone["to_go"])


# Validity


def test_set_valid_marks_timesteps_in_a_field_that_it_adds(buffer):
    before = shown(buffer)
    steps = {(1, 0): False, (2, 3): False, (2, 0): False}
    assert set_valid(buffer, pytest.importorskip("torch").tensor(list(steps))) == 0
    assert set_valid(buffer, [[2, 0], [3, 0], [3, 0]], [True, True, False]) == 0
    steps |= {(2, 0): True, (3, 0): False}
    for (serial, episode), (_, old) in zip(shown(buffer), before, strict=True):
        expected = [steps.get((serial, t), True) for t in range(len(old["reward"]))]
        assert episode == {**old, "valid": expected}
    assert set_valid(buffer, np.array([1, 3])) == 0 and set_valid(buffer, [3], True) == 0  # whole episodes
    assert [episode["valid"] for _, episode in shown(buffer)] == [[False] * 2, [True, True, True, False], [True]]
    assert verify(buffer.folder) == []


def test_set_valid_drops_what_is_gone_and_refuses_what_never_was(buffer):
    with buffer.one_episode() as episode:
        episode.store(**{"x.a": [0, 0], "reward": 0})
    assert set_valid(buffer, [[1, 0], [2, 1], [99, 0]]) == 2  # 1 was overwritten, 99 never published
    assert shown(buffer)[0][1]["valid"] == [True, False, True, True]
    before = shown(buffer)
    for indices, text in (([[2, 4]], "timestep 4 of episode 2, which has 4"), ([[2, -1]], "timestep -1 of episode 2")):
        with pytest.raises(SchemaError, match=text):
            set_valid(buffer, indices)
    for indices in ([[0.5, 1]], [[1, 2, 3]], 3):
        with pytest.raises(SchemaError, match=r"expected \(n, 2\) of \(serial, timestep\)"):
            set_valid(buffer, indices)
    with pytest.raises(SchemaError, match="out of range 0 … 1"):
        set_valid(buffer, [[2, 0]], 7)
    assert shown(buffer) == before
    buffer.drop_field("valid")
    buffer.add_field("valid", ("int", (), 1))
    with pytest.raises(SchemaError, match="`valid` is no bool field"):
        set_valid(buffer, [[2, 0]])
