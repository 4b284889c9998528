"""What a buffer holds: how much, and whole episodes by their position. torch is loaded when first needed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.dtypes import Array, check_count, decode
from memmap_buffer.errors import SchemaError, StaleEpisodeError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.loading.batch_reader import Patience, Reader
from memmap_buffer.loading.options import ReadOptions
from memmap_buffer.schema import Schema, nest
from memmap_buffer.views.folders import Anchors, Folders
from memmap_buffer.views.windows import Trajectory
from memmap_buffer.writing.validation import positions_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.loading.prefetch import Device


class Contents:
    """The part of `Readable` that needs no view."""

    _sources: Folders

    # What is there

    @property
    def schema(self) -> Schema:
        """The fields and meta fields."""
        return self._sources.schema

    @property
    def fieldnames(self) -> tuple[str, ...]:
        return tuple(self.schema.fields)

    @property
    def meta_fieldnames(self) -> tuple[str, ...]:
        return tuple(self.schema.meta_fields)

    def __len__(self) -> int:
        return self.num_episodes

    @property
    def num_episodes(self) -> int:
        """Visible episodes."""
        return sum(len(table) for table in self._sources.refresh())

    @property
    def num_steps(self) -> int:
        """Visible timesteps."""
        return sum(table.steps for table in self._sources.refresh())

    def can_sample(self, *, min_steps: int = 1, min_episodes: int = 1) -> bool:
        """Whether at least so many timesteps and episodes are visible; `sample` itself says why it has nothing."""
        check_count("min_steps", min_steps, 0)
        check_count("min_episodes", min_episodes, 0)
        return self.num_steps >= min_steps and self.num_episodes >= min_episodes

    @property
    def episode_lens(self) -> IntArray:
        """(episodes,) int64 timesteps of each episode, oldest first."""
        return np.concatenate([table.length[table.visible] for table in self._tables()])

    @property
    def serials(self) -> IntArray:
        """(episodes,) int64 the number of each episode, which it keeps for ever; oldest first."""
        return np.concatenate([table.serial[table.visible] for table in self._tables()])

    def _tables(self) -> list[EpisodeTable]:
        """The tables as they are now, source by source."""
        return [table for _, _, table in self._sources.by_number(self._sources.refresh())]

    @property
    def max_episodes(self) -> int:
        return sum(storage.layout.max_episodes for storage in self._sources.storages if not storage.withdrawn)

    @property
    def max_timesteps(self) -> int:
        return self._sources.max_timesteps

    def refresh(self) -> None:
        """See what was published since; every property, `sample` and new epoch does so by itself."""
        self._sources.refresh()

    # Whole episodes

    def episode(self, i: int) -> dict[str, Any]:
        """One episode whole, as numpy arrays: fields (T, *field), those with `final` (T + 1, *field) if it has its
        final observation, and its meta fields.

        Args: i: its position, 0 the oldest, -1 the newest. Raises: IndexError.
        """
        whole = self._read_whole(_position(i), view=Trajectory(final_observation=True))
        batch = {key: values[0] for key, values in whole.items()}
        out: dict[str, Any] = {}
        for name, field in self.schema.all.items():
            stop = batch["_lens"] + (field.final and batch["_has_final"])
            out[name] = decode(batch[name][:stop] if name in self.schema.fields else batch[name], field.dtype)
        return nest(out)

    def episodes(
        self, indices: Sequence[int] | slice | int | None = None, **options: Unpack[ReadOptions]
    ) -> dict[str, Array]:
        """Several episodes, or some of their fields, as numpy arrays under dotted names, without torch.

        Args:
            indices: positions among the episodes that the options choose, or a slice of them; None for all.
            options: those of `Options` for whole episodes, such as fields, filter_meta, split, part, return_indices.
        Returns: fields (E, Tmax, *field) padded with zeros, `_lens` (E,), meta fields (E, *field).
        Raises: SchemaError: an option is not for whole episodes. IndexError.
        """
        data = self._read_whole(indices, **options)
        known = self.schema.all
        return {key: decode(data[key], known[key].dtype) if key in known else data[key] for key in data}

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The item `i` of `dataset()`: one episode as tensors, unpadded, with `_lens`."""
        from memmap_buffer.loading.datasets import Batch, to_tensors

        item: dict[str, Any] = Batch(to_tensors(self._read_whole(_position(i))), 1)[0]
        return item

    def get_all_data(
        self,
        fields: Sequence[str] | None = None,
        meta_fields: Sequence[str] | None = None,
        device: Device = None,
    ) -> dict[str, Any]:
        """Everything at once, as tensors padded to the longest episode: fields (E, Tmax, *field), meta (E, *field).

        Args:
            fields, meta_fields: which; with both left out all, and `episode_lens`.
            device: where to put them.
        """
        from memmap_buffer.loading.datasets import to_tensors
        from memmap_buffer.loading.prefetch import to_device

        every = fields is None and meta_fields is None
        wanted = None if every else self.schema.require(fields or (), "fields", self.schema.fields)
        if not self.num_episodes:
            return {}
        batch = self._read_whole(view=Trajectory(wanted))
        batch["episode_lens"] = batch.pop("_lens")
        meta = (
            self.meta_fieldnames if every else self.schema.require(meta_fields or (), "meta_fields", self._meta_names())
        )
        keep = [*(self.fieldnames if wanted is None else wanted), *meta, *["episode_lens"] * every]
        data = to_tensors({name: batch[name] for name in keep})
        return data if device is None else to_device(data, device)

    def _meta_names(self) -> tuple[str, ...]:
        return (*self.meta_fieldnames, "episode_lens")

    def _read_whole(self, positions: Any = None, **options: Unpack[ReadOptions]) -> dict[str, Array]:
        """Episodes by position, None for all; looked up again where a writer went on in the middle of reading."""
        reader = Reader(self._sources, {**options, "on_stale": "raise"})
        if not reader.selection.view.per_episode:
            raise SchemaError(
                "episodes: these options cut episodes into parts; use dataset(), dataloader() or sample()"
            )
        reader.selection = replace(reader.selection, filter_fields={})  # by position, whatever `valid` excludes
        patience = Patience()
        while True:
            try:
                return reader.read(self._whole(reader, positions))
            except StaleEpisodeError:
                if not patience.wait():
                    raise

    def _whole(self, reader: Reader, positions: Any) -> Anchors:
        index = reader.index(refresh=True)
        return index.locate(positions_of(positions, len(index))[0])


def _position(i: Any) -> list[int]:
    try:
        return [operator.index(i)]
    except TypeError:
        raise SchemaError(f"episode: got {i!r}, expected one position, a whole number; see `episodes`") from None
