"""Evaluate the learned policies in the environment: a table, a plot, and with --check a verdict.

python examples/evaluate.py --folder demo_output --check
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cartpole import evaluate_policy, expert_policy, random_policy
from memmap_buffer import ReplayBuffer
from training import Curve, load_policy


def recorded_returns(folder: Path) -> np.ndarray:
    """The returns of the exploring episodes, from which offline RL has learned."""
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    recorded = buffer.get_all_data(fields=(), meta_fields=("expert", "episode_return"))
    return recorded["episode_return"][~recorded["expert"]].numpy()


def print_table(returns: dict[str, np.ndarray]) -> None:
    """One line per policy: mean and standard deviation of its returns, and the mean as a share of the expert's."""
    expert = returns["expert"].mean()
    print(f"{'policy':<20}{'episodes':>10}{'mean return':>14}{'± std':>8}{'of expert':>12}")
    for name, values in returns.items():
        share = values.mean() / expert
        print(f"{name:<20}{len(values):>10}{values.mean():>14.1f}{values.std():>8.1f}{share:>12.1%}")


def save_plot(path: Path, returns: dict[str, np.ndarray], curves: dict[str, Curve]) -> None:
    """Learning curves on the left, the table's means on the right."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    learning, comparison = figure.subplots(1, 2)
    for name, curve in curves.items():
        learning.plot(curve.updates, curve.returns, marker="o", label=name)
    learning.axhline(returns["expert"].mean(), color="grey", linestyle="--", label="expert")
    learning.axhline(returns["random"].mean(), color="grey", linestyle=":", label="random")
    learning.set(title="While learning", xlabel="updates", ylabel="mean return of 20 episodes")
    learning.legend()
    means, deviations = ([float(f(values)) for values in returns.values()] for f in (np.mean, np.std))
    comparison.bar(list(returns), means, yerr=deviations, capsize=4)
    comparison.set(title="In the end", ylabel="mean return ± std")
    comparison.set_ylim(bottom=0)
    comparison.tick_params(axis="x", rotation=15)
    figure.savefig(path, dpi=120)


def missed_goals(returns: dict[str, np.ndarray]) -> list[str]:
    """The goals that were missed: imitation at 95 % of the expert, offline RL at half of it and above random."""
    mean = {name: float(values.mean()) for name, values in returns.items()}
    missed = []
    if not mean["imitation"] >= 0.95 * mean["expert"]:
        missed.append(f"imitation earns {mean['imitation']:.1f}, less than 95 % of the expert's {mean['expert']:.1f}")
    if not mean["offline RL"] > max(0.5 * mean["expert"], 2 * mean["random"]):
        missed.append(
            f"offline RL earns {mean['offline RL']:.1f}, not more than half of the expert's {mean['expert']:.1f} "
            f"and twice the random policy's {mean['random']:.1f}"
        )
    return missed


def evaluate(folder: Path, num_episodes: int, seed: int) -> list[str]:
    """Play every policy from the same starts, print the table, save the plot; return the missed goals."""
    imitation, imitation_curve = load_policy(folder / "imitation.pt")
    offline_rl, offline_rl_curve = load_policy(folder / "offline_rl.pt")
    policies = {
        "random": random_policy(seed),
        "expert": expert_policy,
        "imitation": imitation,
        "offline RL": offline_rl,
    }
    returns = {"exploring, recorded": recorded_returns(folder / "episodes")}
    returns |= {name: evaluate_policy(policy, num_episodes, seed) for name, policy in policies.items()}
    print_table(returns)
    save_plot(folder / "returns.png", returns, {"imitation": imitation_curve, "offline RL": offline_rl_curve})
    print(f"plot: {folder / 'returns.png'}")
    return missed_goals(returns)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the learned policies with a random one and the expert.")
    parser.add_argument(
        "--folder", type=Path, default=Path("demo_output"), help="where the other examples have written"
    )
    parser.add_argument("--episodes", type=int, default=100, help="episodes per policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="end with an error unless both have learned")
    arguments = parser.parse_args()
    # far from the seeds of the recording and of the curves, so that every start is new
    missed = evaluate(arguments.folder, arguments.episodes, arguments.seed + 1_000_000)
    if arguments.check and missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
