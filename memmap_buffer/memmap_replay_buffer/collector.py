"""Rollouts in memory, whose columns are asked for by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import Collector, ReplayBuffer, SchemaError
from memmap_buffer.adapters import Array, matches, to_numpy

if TYPE_CHECKING:
    from memmap_buffer.adapters import Device


class EpisodeCollector(Collector):
    """A `Collector` whose columns are asked for by name.

    Args:
        replay_buffer: the buffer to which the timesteps are stored.
        num_groups: G, how many groups step together, such as environments.
        fieldnames: the fields that are collected; default: all.
        meta_fieldnames: the meta fields that are collected; default: all.
        strict: whether an unknown name raises; otherwise it is collected, and not stored.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        num_groups: int,
        fieldnames: Sequence[str] | None = None,
        meta_fieldnames: Sequence[str] | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__(replay_buffer, num_groups, fieldnames, meta_fieldnames, strict, complete=False)

    def append(self, **step: Any) -> None:
        """Append one timestep of every group.

        Args:
            step: field -> (G, *field) or (G, 1, *field); meta field -> one value for all groups. A field that is given
                at no timestep is stored as its default, else as zeros.
        """
        super().append(**{name: self._of_groups(name, value) for name, value in step.items()})

    def extend(self, **steps: Any) -> None:
        """Append T timesteps of every group; or add columns to the T timesteps that were appended.

        Args:
            steps: field -> (T, G, *field).
        """
        if not len(self):
            super().extend(**steps)
            return
        for name, values in steps.items():
            if self.strict:
                self.schema.require([name], "extend")
            self[name] = values

    def _of_groups(self, name: str, value: Any) -> Any:
        field, array = self.schema.all.get(name), to_numpy(value)
        if field is None:
            return value
        if name in self.schema.meta_fields and array.shape == field.shape:
            return np.broadcast_to(array, (self.num_groups, *field.shape))
        return array[:, 0] if array.shape == (self.num_groups, 1, *field.shape) else array

    def groups(self, name: str) -> list[Any]:  # type: ignore[override]
        """A column of each group: (T, *field); of a meta field its last value.

        Args:
            name: of the column.
        """
        return list(self.env_major(name))

    def time_major(self, name: str) -> Any:  # type: ignore[override]
        """A column, (T, G, *field); of a meta field (G, *field).

        Args:
            name: of the column.
        """
        from memmap_buffer.adapters import to_tensors

        return to_tensors({"column": np.array(self._column(name))})["column"]

    def env_major(self, name: str) -> Any:  # type: ignore[override]
        """A column, (G, T, *field); of a meta field (G, *field).

        Args:
            name: of the column.
        """
        column = self.time_major(name)
        return column if name in self.schema.meta_fields else column.swapaxes(0, 1)

    def all_data(self, fields: Sequence[str] | None = None, device: Device = None) -> dict[str, Any]:  # type: ignore[override]
        """Name -> (G, T, *field).

        Args:
            fields: the columns that are wanted; default: those that are no meta fields.
            device: where to put them.
        """
        from memmap_buffer.adapters import to_device

        names = [name for name in self.columns if name not in self.schema.meta_fields] if fields is None else fields
        data = {name: self.env_major(name) for name in names}
        return data if device is None else to_device(data, device)

    def dataloader(
        self,
        batch_size: int,
        fields: Sequence[str] | None = None,
        filter_fields: Mapping[str, Any] | None = None,
        to_named_tuple: Sequence[str] = (),
        shuffle: bool = False,
        device: Device = None,
        **options: Any,
    ) -> Any:
        """A PyTorch DataLoader of the G · T timesteps, group by group: name -> (B, *field).

        Args:
            batch_size: how many timesteps a batch has.
            fields: the columns that are wanted; default: those that are no meta fields.
            filter_fields: column -> condition; only timesteps for which all hold.
            to_named_tuple: the columns of the named tuple that a batch becomes.
            shuffle: in a random order, another one each epoch.
            device: where to put batches.
            options: any other argument of `torch.utils.data.DataLoader`.

        Raises:
            SchemaError: nothing was collected, or there is no such column.
        """
        from memmap_buffer.adapters import loader_of

        columns = {n: c.swapaxes(0, 1) for n, c in self.columns.items() if n not in self.schema.meta_fields}
        flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in columns.items()}
        keep = np.ones(len(self) * self.num_groups, np.bool_)
        for name, condition in (filter_fields or {}).items():
            keep &= matches(self._among(name, flat), condition, name)
        wanted = {name: self._among(name, flat)[keep] for name in (flat if fields is None else fields)}
        return loader_of(wanted, batch_size, tuple(to_named_tuple), device, shuffle=shuffle, **options)

    def _column(self, name: str) -> Array:
        column = self._among(name, self.columns)
        return column[-1] if name in self.schema.meta_fields else column

    def _among(self, name: str, columns: Mapping[str, Array]) -> Array:
        if name not in columns:
            raise SchemaError(f"column {name!r}: collected are {', '.join(columns) or 'none'}")
        return columns[name]
