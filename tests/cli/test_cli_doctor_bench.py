"""`doctor` and `bench`: what they look at, what they advise, and that their figures belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_cases import Case, main, make, read_json
from fault_injection import listing
from inside import get_inside, set_inside
from range_server import RangeServer

from memmap_buffer import DiskSpeed, ReplayBuffer, Store, pack, publish
from memmap_buffer.adapters import flatten

SHORT = ["--seconds", "0.1"]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make(tmp_path / "buffer")


def doctor(capsys: pytest.CaptureFixture[str], folder: Path | str, code: int = 0) -> dict[str, Any]:
    assert main("doctor", folder, *SHORT, "--json") == code
    return {remark.pop("what"): remark for remark in read_json(capsys.readouterr().out)}


def test_doctor_finds_nothing_wrong_with_a_small_local_folder_and_changes_nothing(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(case.folder)
    remarks = doctor(capsys, case.folder)
    assert remarks.keys() >= {"file system", "space", "memory", "speed"}
    assert not any(remark["bad"] for remark in remarks.values())
    assert remarks["memory"]["advice"] == remarks["space"]["advice"] == ""
    assert "random timesteps a second" in remarks["speed"]["found"]
    assert listing(case.folder) == before
    assert main("doctor", case.folder, *SHORT) == 0
    assert "ok    file system: local\n" in capsys.readouterr().out


def test_doctor_ends_with_1_on_a_network_file_system(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_inside(monkeypatch, network_file_system=lambda path: "nfs4")
    remark = doctor(capsys, case.folder, code=1)["file system"]
    assert (remark["found"], remark["bad"]) == ("nfs4", True)
    assert "copy the folder to a local disk" in remark["advice"]


def test_doctor_compares_free_space_with_what_may_still_be_written(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = make(tmp_path / "sparse", max_timesteps=4000)
    assert doctor(capsys, sparse.folder)["space"]["advice"] == ""
    set_inside(monkeypatch, free_bytes=lambda self: 10)
    assert "the disk may fill up" in doctor(capsys, sparse.folder)["space"]["advice"]
    pack(case.folder, tmp_path / "packed")
    space = doctor(capsys, tmp_path / "packed")["space"]
    assert (space["found"], space["advice"]) == ("10 B are free, at most 0 B may still be written", "")


def test_doctor_advises_blocks_where_memory_is_less_than_the_data(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_inside(monkeypatch, available_memory=lambda: 1000)
    assert "shuffle='block'" in doctor(capsys, case.folder)["memory"]["advice"]
    set_inside(monkeypatch, available_memory=lambda: None)
    assert "does not say" in doctor(capsys, case.folder)["memory"]["found"]


def test_doctor_says_how_fast_rows_come_from_the_disk_where_they_are_not_in_memory(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[float, bool]] = []

    def measure_disk_speed(path: Path, seconds: float, *, larger: bool) -> DiskSpeed | None:
        asked.append((seconds, larger))
        return found

    set_inside(monkeypatch, disk_speed=measure_disk_speed)
    found: DiskSpeed | None = DiskSpeed(0.25, 256, 4000, 512)
    told = "4,000 random timesteps a second, 2.0 MiB/s, 256 asked for at once; 25% of a random sample were in memory"
    assert doctor(capsys, case.folder)["speed from disk"] == {"found": told, "advice": "", "bad": False}
    assert main("doctor", case.folder, *SHORT) == 0
    assert f"ok    speed from disk: {told}\n" in capsys.readouterr().out
    found = DiskSpeed(1, 0, 0, 512)
    assert "could not be dropped" in doctor(capsys, case.folder)["speed from disk"]["found"]
    found = None
    set_inside(monkeypatch, available_memory=lambda: 1000)
    assert "speed from disk" not in doctor(capsys, case.folder)
    assert asked == [(0.025, False)] * 3 + [(0.025, True)]


def test_available_memory_is_less_than_all_of_it() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = int(next(line.split()[1] for line in lines if line.startswith("MemTotal"))) << 10
    available = get_inside("available_memory")()
    assert available is not None
    assert 0 < available <= total


def test_doctor_of_an_empty_folder_has_nothing_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    assert doctor(capsys, tmp_path / "empty")["speed"]["found"] == "there is nothing to read yet"


def test_bench_measures_every_kind_of_batch_and_its_figures_belong_together(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("bench", case.folder, *SHORT, "--json") == 0
    got = read_json(capsys.readouterr().out)
    assert [row["batches"] for row in got["batches"]] == list(get_inside("bench_levels"))
    with ReplayBuffer.from_folder(case.folder, read_only=True) as buffer:
        for row in got["batches"]:
            count, options = get_inside("bench_levels")[row["batches"]]
            batch = list(flatten(buffer.sample(count, **options)).values())
            assert len(batch[0]) == row["items"]
            seconds = row["us_per_batch"] / 1e6
            assert row["items_per_second"] == pytest.approx(row["items"] / seconds)
            size = row["bytes_per_second"] * seconds
            assert row["times_memory"] == pytest.approx(seconds / (size / got["memory_bytes_per_second"]))
        size = sum(
            leaf.nbytes for leaf in flatten(buffer.sample(256, timestep_level=True)).values() if hasattr(leaf, "nbytes")
        )
    row = got["batches"][0]
    assert row["bytes_per_second"] * row["us_per_batch"] / 1e6 == pytest.approx(size)
    assert main("bench", case.folder, *SHORT) == 0
    assert "whole episodes" in capsys.readouterr().out


def test_bench_of_an_empty_folder_ends_with_2_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    assert main("bench", tmp_path / "empty") == 2
    assert "there is nothing to read" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "forever"])
def test_a_time_that_is_none_ends_with_2(case: Case, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("bench", case.folder, f"--seconds={seconds}") == 2
    assert "--seconds" in capsys.readouterr().err


def test_doctor_tells_what_a_url_will_cost(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(case.folder, f"file://{tmp_path}/far")
    with RangeServer(tmp_path / "far", latency=0.05) as server:
        remarks = doctor(capsys, server.url)
        assert remarks["published"]["found"].startswith(f"1 shard, {len(case.lengths)} episodes, ")
        assert float(remarks["round trip"]["found"].split()[0]) >= 50
        assert float(remarks["first batch"]["found"].split()[0]) >= 0.1
        assert not any(remark["bad"] for remark in remarks.values())
        assert remarks.keys() >= {"requests", "bandwidth", "epoch", "random sample", "cache"}
        assert len(server.requests) < 200
        assert main("doctor", f"{server.url}/buffer", *SHORT) == 0
        assert "ok    ranges: the server sends parts of objects\n" in capsys.readouterr().out
    with RangeServer(tmp_path / "far", ranges=False) as server:
        found = doctor(capsys, server.url, code=1)
        assert [what for what, remark in found.items() if remark["bad"]] == ["ranges"]


def test_what_a_url_costs_follows_from_what_was_measured() -> None:
    mb = 1 << 20
    files, blocks = {"image": 1000.0 * mb, "reward": 0.5 * mb}, {"image": 1 << 18, "reward": 1 << 12}
    store = Store(1, 1, 1, 0, True, 0.02, 1000.0, 100.0 * mb, files, blocks)
    assert store.epoch() == pytest.approx(0.04 + 1000.5 / 100)
    assert store.first_batch() == pytest.approx(0.04 + 2.56)
    assert 200 < store.blocks_of(256)[1 << 18] < 257 > store.blocks_of(256)[1 << 12] > 100
    assert store.blocks_of(10**6) == pytest.approx({1 << 18: 4000, 1 << 12: 128})
    num_bytes = sum(size * count for size, count in store.blocks_of(256).items())
    assert store.sample(256) == pytest.approx(0.04 + num_bytes / (100 * mb))
    assert store.seconds(1, 0.0, 500.0) == pytest.approx(0.02 + 0.5)
