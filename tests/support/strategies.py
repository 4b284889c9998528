"""Random recordings, written to a buffer and to the slow definition at once, and the comparison of their batches.

Each value tells which episode (tag: the number of its plan) and which timestep it belongs to.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from profiles import examples
from reference import Episode, Reference
from specification import EVERY_SLOT, JOURNAL, RECORD, STATE_WORD, sealed

from memmap_buffer import Field, ReplayBuffer, Schema
from memmap_buffer.schema import nest

MAX_TIMESTEPS = 8
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # creating a buffer waits for some twenty files
few = examples(50)
SHAPES = {
    "observation.pixels": (np.uint8, (2, 3)),
    "observation.state": (np.float32, (2,)),
    "action": (np.int64, ()),
    "reward": (np.float32, ()),
    "truncated": (np.bool_, ()),
    "note": (np.dtype("U8"), ()),
    "half": (np.float32, (2,)),
}
DEFAULTS = {"action": -1, "note": "none", "half": 1.5}
CODED = ("observation.pixels", "observation.state", "action", "reward", "half")
ENDS = {"terminated": (np.bool_, ()), "done": (np.uint8, (1,))}
META = {"task_id": "int", "label": "U6", "score": ("float", 1)}


def fields_of(end="terminated", codec=None):
    """The declarations; `end` is the name of the field that says that the episode terminated; `codec` of `CODED`."""
    fields = Schema(_fields_of(end)).fields
    return {name: replace(field, codec=codec if name in CODED else None) for name, field in fields.items()}


def _fields_of(end):
    return {
        "observation": {"pixels": Field("uint8", (2, 3), final=True), "state": Field("float", 2, final=True)},
        "action": ("int", (), -1),
        "reward": "float",
        "truncated": "bool",
        "note": ("U8", (), "none"),
        "half": ("bfloat16", 2, 1.5),
        end: ENDS[end],
    }


def row(name, tag, t):
    """The value of a field at step t of the episode of a plan."""
    dtype, shape = {**SHAPES, **ENDS}[name]
    if name in ("truncated", *ENDS):
        return np.zeros(shape, dtype)
    if name == "note":
        return np.str_(f"{tag}:{t}")
    size = int(np.prod(shape))
    value = (16 * tag + t) % 256 + 64 * np.arange(size) if name != "half" else np.full(size, (16 * tag + t) % 128)
    return value.reshape(shape).astype(dtype)


@dataclass(frozen=True)
class Plan:
    """One episode to record, and what becomes of it."""

    length: int
    end: str = ""  # "", "terminated", "truncated" or "both"
    final: bool = False
    how: str = "block"  # a method of Recorder
    task: int = 0


@dataclass
class Recorder:
    """Writes plans to a buffer and to its reference."""

    buffer: ReplayBuffer
    reference: Reference
    end: str
    by_step: bool
    waiting: list = field(default_factory=list)  # episodes of side(), still open

    def run(self, plans):
        for tag, plan in enumerate(plans):
            before = self.waiting.copy()
            getattr(self, plan.how)(tag, plan)
            for waiting in before:
                self.finish(*waiting)

    def block(self, tag, plan):
        with self.buffer.one_episode(**self.meta(tag, plan)) as episode:
            known = self.store(episode, tag, plan, 0, plan.length)
            self.give_final(known, episode, tag, plan)
        self.show(known)

    def whole(self, tag, plan):
        known = self.known(tag, plan)
        for t in range(plan.length):
            for name, value in self.step(tag, plan, t).items():
                known.steps[name].append(value)
        ends = {name: [known.final[name]] if name in known.final else [] for name in known.steps}
        arrays = {name: np.array(rows + ends[name]) for name, rows in known.steps.items()}
        self.buffer.store_episode(**nest(arrays), **self.meta(tag, plan))
        self.reference.publish(known)

    def side(self, tag, plan):
        """Stays open while the next episode is recorded."""
        episode, half = self.buffer.begin_episode(**self.meta(tag, plan)), plan.length // 2
        self.waiting.append((self.store(episode, tag, plan, 0, half), episode, tag, plan, half))

    def open(self, tag, plan):
        """Stays open to the end, without the last step."""
        self.store(self.buffer.begin_episode(**self.meta(tag, plan)), tag, plan, 0, plan.length - 1)

    def abort(self, tag, plan):
        episode = self.buffer.begin_episode(**self.meta(tag, plan))
        known = self.store(episode, tag, plan, 0, plan.length)
        episode.abort()
        self.reference.leave(known)

    def partial(self, tag, plan):
        known = None
        try:
            with self.buffer.one_episode(keep_partial=True, **self.meta(tag, plan)) as episode:
                known = self.store(episode, tag, plan, 0, plan.length - 1)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            if plan.length > 1:
                self.show(known)

    def clear(self, tag, plan):
        if not self.by_step:
            self.buffer.clear()
            self.reference.leave(*self.reference.episodes)

    def store(self, episode, tag, plan, start, stop, known=None):
        known = known or self.known(tag, plan, final=False)
        for t in range(start, stop):
            step = self.step(tag, plan, t)
            given = {name: value for name, value in step.items() if name not in self.left_out(t)}
            episode.store(**nest(given))
            for name, value in step.items():
                known.steps[name].append(value)
            if self.by_step:
                known.is_open = True
                self.reference.publish(known) if t == 0 else self.reference.show(known)
        return known

    def finish(self, known, episode, tag, plan, done):
        self.store(episode, tag, plan, done, plan.length, known)
        self.give_final(known, episode, tag, plan)
        episode.publish()
        self.waiting = [other for other in self.waiting if other[1] is not episode]
        self.show(known)

    def give_final(self, known, episode, tag, plan):
        if plan.final:
            known.final = self.known(tag, plan).final
            episode.final(**nest(known.final))

    def show(self, known):
        if not self.by_step:
            self.reference.publish(known)
        self.reference.end(known)

    def known(self, tag, plan, final=True):
        meta = {name: np.asarray(value) for name, value in self.meta(tag, plan).items()}
        names = [name for name in SHAPES if name.startswith("observation")]
        finals = {name: row(name, tag, plan.length) for name in names if plan.final and final}
        return Episode({name: [] for name in [*SHAPES, self.end]}, finals, meta)

    def step(self, tag, plan, t):
        step = {name: row(name, tag, t) for name in [*SHAPES, self.end]}
        step |= {name: zeros_defaults(self.end)[1][name] for name in self.left_out(t)}
        last = t == plan.length - 1
        step["truncated"] = np.bool_(last and plan.end in ("truncated", "both"))
        step[self.end] = step[self.end] + step[self.end].dtype.type(last and plan.end in ("terminated", "both"))
        return step

    def left_out(self, t):
        return DEFAULTS if t % 4 == 3 else ()

    def meta(self, tag, plan):
        label, score = np.str_("ab"[tag % 2] * 3), np.float32([tag / 2])
        return {"task_id": np.int64(plan.task), "label": label, "score": score}


def zeros_defaults(end):
    """field -> row of zeros; field -> row of its default."""
    shapes = {**SHAPES, end: ENDS[end]}
    zeros = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
    return zeros, {name: np.full_like(zero, DEFAULTS.get(name, zero.flat[0])) for name, zero in zeros.items()}


HOW = ("block", "block", "whole", "side", "open", "abort", "partial", "clear")


def joined(references):
    """One reference whose serials are (source, serial)."""
    out = Reference(*zeros_defaults("terminated"), max_episodes=1000)
    for source, reference in enumerate(references):
        out.episodes += [replace(episode, serial=(source, episode.serial)) for episode in reference.episodes]
    return out


def items_of(reference, cut, **choice):
    return {(*serial, t): item for (serial, t), item in reference.items(cut, **choice).items()}


@st.composite
def recordings(draw, end="terminated", how=HOW, min_size=1, codecs=(None, None, "zstd")):
    """What a buffer and the plans for it are: rings that wrap, open, aborted, partial episodes, compressed fields."""
    plan = st.builds(
        Plan,
        st.integers(1, MAX_TIMESTEPS),
        st.sampled_from(["", "terminated", "truncated", "both"]),
        st.booleans(),
        st.sampled_from(how),
        st.integers(0, 2),
    )
    plans = draw(st.lists(plan, min_size=min_size, max_size=8))
    ring = {"max_episodes": draw(st.integers(2, 6)), "capacity": draw(st.none() | st.integers(1, 20))}
    publish, stage = draw(st.sampled_from([("episode", "ram"), ("step", "ram"), ("episode", "disk")]))
    codec = draw(st.sampled_from(codecs))
    return plans, {**ring, "publish": publish, "stage": stage, "codec": codec}, end


@contextmanager
def recorded(recording):
    """(buffer, reference) of a recording."""
    plans, how, end = recording
    fields, how = fields_of(end, how.get("codec")), {key: value for key, value in how.items() if key != "codec"}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        in_place = how["publish"] == "step" or how["stage"] == "disk"
        spare = 2 + len(plans) if in_place else 1
        sizes = {"max_timesteps": MAX_TIMESTEPS, "circular": True, "spare_slots": spare, **how}
        buffer = ReplayBuffer(folder, fields=fields, meta_fields=META, **sizes)
        reference = Reference(*zeros_defaults(end), how["max_episodes"], how["capacity"])
        Recorder(buffer, reference, end, how["publish"] == "step").run(plans)
        yield buffer, reference
        buffer.close()


# Comparing


def flat(batch, prefix=""):
    """Dotted name -> array; bfloat16 as float32, text as an array of str."""
    import torch

    out = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            out[prefix + name] = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
        else:
            out[prefix + name] = np.asarray(value)
    return out


def stacked(values, zero):
    """Rows of equal shape, or of unequal length, padded behind."""
    longest = max((len(value) for value in values if np.ndim(value)), default=0)
    return np.array([[*value, *[zero] * (longest - len(value))] if np.ndim(value) else value for value in values])


def assert_batch(batch, items, zeros=None):
    """The batch holds these items, in this order, value by value."""
    got = flat(batch)
    assert got.keys() == items[0].keys()
    for name, values in got.items():
        rows = [item[name] for item in items]
        want = stacked(rows, (zeros or {}).get(name, False)) if zeros is not None else np.array(rows)
        assert values.shape == want.shape, name
        assert values.dtype.kind == want.dtype.kind and (want.dtype.kind == "U" or values.dtype == want.dtype), name
        np.testing.assert_array_equal(values, want, err_msg=name)


def assert_view(buffer, items, batch_size=3, zeros=None, **options):
    """A dataset, loaders and samples of these options give exactly `items`, {([source,] serial, t): item}."""
    options |= {"return_indices": True}
    if not items:
        with np.testing.assert_raises_regex(ValueError, "empty|no.* item"):
            buffer.dataset(**options)
        return
    keys, dataset = list(items), buffer.dataset(**options)
    assert len(dataset) == len(items)
    for i in {0, len(items) // 2, len(items) - 1}:
        assert_item(dataset[i], keys[i], items[keys[i]])
    for shuffle in (False, True):
        seen = []
        for batch in buffer.dataloader(batch_size, shuffle=shuffle, seed=1, **options):
            seen += assert_indexed(batch, items, zeros)
        assert (sorted(seen) if shuffle else seen) == (sorted(keys) if shuffle else keys)
    assert_indexed(buffer.sample(5, seed=2, **options), items, zeros)


def assert_item(item, key, want):
    got = flat(item)
    index = np.atleast_1d(got.pop("_index", got.pop("_indices", None))).tolist()
    assert index in (list(key), list(key[:-1]))
    assert_batch({name: value[None] for name, value in got.items()}, [want])


def assert_indexed(batch, items, zeros=None):
    """The batch's rows are the items that its indices name; returns their keys."""
    batch = dict(batch)
    if "_index" in batch:
        index = batch.pop("_index").numpy()
        keys = [(*row, 0) for row in index.reshape(len(index), -1).tolist()]
    else:
        keys = [tuple(row) for row in batch.pop("_indices").tolist()]
    assert_batch(batch, [items[key] for key in keys], zeros)
    return keys


# Filters


def odd(column):
    return np.asarray(column % 2 == 1)


META_FILTERS = (
    {"task_id": 1},
    {"task_id": {0, 2}},
    {"task_id": (1, None)},
    {"task_id": odd},
    {"label": "aaa"},
    {"label": ["bbb"], "task_id": {0, 1}},
    {"score": (0.5, 2.0)},
    {"episode_lens": (3, 6)},
)
FIELD_FILTERS = (
    {"action": (16, 40)},
    {"action": odd},
    {"action": -1},
    {"reward": {1.0, 2.0, 17.0, 18.0}, "truncated": False},
    {"note": {"0:1", "1:0", "none"}},
    {"truncated": True},
)


@st.composite
def choices(draw, by_step=False):
    """Options that choose episodes and, `by_step`, timesteps."""
    out = {}
    if draw(st.booleans()):
        out["filter_meta"] = draw(st.sampled_from(META_FILTERS))
    if draw(st.booleans()):
        out["min_episode_len"] = draw(st.integers(1, 4))
    if draw(st.integers(0, 3)) == 0:
        out["top_k"] = (draw(st.sampled_from(["task_id", "episode_lens"])), draw(st.integers(1, 4)))
    if by_step and draw(st.integers(0, 2)) == 0:
        out["filter_fields"] = draw(st.sampled_from(FIELD_FILTERS))
    return out


# A writer at work, and what else may happen to its records


OPERATIONS = ("whole", "whole", "begin", "step", "step", "end", "abort", "delete", "update", "clear", "reopen")
DAMAGE = ("double", "odd", "tear")
churns = st.lists(st.tuples(st.sampled_from([*OPERATIONS, *DAMAGE]), st.integers(0, 99)), min_size=1, max_size=25)


class Churn:
    """Does one operation after the other on a ring of episodes, whatever is possible of it.

    Args: folder: where. how: options of the buffer.
    """

    def __init__(self, folder, **how):
        fields, meta = {"x": "int", "terminated": "bool"}, {"task": "int"}
        sizes = {"max_episodes": 6, "max_timesteps": MAX_TIMESTEPS, "circular": True, "spare_slots": 4}
        self.buffer = ReplayBuffer(folder, fields=fields, meta_fields=meta, publish="step", **sizes, **how)
        self.folder, self.open = Path(folder), []

    def run(self, name, number):
        getattr(self, name)(number)

    def whole(self, number):
        x = np.arange(1 + number % MAX_TIMESTEPS)
        self.buffer.store_episode(x=x, terminated=(x == len(x) - 1) & (number % 2 == 0), task=number % 3)

    def begin(self, number):
        if len(self.open) < 3:
            self.open.append(self.buffer.begin_episode(task=number % 3))

    def step(self, number):
        if self.open and self.open[-1].length < MAX_TIMESTEPS:
            self.open[-1].store(x=number, terminated=False)

    def end(self, number):
        if self.open:
            self.open.pop(number % len(self.open)).publish()

    def abort(self, number):
        if self.open:
            self.open.pop().abort()

    def delete(self, number):
        if len(self.buffer) and not self.open:
            self.buffer.delete(number % len(self.buffer))

    def update(self, number):
        if len(self.buffer) and not self.open:
            self.buffer.update(0, task=number % 3, x=number)

    def clear(self, number):
        if number % 4 == 0 and not self.open:
            self.buffer.clear()

    def reopen(self, number):
        self.buffer.close()
        self.open = []
        self.buffer = ReplayBuffer.from_folder(self.folder, publish="step")

    def double(self, number):
        """A serial in two slots."""
        self.buffer.close()
        records = self.records()
        source, target = number % len(records), number // 7 % len(records)
        words = {name: int(records[source][name]) for name in RECORD.names}
        words["first_row"] = target * MAX_TIMESTEPS
        self.write("episodes.npy", RECORD.itemsize * target, sealed(**words))

    def odd(self, number):
        """A generation that nobody will make even again."""
        self.buffer.close()
        slot = number % len(self.records())
        generation = int(self.records()[slot]["generation"]) | 1
        self.write("episodes.npy", RECORD.itemsize * slot, generation.to_bytes(8, "little"))

    def tear(self, number):
        """A record of which the end is missing."""
        self.buffer.close()
        slot, words = number % len(self.records()), 1 + number % 3
        self.write("episodes.npy", RECORD.itemsize * (slot + 1) - 8 * words, bytes(8 * words))

    def records(self):
        return np.load(self.folder / "episodes.npy")

    def write(self, name, at, data):
        """Some bytes of an array, and the counter that tells of it."""
        changes = int(np.load(self.folder / "state.npy")["changes"][0]) + 1
        entry = 8 * (STATE_WORD["journal"] + changes % JOURNAL)
        told = ((entry, EVERY_SLOT), (8 * STATE_WORD["changes"], changes))
        words = [("state.npy", offset, word.to_bytes(8, "little")) for offset, word in told]
        for file, offset, raw in ((name, at, data), *words):
            size = np.load(self.folder / file).nbytes
            with (self.folder / file).open("r+b") as stream:
                stream.seek(offset - size, 2)
                stream.write(raw)
        self.reopen(0)
