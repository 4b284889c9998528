"""Other libraries on the same data, where they are installed. The methods of each class make the calls of a case.

Each library is used as its own documentation advises; only the shapes of its batches are checked. Libraries that want a
successor with every step keep observations twice.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import warnings
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.data import LONGEST, SCHEMAS, Arrays, Run, episodes, lengths
from bench.frames import ALPHA, BETA, GAMMA, SIDE, STACK, Frames, N, errors_of
from bench.measure import Call

if TYPE_CHECKING:
    from bench.online import Loop

Checked = tuple[Any, Any, Any]  # the observations, next observations and rewards of a batch


def contenders(run: Run, kind: str, how: str, *data: Any) -> dict[str, Call]:
    """The calls of the installed peers that have a method `how`, by name; not of those where it gives none."""
    calls: dict[str, Call] = {}
    for peer in PEERS if run.peers else ():
        if hasattr(peer, how) and run.once(("installed", peer.name), partial(installed, peer)):
            made = run.once(("peer", kind, peer.name), partial(peer, run, kind))
            calls[peer.name] = getattr(made, how)(*data)
    return {name: call for name, call in calls.items() if call is not None}


def installed(peer: type[Peer]) -> bool:
    """Whether the library can be imported; if not, a line on stderr names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(peer.module)
    except ImportError as error:
        sys.stderr.write(f"skipped: {peer.name} ({error}); pip install '.[bench]'\n")
        return False
    return True


class Peer:
    """One library; its data is filled in at the first use."""

    name: str
    module: str

    def __init__(self, run: Run, kind: str) -> None:
        self.run, self.kind = run, kind
        self.fields = SCHEMAS[kind]
        self.capacity = int(lengths(run.steps_of(kind)).sum())
        self.dtype, self.shape = self.fields["observation"][0], tuple(np.atleast_1d(self.fields["observation"][1]))
        self.dtype = "float32" if self.dtype == "float" else self.dtype
        self.library = importlib.import_module(self.module)

    def whole(self) -> Arrays:
        """All episodes one behind the other, each step with its successor."""
        parts = [with_successor(arrays) for arrays in episodes(self.fields, self.run.steps_of(self.kind))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def with_successor(arrays: Arrays) -> Arrays:
    observation = arrays["observation"]
    return {**arrays, "next_observation": np.concatenate([observation[1:], observation[-1:]])}


def stacked(loop: Frames, t: int) -> Arrays:
    """A step of one environment as a wrapper that stacks frames gives it, the latest one last."""
    step, env = loop.step(t), np.zeros(1, int)
    now = loop.frames[loop.stacked(np.array([t]), env)][0].transpose(1, 2, 0)
    following = np.concatenate([now[..., 1:], loop.frames[t + 1, 0][..., None]], axis=-1)
    return {"obs": now, "next_obs": following, "act": step["action"], "rew": step["reward"], "done": step["terminated"]}


def in_turn(things: list[Any]) -> Any:
    return itertools.cycle(things)


class Cpprb(Peer):
    name, module = "cpprb", "cpprb"

    def _make(self, size: int, **options: Any) -> Any:
        return self.library.ReplayBuffer(
            size,
            {
                "observation": {"shape": self.shape, "dtype": np.dtype(self.dtype)},
                "next_observation": {"shape": self.shape, "dtype": np.dtype(self.dtype)},
                "action": {"shape": 6},
                "reward": {},
                "terminated": {"dtype": np.bool_},
            },
            **options,
        )

    @cached_property
    def filled(self) -> Any:
        buffer = self._make(self.capacity)
        buffer.add(**self.whole())
        return buffer

    def sample(self) -> Call:
        return lambda: self.filled.sample(256)

    def store(self, steps: list[Arrays]) -> Call:
        buffer = self._make(10 * len(steps))

        def all_steps() -> None:
            for step in steps:
                buffer.add(next_observation=step["observation"], **step)

        return all_steps

    def store_episode(self, datas: list[Arrays]) -> Call:
        buffer = self._make(len(datas) * len(datas[0]["reward"]))
        turn = in_turn([with_successor(data) for data in datas])
        return lambda: buffer.add(**next(turn))

    def online(self, loop: Loop) -> Call:
        names = ("observation", "next_observation", "action", "reward", "terminated")
        buffer = self._make(len(loop.filling["reward"]))
        buffer.add(**{name: loop.filling[name] for name in names})
        steps = iter([{name: step[name] for name in names} for step in loop.steps])

        def add_and_sample() -> Checked:
            buffer.add(**next(steps))
            batch = buffer.sample(256)
            return batch["observation"], batch["next_observation"], batch["reward"]

        return add_and_sample

    def online_frames(self, loop: Frames, size: int) -> Call | None:
        """Its stacks and n-step returns are of one stream of steps, so it takes one environment."""
        if loop.num_envs > 1:
            return None
        stack = {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8}
        buffer = self.library.PrioritizedReplayBuffer(
            loop.fill,
            {"obs": stack, "next_obs": stack, "act": {"dtype": np.int64}, "rew": {}, "done": {"dtype": np.bool_}},
            alpha=ALPHA,
            stack_compress="obs",
            Nstep={"size": N, "gamma": GAMMA, "rew": "rew", "next": "next_obs"},
        )

        def add(step: Arrays) -> None:
            buffer.add(**step)
            if step["done"]:
                buffer.on_episode_end()

        for t in range(loop.fill):
            add(stacked(loop, t))
        steps = iter([stacked(loop, t) for t in range(loop.fill, loop.fill + loop.rounds)])
        errors = errors_of(size)

        def add_and_sample() -> Checked:
            add(next(steps))
            batch = buffer.sample(size, beta=BETA)
            buffer.update_priorities(batch["indexes"], errors)
            return batch["obs"].transpose(0, 3, 1, 2), batch["next_obs"].transpose(0, 3, 1, 2), batch["rew"]

        return add_and_sample


class StableBaselines(Peer):
    name, module = "stable-baselines3", "stable_baselines3.common.buffers"

    def _make(self, size: int, num_envs: int = 1) -> Any:
        from gymnasium.spaces import Box

        image = self.dtype == "uint8"
        observation = Box(0 if image else -np.inf, 255 if image else np.inf, self.shape, np.dtype(self.dtype))
        options = {"device": "cpu", "handle_timeout_termination": False, "n_envs": num_envs}
        return self.library.ReplayBuffer(size, observation, Box(-1, 1, (6,), np.float32), **options)

    @cached_property
    def filled(self) -> Any:
        buffer, data = self._make(self.capacity), self.whole()
        buffer.observations[:, 0], buffer.next_observations[:, 0] = data["observation"], data["next_observation"]
        buffer.actions[:, 0], buffer.rewards[:, 0] = data["action"], data["reward"]
        buffer.dones[:, 0], buffer.full = data["terminated"], True
        return buffer

    def sample(self) -> Call:
        return lambda: self.filled.sample(256)

    def store(self, steps: list[Arrays]) -> Call:
        buffer = self._make(10 * len(steps))

        def all_steps() -> None:
            for step in steps:
                now = step["observation"]
                buffer.add(now, now, step["action"], step["reward"], step["terminated"], [{}])

        return all_steps

    def online(self, loop: Loop) -> Call:
        size = len(loop.filling["reward"]) // loop.num_envs * loop.num_envs
        buffer, infos = self._make(size, loop.num_envs), [{} for _ in range(loop.num_envs)]
        columns = {"observation": "observations", "next_observation": "next_observations", "action": "actions"}
        columns |= {"reward": "rewards", "terminated": "dones"}
        for name, theirs in columns.items():
            array = getattr(buffer, theirs)
            array[:] = loop.filling[name][:size].reshape(array.shape)
        buffer.full, steps = True, iter(loop.steps)

        def add_and_sample() -> Checked:
            step = next(steps)
            now, following = step["observation"], step["next_observation"]
            buffer.add(now, following, step["action"], step["reward"], step["terminated"], infos)
            batch = buffer.sample(256)
            return batch.observations, batch.next_observations, batch.rewards

        return add_and_sample


class TorchRL(Peer):
    name, module = "torchrl", "torchrl.data"

    def __init__(self, run: Run, kind: str) -> None:
        super().__init__(run, kind)
        logging.getLogger("torchrl").setLevel(logging.WARNING)

    def _make(self, size: int, **options: Any) -> Any:
        storage = self.library.LazyMemmapStorage(size, scratch_dir=str(self.run.folder("torchrl")))
        return self.library.TensorDictReplayBuffer(storage=storage, **options)

    def _dict(self, arrays: Arrays, lead: tuple[int, ...]) -> Any:
        import torch
        from tensordict import TensorDict

        flat = {name: torch.as_tensor(values) for name, values in arrays.items()}
        after = {"observation": flat.pop("next_observation"), "reward": flat.pop("reward")}
        after |= {"terminated": flat["terminated"], "done": flat.pop("terminated")}
        return TensorDict({**flat, "next": TensorDict(after, lead)}, lead)

    def _fill(self, **options: Any) -> Any:
        buffer, size = self._make(self.capacity, **options), lengths(self.run.steps_of(self.kind))
        for number, arrays in enumerate(episodes(self.fields, self.run.steps_of(self.kind))):
            arrays["episode"] = np.full(size[number], number)
            buffer.extend(self._dict(with_successor(arrays), (int(size[number]),)))
        return buffer

    @cached_property
    def filled(self) -> Any:
        return self._fill(batch_size=256)

    @cached_property
    def sliced(self) -> Any:
        sampler = self.library.SliceSampler(slice_len=64, traj_key="episode")
        return self._fill(sampler=sampler, batch_size=32 * 64)

    def sample(self) -> Call:
        return lambda: self.filled.sample()

    def windows(self) -> Call:
        return lambda: self.sliced.sample()

    def store(self, steps: list[Arrays]) -> Call:
        buffer = self._make(10 * len(steps))
        some = [self._dict({**step, "next_observation": step["observation"]}, ()) for step in steps[:20]]

        def all_steps() -> None:
            for _ in range(len(steps) // len(some)):
                for step in some:
                    buffer.add(step)

        return all_steps

    def store_episode(self, datas: list[Arrays]) -> Call:
        length = len(datas[0]["reward"])
        buffer = self._make(len(datas) * length)
        turn = in_turn([self._dict(with_successor(data), (length,)) for data in datas])
        return lambda: buffer.extend(next(turn))


class Tianshou(Peer):
    name, module = "tianshou", "tianshou.data"

    @cached_property
    def filled(self) -> Any:
        data = self.whole()
        end = data["terminated"]
        return self.library.ReplayBuffer.from_data(
            obs=data["observation"],
            act=data["action"],
            rew=data["reward"],
            terminated=end,
            truncated=np.zeros_like(end),
            done=end,
            obs_next=data["next_observation"],
        )

    def sample(self) -> Call:
        return lambda: self.filled.sample(256)

    def store(self, steps: list[Arrays]) -> Call:
        buffer = self.library.ReplayBuffer(10 * len(steps))

        def batch(step: Arrays) -> Any:
            return self.library.Batch(
                obs=step["observation"],
                act=step["action"],
                rew=step["reward"],
                terminated=step["terminated"],
                truncated=np.False_,
                done=step["terminated"],
                obs_next=step["observation"],
            )

        def all_steps() -> None:
            for step in steps:
                buffer.add(batch(step))

        return all_steps

    def online_frames(self, loop: Frames, size: int) -> Call:
        """As its DQN draws them: a batch of single transitions, then the returns, and the batch N steps later."""
        import torch
        from tianshou.algorithm.algorithm_base import Algorithm

        count = loop.num_envs
        buffer = self.library.PrioritizedVectorReplayBuffer(
            loop.fill * count, count, alpha=ALPHA, beta=BETA, stack_num=STACK, ignore_obs_next=True
        )

        def add(step: Arrays) -> None:
            batch = self.library.Batch(
                obs=step["observation"],
                act=step["action"],
                rew=step["reward"],
                terminated=step["terminated"],
                truncated=step["truncated"],
            )
            buffer.add(batch)

        for step in loop.filling:
            add(step)
        steps, errors = iter(loop.steps), errors_of(size)

        def add_and_sample() -> Checked:
            add(next(steps))
            batch, rows = buffer.sample(size)
            later = []

            def value(buffer: Any, rows: Any) -> Any:
                later.append(buffer[rows].obs_next)
                return torch.zeros(size)

            batch = Algorithm.compute_nstep_return(batch, buffer, rows, value, GAMMA, N)
            buffer.update_weight(rows, errors)
            return batch.obs, later[0], batch.returns

        return add_and_sample


class MemmapReplayBuffer(Peer):
    """It gets a tenth of the steps, as it stores them one by one; the cost of its loader does not depend on them."""

    name, module = "memmap-replay-buffer", "memmap_replay_buffer"

    def _make(self, count: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.library.ReplayBuffer(
                self.run.folder("theirs"), count, LONGEST, fields=self.fields, flush_every_store_step=0, circular=True
            )

    @cached_property
    def filled(self) -> Any:
        few = max(2, self.run.steps_of(self.kind) // 10)
        buffer = self._make(len(lengths(few)))
        for arrays in episodes(self.fields, few):
            with buffer.one_episode():
                for t in range(len(arrays["reward"])):
                    buffer.store(**{name: values[t] for name, values in arrays.items()})
        return buffer

    def loader(self) -> Call:
        options = {"n_steps": 1, "next_fields": ("observation",), "shuffle": True}
        loader = self.filled.dataloader(256, **options)
        stream = itertools.chain.from_iterable(itertools.repeat(loader))
        return lambda: next(stream)

    def store(self, steps: list[Arrays]) -> Call:
        buffer = self._make(4)

        def all_steps() -> None:
            with buffer.one_episode():
                for step in steps:
                    buffer.store(**step)

        return all_steps


PEERS = (Cpprb, StableBaselines, TorchRL, Tianshou, MemmapReplayBuffer)
