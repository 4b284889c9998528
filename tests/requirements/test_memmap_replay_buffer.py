"""Moving here from memmap-replay-buffer: its README, its options, its errors; and its measured defects, absent here."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from fault_injection import in_child, listing, shown, system

import memmap_buffer
from memmap_buffer import MemmapBufferError, ReplayBuffer

FIELDS = {"state": ("float", (2,), 0.0), "action": ("int", 2), "reward": "float", "done": "bool", "pixel": "uint8"}
META = {"task_id": "int", "score": "float"}
LENGTHS = (3, 5, 2)


def step(episode, t):
    """Values that tell where they belong."""
    return {
        "state": torch.tensor([episode, t]).float(),
        "action": np.array([episode, 10 * t]),
        "reward": episode + t / 8,
        "done": torch.tensor(t == LENGTHS[episode] - 1),
        "pixel": np.array(100 * episode + t, np.uint8),
    }


def store(buffer, episode, length):
    for t in range(length):
        buffer.store(**step(episode, t))


def record(buffer):
    for episode, length in enumerate(LENGTHS):
        with buffer.one_episode(task_id=episode % 2) as late:
            store(buffer, episode, length)
            late["score"] = episode / 4
    return buffer


def ours(folder, fields=FIELDS, meta_fields=META, **options):
    return ReplayBuffer(folder, max_episodes=4, max_timesteps=6, fields=fields, meta_fields=meta_fields, **options)


@pytest.fixture(scope="module")
def peer():
    """The package from PyPI, in its release 0.1.4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip("memmap_replay_buffer")

    def make(folder, fields=FIELDS, meta_fields=META, **options):
        sizes = {"max_episodes": 4, "max_timesteps": 6, "flush_every_store_step": 0}
        return package.ReplayBuffer(folder, fields=fields, meta_fields=meta_fields, **sizes, **options)

    return make


@pytest.fixture(scope="module")
def pair(tmp_path_factory, peer):
    """The same three episodes here and there, to be read only."""
    folder = tmp_path_factory.mktemp("pair")
    with record(ours(folder / "ours")) as here:
        yield here, record(peer(folder / "theirs"))


def assert_alike(here, there):
    """Equal keys, shapes and values; only the width of integers may differ."""
    if isinstance(there, tuple):
        assert here._fields == there._fields
        here, there = here._asdict(), there._asdict()
    assert set(here) == set(there)
    for key, value in there.items():
        assert here[key].dtype.is_floating_point == value.dtype.is_floating_point
        assert torch.equal(here[key].to(value.dtype), value), key  # shapes too


# The README of 0.1.4


def test_the_readme_runs_with_only_the_import_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = dict(max_episodes=1000, max_timesteps=500, circular=True, overwrite=True)
    fields = dict(state=("float", (3, 16, 16), 0.0), action=("int", 2), reward="float")
    buffer = ReplayBuffer("./replay_data", fields=fields, meta_fields=dict(task_id="int"), **sizes)
    for _ in range(4):
        with buffer.one_episode(task_id=1):
            for _ in range(100):
                buffer.store(state=torch.randn(3, 16, 16), action=torch.randint(0, 4, (2,)).numpy(), reward=1.0)

    again = ReplayBuffer.from_folder("./replay_data")
    assert again.num_episodes == 4

    names = ("state", "action", "reward", "task_id", "_mask", "_lens")
    trajectories = buffer.dataloader(batch_size=2, return_mask=True, to_named_tuple=names)
    for state, action, reward, task_id, mask, lens in trajectories:
        assert state.shape == (2, 100, 3, 16, 16) and action.shape == (2, 100, 2) and reward.shape == (2, 100)
        assert task_id.shape == (2,) and lens.shape == (2,) and mask.shape == (2, 100)

    names = ("state", "action", "task_id")
    options = dict(filter_meta=dict(task_id=1), timestep_level=True, drop_last=True)
    timesteps = buffer.dataloader(batch_size=8, to_named_tuple=names, **options)
    for state, action, task_id in timesteps:
        assert state.shape == (8, 3, 16, 16) and action.shape == (8, 2) and task_id.shape == (8,)

    names = ("state", "next_state", "action_chunk", "rewards", "n_step_lens")
    options = dict(current_fields=("state",), next_fields=("state",), sequence_fields=("action", "reward"))
    renamed = {"seq_action": "action_chunk", "seq_reward": "rewards"}
    transitions = buffer.dataloader(batch_size=4, n_steps=5, to_named_tuple=names, fieldname_map=renamed, **options)
    for state, next_state, action_chunk, rewards, n_step_lens in transitions:
        assert state.shape == next_state.shape == (4, 3, 16, 16)
        assert action_chunk.shape == (4, 5, 2) and rewards.shape == (4, 5) and n_step_lens.shape == (4,)
    assert [len(list(loader)) for loader in (trajectories, timesteps, transitions)] == [2, 50, 99]


# The same calls, here and there


LOADERS = [
    {},
    {"return_mask": True},
    {"return_indices": True},
    {"filter_meta": {"task_id": 0}, "return_mask": True},
    {"fieldname_map": {"state": "observation", "task_id": "task"}, "return_mask": True},
    {"to_named_tuple": ("reward", "_lens", "_mask", "task_id"), "return_mask": True},
    {"dataset_kwargs": {"include_metadata": False}},
    {"timestep_level": True},
    {"timestep_level": True, "return_indices": True, "fields": ("pixel",)},
    {"timestep_level": True, "filter_fields": {"done": True, "pixel": 104}},
    {"timestep_level": True, "fieldname_map": {"pixel": "image"}, "dataset_kwargs": {"include_metadata": False}},
    {"n_steps": 1},
    {"n_steps": 3, "sequence_fields": ("action", "reward"), "return_indices": True},
    {"n_steps": 9, "current_fields": ("state",), "next_fields": ("state", "done"), "sequence_fields": ("pixel",)},
    {"n_steps": 2, "filter_meta": {"task_id": 0}, "filter_fields": {"pixel": 0}},
    {"n_steps": 2, "sequence_fields": ("reward",), "fieldname_map": {"seq_reward": "rewards", "next_state": "after"}},
    {"n_steps": 2, "to_named_tuple": ("next_reward", "n_step_lens", "score"), "drop_last": True},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", LOADERS, ids=str)
def test_every_loader_gives_the_batches_of_the_peer(pair, options):
    here, there = (list(buffer.dataloader(batch_size=2, **options)) for buffer in pair)
    assert len(here) == len(there) > 0
    for batch, expected in zip(here, there, strict=True):
        assert_alike(batch, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"timestep_level": True}, {"n_steps": 2}], ids=str)
def test_datasets_and_loaders_over_them_give_the_items_of_the_peer(pair, options):
    here, there = (buffer.dataset(**options) for buffer in pair)
    assert len(here) == len(there)
    for i in range(len(there)):
        assert_alike(here[i], there[i])
    loaders = (buffer.dataloader(batch_size=1, dataset=made) for buffer, made in zip(pair, (here, there), strict=True))
    for batch, expected in zip(*loaders, strict=True):
        assert_alike(batch, expected)


@pytest.mark.filterwarnings("ignore")
def test_everything_at_once_is_what_the_peer_gives(pair):
    here, there = pair
    assert (here.num_episodes, len(here)) == (there.num_episodes, len(there)) == (3, 3)
    assert here.episode_lens.tolist() == there.episode_lens[:3].tolist()
    for names in ({}, {"fields": ("state",)}, {"meta_fields": ("score",)}, {"fields": ("done",), "meta_fields": ()}):
        assert_alike(here.get_all_data(**names, device="cpu"), there.get_all_data(**names, device="cpu"))


WRITES = {
    "store_episode": lambda b: b.store_episode(
        state=np.ones((2, 2)), action=[[1, 2], [3, 4]], reward=torch.ones(2), done=[False, True], pixel=[7, 8], score=2
    ),
    "batched_episode": lambda b: batched(b),
    "update of all": lambda b: b.update(reward=torch.arange(6.0).reshape(3, 2), task_id=torch.tensor([7, 8, 9])),
    "update of some": lambda b: b.update([0, 2], pixel=np.array([[1, 3], [2, 4]]), score=np.array([0.5, 1.5])),
    "update of one": lambda b: b.update(1, state=torch.full((4, 2), 9.0), task_id=5),
    "update of a slice": lambda b: b.update(slice(1, 3), action=np.zeros((2, 2, 2), int)),
    "store_datapoint": lambda b: b.store_datapoint(1, 4, "action", torch.tensor([5, 6])),
    "store_meta_datapoint": lambda b: b.store_meta_datapoint(2, "score", 0.75),
    "clear and reset_": lambda b: (b.clear(), record(b), b.reset_(), record(b)),
}


def batched(buffer):
    with buffer.batched_episode(1, task_id=np.array([3])):
        for t in range(2):
            buffer.store_batch(**{name: np.asarray(value)[None] for name, value in step(1, t).items()})
        buffer.store_meta_batch(score=torch.tensor([0.5]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_stores_what_it_stores_in_the_peer(tmp_path, peer, name):
    made = record(ours(tmp_path / "ours")), record(peer(tmp_path / "theirs"))
    for buffer in made:
        WRITES[name](buffer)
    assert_alike(*(buffer.get_all_data() for buffer in made))


@pytest.mark.filterwarnings("ignore")
def test_a_ring_keeps_the_episodes_that_it_keeps_in_the_peer(tmp_path, peer):
    kept = []
    for made in (ours(tmp_path / "ours", circular=True), peer(tmp_path / "theirs", circular=True)):
        data = record(record(made)).get_all_data(fields=("pixel",), meta_fields=("score",))
        kept.append(sorted(zip(data["pixel"][:, 1].tolist(), data["score"].tolist(), strict=True)))
    assert kept[0] == kept[1]


# Options of 0.2.3


def test_the_options_that_came_with_0_2_work(tmp_path):
    here = record(ours(tmp_path))
    whole = next(iter(here.dataloader(batch_size=3, dataset_kwargs={"slice_by_episode_len": False})))
    assert whole["reward"].shape == (3, 6) and whole["_lens"].tolist() == [3, 5, 2]
    assert "_lens" not in here.dataset(return_episode_lens=False)[0]
    assert len(here.dataset(min_episode_len=3)) == 2
    crops = list(here.dataloader(batch_size=3, window_length=4, return_indices=True, shuffle=True, seed=1))
    assert len(crops) == 1 and crops[0]["state"].shape == (3, 4, 2)
    for i, serial in enumerate(crops[0]["_index"].tolist()):
        start, length = int(crops[0]["_start"][i]), int(crops[0]["_lens"][i])
        expected = [[serial, t] for t in range(start, start + length)] + [[0, 0]] * (4 - length)
        assert crops[0]["state"][i].tolist() == expected and length == min(4, LENGTHS[serial])
        assert crops[0]["_reaches_episode_end"][i] == (start + length == LENGTHS[serial])


ERRORS = {
    "empty": (lambda b: (b.clear(), b.dataset()), "empty"),
    "two views": (lambda b: b.dataset(n_steps=2, timestep_level=True), "exclude each other"),
    "fields and names": (lambda b: b.dataloader(batch_size=1, fields=("state",), to_named_tuple=("state",)), "exclude"),
    "mask of steps": (lambda b: b.dataloader(batch_size=1, timestep_level=True, return_mask=True), "return_mask"),
    "filter of episodes": (lambda b: b.dataset(filter_fields={"done": True}), "filter_fields"),
    "filter of vectors": (lambda b: b.dataset(timestep_level=True, filter_fields={"state": 1}), "shape"),
    "no lens": (lambda b: b.dataset(slice_by_episode_len=False, return_episode_lens=False), "return_episode_lens"),
    "no such field": (lambda b: b.dataset(fields=("stat",)), "did you mean 'state'"),
    "no such name": (lambda b: next(iter(b.dataloader(batch_size=1, to_named_tuple=("states",)))), "'states'"),
    "no data": (lambda b: b.update(), "no data"),
    "episode out of range": (lambda b: b.store_meta_datapoint(99, "score", 1.0), "episode 99"),
    "step out of range": (lambda b: b.store_datapoint(0, 99, "reward", 1.0), "timestep 99"),
    "wrong shape": (lambda b: b.store_datapoint(0, 0, "state", np.zeros(3)), r"\(3,\)"),
    "too long": (lambda b: b.store_episode(**{k: [v] * 7 for k, v in step(0, 0).items()}), "max_timesteps"),
    "lengths": (lambda b: b.store_episode(reward=[1], done=[True, False], action=[[1, 2]], pixel=[1]), "lengths"),
    "full": (lambda b: [record(b) for _ in range(2)], "is full"),
    "full batch": (lambda b: b.batched_episode(2).__enter__(), "is full"),
    "same names": (lambda b: ours(b.folder / "a", meta_fields={"reward": "int"}), "'reward'"),
    "another schema": (lambda b: ours(b.folder, meta_fields={}), "different configuration"),
    "no folder": (lambda b: ReplayBuffer.from_folder(b.folder / "a"), "no such folder"),
    "read only": (lambda b: ReplayBuffer.from_folder(b.folder, read_only=True).clear(), "read_only"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_the_peer_refuses_by_a_value_error_is_one_here(tmp_path, name):
    call, text = ERRORS[name]
    with record(ours(tmp_path)) as buffer:
        with pytest.raises(ValueError, match=text) as caught:
            call(buffer)
        assert isinstance(caught.value, MemmapBufferError)


# Its measured defects


def test_defect_A_an_aborted_episode_is_neither_counted_nor_served(tmp_path):
    with record(ours(tmp_path)) as buffer:
        before = shown(buffer)
        with pytest.raises(RuntimeError, match="boom"), buffer.one_episode():
            store(buffer, 0, 3)
            raise RuntimeError("boom")
        assert len(buffer) == 3 and shown(buffer) == before
        assert len(buffer.dataset(timestep_level=True)) == sum(LENGTHS) == buffer.num_steps


def test_defect_B_meta_of_an_aborted_episode_never_reaches_the_next(tmp_path):
    with ours(tmp_path) as buffer:
        with pytest.raises(RuntimeError, match="boom"), buffer.one_episode(task_id=66) as episode:
            store(buffer, 0, 1)
            episode["score"] = 6.0
            raise RuntimeError("boom")
        with buffer.one_episode():
            store(buffer, 0, 1)
        assert buffer[0]["task_id"] == 0 and buffer[0]["score"] == 0


def test_defect_C_an_interrupted_episode_is_not_continued_by_the_next_program(tmp_path):
    def first_program(tell):
        buffer = ours(tmp_path)
        with pytest.raises(KeyboardInterrupt, match="Ctrl"), buffer.one_episode(task_id=1):
            store(buffer, 1, 3)
            raise KeyboardInterrupt("Ctrl+C")

    assert in_child(first_program).status == 0
    with ReplayBuffer.from_folder(tmp_path) as buffer:
        with buffer.one_episode(task_id=0):
            store(buffer, 2, 2)
        assert buffer.episode_lens.tolist() == [2]
        assert buffer.episode(0)["state"].tolist() == [[2, 0], [2, 1]]


def test_defect_D_opening_an_existing_folder_keeps_what_is_in_it(tmp_path):
    record(ours(tmp_path)).close()
    before = listing(tmp_path)
    with ours(tmp_path) as again:
        assert again.num_episodes == 3 and listing(tmp_path) == before
        with again.one_episode():
            store(again, 0, 1)
        assert again.num_episodes == 4


def test_defect_E_every_reward_is_reached_by_n_step_items(tmp_path):
    """A reward of 1 at the end alone, of an episode that ended there and of one whose last observation is known."""
    fields = {"x": memmap_buffer.Field("float", (), final=True), "reward": "float", "terminated": ("bool", (), False)}
    for ending in ("terminated", "final"):
        with ReplayBuffer(tmp_path / ending, 2, 5, fields) as buffer:
            with buffer.one_episode() as episode:
                for t in range(4):
                    buffer.store(x=t, reward=float(t == 3), terminated=t == 3 and ending == "terminated")
                if ending == "final":
                    episode.final(x=4)
            for n in (1, 3):
                items = next(iter(buffer.dataloader(batch_size=9, n_steps=n, sequence_fields=("reward",))))
                assert items["reward"].tolist() == items["seq_reward"][:, 0].tolist() == [0, 0, 0, 1]
                assert items["seq_reward"].sum() == n


def test_defect_F_an_integer_comes_back_equal_or_is_refused(tmp_path):
    with ReplayBuffer(tmp_path, 2, 2, {"wide": "int", "narrow": ("int32", (), 0)}) as buffer, buffer.one_episode():
        buffer.store(wide=2**40 + 3)
        with pytest.raises(ValueError, match=r"'narrow'.*1099511627779.*out of range"):
            buffer.store(wide=0, narrow=2**40 + 3)
    assert buffer[0]["wide"].tolist() == [2**40 + 3] and buffer[0]["wide"].dtype == torch.int64


def test_defect_G_a_reader_sees_the_old_or_the_new_episode_at_every_moment_of_an_overwrite(tmp_path):
    with ReplayBuffer(tmp_path, 2, 6, {"x": "int"}, circular=True) as buffer:
        older, seen = ReplayBuffer.from_folder(tmp_path, read_only=True), []

        def look():
            for reader in (older, ReplayBuffer.from_folder(tmp_path, read_only=True)):
                seen.append([episode["x"] for _, episode in shown(reader)])
                batch = reader.sample(16, timestep_level=True)["x"] if seen[-1] else torch.zeros(0)
                assert set(batch.tolist()) <= {10, 20, 30, 40, 50}

        for i, length in enumerate((6, 3, 1, 4, 2)):
            before = [x["x"] for _, x in shown(buffer)]
            seen.clear()
            with system(before=look):
                buffer.store_episode(x=np.full(length, 10 * (i + 1)))
            after = [x["x"] for _, x in shown(buffer)]
            assert len(seen) > 8 and all(state in (before, after) for state in seen)


def test_defect_H_storing_a_step_touches_no_file(tmp_path):
    """So its cost is that of an assignment; and an episode costs one write a field, however long it is."""
    writes = []
    for length in (1, 90):
        with ReplayBuffer(tmp_path / str(length), 3, 100, FIELDS, META) as buffer:
            buffer.begin_episode().abort()
            with system() as seen, buffer.one_episode():
                store(buffer, 0, length)
                assert seen.done == []
            writes.append([name for name, _ in seen.done])
    assert writes[0] == writes[1] == ["pwrite"] * len(writes[0]) and len(writes[0]) < 5 + 2 * (len(FIELDS) + len(META))


def test_defect_I_what_a_worker_gets_does_not_grow_with_the_timesteps(tmp_path):
    sizes = {}
    for length in (2, 2000):
        with ReplayBuffer(tmp_path / f"{length:04}", 3, 2000, {"x": ("uint8", 50)}) as buffer:
            for _ in range(3):
                buffer.store_episode(x=np.zeros((length, 50), np.uint8))
            for options in ({"timestep_level": True}, {"n_steps": 2}, {}):
                sizes.setdefault(str(options), []).append(len(pickle.dumps(buffer.dataset(**options))))
    for small, large in sizes.values():
        assert abs(large - small) < 16 and large < 4096


def test_defect_J_a_short_episode_writes_its_own_steps_and_no_defaults_for_the_rest(tmp_path):
    fields = {"image": ("uint8", (64, 64, 3), 7), "reward": ("float", (), 1.0)}
    with ReplayBuffer(tmp_path, 10, 1000, fields) as buffer:
        buffer.begin_episode().abort()
        with system() as seen, buffer.one_episode():
            buffer.store(reward=2)
            buffer.store()
        assert 2 * (64 * 64 * 3 + 4) <= seen.written < 2 * (64 * 64 * 3 + 4) + 1024
        assert buffer.episode(0)["image"].shape == (2, 64, 64, 3) and (buffer.episode(0)["image"] == 7).all()


def test_defect_K_short_episodes_take_the_space_of_their_steps_and_not_of_the_longest_allowed(tmp_path):
    with ReplayBuffer(tmp_path, 1000, 1000, {"image": ("uint8", (32, 32)), "reward": "float"}) as buffer:
        for i in range(3):
            buffer.store_episode(image=np.full((i + 1, 32, 32), i), reward=np.ones(i + 1))
        files = [path.stat() for path in tmp_path.rglob("*.npy")]
        assert sum(file.st_size for file in files) > 10**9 > 2**22 > sum(512 * file.st_blocks for file in files)
        assert buffer.get_all_data()["image"].shape == (3, 3, 32, 32)
        assert next(iter(buffer.dataloader(batch_size=2)))["image"].shape == (2, 2, 32, 32)
