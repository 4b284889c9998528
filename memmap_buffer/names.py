"""Names of fields (identifiers) for the keys of other libraries' data (any text), and the way back.

A key such as "bottom burner" becomes `bottom_burner`. If two keys would get the same name, one gets a number behind it.
Changed keys are remembered, so that an export restores them. Does no I/O: `interop.episodes` stores them in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Schema


class Names:
    """The names of fields for the keys of a data set, and the keys of the names.

    Args:
        changed: dotted name of a field or a group -> its key, if the key differs from the last part of the name.
        fixed: the same for the keys that a format prescribes; they take precedence, and are not stored.

    Attributes:
        changed: the argument `changed`, and the keys that were changed since.
    """

    def __init__(self, changed: Mapping[str, Any] | None = None, fixed: Mapping[str, Any] | None = None) -> None:
        self.changed = dict(changed or {})
        self._fixed = dict(fixed or {})
        self._parts: dict[str, dict[Any, str]] = {}
        for name, key in {**self.changed, **self._fixed}.items():
            group, _, part = name.rpartition(".")
            self._parts.setdefault(group, {})[key] = part

    def ours(self, tree: Mapping[Any, Any], group: str = "") -> dict[str, Any]:
        """The values of `tree` as nested dicts whose keys are names of fields.

        Args:
            tree: nested values, or the groups of an HDF5 file: all keys of a group at once, so that those keys that are
                identifiers keep their names.
            group: the dotted name of the group that `tree` is; "" for the outermost.
        """
        names = self._name(group, tree)
        return {
            part: self.ours(tree[key], _join(group, part)) if isinstance(tree[key], Mapping) else tree[key]
            for key, part in names.items()
        }

    def named(self, path: Iterable[Any]) -> str:
        """The dotted name of a field or group.

        Args:
            path: the keys under which it lies, the outermost first.
        """
        name = ""
        for key in path:
            name = _join(name, self._name(name, [key])[key])
        return name

    def path(self, name: str) -> list[Any]:
        """The keys under which a field or group lies, the outermost first: the reverse of `named`.

        Args:
            name: of the field or group.
        """
        parts = name.split(".")
        groups = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return [self._fixed.get(g, self.changed.get(g, part)) for g, part in zip(groups, parts, strict=True)]

    def key(self, name: str, separator: str = ".") -> str:
        """The keys under which a field or group lies, as one text.

        Args:
            name: of the field or group.
            separator: stands between the keys.
        """
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
    """Key -> part of a field's name, for the keys of one group.

    No two parts are equal, even without regard to case. A key that is an identifier stays the same, unless it is taken.

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
    except SchemaError:  # a reserved word; or a name that is too long, which the schema reports when it is declared
        return f"{name}_"
    return name


def _join(group: str, part: str) -> str:
    return f"{group}.{part}" if group else part
