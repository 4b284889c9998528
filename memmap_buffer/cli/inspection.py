"""`info`, `episodes`, `head`, `show`, `stats`: the contents of a folder, as tables. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from memmap_buffer import Compression, ConcatBuffer, Field, FieldStatistics, ReplayBuffer, compression_of
from memmap_buffer.adapters import TAGS, Array, column_of, histogram_of, is_url, matching, order_of
from memmap_buffer.cli.episodes import marked_table_of, read_episode, serial_of, table_of
from memmap_buffer.cli.folders import disk_use, folders_at, name_of, opened
from memmap_buffer.cli.minimal import say, shards_of
from memmap_buffer.cli.remote import CacheFolder, StorageOptions, info_of_url
from memmap_buffer.cli.terminal import (
    Episode,
    Fields,
    Json,
    Place,
    Problem,
    Reward,
    Where,
    bytes_of,
    cell_of,
    say_json,
    show_table,
)

BARS = "▁▂▃▄▅▆▇█"
MANY = 4  # so many entries of an array are shown
ENTRIES = 16  # `stats` has a row for each entry of a field that has no more


def info(
    place: Place,
    as_json: Json = False,
    reward: Reward = "reward",
    options: StorageOptions = None,
    cache: CacheFolder = None,
) -> None:
    """Say what is in a folder: its fields, its sizes, how many episodes and steps, lengths and returns.

    For a URL: how many shards, episodes, steps and bytes it has, from one small object, and how much of it is here.
    """
    if is_url(place):
        if reward != "reward":
            what = f"got {reward!r} for a URL, of which no returns are told"
            raise Problem(f"--reward: {what}; leave it out, or name a folder that `pull` made")
        info_of_url(place, options, cache, as_json)
        return
    folder = Path(place)
    if shards := shards_of(folder):
        _info_of_root(folder, shards, as_json, reward)
        return
    with opened(folder) as buffer:
        table = table_of(buffer, reward)
        facts = _facts(buffer, table)
    if as_json:
        say_json(facts)
        return
    _say_facts(facts | {"folder": place})
    show_table("\nfields", _field_columns(facts["fields"], "one step"))
    if facts["meta_fields"]:
        show_table("\nmeta fields", _field_columns(facts["meta_fields"], "one episode"))
    for name in ("length", "return"):
        if facts.get(name):
            say(f"\n{_histogram(name, facts[name])}")


def episodes(
    folder: Place,
    sort: Annotated[str, typer.Option("--sort", help="The column to sort by.")] = "serial",
    reverse: Annotated[bool, typer.Option("--reverse", help="The highest first.")] = False,
    where: Where = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="So many rows at most; 0 for all.")] = 50,
    as_json: Json = False,
    reward: Reward = "reward",
) -> None:
    """List the episodes: number, length, return, how each ended, and its meta fields."""
    table = _table_of_all(folder, reward)
    unmarked = [name for name in TAGS if not any(table[name])]
    table = {name: values for name, values in matching(table, where or ()).items() if name not in unmarked}
    order = order_of(column_of(table, sort, "--sort"), reverse)
    shown = {name: values[order][: limit or None] for name, values in table.items()}
    if as_json:
        say_json([dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)])
        return
    show_table("", {name: values.tolist() for name, values in shown.items()})
    if len(shown["serial"]) < len(order):
        say(f"{len(order) - len(shown['serial'])} more; --limit 0 shows all")


def show(folder: Place, episode: Episode, field: Fields = None, as_json: Json = False) -> None:
    """Show one episode: the range of each field, and its meta fields; with --json every value."""
    with opened(folder) as buffer:
        serial = serial_of(buffer, episode)
        wanted = buffer.schema.require(field or buffer.schema.all, "--field")
        data = {name: value for name, value in read_episode(buffer, serial).items() if name in wanted}
        meta = {name: data.pop(name) for name in buffer.meta_fieldnames if name in data}
    if as_json:
        say_json({"serial": serial, "fields": data, "meta_fields": meta})
        return
    say(f"episode {serial}")
    for name, value in meta.items():
        say(f"  {name}: {_short(value)}")
    show_table("", _ranges(data))


def head(
    folder: Place,
    episode: Annotated[str, typer.Argument(help="The episode's number, or first or last.")] = "first",
    steps: Annotated[int, typer.Option("--steps", "-n", min=1, help="How many timesteps.")] = 10,
    field: Fields = None,
) -> None:
    """Show the first timesteps of an episode, a row each."""
    with opened(folder) as buffer:
        serial = serial_of(buffer, episode)
        wanted = buffer.schema.require(field or buffer.fieldnames, "--field", buffer.fieldnames)
        data = read_episode(buffer, serial)
    count = min(steps, min(len(data[name]) for name in wanted))
    columns = {name: [_short(value) for value in data[name][:count]] for name in wanted}
    show_table(f"episode {serial}", {"t": list(range(count)), **columns})


def stats(folder: Place, field: Fields = None, as_json: Json = False) -> None:
    """Count, mean, standard deviation, extremes and quantiles of every field; with --json of each entry of an array."""
    with ExitStack() as stack:
        buffers = [stack.enter_context(opened(each)) for each in folders_at(folder) or [folder]]
        fields = ConcatBuffer(buffers).statistics(field).fields
    if not fields:
        raise Problem(f"{folder}: it has no field of numbers")
    if as_json:
        say_json({name: asdict(statistics) for name, statistics in fields.items()})
        return
    rows = [row for name, statistics in fields.items() for row in _statistics_rows(name, statistics)]
    show_table("", {key: [row[key] for row in rows] for key in rows[0]})
    error = max(statistics.rank_error for statistics in fields.values())
    say(f"the ranks of the quantiles are within {error:.2g}" if error else "the quantiles are exact")


def _info_of_root(root: Path, shards: list[Path], as_json: bool, reward: str) -> None:
    folders = []
    for shard in shards:
        with opened(shard) as buffer:
            folders.append(_facts(buffer, table_of(buffer, reward)))
    if as_json:
        say_json({"folder": str(root), "folders": folders})
        return
    counted = {key: [facts[key] for facts in folders] for key in ("episodes", "steps", "bytes_on_disk")}
    counts, size = sum(counted["episodes"]), bytes_of(sum(counted["bytes_on_disk"]))
    say(f"{root}: {len(shards)} folders, {counts} episodes, {sum(counted['steps'])} steps, {size} on disk")
    sizes = {"on disk": list(map(bytes_of, counted.pop("bytes_on_disk")))}
    show_table("", {"folder": [shard.name for shard in shards], **counted, **sizes})


def _table_of_all(folder: str, reward: str) -> dict[str, Array]:
    """The table of the episodes of a folder; of a root that of all its folders, with a column `folder`."""
    shards, tables = folders_at(folder), []
    for each in shards or [folder]:
        with opened(each) as buffer:
            tables.append(marked_table_of(buffer, reward))
    if not shards:
        return tables[0]
    names = np.repeat(list(map(name_of, shards)), [len(table["serial"]) for table in tables])
    common = [name for name in tables[0] if all(name in table for table in tables)]
    return {"folder": names, **{name: np.concatenate([table[name] for table in tables]) for name in common}}


def _statistics_rows(name: str, statistics: FieldStatistics) -> Iterator[dict[str, Any]]:
    """A row for each entry of a field; for a field of more than `ENTRIES` one row with extremes and mean over all."""
    columns = {"mean": statistics.mean, "std": statistics.std, "min": statistics.min, "max": statistics.max}
    columns |= {f"{100 * q:g}%": values for q, values in statistics.quantiles.items()}
    if statistics.mean.size > ENTRIES:
        over_all = {"mean": statistics.mean.mean(), "min": statistics.min.min(), "max": statistics.max.max()}
        yield {
            "field": f"{name} {statistics.mean.shape}",
            "count": statistics.count,
            **dict.fromkeys(columns),
            **over_all,
        }
        return
    for i in np.ndindex(statistics.mean.shape):
        spelt = f"{name}[{', '.join(map(str, i))}]" if i else name
        yield {"field": spelt, "count": statistics.count, **{key: float(values[i]) for key, values in columns.items()}}


def _facts(buffer: ReplayBuffer, table: dict[str, Array]) -> dict[str, Any]:
    """The facts that `info --json` prints."""
    on_disk, apparent = disk_use(buffer.folder)
    stored = json.loads((buffer.folder / "schema.json").read_text())
    steps, saved = int(table["length"].sum()), compression_of(buffer.folder)
    return {
        "folder": str(buffer.folder),
        **{key: stored[key] for key in ("version", "layout", "max_episodes", "max_timesteps", "capacity", "circular")},
        "episodes": len(table["serial"]),
        "steps": steps,
        "first_serial": int(table["serial"][0]) if len(table["serial"]) else None,
        "last_serial": int(table["serial"][-1]) if len(table["serial"]) else None,
        "bytes_on_disk": on_disk,
        "bytes_apparent": apparent,
        "bytes_per_step": sum(field.itemsize for field in buffer.schema.fields.values()),
        **{name: _summary(table[name]) for name in ("length", "return") if name in table},
        "fields": {name: _field_facts(field, saved.get(name)) for name, field in buffer.schema.fields.items()},
        "meta_fields": {name: _field_facts(field) for name, field in buffer.schema.meta_fields.items()},
    }


def _field_facts(field: Field, saved: Compression | None = None) -> dict[str, Any]:
    facts = {**asdict(field), "bytes": field.itemsize}
    if field.codec is not None and saved is not None:
        facts |= {"codec": saved.codec, "bytes_stored": saved.stored, "bytes_raw": saved.raw}
    return facts


def _say_facts(facts: dict[str, Any]) -> None:
    kind = "packed, read-only" if facts["layout"] == "packed" else "a ring" if facts["circular"] else "until full"
    first, last = facts["first_serial"], facts["last_serial"]
    numbers = "none" if first is None else f"{first} to {last}"
    limit = f", at most {facts['capacity']} steps" if facts["capacity"] is not None else ""
    say(f"{facts['folder']}: {kind}, format version {facts['version']}")
    say(f"episodes  {facts['episodes']} of {facts['max_episodes']}{limit}, numbers {numbers}")
    say(f"steps     {facts['steps']}, at most {facts['max_timesteps']} an episode")
    say(f"on disk   {bytes_of(facts['bytes_on_disk'])} (with holes {bytes_of(facts['bytes_apparent'])})")


def _field_columns(fields: dict[str, Any], unit: str) -> dict[str, list[Any]]:
    defaults = ["-" if f["default"] is None else _short(np.asarray(f["default"])) for f in fields.values()]
    optional = ("default", "final", "codec")
    columns = {
        "name": list(fields),
        "dtype": [f["dtype"] for f in fields.values()],
        "shape": [str(tuple(f["shape"])) for f in fields.values()],
        unit: [bytes_of(f["bytes"]) + " a member" * (None in f["shape"]) for f in fields.values()],
        "default": defaults,
        "final": ["yes" if f["final"] else "" for f in fields.values()],
        "codec": [_codec_of(f) for f in fields.values()],
    }
    return {name: column for name, column in columns.items() if name not in optional or set(column) - {"-", ""}}


def _codec_of(facts: dict[str, Any]) -> str:
    """The codec of a field with its options, and the factor by which it shrinks, as 1/factor, its index included."""
    if facts["codec"] is None:
        return ""
    spelled = " ".join(map(str, facts["codec"].values()))
    return f"{spelled}, 1/{facts['bytes_raw'] / facts['bytes_stored']:.1f}" if facts["bytes_stored"] else spelled


def _summary(values: Array) -> dict[str, Any] | None:
    """Extremes, mean and histogram of the finite values, and how many are not finite; None if there are no values."""
    if not len(values):
        return None
    finite = values[np.isfinite(values)]
    mean = float(np.mean(finite, dtype=np.float64)) if len(finite) else None
    counts, edges = histogram_of(finite)
    return {
        "min": min(finite, default=None),
        "mean": mean,
        "max": max(finite, default=None),
        "not_finite": len(values) - len(finite),
        "histogram": {"counts": counts, "edges": edges},
    }


def _histogram(name: str, summary: dict[str, Any]) -> str:
    """A histogram in one line: bars between the lowest and the highest value."""
    counts, not_finite = summary["histogram"]["counts"], summary["not_finite"]
    heights = np.ceil(counts / max(1, counts.max()) * len(BARS)).astype(int)
    bars = "".join(" " if height == 0 else BARS[height - 1] for height in heights)
    low, mean, high = (cell_of(summary[key] and float(summary[key])) for key in ("min", "mean", "max"))
    return f"{name:<7} {low} {bars} {high}  mean {mean}" + (f", {not_finite} not finite" if not_finite else "")


def _ranges(data: dict[str, Any]) -> dict[str, list[Any]]:
    """The columns of `show`, a row for each field."""
    arrays = {name: np.asarray(values) for name, values in data.items()}
    lists = {name: np.concatenate([*a]) for name, a in arrays.items() if a.dtype == object}  # all members of all lists
    entries = {name: lists.get(name, a) for name, a in arrays.items()}
    numeric = {name: a for name, a in entries.items() if a.dtype.kind in "biuf" and a.size}
    shapes = {name: (len(a), None, *lists[name].shape[1:]) if name in lists else a.shape for name, a in arrays.items()}
    return {
        "field": list(arrays),
        "dtype": ["text" if a.dtype.kind == "U" else str(a.dtype) for a in entries.values()],
        "shape": [str(shape) for shape in shapes.values()],
        "min": [numeric[name].min() if name in numeric else None for name in arrays],
        "mean": [float(numeric[name].mean(dtype=np.float64)) if name in numeric else None for name in arrays],
        "max": [numeric[name].max() if name in numeric else None for name in arrays],
        "first": [_short(a[0]) for a in arrays.values()],
        "last": [_short(a[-1]) for a in arrays.values()],
    }


def _short(value: Any) -> str:
    """A value in one line: the first entries of an array; for a large array of several axes its range."""
    array = np.asarray(value)
    if array.ndim == 0:
        return cell_of(array[()])
    if array.ndim > 1 and array.size > ENTRIES and array.dtype.kind in "biuf":
        return f"{cell_of(array.min())} … {cell_of(array.max())} {array.shape}"
    entries = [_entry(entry) for entry in array.reshape(-1)[:MANY]]
    shape = f" {array.shape}" if array.ndim > 1 else ""
    return f"[{', '.join(entries)}{', …' if array.size > MANY else ''}]{shape}"


def _entry(value: Any) -> str:
    """An entry of an array as text: a float with three digits, as several stand in a line."""
    return f"{value:.3g}" if isinstance(value, np.floating) and abs(value) < 1000 else cell_of(value)
