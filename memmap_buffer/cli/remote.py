"""The commands about folders that are published at a URL: `publish`, `pull`, `ls`, `compact`, `gc`, `cache`, `info`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

import memmap_buffer
from memmap_buffer import NotABufferError
from memmap_buffer.cli.minimal import FOUND, OK, print_left_out, say, shards_of
from memmap_buffer.cli.terminal import FolderArgument, Json, Problem, bytes_of, end, say_json, show_table

Url = Annotated[str, typer.Argument(metavar="URL", help="As in s3://bucket/run7.", show_default=False)]
StorageOptions = Annotated[
    str | None, typer.Option("--storage-options", help='For fsspec, as JSON: \'{"endpoint_url": "http://…"}\'.')
]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", help="Where readers of a URL keep what they fetched.", show_default=False)
]


def publish(folder: FolderArgument, url: Url, options: StorageOptions = None) -> None:
    """Copy a folder, or each of a root, packed to a store; others read it by the URL. Again: only what is new."""
    code = OK
    for source in shards_of(folder) or [folder]:
        left_out = memmap_buffer.publish(source, url, storage_options=parsed(options))
        say(f"{source}: published")
        code |= FOUND if print_left_out(left_out) else OK
    end(code)


def pull(
    url: Url,
    target: Annotated[Path, typer.Argument(help="A folder; after an interruption the same.", show_default=False)],
    options: StorageOptions = None,
) -> None:
    """Copy the data published at a URL to a folder, checked by digests. After an interruption: only what is missing."""
    memmap_buffer.pull(url, target, storage_options=parsed(options))
    say(f"{target}: it is all there")


def ls(url: Url, as_json: Json = False, options: StorageOptions = None) -> None:
    """List the shards at a URL: episodes, steps, bytes; from one small object."""
    try:
        rows = _rows(url, memmap_buffer.shards_at(url, storage_options=parsed(options)))
    except NotABufferError as error:
        if not Path(url).is_dir():
            raise
        here = f"{url}: nothing was published to this folder; what is in it is said by: memmap-buffer info"
        raise Problem(f"{here} {shlex.quote(url)}") from error
    if as_json:
        say_json(rows)
        return
    show_table("", {key: [row[key] for row in rows] for key in rows[0]} if rows else {"name": []})


def gc(
    url: Url,
    older_than: Annotated[
        str, typer.Option("--older-than", help="7d, 36h, 2w: what is younger stays; a day at least.")
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    options: StorageOptions = None,
) -> None:
    """Remove old versions, heads and entries at the URL of a root that no list names any more."""
    removed = memmap_buffer.collect_garbage(
        url, older_than=_time(older_than), storage_options=parsed(options), dry_run=dry_run
    )
    for path, size in removed.items():
        say(f"{path}: {bytes_of(size)}")
    say(f"{'would be removed' if dry_run else 'removed'}: {len(removed)}, {bytes_of(sum(removed.values()))}")


def compact(
    url: Url,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="Of a joined shard; what has more than half of it stays.")
    ] = 1 << 30,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be joined.")] = False,
    options: StorageOptions = None,
) -> None:
    """Join small shards at the URL of a root into larger ones; `gc` removes what they were made of."""
    joined = memmap_buffer.compact(url, max_bytes=max_bytes, storage_options=parsed(options), dry_run=dry_run)
    for name, parts in joined.items():
        say(f"{name}: {len(parts)} shards, {parts[0]} to {parts[-1]}")
    count = sum(map(len, joined.values()))
    say(f"{'would be joined' if dry_run else 'joined'}: {count} shards into {len(joined)}")


def _time(text: str) -> timedelta:
    """A time as people write it. Raises Problem."""
    match = re.fullmatch(r"([0-9]{1,6})([hdw])", text)
    if match is None:
        raise Problem(f"--older-than: got {text!r}, expected hours, days or weeks, as in 36h, 7d, 2w")
    return int(match[1]) * {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}[match[2]]


def cache(
    place: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Default: that of readers.", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare all with the digests; drop what differs.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Empty it; readers fetch anew.")] = False,
    as_json: Json = False,
) -> None:
    """Show what readers of URLs keep on this machine, check it, or empty it; readers may be at work."""
    damaged = memmap_buffer.check_cache(place) if check else {}
    freed = memmap_buffer.clear_cache(place) if clear else 0
    contents = memmap_buffer.cache_contents(place)
    if as_json:
        say_json({**asdict(contents), "path": str(contents.path), "damaged": damaged, "cleared": freed})
    else:
        for name, size in damaged.items():
            say(f"{name}: {bytes_of(size)} are not as they were published, and were dropped")
        if clear:
            say(f"cleared: {bytes_of(freed)}")
        for name, (size, total) in contents.shards.items():
            say(f"{name}  {bytes_of(size)} of {bytes_of(total)}")
        bound = "none" if contents.bound is None else bytes_of(contents.bound)
        say(f"{contents.path}: {bytes_of(contents.num_bytes)}, bound {bound}, heads {bytes_of(contents.head_bytes)}")
    end(FOUND if damaged else OK)


def info_of_url(url: str, options: str | None, cache: Path | None, as_json: bool) -> None:
    """Say how much is published at a URL, and how much of it was fetched into a cache."""
    shards = memmap_buffer.shards_at(url, storage_options=parsed(options))
    rows = _rows(url, shards)
    facts: dict[str, Any] = {"shards": len(rows)}
    facts |= {key: sum(row[key] for row in rows) for key in ("episodes", "steps", "bytes")}
    facts |= zip(("fetched", "needed"), memmap_buffer.fetched_of(shards.values(), cache), strict=True)
    if as_json:
        say_json(facts | {"folders": rows})
        return
    for key, value in facts.items():
        say(f"{key:9}{value if key in ('shards', 'episodes', 'steps') else bytes_of(value)}")


def _rows(url: str, shards: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name or url.partition("?")[0].rstrip("/").rpartition("/")[2],
            "episodes": shard.episodes,
            "steps": shard.steps,
            "bytes": shard.num_bytes,
            "id": shard.id,
            "version": shard.version,
        }
        for name, shard in shards.items()
    ]


def parsed(options: str | None) -> dict[str, Any]:
    """The storage options in a text of JSON; {} for None. Raises Problem if it is no object of JSON."""
    try:
        storage_options = json.loads(options or "{}")
    except ValueError as error:
        raise Problem(f"--storage-options: expected an object of JSON: {error}") from error  # options may have secrets
    if not isinstance(storage_options, dict):
        raise Problem("--storage-options: expected an object of JSON, as in '{\"anon\": true}'")
    return storage_options
