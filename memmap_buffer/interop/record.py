"""Environments that record themselves: `RecordEpisodes` wraps one, `RecordVectorEpisodes` a vector of them.

A wrapper decides when an episode begins and ends, under every way in which Gymnasium resets; never how it is stored.
The environment's results reach the caller untouched. An observation is copied at once, because it is stored only with
the action that follows it, and an environment may write into the same array again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import BufferFullError, Field, ReplayBuffer, Schema, SchemaError
from memmap_buffer.adapters import (
    AnyPath,
    Episode,
    encode_space,
    extra,
    names_of,
    resets_by_a_step,
    schema_of,
    spaces_of,
    to_numpy,
)
from memmap_buffer.interop.episodes import read_names, write_names

with extra("gymnasium"):
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

if TYPE_CHECKING:
    from typing_extensions import Self

    AnyVectorWrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    AnyVectorWrapper = VectorWrapper  # before Gymnasium 1.4 no generic class

SUCCESS = ("success", "is_success")
INFO = "info"
GIVEN_SEED = "given.seed"
META: dict[str, Any] = {
    "episode_return": "float64",
    "episode_length": "int64",
    "seed": Field("uint64", default=0),  # Minari's own have 64 bits
    GIVEN_SEED: Field("bool", default=False),
    "success": Field("int8", default=-1),
}
Place = AnyPath | ReplayBuffer
Row = dict[str, Any]


@dataclass
class _State:
    """The recording of one environment.

    Attributes:
        observation: the last observation, as `_Recorded.row` gives it, to be stored with the next action; None:
            nothing is recorded until a reset.
        seed: of the reset that began the episode; None: it had none.
        over: whether the last step ended an episode.
        episode: the open episode; None: none is open.
        episode_return: of the open episode.
    """

    observation: Row | None = None
    seed: int | None = None
    over: bool = False
    episode: Episode | None = None
    episode_return: float = 0.0


class _Recorded:
    """The part of both wrappers that records: one environment is a vector of one whose values have no axis for it.

    Attributes:
        env: the environment, or the vector of environments.
        buffer: the buffer.
        meta: values of meta fields that the next episodes begin with; may be changed.
    """

    env: Any

    def _open(
        self,
        place: Place,
        infos: Mapping[str, Any] | None,
        meta: Mapping[str, Any] | None,
        options: dict[str, Any],
        *,
        keep_partial: bool,
        mode: AutoresetMode,
    ) -> None:
        """Open the buffer. `mode`: how the environments reset; the other arguments are those of `RecordEpisodes`.

        Its folder gets the changed keys of spaces and infos.
        """
        spaces = spaces_of(self.env)
        names, self._owned = names_of(*spaces), not isinstance(place, ReplayBuffer)
        if isinstance(place, ReplayBuffer):
            if options or infos:
                listed = ", ".join([*options, *(["infos"] if infos else [])])
                raise SchemaError(
                    f"{listed}: the buffer is open already, and says this itself; drop them, or give a folder"
                )
            self.buffer = place
        else:
            own = Schema.from_example(meta).fields if meta else {}
            meta_fields = {**META, **own, **(options.pop("meta_fields", None) or {})}
            fields = {**(options.pop("fields", None) or {}), **(names.ours({INFO: infos}) if infos else {})}
            self.buffer = ReplayBuffer.for_env(self.env, place, fields=fields, meta_fields=meta_fields, **options)
        stored = read_names(self.buffer)
        stored.changed |= names.changed
        write_names(self.buffer, stored)
        _check_fields(self.buffer.schema, schema_of(*spaces))
        self.meta = dict(meta or {})
        self._keep_partial, self._mode = keep_partial, mode
        self._is_vector = isinstance(self.env, VectorEnv)
        self._states = [_State() for _ in range(self.env.num_envs if self._is_vector else 1)]
        of_infos = [name for name in self.buffer.schema.fields if name.startswith(f"{INFO}.")]
        self._infos = {name: stored.key(name).removeprefix(f"{INFO}.") for name in of_infos}

    def _row(self, group: str, space: Any, value: Any) -> Row:
        """The fields of an observation, or of an action, that the buffer has: dotted name -> a copy of the value."""
        schema = self.buffer.schema
        values = schema.flatten({group: encode_space(space, value)})
        return {name: np.array(to_numpy(value))[()] for name, value in values.items() if name in schema.fields}

    def _rows(self, group: str, values: Any) -> list[Row]:
        """`_row` for each environment; `values` are what the vector of them gives or takes."""
        columns = self._row(group, getattr(self.env, f"{group}_space"), values)
        if not self._is_vector:
            return [columns]
        return [{name: column[i] for name, column in columns.items()} for i in range(len(self._states))]

    def _reset(self, which: Sequence[int], seed: Any, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        seeds = [_seed_of(seed, i) for i in which]
        for each in seeds:
            self._check_seed(each)
        self._leave(which)
        observations, infos = self.env.reset(seed=seed, options=options)
        rows = self._rows("observation", observations)
        for i, each in zip(which, seeds, strict=True):
            self._states[i] = _State(rows[i], each)
        return observations, infos

    def _check_seed(self, seed: int | None) -> None:
        """Raise SchemaError if the buffer cannot hold the seed, which is stored only when the episode ends."""
        field = self.buffer.schema.meta_fields.get("seed")
        if seed is not None and field is not None:
            try:
                field.encode(seed)
            except SchemaError as error:
                raise SchemaError(f"seed: {error}", field="seed") from None

    def _step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments. Each that was reset gets an open episode before; an exception drops them all."""
        self._begin_episodes()
        try:
            observations, rewards, terminations, truncations, infos = self.env.step(actions)
            self._record(actions, observations, rewards, terminations, truncations, infos)
        except BaseException:
            states, self._states = self._states, [_State() for _ in self._states]
            for state in states:
                if state.episode is not None:
                    state.episode.abort()
            raise
        return observations, rewards, terminations, truncations, infos

    def _begin_episodes(self) -> None:
        full = None
        for state in self._states:
            if state.observation is not None and state.episode is None:
                try:
                    state.episode = self.buffer.begin_episode(**self.meta)
                except BufferFullError as error:
                    full = error
        if full is not None and all(state.episode is None for state in self._states):
            raise full
        for state in self._states:
            if state.episode is None:
                state.observation = None

    def _record(
        self, actions: Any, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: dict[str, Any]
    ) -> None:
        following = self._rows("observation", observations)
        begun = [self._mode is AutoresetMode.NEXT_STEP and state.over for state in self._states]
        taken = [] if all(begun) else self._rows("action", actions)
        if not self._is_vector:
            rewards, terminations, truncations = [rewards], [terminations], [truncations]
        for i, row in enumerate(following):
            if begun[i]:
                self._states[i] = _State(row)
                continue
            ends, last, info = {"terminated": bool(terminations[i]), "truncated": bool(truncations[i])}, row, infos
            replaced = self._mode is AutoresetMode.SAME_STEP and any(ends.values())
            if replaced:
                last = self._row("observation", self.env.single_observation_space, infos["final_obs"][i])
                info = infos.get("final_info", {})
            self._store(i, taken[i], last, rewards[i], ends, info)
            if replaced:
                self._states[i] = _State(row)

    def _store(
        self, i: int, action: Row, observation: Row, reward: Any, ends: dict[str, bool], info: Mapping[str, Any]
    ) -> None:
        """Record one step, and publish the episode if it ended."""
        state, schema, index = self._states[i], self.buffer.schema, i if self._is_vector else None
        state.over = any(ends.values())
        if state.episode is None:
            return
        assert state.observation is not None
        values = {**state.observation, **action, "reward": reward}
        for kind, flag in ends.items():
            name = getattr(schema, kind) or kind
            values |= {kind: flag, name: flag or values.get(name, False)}  # one field may be declared for both
        values = {name: value for name, value in values.items() if name in schema.fields}
        infos = {name: _look_up(info, path, index) for name, path in self._infos.items()}
        state.episode.store(**values, **{name: value for name, value in infos.items() if value is not None})
        state.episode_return += float(reward)
        state.observation = observation
        if state.over or state.episode.length == self.buffer.max_timesteps:
            flags = (value for name in SUCCESS if (value := _look_up(info, name, index)) is not None)
            self._publish(state, success=next(flags, None), cut=not state.over)
        if state.over:
            state.observation = None

    def _leave(self, which: Sequence[int]) -> None:
        """Publish or drop the open episodes of environments that are about to be reset or closed."""
        for i in which:
            state, self._states[i] = self._states[i], _State()
            if state.episode is not None and state.episode.length and self._keep_partial:
                self._publish(state, cut=True)
            elif state.episode is not None:
                state.episode.abort()

    def _publish(self, state: _State, *, success: Any = None, cut: bool) -> None:
        """Publish the open episode. `success`: whether the last info says so; None: it says nothing."""
        episode, final_names = state.episode, self.buffer.schema.final_names
        assert episode is not None and state.observation is not None
        if final_names:
            episode.final(**{name: value for name, value in state.observation.items() if name in final_names})
        meta: dict[str, Any] = {"episode_return": state.episode_return, "episode_length": episode.length}
        meta |= {} if success is None else {"success": bool(success)}
        meta |= {} if state.seed is None else {"seed": state.seed, GIVEN_SEED: True}
        episode.update({name: value for name, value in meta.items() if name in self.buffer.schema.meta_fields})
        episode.publish(cut=cut)
        state.episode, state.seed, state.episode_return = None, None, 0.0

    def _close(self) -> None:
        self._leave(range(len(self._states)))
        if self._owned:
            self.buffer.close()


class RecordEpisodes(_Recorded, gymnasium.Wrapper[Any, Any, Any, Any]):
    """Record every episode of an environment, with its final observation.

    An episode is published when it ends. If `reset` or `close` comes before its end, it is dropped, or with
    `keep_partial` published as cut short. If `step` raises, it is dropped, as one of its steps is missing. An episode
    longer than the buffer's `max_timesteps` becomes several, all but the last flagged as cut short.

    Meta fields, if the buffer declares them: `episode_return`, `episode_length`, `seed` (of the `reset` that began the
    episode) and `given.seed` (False: that `reset` had no seed), `success` (1 or 0 if the last info has "success" or
    "is_success", else -1).

    A key of a Dict space or of `infos` that is no identifier is changed into one, "bottom burner" into `bottom_burner`.

    Args:
        env: the environment; it may be wrapped in `Autoreset`.
        buffer: a folder, where a buffer of the environment's spaces is made or continued; or an open buffer. Fields of
            the buffer that the environment does not give must have defaults.
        infos: the entries of `info` to record, name -> any spelling of a field; they become `info.<name>`. Nested
            dicts for nested infos. If a step's info lacks an entry, the field's default is stored.
        meta: values of further meta fields, for every episode; `recorder.meta` may be changed between episodes.
        keep_partial: whether to publish episodes that are left before their end.
        options: of `ReplayBuffer.for_env`, if `buffer` is a folder. `max_episodes` or `capacity` must be given; so must
            `max_timesteps` if there is no capacity and the environment's spec names no limit. `meta_fields` and
            `fields` are declared in addition. dtype="float32" stores floating-point observations and actions so.

    Raises:
        SchemaError: an option is missing or not allowed, or the environment does not give a field of the buffer.
        BufferFullError: raised by `step` if no episode can be begun.
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
        mode = AutoresetMode.NEXT_STEP if resets_by_a_step(env) else AutoresetMode.DISABLED
        self._open(buffer, infos, meta, options, keep_partial=keep_partial, mode=mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment: arguments and results are the environment's.

        Raises:
            SchemaError: the buffer cannot hold the seed; the environment was not reset.
        """
        return self._reset([0], seed, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and record the step: arguments and results are the environment's.

        Raises:
            BufferFullError: no episode can be begun; the environment was not stepped.
        """
        return self._step(action)

    def close(self) -> None:
        """Close the environment, and the buffer if it was given as a folder."""
        self._close()
        super().close()


class RecordVectorEpisodes(_Recorded, AnyVectorWrapper):
    """Record every episode of a vector of environments.

    In every autoreset mode of Gymnasium the published episodes are those that each environment would have given alone.
    If a buffer that is not circular has no room for an environment's next episode, that environment goes on unrecorded.

    Args:
        env: the vector environment.
        buffer: as for `RecordEpisodes`.
        infos: as for `RecordEpisodes`.
        meta: as for `RecordEpisodes`.
        keep_partial: as for `RecordEpisodes`.
        autoreset_mode: how `env` resets; None: as its `metadata` says.
        options: as for `RecordEpisodes`.

    Raises:
        SchemaError: as for `RecordEpisodes`, or no autoreset mode is known.
        BufferFullError: raised by `step` if no environment can be recorded.
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
        mode = autoreset_mode or env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise SchemaError(
                f"autoreset_mode: got {mode!r} in the metadata of {env}, expected a gymnasium.vector."
                "AutoresetMode; pass autoreset_mode=…"
            )
        self._open(buffer, infos, meta, options, keep_partial=keep_partial, mode=mode)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments, those of `options["reset_mask"]` if there is one, else all.

        Raises:
            SchemaError: the buffer cannot hold a seed; no environment was reset.
        """
        mask = (options or {}).get("reset_mask")  # the environment takes it out of the options
        which = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        return self._reset(which, seed, options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments, and record the steps: arguments and results are the environment's.

        Raises:
            BufferFullError: no episode can be begun; the environments were not stepped.
        """
        return self._step(actions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and the buffer if it was given as a folder."""
        if "_states" in vars(self):  # before Gymnasium 1.4 a finaliser closes a wrapper even if `__init__` raised
            self._close()
            super().close(**kwargs)


def _seed_of(seed: int | Sequence[int | None] | None, i: int) -> int | None:
    """The seed that environment `i` of a vector is reset with: a single seed becomes seed + i, as in Gymnasium."""
    if seed is None:
        return None
    return int(seed) + i if isinstance(seed, (int, np.integer)) else seed[i]


def _check_fields(schema: Schema, declarations: Mapping[str, Any]) -> None:
    names = {**Schema(declarations).fields, **dict.fromkeys(schema.ends)}
    for name, declared in schema.fields.items():
        if name not in names and not name.startswith(f"{INFO}.") and declared.default is None:
            raise SchemaError(
                f"field {name!r} of the buffer: the environment gives {', '.join(names)}, and it has no default; "
                "declare one, or leave the field out",
                field=name,
            )


def _look_up(info: Mapping[str, Any], path: str, index: int | None) -> Any:
    """The info under a dotted path, or None; of a vector the entry at `index`, or None if the info's mask is False."""
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
