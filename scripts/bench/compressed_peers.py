"""Other ways to keep the same frames, one file or store each: HDF5 and Zarr with a chunk a frame, torchrl, a video."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.data import Array, Run
from bench.measure import Call
from memmap_buffer.adapters import keep_scheduling


@dataclass(frozen=True)
class Frames:
    """Frames (N, height, width, …), by name."""

    run: Run
    name: str
    frames: Array

    def once(self, peer: str, make: Any) -> Any:
        """What `make` gives, which is called once a run, with a path of its own."""
        return self.run.once(
            ("peer", peer, self.name), lambda: make(self.run.folder(peer.replace(" ", "-")), self.frames)
        )


def each_pair(read: Any, rows: list[int]) -> Call:
    """Read a frame and its successor, for each row."""
    return lambda: [read(row) for row in rows]


class Hdf5:
    """h5py, a chunk a frame; a pair is one read."""

    lossy = False

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self._options = f"HDF5 {name}", options

    def load(self) -> None:
        import h5py  # noqa: F401

        if self.name.endswith("blosc"):
            import hdf5plugin

            self._options = dict(hdf5plugin.Blosc(cname="zstd", clevel=5))

    def _make(self, path: Path, frames: Array) -> Any:
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset("frame", data=frames, chunks=(1, *frames.shape[1:]), **self._options)
        return path, h5py.File(path, "r")["frame"]

    def bytes_of(self, data: Frames) -> int:
        return data.once(self.name, self._make)[0].stat().st_size

    def batch(self, data: Frames, rows: list[int]) -> Call:
        frames = data.once(self.name, self._make)[1]
        return each_pair(lambda row: frames[row : row + 2], rows)


class Zarr:
    """zarr 3 with its default codec, Zstandard, a chunk a frame; all rows are one selection."""

    name, lossy = "zarr 3", False

    def load(self) -> None:
        import zarr  # noqa: F401

    def _make(self, path: Path, frames: Array) -> Any:
        import zarr

        array = zarr.create_array(str(path), shape=frames.shape, chunks=(1, *frames.shape[1:]), dtype=frames.dtype)
        array[:] = frames
        return path, array

    def bytes_of(self, data: Frames) -> int:
        folder = data.once(self.name, self._make)[0]
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def batch(self, data: Frames, rows: list[int]) -> Call:
        array, wanted = data.once(self.name, self._make)[1], np.unique([*rows, *(row + 1 for row in rows)])
        return lambda: array.oindex[wanted]


class TorchRL:
    """Its compressed list storage, in memory; 512 single frames."""

    name, lossy = "torchrl", False

    def load(self) -> None:
        from torchrl.data import CompressedListStorage  # noqa: F401

    def _make(self, path: Path, frames: Array) -> Any:
        import torch
        from tensordict import TensorDict
        from torchrl.data import CompressedListStorage, TensorDictReplayBuffer

        buffer = TensorDictReplayBuffer(storage=CompressedListStorage(len(frames)), batch_size=512)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            buffer.extend(TensorDict({"frame": torch.from_numpy(frames)}, [len(frames)]))
        return buffer

    def bytes_of(self, data: Frames) -> int:
        return sum(int(one["frame"].numel()) for one in data.once(self.name, self._make)._storage._storage)

    def batch(self, data: Frames, rows: list[int]) -> Call:
        buffer = data.once(self.name, self._make)
        return lambda: buffer.sample()["frame"]


class Video:
    """A video as LeRobot makes it (AV1, a key frame every 2, crf 30), read as its loader does without torchcodec."""

    name, lossy = "LeRobot's video", True
    options: ClassVar[dict[str, str]] = {"g": "2", "crf": "30"}

    def load(self) -> None:
        os.environ.setdefault("SVT_LOG", "1")  # else it tells its options for every video
        import av

        if "libsvtav1" not in av.codecs_available:
            raise ImportError("this av has no libsvtav1")

    def _make(self, path: Path, frames: Array) -> Any:
        import av

        path = path.with_suffix(".mp4")
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libsvtav1", 30, options=self.options)
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
            with keep_scheduling():  # else all that is measured from here on runs as threads of real time
                stream.codec_context.open()
            for frame in frames:
                picture = av.VideoFrame.from_ndarray(frame, "gray" if frame.ndim == 2 else "rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
        return path, av.open(str(path))

    def bytes_of(self, data: Frames) -> int:
        return data.once(self.name, self._make)[0].stat().st_size

    def _read(self, data: Frames, row: int, count: int) -> list[Array]:
        container, found = data.once(self.name, self._make)[1], []
        stream, kind = container.streams.video[0], "gray" if data.frames.ndim == 3 else "rgb24"
        tick = int(1 / (stream.time_base * stream.average_rate))
        container.seek(row * tick, stream=stream)
        for frame in container.decode(stream):
            if frame.pts >= row * tick:
                found.append(frame.to_ndarray(format=kind))
                if len(found) == count:
                    break
        return found

    def batch(self, data: Frames, rows: list[int]) -> Call:
        return each_pair(lambda row: self._read(data, row, 2), rows)

    def pictures(self, data: Frames, rows: list[int]) -> Call:
        return each_pair(lambda row: self._read(data, row, 1), rows)

    def error(self, data: Frames) -> float:
        """The mean difference of a frame in the middle."""
        row = len(data.frames) // 2
        return float(np.abs(self._read(data, row, 1)[0].astype(int) - data.frames[row]).mean())


PEERS: tuple[Any, ...] = (
    Hdf5("gzip", compression="gzip"),
    Hdf5("lzf", compression="lzf"),
    Hdf5("blosc"),
    Zarr(),
    TorchRL(),
    Video(),
)
