"""The ring, episodes that are published by the step, and everything interleaved against a plain model."""

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from fault_injection import Model, Told, flags_of, in_child, shown, system, without_barriers
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from inside import get_inside, set_inside
from profiles import examples
from specification import CUT, OPEN

from memmap_buffer import (
    BufferFullError,
    ConcatBuffer,
    EpisodeStateError,
    Field,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    WriterLostError,
    verify,
)

FIELDS = {"x": Field("float", 2, final=True), "y": "int", "truncated": ("bool", (), False)}
META = {"task": "int"}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    without_barriers(monkeypatch)


def make(folder, max_episodes=3, max_timesteps=4, circular=True, **options):
    return ReplayBuffer(folder, max_episodes, max_timesteps, FIELDS, META, circular=circular, **options)


def whole(value, length=2):
    return {"x": np.full((length, 2), value), "y": np.full(length, value), "task": value}


def store(episode, y):
    return episode.store(x=[y, y], y=y)


def ys(source):
    return [episode["y"] for _, episode in shown(source)]


@pytest.mark.parametrize("options", [{}, {"stage": "disk"}, {"publish": "step"}], ids=str)
def test_an_episode_written_in_pieces_is_byte_for_byte_one_written_at_once(tmp_path, monkeypatch, options):
    """Data, checksums and records, where every write of a piece is short, too."""
    monkeypatch.setattr("time.time", lambda: 7.0)
    set_inside(monkeypatch, staged_bytes=300)
    folders = [tmp_path / "at once", tmp_path / "in pieces"]
    for folder, piece in zip(folders, (1 << 18, 40), strict=True):
        set_inside(monkeypatch, piece_bytes=piece)
        with make(folder, 3, 50, **options) as buffer, system(short=30 * (piece == 40)):
            for value in range(5):
                with buffer.one_episode(task=value) as episode:
                    for t in range(value, 40 + value):
                        store(episode, t)
                    episode.final(x=[value, value])
        assert verify(folder) == []
    names = [*(f"data/{name}.npy" for name in FIELDS), "meta/task.npy", "checksums.npy", "episodes.npy"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


# The ring


def test_a_ring_of_timesteps_shows_exactly_the_newest_and_as_episodes_those_that_are_whole(tmp_path):
    with make(tmp_path, 10, 4, capacity=6) as ring:
        for length, kept in [
            (2, [0]),
            (3, [0, 1]),
            (1, [0, 1, 2]),
            (1, [1, 2, 3]),
            (3, [2, 3, 4]),
            (4, [5]),
            (1, [5, 6]),
        ]:
            ring.store_episode(**whole(length, length))
            assert ring.serials.tolist() == kept
        assert ring.num_steps == 6 and sum(ring.episode_lens) == 5
        assert ring.batch(timestep_level=True)["y"].tolist() == [3, 4, 4, 4, 4, 1]
    assert ReplayBuffer.from_folder(tmp_path).serials.tolist() == [5, 6]


def test_a_buffer_of_timesteps_that_is_no_ring_refuses_what_does_not_fit_and_keeps_it_staged(tmp_path):
    with make(tmp_path, 10, 4, circular=False, capacity=5) as full:
        full.store_episode(**whole(1, 3))
        episode = full.begin_episode()
        for y in (7, 8, 9):
            store(episode, y)
        with pytest.raises(BufferFullError, match="3 timesteps are published, 3 more would pass capacity=5"):
            episode.publish()
        assert ys(full) == [[1, 1, 1]]
        full.clear()
        episode.publish()
        assert ys(full) == [[7, 8, 9]]


def test_the_slot_being_written_is_never_a_visible_one(tmp_path):
    """A ring of one, of spare slots one: the visible episode stays whole until the next one is."""
    with make(tmp_path, 1) as ring:
        for i in range(5):
            ring.store_episode(**whole(i))
            with system(7, error=errno.EIO), pytest.raises(OSError, match="Input/output"):
                ring.store_episode(**whole(99))
            assert ys(ring) == ys(tmp_path) == [[i, i]]


def test_several_open_episodes_wrap_the_ring_in_the_order_they_end(tmp_path):
    with make(tmp_path, 2) as ring:
        waiting = [ring.begin_episode(task=i) for i in range(5)]
        for t in range(2):
            for i, episode in enumerate(waiting):
                store(episode, 10 * i + t)
        for i in (3, 0, 4, 2, 1):
            waiting[i].publish()
        assert ys(ring) == [[20, 21], [10, 11]] and ring.serials.tolist() == [3, 4]


def test_no_serial_is_given_twice_whatever_happened_to_its_episode(tmp_path):
    seen = []
    with make(tmp_path, 2, publish="step") as ring:
        for i in range(4):
            episode = ring.begin_episode()
            store(episode, i)
            seen.append(ring.serials[-1])
            episode.abort() if i % 2 else episode.publish()
        ring.clear()
    with ReplayBuffer.from_folder(tmp_path) as ring:
        ring.store_episode(**whole(5))
        assert [*seen, ring.serials[-1]] == [0, 1, 2, 3, 4]


# Published by the step


def test_each_step_is_visible_at_once_to_other_objects_and_other_processes(tmp_path):
    with make(tmp_path, publish="step") as writer:
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        with writer.one_episode(task=4) as episode:
            assert shown(reader) == []
            for t in range(3):
                store(episode, t)
                steps = list(range(t + 1))
                assert ys(reader) == [steps] and shown(reader)[0][1]["task"] == 4
                assert in_child(lambda tell: tell(ys(tmp_path))) == (0, [[steps]])
                assert reader.sample(2, timestep_level=True)["y"].max() <= t
            episode.final(x=[9, 9])
            assert len(shown(reader)[0][1]["x"]) == 3
        assert shown(reader)[0][1]["x"][3:] == [[9, 9]] and reader.serials.tolist() == [0]
        assert not flags_of(tmp_path)[0] & (OPEN | CUT)


def test_meta_that_is_known_late_is_shown_when_the_episode_ends(tmp_path):
    with make(tmp_path, publish="step") as writer, writer.one_episode(task=1) as episode:
        store(episode, 1)
        episode["task"] = 2
        assert shown(tmp_path)[0][1]["task"] == 1
    assert shown(ReplayBuffer.from_folder(tmp_path, verify="always"))[0][1]["task"] == 2


def test_an_aborted_episode_is_withdrawn_and_an_exception_keeps_what_was_shown_flagged_as_cut(tmp_path):
    with make(tmp_path, publish="step") as writer:
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        with writer.one_episode() as episode:
            store(episode, 1)
            episode.abort()
        assert ys(reader) == []
        with pytest.raises(KeyboardInterrupt, match="boom"), writer.one_episode(task=3) as episode:
            store(episode, 2)
            episode["task"] = 5
            raise KeyboardInterrupt("boom")
        assert shown(reader)[0][1]["task"] == 5 and flags_of(tmp_path)[1] & (CUT | OPEN) == CUT


def test_the_episode_of_a_killed_step_writer_is_closed_by_the_next_writer(tmp_path):
    def work(tell):
        writer = make(tmp_path, publish="step")
        writer.store_episode(**whole(7))
        episode = writer.begin_episode(task=3)
        store(episode, 1), store(episode, 2)
        with system(3, kill=True):
            store(episode, 3)

    assert in_child(work).status == 137
    assert ys(tmp_path) == [[7, 7], [1, 2]] and flags_of(tmp_path)[1] & (CUT | OPEN) == OPEN
    with ReplayBuffer.from_folder(tmp_path) as writer:
        assert ys(writer) == [[7, 7], [1, 2]]
        writer.store_episode(**whole(8))
        assert ys(writer) == [[7, 7], [1, 2], [8, 8]] and flags_of(tmp_path)[1] & (CUT | OPEN) == CUT
    assert ys(ReplayBuffer.from_folder(tmp_path, verify="always")) == [[7, 7], [1, 2], [8, 8]]


def test_steps_that_would_pass_max_steps_are_refused_and_no_older_episode_pays_for_them(tmp_path):
    with make(tmp_path, 5, 4, circular=False, capacity=5, publish="step") as full:
        full.store_episode(**whole(7, 3))
        with full.one_episode() as episode:
            store(episode, 1), store(episode, 2)
            with pytest.raises(BufferFullError, match="capacity=5"):
                store(episode, 3)
        assert ys(full) == ys(tmp_path) == [[7, 7, 7], [1, 2]]


def test_more_episodes_in_place_than_spare_slots_are_refused_by_the_number_to_create_with(tmp_path):
    for options in ({"publish": "step"}, {"stage": "disk"}):
        with make(tmp_path / str(options), spare_slots=2, **options) as writer:
            kept = [writer.begin_episode(), writer.begin_episode()]
            with pytest.raises(EpisodeStateError, match="spare_slots=3"):
                writer.begin_episode()
            for i, episode in enumerate(kept):
                store(episode, i)
                episode.publish()
            writer.begin_episode().abort()
            assert ys(writer) == [[0], [1]]


def test_a_retired_episode_that_is_still_being_written_never_costs_a_newer_one(tmp_path):
    with make(tmp_path, 1, publish="step", spare_slots=2) as ring:
        first, second = ring.begin_episode(task=1), ring.begin_episode(task=2)
        store(first, 10), store(second, 20)
        assert ys(ring) == [[20]]
        store(first, 11), store(second, 21)
        assert ys(ring) == ys(tmp_path) == [[20, 21]]
        second.publish()
        store(first, 12)
        first.publish()
        assert ys(ring) == ys(tmp_path) == [[20, 21]]
        for episode in (ring.begin_episode(), ring.begin_episode()):
            with system(2, error=errno.EIO), pytest.raises(OSError, match="Input/output"):
                store(episode, 30)
            assert ys(ring) == ys(tmp_path) == [[20, 21]]
        store(episode, 31)
        assert ys(ring) == ys(tmp_path) == [[31]]


def test_an_episode_that_leaves_while_it_is_open_ends_with_a_sound_record(tmp_path):
    with make(tmp_path, 1, publish="step", spare_slots=2) as ring:
        first, second = ring.begin_episode(task=1), ring.begin_episode(task=2)
        store(first, 10), store(second, 20)
        first.publish(), second.publish()
    assert ys(tmp_path) == [[20]] and verify(tmp_path) == []


# Everything, against a plain model


@pytest.mark.parametrize("durability", ["process", "power"])
def test_to_delete_many_episodes_takes_as_many_reads_and_writes_as_to_delete_one(tmp_path, monkeypatch, durability):
    read, columns_of = [], get_inside("columns_of")
    set_inside(monkeypatch, columns_of=lambda *a: read.append(a) or columns_of(*a))
    costs = []
    for count in (1, 20):
        with make(tmp_path / str(count), 40, durability=durability) as buffer:
            for value in range(40):
                buffer.store_episode(**whole(value))
            reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
            assert len(buffer) == len(reader) == 40
            read.clear()
            with system() as seen:
                buffer.delete(range(count))
            costs.append((len(read), len(seen.done)))
            assert ys(buffer) == ys(reader) == [[value] * 2 for value in range(count, 40)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("durability", ["process", "power"])
def test_readers_of_one_deleted_episode_look_at_no_other(tmp_path, monkeypatch, durability):
    looked, columns_of = [], get_inside("columns_of")
    with make(tmp_path, 40, durability=durability) as buffer:
        for value in range(40):
            buffer.store_episode(**whole(value))
        reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
        buffer.delete(3)
        assert len(buffer) == len(reader) == 39
        set_inside(monkeypatch, columns_of=lambda *a: looked.append(len(a[0])) or columns_of(*a))
        set_inside(monkeypatch, changed_records=lambda *a: pytest.fail("every record was compared"))
        buffer.delete(-1)
        buffer.delete([0, 20])
        kept = [value for value in range(39) if value not in (0, 3, 21)]
        assert ys(buffer) == ys(reader) == [[value] * 2 for value in kept]
        assert max(looked) == 3


def test_to_delete_no_episode_has_every_reader_look_at_its_folder_again(tmp_path):
    """An import that replaces a folder tells those who read it in this way."""
    with make(tmp_path / "a") as buffer:
        buffer.store_episode(**whole(0))
        reader = ReplayBuffer.from_folder(tmp_path / "a", read_only=True)
        make(tmp_path / "b").close()
        buffer.delete([])
        (tmp_path / "a").rename(tmp_path / "before")
        (tmp_path / "b").rename(tmp_path / "a")
        with pytest.raises(SchemaMismatchError, match="another buffer took its place"):
            reader.episode(0)
        with suppress(WriterLostError):
            buffer.close()


def test_what_lies_between_deleted_episodes_stays_as_it_is(tmp_path):
    """Also beyond the records that are written together."""
    with make(tmp_path, 3000) as buffer:
        for value in range(3000):
            buffer.store_episode(**whole(value))
        before = np.load(tmp_path / "episodes.npy").copy()
        gone = np.r_[2999:2000:-7, 0:2000:3, 0]
        buffer.delete(gone)
        after, kept = np.load(tmp_path / "episodes.npy"), np.setdiff1d(np.arange(3000), gone)
        assert (after[kept] == before[kept]).all()
        assert (after["generation"] == before["generation"]).all()
        assert ys(buffer) == ys(ReplayBuffer.from_folder(tmp_path, read_only=True)) == [[v] * 2 for v in kept]
        buffer.store_episode(**whole(5))
        assert ys(buffer)[-1] == [5, 5]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"filter_meta": {"task": {1, 4}}}, [0, 2, 3]),
        ({"filter_meta": {"task": lambda column: column > column.mean()}}, [0, 1, 2]),
        ({"filter_meta": {"task": (1, None)}, "min_episode_len": 4}, [0, 1, 2]),
        ({"top_k": ("task", 1)}, [0, 1, 2, 3]),
        ({"mark": "bad"}, [0, 1, 3, 4]),
        ({"split": "task", "part": 0}, [1, 2, 3, 4]),
        ({"filter_meta": {"task": 9}}, [0, 1, 2, 3, 4]),
    ],
    ids=["a set", "a function", "a range", "top_k", "mark", "split", "none"],
)
def test_the_episodes_that_conditions_choose_are_deleted_and_no_others(tmp_path, options, kept):
    with make(tmp_path, 5) as buffer:
        for value in range(5):
            buffer.store_episode(**whole(value, 2 if value < 3 else 4))
        buffer.mark(2, add=["bad"])
        buffer.close()  # another object may have written since
        with ReplayBuffer.from_folder(tmp_path) as again:
            assert again.delete(**options) is None
            assert again.serials.tolist() == buffer.serials.tolist() == kept
    assert not verify(tmp_path)


def test_to_delete_without_positions_and_without_a_condition_is_refused(tmp_path):
    with make(tmp_path, 5) as buffer:
        buffer.store_episode(**whole(1))
        for positions, options in (
            ((), {}),
            ((None,), {}),
            ((), {"filter_meta": {}}),
            ((), {"filter_meta": None}),
            ((), {"min_episode_len": 1}),
            ((0,), {"filter_meta": {"task": 1}}),
        ):
            with pytest.raises(SchemaError, match="expected positions, or conditions that not every episode passes"):
                buffer.delete(*positions, **options)
        with pytest.raises(SchemaError, match="option 'n_steps' is unknown"):
            buffer.delete(n_steps=1)
        assert len(buffer) == 1
        with pytest.raises(ReadOnlyError, match="only reads"):
            ConcatBuffer([buffer]).delete(filter_meta={"task": 1})


def test_conditions_also_delete_what_a_ring_has_left_of_an_episode(tmp_path):
    with ReplayBuffer(tmp_path, capacity=6, max_timesteps=4, fields=FIELDS, meta_fields=META) as buffer:
        for value in range(2):
            buffer.store_episode(**whole(value, 4))
        assert (buffer.num_episodes, buffer.num_steps) == (1, 6)
        buffer.delete(filter_meta={"task": 0})
        assert (buffer.num_episodes, buffer.num_steps) == (1, 4)
        buffer.store_episode(**whole(2, 3))
        assert buffer.batch(timestep_level=True)["y"].tolist() == [1, 1, 1, 2, 2, 2]
    assert not verify(tmp_path)


def test_conditions_delete_no_episode_that_is_still_open(tmp_path):
    with make(tmp_path, 5, publish="step", spare_slots=2) as buffer:
        buffer.store_episode(**whole(0))
        with buffer.one_episode() as episode:
            store(episode, 7)
            buffer.delete(filter_meta={"task": 0})  # which is what the open one has until it is set
            assert ys(buffer) == [[7]]
            store(episode, 8)
            episode["task"] = 3
        assert ys(buffer) == [[7, 8]]
        buffer.delete(filter_meta={"task": 3})
        assert ys(buffer) == []
    assert not verify(tmp_path)


@pytest.mark.parametrize("ring", [{}, {"capacity": 20}], ids=["episodes", "steps"])
def test_an_episode_that_is_still_open_is_not_deleted_by_its_position(tmp_path, ring):
    with make(tmp_path, 5, publish="step", spare_slots=2, **ring) as buffer:
        buffer.store_episode(**whole(0))
        with buffer.one_episode() as episode:
            store(episode, 7)
            with pytest.raises(EpisodeStateError, match="an episode of these is open"):
                buffer.delete([0, 1])
            assert len(buffer) == 2
            store(episode, 8)
        buffer.delete(1)
        assert len(buffer) == 1
        with buffer.one_episode() as episode:
            store(episode, 9)
            episode.abort()
        assert len(buffer) == 1
    assert not verify(tmp_path)
    assert len(ReplayBuffer.from_folder(tmp_path)) == 1


@pytest.mark.parametrize("at", range(1, 8))
def test_readers_are_told_of_what_was_deleted_before_an_error(tmp_path, at):
    buffer = make(tmp_path, 5)
    for value in range(5):
        buffer.store_episode(**whole(value))
    reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
    buffer.delete(0)
    assert len(reader) == 4
    with system(at=at, error=errno.EIO), suppress(OSError):
        buffer.delete([0, 1, 2])
    left = ys(ReplayBuffer.from_folder(tmp_path, read_only=True))
    buffer.store_episode(**whole(5))
    assert ys(buffer) == ys(reader) == [*left, [5, 5]]


class Interleaved(RuleBasedStateMachine):
    """What the buffer shows to its writer and to a reader is what lists and loops say, after every call."""

    @initialize(
        circular=st.booleans(),
        max_episodes=st.integers(1, 3),
        capacity=st.none() | st.integers(1, 9),
        publish=st.sampled_from(["episode", "step"]),
        stage=st.sampled_from(["ram", "disk"]),
        spare=st.integers(1, 3),
    )
    def create(self, circular, max_episodes, capacity, publish, stage, spare):
        if publish == "step" and not circular:
            capacity = None  # has a test of its own
        self.folder, self.how = Path(tempfile.mkdtemp()), {"publish": publish, "stage": stage}
        sizes = {"circular": circular, "capacity": capacity, "spare_slots": spare}
        self.buffer = make(self.folder, max_episodes, **sizes, **self.how)
        self.reader = ReplayBuffer.from_folder(self.folder, read_only=True)
        self.model = Model(circular, max_episodes, capacity)
        self.by_step = publish == "step"
        self.most_open = spare if self.by_step or stage == "disk" else 99
        self.count = 0

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()
            shutil.rmtree(self.folder)

    def one(self, which):
        return self.model.open[which % len(self.model.open)]

    def cannot_begin(self):
        waiting = sum(one.serial is None for one in self.model.open)
        return self.model.refuses(waiting + 1, 1) or len(self.model.open) >= self.most_open

    @property
    def shows_steps(self):
        return any(one.serial is not None for one in self.model.open)

    @rule(task=st.integers(0, 9), keep=st.booleans())
    def begin(self, task, keep):
        if self.cannot_begin():
            with pytest.raises((BufferFullError, EpisodeStateError), match=r"is full|spare_slots"):
                self.buffer.begin_episode(task=task)
            return
        self.model.open.append(Told(self.buffer.begin_episode(task=task, keep_partial=keep), keep, task))

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2), over=st.booleans())
    def store(self, which, over):
        one, self.count = self.one(which), self.count + 1
        step = {"x": [self.count, which], "y": self.count, "truncated": over and self.count % 3 == 0}
        if one.last or len(one.stored) == 4 or (one.stored and one.stored[-1]["truncated"]):
            with pytest.raises(EpisodeStateError, match=r"truncated|final observation|max_timesteps"):
                one.handle.store(**step)
            return
        one.handle.store(**step)
        one.stored.append(step)
        if self.by_step:
            self.model.show(one)

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2), bad=st.sampled_from([{"y": 0.5}, {"z": 1}, {"x": [1, 2, 3]}, {}]))
    def store_what_is_refused(self, which, bad):
        with pytest.raises(ValueError, match=r"not a whole|not declared|shape|missing|begin a new one|max_timesteps"):
            self.one(which).handle.store(**{"x": [0, 0], **bad})

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2))
    def final(self, which):
        one = self.one(which)
        if one.last or not one.stored:
            with pytest.raises(EpisodeStateError, match=r"called twice|before the first step"):
                one.handle.final(x=[0, 0])
        else:
            one.last = [which, 99]
            one.handle.final(x=one.last)

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2), task=st.integers(10, 19))
    def set_meta(self, which, task):
        one = self.one(which)
        one.handle["task"] = one.late = task

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2))
    def publish(self, which):
        one = self.one(which)
        if one.stored and one.serial is None and self.model.refuses(1, len(one.stored)):
            with pytest.raises(BufferFullError, match="is full"):
                one.handle.publish()
        else:
            one.handle.publish()
            self.model.end(one)

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2))
    def abort(self, which):
        one = self.one(which)
        one.handle.abort()
        self.model.open.remove(one)
        self.model.leave(one)

    @precondition(lambda self: self.model.open)
    @rule(which=st.integers(0, 2), kind=st.sampled_from([ValueError, KeyboardInterrupt, GeneratorExit]))
    def leave_by_exception(self, which, kind):
        one = self.one(which)
        kept = one.keep or self.by_step
        if kept and one.serial is None and self.model.refuses(1, len(one.stored)):
            return
        with pytest.raises(kind, match="boom"), one.handle:
            raise kind("boom")
        one.stored = one.stored if kept else []
        self.model.end(one, cut=True)

    @rule(length=st.integers(1, 4), final=st.booleans())
    def store_episode(self, length, final):
        self.count += 1
        x = [[self.count, t] for t in range(length + final)]
        values = {"x": x, "y": list(range(length)), "task": self.count}
        if self.cannot_begin() or self.model.refuses(1, length):
            with pytest.raises((BufferFullError, EpisodeStateError), match=r"is full|spare_slots"):
                self.buffer.store_episode(**values)
            return
        self.buffer.store_episode(**values)
        steps = [{"x": x[t], "y": t, "truncated": False} for t in range(length)]
        self.model.end(Told(None, False, self.count, steps, x[length] if final else None))

    @rule(which=st.none() | st.integers(0, 2), y=st.integers(100, 200))
    def update(self, which, y):
        live = self.model.whole
        if self.shows_steps:
            with pytest.raises(EpisodeStateError, match="still open"):
                self.buffer.update(None, y=y)
        elif which is None or which < len(live):
            self.buffer.update(which, y=y, task=y)
            for one in live if which is None else [live[which]]:
                one.steps[0], one.task = {**one.steps[0], "y": y}, y

    @rule()
    def clear(self):
        if self.shows_steps:
            with pytest.raises(EpisodeStateError, match="still open"):
                self.buffer.clear()
        else:
            self.buffer.clear()
            self.model.leave(*self.model.live)

    @rule()
    def reopen(self):
        self.buffer.close()
        for one in list(self.model.open):
            one.stored = one.stored if self.by_step else []
            self.model.end(one, cut=True)
        self.buffer = ReplayBuffer.from_folder(self.folder, **self.how)

    @precondition(lambda self: not self.model.open)
    @rule()
    def go_on_with_a_newer_object(self):
        self.buffer = ReplayBuffer.from_folder(self.folder, **self.how)

    @invariant()
    def shows_what_the_model_says(self):
        if not hasattr(self, "buffer"):
            return
        expected = []
        for one in self.model.whole:
            columns = {name: [step[name] for step in one.steps] for name in ("x", "y", "truncated")}
            columns["x"] = columns["x"] + [one.final] * (one.final is not None)
            expected.append((one.serial, {**columns, "task": one.task}))
        assert shown(self.buffer) == shown(self.reader) == expected
        assert self.buffer.num_steps == self.reader.num_steps == self.model.num_steps
        flags = flags_of(self.folder)
        assert [bool(flags[one.serial] & CUT) for one in self.model.whole] == [one.cut for one in self.model.whole]


def test_any_interleaving_of_calls_shows_what_a_plain_model_says(monkeypatch):
    set_inside(monkeypatch, staged_bytes=40)
    set_inside(monkeypatch, piece_bytes=16)  # two rows of a field
    chosen = examples(60, stateful_step_count=30, derandomize=True, database=None)
    run_state_machine_as_test(Interleaved, settings=settings(chosen, suppress_health_check=list(HealthCheck)))
