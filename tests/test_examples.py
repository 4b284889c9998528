"""The programs of examples/ run on a small budget, with warnings as errors, and keep their promises."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from memmap_buffer import ReplayBuffer, Zstd

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(program, folder, *arguments, timeout=120):
    """Run an example as a user does; its exit status and what it printed."""
    command = [sys.executable, "-W", "error", EXAMPLES / f"{program}.py", "--folder", folder, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def run_well(program, folder, *arguments, timeout=120):
    done = run(program, folder, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A folder with nine episodes, three of them the expert's."""
    folder = tmp_path_factory.mktemp("demo")
    assert "recorded 9 episodes" in run_well("record", folder, "--episodes", 9)
    return folder


def opened(folder):
    return ReplayBuffer.from_folder(folder / "episodes", read_only=True)


def network_of(path):
    saved = torch.load(path, weights_only=True)
    sizes = [tuple(weight.shape) for weight in saved["network"].values()]
    assert (sizes[0], sizes[-1]) == ((128, 4), (2,))
    assert all(weight.isfinite().all() for weight in saved["network"].values())
    return saved


def action_of(weights, observations):
    """What the network of the examples would do."""
    (w0, b0), (w1, b1), (w2, b2) = zip(list(weights.values())[::2], list(weights.values())[1::2], strict=True)
    hidden = torch.relu(torch.relu(observations @ w0.T + b0) @ w1.T + b1)
    return (hidden @ w2.T + b2).argmax(dim=-1)


def test_recorded_episodes_are_whole_and_their_meta_fields_agree_with_their_steps(recording):
    buffer = opened(recording)
    assert buffer.get_all_data(meta_fields=["expert"])["expert"].tolist() == [True, False, False] * 3
    for i in range(len(buffer)):
        episode = buffer.episode(i)
        length = len(episode["reward"])
        assert len(episode["observation"]) == length + 1  # the final observation
        assert episode["episode_return"] == episode["reward"].sum() == length
        assert episode["terminated"][-1] != episode["truncated"][-1]
        assert not (episode["terminated"] | episode["truncated"])[:-1].any()
        assert episode["success"] == episode["truncated"][-1] == (length == 500)
        if episode["expert"]:
            assert episode["success"]


def test_recording_again_replaces_the_episodes_and_a_seed_repeats_them(recording, tmp_path):
    run_well("record", tmp_path, "--episodes", 3, "--seed", 7)
    first = opened(tmp_path).get_all_data()
    run_well("record", tmp_path, "--episodes", 9)
    again, before = opened(tmp_path), opened(recording)
    assert len(again) == 9
    assert again.episode_lens.tolist() == before.episode_lens.tolist()
    np.testing.assert_array_equal(again.episode(4)["observation"], before.episode(4)["observation"])
    assert not torch.equal(first["observation"][1, :5], again.get_all_data()["observation"][1, :5])


def check_imitation(folder, printed):
    """It has learned some of the expert's actions, and saved its curve."""
    saved = network_of(folder / "imitation.pt")
    assert saved["updates"] == list(range(0, 81, 8))
    assert len(saved["returns"]) == 11
    assert f"mean return {saved['returns'][-1]:.0f} after 80 updates" in printed
    expert = opened(folder).dataset(timestep_level=True, filter_meta={"expert": True})
    steps = expert.__getitems__(range(len(expert))).data
    assert len(steps["action"]) == 1500
    assert (action_of(saved["network"], steps["observation"]) == steps["action"]).float().mean() > 0.7


def check_offline_rl(folder, printed):
    """Its network has moved from where it began, and its curve is saved."""
    saved = network_of(folder / "offline_rl.pt")
    assert saved["updates"] == list(range(0, 21, 2))
    assert f"mean return {saved['returns'][-1]:.0f} after 20 updates" in printed
    torch.manual_seed(0)
    begun_with = torch.nn.Linear(4, 128).weight
    assert 0 < (next(iter(saved["network"].values())) - begun_with).abs().max() < 0.1


# One test, since the learners take seconds and the evaluation needs what they save.
def test_learners_save_networks_and_curves_which_the_evaluation_tabulates_plots_and_finds_wanting(recording):
    check_imitation(recording, run_well("imitation", recording, "--updates", 80))
    check_offline_rl(recording, run_well("offline_rl", recording, "--updates", 20))
    done = run("evaluate", recording, "--episodes", 3, "--check")
    rows = [line for line in done.stdout.splitlines() if "%" in line]
    names = ["exploring, recorded", "random", "expert", "imitation", "offline RL"]
    assert [line[:20].strip() for line in rows] == names
    assert rows[2].split()[1:] == ["3", "500.0", "0.0", "100.0%"]
    assert (recording / "returns.png").read_bytes().startswith(b"\x89PNG")
    assert done.returncode == 1
    assert "less than 95 % of the expert's 500.0" in done.stderr
    assert "offline RL earns" in done.stderr


def test_prioritised_dqn_learns_while_it_plays_and_goes_on_where_it_stood(tmp_path):
    printed = run_well("prioritized_dqn", tmp_path, "--steps", 1100)
    assert "prioritised DQN: best mean return" in printed
    buffer = ReplayBuffer.from_folder(tmp_path / "played", read_only=True)
    assert buffer.num_steps == 1100
    assert {path.name for path in (tmp_path / "played").glob("priority/*.npy")} == {"td.npy", "td.head.npy"}
    assert "continuing after 1100 steps, 1100 of them in the buffer" in run_well(
        "prioritized_dqn", tmp_path, "--steps", 50
    )
    saved = torch.load(tmp_path / "prioritized_dqn.pt", weights_only=True)
    assert saved["steps"] == 1150
    assert all(weight.isfinite().all() for weight in saved["network"].values())
    assert (tmp_path / "prioritized_dqn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_soft_actor_critic_keeps_the_newest_steps_and_goes_on_where_it_stood(tmp_path, num_envs):
    budget = ["--environment", "Pendulum-v1", "--num-envs", num_envs, "--warm-up", 240, "--capacity", 300]
    printed = run_well("sac", tmp_path, *budget, "--steps", 330)
    assert "SAC on Pendulum-v1: 330 steps, 300 of them in the buffer" in printed
    again = run_well("sac", tmp_path, *budget, "--steps", 30)
    assert "continuing after 330 steps, 300 of them in the buffer" in again
    assert "SAC on Pendulum-v1: 360 steps" in again
    buffer = ReplayBuffer.from_folder(tmp_path / "sac-Pendulum-v1" / "replay", read_only=True)
    assert buffer.schema.fields["observation"].dtype == "float32"
    saved = torch.load(tmp_path / "sac-Pendulum-v1" / "sac.pt", weights_only=True)
    assert saved["steps"] == 360 and all(weight.isfinite().all() for weight in saved["actor"].values())
    assert saved["log_alpha"] < 0  # it has learned


def test_a_game_is_learned_from_its_pixels_in_a_compressed_ring_of_a_million_under_a_gigabyte(tmp_path):
    budget = ["--game", "Catch", "--steps", 240, "--warm-up", 224, "--report", 120]
    printed = run_well("atari_dqn", tmp_path, *budget)
    assert "DQN on Catch: 240 steps in the buffer" in printed
    assert float(re.findall(r"a million take ([\d.]+) GB", printed)[-1]) < 1
    buffer = ReplayBuffer.from_folder(tmp_path / "dqn-Catch", read_only=True)
    assert (buffer.capacity, buffer.schema.fields["observation"].codec) == (1_000_000, Zstd())
    frames = buffer.episode(0)["observation"]
    assert frames.shape == (21, 84, 84) and set(np.unique(frames)) == {0, 144, 236}  # as they were drawn
    weights = torch.load(tmp_path / "dqn-Catch.pt", weights_only=True)
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
def test_two_processes_learn_as_one_does_from_the_same_global_batches(recording):
    """Every update's loss, over more than one epoch."""
    arguments = ["--updates", 40, "--seed", 3]
    assert "imitation by 1: loss" in run_well("ddp_imitation", recording, *arguments)
    program = EXAMPLES / "ddp_imitation.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    command += ["--folder", recording, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "imitation by 2: loss" in done.stdout
    one, two = (json.loads((recording / f"losses-{n}.json").read_text()) for n in (1, 2))
    assert len(one) == len(two) == 40
    np.testing.assert_allclose(two, one, rtol=1e-4)
    assert two[-1] < two[0]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "file"])
def test_a_lab_that_shares_no_disk_sees_every_episode_once_an_epoch_whatever_is_killed(tmp_path, monkeypatch, store):
    """The example checks each epoch itself; here that it came so far, and what it kept on its disks."""
    if store == "file":
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['moto'] = None\n")
    elif not all(importlib.util.find_spec(name) for name in ("moto", "flask", "s3fs")):
        pytest.skip("moto and s3fs are not installed: pip install 'memmap-buffer[test]'")
    printed = run_well("lab", tmp_path, "--episodes", 40, timeout=400)
    assert "store: a shared folder" in printed if store == "file" else "the store stopped for 10 s" in printed
    hosts = re.search(r"^hosts: (apart, in namespaces|plain processes, as .+)$", printed, re.MULTILINE)
    assert re.search(r"host-1 is killed with \d+ shards that are not published, and started again", printed)
    assert "rank 1 is killed after" in printed
    assert re.search(r"12[01] published in \d+ shards", printed)
    assert re.search(r"\d+ epochs, of .*12[01] episodes: every published episode was seen once an epoch", printed)
    shards = [[*path.glob("shards/*/schema.json")] for path in tmp_path.glob("lab-*/host-*")]
    assert shards == [[]] * 3
    kept = [*tmp_path.glob("lab-*/host-*/shards/published/*")]
    assert sorted(path.parts[-4] for path in kept) == ["host-0", "host-1", "host-2"]
    if hosts[1].startswith("apart"):  # each has the name of its host
        assert all(path.name.startswith(f"{path.parts[-4]}-") for path in kept)


def test_a_host_of_the_lab_sees_its_own_part_of_the_folder_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    hosts = importlib.import_module("hosts")
    see = "import os, socket, sys; print(socket.gethostname(), os.getpid() == 1, sorted(os.listdir(sys.argv[1])))"
    see += "; open(os.path.join(sys.argv[1], sys.argv[2], 'kept'), 'w').close()"
    with hosts.Hosts(tmp_path, ["a", "b"], [tmp_path / "shown"]) as made:
        told = []
        for name in ("a", "b"):
            command = made.command(name, [sys.executable, "-c", see, str(tmp_path), name])
            told.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
        links = (
            subprocess.run(["ip", "link"], capture_output=True, text=True, check=False) if not made.why_not else None
        )
    assert all((tmp_path / name / "kept").exists() for name in ("a", "b")), "what a host writes is there afterwards"
    if made.why_not:  # no root, or not on Linux: the example says so
        assert told == [f"{socket.gethostname()} False ['a', 'b', 'shown']"] * 2
        return
    assert told == [f"{name} True ['{name}', 'shown']" for name in ("a", "b")]
    bridge = re.search(r"lab[0-9a-f]{6}", links.stdout)[0]
    assert bridge not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def test_hosts_are_plain_processes_where_networks_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    hosts = importlib.import_module("hosts")
    monkeypatch.setenv("PATH", str(tmp_path))  # in which there is no `ip`
    with hosts.Hosts(tmp_path, ["a"], []) as made:
        assert "ip" in made.why_not and made.address == "127.0.0.1"
        assert made.command("a", ["program"]) == ["program"]


def test_one_network_learns_from_three_unlike_robots(tmp_path):
    """As the tests have neither a display nor a time for it, the smallest of the kind."""
    pytest.importorskip("mujoco")
    pytest.importorskip("pygame")
    done = run("mixture", tmp_path, "--episodes", 4, "--updates", 300)
    assert done.returncode == 0, done.stderr
    errors = re.findall(r"(\w+): 4 episodes, error ([\d.]+) before, ([\d.]+) after", done.stdout)
    assert [robot for robot, *_ in errors] == ["pendulum", "car", "hopper"]
    assert all(float(after) < float(before) for _, before, after in errors), done.stdout
