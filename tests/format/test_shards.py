"""A root of shards: found as they appear, read as one, written by one process each."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from fault_injection import fork
from inside import around, folders_of, get_inside, opened, place_of, set_inside

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    NotABufferError,
    NotEnoughDataError,
    Prioritized,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    StaleEpisodeError,
    WriterLostError,
)

STEPS = {"timestep_level": True, "return_indices": True}
SIZES = {"max_episodes": 20, "max_timesteps": 4, "fields": {"x": "int"}, "meta_fields": {"task": ("int", (), 0)}}


def shard(root, number, *values, **options):
    """A closed shard of one-step episodes."""
    path = root / f"shard-{number:05}"
    with ReplayBuffer(path, **SIZES | options) as buffer:
        for value in values:
            buffer.store_episode(x=[value])
    return path


def append(root, number, value):
    with ReplayBuffer.from_folder(root / f"shard-{number:05}") as buffer:
        buffer.store_episode(x=[value])


def rows(batch):
    """(shard, serial, t, x) of each item."""
    return [(*index, x) for index, x in zip(batch["_indices"].tolist(), batch["x"].tolist(), strict=True)]


def everything(buffer, **options):
    return [row for batch in buffer.dataloader(7, **STEPS, **options) for row in rows(batch)]


class TestFound:
    def test_a_relative_path_is_that_of_the_moment_when_the_root_was_opened(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shard(tmp_path / "root", 0, 10)
        root = ConcatBuffer.from_root("root")
        monkeypatch.chdir("root")
        shard(tmp_path / "root", 1, 11)
        assert [x for *_, x in everything(root)] == [10, 11]
        assert len(pickle.loads(pickle.dumps(root))) == 2

    def test_a_shard_is_seen_as_soon_as_it_is_there(self, tmp_path):
        shard(tmp_path, 0, 10)
        root = ConcatBuffer.from_root(tmp_path)
        loader = root.dataloader(9, **STEPS)
        assert rows(next(iter(loader))) == [(0, 0, 0, 10)]
        shard(tmp_path, 1, 20, 21)
        assert rows(next(iter(loader))) == [(0, 0, 0, 10), (1, 0, 0, 20), (1, 1, 0, 21)]
        shard(tmp_path, 2, 30)
        assert {row[0] for row in rows(root.sample(200, **STEPS))} == {0, 1, 2}
        shard(tmp_path, 3, 40)
        root.refresh()
        assert len(root) == 5
        assert [path.name for path in root.folders] == [f"shard-0000{n}" for n in range(4)]

    def test_its_number_is_that_of_its_name_whichever_others_there_are(self, tmp_path):
        shard(tmp_path, 7, 70)
        root = ConcatBuffer.from_root(tmp_path)
        assert everything(root) == [(7, 0, 0, 70)]
        shard(tmp_path, 2, 20)
        shard(tmp_path, 11, 110)
        assert everything(root) == [(2, 0, 0, 20), (7, 0, 0, 70), (11, 0, 0, 110)]
        assert root.shards == (2, 7, 11)
        shutil.rmtree(tmp_path / "shard-00007")
        assert everything(root) == everything(ConcatBuffer.from_root(tmp_path)) == [(2, 0, 0, 20), (11, 0, 0, 110)]
        assert root.max_episodes == 40

    def test_a_folder_is_no_shard_before_its_schema_is_there(self, tmp_path):
        path = shard(tmp_path, 0, 1)
        shard(tmp_path, 1, 2)
        (tmp_path / "shard-00001" / "schema.json").rename(tmp_path / "aside")
        root = ConcatBuffer.from_root(tmp_path)
        assert root.folders == (path,)
        (tmp_path / "aside").rename(tmp_path / "shard-00001" / "schema.json")
        assert len(everything(root)) == 2

    def test_what_else_lies_in_the_root_is_left_alone(self, tmp_path):
        shard(tmp_path, 0, 1)
        ReplayBuffer(tmp_path / "validation", **SIZES).close()
        (tmp_path / "shard-1").mkdir()
        (tmp_path / "shard-00003").mkdir()
        (tmp_path / "shard-00004").write_text("")
        assert everything(ConcatBuffer.from_root(tmp_path)) == [(0, 0, 0, 1)]

    def test_a_root_of_none_is_refused(self, tmp_path):
        with pytest.raises(NotABufferError, match="no subfolder holds a buffer"):
            ConcatBuffer.from_root(tmp_path)
        (tmp_path / "shard-00000").mkdir()
        with pytest.raises(NotABufferError, match="no subfolder holds a buffer"):
            ConcatBuffer.from_root(tmp_path)

    def test_shards_of_other_fields_are_refused_when_they_appear(self, tmp_path):
        shard(tmp_path, 0, 1)
        root = ConcatBuffer.from_root(tmp_path)
        ReplayBuffer(tmp_path / "shard-00001", 2, 4, {"x": "float"}).close()
        with pytest.raises(SchemaMismatchError, match=r"(?s)shard-00001 and .*shard-00000 have different fields"):
            root.refresh()

    @pytest.mark.parametrize("removed", ["root/shard-00000", "root"])
    def test_every_shard_removed_leaves_nothing_to_read(self, tmp_path, removed):
        shard(tmp_path / "root", 0, 1)
        root = ConcatBuffer.from_root(tmp_path / "root")
        root.sample(4, timestep_level=True)
        shutil.rmtree(tmp_path / removed)
        with pytest.raises(NotEnoughDataError, match="it is empty"):
            root.sample(4, timestep_level=True)
        shard(tmp_path / "root", 0, 2)
        assert everything(root) == [(0, 0, 0, 2)]

    def test_a_shard_made_anew_under_its_old_number_is_another(self, tmp_path):
        shard(tmp_path, 0, 1)
        shard(tmp_path, 1, *range(10, 20))
        root = ConcatBuffer.from_root(tmp_path)
        assert len(everything(root)) == 11
        shutil.rmtree(tmp_path / "shard-00001")
        shard(tmp_path, 1, 99, max_episodes=3)
        assert everything(root) == [(0, 0, 0, 1), (1, 0, 0, 99)]


class TestRead:
    def test_an_epoch_that_began_goes_on_without_the_shard_that_was_removed(self, tmp_path):
        shard(tmp_path, 0, *range(10))
        shard(tmp_path, 1, *range(100, 110))
        root = ConcatBuffer.from_root(tmp_path)
        batches = iter(root.dataloader(1, shuffle=True, seed=1, **STEPS))
        next(batches)
        shutil.rmtree(tmp_path / "shard-00001")
        root.refresh()
        rest = [row for batch in batches for row in rows(batch)]
        assert len(rest) == 19
        assert all(x == serial + 100 * number for number, serial, _, x in rest)
        assert all(number == 0 for number, *_ in rest[16:])  # what was planned before is still mapped

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_workers_read_shards_that_appeared_after_they_were_started(self, tmp_path, context):
        shard(tmp_path, 0, 1)
        loader = ConcatBuffer.from_root(tmp_path).dataloader(
            2, num_workers=1, persistent_workers=True, multiprocessing_context=context, **STEPS
        )
        assert [row for batch in loader for row in rows(batch)] == [(0, 0, 0, 1)]
        shard(tmp_path, 4, 40, 41)
        append(tmp_path, 0, 2)
        expected = [(0, 0, 0, 1), (0, 1, 0, 2), (4, 0, 0, 40), (4, 1, 0, 41)]
        assert [row for batch in loader for row in rows(batch)] == expected

    def test_an_epoch_is_resumed_where_more_shards_have_appeared(self, tmp_path):
        shard(tmp_path, 0, *range(5))
        shard(tmp_path, 3, *range(10, 15))
        loader = ConcatBuffer.from_root(tmp_path).dataloader(2, shuffle=True, seed=1, **STEPS)
        batches = iter(loader)
        head = [row for _ in range(2) for row in rows(next(batches))]
        state = loader.state_dict()
        rest = [row for batch in batches for row in rows(batch)]
        for number in (1, 8):
            shard(tmp_path, number, 1000)
        other = ConcatBuffer.from_root(tmp_path).dataloader(2, shuffle=True, **STEPS)
        other.load_state_dict(state)
        assert [row for batch in other for row in rows(batch)] == rest
        assert len({*head, *rest}) == 10
        shutil.rmtree(tmp_path / "shard-00003")
        late = ConcatBuffer.from_root(tmp_path).dataloader(2, shuffle=True, **STEPS)
        with pytest.raises(StaleEpisodeError, match="shard-00003: 5 episodes of the epoch"):
            late.load_state_dict(state)

    def test_the_datasets_pickle_as_the_root(self, tmp_path):
        for number in (0, 2):
            shard(tmp_path, number, number)
        dataset = ConcatBuffer.from_root(tmp_path).dataset(timestep_level=True)
        data = pickle.dumps(dataset)
        assert [pickle.loads(data)[i]["x"].item() for i in range(2)] == [0, 2]

    def test_wide_rows_text_and_odd_sizes_are_those_of_each_shard(self, tmp_path):
        """What is taken by one index of all shards, against each shard read by itself."""
        fields = {
            "image": ("uint8", (3, 40, 40)),
            "odd": ("float32", (17,)),
            "note": "U5",
            "half": "bfloat16",
            "last": "int",
        }
        rng = np.random.default_rng(0)
        for number in range(3):
            with ReplayBuffer(tmp_path / f"shard-{number:05}", 9 + number, 6, fields, {"m": ("float", 3)}) as buffer:
                for length in (2, 6, 1):
                    buffer.store_episode(
                        image=rng.integers(0, 256, (length, 3, 40, 40), np.uint8),
                        odd=rng.standard_normal((length, 17), np.float32),
                        note=[f"{number}-{t}" for t in range(length)],
                        half=torch.randn(length).bfloat16(),
                        last=range(length),
                        m=rng.standard_normal(3),
                    )
        whole = ConcatBuffer.from_root(tmp_path)
        for options in ({"timestep_level": True}, {"n_steps": 2}, {}):
            got = list(whole.dataloader(1, include_metadata=True, **options))
            each = [
                batch
                for folder in whole.folders
                for batch in ReplayBuffer.from_folder(folder).dataloader(1, include_metadata=True, **options)
            ]
            assert len(got) == len(each) > 8
            for one, other in zip(got, each, strict=True):
                assert one.keys() == other.keys()
                for key, value in one.items():
                    same = value.equal(other[key]) if isinstance(value, torch.Tensor) else value == other[key]
                    assert same, key


class TestPriorities:
    def test_a_draw_picks_the_shard_by_its_mass_and_shards_may_come_and_go(self, tmp_path):
        shard(tmp_path, 1, *range(4))
        shard(tmp_path, 3, *range(4))
        root, how = ConcatBuffer.from_root(tmp_path), Prioritized(alpha=1.0)
        batch = root.sample(4000, prioritized=how, timestep_level=True)
        assert set(batch["_indices"][:, 0].tolist()) == {1, 3}
        indices = torch.tensor([[number, serial, 0] for number in (1, 3) for serial in range(4)])
        assert root.update_priorities(indices, torch.where(indices[:, 0] == 3, 3.0, 1.0)) == 0
        share = (root.sample(4000, prioritized=how, timestep_level=True)["_indices"][:, 0] == 3).double().mean().item()
        assert abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 4000)
        shard(tmp_path, 0, 5)
        assert 0 in root.sample(4000, prioritized=how, timestep_level=True)["_indices"][:, 0].tolist()
        shutil.rmtree(tmp_path / "shard-00003")
        batch = root.sample(400, prioritized=how, timestep_level=True)
        assert set(batch["_indices"][:, 0].tolist()) == {0, 1}
        assert root.update_priorities(indices, torch.ones(8)) == 4
        with pytest.raises(SchemaError, match="got folder 9, expected one from 0 to 3"):
            root.update_priorities(torch.tensor([[9, 0, 0]]), torch.ones(1))

    @pytest.mark.parametrize("stored", [False, True])
    def test_the_priorities_of_shards_keep_no_file_open(self, tmp_path, stored):
        """There may be more shards than files that a process may have open."""
        for number in range(5):
            path = shard(tmp_path, number, *range(4))
            with ReplayBuffer.from_folder(path) as buffer:
                if stored:
                    buffer.sample(8, prioritized=True, timestep_level=True)
        root, before = ConcatBuffer.from_root(tmp_path), len(os.listdir("/dev/fd"))
        indices = root.sample(8, prioritized=True, timestep_level=True)["_indices"]
        root.update_priorities(indices, torch.ones(8))
        root.sample(8, prioritized=Prioritized(alpha=0.3), window_length=1)
        assert len(os.listdir("/dev/fd")) == before

    def test_priorities_in_memory_that_are_made_anew_are_not_those_of_a_shard_that_took_the_place(self, tmp_path):
        shard(tmp_path, 0, *range(4))
        storage = opened(tmp_path / "shard-00000", read_only=True)
        priorities = get_inside("open_priorities")(storage, "default")
        priorities.follow()
        shutil.rmtree(tmp_path / "shard-00000")
        shard(tmp_path, 0, *range(4))
        with pytest.raises(WriterLostError, match="was moved, removed or overwritten"):
            priorities.mend()


class TestNumbers:
    def test_cost_follows_how_many_shards_there_are_and_not_their_numbers(self, tmp_path, monkeypatch):
        made, withdraw = [], get_inside("withdraw")
        set_inside(monkeypatch, withdraw=lambda *args: made.append(args) or withdraw(*args))
        for number in (99_999, 0):
            shard(tmp_path, number, *range(number, number + 6))
        root = ConcatBuffer.from_root(tmp_path)
        batches = iter(root.dataloader(4, shuffle=True, seed=1, **STEPS))
        seen = rows(next(batches))
        assert (root.shards, len(root.folders), len(folders_of(root).storages)) == ((0, 99_999), 2, 2)
        shard(tmp_path, 500, 500)
        assert sorted(seen + [row for batch in batches for row in rows(batch)]) == [
            (number, serial, 0, number + serial) for number in (0, 99_999) for serial in range(6)
        ]
        assert len(folders_of(root).storages) == 3
        assert made == []

    @pytest.mark.parametrize(
        "options",
        [{}, {"shuffle": True, "seed": 1}, {"prioritized": Prioritized()}, {"num_workers": 1}, {"shuffle": "block"}],
        ids=str,
    )
    def test_a_shard_between_others_is_read_as_those_are(self, tmp_path, options):
        for number in (40, 3):
            shard(tmp_path, number, number, number + 1, max_timesteps=number)
        loader = ConcatBuffer.from_root(tmp_path).dataloader(3, **STEPS, **options)
        list(loader)
        shard(tmp_path, 7, 7, 8, 9, max_timesteps=1)
        got = [row for batch in loader for row in rows(batch)]
        assert all(x == number + serial for number, serial, _, x in got)
        if "prioritized" not in options:
            expected = [(number, serial) for number, count in ((3, 2), (7, 3), (40, 2)) for serial in range(count)]
            assert sorted(row[:2] for row in got) == expected

    def test_episodes_are_listed_by_the_numbers_of_their_shards_whichever_was_found_first(self, tmp_path):
        shard(tmp_path, 40, 400, 401)
        root = ConcatBuffer.from_root(tmp_path)
        assert len(root) == 2
        shard(tmp_path, 3, 30)
        root.refresh()
        for buffer in (root, ConcatBuffer.from_root(tmp_path)):
            assert buffer.shards == (3, 40)
            assert [path.name for path in buffer.folders] == ["shard-00003", "shard-00040"]
            assert buffer.serials.tolist() == [0, 0, 1]
            assert [buffer.episode(i)["x"].tolist() for i in range(3)] == [[30], [400], [401]]
            assert everything(buffer, seed=1, shuffle=True) == everything(root, seed=1, shuffle=True)
            batch = buffer.sample(5, seed=1, prioritized=Prioritized(), **STEPS)
            assert rows(batch) == rows(root.sample(5, seed=1, prioritized=Prioritized(), **STEPS))

    def test_the_state_of_an_epoch_names_its_shards_by_their_numbers(self, tmp_path):
        shard(tmp_path, 99_999, *range(5))
        loader = ConcatBuffer.from_root(tmp_path).dataloader(2, shuffle=True, seed=1, **STEPS)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [row for batch in batches for row in rows(batch)]
        shard(tmp_path, 5, 1000)
        other = ConcatBuffer.from_root(tmp_path).dataloader(2, shuffle=True, **STEPS)
        other.load_state_dict(state)
        assert [row for batch in other for row in rows(batch)] == rest
        assert [folder["number"] for folder in state["folders"]] == [99_999]
        for number in (-1, 100_000):
            bad = {**state, "folders": [{**state["folders"][0], "number": number}]}
            with pytest.raises(SchemaError, match=f"number: got {number}, expected 0 to 99999"):
                other.load_state_dict(bad)

    def test_the_state_of_an_epoch_of_many_shards_tells_little_of_each(self, tmp_path):
        for number in range(40):
            shard(tmp_path, 3 * number, *range(number, number + 4))
        for number, gone in ((30, 1), (33, 0)):
            with ReplayBuffer.from_folder(tmp_path / f"shard-{number:05}") as buffer:
                buffer.delete([gone])
        loader = ConcatBuffer.from_root(tmp_path).dataloader(7, shuffle=True, seed=1, **STEPS)
        batches = iter(loader)
        seen = rows(next(batches))
        state = json.loads(json.dumps(loader.state_dict()))
        assert [folder["number"] for folder in state["folders"]] == [30]
        assert len(state["plain"]) < 39 * 16
        expected = [row for batch in batches for row in rows(batch)]
        shutil.rmtree(tmp_path / "shard-00099")
        shard(tmp_path, 99, *range(4))
        append(tmp_path, 0, 77)
        shard(tmp_path, 1, 88)
        for again in range(2):
            resumed = ConcatBuffer.from_root(tmp_path).dataloader(7, shuffle=True, **STEPS)
            with pytest.raises(StaleEpisodeError, match="shard-00099"):
                resumed.load_state_dict(state)
            resumed.load_state_dict(state, on_stale="redraw")
            if not again:
                state = json.loads(json.dumps(resumed.state_dict()))
        got = [row for batch in resumed for row in rows(batch)]
        assert [row for row in got if row[0] != 99][:20] == [row for row in expected if row[0] != 99][:20]
        assert not {row[:3] for row in seen} & {row[:3] for row in got if row[0] != 99 and row in expected}
        assert not {0: 77, 1: 88}.items() & {(row[0], row[3]) for row in got}

    @pytest.mark.parametrize("wrong", [3, "x", "2:AAAA", "99999999:eJwDAAAAAAE=", "1:eJwDAAAAAAE="], ids=str)
    def test_what_is_no_state_of_many_shards_is_refused(self, tmp_path, wrong):
        for number in range(20):
            shard(tmp_path, number, 1)
        loader = ConcatBuffer.from_root(tmp_path).dataloader(7, shuffle=True, seed=1, **STEPS)
        next(iter(loader))
        state = loader.state_dict()
        for text in (wrong, state["plain"][:-8]):
            with pytest.raises(SchemaError, match="expected what state_dict gave"):
                loader.load_state_dict({**state, "plain": text})

    def test_the_next_shard_after_the_last_number_is_one_that_is_left(self, tmp_path):
        for number in (0, 99_999):
            shard(tmp_path, number, 1, 2, max_episodes=2)
        with ReplayBuffer(tmp_path, **SIZES | {"max_episodes": 2}, shard="auto") as buffer:
            assert buffer.folder.name == "shard-00001"


def copied(source, target, names):
    """Some files of a shard, as a copy brings them one by one."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


class TestWhole:
    FILES = ("schema.json", "episodes.npy", "state.npy", "checksums.npy", "data/x.npy", "meta/task.npy")

    @pytest.fixture
    def away(self, tmp_path_factory):
        """A shard that lies elsewhere."""
        return shard(tmp_path_factory.mktemp("away"), 3, 30, 31)

    def test_a_shard_that_is_copied_file_by_file_is_read_when_it_is_whole(self, tmp_path, away, caplog):
        shard(tmp_path, 0, 1)
        root, target = ConcatBuffer.from_root(tmp_path), tmp_path / "shard-00003"
        for name in self.FILES:
            assert rows(root.sample(3, **STEPS)) == [(0, 0, 0, 1)] * 3
            assert len(ConcatBuffer.from_root(tmp_path)) == 1
            content = (away / name).read_bytes()
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            for cut in (0, len(content) // 2, len(content) - 1):
                (target / name).write_bytes(content[:cut])
                assert (len(root), root.shards) == (1, (0,))
            (target / name).write_bytes(content)
        assert len(root) == 3
        assert {row[0] for row in rows(root.sample(99, **STEPS))} == {0, 3}
        said = [record.getMessage() for record in caplog.records if "shard-00003" in record.getMessage()]
        assert len(said) == len(self.FILES)  # each of those that were opened on the way said it once, `root` too
        assert "is passed over until it is whole: schema.json is cut short" in said[0]

    @pytest.mark.parametrize("name", ["state.npy", "data/x.npy", "meta/task.npy"])
    def test_the_file_that_a_shard_lacks_is_named(self, tmp_path, caplog, name):
        shard(tmp_path, 0, 1)
        (shard(tmp_path, 1, 2) / name).unlink()
        assert ConcatBuffer.from_root(tmp_path).shards == (0,)
        assert f"shard-00001 is passed over until it is whole: {name} is missing" in caplog.text
        shutil.rmtree(tmp_path / "shard-00000")
        with pytest.raises(NotABufferError, match=rf"(?s)no subfolder .* whole:.*shard-00001: {name} is missing"):
            ConcatBuffer.from_root(tmp_path)

    def test_a_shard_that_is_copied_again_over_itself_is_read_as_soon_as_that_is_done(self, tmp_path, away):
        shard(tmp_path, 0, 1)
        target = tmp_path / "shard-00003"
        shutil.copytree(away, target)
        root = ConcatBuffer.from_root(tmp_path)
        assert len(everything(root)) == 3
        shutil.rmtree(target)
        copied(away, target, self.FILES[:-1])
        assert everything(root) == [(0, 0, 0, 1)]
        copied(away, target, self.FILES[-1:])
        assert everything(root) == [(0, 0, 0, 1), (3, 0, 0, 30), (3, 1, 0, 31)]

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_workers_pass_over_what_is_not_whole_too(self, tmp_path, away, context):
        shard(tmp_path, 0, 1)
        copied(away, tmp_path / "shard-00003", self.FILES[:-1])
        loader = ConcatBuffer.from_root(tmp_path).dataloader(
            4, num_workers=1, persistent_workers=True, multiprocessing_context=context, **STEPS
        )
        assert [row for batch in loader for row in rows(batch)] == [(0, 0, 0, 1)]
        copied(away, tmp_path / "shard-00003", self.FILES[-1:])
        assert [row for batch in loader for row in rows(batch)] == [(0, 0, 0, 1), (3, 0, 0, 30), (3, 1, 0, 31)]

    @pytest.mark.parametrize("last", ["schema.json", "data/x.npy"])
    def test_a_writer_takes_no_shard_that_is_being_copied(self, tmp_path, away, last):
        copied(away, tmp_path / "shard-00000", [name for name in self.FILES if name != last])
        with ReplayBuffer(tmp_path, **SIZES, shard="auto") as buffer:
            assert buffer.folder.name == "shard-00001"
        copied(away, tmp_path / "shard-00000", [last])
        assert everything(ConcatBuffer.from_root(tmp_path)) == [(0, 0, 0, 30), (0, 1, 0, 31)]

    def test_a_writer_takes_no_file_and_no_folder_of_an_unknown_version(self, tmp_path):
        (tmp_path / "shard-00000").write_text("")
        schema = shard(tmp_path, 1) / "schema.json"
        schema.write_text(schema.read_text().replace('"version": 1', '"version": 7'))
        with ReplayBuffer(tmp_path, **SIZES, shard="auto") as buffer:
            assert buffer.folder.name == "shard-00002"


def longer(folder):
    with (folder / "data" / "x.npy").open("ab") as file:
        file.write(b"x")


def another_header(folder):
    with (folder / "state.npy").open("r+b") as file:
        file.write(b"x")


def another_version(folder):
    schema = folder / "schema.json"
    schema.write_text(schema.read_text().replace('"version": 1', '"version": 7'))


def no_json(folder):
    schema = folder / "schema.json"
    schema.write_text(schema.read_text().replace(":", ";"))


def a_link(folder):
    (folder / "data" / "x.npy").rename(folder / "x")
    (folder / "data" / "x.npy").symlink_to(folder / "x")


DAMAGES = [
    (longer, "x.npy has 801 bytes, the schema says 800"),
    (another_header, "state.npy has another header than the schema says"),
    (another_version, "version: got 7, this release reads 1"),
    (no_json, "schema.json is no valid schema"),
    (a_link, "x.npy is a link or no plain file"),
]


class TestDamaged:
    @pytest.mark.parametrize(("damage", "text"), DAMAGES)
    def test_a_damaged_shard_is_refused_or_skipped_on_request(self, tmp_path, caplog, damage, text):
        shard(tmp_path, 0, 1)
        damage(shard(tmp_path, 1, 2))
        with pytest.raises((CorruptBufferError, SchemaError), match=rf"shard-00001.*{text}.*on_damaged='skip'"):
            ConcatBuffer.from_root(tmp_path)
        root = ConcatBuffer.from_root(tmp_path, on_damaged="skip")
        for _ in range(3):
            assert everything(root, num_workers=1) == [(0, 0, 0, 1)]
        said = [record.getMessage() for record in caplog.records]
        assert [text in one for one in said] == [True]
        shutil.rmtree(tmp_path / "shard-00001")
        shard(tmp_path, 1, 3)
        assert everything(root) == [(0, 0, 0, 1), (1, 0, 0, 3)]

    def test_one_that_appears_is_refused_or_skipped_by_who_reads_on(self, tmp_path):
        shard(tmp_path, 0, 1)
        strict, lenient = (ConcatBuffer.from_root(tmp_path, on_damaged=how) for how in ("raise", "skip"))
        folder = shard(tmp_path, 1, 2)
        another_header(folder)
        for _ in range(2):
            with pytest.raises(CorruptBufferError, match=r"state\.npy has another header"):
                strict.refresh()
        assert everything(lenient) == [(0, 0, 0, 1)]
        with (folder / "state.npy").open("r+b") as file:
            file.write(b"\x93")
        for buffer in (strict, lenient):
            assert everything(buffer) == [(0, 0, 0, 1), (1, 0, 0, 2)]

    def test_of_folders_with_other_names_it_is_left_out_with_its_weight(self, tmp_path):
        for name in "abc":
            with ReplayBuffer(tmp_path / name, **SIZES) as buffer:
                buffer.store_episode(x=[ord(name)])
        longer(tmp_path / "b")
        with pytest.raises(CorruptBufferError, match=r"x\.npy has 801 bytes"):
            ConcatBuffer.from_root(tmp_path)
        for weights in (None, [1, 5, 3]):
            buffer = ConcatBuffer.from_root(tmp_path, weights, on_damaged="skip")
            assert [folder.name for folder in buffer.folders] == ["a", "c"]
        assert sorted(buffer.sample(4, timestep_level=True)["x"].tolist()) == [97, 99, 99, 99]

    @pytest.mark.parametrize("at", [1, 4, 7])
    def test_one_that_vanishes_while_folders_are_opened_takes_its_own_weight_along(self, tmp_path, monkeypatch, at):
        for name in "abcd":
            with ReplayBuffer(tmp_path / name, **SIZES) as buffer:
                buffer.store_episode(x=[ord(name)])
        longer(tmp_path / "b")
        left = iter([*[lambda: None] * (at - 1), lambda: shutil.rmtree(tmp_path / "d")])
        around(monkeypatch, *place_of("open_storage"), before=lambda: next(left, lambda: None)())
        buffer = ConcatBuffer.from_root(tmp_path, [1, 5, 3, 2], on_damaged="skip")
        drawn = buffer.sample(12, timestep_level=True)["x"].tolist()
        assert drawn.count(ord("c")) == 3 * drawn.count(ord("a")) > 0

    def test_other_ways_to_treat_them_are_refused(self, tmp_path):
        with pytest.raises(SchemaError, match="on_damaged: got 'ignore', expected one of 'raise', 'skip'"):
            ConcatBuffer.from_root(tmp_path, on_damaged="ignore")


class TestTaken:
    def test_each_writer_takes_a_shard_of_its_own_and_a_free_one_is_taken_again(self, tmp_path):
        buffers = [ReplayBuffer(tmp_path, **SIZES, shard="auto") for _ in range(3)]
        assert [buffer.folder.name for buffer in buffers] == [f"shard-0000{n}" for n in range(3)]
        for i, buffer in enumerate(buffers):
            buffer.store_episode(x=[i])
        buffers[1].close()
        again = ReplayBuffer(tmp_path, **SIZES, shard="auto")
        assert again.folder == buffers[1].folder
        again.store_episode(x=[7])
        assert everything(ConcatBuffer.from_root(tmp_path)) == [(0, 0, 0, 0), (1, 0, 0, 1), (1, 1, 0, 7), (2, 0, 0, 2)]

    def test_a_shard_of_another_schema_a_full_one_and_a_damaged_one_are_passed_over(self, tmp_path):
        shard(tmp_path, 0, fields={"y": "int"})
        shard(tmp_path, 1, 1, 2, max_episodes=2)
        damaged = shard(tmp_path, 2) / "state.npy"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        options = SIZES | {"max_episodes": 2}
        shard(tmp_path, 4, 1, max_episodes=2)
        taken = [ReplayBuffer(tmp_path, **options, shard="auto") for _ in range(2)]
        assert [buffer.folder.name for buffer in taken] == ["shard-00004", "shard-00005"]

    def test_writers_that_begin_at_once_get_one_each(self, tmp_path):
        (ready, told), (go, start), (end, stop) = os.pipe(), os.pipe(), os.pipe()

        def take(at):
            os.read(go, 1)
            buffer = ReplayBuffer(tmp_path, **SIZES, shard="auto")
            buffer.store_episode(x=[at])
            os.write(told, b"x")
            os.read(end, 1)  # it holds the shard until all have one

        children = []
        for at in range(6):
            children.append(fork())
            if children[-1] == 0:
                code = 1
                try:
                    take(at)
                    code = 0
                finally:
                    os._exit(code)
        os.write(start, b"x" * 6)
        seen = b""
        os.close(told)  # should a child fail, the others are not waited for
        while len(seen) < 6 and (some := os.read(ready, 6)):
            seen += some
        os.write(stop, b"x" * 6)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
        got = everything(ConcatBuffer.from_root(tmp_path))
        assert [row[:3] for row in got] == [(number, 0, 0) for number in range(6)]
        assert sorted(row[3] for row in got) == list(range(6))

    def test_a_killed_writers_shard_is_free(self, tmp_path):
        child = fork()
        if child == 0:
            ReplayBuffer(tmp_path, **SIZES, shard="auto").store_episode(x=[1])
            os._exit(0)  # without closing
        os.waitpid(child, 0)
        with ReplayBuffer(tmp_path, **SIZES, shard="auto") as buffer:
            assert (buffer.folder.name, len(buffer)) == ("shard-00000", 1)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"shard": "1"}, "shard: got '1', expected 'auto' or None"),
            ({"shard": "auto", "overwrite": True}, "leave out overwrite and read_only"),
            ({"shard": "auto", "read_only": True}, "leave out overwrite and read_only"),
        ],
    )
    def test_what_a_shard_cannot_be_is_refused(self, tmp_path, options, text):
        with pytest.raises(SchemaError, match=text):
            ReplayBuffer(tmp_path, **SIZES, **options)
        assert list(tmp_path.iterdir()) == []


def test_a_number_that_no_shard_can_have_takes_no_memory(tmp_path):
    shard(tmp_path, 0, 1)
    shard(tmp_path, 99_999, 2)
    buffer = ConcatBuffer.from_root(tmp_path)
    assert {*buffer.sample(64, **STEPS)["_indices"][:, 0].tolist()} == {0, 99_999}
    for number in (10**9, 2**62, -1):
        with pytest.raises(SchemaError, match=f"folder {number}: there is none of that number"):
            buffer.batch(np.array([[number, 0, 0]]), **STEPS)
    assert len(folders_of(buffer).storages) == 2
