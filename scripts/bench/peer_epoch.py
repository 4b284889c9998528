"""An epoch from a URL by this library or by another, in a process of its own, so that memory is that of one of them.

python peer_epoch.py write NAME FOLDER KIND STEPS SHARDS     another library writes the steps of a kind there
python peer_epoch.py read NAME URL LOCAL KIND STEPS WORKERS  an epoch; its last line is JSON about it

The interpreter may lack all packages of this library but numpy and torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from bench.data import SCHEMAS, episodes

BATCH = 256
WINDOWS = 8  # the windows of shuffle="block" that an epoch of ours has: it fetches one while the one before is given
SHARD_BYTES = 1 << 24  # of a file of theirs: as each worker needs files of its own, several of the least data too
BUFFERED = 1000  # samples that webdataset mixes, as in its documentation

Batches = Iterable[dict[str, Any]]


def steps_of(kind: str, steps: int, shards: int) -> Iterator[dict[str, Any]]:
    """The published steps one by one: field -> (*field), of at least one axis."""
    for i in range(shards):
        for arrays in episodes(SCHEMAS[kind], steps // shards, i):
            arrays["terminated"] = arrays["terminated"].view(np.uint8)  # mosaicml-streaming has no bool
            for t in range(len(arrays["reward"])):
                yield {name: np.atleast_1d(values[t]) for name, values in arrays.items()}


def library_of(name: str) -> Any:
    """The module; mosaicml-streaming's also where its torchvision is built for CUDA, and torch is not."""
    if name == "mosaic":
        try:
            import torchvision  # noqa: F401
        except RuntimeError:  # its operators were not loaded; none is used here, but it says more about these two
            import torch

            for one in ("nms", "qnms"):
                torch.library.define(f"torchvision::{one}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return importlib.import_module(MODULES[name])


# How each writes


def write_mosaic(library: Any, folder: str, kind: str, steps: int, shards: int) -> None:
    some = next(steps_of(kind, steps, shards))
    columns = {name: f"ndarray:{value.dtype}:{','.join(map(str, value.shape))}" for name, value in some.items()}
    with library.MDSWriter(out=folder, columns=columns, size_limit=SHARD_BYTES) as writer:
        for step in steps_of(kind, steps, shards):
            writer.write(step)


def write_litdata(library: Any, folder: str, kind: str, steps: int, shards: int) -> None:
    options: dict[str, Any] = {"chunk_bytes": SHARD_BYTES, "num_workers": 1, "start_method": "fork", "verbose": False}
    library.optimize(_steps_of, [(kind, steps, shards)], folder, **options)


def _steps_of(given: tuple[str, int, int]) -> Iterator[dict[str, Any]]:
    yield from steps_of(*given)


def write_webdataset(library: Any, folder: str, kind: str, steps: int, shards: int) -> None:
    """A step is one file in a tar archive: a file for each field would take 1 KiB a field."""
    Path(folder).mkdir()
    with library.ShardWriter(f"{folder}/%05d.tar", maxsize=SHARD_BYTES, encoder=False, verbose=0) as writer:
        for i, step in enumerate(steps_of(kind, steps, shards)):
            writer.write({"__key__": f"{i:09}", "bin": b"".join(value.tobytes() for value in step.values())})


# How each reads


def read_ours(library: Any, url: str, local: str, kind: str, steps: int, workers: int) -> Batches:
    buffer = library.ConcatBuffer.from_root(url, cache=local)
    options: dict[str, Any] = {"shuffle": "block", "shuffle_window": -(-steps // WINDOWS), "timestep_level": True}
    return buffer.dataloader(BATCH, seed=0, num_workers=workers, **options)


def read_mosaic(library: Any, url: str, local: str, kind: str, steps: int, workers: int) -> Batches:
    import torch

    os.environ["S3_ENDPOINT_URL"] = url
    options: dict[str, Any] = {"shuffle": True, "shuffle_seed": 0, "batch_size": BATCH}
    data = library.StreamingDataset(remote="s3://mosaic", local=local, **options)
    return torch.utils.data.DataLoader(data, BATCH, num_workers=workers)


def read_litdata(library: Any, url: str, local: str, kind: str, steps: int, workers: int) -> Batches:
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # no public option lets it ask a server that has no TLS
    options = {"endpoint_url": url}
    data = library.StreamingDataset("s3://litdata", local, shuffle=True, seed=0, storage_options=options)
    return library.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


def read_webdataset(library: Any, url: str, local: str, kind: str, steps: int, workers: int) -> Batches:
    shards = url.split()  # it has no listing
    data = library.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(BUFFERED, seed=0).map(Row(kind))
    return library.WebLoader(data, batch_size=BATCH, num_workers=workers)


class Row:
    """What turns a file of webdataset into a step."""

    def __init__(self, kind: str) -> None:
        step = next(steps_of(kind, 0, 1))
        self._dtype = np.dtype([(name, value.dtype, value.shape) for name, value in step.items()])

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        row = np.frombuffer(sample["bin"], self._dtype)[0]
        return {name: row[name] for name in self._dtype.names or ()}


MODULES = {"ours": "memmap_buffer", "mosaic": "streaming", "litdata": "litdata", "webdataset": "webdataset"}
WRITERS: dict[str, Callable[..., None]] = {
    "mosaic": write_mosaic,
    "litdata": write_litdata,
    "webdataset": write_webdataset,
}
READERS: dict[str, Callable[..., Batches]] = {
    "ours": read_ours,
    "mosaic": read_mosaic,
    "litdata": read_litdata,
    "webdataset": read_webdataset,
}


def epoch(name: str, url: str, local: str, kind: str, steps: int, workers: int) -> dict[str, float]:
    """Seconds of an epoch and until its first batch, from the call that opens; the steps, and the sum of rewards."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    library = library_of(name)
    begin, first, count, reward = time.perf_counter(), 0.0, 0, 0.0
    for batch in READERS[name](library, url, local, kind, steps, workers):
        first = first or time.perf_counter() - begin
        count, reward = count + len(batch["reward"]), reward + float(batch["reward"].double().sum())
    return {"seconds": time.perf_counter() - begin, "first": first, "steps": count, "reward": reward}


if __name__ == "__main__":
    task, name, *given = sys.argv[1:]
    if task == "write":
        WRITERS[name](library_of(name), given[0], given[1], int(given[2]), int(given[3]))
    else:
        print(json.dumps(epoch(name, given[0], given[1], given[2], int(given[3]), int(given[4]))))
