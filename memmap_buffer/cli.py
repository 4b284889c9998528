"""The command `memmap-buffer`: looking a folder over, and mending it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from memmap_buffer.errors import MemmapBufferError
from memmap_buffer.store.checkup import Finding, verify
from memmap_buffer.store.repair import LOST, repair

OK, FOUND, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns: 0: nothing is lost, 1: something is, or was not mended, 2: it could not be done, or was misspelt.
    """
    given = _parser().parse_args(arguments)
    try:
        return _verify(given.folder) if given.command == "verify" else _repair(given.folder, given.yes)
    except (MemmapBufferError, OSError) as error:
        sys.stderr.write(f"memmap-buffer: {error}\n")
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memmap-buffer", description="Look at, check and mend a folder of episodes.")
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("verify", help="check every file, record and checksum; reads only")
    look.add_argument("folder")
    mend = commands.add_parser("repair", help=f"make a damaged folder whole; what is taken out goes to {LOST}/")
    mend.add_argument("folder")
    mend.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _verify(folder: str) -> int:
    found = verify(folder)
    _report(found)
    return FOUND if any(finding.lost for finding in found) else OK


def _repair(folder: str, yes: bool) -> int:
    found = verify(folder)
    _report(found)
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


def _agreed() -> bool:
    try:
        return input("Repair it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # nobody there to ask
        return False


def _report(found: Sequence[Finding]) -> None:
    for finding in found:
        sys.stdout.write(f"{finding}\n")
    if not found:
        sys.stdout.write("all is well\n")
