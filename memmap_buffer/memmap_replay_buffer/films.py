"""Films written from images, and single pictures that show a film's images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memmap_buffer.adapters import AnyPath, Array, to_numpy
from memmap_buffer.interop.video import sheet_of, write_video


def trajectory_to_video(frames: Any, path: AnyPath, fps: int = 30) -> Path:
    """Write images as a film.

    Args:
        frames: (T, H, W), (T, H, W, C) or (T, C, H, W), bytes, or floats from 0 to 1.
        path: a file that ends in .gif, or in .mp4, .mkv or .mov.
        fps: images a second.

    Returns:
        The path.

    Raises:
        SchemaError: the frames are no images, or the path ends in something else.
        ImportError: the extra `video` is not installed.
    """
    return write_video(path, to_numpy(frames), fps)


def frames_to_sheet(frames: Any, rows: int = 2, columns: int = 5) -> Array:
    """A picture of images spread evenly over a film, in rows from left to right.

    Args:
        frames: as for `trajectory_to_video`.
        rows: how many rows.
        columns: how many images a row has.

    Returns:
        (rows · H, columns · W, 3) uint8.
    """
    return sheet_of(to_numpy(frames), rows, columns)
