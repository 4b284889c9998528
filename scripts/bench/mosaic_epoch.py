"""An epoch of mosaicml-streaming, in a process of its own: it keeps what it has in memory that processes share.

python mosaic_epoch.py FOLDER KIND STEPS SHARDS    write the steps of a kind there
python mosaic_epoch.py URL LOCAL WORKERS           an epoch; a line of JSON about it
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256


def write(folder: str, kind: str, steps: int, shards: int) -> None:
    from streaming import MDSWriter

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from bench.data import SCHEMAS, episodes

    writer: Any = None
    for i in range(shards):
        for arrays in episodes(SCHEMAS[kind], steps // shards, i):
            arrays["terminated"] = arrays["terminated"].view(np.uint8)  # it has no bool
            if writer is None:
                columns = {name: _encoding(values) for name, values in arrays.items()}
                writer = MDSWriter(out=folder, columns=columns)
            for t in range(len(arrays["reward"])):
                writer.write({name: np.atleast_1d(values[t]) for name, values in arrays.items()})
    writer.finish()


def _encoding(values: Any) -> str:
    return f"ndarray:{values.dtype}:{','.join(map(str, values.shape[1:] or (1,)))}"


def epoch(url: str, local: str, workers: int) -> None:
    import streaming
    import torch

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    begin, first, steps, reward = time.perf_counter(), 0.0, 0, 0.0
    data = streaming.StreamingDataset(remote=url, local=local, shuffle=True, batch_size=BATCH, shuffle_seed=0)
    for batch in torch.utils.data.DataLoader(data, BATCH, num_workers=workers):
        first = first or time.perf_counter() - begin
        steps, reward = steps + len(batch["reward"]), reward + float(batch["reward"].double().sum())
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "first": first, "steps": steps, "reward": reward}))


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) == 4:
        write(given[0], given[1], int(given[2]), int(given[3]))
    else:
        epoch(given[0], given[1], int(given[2]))
