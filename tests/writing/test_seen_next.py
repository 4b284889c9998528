"""What is given as seen after the end of an episode, where it cannot be right: one warning, which says what to give."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from memmap_buffer import ReplayBuffer

gymnasium = pytest.importorskip("gymnasium")

B = 3


def play(folder: Path, first, last, *, skips_resets: bool = False, resets: str = "", calls: int = 40) -> list[str]:
    """Add steps of environments whose episodes take 4, 5 and 6 steps; the warnings.

    Args: first, last: of a random generator the observation that an episode begins with, and the one that it ends with,
        None where that of the reset is given in its place. resets: what is done at the end of an episode.
    """
    rng = np.random.default_rng(0)
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP if skips_resets else gymnasium.vector.AutoresetMode.SAME_STEP
    env = gymnasium.make_vec("CartPole-v1", B, "sync", vector_kwargs={"autoreset_mode": mode})
    buffer = ReplayBuffer.for_env(env, folder, max_episodes=200)
    t, observation = np.zeros(B, int), np.stack([first(rng) for _ in range(B)])
    over = np.zeros(B, bool)
    with warnings.catch_warnings(record=True) as caught, buffer:
        warnings.simplefilter("always")
        for _ in range(calls):
            t = np.where(over, 0, t + 1)
            ends = t >= [4, 5, 6]
            begun, following = np.stack([first(rng) for _ in range(B)]), rng.random((B, 4))
            seen = following.copy()
            for i in np.flatnonzero(ends):
                seen[i] = begun[i] if last is None else last(rng)
            seen[over] = begun[over]
            buffer.add(
                observation=observation,
                action=np.zeros(B, int),
                reward=np.zeros(B),
                terminated=ends & (t % 2 == 0),
                truncated=ends & (t % 2 == 1),
                next_observation=seen,
            )
            observation = seen.copy()
            if skips_resets:
                over = ends
                if resets and ends.any():
                    if resets == "end_episodes":
                        buffer.end_episodes()
                    observation, t, over = begun, np.zeros(B, int), np.zeros(B, bool)
            else:
                observation[ends] = begun[ends]
                t[ends] = 0
    return [str(one.message) for one in caught]


def anywhere(rng):
    return rng.random(4)


def home(rng):
    return np.zeros(4)


def test_an_observation_of_the_reset_in_the_place_of_the_last_one_is_told_once_with_the_remedy(tmp_path):
    (text,) = play(tmp_path, anywhere, None)
    assert 'infos["final_obs"][i]' in text


@pytest.mark.parametrize(("first", "last"), [(anywhere, anywhere), (home, home), (home, None), (home, anywhere)])
def test_episodes_that_may_begin_where_the_last_one_ended_are_not_suspected(tmp_path, first, last):
    assert play(tmp_path, first, last) == []


def test_a_reset_by_hand_where_a_step_would_reset_is_told_once_with_the_remedy(tmp_path):
    (text,) = play(tmp_path, anywhere, anywhere, skips_resets=True, resets="reset")
    assert "Call end_episodes() before you reset" in text


@pytest.mark.parametrize("resets", ["", "end_episodes"])
def test_resets_by_a_step_or_behind_the_end_of_all_episodes_are_not_suspected(tmp_path, resets):
    assert play(tmp_path, anywhere, anywhere, skips_resets=True, resets=resets) == []
