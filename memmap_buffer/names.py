"""The keys of other libraries' data, which may be any text, as names of fields, which are identifiers; and back.

A key such as "bottom burner" becomes `bottom_burner`; a number tells two keys apart that would become one. Changed keys
are remembered, so that an export restores them. Does no I/O: `interop.episodes` stores them in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Schema


class Names:
    """The names that keys were given, and the way back.

    Args:
        changed: dotted name of a field or a group -> its key, where that is not the last part of the name.
        fixed: the same for the keys that a format prescribes; they take precedence, and are not stored.

    Attributes:
        changed: as given, and the keys that were changed since.
    """

    def __init__(self, changed: Mapping[str, Any] | None = None, fixed: Mapping[str, Any] | None = None) -> None:
        self.changed = dict(changed or {})
        self._fixed = dict(fixed or {})
        self._parts: dict[str, dict[Any, str]] = {}
        for name, key in {**self.changed, **self._fixed}.items():
            group, _, part = name.rpartition(".")
            self._parts.setdefault(group, {})[key] = part

    def ours(self, tree: Mapping[Any, Any], group: str = "") -> dict[str, Any]:
        """Nested values, or the groups of an HDF5 file, as nested dicts by the names of fields.

        Args:
            tree: all keys of the group at once, so that the identifiers among them keep their names.
            group: the dotted name of the group.
        """
        names = self._name(group, tree)
        return {
            part: self.ours(tree[key], _join(group, part)) if isinstance(tree[key], Mapping) else tree[key]
            for key, part in names.items()
        }

    def named(self, path: Iterable[Any]) -> str:
        """The dotted name of a path of keys, each within the one before."""
        name = ""
        for key in path:
            name = _join(name, self._name(name, [key])[key])
        return name

    def path(self, name: str) -> list[Any]:
        """The path of keys of a field or group, the reverse of `named`."""
        parts = name.split(".")
        groups = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return [self._fixed.get(g, self.changed.get(g, part)) for g, part in zip(groups, parts, strict=True)]

    def key(self, name: str, separator: str = ".") -> str:
        """The path of keys as one text."""
        return separator.join(map(str, self.path(name)))

    def _name(self, group: str, keys: Iterable[Any]) -> dict[Any, str]:
        parts = self._parts.setdefault(group, {})
        new = parts_of([key for key in keys if key not in parts], parts.values())
        parts |= new
        for key, part in new.items():
            if part != key:
                self.changed[_join(group, part)] = key
        return {key: parts[key] for key in keys}


def parts_of(keys: Iterable[Any], taken: Iterable[str] = ()) -> dict[Any, str]:
    """Key -> part of a field's name, for the keys of one group; no two get the same, and identifiers stay as they are.

    Args:
        keys: of one group.
        taken: parts that other keys of the group have already.
    """
    group, used = list(keys), {part.casefold() for part in taken}
    parts: dict[Any, str] = {}
    for key in sorted(group, key=lambda key: _identifier(str(key)) != key):
        wanted = part = _identifier(str(key))
        count = 1
        while part.casefold() in used:
            count += 1
            part = f"{wanted}_{count}"
        used.add(part.casefold())
        parts[key] = part
    return {key: parts[key] for key in group}


@cache
def _identifier(key: str) -> str:
    """The key if it can be a field's name, else a similar name that can."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", key)
    name = name if name[:1].isalpha() else f"n{name}"
    try:
        Schema({name: "bool"})
    except SchemaError:  # a word that is reserved; the schema itself reports a name that is too long
        return f"{name}_"
    return name


def _join(group: str, part: str) -> str:
    return f"{group}.{part}" if group else part
