"""Which episode follows which, found change by change, is what it would be if it were found anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import live_index_of

from memmap_buffer import ReplayBuffer, Window

META = {"place": ("int64", (2,)), "side": "float32", "name": "U4"}
VALUES = {"place": [(0, 1), (1, 0), (1, 1)], "side": [-0.0, 0.0, 1.5], "name": ["a", "b", "äöü"]}


def expected(buffer: ReplayBuffer, length: int, name: str | None) -> dict[tuple[int, int], list[int]]:
    """Each (serial, timestep) at which an item begins, and the serials of the episodes that it is of."""
    streams: dict[Any, list[tuple[int, int]]] = {}
    values = (
        [None] * len(buffer) if name is None else buffer.episodes(fields=["x"])[name].tolist() if len(buffer) else []
    )
    for serial, steps, value in zip(buffer.serials.tolist(), buffer.episode_lens.tolist(), values, strict=True):
        key = tuple(value) if isinstance(value, list) else value
        streams.setdefault(key, []).extend((serial, t) for t in range(steps))
    return {
        steps[i]: [*dict.fromkeys(serial for serial, _ in steps[i : i + length])]
        for steps in streams.values()
        for i in range(len(steps) - length + 1)
    }


@pytest.mark.parametrize("name", [None, *META])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_stored_deleted_and_changed_items_run_on_in_their_stream(
    tmp_path: Path, name: str | None, seed: int
) -> None:
    rng, length = np.random.default_rng(seed), [1, 5, 13][seed]
    buffer = ReplayBuffer(tmp_path, 12, 8, {"x": "int64"}, META, publish="step", spare_slots=4, circular=True)
    view = Window(length, boundary="continue", stream=name)
    live = live_index_of(buffer, view)
    made_anew = 0

    def meta() -> dict[str, Any]:
        return {key: values[rng.integers(3)] for key, values in VALUES.items()}

    for call in range(200):
        what = rng.choice(["store", "add", "delete", "update", "clear"], p=[0.3, 0.47, 0.15, 0.06, 0.02])
        if what == "store":
            buffer.store_episode(x=np.arange(rng.integers(1, 8)), **meta())
        elif what == "add":
            columns = {key: np.array([values[rng.integers(3)] for _ in range(2)]) for key, values in VALUES.items()}
            buffer.add(x=np.full(2, call), **columns)
        else:
            buffer.end_episodes()
            if what == "clear":
                buffer.clear()
            elif len(buffer) and what == "delete":
                gone = rng.choice(len(buffer), min(len(buffer), int(rng.integers(1, 4))), replace=False)
                buffer.delete([*map(int, gone)])
            elif len(buffer):
                buffer.update(int(rng.integers(len(buffer))), **meta())
        if rng.random() < 0.7:
            before = live.made
            assert live.follow()
            made_anew += live.made > before
            anchors = live.locate(np.arange(len(live)))
            assert anchors.following is not None
            serials = np.concatenate([anchors.serial[:, None], anchors.following[..., 1]], axis=1).tolist()
            found = {
                (serial, t): [one for one in row if one >= 0]
                for serial, t, row in zip(anchors.serial.tolist(), anchors.t.tolist(), serials, strict=True)
            }
            assert found == expected(buffer, length, name), (call, what)
    assert 0 < made_anew < 50
