"""The recording of one or more environments into one buffer.

Owns when an episode is opened, cut, published or dropped; knows nothing of how Gymnasium resets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.environments import encode_space, schema_of, spaces_of
from memmap_buffer.errors import BufferFullError, SchemaError
from memmap_buffer.interop.episodes import read_names
from memmap_buffer.schema import Schema

if TYPE_CHECKING:
    from memmap_buffer.writing.episode import Episode

SUCCESS = ("success", "is_success")
INFO = "info"
GIVEN_SEED = "given.seed"


@dataclass
class EnvState:
    """The recording of one environment.

    Attributes:
        observation: the last one, encoded, to be stored with the next action; None: nothing is recorded until a reset.
        seed: of the reset that began the episode.
        over: whether the last step ended an episode.
        episode: the open one.
        episode_return: of the open episode.
    """

    observation: Any = None
    seed: int | None = None
    over: bool = False
    episode: Episode | None = None
    episode_return: float = 0.0


@dataclass
class Step:
    """The result of one step of one environment; `info` is that of the whole vector where `index` is not None."""

    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    observation: Any
    info: Mapping[str, Any]
    index: int | None = None

    def look_up(self, path: str) -> Any:
        """The info under a dotted path, or None."""
        return _look_up(self.info, path, self.index)


class EnvRecorder:
    """The buffer and the state of each environment; as a context manager it drops open episodes on an exception.

    Args:
        buffer: shared by the environments.
        env: one environment, or a vector of them.
        num_envs: how many they are.
        meta: values of further meta fields.
        keep_partial: whether episodes that are left before their end are published.
        owned: whether `close` closes the buffer.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        env: Any,
        num_envs: int,
        meta: Mapping[str, Any] | None,
        *,
        keep_partial: bool,
        owned: bool,
    ) -> None:
        self.buffer = buffer
        self.meta = dict(meta or {})
        self.states = [EnvState() for _ in range(num_envs)]
        self._observation_space, self._action_space = spaces_of(env)
        self._keep_partial = keep_partial
        self._owned = owned
        names = read_names(buffer)
        infos = [name for name in buffer.schema.fields if name.startswith(f"{INFO}.")]
        self._infos = {name: ".".join(map(str, names.path(name)[1:])) for name in infos}
        _check_fields(buffer.schema, schema_of(self._observation_space, self._action_space))

    def check_seed(self, seed: int | None) -> None:
        """Raise SchemaError before a reset by a seed that could not be stored when the episode ends."""
        field = self.buffer.schema.meta_fields.get("seed")
        if seed is not None and field is not None:
            try:
                field.encode(seed)
            except SchemaError as error:
                raise SchemaError(f"seed: {error}", field="seed") from None

    def begin(self, i: int, observation: Any, seed: int | None) -> None:
        """Note that the environment was reset: its next step is the first of an episode."""
        self.states[i] = EnvState(deepcopy(encode_space(self._observation_space, observation)), seed)

    def ready(self) -> None:
        """Open an episode for each environment that was reset. Raises BufferFullError if none is being recorded."""
        full = None
        waiting = [state for state in self.states if state.observation is not None and state.episode is None]
        for state in waiting:
            try:
                state.episode = self.buffer.begin_episode(**self.meta)
            except BufferFullError as error:
                full = error
        if full is not None and all(state.episode is None for state in self.states):
            raise full
        for state in waiting:
            if state.episode is None:
                state.observation = None

    def store(self, i: int, step: Step) -> None:
        """Record one step, and publish the episode if it ended."""
        state = self.states[i]
        state.over = bool(step.terminated or step.truncated)
        if state.episode is None:
            return
        values = {
            "observation": state.observation,
            "action": encode_space(self._action_space, step.action),
            "reward": step.reward,
            "terminated": bool(step.terminated),
            "truncated": bool(step.truncated),
        }
        schema = self.buffer.schema
        for name, flag in ((schema.terminated, step.terminated), (schema.truncated, step.truncated)):
            values |= {} if name is None else {name: np.full(schema.fields[name].shape, bool(flag))}
        infos = {name: value for name, path in self._infos.items() if (value := step.look_up(path)) is not None}
        state.episode.store(**self._declared(values), **infos)
        state.episode_return += float(step.reward)
        state.observation = deepcopy(encode_space(self._observation_space, step.observation))
        if state.over:
            self._publish(state, step, cut=False)
            state.observation = None
        elif state.episode.length == self.buffer.max_timesteps:
            self._publish(state, step, cut=True)

    def leave(self, which: Sequence[int]) -> None:
        """Publish or drop the open episodes of environments that are about to be reset or closed."""
        for i in which:
            state, self.states[i] = self.states[i], EnvState()
            if state.episode is not None and state.episode.length and self._keep_partial:
                self._publish(state, None, cut=True)
            elif state.episode is not None:
                state.episode.abort()

    def close(self) -> None:
        self.leave(range(len(self.states)))
        if self._owned:
            self.buffer.close()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            states, self.states = self.states, [EnvState() for _ in self.states]
            for state in states:
                if state.episode is not None:
                    state.episode.abort()

    def _publish(self, state: EnvState, step: Step | None, *, cut: bool) -> None:
        episode = state.episode
        assert episode is not None
        final = self._declared({"observation": state.observation}, self.buffer.schema.final_names)
        if final:
            episode.final(**final)
        meta: dict[str, Any] = {"episode_return": state.episode_return, "episode_length": episode.length}
        success = [value for name in SUCCESS if step is not None and (value := step.look_up(name)) is not None]
        meta |= {"success": bool(success[0])} if success else {}
        meta |= {} if state.seed is None else {"seed": state.seed, GIVEN_SEED: True}
        episode.update({name: value for name, value in meta.items() if name in self.buffer.schema.meta_fields})
        episode.publish(cut=cut)
        state.episode, state.seed, state.episode_return = None, None, 0.0

    def _declared(self, values: Mapping[str, Any], among: Any = None) -> dict[str, Any]:
        names = self.buffer.schema.fields if among is None else among
        return {name: value for name, value in self.buffer.schema.flatten(values).items() if name in names}


def _check_fields(schema: Schema, given: Mapping[str, Any]) -> None:
    known = {**Schema(given).fields, **dict.fromkeys(schema.ends)}
    for name, declared in schema.fields.items():
        if name not in known and not name.startswith(f"{INFO}.") and declared.default is None:
            raise SchemaError(
                f"field {name!r} of the buffer: the environment gives {', '.join(known)}, and it has no default; "
                "declare one, or leave the field out",
                field=name,
            )


def _look_up(info: Mapping[str, Any], path: str, index: int | None) -> Any:
    """The info under a dotted path, or None; of a vector the entry at `index`, if the info's mask says it is set."""
    head, _, rest = path.partition(".")
    if path not in info and head not in info:
        return None
    key, rest = (path, "") if path in info else (head, rest)
    mask = None if index is None else info.get(f"_{key}")
    if mask is not None and not mask[index]:
        return None
    value = info[key]
    if rest:
        return _look_up(value, rest, index) if isinstance(value, Mapping) else None
    return value if index is None else value[index]
