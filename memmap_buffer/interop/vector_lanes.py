"""Where the recording of each of several environments stands: one lane for each, and the buffer that they share.

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
from memmap_buffer.interop.extra_json import read_names
from memmap_buffer.schema import Schema

if TYPE_CHECKING:
    from memmap_buffer.writing.episode import Episode

SUCCESS = ("success", "is_success")
INFO = "info"
GIVEN_SEED = "given.seed"


@dataclass
class Lane:
    """Where one environment's recording stands.

    `observation`: the one that its next action answers, as stored; None: nothing is recorded until it begins anew.
    `over`: its last step ended an episode.
    """

    observation: Any = None
    seed: int | None = None
    over: bool = False
    episode: Episode | None = None
    episode_return: float = 0.0


@dataclass
class Step:
    """What one step of one environment gave; `info` is that of the whole vector where `lane` is not None."""

    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    observation: Any
    info: Mapping[str, Any]
    lane: int | None = None

    def look_up(self, path: str) -> Any:
        """The info under a dotted path, or None."""
        return _look_up(self.info, path, self.lane)


class Recorder:
    """The buffer, and one lane for each environment. As a context manager it drops what is open on an exception."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        env: Any,
        num_envs: int,
        meta: Mapping[str, Any] | None,
        keep_partial: bool,
        *,
        owned: bool,
    ) -> None:
        self.buffer = buffer
        self.meta = dict(meta or {})
        self.lanes = [Lane() for _ in range(num_envs)]
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
        """The environment was reset: its next step is the first of an episode."""
        self.lanes[i] = Lane(deepcopy(encode_space(self._observation_space, observation)), seed)

    def ready(self) -> None:
        """Open an episode wherever one begins. Raises BufferFullError if nothing at all could be recorded."""
        full = None
        waiting = [lane for lane in self.lanes if lane.observation is not None and lane.episode is None]
        for lane in waiting:
            try:
                lane.episode = self.buffer.begin_episode(**self.meta)
            except BufferFullError as error:
                full = error
        if full is not None and all(lane.episode is None for lane in self.lanes):
            raise full
        for lane in waiting:
            if lane.episode is None:
                lane.observation = None

    def store(self, i: int, step: Step) -> None:
        """Record one step, and publish the episode if it ended."""
        lane = self.lanes[i]
        lane.over = bool(step.terminated or step.truncated)
        if lane.episode is None:
            return
        values = {
            "observation": lane.observation,
            "action": encode_space(self._action_space, step.action),
            "reward": step.reward,
            "terminated": bool(step.terminated),
            "truncated": bool(step.truncated),
        }
        schema = self.buffer.schema
        for name, flag in ((schema.terminated, step.terminated), (schema.truncated, step.truncated)):
            values |= {} if name is None else {name: np.full(schema.fields[name].shape, bool(flag))}
        infos = {name: value for name, path in self._infos.items() if (value := step.look_up(path)) is not None}
        lane.episode.store(**self._declared(values), **infos)
        lane.episode_return += float(step.reward)
        lane.observation = deepcopy(encode_space(self._observation_space, step.observation))
        if lane.over:
            self._publish(lane, step, cut=False)
            lane.observation = None
        elif lane.episode.length == self.buffer.max_timesteps:
            self._publish(lane, step, cut=True)

    def leave(self, which: Sequence[int]) -> None:
        """Environments are about to be reset or closed, whether or not their episodes are over."""
        for i in which:
            lane, self.lanes[i] = self.lanes[i], Lane()
            if lane.episode is not None and lane.episode.length and self._keep_partial:
                self._publish(lane, None, cut=True)
            elif lane.episode is not None:
                lane.episode.abort()

    def close(self) -> None:
        self.leave(range(len(self.lanes)))
        if self._owned:
            self.buffer.close()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            lanes, self.lanes = self.lanes, [Lane() for _ in self.lanes]
            for lane in lanes:
                if lane.episode is not None:
                    lane.episode.abort()

    def _publish(self, lane: Lane, step: Step | None, *, cut: bool) -> None:
        episode = lane.episode
        assert episode is not None
        final = self._declared({"observation": lane.observation}, self.buffer.schema.final_names)
        if final:
            episode.final(**final)
        meta: dict[str, Any] = {"episode_return": lane.episode_return, "episode_length": episode.length}
        told = [value for name in SUCCESS if step is not None and (value := step.look_up(name)) is not None]
        meta |= {"success": bool(told[0])} if told else {}
        meta |= {} if lane.seed is None else {"seed": lane.seed, GIVEN_SEED: True}
        episode.update({name: value for name, value in meta.items() if name in self.buffer.schema.meta_fields})
        episode.publish(cut=cut)
        lane.episode, lane.seed, lane.episode_return = None, None, 0.0

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


def _look_up(info: Mapping[str, Any], path: str, lane: int | None) -> Any:
    """The info under a dotted path, or None; of a vector (`lane`) only where the mask beside it says that it is set."""
    head, _, rest = path.partition(".")
    if path not in info and head not in info:
        return None
    key, rest = (path, "") if path in info else (head, rest)
    mask = None if lane is None else info.get(f"_{key}")
    if mask is not None and not mask[lane]:
        return None
    value = info[key]
    if rest:
        return _look_up(value, rest, lane) if isinstance(value, Mapping) else None
    return value if lane is None else value[lane]
