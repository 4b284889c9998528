"""Names of a module that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def on_first_use(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module.

    Args:
        module: its name.
        places: module below `memmap_buffer` -> the names in it, with spaces between.
    """
    place_of = {name: place for place, names in places.items() for name in names.split()}

    def attribute_of(name: str) -> Any:
        if name not in place_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        attribute = getattr(importlib.import_module(f"memmap_buffer.{place_of[name]}"), name)
        setattr(sys.modules[module], name, attribute)
        return attribute

    return attribute_of
