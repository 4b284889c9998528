"""Gymnasium's spaces as fields, and their values as `store` takes them. Knows no buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.names import Names, parts_of
from memmap_buffer.schema import Field

with extra("gymnasium"):
    from gymnasium import Space, Wrapper, spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.wrappers import Autoreset

FLOATS = ("float16", "bfloat16", "float32", "float64")
TIME_LIMIT = "_max_episode_steps"  # of `TimeLimit`


def schema_of(
    observation_space: Space[Any], action_space: Space[Any], codec: Any = None, dtype: Any = None
) -> dict[str, Any]:
    """The fields of one environment's timesteps, as `ReplayBuffer` and `Schema` take them.

    Box, Discrete, MultiDiscrete and MultiBinary keep their shape and dtype, Text(n) becomes "U<n>"; Dict and Tuple are
    nested, the members of a Tuple named `item0`, `item1`, … A key of a Dict that is no identifier is changed into one,
    "bottom burner" into `bottom_burner`; `encode_space` does the same with the values.

    Args:
        observation_space: of one environment; of a vector environment `single_observation_space`.
        action_space: of one environment; of a vector environment `single_action_space`.
        codec: of images: spaces of uint8 with two axes or more.
        dtype: of floating-point numbers, such as "float32"; default: as the space says.

    Returns:
        `observation` (with `final`), `action`, `reward`, `terminated`, `truncated`.

    Raises:
        SchemaError: a space has no fixed size (Graph, Sequence, OneOf), or `dtype` is of no floating-point numbers.
    """
    if dtype is not None and Field(dtype).dtype not in FLOATS:
        raise SchemaError(f"dtype: got {dtype!r}, expected one of {', '.join(FLOATS)}")
    members = Names().ours({"observation": _members(observation_space), "action": _members(action_space)})
    return {
        "observation": _fields("observation", members["observation"], dtype, final=True, codec=codec),
        "action": _fields("action", members["action"], dtype, final=False),
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
    }


def encode_space(space: Space[Any], value: Any) -> Any:
    """A value of a space as `store` takes it: Dict and Tuple as nested dicts, any other as it is.

    Args:
        space: of the value, also the batched one of a vector environment.
        value: an element of the space.
    """
    if isinstance(space, spaces.Dict):
        parts = _parts(tuple(space.spaces))
        return {parts[key]: encode_space(member, value[key]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and not _is_text(space):
        return {f"item{i}": encode_space(member, value[i]) for i, member in enumerate(space.spaces)}
    return value


def decode_space(space: Space[Any], tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """The reverse of `encode_space`; `leaf` is applied to the values of all spaces but Dict and Tuple."""
    if isinstance(space, spaces.Dict):
        parts = _parts(tuple(space.spaces))
        return {key: decode_space(member, tree[parts[key]], leaf) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(decode_space(member, tree[f"item{i}"], leaf) for i, member in enumerate(space.spaces))
    return leaf(tree)


def names_of(observation_space: Space[Any], action_space: Space[Any]) -> Names:
    """The keys of the spaces that `schema_of` changes."""
    names = Names()
    names.ours({"observation": _members(observation_space), "action": _members(action_space)})
    return names


def spaces_of(env: Any) -> tuple[Space[Any], Space[Any]]:
    """The observation and action space of one environment, or of one among those of a vector environment."""
    first, second = (
        getattr(env, f"single_{name}", None) or getattr(env, name, None)
        for name in ("observation_space", "action_space")
    )
    if not isinstance(first, Space) or not isinstance(second, Space):
        raise SchemaError(f"env: got {env!r}, expected a Gymnasium environment with observation_space and action_space")
    return first, second


def count_of(env: Any) -> int:
    """How many environments a vector environment has; 1 of any other."""
    return env.num_envs if isinstance(env, VectorEnv) else 1


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


def resets_at_once(env: Any) -> bool:
    """Whether the step that ends an episode gives the observation of the reset: Gymnasium's `SAME_STEP`."""
    return isinstance(env, VectorEnv) and env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP


def _is_text(space: spaces.Tuple[Any]) -> bool:
    """Whether batching made it from a Text space: one string for each environment is a column, not a group."""
    return len(space.spaces) > 0 and all(isinstance(member, spaces.Text) for member in space.spaces)


def image_codec(dtype: Any, shape: tuple[int, ...], codec: Any) -> Any:
    """The codec of a field of observations: that of images, where it is one."""
    return codec if dtype == np.uint8 and len(shape) > 1 else None


def _fields(name: str, space: Any, dtype: Any, *, final: bool, codec: Any = None) -> Any:
    if isinstance(space, dict):
        return {
            part: _fields(f"{name}.{part}", member, dtype, final=final, codec=codec) for part, member in space.items()
        }
    if isinstance(space, spaces.Text):
        return Field(f"U{space.max_length}", (), final=final)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        shape, own = tuple(space.shape or ()), np.dtype(space.dtype)
        stored = dtype if dtype is not None and own.kind == "f" else own
        return Field(stored, shape, final=final, codec=image_codec(own, shape, codec))
    raise SchemaError(
        f"{name}: got {space}, expected Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple; "
        "give it a fixed size by an observation or action wrapper",
        field=name,
    )


def _members(space: Space[Any]) -> Any:
    """Dict and Tuple spaces as nested dicts of their members; any other space as it is."""
    if isinstance(space, spaces.Dict):
        return {key: _members(member) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {f"item{i}": _members(member) for i, member in enumerate(space.spaces)}
    return space


@cache  # called at every step; an environment has few spaces
def _parts(keys: tuple[Any, ...]) -> dict[Any, str]:
    return parts_of(keys)
