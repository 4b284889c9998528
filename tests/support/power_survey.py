"""Cutting the power of writers, and whether what a folder shows then, read in every way, is what was promised."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from power import Disk, Left, Operation, Recorder, boot, cuts, recording
from power_life import EPISODES, LONGEST, SMALL, Episode, Life, Promise, Protocol, State
from races import META_FIELDS, VIEWS, wrong

from memmap_buffer import MemmapBufferError, NotABufferError, NotEnoughDataError, ReplayBuffer

Mutation = Callable[[list[Operation]], list[Operation]]
RUNS, STEPS = 2, 24  # writers, and what each does
AGAIN = 1 / 8  # of the cuts have another writer after them, and another cut
SHAPES = {"number": (), "step": (), "value": (9,), "observation": (4,)}


def survey(
    protocol: Protocol, count: int, place: Path, *, runs: int = RUNS, seed: int = 0, mutate: Mutation = list
) -> Counter[str]:
    """Cut the power of some writers `count` times in all; how often which promise was broken.

    Each kind of state that the cuts leave is looked at once, and counted (see `Cut`).

    Args: mutate: what the disk is told instead of what was done.
    """
    found, seen = Counter[str](), set[Any]()
    for run in range(runs):
        rng = random.Random(f"{seed}, {run}")
        place.mkdir(exist_ok=True)
        with boot(1), recording() as recorder:
            life = Life(place / f"run{run}", protocol, recorder, rng)
            life.live(STEPS)
            log, folder = mutate(recorder.log), recorder.folder(life.folder)
            life.buffer.close()
        for disk in cuts(log, count // runs, rng):
            for copy in disk.marked.copies:
                if new(cut := Cut(disk, copy, rng), seen):
                    found.update(cut_off_copy(cut, disk.marked.copies[copy], life, place / "cut", rng))
            if not new(cut := Cut(disk, folder, rng), seen):
                continue
            found.update(cut_off(cut, life, place / "cut", rng))
            if rng.random() < AGAIN:
                try:
                    live_again(cut, life, place / "again", rng, found)
                except (MemmapBufferError, OSError, AssertionError) as error:
                    found[f"{type(error).__name__} in another life: {error}"] += 1
    return found


def broken(found: Counter[str]) -> dict[str, int]:
    """Of what a survey counted, the broken promises."""
    return {kind: count for kind, count in found.items() if count and kind not in ("states", "copies", "lives")}


class Cut:
    """A power cut: what was promised of a folder, or of a copy of it, and what is left.

    Attributes:
        kind: what was being done, or was done last; the last write, barrier or name of it; and of which files nothing,
            some or all of what was done since their last barriers is left. Of one kind there are as many states as
            there are episodes, and sectors that are some.
    """

    def __init__(self, disk: Disk, folder: int, rng: random.Random) -> None:
        self.promise: Promise = disk.marked
        self.left = disk.cut(folder, rng)
        is_copy, doing = folder in self.promise.copies, self.promise.doing
        during = () if is_copy and doing != "copy" else (doing, *disk.last)  # it has been made: all else is no matter
        self.kind = is_copy, during, frozenset(self.left.kept.items())


def new(cut: Cut, seen: set[Any]) -> bool:
    """Whether no cut of this kind was seen before; then it is now."""
    known = len(seen)
    seen.add(cut.kind)
    return len(seen) > known


@contextmanager
def left(cut: Left, path: Path, number: int = 2) -> Iterator[Recorder]:
    """What a cut left of a folder, at `path`, after the machine has started again."""
    cut.write(path)
    try:
        with boot(number), recording(path) as recorder:
            yield recorder
    finally:
        for made in path.parent.glob(f"{path.name}*"):  # snapshots lie beside it
            shutil.rmtree(made)


def cut_off(cut: Cut, life: Life, path: Path, rng: random.Random) -> Counter[str]:
    """Look at what is left, before a writer has come and behind it."""
    found, promise = Counter(states=1), cut.promise
    trusting = "never" if life.exact else "always"
    with left(cut.left, path):
        state, differs = look(path, rng, read_only=True, verify=rng.choice(("auto", trusting, "read")))
        found.update(differs + judge(state, promise._replace(states=promise.before_a_writer), life))
        state, differs = look(path, rng, verify=rng.choice(("auto", trusting, "read")))
        found.update(differs + judge(state, promise, life))
        if state is None:
            found.update(begun_anew(path, life))
    return found


def cut_off_copy(cut: Cut, states: list[State | None], life: Life, path: Path, rng: random.Random) -> Counter[str]:
    """Look at what is left of a snapshot, which is in one of these states."""
    with left(cut.left, path):
        state, differs = look(path, rng)
        strangers = life.strangers(state)
        differs.update(wrong=strangers, lost=not strangers and state not in states)
    return Counter(copies=1) + Counter({f"{kind} in a copy": n for kind, n in differs.items()})


def begun_anew(path: Path, life: Life) -> Counter[str]:
    """A creation that was cut off is no obstacle to the next."""
    fields = life.protocol.fields
    with suppress(MemmapBufferError), ReplayBuffer(path, EPISODES, LONGEST, fields, META_FIELDS) as buffer:
        return Counter(stuck=len(buffer))
    return Counter(stuck=1)


def live_again(
    cut: Cut,
    life: Life,
    path: Path,
    rng: random.Random,
    found: Counter[str],
    *,
    same: bool | None = None,
) -> None:
    """Another writer takes over, without a look, and does some things; then the power goes again.

    Args: same: whether it is of the same durability; None for either.
    """
    promise, same = cut.promise, rng.random() < 0.5 if same is None else same
    with left(cut.left, path) as recorder:
        if not (path / "schema.json").exists():
            return
        found["lives"] += 1
        protocol = life.protocol if same else life.protocol.other()
        second = Life(path, protocol, recorder, rng, (promise, life))
        state, differs = look(path, rng, read_only=True)
        found.update(differs + judge(state, second.taken, second))
        second.begin(state or {}, second.taken.safe)
        second.live(rng.randint(1, 5))
        state, differs = look(path, rng, read_only=True)
        found.update(differs + judge(state, Promise([second.now], second.safe, {}), second))
        for copy in sorted(path.parent.glob(f"{path.name}-copy*")):
            found.update({"wrong in a copy": second.strangers(look(copy, rng)[0])})
        log, folder = list(recorder.log), recorder.folder(path)
        second.buffer.close()
    for later in cuts(log, 3, rng):
        with left(later.cut(folder, rng), path, number=3):
            state, differs = look(path, rng)
            found.update(differs + judge(state, later.marked, second))


class Shown:
    """What `races.wrong` compares a batch with: the episodes of a folder as they were read whole."""

    growing = False

    def __init__(self, state: State) -> None:
        self._state = state

    def length(self, serials: np.ndarray) -> np.ndarray:
        return np.array([self._state[s].length if s in self._state else 0 for s in serials.tolist()])

    def end(self, serials: np.ndarray) -> np.ndarray:
        return np.array([self._state[s].data["end"] if s in self._state else -1 for s in serials.tolist()])

    def has_final(self, serials: np.ndarray) -> np.ndarray:
        return np.array([bool(self._state[s].final) if s in self._state else False for s in serials.tolist()])

    def row(self, name: str, serials: np.ndarray, versions: np.ndarray, t: np.ndarray) -> np.ndarray:
        known = [
            self._state[s].data[name] if s in self._state else np.zeros((1, *SHAPES[name]))
            for s in serials[:, 0].tolist()
        ]
        return np.stack([rows[np.clip(at, 0, len(rows) - 1)] for rows, at in zip(known, t, strict=True)])


def look(folder: Path, rng: random.Random, **options: Any) -> tuple[State | None, Counter[str]]:
    """What a folder shows, None if it is no buffer; and what differs between the ways to read it.

    Through a loader of whole episodes first, so that damage is met by a batch; then through another view, and one by
    one.
    """
    state: State = {}
    try:
        return state, _look(ReplayBuffer.from_folder(folder, **options), state, rng)
    except NotABufferError:
        return None, Counter()
    except (MemmapBufferError, OSError) as error:
        return state, Counter({f"{type(error).__name__}: {error}": 1})


def _look(buffer: ReplayBuffer, state: State, rng: random.Random) -> Counter[str]:
    found = Counter[str]()
    with buffer:
        for _ in range(2 * EPISODES):  # where a damaged episode leaves, an older one may come back
            state.clear()
            found["differs"] += _read_whole(buffer, state)
            if buffer.serials.tolist() == sorted(state):
                break
        with suppress(NotEnoughDataError):
            view = VIEWS[rng.choice(list(VIEWS))]
            batch = buffer.sample(8, view=view, return_indices=True, seed=rng.randrange(99))
            index = next(np.asarray(batch[name]) for name in ("_indices", "_index") if name in batch)
            whole = np.isin(index.reshape(len(index), -1)[:, 0], [*state])  # not of an episode that a ring has trimmed
            if whole.any():
                batch = {name: value[whole] for name, value in batch.items()}
                found["differs"] += int(wrong(batch, Shown(state)).sum())
        serials = buffer.serials.tolist()
        found["differs"] += serials != sorted(state)
        for i, serial in enumerate(serials):
            found["differs"] += Episode(buffer.episode(i)) != state.get(serial)
    return found


def _read_whole(buffer: ReplayBuffer, state: State) -> int:
    """Every episode through a loader; how many came twice, and not alike."""
    differ = 0
    with suppress(NotEnoughDataError):
        for batch in buffer.dataloader(3, view=VIEWS["final"], return_indices=True):
            for serial, episode in _items(batch):
                differ += state.setdefault(serial, episode) != episode
    return differ


def _items(batch: dict[str, Any]) -> Iterator[tuple[int, Episode]]:
    arrays = {name: values.numpy() for name, values in batch.items()}
    for i, (serial, length) in enumerate(zip(arrays["_index"].tolist(), arrays["_lens"].tolist(), strict=True)):
        data = {name: arrays[name][i] if name in META_FIELDS else arrays[name][i, :length] for name in SMALL}
        data |= {name: arrays[name][i] for name in META_FIELDS}
        final = arrays["observation"][i, length : length + 1]  # zeros where there is none
        data["observation"] = arrays["observation"][i, : length + bool(final.any())]
        yield serial, Episode(data)


def judge(state: State | None, promise: Promise, life: Life) -> Counter[str]:
    """How a folder breaks its promise after a cut."""
    if state is None:
        return Counter(lost=None not in promise.states)
    strangers = life.strangers(state)
    if not life.exact or strangers:
        lost = sum(state.get(serial) != episode for serial, episode in promise.safe.items())
        return Counter(wrong=strangers, lost=lost)
    if state in promise.states:
        return Counter()
    shown = [set(known) for known in promise.states if known is not None]
    lost = set.intersection(*shown) - set(state)
    return Counter(lost=len(lost)) if lost else Counter(between=1)
