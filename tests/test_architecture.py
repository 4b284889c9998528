"""The shape of the package: layers, sizes, and what no module may do. Each check is tried on a bad example too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memmap_buffer

PACKAGE = Path(memmap_buffer.__file__).parent
NAME = PACKAGE.name
MAX_LINES = 450
SYSTEM = {"os", "mmap", "fcntl", "filelock", "posix"}
NEAR_THE_SYSTEM = {"store.files", "store.folder"}
SLOW = {"torch", "gymnasium", "matplotlib", "pandas", "tqdm"}
UNPICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def source_files() -> dict[str, str]:
    """Module name within the package, "" for the package itself -> its source."""
    return {module_of(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def levels(docstring: str) -> dict[str, int]:
    """Module -> level, from the list in the package's docstring."""
    found: dict[str, int] = {}
    for number, names in re.findall(r"^ +level (\d+) +(.+)$", docstring, re.MULTILINE):
        for name in names.split(", "):
            assert name.strip() not in found, f"{name} is listed twice"
            found[name.strip()] = int(number)
    return found


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name or "") of every import, also within functions, but for those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imports(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)
        else:
            yield from imports(node)


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """The modules of the package that a source imports; of a subpackage, the module taken from it."""
    found = set()
    for module, name in imports(ast.parse(source)):
        if module == NAME or module.startswith(f"{NAME}."):
            inner = module.removeprefix(NAME).removeprefix(".")
            deeper = f"{inner}.{name}".removeprefix(".")
            found.add(deeper if deeper in modules else inner)
    return found


def misplaced_imports(sources: dict[str, str], level_of: dict[str, int]) -> list[str]:
    """Imports that do not go strictly downwards, and modules without a level."""
    modules = {name for name in sources if name in level_of or not _is_package(name, sources)}
    wrong = [f"{name} has no level" for name in sorted(modules - level_of.keys())]
    wrong += [f"{name} has a level and does not exist" for name in sorted(level_of.keys() - sources.keys())]
    for name in sorted(modules & level_of.keys()):
        for other in sorted(imported_modules(sources[name], set(sources))):
            if level_of.get(other, 10**6) >= level_of[name]:
                wrong.append(f"{name} imports {other or 'the package'}")
    return wrong


def _is_package(name: str, sources: dict[str, str]) -> bool:
    return name == "" or any(other.startswith(f"{name}.") for other in sources)


def top_level_imports(source: str) -> set[str]:
    """The first part of every import of something that is not the package; `os.PathLike` is no import of os."""
    found = {(module.split(".")[0], name) for module, name in imports(ast.parse(source))}
    return {module for module, name in found if (module, name) != ("os", "PathLike")} - {NAME}


def calls_of(source: str, *names: str) -> list[str]:
    called = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [node.id for node in called if isinstance(node, ast.Name) and node.id in names]


def methods_named(source: str, name: str) -> list[int]:
    return [
        node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name
    ]


def unsafe_loads(source: str) -> list[str]:
    """Uses of numpy's and torch's loaders, and of `allow_pickle`."""
    tree = ast.parse(source)
    loads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "load"]
    found = [ast.unparse(n) for n in loads if ast.unparse(n.value) in ("np", "numpy", "torch")]
    return found + [n.arg for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "allow_pickle"]


# The package

SOURCES = source_files()
LEVELS = levels(ast.get_docstring(ast.parse(SOURCES[""]), clean=False) or "")
each_module = pytest.mark.parametrize("name", SOURCES, ids=lambda name: name or NAME)


def test_every_module_imports_only_from_lower_levels_and_has_one() -> None:
    assert len(LEVELS) > 20
    assert misplaced_imports(SOURCES, LEVELS) == []


def test_the_folders_of_the_package_hold_no_code_of_their_own() -> None:
    for name, source in SOURCES.items():
        if name and _is_package(name, SOURCES):
            assert len(ast.parse(source).body) == 1, f"{name}/__init__.py is more than a docstring"


@each_module
def test_a_module_is_short_and_says_what_it_is(name: str) -> None:
    assert len(SOURCES[name].splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(SOURCES[name]))


@each_module
def test_only_the_modules_nearest_to_the_system_touch_it(name: str) -> None:
    assert name in NEAR_THE_SYSTEM or not top_level_imports(SOURCES[name]) & SYSTEM


def private_names(source: str) -> list[str]:
    """What a source takes from the package, but from other neighbours, that the package does not offer to everybody."""
    taken = [(module, name) for module, name in imports(ast.parse(source)) if module.split(".")[0] == NAME]
    theirs = [(module, name) for module, name in taken if not module.startswith(f"{NAME}.interop")]
    return [f"{module}.{name}" for module, name in theirs if name not in memmap_buffer.__all__]


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("interop.")])
def test_neighbours_stand_on_the_public_names_alone(name: str) -> None:
    assert private_names(SOURCES[name]) == []


@each_module
def test_nothing_is_unpickled_printed_or_left_to_a_finaliser(name: str) -> None:
    source = SOURCES[name]
    assert not top_level_imports(source) & UNPICKLING
    assert unsafe_loads(source) == []
    assert calls_of(source, "eval", "exec", "breakpoint") == []
    assert name == "cli" or calls_of(source, "print") == []
    assert methods_named(source, "__del__") == []


def test_torch_is_imported_by_the_datasets_and_what_only_they_load() -> None:
    users = {name for name, source in SOURCES.items() if "torch" in top_level_imports(source)}
    assert users == {f"reading.{name}" for name in ("datasets", "distributed", "prefetch", "transport")}


def test_importing_the_package_does_not_import_torch_or_what_only_some_need() -> None:
    loaded = set(run("import sys, memmap_buffer; print(*sys.modules)").split())
    assert "memmap_buffer.buffer" in loaded
    assert loaded & SLOW == set()


def test_recording_and_reading_an_episode_does_not_import_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from memmap_buffer import ReplayBuffer
with ReplayBuffer({str(tmp_path)!r}, 2, 3, {{"a": "bfloat16", "b": ("U3", 2)}}) as buffer:
    with buffer.one_episode():
        buffer.store(a=[1.5], b=["x", "yz"])
    assert buffer.episode(0)["a"].tolist() == [1.5]
print(*sys.modules)"""
    assert set(run(code).split()) & SLOW == set()


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


# The checks themselves

TWO = {
    "": '"""levels"""',
    "low": "x = 1",
    "high": "from memmap_buffer.low import x",
    "sub": "",
    "sub.a": "",
    "sub.b": "",
}
TWO_LEVELS = {"low": 0, "high": 1, "sub.a": 1, "sub.b": 1}


def test_a_good_example_passes_the_check_of_the_layers() -> None:
    assert misplaced_imports(TWO, TWO_LEVELS) == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("low", "import memmap_buffer.high", "low imports high"),
        ("low", "from memmap_buffer import high", "low imports high"),
        ("low", "from memmap_buffer import ReplayBuffer", "low imports the package"),
        ("low", "def f():\n    from memmap_buffer.high import x", "low imports high"),
        ("low", "class A:\n    def f(self):\n        if x:\n            import memmap_buffer.high", "low imports high"),
        ("low", "if TYPE_CHECKING:\n    pass\nelse:\n    import memmap_buffer.high", "low imports high"),
        ("sub.a", "from memmap_buffer.sub import b", "sub.a imports sub.b"),
        ("sub.a", "from memmap_buffer.sub.b import x", "sub.a imports sub.b"),
        ("sub.a", "from memmap_buffer.high import x", "sub.a imports high"),
        ("high", "import memmap_buffer.high", "high imports high"),
        ("new", "x = 1", "new has no level"),
        ("sub.c", "x = 1", "sub.c has no level"),
    ],
)
def test_the_check_of_the_layers_finds_what_it_must(name: str, source: str, complaint: str) -> None:
    assert misplaced_imports({**TWO, name: source}, TWO_LEVELS) == [complaint]


@pytest.mark.parametrize(
    "source", ["if TYPE_CHECKING:\n    from memmap_buffer.high import x", "import numpy", "import memmap_bufferish"]
)
def test_the_check_of_the_layers_lets_annotations_and_strangers_pass(source: str) -> None:
    assert misplaced_imports({**TWO, "low": source}, TWO_LEVELS) == []


def test_the_check_of_the_layers_finds_a_level_of_nothing() -> None:
    assert misplaced_imports(TWO, {**TWO_LEVELS, "gone": 3}) == ["gone has a level and does not exist"]


def test_the_levels_are_read_from_the_docstring() -> None:
    text = "Layers:\n\n    level 0   errors\n    level 12  store.a, store.b\n\nNo level 3  x\n"
    assert levels(text) == {"errors": 0, "store.a": 12, "store.b": 12}
    with pytest.raises(AssertionError, match="errors is listed twice"):
        levels(text + "    level 4   errors\n")


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import os.path",
        "from os import path",
        "def f():\n    import mmap",
        "from os import PathLike, fsync",
        "from filelock import FileLock",
    ],
)
def test_the_check_of_the_system_finds_what_it_must(source: str) -> None:
    assert top_level_imports(source) & SYSTEM
    assert not top_level_imports("from os import PathLike\nimport ossaudiodev") & SYSTEM


def test_the_checks_of_single_modules_find_what_they_must() -> None:
    assert top_level_imports("from pickle import loads") & UNPICKLING
    assert unsafe_loads("import numpy as np\nnp.load(f)") == ["np.load"]
    assert unsafe_loads("read(f, allow_pickle=True)") == ["allow_pickle"]
    assert unsafe_loads("json.load(f)") == []
    assert calls_of("def f():\n    print(1)", "print") == ["print"]
    assert private_names("from memmap_buffer.schema import Field, nest") == ["memmap_buffer.schema.nest"]
    assert methods_named("class A:\n    def __del__(self): ...", "__del__") == [2]
