"""skrl: a memory in a folder for its off-policy agents.

    memory = DiskMemory(memory_size=100_000, num_envs=env.num_envs, device=device, folder="runs/sac")

takes the place of a `RandomMemory`; called again with the same folder, a run goes on with what was stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import NotEnoughDataError
from memmap_buffer.extras import extra
from memmap_buffer.interop.columns import Array, equal_rows
from memmap_buffer.interop.episodes import SPARE_SLOTS, sample_newest
from memmap_buffer.paths import AnyPath
from memmap_buffer.schema import Field

with extra("skrl"):
    from skrl.memories.torch import Memory
    from skrl.utils.spaces.torch import compute_space_size

NEXT, TERMINATED, TRUNCATED = "next_", "terminated", "truncated"


class DiskMemory(Memory):  # type: ignore[misc]  # skrl has no types here
    """A memory for DQN, DDPG, TD3 and SAC that lives in a folder, in the place of theirs.

    An observation is stored once, also as the one that follows the step before. A step is stored with the next
    `add_samples`, which tells whether its episode went on, and drawn from the one after that on. Batches are drawn
    uniformly, with replacement. Tensors such as `tensors["observations"]` are not there: `disk` has the data.

    Args:
        memory_size: steps of each environment.
        num_envs: how many environments step together.
        device: where batches go.
        folder: where it is; made at the first `add_samples`.
        max_timesteps: longer episodes are stored in parts; no transition is lost where they are cut.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`.

    Raises:
        SchemaMismatchError: later, the folder holds other tensors, or another `memory_size`.
    """

    def __init__(
        self,
        *,
        memory_size: int,
        num_envs: int = 1,
        device: Any = None,
        folder: AnyPath,
        max_timesteps: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(memory_size=memory_size, num_envs=num_envs, device=device)
        self._folder = folder
        spare = max(SPARE_SLOTS, 2 * num_envs)
        sizes = {"max_timesteps": max_timesteps, "capacity": memory_size * num_envs, "spare_slots": spare}
        self._options = {**sizes, "publish": "step", **options}
        self._fields: dict[str, Field] = {}
        self._disk: ReplayBuffer | None = None
        self._newest: dict[str, Array] = {}

    @property
    def disk(self) -> ReplayBuffer:
        """The `memmap_buffer.ReplayBuffer`. Raises NotEnoughDataError before the agent made its tensors."""
        if self._disk is None:
            if not self._fields:
                raise NotEnoughDataError("there is no tensor yet; the agent makes them when the trainer is made")
            self._disk = self._opened()
        return self._disk

    def _opened(self) -> ReplayBuffer:
        following = {name.removeprefix(NEXT) for name in self._fields if name.startswith(NEXT)}
        fields = {
            name: Field(field.dtype, field.shape, final=name in following)
            for name, field in self._fields.items()
            if not name.startswith(NEXT)
        }
        ends: dict[str, Any] = {TERMINATED: TERMINATED if TERMINATED in fields else None, TRUNCATED: TRUNCATED}
        return ReplayBuffer(self._folder, fields={**fields, TRUNCATED: ("bool", (1,))}, **ends, **self._options)

    def __len__(self) -> int:
        return self.disk.num_steps if self._fields else 0

    def create_tensor(self, name: str, *, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
        """Declare a tensor.

        Args:
            name: of the tensor.
            size: of an entry, or the space that it is of; None: there is none.
            dtype: of its entries; default: that of torch.
            keep_dimensions: whether entries have the axes of `size`, not one.

        Returns:
            Whether it is new.

        Raises:
            ValueError: there is one of that name and another size or dtype.
        """
        if size is None:
            return False
        shape = tuple(size) if keep_dimensions else (compute_space_size(size, occupied_size=True),)
        field = Field("float32" if dtype is None else str(dtype).removeprefix("torch."), shape)
        earlier = self._fields.get(name)
        if earlier is not None and earlier != field:
            raise ValueError(f"Tensor {name!r} is {earlier} already, and not {field}")
        self._fields[name] = field
        return earlier is None

    def reset(self) -> None:
        """Forget every step."""
        super().reset()
        self._newest = {}
        if self._disk is not None:
            self._disk.end_episodes()
            self._disk.clear()

    # Writing

    def add_samples(self, **tensors: Any) -> None:
        """Store one step of each environment.

        Args:
            tensors: name -> (num_envs, size); names without a tensor are left out.

        Raises:
            ValueError: there is no sample, or not one of each environment.
        """
        if not tensors:
            raise ValueError("There are no samples. Provide samples as key-value arguments")
        now = {}
        for name, field in self._fields.items():
            if tensors.get(name) is not None:
                values = tensors[name].detach().cpu().numpy()
                if values.size != self.num_envs * int(np.prod(field.shape)):
                    raise ValueError(
                        f"Expected {name!r} of shape ({self.num_envs}, *{field.shape}), got {values.shape}"
                    )
                now[name] = values.reshape(self.num_envs, *field.shape).copy()
        self._store(now)
        self._newest = now

    def _store(self, now: dict[str, Array] | None) -> None:
        """Store the step before; without what is now, its episodes are cut short there."""
        if not self._newest:
            return
        over = np.ones((self.num_envs, 1), np.bool_)
        if now is not None:
            following = {name: self._newest[NEXT + name] for name in self.disk.schema.final_names}
            over = ~equal_rows(following, now)[:, None]
        ended = self._newest[TERMINATED] if TERMINATED in self._newest else np.zeros_like(over)
        step: dict[str, Any] = {**self._newest, TRUNCATED: over & ~ended.astype(np.bool_)}
        self.disk.add(**step)
        self._newest = {}

    def _end_episodes(self) -> None:
        self._store(None)
        self.disk.end_episodes()

    def save(self, directory: str = "", *, format: str = "pt") -> None:
        """Wait until every step is on the disk; there is nothing else to be saved.

        Args:
            directory: as theirs; not used.
            format: as theirs; not used.
        """
        self._end_episodes()
        self.disk.flush()

    def close(self) -> None:
        """Wait until every step is on the disk, and let go of the folder."""
        if self._disk is not None:
            self._store(None)
            self._disk.close()

    # Reading

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Batches drawn uniformly.

        Args:
            names: of the tensors.
            batch_size: steps of all mini-batches together.
            mini_batches: how many the steps are shared among.
            sequence_length: must be 1.

        Returns:
            For each mini-batch the tensors (steps, size) in the order of the names; None where there is no such tensor.

        Raises:
            NotEnoughDataError: there is no transition.
            ValueError: `sequence_length`.
        """
        if sequence_length != 1:
            raise ValueError(f"sequence_length: got {sequence_length}, and single steps are drawn; leave it out")
        batch = sample_newest(self.disk, self._end_episodes, batch_size, device=self.device, **self._draws())
        self.sampling_indexes = batch["_indices"].cpu()
        return _shared(batch, names, mini_batches)

    def sample_by_index(self, names: list[str], *, indexes: Any, mini_batches: int = 1) -> list[list[Any]]:
        """The steps that were drawn before.

        Args:
            names: of the tensors.
            indexes: (B, 2), as `get_sampling_indexes` gives them, or (B,) positions.
            mini_batches: how many the steps are shared among.

        Returns:
            As `sample`.

        Raises:
            StaleEpisodeError: a step is gone.
        """
        return _shared(self.disk.batch(indexes, device=self.device, **self._draws()), names, mini_batches)

    def _draws(self) -> dict[str, Any]:
        return {"n_steps": 1, "next_fields": tuple(self.disk.schema.final_names), "return_indices": True}


def _shared(batch: Any, names: list[str], mini_batches: int) -> list[list[Any]]:
    """The tensors of a batch by name, for each mini-batch."""
    parts = [batch[name].tensor_split(mini_batches) if name in batch else [None] * mini_batches for name in names]
    return [list(tensors) for tensors in zip(*parts, strict=True)]
