"""The command `memmap-buffer`: looking a folder over, mending it, and copying it into another layout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from memmap_buffer.errors import MemmapBufferError
from memmap_buffer.store.checkup import Finding, verify
from memmap_buffer.store.pack import pack, unpack
from memmap_buffer.store.repair import LOST, repair

OK, FOUND, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns: 0: nothing is lost, 1: something is, or was not mended, 2: it could not be done, or was misspelt.
    """
    given = vars(_parser().parse_args(arguments))
    try:
        code: int = given.pop("run")(**given)
        return code
    except (MemmapBufferError, OSError) as error:
        sys.stderr.write(f"memmap-buffer: {error}\n")
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memmap-buffer", description="Look at, check and mend a folder of episodes.")
    commands = parser.add_subparsers(required=True)
    look = commands.add_parser("verify", help="check every file, record and checksum; reads only")
    look.add_argument("folder")
    look.set_defaults(run=_verify)
    mend = commands.add_parser("repair", help=f"make a damaged folder whole; what is taken out goes to {LOST}/")
    mend.add_argument("folder")
    mend.add_argument("--yes", action="store_true", help="do not ask")
    mend.set_defaults(run=_repair)
    dense = commands.add_parser("pack", help="copy a buffer into a new folder that is read-only and without holes")
    grid = commands.add_parser("unpack", help="copy a buffer, packed or not, into a new folder to be written to")
    for command, run in ((dense, _pack), (grid, _unpack)):
        command.add_argument("src")
        command.add_argument("dst")
        command.set_defaults(run=run)
    grid.add_argument("--max-episodes", type=int, help="default: as many as the source")
    grid.add_argument("--max-timesteps", type=int, help="default: as many as the source")
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


def _pack(src: str, dst: str) -> int:
    return _left_out(pack(src, dst))


def _unpack(src: str, dst: str, max_episodes: int | None, max_timesteps: int | None) -> int:
    return _left_out(unpack(src, dst, max_episodes, max_timesteps))


def _left_out(serials: Sequence[int]) -> int:
    for serial in serials:
        sys.stdout.write(f"episode {serial} is damaged, or was overwritten meanwhile, and is left out\n")
    return FOUND if serials else OK


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
