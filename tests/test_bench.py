"""The benchmark itself: every case runs and compares what it read; of several bounds the fastest counts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.measure import Goal, medians, throughput
from bench.peer_epoch import Row, steps_of
from bench.remote import peak_memory

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench.py"
slow = pytest.mark.slow  # barriers, worker processes, a new interpreter for every opening
SMALL = ["--steps", "20000", "--repeats", "4", "--cold-gb", "0.02", "--top", "5", "--no-peers", "--json"]


def rows(folder: Path, *arguments: str) -> list[dict[str, object]]:
    command = [sys.executable, str(SCRIPT), *SMALL, "--folder", str(folder), *arguments]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert list(folder.iterdir()) == [], "something was left behind"
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize(
    ("group", "names"),
    [
        pytest.param("writes", ("store() a step, image", "publish, power"), marks=slow),
        (
            "reads",
            (
                "sample(256) transitions, image",
                "loader(256) transitions, image, packed",
                "loader(256) transitions, low-dim",
                "16 whole episodes",
            ),
        ),
        pytest.param("workers", ("loader, 2 workers over none and 2 ms", "loader, prefetch=2"), marks=slow),
        pytest.param("online", ("add 64 and sample(256), 10^4 episodes", "add 8 and sample(256), frames"), marks=slow),
        pytest.param("environments", ("add 64, ends at 50, step", "add 4096, ends at 300, episode, read"), marks=slow),
        pytest.param("cold", ("cold sample(256), image", "cold loader(256), image", "cold epoch"), marks=slow),
        ("compressed-batches", ("sample(256) with next, ",)),
        pytest.param(
            "compressed",
            ("size, ", "cold sample(256)", "64 frames of 480 x 640, jpeg", "recording 2 x 30", "store() of two"),
            marks=slow,
        ),
        pytest.param(
            "remote",
            (
                "remote epoch, shuffle='block', image",
                "  bytes fetched over needed",
                "  first batch",
                "  second epoch",
                "remote cold sample(256), low-dim, round trips",
                "remote epoch by S3",
                "remote open of 10 shards, again",
            ),
            marks=slow,
        ),
        pytest.param("scale", ("open 10^2 episodes", "shuffled windows of 64, 10^5 steps"), marks=slow),
    ],
)
def test_every_case_reads_and_writes_what_its_bound_does(tmp_path: Path, group: str, names: tuple[str, ...]) -> None:
    found = rows(tmp_path, "--case", group)
    for name in names:
        assert any(str(row["case"]).startswith(name) for row in found), f"{name} is missing"
    for row in found:
        assert math.isfinite(row["figure"]) and row["ours"] > 0  # type: ignore[operator,arg-type]


@slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["priority", "--leaves", "2000", "--batch", "32", "--repeats", "20", "--bare"],
        ["shards", "--shards", "1", "2", "--episodes", "4", "--many", "10", "--bursts", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_benchmarks_with_options_of_their_own_run(tmp_path: Path, arguments: list[str]) -> None:
    subprocess.run([sys.executable, str(SCRIPT), *arguments], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [], "something was left behind"


def test_a_figure_is_over_the_fastest_bound_and_marked_by_its_goal() -> None:
    seconds = {"ours": 0.2, "bound a": 0.4, "bound b": 0.1, "peer": 1.0}
    row = throughput("case", seconds, 0.6, per_call=3, unit="steps/s")
    assert (row.ours, row.bound, row.figure) == pytest.approx((15, 30, 0.5))
    assert row.reached is False
    assert row.peers == pytest.approx({"bound a": 7.5, "peer": 3})
    assert throughput("case", seconds, 0.5, unit="steps/s").reached is True
    assert Goal(50, at_most=True).reached_by(49) is True
    assert Goal(None).reached_by(0) is None


def test_contenders_are_called_in_turns_and_as_often_as_each_other() -> None:
    called: list[str] = []
    found = medians({name: lambda n=name: called.append(n) for name in "ab"}, repeats=4, burst=2)
    assert "".join(called) == "ab" + "aabb" * 2
    assert found.keys() == {"a", "b"}


def test_what_is_worked_out_for_several_calls_together_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], [0]
    monkeypatch.setattr("bench.measure.time.perf_counter", lambda: now[0])

    def every_fourth_is_dear() -> None:
        calls[0] += 1
        now[0] += 8 if calls[0] % 4 == 0 else 0

    assert medians({"ours": every_fourth_is_dear}, repeats=24, burst=8) == {"ours": 2.0}
    assert medians({"ours": every_fourth_is_dear}, 24, before=lambda: None) == {"ours": 0.0}


@pytest.mark.parametrize("kind", ["low-dim", "image"])
def test_a_step_in_a_file_of_webdataset_is_read_as_it_was_written(kind: str) -> None:
    step = next(steps_of(kind, 0, 1))
    read = Row(kind)({"bin": b"".join(value.tobytes() for value in step.values())})
    assert read.keys() == step.keys()
    for name, value in step.items():
        np.testing.assert_array_equal(read[name], value, strict=True)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells it")
def test_the_memory_of_an_epoch_is_that_of_the_process_and_its_workers() -> None:
    worker = "import time; kept = [1] * (8 << 20); time.sleep(1)"
    main = f"import subprocess, sys; kept = [1] * (8 << 20); subprocess.run([sys.executable, '-c', '{worker}'])"
    with subprocess.Popen([sys.executable, "-c", main], text=True, start_new_session=True) as process:
        assert 2 << 26 <= peak_memory(process) < 3 << 26
