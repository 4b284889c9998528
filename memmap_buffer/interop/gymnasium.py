"""Gymnasium's spaces as fields, and their values as `store` takes them. Knows no buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.interop.extras import extra
from memmap_buffer.schema import Field

with extra("gymnasium"):
    from gymnasium import Space, Wrapper, spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.wrappers import Autoreset

TIME_LIMIT = "_max_episode_steps"  # of `TimeLimit`


def schema_of(observation_space: Space[Any], action_space: Space[Any]) -> dict[str, Any]:
    """The fields of one environment's timesteps, as `ReplayBuffer` and `Schema` take them.

    Box, Discrete, MultiDiscrete and MultiBinary keep their shape and dtype, Text(n) becomes "U<n>"; Dict and Tuple are
    nested, the members of a Tuple named `item0`, `item1`, …

    Args: observation_space, action_space: of one environment, of a vector environment its `single_…_space`.
    Returns: `observation` (with `final`), `action`, `reward`, `terminated`, `truncated`.
    Raises: SchemaError: a space without a fixed size (Graph, Sequence, OneOf), or a key that is no identifier.
    """
    return {
        "observation": _fields("observation", observation_space, final=True),
        "action": _fields("action", action_space, final=False),
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
    }


def encode_space(space: Space[Any], value: Any) -> Any:
    """A value of a space as `store` takes it: Dict and Tuple as nested dicts, anything else as it is.

    Args: space: of the value, also the batched one of a vector environment. value: an element of it.
    """
    if isinstance(space, spaces.Dict):
        return {key: encode_space(member, value[key]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and not _is_text(space):
        return {f"item{i}": encode_space(member, value[i]) for i, member in enumerate(space.spaces)}
    return value


def spaces_of(env: Any) -> tuple[Space[Any], Space[Any]]:
    """The observation and action space of one environment, or of one among those of a vector environment."""
    first, second = (
        getattr(env, f"single_{name}", None) or getattr(env, name, None)
        for name in ("observation_space", "action_space")
    )
    if not isinstance(first, Space) or not isinstance(second, Space):
        raise SchemaError(f"env: got {env!r}, expected a Gymnasium environment with observation_space and action_space")
    return first, second


def max_steps_of(env: Any) -> int | None:
    """The time limit of an environment, or the longest among those of a vector environment; None: one has none."""
    limit: int | None = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    if limit is not None:
        return limit
    call = getattr(env.unwrapped, "call", None) if isinstance(env, VectorEnv) else None
    if call is not None:  # the specifications of members in other processes may not pickle; these answers do
        limits = call("get_wrapper_attr", TIME_LIMIT) if all(call("has_wrapper_attr", TIME_LIMIT)) else [None]
        return None if None in limits else max(limits)
    own = getattr(env, "has_wrapper_attr", None)
    return env.get_wrapper_attr(TIME_LIMIT) if own is not None and own(TIME_LIMIT) else None


def resets_by_a_step(env: Any) -> bool:
    """Whether the step after an episode's end is the reset, its action ignored: Gymnasium's `NEXT_STEP`."""
    if isinstance(env, VectorEnv):
        return env.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP
    while isinstance(env, Wrapper):
        if isinstance(env, Autoreset):
            return True
        env = env.env
    return False


def _is_text(space: spaces.Tuple[Any]) -> bool:
    """Whether it is what batching made of a Text space: one string an environment is a column, not a group."""
    return len(space.spaces) > 0 and all(isinstance(member, spaces.Text) for member in space.spaces)


def _fields(name: str, space: Space[Any], *, final: bool) -> Any:
    members: dict[Any, Space[Any]] | None = None
    if isinstance(space, spaces.Dict):
        members = dict(space.spaces)
    elif isinstance(space, spaces.Tuple):
        members = {f"item{i}": member for i, member in enumerate(space.spaces)}
    if members is not None:
        return {_key(name, key): _fields(f"{name}.{key}", member, final=final) for key, member in members.items()}
    if isinstance(space, spaces.Text):
        return Field(f"U{space.max_length}", (), final=final)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return Field(np.dtype(space.dtype), tuple(space.shape or ()), final=final)
    raise SchemaError(
        f"{name}: got {space}, expected Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple; "
        "give it a fixed size by an observation or action wrapper",
        field=name,
    )


def _key(name: str, key: Any) -> str:
    if not isinstance(key, str) or "." in key or not key.isidentifier():
        raise SchemaError(
            f"{name}: got the key {key!r} of a Dict space, expected an identifier; rename it by an observation wrapper",
            field=name,
        )
    return key
