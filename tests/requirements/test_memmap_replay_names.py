"""`memmap_buffer.memmap_replay_buffer`: what scripts do with that package, here and there, bit for bit.

Each use is the calls of one kind of script, with numbers of our own, until a ring has wrapped. Then the names
themselves: what is open, columns on the disk, dataset classes, the collector, films.
"""

import pickle
import subprocess
import sys

import av
import numpy as np
import pytest
import torch
from fault_injection import shown
from PIL import Image
from torch.utils.data import DataLoader

from memmap_buffer import (
    BufferFullError,
    EpisodeIndexError,
    EpisodeStateError,
    ReadOnlyError,
    SchemaError,
    memmap_replay_buffer,
)
from memmap_buffer.memmap_replay_buffer import (
    Column,
    ConcatReplayBuffer,
    ReplayBuffer,
    ReplayDataset,
    ReplayDatasetNStep,
    ReplayDatasetTimestep,
    ReplayDatasetTimeWindow,
    frames_to_sheet,
    trajectory_to_video,
)

LAST = 4  # episodes of a ring in the uses
UNFLUSHED = {"flush_every_store_step": 0}  # the other package would wait for the disk at each timestep


def returns_of(rewards, alive):
    """Some numbers that come from a whole episode, backwards."""
    out, last = torch.zeros_like(rewards), 0
    for t in reversed(range(rewards.shape[-1])):
        out[..., t] = last = rewards[..., t] + 0.5 * last * alive[..., t]
    return out


def rows_of(batches):
    """All rows of batches of equal columns, in an order that tells nothing of how they were shuffled."""
    columns = [torch.cat(parts).flatten(1) if parts[0].ndim > 1 else torch.cat(parts)[:, None] for parts in batches]
    rows = torch.cat([column.double() for column in columns], 1).numpy()
    return rows[np.lexsort(rows.T)]


def on_policy(make, count):
    """PPO: a bootstrapped last step, returns assigned by `_index`, timesteps drawn by a flag."""
    fields = {"state": ("float", 2), "reward": "float", "done": "bool", "learn": "bool", "returns": "float"}
    memories = make(fields, circular=True)
    for i in range(count):
        with memories.one_episode():
            for t in range(2 + i % 3):
                memory = memories.store(state=np.array([i, t]), reward=i + t / 4, done=False, learn=True)
            memories.store(**memory._replace(learn=False, done=torch.tensor(True))._asdict())
        names = ("_index", "reward", "done")
        for indices, rewards, done in memories.dataloader(batch_size=3, return_indices=True, to_named_tuple=names):
            returns = returns_of(rewards, 1.0 - done.float())
            memories.data["returns"][indices, : returns.shape[-1]] = returns.numpy()
            memories.flush()
        names = ("state", "reward", "returns")
        options = {"timestep_level": True, "filter_fields": {"learn": True}, "to_named_tuple": names, "shuffle": True}
        yield rows_of(zip(*memories.dataloader(batch_size=4, **options), strict=True))


def after_each_episode(make, count):
    """Values of the newest episode, by `episode_index`; then everything, episode by episode."""
    fields = {"state": ("float", (2,)), "image": ("uint8", (3, 2, 2)), "done": "float", "value": "float"}
    buffer = make(fields, circular=True)
    for i in range(count):
        with buffer.one_episode():
            for t in range(1 + i % 4):
                buffer.store(
                    state=np.array([i, t]), image=np.full((3, 2, 2), 10 * i + t, np.uint8), done=float(t == i % 4)
                )
        newest = (buffer.episode_index - 1) % buffer.max_episodes
        length = buffer.episode_lens[newest]
        data = {name: torch.tensor(column[newest, :length]) for name, column in buffer.data.items()}
        assert data["state"].tolist() == [[i, t] for t in range(length)] and length == 1 + i % 4
        buffer.data["value"][newest, :length] = data["state"].sum(-1).numpy()
        parts = []
        for k in range(min(buffer.num_episodes, buffer.max_episodes)):
            steps = buffer.episode_lens[k]
            parts.append([torch.tensor(buffer.data[name][k, :steps]) for name in ("state", "image", "value")])
        yield rows_of(zip(*parts, strict=True))


def groups_of_rollouts(make, count):
    """Rollouts of one group after another: `store` without a block, the return as a meta field, `clear`."""
    buffer = make({"state": ("float", (2,)), "action": ("int", ())}, {"score": "float"})
    for group in range(count // 2):
        buffer.clear()
        for k in range(LAST):
            for t in range(1 + (group + k) % 3):
                buffer.store(state=np.array([group, t], np.float64), action=k)
            assert (buffer.episode_index, buffer.timestep_index) == (k, t + 1)
            buffer.store_meta_datapoint(k, "score", group + k / 8)
            buffer.advance_episode()
            buffer.advance_episode()  # nothing is stored: nothing happens
        data = buffer.get_all_data(device="cpu")
        yield from (data[name].double().numpy() for name in ("state", "action", "score", "episode_lens"))


def cloned_behaviour(make, count):
    """Whole episodes, and the shapes of what is learned from them."""
    buffer = make({"state": ("float", (2, 3)), "action": "float"}, {"mission": ("float", (4,))}, circular=True)
    for i in range(count):
        buffer.store_episode(state=np.full((2, 2, 3), i), action=torch.arange(2) / 4, mission=np.full(4, i / 2))
    yield np.array(buffer.shapes["state"])
    for batch in buffer.dataloader(batch_size=LAST):
        yield from (
            batch[name].sum(tuple(range(1, batch[name].ndim))).sort().values.numpy() for name in ("state", "mission")
        )


def stored_successors(make, count):
    """`next_state` stored, and asked for as the successor of `state`, with and without `current_fields`."""
    fields = {"state": ("float", (2,)), "reward": "float", "terminated": "bool", "next_state": ("float", (2,))}
    buffer = make(fields, circular=True)
    for i in range(count):
        with buffer.one_episode():
            for t in range(2 + i % 4):
                buffer.store(state=np.array([i, t]), reward=float(t), terminated=t == 1, next_state=np.array([-i, t]))
    names = ("state", "next_state", "seq_reward", "seq_terminated", "n_step_lens")
    options = {"n_steps": 2, "next_fields": ("state",), "sequence_fields": ("reward", "terminated")}
    for more in ({"current_fields": ("state",)}, {}):
        loader = buffer.dataloader(batch_size=3, shuffle=True, to_named_tuple=names, **options, **more)
        yield rows_of(zip(*loader, strict=True))
    yield rows_of(zip(*buffer.dataloader(batch_size=3, timestep_level=True, to_named_tuple=tuple(fields)), strict=True))


def shaped_rewards(make, count):
    """Several environments: what was done so far is read, and a reward is written ahead of its step, by a function."""
    fields = {"state": ("float", (2,)), "action": ("int", 1), "reward": "float", "shaped": ("float", 2)}
    buffer = make(fields, {"total": "float", "gene": "int"}, circular=True)
    for i in range(count):
        with buffer.batched_episode(1, gene=torch.tensor([i])):
            for t in range(1 + i % 3):
                shaped = buffer.data["shaped"]
                episode, step = buffer.episode_index, buffer.timestep_index
                assert (shaped.ndim, step) == (3, t)
                shaped[episode, step, 1] = i + t / 2
                yield np.array(buffer.data["action"][episode, :step])
                buffer.store_batch(state=torch.full((1, 2), i), action=torch.full((1, 1), t), reward=torch.ones(1))
            buffer.store_batch(state=torch.zeros(1, 2), reward=torch.ones(1))  # the others are zeros
            buffer.store_meta_batch(total=torch.tensor([i / 2]))
    yield np.sort(buffer.meta_data["total"][: buffer.num_episodes])
    dataset = buffer.dataset()
    items = [dataset[i] for i in range(len(dataset))]
    yield rows_of(zip(*([item["state"], item["shaped"], item["action"]] for item in items), strict=True))


def growing_experience(make, count):
    """Whole episodes with a field that is never given."""
    fields = {"states": ("float", torch.Size([3])), "actions": "int", "log_probs": "float"}
    buffer = make(fields, {"total": "float"}, circular=True)
    for i in range(count):
        known = {"states": torch.full((3, 3), i), "actions": torch.arange(3)}
        buffer.store_episode(**{name: value for name, value in known.items() if name in buffer.fieldnames}, total=i)
    data = buffer.get_all_data()
    yield rows_of([[data[name]] for name in ("states", "actions", "log_probs", "total")])


def labelled_recordings(make, count):
    """Columns with defaults that say that nothing is known yet, labelled by whole rows and by single timesteps."""
    unknown = float("nan")
    fields = {"reward": "float", "value": ("float", (), unknown), "expert": "bool", "label": ("int", (), -1)}
    buffer = make(fields, {"task": "int", "marked": ("int", (), -1)}, circular=True)
    for i in range(count):
        with buffer.one_episode(task=torch.tensor(i)):
            for t in range(2 + i % 3):
                buffer.store(reward=torch.tensor(float(t)))
    for i in range(buffer.num_episodes):
        length = buffer.meta_data["episode_lens"][i].item()
        assert (buffer.data["label"][i] != -1).sum() == 0 and length == buffer.episode_lens[i]
        row = torch.full((buffer.data["value"].shape[1],), unknown)
        row[:length] = torch.from_numpy(buffer.data["reward"][i, :length]) * 2
        buffer.data["value"][i] = row.numpy()
        mask = buffer.data["expert"][i]
        mask[1:length] = True
        buffer.data["expert"][i] = mask
        buffer.data["label"][i, 1] = 7
    last = buffer.meta_data["task"][:].tolist().index(count - 2)
    buffer.store_datapoint(last, 0, "reward", torch.tensor(-1.0))
    buffer.store_meta_datapoint(last, "marked", 9)
    assert buffer.meta_data["marked"][last].item() == 9
    buffer.meta_data["task"][:] = 5
    items = [buffer.dataset(include_metadata=False)[i] for i in range(buffer.num_episodes)]
    yield rows_of(zip(*([item[name] for name in fields] for item in items), strict=True))
    yield np.sort(buffer.meta_data["marked"][: buffer.num_episodes])
    yield buffer.meta_data["task"][: buffer.num_episodes]


USES = (
    on_policy,
    after_each_episode,
    groups_of_rollouts,
    cloned_behaviour,
    stored_successors,
    shaped_rewards,
    growing_experience,
    labelled_recordings,
)


def maker(kind, folder):
    def make(fields, meta_fields=None, **options):
        return kind(folder, LAST, 8, fields, meta_fields or {}, **UNFLUSHED, **options)

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_what_a_script_does_with_that_package_gives_the_same_here(tmp_path, use, count=LAST + 3):
    package = pytest.importorskip("memmap_replay_buffer")
    here = list(use(maker(ReplayBuffer, tmp_path / "here"), count))
    there = list(use(maker(package.ReplayBuffer, tmp_path / "there"), count))
    assert len(here) == len(there) > 0
    for got, expected in zip(here, there, strict=True):
        np.testing.assert_array_equal(got, expected)


# What is open


def ring(folder, **options):
    return ReplayBuffer(folder, 3, 6, {"x": "float", "y": ("int", (2,))}, {"tag": "int"}, circular=True, **options)


def fill(buffer, count):
    for i in range(count):
        buffer.store_episode(x=np.full(2 + i % 3, i), tag=i)
    return buffer


def test_a_value_that_was_assigned_ahead_of_its_step_can_be_taken_back(tmp_path):
    with ring(tmp_path) as buffer:
        buffer.store(x=1)
        for value in (5, 0):
            buffer.data["x"][buffer.episode_index, 1] = value
        buffer.store()
        buffer.advance_episode()
        assert buffer.data["x"][0, :2].tolist() == [1, 0]


def test_in_a_full_ring_the_index_of_the_open_episode_is_not_the_oldest_ones(tmp_path):
    with fill(ring(tmp_path), 5) as buffer:
        buffer.store(x=9)
        assert buffer.episode_index == 0
        buffer.store_meta_datapoint(buffer.episode_index, "tag", 90)
        buffer.store_meta_datapoint(0, "tag", 20)
        buffer.store_datapoint(buffer.episode_index, 0, "y", [1, 2])
        index = buffer.episode_index
        assert (buffer.data["x"][index, 0], buffer.data["x"][0, 0]) == (9, 2)
        buffer.advance_episode()
        assert buffer.meta_data["tag"][:].tolist() == [3, 4, 90] and buffer.data["x"][index, 0] == 9
        assert buffer.data["y"][2, 0].tolist() == [1, 2] and buffer.episode_index == 0


def test_what_store_opened_is_published_by_close_and_dropped_by_clear(tmp_path):
    with ring(tmp_path) as buffer:
        buffer.store(x=1)
        buffer.clear()
        assert buffer.is_new_episode and buffer.timestep_index == 0
        buffer.store(x=2)
    with ring(tmp_path) as buffer:
        assert buffer.data["x"][0, :2].tolist() == [2, 0] and buffer.num_episodes == 1
        buffer.store_batch(x=[3.0, 4.0], y=[[1, 1], [2, 2]])
        buffer.store_meta_batch(tag=torch.tensor([7, 8]))
        with pytest.raises(SchemaError, match="batch_size=1, 2 episodes are open"):
            buffer.advance_episode()
        with pytest.raises(EpisodeStateError, match="use store_batch"):
            buffer.store(x=1)
        with pytest.raises(SchemaError, match="got a batch of 3, expected 2"):
            buffer.store_batch(x=[1, 2, 3])
    assert [(e["x"], e["tag"]) for _, e in shown(ReplayBuffer.from_folder(tmp_path))] == [([2], 0), ([3], 7), ([4], 8)]


def test_a_member_of_a_group_that_a_step_leaves_out_is_zeros(tmp_path):
    with ReplayBuffer(tmp_path, 4, 3, {"x": {"a": "float", "b": ("int", 2)}}) as buffer:
        buffer.store(x={"a": 1})
        buffer.advance_episode()
        buffer.store_batch(x={"a": [2, 3]})
        buffer.advance_episode(2)
        buffer.store_episode(x={"b": [[4, 5], [6, 7]]})
        groups = [e["x"] for _, e in shown(buffer)]
        assert groups == [*({"a": [a], "b": [[0, 0]]} for a in (1, 2, 3)), {"a": [0, 0], "b": [[4, 5], [6, 7]]}]


def test_a_batch_that_raises_opens_nothing(tmp_path):
    with ring(tmp_path) as buffer:
        bad = {
            "no data": {"x": None},
            "'z'": {"z": [1]},
            "a batch of 2": {"x": [1, 2, 3], "y": [[1, 2]] * 2},
            "at least one": {"x": 1},
        }
        for text, batch in bad.items():
            with pytest.raises(SchemaError, match=text):
                buffer.store_batch(**batch)
        with pytest.raises(SchemaError, match="'z'"):
            buffer.store_meta_batch(z=[1])
        buffer.advance_episode()
        assert buffer.num_episodes == 0 and buffer.is_new_episode


def test_of_a_batch_that_is_larger_than_the_room_the_first_episodes_are_stored_and_the_log_says_so(tmp_path, caplog):
    with ReplayBuffer(tmp_path, 3, 6, {"x": "float"}) as buffer:
        buffer.store_episode(x=[0])
        for t in range(2):
            buffer.store_batch(x=10 * torch.arange(1, 5) + t)
        buffer.advance_episode(2)
        assert "2 of 4 episodes fit" in caplog.text and len(caplog.records) == 1
        assert [e["x"] for _, e in shown(buffer)] == [[0], [10, 11], [20, 21]]
        with pytest.raises(BufferFullError, match="full"):
            buffer.store_batch(x=[1])


@pytest.mark.parametrize("room", [1, 2, 7, 999])
def test_how_many_episodes_of_a_batch_fit_is_found_in_few_tries(tmp_path, monkeypatch, room):
    tries, begin = [], ReplayBuffer.begin_batch
    monkeypatch.setattr(ReplayBuffer, "begin_batch", lambda buffer, size: tries.append(size) or begin(buffer, size))
    with ReplayBuffer(tmp_path, room, 6, {"x": "int"}) as buffer:
        buffer.store_batch(x=range(1000))
        assert (len(buffer.open_episodes[0]), len(tries) < 15) == (room, True)


def test_nothing_is_open_where_nothing_may_be_written(tmp_path):
    fill(ring(tmp_path), 2).close()
    reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
    assert (reader.episode_index, reader.timestep_index) == (2, 0)
    for write in (lambda: reader.store(x=1), lambda: reader.store_batch(x=[1]), reader.clear):
        with pytest.raises(ReadOnlyError, match="read_only"):
            write()
    with pytest.raises(ReadOnlyError, match="read_only"):
        reader.data["x"][0] = 1
    with pytest.raises(AssertionError, match="no such folder"):
        ring(tmp_path / "missing", read_only=True)
    with pytest.raises(NotImplementedError, match="only reads"):
        ConcatReplayBuffer([tmp_path]).clear()


# Columns


def test_a_column_reads_and_assigns_what_an_array_of_all_episodes_would(tmp_path):
    with fill(ring(tmp_path), 5) as buffer:
        column, serials = buffer.data["x"], buffer.serials
        slow = np.zeros((3, 6), np.float32)
        for k, i in enumerate((2, 3, 4)):
            slow[k, : 2 + i % 3] = i
        assert isinstance(column, Column) and (column.shape, column.ndim, len(column)) == ((3, 6), 2, 3)
        pairs = np.array([4, 2, 4]), np.array([0, 1, 1])
        for key in (0, (1, slice(2)), slice(1, None), -1, (2, 0), (..., 0), np.int64(1), (slice(None), [0, 1])):
            np.testing.assert_array_equal(column[key], slow[key])
        np.testing.assert_array_equal(column[torch.tensor([4, 2])], slow[[2, 0]])
        np.testing.assert_array_equal(column[pairs], slow[[2, 0, 2], pairs[1]])
        np.testing.assert_array_equal(column[serials > 2, :1], slow[1:, :1])
        np.testing.assert_array_equal(np.asarray(column), slow)
        column[pairs] = [5, 6, 7]
        slow[[2, 0, 2], pairs[1]] = [5, 6, 7]
        column[slice(None), :2] += 1
        slow[:, :2] += 1
        column[[3]] = 8
        slow[1, :2] = 8
        np.testing.assert_array_equal(column[:], slow)
        buffer.update(serials[[2, 0]], tag=[40, 20])
        buffer.update([3], tag=[30])
        buffer.update(0, x=[0, 0])
        assert buffer.meta_data["tag"][[4, 3, 2]].tolist() == [40, 30, 20] and buffer.data["x"][0, 1] == 0


def test_a_mask_of_a_column_names_its_numbers_and_one_of_another_shape_is_refused(tmp_path):
    with fill(ring(tmp_path), 3) as buffer:
        column = buffer.data["x"]
        slow = column[:].copy()
        mask = slow > slow[1, 0]
        np.testing.assert_array_equal(column[mask], slow[mask])
        lens = buffer.episode_lens[:, None]
        column[mask & (np.arange(buffer.max_timesteps) < lens)] = 7
        slow[mask] = 7
        np.testing.assert_array_equal(column[:], slow)
        np.testing.assert_array_equal(column[np.array([True, False, True])], slow[[0, 2]])
        for wrong in (np.ones(2, bool), np.ones(4, bool), mask[:, :1], mask.T):
            with pytest.raises(SchemaError, match=r"got a mask of shape \(.*\), the column has \(3, "):
                column[wrong]


def test_what_is_assigned_to_a_part_that_was_read_is_on_the_disk_and_to_a_copy_of_it_is_not(tmp_path):
    with fill(ring(tmp_path), 5) as buffer:
        part = buffer.data["x"][1]
        part[:2][np.array([True, False])] = 5
        part[1:2] += 3
        np.clip(part, 0, 5.5, out=part)
        assert type(part * 2) is np.ndarray and part[:2].tolist() == [5, 5.5]
        for copy in (part[[0, 1]], part.copy(), pickle.loads(pickle.dumps(part)), part + 0):
            copy[...] = 9
        buffer.data["x"][1, 1] = 6  # the part knows nothing of it, and leaves it
        buffer.store_episode(x=[0])  # the part is of the same episode still, which is the oldest now
        part[0] = 4
        assert buffer.data["x"][0, :3].tolist() == [4, 6, 0] and torch.from_numpy(part)[0] == 4
        buffer.store_episode(x=[0])
        with pytest.raises(EpisodeIndexError, match="episode 3: no visible one has this serial"):
            part[0] = 1
        buffer.store(x=1)
        part = buffer.data["x"][buffer.episode_index]
        part[:1] = 2
        buffer.advance_episode()
        assert buffer.data["x"][2, 0] == 2
        part[0] = 3
        assert buffer.data["x"][2, 0] == 3


def test_what_a_column_refuses_says_why(tmp_path):
    with fill(ring(tmp_path), 5) as buffer:
        before = shown(buffer)
        bad = {
            "no visible one has this serial": (EpisodeIndexError, lambda: buffer.data["x"][[0]]),
            "episode 3: the buffer has 3": (EpisodeIndexError, lambda: buffer.data["x"][3]),
            "expected a position, a slice": (SchemaError, lambda: buffer.data["x"]["a"]),
            "timestep 4: the episode has 4": (EpisodeStateError, lambda: buffer.data["x"].__setitem__((0, 4), 1)),
            "episode 0: no visible one": (EpisodeIndexError, lambda: buffer.update([0], tag=[1])),
            r"3\.5": (SchemaError, lambda: buffer.data["y"].__setitem__((0, 0), 3.5)),
        }
        for text, (kind, call) in bad.items():
            with pytest.raises(kind, match=text):
                call()
        assert shown(buffer) == before


# Datasets, the collector, films


def test_datasets_are_of_the_class_of_their_level(tmp_path):
    with fill(ring(tmp_path), 3) as buffer:
        made = buffer.dataset(), buffer.dataset(timestep_level=True), buffer.dataset(n_steps=2)
        named = ReplayDataset(buffer), ReplayDatasetTimestep(tmp_path), ReplayDatasetNStep(str(tmp_path), n_steps=2)
        window = ReplayDatasetTimeWindow(buffer, window_length=3, return_indices=True)
        for one, other in zip((*made, buffer.dataset(window_length=3)), (*named, window), strict=True):
            assert type(one) is type(other) and isinstance(one, ReplayDataset) and len(one) == len(other)
        assert window[0]["x"].shape == (3,) and window[0]["_start"] == 0
        for dataset in (made[1], pickle.loads(pickle.dumps(named[1]))):
            loader = DataLoader(dataset, batch_size=4)
            assert torch.cat([batch["x"] for batch in loader]).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]


def test_importing_the_names_does_not_import_torch():
    code = "import sys, memmap_buffer.memmap_replay_buffer as m; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'Replay'"):
        _ = memmap_replay_buffer.Replay


def test_a_rollout_is_read_by_name_and_stored_as_one_episode_of_each_group(tmp_path):
    groups, steps = 3, 4
    fields = {
        "x": ("float", 2),
        "action": "int",
        "done": "bool",
        "terminated": "bool",
        "gain": "float",
        "half": ("float", (), 2),
    }
    with ReplayBuffer(tmp_path, groups, steps, fields, {"score": "float", "kind": "int"}, circular=True) as buffer:
        collector = buffer.create_rollout_collector(groups)
        x = torch.arange(groups * steps * 2.0).reshape(groups, steps, 2)
        done = torch.arange(groups * steps).reshape(groups, steps) % 3 == 0
        for t in range(steps):
            collector.append(x=x[:, t : t + 1], action=[t] * groups, done=done[:, t], terminated=done[:, t], kind=6)
        with pytest.raises(SchemaError, match="'gains'"):
            collector.extend(gains=np.zeros((steps, groups)))
        collector.extend(gain=x.sum(-1).T)
        assert torch.equal(collector.env_major("x"), x) and torch.equal(collector.time_major("done"), done.T)
        assert [group.tolist() for group in collector.groups("action")] == [list(range(steps))] * groups
        assert collector.time_major("kind").tolist() == [6] * groups
        every = collector.all_data(device="cpu")
        assert list(every) == ["x", "action", "done", "terminated", "gain"] and torch.equal(every["gain"], x.sum(-1))
        loader = collector.dataloader(5, ("gain", "done"), {"done": True}, to_named_tuple=("gain",), shuffle=True)
        for _ in range(2):
            batches = [batch.gain for batch in loader]
            assert len(batches) == len(loader) == 1 and sorted(batches[0].tolist()) == x.sum(-1)[done].tolist()
        plain = list(collector.dataloader(5, device="cpu", drop_last=True))
        assert torch.equal(torch.cat([batch["x"] for batch in plain]), x.reshape(-1, 2)[:10])
        with pytest.raises(SchemaError, match="column 'y': collected are x"):
            collector.dataloader(5, ("y",))
        collector.store(score=torch.arange(groups))
        data = buffer.get_all_data()
        assert torch.equal(data["x"], x) and torch.equal(data["gain"], x.sum(-1)) and (data["half"] == 2).all()
        assert data["score"].tolist() == [0, 1, 2] and data["kind"].tolist() == [6] * 3 and len(collector) == 0
        assert buffer.dataset(n_steps=1, current_fields=("x",))[2]["x"].tolist() == x[0, 2].tolist()


def test_films_hold_the_images_of_the_episodes(tmp_path):
    fields = {"image": ("uint8", (16, 20, 3)), "depth": ("float", (16, 20)), "x": "float"}
    with ReplayBuffer(tmp_path / "buffer", 4, 6, fields) as buffer:
        for i in range(2):
            images = np.full((3, 16, 20, 3), 100 * i, np.uint8)
            buffer.store_episode(image=images, depth=images[..., 0] / 255, x=np.zeros(3))
        assert buffer.image_fields() == ["image", "depth"]
        assert buffer.episode_frames([1, 0], "image")[:, 0, 0, 0].tolist() == [100] * 3 + [0] * 3
        path = buffer.save_video(tmp_path / "film.mp4", [0, 1], field="image", fps=5)
        with av.open(str(path)) as film:
            seen = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        assert len(seen) == 6 and seen[0].shape == (16, 20, 3) and abs(int(seen[5].mean()) - 100) < 4
        with Image.open(buffer.save_video(tmp_path / "depth.gif", 1, field="depth")) as picture:
            assert picture.size == (20, 16)
        bad = {
            "multiple": (SchemaError, lambda: buffer.save_video(tmp_path / "a.mp4")),
            "invalid field": (SchemaError, lambda: buffer.episode_frames(0, "imag")),
            "out of range": (EpisodeIndexError, lambda: buffer.episode_frames([0, 2], "image")),
            "at least one": (SchemaError, lambda: buffer.episode_frames([], "image")),
            "ends in one of": (SchemaError, lambda: buffer.save_video(tmp_path / "a.txt", field="image")),
            "is no image": (SchemaError, lambda: trajectory_to_video(np.zeros((2, 3)), tmp_path / "a.gif")),
            "got no images": (SchemaError, lambda: trajectory_to_video(np.zeros((0, 8, 8)), tmp_path / "a.gif")),
        }
        for text, (kind, call) in bad.items():
            with pytest.raises(kind, match=text):
                call()
    with ReplayBuffer(tmp_path / "plain", 4, 6, {"x": "float"}) as plain, pytest.raises(SchemaError, match="no field"):
        plain.default_image_field()
    sheet = frames_to_sheet(np.arange(6, dtype=np.uint8)[:, None, None] * np.ones((2, 3), np.uint8), rows=2, columns=2)
    assert sheet.shape == (4, 6, 3) and sheet[::2, ::3, 0].tolist() == [[0, 1], [3, 5]]


def test_a_block_within_an_open_batch_is_stored_to_and_the_batch_goes_on_after_it(tmp_path):
    with ReplayBuffer(tmp_path, 9, 4, {"x": "int"}) as buffer:
        buffer.store_batch(x=[1, 2])
        with buffer.one_episode():
            buffer.store(x=5)
            with pytest.raises(EpisodeStateError, match="no batch is open"):
                buffer.store_batch(x=[7, 8])
        with buffer.batched_episode(3):
            buffer.store_batch(x=[6, 6, 6])
        buffer.store_batch(x=[3, 4])
        buffer.advance_episode(2)
        lens = buffer.episode_lens.tolist()
        rows = [row[:n] for row, n in zip(buffer.data["x"][:].tolist(), lens, strict=True)]
        assert rows == [[5], [6], [6], [6], [1, 3], [2, 4]]


def test_the_open_episode_is_changed_in_memory_and_on_the_disk_where_its_timesteps_are_shown_already(tmp_path):
    with ReplayBuffer(tmp_path / "staged", 4, 5, {"x": "int"}, {"task": "int"}) as buffer:
        for x in (1, 2):
            buffer.store(x=x)
        buffer.data["x"][buffer.episode_index, 0] = 7
        buffer.store_datapoint(buffer.episode_index, 1, "x", 8)
        buffer.meta_data["task"][buffer.episode_index] = 3
        assert buffer.data["x"][buffer.episode_index][:2].tolist() == [7, 8]
        buffer.store(x=9)
        buffer.advance_episode()
        assert buffer.data["x"][0][:3].tolist() == [7, 8, 9] and buffer.meta_data["task"][0] == 3
    with ReplayBuffer(tmp_path / "shown", 4, 5, {"x": "int"}, {"task": ("int", (), 0)}, publish="step") as buffer:
        buffer.store(x=1)
        assert buffer.data["x"][buffer.episode_index][:1].tolist() == [1]
        buffer.data["x"][buffer.episode_index, 0] = 7
        assert buffer.data["x"][buffer.episode_index, 0] == 7
        with pytest.raises(EpisodeStateError, match="end it first"):
            buffer.meta_data["task"][buffer.episode_index] = 3
        buffer.advance_episode()
        buffer.data["x"][0, 0], buffer.meta_data["task"][0] = 8, 3
        assert buffer.data["x"][0, 0] == 8 and buffer.meta_data["task"][0] == 3
