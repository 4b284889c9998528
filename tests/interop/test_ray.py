"""Ray's tests, `ray_cases.py`, in a process of their own: Ray starts threads and warns in whoever imports it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import run_cases

CASES = Path(__file__).parent / "ray_cases.py"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'memmap-buffer[ray]'"
)


@needs_ray
def test_episodes_go_through_ray_data_and_from_rollouts_to_recorders_as_the_cases_say():
    run_cases(CASES, "not slow")


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_kill_of_a_rollout_a_recorder_or_a_learner_loses_or_doubles_an_episode():
    run_cases(CASES, "slow")


@needs_ray
@pytest.mark.slow
def test_the_example_learns_while_it_collects_and_goes_on_through_kills_and_where_it_stood(tmp_path):
    program = CASES.parent.parent / "examples" / "ray_collect.py"
    for run in (1, 2):
        options = {"--folder": tmp_path, "--episodes": 60, "--kills": 3}
        command = [sys.executable, program, *(part for option in options.items() for part in option)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"published {60 * run} episodes, " in done.stdout
        assert f"{60 * run} of {60 * run} ids differ, after 3 kills of a recorder" in done.stdout
    assert int(re.search(r"after (\d+) updates", done.stdout)[1]) > 0
