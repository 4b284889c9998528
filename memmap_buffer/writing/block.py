"""The block of a `with` statement: what was opened for it is over when it is left, wherever its end is interrupted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

if TYPE_CHECKING:
    from typing_extensions import Self

Leave: TypeAlias = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
Held: TypeAlias = Callable[[], Leave | None]


def left() -> None:
    """What is held of a block whose end did not run through."""


class _Exit:
    """`__exit__`: each time it is asked for a new bound method, which nothing but the `with` statement holds.

    Ctrl-C may come before the first line of an `__exit__` runs. Then the frame, and with it the object, lives on in the
    traceback, which a notebook keeps; that method does not, as the statement lets go of it however it is left.
    """

    @overload
    def __get__(self, block: None, kind: type[Block]) -> Callable[..., None]: ...
    @overload
    def __get__(self, block: Block, kind: type[Block]) -> Leave: ...
    def __get__(self, block: Block | None, kind: type[Block]) -> Callable[..., None]:
        try:
            if block is None:
                return kind.leave  # to `contextlib.ExitStack`, which asks the class, nothing can be told of its end
            leave = block.leave
            block._asked = weakref.ref(leave)
            return leave
        except BaseException:
            if block is not None:
                block.held = left  # it is never entered
            raise


class Block:
    """A context manager that knows whether its block was left.

    Attributes:
        held: gives the method that the `with` statement holds as long as the block lasts; None where there is none, or
            where its end runs. thread: in which it was entered.
    """

    held: Held | None = None
    thread = 0
    _asked: Held | None = None

    def __enter__(self) -> Self:
        try:
            if self._asked is not None and self._asked() is not None:  # by `with`, which asks for both before it enters
                self.held, self.thread = self._asked, get_ident()
            return self
        except BaseException:
            self.held = left
            raise

    __exit__ = _Exit()

    @property
    def was_left(self) -> bool:
        """Whether its block was left and the end of it did not run through; another thread may only be about to."""
        return self.held is left or (self.held is not None and self.held() is None and self.thread == get_ident())

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Any:
        """The end of the block."""
        raise NotImplementedError
