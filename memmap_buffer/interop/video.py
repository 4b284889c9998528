"""Films: PyAV writes .mp4 files and reads frames by their times; Pillow writes .gif files and contact sheets.

Both need the extra `video`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import CorruptBufferError, SchemaError
from memmap_buffer.adapters import AnyPath, Array, extra, frames_of, keep_scheduling, path_of, progress

FAR = 2.0  # seconds ahead, from which on a jump costs less than decoding all frames up to there


def write_video(path: AnyPath, frames: Array, fps: int = 30) -> Path:
    """Write images as a film.

    Args:
        path: a file that ends in .gif, or in .mp4, .mkv or .mov.
        frames: as for `frames_of`, at least one.
        fps: images a second.

    Returns:
        The path.

    Raises:
        SchemaError: there are no images, or the path ends in something else.
        ImportError: the extra `video` is not installed.
    """
    place = path_of(path)
    write = FORMATS.get(place.suffix.lower())
    if write is None:
        raise SchemaError(f"{place}: expected a name that ends in one of {', '.join(FORMATS)}")
    if not len(frames):
        raise SchemaError(f"{place}: got no images, expected at least one")
    write(place, frames_of(frames, "frames"), fps)
    return place


def sheet_of(frames: Array, rows: int, columns: int) -> Array:
    """A picture of images spread evenly over a film, in rows from left to right.

    Args:
        frames: as for `frames_of`, at least one.
        rows: how many rows.
        columns: how many images a row has.

    Returns:
        (rows · H, columns · W, 3) uint8.
    """
    images = frames_of(frames, "frames")
    chosen: Array = images[np.linspace(0, len(images) - 1, rows * columns).astype(int)]
    return grid_of(chosen, columns)


def grid_of(images: Array, columns: int) -> Array:
    """(N, H, W, 3) uint8 as one image, in rows from left to right; the last row is filled up with black."""
    count, height, width = images.shape[:3]
    rows = -(-count // columns)
    grid = np.zeros((rows * columns, height, width, 3), np.uint8)
    grid[:count] = images
    return grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def write_mp4(place: Path, frames: Array, fps: int) -> None:
    """Write (T, H, W, 3) uint8 as H.264."""
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # H.264 halves the colours
    with closing(FilmWriter(place, frames.shape[1:3], fps)) as film:
        film.write(progress(frames, "frames"))


class FilmWriter:
    """A film file to which frames are added.

    Attributes:
        size: how many bytes the encoder has given so far.
        info: height, width, codec, pix_fmt, is_depth_map, fps and channels of the film, as LeRobot names them.

    Args:
        place: of the file.
        shape: height and width of the frames.
        fps: frames a second.
        codec: PyAV's name of the codec.
        options: of the codec.

    Raises:
        SchemaError: the codec takes no frames of that size.
        ImportError: the extra `video` is not installed.
    """

    def __init__(
        self,
        place: Path,
        shape: tuple[int, ...],
        fps: float,
        codec: str = "libx264",
        options: Mapping[str, str] | None = None,
    ) -> None:
        with extra("video"):
            import av
        self._av = av
        self._film: Any = av.open(str(place), "w")
        stream: Any = self._film.add_stream(
            codec, rate=Fraction(fps).limit_denominator(1001), options=dict(options or {})
        )
        stream.height, stream.width, stream.pix_fmt = *shape, "yuv420p"
        self._stream: Any = stream
        self.size = 0
        try:
            with keep_scheduling():
                self._stream.codec_context.open()
        except av.error.FFmpegError as error:
            self._film.close()
            raise SchemaError(
                f"{place}: {codec} takes no frames of {shape[0]} x {shape[1]} ({error}); crop them to even sizes, or "
                "use another codec"
            ) from error
        self.info = {
            "height": stream.height,
            "width": stream.width,
            "codec": stream.codec.canonical_name,
            "pix_fmt": stream.pix_fmt,
            "is_depth_map": False,
            "fps": int(fps),
            "channels": 3,
        }

    def write(self, frames: Any) -> None:
        """Add frames, each (H, W, 3) uint8."""
        for frame in frames:
            picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            packets = self._stream.encode(picture)
            self.size += sum(packet.size for packet in packets)
            self._film.mux(packets)

    def close(self) -> None:
        """Write what the encoder still holds, and the end of the file."""
        try:
            self._film.mux(self._stream.encode())
        finally:
            self._film.close()


class FilmReader:
    """A film whose frames are read by their times. Going back, or far ahead, jumps to the key frame before the time.

    Attributes:
        place: of the file.

    Args:
        place: of the file.
        size: the height and width that its frames must have.

    Raises:
        CorruptBufferError: the file is no film of that size.
        ImportError: the extra `video` is not installed.
    """

    def __init__(self, place: Path, size: tuple[int, int]) -> None:
        with extra("video"):
            import av
        self.place, self._size, self._error = place, size, av.error.FFmpegError
        try:
            self._film = av.open(str(place))
        except self._error as error:
            raise CorruptBufferError(f"{place}: {error}; fetch the file again", path=place) from error
        try:
            if not self._film.streams.video:
                raise CorruptBufferError(f"{place}: it has no video; fetch the file again", path=place)
            self._stream: Any = self._film.streams.video[0]
            self._stream.thread_type = "AUTO"
            self._require_size(self._stream)
        except BaseException:
            self._film.close()
            raise
        self._frames = self._decoded()
        self._before: Any = None
        self._here: Any = next(self._frames, None)

    def read(self, times: Array, tolerance: float) -> Array:
        """The frames nearest to the given times.

        Args:
            times: (T,) in seconds.
            tolerance: how far a frame may be from its time, in seconds.

        Returns:
            (T, H, W, 3) uint8, RGB.

        Raises:
            CorruptBufferError: there is no frame at one of the times, or it cannot be decoded.
        """
        out = np.empty((len(times), *self._size, 3), np.uint8)
        for place in np.argsort(times, kind="stable").tolist():
            out[place] = self._nearest(float(times[place]), tolerance).to_ndarray(format="rgb24")
        return out

    def close(self) -> None:
        """Close the file."""
        self._film.close()

    def _nearest(self, time: float, tolerance: float) -> Any:
        first = self._before or self._here
        if first is None or time < first.time - tolerance or time > first.time + FAR:
            self._jump(time)
        while self._here is not None and self._here.time < time:
            self._before, self._here = self._here, next(self._frames, None)
        around = [frame for frame in (self._before, self._here) if frame is not None]
        nearest = min(around, key=lambda frame: abs(frame.time - time), default=None)
        if nearest is None or abs(nearest.time - time) > tolerance:
            there = "none" if nearest is None else f"one at {nearest.time:.6f} s"
            raise CorruptBufferError(
                f"{self.place}: expected a frame at {time:.6f} s ± {tolerance:g} s, got {there}; pass a larger "
                "tolerance_s, or fetch the file again",
                path=self.place,
            )
        return nearest

    def _jump(self, time: float) -> None:
        """Go on from the last key frame at or before a time."""
        try:
            self._film.seek(max(0, int(time / self._stream.time_base)), stream=self._stream)
        except self._error as error:
            raise CorruptBufferError(f"{self.place}: {error}; fetch the file again", path=self.place) from error
        self._frames, self._before = self._decoded(), None
        self._here = next(self._frames, None)

    def _decoded(self) -> Iterator[Any]:
        try:
            for frame in self._film.decode(self._stream):
                if frame.time is not None:
                    self._require_size(frame)
                    yield frame
        except self._error as error:
            raise CorruptBufferError(f"{self.place}: {error}; fetch the file again", path=self.place) from error

    def _require_size(self, frame: Any) -> None:
        if (frame.height, frame.width) != self._size:
            raise CorruptBufferError(
                f"{self.place}: got frames of {frame.height} x {frame.width}, expected {self._size[0]} x "
                f"{self._size[1]}; fetch the data set again",
                path=self.place,
            )


def write_gif(place: Path, frames: Array, fps: int) -> None:
    """Write (T, H, W, 3) uint8 as an animated GIF."""
    first, *others = pillow_images(frames)
    first.save(place, save_all=True, append_images=others, duration=1000 / fps, loop=0)


def pillow_images(frames: Array) -> list[Any]:
    """(T, H, W, 3) uint8 as images of Pillow."""
    with extra("video"):
        from PIL import Image
    return [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames]


FORMATS = dict.fromkeys((".mp4", ".mkv", ".mov"), write_mp4) | {".gif": write_gif}
