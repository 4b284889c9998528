"""`verify`, `repair`, `pack` and `unpack`, which need nothing but the library: a robot has no extras."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from memmap_buffer.errors import MemmapBufferError
from memmap_buffer.store.checkup import Finding, verify
from memmap_buffer.store.pack import pack, unpack
from memmap_buffer.store.repair import LOST, repair

OK, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130  # the last as shells have it: 128 + SIGINT
COMMANDS = ("verify", "repair", "pack", "unpack")
EXTRA = "only verify, repair, pack and unpack work without typer and rich; for all: pip install 'memmap-buffer[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the four commands.

    Returns: 0: nothing is lost, 1: something is, or was not mended, 2: it could not be done, or was misspelt,
        130: interrupted.
    """
    words = [word for word in (sys.argv[1:] if arguments is None else arguments) if not word.startswith("-")]
    if words and words[0] not in COMMANDS:
        return complain(EXTRA)
    try:
        given = vars(_parser().parse_args(arguments))
    except SystemExit as done:  # argparse's way of saying that it has said it
        return int(done.code or OK)
    try:
        code: int = given.pop("run")(**given)
        return code
    except (MemmapBufferError, OSError) as error:
        return complain(str(error))
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)


def version() -> str:
    """What `--version` prints: of the library that is loaded."""
    return f"memmap-buffer {sys.modules['memmap_buffer'].__version__}"


def complain(text: str, code: int = FAILED) -> int:
    """Print why the command ends, and give the exit code back."""
    sys.stderr.write(f"memmap-buffer: {text}\n")
    return code


def mend(folder: Path, yes: bool) -> int:
    """Check a folder, and mend it if the user agrees.

    Returns: 0: all is well now, 1: it is not.
    """
    found = verify(folder)
    tell(found)
    if not found:
        return OK
    if not yes and not _agreed():
        sys.stdout.write("nothing was changed\n")
        return FOUND
    repair(folder)
    left = verify(folder)
    sys.stdout.write(f"repaired; what was taken out lies in {LOST}/\n" if not left else "not all could be repaired:\n")
    for finding in left:
        sys.stdout.write(f"{finding}\n")
    return FOUND if left else OK


def tell(found: Sequence[Finding]) -> int:
    """Print what `verify` found; 1 if something is lost, else 0."""
    for finding in found:
        sys.stdout.write(f"{finding}\n")
    if not found:
        sys.stdout.write("all is well\n")
    return FOUND if any(finding.lost for finding in found) else OK


def tell_left_out(serials: Sequence[int]) -> int:
    """Print what a copy lacks; 1 if that is anything, else 0."""
    for serial in serials:
        sys.stdout.write(f"episode {serial} is damaged, or was overwritten meanwhile, and is left out\n")
    return FOUND if serials else OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memmap-buffer", description=f"Check and copy episodes; {EXTRA}.", epilog=EXTRA
    )
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(required=True)
    look = commands.add_parser("verify", help="check every file, record and checksum; reads only")
    look.add_argument("folder", type=Path)
    look.set_defaults(run=lambda folder: tell(verify(folder)))
    whole = commands.add_parser("repair", help=f"make a damaged folder whole; what is taken out goes to {LOST}/")
    whole.add_argument("folder", type=Path)
    whole.add_argument("--yes", action="store_true", help="do not ask")
    whole.set_defaults(run=mend)
    dense = commands.add_parser("pack", help="copy a buffer into a new folder that is read-only and without holes")
    grid = commands.add_parser("unpack", help="copy a buffer, packed or not, into a new folder to be written to")
    for command, copy in ((dense, pack), (grid, unpack)):
        command.add_argument("src", type=Path)
        command.add_argument("dst", type=Path)
        command.set_defaults(run=lambda copy=copy, **given: tell_left_out(copy(**given)))
    grid.add_argument("--max-episodes", type=int, help="default: as many as the source")
    grid.add_argument("--max-timesteps", type=int, help="default: as many as the source")
    return parser


def _agreed() -> bool:
    try:
        return input("Repair it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # nobody there to ask
        return False
