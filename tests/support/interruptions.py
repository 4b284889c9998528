"""KeyboardInterrupt at any line of the package: a trace function that raises it, and what must be true afterwards."""

from __future__ import annotations

import ast
import dis
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from fault_injection import shown

import memmap_buffer
from memmap_buffer import ReplayBuffer, verify

PACKAGE = str(Path(memmap_buffer.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th line of the package that is run, counted from 0; `where` it did.

    Not in a finaliser, where Python drops what is raised; not at the begin of a `try`, an instruction that does
    nothing, nor where a `with` statement goes on to the end of its block: there Python looks for no signal.
    """

    def __init__(self, at: int) -> None:
        self._left, self.where = at, ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or in_finaliser(frame):
            return None
        if event == "line" and frame.f_lasti not in without_signals(frame.f_code):
            self._left -= 1
            if self._left < 0 and not self.where:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self


def in_finaliser(frame: Any) -> bool:
    """Whether a finaliser called a function, or what called that."""
    callers = (frame.f_back, frame.f_back and frame.f_back.f_back)
    return any(caller is not None and caller.f_code.co_filename == weakref.__file__ for caller in callers)


@cache
def without_signals(code: CodeType) -> frozenset[int]:
    """The instructions of a function before which no signal is looked for, though a line begins there."""
    first: dict[int, int] = {}
    starts = [(offset, line) for offset, line in dis.findlinestarts(code) if line is not None]
    for offset, line in starts:
        first.setdefault(line, offset)
    blocks, nothing = with_lines(code.co_filename), dis.opmap["NOP"]
    ends = {offset for offset, line in starts if line in blocks and offset != first[line]}
    return frozenset(ends | {offset for offset, _ in starts if code.co_code[offset] == nothing})


@cache
def with_lines(path: str) -> frozenset[int]:
    """The lines of a source on which a `with` statement begins."""
    nodes = ast.walk(ast.parse(Path(path).read_text()))
    return frozenset(node.lineno for node in nodes if isinstance(node, ast.With))


def interrupted(work: Callable[[], Any], at: int) -> KeyboardInterrupt | None:
    """Run `work` with an interruption at a line; returns it with its traceback, or None where there are fewer lines."""
    interrupt, before = Interrupt(at), sys.gettrace()
    try:
        sys.settrace(interrupt)
        work()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    assert not interrupt.where, f"{interrupt.where}: the interruption was swallowed"
    return None


def free_for_other_threads(turn: Any) -> bool:
    """Whether another thread could take a lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(turn.acquire(blocking=False))
        if taken[0]:
            turn.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def content(buffer: ReplayBuffer | Path) -> list[dict[str, Any]]:
    """What is shown, without the serials."""
    return [episode for _, episode in shown(buffer)]


def require_whole(folder: Path, buffer: ReplayBuffer, reader: ReplayBuffer) -> list[dict[str, Any]]:
    """What is shown; the same to the writer, to a reader that was there before, and to one that comes now."""
    assert free_for_other_threads(buffer._writer.turn), "the turn"
    found = content(buffer)
    assert content(reader) == content(folder) == found
    assert [finding for finding in verify(folder) if finding.lost] == []
    return found
