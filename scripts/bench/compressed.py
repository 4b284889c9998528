"""Compressed fields: their size, random batches from memory and from the disk, and recording from cameras.

The frames are those of Atari games where ale-py and opencv are installed, else a drawn game; those of cameras are a
texture with the noise of a sensor. The bound of a batch is a loop over the codec's own decoder, in one thread, with the
same blobs in memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.cold import forget
from bench.compressed_peers import PEERS, Frames
from bench.data import Array, Run
from bench.measure import BOUND, OURS, Call, Goal, Row, finish, medians, throughput
from bench.peers import in_turn
from memmap_buffer import Field, Jpeg, ReplayBuffer, pack
from memmap_buffer.format.blobs import Threads, encode
from memmap_buffer.writing.episode import Episode

GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman")
EPISODE, BATCH, CAMERA_BATCH = 500, 256, 64
HEIGHT, WIDTH, RATE = 480, 640, 30
NEXT: dict[str, Any] = {"n_steps": 1, "next_fields": ("frame",), "current_fields": ("frame",), "return_indices": False}


def sizes(run: Run) -> Iterator[Row]:
    """Bytes a frame on the disk: of what `store` writes, and of what `pack` makes of it."""
    for name, frames in games(run).items():
        data = Frames(run, name, frames)
        buffer = store(run, name, "zstd")
        live = sum(on_disk(path) for path in (buffer.folder / "data").glob("frame*")) / frames_of(buffer)
        peers = {peer.name: peer.bytes_of(data) / len(frames) for peer in installed(run)}
        yield finish(
            f"size, {name}, as stored", "B/frame", live, frames[0].nbytes, frames[0].nbytes / live, Goal(5), peers
        )
        folder = run.folder("packed")
        pack(buffer.folder, folder, codec={"frame": "zstd"})
        packed = sum(on_disk(path) for path in (folder / "data").glob("frame*")) / frames_of(buffer)
        raw = frames[0].nbytes
        yield finish(f"size, {name}, packed", "B/frame", packed, raw, raw / packed, Goal(15))


def batches(run: Run) -> Iterator[Row]:
    """256 random frames with their successors, over the bare decoder; by two threads over one."""
    import zstandard

    for name, frames in games(run).items():
        buffer, raw = store(run, name, "zstd"), store(run, name, None)
        check(buffer, raw)
        compress = zstandard.ZstdCompressor(3, write_checksum=False, write_dict_id=False).compress
        blobs, decompress = [compress(frame) for frame in frames], zstandard.ZstdDecompressor().decompress
        picks = np.random.default_rng(0).integers(0, len(frames) - 1, (64, BATCH)).tolist()

        sample = partial(buffer.sample, BATCH, **NEXT)
        calls: dict[str, Call] = {
            OURS: with_threads(1, sample),
            BOUND: partial(decode_pairs, decompress, blobs, in_turn(picks)),
            "stored raw": partial(raw.sample, BATCH, **NEXT),
        }
        data = Frames(run, name, frames)
        slow = {peer.name: peer.batch(data, picks[0]) for peer in installed(run)}
        seconds = quintiles(calls, max(20, run.repeats // 2), time.process_time)
        seconds |= quintiles(slow, max(2, run.repeats // 400), time.process_time)
        yield throughput(f"sample({BATCH}) with next, {name}, processor time", seconds, 0.8, unit="batches/s")
        both = {OURS: with_threads(2, sample), BOUND: with_threads(1, sample)}
        seconds = quintiles(both, max(20, run.repeats // 2), time.perf_counter)
        yield throughput(f"sample({BATCH}) with next, {name}, 2 threads over 1", seconds, 1.3, unit="batches/s")


def quintiles(calls: Mapping[str, Call], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of one call of each, five in a row: the lower quintile, as others may use the machine, too."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(-(-repeats // 5)):
        for name, call in calls.items():
            for _ in range(5):
                start = clock()
                call()
                taken[name].append(clock() - start)
    return {name: sorted(times)[len(times) // 5] for name, times in taken.items()}


def decode_pairs(decompress: Callable[[bytes], bytes], blobs: list[bytes], picks: Iterator[list[int]]) -> None:
    for i in next(picks):
        decompress(blobs[i])
        decompress(blobs[i + 1])


def cold(run: Run) -> Iterator[Row]:
    """The same with no page of the store in memory, over the same frames stored raw."""
    name, frames = next(iter(games(run).items()))
    times = max(1, run.cold // 4 // frames.nbytes)
    both = [fill(run, f"cold-{codec}", np.concatenate([frames] * times), codec) for codec in ("zstd", None)]
    calls = {key: partial(buffer.sample, BATCH, **NEXT) for key, buffer in zip((OURS, BOUND), both, strict=True)}
    seconds = medians(calls, max(5, run.repeats // 100), burst=1, before=lambda: [drop(buffer) for buffer in both])
    yield throughput(f"cold sample({BATCH}) with next, {name}, over raw", seconds, 5, unit="batches/s")


def cameras(run: Run) -> Iterator[Row]:
    """64 random frames of a camera as JPEG, by two threads, over one thread's bare decoder; bytes and errors."""
    import simplejpeg

    frames = pictures(max(CAMERA_BATCH, min(300, run.steps // 3000)))
    buffer = fill(run, "camera", frames, Jpeg(95))
    blobs = encode(Field("uint8", frames.shape[1:], codec=Jpeg(95)), frames)
    picks = np.random.default_rng(0).integers(0, len(frames), CAMERA_BATCH).tolist()
    data = Frames(run, "camera", frames)
    ours = partial(buffer.sample, CAMERA_BATCH, timestep_level=True, fields=["frame"])
    calls: dict[str, Call] = {
        OURS: with_threads(2, ours),
        "1 thread": with_threads(1, ours),
        BOUND: lambda: [simplejpeg.decode_jpeg(blobs[i], "RGB") for i in picks],
    }
    video = [peer for peer in installed(run) if peer.lossy]
    calls |= {peer.name: peer.pictures(data, picks) for peer in video}
    seconds = medians(calls, max(3, run.repeats // 200), burst=1)
    yield throughput("64 frames of 480 x 640, jpeg, 2 threads", seconds, 1.7, per_call=CAMERA_BATCH, unit="frames/s")
    size = sum(map(len, blobs)) / len(blobs)
    told = {peer.name: peer.bytes_of(data) / len(frames) for peer in video}
    raw = frames[0].nbytes
    yield finish("size, camera, jpeg 95", "B/frame", size, raw, raw / size, Goal(None), told)
    first = buffer.episode(0)["frame"].astype(int)
    error = np.abs(first - frames[: len(first)]).mean()
    told = {peer.name: peer.error(data) for peer in video}
    yield finish("mean error, camera, jpeg 95", "of 255", float(error), None, float(error), Goal(None), told)


def recording(run: Run) -> Iterator[Row]:
    """Two cameras at 30 frames a second: how much of a processor it takes, and how long `store` takes."""
    frames, steps = pictures(16), max(30, min(300, run.repeats // 10))
    camera = Field("uint8", (HEIGHT, WIDTH, 3), codec="jpeg")
    fields = {"left": camera, "right": camera, "action": ("float", 7)}
    action, out = np.zeros(7, np.float32), np.empty((2, HEIGHT, WIDTH, 3), np.uint8)
    with ReplayBuffer(run.folder("cameras"), 2, steps, fields) as buffer, buffer.one_episode() as episode:
        begin, busy = time.perf_counter(), time.process_time()
        taken, copies = zip(*paced(episode, frames, action, out, steps), strict=True)
        share = (time.process_time() - busy - sum(copies)) / (time.perf_counter() - begin)
    assert buffer.episode_lens[-1] == steps, "a frame was lost"
    yield finish(f"recording 2 x {RATE} frames/s, jpeg", "of a core", share, None, share, Goal(0.2, at_most=True))
    p50, p99, copy = (1e6 * float(x) for x in (*np.percentile(taken, [50, 99]), np.median(copies)))
    goal = Goal(100, at_most=True, unit=" us")
    yield finish("store() of two 480 x 640 frames", "us", p50, copy, p50, goal, {"p99": p99})


def paced(episode: Episode, frames: Array, action: Array, out: Array, steps: int) -> Iterator[tuple[float, float]]:
    """Seconds of each `store`, and of plain copies of the same frames."""
    begin, count = time.perf_counter(), len(frames)
    for t in range(steps):
        time.sleep(max(0.0, begin + t / RATE - time.perf_counter()))
        start = time.perf_counter()
        episode.store(left=frames[t % count], right=frames[-t % count], action=action)
        stored = time.perf_counter()
        out[0], out[1] = frames[(t + 5) % count], frames[(5 - t) % count]  # not those that are in the caches
        yield stored - start, time.perf_counter() - stored


# What they are measured on


def games(run: Run) -> dict[str, Array]:
    """Name -> (N, 84, 84): frames of random play."""
    return run.once(("games",), lambda: played(run))


def played(run: Run) -> dict[str, Array]:
    count = max(EPISODE, min(3000, run.steps // 100))
    try:
        import ale_py
        import cv2  # noqa: F401
        import gymnasium
    except ImportError as error:
        sys.stderr.write(f"a drawn game instead of Atari's ({error}); pip install ale-py opencv-python-headless\n")
        return {"a drawn game": drawn(count)}
    gymnasium.register_envs(ale_py)
    return {name: play(gymnasium.make(f"ALE/{name}-v5", frameskip=1), count) for name in GAMES}


def play(env: Any, count: int) -> Array:
    from gymnasium.wrappers import AtariPreprocessing

    env, frames = AtariPreprocessing(env, noop_max=10), []
    observation, _ = env.reset(seed=1)
    env.action_space.seed(1)
    while len(frames) < count:
        frames.append(observation)
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            observation, _ = env.reset()
    return np.array(frames)


def drawn(count: int) -> Array:
    """A ball, a paddle and bricks, of which some are gone."""
    rng = np.random.default_rng(0)
    frames = np.zeros((count, 84, 84), np.uint8)
    bricks = np.repeat(np.repeat(rng.integers(90, 200, (6, 14)), 3, 0), 6, 1)
    for t, frame in enumerate(frames):
        frame[20:38] = bricks
        frame[20:38, : 6 * (t % 14)] = 0
        x, y = abs(t * 3 % 160 - 80), 38 + abs(t * 2 % 80 - 40)
        frame[y : y + 2, x : x + 2], frame[80:83, x // 2 : x // 2 + 8] = 236, 144
    return frames


def pictures(count: int) -> Array:
    """Frames of a camera that moves, (N, HEIGHT, WIDTH, 3): a texture, and noise of 3 levels."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:HEIGHT, : WIDTH + count]
    smooth = [128 + 60 * np.sin(x / (31 + 9 * k)) * np.cos(y / (23 + 7 * k)) for k in range(3)]
    edges = 40.0 * ((x // 57 + y // 43) % 2)
    scene = np.stack(smooth, -1) + edges[..., None]
    noise = rng.normal(0, 3, (HEIGHT, WIDTH, 3))
    moved = (scene[:, t : t + WIDTH] + np.roll(noise, 17 * t, (0, 1)) for t in range(count))
    return np.array([np.clip(frame, 0, 255).astype(np.uint8) for frame in moved])


def store(run: Run, name: str, codec: Any) -> ReplayBuffer:
    """The frames of a game in a buffer."""
    return run.once(
        ("frames", name, str(codec)), lambda: fill(run, f"{name.split()[-1]}-{codec}", games(run)[name], codec)
    )


def fill(run: Run, folder: str, frames: Array, codec: Any) -> ReplayBuffer:
    lengths = [len(part) - 1 for part in np.array_split(frames, -(-len(frames) // EPISODE))]
    fields = {
        "frame": Field("uint8", frames.shape[1:], final=True, codec=codec),
        "reward": "float",
        "terminated": "bool",
    }
    buffer, begin = ReplayBuffer(run.folder(folder.replace("(", "").split("=")[0]), len(lengths), EPISODE, fields), 0
    for length in lengths:
        ends = np.arange(length) == length - 1
        buffer.store_episode(frame=frames[begin : begin + length + 1], reward=np.arange(length), terminated=ends)
        begin += length + 1
    buffer.flush()
    return buffer


def frames_of(buffer: ReplayBuffer) -> int:
    return int((buffer.episode_lens + 1).sum())


def check(buffer: ReplayBuffer, raw: ReplayBuffer) -> None:
    """Both give the same batch."""
    got, expected = (one.sample(BATCH, seed=0, **NEXT) for one in (buffer, raw))
    assert all(got[key].equal(expected[key]) for key in ("frame", "next_frame")), "other frames were read"


def with_threads(count: int, call: Call) -> Call:
    """A call with so many threads that decode."""

    def limited() -> None:
        with patch.object(Threads, "count", count):
            call()

    return limited


def installed(run: Run) -> list[Any]:
    """The peers that can be imported."""
    return [peer for peer in PEERS if run.peers and run.once(("installed", peer.name), partial(can_import, peer))]


def can_import(peer: Any) -> bool:
    try:
        peer.load()
    except ImportError as error:
        sys.stderr.write(f"skipped: {peer.name} ({error})\n")
        return False
    return True


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def drop(buffer: ReplayBuffer) -> None:
    """Drop the data files from the page cache."""
    maps = buffer._storage.maps
    for array in (*maps.rows.values(), *(coded.data for coded in maps.coded.values())):
        forget(array)
    for path in (buffer.folder / "data").iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
