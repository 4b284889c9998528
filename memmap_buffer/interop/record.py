"""Environments that record themselves: `RecordEpisodes` wraps one, `RecordVectorEpisodes` several that run together.

Each owns when an episode begins and ends, under every way in which Gymnasium resets; never how it is stored. What comes
out of the environment goes on to the caller untouched. An observation is copied when it is seen, as it is stored only
with the action that follows it, and an environment may write into the same array again.
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
from memmap_buffer.interop.extra_json import read_names, write_names
from memmap_buffer.interop.vector_lanes import GIVEN_SEED, INFO, Recorder, Step
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


class RecordEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Record every episode of an environment, with its final observation.

    An episode is published when it ends. One that is left by `reset` or `close` before that is dropped, or published
    as cut short with `keep_partial`; one in which `step` raised is dropped, as a step of it is missing. An episode
    longer than the buffer's `max_timesteps` becomes several, all but the last flagged as cut short.

    Meta fields, as far as the buffer declares them: `episode_return`, `episode_length`, `seed` (of the `reset` that
    began the episode) and `given.seed` (false: there was none), `success` (1 or 0 if the last info has "success" or
    "is_success", else -1).

    A key of a Dict space or of `infos` that is no identifier is changed into one, "bottom burner" into `bottom_burner`.

    Args:
        env: the environment; one that is wrapped in `Autoreset` is recorded right, too.
        buffer: a folder, where a buffer of the environment's spaces is made or continued, or an open buffer, of which
            every field must be one that is recorded here or have a default.
        infos: which entries of `info` to record, name -> any spelling of a field; they become `info.<name>`. Nested
            dicts for nested infos. An entry that a step's info lacks takes the field's default.
        meta: values of further meta fields, for every episode; `recorder.meta` may be changed between episodes.
        keep_partial: see above.
        options: of `ReplayBuffer.for_env`, where `buffer` is a folder: `max_episodes` must be given, `max_timesteps`
            where the environment's spec names no limit. `meta_fields` and `fields` are declared beside those above.

    Raises: SchemaError: an option is missing or too many, or a field of the buffer is none of the environment's.
        From `step`: BufferFullError: no episode can be begun.
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
        self._recorder = Recorder(opened, env, 1, meta, keep_partial, owned=opened is not buffer)
        self._autoreset = resets_by_a_step(env)

    @property
    def buffer(self) -> ReplayBuffer:
        return self._recorder.buffer

    @property
    def meta(self) -> dict[str, Any]:
        """The values of further meta fields that the next episode begins with."""
        return self._recorder.meta

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As the environment's. Raises SchemaError, before anything is done: the buffer cannot hold the seed."""
        self._recorder.check_seed(seed)
        self._recorder.leave([0])
        observation, info = self.env.reset(seed=seed, options=options)
        self._recorder.begin(0, observation, seed)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As the environment's. Raises BufferFullError, before anything is done."""
        recorder = self._recorder
        recorder.ready()
        with recorder:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if self._autoreset and recorder.lanes[0].over:
                recorder.begin(0, observation, None)
            else:
                recorder.store(0, Step(action, reward, terminated, truncated, observation, info))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment, and the buffer if it was given as a folder."""
        self._recorder.close()
        super().close()


class RecordVectorEpisodes(VectorWrapper[Any, Any, Any, Any, Any]):
    """Record every episode of environments that run together; see `RecordEpisodes` for the arguments.

    Each autoreset mode of Gymnasium is recorded as it is meant: what is published is what each environment would have
    done alone. In a buffer that is not circular, environments for whose next episode there is no room go on unrecorded.

    Args: autoreset_mode: default: what the environment's `metadata` says.
    Raises: SchemaError: it says nothing.
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
        opened = _open(buffer, env, infos, meta, options)
        self._recorder = Recorder(opened, env, env.num_envs, meta, keep_partial, owned=opened is not buffer)

    @property
    def buffer(self) -> ReplayBuffer:
        return self._recorder.buffer

    @property
    def meta(self) -> dict[str, Any]:
        """The values of further meta fields that the next episodes begin with."""
        return self._recorder.meta

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As the environment's, also of some by `options["reset_mask"]`."""
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
        """As the environment's. Raises BufferFullError, before anything is done."""
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
            if self._mode is AutoresetMode.NEXT_STEP and recorder.lanes[i].over:
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
        _keep(place, names)
        return place
    own = Schema.from_example(meta).fields if meta else {}
    meta_fields = {**META, **own, **(options.pop("meta_fields", None) or {})}
    fields = {**(options.pop("fields", None) or {}), **(names.ours({INFO: infos}) if infos else {})}
    buffer = ReplayBuffer.for_env(env, place, fields=fields, meta_fields=meta_fields, **options)
    _keep(buffer, names)
    return buffer


def _keep(buffer: ReplayBuffer, names: Names) -> None:
    """Keep the keys that were changed beside those that are kept already."""
    kept = read_names(buffer)
    kept.changed |= names.changed
    write_names(buffer, kept)


def _seed_of(seed: int | Sequence[int | None] | None, i: int) -> int | None:
    """The seed that environment `i` of several is reset with: Gymnasium counts on from a single one."""
    if seed is None:
        return None
    return int(seed) + i if isinstance(seed, (int, np.integer)) else seed[i]
