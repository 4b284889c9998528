"""`import` and `export`: data sets of other systems, by modules of `interop`, each loaded when its format is named."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from memmap_buffer import MemmapBufferError
from memmap_buffer.adapters import IfExists
from memmap_buffer.adapters import Target as ImportTarget
from memmap_buffer.cli.folders import new_file, opened
from memmap_buffer.cli.minimal import explained, say
from memmap_buffer.cli.terminal import Place, Problem, Target, Yes

FORMATS = {  # `memmap_buffer.interop.<name>` has `import_<name>`, `export_<name>` or both
    "minari": "a local Minari data set, by its name",
    "d4rl": "a D4RL file (HDF5)",
    "ogbench": "an OGBench file (.npz)",
    "robomimic": "a robomimic file (HDF5)",
    "lerobot": "a LeRobot v3 data set (folder)",
    "parquet": "a folder of two Parquet tables (export only)",
    "rllib": "a folder that RLlib's `output` wrote (import only)",
    "torchrl": "a folder that a LazyMemmapStorage of torchrl dumped (import only)",
    "memmap_replay_buffer": "a folder of memmap-replay-buffer; out in its HDF5 layout",
}
NAMED = ("minari",)  # data sets with names, not paths: an export is made at its place, not moved there when whole
OF_BUFFERS = ("max_episodes", "max_timesteps", "circular", "capacity", "spare_slots", "durability", "reserve")
IF_EXISTS = "Where something is there: end; resume an import that was interrupted; or replace it when the new is whole."
LIST = ", ".join(f"{name}: {what}" for name, what in FORMATS.items())

FormatArgument = Annotated[str, typer.Argument(metavar="FORMAT", help=LIST, show_default=False)]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="Another argument of the format's function, as in fps=30; may be repeated."),
]


def import_(
    form: FormatArgument,
    source: Annotated[str, typer.Argument(help="The data set: its path, or its name.", show_default=False)],
    target: Target,
    option: Options = None,
    if_exists: Annotated[IfExists, typer.Option("--if-exists", help=IF_EXISTS)] = "error",
) -> None:
    """Copy a data set of another system into a new folder, which appears when it is whole.

    Options are those of the format's function in memmap_buffer.interop and of ReplayBuffer, as in --option
    max_episodes=1000.
    """
    function = function_of("import", form)
    options = options_of(function, option or (), OF_BUFFERS)
    with _errors_as_options(function, OF_BUFFERS):
        ImportTarget.checked(target, if_exists)
        if form not in NAMED and not Path(source).exists():
            raise Problem(f"{source}: there is no such file or folder; check the path")
        with function(source, target, if_exists=if_exists, **options) as buffer:
            count, steps = buffer.num_episodes, buffer.num_steps
    say(f"{target}: {count} episodes, {steps} steps")


def export(
    form: FormatArgument,
    folder: Place,
    target: Annotated[str, typer.Argument(help="The new data set: its path, or its name.", show_default=False)],
    option: Options = None,
    yes: Yes = False,
) -> None:
    """Copy a folder into a new data set of another system.

    Options are those of the format's function in memmap_buffer.interop, as in --option fps=30.
    """
    function = function_of("export", form)
    options = options_of(function, option or ())
    with _errors_as_options(function), opened(folder) as buffer:
        if form in NAMED:
            function(buffer, target, **options)
            say(f"wrote {target}")
            return
        with new_file(Path(target), yes) as place:
            function(buffer, place, **options)


def function_of(verb: str, form: str) -> Any:
    """The function `import_<form>` or `export_<form>` of the format's module in `interop`.

    Raises:
        Problem: there is no such format, or it has no function in this direction.
        ImportError: the extra of the format is not installed.
    """
    if form not in FORMATS:
        raise Problem(f"{verb} {form!r}: there is no such format; there are {', '.join(FORMATS)}")
    module = importlib.import_module(f"memmap_buffer.interop.{form}")
    function = getattr(module, f"{verb}_{form}", None)
    if function is None:
        raise Problem(f"{verb} {form!r}: only the other way is possible")
    return function


def options_of(function: Any, texts: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    """Name -> value of the options, from texts NAME=VALUE with the value as JSON or text.

    Args:
        function: the function of `interop` that takes the options.
        texts: NAME=VALUE each.
        more: names of options of `ReplayBuffer`, which the function hands on; (): a function with **options takes any
            name.

    Raises:
        Problem: the function has no such argument, or the text is not NAME=VALUE.
    """
    options, names = {}, _names_of(function, more)
    takes_any = not more and inspect.getfullargspec(function).varkw is not None
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not (name in names or (takes_any and name.isidentifier())):
            raise Problem(f"--option {text!r}: expected NAME=VALUE with one of {', '.join(names) or 'no names'}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _names_of(function: Any, more: Sequence[str]) -> list[str]:
    own = inspect.getfullargspec(function).kwonlyargs
    return [*(name for name in own if name != "if_exists"), *more]


@contextmanager
def _errors_as_options(function: Any, more: Sequence[str] = ()) -> Iterator[None]:
    """A block whose errors name the function's arguments as options of the command."""
    try:
        yield
    except MemmapBufferError as error:
        flags = {name: f"--option {name}=" for name in _names_of(function, more)} | {"if_exists": "--if-exists "}
        raise Problem(explained(error, flags)) from error
