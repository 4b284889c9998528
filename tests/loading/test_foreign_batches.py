"""Batches of other code, by its own formula: Diffusion Policy, LeRobot, ACT, Decision Transformer, Dreamer, R2D2.

Each sampler is written anew as a loop over episodes, and every item that it can give is compared to the last bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memmap_buffer import (
    Advantages,
    ConcatBuffer,
    Field,
    NotEnoughDataError,
    Offsets,
    ReplayBuffer,
    Returns,
    SchemaError,
    Trajectory,
    Window,
    advantages,
    discounted_returns,
)

LENGTHS = (5, 23, 1, 16, 9, 2, 30)


def steps_of(number, length, rng):
    return {
        "observation": rng.normal(size=(length, 3)).astype(np.float32),
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "reward": rng.integers(-3, 9, length).astype(np.float32),
        "t": np.arange(length),
        "episode": np.full(length, number),
    }


@pytest.fixture
def data(tmp_path):
    """The episodes as dicts of arrays, and a buffer of them; the even ones are chosen by `task`."""
    rng = np.random.default_rng(0)
    episodes = [steps_of(i, n, rng) for i, n in enumerate(LENGTHS)]
    fields = {"observation": ("float", 3), "action": ("float", 2), "reward": "float", "t": "int", "episode": "int"}
    with ReplayBuffer(tmp_path / "a", 20, 40, fields, meta_fields={"task": "int", "env": "U3"}) as buffer:
        for i, episode in enumerate(episodes):
            buffer.store_episode(**episode, task=i % 2, env="abc"[i % 3])
        yield SimpleNamespace(episodes=episodes, buffer=buffer)


def padded(rows, before, after, edge=False):
    """Rows with so many more in front and behind, zeros or the nearest row."""
    front, behind = (rows[:1], rows[-1:]) if edge else (rows[:1] * 0, rows[:1] * 0)
    return np.concatenate([front.repeat(before, 0), rows, behind.repeat(after, 0)])


class TestDiffusionPolicy:
    """`SequenceSampler`: starts -pad_before … len - length + pad_after of each chosen episode, the edge repeated."""

    @pytest.mark.parametrize(("length", "before", "after"), [(16, 1, 7), (16, 0, 0), (8, 7, 7), (1, 0, 0), (16, 15, 0)])
    @pytest.mark.parametrize("task", [None, 0])
    def test_every_window_is_one_of_the_sequence_sampler_in_its_order(self, data, length, before, after, task):
        want = []
        for i, episode in enumerate(data.episodes):
            n = LENGTHS[i]
            for start in range(-before, n - length + after + 1) if task is None or i % 2 == task else ():
                low, high = max(start, 0), min(start + length, n)
                rows = {key: values[low:high] for key, values in episode.items()}
                want.append({k: padded(v, low - start, start + length - high, edge=True) for k, v in rows.items()})
        view = Window(length, pad_before=before, pad_after=after, padding="edge")
        options = {"view": view} | ({} if task is None else {"filter_meta": {"task": task}})
        assert len(data.buffer.dataset(**options)) == len(want)
        batch = data.buffer.batch(**options)
        for key in data.episodes[0]:
            np.testing.assert_array_equal(batch[key], np.stack([item[key] for item in want]))

    def test_conditions_on_steps_hold_where_a_window_begins(self, data):
        view = Window(8, pad_before=1, pad_after=3, padding="edge")
        every = data.buffer.batch(view=view)
        keep = (every["_start"] >= 0) & (every["_start"] < 4)
        some = data.buffer.batch(view=view, filter_fields={"t": (0, 4)})
        assert torch.equal(some["action"], every["action"][keep])

    @pytest.mark.parametrize("drop", [7, 0, 1, 40])
    def test_lerobot_leaves_the_last_frames_of_every_episode_out(self, data, drop):
        want = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n - drop)]
        view = Offsets(observation=(-1, 0), action=range(-1, 15), drop_last=drop, padding="edge")
        if not want:
            with pytest.raises(NotEnoughDataError, match="none of 7 episodes has an item"):
                data.buffer.dataset(view=view)
            return
        batch = data.buffer.batch(view=view, return_indices=True)
        assert [tuple(row) for row in batch["_indices"].tolist()] == want
        for (i, t), rows in zip(want, batch["action"], strict=True):
            nearest = np.clip(np.arange(t - 1, t + 15), 0, LENGTHS[i] - 1)
            np.testing.assert_array_equal(rows, data.episodes[i]["action"][nearest])


class TestACT:
    """`EpisodicDataset`: the observation at a step, and all actions from it on, zero behind, normalised with them."""

    def test_an_observation_and_a_chunk_of_zero_padded_actions_with_their_mask(self, data):
        chunk = 20
        view = Offsets(observation=(0,), action=range(chunk))
        batch = data.buffer.batch(view=view, return_indices=True)
        for row, (i, t) in enumerate(batch["_indices"].tolist()):
            rest = data.episodes[i]["action"][t : t + chunk]
            np.testing.assert_array_equal(batch["action"][row], padded(rest, 0, chunk - len(rest)))
            np.testing.assert_array_equal(~batch["_mask_action"][row], np.arange(chunk) >= len(rest))
            np.testing.assert_array_equal(batch["observation"][row, 0], data.episodes[i]["observation"][t])

    @pytest.mark.parametrize("keep", [False, True])
    def test_padding_is_normalised_as_there_or_left_at_zero(self, data, keep):
        found = data.buffer.statistics()
        normalize = found.normalize("action", eps=0.01, add_eps=True, keep_padding=keep)
        batch = data.buffer.batch(view=Offsets(action=range(20)), transform=normalize)
        before = data.buffer.batch(view=Offsets(action=range(20)))
        mean, std = found["action"].mean, found["action"].std + 0.01
        want = ((before["action"].numpy() - mean) / std).astype(np.float32)
        want[~before["_mask_action"].numpy()] *= not keep
        np.testing.assert_array_equal(batch["action"], want)


class TestDecisionTransformer:
    """CORL: `__prepare_sample`, padded behind; the first authors' `get_batch`, padded in front."""

    scale = 0.001

    def to_go(self, data):
        """Returns to go as a field, which whole numbers make exact."""
        data.buffer.add_field("to_go", "float", lambda episode: discounted_returns(episode["reward"]))
        return [np.cumsum(e["reward"][::-1], dtype=np.float32)[::-1] for e in data.episodes]

    @pytest.mark.parametrize("length", [1, 10, 25])
    def test_sequences_of_corl_are_windows_padded_behind(self, data, length):
        returns, found = self.to_go(data), data.buffer.statistics()
        normalize = found.normalize("observation", add_eps=True, keep_padding=True)
        batch = data.buffer.batch(view=Window(length), transform=normalize, return_indices=True)
        mean, std = found["observation"].mean, found["observation"].std + 1e-6
        assert len(batch["_start"]) == sum(LENGTHS)
        for row, (i, t) in enumerate(batch["_indices"].tolist()):
            episode = {**data.episodes[i], "to_go": returns[i]}
            part = {key: values[t : t + length] for key, values in episode.items()}
            part["observation"] = ((part["observation"] - mean) / std).astype(np.float32)
            missing = length - len(part["t"])
            for key in ("observation", "action", "to_go"):
                np.testing.assert_array_equal(batch[key][row], padded(part[key], 0, missing))
            np.testing.assert_array_equal(batch["_start"][row] + torch.arange(length), np.arange(t, t + length))
            np.testing.assert_array_equal(batch["_mask"][row], np.arange(length) < length - missing)

    @pytest.mark.parametrize("length", [1, 10, 25])
    def test_sequences_of_the_first_authors_are_windows_padded_in_front(self, data, length):
        returns = self.to_go(data)
        batch = data.buffer.batch(view=Window(length, pad_in_front=True), return_indices=True)
        for row, (i, t) in enumerate(batch["_indices"].tolist()):
            rest = {key: values[t : t + length] for key, values in {**data.episodes[i], "to_go": returns[i]}.items()}
            missing = length - len(rest["t"])
            for key, values in rest.items():
                np.testing.assert_array_equal(batch[key][row], padded(values, missing, 0))
            np.testing.assert_array_equal(batch["_mask"][row], np.arange(length) >= missing)
            steps = torch.where(batch["_mask"][row], batch["_start"][row] + torch.arange(length), 0)
            np.testing.assert_array_equal(steps, padded(rest["t"], missing, 0))
            assert batch["_lens"][row] == len(rest["t"])


class TestDreamer:
    """`sample_episodes`: from a random step on, and on into other episodes until the sequence is full.

    Which episode follows is random there, and the next of the environment here; so the loop is given that.
    """

    @staticmethod
    def sequence(episodes, start, length):
        """From a step of the first of some episodes on."""
        out, flags = {key: [] for key in episodes[0]}, []
        for episode in episodes:
            rows = {key: values[start:][: length - len(flags)] for key, values in episode.items()}
            for key, values in rows.items():
                out[key] += list(values)
            flags += [k == 0 for k in range(len(rows["t"]))]
            start = 0
            if len(flags) == length:
                return {**{key: np.array(values) for key, values in out.items()}, "_is_first": np.array(flags)}
        return None

    @pytest.mark.parametrize("stream", [None, "env"])
    @pytest.mark.parametrize("length", [2, 16, 64])
    def test_every_sequence_is_one_of_the_sampler(self, data, length, stream):
        want = {}
        for i, n in enumerate(LENGTHS):
            line = data.episodes[i :: 1 if stream is None else 3]
            for start in range(n):
                item = self.sequence(line, start, length)
                want |= {(i, start): item} if item else {}
        options = {"view": Window(length, boundary="continue", stream=stream), "return_indices": True}
        if not want:
            with pytest.raises(NotEnoughDataError, match="none of 7 episodes has an item"):
                data.buffer.dataset(**options)
            return
        seen = []
        for batch in data.buffer.dataloader(8, shuffle=True, seed=0, **options):
            for row, index in enumerate(map(tuple, batch["_indices"].tolist())):
                seen.append(index)
                for key, values in want[index].items():
                    np.testing.assert_array_equal(batch[key][row], values)
                ends = [t == LENGTHS[e] - 1 for e, t in zip(want[index]["episode"], want[index]["t"], strict=True)]
                assert batch["_is_last"][row].tolist() == ends
        assert sorted(seen) == sorted(want)  # an end is a start as often as a middle

    def test_filters_and_folders_keep_their_streams(self, data, tmp_path):
        with ReplayBuffer(tmp_path / "b", 5, 40, data.buffer.schema.fields, data.buffer.schema.meta_fields) as other:
            for n in (4, 6):
                other.store_episode(**steps_of(100 + n, n, np.random.default_rng(n)), task=0, env="a")
            both = ConcatBuffer([data.buffer.folder, other])
            options = {"view": Window(8, boundary="continue"), "filter_meta": {"task": 0}, "return_indices": True}
            batch = both.batch(**options)
            for folder, episode in zip(batch["_indices"][:, 0], batch["episode"], strict=True):
                assert (episode >= 100).all() if folder else (episode % 2 == 0).all()
            assert (batch["_indices"][:, 0] == 1).sum() == 10 - 7
            assert len(batch["t"]) == sum(LENGTHS[::2]) - 7 + 3
            alone = data.buffer.batch(**options)
            assert torch.equal(alone["observation"], batch["observation"][batch["_indices"][:, 0] == 0])
            drawn = both.sample(64, **options, seed=0)
            index = {tuple(row): i for i, row in enumerate(batch["_indices"].tolist())}
            chosen = [index[tuple(row)] for row in drawn["_indices"].tolist()]
            assert torch.equal(drawn["action"], batch["action"][chosen])

    def test_ends_within_a_stored_episode_are_told(self, tmp_path):
        fields = {"x": "int", "terminated": "bool"}
        with ReplayBuffer(tmp_path / "c", 5, 40, fields) as buffer:
            buffer.store_episode(x=np.arange(6), terminated=np.arange(6) == 2)
            buffer.store_episode(x=np.arange(6, 9), terminated=np.zeros(3, bool))
            batch = buffer.batch(view=Window(5, boundary="continue"))
            assert batch["x"].tolist() == [list(range(start, start + 5)) for start in range(5)]
            for row, first, last in zip(batch["x"], batch["_is_first"], batch["_is_last"], strict=True):
                assert last.tolist() == [x in (2, 5, 8) for x in row]
                assert first.tolist() == [True, *[x in (3, 6) for x in row[1:]]]

    def test_what_one_episode_alone_can_mean_is_refused(self, data):
        for options, match in (
            ({"view": Window(4, boundary="continue"), "ragged": True}, "gives no sequences that differ in length"),
            ({"view": Window(4, boundary="continue", stream="envs")}, "stream"),
        ):
            with pytest.raises(SchemaError, match=match):
                data.buffer.dataset(**options)


class TestR2D2:
    """A block of an actor's: burn-in, learning and forward steps of each sequence, n-step rewards and discounts."""

    burn_in, learning, forward, gamma = 4, 5, 3, 0.5

    def sequences(self, episode, n, done):
        """The learning parts of an episode, one after another, each with what comes before and behind."""
        rewards = np.append(episode["reward"], np.zeros(self.forward - 1, np.float32))
        kernel = [self.gamma ** (self.forward - 1 - i) for i in range(self.forward)]
        returns = np.convolve(rewards, kernel, "valid").astype(np.float32)
        short = min(n, self.forward)
        tail = [0.0] * short if done else [self.gamma**k for k in range(short, 0, -1)]
        discounts = np.float32([self.gamma**self.forward] * (n - short) + tail)
        for start in range(0, n, self.learning):
            learned = slice(start, min(start + self.learning, n))
            burn_in = min(start, self.burn_in)
            forward = min(self.forward, n + 1 - learned.stop)
            yield {
                "observation": episode["observation"][start - burn_in : learned.stop + forward],
                "hidden": episode["hidden"][start - burn_in],
                "action": episode["action"][learned],
                "return": returns[learned],
                "discount": discounts[learned],
                "burn_in": burn_in,
            }

    @pytest.fixture
    def recorded(self, tmp_path):
        rng, episodes = np.random.default_rng(1), []
        fields = {"observation": Field("float", 3, final=True), "hidden": ("float", (2, 4)), "action": "int"}
        fields |= {"reward": "float", "terminated": "bool"}
        with ReplayBuffer(tmp_path / "r", 20, 40, fields) as buffer:
            for i, n in enumerate(LENGTHS):
                episode = {
                    "observation": rng.normal(size=(n + 1, 3)).astype(np.float32),
                    "hidden": rng.normal(size=(n, 2, 4)).astype(np.float32),
                    "action": rng.integers(0, 9, n),
                    "reward": rng.integers(-3, 9, n).astype(np.float32),
                    "terminated": (np.arange(n) == n - 1) & (i % 2 == 0),
                }
                buffer.store_episode(**episode)
                episodes.append(episode)
            yield buffer, episodes

    def view(self):
        return Window(
            self.burn_in + self.learning + self.forward,
            stride=self.learning,
            pad_before=self.burn_in,
            pad_after=self.learning + self.forward - 1,
            burn_in=self.burn_in,
            n_steps=self.forward,
            gamma=self.gamma,
            start_fields=["hidden"],
        )

    def test_every_sequence_of_the_blocks_is_a_window(self, recorded):
        buffer, episodes = recorded
        want = [s for i, e in enumerate(episodes) for s in self.sequences(e, LENGTHS[i], done=i % 2 == 0)]
        batch = buffer.batch(view=self.view())
        assert len(batch["_start"]) == len(want)
        for row, item in enumerate(want):
            learned = batch["_loss_mask"][row]
            assert learned.sum() == len(item["action"])
            for key, name in (("action", "action"), ("return", "_return"), ("discount", "_discount")):
                np.testing.assert_array_equal(batch[name][row][learned], item[key])
            there = batch["_mask_observation"][row]
            np.testing.assert_array_equal(batch["observation"][row][there], item["observation"])
            assert (batch["observation"][row][~there] == 0).all()
            np.testing.assert_array_equal(batch["hidden"][row], item["hidden"])
            assert (torch.arange(len(there))[there][: item["burn_in"]] < self.burn_in).all()
            # The state that follows a learned step stands k entries on.
            at = torch.arange(len(there))[learned]
            assert there[at + batch["n_step_lens"][row][learned]].all()

    def test_returns_of_every_entry_are_those_of_single_transitions(self, recorded):
        buffer, _ = recorded
        options = {"gamma": 0.9, "include_metadata": False, "return_indices": True}
        single = buffer.batch(n_steps=4, **options)
        known = {tuple(row): i for i, row in enumerate(single["_indices"].tolist())}
        batch = buffer.batch(view=Window(6, n_steps=4, gamma=0.9, pad_before=2), return_indices=True)
        for row, (serial, start) in enumerate(batch["_indices"].tolist()):
            for k in range(6):
                i = known.get((serial, start + k))
                for name in ("_return", "_discount", "n_step_lens"):
                    assert batch[name][row, k] == (0 if i is None else single[name][i]), name
        assert batch["_loss_mask"].sum(dim=0).tolist()[2:] == [0, 0, 0, 0]

    def test_windows_of_returns_are_drawn_by_priority_and_by_goal_free_options_alike(self, recorded):
        buffer, _ = recorded
        drawn = buffer.sample(9, view=self.view(), prioritized=True, seed=3)
        every = buffer.batch(view=self.view(), return_indices=True)
        index = {tuple(row): i for i, row in enumerate(every["_indices"].tolist())}
        chosen = [index[tuple(row)] for row in drawn["_indices"].tolist()]
        for name in ("observation", "hidden", "_return", "_discount", "_loss_mask"):
            assert torch.equal(drawn[name], every[name][chosen]), name


class TestWholeEpisodes:
    """CleanRL's estimates of advantages, and d3rlpy's returns-to-go."""

    @staticmethod
    def clean(rewards, values, next_value, next_done, gamma, lambda_):
        """One environment's rollout that is one episode."""
        out, last = np.zeros_like(rewards), np.float32(0)
        for t in reversed(range(len(rewards))):
            goes_on = np.float32(1.0 - next_done) if t == len(rewards) - 1 else np.float32(1)
            following = next_value if t == len(rewards) - 1 else values[t + 1]
            delta = rewards[t] + gamma * following * goes_on - values[t]
            out[t] = last = delta + gamma * lambda_ * goes_on * last
        return out, out + values

    @pytest.mark.parametrize("cut", [False, True])
    def test_advantages_of_episodes_are_those_of_cleanrl_to_the_last_bit(self, tmp_path, cut):
        rng = np.random.default_rng(2)
        fields = {"reward": "float", "terminated": "bool", "value": Field("float", (), final=cut)}
        with ReplayBuffer(tmp_path / "g", 20, 40, fields) as buffer:
            episodes = []
            for n in LENGTHS:
                rewards, values = rng.normal(size=n).astype("f4"), rng.normal(size=n + 1).astype("f4")
                episodes.append((rewards, values))
                buffer.store_episode(
                    reward=rewards,
                    terminated=(np.arange(n) == n - 1) & (not cut),
                    value=values if cut else values[:-1],
                )
            view = Trajectory(final_observation=cut)
            (batch,) = buffer.dataloader(20, view=view, transform=Advantages(gamma=0.97, lambda_=0.9))
            for i, (rewards, values) in enumerate(episodes):
                n = len(rewards)
                want = self.clean(rewards, values[:-1], values[-1], not cut, 0.97, 0.9)
                for name, column in zip(("advantage", "lambda_return"), want, strict=True):
                    # NumPy 1 computes a float32 by a number of Python's in float64: its sums are not CleanRL's
                    near = 0 if np.__version__ >= "2" else 1e-5
                    np.testing.assert_allclose(batch[name][i, :n], column, rtol=near, atol=near)
                    assert (batch[name][i, n:] == 0).all()

    def test_numbers_with_an_axis_more_have_advantages_with_one(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, 2, 5, {"reward": "float", "terminated": "bool", "value": "float"})
        buffer.store_episode(reward=np.arange(5.0), terminated=np.arange(5) == 4, value=np.ones(5))
        plain = buffer.batch(transform=Advantages())
        wide = buffer.batch(transform=Advantages(), expand_scalars=True)
        for key in ("advantage", "lambda_return"):
            assert wide[key].shape == (1, 5, 1)
            assert torch.equal(wide[key][..., 0], plain[key])

    def test_numbers_without_names_are_no_keys(self):
        with pytest.raises(SchemaError, match=r"value: got 0\.99, expected a key; give γ and λ as gamma=, lambda_="):
            Advantages(0.99, 0.95)
        with pytest.raises(SchemaError, match="reward: got None, expected a key"):
            Advantages(reward=None)
        Advantages(terminated=None)

    def test_windows_that_end_before_their_episode_have_no_advantages(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, 2, 5, {"reward": "float", "terminated": "bool", "value": "float"})
        buffer.store_episode(reward=np.arange(5.0), terminated=np.arange(5) == 4, value=np.ones(5))
        with pytest.raises(SchemaError, match="windows end before"):
            buffer.batch(view=Window(3), transform=Advantages())
        assert buffer.batch(view=Window(5), transform=Advantages())["advantage"].shape[1] == 5

    def test_an_episode_that_was_cut_short_has_no_advantages_without_a_word_where_nothing_follows(self, tmp_path):
        fields = {"reward": "float", "terminated": "bool", "value": Field("float", (), final=True)}
        buffer = ReplayBuffer(tmp_path, 2, 5, fields)
        for n, over in ((5, True), (3, False)):
            buffer.store_episode(
                reward=np.zeros(n), terminated=(np.arange(n) == n - 1) & over, value=np.ones(n + (not over))
            )
        with pytest.warns(
            UserWarning, match=r"cut short, and the 'value' behind its last step.*final_observation=True"
        ):
            buffer.batch(transform=Advantages())
        buffer.batch([0], transform=Advantages())
        with pytest.raises(SchemaError, match="advantages: got rewards"):
            buffer.batch(timestep_level=True, transform=Advantages())
        buffer.batch(view=Trajectory(final_observation=True), transform=Advantages())

    def test_td_lambda_is_the_mixture_of_all_n_step_returns(self):
        rng, gamma, lambda_, n = np.random.default_rng(3), 0.9, 0.7, 6
        rewards, values = rng.normal(size=(1, n)), rng.normal(size=(1, n + 1))
        ends = np.zeros((1, n), bool)
        _, got = advantages(rewards, values, ends, gamma, lambda_)
        for t in range(n):
            each = [
                sum(gamma**k * rewards[0, t + k] for k in range(m)) + gamma**m * values[0, t + m]
                for m in range(1, n - t + 1)
            ]
            mixed = (1 - lambda_) * sum(lambda_**m * r for m, r in enumerate(each[:-1])) + lambda_ ** (
                n - t - 1
            ) * each[-1]
            np.testing.assert_allclose(got[0, t], mixed, rtol=1e-12)

    def test_arrays_and_tensors_give_the_same_and_padding_does_not_count(self):
        rng = np.random.default_rng(4)
        rewards, values = rng.normal(size=(2, 5)), rng.normal(size=(2, 6))
        ends, lens = np.zeros((2, 5), bool), np.array([5, 3])
        values[1, 4:] = rewards[1, 3:] = np.nan
        got = advantages(rewards, values, ends, lens=lens)
        given = (torch.from_numpy(column) for column in (rewards, values, ends))
        same = advantages(*given, lens=torch.from_numpy(lens))
        alone = advantages(rewards[1:, :3], values[1:, :4], ends[1:, :3])
        for column, tensor, part in zip(got, same, alone, strict=True):
            np.testing.assert_array_equal(column, tensor)
            np.testing.assert_array_equal(column[1], [*part[0], 0, 0])

    @pytest.mark.parametrize(
        ("shapes", "match"), [(((2, 3), (2, 5), (2, 3)), r"got rewards \(2, 3\)"), (((3,), (3,), (3,)), "expected")]
    )
    def test_shapes_that_do_not_fit_are_refused(self, shapes, match):
        with pytest.raises(SchemaError, match=match):
            advantages(*map(np.ones, shapes))

    def test_returns_to_go_are_those_of_d3rlpy_where_sums_are_exact(self, data):
        (batch,) = data.buffer.dataloader(20, transform=Returns())
        for i, episode in enumerate(data.episodes):
            r = episode["reward"]
            np.testing.assert_array_equal(batch["returns_to_go"][i, : len(r)], r.sum() - np.cumsum(r) + r)


class TestShortEpisodes:
    """S5-20: a portion that is longer than its trajectory raises, where that was asked for."""

    @pytest.mark.parametrize("boundary", ["repeat", "shift"])
    def test_a_window_longer_than_its_episode_raises_on_request(self, data, boundary):
        view = Window(9, boundary=boundary, allow_short=False)
        with pytest.raises(
            NotEnoughDataError, match=r"episode 0 has 5 timesteps, fewer than the 9 that were asked for"
        ):
            data.buffer.batch(view=view)
        batch = data.buffer.batch(view=view, min_episode_len=9)
        assert batch["_mask"].all()
        assert (data.buffer.batch(view=Window(9, boundary=boundary))["_lens"] < 9).any()
        assert data.buffer.batch([30], view=view)["_lens"].tolist() == [9]  # others do not matter


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pad_after": 4}, r"pad_after: got 4, expected 0 … length - 1"),
        ({"burn_in": 4}, r"burn_in: got 4, expected 0 … length - 1"),
        ({"pad_after": 1, "boundary": "drop"}, "pad_after pads, and boundary='drop' does not"),
        ({"pad_in_front": True, "boundary": "continue"}, "pad_in_front pads, and boundary='continue' does not"),
        ({"pad_in_front": True, "pad_before": 1}, "pad_before and pad_in_front exclude each other"),
        ({"allow_short": False}, "allow_short=False goes with 'shift' and 'repeat'"),
        ({"stream": "env"}, "stream goes with boundary='continue'"),
        ({"n_steps": 2}, r"gamma: got None, expected a number"),
        ({"gamma": 0.9}, "gamma goes with n_steps"),
        ({"n_steps": 2, "gamma": 0.9, "boundary": "continue"}, "n_steps ends with its episode"),
    ],
)
def test_windows_that_contradict_themselves_are_refused(options, match):
    with pytest.raises(SchemaError, match=match):
        Window(4, **options)
