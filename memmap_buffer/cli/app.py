"""Which commands there are, each with an example, and how each one's errors reach the user."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from memmap_buffer.cli import change, draw, exchange, look, measure, mend, plain, view
from memmap_buffer.cli.terminal import clean, say
from memmap_buffer.errors import MemmapBufferError

EXAMPLES: dict[str, tuple[Callable[..., None], str]] = {
    "info": (look.info, "info replay_data"),
    "episodes": (look.episodes, "episodes replay_data --where 'length>=20' --sort return --reverse"),
    "head": (look.head, "head replay_data 3 --steps 5"),
    "show": (look.show, "show replay_data last"),
    "stats": (look.stats, "stats replay_data --field reward"),
    "verify": (mend.verify, "verify replay_data"),
    "repair": (mend.repair, "repair replay_data"),
    "pack": (mend.pack, "pack replay_data published_data"),
    "unpack": (mend.unpack, "unpack packed_data writable_data --max-episodes 2000"),
    "merge": (change.merge, "merge all_data shards/0 shards/1"),
    "split": (change.split, "split replay_data parts --part train=0.8 --part val=0.2"),
    "delete": (change.delete, "delete replay_data --where 'length<10'"),
    "add-field": (change.add_field, "add-field replay_data weight --dtype float --default 1.0 --meta"),
    "import": (exchange.import_, "import robomimic demos.hdf5 imported_data"),
    "export": (exchange.export, "export robomimic replay_data exported.hdf5"),
    "doctor": (measure.doctor, "doctor replay_data"),
    "bench": (measure.bench, "bench replay_data --seconds 4"),
    "plot": (draw.plot, "plot replay_data --out episodes.png"),
    "video": (draw.video, "video replay_data 3 --out episode.mp4"),
    "view": (view.view, "view replay_data 1-3 --save episodes.rrd"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code as `command.main` says it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = plain.OK if given else plain.FAILED
    try:
        make_app()(args=given or ["--help"], prog_name="memmap-buffer")
    except SystemExit as done:  # how typer always ends
        return int(done.code or code)
    return code


def make_app() -> typer.Typer:
    """All commands, as typer has them."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(_options)
    for name, (function, example) in EXAMPLES.items():
        app.command(name, epilog=f"Example: memmap-buffer {example}")(_at_the_door(function))
    return app


def _say_version(asked: bool) -> None:
    if asked:
        say(plain.version())
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Look at, check, change and copy a folder of episodes."""


def _at_the_door(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are one line on stderr, and whose interruption is one too."""

    flags = {name: f"--{name.replace('_', '-')} " for name in inspect.signature(function).parameters}

    @functools.wraps(function)
    def command(**given: Any) -> None:
        try:
            function(**given)
        except BrokenPipeError:  # `… | head`: typer ends quietly
            raise
        except (MemmapBufferError, OSError, ImportError) as error:
            raise typer.Exit(plain.complain(clean(plain.explained(error, flags)))) from error
        except KeyboardInterrupt:
            raise typer.Exit(plain.complain("interrupted; nothing half is left", plain.INTERRUPTED)) from None

    return command
