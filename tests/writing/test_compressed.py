"""Compressed fields hold what raw ones hold: however they are written, changed, copied and read."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_same
from fault_injection import KILLED, in_child, shown, state_of, system, without_barriers
from hypothesis import given
from hypothesis import strategies as st
from inside import get_inside, set_inside
from profiles import examples
from specification import NUMERIC
from strategies import MEMORY

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    Hindsight,
    Jpeg,
    NStep,
    Offsets,
    RandomCrop,
    ReplayBuffer,
    Schema,
    Timestep,
    Trajectory,
    Window,
    Zstd,
    verify,
)

LONGEST = 9
FIELDS = {
    "frame": Field("uint8", (12, 12), final=True, codec="zstd"),
    "state": Field("float32", (24,), final=True, codec=Zstd(level=1)),
    "half": Field("bfloat16", (40,), default=1.5, codec="zstd"),
    "number": Field("int64", codec="zstd"),
    "action": "int",
    "reward": "float",
    "terminated": ("bool", (), False),
}
RAW = {name: replace(field, codec=None) for name, field in Schema(FIELDS).fields.items()}
VIEWS = {
    "timestep": Timestep(),
    "n-step": NStep(3, sequence_fields=("reward", "half")),
    "zeros": Window(4, pad_before=2),
    "edges": Window(4, pad_before=2, padding="edge"),
    "defaults": Window(4, pad_before=2, padding="default"),
    "stacks": Offsets(frame=(-3, -2, -1, 0, 1), half=(0, 2), reward=(0,)),
    "trajectory": Trajectory(final_observation=True, return_mask=True),
    "crop": RandomCrop(3),
}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    without_barriers(monkeypatch)


def reward_for(achieved: Any, goal: Any, info: Any) -> Any:
    return -np.abs(achieved - goal).sum(axis=-1)


HINDSIGHT = Hindsight(achieved="state", goal="state", reward_fn=reward_for, prob=0.7)


def episode_of(number: int, length: int, final: bool = True) -> dict[str, Any]:
    """An episode whose blobs are of very different lengths: zeros, patterns, and noise that does not become shorter."""
    rng = np.random.default_rng(number)
    frame = np.zeros((length + final, 12, 12), np.uint8)
    for t in range(length + final):
        kind = rng.integers(4)
        frame[t] = rng.integers(0, 256, (12, 12)) if kind == 0 else t + number if kind < 3 else np.arange(12) * number
    steps = np.arange(length)
    return {
        "frame": frame,
        "state": np.repeat(np.arange(length + final)[:, None] + number, 24, 1).astype(np.float32),
        "half": np.repeat(steps[:, None] % 7 + 0.5, 40, 1).astype(np.float32),
        "number": steps + 100 * number,
        "action": steps,
        "reward": steps + number * 0.5,
        "terminated": (steps == length - 1) & (number % 3 == 0),
    }


class Pair:
    """A raw and a compressed buffer that are told the same."""

    def __init__(self, place: Path, **options: Any) -> None:
        sizes = {"max_timesteps": LONGEST, "circular": True, "spare_slots": 2, **options}
        self.how = {key: options[key] for key in ("publish", "stage", "durability") if key in options}
        self.both = [ReplayBuffer(place / name, fields=f, **sizes) for name, f in (("raw", RAW), ("coded", FIELDS))]

    @property
    def coded(self) -> ReplayBuffer:
        return self.both[1]

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        for buffer in self.both:
            getattr(buffer, name)(*arguments, **options)

    def store(self, number: int, length: int, final: bool, whole: bool) -> None:
        data = episode_of(number, length, final)
        for buffer in self.both:
            if whole:
                buffer.store_episode(**data)
                continue
            with buffer.one_episode() as episode:
                for t in range(length):
                    left_out = {"half"} if t % 3 == 1 else set()
                    episode.store(**{name: data[name][t] for name in FIELDS if name not in left_out})
                if final:
                    episode.final(frame=data["frame"][-1], state=data["state"][-1])

    def reopen(self) -> None:
        folders = [buffer.folder for buffer in self.both]
        for buffer in self.both:
            buffer.close()
        self.both = [ReplayBuffer.from_folder(folder, **self.how) for folder in folders]

    def check(self, *views: str) -> None:
        """Everything that is shown is the same, and so is every batch."""
        raw, coded = self.both
        assert shown(raw) == shown(coded)
        assert raw.serials.tolist() == coded.serials.tolist()
        for name in views if len(raw) else ():
            options = {"view": VIEWS[name], "return_indices": True}
            assert_same(*[buffer.sample(16, seed=1, **options) for buffer in self.both])
            loaders = [buffer.dataloader(5, shuffle=True, seed=2, **options) for buffer in self.both]
            for batches in zip(*loaders, strict=True):
                assert_same(*batches)


numbers = st.integers(0, 99)
LENGTHS = st.integers(1, LONGEST)
CHANGES = st.one_of(
    st.tuples(st.just("store"), numbers, LENGTHS, st.booleans(), st.booleans()),
    st.tuples(st.just("store"), numbers, LENGTHS, st.booleans(), st.booleans()),
    st.tuples(st.just("update"), st.sampled_from(["frame", "state", "half", "number"]), numbers, LENGTHS),
    st.tuples(st.just("datapoint"), numbers, numbers),
    st.tuples(st.just("recompute"), numbers),
    st.tuples(st.sampled_from(["delete", "clear", "reopen"]), numbers),
)
MODES = [{}, {"publish": "step"}, {"stage": "disk"}, {"durability": "power"}, {"capacity": 15}]


@examples(25)
@given(st.lists(CHANGES, min_size=4, max_size=14), st.sampled_from(MODES), st.sampled_from([*VIEWS]))
def test_whatever_is_done_compressed_and_raw_fields_hold_the_same(
    tmp_path_factory: Any, changes: list[Any], mode: dict[str, Any], view: str
) -> None:
    place = Path(MEMORY or tmp_path_factory.getbasetemp()) / f"compressed-{os.getpid()}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Every byte is given back, wherever the folder lies.
            set_inside(patch, punched_bytes=1, given_back_bytes=1, in_memory_systems=())
            set_inside(patch, encoded_bytes=300, staged_bytes=2000)
            pair = Pair(place, max_episodes=2 if "capacity" not in mode else 4, spare_slots=1, **mode)
            for change in changes:
                do(pair, *change)
                pair.check()
            pair.check(view)
            if len(pair.coded):
                pair.coded.snapshot(place / "copy")
                assert shown(place / "copy") == shown(pair.coded)
            for buffer in pair.both:
                buffer.close()
            assert verify(place / "coded") == []
            assert len(shown(ReplayBuffer.from_folder(place / "coded", verify="always"))) == len(pair.coded)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def do(pair: Pair, what: str, *how: Any) -> None:
    count = len(pair.coded)
    if what in ("store", "reopen"):
        pair.store(*how) if what == "store" else pair.reopen()
    elif what == "clear":
        pair.tell("clear") if how[0] % 4 == 0 else None
    elif not count:
        return
    elif what == "update":
        name, number, steps = how
        position = number % count
        rows = episode_of(number, min(steps, int(pair.coded.episode_lens[position])))[name]
        pair.tell("update", position, **{name: rows[: int(pair.coded.episode_lens[position])]})
    elif what == "datapoint":
        position = how[0] % count
        t = how[1] % int(pair.coded.episode_lens[position])
        pair.tell("store_datapoint", position, t, "frame", episode_of(how[1], 1)["frame"][0])
    elif what == "recompute":
        add = how[0] % 5
        pair.tell("recompute", "frame", lambda episode: (episode["frame"] + add).astype(np.uint8))
    else:
        pair.tell("delete", how[0] % count)


# What is stored


def test_numbers_of_every_dtype_come_back_bit_by_bit(tmp_path: Path) -> None:
    fields = {f"x_{dtype}": Field(dtype, (64,), codec="zstd") for dtype in NUMERIC}
    data = {name: np.zeros((4, 64), field.storage) for name, field in fields.items() if field.dtype != "bfloat16"}
    for rows in data.values():
        rows[1], rows[2] = np.arange(64) % 2, np.arange(64) % 2 if rows.dtype == bool else np.arange(64)
        if rows.dtype.kind in "iu":
            rows[3, :2] = np.iinfo(rows.dtype).min, np.iinfo(rows.dtype).max
        elif rows.dtype.kind in "fc":
            rows[3, :4] = np.nan, -0.0, np.inf, np.finfo(rows.dtype).tiny
    data["x_bfloat16"] = np.stack([np.zeros(64), np.arange(64), -np.arange(64), np.arange(64)]).astype(np.float32)
    with ReplayBuffer(tmp_path / "a", 3, 5, fields) as buffer:
        buffer.store_episode(**data)
        buffer.update(0, **{name: rows[:2] for name, rows in data.items()})
        found = buffer.episode(0)
    for name, rows in data.items():
        assert found[name].tobytes() == rows.astype(found[name].dtype).tobytes(), name
        index = np.load(tmp_path / "a" / "data" / f"{name}.npy")
        assert index[0, 0, 1] < fields[name].itemsize, "it is not compressed"


def test_a_picture_is_within_its_error_and_the_same_bytes_wherever_it_is_copied(tmp_path: Path) -> None:
    x, y = np.meshgrid(np.arange(32), np.arange(48))
    pictures = np.stack([np.stack([x * 4 + t, y * 3, (x + y) * 2], -1).astype(np.uint8) for t in range(4)])
    with ReplayBuffer(tmp_path / "a", 4, 4, {"camera": Field("uint8", (48, 32, 3), codec=Jpeg(90)), "t": "int"}) as b:
        for _ in range(2):
            b.store_episode(camera=pictures, t=np.arange(4))
        before = b.episode(0)["camera"]
        assert 0 < np.abs(before.astype(int) - pictures).max() < 24
        b.update(0, camera=pictures[3:])  # the three after it are kept
        b.update(0, t=np.arange(4) + 1)
        b.snapshot(tmp_path / "copy")
        for source in (b, ReplayBuffer.from_folder(tmp_path / "copy", read_only=True)):
            for i in (0, 1):
                assert (source.episode(i)["camera"][1:] == before[1:]).all()
            assert (source.episode(0)["camera"][0] == before[3]).all()
    assert blobs_of(tmp_path / "a", "camera", 0)[1:] == blobs_of(tmp_path / "copy", "camera", 1)[1:]
    assert blobs_of(tmp_path / "a", "camera", 0)[0] == blobs_of(tmp_path / "a", "camera", 0)[3]


def blobs_of(folder: Path, name: str, slot: int) -> list[bytes]:
    """The blobs of a slot, read without the library."""
    index = np.load(folder / "data" / f"{name}.npy")[slot].astype(np.int64)
    data = np.load(folder / "data" / f"{name}.blobs.npy").reshape(-1)
    return [data[begin : begin + (length & 0xFFFFFFFF)].tobytes() for begin, length in index.tolist()]


# How it is read


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    made = Pair(tmp_path, max_episodes=6)
    for number, length in enumerate((5, 9, 1, 7, 4, 8)):
        made.store(number, length, number % 2 == 0, number % 3 == 0)
    yield made
    for buffer in made.both:
        buffer.close()


def test_every_view_gives_the_same(pair: Pair) -> None:
    pair.check(*VIEWS)


@pytest.mark.parametrize(
    "options",
    [
        {"n_steps": 2, "hindsight": HINDSIGHT},
        {"n_steps": 1, "hindsight": replace(HINDSIGHT, strategy="random")},
        {"timestep_level": True, "filter_fields": {"number": (100, 305)}},
        {"timestep_level": True, "filter_fields": {"number": {3, 104, 501}}},
        {"n_steps": 3, "terminated": "number"},
    ],
    ids=["hindsight", "hindsight across episodes", "range", "members", "ends"],
)
def test_options_that_look_at_rows_give_the_same(pair: Pair, options: dict[str, Any]) -> None:
    options |= {"return_indices": True}
    assert_same(*[buffer.sample(32, seed=3, **options) for buffer in pair.both])
    assert_same(*[next(iter(buffer.dataloader(500, seed=3, shuffle=True, **options))) for buffer in pair.both])


def test_statistics_are_the_same(pair: Pair) -> None:
    raw, coded = (buffer.statistics(["frame", "state", "number"]) for buffer in pair.both)
    for name in ("frame", "state", "number"):
        assert (raw[name].mean == coded[name].mean).all() and (raw[name].max == coded[name].max).all()


def test_a_raw_and_a_compressed_folder_are_read_as_one(pair: Pair, tmp_path: Path) -> None:
    folders = [buffer.folder for buffer in pair.both]
    with ReplayBuffer(tmp_path / "other", 6, LONGEST, RAW) as other:
        for i in range(len(pair.coded)):
            data = pair.coded.episode(i)
            other.store_episode(**{name: np.asarray(data[name]) for name in RAW})
    mixed, raw = (ConcatBuffer([folders[0], folder]) for folder in (folders[1], tmp_path / "other"))
    for view in VIEWS.values():
        for a, b in zip(*[x.dataloader(7, view=view, shuffle=True, seed=4) for x in (mixed, raw)], strict=True):
            assert_same(a, b)


def test_workers_decode(pair: Pair) -> None:
    options = {"batch_size": 8, "n_steps": 2, "shuffle": True, "seed": 5, "num_workers": 2}
    for raw, coded in zip(*[buffer.dataloader(**options) for buffer in pair.both], strict=True):
        assert_same(raw, coded)


def spoil(buffer: ReplayBuffer, name: str) -> None:
    """Overwrite the blobs of every slot, as another program might."""
    path = buffer.folder / "data" / f"{name}.blobs.npy"
    with path.open("r+b") as file:
        size = path.stat().st_size - 128
        file.seek(128)
        file.write(b"\x55" * size)


def test_a_blob_that_is_none_is_an_error_and_no_row(pair: Pair) -> None:
    spoil(pair.coded, "state")
    text = "coded/data/state.blobs.npy: .*episode .* cannot be decoded"
    for read in (
        lambda: pair.coded.sample(32, timestep_level=True),
        lambda: pair.coded.sample(32, n_steps=2, hindsight=HINDSIGHT, current_fields=("action", "reward")),
        lambda: pair.coded.statistics(["state"]),
        lambda: pair.coded.recompute("state", lambda episode: episode["state"]),
        lambda: pair.coded.update(1, state=np.zeros((1, 24))) or pair.coded.sample(64, timestep_level=True),
    ):
        with pytest.raises(CorruptBufferError, match=text):
            read()


def test_what_looks_at_rows_goes_on_where_they_are_overwritten_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters, statistics and goals: an episode that is gone when its bytes turn out to be none is no error."""

    decode, reader = get_inside("decode_rows"), ReplayBuffer.from_folder(pair.coded.folder, read_only=True)

    def late(self: Any, index: Any, out: Any, places: Any) -> Any:
        if waiting:
            for number in waiting.pop():
                pair.coded.store_episode(**episode_of(number, LONGEST))
            out[places] = 0
            return np.arange(len(index))
        return decode(self, index, out, places)

    set_inside(monkeypatch, decode_rows=late)
    for times, turned, read in (
        (2, 8, lambda: reader.sample(16, timestep_level=True, filter_fields={"number": (0, 10**6)})),
        (2, 8, lambda: reader.sample(16, n_steps=2, hindsight=HINDSIGHT)),
        (2, 8, lambda: reader.sample(16, n_steps=3, terminated="number")),
        (1, 8, lambda: reader.sample(16, timestep_level=True)),
        (2, 3, lambda: reader.statistics(["number"])),
    ):
        waiting = [range(0), range(turned)][-times:]  # the ring turns meanwhile; what is read again may be none, too
        read()
        assert not waiting


# How it is written


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("how", [{}, {"publish": "step"}, {"stage": "disk"}], ids=str)
def test_an_episode_that_met_a_full_disk_goes_on_with_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], at: int
) -> None:
    """Blobs that were asked for once already are asked for again, some of them of steps that came in their place."""
    set_inside(monkeypatch, encoded_bytes=2 * 144)  # two frames are encoded together
    set_inside(monkeypatch, staged_bytes=4 * sum(field.itemsize for field in RAW.values()))
    data, other = episode_of(1, 9), episode_of(2, 9)
    with ReplayBuffer(tmp_path / "a", 4, LONGEST, FIELDS, spare_slots=2, **how) as buffer:
        buffer.begin_episode().abort()
        episode = buffer.begin_episode()
        episode.extend(**{name: data[name][:2] for name in FIELDS})
        with system(at, error=errno.ENOSPC, only=("pwrite",), lasting=True), suppress(OSError):
            if how:
                episode.extend(**{name: other[name][2:6] for name in FIELDS})
            else:
                episode.publish()
        if episode.state == "open":
            there = episode.length
            episode.extend(**{name: data[name][there:7] for name in FIELDS})
            episode.extend(**{name: data[name][7:9] for name in FIELDS})
            episode.final(frame=data["frame"][-1], state=data["state"][-1])
            episode.publish()
            found = buffer.episode(0)
            for name in FIELDS:
                wanted = np.concatenate([data[name][:2], other[name][2:there], data[name][there:]])
                np.testing.assert_array_equal(found[name], wanted, err_msg=name)
    assert verify(tmp_path / "a") == []


def test_columns_come_and_go(pair: Pair) -> None:
    """Added by a default, by zeros, by a function; renamed; written to, in part; dropped."""
    made = {
        "fives": ((3,), 5, None),
        "more.zeros": ((2, 2), 0, None),
        "copies": ((24,), None, lambda episode: episode["state"] + 1),
    }
    for name, (shape, default, compute) in made.items():
        for buffer, codec in zip(pair.both, (None, "zstd"), strict=True):
            field = Field("float32", shape, default, final=name != "fives", codec=codec)
            buffer.add_field(name, field, compute)
        pair.check("timestep")
    pair.tell("update", 1, fives=np.full((2, 3), 7), copies=np.full((1, 24), 1.5), more={"zeros": np.ones((3, 2, 2))})
    pair.tell("store_datapoint", 3, 6, "fives", [1, 2, 3])
    pair.check("timestep")
    pair.tell("rename_field", "frame", "pixels.frame")
    pair.tell("rename_field", "more", "less")
    pair.tell("drop_field", "half")
    pair.check("timestep")
    left = {path.name for path in (pair.coded.folder / "data").iterdir() if ".blobs." in path.name}
    names = ("pixels.frame", "state", "number", "fives", "less.zeros", "copies")
    assert left == {f"{name}.blobs.npy" for name in names}
    pair.reopen()
    for buffer in pair.both:
        with buffer.one_episode() as episode:
            episode.store(**{name: np.ones(field.shape) for name, field in buffer.schema.fields.items()})
    pair.check("timestep", "crop")
    assert verify(pair.coded.folder) == []
    assert shown(ReplayBuffer.from_folder(pair.coded.folder, verify="always")) == shown(pair.coded)


def test_many_environments_and_threads_write_side_by_side(tmp_path: Path) -> None:
    from threading import Thread

    with ReplayBuffer(tmp_path / "a", 40, LONGEST, FIELDS, spare_slots=8) as buffer:

        def work(first: int) -> None:
            for number in range(first, first + 6):
                data = episode_of(number, 1 + number % LONGEST)
                with buffer.one_episode() as episode:
                    for t in range(len(data["action"])):
                        episode.store(**{name: data[name][t] for name in FIELDS})
                    episode.final(frame=data["frame"][-1], state=data["state"][-1])

        threads = [Thread(target=work, args=(10 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(buffer) == 24
        for i in range(24):
            found = buffer.episode(i)
            wanted = episode_of(int(found["number"][0]) // 100, len(found["action"]))
            for name in FIELDS:
                np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert verify(tmp_path / "a") == []


@pytest.mark.parametrize("capacity", [None, 200])
def test_a_ring_gives_the_space_of_larger_blobs_back(tmp_path: Path, capacity: int | None) -> None:
    """Episodes of noise, then ten wraps of zeros: their blobs take no more than what a block is rounded up to."""
    fields = {"frame": Field("uint8", (128, 128), codec="zstd")}

    def used() -> int:
        with (tmp_path / "ring" / "data" / "frame.blobs.npy").open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_blocks * 512

    noise = np.random.default_rng(0).integers(0, 256, (64, 128, 128), np.uint8)
    with ReplayBuffer(tmp_path / "ring", 4, 64, fields, capacity=capacity, circular=True, spare_slots=2) as buffer:
        for _ in range(6):
            buffer.store_episode(frame=noise)
        large = used()
        for wrap in range(10):
            for _ in range(6):
                buffer.store_episode(frame=np.full((64, 128, 128), wrap, np.uint8))
        small = used()
    assert large >= 4 * noise.nbytes
    if get_inside("file_system")(tmp_path) not in get_inside("in_memory_systems"):
        assert small <= 6 * 2 * get_inside("punched_bytes") < large / 2


# Whatever ends a change, it is done or not


def steps_of(buffer: ReplayBuffer, held: dict[str, Any], t: int) -> None:
    """Step t of an episode that is shown as it grows."""
    data = episode_of(7, 4)
    episode = held.setdefault("episode", None) or held.setdefault("new", buffer.begin_episode())
    held["episode"] = episode
    if episode.length == t:
        episode.store(**{name: data[name][t] for name in FIELDS})


def end_of(buffer: ReplayBuffer, held: dict[str, Any]) -> None:
    """The end of it, by a rewrite, as a meta field was set since its first step."""
    episode, data = held["episode"], episode_of(7, 4)
    episode["tag"] = 5
    if not episode.finals:
        episode.final(frame=data["frame"][-1], state=data["state"][-1])
    episode.publish()


def complete(buffer: ReplayBuffer, held: dict[str, Any]) -> None:
    """An episode that was cut, and later its final observation."""
    data = episode_of(8, 3)
    if held.get("cut") is None:
        held["cut"] = buffer.begin_episode()
        held["cut"].extend(**{name: data[name][:3] for name in FIELDS})
    if held["cut"].state == "open":
        held["cut"].publish(cut=True)


def add_final(buffer: ReplayBuffer, held: dict[str, Any]) -> None:
    data = episode_of(8, 3)
    held["cut"].complete({name: data[name][-1] for name in ("frame", "state")})


def update(buffer: ReplayBuffer, held: dict[str, Any]) -> None:
    data = episode_of(21, 2, final=False)
    buffer.update(1, frame=data["frame"], half=data["half"], tag=9)


def numbered(episode: Any) -> Any:
    frame = episode["frame"]
    return np.zeros_like(frame) + np.arange(len(frame), dtype=np.uint8)[:, None, None]


# name -> (how the buffer is written, the calls that make the change)
CALLS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "publish": ({}, [lambda b, held: b.store_episode(**episode_of(5, 6))]),
    "update": ({}, [update]),
    "datapoint, with barriers": (
        {"durability": "power"},
        [lambda b, held: b.store_datapoint(0, 2, "frame", episode_of(3, 1)["frame"][0])],
    ),
    "recompute": ({}, [lambda b, held: b.recompute("frame", numbered)]),
    "steps": ({"publish": "step"}, [*(partial(steps_of, t=t) for t in range(4)), end_of]),
    "complete": ({}, [complete, add_final]),
}


def begin(folder: Path) -> None:
    with ReplayBuffer(folder, 3, LONGEST, FIELDS, {"tag": "int"}, circular=True, spare_slots=2) as buffer:
        for number, length in enumerate((6, 4, 9)):
            buffer.store_episode(**episode_of(number, length))


def states_of(name: str, tmp_path: Path) -> list[Any]:
    """What is shown at the start, and after each call; a recomputed field changes episode by episode."""
    how, calls = CALLS[name]
    begin(tmp_path / "start")
    shutil.copytree(tmp_path / "start", tmp_path / "reference")
    buffer, held, states = ReplayBuffer.from_folder(tmp_path / "reference", **how), {}, []
    states.append(state_of(tmp_path / "reference"))
    for call in calls:
        call(buffer, held)
        states.append(state_of(tmp_path / "reference"))
    buffer.close()
    return states


def assert_between(found: Any, before: Any, after: Any) -> None:
    """The one or the other; where several episodes change, each by itself."""
    if len(before) == len(after) and [one[0] for one in before] == [one[0] for one in after]:
        assert all(one in pair for one, pair in zip(found, zip(before, after, strict=True), strict=True))
    else:
        assert found in (before, after)


def some(names: Any) -> list[Any]:
    """The calls of these names, and the others where the slow tests run, too."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in CALLS]


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 3], ids=["each", "every third"])
@pytest.mark.parametrize("name", some(["update", "steps", "complete"]))
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_state(tmp_path: Path, name: str, stride: int) -> None:
    """Of a write half of the bytes have arrived."""
    (how, calls), states = CALLS[name], states_of(name, tmp_path)
    for at in range(1, 300, stride):
        folder = shutil.copytree(tmp_path / "start", tmp_path / str(at))

        def work(tell: Any, folder: Path = folder, at: int = at) -> None:
            buffer, held = ReplayBuffer.from_folder(folder, **how), {}
            buffer.begin_episode().abort()
            with system(at, kill=True, half=True):
                for call in calls:
                    call(buffer, held)
                    tell(1)

        child = in_child(work)
        if child.status != KILLED:
            assert child.status == 0, child.told
            break
        done = len(child.told)
        found = state_of(folder)  # read before a writer comes, and behind one
        with ReplayBuffer.from_folder(folder) as buffer:
            buffer.begin_episode().abort()
            finished = [(one[0], one[1]) for one in state_of(folder)]
            assert_between(finished, *([(one[0], one[1]) for one in state] for state in states[done : done + 2]))
            buffer.store_episode(**episode_of(30, 5))
        assert len(found) >= len(finished) - 1
        assert verify(folder) == [] and state_of(folder, verify="always")[-1][0] > found[-1][0]
        shutil.rmtree(folder)
    assert at > 4


@pytest.mark.parametrize("name", some(["update", "steps"]))
def test_a_full_disk_at_any_write_raises_and_the_same_call_works_once_there_is_space(tmp_path: Path, name: str) -> None:
    (how, calls), states = CALLS[name], states_of(name, tmp_path)
    for at in range(1, 300):
        folder, held, failed = shutil.copytree(tmp_path / "start", tmp_path / str(at)), {}, False
        with ReplayBuffer.from_folder(folder, **how) as buffer:
            buffer.begin_episode().abort()
            with system(at, error=errno.ENOSPC, only=("pwrite", "create"), lasting=True) as seen:
                for call in calls:
                    try:
                        call(buffer, held)
                    except OSError:
                        seen.at, failed = 0, True
                        call(buffer, held) if not is_done(name, held) else None
        found = state_of(folder, verify="always")
        if name == "publish" and len(found) and found[-1][0] > states[-1][-1][0]:
            found = [(serial - 1, *rest) for serial, *rest in found]
        assert [one[1:] for one in found][-1] == [one[1:] for one in states[-1]][-1], at
        assert verify(folder) == []
        shutil.rmtree(folder)
        if not failed:
            break
    assert at > 3


def is_done(name: str, held: dict[str, Any]) -> bool:
    episode = held.get("episode")
    return name == "steps" and episode is not None and episode.state == "published"
