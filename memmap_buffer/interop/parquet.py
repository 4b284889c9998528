"""Parquet tables of a buffer, one of episodes and one of timesteps: for pandas, Polars, DuckDB and others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, extra, path_of
from memmap_buffer.interop.columns import objects
from memmap_buffer.interop.episodes import exported_episodes, put_when_whole, require_kinds

with extra("parquet"):
    import pyarrow as pa
    import pyarrow.parquet as pq

PARQUET = "Parquet"
EPISODES, STEPS = "episodes.parquet", "steps.parquet"
GROUP_STEPS = 1 << 16  # of a row group, at least


def export_parquet(buffer: ReplayBuffer, path: AnyPath) -> None:
    """Copy a buffer into two tables in a new folder; one row group is in memory at a time.

    `steps.parquet` has a row for each timestep: `_episode`, the serial, `_t`, and the fields by their dotted names.
    `episodes.parquet` has a row for each episode: `_episode`, `_length`, the meta fields, and `final.<field>` for
    fields that were declared with `final`, null if an episode has no final observation. Of a `ConcatBuffer` both have
    `_shard`, the number of the folder. Arrays become lists of a fixed size; those in `final.<field>`, which may be
    null, and fields of lists become lists of any size. bfloat16 becomes float32.

    Args:
        buffer: the buffer to copy.
        path: the folder; it is made.

    Raises:
        SchemaError: the tables are there already, there are no episodes, or a field is of complex numbers, which
            Parquet does not have.
        ImportError: pyarrow is not installed.
    """
    root = path_of(path)
    if (root / EPISODES).exists() or (root / STEPS).exists():
        raise SchemaError(f"{root}: there are tables already; give a folder of its own")
    require_tables(buffer, buffer.schema.all)
    episodes, rows = exported_episodes(buffer), list[dict[str, Any]]()
    serials = episodes.serials.reshape(len(episodes), -1)
    names = ("_shard", "_episode")[-serials.shape[1] :]
    with put_when_whole(root / STEPS, root / EPISODES) as new:
        with closing(TableWriter(new / STEPS, GROUP_STEPS)) as steps:
            for each, (places, episode) in zip(serials.tolist(), episodes, strict=True):
                length, place = len(places), dict(zip(names, each, strict=True))
                columns = {name: np.full(length, number) for name, number in place.items()} | {"_t": np.arange(length)}
                columns |= {name: episode[name][:length] for name in buffer.fieldnames}
                steps.add(pa.table({name: column_of(column) for name, column in columns.items()}))
                finals = {name: episode[name][length:] for name, field in buffer.schema.fields.items() if field.final}
                rows.append({**place, "_length": length, **{name: episode[name] for name in buffer.meta_fieldnames}})
                rows[-1] |= {f"final.{name}": last[0] if len(last) else None for name, last in finals.items()}
        pq.write_table(_episodes(buffer, rows), new / EPISODES)


class TableWriter:
    """A Parquet file that is written in row groups; the first table determines its columns.

    Args:
        path: of the file.
        group: every row group but the last has at least so many rows.
    """

    def __init__(self, path: Path, group: int = 1) -> None:
        self._path, self._group = path, group
        self._file: Any = None
        self._tables: list[Any] = []

    def add(self, table: Any) -> None:
        """Append the rows of a table."""
        self._tables.append(table)
        if sum(waiting.num_rows for waiting in self._tables) >= self._group:
            self._flush()

    def _flush(self) -> None:
        if self._tables:
            table = pa.concat_tables(self._tables)
            self._tables.clear()
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = pq.ParquetWriter(self._path, table.schema)
            self._file.write_table(table)

    def close(self) -> None:
        """Write the rows that wait for a whole group, and the end of the file."""
        self._flush()
        if self._file is not None:
            self._file.close()


def _episodes(buffer: ReplayBuffer, rows: list[dict[str, Any]]) -> Any:
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        there = np.array([value is not None for value in values])
        shown = [value for value in values if value is not None]
        is_list = name.removeprefix("final.") in buffer.schema.lists
        column = column_of(objects(shown) if is_list else np.stack(shown)) if shown else None
        if column is None:
            columns[name] = pa.nulls(len(rows))
        else:
            if name.startswith("final.") and pa.types.is_fixed_size_list(column.type):
                # pyarrow before 26 cannot read a null among lists of a fixed size
                column = column.cast(pa.list_(column.type.value_type))
            places = np.where(there, np.cumsum(there) - 1, 0)
            columns[name] = column.take(pa.array(places, mask=~there))
    return pa.table(columns)


def require_tables(buffer: ReplayBuffer, fields: Mapping[str, Field], format_name: str = PARQUET) -> None:
    """Raise SchemaError unless there are episodes, and the format can hold the fields; only `PARQUET` has lists."""
    require_kinds(fields, format_name, "c", lists=format_name == PARQUET)
    if not len(buffer):
        raise SchemaError(f"{buffer.folder}: it has no episodes; record one first")


def column_of(values: Any) -> Any:
    """An array (n, …) as Arrow's: text as strings, rows as lists of a fixed size, objects as lists of any size."""
    if values.dtype == object:
        ends = np.cumsum([0, *map(len, values)])
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column_of(np.concatenate([*values])))
    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype.kind == "U" else values)
    flattened = values.reshape(-1)
    array = pa.array(flattened.tolist() if values.dtype.kind == "U" else np.ascontiguousarray(flattened))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, int(size))
    return array
