"""`Hindsight`: which goals items are given instead of their own, and what their rewards are then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memmap_buffer.dtypes import check_number
from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Schema

STRATEGIES = ("future", "final", "episode", "random", "geometric")


@dataclass(frozen=True)
class Hindsight:
    """Give items a goal that was achieved later, and the rewards that they would have had for it.

    Step t of an episode leads to what was achieved at t + 1, so goals are taken from timesteps after a step, and the
    reward of step t is that of the achieved goal at t + 1; the observation after the last action counts, where it was
    stored (`final`). An item has one goal: it replaces the field `goal` wherever the item has it, `next_` and `seq_`
    too, and the field `reward`, with the returns that are made of it. All else stays, also how an episode ended. Of an
    episode without the final achieved goal, what reaches its last step is left as it is.

    A batch gains `_goal` (B, 2) int64: (serial, t) of the achieved goal, -1 where the item kept its own; of a
    ConcatBuffer (B, 3). The same seed chooses the same.

    Args:
        reward_fn: called with arrays: achieved goals (N, *goal), goals (N, *goal) and a dict of the fields `info`,
            name -> (N, *field), of the steps; gives (N, *reward). `env.unwrapped.compute_reward` of a goal environment
            is one. To be sent to workers that are spawned it must pickle.
        goal: a field, or a meta field. achieved: a field of the same shape and dtype. reward: a field.
        strategy: the timestep that the goal was achieved at, of an item from step t on, in an episode whose last entry
            is T: "future": t + 1 … T, each alike; "geometric": of these, d steps on with P ∝ gamma^d; "final": T;
            "episode": 1 … T; "random": the one after the step of another item of the batch.
        prob: of each item to be given another goal.
        gamma: of "geometric", 0 < γ < 1.
        info: fields for `reward_fn`.

    Raises: SchemaError: a value that is not one of these.
    Source: Andrychowicz et al. 2017, "Hindsight Experience Replay", sections 3 and 4.5; "geometric": Eysenbach et al.
        2022, "Contrastive Learning as Goal-Conditioned Reinforcement Learning".
    """

    reward_fn: Callable[[Any, Any, Any], Any]
    goal: str = "observation.desired_goal"
    achieved: str = "observation.achieved_goal"
    reward: str = "reward"
    strategy: str = "future"
    prob: float = 0.8
    gamma: float = 0.99
    info: Iterable[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "info", (self.info,) if isinstance(self.info, str) else tuple(self.info))
        if not callable(self.reward_fn):
            raise SchemaError(
                f"reward_fn: got {self.reward_fn!r}, expected a function (achieved, goal, info) -> rewards"
            )
        if self.strategy not in STRATEGIES:
            raise SchemaError(f"strategy: got {self.strategy!r}, expected one of {', '.join(map(repr, STRATEGIES))}")
        check_number("prob", self.prob)
        check_number("gamma", self.gamma)
        if self.gamma in (0, 1):
            raise SchemaError(f"gamma: got {self.gamma!r}, expected a number between 0 and 1, and neither of them")

    def check(self, schema: Schema) -> None:
        """Raise SchemaError for fields that were not declared, or that cannot stand for one another."""
        for where in ("goal", "achieved", "reward"):
            known = schema.all if where == "goal" else schema.fields
            if getattr(self, where) not in known:
                raise schema.unknown(getattr(self, where), f"hindsight, {where}", known)
        for name in self.info:
            if name not in schema.fields:
                raise schema.unknown(name, "hindsight, info", schema.fields)
        goal, achieved = schema.all[self.goal], schema.fields[self.achieved]
        if (goal.shape, goal.dtype) != (achieved.shape, achieved.dtype):
            raise SchemaError(
                f"hindsight: {self.goal!r} is {goal.dtype} {goal.shape}, {self.achieved!r} is {achieved.dtype} "
                f"{achieved.shape}; what was achieved can be a goal only where both are alike"
            )
