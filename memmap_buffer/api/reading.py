"""What every buffer can be asked: its episodes, datasets, loaders, samples. torch is loaded when first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.api.contents import Contents
from memmap_buffer.dtypes import to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.lock import Turn
from memmap_buffer.loading.batch_reader import ArraySpec, Reader
from memmap_buffer.loading.option_keys import key_of
from memmap_buffer.loading.options import ReadOptions
from memmap_buffer.loading.prioritized import PrioritizedDraws, Trees, update_priorities
from memmap_buffer.loading.samplers import UniformSampler
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.views.folders import Folders

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.loading.datasets import EpisodeDataset, EpisodeLoader
    from memmap_buffer.loading.prefetch import Device

MAX_KEPT = 32  # option sets whose index `sample` keeps


class Readable(Contents):
    """The reading half of `ReplayBuffer` and `ConcatBuffer`.

    Args: sources: the folders. weights: exact shares of each batch by source, or None.
    """

    def __init__(self, sources: Folders, weights: Sequence[float] | None = None) -> None:
        self._sources = sources
        self._weights = weights
        self._rng: np.random.Generator | None = None
        self._draws: dict[Any, UniformSampler | PrioritizedDraws] = {}
        self._priorities: dict[str, Trees] = {}
        self._opening = Turn()

    @cached_property
    def _torch(self) -> ModuleType:
        """What needs torch; to ask for it by an import each time is dearer than some batches' copies."""
        from memmap_buffer.loading import datasets

        return datasets

    # Batches

    def dataset(self, **options: Unpack[ReadOptions]) -> EpisodeDataset:
        """A map-style PyTorch dataset; see `Options` for the options.

        Raises: SchemaError: options that contradict each other or the schema. NotEnoughDataError: nothing to read.
        """
        from memmap_buffer.loading.datasets import EpisodeDataset

        reader = Reader(self._sources, options)
        reader.require(reader.index(refresh=True))
        return EpisodeDataset(reader, self._weights)

    def dataloader(
        self,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        drop_last: bool = False,
        seed: int | None = None,
        shuffle_window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "pad",
        device: Device = None,
        prefetch: int = 0,
        dataset: EpisodeDataset | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> EpisodeLoader:
        """A PyTorch DataLoader whose batches are gathered whole; every epoch sees the episodes published since.

        `state_dict` and `load_state_dict` of the loader resume an epoch in another process.

        Args:
            batch_size: items a batch.
            shuffle: draw each epoch without replacement in an order fixed by (seed, epoch). "block": from disk, for a
                store larger than memory: blocks of neighbouring items are taken in a random order, 64 together, and
                shuffled within that window. With `prioritized` every batch is drawn by priority, with replacement, in
                this process: workers only gather.
            shuffle_window: with "block", how many items the window has; default: as many as take 256 MiB. The
                system's page cache must hold two windows, this one and the next; nothing else grows with it.
            drop_last: leave out an incomplete last batch.
            seed: fixes the order; None draws one from torch's generator.
            rank, world_size: which part of every epoch this process gives, and of how many; default: those of
                torch.distributed if it is initialised, and then every rank must begin each epoch, where rank 0 tells
                the others its seed and which episodes there are. Give 0 and 1 to a loader that only one rank uses.
            tail: where the items do not divide by the ranks, "pad" repeats a few, "drop" leaves a few out, and "uneven"
                gives every item once, so that some ranks have one more, or a batch: to validate with.
            device: move batches there.
            prefetch: keep this many batches ready, by a thread of this process that gathers, pins and moves them.
            dataset: read this one, instead of one made from the options.
            options: those of `Options` (`dataset_kwargs` adds to them), and any argument of
                `torch.utils.data.DataLoader`, such as num_workers.

        Raises: SchemaError, NotEnoughDataError.
        """
        from memmap_buffer.loading.datasets import make_loader

        known = {name: value for name, value in options.items() if name in ReadOptions.__annotations__}
        # None stands for "not given", but for `terminated`, where it says that nothing does.
        own = {name: value for name, value in known.items() if value is not None or name == "terminated"}
        loader_options = {name: value for name, value in options.items() if name not in ReadOptions.__annotations__}
        own |= dataset_kwargs or {}
        if dataset is not None and own:
            raise SchemaError(
                f"options: a dataset has its own; give {', '.join(own)} to dataset(), or leave it out here"
            )
        reader = Reader(self._sources, own) if dataset is None else dataset.reader
        draws = self._make_draws(reader)
        return make_loader(
            reader,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            weights=self._weights,
            shuffle_window=shuffle_window,
            rank=rank,
            world_size=world_size,
            tail=tail,
            device=device,
            prefetch=prefetch,
            dataset=dataset,
            draws=draws if isinstance(draws, PrioritizedDraws) else None,
            **loader_options,
        )

    def sample(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        device: Device = None,
        replacement: bool = True,
        **options: Unpack[ReadOptions],
    ) -> Any:
        """One batch drawn uniformly, without a loader: the same options, the same batch.

        Args:
            seed: the same seed gives the same batch, as long as the episodes are the same; without it draws go on from
                a seed that torch's generator gave at the first call.
            device: move the batch there.
            replacement: whether an item may be drawn twice.

        Raises: SchemaError. NotEnoughDataError: there is nothing to draw from, or not so much.
        """
        draws = self._draws_of(options)
        if seed is not None:
            rng = self._torch.seeded_rng(seed)
        elif self._rng is None:
            rng = self._rng = self._torch.seeded_rng()
        else:
            rng = self._rng
        return self._torch.sample(draws, batch_size, rng, device, seed is not None, replacement)

    def batch(self, indices: Any = None, *, device: Device = None, **options: Unpack[ReadOptions]) -> Any:
        """The items of `dataset` at some positions, as one batch.

        Args: indices: (B,) positions, negative ones from the end; None: all items. device: move the batch there.
        Raises: SchemaError. NotEnoughDataError: there are no items. IndexError: there are not so many.
        """
        from memmap_buffer.loading.datasets import batch_of

        return batch_of(self._draws_of(options).reader, indices, device)

    def to_dataframe(self, indices: Any = None, **options: Unpack[ReadOptions]) -> Any:
        """Items as a pandas table, one row each; see `interop.pandas.to_dataframe`."""
        from memmap_buffer.interop.pandas import to_dataframe

        return to_dataframe(self, indices, **options)

    def elements(self, batch_size: int | None = None, **options: Unpack[ReadOptions]) -> dict[str, ArraySpec]:
        """What a batch holds, before it is transformed: dotted key -> `ArraySpec` (shape, dtype). Nothing is read.

        Args: batch_size: the first axis, if it is known.
        Raises: SchemaError: options that contradict each other or the schema.
        """
        return Reader(self._sources, options).elements(batch_size)

    def _draws_of(self, options: Mapping[str, Any]) -> UniformSampler | PrioritizedDraws:
        """What draws with some options, kept for the next time."""
        try:
            draws = self._draws.get(tuple(options.items()))  # most options are their own key
        except TypeError:
            draws = None
        if draws is not None:
            return draws
        key = key_of(options)
        draws = self._draws.get(key)
        if draws is None or key_of(draws.reader.given) != key:  # a list or what a closure holds has changed since
            draws = self._make_draws(Reader(self._sources, options))
            self._draws = {key: draws} if len(self._draws) >= MAX_KEPT else {**self._draws, key: draws}
        return draws

    # Priorities

    def update_priorities(self, indices: Any, td_errors: Any, *, name: str = "td") -> int:
        """Give the steps of a prioritised batch the priorities of their errors δ: (|δ| + ε)^α.

        Args:
            indices: `_indices` or `_index` of the batch. td_errors: (B,), or (B, L) for the L steps from each item's
                first on; (B,) of whole episodes is given to every step.
            name: of the `Prioritized` that drew it.

        Returns: how many items were dropped because their episode was overwritten or cleared meanwhile.
        Raises: SchemaError: shapes that do not fit, an error that is no finite number, or an unknown name.
        """
        if name not in self._priorities:
            known = ", ".join(self._priorities) or "none yet"
            raise SchemaError(f"update_priorities: no batch was drawn by priorities {name!r}; known are {known}")
        return update_priorities(self._priorities[name], to_numpy(indices), to_numpy(td_errors))

    def checkpoint(self) -> None:
        """Wait until the priorities are on the disk; `flush` and `close` do so, too."""
        for priorities in list(self._priorities.values()):
            priorities.checkpoint()

    def _make_draws(self, reader: Reader) -> UniformSampler | PrioritizedDraws:
        how = reader.prioritized
        if how is None:
            return UniformSampler(reader, self._weights)
        priorities = None if how.meta is not None else self._trees(how)
        return PrioritizedDraws(reader, how, priorities, self._weights)

    def _trees(self, how: Prioritized) -> Trees:
        with self._opening.lock:
            priorities = self._priorities.get(how.name)
            if priorities is None:
                priorities = Trees(self._sources, how.name, alpha=how.alpha, epsilon=how.epsilon)
                priorities.open()
                self._priorities[how.name] = priorities
            priorities.require(alpha=how.alpha, epsilon=how.epsilon)
            return priorities

    def _close_priorities(self) -> None:
        while self._priorities:
            self._priorities.popitem()[1].close()
