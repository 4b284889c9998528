"""How a case is measured: contenders take turns in one run; the row of the table has the median of each.

A row's `figure` is ours over the bound in throughput, unless its goal says otherwise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

Call = Callable[[], object]
OURS, BOUND = "ours", "bound"  # names of contenders; a case may have several whose names begin with "bound"


@dataclass(frozen=True)
class Goal:
    """The goal of a figure: at least `value`, or at most; None for no goal."""

    value: float | None
    at_most: bool = False
    unit: str = ""

    def __str__(self) -> str:
        return "" if self.value is None else f"{'<=' if self.at_most else '>='} {self.value:g}{self.unit}"

    def reached_by(self, figure: float) -> bool | None:
        if self.value is None:
            return None
        return figure <= self.value if self.at_most else figure >= self.value


@dataclass(frozen=True)
class Row:
    """One line: `ours`, `bound` and each of `peers` in `unit`, and the figure with its goal."""

    case: str
    unit: str
    ours: float
    bound: float | None
    figure: float
    goal: str
    reached: bool | None
    peers: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """The line of the table."""
        bound = "" if self.bound is None else _short(self.bound)
        mark = {True: "yes", False: "NO", None: ""}[self.reached]
        peers = ", ".join(f"{name} {_short(rate)}" for name, rate in self.peers.items())
        figure = f"{self.figure:.2f}"
        values = f"{_short(self.ours):>9} {bound:>9} {self.unit:10} {figure:>7} {self.goal:9} {mark:4}"
        return f"{self.case:46} {values} {peers}".rstrip()

    def json(self) -> dict[str, object]:
        return asdict(self)


HEAD = f"{'case':46} {'ours':>9} {'bound':>9} {'unit':10} {'figure':>7} {'to reach':9} {'':4} peers"


def medians(
    contenders: Mapping[str, Call], repeats: int, burst: int = 100, before: Call | None = None
) -> dict[str, float]:
    """Seconds of one call of each contender: the median over the means of bursts, taken in turns.

    A burst is longer than anything that is worked out for several batches together, so that every call bears its share;
    and it lets a contender meet its own caches, not another's.

    Args:
        repeats: calls of each. burst: calls in a row that are timed as one.
        before: called before every call, untimed; then calls are timed one by one.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():  # what is built at the first call is not the cost of a batch
        _timed(call, 1, before)
    burst = min(burst, repeats)
    for _ in range(-(-repeats // burst)):
        for name, call in contenders.items():
            if before is None:
                taken[name].append(_timed(call, burst, None) / burst)
            else:
                taken[name] += [_timed(call, 1, before) for _ in range(burst)]
    return {name: statistics.median(times) for name, times in taken.items()}


def _timed(call: Call, times: int, before: Call | None) -> float:
    if before is not None:
        before()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def throughput(case: str, seconds: Mapping[str, float], goal: float | None, *, per_call: int = 1, unit: str) -> Row:
    """A row of rates, with `per_call` units a call; of several bounds the fastest counts."""
    rates = {name: per_call / median for name, median in seconds.items()}
    ours = rates.pop(OURS)
    best = max((name for name in rates if name.startswith(BOUND)), key=lambda name: rates[name])
    bound = rates.pop(best)
    return finish(case, unit, ours, bound, ours / bound, Goal(goal), rates)


def finish(
    case: str,
    unit: str,
    ours: float,
    bound: float | None,
    figure: float,
    goal: Goal,
    peers: Mapping[str, float] | None = None,
) -> Row:
    return Row(case, unit, ours, bound, figure, str(goal), goal.reached_by(figure), dict(peers or {}))


def _short(value: float) -> str:
    """Three digits and a magnitude: 12.4k."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
