"""The n-step return against a loop over its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmap_buffer.transforms import n_step_return


@st.composite
def rewards_and_steps(draw):
    """(rewards (B, n, *shape), k (B,), terminated (B,)) of small whole rewards."""
    batch, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    shape = (batch, n, *draw(st.sampled_from([(), (1,), (2, 3)])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]))
    rewards = rng.integers(0, 2 if dtype is np.bool_ else 9, shape).astype(dtype)
    return rewards, rng.integers(1, n + 1, batch), rng.random(batch) < 0.5


@settings(max_examples=60, deadline=None)
@given(rewards_and_steps(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_the_return_is_the_sum_of_its_definition(drawn, gamma):
    """S4-21: R = r_t + γ r_{t+1} + … + γ^{k-1} r_{t+k-1}, and γ^k for what follows, 0 where nothing does"""
    rewards, k, terminated = drawn
    returns, discount = n_step_return(rewards, k, terminated, gamma)
    for b in range(len(k)):
        want = sum(gamma**i * rewards[b, i].astype(np.float64) for i in range(k[b]))
        np.testing.assert_allclose(returns[b], want, rtol=1e-6)
        np.testing.assert_allclose(discount[b], 0 if terminated[b] else gamma ** k[b], rtol=1e-6)


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


def test_the_rewards_are_left_as_they_are():
    rewards = np.full((1, 3), 2.0, np.float32)
    n_step_return(rewards, np.array([1]), np.ones(1, bool), 0.5)
    assert rewards.tolist() == [[2, 2, 2]]
