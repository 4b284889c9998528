"""What a release needs is there and agrees: one version, the Pythons, the changelog, the forge's files."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import contents
import memmap_buffer

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r"Python :: (3\.\d+)\"", PROJECT)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
not_in_an_sdist = pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no forge's files")


def read(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


def test_the_version_stands_in_one_place() -> None:
    version = memmap_buffer.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version)
    assert 'dynamic = ["version"]' in PROJECT and 'path = "memmap_buffer/__init__.py"' in PROJECT
    citation = read(ROOT / "CITATION.cff")
    assert not citation.keys() & {"version", "date-released"}  # these would be forgotten
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


def test_the_changelog_begins_with_what_is_not_released_and_dates_what_is() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - 20\d\d-\d\d-\d\d", heading), heading


def test_every_promised_python_is_classified_tried_and_written_down() -> None:
    assert re.search(r'requires-python = ">=(3\.\d+)"', PROJECT)[1] == PYTHONS[0]  # type: ignore[index]
    assert f"| {PYTHONS[0]} to {PYTHONS[-1]} |" in (ROOT / "docs" / "platforms.md").read_text()


@not_in_an_sdist
def test_the_forge_tries_every_promised_python_by_scripts_that_are_here() -> None:
    jobs = [(name, job) for path in WORKFLOWS for name, job in read(path)["jobs"].items()]
    assert dict(jobs)["check"]["strategy"]["matrix"]["python"] == PYTHONS
    steps = [step for _, job in jobs for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    for script in ("check", "test", "build"):
        assert any(command.startswith(f"scripts/{script}") for command in commands)
        assert (ROOT / "scripts" / script).exists()
    given = [str(step.get("with", {}).get("python-version", "")).splitlines() for step in steps]
    assert [set(several) for several in given if len(several) > 1] == [set(PYTHONS)] * 2  # where wheels are tried


@not_in_an_sdist
def test_the_forge_is_given_no_secret() -> None:
    for path in WORKFLOWS:
        assert "secrets." not in path.read_text()
        assert read(path)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("script", ["build", "check", "demo", "install", "pythons.sh", "test"])
def test_a_script_can_be_read_by_bash(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts" / script], check=True)


def test_a_tag_of_another_version_or_without_a_date_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    for name in ("scripts/build", "scripts/pythons.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "memmap_buffer").mkdir()
    (tmp_path / "memmap_buffer" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - unreleased\n")
    wrong = {"v9.9.9": "the tag is v9.9.9, memmap_buffer.__version__ is 1.2.3", "v1.2.3": "has no heading"}
    for tag, text in wrong.items():
        done = subprocess.run([tmp_path / "scripts" / "build", "--tag", tag], capture_output=True, text=True)
        assert done.returncode == 1
        assert text in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CHANGELOG.md", "memmap_buffer", "scripts"]


def test_the_contents_of_what_is_built_are_compared_with_the_package(tmp_path: Path) -> None:
    folders = [f"{name}/x.py" for name in contents.FOLDERS]
    with zipfile.ZipFile(tmp_path / "m-1.whl", "w") as wheel:
        for name in (*contents.package(), "m-1.dist-info/licenses/LICENSE"):
            wheel.writestr(name, "")
    with tarfile.open(tmp_path / "m-1.tar.gz", "w:gz") as sdist:
        for name in (*contents.package(), *contents.TOP, *folders):
            sdist.addfile(tarfile.TarInfo(f"m-1/{name}"))
    assert contents.wrong(tmp_path) == []
    with zipfile.ZipFile(tmp_path / "m-1.whl", "w") as wheel:
        for name in (*(contents.package() - {"memmap_buffer/py.typed"}), "tests/test_x.py"):
            wheel.writestr(name, "")
    with tarfile.open(tmp_path / "m-1.tar.gz", "w:gz") as sdist:
        for name in (*contents.package(), *contents.TOP[1:], *folders[:-1], "stray.py"):
            sdist.addfile(tarfile.TarInfo(f"m-1/{name}"))
    assert contents.wrong(tmp_path) == [
        "m-1.whl lacks memmap_buffer/py.typed",
        "m-1.whl has tests/test_x.py",
        "m-1.whl lacks the licence",
        f"m-1.tar.gz lacks {contents.TOP[0]}",
        f"m-1.tar.gz has nothing in {contents.FOLDERS[-1]}",
        "m-1.tar.gz has stray.py",
    ]
