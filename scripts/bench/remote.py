"""Published folders that are read by their URL: epochs, the first batch, random samples, many shards.

The server is a process of its own, with a latency and a bandwidth that are those of a bucket; the bound is its line.
S3 is spoken to moto's server, which has neither, so there the bound is what plain requests get from it.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.data import LONGEST, SCHEMAS, STEPS_OF_A_SHARD, Run, episodes, forge_root, lengths
from bench.measure import BOUND, OURS, Call, Goal, Row, finish, medians, throughput
from bench.peers import installed
from memmap_buffer import ConcatBuffer, ReplayBuffer, pack, publish

LATENCY, BANDWIDTH = 0.02, 1e8  # seconds before each answer; bytes a second of all connections together
SHARDS, THREADS, PIECE = 4, 16, 4 << 20
WINDOWS = 8  # the windows of shuffle="block" that an epoch has: it fetches one while the one before is given
SUPPORT = Path(__file__).parents[2] / "tests" / "support"
BATCH = 256
STEPS: dict[str, Any] = {"timestep_level": True}
MOSAIC = Path(__file__).with_name("mosaic_epoch.py")


def epochs(run: Run, kind: str) -> Iterator[Row]:
    """An epoch of `shuffle="block"` with nothing in the cache, then one with everything; bytes, and the first batch."""
    with serving(run, kind) as far:
        epoch = Epoch(far)
        calls: dict[str, Call] = {OURS: epoch.cold, "plain GETs": lambda: fetch_all(far.server.url, far.files)}
        mosaic = (
            Mosaic(run, far) if run.peers and run.once(("installed", Mosaic.name), lambda: installed(Mosaic)) else None
        )
        seconds = medians(calls, max(3, run.repeats // 700), burst=1)
        theirs = {} if mosaic is None else mosaic.epochs(max(1, run.repeats // 1000))
        name, mb = f"remote epoch, shuffle='block', {kind}", far.bytes / 1e6
        seconds[f"{BOUND} line"] = far.bytes / BANDWIDTH
        seconds |= {f"{who} {workers} workers": told["seconds"] for (who, workers), told in theirs.items()}
        yield throughput(name, seconds, 0.9, per_call=-(-far.steps // BATCH), unit="batches/s")
        told, firsts = statistics.median(epoch.sent) / far.bytes, statistics.median(epoch.first)
        peers = {f"{who} {workers} workers": told["sent"] / far.bytes for (who, workers), told in theirs.items()}
        yield finish("  bytes fetched over needed", "", told, None, told, Goal(1.1, at_most=True), peers)
        expected = 3 * LATENCY + far.bytes / WINDOWS / BANDWIDTH
        peers = {f"{who} {workers} workers": 1e3 * told["first"] for (who, workers), told in theirs.items()}
        values = 1e3 * firsts, 1e3 * expected, firsts / expected
        yield finish("  first batch, over 3 trips and a window", "ms", *values, Goal(1.0, at_most=True), peers)
        near, cached = ConcatBuffer.from_root(far.near), epoch.opened()
        consume(cached, far)
        warm: dict[str, Call] = {OURS: lambda: consume(cached, far), f"{BOUND} folders": lambda: consume(near, far)}
        again = medians(warm, max(3, run.repeats // 200), burst=1)
        yield throughput(f"  second epoch, {mb:.0f} MB", again, 0.9, per_call=far.steps, unit="steps/s")


def samples(run: Run, kind: str) -> Iterator[Row]:
    """`sample(256)` with nothing in the cache: how often it waits for the server, and how long."""
    with serving(run, kind) as far:
        trips, sent, taken, least = [], [], [], []
        for seed in range(max(3, run.repeats // 400)):
            with far.cache() as cache:
                buffer = ConcatBuffer.from_root(far.server.url, cache=cache)
                far.server.told()
                begin = time.perf_counter()
                buffer.sample(BATCH, seed=seed, **STEPS)
                taken.append(time.perf_counter() - begin)
            told = far.server.told()
            trips.append(told["trips"])
            sent.append(told["sent"] / 1e6)
            least.append(2 * LATENCY + told["sent"] / BANDWIDTH)
        count = max(trips)
        name = f"remote cold sample(256), {kind}"
        values = statistics.median(taken), statistics.median(least)
        yield finish(f"{name}, round trips", "", count, 2, count, Goal(2, at_most=True))
        more = {"MB": statistics.median(sent)}
        yield finish(
            "  over 2 trips and its bytes", "ms", *(1e3 * v for v in values), values[0] / values[1], Goal(None), more
        )


def by_s3(run: Run, kind: str) -> Iterator[Row]:
    """An epoch by s3fs from moto's server, which takes the time that it takes for a request."""
    sys.path.insert(0, str(SUPPORT))
    from s3_server import make_bucket, s3_server

    root = run.once(("published", kind), lambda: published(run, kind))
    with s3_server() as server:
        url, options = make_bucket(server, "bench")
        for shard in sorted(root.near.iterdir()):
            publish(shard, url, storage_options=options)
        far = replace(root, url=url, options=options)
        calls: dict[str, Call] = {OURS: far.cold_epoch, f"{BOUND} plain GETs": lambda: get_all(server, root.files)}
        seconds = medians(calls, max(3, run.repeats // 700), burst=1)
    yield throughput(f"remote epoch by S3, {kind}", seconds, 0.9, per_call=-(-far.steps // BATCH), unit="batches/s")


def opening(run: Run) -> Iterator[Row]:
    """A root of many shards, opened with and without their heads in the cache; only its list and heads are there."""
    count = 10 ** max(1, run.top - 5)
    folder = forge_root(run.folder("listed"), count)
    with server_of(folder) as server, ExitStack() as held:
        cache = run.folder("cache")
        held.callback(shutil.rmtree, cache)
        for what in ("cold", "again"):
            server.told()
            begin = time.process_time()  # of all threads: what the line takes is in the other cases
            buffer = ConcatBuffer.from_root(server.url, cache=cache)
            assert buffer.num_steps == count * STEPS_OF_A_SHARD, "not what was forged"
            seconds, asked = time.process_time() - begin, server.told()["requests"]
            name = f"remote open of {count} shards, {what}"
            yield finish(name, "cpu s", seconds, None, seconds, Goal(5, at_most=True, unit=" s"))
            yield finish("  requests", "", asked, None, asked, Goal(36, at_most=True))


# What is published, and who serves it


@dataclass(frozen=True)
class Published:
    """What stands at a URL.

    Args:
        kind: of data. near: the packed folders that were published. far: the folder that they were published to.
        files: path in it -> bytes, of all data files. steps: of all. reward: their sum.
        url: where they are read. options: for the store.
    """

    kind: str
    near: Path
    far: Path
    files: Mapping[str, int]
    steps: int
    reward: float
    url: str = ""
    options: Mapping[str, Any] | None = None
    server: Any = None

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    @contextmanager
    def cache(self) -> Iterator[Path]:
        """A new one."""
        path = self.far.parent / f"cache-{secrets.token_hex(4)}"
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def opened(self, cache: Path) -> ConcatBuffer:
        return ConcatBuffer.from_root(self.url, storage_options=self.options, cache=cache)

    def cold_epoch(self) -> float:
        """Seconds until the first batch of an epoch with nothing in the cache."""
        with self.cache() as cache:
            return consume(self.opened(cache), self)


def published(run: Run, kind: str) -> Published:
    """Some shards of a kind, packed, and published to a folder."""
    place, steps, reward = run.folder(f"published-{kind}").resolve(), 0, 0.0
    for i in range(SHARDS):
        count = run.steps_of(kind) // SHARDS
        with ReplayBuffer(place / "grid", len(lengths(count, i)), LONGEST, SCHEMAS[kind]) as buffer:
            for arrays in episodes(SCHEMAS[kind], count, i):
                buffer.store_episode(**arrays)
                steps, reward = steps + len(arrays["reward"]), reward + float(arrays["reward"].sum(dtype=np.float64))
        pack(place / "grid", place / "near" / f"shard-{i:05}")
        shutil.rmtree(place / "grid")
        publish(place / "near" / f"shard-{i:05}", f"file://{place}/far")
    far = place / "far"
    files = {str(path.relative_to(far)): path.stat().st_size for path in far.rglob("data/*.npy")}
    return Published(kind, place / "near", far, files, steps, reward)


@contextmanager
def serving(run: Run, kind: str) -> Iterator[Published]:
    root: Published = run.once(("published", kind), lambda: published(run, kind))
    with server_of(root.far) as server:
        yield replace(root, url=server.url, server=server)


class Server:
    """The process of a server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def told(self) -> dict[str, int]:
        """What was asked since it was asked this: requests, round trips, bytes sent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def server_of(folder: Path) -> Iterator[Server]:
    command = [sys.executable, str(SUPPORT / "range_server.py"), str(folder), str(LATENCY), str(BANDWIDTH)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


# The contenders


def consume(buffer: ConcatBuffer, far: Published) -> float:
    """An epoch; the seconds until its first batch."""
    begin, first, steps, reward = time.perf_counter(), 0.0, 0, 0.0
    window = -(-far.steps // WINDOWS)
    for batch in buffer.dataloader(BATCH, shuffle="block", shuffle_window=window, seed=0, **STEPS):
        first = first or time.perf_counter() - begin
        steps, reward = steps + len(batch["reward"]), reward + float(batch["reward"].double().sum())
    assert steps == far.steps and abs(reward - far.reward) < 1e-6 * far.steps, "an epoch was not whole"
    return first


class Epoch:
    """Cold epochs; of each, the bytes that were sent, and the seconds until the first batch."""

    def __init__(self, far: Published) -> None:
        self._far = far
        self.sent: list[int] = []
        self.first: list[float] = []

    def cold(self) -> None:
        self._far.server.told()
        self.first.append(self._far.cold_epoch())
        self.sent.append(self._far.server.told()["sent"])

    def opened(self) -> ConcatBuffer:
        """With a cache that stays."""
        return self._far.opened(self._far.far.parent / "kept")


Piece = tuple[str, int, int]


def fetch_all(url: str, files: Mapping[str, int]) -> None:
    """All bytes of some files by plain requests, kept nowhere and compared with nothing."""
    in_threads(lambda pieces: fetch(url, pieces), files)


def get_all(url: str, files: Mapping[str, int]) -> None:
    """The same by S3."""
    import boto3
    from s3_server import OPTIONS

    key = {"aws_access_key_id": OPTIONS["key"], "aws_secret_access_key": OPTIONS["secret"]}
    client = boto3.client("s3", endpoint_url=url, **OPTIONS["client_kwargs"], **key)

    def get(piece: Piece) -> int:
        path, first, stop = piece
        reply = client.get_object(Bucket="bench", Key=f"root/{path}", Range=f"bytes={first}-{stop - 1}")
        return len(reply["Body"].read())

    in_threads(lambda pieces: sum(map(get, pieces)), files)


def in_threads(fetch: Callable[[list[Piece]], int], files: Mapping[str, int]) -> None:
    pieces = [(path, at, min(at + PIECE, size)) for path, size in files.items() for at in range(0, size, PIECE)]
    with ThreadPoolExecutor(THREADS) as threads:
        assert sum(threads.map(fetch, (pieces[i::THREADS] for i in range(THREADS)))) == sum(files.values())


def fetch(url: str, pieces: list[Piece]) -> int:
    """By one connection; the bytes that came."""
    connection, count, space = http.client.HTTPConnection(urlsplit(url).netloc), 0, bytearray(PIECE)
    for path, first, stop in pieces:
        connection.request("GET", f"/{path}", headers={"Range": f"bytes={first}-{stop - 1}"})
        reply = connection.getresponse()
        while size := reply.readinto(space):
            count += size
    connection.close()
    return count


class Mosaic:
    """mosaicml-streaming on the same steps, from the same server, to which it speaks S3."""

    name, module = "mosaicml-streaming", "streaming"

    def __init__(self, run: Run, far: Published) -> None:
        self._far, self._key = far, {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key"}
        if not (far.far / "mds").exists():
            self._python(str(far.far / "mds"), far.kind, str(run.steps_of(far.kind)), str(SHARDS))

    def epochs(self, repeats: int) -> dict[tuple[str, int], dict[str, float]]:
        """(name, worker processes) -> medians of the seconds of an epoch, those until its first batch, bytes sent."""
        told: dict[tuple[str, int], list[dict[str, float]]] = {(self.name, workers): [] for workers in (0, 2)}
        for _ in range(repeats):
            for (_, workers), each in told.items():
                each.append(self._epoch(workers))
        return {
            who: {key: statistics.median(one[key] for one in each) for key in each[0]} for who, each in told.items()
        }

    def _epoch(self, workers: int) -> dict[str, float]:
        self._far.server.told()
        with self._far.cache() as local:
            found: dict[str, float] = json.loads(self._python("s3://mds", str(local), str(workers)))
        assert found["steps"] == self._far.steps, "an epoch was not whole"
        return {**found, "sent": self._far.server.told()["sent"]}

    def _python(self, *arguments: str) -> str:
        env = {**os.environ, **self._key, "S3_ENDPOINT_URL": self._far.server.url}
        command = [sys.executable, str(MOSAIC), *arguments]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
        return said.rstrip().rpartition("\n")[2]
