"""The replay memory below the buffers of trainers: a ring of transitions in a folder.

It owns how such a folder is opened, where episodes end that the trainer did not end, and how many steps there are;
never the trainer's names of columns and batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer import MemmapBufferError, NotEnoughDataError, ReplayBuffer, Schema
from memmap_buffer.adapters import AnyPath, Array, equal_rows, path_of

NEXT, TERMINATED, TRUNCATED = "next_", "terminated", "truncated"
SPARE_SLOTS = 64  # one for each open episode; unused ones cost nothing, see `ReplayBuffer`


class TrainerMemory:
    """The newest transitions of environments that run side by side. Opened again, it goes on with the stored ones.

    An observation is stored once, although it is also the one that follows the step before. A pickle holds only the
    folder's name; pickling first writes every step to the disk.

    Args:
        folder: where the transitions are; made by `open`.
        capacity: steps of all environments together.
        num_envs: how many environments step together.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`.

    Attributes:
        path: of the folder.
        capacity: see above.
        over: (num_envs,) whether the last step ended the episode, so that the next one begins another in any case.
    """

    def __init__(self, folder: AnyPath, capacity: int, num_envs: int = 1, **options: Any) -> None:
        self.path, self.capacity, self.num_envs = path_of(folder), capacity, num_envs
        usual = {"publish": "step", "max_timesteps": 1000, "spare_slots": max(SPARE_SLOTS, num_envs)}
        usual["skips_resets"] = False  # a trainer adds no steps that only reset, even if the folder was made for such
        self._options = {**usual, **options, "capacity": capacity}
        self._disk: ReplayBuffer | None = None
        self._forget()

    def open(self, fields: Mapping[str, Any] | Schema, **ends: Any) -> ReplayBuffer:
        """Open the folder, or make it; later calls do nothing.

        Args:
            fields: as for `ReplayBuffer`; final fields show whether a step goes on from the one before.
            ends: `terminated` and `truncated`, as for `ReplayBuffer`.

        Returns:
            `disk`.

        Raises:
            SchemaMismatchError: the folder has other fields, or another capacity.
        """
        if self._disk is None:
            self._disk = ReplayBuffer(self.path, fields=fields, **ends, **self._options)
            self._count()
        return self._disk

    @property
    def disk(self) -> ReplayBuffer:
        """The `memmap_buffer.ReplayBuffer`. Raises NotEnoughDataError before `open` was called."""
        if self._disk is None:
            raise NotEnoughDataError(f"{self.path}: nothing was stored yet; store a step first")
        return self._disk

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._disk is not None

    def __len__(self) -> int:
        """How many steps of all environments are visible."""
        return self.disk.num_steps if self.is_open else 0

    def _count(self) -> None:
        self.num_added = len(self) // self.num_envs  # steps of each environment that are visible

    def _forget(self) -> None:
        """Let the next step of each environment begin an episode."""
        # (the step that waits for the next one, {} if none does; the observations that followed the last step, None if
        # they are lost). One attribute, as an interruption may come between two assignments.
        self._last: tuple[Mapping[str, Array], Mapping[str, Array] | None] = ({}, {})
        self.over = np.ones(self.num_envs, np.bool_)

    # Writing

    def add(self, step: Mapping[str, Array], following: Mapping[str, Array]) -> None:
        """Store one step of each environment. If it does not follow the step before, that episode ended.

        Args:
            step: dotted name -> (num_envs, *field). A step without `truncated` is stored by the next `add`, which shows
                which episodes went on.
            following: final field -> (num_envs, *field) after the step.

        Raises:
            MemmapBufferError: as `ReplayBuffer.add` raises it.
            OSError: as `ReplayBuffer.add` raises it.
        """
        waiting, before = self._last
        goes_on = np.zeros(self.num_envs, np.bool_) if before is None else equal_rows(before, step)
        if waiting:
            self._store_waiting(goes_on)
        elif (reset := ~(self.over | goes_on)).any():  # without an end of its episode
            self.disk.end_episodes(reset)
        if TRUNCATED in step:
            self._store(step, following)
            self.over = (step[TERMINATED] | step[TRUNCATED]).reshape(self.num_envs)
            step = {}
        self._last = step, following

    def _store_waiting(self, goes_on: Array) -> None:
        """Store the waiting step. It is truncated where its episode does not go on, unless it terminated."""
        waiting, following = self._last
        ended = np.asarray(waiting.get(TERMINATED, False), np.bool_)
        cut = ~goes_on.reshape(self.num_envs, *self.disk.schema.fields[TRUNCATED].shape)
        try:
            self._store({**waiting, TRUNCATED: cut & ~ended}, following or {})
            self.over = (cut | ended).reshape(self.num_envs)  # for the next `add`, if this one's step gets lost
            self._last = {}, following
        except (MemmapBufferError, OSError):
            raise
        except BaseException:  # it may be stored or not: it is not stored again, and the next `add` ends open episodes
            self._last, self.over = ({}, None), np.zeros(self.num_envs, np.bool_)
            raise

    def _store(self, step: Mapping[str, Any], following: Mapping[str, Any]) -> None:
        self.disk.add(**step, **{f"{NEXT}{name}": rows for name, rows in following.items()})
        self.num_added += 1

    def end_episodes(self) -> None:
        """End the open episodes as cut short, so that their newest steps can be drawn."""
        if self._last[0]:
            self._store_waiting(np.zeros(self.num_envs, np.bool_))
        if self.is_open:
            self.disk.end_episodes()
        self._forget()

    def clear(self) -> None:
        """Forget every step."""
        self._last = {}, self._last[1]
        self.end_episodes()
        if self.is_open:
            self.disk.clear()
        self._count()

    def save(self) -> None:
        """End the open episodes, and wait until every step is on the disk."""
        self.end_episodes()
        if self.is_open:
            self.disk.flush()

    def close(self) -> None:
        """End the open episodes, and close the folder when every step is on the disk."""
        if self.is_open:
            self.end_episodes()
            self.disk.close()

    def __getstate__(self) -> dict[str, Any]:
        self.save()
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._count()

    # Reading

    def sample(self, batch_size: int, **options: Any) -> Any:
        """A batch. If nothing can be drawn, open episodes are ended first, so that their newest steps can be.

        Args:
            batch_size: as for `ReplayBuffer.sample`.
            options: as for `ReplayBuffer.sample`.

        Raises:
            NotEnoughDataError: there is nothing to draw.
        """
        try:
            return self.disk.sample(batch_size, **options)
        except NotEnoughDataError:
            self.end_episodes()
            return self.disk.sample(batch_size, **options)
