"""`write`: new values where steps were drawn, compared with episodes that were stored with these values."""

import json
import threading

import numpy as np
import pytest
import torch
from fault_injection import system, without_barriers
from specification import REDO_START

from memmap_buffer import (
    ConcatBuffer,
    EpisodeStateError,
    Field,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    Window,
    verify,
)

FIELDS = {
    "x": Field("float32", (3,), final=True),
    "latent": {"z": ("float32", (4,), 0)},
    "packed": Field("int", (2,), codec="zstd"),
    "members": Field("int", (None,)),
    "note": Field("U8"),
    "done": "bool",
}
LENGTH, RING = 12, 6


def make(folder, **options):
    ends = {"terminated": "done", "truncated": None}
    return ReplayBuffer(folder, RING, LENGTH, FIELDS, circular=True, **ends, spare_slots=2, **options)


def steps(serial, t):
    """Of timesteps (n,)."""
    t = np.asarray(t)
    return {
        "x": np.stack([t + serial, t, t * 0], axis=1).astype(np.float32),
        "latent": {"z": np.zeros((len(t), 4), np.float32)},
        "packed": np.stack([t, t * 0 + serial], axis=1),
        "members": [np.arange(k % 3) for k in t.tolist()],
        "note": [f"{serial}-{k}" for k in t.tolist()],
        "done": np.zeros(len(t), np.bool_),
    }


def episode(serial, length=LENGTH):
    return {**steps(serial, range(length)), "x": steps(serial, range(length + 1))["x"]}


@pytest.fixture
def buffer(tmp_path):
    with make(tmp_path / "buffer") as made:
        for serial in range(RING):
            made.store_episode(**episode(serial, LENGTH - serial))
        yield made


def everything(source):
    return [source.episode(i) for i in range(len(source))]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_equal(a, b)


VALUES = {
    "x": lambda n: np.arange(3 * n, dtype=np.float32).reshape(n, 3) + 100,
    "latent": lambda n: {"z": np.arange(4 * n, dtype=np.float32).reshape(n, 4) + 200},
    "packed": lambda n: np.arange(2 * n).reshape(n, 2) + 300,
    "note": lambda n: [f"new{k}" for k in range(n)],
}


@pytest.mark.parametrize("name", VALUES)
def test_random_steps_get_the_values_that_are_given_last_and_nothing_else_changes(buffer, name):
    rng = np.random.default_rng(1)
    expected = everything(buffer)
    for _ in range(10):
        serials = rng.integers(0, RING, 40)
        indices = np.stack([serials, rng.integers(0, LENGTH - serials)], axis=1)
        values = VALUES[name](len(indices))
        assert buffer.write(indices, **{name: values}) == 0
        column = values["z"] if name == "latent" else values
        for k, (serial, t) in enumerate(indices.tolist()):
            target = expected[serial]["latent"]["z"] if name == "latent" else expected[serial][name]
            target[t] = column[k]
    assert_same(everything(buffer), expected)
    buffer.close()
    assert verify(buffer.folder) == []
    assert_same(everything(ReplayBuffer.from_folder(buffer.folder)), expected)


def test_lists_get_other_members(buffer):
    assert buffer.write([[0, 3], [0, 0]], members=[[7, 8, 9, 10], []]) == 0
    assert buffer.episode(0)["_lens_members"].tolist()[:5] == [0, 1, 2, 4, 1]
    assert buffer.episode(0)["members"][3].tolist()[:4] == [7, 8, 9, 10]
    assert verify(buffer.folder) == []


WINDOWS = {
    "pad": Window(5, stride=2, pad_before=2, return_steps=True),
    "in front": Window(9, pad_in_front=True, return_steps=True),
    "shift": Window(10, boundary="shift", return_steps=True),
    "run on": Window(20, boundary="continue", return_steps=True),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("folders", [1, 2])
def test_the_steps_of_windows_get_their_values(buffer, tmp_path, name, folders):
    source = buffer
    if folders == 2:
        with make(tmp_path / "other") as other:
            for serial in range(3):
                other.store_episode(**episode(serial))
        source = ConcatBuffer([buffer, other])
    batch = source.sample(32, view=WINDOWS[name], seed=1)
    steps, mask = batch["_steps"], batch["_mask"].bool()
    assert steps.shape == (32, WINDOWS[name].length, 1 + folders) and mask.any()
    assert (steps[~mask] == -1).all() and (steps[mask] >= 0).all()
    assert (batch["x"][..., 1] == steps[..., -1])[mask].all()
    assert (batch["x"][..., 0] == steps[..., -1] + steps[..., -2])[mask].all()
    if folders == 2:
        assert {*steps[mask][:, 0].tolist()} == {0, 1}
        return
    values = torch.arange(steps[..., 0].numel() * 4, dtype=torch.float32).reshape(*steps.shape[:2], 4) + 1
    expected = everything(buffer)
    assert buffer.write(steps, latent={"z": values}) == 0
    for k, j in zip(*np.nonzero(mask.numpy()), strict=True):
        serial, t = steps[k, j].tolist()
        expected[serial]["latent"]["z"][t] = values[k, j].numpy()
    assert_same(everything(buffer), expected)


def test_a_window_that_stops_at_an_end_in_the_middle_names_no_step_behind_it(tmp_path):
    with ReplayBuffer(tmp_path / "ends", 2, 10, {"n": "int", "terminated": "bool"}) as buffer:
        buffer.store_episode(n=np.arange(10), terminated=np.arange(10) == 4)
        batch = buffer.sample(64, view=Window(4, return_steps=True), seed=1)
        t = batch["_steps"][..., 1]
        assert (t == torch.where(batch["_mask"].bool(), batch["n"], -1)).all()
        assert (t[batch["_start"] == 3] == torch.tensor([3, 4, -1, -1])).all() and (batch["_start"] == 3).any()


def test_each_step_of_a_batch_may_be_named_and_padding_is_of_none(buffer):
    indices = np.array([[[0, 3], [0, 4], [-1, -1]], [[5, 0], [-1, 0], [1, 10]]])
    expected = everything(buffer)
    assert buffer.write(indices, packed=np.arange(12).reshape(2, 3, 2), x=7) == 0
    for serial, t, values in ((0, 3, [0, 1]), (0, 4, [2, 3]), (5, 0, [6, 7]), (1, 10, [10, 11])):
        expected[serial]["packed"][t], expected[serial]["x"][t] = values, 7
    assert_same(everything(buffer), expected)


def test_what_is_gone_is_counted(buffer):
    batch = buffer.sample(64, timestep_level=True, return_indices=True, seed=2)
    gone = int((batch["_indices"][:, 0] < 2).sum() + (batch["_indices"][:, 0] == 3).sum())
    buffer.store_episode(**episode(RING))
    buffer.store_episode(**episode(RING + 1))
    buffer.delete(1)
    assert gone and buffer.write(batch["_indices"], latent={"z": np.ones((64, 4))}) == gone
    assert buffer.write(np.empty((0, 2), int), latent={"z": np.ones((0, 4))}) == 0
    assert verify(buffer.folder) == []


def test_steps_that_a_capacity_forgot_are_gone(tmp_path):
    with make(tmp_path / "ring", capacity=20, publish="step") as buffer:
        for serial in range(3):
            buffer.store_episode(**episode(serial))
        first = buffer.sample(512, timestep_level=True, return_indices=True)["_indices"]
        start = int(first[first[:, 0] == 1][:, 1].min())
        assert start > 1
        assert buffer.write([[1, start - 1], [1, start], [0, 0]], x=np.ones((3, 3))) == 2
    assert verify(tmp_path / "ring") == []


def test_whole_episodes_are_excluded_as_far_as_a_capacity_has_left_them(tmp_path):
    with make(tmp_path / "ring", capacity=20, publish="step") as buffer:
        for serial in range(3):
            buffer.store_episode(**episode(serial))
        assert buffer.serials.tolist() == [2] and buffer.num_steps == 20
        assert buffer.set_valid([1, 2, 0], [False, True, False]) == 1
        batch = buffer.sample(64, timestep_level=True, return_indices=True)
        assert {*batch["_indices"][:, 0].tolist()} == {2}


@pytest.mark.parametrize("ending", ["end", "close", "crash"])
def test_steps_of_an_open_episode_are_written_to_while_it_goes_on(tmp_path, ending):
    written, told = make(tmp_path / "written", publish="step"), make(tmp_path / "told", publish="step")
    rows, rng = steps(0, range(LENGTH)), np.random.default_rng(3)
    openings = [buffer.begin_episode() for buffer in (written, told)]
    for t in range(LENGTH):
        step = {name: column[t] if name != "latent" else {"z": column["z"][t]} for name, column in rows.items()}
        openings[0].store(**step)
        some = rng.integers(0, t + 1, 3)
        values = {"latent": {"z": rng.random((3, 4))}, "packed": rng.integers(0, 99, (3, 2)), "x": rng.random((3, 3))}
        assert written.write(np.stack([some * 0, some], axis=1), **values) == 0
        for k, at in enumerate(some.tolist()):
            rows["latent"]["z"][at] = values["latent"]["z"][k]
            rows["packed"][at], rows["x"][at] = values["packed"][k], values["x"][k]
        seen = written.sample(64, timestep_level=True, return_indices=True)
        np.testing.assert_array_equal(seen["packed"], rows["packed"][seen["_indices"][:, 1]])
        np.testing.assert_array_equal(seen["latent"]["z"], rows["latent"]["z"][seen["_indices"][:, 1]])
        if t == 5:
            written.flush()
    for t in range(LENGTH):
        openings[1].store(
            **{name: column[t] if name != "latent" else {"z": column["z"][t]} for name, column in rows.items()}
        )
    for opened, buffer in zip(openings, (written, told), strict=True):
        if ending == "end":
            opened.final(x=[1, 2, 3])
            opened.publish()
        buffer.flush() if ending == "crash" else buffer.close()
    folders = [tmp_path / "written", tmp_path / "told"]
    if ending == "crash":  # the records that stand, each opened by another writer
        import shutil

        folders = [shutil.copytree(folder, folder.with_name(f"{folder.name}-copy")) for folder in folders]
    assert_same(*[everything(ReplayBuffer.from_folder(folder, verify="always")) for folder in folders])
    assert [verify(folder) for folder in folders] == [[], []]


@pytest.mark.parametrize("name", ["x", "packed"])
def test_the_record_of_an_open_episode_vouches_for_the_same_steps_as_before(tmp_path, name):
    with make(tmp_path / "open", publish="step") as buffer:
        opened = buffer.begin_episode()
        rows = steps(0, range(4))
        for t in range(4):
            opened.store(**{key: {"z": each["z"][t]} if key == "latent" else each[t] for key, each in rows.items()})
            if t == 1:
                buffer.flush()
        values = VALUES[name](2)
        assert buffer.write([[0, 0], [0, 3]], **{name: values}) == 0
        rows[name][[0, 3]] = values
        assert verify(buffer.folder) == []
        reader = ReplayBuffer.from_folder(buffer.folder, read_only=True, verify="always")
        assert reader.episode(0)[name].tolist() == rows[name].tolist()


def test_how_an_episode_ends_may_be_changed_beside_an_open_one_and_not_in_it(tmp_path):
    with make(tmp_path / "open", publish="step") as buffer:
        buffer.store_episode(**episode(0))
        opened = buffer.begin_episode()
        rows = steps(1, [0])
        opened.store(**{key: {"z": each["z"][0]} if key == "latent" else each[0] for key, each in rows.items()})
        with pytest.raises(EpisodeStateError, match="is open, and its end writes 'done'"):
            buffer.write([[0, 11], [1, 0]], done=True)
        assert not buffer.episode(0)["done"].any()
        assert buffer.write([[0, 11]], done=True) == 0
        assert buffer.episode(0)["done"].tolist() == [False] * 11 + [True]
    assert verify(tmp_path / "open") == []


def test_whole_episodes_are_left_out_by_a_flag_each_and_those_that_are_gone_are_counted(tmp_path):
    with make(tmp_path / "ring") as buffer:
        for serial in range(RING):
            buffer.store_episode(**episode(serial, 3 + serial))
        buffer.delete(1)
        assert buffer.set_valid([1, 0, 4, 2], [True, False, True, False]) == 1
        assert buffer.set_valid([[1, 0], [4, 2]], False) == 1
        flags = {serial: buffer.episode(i)["valid"].tolist() for i, serial in enumerate(buffer.serials.tolist())}
    assert flags == {0: [False] * 3, 2: [False] * 5, 3: [True] * 6, 4: [True, True, False, *[True] * 4], 5: [True] * 8}


def test_a_redo_file_is_of_so_many_episodes_and_runs_that_its_head_stays_small(tmp_path, monkeypatch):
    without_barriers(monkeypatch)
    heads = {}

    def look():
        if (folder / ".redo").exists() and len(data := (folder / ".redo").read_bytes()) > REDO_START.size:
            size = REDO_START.unpack(data[: REDO_START.size])[1]
            heads[data] = json.loads(data[REDO_START.size :][:size])

    folder = tmp_path / "many"
    with ReplayBuffer(folder, 100, 200, {"x": "int"}) as buffer:
        for _ in range(100):
            buffer.store_episode(x=np.arange(200))
        indices = np.stack(np.meshgrid(np.arange(100), np.arange(0, 200, 2), indexing="ij"), axis=-1)
        with system(before=look):
            assert buffer.write(indices, x=-1) == 0
        assert all((buffer.episode(i)["x"][::2] == -1).all() for i in range(100))
    assert sorted(len(head) for head in heads.values()) == [36, 64]
    assert {len(rewrite["pieces"]) for head in heads.values() for rewrite in head} == {2}  # and the checksums


def test_environments_record_on_while_what_was_drawn_is_written_to(tmp_path):
    fields = {"x": Field("float32", (2,), final=True), "z": ("float32", (4,), 0), "truncated": ("bool", (), False)}
    with ReplayBuffer(tmp_path / "ring", 64, 50, fields, circular=True, publish="step", spare_slots=8) as buffer:
        rng, told = np.random.default_rng(4), {}
        for t in range(300):
            ended = rng.random(8) < 0.05
            x = np.full((8, 2), t, np.float32)
            buffer.add(x=x, z=np.zeros((8, 4), np.float32), truncated=ended, next_x=x + 1)
            batch = buffer.sample(16, timestep_level=True, return_indices=True)
            values = rng.random((16, 4)).astype(np.float32)
            assert buffer.write(batch["_indices"], z=values) == 0
            told |= {tuple(index): value for index, value in zip(batch["_indices"].tolist(), values, strict=True)}
        for i, serial in enumerate(buffer.serials.tolist()):
            z = buffer.episode(i)["z"]
            for t in range(len(z)):
                np.testing.assert_array_equal(z[t], told.get((serial, t), np.zeros(4)))
    assert verify(tmp_path / "ring") == []


def test_a_thread_that_draws_beside_it_sees_all_steps_of_an_episode_as_before_or_all_as_after(tmp_path):
    fields = {"a": ("int", (512,), 0), "b": ("int", (512,), 0)}
    with ReplayBuffer(tmp_path / "ring", 4, 16, fields) as buffer:
        for _ in range(4):
            buffer.store_episode(a=np.zeros((16, 512), int), b=np.zeros((16, 512), int))
        mixed, over, seen = [], threading.Event(), []

        def draw():
            while not over.is_set():
                batch = buffer.sample(8, view=Window(16, boundary="shift"))
                values = torch.cat([batch["a"].reshape(8, -1), batch["b"].reshape(8, -1)], dim=1)
                mixed.append(bool((values != values[:, :1]).any()))
                seen.append(int(values.max()))

        thread = threading.Thread(target=draw)
        thread.start()
        indices = np.stack(np.meshgrid(np.arange(4), np.arange(16), indexing="ij"), axis=-1)
        number = 0
        while len(seen) < 200 and thread.is_alive():
            number += 1
            assert buffer.write(indices, a=number, b=number) == 0
        over.set()
        thread.join()
    assert len(seen) >= 200 and not any(mixed) and max(seen) > 1


@pytest.mark.parametrize(
    ("indices", "data", "text"),
    [
        ([[0, 12]], {"x": 1}, "timestep 12 of episode 0, which has 12"),
        ([[0, -1]], {"x": 1}, "timestep -1 of episode 0"),
        ([0, 1], {"x": 1}, r"shape \(2,\), expected \(n, 2\) of \(serial, timestep\)"),
        ([[0.5, 1]], {"x": 1}, "indices of float64"),
        ([[0, 1]], {"y": 1}, "write: got 'y'"),
        ([[0, 1]], {"x": np.ones((2, 3))}, r"'x' of shape \(2, 3\), expected \(1, 3\)"),
        ([[0, 1]], {"x": np.ones((1, 4))}, r"'x', write: got shape \(1, 4\)"),
        ([[0, 1]], {"packed": [[1.5, 0]]}, "not a whole number"),
        ([[0, 1]], {}, "no data was given"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(buffer, indices, data, text):
    before = everything(buffer)
    with pytest.raises(SchemaError, match=text):
        buffer.write(indices, **data)
    assert_same(everything(buffer), before)


def test_who_only_reads_cannot_write(buffer):
    with pytest.raises(ReadOnlyError, match="read_only=True"):
        ReplayBuffer.from_folder(buffer.folder, read_only=True).write([[0, 0]], x=1)
    with pytest.raises(ReadOnlyError, match="folder 0 is only read here"):
        ConcatBuffer([buffer.folder]).write([[0, 0, 0]], x=1)


def test_several_buffers_are_written_to_by_the_numbers_of_their_folders(buffer, tmp_path):
    with make(tmp_path / "other") as other:
        for serial in range(3):
            other.store_episode(**episode(serial))
        both = ConcatBuffer([buffer, other])
        expected = [everything(buffer), everything(other)]
        batch = both.sample(64, timestep_level=True, return_indices=True, seed=3)
        values = np.arange(128).reshape(64, 2)
        buffer.delete(1)
        del expected[0][1]
        gone = 0
        for k, (folder, serial, t) in enumerate(batch["_indices"].tolist()):
            position = serial - (serial > 1) if folder == 0 else serial
            gone += (folder, serial) == (0, 1)
            if (folder, serial) != (0, 1):
                expected[folder][position]["packed"][t] = values[k]
        assert gone and both.write(batch["_indices"], packed=values) == gone
        assert_same(everything(buffer), expected[0])
        assert_same(everything(other), expected[1])
        mixed = ConcatBuffer([buffer, tmp_path / "other"])
        with pytest.raises(ReadOnlyError, match="folder 1 is only read here"):
            mixed.write([[0, 0, 0], [1, 0, 0]], packed=[[1, 1], [1, 1]])
        assert_same(everything(buffer), expected[0])
        with pytest.raises(SchemaError, match=r"expected \(n, 3\) of \(folder, serial, timestep\)"):
            both.write([[0, 0]], packed=[[1, 1]])
    alone = ConcatBuffer([buffer])
    indices = alone.batch(timestep_level=True, return_indices=True)["_indices"]
    alone.write(indices, packed=np.arange(2 * len(indices)).reshape(-1, 2))
    written = np.concatenate([each["packed"] for each in everything(buffer)])
    assert written.ravel().tolist() == list(range(2 * len(indices)))


def test_many_scattered_steps_are_written_by_few_pieces(tmp_path, monkeypatch):
    without_barriers(monkeypatch)
    with ReplayBuffer(tmp_path / "long", 2, 200_000, {"x": "int"}) as buffer:
        buffer.store_episode(x=np.arange(200_000))
        t = np.arange(0, 200_000, 2)
        assert buffer.write(np.stack([t * 0, t], axis=1), x=-t) == 0
        x = buffer.episode(0)["x"]
        assert (x[::2] == -t).all() and (x[1::2] == t + 1).all()
    assert verify(tmp_path / "long") == []
