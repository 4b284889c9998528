"""The commands that check, repair, copy and change folders: verify to unpack, merge, split, delete, add-field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import memmap_buffer
from memmap_buffer import ConcatBuffer, Field, Mark, ReplayBuffer
from memmap_buffer.adapters import matching, progress
from memmap_buffer.cli import minimal
from memmap_buffer.cli.episodes import marked_table_of, read_episode, serials_of
from memmap_buffer.cli.folders import new_folder, opened, require_new
from memmap_buffer.cli.minimal import FOUND, OK, agreed, codecs_of, print_left_out, say, shards_of
from memmap_buffer.cli.terminal import Episodes, FolderArgument, Problem, Target, Where, Yes, end

Source = Annotated[Path, typer.Argument(help="The folder to copy; it may be in use.", show_default=False)]
Size = Annotated[int | None, typer.Option(min=1, help="As many as the source, if not given.")]
Codecs = Annotated[list[str] | None, typer.Option("--codec", metavar="FIELD=CODEC", help=minimal.CODEC_HELP)]
Folders = Annotated[list[Path], typer.Argument(help="The folders, in the order of their episodes.", show_default=False)]
Parts = Annotated[list[str] | None, typer.Option("--part", help="A part and its share, as in train=0.8; repeat it.")]


def verify(folder: FolderArgument) -> None:
    """Check every file, record and checksum; reads only. Ends with 1 if something published is lost."""
    end(minimal.print_findings([*minimal.verify_all(folder), *minimal.unfinished(folder)]))


def repair(folder: FolderArgument, yes: Yes = False) -> None:
    """Make a damaged folder whole again; what is taken out is moved to lost+found/ and never deleted."""
    end(minimal.check_and_repair(folder, yes))


def pack(source: Source, target: Target, codec: Codecs = None) -> None:
    """Copy a buffer into a new folder that is read-only and without holes: the form to keep and to publish."""
    end(minimal.print_copy(target, memmap_buffer.pack(source, target, codec=codecs_of(codec))))


def unpack(
    source: Source, target: Target, max_episodes: Size = None, max_timesteps: Size = None, codec: Codecs = None
) -> None:
    """Copy a buffer, packed or not, into a new folder that can be written to."""
    left_out = memmap_buffer.unpack(source, target, max_episodes, max_timesteps, codec=codecs_of(codec))
    end(minimal.print_copy(target, left_out))


def merge(
    target: Target,
    sources: Folders,
    max_episodes: Annotated[int | None, typer.Option(min=1, help="Room in the new folder; default: as needed.")] = None,
) -> None:
    """Copy the episodes of several folders or roots, which must have equal fields, into one new, writable folder.

    Episodes are numbered anew, source by source. Damaged episodes are left out and named, and the command ends with 1.
    """
    require_new(target)
    with ExitStack() as stack:
        folders = [folder for source in sources for folder in shards_of(source) or [source]]
        buffers = [stack.enter_context(opened(folder, verify="read")) for folder in folders]
        joined = ConcatBuffer(buffers)  # raises an error that names fields that differ
        marks = [buffer.marks() for buffer in buffers]
        planned = [(n, serial) for n, buffer in enumerate(buffers) for serial in buffer.serials.tolist()]
        if not planned:
            raise Problem("merge: there is no episode in any of the folders")
        room = max(len(planned), max_episodes or 0)
        stored = [json.loads((buffer.folder / "schema.json").read_text()) for buffer in buffers]
        skips_resets = all(schema.get("skips_resets") for schema in stored)
        left_out, marked = [], dict[Mark, list[int]]()
        with (
            new_folder(target) as place,
            ReplayBuffer(place, room, joined.max_timesteps, joined.schema, skips_resets=skips_resets) as merged,
        ):
            for n, serial in progress(planned, "merging"):
                try:
                    merged.store_episode(**read_episode(buffers[n], serial))
                    if serial in marks[n]:
                        marked.setdefault(marks[n][serial], []).append(int(merged.serials[-1]))
                except Problem:
                    left_out.append(f"{buffers[n].folder}: episode {serial}")
            for mark, serials in marked.items():
                merged.mark(serials, add=mark.labels, note=mark.note)
            made = f"{target}: {merged.num_episodes} episodes, {merged.num_steps} steps"
    say(made)
    for name in left_out:
        say(f"{name} is damaged, or was overwritten meanwhile, and is left out")
    end(FOUND if left_out else OK)


def split(
    source: Annotated[Path, typer.Argument(help="The folder to copy from.", show_default=False)],
    target: Target,
    part: Parts = None,
    seed: Annotated[int, typer.Option(help="Another seed draws another split.")] = 0,
) -> None:
    """Copy a folder's episodes into packed folders, one for each part, below a new folder.

    An episode's part follows from its number and the seed, as with the option split= of a data loader.
    """
    require_new(target)
    shares = _shares(part or ["train=0.9", "val=0.1"])
    with opened(source) as buffer:
        chosen = {
            name: buffer.episodes(fields=(), split=shares, part=name, split_seed=seed, return_indices=True)["_index"]
            for name in shares
        }
        serials = buffer.serials
    empty = [name for name, members in chosen.items() if not len(members)]
    if empty:
        raise Problem(f"split: no episode falls into {', '.join(empty)}; give it a larger share, or another --seed")
    left_out: list[int] = []
    with new_folder(target) as place:
        for name, members in chosen.items():
            left_out += memmap_buffer.pack(source, place / name, episodes=np.searchsorted(serials, members))
            with opened(place / name, verify="never") as made:
                if not set(made.serials.tolist()) <= set(members.tolist()):
                    raise Problem(f"{source}: its episodes changed while they were copied; pause the writer")
                say(f"{target / name}: {made.num_episodes} episodes, {made.num_steps} steps")
    end(print_left_out(sorted(left_out)))


def delete(
    folder: FolderArgument,
    episode: Episodes = None,
    where: Where = None,
    mark: Annotated[
        list[str] | None, typer.Option("--mark", help="Only those with this mark, as in bad; with all of several.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Remove episodes, by number, --where or --mark; their numbers are never used again."""
    if mark and not all(mark):
        raise Problem("--mark '': name a label; --where mark= is for episodes without any")
    conditions = [*(where or ()), *(f"mark={label}" for label in mark or ())]
    if not episode and not conditions:
        raise Problem("delete: name the episodes, or choose them by --where or --mark")
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.delete([])  # takes the lock: from here on no other process adds or removes episodes
        serials = serials_of(buffer, episode) if episode else buffer.serials.tolist()
        if conditions:
            serials = np.intersect1d(serials, matching(marked_table_of(buffer), conditions)["serial"]).tolist()
        steps = int(buffer.episode_lens[np.isin(buffer.serials, serials)].sum())
        if not serials:
            raise Problem("delete: no episode is like that")
        if not agreed(f"Delete {len(serials)} of {len(buffer)} episodes, {steps} steps, for ever?", yes):
            say("nothing was changed")
            end(FOUND)
        buffer.delete(np.flatnonzero(np.isin(buffer.serials, serials)))
    say(f"deleted {len(serials)} episodes, {steps} steps")


def add_field(
    folder: FolderArgument,
    name: Annotated[str, typer.Argument(help="Its name; dotted for a group.", show_default=False)],
    default: Annotated[str, typer.Option("--default", help="Its value in every episode there is, as JSON or text.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="As for the constructor: float, int, bool, uint8, U12, …")
    ] = "float",
    shape: Annotated[
        str, typer.Option("--shape", help="Of one entry, as in 3,64,64; left out for a single value.")
    ] = "",
    meta: Annotated[bool, typer.Option("--meta", help="One value an episode, not one a timestep.")] = False,
) -> None:
    """Add a field with one value to every episode of a folder; all other files stay as they are.

    To compute its values from each episode, use buffer.add_field(name, spec, compute) in Python.
    """
    try:
        sizes = tuple(int(size) for size in shape.split(",") if size.strip())
    except ValueError:
        raise Problem(f"--shape {shape!r}: expected whole numbers with commas between, as in 3,64,64") from None
    try:
        value = default if dtype.startswith("U") else json.loads(default)
    except ValueError:
        raise Problem(f"--default {default!r}: expected JSON, such as 0.5, true or [1, 2]") from None
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.add_field(name, Field(dtype, sizes, value), meta=meta)
    say(f"added {name}: {dtype} {sizes}")


def _shares(parts: Sequence[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in parts:
        name, _, share = text.partition("=")
        if name in shares:
            raise Problem(f"--part {text!r}: there is a part {name!r} already; give each part once, as in train=0.8")
        try:
            shares[name] = float(share)
        except ValueError:
            raise Problem(f"--part {text!r}: expected a name and a share, as in train=0.8") from None
        if not name.isidentifier() or not 0 < shares[name] <= 1:
            raise Problem(f"--part {text!r}: expected a name and a share above 0 and at most 1, as in train=0.8")
    if sum(shares.values()) > 1 + 1e-9:
        raise Problem(f"--part: the shares sum to {sum(shares.values()):g}, expected at most 1")
    return shares
