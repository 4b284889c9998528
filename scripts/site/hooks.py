"""Hooks of MkDocs: the pages of the site are files of the repository, as they are read there.

README.md is the front page, docs/README.md the list of pages, and its tables are the navigation. The programs of
examples/, the notebooks of docs/tutorials/ and the docstrings become pages of their own. A link leads to the page that
a file became; MkDocs warns of one to a file that became none.
"""

from __future__ import annotations

import ast
import base64
import json
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"(^```.*?^```$|`+[^`\n]+`+)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)((?:#[^)]*)?)(?=\))")
GROUPS = {  # packages and modules of public names -> the page of their docstrings
    "api": "Buffers",
    "codecs": "Fields",
    "schema": "Fields",
    "loading": "Reading",
    "items": "Reading",
    "priority": "Priorities",
    "views": "Views and transforms",
    "maintenance": "Checking and copying",
    "errors": "Errors",
    "format": "Marks",
}


# What MkDocs calls


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slug
    config.extra_css.append("site.css")
    config.nav = navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    files.remove(files.src_uris["README.md"])
    for source, page in pages().items():
        if page not in files.src_uris:
            files.append(File.generated(config, page, content=page_of(source)))
    for title in groups():
        files.append(File.generated(config, place_of(title), content=docstrings(title)))
    for notebook in notebooks():
        for name, data in pictures_of(notebook):
            files.append(File.generated(config, f"tutorials/{name}", content=data))
    files.append(File.generated(config, "site.css", abs_src_path=str(Path(__file__).with_name("site.css"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    source = next((source for source, made in pages().items() if made == place), place)
    if source == "docs/reference.md":
        markdown = with_links_to_docstrings(markdown)
    parts = CODE.split(markdown)  # every second one is code
    parts[::2] = [LINK.sub(lambda found: link(found[1], source, place) + found[2], part) for part in parts[::2]]
    return "".join(parts)


def slug(text: str, separator: str) -> str:
    """The fragment that forges give a heading: lower case, without punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


# Which file becomes which page


@cache
def pages() -> dict[str, str]:
    """The page that each file of the repository becomes, by its path."""
    found = {"README.md": "index.md", "docs/README.md": "pages.md", "memmap_buffer/interop": "api/interop.md"}
    found |= {f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
    found |= {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"}
    found |= {f"docs/tutorials/{path.name}": f"tutorials/{path.stem}.md" for path in notebooks()}
    found |= {"examples/": "examples/index.md", "memmap_buffer/format/__init__.py": "api/format.md"}
    return found | {f"examples/{path.name}": f"examples/{path.stem}.md" for path in programs()}


def page_of(source: str) -> str:
    """The text of the page that a file becomes."""
    path = ROOT / source
    if source == "examples/":
        rows = "\n".join(f"| [{p.name}]({p.name}) | {summary(p)} |" for p in programs())
        return f"# Programs\n\nEach in one file, to be read and changed.\n\n| program | |\n|---|---|\n{rows}\n"
    if source == "memmap_buffer/interop":
        return "# Libraries of others\n\n" + "\n".join(f"::: memmap_buffer.interop.{n}\n" for n in modules_of_others())
    if path.suffix == ".py":
        return f"# {path.relative_to(ROOT)}\n\n```python\n{path.read_text()}```\n"
    return "".join(cells_of(path)) if path.suffix == ".ipynb" else path.read_text()


def link(target: str, source: str, place: str) -> str:
    """A link of a file to another one, as a link between the pages that they became."""
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) + "/" * target.endswith("/")
    page = pages().get(wanted, wanted.removeprefix("docs/"))
    return posixpath.relpath(page, posixpath.dirname(place) or ".")


def navigation() -> list[Any]:
    """The pages by task, as the tables of docs/README.md list them."""
    by_task: dict[str, list[Any]] = {}
    for table in re.split(r"^\| (?=\w+ \| \|$)", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)[1:]:
        listed = [pages()[f"docs/{name}"] for name in re.findall(r"^\| \[[^]]*\]\(([^)]+)\)", table, re.MULTILINE)]
        by_task[table.split(" ")[0].capitalize()] = listed
    listings = [{path.name: f"examples/{path.stem}.md"} for path in programs()]
    generated = [{title: place_of(title)} for title in groups()]
    names = [*generated, {"Libraries of others": "api/interop.md"}, {"Files": "api/format.md"}]
    project = ["pages.md", *(pages()[f"{name}.md"] for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
    by_task["Start"].append({"Programs": ["examples/index.md", *listings]})
    by_task["Reference"] += [{"Docstrings": names}, {"Project": project}]
    return [{"Home": "index.md"}, *({task: listed} for task, listed in by_task.items())]


# Programs and notebooks


@cache
def programs() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.py"))


@cache
def notebooks() -> list[Path]:
    return sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def summary(path: Path) -> str:
    """The first sentence of a program's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def cells_of(path: Path) -> Iterator[str]:
    """The cells of a notebook as Markdown, the pictures among their outputs as links."""
    number = 0
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        yield f"{text}\n\n" if cell["cell_type"] == "markdown" else f"```python\n{text}\n```\n\n"
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                yield f"```text\n{''.join(output['text']).rstrip()}\n```\n\n"
            elif "image/png" in output["data"]:
                yield f"![the figure that this draws]({path.stem}-{number}.png)\n\n"
                number += 1
    yield f"As a notebook: <a href='{path.name}' download>{path.name}</a>\n"


def pictures_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, PNG) of the figures among the outputs of a notebook."""
    cells = json.loads(path.read_text())["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    for number, found in enumerate(each["image/png"] for each in data if "image/png" in each):
        yield f"{path.stem}-{number}.png", base64.b64decode("".join(found))


# Docstrings


@cache
def groups() -> dict[str, list[str]]:
    """The names that the package exports, by the page of their docstrings."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    nodes = [*ast.walk(ast.parse((ROOT / "memmap_buffer" / "__init__.py").read_text()))]
    (exported,) = (ast.literal_eval(node.value) for node in nodes if ast.unparse(node).startswith("__all__ = "))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memmap_buffer."):
            names = [name.name for name in node.names if name.name in exported]
            if names:
                found[GROUPS[node.module.split(".")[1]]] += names
    return found


def place_of(title: str) -> str:
    return f"api/{slug(title, '-')}.md"


def docstrings(title: str) -> str:
    return f"# {title}\n\n" + "\n".join(f"::: memmap_buffer.{name}\n" for name in groups()[title])


def modules_of_others() -> list[str]:
    """The modules of `interop` that the pages import from; the others are of no use to a reader."""
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    return sorted(set(re.findall(r"from memmap_buffer\.interop\.(\w+) import", text)))


def with_links_to_docstrings(markdown: str) -> str:
    """The reference, each name in the first column of its tables a link to its docstring."""
    owner = {
        "What can be imported": "",
        "A buffer that writes": "ReplayBuffer.",
        "A buffer that reads": "ReplayBuffer.",
    }
    lines, title = [], ""
    for line in markdown.splitlines():
        title = line.removeprefix("## ") if line.startswith("## ") else title
        if title in owner and line.startswith("| `"):
            first, _, rest = line[1:].partition("|")
            prefix = "ConcatBuffer." if "(`ConcatBuffer`)" in rest else owner[title]
            line = "|" + re.sub(r"`(\w+)`", rf"[`\1`][memmap_buffer.{prefix}\1]", first) + "|" + rest
        lines.append(line)
    return "\n".join(lines)
