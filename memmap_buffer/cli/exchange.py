"""`import` and `export`: data sets of others in and out, by the modules of `interop`, each loaded when named."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from memmap_buffer.cli.change import appearing, require_new
from memmap_buffer.cli.draw import replacing
from memmap_buffer.cli.episodes import opened
from memmap_buffer.cli.mend import Target
from memmap_buffer.cli.terminal import FolderArgument, Problem, Yes, progress, say


@dataclass(frozen=True)
class Format:
    """Another system's data: `memmap_buffer.interop.<module>` has `import_<name>` and `export_<name>`.

    Attributes: what: a data set is called there. module: default: the name. named: a data set has a name there, not a
        path, so that what is exported is not moved to its place when it is whole.
    """

    what: str
    module: str = ""
    named: bool = False


FORMATS = {
    "minari": Format("a local Minari data set, by its name", named=True),
    "d4rl": Format("a D4RL file (HDF5)"),
    "ogbench": Format("an OGBench file (.npz)"),
    "robomimic": Format("a robomimic file (HDF5)"),
    "torchrl": Format("a folder that a LazyMemmapStorage of torchrl dumped (import only)"),
    "memmap_replay_buffer": Format("a folder of memmap-replay-buffer (import only)", module="upstream"),
}
LIST = ", ".join(f"{name}: {form.what}" for name, form in FORMATS.items())

FormatArgument = Annotated[str, typer.Argument(metavar="FORMAT", help=LIST, show_default=False)]
Sizes = Annotated[int | None, typer.Option(min=1, help="As many as there are, if not given.")]


def import_(
    form: FormatArgument,
    source: Annotated[str, typer.Argument(help="The data set: its path, or its name.", show_default=False)],
    target: Target,
    max_episodes: Sizes = None,
    max_timesteps: Sizes = None,
) -> None:
    """Copy a data set of another system into a new folder; it is there when it is whole."""
    function = function_of("import", form)
    require_new(target)
    given = {"max_episodes": max_episodes, "max_timesteps": max_timesteps}
    sizes = {name: size for name, size in given.items() if size is not None}
    with progress(f"importing {form}", None), appearing(target) as place, function(source, place, **sizes) as buffer:
        count, steps = buffer.num_episodes, buffer.num_steps
    say(f"{target}: {count} episodes, {steps} steps")


def export(
    form: FormatArgument,
    folder: FolderArgument,
    target: Annotated[str, typer.Argument(help="The new data set: its path, or its name.", show_default=False)],
    yes: Yes = False,
) -> None:
    """Copy a folder into a new data set of another system."""
    function = function_of("export", form)
    with opened(folder) as buffer, progress(f"exporting {form}", None):
        if FORMATS[form].named:
            function(buffer, target)
            say(f"wrote {target}")
            return
        with replacing(Path(target), yes) as place:
            function(buffer, place)


def function_of(verb: str, form: str) -> Any:
    """`import_<form>` or `export_<form>` of the module of `interop` that has it.

    Raises: Problem: there is no such format, or not in this direction. ImportError: its extra is missing, and named.
    """
    if form not in FORMATS:
        raise Problem(f"{verb} {form!r}: there is no such format; there are {', '.join(FORMATS)}")
    module = importlib.import_module(f"memmap_buffer.interop.{FORMATS[form].module or form}")
    function = getattr(module, f"{verb}_{form}", None)
    if function is None:
        raise Problem(f"{verb} {form!r}: only the other way is possible")
    return function
