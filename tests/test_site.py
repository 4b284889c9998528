"""The documentation is built as a site without a warning, and asks no other machine for anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import memmap_buffer

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("material", "mkdocs", "mkdocstrings")
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]* src="?([^"\s>]+)|<link[^>]*rel="?stylesheet"?[^>]* href="?([^"\s>]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `scripts/docs --strict` builds it."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed; the extra `docs` has them")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    command += ["--config-file", ROOT / "scripts" / "site" / "mkdocs.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_program_and_docstring_is_on_the_site(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    written = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"}
    programs = {f"examples/{path.stem}.html" for path in (ROOT / "examples").glob("*.py")}
    tutorials = {f"tutorials/{path.stem}.html" for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")}
    assert pages >= {"index.html", "pages.html", "changelog.html"} | written | programs | tutorials
    buffers = (site / "api" / "buffers.html").read_text()
    assert 'id="memmap_buffer.ReplayBuffer.sample"' in buffers and "BufferLockedError" in buffers
    assert 'href="api/buffers.html#memmap_buffer.ReplayBuffer.sample"' in (site / "reference.html").read_text()


@pytest.mark.slow
def test_every_exported_name_has_its_docstring_on_the_site(site: Path) -> None:
    pages = [path.read_text() for path in (site / "api").glob("*.html")]
    shown = {name for page in pages for name in re.findall(r'id="memmap_buffer\.(\w+)"', page)}
    assert shown == set(memmap_buffer.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("quickstart", "quickstart.html"),
        ("getting started", "quickstart.html"),
        ("jupyter", "quickstart.html"),
        ("relabel rewards", "recording.html"),
        ("relabel goals", "which-call.html"),
        ("faq", "faq.html"),
        ("glossary", "glossary.html"),
        ("import and export", "interop.html"),
        ("same_step", "gymnasium.html"),
        ("float64", "gymnasium.html"),
        ("checkpoint", "checkpoint.html"),
    ],
)
def test_the_words_of_a_newcomer_find_a_page(site: Path, words: str, page: str) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {
        each["location"].partition("#")[0] for each in entries if words in f"{each['title']} {each['text']}".lower()
    }
    assert page in found


@pytest.mark.slow
def test_the_pages_are_grouped_by_task(site: Path) -> None:
    bar = (site / "index.html").read_text().partition("md-tabs__list")[2].partition("</nav>")[0]
    groups = [" ".join(text.split()) for text in re.findall(r"md-tabs__link[^>]*>([^<]*)<", bar)]
    assert groups == ["Home", "Start", "Record", "Train", "Look", "Share", "Operate", "Reference"]


@pytest.mark.slow
def test_set_ups_of_blocks_are_folded_away_and_shown_on_demand(site: Path) -> None:
    page = (site / "views.html").read_text()
    folded = page.partition("<details>")[2].partition("</details>")[0]
    assert "<summary>Set-up" in folded and "store_episode" in folded


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_machines(site: Path) -> None:
    for page in site.rglob("*.html"):
        for found in LOADED.finditer(page.read_text()):
            assert not re.match(r"(\w+:)?//", found[1] or found[2]), (page.name, found[0])
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style.name
