"""Environments that record themselves: `RecordEpisodes` wraps one, `RecordVectorEpisodes` several that run in step.

Each owns when an episode begins and ends, under every way in which Gymnasium resets; never how it is stored. The
environment's results reach the caller untouched. An observation is copied at once, because it is stored only with the
action that follows it, and an environment may write into the same array again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.environments import names_of, resets_by_a_step, spaces_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.env_recorder import GIVEN_SEED, INFO, EnvRecorder, Step
from memmap_buffer.interop.episodes import read_names, write_names
from memmap_buffer.names import Names
from memmap_buffer.schema import Field, Schema

with extra("gymnasium"):
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
    from gymnasium.vector.utils import iterate

if TYPE_CHECKING:
    from typing_extensions import Self

META: dict[str, Any] = {
    "episode_return": "float64",
    "episode_length": "int64",
    "seed": Field("uint64", default=0),  # Minari's own have 64 bits
    GIVEN_SEED: Field("bool", default=False),
    "success": Field("int8", default=-1),
}
Place = str | PathLike[str] | ReplayBuffer


class _Recorded:
    """The properties that both wrappers have."""

    _recorder: EnvRecorder

    @property
    def buffer(self) -> ReplayBuffer:
        return self._recorder.buffer

    @property
    def meta(self) -> dict[str, Any]:
        """The values of further meta fields that the next episodes begin with."""
        return self._recorder.meta


class RecordEpisodes(_Recorded, gymnasium.Wrapper[Any, Any, Any, Any]):
    """Record every episode of an environment, with its final observation.

    An episode is published when it ends. One that is left by `reset` or `close` before that is dropped, or published
    as cut short with `keep_partial`; one in which `step` raised is dropped, as a step of it is missing. An episode
    longer than the buffer's `max_timesteps` becomes several, all but the last flagged as cut short.

    Meta fields, if the buffer declares them: `episode_return`, `episode_length`, `seed` (of the `reset` that began the
    episode) and `given.seed` (false: there was none), `success` (1 or 0 if the last info has "success" or
    "is_success", else -1).

    A key of a Dict space or of `infos` that is no identifier is changed into one, "bottom burner" into `bottom_burner`.

    Args:
        env: the environment; one that is wrapped in `Autoreset` is recorded right, too.
        buffer: a folder, where a buffer of the environment's spaces is made or continued, or an open buffer, whose
            other fields must have defaults.
        infos: the entries of `info` to record, name -> any spelling of a field; they become `info.<name>`. Nested
            dicts for nested infos. Where a step's info lacks an entry, the field's default is stored.
        meta: values of further meta fields, for every episode; `recorder.meta` may be changed between episodes.
        keep_partial: whether to publish episodes that are left before their end.
        options: of `ReplayBuffer.for_env`, where `buffer` is a folder: `max_episodes` or `capacity` must be given;
            `max_timesteps`, too, where there is no capacity and the environment's spec names no limit. `meta_fields`
            and `fields` are declared in addition.

    Raises:
        SchemaError: an option is missing or not allowed, or the environment does not give a field of the buffer.
        BufferFullError: from `step`, where no episode can be begun.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        buffer: Place,
        *,
        infos: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        keep_partial: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(env)
        opened = _open(buffer, env, infos, meta, options)
        self._recorder = EnvRecorder(opened, env, 1, meta, keep_partial=keep_partial, owned=opened is not buffer)
        self._autoreset = resets_by_a_step(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As the environment's.

        Raises:
            SchemaError: the buffer cannot hold the seed; the environment was not reset.
        """
        self._recorder.check_seed(seed)
        self._recorder.leave([0])
        observation, info = self.env.reset(seed=seed, options=options)
        self._recorder.begin(0, observation, seed)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As the environment's.

        Raises:
            BufferFullError: no episode can be begun; the environment was not stepped.
        """
        recorder = self._recorder
        recorder.ready()
        with recorder:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if self._autoreset and recorder.states[0].over:
                recorder.begin(0, observation, None)
            else:
                recorder.store(0, Step(action, reward, terminated, truncated, observation, info))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment, and the buffer if it was given as a folder."""
        self._recorder.close()
        super().close()


class RecordVectorEpisodes(_Recorded, VectorWrapper[Any, Any, Any, Any, Any]):
    """Record every episode of a vector of environments.

    The published episodes are those that each environment would have given alone, in each autoreset mode of Gymnasium.
    In a buffer that is not circular, environments for whose next episode there is no room go on unrecorded.

    Args:
        env: the vector environment.
        buffer: as for `RecordEpisodes`.
        infos: as for `RecordEpisodes`.
        meta: as for `RecordEpisodes`.
        keep_partial: as for `RecordEpisodes`.
        autoreset_mode: default: that in the environment's `metadata`.
        options: as for `RecordEpisodes`.

    Raises:
        SchemaError: as `RecordEpisodes`, or no autoreset mode is known.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        buffer: Place,
        *,
        infos: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        keep_partial: bool = False,
        autoreset_mode: AutoresetMode | None = None,
        **options: Any,
    ) -> None:
        super().__init__(env)
        self._mode = autoreset_mode or env.metadata.get("autoreset_mode")
        if not isinstance(self._mode, AutoresetMode):
            raise SchemaError(
                f"autoreset_mode: got {self._mode!r} in the metadata of {env}, expected a gymnasium.vector."
                "AutoresetMode; pass autoreset_mode=…"
            )
        opened, count = _open(buffer, env, infos, meta, options), env.num_envs
        self._recorder = EnvRecorder(opened, env, count, meta, keep_partial=keep_partial, owned=opened is not buffer)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As the environment's; `options["reset_mask"]` resets some of them.

        Raises:
            SchemaError: the buffer cannot hold a seed; no environment was reset.
        """
        mask = (options or {}).get("reset_mask")  # the environment takes it out of the options
        which = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        for i in which:
            self._recorder.check_seed(_seed_of(seed, i))
        self._recorder.leave(which)
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        each = list(iterate(self.observation_space, observations))
        for i in which:
            self._recorder.begin(i, each[i], _seed_of(seed, i))
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment's.

        Raises:
            BufferFullError: no episode can be begun; the environment was not stepped.
        """
        self._recorder.ready()
        with self._recorder:
            result = self.env.step(actions)
            self._record(actions, *result)
        return result

    def _record(
        self, actions: Any, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: dict[str, Any]
    ) -> None:
        recorder, ends = self._recorder, np.logical_or(terminations, truncations)
        each = zip(iterate(self.action_space, actions), iterate(self.observation_space, observations), strict=True)
        for i, (action, observation) in enumerate(each):
            if self._mode is AutoresetMode.NEXT_STEP and recorder.states[i].over:
                recorder.begin(i, observation, None)
                continue
            replaced = self._mode is AutoresetMode.SAME_STEP and ends[i]
            last = infos["final_obs"][i] if replaced else observation
            info = infos.get("final_info", {}) if replaced else infos
            recorder.store(i, Step(action, rewards[i], terminations[i], truncations[i], last, info, i))
            if replaced:
                recorder.begin(i, observation, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and the buffer if it was given as a folder."""
        self._recorder.close()
        super().close(**kwargs)


def _open(
    place: Place,
    env: Any,
    infos: Mapping[str, Any] | None,
    meta: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> ReplayBuffer:
    names = names_of(*spaces_of(env))
    if isinstance(place, ReplayBuffer):
        if options or infos:
            given = ", ".join([*options, *(["infos"] if infos else [])])
            raise SchemaError(f"{given}: the buffer is open already, and says this itself; drop them, or give a folder")
        _store_names(place, names)
        return place
    own = Schema.from_example(meta).fields if meta else {}
    meta_fields = {**META, **own, **(options.pop("meta_fields", None) or {})}
    fields = {**(options.pop("fields", None) or {}), **(names.ours({INFO: infos}) if infos else {})}
    buffer = ReplayBuffer.for_env(env, place, fields=fields, meta_fields=meta_fields, **options)
    _store_names(buffer, names)
    return buffer


def _store_names(buffer: ReplayBuffer, names: Names) -> None:
    """Add the changed keys to those that are stored already."""
    stored = read_names(buffer)
    stored.changed |= names.changed
    write_names(buffer, stored)


def _seed_of(seed: int | Sequence[int | None] | None, i: int) -> int | None:
    """The seed that environment `i` of several is reset with: Gymnasium counts on from a single one."""
    if seed is None:
        return None
    return int(seed) + i if isinstance(seed, (int, np.integer)) else seed[i]
