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
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.data import LONGEST, SCHEMAS, STEPS_OF_A_SHARD, Run, episodes, forge_root, lengths
from bench.measure import BOUND, OURS, Call, Goal, Row, finish, medians, throughput
from bench.peer_epoch import BATCH, WINDOWS
from memmap_buffer import ConcatBuffer, ReplayBuffer, pack, publish

LATENCY, BANDWIDTH = 0.02, 1e8  # seconds before each answer; bytes a second of all connections together
SHARDS, THREADS, PIECE = 4, 16, 4 << 20
SUPPORT = Path(__file__).parents[2] / "tests" / "support"
STEPS: dict[str, Any] = {"timestep_level": True}
PEER_EPOCH = Path(__file__).with_name("peer_epoch.py")
PEERS = {"mosaic": "mosaicml-streaming", "litdata": "litdata", "webdataset": "webdataset"}  # name -> package
S3 = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key", "AWS_ALLOW_HTTP": "true"}
ROWS = (
    ("seconds", "", "s"),
    ("first", "  first batch", "s"),
    ("memory", "  peak memory", "MB"),
    ("sent", "  sent", "MB"),
)


def epochs(run: Run, kind: str) -> Iterator[Row]:
    """An epoch of `shuffle="block"` with nothing in the cache, then one with everything; bytes, and the first batch."""
    with serving(run, kind) as far:
        epoch = Epoch(far)
        calls: dict[str, Call] = {OURS: epoch.cold, "plain GETs": lambda: fetch_all(far.server.url, far.files)}
        seconds = medians(calls, max(3, run.repeats // 700), burst=1)
        name, mb = f"remote epoch, shuffle='block', {kind}", far.bytes / 1e6
        seconds[f"{BOUND} line"] = far.bytes / BANDWIDTH
        yield throughput(name, seconds, 0.9, per_call=-(-far.steps // BATCH), unit="batches/s")
        told, firsts = statistics.median(epoch.sent) / far.bytes, statistics.median(epoch.first)
        yield finish("  bytes fetched over needed", "", told, None, told, Goal(1.1, at_most=True))
        expected = 3 * LATENCY + far.bytes / WINDOWS / BANDWIDTH
        values = 1e3 * firsts, 1e3 * expected, firsts / expected
        yield finish("  first batch, over 3 trips and a window", "ms", *values, Goal(1.0, at_most=True))
        near, cached = ConcatBuffer.from_root(far.near), epoch.opened()
        consume(cached, far)
        warm: dict[str, Call] = {OURS: lambda: consume(cached, far), f"{BOUND} folders": lambda: consume(near, far)}
        again = medians(warm, max(3, run.repeats // 200), burst=1)
        yield throughput(f"  second epoch, {mb:.0f} MB", again, 0.9, per_call=far.steps, unit="steps/s")


def beside(run: Run, kind: str) -> Iterator[Row]:
    """Cold epochs of this library and of others; the figure is ours over the least of theirs."""
    if not run.peers or run.environment is None:
        sys.stderr.write(f"skipped: an epoch beside {', '.join(PEERS.values())}; --peers FOLDER\n")
        return
    python = run.once(("environment",), lambda: environment(run.environment))
    with serving(run, kind) as far:
        contenders, names = Beside(run, far, python), (OURS, *PEERS)
        for workers in (0, 2):
            told: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for name in names * max(1, run.repeats // 1000):
                if found := contenders.epoch(name, workers):
                    told[name].append(found)
            load = os.getloadavg()[1]
            what = f"remote epoch, {kind}, {far.bytes / 1e6:.0f} MB, {workers} workers, load {load:.0f}"
            for key, title, unit in ROWS:
                values = {name: statistics.median(one[key] for one in told[name]) for name in names if told[name]}
                ours = values.pop(OURS)
                yield finish(
                    title or what,
                    unit,
                    ours,
                    None,
                    ours / min(values.values(), default=ours),
                    Goal(1, at_most=True),
                    values,
                )


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


# Beside other libraries


class Beside:
    """Epochs of this library and of the others, of the same steps from the same server, each in a process of its own.

    Two of the others do not read from plain HTTP, so the server is asked as S3 would be.
    """

    def __init__(self, run: Run, far: Published, python: Path) -> None:
        self._far, self._python = far, python
        for name in PEERS:
            if not (far.far / name).exists():
                given = str(far.far / name), far.kind, str(run.steps_of(far.kind)), str(SHARDS)
                subprocess.run([python, PEER_EPOCH, "write", name, *given], check=True, stdout=sys.stderr)

    def epoch(self, name: str, workers: int) -> dict[str, float] | None:
        """Of a cold one: seconds, those until its first batch, peak memory in MB, MB sent; None where theirs failed."""
        urls = [self._far.url]
        if name == "webdataset":  # it has no listing
            urls = [f"{self._far.url}/{name}/{path.name}" for path in sorted((self._far.far / name).iterdir())]
        python = sys.executable if name == OURS else self._python
        self._far.server.told()
        with self._far.cache() as local:
            local.mkdir()
            given = " ".join(urls), str(local), self._far.kind, str(self._far.steps), str(workers)
            command = [python, PEER_EPOCH, "read", name, *given]
            env = {**os.environ, **S3}
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
            ) as process:
                try:
                    peak = peak_memory(process)
                    assert process.stdout is not None
                    said = process.stdout.read()
                finally:  # a session of its own hears no Ctrl-C, and workers may outlive it
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        if process.returncode and name != OURS:
            sys.stderr.write(f"failed: an epoch of {name} with {workers} workers, see above\n")
            return None
        found: dict[str, float] = json.loads(said.rstrip().rpartition("\n")[2])
        same = abs(found["reward"] - self._far.reward) < 1e-6 * self._far.steps
        assert found["steps"] == self._far.steps and same, f"an epoch of {name} was not whole"
        return {**found, "memory": peak / 1e6, "sent": self._far.server.told()["sent"] / 1e6}


def environment(folder: Path) -> Path:
    """The interpreter of an environment with the other libraries, which is made where it is not there."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        torch = f"torch=={version('torch').partition('+')[0]}"  # first: what needs it would bring one of its own
        for packages in ([torch], [torch, *PEERS.values()]):
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, stdout=sys.stderr)
    return python


def peak_memory(process: subprocess.Popen[str]) -> int:
    """The most bytes, pages of files aside, that a process and all of its session had until it ended; 0 without /proc.

    What several of them share counts once. Pages of files are what the system takes back, those of a cache among them.
    """
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(memory_of, processes_of(process.pid))))
        time.sleep(0.1)
    return peak


def processes_of(session: int) -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                yield folder


def memory_of(process: Path) -> int:
    with suppress(OSError):
        lines = dict(line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:])
        return sum(1024 * int(lines[part].split()[0]) for part in ("Pss_Anon", "Pss_Shmem"))
    return 0
