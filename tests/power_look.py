"""What a folder shows after a power cut, read in every way, and whether that is what was promised."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from power_life import EPISODES, SMALL, Episode, Life, Promise, State
from races import META_FIELDS, VIEWS, wrong

from memmap_buffer import MemmapBufferError, NotABufferError, NotEnoughDataError, ReplayBuffer

SHAPES = {"number": (), "step": (), "value": (9,), "observation": (4,)}


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
    if life.protocol.durability == "process" or strangers:
        lost = sum(state.get(serial) != episode for serial, episode in promise.safe.items())
        return Counter(wrong=strangers, lost=lost)
    if state in promise.states:
        return Counter()
    shown = [set(known) for known in promise.states if known is not None]
    lost = set.intersection(*shown) - set(state)
    return Counter(lost=len(lost)) if lost else Counter(between=1)
