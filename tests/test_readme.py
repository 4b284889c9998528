"""Every Python block of README, CONTRIBUTING and docs/ runs; the pages name every option, method and file rightly."""

import inspect
import re
import traceback
from pathlib import Path

import pytest
from pages import FENCE, blocks_of, run_alone, run_blocks

import memmap_buffer
from memmap_buffer import ConcatBuffer, Options, ReplayBuffer, compat
from memmap_buffer.adapters import Readable

ROOT = Path(__file__).resolve().parent.parent
OWN = {"d3rlpy.md", "jax.md", "ray.md", "rllib.md"}  # run by tests of the same names, or …_cases.py, in tests/interop
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in OWN),
]
GO_ON = {  # sections of one program each: (page, number of the block)
    ("trainers.md", 3),  # slices, of the environment of the block before
    ("trainers.md", 7),  # Lightning, of the folder that LeRobot's block has written
}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def in_text(word, text):
    return re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", text) is not None


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_bullet_stands_twice_in_a_section(page):
    for section in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE):
        bullets = [" ".join(text.split())[:50] for text in re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE)]
        assert len(bullets) == len(set(bullets)), sorted(bullets)


@every_page
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # Lightning's, with torch 2.13
@pytest.mark.filterwarnings("ignore:.*(does not have many workers|fewer than the logging interval):UserWarning")
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page).count == len(re.findall("^```python", page.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page in PAGES for number in range(len(blocks_of(page))) if (page.name, number) not in GO_ON],
    ids=lambda value: value if isinstance(value, int) else str(value.relative_to(ROOT)),
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_every_block_runs_alone_after_the_set_ups_above_it(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_alone(page, number)


def test_a_block_that_needs_another_one_does_not_run_alone(tmp_path):
    page = tmp_path / "page.md"
    blocks = ('```python title="Set-up: x"\nx = 1\n```', "```python\ny = x\n```", "```python\nz = y\n```")
    page.write_text("\n\n".join(blocks))
    assert run_blocks(page).names["z"] == 1
    run_alone(page, 1)
    with pytest.raises(NameError, match="'y' is not defined"):
        run_alone(page, 2)


def test_the_recording_page_prints_the_errors_that_it_announces(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "recording.md"
    run_blocks(page)
    block = next(found["code"] for found in FENCE.finditer(page.read_text()) if "for wrong in" in found["code"])
    announced = re.findall(r"^ +(?:right|\{).*,  # (.*)$", block, re.MULTILINE)
    printed = [line for line in capsys.readouterr().out.splitlines() if "timestep 0" in line]
    assert len(announced) == len(printed) == 4
    for text, line in zip(announced, printed, strict=True):
        assert text in line


def test_the_first_block_of_the_readme_runs_twice_and_goes_on_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "first.md"
    first.write_text(FENCE.search(PAGES[0].read_text())[0])
    lengths = []
    for _ in range(2):
        buffer = run_blocks(first).names["buffer"]
        lengths.append(buffer.num_episodes)
    assert lengths == [4, 8]


def test_a_block_that_fails_is_reported_with_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\ntext\n\n```python\ny = x\n\nassert y == 2, y\n```\n")
    with pytest.raises(AssertionError, match="1") as caught:
        run_blocks(page)
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == (str(page), 12)
    assert page.read_text().splitlines()[last.lineno - 1] == "assert y == 2, y"


def test_a_block_that_cannot_be_compiled_is_reported_with_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = = 1\n```\n")
    with pytest.raises(SyntaxError, match="invalid syntax") as caught:
        run_blocks(page)
    assert (caught.value.filename, caught.value.lineno) == (str(page), 4)


def test_the_recording_page_names_every_option_and_method_that_writes():
    text = (ROOT / "docs" / "recording.md").read_text()
    options = set(inspect.signature(ReplayBuffer.__init__).parameters) - {"self"}
    kinds = set(ReplayBuffer.__mro__) - set(Readable.__mro__)
    every = {name: value for kind in kinds for name, value in vars(kind).items()}
    methods = {name for name, value in every.items() if inspect.isroutine(value)}
    expected = options | {name for name in methods if not name.startswith("_")}
    assert {name for name in expected if not in_text(name, text)} == set()


def test_the_reading_pages_name_every_option_and_method_that_reads():
    overview = (ROOT / "docs" / "reading.md").read_text()
    linked = set(re.findall(r"^\| \[[^]]*\]\((\S+\.md)\) \|", overview, re.MULTILINE))
    text = overview + "".join((ROOT / "docs" / name).read_text() for name in linked)
    arguments = {"device", "seed", "shuffle", "shuffle_window", "drop_last", "rank", "world_size", "tail", "weights"}
    methods = {
        "from_root",
        "state_dict",
        "load_state_dict",
        "dataset",
        "dataloader",
        "sample",
        "episode",
        "get_all_data",
        "num_episodes",
        "num_steps",
        "serials",
    }
    expected = set(Options.__annotations__) | arguments | methods
    assert {name for name in expected if not in_text(name, text)} == set()


def referenced(text):
    """What reference.md names: section -> the names in the first column of its tables."""
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    tables = zip(sections[::2], sections[1::2], strict=True)
    return {title: re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", rows, re.M))) for title, rows in tables}


def public_names(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_reference_names_everything_public_once():
    found = referenced((ROOT / "docs" / "reference.md").read_text())
    assert sorted(found["What can be imported"]) == sorted(memmap_buffer.__all__)
    methods = found["A buffer that writes"] + found["A buffer that reads"]
    assert sorted(methods) == sorted(public_names(ReplayBuffer) | public_names(ConcatBuffer))
    assert sorted(found["Names of other systems"]) == sorted(
        name for name, value in inspect.getmembers(compat, inspect.isfunction) if value.__module__ == compat.__name__
    )
    assert sorted(found["Options of reading"]) == sorted(Options.__annotations__)


def test_what_the_reference_lists_is_explained_where_it_says():
    missing = []
    for line in (ROOT / "docs" / "reference.md").read_text().splitlines():
        if line.startswith("| `") and (links := re.findall(r"\]\(([a-z0-9-]+\.md)[^)]*\)", line)):
            text = (ROOT / "docs" / links[-1]).read_text()
            names = re.findall(r"`(\w+)`", line.split("|")[1])
            missing += [(name, links[-1]) for name in names if not in_text(name, text)]
    assert missing == []


def test_every_file_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:memmap_buffer|tests|docs|scripts)/[\w/.-]+)", text)
    assert len(paths) > 30
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    packages = {path.name for path in (ROOT / "memmap_buffer").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert packages == set(re.findall(r"^│ ([a-z_]+) ", text, re.MULTILINE))


def test_every_class_and_method_that_contributing_names_is_there():
    source = "".join(path.read_text() for path in (ROOT / "memmap_buffer").rglob("*.py"))
    named = re.findall(r"`([A-Z][a-z]\w+)(?:\.(\w+))?`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    assert {name for name, _ in named if not re.search(rf"^class {name}\b", source, re.MULTILINE)} == set()
    assert {method for _, method in named if method and not re.search(rf"def {method}\b", source)} == set()


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    linked = re.findall(r"^\| \[[^]]*\]\(([a-z0-9-]+\.md)\)", index, re.MULTILINE)
    assert sorted(linked) == sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")


def test_the_index_calls_each_page_by_its_title():
    index = (ROOT / "docs" / "README.md").read_text()
    for text, name in re.findall(r"^\| \[([^]]*)\]\(([a-z0-9-]+\.md)\)", index, re.MULTILINE):
        assert (ROOT / "docs" / name).read_text().startswith(f"# {text}\n"), name


@every_page
def test_a_link_is_not_called_by_the_name_of_a_page(page):
    assert re.findall(r"\[((?:docs/)?[a-z0-9-]+\.md)\]", page.read_text()) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("[a-z]*.md")), ids=lambda page: page.name)
def test_each_page_begins_with_what_the_reader_will_have(page):
    begin = page.read_text().split("\n\n")[1]
    assert re.match(r"(This page is for .*\. )?At (the|its) end (of this page )?", begin), begin


def anchors(page):
    """The fragments that GitHub gives a page's headings: lower case, without punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_within_the_repository_lead_somewhere(page):
    for target, fragment in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not fragment or fragment in anchors(path), (target, fragment)
