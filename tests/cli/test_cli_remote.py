"""`publish`, `pull`, `ls` and `info` of a URL: what is told of a store, and no secret of the way to it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cli_cases import main, make, read_json
from inside import get_inside

from memmap_buffer import ReplayBuffer, publish, shards_at, verify


def test_a_root_of_shards_is_published_listed_and_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["shard-00000", "shard-00001"]
    cases = [make(tmp_path / "root" / name, range(number, number + 3)) for number, name in enumerate(names)]
    url = f"file://{tmp_path}/url"
    assert main("publish", tmp_path / "root", url) == 0
    assert capsys.readouterr().out == "".join(f"{tmp_path}/root/{name}: published\n" for name in names)
    assert main("ls", url, "--json") == 0
    rows = read_json(capsys.readouterr().out)
    steps = [sum(case.lengths.values()) for case in cases]
    assert [(row["name"], row["episodes"], row["steps"]) for row in rows] == list(
        zip(names, [3, 3], steps, strict=True)
    )
    assert main("info", url) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == ["shards   2", "episodes 6", f"steps    {sum(steps)}"]
    assert main("info", f"{url}/shard-00001", "--json") == 0
    found = read_json(capsys.readouterr().out)
    assert (found["shards"], found["steps"], found["folders"]) == (1, steps[1], rows[1:])
    assert main("pull", url, tmp_path / "back") == 0
    assert capsys.readouterr().out == f"{tmp_path}/back: it is all there\n"
    assert [verify(tmp_path / "back" / name) for name in names] == [[], []]


def test_of_a_url_no_returns_are_told_so_a_reward_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("info", f"file://{tmp_path}", "--reward", "nope") == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "memmap-buffer: --reward: got 'nope' for a URL, of which no returns are told; leave it out, or name a folder "
        "that `pull` made\n",
    )


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("info", "--storage-options"),
        ("doctor", "--storage-options"),
        ("browse", "--storage-options"),
        ("info", "--cache"),
    ],
)
def test_options_that_only_urls_have_are_refused_for_a_folder(
    command: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "one", range(1))
    assert main(command, tmp_path / "one", flag, "{") == 2
    told = f"memmap-buffer: {flag}: it is for a URL, and {tmp_path}/one is a folder; leave it out, or name the URL\n"
    assert tuple(capsys.readouterr()) == ("", told)


@pytest.mark.parametrize("command", [("publish", "one"), ("pull", "back"), ("ls",), ("info",)])
def test_what_fails_is_one_line_without_secrets(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("one"), range(1))
    name, *folder = command

    def call(url: str, options: str) -> str:
        places = [*folder, url] if name == "publish" else [url, *folder]
        assert main(name, *places, "--storage-options", options) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "secret" not in err
        return err

    url = "nothing://me:secret@host/root?signature=secret"
    assert "nothing://host/root: Protocol not known: nothing" in call(url, "{}")
    assert "--storage-options: expected an object of JSON" in call(url, '{"key": "secret"')
    assert "--storage-options: expected an object of JSON" in call(url, '"secret"')


READING = [("episodes", "--json"), ("stats", "--json"), ("show", "last", "--json"), ("head", "first")]


def test_what_reads_a_folder_reads_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, url = tmp_path / "root", f"file://{tmp_path}/url"
    for name in ("a", "b"):
        make(root / name, range(3))
    assert main("publish", root, url) == 0
    capsys.readouterr()

    def told(place: object, name: str, *options: str) -> str:
        assert main(name, place, *options) == 0
        return capsys.readouterr().out

    for command, *options in READING:
        assert told(f"{url}/b", command, *options) == told(root / "b", command, *options)
    for command, *options in READING[:2]:  # the two that also take a root
        assert told(url, command, *options) == told(root, command, *options)
    for command, *options in READING[2:]:
        assert main(command, url, *options) == 2
        assert "this is the URL of a root of 2 folders: name one behind it: a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "s3://x/y"),
        ("verify", "S3://x/y"),
        ("verify", "simplecache::s3://x/y"),
        ("pack", "s3://x/y", "new"),
        ("pack", "one", "s3://x/y"),
        ("merge", "new", "one", "s3://x/y"),
    ],
)
def test_what_needs_a_folder_refuses_a_url_and_names_the_way(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("one"), range(1))
    assert main(*command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "got a URL, expected a folder on this machine: `memmap-buffer pull URL FOLDER`" in err
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("command", ["info", "stats", "head", "verify", "doctor", "publish"])
def test_a_root_whose_shards_are_all_published_is_told_from_a_folder_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    make(tmp_path / "root" / "published" / "shard-00000", range(2))
    assert main(command, tmp_path / "root", *([tmp_path / "url"] if command == "publish" else [])) == 2
    error = capsys.readouterr().err
    assert f"moved to {tmp_path}/root/published/shard-00000; read the root by the URL" in error


def test_ls_of_a_folder_here_names_the_command_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a folder", range(2))
    assert main("ls", tmp_path / "a folder") == 2
    error = capsys.readouterr().err
    assert error.endswith(f"what is in it is said by: memmap-buffer info '{tmp_path}/a folder'\n")
    assert main("ls", tmp_path / "missing") == 2
    assert "nothing was published here" in capsys.readouterr().err


def test_small_shards_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/url"
    for number in range(3):
        with ReplayBuffer(tmp_path / f"shard-{number:05}", 1, 5, {"x": "float"}) as buffer:
            buffer.store_episode(x=[1.0])
        publish(tmp_path / f"shard-{number:05}", url)
    size = max(shard.num_bytes for shard in shards_at(url).values())
    for options, told in (
        (["--max-bytes", f"{2 * size}"], "2 shards, shard-00000 to shard-00001"),
        ([], "3 shards, shard-00000 to shard-00002"),
    ):
        assert main("compact", url, "--dry-run", *options) == 0
        line, total = capsys.readouterr().out.splitlines()
        assert line.startswith("joined-") and line.endswith(told)
        assert total == f"would be joined: {told[0]} shards into 1"
    assert len(shards_at(url)) == 3
    assert main("compact", url) == 0
    assert capsys.readouterr().out.endswith("joined: 3 shards into 1\n")
    assert len(shards_at(url)) == 1


def test_garbage_is_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/url"
    make(tmp_path / "one", range(2))
    assert main("publish", tmp_path / "one", url) == 0
    half = tmp_path / "url" / "one" / ("a" * 32) / "data" / "x.npy"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 5000)
    for path in (tmp_path / "url").rglob("*"):
        os.utime(path, (time.time() - 40 * 3600,) * 2)
    capsys.readouterr()
    for options, count in [((), 0), (("--older-than", "2d"), 0), (("--older-than", "36h", "--dry-run"), 1)]:
        assert main("gc", url, *options) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) == count + 1
        assert half.exists()
    assert out == [f"one/{'a' * 32}: 4.9 KiB", "would be removed: 1, 4.9 KiB"]
    assert main("gc", url, "--older-than", "36h") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "removed: 1, 4.9 KiB"
    assert not half.exists()
    for age, error in [("12h", "--older-than: got "), ("soon", "--older-than: got 'soon', expected hours, days")]:
        assert main("gc", url, "--older-than", age) == 2
        assert error in capsys.readouterr().err


def test_a_cache_is_shown_checked_and_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "cache"
    make(tmp_path / "one", range(2))
    assert main("publish", tmp_path / "one", f"file://{tmp_path}/url") == 0
    ReplayBuffer.from_folder(f"file://{tmp_path}/url/one", cache=place, cache_bytes=8 << 20).batch(timestep_level=True)
    capsys.readouterr()
    assert main("cache", place, "--check", "--json") == 0
    shown = read_json(capsys.readouterr().out)
    ((name, (size, total)),) = shown.pop("shards").items()
    sizes = {"num_bytes": total, "head_bytes": shown["head_bytes"], "bound": 8 << 20, "cleared": 0}
    assert (size, shown) == (total, {"path": str(place), "damaged": {}, **sizes})
    file = next((place / name / "data").iterdir())
    data = file.read_bytes()
    with open(file, "r+b") as opened:
        opened.write(data[:-1] + bytes([data[-1] ^ 1]))
    assert main("cache", place, "--check") == 1
    lines, bytes_of = capsys.readouterr().out.splitlines(), get_inside("bytes_of")
    assert lines[0] == f"{name}: {bytes_of(len(data))} are not as they were published, and were dropped"
    assert lines[1] == f"{name}  {bytes_of(total - len(data))} of {bytes_of(total)}"
    assert lines[2].startswith(f"{place}: {bytes_of(total - len(data))}, bound 8.0 MiB, heads ")
    assert main("cache", place, "--clear") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"{place}: 0 B, bound 8.0 MiB, heads 0 B"]
    assert main("cache", tmp_path / "one") == 2
    assert "there is no cache" in capsys.readouterr().err
