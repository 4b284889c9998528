"""skrl: a memory in a folder for its off-policy agents.

    memory = DiskMemory(memory_size=100_000, num_envs=env.num_envs, device=device, folder="runs/sac")

takes the place of a `RandomMemory`. Called again with the same folder, it goes on with the steps that are stored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from memmap_buffer import Field, NotEnoughDataError, ReplayBuffer
from memmap_buffer.adapters import AnyPath, Array, extra
from memmap_buffer.interop.trainer_memory import NEXT, SPARE_SLOTS, TERMINATED, TRUNCATED, TrainerMemory

with extra("skrl"):
    from skrl.memories.torch import Memory
    from skrl.utils.spaces.torch import compute_space_size


class DiskMemory(Memory):  # type: ignore[misc]  # skrl has no types here
    """A memory in a folder for DQN, DDPG, TD3 and SAC, which takes the place of skrl's.

    An observation is stored once, although it is also the one that follows the step before. A step is stored by the
    next `add_samples`, which shows whether its episode went on; it can be drawn from the `add_samples` after that on.
    Batches are drawn uniformly, with replacement. Tensors such as `tensors["observations"]` do not exist: `disk` has
    the data.

    Args:
        memory_size: steps of each environment.
        num_envs: how many environments step together.
        device: where batches go.
        folder: where the steps are; made at the first `add_samples`.
        max_timesteps: longer episodes are stored in parts; no transition is lost where they are cut.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`.

    Raises:
        SchemaMismatchError: later, when the folder is opened: it holds other tensors, or another `memory_size`.
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
        sizes: dict[str, Any] = {"max_timesteps": max_timesteps, "spare_slots": max(SPARE_SLOTS, 2 * num_envs)}
        self._memory = TrainerMemory(folder, memory_size * num_envs, num_envs, **{**sizes, **options})
        self._fields: dict[str, Field] = {}

    @cached_property
    def disk(self) -> ReplayBuffer:
        """The `memmap_buffer.ReplayBuffer`. Raises NotEnoughDataError before the agent has made its tensors."""
        if not self._fields:
            raise NotEnoughDataError("there is no tensor yet; the agent makes them when the trainer is made")
        fields = {
            name: Field(field.dtype, field.shape, final=f"{NEXT}{name}" in self._fields)
            for name, field in self._fields.items()
            if not name.startswith(NEXT)
        }
        ends = {TERMINATED: TERMINATED if TERMINATED in fields else None, TRUNCATED: TRUNCATED}
        return self._memory.open({**fields, TRUNCATED: ("bool", (1,))}, **ends)

    def __len__(self) -> int:
        return self.disk.num_steps if self._fields else 0

    def create_tensor(self, name: str, *, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
        """Declare a tensor.

        Args:
            name: of the tensor.
            size: of an entry, or the space of the entries; None: no tensor is declared.
            dtype: of its entries; None: float32.
            keep_dimensions: True: entries have the axes of `size`; False: they are flat, (size,).

        Returns:
            Whether the tensor is new.

        Raises:
            ValueError: there is a tensor of that name with another size or dtype.
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
        self._memory.clear()

    # Writing

    def add_samples(self, **tensors: Any) -> None:
        """Store one step of each environment.

        Args:
            tensors: name -> (num_envs, size); names that were not declared are left out.

        Raises:
            ValueError: there is no sample, or not one sample of each environment.
        """
        if not tensors:
            raise ValueError("There are no samples. Provide samples as key-value arguments")
        finals = self.disk.schema.final_names
        step = {name: self._rows(name, tensors[name]) for name in self._fields if tensors.get(name) is not None}
        step.pop(TRUNCATED, None)  # not all agents give it; so the next step shows whether the episode was cut
        self._memory.add(step, {name: step.pop(f"{NEXT}{name}") for name in finals})

    def _rows(self, name: str, tensor: Any) -> Array:
        values, shape = tensor.detach().cpu().numpy(), (self.num_envs, *self._fields[name].shape)
        if values.size != np.prod(shape):
            raise ValueError(f"Expected {name!r} of shape {shape}, got {values.shape}")
        return np.array(values.reshape(shape))

    def save(self, directory: str = "", *, format: str = "pt") -> None:
        """Wait until every step is on the disk; there is nothing else to save.

        Args:
            directory: without effect.
            format: without effect.
        """
        self._memory.save()

    def close(self) -> None:
        """Wait until every step is on the disk, and close the folder."""
        self._memory.close()

    # Reading

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Batches drawn uniformly.

        Args:
            names: of the tensors.
            batch_size: steps of all mini-batches together.
            mini_batches: among how many mini-batches the steps are shared.
            sequence_length: must be 1.

        Returns:
            For each mini-batch the tensors (steps, size) in the order of `names`; None if there is no such tensor.

        Raises:
            NotEnoughDataError: there is no transition.
            ValueError: `sequence_length` is not 1.
        """
        if sequence_length != 1:
            raise ValueError(f"sequence_length: got {sequence_length}, and single steps are drawn; leave it out")
        batch = self._memory.sample(batch_size, device=self.device, **self._draws())
        self.sampling_indexes = batch["_indices"].cpu()
        return _shared(batch, names, mini_batches)

    def sample_by_index(self, names: list[str], *, indexes: Any, mini_batches: int = 1) -> list[list[Any]]:
        """The steps of given indexes, such as those that were drawn before.

        Args:
            names: of the tensors.
            indexes: (B, 2), as `get_sampling_indexes` gives them, or (B,) positions.
            mini_batches: among how many mini-batches the steps are shared.

        Returns:
            As `sample` returns them.

        Raises:
            StaleEpisodeError: a step is overwritten or cleared.
        """
        return _shared(self.disk.batch(indexes, device=self.device, **self._draws()), names, mini_batches)

    def _draws(self) -> dict[str, Any]:
        return {"n_steps": 1, "next_fields": tuple(self.disk.schema.final_names), "return_indices": True}


def _shared(batch: Any, names: list[str], mini_batches: int) -> list[list[Any]]:
    """The tensors of a batch by name, for each mini-batch."""
    parts = [batch[name].tensor_split(mini_batches) if name in batch else [None] * mini_batches for name in names]
    return [list(tensors) for tensors in zip(*parts, strict=True)]
