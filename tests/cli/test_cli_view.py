"""`view`: what is in the recordings for Rerun, read back by its own reader, and where its viewer listens."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import RUN, Case, episode_of, main, make, run
from fault_injection import listing

pytest.importorskip("rerun", reason="rerun-sdk (extra rerun) is not installed; it takes 500 MB", exc_type=ImportError)

from memmap_buffer import ReplayBuffer


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make(tmp_path / "buffer")


def recorded(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Entity -> column -> its values, in the order of "step"."""
    from rerun.chunk import RrdReader

    rows: dict[str, list[dict[str, Any]]] = {}
    for chunk in RrdReader(str(path)).stream():
        batch = chunk.to_record_batch()
        kept = batch.select([name for name in batch.schema.names if name == "step" or ":" in name])
        rows.setdefault(chunk.entity_path, []).extend(kept.to_pylist())
    found = {}
    for entity, several in rows.items():
        several.sort(key=lambda row: row.get("step", 0))
        found[entity.lstrip("/")] = {key: [row[key] for row in several] for key in several[0]}
    return found


def test_a_recording_has_every_value_on_one_timeline(case: Case, tmp_path: Path) -> None:
    before = listing(case.folder)
    assert main("view", case.folder, "3", "6", "--save", tmp_path / "two.rrd") == 0
    assert listing(case.folder) == before
    found = recorded(tmp_path / "two.rrd")
    episodes = {number: episode_of(number, case.lengths[number]) for number in (3, 6)}
    starts = {3: 0, 6: case.lengths[3] + 1}  # the final observation has a place of its own
    for name in ("reward", "action", "terminated"):
        assert [value for (value,) in found[name]["Scalars:scalars"]] == pytest.approx(
            np.concatenate([episode[name] for episode in episodes.values()]).astype(float)
        )
        steps = np.concatenate([starts[number] + np.arange(case.lengths[number]) for number in episodes])
        assert found[name]["step"] == steps.tolist()
    states = np.concatenate([episode["observation"]["state"] for episode in episodes.values()])
    np.testing.assert_allclose(found["observation/state"]["Scalars:scalars"], states)
    pixels = np.concatenate([episode["observation"]["pixels"] for episode in episodes.values()])
    images = [bytes(buffer[0]) for buffer in found["observation/pixels"]["Image:buffer"]]
    assert images == [frame.tobytes() for frame in pixels]
    assert found["observation/pixels"]["step"] == list(range(len(pixels)))
    assert [text for (text,) in found["episode"]["TextDocument:text"]] == [
        f"- episode: {n}\n- from step: {starts[n]}\n- task_id: {n % 3}\n- success: {n % 4 == 0}\n- name: e{n}"
        for n in episodes
    ]


def test_the_newest_ten_are_shown_if_none_is_named_and_only_the_fields_that_are(tmp_path: Path) -> None:
    case = make(tmp_path / "buffer", range(14), max_episodes=14)
    assert main("view", case.folder, "--field", "reward", "--field", "task_id", "--save", tmp_path / "new.rrd") == 0
    found = recorded(tmp_path / "new.rrd")
    assert {name for name in found if not name.startswith("__")} == {"episode", "reward"}
    assert len(found["episode"]["step"]) == 10
    assert len(found["reward"]["step"]) == sum(case.lengths[number] for number in range(4, 14))


def test_S4_27_episodes_and_fields_may_be_joined_by_commas(case: Case, tmp_path: Path) -> None:
    each = ["3", "6", "--field", "reward", "--field", "action"]
    for number, arguments in enumerate([each, ["3,6", "--field", "reward,action"]]):
        assert main("view", case.folder, *arguments, "--save", tmp_path / f"{number}.rrd") == 0
    found = [recorded(tmp_path / f"{number}.rrd") for number in range(2)]
    assert found[0]["reward"]["Scalars:scalars"] == found[1]["reward"]["Scalars:scalars"]
    assert [text for (text,) in found[0]["episode"]["TextDocument:text"]] == [
        text for (text,) in found[1]["episode"]["TextDocument:text"]
    ]
    assert {"reward", "action"} < found[0].keys() == found[1].keys()


def test_text_is_logged_and_what_cannot_be_drawn_is_left_out(tmp_path: Path) -> None:
    fields = {"text": "U8", "words": ("U8", 2), "wide": ("float", 100), "wave": "complex64"}
    with ReplayBuffer(tmp_path / "buffer", 3, 4, fields) as buffer:
        buffer.store_episode(text=["a", "b"], words=[["c", "d"]] * 2, wide=np.zeros((2, 100)), wave=[1j, 2])
    assert main("view", tmp_path / "buffer", "--save", tmp_path / "text.rrd") == 0
    found = recorded(tmp_path / "text.rrd")
    assert {name for name in found if not name.startswith("__")} == {"episode", "text", "words"}
    assert found["text"]["TextLog:text"] == [["a"], ["b"]]
    assert found["words"]["TextLog:text"] == [["c d"], ["c d"]]


def test_an_empty_folder_and_contradictions_end_with_2(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    for arguments, complaint in {
        (tmp_path / "empty", "--save", tmp_path / "a.rrd"): "there is no episode to show",
        (case.folder, "--save", tmp_path / "a.rrd", "--web"): "exclude each other",
        (case.folder, "77", "--save", tmp_path / "a.rrd"): "the buffer does not show it",
        (case.folder, "--field", "reword", "--save", tmp_path / "a.rrd"): "did you mean 'reward'?",
    }.items():
        assert main("view", *arguments) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "a.rrd").exists()


IGNORING = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"  # as a shell does for a job behind `&`


@pytest.mark.parametrize(
    ("end", "before"),
    [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGTERM, IGNORING)],
    ids=["ctrl-c", "terminated", "terminated in the background"],
)
def test_the_viewer_for_browsers_listens_on_this_machine_alone_until_it_is_ended(
    case: Case, end: int, before: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] - 1
    command = [sys.executable, "-c", f"{before}\n{RUN}", "view", str(case.folder), "--web", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.match(
            rf"open http://127\.0\.0\.1:{port}/\?url=rerun%2Bhttp%3A%2F%2F127\.0\.0\.1%3A{port + 1}%2F", line
        )
        deadline = time.monotonic() + 60
        while len(addresses(port, port + 1)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        assert addresses(port, port + 1) == {(port, "127.0.0.1"), (port + 1, "127.0.0.1")}
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as page:
            assert b"Rerun" in page.read()
        os.kill(process.pid, end)
        assert process.wait(timeout=20) == 0
        while addresses(port, port + 1):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_viewer_that_cannot_start_ends_the_command_with_2(case: Case) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("view", case.folder, "--web", "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert done.stderr.endswith("memmap-buffer: rerun ended with 1; `--save FILE.rrd` needs no viewer\n")


def addresses(*ports: int) -> set[tuple[int, str]]:
    """(port, address) of every socket of this machine that listens on one of the ports (proc_net(5))."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == "0A" and int(port, 16) in ports:
                raw = bytes.fromhex(address)[::-1] if len(address) == 8 else bytes.fromhex(address)
                found.add((int(port, 16), socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)))
    return found
