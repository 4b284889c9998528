"""The list of all commands, each with an example, and the printing of their errors for the user."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from memmap_buffer.adapters import is_url
from memmap_buffer.cli import browse, doctor_bench, import_export, inspection, maintain, minimal, pictures, remote
from memmap_buffer.cli.terminal import Problem, end

EXAMPLES: dict[str, tuple[Callable[..., None], str]] = {
    "info": (inspection.info, "info replay_data"),
    "episodes": (inspection.episodes, "episodes replay_data --where 'length>=20' --sort return --reverse"),
    "head": (inspection.head, "head replay_data 3 --steps 5"),
    "show": (inspection.show, "show replay_data last"),
    "stats": (inspection.stats, "stats replay_data --field reward"),
    "verify": (maintain.verify, "verify replay_data"),
    "repair": (maintain.repair, "repair replay_data"),
    "pack": (maintain.pack, "pack replay_data published_data"),
    "unpack": (maintain.unpack, "unpack packed_data writable_data --max-episodes 2000"),
    "publish": (remote.publish, "publish replay_data published_root"),
    "pull": (remote.pull, "pull published_root local_root"),
    "ls": (remote.ls, "ls published_root"),
    "compact": (remote.compact, "compact published_root --dry-run"),
    "gc": (remote.gc, "gc published_root --older-than 7d --dry-run"),
    "cache": (remote.cache, "cache scratch_cache --check"),
    "merge": (maintain.merge, "merge all_data shards/0 shards/1"),
    "split": (maintain.split, "split replay_data parts --part train=0.8 --part val=0.2"),
    "delete": (maintain.delete, "delete replay_data --where 'length<10'"),
    "add-field": (maintain.add_field, "add-field replay_data weight --dtype float --default 1.0 --meta"),
    "import": (import_export.import_, "import robomimic demos.hdf5 imported_data"),
    "export": (import_export.export, "export robomimic replay_data exported.hdf5"),
    "doctor": (doctor_bench.doctor, "doctor replay_data"),
    "bench": (doctor_bench.bench, "bench replay_data --seconds 4"),
    "plot": (pictures.plot, "plot replay_data --out episodes.png"),
    "video": (pictures.video, "video replay_data 3 --out episode.mp4"),
    "browse": (browse.browse, "browse replay_data"),
    "view": (pictures.view, "view replay_data 1-3 --save episodes.rrd"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the extra `cli`. Returns the exit code, see `command.main`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = minimal.OK if words else minimal.FAILED
    try:
        make_app()(args=words or ["--help"], prog_name="memmap-buffer")
    except SystemExit as done:  # typer always ends by it
        return int(done.code or code)
    return code


def make_app() -> typer.Typer:
    """The typer application with all commands."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(_options)
    for name, (function, example) in EXAMPLES.items():
        app.command(name, epilog=f"Example: memmap-buffer {example}")(_with_errors_printed(function))
    return app


def _refuse_urls(arguments: Mapping[str, Any]) -> None:
    """Raise Problem if a path is a URL, of which `Path` has made "s3:/…", and no such file exists."""
    paths = [path for value in arguments.values() for path in (value if isinstance(value, list) else [value])]
    for path in paths:
        if isinstance(path, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.:-]+:/", str(path)) and not path.exists():
            raise Problem(
                "got a URL, expected a folder on this machine: `memmap-buffer pull URL FOLDER` copies one here, and "
                "`memmap-buffer publish FOLDER URL` there"
            )


def _refuse_options_of_urls(arguments: Mapping[str, Any]) -> None:
    """Raise Problem if a command that takes a folder or a URL is given a folder, and an option that only URLs have."""
    place = arguments.get("place")
    for name, flag in {"options": "--storage-options", "cache": "--cache"}.items():
        if isinstance(place, str) and not is_url(place) and arguments.get(name) is not None:
            raise Problem(f"{flag}: it is for a URL, and {place} is a folder; leave it out, or name the URL")


def _say_version(asked: bool) -> None:
    if asked:
        minimal.say(minimal.version())
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Look at, check, change and copy a folder of episodes."""


def _with_errors_printed(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a command that prints errors and interruptions as one line on stderr."""

    def run(**arguments: Any) -> None:
        _refuse_urls(arguments)
        _refuse_options_of_urls(arguments)
        function(**arguments)

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        end(minimal.attempt(run, arguments))  # a BrokenPipeError passes, as of `… | head`: typer ends quietly

    return command
