"""Single episodes for the page: curves thinned by minimum and maximum, frames as PNG or JPEG, values at a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.pictures import frames_of, is_image, lines_of
from memmap_buffer.schema import LENGTHS, flatten
from memmap_buffer.views.windows import Trajectory

if TYPE_CHECKING:
    from memmap_buffer import ConcatBuffer, ReplayBuffer

SMALL = 256  # pixels a side up to which a frame is sent as PNG, exactly
LARGE = 2048  # pixels a side beyond which a frame is made smaller
MAX_RATE = 1000.0
FEW = 16  # entries of a field that are shown at a step


class EpisodeReader:
    """Parts of single episodes, as the page shows them. An episode is named by (serial,), in a root by (shard, serial).

    Every method raises StaleEpisodeError if the episode is gone, and SchemaError for a field of another kind.

    Args:
        buffer: the buffer that has the episodes.

    Attributes:
        kinds: how each field is shown: as "image", as "curve", or as "value" at the cursor alone.
    """

    def __init__(self, buffer: ReplayBuffer | ConcatBuffer) -> None:
        self.buffer = buffer
        self.kinds: dict[str, str] = {}
        for name, field in buffer.schema.fields.items():
            drawn = not field.is_list and lines_of(np.zeros((1, *field.shape), field.storage)) is not None
            self.kinds[name] = "image" if is_image(field) else "curve" if drawn else "value"

    def facts(self, episode: tuple[int, ...]) -> dict[str, Any]:
        """The `length` of an episode in steps, and whether it has a `final` observation behind them."""
        whole = self._whole(episode, view=Trajectory((), final_observation=True))
        return {"length": int(whole["_lens"][0]), "final": bool(whole["_has_final"][0])}

    def curve(
        self, episode: tuple[int, ...], name: str, begin: int, stop: int, points: int, total: bool
    ) -> dict[str, Any]:
        """A field over some steps.

        Args:
            episode: its name.
            name: of the field.
            begin: the first step.
            stop: the step after the last.
            points: about how many x values the curve may have.
            total: whether to give the running sum instead of the values.

        Returns:
            `x`: steps; `lines`: for each entry of the field a list of values, None for NaN and infinities.
        """
        self._require(name, "curve")
        data = self._whole(episode, fields=[name])
        lines = lines_of(data[name][0, : data["_lens"][0]])
        assert lines is not None, name
        if total:
            with np.errstate(over="ignore", invalid="ignore"):  # of infinities, or of the largest numbers
                lines = np.nancumsum(lines, axis=0)
        begin = max(0, begin)
        x, lines = thinned(lines[begin : max(begin, stop)], points)
        shown = np.where(np.isfinite(lines), lines, np.nan).T.tolist()
        return {"x": (x + begin).tolist(), "lines": [[None if v != v else v for v in line] for line in shown]}

    def frame(self, episode: tuple[int, ...], name: str, t: int, size: int, final: bool) -> tuple[bytes, str]:
        """A frame as the bytes of an image file, and its media type.

        Args:
            episode: its name.
            name: of the field.
            t: the step; -1 is the last.
            size: pixels a side at most.
            final: whether to show the final observation, which follows the last step, instead.
        """
        with extra("browse"):
            from PIL import Image
        self._require(name, "image")
        if t < 0:
            t += int(self._whole(episode, fields=[])["_lens"][0])
        image = Image.fromarray(frames_of(self._step(episode, t, [name], final)[name], name)[0])
        size = min(max(1, size), LARGE)
        if max(image.size) > size:
            image.thumbnail((size, size))
        exact = max(image.size) <= SMALL
        out = BytesIO()
        image.save(out, "PNG" if exact else "JPEG", **({} if exact else {"quality": 92, "subsampling": 0}))
        return out.getvalue(), "image/png" if exact else "image/jpeg"

    def values(self, episode: tuple[int, ...], t: int, final: bool) -> dict[str, str]:
        """Field -> its value at a step as text, but for images; with `final` only fields with a final observation."""
        fields = self.buffer.schema.fields
        names = [name for name, kind in self.kinds.items() if kind != "image" and (fields[name].final or not final)]
        data = self._step(episode, t, names, final)
        return {name: self._as_text(name, data) for name in names}

    def _as_text(self, name: str, data: dict[str, Array]) -> str:
        values = np.asarray(data[name][0])
        if self.buffer.schema.fields[name].is_list:
            values = values[: int(data[LENGTHS + name][0])]
        numbers = [f"{v:.5g}" if values.dtype.kind == "f" else str(v) for v in values.reshape(-1)[:FEW].tolist()]
        more = f", … ({values.size} in all)" if values.size > FEW else ""
        return numbers[0] if values.ndim == 0 else f"[{', '.join(numbers)}{more}]"

    def _whole(self, episode: tuple[int, ...], **options: Any) -> dict[str, Array]:
        return flatten(self.buffer.batch(np.array([episode]), include_metadata=False, format="numpy", **options))

    def _step(self, episode: tuple[int, ...], t: int, names: Sequence[str], final: bool) -> dict[str, Array]:
        """Field -> (1, *field) at a step, or with `final` after it."""
        at: dict[str, Any] = {"indices": np.array([[*episode, t]]), "include_metadata": False, "format": "numpy"}
        if not final:
            return flatten(self.buffer.batch(**at, timestep_level=True, fields=names))
        data = flatten(self.buffer.batch(**at, n_steps=1, current_fields=(), next_fields=names))
        return {key.replace("next_", "", 1): values for key, values in data.items()}

    def _require(self, name: str, kind: str) -> None:
        if self.kinds.get(name) != kind:
            raise SchemaError(f"field {name!r}: it is not shown as a {kind}")


def recorded_rate(buffer: ReplayBuffer | ConcatBuffer) -> float | None:
    """The steps a second that an imported LeRobot data set states; None if there is no such data set or number."""
    for folder in getattr(buffer, "folders", None) or [buffer.folder]:  # type: ignore[union-attr]
        with suppress(OSError, ValueError, KeyError, TypeError):
            rate = float(json.loads((folder / "extra" / "lerobot.json").read_bytes())["fps"])
            return rate if 0 < rate < MAX_RATE else None
    return None


def thinned(lines: Array, points: int) -> tuple[Array, Array]:
    """Lines with fewer points: the lowest and highest value of each of equal parts of the steps, so no peak is lost.

    Args:
        lines: (T, K).
        points: the most points of a line; two at least are given.

    Returns:
        (P,) steps, (P, K) values.
    """
    parts = max(1, points // 2)
    if len(lines) <= 2 * parts:
        return np.arange(len(lines)), lines
    first = np.linspace(0, len(lines), parts, endpoint=False).astype(int)
    low, high = (extreme.reduceat(lines, first, axis=0) for extreme in (np.fmin, np.fmax))
    middle = (first + np.append(first[1:], len(lines))) // 2
    x = np.stack([first, middle], axis=1).reshape(-1)
    return x, np.stack([low, high], axis=1).reshape(-1, lines.shape[1])
