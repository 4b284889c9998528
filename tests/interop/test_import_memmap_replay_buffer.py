"""Folders of memmap-replay-buffer, written by the package itself, come in whole, in order, and without unpickling."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_same

from memmap_buffer import CorruptBufferError, NotABufferError, ReplayBuffer, SchemaError
from memmap_buffer.interop.memmap_replay_buffer import export_memmap_replay_buffer, import_memmap_replay_buffer

FIELDS = {"state": ("float", (2,), 0.5), "action": ("int", 2), "reward": "float", "done": "bool", "pixel": "uint8"}
META = {"task": "int", "score": ("float", (), 2.5)}
LENGTHS = (3, 5, 2, 4)


@pytest.fixture(scope="module")
def peer():
    """The package from PyPI; it warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import memmap_replay_buffer
        import memmap_replay_buffer.replay_buffer_h5py
    return memmap_replay_buffer


KINDS = ("memmap", "hdf5")
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(peer, folder, kind, *, max_episodes=6, circular=False, open_steps=0):
    """A folder of four episodes whose values tell where they belong, and perhaps one that is still open."""
    cls = peer.ReplayBuffer if kind == "memmap" else peer.replay_buffer_h5py.ReplayBufferH5PY
    buffer = cls(folder, max_episodes, 6, dict(FIELDS), dict(META), circular=circular)
    for episode, length in enumerate(LENGTHS):
        with buffer.one_episode(task=episode % 2) as late:
            for t in range(length):
                buffer.store(**step(episode, t))
            if episode != 2:
                late["score"] = episode / 4
    for t in range(open_steps):
        buffer.store(**step(9, t))
    buffer.flush()
    if kind == "hdf5":
        buffer.file.close()


def step(episode, t):
    reward, done = np.float32(episode + t / 8), np.bool_(t == 1)
    return {
        "state": torch.tensor([episode, t]).float(),
        "action": np.array([episode, 10 * t]),
        "reward": torch.tensor(reward),
        "done": torch.tensor(done),
        "pixel": torch.tensor(100 * (episode % 2) + t, dtype=torch.uint8),
    }


def assert_episodes(buffer, numbers, open_steps=0):
    assert len(buffer) == len(numbers)
    for i, number in enumerate(numbers):
        length = LENGTHS[number] if number < len(LENGTHS) else open_steps
        got = buffer.episode(i)
        for name in FIELDS:
            expected = np.stack([np.asarray(step(number, t)[name]) for t in range(length)])
            np.testing.assert_array_equal(got[name], expected)
    buffer.close()


@every_kind
def test_every_episode_comes_in_with_its_types_defaults_and_sizes(tmp_path, peer, kind):
    make(peer, tmp_path / "theirs", kind)
    buffer = import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b")
    dtypes = {name: field.dtype for name, field in buffer.schema.all.items()}
    own = {"state": "float32", "action": "int32", "reward": "float32", "done": "bool", "pixel": "uint8"}
    assert dtypes == own | {"task": "int32", "score": "float32"}
    assert (buffer.schema.fields["state"].default, buffer.schema.meta_fields["score"].default) == (0.5, 2.5)
    assert (buffer.max_episodes, buffer.max_timesteps, buffer.circular) == (6, 6, False)
    assert [(int(e["task"]), float(e["score"])) for e in map(buffer.episode, range(4))] == [
        (0, 0.0),
        (1, 0.25),
        (0, 2.5),
        (1, 0.75),
    ]
    assert_episodes(buffer, [0, 1, 2, 3])


@every_kind
def test_a_ring_comes_in_oldest_first(tmp_path, peer, kind):
    make(peer, tmp_path / "theirs", kind, max_episodes=3, circular=True)
    buffer = import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b")
    assert buffer.circular
    assert_episodes(buffer, [1, 2, 3])


@every_kind
@pytest.mark.parametrize("keep", [False, True])
def test_an_open_episode_comes_in_only_on_request_and_last(tmp_path, peer, kind, keep):
    make(peer, tmp_path / "theirs", kind, open_steps=2)
    buffer = import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b", keep_partial=keep, max_episodes=9)
    assert buffer.max_episodes == 9
    assert_episodes(buffer, [0, 1, 2, 3, 9] if keep else [0, 1, 2, 3], open_steps=2)


def test_the_first_versions_which_wrote_no_configuration_are_read_by_their_files(tmp_path, peer):
    make(peer, tmp_path / "theirs", "memmap")
    for path in [*(tmp_path / "theirs").glob("*.state.npy"), *(tmp_path / "theirs").glob("_*")]:
        path.unlink()
    (tmp_path / "theirs/metadata.pkl").unlink()
    assert_episodes(import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b"), [0, 1, 2, 3])


def test_arrays_that_an_older_buffer_left_in_the_folder_stay_out(tmp_path, peer):
    make(peer, tmp_path / "theirs", "memmap")
    np.save(tmp_path / "theirs/older.data.npy", np.zeros((2, 3)))
    assert_episodes(import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b"), [0, 1, 2, 3])


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_hostile_configuration_is_refused_and_not_carried_out(tmp_path, peer):
    make(peer, tmp_path / "theirs", "memmap")
    trace = tmp_path / "carried out"
    config = {"max_episodes": 6, "max_timesteps": 6, "fields": FIELDS, "meta_fields": META, "circular": Hostile(trace)}
    (tmp_path / "theirs/metadata.pkl").write_bytes(pickle.dumps(config))
    with pytest.raises(SchemaError, match=r"metadata\.pkl: .*more than hold plain values.*; move it away"):
        import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b")
    assert not trace.exists()
    assert not (tmp_path / "b").exists()


def test_arrays_of_objects_are_refused(tmp_path, peer):
    make(peer, tmp_path / "theirs", "memmap")
    np.save(tmp_path / "theirs/reward.data.npy", np.array([[Hostile(tmp_path / "x")]], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptBufferError, match=r"reward\.data\.npy: .*objects"):
        import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b")
    assert not (tmp_path / "x").exists()


def spoil(folder, what):
    if what == "cut":
        path = folder / "state.data.npy"
        path.write_bytes(path.read_bytes()[:-8])
    elif what == "shape":
        np.save(folder / "reward.data.npy", np.zeros((6, 7), np.float32))
    elif what == "length":
        lengths = np.load(folder / "episode_lens.data.meta.npy")
        np.save(folder / "episode_lens.data.meta.npy", lengths + np.int32(4))
    elif what == "list":
        (folder / "metadata.pkl").write_bytes(pickle.dumps([1]))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", r"state\.data\.npy: "),
        ("shape", r"reward: expected \(6, 6\) episodes and steps"),
        ("length", r"episode_lens lie outside 0 … 6"),
        ("list", r"metadata\.pkl: got a list, expected a dict"),
    ],
)
def test_a_spoilt_folder_is_refused_and_says_where(tmp_path, peer, what, message):
    make(peer, tmp_path / "theirs", "memmap")
    spoil(tmp_path / "theirs", what)
    with pytest.raises(CorruptBufferError, match=message):
        import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "b")


def test_what_is_no_such_folder_is_refused(tmp_path):
    with pytest.raises(NotABufferError, match="no folder of memmap-replay-buffer"):
        import_memmap_replay_buffer(tmp_path, tmp_path / "b")


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_an_export_is_opened_by_its_hdf5_class_and_comes_back(tmp_path, peer, compression):
    """S4-17: with what its HDF5 layout has no view for here: items of n steps."""
    make(peer, tmp_path / "theirs", "memmap")
    with import_memmap_replay_buffer(tmp_path / "theirs", tmp_path / "ours") as buffer:
        export_memmap_replay_buffer(buffer, tmp_path / "hdf5", max_episodes=9, compression=compression)
        wanted = buffer.sample(8, n_steps=2, seed=1)
    theirs = peer.replay_buffer_h5py.ReplayBufferH5PY.from_folder(tmp_path / "hdf5")
    assert (theirs.num_episodes, theirs.max_episodes, theirs.max_timesteps) == (4, 9, 6)
    got = theirs.get_all_data()
    for number, length in enumerate(LENGTHS):
        for t in range(length):
            for name, value in step(number, t).items():
                assert np.array_equal(np.asarray(got[name][number, t]), np.asarray(value)), name
    with theirs.one_episode(task=1):
        theirs.store(**step(9, 0))
    theirs.file.close()
    with import_memmap_replay_buffer(tmp_path / "hdf5", tmp_path / "again") as again:
        assert (again.schema.fields["state"].default, again.schema.meta_fields["score"].default) == (0.5, 2.5)
        assert again.episode_lens.tolist() == [*LENGTHS, 1]
        again.delete([4])
        assert_same(again.sample(8, n_steps=2, seed=1), wanted)


def test_what_its_layout_does_not_hold_is_refused(tmp_path):
    with ReplayBuffer(tmp_path / "a", 4, 3, {"x": "int"}) as buffer:
        buffer.store_episode(x=[2**40])
        with pytest.raises(SchemaError, match=r"field 'x': got 1099511627776 … 1099511627776, more than int32 holds"):
            export_memmap_replay_buffer(buffer, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        buffer.update(0, x=[1])
        with pytest.raises(FileExistsError, match="a"):
            export_memmap_replay_buffer(buffer, tmp_path / "a")
        with pytest.raises(SchemaError, match="max_episodes: got 1, the buffer has 2 episodes"):
            buffer.store_episode(x=[1])
            export_memmap_replay_buffer(buffer, tmp_path / "other", max_episodes=1)


@pytest.mark.parametrize("fields", [{"text": "U4"}, {"group": {"x": "float"}}, {"z": "complex64"}])
def test_fields_that_its_layout_does_not_know_are_refused(tmp_path, fields):
    buffer = ReplayBuffer(tmp_path / "a", 4, 3, fields)
    with pytest.raises(SchemaError, match="expected numbers, and no groups; export a copy without it"):
        export_memmap_replay_buffer(buffer, tmp_path / "out")
    buffer.close()
