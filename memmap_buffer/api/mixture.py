"""`mixture_loader`: one loader over several buffers whose fields differ, each read with options of its own (`Source`).

Here the arguments are checked; the work is in `loading.mixture`.
"""

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

NOT_OF_SOURCES = ("prioritized", "ragged", "to_named_tuple", "format")  # options that concern a whole batch


class Source:
    """A source of a mixture: a buffer, its share, and the options by which its items are read.

    Args:
        place: a buffer; or a folder, a root of shards, or the URL of one of these, which is opened for reading.
        weight: its share, above 0; shares need not sum to 1.
        options: those of `Options`: view, fields, filters, split, transform, ….

    Raises:
        SchemaError: `weight` is no such number, or a source of a mixture cannot have an option.
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
    """A loader whose batches mix items of several buffers, whose fields, shapes and dtypes may differ.

    Each source is read with its own view, filters and transform. The items of all sources are then joined key by key:
    shorter axes are padded with zeros behind, and a source without the key gives zeros. Such a key has a mask
    `_present_<key>` (B, …), true where the item has the entry; along axes of equal length the mask has length 1, so it
    broadcasts. Numbers get the dtype that holds those of all sources. `_source` (B,) int64 is the number of each item's
    source, in the order of `sources`.

    `state_dict` and `load_state_dict` of the loader resume an epoch exactly, with any number of workers.

    Args:
        sources: name -> source.
        batch_size: the number of items in a batch.
        shares: "exact": any run of successive items has the shares of the weights, with remainders carried over;
            "chance": only a whole epoch has them, and the sources come in a random order.
        length: an epoch ends when the "longest" or the "shortest" source, by its share, was read once; or after this
            number of items. A source that was read to its end begins anew, in another order.
        shuffle: the order within each source, see `ReplayBuffer.dataloader`.
        drop_last: leave out an incomplete last batch.
        seed: fixes the order of all sources, and the shares by chance; None draws a seed from torch's generator.
        rank: see `ReplayBuffer.dataloader`, also for `world_size`, `tail`, `device` and `prefetch`.
        format: "torch" or "numpy".
        loader_options: any argument of `torch.utils.data.DataLoader`, such as num_workers.

    Raises:
        SchemaError: options contradict each other, or a key has another number of axes in another source.
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
        order: dict[str, Any] = {"shuffle": shuffle, "weights": source.buffer._weights, "ranks": ranks}
        members[name] = OrderedSampler(reader, batch_size=1, drop_last=False, seed=seed, **order)
    readers = {name: member.reader for name, member in members.items()}
    weights = [source.weight for source in sources.values()]
    sizes: dict[str, Any] = {"batch_size": int(batch_size), "drop_last": drop_last, "seed": seed}
    sampler = MixtureSampler(members, weights, exact=shares == "exact", length=length, **sizes, ranks=ranks, tail=tail)
    dataset = MixtureDataset(readers, format)
    if not len(sampler):
        raise NotEnoughDataError(f"length={length!r}, batch_size={batch_size} and drop_last={drop_last} give no batch")
    return EpisodeLoader(dataset, sampler=sampler, device=device, prefetch=prefetch, **loader_options)  # type: ignore[arg-type]


def _opened(place: AnyPath) -> Readable:
    """The buffer of a folder or URL, or of a root of several, opened for reading."""
    try:
        return ReplayBuffer.from_folder(place, read_only=True)
    except NotABufferError:
        return ConcatBuffer.from_root(place)
