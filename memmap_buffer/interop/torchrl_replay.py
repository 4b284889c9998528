"""torchrl: a `TensorDictReplayBuffer` in a folder, which takes the place of one over a `LazyMemmapStorage`.

    replay_buffer = DiskReplayBuffer("runs/sac", 1_000_000, batch_size=256)

Called again with the same folder, a run goes on with the steps that are stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import Field, Offsets, Prioritized, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, Array, Episode, Names, equal_rows, extra, flatten, path_of, to_numpy
from memmap_buffer.interop.columns import BoolArray
from memmap_buffer.interop.episodes import episode_bounds, read_names, write_names
from memmap_buffer.interop.torchrl import columns_of_steps, to_tensordict
from memmap_buffer.interop.trainer_memory import TERMINATED, TRUNCATED, TrainerMemory

if TYPE_CHECKING:
    from tensordict import TensorDictBase

with extra("torchrl"):
    from tensordict import TensorDict
    from torchrl.data import TensorDictReplayBuffer
    from torchrl.data.replay_buffers import Storage

TRAJECTORY = ("collector", "traj_ids")
SPARE_SLOTS = 128  # half of them for trajectories that go on side by side; unused ones cost nothing
IS_INIT = "is_init"
STATE = "folder.json"


class DiskReplayBuffer(TensorDictReplayBuffer):  # type: ignore[misc]  # torchrl has no types
    """Transitions, or slices of trajectories, in a folder, as torchrl's collectors give them and its losses take them.

    Steps are stored as episodes: the successive steps of one trajectory, by ("collector", "traj_ids"), or, if these are
    missing, of one row of the batch. A key that is at the root and below "next", such as an observation, is stored
    once; an episode ends where a step's value below "next" is not the next step's value at the root. Of the keys that
    are only below "next", the reward and the ends are stored, also those of groups; others are left out. bfloat16 is
    stored as float32. A transition can be drawn from the next step of its trajectory on. Saved by `dumps`, `state_dict`
    or pickle, the buffer is only the folder's name: loading gives the steps that the folder has then.

    Args:
        folder: where the steps are; made at the first `extend`.
        capacity: so many newest transitions can be drawn.
        batch_size: of `sample`, in steps.
        alpha: α, to draw by priority as `TensorDictPrioritizedReplayBuffer` does; None: uniformly.
        beta: β of the weights of draws by priority.
        eps: ε of the priorities (|δ| + ε)^α.
        priority_key: the key of the TD errors δ in a batch.
        slice_len: draw slices of so many successive steps, as `SliceSampler` does; None: single transitions.
        strict_length: whether a trajectory shorter than a slice is left out; False: it gives a slice of its own length.
        traj_key: the key at the root that numbers trajectories, or a tuple of keys, as for `SliceSampler`; None:
            ("collector", "traj_ids"), if it is there.
        n_steps: the most steps k of a transition. With more than one, ("next", "reward") is the return over these
            steps, and "steps_to_next_obs" is k.
        gamma: γ of the returns.
        transform: is applied to batches, and its inverse to steps before they are stored.
        prefetch: how many batches are drawn ahead.
        pin_memory: whether batches are in pinned memory.
        device: where batches go.
        max_timesteps: longer episodes are stored in parts; no transition of one step is lost where they are cut.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`; `spare_slots` (128) is twice the number
            of trajectories that may go on side by side.

    Raises:
        SchemaError: `alpha` or `beta` is given without the other, or `slice_len` with several `n_steps`.
        SchemaMismatchError: the folder has another capacity.
    """

    def __init__(
        self,
        folder: AnyPath,
        capacity: int,
        *,
        batch_size: int | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        priority_key: str = "td_error",
        slice_len: int | None = None,
        strict_length: bool = True,
        traj_key: str | tuple[str, ...] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        transform: Any = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        device: Any = None,
        max_timesteps: int = 1000,
        **options: Any,
    ) -> None:
        if (alpha is None) != (beta is None):
            raise SchemaError(f"alpha, beta: got {alpha} and {beta}; give both, to draw by priority, or none")
        if slice_len is not None and n_steps > 1:
            raise SchemaError(f"slice_len: got {slice_len} with n_steps={n_steps}; leave one out")
        prioritized = None
        if alpha is not None and beta is not None:
            prioritized = Prioritized(alpha, beta, epsilon=eps, normalize="buffer")
        several = slice_len is not None or n_steps > 1
        self.memory = _Trajectories(folder, capacity, traj_key, several, max_timesteps=max_timesteps, **options)
        how = {"prioritized": prioritized, "device": device}
        super().__init__(
            storage=_Folder(self.memory, (slice_len, strict_length), (n_steps, gamma), **how),
            collate_fn=_collated,
            batch_size=batch_size,
            priority_key=priority_key,
            transform=transform,
            prefetch=prefetch,
            pin_memory=pin_memory,
        )

    def __repr__(self) -> str:
        return f"DiskReplayBuffer({str(self.memory.path)!r}, {len(self)} of {self._storage.max_size} transitions)"

    @property
    def disk(self) -> ReplayBuffer:
        """The `memmap_buffer.ReplayBuffer`. Raises NotEnoughDataError before the first `extend`."""
        return self.memory.disk

    @property
    def write_count(self) -> int:
        """How many steps were stored since the buffer was opened."""
        return self.memory.write_count

    # Writing

    def add(self, data: TensorDictBase) -> Any:
        """Store one step; see `extend`."""
        return self.extend(data.unsqueeze(0))[0]

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Any:
        """Store steps in the order of time.

        Args:
            tensordicts: of batch size (N,) or (B, T), as collectors give them; its key "index" is set.
            update_priority: False: its TD errors do not become priorities; None or True: they do, if there are any.

        Returns:
            (N, 2) or (B, T, 2) int64: the episode's serial and the timestep of each step, as "index" in batches.

        Raises:
            SchemaError: a value is no tensor, or does not fit the steps that were stored before.
        """
        data = self._transform.inv(tensordicts) if len(self._transform) else tensordicts
        with self._replay_lock:
            index = self.memory.write(data)
        tensordicts.set("index", index)
        if update_priority is not False and self.priority_key in tuple(data.keys()):
            self.update_tensordict_priority(data.copy().set("index", index))
        return tensordicts.get("index")

    def end_episodes(self) -> None:
        """End the open episodes, so that their newest steps can be drawn; the next steps begin other episodes."""
        with self._replay_lock:
            self.memory.end_episodes()

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of steps from their TD errors; does nothing if steps are drawn uniformly.

        Args:
            index: (..., 2), as "index" of a batch.
            priority: (...) or (..., 1), the TD errors δ.
        """
        with self._replay_lock:
            self._storage.update(np.asarray(index).reshape(-1, 2), np.asarray(priority).reshape(-1))

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """`update_priority` by a batch that has "index", and the TD errors under `priority_key`."""
        if self._storage.prioritized is not None:
            self.update_priority(data.get("index").cpu(), data.get(self.priority_key).detach().cpu())

    def close(self) -> None:
        """Wait until every step is on the disk, and close the folder."""
        with self._replay_lock:
            self.memory.close()

    # Reading

    def _sample(self, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """(a batch; "index" and "priority_weight", which torchrl's `sample` adds to it)."""
        with self._replay_lock:
            data, info = self._storage.draw(batch_size)
        data = data.pin_memory() if self._pin_memory else data
        return (self._transform(data) if len(self._transform) else data), info


class _Trajectories(TrainerMemory):
    """The writing half: batches of torchrl become episodes, one or more for each trajectory.

    Args:
        folder: see `DiskReplayBuffer`.
        capacity: see `DiskReplayBuffer`.
        traj_key: see `DiskReplayBuffer`.
        cuts_runs: whether several steps of a trajectory are drawn at once, so that a batch must say where it ends.
        options: of `TrainerMemory`.
    """

    def __init__(
        self, folder: AnyPath, capacity: int, traj_key: str | tuple[str, ...] | None, cuts_runs: bool, **options: Any
    ) -> None:
        super().__init__(folder, capacity, 1, **{"spare_slots": SPARE_SLOTS, **options})
        self.names, self.write_count = Names(), 0
        self._traj_key, self._cuts_runs = (traj_key,) if isinstance(traj_key, str) else traj_key, cuts_runs
        # Key of a trajectory -> (its episode, what followed its last step), in the order of their newest steps.
        self._open: dict[Any, tuple[Episode, dict[str, Array]]] = {}
        if (self.path / "schema.json").exists():
            there = ReplayBuffer.from_folder(self.path, read_only=True)
            self.names = read_names(there)
            self.open(there.schema)

    def write(self, data: TensorDictBase) -> Array:
        """Store a batch, in each row of which trajectories follow one another.

        Returns:
            (*batch size, 2) int64, the serial and timestep of each step.
        """
        if data.ndim not in (1, 2):
            raise SchemaError(f"extend: got a batch of shape {tuple(data.batch_size)}, expected (N,) or (B, T)")
        if 0 in data.batch_size:
            return np.empty((*data.batch_size, 2), np.int64)
        steps, row_length = data.reshape(-1), data.batch_size[-1]
        arrays = {name: _array(name, value) for name, value in flatten(self.names.ours(steps.to_dict())).items()}
        fields, after = columns_of_steps(arrays)
        ids = self._ids(arrays)
        disk = self.disk if self.is_open else self._made(fields, after)
        ends = np.zeros(len(steps), np.bool_)
        for name in disk.schema.ends:
            ends |= _any(fields[name])
        cuts = ends.copy()
        cuts[:-1] |= ~equal_rows({n: a[:-1] for n, a in after.items()}, {n: a[1:] for n, a in fields.items()})
        if ids is not None:
            cuts[:-1] |= _any(ids[1:] != ids[:-1])
        cuts[row_length - 1 :: row_length] = True
        index: list[Array] = []
        for start, stop in episode_bounds(cuts):
            key = start // row_length if ids is None else int(ids[start].reshape(-1)[0])
            while start < stop:
                run = ({name: rows[start:stop] for name, rows in columns.items()} for columns in (fields, after))
                index.append(self._write_run(key, *run, ended=bool(ends[stop - 1])))
                start += len(index[-1])
        self.write_count += len(steps)
        return np.concatenate(index).reshape(*data.batch_size, 2)

    def _ids(self, arrays: Mapping[str, Array]) -> Array | None:
        """The number of each step's trajectory, or None. Raises SchemaError if nothing says where a trajectory ends."""
        name = self.names.named(self._traj_key or TRAJECTORY)
        if name in arrays:
            return arrays[name]
        if self._traj_key is not None:
            raise SchemaError(f"extend: traj_key={self._traj_key!r} is not there; there is {', '.join(arrays)}")
        has_ends = any(key == "done" or key.startswith("next.") for key in arrays)
        if not has_ends and self._cuts_runs:
            raise SchemaError(
                "extend: nothing tells where a trajectory ends, so several steps of one cannot be drawn: there is "
                'neither "next" nor ("collector", "traj_ids"); name the entry that numbers trajectories, '
                'traj_key="episode"'
            )
        return None

    def _write_run(self, key: Any, fields: dict[str, Array], after: dict[str, Array], *, ended: bool) -> Array:
        """Store successive steps of the trajectory `key`, as many as its episode has room for.

        Returns:
            (N, 2) int64, the serial and timestep of each step that was stored.
        """
        if key in self._open and not equal_rows(self._open[key][1], {n: rows[:1] for n, rows in fields.items()}).all():
            self._end(key)
        episode, following = self._open.pop(key) if key in self._open else (self.disk.begin_episode(), {})
        first, limit = episode.length, self.disk.max_timesteps
        try:
            episode.extend(**{name: rows[: limit - first] for name, rows in fields.items()})
        finally:  # after an error, too: the stored steps keep the observations that follow them
            count = episode.length - first
            if count:
                following = {name: rows[count - 1 : count].copy() for name, rows in after.items()}
            self._open[key] = episode, following
        is_over = ended and count == len(next(iter(fields.values())))
        if is_over or episode.length == limit:
            self._end(key, cut=not is_over)
        while len(self._open) > self.disk.spare_slots // 2:
            self._end(next(iter(self._open)))
        return np.stack([np.full(count, episode.serial), np.arange(first, first + count)], axis=1)

    def _end(self, key: Any, *, cut: bool = True) -> None:
        """Publish an episode with the observation after its last step."""
        episode, following = self._open.pop(key)
        if following:
            episode.final(**{name: rows[0] for name, rows in following.items()})
        episode.publish(cut=cut)

    def _made(self, fields: Mapping[str, Array], after: Mapping[str, Array]) -> ReplayBuffer:
        declared = {name: Field(rows.dtype, rows.shape[1:], final=name in after) for name, rows in fields.items()}
        ends: dict[str, Any] = {name: name if name in declared else None for name in (TERMINATED, TRUNCATED)}
        if not any(ends.values()) and "done" in declared:
            ends[TERMINATED] = "done"
        disk = self.open(declared, **ends)
        write_names(disk, self.names)
        return disk

    def end_episodes(self) -> None:
        for key in [*self._open]:
            self._end(key)
        super().end_episodes()


class _Folder(Storage):  # type: ignore[misc]
    """The reading half, a storage of torchrl: items of the buffer become batches of torchrl.

    Args:
        memory: the writing half.
        slices: `slice_len` and `strict_length`.
        steps: `n_steps` and `gamma`.
        how: `prioritized`, and the device.
    """

    def __init__(
        self, memory: _Trajectories, slices: tuple[int | None, bool], steps: tuple[int, float], **how: Any
    ) -> None:
        super().__init__(memory.capacity)
        self.memory, self.prioritized, self._drawn, self._how = memory, how["prioritized"], False, how
        (self._slice_len, self._strict_length), (self._n_steps, self._gamma) = slices, steps

    def __len__(self) -> int:
        return len(self.memory)

    def update(self, index: Array, errors: Array) -> None:
        """Set the priorities of steps from their TD errors, unless steps are drawn uniformly."""
        how = self.prioritized
        if how is not None:
            if not self._drawn:  # only a draw gives α and ε to the tree of priorities
                self.memory.disk.sample(1, timestep_level=True, prioritized=how)
                self._drawn = True
            self.memory.disk.update_priorities(index, errors, name=how.name)

    # Reading

    def draw(self, size: int) -> tuple[TensorDict, dict[str, Any]]:
        """(a batch of `size` steps; its index and weights)."""
        schema, length = self.memory.disk.schema, self._slice_len
        if length is None:
            return self._transitions(self.memory.sample(size, **self._of_transitions(), **self._how))
        if size % length:
            raise SchemaError(f"sample: got batch_size={size}, which {length}, the length of slices, does not divide")
        # Every field at the steps of a slice; fields with a final entry also at the step after it.
        steps = {name: range(length + field.final) for name, field in schema.fields.items()}
        view = Offsets(steps, boundary="drop" if self._strict_length else "shift")
        batch = self.memory.disk.sample(size // length, view=view, return_indices=True, **self._how)
        return self._slices(batch, length)

    def get(self, index: Any) -> TensorDict:
        """Transitions by position, or by "index" of a batch."""
        disk, options = self.memory.disk, self._of_transitions()
        where = range(len(disk.dataset(**options)))[index] if isinstance(index, slice) else np.asarray(index)
        data, _ = self._transitions(disk.batch(np.atleast_1d(where), device=self._how["device"], **options))
        return data[0] if np.ndim(where) == 0 else data

    def _of_transitions(self) -> dict[str, Any]:
        """The options by which the buffer gives transitions."""
        schema = self.memory.disk.schema
        options: dict[str, Any] = {"n_steps": self._n_steps, "next_fields": tuple(schema.final_names)}
        if self._n_steps > 1:
            options |= {"gamma": self._gamma, "sequence_fields": tuple(schema.ends)}
        return {**options, "return_indices": True}

    def _transitions(self, batch: Mapping[str, Any]) -> tuple[TensorDict, dict[str, Any]]:
        """A batch of transitions in torchrl's form."""
        schema, several = self.memory.disk.schema, self._n_steps > 1
        steps = {name: rows for name, rows in batch.items() if not name.startswith("_")}
        lens = steps.pop("n_step_lens")
        if several:
            ends = {name: steps.pop(f"seq_{name}").any(1) for name in schema.ends}
            steps |= {"reward": batch["_return"], **ends}
        data = to_tensordict(steps, schema=schema, names=self.memory.names)
        return data.set("steps_to_next_obs", lens[:, None]) if several else data, _info(batch)

    def _slices(self, batch: Mapping[str, Any], length: int) -> tuple[TensorDict, dict[str, Any]]:
        """A batch of slices in torchrl's form: (steps,), one slice after another."""
        schema, batch = self.memory.disk.schema, flatten(batch)
        exists = batch[f"_mask_{next(iter(schema.fields))}"][:, :length]
        for name in schema.final_names:
            exists = exists & batch[f"_mask_{name}"][:, 1:]
        all_exist = bool(exists.all())

        def flat(rows: Any) -> Any:
            return rows.flatten(0, 1) if all_exist else rows[exists]

        steps = {name: flat(batch[name][:, :length]) for name in schema.fields}
        steps |= {f"next_{name}": flat(batch[name][:, 1:]) for name in schema.final_names}
        data = to_tensordict(steps, schema=schema, names=self.memory.names)
        place = exists.cumsum(1) - 1
        first, last = flat(place == 0)[:, None], flat(place == place[:, -1:])[:, None]
        data.set(("next", "truncated"), last)
        done = data.get(("next", "done"), None)
        data.set(("next", "done"), last if done is None else done | last)
        if IS_INIT in schema.fields:
            data.set(IS_INIT, data.get(IS_INIT) | first.reshape(data.get(IS_INIT).shape))
        info = {name: flat(rows[:, None].expand(-1, length, *rows.shape[1:])) for name, rows in _info(batch).items()}
        info["index"] = info["index"] + flat(place)[:, None] * info["index"].new_tensor([0, 1])
        return data, info

    # What torchrl asks of every storage

    def set(self, cursor: Any, data: Any, **options: Any) -> None:
        raise SchemaError("steps are not changed one by one; store others by extend")

    def contains(self, item: Any) -> bool:
        return 0 <= int(item) < len(self)

    def _empty(self) -> None:
        self.memory.clear()

    def state_dict(self) -> dict[str, Any]:
        self.memory.save()
        return {"folder": str(self.memory.path.resolve())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        path = self.memory.path
        if Path(state_dict["folder"]).resolve() != path.resolve():
            raise SchemaError(f"{path}: the steps of what is loaded are in {state_dict['folder']}; open that folder")

    def dumps(self, path: Any) -> None:
        path_of(path).mkdir(parents=True, exist_ok=True)
        (path_of(path) / STATE).write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def loads(self, path: Any) -> None:
        self.load_state_dict(json.loads((path_of(path) / STATE).read_text(encoding="utf-8")))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_drawn": False}


def _collated(batch: TensorDict) -> TensorDict:
    """The batch itself: `_Folder` has made it whole."""
    return batch


def _info(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The index and the weights that torchrl returns beside a batch."""
    info = {"index": batch["_indices"]}
    return {**info, "priority_weight": batch["_weights"]} if "_weights" in batch else info


def _array(name: str, value: Any) -> Array:
    if not hasattr(value, "detach"):
        raise SchemaError(f"extend: {name!r} is no tensor but {type(value).__name__}; exclude it")
    return to_numpy(value)


def _any(flags: Array) -> BoolArray:
    """(N,) whether any of the flags (N, …) is true."""
    return np.asarray(flags.any(axis=tuple(range(1, flags.ndim))))
