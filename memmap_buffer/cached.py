"""`cached_property` without a lock, as Python has it from 3.12 on.

Before 3.12, functools holds one lock for all objects of a class while it computes a value. If another thread forks the
process at that time, the child waits for that lock for ever.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # has the name of functools.cached_property, which it replaces
        """A method whose value is kept in the object. Threads that compute it at once all get the value kept first."""

        def __init__(self, make: Any) -> None:
            self.func, self.__doc__ = make, make.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.attrname = name

        def __get__(self, owner: Any, of: type | None = None) -> Any:
            if owner is None:
                return self
            return vars(owner).setdefault(self.attrname, self.func(owner))


__all__ = ["cached_property"]
