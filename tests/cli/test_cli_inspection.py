"""`info`, `episodes`, `show` and `head` say what the library says of the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coded_folder
import numpy as np
import pytest
from cli_cases import Case, episode_of, main, make, read_json, run
from fault_injection import listing
from inside import get_inside

from memmap_buffer import ReplayBuffer, pack


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make(tmp_path / "buffer")


def json_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    assert main(*arguments, "--json") == 0
    return read_json(capsys.readouterr().out)


def text_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(*arguments) == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


# info


def test_info_says_what_the_library_says(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    got = json_of(capsys, "info", case.folder)
    with ReplayBuffer.from_folder(case.folder, read_only=True) as buffer:
        assert (got["episodes"], got["steps"]) == (buffer.num_episodes, buffer.num_steps) == (8, got["steps"])
        assert [got["first_serial"], got["last_serial"]] == buffer.serials[[0, -1]].tolist()
        for kind, fields in (("fields", buffer.schema.fields), ("meta_fields", buffer.schema.meta_fields)):
            assert got[kind].keys() == fields.keys()
            for name, field in fields.items():
                found = got[kind][name]
                assert (found["dtype"], tuple(found["shape"]), found["final"]) == (
                    field.dtype,
                    field.shape,
                    field.final,
                )
    lengths, returns = list(case.lengths.values()), list(case.returns.values())
    assert (got["length"]["min"], got["length"]["max"]) == (min(lengths), max(lengths))
    assert got["return"]["mean"] == pytest.approx(np.mean(returns))
    assert sum(got["length"]["histogram"]["counts"]) == 8
    assert got["bytes_per_step"] == 12 + 240 + 8 + 4 + 1 + 1


def test_info_measures_the_files(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    got = json_of(capsys, "info", case.folder)
    files = [path.stat() for path in case.folder.rglob("*") if path.is_file()]
    assert got["bytes_apparent"] == sum(status.st_size for status in files)
    assert got["bytes_on_disk"] == sum(status.st_blocks * 512 for status in files)


def test_info_for_people_names_every_field_and_changes_nothing(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(case.folder)
    text = text_of(capsys, "info", case.folder)
    for word in (
        "8 of 8",
        "numbers 2 to 9",
        "observation.pixels",
        "(8, 10, 3)",
        "task_id",
        "a ring",
        "length ",
        "return ",
    ):
        assert word in text
    assert listing(case.folder) == before


def test_info_of_packed_empty_and_rewardless_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = make(tmp_path / "buffer")
    pack(case.folder, tmp_path / "packed")
    assert "packed, read-only" in text_of(capsys, "info", tmp_path / "packed")
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    got = json_of(capsys, "info", tmp_path / "empty")
    assert (got["episodes"], got["steps"], got["length"], got["first_serial"]) == (0, 0, None, None)
    assert "return" not in got
    assert "numbers none" in text_of(capsys, "info", tmp_path / "empty")


def test_info_of_returns_that_are_no_numbers_is_json_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ReplayBuffer(tmp_path / "odd", 3, 4, {"reward": "float"}) as buffer:
        for value in (np.nan, np.inf):
            buffer.store_episode(reward=[value])
    assert json_of(capsys, "info", tmp_path / "odd")["return"]["mean"] is None
    assert text_of(capsys, "info", tmp_path / "odd").splitlines()[-1].endswith(" -  mean -, 2 not finite")
    with ReplayBuffer.from_folder(tmp_path / "odd") as buffer:
        buffer.store_episode(reward=[1, 2])
    for reverse, wanted in ([], [2, 1, 0]), (["--reverse"], [1, 2, 0]):  # NaN is last, and not the highest
        assert [
            row["serial"] for row in json_of(capsys, "episodes", tmp_path / "odd", "--sort", "return", *reverse)
        ] == wanted
    got = json_of(capsys, "info", tmp_path / "odd")["return"]
    assert (got["min"], got["mean"], got["max"], got["not_finite"]) == (3, 3, 3, 2)
    assert text_of(capsys, "info", tmp_path / "odd").splitlines()[-1].endswith("3  mean 3, 2 not finite")


def histogram_of(folder: Path, values: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Any]:
    """The counts and edges of `info --json`, of the returns of episodes of one timestep each."""
    with ReplayBuffer(folder, len(values), 1, {"reward": values.dtype}) as buffer:
        for value in values:
            buffer.store_episode(reward=[value])
    histogram = json_of(capsys, "info", folder)["return"]["histogram"]
    return np.array(histogram["counts"]), np.array(histogram["edges"])


@pytest.mark.parametrize(
    "values",
    [
        np.arange(5, 40),
        np.array([3]),
        np.array([5.5, 5.5]),
        np.array([0.1, 0.2, 0.7]),
        np.random.default_rng(0).normal(size=1000),
        np.array([0, 2**62]),
        np.array([1.0, np.nan, np.inf, 2.0]),
        np.array([1e308, -1e308]),
        np.array([np.nan]),
    ],
    ids=lambda values: f"{values.dtype}-{len(values)}-{values.flat[0]:.3g}",
)
def test_a_histogram_counts_every_finite_value_once_between_its_edges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: Any
) -> None:
    counts, edges = histogram_of(tmp_path / "buffer", values, capsys)
    finite = values[np.isfinite(values)].astype(float)
    assert len(counts) == len(edges) - 1 <= get_inside("histogram_bins")
    assert counts.sum() == len(finite)
    if len(finite) and abs(finite).max() < 1e300:
        assert edges[0] == finite.min()
        assert edges[-1] >= finite.max() * (1 - 1e-12)
        np.testing.assert_allclose(np.diff(edges), edges[1] - edges[0])
    assert text_of(capsys, "info", tmp_path / "buffer").splitlines()[-1].startswith("return ")


def test_whole_numbers_share_the_bars_of_a_histogram_equally(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, edges = histogram_of(tmp_path / "buffer", np.arange(5, 40), capsys)
    assert (counts.tolist(), edges[:3].tolist()) == ([2] * 17 + [1], [5, 7, 9])


# episodes


def test_episodes_lists_what_is_visible(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "episodes", case.folder)
    assert {row["serial"]: row["length"] for row in rows} == case.lengths
    for row in rows:
        number = row["serial"]
        assert row["return"] == pytest.approx(case.returns[number])
        assert row["end"] == ("" if number == 5 else "terminated" if number % 2 else "truncated")
        assert (row["task_id"], row["success"], row["name"]) == (number % 3, number % 4 == 0, f"e{number}")


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("length>=20", lambda row: row["length"] >= 20),
        ("length < 20", lambda row: row["length"] < 20),
        ("task_id=1", lambda row: row["task_id"] == 1),
        ("task_id!=1", lambda row: row["task_id"] != 1),
        ("return>0.5", lambda row: row["return"] > 0.5),
        ("success=true", lambda row: row["success"]),
        ("success=no", lambda row: not row["success"]),
        ("name=e4", lambda row: row["name"] == "e4"),
        ("end=terminated", lambda row: row["end"] == "terminated"),
        ("serial<=3", lambda row: row["serial"] <= 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_episodes_are_filtered(case: Case, condition: str, wanted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "episodes", case.folder)
    assert json_of(capsys, "episodes", case.folder, "--where", condition) == [row for row in rows if wanted(row)]


def test_every_condition_must_hold(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    both = json_of(capsys, "episodes", case.folder, "--where", "serial>3", "--where", "serial<6")
    assert [row["serial"] for row in both] == [4, 5]


def test_episodes_are_sorted_and_cut_short(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "episodes", case.folder, "--sort", "return", "--reverse", "--limit", 3)
    assert [row["return"] for row in rows] == pytest.approx(sorted(case.returns.values())[:-4:-1])
    text = text_of(capsys, "episodes", case.folder, "--limit", 3)
    assert "5 more; --limit 0 shows all" in text
    assert len(text_of(capsys, "episodes", case.folder, "--limit", 0).splitlines()) == 9


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--where", "length"], "expected a column, one of"),
        (["--where", "lenght>2"], "there is no column 'lenght'; there are serial, length, return"),
        (["--where", "length>long"], "'long' is no value of a column of int64"),
        (["--where", "success=maybe"], "'maybe' is no value of a column of bool"),
        (["--sort", "size"], "--sort: there is no column 'size'"),
    ],
    ids=str,
)
def test_a_condition_that_cannot_be_meant_ends_with_2(
    case: Case, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in error_of(capsys, "episodes", case.folder, *arguments)


def test_a_meta_field_that_is_called_like_a_column_keeps_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ReplayBuffer(tmp_path / "buffer", 3, 4, {"x": "int"}, {"length": "float"}) as buffer:
        buffer.store_episode(x=[1, 2], length=0.5)
    assert json_of(capsys, "episodes", tmp_path / "buffer") == [{"serial": 0, "length": 2, "meta.length": 0.5}]


def test_marks_are_columns_where_there_are_some(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert "mark" not in json_of(capsys, "episodes", case.folder)[0]
    with ReplayBuffer.from_folder(case.folder) as buffer:
        buffer.mark([4], add=["bad", "slip"], note="cable")
    rows = {row["serial"]: (row["mark"], row["note"]) for row in json_of(capsys, "episodes", case.folder)}
    assert (rows[4], rows[5]) == ((["bad", "slip"], "cable"), ([], ""))
    assert "bad, slip  cable" in text_of(capsys, "episodes", case.folder, "--where", "mark=slip")
    assert len(json_of(capsys, "episodes", case.folder, "--where", "mark=")) == len(rows) - 1


def test_chunks_of_episodes_are_put_together(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json_of(capsys, "episodes", case.folder)
    monkeypatch.setattr("memmap_buffer.episode_columns.CHUNK_BYTES", 1)
    assert json_of(capsys, "episodes", case.folder) == whole


# show and head


def test_show_gives_the_episode_of_that_number(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for name, number in (("4", 4), ("first", 2), ("last", 9)):
        got, wanted = json_of(capsys, "show", case.folder, name), episode_of(number, case.lengths[number])
        assert got["serial"] == number
        assert got["fields"]["observation.pixels"] == wanted["observation"]["pixels"].tolist()
        assert got["fields"]["reward"] == pytest.approx(wanted["reward"])
        assert got["meta_fields"] == {name: wanted[name] for name in ("task_id", "success", "name")}


def test_show_for_people_gives_the_range_of_each_field(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    actions = episode_of(4, case.lengths[4])["action"]
    text = text_of(capsys, "show", case.folder, 4, "--field", "action")
    line = next(line for line in text.splitlines() if line.startswith("action"))
    assert line.split()[-5:] == [
        str(actions.min()),
        f"{actions.mean():.4g}",
        *map(str, (actions.max(), actions[0], actions[-1])),
    ]


def test_head_gives_the_first_steps(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    lines = text_of(capsys, "head", case.folder, 4, "--steps", 3, "--field", "action").splitlines()
    actions = episode_of(4, case.lengths[4])["action"][:3]
    assert [line.split() for line in lines] == [
        ["episode", "4"],
        ["t", "action"],
        *([str(t), str(actions[t])] for t in range(3)),
    ]


def test_lists_are_shown_without_their_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ReplayBuffer(tmp_path, 2, 4, {"ids": ("int", (None,)), "boxes": ("float", (None, 2))}) as buffer:
        buffer.store_episode(ids=[[5], [], [7, 9]], boxes=[np.full((1, 2), 2.5), [], []])
        buffer.store_episode(ids=[[]], boxes=[[]])
    boxes = [[[2.5, 2.5]], [], []]
    assert json_of(capsys, "show", tmp_path, "0")["fields"] == {"ids": [[5], [], [7, 9]], "boxes": boxes}
    rows = [line.split() for line in text_of(capsys, "show", tmp_path, "0").splitlines()[2:]]
    assert rows[0] == ["ids", "int64", "(3,", "None)", "5", "7", "9", "[5]", "[7,", "9]"]
    assert rows[1][:8] == ["boxes", "float32", "(3,", "None,", "2)", "2.5", "2.5", "2.5"]
    lines = text_of(capsys, "head", tmp_path, "0", "--field", "ids").splitlines()
    assert [line.strip().split(maxsplit=1) for line in lines[2:]] == [["0", "[5]"], ["1", "[]"], ["2", "[7, 9]"]]
    assert "(1, None)" in text_of(capsys, "show", tmp_path, "last")
    fields = [line.split() for line in text_of(capsys, "info", tmp_path).splitlines()]
    assert ["ids", "int64", "(None,)", "8", "B", "a", "member"] in fields
    assert ["boxes", "float32", "(None,", "2)", "8", "B", "a", "member"] in fields


@pytest.mark.parametrize("command", ["show", "head"])
@pytest.mark.parametrize(
    ("episode", "complaint"),
    [
        ("0", "the buffer does not show it; it has 2 to 9"),
        ("10", "the buffer does not show it"),
        ("two", "expected its number, a range"),
        ("9" * 40, "expected its number"),
    ],
)
def test_an_episode_that_is_not_there_is_named(
    case: Case, command: str, episode: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in error_of(capsys, command, case.folder, episode)


@pytest.mark.parametrize("command", ["show", "head"])
def test_of_a_folder_without_episodes_there_is_no_first_one(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ReplayBuffer(tmp_path, 2, 3, {"x": "float"}).close()
    assert f"episode first: {tmp_path} shows no episode" in error_of(capsys, command, tmp_path, "first")


@pytest.mark.parametrize("command", ["show", "head"])
def test_a_field_that_is_not_there_is_named(case: Case, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'reward'?" in error_of(capsys, command, case.folder, "4", "--field", "rewards")


@pytest.mark.parametrize("command", ["info", "episodes", "plot", "browse"])
@pytest.mark.parametrize("reward", ["rewards", "observation.state", "success"])
def test_a_reward_that_is_no_number_a_timestep_is_refused(
    case: Case, command: str, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = error_of(capsys, command, case.folder, "--reward", reward)
    assert told.startswith(f"memmap-buffer: --reward: got {reward!r}, which ")


# stats


def test_stats_are_those_of_the_library(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    got = json_of(capsys, "stats", case.folder)
    episodes = [episode_of(number, length) for number, length in case.lengths.items()]
    rewards = np.concatenate([episode["reward"] for episode in episodes]).astype(float)
    states = np.concatenate([episode["observation"]["state"] for episode in episodes]).astype(float)
    assert got["reward"]["count"] == len(rewards)
    assert got["reward"]["std"] == pytest.approx(rewards.std())
    assert got["reward"]["quantiles"]["0.5"] == pytest.approx(np.median(rewards))
    assert got["observation.state"]["mean"] == pytest.approx(states.mean(axis=0))
    with ReplayBuffer.from_folder(case.folder, read_only=True) as buffer:
        assert got.keys() == buffer.statistics().fields.keys()


def test_stats_for_people_have_a_row_an_entry_and_one_for_images(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = text_of(capsys, "stats", case.folder, "--field", "observation", "--field", "reward").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "field",
        *(f"observation.state[{i}]" for i in range(3)),
        "observation.pixels",
        "reward",
    ]
    rewards = np.concatenate([episode_of(number, length)["reward"] for number, length in case.lengths.items()])
    assert float(lines[-2].split()[2]) == pytest.approx(rewards.astype(float).mean(), rel=1e-4)
    assert lines[-1] == "the quantiles are exact"
    assert text_of(capsys, "stats", case.folder, "--field", "observation,reward").splitlines() == lines


def test_stats_of_nothing_end_with_2(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    assert "there are no episodes to describe" in error_of(capsys, "stats", tmp_path / "empty")
    assert "field 'name' holds text, and only fields of real numbers" in error_of(
        capsys, "stats", case.folder, "--field", "name"
    )
    ReplayBuffer(tmp_path / "words", 3, 4, {"x": "U3"}).store_episode(x=["a"])
    assert "no field of numbers" in error_of(capsys, "stats", tmp_path / "words")


# Hostile folders


def test_text_of_a_stranger_does_not_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[31m[bold]\x07"
    with ReplayBuffer(tmp_path / "buffer", 3, 4, {"text": "U20"}, {"note": "U20"}) as buffer:
        buffer.store_episode(text=[evil, "x\ny"], note=evil)
    for command in (["episodes"], ["show"], ["head"], ["info"]):
        done = run(command[0], tmp_path / "buffer", *["0"] * (command[0] in ("show", "head")))
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert "\x07" not in done.stdout
        assert command == ["info"] or "[bold]" in done.stdout


@pytest.mark.parametrize("command", ["info", "episodes", "head", "show", "verify", "repair"])
@pytest.mark.parametrize("damage", ["no folder", "a file", "empty", "no json", "cut short", "a link"])
def test_a_hostile_folder_ends_in_one_line_and_no_traceback(
    case: Case, command: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = case.folder
    if damage in ("no folder", "a file", "empty"):
        folder = tmp_path / "other"
        _ = {"a file": folder.touch, "empty": folder.mkdir, "no folder": bool}[damage]()
    elif damage == "no json":
        (folder / "schema.json").write_text("{" * 10_000)
    elif damage == "cut short":
        with open(folder / "data" / "reward.npy", "r+b") as file:
            file.truncate(200)
    else:
        (folder / "data" / "reward.npy").rename(tmp_path / "elsewhere")
        (folder / "data" / "reward.npy").symlink_to(tmp_path / "elsewhere")
    code = main(command, folder, *["2"] * (command in ("head", "show")), *["--yes"] * (command == "repair"))
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    if command in ("verify", "repair"):
        assert code in (0, 1, 2)
    else:
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_info_tells_the_codec_and_how_much_it_saves(capsys: pytest.CaptureFixture[str]) -> None:
    folder = coded_folder.example("dense")
    fields = json_of(capsys, "info", folder)["fields"]
    assert fields["frame"]["codec"] == {"name": "zstd", "level": 12}
    parts = ("", ".blobs", ".dictionary")
    stored = sum(np.load(folder / "data" / f"frame{part}.npy").nbytes for part in parts) - 2 * 16  # final ones of none
    assert (fields["frame"]["bytes_stored"], fields["frame"]["bytes_raw"]) == (stored, 1024 * (122 + 2))
    assert fields["depth"]["codec"] is None
    main("info", folder)
    told = capsys.readouterr().out
    assert f"zstd 12, 1/{1024 * 124 / stored:.1f}" in " ".join(told.split())
    assert "jpeg 90 420" in " ".join(told.split())
