"""A writer that does everything a writer can, at random, and says at each moment what a power cut may leave of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from inside import next_serial, take_lock
from power import Recorder
from races import FIELDS, META_FIELDS

from memmap_buffer import Field, ReplayBuffer, pack

LONGEST, EPISODES = 6, 4
SMALL = {**FIELDS, "value": ("int", (9,))}  # an episode's values take most of a sector; its other fields share theirs


class Protocol(NamedTuple):
    """How a buffer is written. `fixed`: all episodes are equally long. `codec`: of what has an update."""

    durability: str
    how: Mapping[str, Any] = MappingProxyType({})
    spare_slots: int = 1
    capacity: int | None = None
    fixed: bool = False
    codec: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        coded = {name: Field.parse(spec) for name, spec in SMALL.items() if name in ("value", "observation")}
        return SMALL | {name: replace(field, codec=self.codec) for name, field in coded.items()}

    @property
    def power(self) -> bool:
        return self.durability == "power"

    @property
    def options(self) -> dict[str, Any]:
        return {"durability": self.durability, **self.how}

    def other(self) -> Protocol:
        """The same with the other durability, episode by episode."""
        how = {name: value for name, value in self.how.items() if name != "sync_every"}
        return self._replace(durability="process" if self.power else "power", how=how)


PROTOCOLS = {
    "power": Protocol("power"),
    "power, fixed lengths": Protocol("power", fixed=True),
    "power, groups of 3": Protocol("power", {"sync_every": 3}, spare_slots=3),
    "power, by step": Protocol("power", {"publish": "step"}, capacity=16),
    "power, on disk": Protocol("power", {"stage": "disk"}, spare_slots=2),
    "power, compressed": Protocol("power", codec="zstd"),
    "process": Protocol("process"),
    "process, fixed lengths": Protocol("process", fixed=True),
    "process, by step": Protocol("process", {"publish": "step"}, capacity=16),
    "process, on disk": Protocol("process", {"stage": "disk"}, spare_slots=2),
    "process, compressed, by step": Protocol("process", {"publish": "step"}, capacity=16, codec="zstd"),
}


class Episode:
    """One episode as it was published: equal where every byte of it is."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.length = len(data["number"])
        self._bytes = b"".join(np.asarray(data[name]).tobytes() for name in (*FIELDS, *META_FIELDS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Episode) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)

    @property
    def meta(self) -> dict[str, Any]:
        return {name: self.data[name] for name in META_FIELDS}

    def step(self, t: int) -> dict[str, Any]:
        return {name: self.data[name][t] for name in FIELDS}

    def until(self, stop: int, **meta: Any) -> Episode:
        """Its first steps, and whatever is said of it until they end."""
        return Episode({**self.data, **{name: self.data[name][:stop] for name in FIELDS}, **meta})

    @property
    def final(self) -> dict[str, Any]:
        return dict(zip(["observation"], self.data["observation"][self.length :], strict=False))


State = dict[int, Episode]


class Promise(NamedTuple):
    """What holds after a cut at some moment.

    Attributes:
        states: the folder is in one of them, None being no buffer, unless some writer left the barriers out.
        safe: is there in any case.
        copies: the snapshots that were begun, by folder, and the states that each may be in.
        changing: the episodes that are being changed in place; a reader may not see some of them before the next writer
            has come.
        doing: what is being done, or was done last.
    """

    states: list[State | None]
    safe: State
    copies: dict[int, list[State | None]]
    changing: tuple[int, ...] = ()
    doing: str = ""

    @property
    def before_a_writer(self) -> list[State | None]:
        """The states in which a reader that comes first may find the folder."""
        sets = [some for count in range(len(self.changing)) for some in combinations(self.changing, count + 1)]
        states = [state for state in self.states if state is not None]
        hidden = [{s: e for s, e in state.items() if s not in some} for state in states for some in sets]
        return [*self.states, *hidden]


class Life:
    """A writer that does random things, and promises, until the power goes.

    Args:
        folder: where; it is made unless there is an `earlier` life that ended with it.
        earlier: what that one promised, and that one.

    Attributes:
        now: the episodes that are visible. ever: serial -> everything that its episode ever was.
        exact: whether nothing but `now` is visible: no writer was ever without its barriers.
        safe, copies: as in `Promise`.
        taken: what holds once this one has taken over from the earlier life.
    """

    def __init__(
        self,
        folder: Path,
        protocol: Protocol,
        recorder: Recorder,
        rng: random.Random,
        earlier: tuple[Promise, Life] | None = None,
    ) -> None:
        self.folder, self.protocol, self.recorder, self.rng = folder, protocol, recorder, rng
        self.stamp = 100_000 if earlier is None else 200_000  # nothing that is written was ever written before
        self.now: State = {}
        self.safe: State = {}
        self.copies: dict[int, list[State | None]] = {}
        self.waiting: list[Episode] = []
        self.next = 0
        self.doing = "create"
        self.exact = protocol.power and (earlier is None or earlier[1].exact)
        self.ever: dict[int, set[Episode]] = defaultdict(set)
        if earlier is None:
            folder.mkdir()
            self.promise(None, {})
            self.create()
            self.promise({})
        else:
            self.taken = earlier[0]._replace(safe=dict(earlier[0].safe))
            recorder.mark(self.taken)
            self.buffer = ReplayBuffer.from_folder(folder, **protocol.options)
            is_full = protocol.capacity is not None and self.buffer.num_steps > protocol.capacity
            take_lock(self.buffer)
            if is_full:  # a deletion did not reach the disk, so the oldest left in the place of what is there again
                for serial in self.taken.safe.keys() - set(self.buffer.serials.tolist()):
                    del self.taken.safe[serial]
            self.next = next_serial(self.buffer)
            # a number that is given again must not show what it was before
            self.ever |= {serial: set(known) for serial, known in earlier[1].ever.items() if serial < self.next}

    def strangers(self, state: State | None) -> int:
        """How many episodes of a state were never published like that."""
        return sum(episode not in self.ever[serial] for serial, episode in (state or {}).items())

    def begin(self, state: State, safe: State) -> None:
        """Go on from what a crash left; to the writer damaged episodes fill the ring as well, until they are read."""
        serials = self.buffer.serials.tolist()
        # Oldest first, as they retire; what is read in the place of damaged ones comes in any order.
        self.now = {serial: episode for serial, episode in sorted(state.items()) if serial in serials}
        self.safe = {serial: episode for serial, episode in safe.items() if serial in self.now}
        self.promise(self.now)

    def create(self, overwrite: bool = False) -> None:
        protocol = self.protocol
        sizes = {"circular": True, "spare_slots": protocol.spare_slots, "capacity": protocol.capacity}
        options = {**sizes, "overwrite": overwrite, **protocol.options}
        self.buffer = ReplayBuffer(self.folder, EPISODES, LONGEST, self.protocol.fields, META_FIELDS, **options)

    def promise(self, *states: State | None, changing: tuple[int, ...] = ()) -> Promise:
        """From here on the folder is in one of these states."""
        for state in states:
            for serial, episode in (state or {}).items():
                self.ever[serial].add(episode)
        always = {s: e for s, e in self.safe.items() if all((state or {}).get(s) == e for state in states)}
        promise = Promise(list(states), always, dict(self.copies), changing, self.doing)
        self.recorder.mark(promise)
        return promise

    def do(
        self, action: Callable[[], Any], *states: State | None, safe: bool = False, changing: tuple[int, ...] = ()
    ) -> None:
        """Do something that takes the folder through these states, the last of which stays."""
        promise = self.promise(self.now, *states, changing=changing)
        action()
        self.now = states[-1] or {} if states else self.now
        if self.exact:
            assert self.buffer.serials.tolist() == list(self.now)
        serials = self.buffer.serials.tolist()
        self.now = {serial: episode for serial, episode in self.now.items() if serial in serials}
        for serial in promise.safe.keys() - serials:  # the ring was full of damaged ones, so this one left it
            del promise.safe[serial]
        if safe or self.protocol.power:
            self.safe = dict(self.now)
        self.safe = {serial: episode for serial, episode in self.safe.items() if self.now.get(serial) == episode}
        self.promise(self.now)

    def live(self, steps: int) -> None:
        """Do this many random things."""
        by_step = self.protocol.how.get("publish") == "step"
        work = [self.by_step] * 5 + [self.withdraw] if by_step else [self.publish] * 8
        work += (
            [self.update] * 3
            + [self.write] * 3
            + [self.delete, self.clear, self.flush, self.reopen, self.copy, self.overwrite]
        )
        for _ in range(steps):
            done = self.rng.choice(work)
            self.doing = done.__name__
            done()

    # What is done

    def publish(self) -> None:
        episode = self.new_episode(self.next)
        self.next += 1
        self.waiting.append(episode)
        full = len(self.waiting) == self.protocol.how.get("sync_every", 1)
        self.do(lambda: self.store(episode), *(self.shown() if full else ()))

    def by_step(self) -> None:
        """Each step is published at once; its version and final observation are known at the end."""
        opened, episode = self.open_steps()
        opened["version"] = episode.data["version"]
        if episode.final:
            opened.final(**episode.final)
        serial = episode.data["serial"]
        self.do(opened.publish, {**self.now, serial: episode}, changing=(serial,))

    def withdraw(self) -> None:
        opened, episode = self.open_steps()
        self.do(opened.abort, self.without(episode.data["serial"]))

    def update(self) -> None:
        """New values for the first steps, or for all."""
        if not self.now:
            return
        serial, old = self.rng.choice(list(self.now.items()))
        new, steps = self.new_episode(serial), self.rng.choice((1, old.length, self.rng.randint(1, old.length)))
        rows = self.values(serial, steps)
        change = {"version": self.stamp, "value": np.concatenate([rows, old.data["value"][steps:]])}
        new = Episode({**old.data, **change})
        position = self.buffer.serials.tolist().index(serial)
        shown = {**self.now, serial: new}
        self.do(lambda: self.buffer.update(position, value=rows, version=self.stamp), shown, changing=(serial,))

    def write(self) -> None:
        """New values for some steps of one or two episodes, which may change one before the other."""
        serials = self.rng.sample([*self.now], min(len(self.now), self.rng.choice((1, 2))))
        if serials:
            indices, values, new = self.rewritten({serial: self.now[serial] for serial in serials})
            one_by_one = [{**self.now, serial: new[serial]} for serial in serials]
            change = lambda: self.buffer.write(indices, value=values)  # noqa: E731
            self.do(change, *one_by_one, {**self.now, **new}, changing=tuple(serials))

    def rewritten(self, episodes: State) -> tuple[np.ndarray, np.ndarray, State]:
        """Some of their timesteps, new values for these, and the episodes as they are then."""
        indices, values, new = [], [], {}
        shown = dict(zip(self.buffer.serials.tolist(), self.buffer.episode_lens.tolist(), strict=True))
        for serial, episode in episodes.items():
            # Of an open episode whose number a crash had left in doubt, the first step is shown until it ends.
            count = min(episode.length, shown[serial])
            steps = sorted(self.rng.sample(range(count), self.rng.randint(1, count)))
            rows, value = self.values(serial, len(steps)), episode.data["value"].copy()
            value[steps] = rows
            indices += [(serial, t) for t in steps]
            values.append(rows)
            new[serial] = Episode({**episode.data, "value": value})
        return np.array(indices), np.concatenate(values), new

    def delete(self) -> None:
        if self.now:
            serial = self.rng.choice(list(self.now))
            position = self.buffer.serials.tolist().index(serial)
            self.do(lambda: self.buffer.delete(position), self.without(serial))

    def clear(self) -> None:
        if self.rng.random() < 0.5:
            self.do(self.buffer.clear, *self.shown(), {})

    def flush(self) -> None:
        self.do(self.buffer.flush, *self.shown(), safe=True)

    def reopen(self) -> None:
        self.do(self.buffer.close, *self.shown(), safe=True)
        self.buffer = ReplayBuffer.from_folder(self.folder, **self.protocol.options)
        self.do(lambda: None)  # to a new object, too, damaged episodes fill the ring until they are read

    def overwrite(self) -> None:
        if self.rng.random() < 0.3:
            self.reopen()
            self.next = 0
            self.do(lambda: self.create(overwrite=True), None, {})

    def copy(self) -> None:
        if len(self.copies) < 2:
            path = self.folder.with_name(f"{self.folder.name}-copy{len(self.copies)}")
            path.mkdir()
            number = self.recorder.folder(path)
            self.copies[number] = [None, self.now]
            # A pack is not made of what fails its checksums, and in its place shows nothing that was retired. That of
            # compressed fields makes a file shorter, which the model of the disk does not know.
            packs = self.exact and bool(self.now) and not self.protocol.codec and self.rng.random() < 0.5
            self.do(lambda: pack(self.folder, path) if packs else self.buffer.snapshot(path))
            self.copies[number] = [self.now]
            self.promise(self.now)

    # With what

    def new_episode(self, serial: int) -> Episode:
        length = LONGEST if self.protocol.fixed else self.rng.randint(1, LONGEST)
        t = np.arange(length + self.rng.randrange(2))
        values = self.values(serial, length)
        observation = np.stack([t + serial, t, t * 0 + self.stamp, t * 0 + 1], axis=1).astype(np.float32)
        steps = t[:length]
        return Episode(
            {
                "number": steps * 0 + serial,
                "step": steps + 100 * self.stamp,
                "value": values,
                "observation": observation,
                **{"serial": serial, "version": self.stamp, "end": length},
            }
        )

    def values(self, serial: int, length: int) -> np.ndarray:
        """Values that were never written before."""
        self.stamp += 1
        return np.arange(length)[:, None] * 1_000 + np.arange(9) + self.stamp * 1_000_000 + serial

    def store(self, episode: Episode) -> None:
        if self.protocol.how.get("stage") != "disk":
            self.buffer.store_episode(**episode.data)
            return
        with self.buffer.one_episode(**episode.meta) as opened:
            for t in range(episode.length):
                opened.store(**episode.step(t))
            if episode.final:
                opened.final(**episode.final)

    def open_steps(self) -> tuple[Any, Episode]:
        episode, serial = self.new_episode(self.next), self.next
        self.next += 1
        opened = self.buffer.begin_episode(**episode.meta | {"version": 0})
        for t in range(episode.length):
            longer = {**self.now, serial: episode.until(t + 1, version=0)}
            # The new step is shown before the oldest one leaves.
            between = dict(list(longer.items())[-EPISODES:])
            self.do(lambda t=t, episode=episode: opened.store(**episode.step(t)), between, self.retired(longer))
            if self.rng.random() < 0.3 and serial in self.now:
                episode = self.write_open(serial, episode)
        return opened, episode

    def write_open(self, serial: int, episode: Episode) -> Episode:
        """New values for some steps that an open episode shows; the episode as it goes on then."""
        indices, values, new = self.rewritten({serial: self.now[serial]})
        self.do(lambda: self.buffer.write(indices, value=values), {**self.now, **new}, changing=(serial,))
        for stop in range(1, new[serial].length):  # a crash of the machine may take the steps since the last flush
            self.ever[serial].add(new[serial].until(stop, version=0))
        value = episode.data["value"].copy()
        value[: new[serial].length] = new[serial].data["value"]
        return Episode({**episode.data, "value": value})

    def shown(self) -> list[State]:
        """The states in which the episodes that wait are published, one after the other."""
        states = [self.now]
        for episode in self.waiting:
            states.append(self.retired({**states[-1], episode.data["serial"]: episode}))
        self.waiting = []
        return states[1:]

    def without(self, serial: int) -> State:
        return {s: episode for s, episode in self.now.items() if s != serial}

    def retired(self, state: State) -> State:
        """A state without the oldest, as many as do not fit: of these some steps are shown, or none."""
        limit = self.protocol.capacity or EPISODES * LONGEST
        while len(state) > EPISODES or sum(episode.length for episode in state.values()) > limit:
            del state[next(iter(state))]
        return state
