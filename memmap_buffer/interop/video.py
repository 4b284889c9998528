"""Episodes as films: images as frames, .mp4 by PyAV, .gif and contact sheets by Pillow (the extra `video`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.columns import Array
from memmap_buffer.paths import AnyPath, path_of
from memmap_buffer.pictures import frames_of
from memmap_buffer.progress import progress


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
    """Images spread evenly over a film, in rows from left to right.

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
    with extra("video"):
        import av
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # H.264 halves the colours
    with av.open(str(place), "w") as film:
        stream = film.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in progress(frames, "frames"):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        film.mux(stream.encode())


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
