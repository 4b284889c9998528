"""A replay buffer of torchrl in a folder gives the transitions that its own give, and goes on from the folder."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import flags_of
from inside import open_episodes
from specification import CUT

pytest.importorskip("torchrl", reason="torchrl is not installed")
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv, step_mdp
from torchrl.envs.transforms import RewardScaling
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from memmap_buffer import NotEnoughDataError, ReplayBuffer, SchemaError, SchemaMismatchError, verify
from memmap_buffer.adapters import Episode
from memmap_buffer.interop.torchrl_replay import DiskReplayBuffer

IDS = ("collector", "traj_ids")


def collected(num_envs: int, frames: int, total: int) -> list[TensorDict]:
    """Batches as collectors give them: (frames,) of one environment, (B, frames / B) of several."""
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1") if num_envs == 1 else SerialEnv(num_envs, lambda: GymEnv("CartPole-v1"))
    env.set_seed(0)
    now, ids, out = env.reset(), torch.arange(num_envs), []
    for _ in range(total // frames):
        batch = env.rollout(frames // num_envs, tensordict=now, auto_reset=False, break_when_any_done=False)
        before = batch["next", "done"].reshape(num_envs, -1).long().cumsum(1).roll(1, 1)
        after = before[:, :1].clone()
        before[:, 0] = 0
        batch["collector", "traj_ids"] = (ids[:, None] + num_envs * before).reshape(batch.batch_size)
        ids = ids + num_envs * after[:, 0]
        now = step_mdp(batch[..., -1])
        if now["done"].any():
            now = env.reset(now.set("_reset", now["done"].clone()))
        out.append(batch.contiguous())
    env.close()
    return out


def rows(data: TensorDict) -> set[tuple[float, ...]]:
    """Transitions as a set."""
    keys = [
        "observation",
        "action",
        *[("next", name) for name in ("observation", "reward", "terminated", "truncated", "done")],
    ]
    parts = [data.get(key).reshape(data.numel(), -1).double() for key in keys]
    return {tuple(row) for row in torch.cat(parts, 1).tolist()}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_the_transitions_are_those_that_collectors_gave(tmp_path: Path, num_envs: int, flat: bool) -> None:
    batches = collected(num_envs, 40, 160)
    theirs = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "theirs"))
    buffer = DiskReplayBuffer(tmp_path / "ours", 1000, batch_size=8, max_timesteps=15)
    for batch in batches:
        batch = batch.reshape(-1) if flat else batch
        index = buffer.extend(batch)
        theirs.extend(batch.reshape(-1))
        assert index.shape == (*batch.batch_size, 2)
        stored = buffer.disk.batch(index.reshape(-1, 2).numpy(), timestep_level=True)
        assert torch.equal(stored["observation"], batch["observation"].reshape(-1, 4))
        assert rows(buffer[:]) <= rows(theirs[:])
    buffer.end_episodes()
    assert rows(buffer[:]) == rows(theirs[:]) and len(buffer) == 160
    assert verify(tmp_path / "ours") == []


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_trajectory_that_ended_is_not_flagged_as_cut_short_and_others_are(tmp_path: Path, end: str) -> None:
    buffer = DiskReplayBuffer(tmp_path, 1000, max_timesteps=4)
    ids, t = torch.tensor([0] * 3 + [1] * 6 + [2] * 2), torch.tensor([*range(3), *range(6), *range(2)])
    of_next = {name: torch.zeros(11, dtype=torch.bool) for name in ("terminated", "truncated")}
    of_next[end][[2, 8]] = True  # the last steps of the first two; the second one has two parts
    buffer.extend(
        TensorDict({"x": t, "collector": {"traj_ids": ids}, "next": {"x": t + 1, "reward": t, **of_next}}, [11])
    )
    buffer.close()
    cut = [bool(flags & CUT) for flags in flags_of(tmp_path).values()]
    assert (ReplayBuffer.from_folder(tmp_path).episode_lens.tolist(), cut) == ([3, 4, 2, 2], [False, True, False, True])


def test_a_batch_has_the_keys_shapes_and_dtypes_of_theirs_and_their_losses_take_it(tmp_path: Path) -> None:
    (batch,) = collected(1, 60, 60)
    theirs = TensorDictReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "theirs"), batch_size=16)
    buffer = DiskReplayBuffer(tmp_path / "ours", 100, batch_size=16, alpha=0.7, beta=0.5)
    theirs.extend(batch)
    buffer.extend(batch)
    ours, expected = buffer.sample(), theirs.sample()
    for key in ours.keys(True, True):
        if key not in ("index", "priority_weight"):
            assert (ours[key].shape, ours[key].dtype) == (expected[key].shape, expected[key].dtype), key
    assert ours["index"].shape == (16, 2) and ours["priority_weight"].shape == (16,)
    network = torch.nn.Linear(4, 2)
    loss = DQNLoss(
        QValueActor(network, spec=GymEnv("CartPole-v1").action_spec), action_space="one_hot", delay_value=False
    )
    loss(ours)["loss"].backward()
    assert network.weight.grad is not None and ours["td_error"].shape == (16, 1)
    buffer.update_tensordict_priority(ours)
    found = buffer.disk.priorities(ours["index"].numpy())
    newest = {tuple(index): float(error) for index, error in zip(ours["index"].tolist(), ours["td_error"], strict=True)}
    given = np.array([newest[tuple(index)] for index in ours["index"].tolist()])
    np.testing.assert_allclose(found, (np.abs(given) + 1e-8) ** 0.7, rtol=1e-5)


def test_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    first, second = collected(1, 50, 100)
    buffer = DiskReplayBuffer(tmp_path, 80, batch_size=4)
    with pytest.raises(NotEnoughDataError, match="nothing was stored yet"):
        buffer.sample()
    buffer.extend(first)
    buffer.close()
    again = DiskReplayBuffer(tmp_path, 80, batch_size=4)
    assert len(again) == 50 and rows(again[:]) == rows(first)
    again.extend(second)
    assert len(again) == 80 and again.sample().batch_size == (4,)
    again.empty()
    assert len(again) == 0
    again.close()
    with pytest.raises(SchemaMismatchError, match="capacity"):
        DiskReplayBuffer(tmp_path, 81)


def test_returns_of_several_steps_are_sums_of_rewards(tmp_path: Path) -> None:
    (batch,) = collected(1, 40, 40)
    buffer = DiskReplayBuffer(tmp_path, 100, n_steps=3, gamma=0.5)
    buffer.extend(batch)
    buffer.end_episodes()
    data = buffer.sample(200)
    steps = data["steps_to_next_obs"]
    expected = torch.tensor([0.0, 1.0, 1.5, 1.75])[steps]
    assert torch.equal(data["next", "reward"], expected) and steps.unique().tolist() == [1, 2, 3]
    at = {tuple(row.tolist()): i for i, row in enumerate(batch["observation"])}
    places = [at[tuple(row.tolist())] for row in data["observation"]]
    last = torch.tensor(places)[:, None] + steps - 1
    assert torch.equal(data["next", "observation"], batch["next", "observation"][last[:, 0]])
    assert torch.equal(data["next", "terminated"], batch["next", "terminated"][last[:, 0]])


def test_transforms_run_on_batches_and_backwards_on_what_is_stored(tmp_path: Path) -> None:
    (batch,) = collected(1, 20, 20)
    buffer = DiskReplayBuffer(tmp_path, 100, batch_size=8).append_transform(
        RewardScaling(1.0, 2.0, [("next", "reward")])
    )
    buffer.extend(batch)
    assert (buffer.sample()["next", "reward"] == 3).all()  # r * scale + loc, of rewards of 1
    buffer.append_transform(lambda data: data.set("more", data["next", "reward"] + 1))
    assert (buffer.sample()["more"] == 4).all() and "more" not in buffer.disk.schema.fields


def test_what_cannot_be_stored_is_told(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(tmp_path, 10)
    with pytest.raises(SchemaError, match=r"expected \(N,\) or \(B, T\)"):
        buffer.extend(TensorDict({"x": torch.zeros(2, 2, 2)}, (2, 2, 2)))
    with pytest.raises(SchemaError, match="no tensor"):
        buffer.extend(TensorDict({"x": torch.zeros(2), "name": "a"}, (2,)))


def test_each_row_of_a_batch_goes_on_in_its_own_episode(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(tmp_path, 100)
    for start in (0, 3):
        numbers = start + torch.tensor([[0, 1, 2], [3, 4, 5]])  # the second row begins with what follows the first one
        done = torch.zeros(2, 3, 1, dtype=torch.bool)
        after = {"observation": numbers + 1, "done": done, "terminated": done}
        index = buffer.extend(TensorDict({"observation": numbers, "next": after}, (2, 3)))
        stored = buffer.disk.batch(index.reshape(-1, 2).numpy(), timestep_level=True)["observation"]
        assert torch.equal(stored, numbers.reshape(-1)) and buffer.disk.num_episodes == 2
    buffer.end_episodes()
    whole = [buffer.disk.episode(i)["observation"].tolist() for i in range(2)]
    assert whole == [[0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8, 9]]


def counted(ids: list[int]) -> TensorDict:
    """Steps whose observations count on, whatever trajectories they are of."""
    numbers, done = torch.arange(len(ids)), torch.zeros(len(ids), 1, dtype=torch.bool)
    after = {"observation": numbers + 1, "done": done, "terminated": done}
    return TensorDict(
        {"observation": numbers, "collector": {"traj_ids": torch.tensor(ids)}, "next": after}, (len(ids),)
    )


def test_another_trajectory_begins_another_episode_even_if_its_observation_follows(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(tmp_path, 100)
    buffer.extend(counted([5, 5, 7, 7, 7]))
    buffer.end_episodes()
    assert buffer.disk.episode_lens.tolist() == [2, 3]


def test_of_more_trajectories_than_may_go_on_the_oldest_end(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(tmp_path, 100, spare_slots=4)
    buffer.extend(counted([0, 1, 2, 0]))
    assert len(open_episodes(buffer.disk)) == 2 and buffer.disk.episode_lens.tolist() == [1] * 4


def test_values_that_numpy_lacks_are_stored_as_wider_ones(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(tmp_path, 10)
    half = torch.arange(3).bfloat16()
    index = buffer.extend(TensorDict({"x": half, "next": {"done": torch.tensor([False, False, True])}}, (3,)))
    stored = buffer.disk.batch(index.numpy(), timestep_level=True)["x"]
    assert stored.dtype == torch.float32 and torch.equal(stored, half.float())


def test_steps_may_come_one_by_one(tmp_path: Path) -> None:
    batches = collected(2, 20, 40)
    buffer = DiskReplayBuffer(tmp_path, 100)
    for t in range(10):
        for batch in (batches[0][:, t], batches[1][:1, t]):
            index = buffer.extend(batch)
            assert torch.equal(batch["index"], index)
    assert buffer.add(batches[1][1, 9]).shape == (2,) and buffer.extend(batches[0][0, :0]).shape == (0, 2)
    assert len(buffer) == buffer.write_count == 31
    buffer.end_episodes()
    everything = torch.cat([batches[0].reshape(-1), batches[1][0], batches[1][1, 9:]])
    assert rows(buffer[:]) == rows(everything.exclude("index"))


def sliced(data: TensorDict, length: int) -> dict[tuple[float, ...], TensorDict]:
    """Slices by what they begin with."""
    parts = data.exclude("index", "collector", "done", "terminated", "truncated").reshape(-1, length)
    return {tuple(one["observation"][0].tolist()): one for one in parts}


def test_slices_are_those_of_their_slice_sampler(tmp_path: Path) -> None:
    batches = collected(2, 100, 200)
    memory, sampler = LazyMemmapStorage(1000, scratch_dir=tmp_path / "theirs"), SliceSampler(slice_len=5, traj_key=IDS)
    theirs = TensorDictReplayBuffer(storage=memory, sampler=sampler, batch_size=8000)
    buffer = DiskReplayBuffer(tmp_path / "ours", 1000, batch_size=8000, slice_len=5)
    whole = torch.cat([torch.cat([batch[i] for batch in batches]) for i in range(2)])
    whole["is_init"] = whole["next", "step_count"] = whole["step_count"] = torch.zeros(len(whole), 1, dtype=torch.bool)
    for data in (theirs, buffer):
        data.extend(whole.clone())
    buffer.end_episodes()
    data = buffer.sample()
    ours, expected = sliced(data, 5), sliced(theirs.sample(), 5)
    assert len(ours) == sum(max(0, length - 4) for length in buffer.disk.episode_lens)
    for start, one in expected.items():
        assert set(ours[start].keys(True, True)) == set(one.keys(True, True))
        assert (ours[start] == one).all()
        assert one["next", "truncated"].flatten().tolist() == [False] * 4 + [True]
    steps = buffer.disk.batch(data["index"].numpy(), timestep_level=True)
    assert torch.equal(steps["observation"], data["observation"])
    buffer.close()
    with pytest.raises(SchemaError, match="does not divide"):
        DiskReplayBuffer(tmp_path / "ours", 1000, batch_size=7, slice_len=5).sample()


def test_a_trajectory_shorter_than_a_slice_gives_a_short_one_if_told_so(tmp_path: Path) -> None:
    (batch,) = collected(1, 60, 60)
    buffer = DiskReplayBuffer(tmp_path, 100, batch_size=408, slice_len=12, strict_length=False, alpha=0.6, beta=0.4)
    buffer.extend(batch)
    buffer.end_episodes()
    lengths = buffer.disk.episode_lens
    assert lengths.min() < 12 < lengths.max()
    data = buffer.sample()
    ends = data["next", "truncated"].flatten().nonzero().flatten()
    found = torch.diff(ends, prepend=torch.tensor([-1]))
    assert set(found.tolist()) == {min(12, length) for length in lengths.tolist()} and len(ends) == 34
    assert torch.equal(data["next", "done"], data["next", "truncated"])
    assert rows(
        data.set(("next", "truncated"), data["next", "truncated"] & False).set(
            ("next", "done"), data["next", "terminated"]
        )
    ) <= rows(batch)
    assert data["priority_weight"].shape == (len(data),)
    data["td_error"] = torch.rand(len(data), 1)
    buffer.update_tensordict_priority(data)


def of_episode(number: int, length: int) -> TensorDict:
    """The rows of an episode without "next": what led to an observation stands beside it, as TD-MPC2 has it."""
    steps = torch.arange(length + 1)
    return TensorDict(
        {
            "obs": 100 * number + steps[:, None],
            "action": torch.where(steps[:, None] == 0, torch.nan, steps[:, None] + torch.zeros(2)),
            "reward": torch.where(steps == 0, torch.nan, steps.float()),
            "terminated": (steps == length) & (number % 2 == 0),
            "episode": torch.full((length + 1,), number),
        },
        (length + 1,),
    )


def test_slices_of_rows_without_next_stay_within_what_traj_key_numbers(tmp_path: Path) -> None:
    lengths = (5, 9, 3, 6)
    buffer = DiskReplayBuffer(tmp_path, 1000, batch_size=4000, slice_len=4, traj_key="episode")
    for number, length in enumerate(lengths):
        buffer.extend(of_episode(number, length))
    assert buffer.disk.episode_lens.tolist() == [length + 1 for length in lengths]
    found = buffer.sample().exclude("index", "next").reshape(-1, 4)
    starts = {tuple(one["obs"].flatten().tolist()): one for one in found}
    assert len(starts) == sum(length + 1 - 3 for length in lengths)  # all there are
    for first, *_ in starts:
        number, t = divmod(first, 100)
        one, expected = starts[tuple(range(first, first + 4))], of_episode(number, lengths[number])[t : t + 4]
        assert set(one.keys()) == set(expected.keys())
        for key, values in expected.items():
            assert torch.equal(one[key].nan_to_num(), values.nan_to_num())


def test_steps_of_which_nothing_tells_the_trajectory_are_not_joined(tmp_path: Path) -> None:
    for number, options in enumerate([{"slice_len": 4}, {"n_steps": 3}]):
        with pytest.raises(SchemaError, match="nothing tells where a trajectory ends"):
            DiskReplayBuffer(tmp_path / str(number), 100, batch_size=4, **options).extend(of_episode(0, 8))
    with pytest.raises(SchemaError, match=r"traj_key=\('id',\) is not there; there is .*episode"):
        DiskReplayBuffer(tmp_path / "other", 100, batch_size=4, traj_key="id").extend(of_episode(0, 8))
    marked = of_episode(0, 8).set("done", torch.arange(9) % 3 == 2)
    buffer = DiskReplayBuffer(tmp_path / "marked", 100, batch_size=4, slice_len=2)
    buffer.extend(marked.exclude("terminated"))
    assert buffer.disk.episode_lens.tolist() == [3, 3, 3]


@pytest.mark.parametrize("slice_len", [None, 3])
def test_the_rewards_and_ends_of_a_team_are_given_as_they_came(tmp_path: Path, slice_len: int | None) -> None:
    observations, number = torch.rand(2, 9, 3, 4), torch.arange(16.0).reshape(2, 8, 1, 1).expand(2, 8, 3, 1)
    flags = torch.zeros(2, 8, 3, 1, dtype=torch.bool)
    ended = flags[:, :, 0].clone()
    ended[:, -1] = True
    team = {"observation": observations[:, :-1], "action": torch.rand(2, 8, 3, 2)}
    after = {
        "observation": observations[:, 1:],
        "reward": number,
        "done": flags | (number % 5 == 0),
        "terminated": flags,
    }
    own = {"done": ended, "terminated": ended & False, "truncated": ended}
    data = TensorDict({"agents": team, "next": {"agents": after, **own}}, (2, 8))
    buffer = DiskReplayBuffer(tmp_path, 100, batch_size=300, slice_len=slice_len)
    buffer.extend(data.clone())
    found, given = buffer.sample(), data.reshape(-1)
    which = found["next", "agents", "reward"][:, 0, 0].long()
    assert set(which.tolist()) == set(range(16))
    for key in [("agents", name) for name in team] + [("next", "agents", name) for name in after]:
        assert torch.equal(found[key], given[which][key]), key
    assert set(found["next", "agents"].keys()) == set(after)


def test_a_checkpoint_and_a_pickle_are_the_name_of_the_folder(tmp_path: Path) -> None:
    first, second = collected(1, 30, 60)
    buffer = DiskReplayBuffer(tmp_path / "data", 100, batch_size=4, prefetch=2)
    buffer.extend(first)
    for _ in range(5):
        assert rows(buffer.sample()) <= rows(first)
    buffer.dumps(tmp_path / "checkpoint")
    state, copied = buffer.state_dict(), pickle.loads(pickle.dumps(buffer))
    buffer.extend(second)
    buffer.close()
    for load in (lambda b: b.loads(tmp_path / "checkpoint"), lambda b: b.load_state_dict(state)):
        again = DiskReplayBuffer(tmp_path / "data", 100, batch_size=4, prefetch=2)
        load(again)
        assert len(again) == 60
        again.close()
        with pytest.raises(SchemaError, match="open that folder"):
            load(DiskReplayBuffer(tmp_path / "other", 100, batch_size=4, prefetch=2))
    assert len(copied) == 60 and rows(copied[:]) <= rows(torch.cat([first, second]))


def test_errors_that_come_with_the_steps_are_their_priorities(tmp_path: Path) -> None:
    (batch,) = collected(1, 30, 30)
    batch["td_error"] = torch.arange(30.0)[:, None]
    buffer = DiskReplayBuffer(tmp_path, 100, batch_size=4, alpha=1.0, beta=0.5, eps=0.5)
    index = buffer.extend(batch)
    assert buffer.disk.priorities(index.numpy()).tolist() == (torch.arange(30) + 0.5).tolist()
    buffer.extend(batch, update_priority=False)
    assert buffer.disk.priorities(batch["index"].numpy()).tolist() == [29.5] * 30  # the highest so far


def test_options_that_exclude_each_other_are_told(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="give both"):
        DiskReplayBuffer(tmp_path, 10, alpha=0.6)
    with pytest.raises(SchemaError, match="leave one out"):
        DiskReplayBuffer(tmp_path, 10, slice_len=2, n_steps=2)


def test_what_is_stored_before_an_error_keeps_what_followed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = collected(1, 12, 12)
    buffer = DiskReplayBuffer(tmp_path, 100, batch_size=4)
    buffer.extend(batch[:3])
    extend = Episode.extend

    def full(self: Episode, **steps: Any) -> None:
        extend(self, **{name: column[:2] for name, column in steps.items()})
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Episode, "extend", full)
        with pytest.raises(OSError, match="full"):
            buffer.extend(batch[3:8])
    for _ in range(2):
        with pytest.raises(SchemaError, match="'action', extend: missing"):
            buffer.extend(batch[8:].exclude("action"))
    index = buffer.extend(batch[5:])
    assert (index >= 0).all()
    buffer.end_episodes()
    assert rows(buffer[:]) == rows(batch.exclude("index"))
    assert buffer.disk.num_episodes == 2 + int(batch["next", "done"][:-1].sum())


def test_the_index_of_what_is_stored_is_that_of_batches(tmp_path: Path) -> None:
    (batch,) = collected(1, 40, 40)
    buffer = DiskReplayBuffer(tmp_path, 100, batch_size=4, max_timesteps=15)
    index = buffer.extend(batch)
    buffer.end_episodes()
    again = buffer.disk.batch(index.numpy(), timestep_level=True)
    assert torch.equal(again["observation"], batch["observation"]) and index.unique(dim=0).shape == (40, 2)
