"""Returns against loops over their definitions, and the transforms of batches."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from memmap_buffer import ReplayBuffer, Returns, Scale, SchemaError, Window, discounted_returns
from memmap_buffer.views.transforms import n_step_return


@st.composite
def rewards_and_steps(draw):
    """(rewards (B, n, *shape), k (B,), terminated (B,)) of small whole rewards."""
    batch, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    shape = (batch, n, *draw(st.sampled_from([(), (1,), (2, 3)])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]))
    rewards = rng.integers(0, 2 if dtype is np.bool_ else 9, shape).astype(dtype)
    return rewards, rng.integers(1, n + 1, batch), rng.random(batch) < 0.5


@examples(60)
@given(rewards_and_steps(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_the_return_is_the_sum_of_its_definition(drawn, gamma):
    """S4-21: R = r_t + γ r_{t+1} + … + γ^{k-1} r_{t+k-1}, and γ^k for what follows, 0 where nothing does"""
    rewards, k, terminated = drawn
    returns, discount = n_step_return(rewards, k, terminated, gamma)
    for b in range(len(k)):
        want = sum(gamma**i * rewards[b, i].astype(np.float64) for i in range(k[b]))
        np.testing.assert_allclose(returns[b], want, rtol=1e-6)
        np.testing.assert_allclose(discount[b], 0 if terminated[b] else gamma ** k[b], rtol=1e-6)
    assert discount.shape == (len(k), *[1] * (rewards.ndim - 2))


@examples(60)
@given(rewards_and_steps(), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans())
def test_a_discount_of_every_step_multiplies_what_comes_after_it(drawn, gamma, of_parts):
    """As the loop of DrQ-v2's replay_buffer.py; what stands beyond k does not count."""
    rewards, k, terminated = drawn
    shape = rewards.shape if of_parts else (*rewards.shape[:2], *[1] * (rewards.ndim - 2))
    discounts = np.random.default_rng(int(k.sum())).choice([0.0, 0.5, 1.0], shape).astype(np.float32)
    discounts[np.arange(shape[1]) >= k[:, None]] = np.nan
    returns, following = n_step_return(rewards, k, terminated, gamma, discounts)
    for b in range(len(k)):
        reward, discount = np.zeros(rewards.shape[2:]), np.ones(shape[2:])
        for i in range(k[b]):
            reward = reward + discount * rewards[b, i].astype(np.float64)
            discount = discount * discounts[b, i] * gamma
        np.testing.assert_allclose(returns[b], reward, rtol=1e-6)
        np.testing.assert_allclose(following[b], 0 * discount if terminated[b] else discount, rtol=1e-6)
    assert returns.shape == rewards.shape[:1] + rewards.shape[2:] and following.shape == shape[:1] + shape[2:]
    assert returns.dtype == following.dtype == (np.float64 if rewards.dtype == np.float64 else np.float32)


@pytest.mark.parametrize("beyond", [np.nan, np.inf, -np.inf, 1e30])
def test_what_stands_beyond_k_does_not_count(beyond):
    rewards = np.array([[1, 2, beyond], [1, beyond, beyond]], np.float32)
    returns, _ = n_step_return(rewards, np.array([2, 1]), np.zeros(2, bool), 0.5)
    assert returns.tolist() == [2, 1]


def test_a_reward_that_is_no_number_makes_its_return_none():
    returns, _ = n_step_return(np.array([[1, np.nan]]), np.array([2]), np.zeros(1, bool), 0.0)
    assert np.isnan(returns[0])


@pytest.mark.parametrize(("given_", "out"), [("f8", "f8"), ("f4", "f4"), ("f2", "f4"), ("i8", "f4"), ("?", "f4")])
def test_returns_are_float32_unless_the_rewards_are_float64(given_, out):
    returns, discount = n_step_return(np.ones((2, 3), given_), np.array([1, 3]), np.zeros(2, bool), 0.9)
    assert returns.dtype == discount.dtype == np.dtype(out)


@pytest.mark.parametrize("dtype", ["i8", "u8", "i4"])
def test_returns_of_whole_numbers_are_rounded_once(dtype):
    """To float32, torch's default: in it each of these would already be rounded."""
    rewards = np.array([2**24 + 1, 2**24 + 1, 2], dtype)
    returns, _ = n_step_return(rewards[None], np.array([3]), np.zeros(1, bool), 1.0)
    assert returns.dtype == np.float32 and returns.tolist() == [2**25 + 4]
    for given_ in (rewards, torch.from_numpy(rewards.astype("i8")), rewards.tolist()):
        to_go = discounted_returns(given_)
        assert str(to_go.dtype).removeprefix("torch.") == "float32" and to_go[0] == 2**25 + 4


def test_the_rewards_are_left_as_they_are():
    rewards = np.full((1, 3), 2.0, np.float32)
    n_step_return(rewards, np.array([1]), np.ones(1, bool), 0.5)
    assert rewards.tolist() == [[2, 2, 2]]


@examples(60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.sampled_from(["f4", "f8", "i8"]),
    st.sampled_from([(), (2,)]),
    st.booleans(),
)
def test_discounted_returns_are_sums_over_what_is_left_of_each_episode(lengths, gamma, dtype, shape, as_tensor):
    rng = np.random.default_rng(sum(lengths))
    rewards = np.zeros((len(lengths), 9, *shape), dtype)
    for b, length in enumerate(lengths):
        rewards[b, :length] = rng.integers(-9, 9, (length, *shape))
    given_ = torch.from_numpy(rewards) if as_tensor else rewards
    batch = discounted_returns(given_, gamma, axis=1)
    assert type(batch) is type(given_)
    assert str(batch.dtype).endswith("float64" if dtype == "f8" else "float32")
    for b, length in enumerate(lengths):
        for t in range(9):
            want = sum(gamma**k * rewards[b, t + k].astype(float) for k in range(max(length - t, 0)))
            np.testing.assert_allclose(batch[b, t], want, rtol=1e-5)
        alone = discounted_returns(given_[b, :length], gamma)
        np.testing.assert_allclose(alone, batch[b, :length], rtol=1e-5)


def test_the_rewards_of_discounted_returns_are_left_as_they_are():
    for rewards in (np.ones(4), torch.ones(4, dtype=torch.float64)):
        discounted_returns(rewards)
        assert rewards.tolist() == [1, 1, 1, 1]
    assert discounted_returns([1, 2, 3]).tolist() == [6, 5, 3]


def test_a_discount_beyond_one_is_refused():
    with pytest.raises(SchemaError, match=r"gamma: got 1\.5, expected a number from 0 to 1"):
        discounted_returns(np.ones(3), 1.5)


def test_returns_to_go_are_added_to_whole_episodes_or_stored_once_for_windows(tmp_path):
    with ReplayBuffer(tmp_path, 3, 9, {"reward": "float"}) as buffer:
        for length in (3, 5):
            buffer.store_episode(reward=np.ones(length))
        (batch,) = buffer.dataloader(2, transform=Returns())
        assert batch["returns_to_go"].tolist() == [[3, 2, 1, 0, 0], [5, 4, 3, 2, 1]]
        buffer.add_field("to_go", "float", lambda episode: discounted_returns(episode["reward"]))
        assert buffer.sample(1, view=Window(2), filter_fields={"to_go": 4}, seed=0)["to_go"].tolist() == [[4, 3]]


def test_scaled_images_are_float32_and_all_else_is_shared():
    batch = {"camera": {"left": torch.tensor([0, 51, 255], dtype=torch.uint8), "right": torch.ones(1)}, "a": 1}
    out = Scale("camera.left")(batch)
    assert out["camera"]["left"].tolist() == [0, np.float32(0.2), 1]
    assert out["camera"]["left"].dtype == torch.float32
    assert out["camera"]["right"] is batch["camera"]["right"]
    assert batch["camera"]["left"].dtype == torch.uint8


@pytest.mark.parametrize("transform", [Scale(["x", "y.z"], by=2), Returns("y", 0.9)])
def test_a_transform_is_a_value_that_pickles(transform):
    assert pickle.loads(pickle.dumps(transform)) == transform


@pytest.mark.parametrize(
    ("transform", "match"),
    [
        (Scale("pixel"), r"transform: the batch has no 'pixel'; it has 'pixels', 'group'"),
        (Scale("group.c"), r"the batch has no 'c'; it has 'b'"),
        (Scale("pixels.a"), r"the batch has no 'a'; it has no groups there"),
        (Returns("rewards"), r"the batch has no 'rewards'"),
    ],
)
def test_a_key_that_the_batch_has_not_is_named(transform, match):
    with pytest.raises(SchemaError, match=match):
        transform({"pixels": torch.ones(1, 2), "group": {"b": torch.ones(1)}})
