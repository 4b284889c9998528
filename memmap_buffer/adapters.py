"""The tools of an adapter: a module that joins a trainer, a format or an environment to a buffer.

The modules of `memmap_buffer.interop` import `memmap_buffer` and this module alone, and so can an adapter in another
package; docs/adapters.md builds one step by step.

    optional packages   extra, keep_scheduling
    paths and choices   AnyPath, path_of, is_url, IfExists, Verify, check_choice, check_count
    names and values    Names, Array, flatten, to_numpy, decode, equal_rows, matches
    torch               Device, EpisodeDataset, loader_of, to_device, to_tensors
    pictures            frames_of, is_image, lines_of, draw_lines, MAX_LINES
    episodes            Episode, EpisodeGroup, Readable, progress
    tables of episodes  EpisodeColumns, column_of, matching, order_of, histogram_of, tags_of, TAGS, Mark
    data sets           Target, import_episodes, exported_episodes, put_when_whole, read_names, write_names,
                        read_extra, write_extra;
                        LOST: the folder into which `repair` moves the files that it takes out of a buffer
    environments        schema_of, spaces_of, names_of, encode_space, decode_space, image_codec, resets_by_a_step

The tools of torch, data sets and environments are loaded on first use; those of environments need the extra
`gymnasium`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memmap_buffer.api.reading import Readable
from memmap_buffer.choices import IfExists, Verify, check_choice
from memmap_buffer.conditions import column_of, matching
from memmap_buffer.dtypes import Array, check_count, decode, to_numpy
from memmap_buffer.episode_columns import TAGS, EpisodeColumns, histogram_of, order_of, tags_of
from memmap_buffer.extras import extra
from memmap_buffer.first_use import on_first_use
from memmap_buffer.format.marks import Mark
from memmap_buffer.format.syscalls import keep_scheduling
from memmap_buffer.items.filters import matches
from memmap_buffer.names import Names
from memmap_buffer.paths import AnyPath, is_url, path_of
from memmap_buffer.pictures import MAX_LINES, draw_lines, frames_of, is_image, lines_of
from memmap_buffer.progress import progress
from memmap_buffer.schema import flatten
from memmap_buffer.writing.episode import Episode
from memmap_buffer.writing.episode_group import EpisodeGroup

if TYPE_CHECKING:
    from memmap_buffer.environments import (
        decode_space,
        encode_space,
        image_codec,
        names_of,
        resets_by_a_step,
        schema_of,
        spaces_of,
    )
    from memmap_buffer.interop.columns import equal_rows
    from memmap_buffer.interop.episodes import (
        exported_episodes,
        import_episodes,
        put_when_whole,
        read_extra,
        read_names,
        write_extra,
        write_names,
    )
    from memmap_buffer.interop.target import Target
    from memmap_buffer.loading.datasets import EpisodeDataset, loader_of
    from memmap_buffer.loading.prefetch import Device, to_device
    from memmap_buffer.loading.tensors import to_tensors
    from memmap_buffer.maintenance.repair import LOST

__all__ = [
    "LOST",
    "MAX_LINES",
    "TAGS",
    "AnyPath",
    "Array",
    "Device",
    "Episode",
    "EpisodeColumns",
    "EpisodeDataset",
    "EpisodeGroup",
    "IfExists",
    "Mark",
    "Names",
    "Readable",
    "Target",
    "Verify",
    "check_choice",
    "check_count",
    "column_of",
    "decode",
    "decode_space",
    "draw_lines",
    "encode_space",
    "equal_rows",
    "exported_episodes",
    "extra",
    "flatten",
    "frames_of",
    "histogram_of",
    "image_codec",
    "import_episodes",
    "is_image",
    "is_url",
    "keep_scheduling",
    "lines_of",
    "loader_of",
    "matches",
    "matching",
    "names_of",
    "order_of",
    "path_of",
    "progress",
    "put_when_whole",
    "read_extra",
    "read_names",
    "resets_by_a_step",
    "schema_of",
    "spaces_of",
    "tags_of",
    "to_device",
    "to_numpy",
    "to_tensors",
    "write_extra",
    "write_names",
]

_LATER = {  # these need an optional package, take long to import, or import this module themselves
    "environments": "decode_space encode_space image_codec names_of resets_by_a_step schema_of spaces_of",
    "interop.columns": "equal_rows",
    "interop.episodes": "exported_episodes import_episodes put_when_whole "
    "read_extra read_names write_extra write_names",
    "interop.target": "Target",
    "loading.datasets": "EpisodeDataset loader_of",
    "loading.prefetch": "Device to_device",
    "loading.tensors": "to_tensors",
    "maintenance.repair": "LOST",
}
__getattr__ = on_first_use(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
