"""Statistics against numpy over everything at once; what is kept in the folder; normalisation and its inverse."""

import errno
import json
import pickle

import numpy as np
import pytest
import torch
from damage import rewrite_state
from fault_injection import in_child, listing, system
from inside import get_inside, place_of_row, set_inside

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotEnoughDataError,
    Offsets,
    ReplayBuffer,
    RunningStatistics,
    SchemaError,
    Statistics,
    Trajectory,
    Window,
    publish,
)

FIELDS = {
    "observation": {"x": Field("float", 3, final=True), "image": ("uint8", (4, 2))},
    "reward": "float64",
    "half": "bfloat16",
    "done": "bool",
    "text": "U3",
    "z": "complex64",
}
META = {"task": "int", "goal": ("float", 2), "name": ("U8", (), "none")}
LENGTHS = (3, 7, 1, 5, 6)


def record(buffer, rng, lengths=LENGTHS):
    for i, length in enumerate(lengths):
        buffer.store_episode(
            observation={
                "x": 100 + 5 * rng.standard_normal((length + i % 2, 3)),
                "image": rng.integers(0, 256, (length, 4, 2), np.uint8),
            },
            reward=1e9 + rng.random(length),
            half=rng.integers(-4, 4, length) / 2,
            done=np.arange(length) == length - 1,
            text=["abc"] * length,
            z=np.ones(length),
            task=i * 10,
            goal=rng.random(2),
        )


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path / "buffer", 4, 8, FIELDS, META, circular=True) as made:
        record(made, np.random.default_rng(0))
        yield made


def column(buffer, name):
    """Every entry of a field, by the public names."""
    rows = []
    for i in range(len(buffer)):
        value = buffer.episode(i)
        for part in name.split("."):
            value = value[part]
        rows.append(np.asarray(value)[None] if name in buffer.meta_fieldnames else value)
    return np.concatenate(rows).astype(np.float64)


NUMERIC = ["observation.x", "observation.image", "reward", "half", "done", "task", "goal"]


def check(found, everything, exact=True):
    assert found.count == len(everything) and found.rank_error == 0
    np.testing.assert_allclose(found.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, everything.std(0), rtol=1e-6, atol=1e-12)
    assert np.array_equal(found.min, everything.min(0)) and np.array_equal(found.max, everything.max(0))
    for q, value in found.quantiles.items():
        np.testing.assert_allclose(value, np.quantile(everything, q, axis=0), rtol=1e-12)


@pytest.mark.parametrize("block_bytes", [1, 64, get_inside("statistics_block_bytes")])
def test_statistics_are_those_of_numpy_over_everything_in_parts_of_any_size(buffer, monkeypatch, block_bytes):
    set_inside(monkeypatch, statistics_block_bytes=block_bytes)
    found = buffer.statistics()
    assert list(found.fields) == NUMERIC and found.last_serial == 4 and found.num_episodes == 4
    for name in NUMERIC:
        check(found[name], column(buffer, name))


def test_entries_from_anywhere_are_described_part_by_part_but_those_that_do_not_count():
    values, rng = np.random.default_rng(5).normal(size=(100, 3)), np.random.default_rng(6)
    good = rng.random(100) < 0.7
    running = RunningStatistics((3,), 100, (0.1, 0.5))
    assert running.result() is None
    for start, stop in ((0, 1), (1, 40), (40, 40), (40, 100)):
        running.add(values[start:stop], good[start:stop])
    found, counted = running.result(), values[good]
    assert (found.count, found.rank_error) == (len(counted), 0)
    for got, expected in (
        (found.mean, counted.mean(axis=0)),
        (found.std, counted.std(axis=0)),
        (found.min, counted.min(axis=0)),
        (found.max, counted.max(axis=0)),
        (found.quantiles[0.1], np.quantile(counted, 0.1, axis=0)),
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    everything = RunningStatistics((3,), 100, (0.1, 0.5))
    everything.add(values)
    np.testing.assert_allclose(everything.result().quantiles[0.5], np.median(values, axis=0), rtol=1e-12)


def test_several_folders_are_described_as_one(buffer, tmp_path):
    with ReplayBuffer(tmp_path / "other", 3, 9, FIELDS, META) as other:
        record(other, np.random.default_rng(1), (9, 2))
        both = ConcatBuffer([buffer, other])
        found = both.statistics(["observation", "reward"], [0.5])
        assert list(found.fields) == ["observation.x", "observation.image", "reward"]
        for name in found.fields:
            check(found[name], column(both, name))


def test_quantiles_of_more_entries_than_the_sample_are_off_by_no_more_than_they_say(tmp_path):
    values = np.random.default_rng(3).standard_normal((40, 500, 2)).astype(np.float32)
    with ReplayBuffer(tmp_path, 40, 500, {"x": ("float", 2)}) as buffer:
        for episode in values:
            buffer.store_episode(x=episode)
        flat = values.reshape(-1, 2).astype(np.float64)
        whole = buffer.statistics(quantiles=(0.1, 0.5, 0.99))["x"]
        check(whole, flat)
    with pytest.MonkeyPatch.context() as patch, ReplayBuffer.from_folder(tmp_path, read_only=True) as reader:
        set_inside(patch, statistics_sample=2000)
        source = ConcatBuffer([reader])  # which keeps none
        found = [source.statistics(["x"], (0.1, 0.5, 0.99), seed=seed)["x"] for seed in range(20)]
    assert found[0].rank_error == pytest.approx(np.sqrt(np.log(2000) / 4000)) and found[0].count == 20000
    assert np.array_equal(found[0].mean, whole.mean)
    for one in found:
        for q, value in one.quantiles.items():
            ranks = (flat <= value).mean(0)
            assert (abs(ranks - q) <= one.rank_error + 1 / len(flat)).all()
    assert not np.array_equal(found[0].quantiles[0.5], found[1].quantiles[0.5])


def test_they_are_kept_by_the_writer_and_computed_again_when_something_changed(buffer, monkeypatch):
    first = buffer.statistics()
    path = buffer.folder / "extra" / "statistics.json"
    assert json.loads(path.read_text())["last_serial"] == 4
    computed, running = [], get_inside("running_statistics")
    set_inside(monkeypatch, running_statistics=lambda *a, **how: computed.append(a) or running(*a, **how))
    before = listing(buffer.folder)
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    for source in (buffer, reader):
        again = source.statistics(["reward"])
        assert np.array_equal(again["reward"].mean, first["reward"].mean)
        assert again["reward"].quantiles.keys() == first["reward"].quantiles.keys() and again.last_serial == 4
    assert computed == [] and listing(buffer.folder) == before
    buffer.statistics(["reward"], [0.3])
    assert len(computed) == 1
    buffer.update(0, reward=[5.0])
    assert reader.statistics(["reward"])["reward"].min == 5 and len(computed) == 2
    path.write_text("{")
    assert buffer.statistics(["done"])["done"].max == 1 and len(computed) == 3
    assert not [name for name in listing(buffer.folder) if name.endswith(".new")]


HALVES = {"train": 0.5, "val": 0.5}
CHOSEN = [
    {"split": HALVES, "part": "train"},
    {"split": HALVES, "part": "val", "split_seed": 1},
    {"split": {"train": 2, "val": 1}, "part": "train"},
    {"split": "task", "part": 20},
    {"filter_meta": {"task": lambda column: column > 10, "episode_lens": (None, 6)}},
    {"top_k": ("task", 2), "min_episode_len": 5},
]


@pytest.mark.parametrize("options", CHOSEN, ids=["split", "seed", "counts", "by field", "filters", "top_k"])
def test_the_statistics_of_a_part_are_those_of_its_episodes_alone_from_folders_and_urls(buffer, tmp_path, options):
    with ReplayBuffer(tmp_path / "other", 3, 9, FIELDS, META) as other:
        record(other, np.random.default_rng(1), (9, 2, 5))
    publish(tmp_path / "other", f"file://{tmp_path}/far")
    far = ReplayBuffer.from_folder(f"file://{tmp_path}/far/other", cache=tmp_path / "cache")
    for source in (buffer, ConcatBuffer([buffer, other]), far):
        everything = source.statistics(["reward", "task"])
        found = source.statistics(["reward", "task"], **options)
        batch = source.batch(return_mask=True, format="numpy", **options)
        assert found.num_episodes == len(batch["task"]) < everything.num_episodes
        check(found["reward"], batch["reward"][batch["_mask"]])
        check(found["task"], batch["task"].astype(np.float64))


def test_the_statistics_of_a_part_and_those_that_are_kept_are_never_taken_for_each_other(buffer):
    part = {"split": HALVES, "part": "train"}
    first = buffer.statistics(["reward"], **part)
    assert "extra/statistics.json" not in listing(buffer.folder)
    everything = buffer.statistics(["reward"])
    before = listing(buffer.folder)
    again = buffer.statistics(["reward"], **part)
    assert first.num_episodes == again.num_episodes == 1 and everything.num_episodes == len(buffer) == 4
    assert again["reward"].mean == first["reward"].mean != everything["reward"].mean
    assert listing(buffer.folder) == before


def test_statistics_take_the_options_that_choose_episodes_and_no_others(buffer):
    buffer.mark(2, add=["good"])
    assert buffer.statistics(["task"], mark="good").num_episodes == 1
    for options, error in (
        ({"n_steps": 3}, "option 'n_steps' is unknown"),
        ({"filter_fields": {"done": True}}, "option 'filter_fields' is unknown; did you mean 'filter_meta'"),
        ({"filter_meta": {"reward": 3}}, "filter_meta"),
        ({"part": "train"}, "part: got 'train' without split"),
    ):
        with pytest.raises(SchemaError, match=error):
            buffer.statistics(**options)
    with pytest.raises(NotEnoughDataError, match="there are no episodes to describe"):
        buffer.statistics(filter_meta={"task": 7})


def test_what_was_kept_of_a_folder_that_was_overwritten_is_not_that_of_the_new_one(tmp_path):
    for value in (1, 5):
        with ReplayBuffer(tmp_path, 2, 3, {"x": "float"}, overwrite=True) as buffer:
            buffer.store_episode(x=[value] * 2)
            assert buffer.statistics()["x"].mean == value


def test_what_was_kept_of_a_column_is_not_that_of_another_of_its_name(tmp_path):
    with ReplayBuffer(tmp_path, 2, 3, {"x": "float"}) as buffer:
        buffer.store_episode(x=[1, 2])
        for value in (1, 5):
            buffer.add_field("y", ("float", (), value))
            assert buffer.statistics()["y"].mean == value
            buffer.drop_field("y")


HOSTILE = {
    "nested": lambda text: "[" * 200_000,
    "infinite": lambda text: text.replace('"num_episodes": 1', '"num_episodes": 1e999'),
    "shape": lambda text: text.replace('"mean": 1.5', '"mean": [1.0, 2.0]'),
    "quantile": lambda text: text.replace('"quantiles": [[0.01, ', '"quantiles": [[0.01, 0], [0.5, '),
    "list": lambda text: "[]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_stranger_kept_there_is_computed_anew(tmp_path, name):
    with ReplayBuffer(tmp_path, 2, 3, {"x": "float"}) as buffer:
        buffer.store_episode(x=[1, 2])
        buffer.statistics()
        path = tmp_path / "extra" / "statistics.json"
        text = path.read_text()
        path.write_text(HOSTILE[name](text))
        assert path.read_text() != text
        found = buffer.statistics()
        check(found["x"], np.array([1.0, 2.0]))
        assert found.num_episodes == 1


def test_a_disk_too_full_to_keep_them_takes_nothing_from_them(tmp_path, caplog):
    with ReplayBuffer(tmp_path, 2, 3, {"x": "float"}) as buffer:
        buffer.store_episode(x=[1, 2])
        with system(1, error=errno.ENOSPC, only=("pwrite",)):
            assert buffer.statistics()["x"].mean == 1.5
        assert "statistics could not be kept" in caplog.text
        assert buffer.statistics()["x"].mean == 1.5 and (tmp_path / "extra" / "statistics.json").exists()


def test_an_episode_that_fails_its_checksums_is_in_none_of_them(tmp_path):
    def write(_):
        buffer = ReplayBuffer(tmp_path, 3, 3, {"x": "float"})
        for value in (1, 2, 3):
            buffer.store_episode(x=[value] * 2)

    assert in_child(write).status == 0  # without `close`
    rewrite_state(tmp_path, boot=(0x44332211, 0))
    path, offset = place_of_row(tmp_path, "x", 1)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x11\x22\x33\x44")
    found = ReplayBuffer.from_folder(tmp_path, read_only=True).statistics()["x"]
    assert (found.count, found.min, found.max, found.mean) == (4, 1, 3, 2)


def test_what_cannot_be_described_is_refused(buffer, tmp_path):
    empty = ReplayBuffer(tmp_path / "empty", 2, 2, {"x": "float"})
    with empty, pytest.raises(NotEnoughDataError, match="there are no episodes to describe"):
        empty.statistics()
    for names, text in ((["text"], "statistics: field 'text' holds text"), (["rewrad"], "did you mean 'reward'")):
        with pytest.raises(SchemaError, match=text):
            buffer.statistics(names)
    with pytest.raises(SchemaError, match=r"quantiles: got .*numbers from 0 to 1"):
        buffer.statistics(quantiles=[2])


# Normalisation


def test_a_normalised_column_has_mean_0_and_deviation_1_or_reaches_from_minus_1_to_1(buffer):
    found = buffer.statistics(quantiles=(0.25, 0.75))
    batch = next(iter(buffer.dataloader(100, timestep_level=True)))
    out = found.normalize("reward", "observation.image")(batch)
    assert out["reward"].mean().abs() < 1e-3 and out["reward"].dtype == torch.float64
    assert (out["observation"]["image"].std(0, unbiased=False) - 1).abs().max() < 1e-3
    assert out["observation"]["x"] is batch["observation"]["x"] and batch["observation"]["image"].dtype == torch.uint8
    ranged = found.normalize("observation.image", by="range")(batch)["observation"]["image"]
    assert ranged.amin(0).eq(-1).all() and ranged.amax(0).eq(1).all()
    cut = found.normalize("reward", by="quantiles")(batch)["reward"]
    assert ((cut >= -1) & (cut <= 1)).double().mean() == pytest.approx(0.5, abs=0.1)


def test_it_normalises_what_was_read_of_a_field_in_every_view_and_back_again(buffer):
    normalize = pickle.loads(pickle.dumps(buffer.statistics().normalize("observation.x", "reward", "half")))
    found = buffer.statistics()
    batch = buffer.sample(8, n_steps=2, sequence_fields=["reward"], seed=1)
    out = normalize(batch)
    x = found["observation.x"]
    for key in ("observation", "next_observation"):
        expected = (batch[key]["x"].double().numpy() - x.mean) / x.std
        np.testing.assert_allclose(out[key]["x"].numpy(), expected, rtol=1e-4, atol=1e-4)
    assert out["seq_reward"].shape == batch["seq_reward"].shape and not torch.equal(
        out["seq_reward"], batch["seq_reward"]
    )
    back = normalize.inverse(out)
    torch.testing.assert_close(back["observation"]["x"], batch["observation"]["x"])
    torch.testing.assert_close(back["seq_reward"], batch["seq_reward"])
    arrays = normalize({"reward": np.array([1, 2])})["reward"]
    assert isinstance(arrays, np.ndarray) and arrays.dtype == np.float32


def test_what_another_transform_has_put_into_a_batch_stays_as_it_is(buffer):
    normalize, batch = buffer.statistics().normalize("observation.x"), buffer.sample(8, n_steps=2, seed=1)
    more = {"policy.0": torch.ones(8), "info": {}, "nested": {"a.b": 1, "c": {}}, 7: "seven"}
    for change in (normalize, normalize.inverse):
        out = change(batch | more)
        assert list(out) == [*batch, *more] and {key: out[key] for key in more} == more
        assert not torch.equal(out["observation"]["x"], batch["observation"]["x"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64"])
def test_a_large_mean_leaves_no_bias(tmp_path, dtype):
    """It is computed in float64, and rounded once to the floats of the field."""
    rng = np.random.default_rng(0)
    with ReplayBuffer(tmp_path, 1, 1000, {"x": (dtype, 2)}) as buffer:
        buffer.store_episode(x=torch.from_numpy(10_000 + 100 * rng.normal(size=(1000, 2))).to(getattr(torch, dtype)))
        normalize, x = buffer.statistics().normalize("x"), buffer.statistics()["x"]
        batch = buffer.batch(timestep_level=True)
        floats = batch["x"].dtype if batch["x"].is_floating_point() else torch.float32
        out, exact = normalize(batch)["x"], (batch["x"].double() - torch.from_numpy(x.mean)) / torch.from_numpy(x.std)
        assert out.dtype == floats and torch.equal(out, exact.to(floats))
        assert out.double().mean(0).abs().max() < max(1e-12, torch.finfo(floats).eps / 8)
        back = normalize.inverse({"x": exact.to(floats)})["x"]
        again = exact.to(floats).double() * torch.from_numpy(x.std) + torch.from_numpy(x.mean)
        assert back.dtype == floats and torch.equal(back, again.to(floats))
        if dtype in ("float32", "float64", "int64"):
            arrays = normalize({"x": batch["x"].numpy()})["x"]
            assert isinstance(arrays, np.ndarray) and (arrays == out.numpy()).all()


def test_padding_stays_zero_on_request_in_every_kind_of_sequence(recorded_statistics):
    buffer, found = recorded_statistics
    normalize = found.normalize("observation.x", "reward", keep_padding=True)
    every = found.normalize("observation.x", "reward")
    for how, told in (
        ({}, lambda b: {"reward": steps(b["_lens"], 7), "x": steps(b["_lens"], 7)}),
        (
            {"view": Trajectory(final_observation=True)},
            lambda b: {"reward": steps(b["_lens"], 7), "x": steps(b["_lens"] + b["_has_final"].int(), 8)},
        ),
        (
            {"view": Trajectory(to_length=8, final_observation=True, return_mask=True)},
            lambda b: {"reward": b["_mask"], "x": steps(b["_lens"] + b["_has_final"].int(), 9)},
        ),
        ({"view": Window(4, pad_before=2)}, lambda b: {"reward": b["_mask"], "x": b["_mask"]}),
        (
            {"view": Offsets({"observation.x": range(-1, 3), "reward": (0, 2)})},
            lambda b: {"reward": b["_mask_reward"], "x": b["_mask_observation"]["x"]},
        ),
    ):
        plain, got = (buffer.batch(**how, transform=transform) for transform in (every, normalize))
        for name, mask in told(plain).items():
            (before, after) = (b["observation"]["x"] if name == "x" else b["reward"] for b in (plain, got))
            assert torch.equal(after[mask], before[mask]) and not after[~mask].any() and before[~mask].any()
    transitions = {"n_steps": 3, "sequence_fields": ["reward"], "timeline": True, "transform": normalize}
    got = buffer.batch(**transitions)
    exist = steps(got["n_step_lens"], 3)
    assert not got["seq_reward"][~exist].any() and not got["next_observation"]["x"][~exist].any()
    assert torch.equal(
        buffer.batch(timestep_level=True, transform=normalize)["reward"],
        every(buffer.batch(timestep_level=True))["reward"],
    )
    arrays = normalize({"reward": np.ones((2, 3)), "_lens": np.array([3, 1])})["reward"]
    assert (arrays[1, 1:] == 0).all() and arrays[1, 0] == arrays[0, 2] != 0


def test_padding_that_nothing_tells_of_is_refused(recorded_statistics):
    buffer, found = recorded_statistics
    normalize = found.normalize("observation.x", keep_padding=True)
    for how in (
        {"n_steps": 1, "stack": {"observation.x": 2}},
        {"view": Trajectory(to_length=12, final_observation=True)},
    ):
        with pytest.raises(SchemaError, match=r"does not tell which timesteps of 'observation.x' exist"):
            buffer.batch(**how, transform=normalize)


def test_eps_is_added_on_request(recorded_statistics):
    _, found = recorded_statistics
    out = found.normalize("reward", eps=0.5, add_eps=True)({"reward": torch.ones(1, dtype=torch.float64)})["reward"]
    assert out.item() == (1 - found["reward"].mean) / (found["reward"].std + 0.5)


def steps(lens, length):
    return torch.arange(length) < lens[:, None]


@pytest.fixture
def recorded_statistics(tmp_path):
    with ReplayBuffer(tmp_path, 9, 8, FIELDS, meta_fields=META) as buffer:
        record(buffer, np.random.default_rng(0))
        yield buffer, buffer.statistics()


def test_what_does_not_vary_is_only_shifted_and_an_unknown_name_is_refused(tmp_path):
    with ReplayBuffer(tmp_path, 2, 3, {"x": "float"}) as buffer:
        buffer.store_episode(x=[2, 2, 2])
        found = buffer.statistics()
        assert isinstance(found, Statistics)
        for by in ("std", "range", "quantiles"):
            assert found.normalize(by=by)({"x": torch.tensor([2.0, 3.0])})["x"].tolist() == [0, 1]
        with pytest.raises(SchemaError, match=r"normalize: got 'y', there are statistics of x"):
            found.normalize("y")
        with pytest.raises(SchemaError, match=r"by: got 'max'"):
            found.normalize(by="max")


def test_of_an_episode_that_a_ring_has_trimmed_the_steps_count_that_are_shown(tmp_path):
    with ReplayBuffer(
        tmp_path, capacity=5, max_timesteps=10, fields={"x": Field("float", final=True), "y": "int"}
    ) as ring:
        ring.store_episode(x=np.arange(11.0), y=np.arange(10))
        found = ring.statistics()
        assert (found["x"].count, found["x"].min, found["x"].max, found["y"].count) == (6, 5, 10, 5)
        ring.store_episode(x=[100.0, 101.0], y=[100, 101])
        found = ring.statistics(["y"])
        assert (found.num_episodes, found["y"].count, found["y"].min, found["y"].max) == (2, 5, 7, 101)
        assert ring.statistics(["y"], filter_meta={"episode_lens": 3})["y"].count == 3  # of the first, by what is left


def test_what_is_not_finite_or_too_large_to_be_squared_warns_of_nothing():
    for values in ([1, np.nan, 2], [1, np.inf, -np.inf], [1e308, -1e308, 1e308, 1e308]):
        running = RunningStatistics((), len(values))
        running.add(np.array(values))
        running.add(np.array(values[:0]))
        assert not np.isfinite(running.result().std)
