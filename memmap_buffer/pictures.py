"""Episodes as pictures: which fields are images or curves, and a figure of both by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from io import BytesIO
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.schema import Field

CHANNELS = (1, 3, 4)
MAX_LINES = 32  # lines in one panel
STRIP = 8  # frames in one panel
LEGEND = 10  # lines that a legend can tell from each other


def is_image(field: Field) -> bool:
    """Whether a field looks like an image of 8 x 8 pixels or more.

    Args:
        field: an image has the shape (H, W), (H, W, C) or (C, H, W) with C of 1, 3 or 4, of uint8, bools or floats.
    """
    if field.is_list:
        return False
    shape = field.shape
    if len(shape) == 3 and shape[2] not in CHANNELS:
        shape = (*shape[1:], shape[0])
    flat = len(shape) == 2 or (len(shape) == 3 and shape[2] in CHANNELS)
    return flat and min(shape[:2]) >= 8 and (field.dtype in ("uint8", "bool") or field.dtype.startswith("float"))


def frames_of(values: Array, name: str) -> Array:
    """Images as the RGB frames of a film.

    Args:
        values: (T, H, W), (T, H, W, C) or (T, C, H, W) with C of 1, 3 or 4; bytes, bools, or floats from 0 to 1.
        name: of the field.

    Returns:
        (T, H, W, 3) uint8.

    Raises:
        SchemaError: the values are no images.
    """
    images = values[..., None] if values.ndim == 3 else values
    if images.ndim == 4 and images.shape[3] not in CHANNELS:
        images = np.moveaxis(images, 1, 3)
    if images.ndim != 4 or images.shape[3] not in CHANNELS or images.dtype.kind not in "uifb":
        raise SchemaError(
            f"field {name!r}: {values.dtype} {values.shape[1:]} is no image; expected (H, W), (H, W, C) or (C, H, W) "
            "with C of 1, 3 or 4"
        )
    if images.dtype != np.uint8:
        scale = 1 if images.dtype.kind in "ui" else 255
        images = np.clip(np.nan_to_num(images.astype(np.float64)) * scale, 0, 255).round().astype(np.uint8)
    return np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images[..., :3]


def lines_of(values: Any) -> Array | None:
    """Values of a field as lines over time.

    Args:
        values: (T, …).

    Returns:
        (T, lines) float64; None if the values are no numbers, or more than `MAX_LINES` a timestep.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or np.prod(array.shape[1:]) > MAX_LINES:
        return None
    return array.reshape(len(array), -1).astype(np.float64)


def draw_lines(axes: Any, name: str, values: Array) -> None:
    """Draw lines over the timesteps, with a legend if there are 2 to `LEGEND` of them.

    Args:
        axes: of matplotlib.
        name: the title.
        values: (T, lines).
    """
    lines = axes.plot(values, linewidth=1)
    axes.set_title(name, loc="left", fontsize="medium")  # beside the axis a long name would run into the next panel
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if 1 < len(lines) <= LEGEND:
        entries = [f"[{i}]" for i in range(len(lines))]
        axes.legend(lines, entries, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="x-small", frameon=False)


class Picture:
    """A figure of an episode, which a notebook shows.

    Args:
        figure: of matplotlib; `figure.savefig(path)` keeps it.
    """

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def __repr__(self) -> str:
        return f"<Picture of {self.figure.get_suptitle()}: {len(self.figure.axes)} panels; .figure is matplotlib's>"

    def _repr_png_(self) -> bytes:
        out = BytesIO()
        self.figure.savefig(out, format="png", dpi=80)
        return out.getvalue()


def picture_of(
    title: str, data: Mapping[str, Any], fields: Mapping[str, Field], *, named: Collection[str] = ()
) -> Picture:
    """A picture of an episode's fields over time: images as frames spread over the episode, numbers as curves.

    Args:
        title: of the picture.
        data: dotted name -> (T, *field).
        fields: the fields to draw; those that are neither images nor numbers, such as text and lists, are left out.
        named: the fields that must not be left out.

    Raises:
        SchemaError: no field can be drawn, or one of `named` cannot.
        ImportError: matplotlib is not installed.
    """
    with extra("plot"):
        from matplotlib.figure import Figure
    panels: dict[str, Array] = {}
    for name, field in fields.items():
        values = data[name] if is_image(field) else None if field.is_list else lines_of(data[name])
        if values is not None:
            panels[name] = values
    left_out = [name for name in fields if name not in panels]
    if not panels or not {*named}.isdisjoint(left_out):
        raise SchemaError(
            f"fields: {', '.join(left_out)}: no images, and no numbers of at most {MAX_LINES} entries a timestep; name "
            "other fields, as these can be read, but not drawn"
        )
    figure = Figure(figsize=(8, 1.8 * len(panels)), layout="constrained")
    figure.suptitle(title)
    for axes, (name, values) in zip(np.atleast_1d(figure.subplots(len(panels))), panels.items(), strict=True):
        if is_image(fields[name]):
            _draw_strip(axes, name, values)
        else:
            draw_lines(axes, name, values)
    axes.set_xlabel("timestep")
    return Picture(figure)


def _draw_strip(axes: Any, name: str, values: Array) -> None:
    """Draw frames spread over the episode, side by side, each above its timestep."""
    chosen = np.linspace(0, len(values) - 1, min(STRIP, len(values))).round().astype(int)
    strip = np.concatenate(list(frames_of(values[chosen], name)), axis=1)
    axes.imshow(strip, aspect="equal")
    width = strip.shape[1] / len(chosen)
    axes.set(xticks=(np.arange(len(chosen)) + 0.5) * width - 0.5, xticklabels=chosen, yticks=[])
    axes.set_title(name, loc="left", fontsize="medium")


def table_of(caption: str, rows: Mapping[str, Field], meta: Mapping[str, Field]) -> str:
    """An HTML table of per-timestep fields, `rows`, and meta fields."""
    from html import escape

    cells = [
        (name, field.dtype, str(field.shape), *_notes(field, per))
        for per, fields in (("timestep", rows), ("episode", meta))
        for name, field in fields.items()
    ]
    head = "".join(f"<th>{text}</th>" for text in ("field", "dtype", "shape", "one per", "default"))
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in cells)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _notes(field: Field, per: str) -> tuple[str, str]:
    return f"{per}, and a final one" if field.final else per, "" if field.default is None else repr(field.default)
