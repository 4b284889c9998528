"""Measure this library against the lower bound that plain numpy, torch and the system set, in one run.

    python scripts/bench.py [--case NAME or GROUP ...] [--repeats N] [--steps N] [--cold-gb G] [--json]
        [--peers FOLDER] [--no-peers]
    python scripts/bench.py priority | shards | episodes | ray [options of their own: --help; also --case shards]

A case measures this library and a bound on the same data. The bound does the same work into a given output, without any
of our checks. Both take turns with the peers that are installed (`pip install '.[bench]'`), and the median of each
counts; the results are compared outside the timed part. Every line names the figure to reach: a bare number is our
throughput over the bound's. The files are made in a new folder here, and removed at the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import memmap_buffer
from bench import cold, compressed, environments, online, read, remote, scale, write
from bench.data import Run
from bench.measure import HEAD, Row

Case = Callable[[Run], Iterator[Row]]
GROUPS: dict[str, dict[str, Case]] = {
    "writes": {
        "store": lambda run: write.store_steps(run, "low-dim", 0.35),
        "store-image": lambda run: write.store_steps(run, "image", 0.7),
        "store-episode": lambda run: write.store_episodes(run, "low-dim", None, 0.8),
        "store-episode-checked": lambda run: write.store_episodes(run, "low-dim", "crc32", 0.55),
        "store-episode-image": lambda run: write.store_episodes(run, "image", None, 0.8),
        "store-episode-image-checked": lambda run: write.store_episodes(run, "image", "crc32", 0.55),
        "publish-process": lambda run: write.publish(run, "process", 0.4),
        "publish-power": lambda run: write.publish(run, "power", 0.77),
    },
    "reads": {
        "transitions": lambda run: read.transitions(run, "low-dim", (0.6, 0.4)),
        "transitions-image": lambda run: read.transitions(run, "image", (0.9, 0.85)),
        "packed": lambda run: read.packed(run, "low-dim", (0.6, 0.4)),
        "packed-image": lambda run: read.packed(run, "image", (0.9, 0.85)),
        "windows": lambda run: read.windows(run, "low-dim", 0.6),
        "windows-image": lambda run: read.windows(run, "image", 0.9),
        "episodes": read.whole_episodes,
        "n-step": read.n_step,
        "generation-check": scale.generation_check,
    },
    "online": {"online": online.add_and_sample, "online-frames": online.add_and_sample_frames},
    "environments": {"many-environments": environments.many},
    "workers": {"loader-workers": read.workers, "loader-prefetch": read.prefetched},
    "cold": {"cold-image": cold.cold_batches, "cold-stream": cold.cold_stream},
    "compressed": {
        "compressed-size": compressed.sizes,
        "compressed-batches": compressed.batches,
        "compressed-cold": compressed.cold,
        "compressed-jpeg": compressed.cameras,
        "compressed-recording": compressed.recording,
    },
    "remote": {
        "remote-epoch": lambda run: remote.epochs(run, "low-dim"),
        "remote-epoch-image": lambda run: remote.epochs(run, "image"),
        "remote-peers": lambda run: remote.beside(run, "low-dim"),
        "remote-peers-image": lambda run: remote.beside(run, "image"),
        "remote-sample": lambda run: remote.samples(run, "low-dim"),
        "remote-sample-image": lambda run: remote.samples(run, "image"),
        "remote-s3": lambda run: remote.by_s3(run, "image"),
        "remote-open": remote.opening,
    },
    "scale": {"open": scale.opening, "growth": scale.growth},
}
PROGRAMS = {
    "priority": "bench.priority",
    "shards": "bench.shards",
    "episodes": "bench.episodes",
    "ray": "bench.ray_recorders",
}
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="memmap-bench-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def chosen(names: list[str]) -> list[str]:
    """Cases, groups replaced by theirs, each once."""
    return list(dict.fromkeys(case for name in names for case in GROUPS.get(name, {name: None})))


def main() -> None:
    asked = sys.argv[1:]
    if asked[:1] == ["--case"] and not CASES.keys() & asked[1:2]:
        asked = asked[1:]
    if asked and asked[0] in PROGRAMS:
        importlib.import_module(PROGRAMS[asked[0]]).main(asked[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case",
        nargs="+",
        choices=[*GROUPS, *CASES],
        default=list(CASES),
        metavar="NAME",
        help=f"groups: {', '.join(GROUPS)}; cases: {', '.join(CASES)}",
    )
    parser.add_argument("--repeats", type=int, default=2000, help="calls of a short case; others do a part of them")
    parser.add_argument("--steps", type=int, default=10**6, help="low-dimensional steps; of images a twentieth")
    parser.add_argument("--cold-gb", type=float, default=4.0, help="size of the store that is read cold")
    parser.add_argument("--top", type=int, default=9, choices=range(5, 10), help="scale: up to 10^N steps, of holes")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to put the files: a disk with room for them")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="remote: the environment of mosaicml-streaming, litdata and webdataset, made there if it is not (minutes)",
    )
    parser.add_argument("--no-peers", action="store_true", help="measure ours and the bounds alone")
    parser.add_argument("--threads", type=int, default=1, help="torch's; more wait for each other on a busy machine")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sys.stderr.write(f"measured is {Path(memmap_buffer.__file__).parent}\n")
    if not given.json:
        print(HEAD)
    with workplace(given.folder) as root:
        sizes = given.repeats, given.steps, int(given.cold_gb * 1e9), given.top
        run = Run(root, *sizes, not given.no_peers, given.peers)
        for name in chosen(given.case):
            for row in CASES[name](run):
                print(json.dumps(row.json()) if given.json else row.text(), flush=True)


if __name__ == "__main__":
    main()
