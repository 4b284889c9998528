"""Changing what is published, in place; and every call that changes files, failing or killed at each operation."""

import errno
import shutil

import numpy as np
import pytest
from fault_injection import Play, flags_of, in_child, operations_of, perform, shown, state_of, system, without_barriers
from inside import get_inside, set_inside
from specification import FINAL, OPEN, TERMINATED

from memmap_buffer import EpisodeStateError, Field, ReplayBuffer, SchemaError, StaleEpisodeError, verify


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Of an episode that stays hidden, as the disk is full, nobody waits to see more."""
    monkeypatch.setattr("memmap_buffer.loading.batch_reader.PATIENCE", 0.02)


FIELDS = {"x": Field("float", 2, final=True), "y": ("int", (), 0), "terminated": ("bool", (), False)}
META = {"task": "int", "label": ("float", 1)}
LENGTHS = (3, 2, 4)


def make(folder, publish="episode", **options):
    return ReplayBuffer(folder, 3, 4, FIELDS, META, circular=True, spare_slots=2, publish=publish, **options)


def whole(value, length=2):
    """An episode with its final observation, every number of it made from one."""
    x = value + np.arange(2 * length + 2).reshape(length + 1, 2) / 16
    return {"x": x, "y": value + np.arange(length), "task": value, "label": value / 2}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    without_barriers(monkeypatch)


@pytest.fixture
def buffer(tmp_path):
    with make(tmp_path) as made:
        for i, length in enumerate(LENGTHS):
            made.store_episode(**whole(10 * i, length))
        yield made


def ys(source):
    return [episode["y"] for _, episode in shown(source)]


OLD = [[0, 1, 2], [10, 11], [20, 21, 22, 23]]


# Some timesteps of one field


def test_several_timesteps_of_a_field_are_overwritten_by_one_call_that_sums_the_field_once(buffer, monkeypatch):
    summed, add_rows = [], get_inside("sum_updated_rows")
    set_inside(monkeypatch, sum_updated_rows=lambda sums, rows: summed.append(len(rows)) or add_rows(sums, rows))
    buffer.store_datapoint(2, 1, "y", 7)
    one = sum(summed)
    buffer.store_datapoint(2, [3, 0, 2], "y", [43, 40, 42])
    assert one == LENGTHS[2] == sum(summed) - one
    assert ys(buffer) == ys(buffer.folder) == [*OLD[:2], [40, 7, 42, 43]]
    assert verify(buffer.folder) == []


@pytest.mark.parametrize(
    ("t", "value", "text"),
    [
        ([0, 2], [1, 1], "the episode has 2"),
        ([-1], [1], "the episode has 2"),
        ([0, 1], [1], "got 1 values of 'y' for 2 timesteps"),
        ([0.5], [1], "expected a whole number"),
        ([], [], "expected a whole number"),
        ([0, 1], [1.5, 2], "'y', store_datapoint: .*not a whole number"),
    ],
)
def test_timesteps_that_cannot_be_overwritten_are_refused_and_nothing_changes(buffer, t, value, text):
    with pytest.raises(SchemaError, match=text):
        buffer.store_datapoint(1, t, "y", value)
    assert ys(buffer) == OLD


# What it changes


@pytest.mark.parametrize(
    ("indices", "y", "expected"),
    [
        (None, 5, [[5, 1, 2], [5, 11], [5, 21, 22, 23]]),
        (None, [[7, 8, 9, 10]], [[7, 8, 9], [7, 8], [7, 8, 9, 10]]),
        (None, np.arange(6).reshape(3, 2), [[0, 1, 2], [2, 3], [4, 5, 22, 23]]),
        ([0, 2], np.array([[5], [6]]), [[5, 1, 2], [10, 11], [6, 21, 22, 23]]),
        ([2, 0], [[5, 5], [6, 6]], [[6, 6, 2], [10, 11], [5, 5, 22, 23]]),
        (1, [8, 9], [[0, 1, 2], [8, 9], [20, 21, 22, 23]]),
        (-1, [8], [[0, 1, 2], [10, 11], [8, 21, 22, 23]]),
        (np.int64(0), [8, 9], [[8, 9, 2], [10, 11], [20, 21, 22, 23]]),
        (slice(1, None), [[8], [9]], [[0, 1, 2], [8, 11], [9, 21, 22, 23]]),
        ([], 5, OLD),
    ],
    ids=str,
)
def test_update_overwrites_the_first_timesteps_of_the_episodes_named(buffer, indices, y, expected):
    before = shown(buffer)
    buffer.update(indices, y=y)
    assert ys(buffer) == ys(buffer.folder) == expected
    unchanged = [(serial, {**episode, "y": 0}) for serial, episode in before]
    assert [(serial, {**episode, "y": 0}) for serial, episode in shown(buffer)] == unchanged


@pytest.mark.parametrize(
    ("indices", "data", "expected"),
    [
        (None, {"task": 9}, [(9, [0]), (9, [5]), (9, [10])]),
        (None, {"task": [1, 2, 3]}, [(1, [0]), (2, [5]), (3, [10])]),
        ([0, 2], {"label": [[1], [2]]}, [(0, [1]), (10, [5]), (20, [2])]),
        ([0, 2], {"label": [1, 2], "task": 4}, [(4, [1]), (10, [5]), (4, [2])]),
        (1, {"label": [7], "task": 6}, [(0, [0]), (6, [7]), (20, [10])]),
    ],
    ids=str,
)
def test_update_overwrites_meta(buffer, indices, data, expected):
    buffer.update(indices, **data)
    assert [(episode["task"], episode["label"]) for _, episode in shown(buffer)] == expected
    assert ys(buffer) == OLD


TEXTS = {"note": Field("U8", final=True)}, {"label": "U8"}


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.update(0, label="b", note=["b"]),
        lambda buffer: buffer.update([0], label=np.array(["b"], "U8"), note=[["b"]]),
        lambda buffer: (buffer.store_meta_datapoint(0, "label", "b"), buffer.store_datapoint(0, 0, "note", "b")),
    ],
)
def test_a_shorter_text_takes_the_place_of_a_longer_one_whole(tmp_path, change):
    with ReplayBuffer(tmp_path, 3, 4, *TEXTS) as buffer:
        buffer.store_episode(note=["aaaaaaaa"], label="aaaaaaaa")
        change(buffer)
        assert (buffer.episode(0)["note"].tolist(), buffer.episode(0)["label"]) == (["b"], "b")
    assert verify(tmp_path) == []


def test_a_shorter_text_in_a_slot_of_a_longer_one_is_whole(tmp_path):
    with ReplayBuffer(tmp_path, 1, 4, {"x": "float", **TEXTS[0]}, TEXTS[1], circular=True) as buffer:
        for letters in ("aaaaaaaa", "b", "b"):  # in two slots, of which the third takes the first again
            buffer.store_episode(x=[0.0], note=[letters, letters], label=letters)
        assert (buffer.episode(0)["note"].tolist(), buffer.episode(0)["label"]) == (["b", "b"], "b")
    assert verify(tmp_path) == []


def test_several_fields_change_together_and_serial_and_final_observation_stay(buffer):
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    assert ys(reader) == OLD
    buffer.update(1, x=[[1, 1], [2, 2]], y=[3, 4], task=5, terminated=[False, True])
    changed = {"x": [[1, 1], [2, 2], [10.25, 10.3125]], "y": [3, 4], "terminated": [False, True]}
    assert shown(buffer)[1][1] == {**changed, "task": 5, "label": [5]}
    assert flags_of(buffer.folder)[1] & (FINAL | TERMINATED) == FINAL | TERMINATED
    buffer.update(1, terminated=[False, False])
    assert not flags_of(buffer.folder)[1] & TERMINATED
    assert shown(ReplayBuffer.from_folder(buffer.folder, verify="always")) == shown(buffer) == shown(reader)
    assert reader.serials.tolist() == [0, 1, 2]


def test_an_episode_that_cannot_be_read_is_never_replaced_by_another(buffer):
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    assert ys(reader) == OLD
    with system(4, error=errno.EIO), pytest.raises(OSError, match="Input/output"):
        buffer.update(1, y=[7, 8])
    for read in (lambda: reader.episode(1), lambda: {"task": reader.get_all_data()["task"][1]}):
        try:
            assert read()["task"] == 10
        except StaleEpisodeError:
            continue


def test_tensors_are_taken_as_arrays_are(buffer):
    torch = pytest.importorskip("torch")
    buffer.update([0, 2], y=torch.tensor([[5], [6]]))
    buffer.store_datapoint(2, [3, 1], "y", torch.tensor([43, 41]))
    buffer.store_datapoint(0, 2, "y", torch.tensor(9))
    assert ys(buffer) == ys(buffer.folder) == [[5, 1, 9], [10, 11], [6, 41, 22, 43]]


def test_a_datapoint_is_one_timestep_of_one_field(buffer):
    buffer.store_datapoint(0, 2, "y", 9)
    buffer.store_datapoint(2, 0, "x", [5, 6])
    buffer.store_meta_datapoint(1, "label", np.array([8]))
    expected = shown(buffer)
    assert ys(buffer) == [[0, 1, 9], *OLD[1:]] and expected[2][1]["x"][:2] == [[5, 6], [20.125, 20.1875]]
    assert expected[1][1]["label"] == [8]


BAD = {
    "no data": ((None, {}), SchemaError, "no data was given"),
    "unknown": ((0, {"yy": 1}), SchemaError, "update: got 'yy'.*did you mean 'y'"),
    "too long": ((None, {"y": [[1] * 5]}), SchemaError, "'y'.*5 timesteps.*longest of these episodes has 4"),
    "one too long": ((1, {"y": [1, 2, 3]}), SchemaError, "'y'.*3 timesteps.*longest of these episodes has 2"),
    "shape": ((0, {"x": [[1, 2, 3]]}), SchemaError, r"'x'.*expected \(episodes, time, 2\)"),
    "meta shape": ((None, {"task": [1, 2]}), SchemaError, r"'task'.*expected \(episodes\)"),
    "lossy": ((0, {"y": [0.5]}), SchemaError, "'y'.*0.5.*not a whole number"),
    "lossy meta": ((0, {"y": [1], "task": 2**70}), SchemaError, "'task'"),
    "index": ((3, {"y": 1}), IndexError, "episode 3: the buffer has 3"),
    "negative": (([0, -4], {"y": 1}), IndexError, "episode -4"),
    "fraction": (([0.5], {"y": 1}), SchemaError, r"episodes: got float64 \(1,\), expected whole numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_update_that_is_refused_changes_nothing_at_all(buffer, name):
    (indices, data), kind, text = BAD[name]
    before = shown(buffer)
    with system() as seen, pytest.raises(kind, match=text):
        buffer.update(indices, **data)
    assert seen.done == [] and shown(buffer) == before


def test_datapoints_that_are_refused_change_nothing(buffer):
    bad = [
        ((0, 3, "y", 1), SchemaError, "timestep 3, the episode has 3"),
        ((3, 0, "y", 1), IndexError, "episode 3"),
        ((0, 0, "task", 1), SchemaError, "'task', which is a meta field"),
        ((0, 0, "y", [1, 2]), SchemaError, r"shape \(2,\)"),
    ]
    with system() as seen:
        for arguments, kind, text in bad:
            with pytest.raises(kind, match=text):
                buffer.store_datapoint(*arguments)
        with pytest.raises(SchemaError, match="'y', which is a per-timestep field; expected task"):
            buffer.store_meta_datapoint(0, "y", 1)
    assert seen.done == [] and ys(buffer) == OLD


def test_an_open_episode_is_left_to_its_end_for_what_that_writes(buffer):
    with buffer.one_episode():
        buffer.store(x=[0, 0], y=30)
        buffer.update(0, y=9)
    assert ys(buffer) == [[10, 11], [20, 21, 22, 23], [30]]
    buffer.close()
    with ReplayBuffer.from_folder(buffer.folder, publish="step") as by_step, by_step.one_episode():
        by_step.store(x=[0, 0], y=40)
        with pytest.raises(EpisodeStateError, match="an episode whose steps are published is still open"):
            by_step.clear()
        for data in ({"task": 1}, {"terminated": True}, {"y": 1, "task": 1}):
            with pytest.raises(
                EpisodeStateError, match=f"an episode of these is open, and its end writes {[*data][-1]!r}"
            ):
                by_step.update([0, -1], **data)
        by_step.update([0, -1], y=[[1], [41]])
    assert ys(buffer.folder) == [[1, 21, 22, 23], [30], [41]]
    assert verify(buffer.folder) == []


# Every file operation of every change, failing or killed


def publish(value):
    return lambda play: play.publish(value)


def step(t):
    return lambda play: play.step(t)


def write(*indices, **data):
    return lambda play: play.buffer.write(indices, **data)


def update(indices, **data):
    return lambda play: play.buffer.update(indices, **data)


Y = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]]
STEP = {"publish": "step"}
POWER = {"durability": "power"}
GROUP = {**POWER, "sync_every": 2}
EACH = [update(i, y=Y[i][: LENGTHS[i]], task=4) for i in range(3)]
# name -> (how it is opened, episodes at the start, calls); a call that is several changes is (call, change, change …)
CASES = {
    "publish": ({}, 1, [publish(40), publish(50)]),
    "publish, with barriers": (POWER, 1, [publish(40)]),
    "publish on a full ring": ({}, 3, [publish(40), publish(50)]),
    "publish twice behind one barrier": (GROUP, 3, [(publish(40),), (publish(50), publish(40), publish(50))]),
    "publish what was staged on disk": ({"stage": "disk"}, 3, [publish(40)]),
    "batch": ({}, 2, [(Play.batch, lambda play: play.half_batch(1), lambda play: play.half_batch(2))]),
    "steps": (STEP, 2, [step(0), step(1), Play.end]),
    "steps on a full ring, with barriers": ({**STEP, **POWER}, 3, [step(0), step(1), Play.end]),
    "steps that are withdrawn": (STEP, 3, [step(0), step(1), lambda play: play.open.abort()]),
    "clear": ({}, 3, [lambda play: play.buffer.clear(), publish(60)]),
    "update": ({}, 3, [update(1, y=[7, 8], x=[[0, 0]], task=9), publish(60)]),
    "update, with barriers": (POWER, 2, [update(1, y=[7, 8], terminated=[False, True])]),
    "update of all": ({}, 3, [(update(None, y=Y, task=4), *EACH)]),
    "write": (
        {},
        3,
        [(write([1, 1], [2, 3], [2, 0], y=[7, 8, 9]), write([1, 1], y=7), write([2, 3], [2, 0], y=[8, 9]))],
    ),
    "write, with barriers": (POWER, 3, [write([0, 0], [0, 2], x=[[1, 2], [3, 4]], y=[5, 6])]),
    "steps that are written to": (
        STEP,
        2,
        [step(0), step(1), write([2, 0], y=5), step(2), write([2, 1], [2, 2], x=1, y=6), step(3), Play.end],
    ),
    "steps that are written to, with barriers": (
        {**STEP, **POWER},
        3,
        [step(0), write([3, 0], y=5), step(1), Play.end],
    ),
    "datapoint": ({}, 3, [lambda play: play.buffer.store_datapoint(2, 3, "y", 1)]),
    "close": ({}, 2, [publish(40), lambda play: play.buffer.close()]),
}


def stage_setting(case, tmp_path):
    """The folder at the start, every state that may be seen, and for each call the first that must be."""
    options, count, calls = case
    with make(tmp_path / "start") as made:
        for i in range(count):
            made.store_episode(**whole(10 * i, LENGTHS[i]))
    shutil.copytree(tmp_path / "start", tmp_path / "reference")
    play = Play(tmp_path / "reference", **{key: value for key, value in options.items() if key != "sync_every"})
    states, due = [state_of(tmp_path / "reference")], [0]
    for call in calls:
        for change in call[1:] if isinstance(call, tuple) else [call]:
            change(play)
            states.append(state_of(tmp_path / "reference"))
        due.append(len(states) - 1)
    play.buffer.close()
    return tmp_path / "start", states, due


def check_writing_goes_on(folder, before, **options):
    """One more episode is published, and all that was seen before is still there, as far as the ring reaches."""
    with ReplayBuffer.from_folder(folder, **options) as buffer:
        buffer.store_episode(**whole(99))
    after = state_of(folder, verify="always")
    assert after[:-1] == before[-2:] and after[-1][1]["y"] == [99, 100]
    assert after[-1][0] > max((serial for serial, *_ in before), default=-1)
    assert not any(flags_of(folder)[serial] & OPEN for serial, *_ in after)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5], ids=["each", "every fifth"])
@pytest.mark.parametrize("half", [False, True], ids=["whole writes", "half a write"])
@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_state(tmp_path, name, half, stride):
    """Faults 2 and 4: opened as ever, without repair; at most one unacknowledged change more, and writing goes on."""
    options, _, calls = CASES[name]
    start, states, due = stage_setting(CASES[name], tmp_path)

    def play_until(at):
        folder = shutil.copytree(start, tmp_path / f"{at}")

        def work(tell):
            play = Play(folder, **options)
            with system(at, kill=True, half=half) as seen:
                perform(play, calls, lambda: tell(1))
                tell(seen.count)

        return folder, in_child(work)

    _, whole_run = play_until(0)
    assert whole_run.status == 0, whole_run.told
    for at in range(1 + half % stride, whole_run.told[-1] + 1, stride):
        folder, child = play_until(at)
        assert child.status == 137, child.told
        acknowledged = len(child.told)
        seen = state_of(folder)
        assert seen in states[due[acknowledged] : due[acknowledged + 1] + 1], f"killed at operation {at}"
        check_writing_goes_on(folder, seen)
        shutil.rmtree(folder)


@pytest.mark.parametrize(("name", "first"), [("update", 3), ("update", 7), ("steps", 12)])
def test_a_kill_while_the_folder_is_taken_over_changes_nothing_that_is_seen(tmp_path, name, first):
    """Faults 2 and 4: recovery itself, of a begun update and of abandoned steps, can be killed at any operation."""
    options, _, calls = CASES[name]
    start, states, _ = stage_setting(CASES[name], tmp_path)

    def killed_in(folder, at, work, **options):
        def run(tell):
            play = Play(folder, **options) if work else None
            with system(at, kill=True):
                perform(play, work) if work else Play(folder)

        return in_child(run).status == 137

    assert killed_in(start, first, calls, **options)
    expected = state_of(shutil.copytree(start, tmp_path / "seen"))
    assert expected == states[1]
    count = len(operations_of(lambda: Play(shutil.copytree(start, tmp_path / "count"))))
    assert count > 15
    for at in range(1, count + 1):
        folder = shutil.copytree(start, tmp_path / f"{at}")
        assert killed_in(folder, at, [])
        assert state_of(folder) == expected
        check_writing_goes_on(folder, expected)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "until there is space"])
@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_at_any_write_raises_and_the_same_call_works_once_there_is_space(tmp_path, name, lasting):
    """Fault 17: nothing is lost, nothing appears twice; the staged episode that failed is the one that is published."""
    options, _, calls = CASES[name]
    start, states, due = stage_setting(CASES[name], tmp_path)
    at, failed = 0, True
    while failed:
        at, failed = at + 1, False
        folder = shutil.copytree(start, tmp_path / f"{at}")
        play = Play(folder, **options)
        reader = ReplayBuffer.from_folder(folder, read_only=True)
        with system(at, error=errno.ENOSPC, only=("pwrite", "create"), lasting=lasting) as seen:
            for number, call in enumerate(calls):
                for _ in range(2 * len(states)):
                    try:
                        perform(play, [call])
                        break
                    except OSError as error:
                        assert error.errno == errno.ENOSPC
                        seen.at, failed = (seen.at if not failed else 0), True
                        # A step that is on the disk although its call failed is announced to readers by a later call.
                        check_shown(reader, states[due[number] * ("steps" not in name) : due[number + 1] + 1])
        assert failed or seen.count < at
        play.buffer.close()
        found = state_of(folder)
        assert found == states[-1], f"failed at operation {at}"
        check_writing_goes_on(folder, found)


def check_shown(reader, states):
    """After a failed call: one of the states; an episode whose change in place was begun may be hidden meanwhile."""
    states = [[(serial, episode) for serial, episode, _ in state] for state in states]
    found = shown(reader)
    changed = len(states) > 1 and list(dict(states[-2])) == list(dict(states[-1]))
    hidden = [[entry for entry in state if entry[0] in dict(found)] for state in states if len(state) == len(found) + 1]
    assert found in states or (changed and found in hidden)


@pytest.mark.parametrize("size", [1, 13])
@pytest.mark.parametrize("name", CASES)
def test_short_writes_are_completed(tmp_path, name, size):
    """Fault 18."""
    options, _, calls = CASES[name]
    start, states, _ = stage_setting(CASES[name], tmp_path)
    with system(short=size):
        play = Play(start, **options)
        perform(play, calls)
        play.buffer.close()
        assert state_of(start, verify="always") == states[-1]
        check_writing_goes_on(start, states[-1])


def test_an_update_that_failed_half_way_loses_nothing_whatever_is_done_next(tmp_path):
    """Fault 17: it is not tried again; another update, a publication or the next opening comes instead."""
    nexts = {
        "another update": (lambda play: play.buffer.update(0, task=3), [0, 1, 2]),
        "an update of the same": (lambda play: play.buffer.update(1, task=3), [0, 1, 2]),
        "publish": (publish(60), [1, 2, 3]),
        "close": (lambda play: play.buffer.close(), [0, 1, 2]),
    }
    start, states, _ = stage_setting(CASES["update"], tmp_path)
    old, new = states[0][1][1], states[1][1][1]
    for name, (act, serials) in nexts.items():
        for at in range(1, 9):
            play = Play(shutil.copytree(start, tmp_path / f"{name} {at}"))
            with system(at, error=errno.EIO), pytest.raises(OSError, match="Input/output"):
                CASES["update"][2][0](play)
            act(play)
            play.buffer.close()
            found = dict(shown(tmp_path / f"{name} {at}"))
            assert sorted(found) == serials, f"{name} after failing at {at}"
            changed = {**found[1], "task": 0}
            assert changed in ({**old, "task": 0}, {**new, "task": 0})


@pytest.mark.parametrize("error", [errno.ENOSPC, KeyboardInterrupt], ids=["ENOSPC", "KeyboardInterrupt"])
@pytest.mark.parametrize("options", [{}, {"stage": "disk"}, POWER], ids=str)
def test_nothing_is_seen_of_an_episode_whose_publication_failed_and_that_was_then_given_up(tmp_path, options, error):
    """Faults 9 and 17: whichever operation failed, and whether or not the next episode takes its slot."""
    start, states, _ = stage_setting(({}, 2, [publish(50)]), tmp_path)
    for at in range(1, 100):
        play = Play(shutil.copytree(start, tmp_path / f"{at}"), **options)
        with system(at, error=error, only=("pwrite",)) as seen:
            try:
                play.publish(40)
            except (OSError, KeyboardInterrupt):
                play.open.abort()
        if seen.count < at:
            break
        assert state_of(tmp_path / f"{at}") == states[0], f"failed at operation {at}"
        play.publish(50)
        play.buffer.close()
        assert [entry[1:] for entry in state_of(tmp_path / f"{at}")] == [entry[1:] for entry in states[1]]
    assert 9 < at < 20
