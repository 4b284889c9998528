"""Episodes as the commands name and list them: by serial, as a table of columns that can be filtered and sorted."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.cli.terminal import Problem, progress

CHUNK = 1 << 26  # bytes of padded rows read at a time
TRIES = 100
Array: TypeAlias = npt.NDArray[Any]
_CONDITION = re.compile(r"\s*([\w.]+)\s*(==|=|!=|<=|>=|<|>)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def table_of(buffer: ReplayBuffer, reward: str = "reward") -> dict[str, Array]:
    """A table of the episodes, one row each, oldest first.

    Args:
        buffer: the source.
        reward: a scalar field whose sum over the steps is the return; without the field there is no such column.

    Returns:
        The columns `serial`, `length`, `return`, `end` ("terminated", "truncated" or "", if there are such fields),
        and every scalar meta field, as "meta.<name>" if one of these has its name: (episodes,) each.
    """
    ends = {kind: name for kind in ("terminated", "truncated") if (name := getattr(buffer.schema, kind)) is not None}
    wanted = list(dict.fromkeys([*[reward] * _is_scalar(buffer, reward), *ends.values()]))
    chunks = list(_chunks(buffer, wanted))
    data = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    _, first = np.unique(data["_index"], return_index=True)  # a ring that moved on meanwhile shows some of them twice
    table = {"serial": data["_index"], "length": data["_lens"]}
    if reward in wanted:
        table["return"] = data[reward]
    if ends:
        table["end"] = _ends(data, ends)
    scalar = [name for name in buffer.meta_fieldnames if buffer.schema.meta_fields[name].shape in ((), (1,))]
    table |= {f"meta.{name}" if name in table else name: data[name].reshape(-1) for name in scalar}
    return {name: values[first] for name, values in table.items()}


def matching(table: dict[str, Array], conditions: Iterable[str]) -> dict[str, Array]:
    """The rows for which all conditions hold, such as "length>=20" or "task_id=1".

    Raises:
        Problem: a condition cannot be read, or names no column.
    """
    for text in conditions:
        condition = _CONDITION.fullmatch(text)
        if condition is None:
            raise Problem(
                f"--where {text!r}: expected a column, one of = != < <= > >=, and a value, as in 'length>=20'"
            )
        column = column_of(table, condition[1], "--where")
        chosen = np.asarray(_COMPARE[condition[2]](column, _value_like(column, condition[3], text)))
        table = {name: values[chosen] for name, values in table.items()}
    return table


def column_of(table: dict[str, Array], name: str, where: str) -> Array:
    """A column by its name. Raises Problem, with the names that there are."""
    if name not in table:
        raise Problem(f"{where}: there is no column {name!r}; there are {', '.join(table)}")
    return table[name]


def serials_of(buffer: ReplayBuffer, names: Sequence[str]) -> list[int]:
    """The serials that names stand for: a serial, a range of them such as 3-7, "first" or "last".

    Raises:
        Problem: there is no such episode.
    """
    there, serials = buffer.serials, []
    for name in names:
        wanted = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", name)
        if name in ("first", "last") and len(there):
            serials.append(int(there[0 if name == "first" else -1]))
            continue
        if wanted is None:
            if name in ("first", "last"):
                raise Problem(f"episode {name}: {buffer.folder} shows no episode")
            raise Problem(f"episode {name!r}: expected its number, a range such as 3-7, 'first' or 'last'")
        low, high = int(wanted[1]), int(wanted[2] or wanted[1])
        inside = there[(there >= low) & (there <= high)].tolist()
        if not inside:
            have = f"{there[0]} to {there[-1]}" if len(there) else "none"
            raise Problem(f"episode {name}: the buffer does not show it; it has {have}")
        serials += inside
    return list(dict.fromkeys(serials))


def serial_of(buffer: ReplayBuffer, name: str) -> int:
    """The serial of one episode; of a range its first."""
    return serials_of(buffer, [name])[0]


def read_episode(buffer: ReplayBuffer, serial: int) -> dict[str, Any]:
    """The episode of a serial, as `ReplayBuffer.episode` gives it, by dotted names.

    Raises:
        Problem: it is not there any more.
    """
    for _ in range(TRIES):
        position = int(np.searchsorted(buffer.serials, serial))
        if _shows(buffer, position, serial):
            data = buffer.episode(position)
            if _shows(buffer, position, serial):  # serials only grow, so it was the same while it was read
                return buffer.schema.flatten(data)
        elif serial not in buffer.serials:
            break
    raise Problem(f"episode {serial}: it is not there any more; the ring went on")


def _shows(buffer: ReplayBuffer, position: int, serial: int) -> bool:
    serials = buffer.serials
    return position < len(serials) and int(serials[position]) == serial


def _is_scalar(buffer: ReplayBuffer, name: str) -> bool:
    field = buffer.schema.fields.get(name)
    return field is not None and field.shape in ((), (1,)) and field.storage.kind in "biuf"


def _chunks(buffer: ReplayBuffer, wanted: list[str]) -> Iterator[dict[str, Array]]:
    """Columns of all episodes, some at a time; fields as their sums over the steps."""
    step = max(1, CHUNK // (8 * buffer.max_timesteps * len(wanted))) if wanted else buffer.max_episodes
    at, count = 0, buffer.num_episodes
    with progress("episodes", count) as tell:
        while True:
            stop = min(at + step, buffer.num_episodes)
            data = buffer.episodes(range(min(at, stop), stop), fields=wanted, return_indices=True)
            yield {**data, **{name: _sum(data[name]) for name in wanted}}
            if not len(data["_index"]):
                break
            at = int(
                np.searchsorted(buffer.serials, data["_index"][-1], side="right")
            )  # the next one's position, also if the ring moved on
            if at >= buffer.num_episodes:
                break
            tell(at)


def _sum(values: Array) -> Array:
    return np.asarray(values.sum(axis=tuple(range(1, values.ndim)), dtype=np.float64))


def _ends(data: dict[str, Array], names: Mapping[str, str]) -> Array:
    ends = np.full(len(data["_lens"]), "", "U10")
    for kind, name in reversed([*names.items()]):
        ends[data[name] > 0] = kind
    return ends


def _value_like(column: Array, text: str, condition: str) -> Any:
    """A value of a column's kind from its text."""
    try:
        if column.dtype.kind == "U":
            return text
        if column.dtype.kind == "b":
            return _TRUTH[text.lower()]
        if column.dtype.kind == "c":
            return complex(text)
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except (KeyError, ValueError):
        raise Problem(f"--where {condition!r}: {text!r} is no value of a column of {column.dtype}") from None
