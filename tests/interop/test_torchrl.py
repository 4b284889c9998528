"""torchrl: batches become TensorDicts over the same memory, and dumps of its own come in whole."""

import importlib
import json
import multiprocessing
import tracemalloc

import numpy as np
import pytest
import torch
from fault_injection import flags_of
from specification import CUT
from tensordict import TensorDict

from memmap_buffer import CorruptBufferError, Field, NotABufferError, ReplayBuffer, SchemaError
from memmap_buffer.interop.torchrl import import_torchrl, to_tensordict

LENGTHS = (4, 1, 5, 3)


def imported(name):
    """A module of torchrl, which on its import makes "spawn" the way in which all processes start from then on."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        return importlib.import_module(name)
    finally:
        multiprocessing.set_start_method(before, force=True)


torchrl_data = imported("torchrl.data")


def transitions(lengths=LENGTHS, marked=True):
    """Steps of episodes whose values tell where they belong, as torchrl's collectors give them."""
    parts = []
    for number, length in enumerate(lengths):
        t, ends = torch.arange(length + 1), torch.arange(length) == length - 1
        pixels = (10 * number + t[:, None, None]).expand(-1, 2, 2).to(torch.uint8)
        state, half = torch.stack([t + number / 8, -t], 1).double(), (t + number / 4).bfloat16()
        done = (ends & marked)[:, None]
        terminated = done & bool(number % 2)
        parts.append(
            TensorDict(
                {
                    "observation": {"pixels": pixels[:-1], "state": state[:-1]},
                    "half": half[:-1],
                    "action": 100 * number + t[:-1],
                    "done": torch.zeros(length, 1, dtype=torch.bool),
                    "collector": {"traj_ids": torch.full((length,), number)},
                    "next": {
                        "observation": {"pixels": pixels[1:], "state": state[1:]},
                        "half": half[1:],
                        "reward": (number + t[:-1, None] / 16).float(),
                        "done": done,
                        "terminated": terminated,
                        "truncated": done & ~terminated,
                    },
                },
                [length],
            )
        )
    return parts


def dump(folder, parts, size=20):
    buffer = torchrl_data.TensorDictReplayBuffer(storage=torchrl_data.LazyMemmapStorage(size), batch_size=2)
    for part in parts:
        buffer.extend(part)
    buffer.dumps(folder)


def assert_episodes(buffer, parts):
    assert buffer.episode_lens.tolist() == [len(part) for part in parts]
    for i, part in enumerate(parts):
        got, following = buffer.episode(i), part["next"]
        for name in ("pixels", "state"):
            expected = torch.cat([part["observation", name], following["observation", name][-1:]])
            np.testing.assert_array_equal(got["observation"][name], expected)
        np.testing.assert_array_equal(got["half"], torch.cat([part["half"], following["half"][-1:]]).float())
        np.testing.assert_array_equal(got["action"], part["action"])
        for name in ("reward", "terminated", "truncated"):
            np.testing.assert_array_equal(got[name], following[name])
    buffer.close()


@pytest.mark.parametrize("below", ["", "storage"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_dump_is_cut_into_its_episodes(tmp_path, marked, below):
    parts = transitions(marked=marked)
    dump(tmp_path / "dump", parts)
    buffer = import_torchrl(tmp_path / "dump" / below, tmp_path / "b")
    assert buffer.schema.fields["half"].dtype == "bfloat16"
    assert set(buffer.fieldnames) == {
        *("observation.pixels", "observation.state", "half", "action", "reward", "terminated", "truncated")
    }
    assert_episodes(buffer, parts)
    assert not any(flags & CUT for flags in flags_of(tmp_path / "b").values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_an_end_of_any_dtype_is_what_is_not_zero(tmp_path, dtype):
    parts = transitions()
    for part in parts:
        for name in ("done", "terminated", "truncated"):
            flag = part["next", name]
            part["next", name] = torch.where(flag, 1.0, -0.0).to(dtype)
    dump(tmp_path / "dump", parts)
    with import_torchrl(tmp_path / "dump", tmp_path / "b") as buffer:
        assert buffer.episode_lens.tolist() == [*LENGTHS]


def test_a_full_storage_comes_in_oldest_first(tmp_path):
    parts = transitions((4, 1, 5, 3))
    dump(tmp_path / "dump", parts, size=10)
    assert_episodes(import_torchrl(tmp_path / "dump", tmp_path / "b"), [parts[0][3:], *parts[1:]])


def test_a_dump_is_read_episode_by_episode(tmp_path):
    parts = transitions([50] * 20)
    for part in parts:
        part["image"] = torch.randint(256, (50, 100, 100), dtype=torch.uint8)
    dump(tmp_path / "dump", parts, size=1000)
    tracemalloc.start()
    try:
        import_torchrl(tmp_path / "dump", tmp_path / "b").close()
        assert tracemalloc.get_traced_memory()[1] < 10_000_000 / 4
    finally:
        tracemalloc.stop()
    there = ReplayBuffer.from_folder(tmp_path / "b", read_only=True)
    np.testing.assert_array_equal(there.episode(19)["image"], parts[19]["image"])


def test_keys_that_are_no_identifiers_become_some(tmp_path):
    parts = transitions()
    for part in parts:
        for place in (part, part["next"]):
            place["joint pos"] = place["half"].float()
            place["observation", "left-eye"] = place["observation", "pixels"]
    dump(tmp_path / "dump", parts)
    with import_torchrl(tmp_path / "dump", tmp_path / "b") as buffer:
        for i in range(len(parts)):
            episode = buffer.episode(i)
            np.testing.assert_array_equal(episode["joint_pos"], episode["half"])
            np.testing.assert_array_equal(episode["observation"]["left_eye"], episode["observation"]["pixels"])


def test_an_end_that_nothing_marks_is_found_by_what_follows(tmp_path):
    parts = [part.exclude("collector") for part in transitions(marked=False)]
    dump(tmp_path / "dump", parts)
    with pytest.raises(SchemaError, match=r"'observation.pixels'\): what follows step 3 is not .* 4 has.*mark the end"):
        import_torchrl(tmp_path / "dump", tmp_path / "b")


def spoil(folder, what):
    meta = json.loads((folder / "storage/meta.json").read_text())
    if what == "cut":
        path = folder / "storage/action.memmap"
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "gone":
        (folder / "storage/storage_metadata.json").unlink()
    elif what == "climbing":
        meta["../../secret"] = meta["action"]
    elif what == "upwards":
        meta[".."] = {"type": "TensorDict"}
    elif what == "object":
        meta["note"] = {"type": "NonTensorData"}
    elif what == "two":
        meta["shape"] = [2, 10]
    (folder / "storage/meta.json").write_text("{" if what == "json" else json.dumps(meta))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("cut", CorruptBufferError, r"action\.memmap: got 159 bytes, expected 160"),
        ("json", CorruptBufferError, r"meta\.json: "),
        ("gone", NotABufferError, "no dump of a LazyMemmapStorage"),
        ("climbing", CorruptBufferError, r"storage/\.\.%2F\.\.%2Fsecret\.memmap: got None bytes"),
        ("upwards", NotABufferError, r"storage/%2E%2E/meta\.json is missing"),
        ("object", SchemaError, r"'note' is no tensor but 'NonTensorData'"),
        ("two", SchemaError, r"got a storage of shape \[2, 10\], expected one dimension"),
    ],
)
def test_what_is_no_such_dump_is_refused(tmp_path, what, kind, message):
    dump(tmp_path / "dump", transitions())
    spoil(tmp_path / "dump", what)
    with pytest.raises(kind, match=message):
        import_torchrl(tmp_path / "dump", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_batch_becomes_a_tensordict_over_the_same_memory(recorded):
    buffer = recorded()
    batch = buffer.sample(5, view=None, timestep_level=True, seed=1)
    tensors = to_tensordict(batch)
    assert tensors.batch_size == (5,)
    assert tensors["camera", "left"].data_ptr() == batch["camera"]["left"].data_ptr()
    assert torch.equal(tensors["half"], batch["half"])
    assert "text" not in list(tensors.keys())


def test_a_transition_has_what_follows_below_next(recorded):
    batch = recorded().sample(5, n_steps=1, seed=1)
    tensors = to_tensordict(batch)
    assert tensors["next", "observation"].data_ptr() == batch["next_observation"].data_ptr()
    assert torch.equal(tensors["next", "reward"], batch["reward"][:, None])
    assert tensors["next", "reward"].data_ptr() == batch["reward"].data_ptr()
    assert torch.equal(tensors["next", "done"], batch["terminated"][:, None])
    assert "reward" not in list(tensors.keys())


def test_the_declared_ends_of_a_transition_are_what_torchrl_calls_terminated_and_truncated(tmp_path):
    fields = {"x": Field("int", final=True), "done": "bool", "timeout": "uint8", "terminated": "int"}
    with ReplayBuffer(tmp_path / "b", 2, 9, fields, terminated="done", truncated="timeout") as buffer:
        buffer.store_episode(x=range(4), done=[0, 0, 1], timeout=[0, 0, 0], terminated=[7, 8, 9])
        buffer.store_episode(x=range(3), done=[0, 0], timeout=[0, 2], terminated=[7, 8])
        batch = next(iter(buffer.dataloader(5, n_steps=1)))
        tensors = to_tensordict(batch, schema=buffer.schema)
    assert tensors["next", "terminated"].flatten().tolist() == [False, False, True, False, False]
    assert tensors["next", "truncated"].flatten().tolist() == [False, False, False, False, True]
    assert tensors["next", "done"].flatten().tolist() == [False, False, True, False, True]
    assert tensors["terminated"].tolist() == [7, 8, 9, 7, 8]
    assert {"done", "timeout"}.isdisjoint(tensors.keys())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", [(), (1,)], ids=["flat", "with an axis"])
def test_a_transition_is_what_a_loss_of_torchrl_takes(tmp_path, shape):
    modules, objectives = imported("torchrl.modules"), imported("torchrl.objectives")
    fields = {"observation": Field("float", (4,), final=True), "action": "int"}
    ends = {"reward": ("float", shape), "terminated": ("bool", shape), "truncated": ("bool", shape)}
    with ReplayBuffer(tmp_path / "b", 2, 9, fields | ends) as buffer:
        flags = {"terminated": np.zeros((8, *shape)), "truncated": np.zeros((8, *shape))}
        buffer.store_episode(observation=np.eye(9, 4), action=np.arange(8) % 2, reward=np.ones((8, *shape)), **flags)
        tensors = to_tensordict(buffer.sample(32, n_steps=1, seed=1))
    network = modules.MLP(in_features=4, out_features=2, num_cells=[8])
    actor = modules.QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = objectives.DQNLoss(actor, action_space="categorical")(tensors)["loss"]
    assert loss.shape == ()
    assert loss.isfinite()


def test_a_buffer_becomes_all_its_steps(recorded):
    buffer = recorded()
    tensors = to_tensordict(buffer)
    assert tensors.batch_size == (buffer.num_steps,)
    expected = np.concatenate([buffer.episode(i)["observation"][:n] for i, n in enumerate(buffer.episode_lens)])
    np.testing.assert_array_equal(tensors["observation"], expected)
    serials = np.repeat(buffer.serials, buffer.episode_lens)
    np.testing.assert_array_equal(tensors["_indices"][:, 0], serials)


def test_a_way_through_torchrl_and_back_is_equal(tmp_path):
    parts = transitions()
    dump(tmp_path / "dump", parts)
    with import_torchrl(tmp_path / "dump", tmp_path / "b") as buffer:
        batch = next(iter(buffer.dataloader(buffer.num_steps, n_steps=1, next_fields=["observation", "half"])))
        dump(tmp_path / "again", [to_tensordict(batch).exclude("n_step_lens")])
    again = import_torchrl(tmp_path / "again", tmp_path / "c")
    assert_episodes(again, parts)


def test_what_holds_no_tensor_is_refused(tmp_path):
    with pytest.raises(SchemaError, match="a batch without tensors"):
        to_tensordict({"text": ["a"]})
    with (
        ReplayBuffer(tmp_path / "b", 2, 3, {"x": "int"}) as buffer,
        pytest.raises(RuntimeError, match=r"nothing|no |empty"),
    ):
        to_tensordict(buffer)
