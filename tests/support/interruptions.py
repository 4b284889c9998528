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
from inside import turn_of

import memmap_buffer
from memmap_buffer import ReplayBuffer, verify

PACKAGE = str(Path(memmap_buffer.__file__).parent)
BEGIN = "SETUP_FINALLY"  # of a `try` up to Python 3.10


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th line of the package that is run, counted from 0; `where` it did.

    Not in a finaliser, where Python drops what is raised; not at the begin of a `try`, an instruction that does
    nothing or makes room for its end, nor where a `with` statement goes on to the end of its block: there Python looks
    for no signal. Not at the next turn of a comprehension either, from Python 3.12 on: what a trace function raises
    there passes by all that its function has to end by, and what a signal raises does not.
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
    starts = [(offset, line) for offset, _, line in code.co_lines() if line is not None]
    for offset, line in starts:
        first.setdefault(line, offset)
    blocks, begins = with_lines(code.co_filename), {dis.opmap[name] for name in ("NOP", BEGIN) if name in dis.opmap}
    ends = {offset for offset, line in starts if line in blocks and offset != first[line]}
    turns = {
        offset
        for entry in entries_of(code)
        if dis.opname[code.co_code[entry.target]] == "SWAP"  # which restores the names of a comprehension
        for offset in range(entry.start, entry.end, 2)
        if dis.opname[code.co_code[offset]] == "FOR_ITER"
    }
    return frozenset(ends | turns | {offset for offset, _ in starts if code.co_code[offset] in begins})


def entries_of(code: CodeType) -> list[Any]:
    """The rows of a function's table of exceptions, from `start` to `end` to `target`; none before Python 3.11."""
    return list(getattr(dis.Bytecode(code), "exception_entries", ()))


def loops_that_pass_by_ends(code: CodeType) -> list[int]:
    """The lines of loops within a `try` or `with` whose jump back is in no row of the table: a signal there ends none.

    Python 3.12 and 3.13 make such a jump of a condition at the end of a loop, that of `while` itself or of a
    comprehension. 3.13 looks for signals before it jumps: https://github.com/python/cpython/issues/130279.
    """
    found, instructions = [], list(dis.Bytecode(code))
    for before, condition, jump in zip(instructions, instructions[1:], instructions[2:], strict=False):
        at_end = condition.opname.startswith("POP_JUMP") and jump.opname == "JUMP_BACKWARD"
        if at_end and not rows_at(code, jump.offset) and ends_something(code, before.offset):
            found.append(jump.positions.lineno)
    return found


def rows_at(code: CodeType, offset: int) -> list[Any]:
    return [entry for entry in entries_of(code) if entry.start <= offset < entry.end]


def ends_something(code: CodeType, offset: int) -> bool:
    """Whether an exception there comes to a handler that the source has, not only to one of Python's own."""
    names = {one.offset: one.opname for one in dis.Bytecode(code)}
    while rows := rows_at(code, offset):
        offset = rows[0].target
        if names[offset] == "PUSH_EXC_INFO":
            return True
        offset = min((at for at, name in names.items() if at > offset and name == "RERAISE"), default=-1)
    return False


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
    assert free_for_other_threads(turn_of(buffer)), "the turn"
    found = content(buffer)
    assert content(reader) == content(folder) == found
    assert [finding for finding in verify(folder) if finding.lost] == []
    return found
