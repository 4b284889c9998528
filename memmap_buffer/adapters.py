"""The tools of an adapter: a module that joins a trainer, a format or an environment to a buffer.

What stands in `memmap_buffer.interop` needs `memmap_buffer` and this module alone, as an adapter elsewhere does.

    optional packages   extra
    paths and choices   AnyPath, path_of, is_url, IfExists, Verify, check_choice, check_count
    names and values    Names, Array, flatten, to_numpy, equal_rows
    pictures            frames_of, is_image, lines_of, draw_lines, MAX_LINES
    episodes            Episode, EpisodeGroup, Readable, progress
    data sets           Target, import_episodes, exported_episodes, read_names, write_names, read_extra, write_extra
    environments        schema_of, spaces_of, names_of, encode_space, decode_space, image_codec, resets_by_a_step

Those of data sets and environments are loaded when they are asked for; the latter need the extra `gymnasium`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memmap_buffer.api.reading import Readable
from memmap_buffer.choices import IfExists, Verify, check_choice
from memmap_buffer.dtypes import Array, check_count, to_numpy
from memmap_buffer.extras import extra
from memmap_buffer.names import Names
from memmap_buffer.paths import AnyPath, is_url, path_of
from memmap_buffer.pictures import MAX_LINES, draw_lines, frames_of, is_image, lines_of
from memmap_buffer.progress import progress
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
    from memmap_buffer.interop.columns import equal_rows, flatten
    from memmap_buffer.interop.episodes import (
        exported_episodes,
        import_episodes,
        read_extra,
        read_names,
        write_extra,
        write_names,
    )
    from memmap_buffer.interop.target import Target

__all__ = [
    "MAX_LINES",
    "AnyPath",
    "Array",
    "Episode",
    "EpisodeGroup",
    "IfExists",
    "Names",
    "Readable",
    "Target",
    "Verify",
    "check_choice",
    "check_count",
    "decode_space",
    "draw_lines",
    "encode_space",
    "equal_rows",
    "exported_episodes",
    "extra",
    "flatten",
    "frames_of",
    "image_codec",
    "import_episodes",
    "is_image",
    "is_url",
    "lines_of",
    "names_of",
    "path_of",
    "progress",
    "read_extra",
    "read_names",
    "resets_by_a_step",
    "schema_of",
    "spaces_of",
    "to_numpy",
    "write_extra",
    "write_names",
]

_LATER = {  # module -> its names: the first needs Gymnasium, the others stand on this module themselves
    "environments": {
        "decode_space",
        "encode_space",
        "image_codec",
        "names_of",
        "resets_by_a_step",
        "schema_of",
        "spaces_of",
    },
    "interop.columns": {"equal_rows", "flatten"},
    "interop.episodes": {
        "exported_episodes",
        "import_episodes",
        "read_extra",
        "read_names",
        "write_extra",
        "write_names",
    },
    "interop.target": {"Target"},
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            attribute = globals()[name] = getattr(importlib.import_module(f"memmap_buffer.{module}"), name)
            return attribute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
