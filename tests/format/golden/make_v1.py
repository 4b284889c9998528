"""Makes the golden folders of format version 1 anew, grid and packed, with `tests/support` on the PYTHONPATH.

Run it only while version 1 is not released: afterwards they must open for ever as they are, and a change of the
bytes is a new version with folders of its own; `make_packed` alone leaves the grid as it is. What is made anew has
another id, and perhaps the episodes in other slots, as a writer may choose any free one. Nothing of the machine stays
in them: process, host, boot and times are overwritten. The formulas of the values stand in
`tests/format/test_golden.py` too, so that neither trusts the other.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from specification import RECORD, sealed

from memmap_buffer import Field, ReplayBuffer, pack

FOLDER = Path(__file__).parent / "v1"
PACKED = FOLDER.with_name("v1-packed")
FIELDS = {
    "observation": {"image": Field("uint8", (2, 2), final=True), "state": Field("float32", 3, final=True)},
    "action": ("int64", 2),
    "reward": ("float64", (), -1.5),
    "terminated": "bool",
    "numbers": {"half": "float16", "brain": "bfloat16", "wave": "complex64", "tiny": "int8", "count": "uint64"},
    "more": {"short": "int16", "long": "int32", "unsigned": "uint16"},
    "word": "U3",
}
META_FIELDS = {
    "task": ("U8", (), "none"),
    "success": "bool",
    "weight": ("complex128", 2, [0.5, float("inf")]),
    "seed": ("uint32", 1),
}
LENGTHS = {0: 4, 1: 2, 2: 3, 3: 3, 4: 3, 5: 2, 6: 4, 7: 2}
CUT_SHORT, TERMINATED = 7, 6


def observation(serial: int, t: int) -> dict[str, Any]:
    return {
        "image": [[serial, t], [serial + t, 255 - t]],
        "state": [serial + t / 2, -t, 1 / (t + 1)],
    }


def step(serial: int, t: int) -> dict[str, Any]:
    numbers = {"half": serial + t / 8, "brain": serial + t / 4, "wave": complex(t, -serial), "tiny": -100 - t}
    values = {
        "observation": observation(serial, t),
        "action": [10 * serial + t, -(2**40) - t],
        "reward": t / 3,
        "terminated": serial == TERMINATED and t == LENGTHS[serial] - 1,
        "numbers": {**numbers, "count": 2**64 - 1 - t},
        "more": {"short": -30000 - t, "long": -(2**31) + t, "unsigned": 65535 - t},
        "word": "é" * t,
    }
    if t == 0:
        del values["reward"]  # its default
    return values


def record(buffer: ReplayBuffer, serial: int) -> None:
    episode = buffer.begin_episode(seed=2**32 - 1 - serial)
    for t in range(LENGTHS[serial]):
        episode.store(**step(serial, t))
    if serial == CUT_SHORT:
        episode.publish(cut=True)  # its other meta fields are the defaults
        return
    episode.update({"task": f"task {serial}", "success": serial % 2 == 0, "weight": [serial + 1j, -serial * 1j]})
    if serial != TERMINATED:
        episode.final(observation=observation(serial, LENGTHS[serial]))
    episode.publish()


def make() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    with ReplayBuffer(FOLDER, 4, 4, FIELDS, META_FIELDS, circular=True, capacity=11, spare_slots=1) as buffer:
        for serial in (0, 1):
            record(buffer, serial)
        buffer.clear()
        for serial in (2, 3, 4, 5, 6):  # 2 leaves the ring of four; and the first step of 3, that of eleven
            record(buffer, serial)
        buffer.delete(1)  # 5
        record(buffer, 7)
        buffer.update(1, success=False)  # 6: what was true becomes false, in place
        assert buffer.serials.tolist() == [4, 6, 7] and buffer.num_steps == 11
    neutralise(FOLDER)
    (FOLDER / "records.json").write_text(json.dumps(vectors(), indent=1) + "\n")


def make_packed() -> None:
    """The episodes of the grid, packed; a copy tells of no machine but by what the records say, which are neutral."""
    shutil.rmtree(PACKED, ignore_errors=True)
    pack(FOLDER, PACKED)
    (PACKED / ".lock").unlink()


def neutralise(folder: Path) -> None:
    """Take out what tells of this machine and this hour, and file modes with it."""
    (folder / ".lock").unlink()
    state, records = (open_memmap(folder / f"{name}.npy", mode="r+") for name in ("state", "episodes"))
    for name in ("pid", "time", "boot", "host", "nonce", "unused"):
        state[name] = np.zeros_like(state[name])
    for slot, one in enumerate(records):
        words = {name: int(one[name]) for name in RECORD.names or () if name != "check"} | {"time": int(one["serial"])}
        if one["generation"]:
            records[slot] = np.frombuffer(sealed(**words), RECORD)[0]
    state.flush()
    records.flush()


def vectors() -> list[dict[str, Any]]:
    """Records with their bytes, so that another implementation of the check can be tried."""
    rng = random.Random(1)
    bits = {name: 8 * RECORD[name].itemsize for name in RECORD.names or () if name != "check"}
    corners = [dict.fromkeys(bits, 0), {name: 2**n - 1 for name, n in bits.items()}]
    corners += [{name: rng.getrandbits(n) for name, n in bits.items()} for _ in range(6)]
    return [
        {
            "bytes": raw.hex(),
            "record": dict(zip(RECORD.names or (), np.frombuffer(raw, RECORD)[0].tolist(), strict=True)),
        }
        for raw in (sealed(**corner) for corner in corners)
    ]


if __name__ == "__main__":
    make()
    make_packed()
