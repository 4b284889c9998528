"""The program of docs/checkpoint.md is killed, and goes on: with its steps, its priorities, its network and its β."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import blocks_of

from memmap_buffer import ReplayBuffer

pytest.importorskip("gymnasium")
(PROGRAM,) = blocks_of(Path(__file__).resolve().parent.parent / "docs" / "checkpoint.md")
BETA = '\nprint("the first beta is", beta.beta_at(updates), how.beta, how.beta_steps)\n'


def program(steps):
    """The page's program, which ends after so many steps, and tells with which β it begins."""
    code = PROGRAM["code"].replace("STEPS = 600\n", f"STEPS = {steps}\n", 1)
    assert code.count(f"STEPS = {steps}\n") == 1
    return code.replace("\n\ndef save():", f"{BETA}\n\ndef save():", 1)


def steps_ahead(run):
    """How many steps the folder has and the checkpoint has not; -1 without a checkpoint."""
    path = run / "checkpoint.pt"
    return recorded(run).num_steps - torch.load(path, weights_only=True)["steps"] if path.exists() else -1


def recorded(run):
    return ReplayBuffer.from_folder(run / "replay", read_only=True)


@pytest.mark.slow
def test_a_killed_online_run_goes_on_with_all_that_the_page_says(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", program(10**9)], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while steps_ahead(run) < 20 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    saved, ahead = torch.load(run / "checkpoint.pt", weights_only=True), steps_ahead(run)
    assert saved["steps"] % 200 == 0 and saved["updates"] == saved["steps"] - 99
    assert ahead > 0
    before = recorded(run).batch(timestep_level=True, return_indices=True)

    command = [sys.executable, "-c", program(saved["steps"] + 200)]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    beta = 0.4 + 0.6 * saved["updates"] / 10_000
    assert f"the first beta is {beta} {beta} {10_000 - saved['updates']}\n" in told
    in_checkpoint = f"{saved['steps']} steps and {saved['updates']} updates in the checkpoint"
    assert f"{in_checkpoint}, {saved['steps'] + ahead} steps in the folder\n" in told
    assert torch.load(run / "checkpoint.pt", weights_only=True)["steps"] == saved["steps"] + 200

    after = recorded(run)
    assert after.num_steps == saved["steps"] + ahead + 200
    same = after.batch(before["_indices"], timestep_level=True)
    assert torch.equal(same["observation"], before["observation"])


@pytest.mark.slow
def test_the_priorities_of_a_killed_run_are_those_of_its_last_updates(tmp_path):
    whole = program(150).replace("replay.close()\n", "")
    tail = (
        "indices = replay.batch(timestep_level=True, return_indices=True)['_indices']\n"
        "import numpy as np; np.save('indices.npy', indices); np.save('told.npy', replay.priorities(indices))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", whole + tail], cwd=tmp_path, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == -signal.SIGKILL
    indices, told = (np.load(tmp_path / f"{name}.npy") for name in ("indices", "told"))
    with ReplayBuffer.from_folder(tmp_path / "run" / "replay") as again:
        kept = again.priorities(indices)
    assert len(set(told.tolist())) > 10
    assert np.array_equal(kept, told)
