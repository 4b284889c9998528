"""A progress bar where tqdm is installed and stderr is a terminal; nothing otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """The items; going through them shows a bar on stderr if that is a terminal and tqdm is installed.

    Args:
        items: any items.
        description: the text before the bar.
        total: how many items there are; None: as many as `len(items)` says, if it does.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[Item] = tqdm(items, description, total=total, disable=None, leave=False)  # None: on a terminal only
    return bar
