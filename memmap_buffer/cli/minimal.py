"""The part of the command that works without typer and rich, which a robot may lack.

It has `verify`, `repair`, `pack` and `unpack`; and the exit codes, texts of errors and lines that all commands share.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memmap_buffer import (
    Finding,
    Jpeg,
    MemmapBufferError,
    NotABufferError,
    ReplayBuffer,
    SchemaError,
    Zstd,
    pack,
    repair,
    unpack,
    verify,
)
from memmap_buffer.adapters import LOST

OK, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130  # the last as shells have it: 128 + SIGINT
CODEC_HELP = "How a field is compressed: frame=zstd, frame=zstd:19 (its level), camera=jpeg:90 (its quality), x=none."
CODECS: dict[str, type[Zstd] | type[Jpeg]] = {codec.name: codec for codec in (Zstd, Jpeg)}
COMMANDS = ("verify", "repair", "pack", "unpack")
EXTRA = "only verify, repair, pack and unpack work without typer and rich; for all: pip install 'memmap-buffer[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the four commands.

    Args:
        arguments: the words behind the program's name; None: those of this process.

    Returns:
        0: nothing is lost, 1: something is lost, or was not repaired, 2: the command failed, or was misspelt,
        130: interrupted.
    """
    words = [word for word in (sys.argv[1:] if arguments is None else arguments) if not word.startswith("-")]
    if words and words[0] not in COMMANDS:
        return complain(EXTRA)
    try:
        values = vars(_parser().parse_args(arguments))
    except SystemExit as done:  # argparse has printed its help or error
        return int(done.code or OK)
    try:
        return attempt(values.pop("run"), values)
    except BrokenPipeError as error:
        return complain(str(error))


def attempt(command: Callable[..., int | None], arguments: Mapping[str, Any]) -> int:
    """The exit code of a command. Errors and interruptions are printed as one line; BrokenPipeError passes."""
    flags = {name: f"--{name.replace('_', '-')} " for name in arguments}
    try:
        return command(**arguments) or OK
    except BrokenPipeError:
        raise
    except (MemmapBufferError, OSError, ImportError) as error:
        return complain(explained(error, flags))
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", ["nothing half is left"])
        return complain(explained(Exception("; ".join(["interrupted", *notes])), flags), INTERRUPTED)


def shards_of(folder: Path) -> list[Path]:
    """The folders of the buffers in a root; [] for a folder that is a buffer itself, or holds none."""
    if (folder / "schema.json").exists():
        return []
    buffers = sorted(path.parent for path in folder.glob("*/schema.json"))
    if any(re.fullmatch(r"joined-[0-9a-f]{32}", path.name) for path in buffers):  # as `ConcatBuffer.from_root` does
        return buffers
    return [path for path in buffers if re.fullmatch(r"shard-[0-9]{5}", path.name)] or buffers


def explained(error: Exception, flags: Mapping[str, str] | None = None) -> str:
    """The text of an error in the words of the command line.

    Args:
        error: an error of the library.
        flags: name of an argument -> its spelling on the command line, up to its value.
    """
    text, path = str(error), getattr(error, "path", None)
    if isinstance(error, NotABufferError) and path is not None and (shards := shards_of(path)):
        return (
            f"{path} is a root of {len(shards)} folders, {shards[0].name} to {shards[-1].name}: name one of them, or "
            f"copy them into one by: memmap-buffer merge NEW {shlex.quote(str(path))}"
            + "".join(f"; {finding}" for finding in unfinished(path))
        )
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    text = text.replace("create one with ReplayBuffer(...)", "give a folder that holds episodes, or a root of such")
    for name, flag in (flags or {}).items():
        text = re.sub(rf"(?<![\w.-]){name}=(…|'[^']*'|\w+)", rf"{flag}\1", text).replace(f"{flag}…", f"{flag}VALUE")
        text = re.sub(rf"(?<![\w.-]){name}(?=: got )", flag.rstrip(" ="), text)
    return text


def verify_all(folder: Path) -> list[Finding]:
    """The findings of `verify` in a folder, or in each buffer of a root."""
    if not (shards := shards_of(folder)):
        return verify(folder)
    return [replace(each, file=f"{shard.name}/{each.file}") for shard in shards for each in verify(shard)]


def unfinished(root: Path) -> list[Finding]:
    """Findings for the folders in a root whose creation a kill may have ended. Readers of the root skip these."""
    what = "it is no buffer: its creation, or a copy to it, did not finish, unless that goes on now; else remove it"
    folders = sorted(path.parent for path in root.glob("[!.]*/.lock") if not (path.parent / "schema.json").exists())
    return [Finding(path.name, what, lost=False) for path in folders]


def version() -> str:
    """The text of `--version`."""
    return f"memmap-buffer {sys.modules['memmap_buffer'].__version__}"


def clean(text: str) -> str:
    """Text without control characters: names and text of a stranger's folder must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def say(text: str = "") -> None:
    """Print one line on stdout, without markup or control characters."""
    sys.stdout.write(f"{clean(text)}\n")


def agreed(question: str, yes: bool) -> bool:
    """Whether the user agrees, or `yes` says so. An end of the input means no, as in a script nobody can answer."""
    if yes:
        return True
    sys.stdout.write(f"{clean(question)} [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def complain(text: str, code: int = FAILED) -> int:
    """Print on stderr why the command failed. Returns `code`."""
    sys.stderr.write(f"memmap-buffer: {clean(text)}\n")
    return code


def check_and_repair(folder: Path, yes: bool) -> int:
    """Check a folder, or each buffer of a root, and repair it if the user agrees.

    Returns:
        0: all is well now, 1: something is damaged still.
    """
    findings = verify_all(folder)
    print_findings([*findings, *unfinished(folder)])
    if not findings:
        return OK
    if not agreed("Repair it?", yes):
        say("nothing was changed")
        return FOUND
    for each in shards_of(folder) or [folder]:
        if verify(each):
            repair(each)
    rest = verify_all(folder)
    say("not all could be repaired:" if rest else f"repaired; what was taken out lies in {LOST}/")
    for finding in rest:
        say(str(finding))
    return FOUND if rest else OK


def print_findings(findings: Sequence[Finding]) -> int:
    """Print the findings of `verify`. Returns 1 if something is lost, else 0."""
    for finding in findings:
        say(str(finding))
    if not findings:
        say("all is well")
    return FOUND if any(finding.lost for finding in findings) else OK


def print_copy(target: Path, serials: Sequence[int]) -> int:
    """Print the size of a copy, and the serials of episodes that it lacks. Returns 1 if it lacks any, else 0."""
    with ReplayBuffer.from_folder(target, read_only=True, verify="never") as made:
        say(f"{target}: {made.num_episodes} episodes, {made.num_steps} steps")
    return print_left_out(serials)


def print_left_out(serials: Sequence[int]) -> int:
    """Print the serials of episodes that a copy lacks. Returns 1 if it lacks any, else 0."""
    for serial in serials:
        say(f"episode {serial} is damaged, or was overwritten meanwhile, and is left out")
    return FOUND if serials else OK


def codecs_of(options: Sequence[str] | None) -> dict[str, Zstd | Jpeg | str | None] | None:
    """Field -> its codec, from words such as frame=zstd, frame=zstd:19, camera=jpeg:90 or depth=none; None: no words.

    Raises:
        SchemaError: a word cannot be read.
    """
    codecs: dict[str, Zstd | Jpeg | str | None] = {}
    for text in options or ():
        field, _, spelled = text.partition("=")
        kind, colon, number = spelled.partition(":")
        try:
            codecs[field] = {"none": None}.get(kind, kind) if not colon else CODECS[kind](int(number))
        except (KeyError, ValueError):
            raise SchemaError(
                f"--codec {text!r}: expected a field and its codec, as in frame=zstd, frame=zstd:19, camera=jpeg:90 "
                "or depth=none"
            ) from None
    return codecs or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memmap-buffer", description=f"Check and copy episodes; {EXTRA}.", epilog=EXTRA
    )
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("verify", help="check every file, record and checksum; reads only")
    check.add_argument("folder", type=Path)
    check.set_defaults(run=lambda folder: print_findings([*verify_all(folder), *unfinished(folder)]))
    whole = commands.add_parser("repair", help=f"make a damaged folder whole; what is taken out goes to {LOST}/")
    whole.add_argument("folder", type=Path)
    whole.add_argument("--yes", action="store_true", help="do not ask")
    whole.set_defaults(run=check_and_repair)
    dense = commands.add_parser("pack", help="copy a buffer into a new folder that is read-only and without holes")
    grid = commands.add_parser("unpack", help="copy a buffer, packed or not, into a new folder to be written to")
    for command, copy in ((dense, pack), (grid, unpack)):
        command.add_argument("src", type=Path)
        command.add_argument("dst", type=Path)
        command.add_argument("--codec", action="append", metavar="FIELD=CODEC", help=CODEC_HELP)
        command.set_defaults(run=lambda copy=copy, **arguments: print_copy(arguments["dst"], _copy(copy, **arguments)))
    grid.add_argument("--max-episodes", type=int, help="default: as many as the source")
    grid.add_argument("--max-timesteps", type=int, help="default: as many as the source")
    return parser


def _copy(copy: Callable[..., list[int]], codec: Sequence[str] | None, **arguments: Any) -> list[int]:
    return copy(codec=codecs_of(codec), **arguments)
