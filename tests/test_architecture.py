"""The shape of the package: its floors, no circles, what no module may do. Each check is tried on a bad example too."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import parts
import pytest

import memmap_buffer
from memmap_buffer import adapters

parse = cache(ast.parse)
PACKAGE = Path(memmap_buffer.__file__).parent
NAME = PACKAGE.name
SYSTEM = {"os", "mmap", "fcntl", "filelock", "posix"}
NEAR_THE_SYSTEM = {"format.syscalls", "format.folder"}
SLOW = {"torch", "gymnasium", "matplotlib", "pandas", "tqdm"}
LATER = {
    "asyncio",
    "concurrent.futures",
    "difflib",
    "filelock",
    "hashlib",
    "multiprocessing",
    "shutil",
    "ssl",
    "subprocess",
}
ROOF = {"__main__", "compat"}
DOORS = {"", "adapters"}  # public: what is behind them knows nothing of them
EDGES = {"cli", "memmap_replay_buffer", "interop"}  # they stand before the doors
OF_TRAINERS = {  # of the objects of d3rlpy, Stable-Baselines3 and torchrl, which have no public name for them
    *("_failure_return", "_gamma", "_n_frames", "_n_steps", "_step_reward", "_maybe_cast_dtype"),
    *("_pin_memory", "_replay_lock", "_storage", "_transform"),
}
ADAPTERS = {"interop.d3rlpy", "interop.stable_baselines3", "interop.torchrl_replay"}  # of these trainers
VAGUE = {"found", "one", "known", "given", "held", "told", "left"}  # of what, a name should say
NO_THING = re.compile(r"(What|Which|Those|One|The same)\b")  # at the begin of a docstring
# Of named tuples, of Python itself, of displays in notebooks, of Stable-Baselines3.
OF_OTHERS = {"_asdict", "_fields", "_replace", "_exit", "_is_owned", "_repr_html_", "_repr_png_", "_get_samples"}
HARMLESS = {("os", "PathLike"), ("pickle", "dumps")}  # names of modules that else may not be imported
UNPICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

INNER = {  # package -> its modules that tests of single classes import
    "": "cached dtypes names schema",
    "browse": "checks episode_list",
    "cli": "app command episodes folders import_export minimal terminal",
    "format": "blobs checksums creation episode_table folder host journal layout marks records source storage syscalls",
    "interop": "columns rows safe_pickle trainer_memory",
    "items": "filters index live_index rank_partition selection shuffle",
    "loading": "batch_reader epochs prefetch shuffle_window transport",
    "priority": "anchor_priorities kernels leaves priorities sum_tree tree_file",
    "remote": "blocks cache layout mirror objects published ranges shards",
    "views": "batch_builder by_address folders memory_pool transforms",
    "writing": "commit episode slots",
}


def source_files() -> dict[str, str]:
    """Module name within the package, "" for the package itself -> its source."""
    return {module_of(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floors(docstring: str) -> list[str]:
    """The packages, from the top floor down, as the package's docstring lists them."""
    return re.findall(r"^    (\w+)  +\S", docstring, re.MULTILINE)


def imports(tree: ast.AST, *, annotations: bool = False) -> Iterator[tuple[str, str]]:
    """(module, name or "") of every import, also within functions; those under `if TYPE_CHECKING` are `annotations`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not annotations:
            yield from imports(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)
        else:
            yield from imports(node, annotations=annotations)


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """The modules of the package that a source imports; of a subpackage, the module taken from it."""
    found = set()
    for module, name in imports(parse(source)):
        if module == NAME or module.startswith(f"{NAME}."):
            inner = module.removeprefix(NAME).removeprefix(".")
            deeper = f"{inner}.{name}".removeprefix(".")
            found.add(deeper if deeper in modules else inner)
    return found


def imports_of_each(sources: dict[str, str]) -> dict[str, set[str]]:
    return {name: imported_modules(source, set(sources)) for name, source in sources.items() if name}


def upward_imports(sources: dict[str, str], floors: list[str]) -> list[str]:
    """Imports that do not go down the list of packages; other modules lie below all, but for those on the roof."""

    def height(module: str) -> float:
        package = module.split(".")[0]
        if package in floors:
            return len(floors) - floors.index(package)
        if module in DOORS:
            return len([floor for floor in floors if floor not in EDGES]) + 0.5
        return len(floors) + 1 if module in ROOF else 0

    return [
        f"{name} imports {other or 'the package'}"
        for name, others in imports_of_each(sources).items()
        for other in sorted(others)
        if height(other) > height(name)
    ]


def circles(sources: dict[str, str]) -> list[str]:
    """The modules that import themselves, by way of others."""
    others_of = imports_of_each(sources)

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = others_of.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return sorted(name for name in others_of if name in reached(name))


def _is_package(name: str, sources: dict[str, str]) -> bool:
    return name == "" or any(other.startswith(f"{name}.") for other in sources)


def top_level_imports(source: str) -> set[str]:
    """The first part of every import of something that is not the package, but for names that do no harm."""
    found = {(module.split(".")[0], name) for module, name in imports(parse(source))}
    return {module for module, name in found - HARMLESS} - {NAME}


def calls_of(source: str, *names: str) -> list[str]:
    called = [node.func for node in ast.walk(parse(source)) if isinstance(node, ast.Call)]
    return [node.id for node in called if isinstance(node, ast.Name) and node.id in names]


def methods_named(source: str, name: str) -> list[int]:
    return [node.lineno for node in ast.walk(parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]


def unsafe_loads(source: str) -> list[str]:
    """Uses of numpy's and torch's loaders, and of `allow_pickle`."""
    tree = parse(source)
    loads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "load"]
    found = [ast.unparse(n) for n in loads if ast.unparse(n.value) in ("np", "numpy", "torch")]
    return found + [n.arg for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "allow_pickle"]


# The package

SOURCES = source_files()
FLOORS = floors(ast.get_docstring(parse(SOURCES[""]), clean=False) or "")
each_module = pytest.mark.parametrize("name", SOURCES, ids=lambda name: name or NAME)


def test_every_package_has_its_floor() -> None:
    assert sorted(FLOORS) == sorted({name.split(".")[0] for name in SOURCES if "." in name})


def test_every_module_imports_only_from_its_own_package_and_those_below() -> None:
    assert upward_imports(SOURCES, FLOORS) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(SOURCES) == []


def test_the_folders_of_the_package_hold_no_code_of_their_own() -> None:
    for name, source in SOURCES.items():
        if name not in ("", "memmap_replay_buffer") and _is_package(name, SOURCES):
            assert len(parse(source).body) == 1, f"{name}/__init__.py is more than a docstring"


@each_module
def test_a_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(parse(SOURCES[name]))


@each_module
def test_only_the_modules_nearest_to_the_system_touch_it(name: str) -> None:
    assert name in NEAR_THE_SYSTEM or not top_level_imports(SOURCES[name]) & SYSTEM


def private_names(source: str, *allowed: str) -> list[str]:
    """The names that a source takes from the package by another way than its public modules, or one of `allowed`."""
    public = {NAME: memmap_buffer.__all__, f"{NAME}.adapters": adapters.__all__}
    return [
        f"{module}.{name}"
        for module, name in imports(parse(source), annotations=True)
        if module.split(".")[0] == NAME
        and (module, name) != (NAME, "")
        and name not in public.get(module, ())
        and not any(f"{module}.".startswith(f"{NAME}.{package}.") for package in allowed)
        and not (module == NAME and name in allowed)
    ]


def private_attributes(source: str) -> set[str]:
    """The underscored attributes that a source uses and does not bind itself: those of other modules' objects."""
    tree = parse(source)
    attributes = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    of_self = {node for node in attributes if ast.unparse(node.value) == "self"}
    bound = {"_asdict", "_fields", "_replace"} | {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    private = {node for node in attributes if re.match("_(?!_)", node.attr)}
    inherited = {node.attr for node in private if ast.unparse(node.value) == "super()"}
    return ({node.attr for node in private} - bound) | inherited


def edges(package: str) -> list[str]:
    return [name for name in SOURCES if name.startswith(f"{package}.")]


@pytest.mark.parametrize("name", edges("interop"))
def test_neighbours_stand_on_the_public_names_alone(name: str) -> None:
    assert private_names(SOURCES[name], "interop") == []
    assert private_attributes(SOURCES[name]) <= (OF_TRAINERS if name in ADAPTERS else set())


@pytest.mark.parametrize("name", edges("cli"))
def test_the_commands_stand_on_the_public_names_and_on_neighbours_alone(name: str) -> None:
    assert private_names(SOURCES[name], "cli", "interop") == []
    assert private_attributes(SOURCES[name]) == set()


def test_the_names_of_memmap_replay_buffer_stand_on_the_public_ones_alone() -> None:
    sources = [source for name, source in SOURCES.items() if name.startswith("memmap_replay_buffer")]
    assert [name for source in sources for name in private_names(source, "memmap_replay_buffer", "interop")] == []
    assert private_attributes("\n".join(sources)) == set()


def test_the_names_of_other_systems_stand_on_the_public_ones_alone() -> None:
    assert private_names(SOURCES["compat"]) == []
    assert private_attributes(SOURCES["compat"]) == set()


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
    assert users == {f"loading.{name}" for name in ("datasets", "distributed", "prefetch", "tensors", "transport")}


def test_importing_the_package_does_not_import_torch_or_what_only_some_need() -> None:
    code = "import sys, numpy; before = {*sys.modules}; import memmap_buffer; print(*{*sys.modules} - before)"
    loaded = set(run(code).split())
    assert "memmap_buffer.api.buffer" in loaded
    assert loaded & (SLOW | LATER) == set()
    assert not any(name.startswith(("memmap_buffer.maintenance.pu", "memmap_buffer.interop")) for name in loaded)


def test_every_public_name_is_there_when_it_is_asked_for() -> None:
    code = "import memmap_buffer as m; print(*[n for n in m.__all__ if n not in dir(m) or getattr(m, n) is None])"
    assert run(code).split() == []
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        memmap_buffer.unknown  # noqa: B018


def test_every_tool_of_an_adapter_is_there_when_it_is_asked_for_and_loads_no_optional_package_before() -> None:
    code = """
import sys
from memmap_buffer import adapters as a
print(*{"torch", "gymnasium", "memmap_buffer.interop"} & {*sys.modules})
print(*[n for n in a.__all__ if n not in dir(a) or n not in a.__doc__ or getattr(a, n) is None])"""
    assert run(code).split() == []
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        adapters.unknown  # noqa: B018


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


def vague_names(tree: ast.AST) -> Iterator[str]:
    """Names that are bound to something and do not say to what: of variables, attributes, arguments, functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.lstrip("_") in VAGUE:
            yield name


def docstrings_without_a_thing(tree: ast.AST) -> Iterator[str]:
    """Functions and classes whose docstring does not begin with a thing."""
    for node in ast.walk(tree):
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if named and NO_THING.match(ast.get_docstring(node) or ""):
            yield node.name


@pytest.mark.parametrize(("of_a_source", "count"), [(vague_names, 1), (docstrings_without_a_thing, 0)])
def test_names_and_docstrings_say_of_what_they_are(of_a_source: Callable[[ast.AST], Iterator[str]], count: int) -> None:
    """The numbers only go down: lower them where there are fewer."""
    assert sum(len([*of_a_source(parse(source))]) for source in source_files().values()) == count


# The tests


def is_private(name: str) -> bool:
    """Whether a name, or the last part of a dotted one, is for its own module alone."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__") and last not in OF_OTHERS


def private_attributes_taken(tree: ast.AST) -> Iterator[str]:
    """Attributes with an underscore that are taken of others, rather than of `self`."""
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and is_private(node.attr)
        if private and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.attr


def private_names_taken(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that are imported, or asked for or replaced by `monkeypatch.setattr` and its like."""
    yield from (name for module, name in imports(tree) if module.split(".")[0] == NAME and is_private(name))
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("setattr", "getattr", "delattr")):
            texts = [argument.value for argument in call.args[:2] if isinstance(argument, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and is_private(text))


@pytest.mark.parametrize(("of_a_source", "count"), [(private_attributes_taken, 0), (private_names_taken, 0)])
def test_tests_speak_to_public_names(of_a_source: Callable[[ast.AST], Iterator[str]], count: int) -> None:
    """What they must know of the inside stands in tests/support/inside.py. The numbers only go down."""
    files = [path for path in sorted(parts.TESTS.rglob("*.py")) if path.parent.name != "support"]
    assert sum(len([*of_a_source(parse(path.read_text()))]) for path in files) == count


@cache
def public_modules() -> set[str]:
    """Modules of the package that a page of the documentation imports from."""
    pages = "".join(path.read_text() for path in sorted((PACKAGE.parent / "docs").glob("*.md")))
    return DOORS | {"compat", "memmap_replay_buffer", *re.findall(rf"{NAME}\.(interop\.\w+)", pages)}


def inner_modules(source: str) -> set[str]:
    """Modules of the package that a source imports from, but for public ones."""
    taken = [name.removeprefix(f"{NAME}.") for name in private_names(source)]
    return {name if name in SOURCES else name.rpartition(".")[0] for name in taken} - public_modules()


def test_tests_import_what_the_pages_do_but_for_those_of_a_class_by_itself() -> None:
    """Others ask tests/support/inside.py for what no public name tells. List and number only shrink."""
    files = [path for path in sorted(parts.TESTS.rglob("*.py")) if path.parent.name != "support"]
    reached = [modules for path in files if (modules := inner_modules(path.read_text()))]
    inner = {f"{package}.{name}".lstrip(".") for package, names in INNER.items() for name in names.split()}
    assert set().union(*reached) == inner
    assert len(reached) <= 45


def test_lines_of_code_are_counted_without_docstrings_comments_and_empty_lines() -> None:
    count = runpy.run_path(str(PACKAGE.parent / "scripts" / "size"))["lines_of_code"]
    code = ["x = 1  # one", "def f(a,", "      b):", "    return (a,", "        b)"]
    source = ['"""Of a module,', 'in two lines."""', "", code[0], "# none", "", *code[1:3], '    "none"', *code[3:], ""]
    assert count("\n".join(source)) == len(code)
    assert count("x = '''two\nlines'''\n") == 2


# The checks themselves

HOUSE = {
    "": "from memmap_buffer.top.c import x",
    "ground": "x = 1",
    "low": "",
    "low.a": "from memmap_buffer.ground import x",
    "low.b": "from memmap_buffer.low.a import x",
    "top": "",
    "top.c": "from memmap_buffer.low.b import x",
}


def test_a_good_example_passes_the_checks_of_the_floors() -> None:
    assert upward_imports(HOUSE, ["top", "low"]) == []
    assert circles(HOUSE) == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("low.a", "import memmap_buffer.top.c", "low.a imports top.c"),
        ("low.a", "from memmap_buffer.top import c", "low.a imports top.c"),
        ("low.a", "from memmap_buffer import ReplayBuffer", "low.a imports the package"),
        ("low.a", "def f():\n    from memmap_buffer.top.c import x", "low.a imports top.c"),
        (
            "low.a",
            "class A:\n    def f(self):\n        if x:\n            import memmap_buffer.top.c",
            "low.a imports top.c",
        ),
        ("low.a", "if TYPE_CHECKING:\n    pass\nelse:\n    import memmap_buffer.top.c", "low.a imports top.c"),
        ("ground", "from memmap_buffer.low import a", "ground imports low.a"),
    ],
)
def test_the_check_of_the_floors_finds_what_it_must(name: str, source: str, complaint: str) -> None:
    assert upward_imports({**HOUSE, name: source}, ["top", "low"]) == [complaint]


@pytest.mark.parametrize(
    "source", ["if TYPE_CHECKING:\n    from memmap_buffer.top.c import x", "import numpy", "import memmap_bufferish"]
)
def test_the_check_of_the_floors_lets_annotations_and_strangers_pass(source: str) -> None:
    assert upward_imports({**HOUSE, "low.a": source}, ["top", "low"]) == []


@pytest.mark.parametrize("source", ["from memmap_buffer.low import b", "import memmap_buffer.low.b"])
def test_the_check_of_circles_finds_both_ends(source: str) -> None:
    assert circles({**HOUSE, "low.a": source}) == ["low.a", "low.b"]


def test_the_floors_are_read_from_the_docstring() -> None:
    assert floors("Top\n\n    top    what\n    low    what\n\nBelow them: ground") == ["top", "low"]


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import os.path",
        "from os import path",
        "def f():\n    import mmap",
        "from os import PathLike, fsync",
        "from fcntl import flock",
    ],
)
def test_the_check_of_the_system_finds_what_it_must(source: str) -> None:
    assert top_level_imports(source) & SYSTEM
    assert not top_level_imports("from os import PathLike\nimport ossaudiodev") & SYSTEM


def test_the_checks_of_single_modules_find_what_they_must() -> None:
    assert top_level_imports("from pickle import loads") & UNPICKLING
    assert top_level_imports("from pickle import dumps, Unpickler") & top_level_imports("import pickle") & UNPICKLING
    assert not top_level_imports("from pickle import dumps") & UNPICKLING
    assert unsafe_loads("import numpy as np\nnp.load(f)") == ["np.load"]
    assert unsafe_loads("read(f, allow_pickle=True)") == ["allow_pickle"]
    assert unsafe_loads("json.load(f)") == []
    assert calls_of("def f():\n    print(1)", "print") == ["print"]
    source = "from memmap_buffer import Field, api\nfrom memmap_buffer.schema import Field\nimport memmap_buffer.dtypes"
    assert private_names(source) == ["memmap_buffer.api", "memmap_buffer.schema.Field", "memmap_buffer.dtypes."]
    source = (
        "import memmap_buffer\nfrom memmap_buffer.adapters import Names, _LATER\nfrom memmap_buffer.cli.app import main"
    )
    assert private_names(source, "cli") == ["memmap_buffer.adapters._LATER"]
    assert private_names("if TYPE_CHECKING:\n    from memmap_buffer.schema import Field") == [
        "memmap_buffer.schema.Field"
    ]
    source = (
        "from memmap_buffer import Field, codecs\nfrom memmap_buffer.format.lock import x\nimport memmap_buffer.names"
    )
    assert inner_modules(f"{source}\nfrom memmap_buffer.interop.minari import y") == {"codecs", "format.lock", "names"}
    assert private_names("from memmap_buffer.interoperable import x", "interop") == ["memmap_buffer.interoperable.x"]
    source = "class A:\n    _c: int = 0\n    def _f(self):\n        self._x = self._f() + self._c + len(self._x) + b._d"
    assert private_attributes(f"{source}\n        b._e = self.__dict__ + super()._f()") == {"_d", "_e", "_f"}
    source = "def f(found, x):\n    self._one, y = x\n    print(known)\ndef told(): ..."
    assert sorted(vague_names(parse(source))) == ["_one", "found", "told"]
    source = "class A:\n    'What is.'\n    def f():\n        'One of.'\n    def g():\n        'Ones of.'"
    assert [*docstrings_without_a_thing(parse(source))] == ["A", "f"]
    assert methods_named("class A:\n    def __del__(self): ...", "__del__") == [2]
    source = "self._a = b._c._d\nsuper()._e\nf.__class__\ng._fields\ncls._h()"
    assert sorted(private_attributes_taken(parse(source))) == ["_c", "_d"]
    source = "from memmap_buffer.low import _a, b\npatch.setattr(c, '_d', '_e')\nsetattr('c._f', g)\nfrom x import _h"
    assert [*private_names_taken(parse(source))] == ["_a", "_d", "c._f"]


@pytest.mark.parametrize("entry", [*parts.QUICK, *parts.LATER, *parts.LIGHT])
def test_each_entry_of_the_parts_of_the_suite_names_tests(entry: str) -> None:
    path, _, name = entry.partition("::")
    names = name.partition("[")[0].split("::") if name else []
    source = (parts.TESTS / path).read_text() if path.endswith(".py") else ""
    assert (parts.TESTS / path).exists()
    assert all(re.search(rf"^ *(class|def) {name}", source, re.MULTILINE) for name in names)
