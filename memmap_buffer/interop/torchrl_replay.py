"""torchrl: a replay buffer in a folder with the methods of its `TensorDictReplayBuffer`.

    replay_buffer = DiskReplayBuffer("runs/sac", 1_000_000, batch_size=256)

takes the place of one over a `LazyMemmapStorage`; a run that is called again goes on with what was stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.columns import flatten
from memmap_buffer.interop.episodes import read_names, write_names
from memmap_buffer.interop.torchrl import columns_of_steps, to_tensordict
from memmap_buffer.names import Names
from memmap_buffer.paths import path_of
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.schema import Field

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from memmap_buffer.writing.episode import Episode

with extra("torchrl"):
    import torch
    from tensordict import TensorDict, is_non_tensor, is_tensor_collection
    from torchrl.envs.transforms import Compose, Transform

Array = npt.NDArray[Any]
TRAJECTORY = "collector.traj_ids"
OPEN_EPISODES = 64


class DiskReplayBuffer:
    """Transitions from torchrl's collectors on disk, as its losses take them.

    Steps are stored as episodes: a run of entries of one trajectory, by ("collector", "traj_ids"), or, where these are
    missing, of one row of the batch. An entry that stands at the root and below "next", such as an observation, is
    stored once; where "next" of a step is not what the following one begins with, an episode ends. Other entries below
    "next" than these, the reward and the ends are left out.

    Args:
        folder: where it is; made at the first `extend`.
        capacity: the newest so many transitions can be drawn.
        batch_size: of `sample`.
        prioritized: draw by priority; None: uniformly.
        priority_key: of the TD errors in a batch.
        n_steps: the most steps of a transition. With more than one ("next", "reward") is their return, and
            "steps_to_next_obs" how many they are.
        gamma: γ of the returns.
        transform: of batches, and inverted of what is stored, as torchrl's buffers do it.
        device: where batches go.
        max_timesteps: longer episodes are stored in parts; no transition of one step is lost where they are cut.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`.

    Raises:
        SchemaMismatchError: the folder has another capacity.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        capacity: int,
        *,
        batch_size: int | None = None,
        prioritized: Prioritized | None = None,
        priority_key: str = "td_error",
        n_steps: int = 1,
        gamma: float = 0.99,
        transform: Any = None,
        device: Any = None,
        max_timesteps: int = 1000,
        **options: Any,
    ) -> None:
        self.batch_size, self.priority_key = batch_size, priority_key
        self._folder, self._n_steps, self._gamma = path_of(folder), n_steps, gamma
        self._prioritized, self._device = prioritized, device
        sizes = {"capacity": capacity, "max_timesteps": max_timesteps, "spare_slots": 2 * OPEN_EPISODES}
        self._options = {**sizes, "publish": "step", **options}
        self._transform = Compose()
        for one in [] if transform is None else [transform]:
            self.append_transform(one)
        self._names = Names()
        self._disk: ReplayBuffer | None = None
        self._open: OrderedDict[Any, tuple[Episode, dict[str, Array]]] = OrderedDict()
        if (self._folder / "schema.json").exists():
            there = ReplayBuffer.from_folder(self._folder, read_only=True)
            self._names = read_names(there)
            self._disk = ReplayBuffer(self._folder, fields=there.schema, **self._options)

    def __len__(self) -> int:
        return 0 if self._disk is None else self._disk.num_steps

    def __repr__(self) -> str:
        return f"DiskReplayBuffer({str(self._folder)!r}, {len(self)} of {self._options['capacity']} transitions)"

    @property
    def disk(self) -> ReplayBuffer:
        """The `memmap_buffer.ReplayBuffer`. Raises NotEnoughDataError before the first `extend`."""
        if self._disk is None:
            raise NotEnoughDataError(f"{self._folder}: nothing was stored yet; call extend")
        return self._disk

    def append_transform(self, transform: Any, *, invert: bool = False) -> DiskReplayBuffer:
        """Transform batches by one more `Transform`, or callable, too."""
        if not isinstance(transform, Transform):
            raise SchemaError(f"append_transform: got {transform!r}, expected a Transform of torchrl")
        transform.eval()
        self._transform.append(transform.inv if invert else transform)
        return self

    # Writing

    def add(self, data: TensorDictBase) -> Any:
        """Store one transition; see `extend`."""
        return self.extend(data.unsqueeze(0))[0]

    def extend(self, tensordicts: TensorDictBase) -> Any:
        """Store transitions in the order of time.

        Args:
            tensordicts: of batch size (N,) or (B, T), as collectors give them.

        Returns:
            (N, 2) or (B, T, 2) int64: the episode and timestep of each, as "index" in batches.

        Raises:
            SchemaError: there is no transition, or an entry is no tensor, or is not as before.
        """
        data = self._transform.inv(tensordicts) if len(self._transform) else tensordicts
        if data.ndim not in (1, 2) or 0 in data.batch_size:
            shape = tuple(data.batch_size)
            raise SchemaError(
                f"extend: got a batch of shape {shape}, expected (N,) or (B, T), of at least one transition"
            )
        rows = [data] if data.ndim == 1 else data.unbind(0)
        index = np.concatenate([self._extend_row(i, row) for i, row in enumerate(rows)])
        if self._prioritized is not None and self.priority_key in tuple(data.keys()):
            self.update_priority(index, data.get(self.priority_key).reshape(-1))
        return TensorDict({"index": index.reshape(*data.batch_size, 2)}, data.batch_size).get("index")

    def _extend_row(self, row: int, data: TensorDictBase) -> Array:
        """Store one row of a batch, in which trajectories stand behind each other."""
        arrays = flatten(self._names.ours(_as_dict(data)))
        fields, after = columns_of_steps(arrays)
        if self._disk is None:
            self._disk = self._made(fields, after)
        ids = arrays.get(TRAJECTORY)
        count = len(next(iter(fields.values())))
        ends = np.zeros(count, np.bool_)
        for name in self._disk.schema.ends:
            ends |= fields[name].reshape(count, -1).any(axis=1)
        cuts = ends.copy()
        if after:
            cuts[:-1] |= ~_equal({n: a[:-1] for n, a in after.items()}, {n: fields[n][1:] for n in after})
        if ids is not None:
            cuts[:-1] |= ids[1:].ravel() != ids[:-1].ravel()
        index = np.empty((count, 2), np.int64)
        start = 0
        for stop in [*(np.flatnonzero(cuts[:-1]) + 1).tolist(), count]:
            key = row if ids is None else int(ids[start].reshape(-1)[0])
            part = slice(start, stop)
            run = ({name: a[part] for name, a in fields.items()}, {name: a[part] for name, a in after.items()})
            index[part] = self._extend_run(key, *run, ended=bool(ends[stop - 1]))
            start = stop
        return index

    def _extend_run(self, key: Any, fields: dict[str, Array], after: dict[str, Array], *, ended: bool) -> Array:
        """Store successive steps of one trajectory, which go on where it stood; the episode and timestep of each."""
        disk, index = self.disk, []
        episode, following = self._open.pop(key, (None, {}))
        if episode is not None and not all(_equal(following, {name: fields[name][:1] for name in following})):
            _end(episode, following)
            episode = None
        count, start, limit = len(next(iter(fields.values()))), 0, disk.max_timesteps
        while start < count:
            if episode is None:
                episode, following = disk.begin_episode(), {}
            stop = min(count, start + limit - episode.length)
            first = episode.length
            try:
                episode.extend(**{name: rows[start:stop] for name, rows in fields.items()})
            finally:  # after an error, too, what is stored goes on with what followed it
                stop = start + episode.length - first
                if stop > start:
                    following = {name: rows[stop - 1 : stop].copy() for name, rows in after.items()}
                self._open[key] = episode, following
            index += [(episode.serial, t) for t in range(first, episode.length)]
            if episode.length == limit or (ended and stop == count):
                del self._open[key]
                _end(episode, following, cut=not (ended and stop == count))
                episode = None
            start = stop
        while len(self._open) > OPEN_EPISODES:
            _end(*self._open.popitem(last=False)[1])
        return np.array(index)

    def _made(self, fields: Mapping[str, Array], after: Mapping[str, Array]) -> ReplayBuffer:
        declared = {name: Field(rows.dtype, rows.shape[1:], final=name in after) for name, rows in fields.items()}
        ends: dict[str, Any] = {name: name if name in declared else None for name in ("terminated", "truncated")}
        if not any(ends.values()) and "done" in declared:
            ends["terminated"] = "done"
        disk = ReplayBuffer(self._folder, fields=declared, **ends, **self._options)
        write_names(disk, self._names)
        return disk

    def end_episodes(self) -> None:
        """End the episodes that are open, so that their newest steps can be drawn; the next ones begin others."""
        while self._open:
            _end(*self._open.popitem(last=False)[1])

    # Reading

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch.

        Args:
            batch_size: default: that of the buffer.
            return_info: return (batch, info) with "index" and "priority_weight" in info, too.

        Returns:
            A TensorDict of batch size (B,): what was stored, below "next" with what followed, ("next", "reward") and
            the ends; "index" (B, 2); drawn by priority also "priority_weight" (B,).

        Raises:
            NotEnoughDataError: there is no transition.
        """
        size = batch_size or self.batch_size
        if size is None:
            raise SchemaError("sample: got no batch_size; give it here, or to the buffer")
        try:
            batch = self.disk.sample(size, device=self._device, **self._draws())
        except NotEnoughDataError:
            self.end_episodes()
            batch = self.disk.sample(size, device=self._device, **self._draws())
        data = self._transform(self._told(dict(batch)))
        info = {name: data.get(name) for name in ("index", "priority_weight") if name in tuple(data.keys())}
        return (data, info) if return_info else data

    def _draws(self) -> dict[str, Any]:
        schema = self.disk.schema
        options: dict[str, Any] = {
            "n_steps": self._n_steps,
            "next_fields": tuple(schema.final_names),
            "return_indices": True,
            "prioritized": self._prioritized or False,
        }
        if self._n_steps > 1:
            options |= {"gamma": self._gamma, "sequence_fields": tuple(schema.ends)}
        return options

    def _told(self, batch: dict[str, Any]) -> TensorDict:
        """A batch of `disk` as torchrl has it."""
        index, weights, lens = (batch.pop(key, None) for key in ("_indices", "_weights", "n_step_lens"))
        for key in ("_probabilities", "_discount"):
            batch.pop(key, None)
        if self._n_steps > 1:
            returns = batch.pop("_return")
            batch["reward"] = returns
            for name in self.disk.schema.ends:
                batch[name] = batch.pop(f"seq_{name}").any(1)
        data = to_tensordict(batch, schema=self.disk.schema, names=self._names)
        data.set("index", index)
        if weights is not None:
            data.set("priority_weight", weights)
        if self._n_steps > 1:
            data.set("steps_to_next_obs", lens[:, None])
        return data

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give transitions the priorities of their TD errors.

        Args:
            index: (B, 2), as "index" of a batch.
            priority: (B,) or (B, 1).
        """
        if self._prioritized is not None:
            errors = torch.as_tensor(priority).detach().cpu().reshape(-1)
            self.disk.update_priorities(index, errors.numpy(), name=self._prioritized.name)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """The same from a batch with "index" and the TD errors below `priority_key`."""
        self.update_priority(data.get("index"), data.get(self.priority_key))

    def empty(self) -> None:
        """Forget every transition."""
        self.end_episodes()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Wait until all is on the disk, and let go of the folder."""
        if self._disk is not None:
            self.end_episodes()
            self._disk.close()


def _as_dict(data: TensorDictBase) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if is_non_tensor(value):
            raise SchemaError(f"extend: {key!r} is no tensor but {type(value).__name__}; exclude it")
        out[key] = _as_dict(value) if is_tensor_collection(value) else value.detach().cpu().numpy()
    return out


def _equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    """(N,) where all of these entries are the same, to the last bit."""
    count = len(next(iter(other.values()), ()))
    same = np.ones(count, np.bool_)
    for name, rows in one.items() if count else ():
        pair = (np.ascontiguousarray(a).reshape(count, -1).view(np.uint8) for a in (rows, other[name]))
        same &= np.equal(*pair).all(axis=1)
    return same


def _end(episode: Episode, following: Mapping[str, Array], *, cut: bool = True) -> None:
    """Publish an episode with the observation after its last step."""
    if following:
        episode.final(**{name: rows[0] for name, rows in following.items()})
    episode.publish(cut=cut)
