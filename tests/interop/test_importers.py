"""Every importer: what it leaves when it fails or is killed, how it goes on, and what it does to what is there."""

import errno
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import main
from fault_injection import KILLED, in_child, system, without_barriers

from memmap_buffer import BufferLockedError, CorruptBufferError, Field, ReplayBuffer, SchemaError, SchemaMismatchError

LENGTHS = (3, 1, 4, 2, 3)
FIELDS = {
    "observation": Field("float32", (4,), final=True),
    "action": "int",
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
}
COUNT = len(LENGTHS)
ALL = [*range(COUNT)]


def episode(number):
    """Its reward is its number."""
    length = LENGTHS[number]
    rng = np.random.default_rng(number)
    last = np.arange(length) == length - 1
    return {
        "observation": rng.random((length + 1, 4), np.float32),
        "action": rng.integers(0, 2, length),
        "reward": np.full(length, number, np.float32),
        "terminated": last,
        "truncated": np.zeros(length, bool),
    }


def exported(name, **options):
    def write(root, buffer):
        module = importlib.import_module(f"memmap_buffer.interop.{name}")
        getattr(module, f"export_{name}")(buffer, root / "data", **options)
        return root / "data"

    return write


def minari(root, buffer):
    exported = importlib.import_module("memmap_buffer.interop.minari").export_minari
    exported(buffer, "cart/test-v0", env=gymnasium.make("CartPole-v1"))
    return root / "cart/test-v0/data"


def torchrl(root, buffer):
    """A dump as `LazyMemmapStorage` writes it."""
    episodes = [buffer.episode(i) for i in range(COUNT)]
    after = {"reward", "terminated", "truncated"}
    here = {name: np.concatenate([e[name][: len(e["reward"])] for e in episodes]) for name in FIELDS}
    following = np.concatenate([e["observation"][1:] for e in episodes])
    below = {"observation": following, **{name: here[name] for name in after}}
    below["done"] = below["terminated"]

    def put(folder, arrays, more):
        folder.mkdir(parents=True)
        told = {}
        for name, array in arrays.items():
            (folder / f"{name}.memmap").write_bytes(array.tobytes())
            told[name] = {"dtype": f"torch.{array.dtype.name}", "shape": array.shape}
        (folder / "meta.json").write_text(json.dumps({**told, **more, "shape": [len(following)]}))

    put(root / "data", {n: a for n, a in here.items() if n not in after}, {"next": {"type": "TensorDict"}})
    put(root / "data/next", below, {})
    (root / "data/storage_metadata.json").write_text(json.dumps({"len": len(following)}))
    return root / "data"


def rllib(root, buffer):
    tables = []
    for number in range(COUNT):
        columns = episode(number)
        observed = columns["observation"].tolist()
        rows = {"eps_id": [f"id{number}"] * LENGTHS[number], "obs": observed[:-1], "new_obs": observed[1:]}
        rows |= {"actions": columns["action"], "rewards": columns["reward"]}
        tables.append(pa.table({**rows, "terminateds": columns["terminated"], "truncateds": columns["truncated"]}))
    (root / "data").mkdir()
    pq.write_table(pa.concat_tables(tables), root / "data/part.parquet")
    return root / "data"


SOURCES = {
    "d4rl": exported("d4rl"),
    "ogbench": exported("ogbench"),
    "robomimic": exported("robomimic"),
    "lerobot": exported("lerobot", fps=10),
    "memmap_replay_buffer": exported("memmap_replay_buffer"),
    "minari": minari,
    "torchrl": torchrl,
    "rllib": rllib,
}
each_importer = pytest.mark.parametrize("name", SOURCES)


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory):
    """Importer -> its source; each has the same episodes."""
    root, made = tmp_path_factory.mktemp("sources"), {}
    with pytest.MonkeyPatch.context() as patch, ReplayBuffer(root / "recorded", COUNT, 4, FIELDS) as buffer:
        patch.setenv("MINARI_DATASETS_PATH", str(root / "minari"))
        for number in range(COUNT):
            buffer.store_episode(**episode(number))
        for name, write in SOURCES.items():
            (root / name).mkdir()
            made[name] = write(root / name, buffer)
    return made


@pytest.fixture
def importer(name, sources, tmp_path):
    """The function, and a copy of its source."""
    source = tmp_path / "source" / sources[name].name
    source.parent.mkdir()
    (shutil.copytree if sources[name].is_dir() else shutil.copy2)(sources[name], source)
    function = getattr(importlib.import_module(f"memmap_buffer.interop.{name}"), f"import_{name}")
    return lambda folder, **options: function(source, folder, **options)


@pytest.fixture
def target(tmp_path):
    """Where to import to, in a folder that has nothing else."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "target"


@pytest.fixture
def stops(monkeypatch):
    """Make the import end before an episode is stored, counted from here; None: at none. Gives how many were."""
    stored, at, store = [0], [None], ReplayBuffer.store_episode

    def dying(self, **columns):
        if stored[0] == at[0]:
            raise KeyboardInterrupt("before an episode")
        store(self, **columns)
        stored[0] += 1

    def set_to(number):
        stored[0], at[0] = 0, number
        return stored

    monkeypatch.setattr(ReplayBuffer, "store_episode", dying)
    return set_to


def numbers(folder):
    """The numbers of the episodes of a folder, and that nothing of them is lost."""
    with ReplayBuffer.from_folder(folder, read_only=True, verify="read") as buffer:
        assert buffer.episode_lens.tolist() == [LENGTHS[int(i)] for i in range(len(buffer))]
        return [int(buffer.episode(i)["reward"][0]) for i in range(len(buffer))]


def beside(target):
    """What stands in the folder of the target, but for it."""
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def interrupted(importer, target, **options):
    with pytest.raises(KeyboardInterrupt, match="before an episode"):
        importer(target, **options)


@each_importer
def test_the_same_import_twice_is_an_error_that_names_the_choices(importer, target):
    importer(target).close()
    message = r"there is something already; .*new folder, if_exists='overwrite' .* if_exists='resume'"
    for _ in range(2):
        with pytest.raises(SchemaError, match=f"{target}: {message}"):
            importer(target)
    assert numbers(target) == ALL
    assert beside(target) == []


@each_importer
def test_an_import_that_fails_leaves_no_target_and_the_next_one_begins_anew(importer, target, stops):
    with pytest.raises(ValueError, match="max_timesteps"):
        importer(target, max_timesteps=2)
    stops(3)
    interrupted(importer, target)
    assert not target.exists()
    stored = stops(None)
    importer(target).close()
    assert (stored, numbers(target), beside(target)) == ([COUNT], ALL, [])


@each_importer
def test_an_import_that_fails_before_its_first_episode_leaves_nothing(importer, target, stops):
    stops(0)
    interrupted(importer, target)
    assert [*target.parent.iterdir()] == []


@each_importer
def test_an_interrupted_import_stores_each_episode_of_the_source_once(importer, target, stops):
    total = 0
    for at in (1, 0, 2):
        stored = stops(at)
        interrupted(importer, target, if_exists="resume")
        assert not target.exists()
        total += stored[0]
    stored = stops(None)
    with importer(target, if_exists="resume") as buffer:
        assert (buffer.folder, total + stored[0]) == (target, COUNT)
        assert not buffer.read_only
    assert (numbers(target), beside(target)) == (ALL, [])
    importer(target.parent / "whole").close()
    for i in range(COUNT):
        once, again = (ReplayBuffer.from_folder(f).episode(i) for f in (target, target.parent / "whole"))
        assert repr(once) == repr(again)


@each_importer
def test_an_import_that_is_whole_is_given_as_it_is_where_it_is_resumed(importer, target, stops):
    importer(target).close()
    stops(0)
    with importer(target, if_exists="resume") as buffer:
        assert len(buffer) == COUNT
    with pytest.raises(SchemaError, match="target: the import to be resumed had other arguments"):
        importer(target, if_exists="resume", durability="power")


@each_importer
def test_what_is_there_is_replaced_when_the_new_is_whole_and_not_before(importer, target, stops):
    with ReplayBuffer(target, 3, 4, FIELDS) as old:
        old.store_episode(**episode(0))
    stops(2)
    interrupted(importer, target, if_exists="overwrite")
    assert numbers(target) == [0]
    with ReplayBuffer.from_folder(target, read_only=True) as reader:
        stops(None)
        importer(target, if_exists="overwrite").close()
        with pytest.raises(SchemaMismatchError, match="another buffer took its place; open it again"):
            reader.episode(0)
    assert (numbers(target), beside(target)) == (ALL, [])


@each_importer
def test_an_interrupted_replacement_is_resumed(importer, target, stops):
    with ReplayBuffer(target, 3, 4, FIELDS) as old:
        old.store_episode(**episode(0))
    stops(2)
    interrupted(importer, target, if_exists="overwrite")
    with pytest.raises(SchemaError, match="there is something already"):
        importer(target)
    assert numbers(target) == [0]
    stored = stops(None)
    importer(target, if_exists="resume").close()
    assert (stored, numbers(target), beside(target)) == ([COUNT - 2], ALL, [])


@each_importer
@pytest.mark.parametrize("change", ["time", "size"])
def test_a_source_that_changed_since_the_interruption_is_refused(importer, target, stops, tmp_path, change):
    stops(2)
    interrupted(importer, target)
    changed = max((path for path in (tmp_path / "source").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    if change == "time":
        os.utime(changed, ns=(1, 1))
    else:
        (changed.parent / "one more.parquet.bak").write_bytes(b"")
        if not (tmp_path / "source").joinpath("data").is_dir():
            os.utime(changed, ns=(2, 2))
    stops(None)
    with pytest.raises(SchemaError, match=r"had other files; .* if_exists='overwrite'"):
        importer(target, if_exists="resume")
    assert not target.exists()
    importer(target).close()
    assert (numbers(target), beside(target)) == (ALL, [])


@each_importer
def test_a_source_that_changes_while_it_is_imported_is_refused(importer, target, monkeypatch, tmp_path):
    store = ReplayBuffer.store_episode

    def touching(self, **columns):
        for path in (tmp_path / "source").rglob("*"):
            os.utime(path, ns=(3, 3))
        store(self, **columns)

    monkeypatch.setattr(ReplayBuffer, "store_episode", touching)
    with pytest.raises(SchemaError, match=r"source.*: it changed while it was imported"):
        importer(target)
    assert not target.exists()


@each_importer
def test_overwrite_true_is_another_spelling(importer, target):
    importer(target).close()
    importer(target, overwrite=True).close()
    assert (numbers(target), beside(target)) == (ALL, [])


OF_ONE = pytest.mark.parametrize("name", ["ogbench"])


@pytest.mark.parametrize(
    ("name", "stride"),
    [("ogbench", 29), ("memmap_replay_buffer", 37), pytest.param("ogbench", 3, marks=pytest.mark.slow)],
)
def test_a_killed_import_is_resumed_wherever_it_was_killed(importer, target, stride, monkeypatch):
    """At many system calls, twice."""
    without_barriers(monkeypatch)
    with system() as counted:
        importer(target).close()
    shutil.rmtree(target)
    for at in range(1, counted.count, stride):
        for more in (at, at // 2):

            def work(tell, more=more):
                with system(more, kill=True):
                    importer(target, if_exists="resume")

            assert in_child(work).status in (KILLED, 0)
        importer(target, if_exists="resume").close()
        assert (numbers(target), beside(target)) == (ALL, []), at
        shutil.rmtree(target)


@OF_ONE
@pytest.mark.parametrize("rename", range(2))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_between_the_renames_of_a_replacement_loses_neither(importer, target, rename, when):
    with ReplayBuffer(target, 3, 4, FIELDS) as old:
        old.store_episode(**episode(0))

    def work(tell):
        renamed, count = Path.rename, [0]

        def dying(path, to):
            if count[0] == rename and when == "before":
                os._exit(KILLED)
            renamed(path, to)
            if count[0] == rename:
                os._exit(KILLED)
            count[0] += 1

        Path.rename = dying
        importer(target, if_exists="overwrite")

    assert in_child(work).status == KILLED
    with pytest.raises(SchemaError, match="there is something already"):
        importer(target)
    whole = (rename, when) == (1, "after")
    assert numbers(target) == (ALL if whole else [0])
    importer(target, if_exists="resume").close()
    assert (numbers(target), beside(target)) == (ALL, [])


@OF_ONE
def test_an_import_into_a_ring_that_drops_episodes_is_resumed_from_the_beginning(importer, target, stops):
    stops(4)
    interrupted(importer, target, circular=True, max_episodes=2)
    stored = stops(None)
    with importer(target, circular=True, max_episodes=2, if_exists="resume") as buffer:
        assert [buffer.episode(i)["reward"][0] for i in range(2)] == ALL[-2:]
    assert stored == [COUNT]


@OF_ONE
def test_what_is_imported_goes_on_as_the_options_say(importer, target, stops):
    options = {"publish": "step", "max_episodes": 20}
    stops(2)
    interrupted(importer, target, **options)
    stops(None)
    with importer(target, if_exists="resume", **options) as buffer:
        buffer.add(**{name: column[:1] for name, column in episode(0).items() if name in buffer.fieldnames})
        assert buffer.episode_lens.tolist() == [*LENGTHS, 1]  # a step is shown at once


@OF_ONE
def test_a_staged_import_that_was_damaged_is_not_resumed(importer, target, stops):
    stops(2)
    interrupted(importer, target)
    (damaged,) = target.parent.glob(".target.import/new/data/reward.npy")
    with damaged.open("r+b") as file:
        file.seek(128)
        file.write(b"\xff")
    stops(None)
    with pytest.raises(CorruptBufferError, match="import it from the beginning, by if_exists='overwrite'"):
        importer(target, if_exists="resume")
    importer(target).close()
    assert numbers(target) == ALL


@OF_ONE
def test_an_import_that_another_process_makes_is_left_alone(importer, target, stops):
    def work(tell):
        def other():
            for choice in ("error", "resume", "overwrite"):
                with pytest.raises(BufferLockedError, match="another writer"):
                    importer(target, if_exists=choice)

        store = ReplayBuffer.store_episode

        def storing(self, **columns):
            store(self, **columns)
            if len(self) == 2:
                ReplayBuffer.store_episode = store
                child = in_child(lambda _: other())
                assert child.status == 0, child.told

        ReplayBuffer.store_episode = storing
        importer(target).close()

    done = in_child(work)
    assert (done.status, done.told) == (0, [])
    assert (numbers(target), beside(target)) == (ALL, [])


@OF_ONE
def test_a_buffer_that_is_written_to_is_not_replaced(importer, target):
    with ReplayBuffer(target, 3, 4, FIELDS) as old:
        old.store_episode(**episode(0))

        def work(tell):
            with pytest.raises(BufferLockedError, match="another writer"):
                importer(target, if_exists="overwrite")

        done = in_child(work)
        assert (done.status, done.told) == (0, [])
        old.store_episode(**episode(1))
    assert numbers(target) == [0, 1]
    importer(target, if_exists="resume").close()  # all of it is there
    assert (numbers(target), beside(target)) == (ALL, [])


@OF_ONE
def test_what_is_no_buffer_or_has_more_in_it_is_never_replaced(importer, target):
    target.mkdir()
    importer(target).close()  # an empty folder is none
    (target / "notes.txt").write_text("mine")
    with pytest.raises(SchemaError, match=r"notes\.txt: not of the buffer there"):
        importer(target, if_exists="overwrite")
    other = target.parent / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for choice in ("overwrite", "resume"):
        with pytest.raises(SchemaError, match="it is no buffer; give a new folder"):
            importer(other, if_exists=choice)
    assert (target / "notes.txt").read_text() == (other / "notes.txt").read_text() == "mine"


@OF_ONE
def test_a_recorded_buffer_is_no_import_to_be_resumed(importer, target):
    with ReplayBuffer(target, 3, 4, FIELDS) as old:
        old.store_episode(**episode(0))
    with pytest.raises(SchemaError, match="there is something already"):
        importer(target, if_exists="resume")
    assert numbers(target) == [0]


@OF_ONE
def test_the_folder_keeps_its_permissions_and_a_link_leads_on(importer, target):
    real = target.parent / "real"
    real.mkdir(mode=0o750)
    target.symlink_to(real)
    with importer(target) as buffer:
        assert buffer.folder == target
    importer(target, if_exists="overwrite").close()
    assert (real.stat().st_mode & 0o777, target.is_symlink(), numbers(real)) == (0o750, True, ALL)


@OF_ONE
def test_other_arguments_are_refused(importer, target):
    with pytest.raises(SchemaError, match="if_exists: got 'append', expected one of 'error', 'resume', 'overwrite'"):
        importer(target, if_exists="append")
    with pytest.raises(SchemaError, match="shard: an import fills one folder of its own"):
        importer(target, shard="auto")
    with pytest.raises(SchemaError, match="/: a disk is mounted there"):
        importer("/")
    with pytest.raises(SchemaError, match="publish: got 'never'"):
        importer(target, publish="never")
    assert [*target.parent.iterdir()] == []


@OF_ONE
def test_a_disk_that_is_full_is_an_error_after_which_the_import_is_resumed(importer, target, stops):
    with system() as counted:
        importer(target).close()
    shutil.rmtree(target)
    stored = stops(None)
    writes = sum(name == "pwrite" for name, _ in counted.done)
    with (
        system(writes * 2 // 3, error=errno.ENOSPC, only=("pwrite",)),
        pytest.raises(OSError, match="No space left on device") as raised,
    ):
        importer(target)
    notes = getattr(raised.value, "__notes__", ["if_exists='resume'"])  # from Python 3.11 on
    assert "if_exists='resume'" in notes[0]
    done = stored[0]
    assert 0 < done < COUNT
    stored = stops(None)
    importer(target, if_exists="resume").close()
    assert (stored[0], numbers(target)) == (COUNT - done, ALL)


@OF_ONE
def test_the_command_takes_the_same_choices(importer, target, tmp_path, stops, capsys):
    pytest.importorskip("typer")
    source = next((tmp_path / "source").iterdir())
    arguments = ["import", "ogbench", source, target]
    stops(2)
    assert main(*arguments) == 130
    assert re.search(r"interrupted; 2 episodes .*--if-exists 'resume' goes on", capsys.readouterr().err) or not hasattr(
        KeyboardInterrupt, "add_note"
    )
    stored = stops(None)
    assert main(*arguments, "--if-exists", "resume") == 0
    assert (stored, numbers(target)) == ([COUNT - 2], ALL)
    assert main(*arguments) == 2
    assert re.search(r"target: there is something already; .*--if-exists 'overwrite'", capsys.readouterr().err)
    assert main(*arguments, "--if-exists", "overwrite") == 0
    assert main(*arguments, "--if-exists", "append") == 2
    assert beside(target) == []
