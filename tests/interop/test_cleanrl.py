"""The changes that the page asks of CleanRL's scripts, in a loop of their form."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from pages import run_blocks

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
STEPS = 2_000
LOOP = """```python
{imported}
if True:
{made}
    obs, _ = envs.reset(seed=1)
    for global_step in range(steps):
        actions = chance.integers(2, size=envs.num_envs)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        played.append((rewards, terminations | truncations))
{logged}
{added}
        obs = next_obs
        if global_step > 200:
            if global_step % 10 == 0:
{learned}
                loss = torch.nn.functional.mse_loss(td_target, old_val)
                shapes.add((tuple(td_target.shape), tuple(old_val.shape), tuple(target_max.shape)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
```
"""


def test_the_changes_of_the_page_make_a_dqn_that_tells_its_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = (section for section in sections if section.startswith("CleanRL\n"))
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    parts = ["\n".join(line[1:] for line in part.splitlines() if line[:1] in "+ ") for part in diff.split("…\n")]
    (tmp_path / "dqn.md").write_text(
        LOOP.format(**dict(zip(("imported", "made", "logged", "added", "learned"), parts, strict=True)))
    )

    told: list[tuple[str, float, int]] = []
    played: list[tuple[np.ndarray, np.ndarray]] = []
    losses: list[float] = []
    shapes: set[tuple[tuple[int, ...], ...]] = set()
    torch.manual_seed(1)
    q_network, target_network = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    make = [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))] * 2
    run_blocks(
        tmp_path / "dqn.md",
        {
            "args": SimpleNamespace(buffer_size=10_000, batch_size=128, gamma=0.99),
            "run_name": "cartpole",
            "writer": SimpleNamespace(add_scalar=lambda *given: told.append(given)),
            "envs": gymnasium.vector.SyncVectorEnv(make),
            "optimizer": torch.optim.Adam(q_network.parameters(), 1e-2),
            "chance": np.random.default_rng(1),
            **{"q_network": q_network, "target_network": target_network, "device": "cpu", "steps": STEPS},
            **{"played": played, "losses": losses, "shapes": shapes, "torch": torch},
        },
    )
    returns = np.zeros(2)
    expected = []
    for step, (rewards, ended) in enumerate(played):
        returns += rewards
        expected += [("charts/episodic_return", got, step) for got in returns[ended].tolist()]
        returns[ended] = 0
    assert len(expected) > 100
    assert told == expected
    assert shapes == {((128,), (128,), (128,))}
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
