"""Batches between the steps of an environment, as ReAgent's `ReplayBufferDataset` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.adapters import check_count


class OnlineBatches:
    """An iterable that plays in an environment, records the timesteps, and between them gives batches of the buffer.

    Each iteration begins with a reset and plays `num_episodes` episodes. If the loop over it is left earlier, the
    recorded timesteps stay, and the open episode ends there, as cut short.

    Args:
        buffer: a buffer as `ReplayBuffer.for_env` makes it.
        env: a Gymnasium environment, not a vector of them.
        policy: a function of the observation. It gives the action, or (action, dict of other fields of the timestep).
        batch_size: as for `sample`.
        training_frequency: a batch comes after every so many timesteps.
        warm_up: no batch comes before so many timesteps are visible; default: `batch_size`.
        num_episodes: episodes of an iteration; None goes on for ever.
        max_steps: an episode is truncated after so many timesteps.
        after_episode: called with the serial and the return of each episode that ended.
        seed: of the first reset. Batches are drawn by torch's generator, as in `sample` without a seed.
        options: of `sample`, such as n_steps, prioritized, device, transform.

    Attributes:
        num_steps: how many timesteps were played.

    Raises:
        SchemaError: the environment is a vector, or a number is below 1.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        env: Any,
        policy: Callable[[Any], Any],
        batch_size: int,
        *,
        training_frequency: int = 1,
        warm_up: int | None = None,
        num_episodes: int | None = None,
        max_steps: int | None = None,
        after_episode: Callable[[int, float], None] | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if hasattr(env, "num_envs"):
            raise SchemaError("env: got a vector, expected one environment; step it yourself, with `add` and `sample`")
        numbers = {"training_frequency": training_frequency, "num_episodes": num_episodes, "max_steps": max_steps}
        for name, number in numbers.items():
            if number is not None:
                check_count(name, number)
        self.buffer, self.env, self.policy, self.batch_size = buffer, env, policy, batch_size
        self.num_steps = 0
        self._every, self._warm_up = training_frequency, batch_size if warm_up is None else warm_up
        self._episodes, self._max_steps = num_episodes, max_steps
        self._after, self._seed, self._options = after_episode, seed, options

    def __repr__(self) -> str:
        played = f"{self.num_steps} steps played"
        return f"<OnlineBatches of {self.batch_size}, every {self._every} steps, {played}, into {self.buffer!r}>"

    def __iter__(self) -> Iterator[Any]:
        played = 0
        while self._episodes is None or played < self._episodes:
            yield from self._episode()
            played += 1

    def _episode(self) -> Iterator[Any]:
        """Play and record one episode; gives its batches."""
        before = self.buffer.num_published
        observation, _ = self.env.reset(seed=self._seed)
        self._seed, total, length, ended = None, 0.0, 0, False
        try:
            while not ended:
                action, more = _parts(self.policy(observation))
                following, reward, terminated, truncated, _ = self.env.step(action)
                length, total = length + 1, total + float(reward)
                truncated = bool(truncated) or length == self._max_steps
                ended = bool(terminated) or truncated
                last = {"next_observation": following} if ended else {}
                step = {"observation": observation, "action": action, "reward": reward, **more, **last}
                self.buffer.add(**step, terminated=bool(terminated), truncated=truncated)
                self.num_steps, observation = self.num_steps + 1, following
                if self.num_steps % self._every == 0 and self.buffer.num_steps >= self._warm_up:
                    yield self.buffer.sample(self.batch_size, **self._options)
        finally:  # also where it ended: the next step is none of a reset, even if the environment could reset itself
            self.buffer.end_episodes()
        if self._after is not None:
            if self.buffer.num_published == before:
                self.buffer.flush()  # by `sync_every` the episode waits to be published together with others
            self._after(self.buffer.num_published - 1, total)


def _parts(chosen: Any) -> tuple[Any, Mapping[str, Any]]:
    """(action, other fields of the timestep) from the result of a policy."""
    if isinstance(chosen, tuple) and len(chosen) == 2 and isinstance(chosen[1], Mapping):
        return chosen
    return chosen, {}
