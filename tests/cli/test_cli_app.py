"""Every command: its help has an example that runs, its errors are one line, Ctrl+C leaves nothing half."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_cases import RUN, make, read_json, run
from fault_injection import listing
from inside import set_inside
from pages import run_blocks

from memmap_buffer import ReplayBuffer, pack, publish
from memmap_buffer.cli import app, folders, import_export
from memmap_buffer.cli.terminal import Problem

each_command = pytest.mark.parametrize("name", app.EXAMPLES)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder to work in, with everything that the examples name."""
    monkeypatch.chdir(tmp_path)
    make(Path("replay_data"), range(8))
    pack("replay_data", "packed_data")
    for shard in range(2):
        make(Path(f"shards/{shard}"), range(shard, shard + 3))
    publish("replay_data", "published_root")
    ReplayBuffer.from_folder(f"file://{tmp_path}/published_root/replay_data", cache="scratch_cache").episode(0)
    if find_spec("h5py") is not None:
        assert app.main(["export", "robomimic", "replay_data", "demos.hdf5"]) == 0
    capsys.readouterr()
    return tmp_path


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert app.main([name, "--help"]) == 0
    return capsys.readouterr().out


def needs(name: str) -> None:
    package = {"view": "rerun", "import": "h5py", "export": "h5py"}.get(name)
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)


@each_command
def test_help_says_what_a_command_does_and_has_an_example_that_runs(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    text = " ".join(help_of(name, capsys).split())
    described = (app.EXAMPLES[name][0].__doc__ or "").partition("\n")[0]
    assert described in text
    assert described.endswith(".")
    found = re.search(r"Example: memmap-buffer (.+)$", text)
    assert found is not None
    assert found[1].split()[0] == name
    needs(name)
    if name == "browse":  # which goes on until it is interrupted: tests/browse
        return
    arguments = shlex.split(found[1])
    yes = ["--yes"] if "--yes" in text else []
    before = listing(place / "replay_data")
    assert app.main([*arguments, *yes]) == 0
    assert capsys.readouterr().err == ""
    assert name in ("delete", "add-field") or listing(place / "replay_data") == before


@each_command
def test_a_command_that_replaces_or_removes_has_yes_and_no_other_has(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = name in ("repair", "delete", "plot", "video", "view", "export")
    assert ("--yes" in help_of(name, capsys)) is asks


@each_command
def test_a_folder_that_is_not_there_ends_with_2_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(name)
    monkeypatch.chdir(tmp_path)
    assert app.main(shlex.split(app.EXAMPLES[name][1])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memmap-buffer: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(set(app.EXAMPLES) - {"verify", "repair", "import"}))
@pytest.mark.parametrize("damage", ["no schema", "cut short"])
def test_a_damaged_folder_ends_with_2_in_one_line_and_leaves_nothing(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(name)
    monkeypatch.chdir(tmp_path)
    for folder in ("replay_data", "packed_data", "shards/0", "shards/1"):
        make(Path(folder), range(3))
        if damage == "no schema":
            Path(folder, "schema.json").write_text("{" * 1000)
        else:
            with open(f"{folder}/data/reward.npy", "r+b") as file:
                file.truncate(500)
    before = listing(tmp_path)
    assert app.main(shlex.split(app.EXAMPLES[name][1])) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert listing(tmp_path) == before


@each_command
def test_an_option_that_does_not_exist_ends_with_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([name, "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(28, "no space left"), ImportError("no such extra")], ids=repr
)
def test_every_end_has_its_code_and_one_line(
    error: BaseException, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    set_inside(monkeypatch, table_of=fail)
    assert app.main(["info", "replay_data"]) == (130 if error is KeyboardInterrupt else 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_a_reader_that_goes_away_ends_the_command_quietly(place: Path) -> None:
    code = f"{sys.executable} -c '{RUN}' show replay_data 3 --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {code}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == 2
    out, err = capsys.readouterr()
    for name in app.EXAMPLES:
        assert re.search(rf"\b{name}\b", out + err)


def test_commands_that_only_look_load_no_torch_and_no_extra_but_their_own(place: Path) -> None:
    for arguments in (["info"], ["episodes"], ["show", "3"], ["head", "3"], ["verify"]):
        before = "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))"
        done = run(arguments[0], "replay_data", *arguments[1:], before=before)
        assert done.returncode == 0
        assert {"torch", "matplotlib", "av", "rerun", "h5py", "gymnasium"} & set(done.stderr.split()) == set()


# Roots of shards


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of one, two and three episodes, and a fourth that a collector is about to make."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        make(Path(f"root/shard-{number:05}"), range(number + 1))
    Path("root/shard-00003").mkdir()
    return Path("root")


def test_a_root_of_shards_is_looked_at_as_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["info", "root"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("root: 3 folders, 6 episodes, ")
    assert [line.split()[:2] for line in lines[2:]] == [[f"shard-{n:05}", str(n + 1)] for n in range(3)]
    assert app.main(["info", "root", "--json"]) == 0
    assert [each["episodes"] for each in read_json(capsys.readouterr().out)["folders"]] == [1, 2, 3]
    assert app.main(["episodes", "root", "--where", "folder=shard-00002"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["shard-00002", str(serial)] for serial in range(3)
    ]
    assert app.main(["stats", "root", "--field", "task_id", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["task_id"]["count"] == 6
    assert app.main(["merge", "all", "root"]) == 0
    assert capsys.readouterr().out.startswith("all: 6 episodes, ")


@pytest.mark.parametrize("without", ["", "typer"])
def test_a_root_of_shards_is_verified_and_repaired_folder_by_folder(root: Path, without: str) -> None:
    before = f"import sys; sys.modules[{without!r}] = None" if without else ""
    assert run("verify", "root", before=before).stdout == "all is well\n"
    with open("root/shard-00001/data/reward.npy", "r+b") as file:
        file.seek(140)
        file.write(b"spoilt")
    done = run("verify", "root", before=before)
    assert done.returncode == 1
    assert done.stdout.startswith("shard-00001/data/reward.npy: ")
    assert run("repair", "root", "--yes", before=before).returncode == 0
    assert run("verify", "root", before=before).returncode == 0
    assert not Path("root/shard-00000/lost+found").exists()


@pytest.mark.parametrize("command", ["show root last", "head root", "pack root new", "delete root 0 --yes"])
def test_what_takes_one_folder_names_those_of_a_root(
    root: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(shlex.split(command)) == 2
    assert capsys.readouterr().err == (
        f"memmap-buffer: {root.absolute()} is a root of 3 folders, shard-00000 to shard-00002: name one of them, or "
        f"copy them into one by: memmap-buffer merge NEW {root.absolute()}\n"
    )


# Hints and summaries


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("unpack replay_data new --max-timesteps 3", "--max-timesteps: got 3, the episodes need "),
        ("export lerobot replay_data new", "pass --option fps=VALUE"),
        ("info .git", ".git: there is no such folder"),
        ("info empty", "empty is not a buffer: there is no schema.json; give a folder that holds episodes"),
        ("import d4rl nowhere.hdf5 new", "nowhere.hdf5: there is no such file or folder"),
    ],
)
def test_hints_are_spelt_for_the_shell(
    place: Path, command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("import")
    Path("empty").mkdir()
    assert app.main(shlex.split(command)) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("without", ["", "typer"])
def test_pack_and_unpack_say_what_they_made(place: Path, without: str) -> None:
    before = f"import sys; sys.modules[{without!r}] = None" if without else ""
    with ReplayBuffer.from_folder("replay_data") as buffer:
        made = f"8 episodes, {buffer.num_steps} steps\n"
    assert run("pack", "replay_data", "dense", before=before).stdout == f"dense: {made}"
    assert run("unpack", "dense", "grid", before=before).stdout == f"grid: {made}"
    done = run("unpack", "dense", "small", "--max-timesteps", "3", before=before)
    assert done.stderr.startswith("memmap-buffer: --max-timesteps: got 3, the episodes need ")


# The page about it

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ memmap-buffer (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def test_the_session_of_the_page_runs_and_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(PAGE)
    session = [found for block in BLOCK.findall(PAGE.read_text()) for found in COMMAND.findall(block)]
    assert len(session) > 15
    for command, expected in session:
        assert app.main(shlex.split(command)) == 0, command
        out, err = capsys.readouterr()
        assert err == ""
        printed = [line.rstrip() for line in out.splitlines()]
        assert not expected or printed == expected.splitlines(), command


def test_the_page_names_every_command() -> None:
    text = PAGE.read_text()
    assert {
        name for name in app.EXAMPLES if not re.search(rf"`(memmap-buffer )?{name}\b|buffer {name}\b", text)
    } == set()


# import and export


@pytest.mark.parametrize("form", import_export.FORMATS)
def test_every_format_has_functions_for_the_ways_that_it_says(form: str) -> None:
    only = re.search(r"\((import|export) only\)", import_export.FORMATS[form])
    for verb in [only[1]] if only else ["import", "export"]:
        try:
            assert callable(import_export.function_of(verb, form))
        except ImportError as error:
            assert "pip install 'memmap-buffer[" in str(error)


def test_a_format_that_does_not_exist_is_told_from_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["import", "zip", "a", "b"]) == 2
    assert capsys.readouterr().err.startswith(
        "memmap-buffer: import 'zip': there is no such format; there are minari, "
    )


def test_a_format_that_goes_one_way_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["export", "torchrl", "replay_data", "there"]) == 2
    assert "only the other way is possible" in capsys.readouterr().err
    assert not Path("there").exists()


def test_what_is_imported_is_what_was_exported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("import")
    assert app.main(["import", "robomimic", "demos.hdf5", "back", "--option", "max_episodes=30"]) == 0
    with ReplayBuffer.from_folder("replay_data") as one, ReplayBuffer.from_folder("back") as other:
        assert (len(one), other.max_episodes) == (len(other), 30)
        for i in range(len(one)):
            expected, got = (buffer.schema.flatten(buffer.episode(i)) for buffer in (one, other))
            for name in ("observation.state", "observation.pixels", "action"):
                assert got[name].tolist() == expected[name].tolist()


def test_options_reach_the_function_of_the_format_and_others_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def function(source: str, folder: str, *, fps: float = 0.0, infos: bool = True, **options: object) -> None: ...

    given = ["fps=2.5", "infos=false", "circular=true"]
    assert import_export.options_of(function, given, import_export.OF_BUFFERS) == {
        "fps": 2.5,
        "infos": False,
        "circular": True,
    }
    assert import_export.options_of(function, ["author=[1, 2]", "name=some text"]) == {
        "author": [1, 2],
        "name": "some text",
    }
    for wrong in ("frames=1", "fps", "=3", "folder=x"):
        with pytest.raises(Problem, match="expected NAME=VALUE with one of fps, infos, max_episodes"):
            import_export.options_of(function, [wrong], import_export.OF_BUFFERS)
    needs("export")
    assert app.main(["export", "robomimic", "replay_data", "there.hdf5", "--option", "fps=3"]) == 2
    assert "--option 'fps=3'" in capsys.readouterr().err
    assert not Path("there.hdf5").exists()


def test_an_import_that_fails_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("import")
    Path("broken.hdf5").write_bytes(Path("demos.hdf5").read_bytes()[:5000])
    assert app.main(["import", "robomimic", "broken.hdf5", "target"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("target").exists()
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


def test_an_export_replaces_a_file_only_after_a_yes(place: Path) -> None:
    needs("export")
    Path("folder").mkdir()
    done = run("export", "robomimic", "replay_data", "folder", "--yes")
    assert (done.returncode, done.stderr) == (2, "memmap-buffer: folder: there is a folder already; give a new name\n")
    Path("mine.hdf5").write_text("mine")
    assert run("export", "robomimic", "replay_data", "mine.hdf5", given="n\n").returncode == 2
    assert Path("mine.hdf5").read_text() == "mine"
    assert run("export", "robomimic", "replay_data", "mine.hdf5", given="y\n").returncode == 0
    assert Path("mine.hdf5").read_bytes().startswith(b"\x89HDF")


def test_a_new_folder_is_asked_for_before_anything_is_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("import")
    for command in (["import", "robomimic", "nowhere.hdf5", "replay_data"], ["merge", "replay_data", "nowhere"]):
        assert app.main(command) == 2
        assert "there is something already" in capsys.readouterr().err
    folders.require_new(place / "new")
