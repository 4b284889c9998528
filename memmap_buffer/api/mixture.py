"""Mixtures: one loader over several buffers of unlike fields, each read in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.api.concat import ConcatBuffer
from memmap_buffer.api.reading import Readable
from memmap_buffer.choices import Format, Length, Shares, Shuffle, Tail, check_choice
from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import NotABufferError, NotEnoughDataError, SchemaError
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.epochs import OrderedSampler
from memmap_buffer.paths import AnyPath

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.loading.datasets import EpisodeLoader
    from memmap_buffer.loading.options import BatchOptions
    from memmap_buffer.loading.prefetch import Device

NOT_OF_SOURCES = ("prioritized", "ragged", "to_named_tuple", "format")  # options that are of a whole batch


class Source:
    """A source of a mixture: what is read, its share, and how its items are made.

    Args:
        place: a buffer, or a folder, a root of shards or a URL of either, which is opened to be read.
        weight: its share, above 0; shares need not sum to 1.
        options: those of `Options`: view, fields, filters, split, transform, ….

    Raises:
        SchemaError: an option that a source of a mixture cannot have.
    """

    def __init__(self, place: Readable | AnyPath, weight: float = 1.0, **options: Unpack[BatchOptions]) -> None:
        if isinstance(weight, bool) or not isinstance(weight, (int, float, np.number)) or not 0 < weight < np.inf:
            raise SchemaError(f"weight: got {weight!r}, expected a number above 0")
        wrong = [name for name in NOT_OF_SOURCES if name in options]
        if wrong:
            raise SchemaError(f"Source: {wrong[0]} is no option of one source of a mixture; leave it out")
        self.buffer = place if isinstance(place, Readable) else _opened(place)
        self.weight, self.options = float(weight), options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Source({self.buffer!r}, weight={self.weight}{options})"


def mixture_loader(
    sources: Mapping[str, Source],
    batch_size: int,
    *,
    shares: Shares = "exact",
    length: Length | int = "longest",
    shuffle: Shuffle = True,
    drop_last: bool = False,
    seed: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    tail: Tail = "pad",
    device: Device = None,
    prefetch: int = 0,
    format: Format = "torch",
    **loader_options: Any,
) -> EpisodeLoader:
    """A loader whose batches mix items of several buffers, which may have other fields, shapes and dtypes.

    Each source is read by its own view, filters and transform. Its items are then joined with those of the others, key
    by key: along axes of unlike length with zeros behind the shorter ones, and zeros where a source has not the key.
    Such a key has a mask, `_present_<key>` (B, …), true where the item has the entry, of length 1 along axes that are
    alike, so that it broadcasts. Numbers take the dtype that holds those of all. `_source` (B,) int64 is the number of
    each item's source, in the order of `sources`.

    `state_dict` and `load_state_dict` of the loader resume an epoch to the bit, for any number of workers.

    Args:
        sources: name -> source.
        batch_size: how many items a batch has.
        shares: "exact": any run of items has the shares of the weights, what does not divide carried over; "chance":
            the same shares, but of a whole epoch, in a random order.
        length: an epoch ends when the "longest" source was gone round once by its share, the others more than once, or
            the "shortest"; or after so many items. A source that is gone round begins anew in another order.
        shuffle: how each source is gone round, see `ReplayBuffer.dataloader`.
        drop_last: leave out an incomplete last batch.
        seed: fixes the order of all sources, and the shares by chance; None draws a seed from torch's generator.
        rank: see `ReplayBuffer.dataloader`; likewise `world_size`, `tail`, `device` and `prefetch`.
        format: "torch" or "numpy".
        loader_options: any argument of `torch.utils.data.DataLoader`, such as num_workers.

    Raises:
        SchemaError: options contradict each other; a key has other axes in another source.
        NotEnoughDataError: a source has no item.
    """
    from memmap_buffer.loading.datasets import EpisodeLoader, check_loader_options
    from memmap_buffer.loading.distributed import ranks_of, seed_of
    from memmap_buffer.loading.mixture import MixtureDataset, MixtureSampler

    check_count("batch_size", batch_size)
    check_count("prefetch", prefetch, 0)
    check_choice("shares", shares, Shares)
    check_choice("format", format, Format)
    check_loader_options(loader_options, signature(mixture_loader).parameters)
    if not isinstance(length, str):
        check_count("length", length)
    else:
        check_choice("length", length, Length)
    if not isinstance(sources, Mapping) or not sources:
        raise SchemaError(f"sources: got {sources!r}, expected name -> Source")
    for name, source in sources.items():
        if not isinstance(name, str) or not isinstance(source, Source):
            raise SchemaError(f"sources: got {name!r}: {source!r}, expected a string and a Source")
    if device is not None and format == "numpy":
        raise SchemaError(f"device: got {device!r} with format='numpy'; arrays stay where they are; leave one out")
    ranks = ranks_of(rank, world_size)
    seed = seed_of(seed, ranks, loader_options.get("generator"))
    members = {}
    for name, source in sources.items():
        reader = BatchReader(source.buffer._folders, {**source.options, "format": "numpy"})
        weights = source.buffer._weights
        order: dict[str, Any] = {"shuffle": shuffle, "weights": weights, "ranks": ranks}
        members[name] = OrderedSampler(reader, batch_size=1, drop_last=False, seed=seed, **order)
    readers = {name: member.reader for name, member in members.items()}
    shared = [source.weight for source in sources.values()]
    sizes: dict[str, Any] = {"batch_size": int(batch_size), "drop_last": drop_last, "seed": seed}
    sampler = MixtureSampler(members, shared, exact=shares == "exact", length=length, **sizes, ranks=ranks, tail=tail)
    dataset = MixtureDataset(readers, format)
    if not len(sampler):
        raise NotEnoughDataError(f"length={length!r}, batch_size={batch_size} and drop_last={drop_last} give no batch")
    return EpisodeLoader(dataset, sampler=sampler, device=device, prefetch=prefetch, **loader_options)  # type: ignore[arg-type]


def _opened(place: AnyPath) -> Readable:
    """A folder or URL, or the root of several, opened to be read."""
    try:
        return ReplayBuffer.from_folder(place, read_only=True)
    except NotABufferError:
        return ConcatBuffer.from_root(place)
