"""Learn CartPole while several processes, on one machine or many, play it: rollouts, recorders, a learner.

    python examples/ray_collect.py --folder demo_output
    python examples/ray_collect.py --folder demo_output --address auto --rollouts 16 --recorders 4

Rollouts play with the newest weights and send each episode to their recorder, which publishes it in a shard of its own.
The learner draws from all shards as they grow. Ray restarts processes that die. `--kills` kills recorders on purpose:
no published episode is lost, and none is stored twice. Rollouts run on any node; recorders and the learner run on the
node where this program starts, since the folder lies there. A second run continues where the first one stopped.

Source: van Hasselt et al. 2016, eq. 4 (double DQN).
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from cartpole import make_environment
from memmap_buffer import ConcatBuffer
from memmap_buffer.environments import max_steps_of, schema_of, spaces_of
from memmap_buffer.interop.ray import ID, Outbox, start_recorders, this_node
from offline_rl import conservative_loss, follow
from training import Curve, greedy_policy, make_network

EPISODES = 4  # of a rollout's turn
UPDATES = 50  # of the learner's turn
WARM_UP = 500  # steps before the first update


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Rollout:
    """Plays episodes and sends them to one recorder."""

    def __init__(self, recorder: Any, seed: int) -> None:
        torch.set_num_threads(1)
        self.outbox, self.rng = Outbox(recorder), np.random.default_rng(seed)
        self.environment, self.network = make_environment(), make_network()

    def play(self, weights: dict[str, torch.Tensor], exploration: float) -> float:
        """Play some episodes, and return the mean of their returns when they are published."""
        self.network.load_state_dict(weights)
        returns = []
        for _ in range(EPISODES):
            episode = self._episode(exploration)
            returns.append(episode["reward"].sum())
            self.outbox.send(episode)
        self.outbox.flush()
        return float(np.mean(returns))

    def _episode(self, exploration: float) -> dict[str, np.ndarray]:
        """The columns of one episode, with one more observation than actions."""
        policy = greedy_policy(self.network)
        observations, steps, ended = [self.environment.reset(seed=int(self.rng.integers(2**31)))[0]], [], False
        while not ended:
            chance = self.rng.random() < exploration
            action = int(self.rng.integers(2) if chance else policy(observations[-1][None])[0])
            observation, reward, terminated, truncated, _ = self.environment.step(action)
            observations.append(observation)
            steps.append((action, reward, terminated, truncated))
            ended = terminated or truncated
        names = ("action", "reward", "terminated", "truncated")
        columns = {name: np.array(values) for name, values in zip(names, zip(*steps, strict=True), strict=True)}
        return {"observation": np.stack(observations), **columns}


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Learner:
    """Learns from the root as it grows; its state is in a file, so it may be restarted."""

    def __init__(self, root: Path, path: Path, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.buffer, self.path = ConcatBuffer.from_root(root), path
        self.network, self.updates = make_network(), 0
        self.target = copy.deepcopy(self.network)
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.network.load_state_dict(saved["network"])
            self.target.load_state_dict(saved["target"])
            self.updates = saved["updates"]
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=5e-4)

    def learn(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Some updates, if there is enough to learn from; returns how many there were in all, and the weights."""
        for _ in range(UPDATES * (self.buffer.num_steps >= WARM_UP)):
            batch = self.buffer.sample(64, n_steps=3, gamma=0.99)
            loss = conservative_loss(self.network, self.target, batch, penalty=0.0)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            follow(self.target, self.network, rate=0.01)
            self.updates += 1
        state = {"network": self.network.state_dict(), "target": self.target.state_dict(), "updates": self.updates}
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)
        return self.updates, self.target.state_dict()

    def measure(self, seed: int) -> float:
        """The mean return of twenty episodes that are not recorded."""
        curve = Curve()
        curve.measure(self.target, self.updates, seed)
        return curve.returns[0]


def collect(root: Path, options: argparse.Namespace) -> None:
    """Play, record and learn until enough episodes were played; kill a recorder now and then."""
    environment = make_environment()
    recorders = start_recorders(
        root,
        options.recorders,
        max_episodes=10_000,
        max_timesteps=max_steps_of(environment) or 500,
        fields=schema_of(*spaces_of(environment)),
        circular=True,
    )
    here = Learner.options(scheduling_strategy=this_node())
    learner = here.remote(root, options.folder / "ray_collect.pt", options.seed)
    share = Rollout.options(num_cpus=min(0.5, 1 / options.rollouts))
    rollouts = [share.remote(recorders[i % options.recorders], options.seed + 1 + i) for i in range(options.rollouts)]
    (updates, weights), played, killed = ray.get(learner.learn.remote()), 0, 0
    first = updates
    learning = learner.learn.remote()
    playing = {rollout.play.remote(weights, 1.0): rollout for rollout in rollouts}
    while playing:
        [done], _ = ray.wait([learning, *playing], num_returns=1)
        if done == learning:
            updates, weights = ray.get(learning)
            learning = learner.learn.remote()
            continue
        rollout, mean = playing.pop(done), ray.get(done)
        played += EPISODES
        print(f"{played:5} episodes, {updates:6} updates: the last {EPISODES} returned {mean:5.1f} on average")
        if played + EPISODES * len(playing) < options.episodes:
            playing[rollout.play.remote(weights, max(0.05, 1 - (updates - first) / 1000))] = rollout
        if killed < options.kills * played / options.episodes:
            ray.kill(recorders[killed % options.recorders], no_restart=False)
            killed += 1
    ray.get(learning)
    print(f"mean return {ray.get(learner.measure.remote(options.seed)):.0f} after {updates} updates")
    report(root, killed)


def report(root: Path, killed: int) -> None:
    """Print how much is published, and whether each episode is there once."""
    buffer = ConcatBuffer.from_root(root)
    ids = buffer.episodes(fields=())[ID].tolist()
    print(f"published {len(buffer)} episodes, {buffer.num_steps} steps, in {len(buffer.folders)} shards")
    print(f"{len(set(ids))} of {len(ids)} ids differ, after {killed} kills of a recorder")


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect and learn CartPole with Ray.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--address", help="of a cluster, such as auto; default: this machine alone")
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--recorders", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=400, help="to play in this run")
    parser.add_argument("--kills", type=int, default=0, help="of recorders, spread over the run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.address:  # sends the modules of this folder to the other nodes
        ray.init(address=options.address, runtime_env={"working_dir": str(Path(__file__).parent)})
    else:
        ray.init(num_cpus=2, include_dashboard=False)
    collect(options.folder / "collected", options)


if __name__ == "__main__":
    main()
