"""Declarations of fields from Gymnasium's spaces, and values of spaces in the form `store` takes. Knows no buffer."""

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
TIME_LIMIT = "_max_episode_steps"  # the attribute of Gymnasium's wrapper `TimeLimit`


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
        codec: of observations that are images: spaces of uint8 with two axes or more.
        dtype: in which spaces of floating-point numbers are stored, such as "float32"; None: the dtype of each space.

    Returns:
        The declarations of `observation` (with `final`), `action`, `reward`, `terminated`, `truncated`.

    Raises:
        SchemaError: a space has no fixed size (Graph, Sequence, OneOf), or `dtype` is no floating-point dtype.
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
        space: the space of the value; for the values of a vector environment its batched space.
        value: an element of the space.
    """
    if isinstance(space, spaces.Dict):
        parts = _parts(tuple(space.spaces))
        return {parts[key]: encode_space(member, value[key]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and not _is_text(space):
        return {f"item{i}": encode_space(member, value[i]) for i, member in enumerate(space.spaces)}
    return value


def decode_space(space: Space[Any], tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """A value of a space from the form that `store` takes: the reverse of `encode_space`.

    Args:
        space: the space of the value.
        tree: nested dicts for Dict and Tuple spaces, as `encode_space` gives them.
        leaf: is applied to the value of every space that is no Dict or Tuple.
    """
    if isinstance(space, spaces.Dict):
        parts = _parts(tuple(space.spaces))
        return {key: decode_space(member, tree[parts[key]], leaf) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(decode_space(member, tree[f"item{i}"], leaf) for i, member in enumerate(space.spaces))
    return leaf(tree)


def names_of(observation_space: Space[Any], action_space: Space[Any]) -> Names:
    """The `Names` of the spaces' keys: which keys `schema_of` changes, and into which names.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
    """
    names = Names()
    names.ours({"observation": _members(observation_space), "action": _members(action_space)})
    return names


def spaces_of(env: Any) -> tuple[Space[Any], Space[Any]]:
    """(observation space, action space) of one environment, or of one member of a vector environment.

    Args:
        env: a Gymnasium environment, or a vector environment.

    Raises:
        SchemaError: `env` is no Gymnasium environment.
    """
    first, second = (
        getattr(env, f"single_{name}", None) or getattr(env, name, None)
        for name in ("observation_space", "action_space")
    )
    if not isinstance(first, Space) or not isinstance(second, Space):
        raise SchemaError(f"env: got {env!r}, expected a Gymnasium environment with observation_space and action_space")
    return first, second


def count_of(env: Any) -> int:
    """How many environments a vector environment has; 1 for any other environment."""
    return env.num_envs if isinstance(env, VectorEnv) else 1


def max_steps_of(env: Any) -> int | None:
    """The time limit of an environment in steps, or the longest of a vector environment's members; None: no limit."""
    limit: int | None = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    if limit is not None:
        return limit
    call = getattr(env.unwrapped, "call", None) if isinstance(env, VectorEnv) else None
    if call is not None:  # the `spec` of a member in another process may not pickle; the answers to these calls do
        limits = call("get_wrapper_attr", TIME_LIMIT) if all(call("has_wrapper_attr", TIME_LIMIT)) else [None]
        return None if None in limits else max(limits)
    own = getattr(env, "has_wrapper_attr", None)
    return env.get_wrapper_attr(TIME_LIMIT) if own is not None and own(TIME_LIMIT) else None


def resets_by_a_step(env: Any) -> bool:
    """Whether the step after the end of an episode resets, and ignores its action: Gymnasium's `NEXT_STEP`.

    Args:
        env: a Gymnasium environment, or a vector environment.
    """
    if isinstance(env, VectorEnv):
        return env.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP
    while isinstance(env, Wrapper):
        if isinstance(env, Autoreset):
            return True
        env = env.env
    return False


def resets_at_once(env: Any) -> bool:
    """Whether the step that ends an episode returns the observation after the reset: Gymnasium's `SAME_STEP`."""
    return isinstance(env, VectorEnv) and env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP


def _is_text(space: spaces.Tuple[Any]) -> bool:
    """Whether a space is a batched Text space: its strings, one an environment, are a column, not a group of fields."""
    return len(space.spaces) > 0 and all(isinstance(member, spaces.Text) for member in space.spaces)


def image_codec(dtype: Any, shape: tuple[int, ...], codec: Any) -> Any:
    """The codec of a field: `codec` if the field is an image, uint8 with two axes or more; else None.

    Args:
        dtype: of the field.
        shape: of the field.
        codec: as for `Field`.
    """
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
