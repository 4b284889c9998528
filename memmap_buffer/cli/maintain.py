"""`verify`, `repair`, `pack`, `unpack` with help texts and progress bars; `minimal` does the work and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memmap_buffer.cli import minimal
from memmap_buffer.cli.arguments import FolderArgument, Target, Yes
from memmap_buffer.cli.episodes import opened
from memmap_buffer.cli.terminal import end, progress, watching
from memmap_buffer.maintenance import pack as copies

Source = Annotated[Path, typer.Argument(help="The folder to copy; it may be in use.", show_default=False)]
Size = Annotated[int | None, typer.Option(min=1, help="As many as the source, if not given.")]


def verify(folder: FolderArgument) -> None:
    """Check every file, record and checksum; reads only. Ends with 1 where something published is lost."""
    with progress("checking", None):
        found = minimal.verify_all(folder)
    end(minimal.print_findings(found))


def repair(folder: FolderArgument, yes: Yes = False) -> None:
    """Make a damaged folder whole again; what is taken out is moved to lost+found/ and never deleted."""
    end(minimal.check_and_repair(folder, yes))


def pack(source: Source, target: Target) -> None:
    """Copy a buffer into a new folder that is read-only and without holes: the form to keep and to publish."""
    with watching("packing", target, bytes_to_copy(source)):
        left_out = copies.pack(source, target)
    end(minimal.print_copy(target, left_out))


def unpack(source: Source, target: Target, max_episodes: Size = None, max_timesteps: Size = None) -> None:
    """Copy a buffer, packed or not, into a new folder that can be written to."""
    with watching("unpacking", target, bytes_to_copy(source)):
        left_out = copies.unpack(source, target, max_episodes, max_timesteps)
    end(minimal.print_copy(target, left_out))


def bytes_to_copy(source: Path) -> int:
    """The bytes that a copy of a folder will have."""
    with opened(source, verify="never") as buffer:
        schema, steps, episodes = buffer.schema, buffer.num_steps, buffer.num_episodes
    rows = sum(field.itemsize * (steps + field.final * episodes) for field in schema.fields.values())
    return rows + sum(field.itemsize * episodes for field in schema.meta_fields.values())
