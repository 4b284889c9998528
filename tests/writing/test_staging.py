"""What is staged: memory that is used again is nobody else's, and no number is assigned that `encode` would change."""

import errno

import numpy as np
import pytest
from fault_injection import system
from hypothesis import given
from hypothesis import strategies as st
from specification import NUMERIC

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.writing import episode as episodes
from memmap_buffer.writing.episode import Scalars, Staging

FIELDS = {"obs": ("float", 3), "reward": "float", "terminated": ("bool", (), False)}


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path / "buffer", 8, 100, FIELDS, circular=True) as made:
        yield made


def store(episode, *rewards):
    for reward in rewards:
        episode.store(obs=np.full(3, reward, np.float32), reward=np.float32(reward))


def interrupt(*_):
    raise KeyboardInterrupt("now")


def rewards(buffer):
    return [episode["reward"].tolist() for episode in buffer]


@pytest.mark.parametrize("end", ["publish", "abort"])
def test_an_episode_gets_the_memory_of_one_that_ended(buffer, end):
    first = buffer.begin_episode()
    store(first, 1.0, 2.0)
    before = dict(first.columns)
    getattr(first, end)()
    second = buffer.begin_episode()
    store(second, 3.0)
    assert all(second.columns[name] is before[name] for name in FIELDS)
    second.publish()
    assert rewards(buffer) == ([[1, 2], [3]] if end == "publish" else [[3]])


def test_open_episodes_never_share_memory(buffer):
    """Eight at a time, stored to in turns, some of them aborted, over memory of those that ended before."""
    rng = np.random.default_rng(0)
    for lap in range(3):
        episodes = [buffer.begin_episode() for _ in range(8)]
        for t in range(5):
            for number in rng.permutation(8):
                store(episodes[number], 100 * lap + 10 * number + t)
        arrays = [array for episode in episodes for array in episode.columns.values()]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
        for number, episode in enumerate(episodes):
            episode.abort() if number % 3 == lap else episode.publish()
    kept = [(lap, number) for lap in range(3) for number in range(8) if number % 3 != lap]
    assert rewards(buffer) == [[100 * lap + 10 * number + t for t in range(5)] for lap, number in kept[-8:]]


def test_the_arrays_of_a_whole_episode_stay_the_users(buffer):
    arrays = {"obs": np.ones((4, 3), np.float32), "reward": np.ones(4, np.float32), "terminated": np.zeros(4, np.bool_)}
    buffer.store_episode(**arrays)
    with buffer.one_episode() as episode:
        store(episode, 5.0, 6.0)
        assert not any(np.shares_memory(episode.columns[name], arrays[name]) for name in FIELDS)
    assert all((array == array.flat[0]).all() for array in arrays.values())
    assert rewards(buffer) == [[1] * 4, [5, 6]]


def test_an_episode_that_could_not_be_published_keeps_its_memory(buffer):
    episode = buffer.begin_episode()
    store(episode, 1.0, 2.0)
    with system(at=3, error=errno.ENOSPC, only=("pwrite",)), pytest.raises(OSError, match="No space left"):
        episode.publish()
    other = buffer.begin_episode()
    store(other, 8.0, 9.0)
    episode.publish()
    other.publish()
    assert rewards(buffer) == [[1, 2], [8, 9]]


def test_steps_survive_the_growth_of_what_is_staged(buffer, monkeypatch):
    monkeypatch.setattr("memmap_buffer.writing.episode.FIRST_CAPACITY", 2)
    monkeypatch.setattr("memmap_buffer.writing.episode.CHUNK_BYTES", 1)
    for _ in range(2):
        with buffer.one_episode() as episode:
            store(episode, *range(71))
    assert rewards(buffer) == [list(range(71))] * 2


@pytest.mark.parametrize("where", ["Scalars.of", "np.empty"])
def test_an_interruption_while_what_is_staged_grows_loses_no_step(buffer, monkeypatch, where):
    monkeypatch.setattr("memmap_buffer.writing.episode.FIRST_CAPACITY", 2)
    monkeypatch.setattr("memmap_buffer.writing.episode.CHUNK_BYTES", 1)
    for after in ([], [4.0, 5.0, 6.0]):
        episode = buffer.begin_episode()
        store(episode, 1.0, 2.0)
        with monkeypatch.context() as patch:
            patch.setattr(f"memmap_buffer.writing.episode.{where}", interrupt)
            with pytest.raises(KeyboardInterrupt, match="now"):
                store(episode, 3.0)
        store(episode, *after)
        episode.publish()
    assert rewards(buffer) == [[1, 2], [1, 2, 4, 5, 6]]


def test_no_more_memory_is_kept_than_said(monkeypatch):
    monkeypatch.setattr(episodes, "KEPT_BYTES", 100)
    kept = Staging()
    columns = [{"a": np.empty(40, np.uint8), "b": np.empty(size, np.uint8)} for size in (10, 11, 10)]
    for some in columns:
        kept.keep(some)
    assert [kept.take(1), kept.take(1), kept.take(1)] == [columns[2], columns[0], {}]


CORNERS = (0, 1, -1, 2, 255, 256, 2**24 + 1, 2**31, 2**53 + 1, 2**63, -(2**63), 0.5, 1e300, -1e39, 6e4, float("nan"))
NUMBERS = st.one_of(st.sampled_from((*CORNERS, float("inf"), -float("inf"))), st.integers(-300, 300), st.floats())
KINDS = (bool, int, float, np.bool_, np.int32, np.int64, np.float32, np.float64)


@given(st.sampled_from(NUMERIC), st.sampled_from(KINDS), NUMBERS)
def test_a_number_that_fits_as_it_is_is_stored_as_encode_makes_it(dtype, kind, number):
    try:
        with np.errstate(all="ignore"):
            value = kind(number)
    except (OverflowError, ValueError):  # there is no such number of that kind
        return
    field = Field(dtype)
    rows = np.zeros(1, field.storage)
    others = Scalars.of(field.dtype, field.shape)
    if kind in others.exact or (kind in others.kinds and others.low <= value <= others.high):
        rows[0] = value
        assert rows[0].tobytes() == field.encode(value).tobytes()


def test_a_step_without_any_field_is_refused_where_one_has_no_default(buffer):
    with buffer.one_episode() as episode:
        store(episode, 1.0)
        with pytest.raises(SchemaError, match="field 'obs', timestep 1: missing"):
            episode.store()
    assert rewards(buffer) == [[1]]


def test_columns_without_room_for_what_is_to_come_are_not_taken():
    kept = Staging()
    columns = {"a": np.empty(4, np.uint8)}
    kept.keep(columns)
    assert kept.take(5) == {}
    assert kept.take(4) is columns


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_steps_of_an_array_with_gaps_are_stored_as_those_of_a_copy(tmp_path, publish):
    every = np.arange(40, dtype=np.float32).reshape(20, 2)
    with ReplayBuffer(tmp_path, 2, 20, {"x": ("float", 2)}, publish=publish) as buffer:
        with buffer.one_episode() as episode:
            episode.extend(x=every[::2])
            episode.extend(x=every.T[:, :3].T[::-1])
        assert buffer.episode(0)["x"].tolist() == [*every[::2].tolist(), *every[2::-1].tolist()]
