"""A folder as a data set of d3rlpy: batches equal to those of its own data set, to the last bit.

Where d3rlpy is not installed, which pins versions that the other tests do not have, `d3rlpy_peer` restates it.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import d3rlpy_peer
import numpy as np
import pytest
from pages import run_alone, run_blocks

from memmap_buffer import ConcatBuffer, Field, NotEnoughDataError, ReplayBuffer, SchemaError
from memmap_buffer.compat import set_valid

REAL = importlib.util.find_spec("d3rlpy") is not None
pytestmark = pytest.mark.filterwarnings("default")  # those of d3rlpy and of gym, which it imports
needs_d3rlpy = pytest.mark.skipif(
    not REAL, reason="d3rlpy is not installed; it pins versions that the other tests do not have"
)
if not REAL:
    d3rlpy_peer.install()

from d3rlpy.dataset import (  # noqa: E402
    FrameStackTrajectorySlicer,
    FrameStackTransitionPicker,
    MDPDataset,
    MultiStepTransitionPicker,
    SparseRewardTransitionPicker,
)

from memmap_buffer.interop.d3rlpy import DiskDataset  # noqa: E402

LENGTHS = (7, 2, 12, 1, 30, 5)
TERMINATED = (True, False, True, True, False, True)
FIELDS = {"observation": ("uint8", (2, 3)), "action": "int", "reward": "float", "terminated": "bool"}


class OtherPicker(MultiStepTransitionPicker):
    """One that the adapter does not know, so it gets whole episodes."""


class OtherSlicer(FrameStackTrajectorySlicer):
    """Likewise."""


def columns(discrete: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "observation": rng.integers(1, 256, (n, 2, 3), dtype=np.uint8),
            "action": rng.integers(0, 4, n) if discrete else rng.normal(size=(n, 3)).astype(np.float32),
            "reward": np.where(n == 5, 0, rng.normal(size=n)).astype(np.float32),
            "terminated": (np.arange(n) == n - 1) & over,
        }
        for n, over in zip(LENGTHS, TERMINATED, strict=True)
    ]


def stored(folder: Path, episodes: list[dict[str, Any]], **fields: Any) -> Path:
    with ReplayBuffer(folder, len(episodes), max(LENGTHS), {**FIELDS, **fields}) as buffer:
        for episode in episodes:
            buffer.store_episode(**episode)
    return folder


def theirs(episodes: list[dict[str, Any]], **options: Any) -> Any:
    joined = {name: np.concatenate([e[name] for e in episodes]) for name in ("observation", "action", "reward")}
    terminals = np.concatenate([e["terminated"] for e in episodes]).astype(np.float32)
    timeouts = np.zeros_like(terminals)
    timeouts[np.cumsum([len(e["reward"]) for e in episodes]) - 1] = 1
    timeouts -= terminals
    return MDPDataset(*joined.values(), terminals, timeouts, **options)


def assert_equal(got: Any, expected: Any) -> None:
    """Equal in shape, dtype and bits, field by field."""
    for field in dataclasses.fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "transitions":
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert_equal(x, y)
            continue
        for x, y in zip(*(v if isinstance(v, list) else [v] for v in (a, b)), strict=True):
            x, y = np.asarray(x), np.asarray(y)
            assert (x.dtype, x.shape) == (y.dtype, y.shape), field.name
            np.testing.assert_array_equal(x, y, err_msg=field.name)


def assert_same_draws(ours: Any, expected: Any, length: int = 9) -> None:
    for seed in range(3):
        batches = []
        for dataset in (ours, expected):
            np.random.seed(seed)
            batches.append((dataset.sample_transition_batch(64), dataset.sample_trajectory_batch(32, length)))
        for got, wanted in zip(*batches, strict=True):
            assert_equal(got, wanted)


@pytest.mark.parametrize("discrete", [True, False], ids=["discrete", "continuous"])
@pytest.mark.parametrize(
    ("picker", "slicer"),
    [
        (None, None),
        (FrameStackTransitionPicker(4), FrameStackTrajectorySlicer(3)),
        (MultiStepTransitionPicker(3, 0.9), FrameStackTrajectorySlicer(1)),
        (MultiStepTransitionPicker(20, 0.99), None),
        (SparseRewardTransitionPicker(-5.0), None),
        (OtherPicker(2, 0.9), OtherSlicer(2)),
    ],
    ids=["basic", "stacks", "3 steps", "20 steps", "sparse", "others"],
)
def test_batches_are_those_of_their_data_set(tmp_path: Path, discrete: bool, picker: Any, slicer: Any) -> None:
    episodes = columns(discrete)
    action = "int" if discrete else ("float32", 3)
    options = {"transition_picker": picker, "trajectory_slicer": slicer}
    ours = DiskDataset(stored(tmp_path / "b", episodes, action=action), **options)
    expected = theirs(episodes, **options)
    assert (ours.size(), ours.transition_count) == (expected.size(), expected.transition_count)
    assert repr(ours.dataset_info) == repr(expected.dataset_info)
    assert_same_draws(ours, expected)


def test_an_episode_is_theirs(tmp_path: Path) -> None:
    episodes = columns()
    ours, expected = DiskDataset(stored(tmp_path / "b", episodes)), theirs(episodes)
    assert len(ours.episodes) == len(ours.episodes[:]) == len(LENGTHS)
    for got, wanted in zip(ours.episodes, expected.episodes, strict=True):
        assert_equal(got, wanted)
    for i in (0, 6, 7, expected.transition_count - 1):
        got, wanted = ours.buffer[i], expected.buffer[i]
        assert got[1] == wanted[1]
        assert_equal(got[0], wanted[0])
    with pytest.raises(IndexError, match="99"):
        ours.buffer[99]


def test_several_fields_are_a_tuple_observation(tmp_path: Path) -> None:
    episodes = columns()
    for episode in episodes:
        episode["observation"] = {"image": episode["observation"], "state": episode["reward"][:, None] + 1}
    fields = {"image": ("uint8", (2, 3)), "state": ("float32", 1)}
    folder = stored(tmp_path / "b", episodes, observation=fields)
    ours = DiskDataset(folder, observation=("observation.image", "observation.state"))
    np.random.seed(0)
    batch = ours.sample_transition_batch(8)
    assert [x.shape for x in batch.observations] == [(8, 2, 3), (8, 1)]
    assert_equal(batch.transitions[3], ours.transition_picker(*located(ours, 0, 3)))
    state = DiskDataset(folder, observation="observation.state")
    assert [x.observations.tolist() for x in state.episodes] == [e["observation"]["state"].tolist() for e in episodes]
    for name in ("observation", "reward", "terminated"):
        with pytest.raises(SchemaError, match="DiskDataset: got 'observation', which is a group"):
            DiskDataset(folder, **{"observation": "observation.state", name: "observation"})


def located(dataset: Any, seed: int, i: int) -> Any:
    """The episode and timestep of the i-th draw."""
    np.random.seed(seed)
    return dataset.buffer[int(np.random.randint(dataset.transition_count, size=i + 1)[i])]


def test_final_observations_and_the_field_valid_change_nothing(tmp_path: Path) -> None:
    episodes = columns()
    observation = Field("uint8", (2, 3), final=True)
    with ReplayBuffer(tmp_path / "b", 9, 30, {**FIELDS, "observation": observation}) as buffer:
        for episode in episodes:
            seen = np.concatenate([episode["observation"], np.full((1, 2, 3), 9, np.uint8)])
            buffer.store_episode(**{**episode, "observation": seen})
        set_valid(buffer, [[0, 3], [2, 5]], False)
        assert_same_draws(DiskDataset(buffer), theirs(episodes))


def test_several_folders_are_one_data_set(tmp_path: Path) -> None:
    episodes = columns()
    buffers = [
        ReplayBuffer.from_folder(stored(tmp_path / str(i), part), read_only=True)
        for i, part in enumerate((episodes[:2], episodes[2:]))
    ]
    assert_same_draws(DiskDataset(ConcatBuffer(buffers)), theirs(episodes))


def test_episodes_of_which_a_ring_forgot_the_first_steps_begin_later(tmp_path: Path) -> None:
    episodes = columns()
    with ReplayBuffer(tmp_path / "b", max_timesteps=30, fields=FIELDS, capacity=40) as buffer:
        for episode in episodes:
            buffer.store_episode(**episode)
        assert buffer.num_steps == 40
        expected = [{name: x[-4:] for name, x in episodes[2].items()}, *episodes[3:]]
        assert_same_draws(DiskDataset(buffer), theirs(expected))


def test_what_was_overwritten_is_drawn_from_what_is_there_now(tmp_path: Path) -> None:
    episodes, later = columns(), columns(seed=1)
    with ReplayBuffer(tmp_path / "b", len(LENGTHS), 30, FIELDS, circular=True) as buffer:
        for episode in episodes:
            buffer.store_episode(**episode)
        dataset = DiskDataset(tmp_path / "b")
        for episode in later:
            buffer.store_episode(**episode)
        seen = dataset.sample_transition_batch(500).rewards
        assert np.isin(seen, np.concatenate([e["reward"] for e in later])).all()
        assert dataset.transition_count == theirs(later).transition_count


def test_episodes_that_are_published_are_there_after_a_refresh(tmp_path: Path) -> None:
    episodes = columns()
    with ReplayBuffer(tmp_path / "b", 9, 30, FIELDS) as buffer:
        for episode in episodes[:3]:
            buffer.store_episode(**episode)
        dataset = DiskDataset(tmp_path / "b")
        for episode in episodes[3:]:
            buffer.store_episode(**episode)
        assert dataset.size() == 3
        dataset.refresh()
        assert_same_draws(dataset, theirs(episodes))


def test_it_is_only_read(tmp_path: Path) -> None:
    dataset = DiskDataset(stored(tmp_path / "b", columns()))
    for write in (
        lambda: dataset.append(1, 2, 3),
        lambda: dataset.append_episode(1),
        lambda: dataset.clip_episode(True),
    ):
        with pytest.raises(NotImplementedError, match="only read"):
            write()


def test_without_a_transition_it_says_so(tmp_path: Path) -> None:
    episode = {name: x[:1] for name, x in columns()[1].items()}
    with pytest.raises(NotEnoughDataError, match="no transition"):
        DiskDataset(stored(tmp_path / "b", [episode]))


@needs_d3rlpy
@pytest.mark.parametrize("name", ["CQL", "CalQL", "BC", "DecisionTransformer"])
def test_algorithms_learn_the_same_from_the_folder(tmp_path: Path, name: str) -> None:
    import d3rlpy
    import torch
    from d3rlpy.preprocessing import MinMaxObservationScaler

    episodes = columns(False)
    for episode in episodes:
        episode["observation"] = episode["observation"][:, 0] / np.float32(256)
    folder = stored(tmp_path / "b", episodes, action=("float32", 3), observation=("float32", 3))
    learned = []
    for dataset in (DiskDataset(folder), theirs(episodes)):
        d3rlpy.seed(1)
        config = getattr(d3rlpy.algos, f"{name}Config")
        algo = config(batch_size=8, observation_scaler=MinMaxObservationScaler()).create()
        algo.fit(dataset, 6, 3, show_progress=False, logger_adapter=d3rlpy.logging.NoopAdapterFactory())
        modules = vars(algo.impl.modules).values()
        learned.append([p for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*learned, strict=True))


@needs_d3rlpy
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "d3rlpy.md"
    assert run_blocks(page).count == 2
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    run_alone(page, 1)
