"""`mixture_loader`: unlike buffers in one batch, in an order that the seed fixes whoever reads it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from memmap_buffer import (
    ConcatBuffer,
    NotEnoughDataError,
    RandomCrop,
    ReplayBuffer,
    SchemaError,
    Source,
    StaleEpisodeError,
    Trajectory,
    Window,
    mixture_loader,
)

ARM = {"image": ("uint8", (8, 8, 3)), "action": ("float32", (4,)), "text": "U8", "step": "int"}
HAND = {
    "image": ("uint8", (6, 10, 3)),
    "wrist": {"image": ("uint8", (4, 4, 1))},
    "action": ("float64", (7,)),
    "text": "U16",
    "step": "int",
}


UNLIKE = ("image", "action", "wrist")


def arm(serial, length=12):
    t = np.arange(length)
    image = np.full((length, 8, 8, 3), serial + 1, np.uint8)
    action = np.full((length, 4), serial + 1, np.float32)
    return {"image": image, "action": action, "text": [f"arm {serial}"] * length, "step": 100 * serial + t}


def hand(serial, length=9):
    t = np.arange(length)
    return {
        "image": np.full((length, 6, 10, 3), serial + 101, np.uint8),
        "wrist": {"image": np.full((length, 4, 4, 1), serial + 101, np.uint8)},
        "action": np.full((length, 7), serial + 0.5),
        "text": [f"the hand, {serial}"] * length,
        "step": 10_000 + 100 * serial + t,
    }


@pytest.fixture
def buffers(tmp_path):
    with ReplayBuffer(tmp_path / "arm", 8, 12, ARM) as a, ReplayBuffer(tmp_path / "hand", 8, 12, HAND) as b:
        for serial in range(4):
            a.store_episode(**arm(serial))
            b.store_episode(**hand(serial))
        yield a, b


def mixed(buffers, *, weights=(3, 1), view=None, batch_size=8, seed=5, **options):
    names = ("arm", "hand")
    sources = {
        name: Source(buffer, weight, view=view or Window(4), return_indices=True)
        for name, buffer, weight in zip(names, buffers, weights, strict=True)
    }
    return mixture_loader(sources, batch_size, seed=seed, **options)


def items(batches):
    """(source, serial, timestep) of each item, batch by batch."""
    return [
        [tuple(item) for item in np.column_stack([batch["_source"], batch["_indices"]]).tolist()] for batch in batches
    ]


def contents(batches):
    return [{key: np.asarray(value).tolist() for key, value in _flat(batch)} for batch in batches]


def _flat(batch, prefix=""):
    for key, value in batch.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# What a batch is


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_unlike_shapes_are_padded_with_zeros_and_told_by_masks(buffers, format):
    batch = next(iter(mixed(buffers, weights=(1, 1), format=format)))
    source = np.asarray(batch["_source"])
    assert Counter(source.tolist()) == {0: 4, 1: 4}
    for name, shape, present in (("image", (8, 4, 8, 10, 3), (8, 1, 8, 10, 1)), ("action", (8, 4, 7), (8, 1, 7))):
        assert tuple(batch[name].shape) == shape and tuple(batch[f"_present_{name}"].shape) == present
        assert (np.asarray(batch[name])[np.broadcast_to(~np.asarray(batch[f"_present_{name}"]), shape)] == 0).all()
    assert np.asarray(batch["_present_action"])[source == 0, 0].tolist() == [[True] * 4 + [False] * 3] * 4
    assert np.asarray(batch["_present_image"])[source == 1][:, 0, :, :, 0].sum(axis=(1, 2)).tolist() == [60] * 4
    assert (np.asarray(batch["_present_wrist"]["image"]) == (source == 1)[:, None, None, None, None]).all()
    wrist = np.asarray(batch["wrist"]["image"])
    assert wrist.shape == (8, 4, 4, 4, 1) and (wrist[source == 0] == 0).all() and (wrist[source == 1, 0] > 100).all()
    serial = np.asarray(batch["_indices"])[:, 0]
    mask = np.asarray(batch["_mask"])
    assert (np.asarray(batch["action"])[:, 0, 0] == np.where(source == 0, serial + 1, serial + 0.5)).all()
    assert (np.asarray(batch["image"])[:, 0, 5, 7, 0] == np.where(source == 0, serial + 1, serial + 101)).all()
    t = np.asarray(batch["_start"])[:, None] + np.arange(4)
    assert (np.asarray(batch["step"]) == np.where(mask, (source * 10_000 + serial * 100)[:, None] + t, 0)).all()
    texts = [row[0] for row in (batch["text"] if format == "torch" else batch["text"].tolist())]
    assert texts == [f"arm {s}" if k == 0 else f"the hand, {s}" for k, s in zip(source, serial, strict=True)]
    assert str(batch["action"].dtype).endswith("float64") and str(batch["image"].dtype).endswith("uint8")
    assert {key for key in batch if key.startswith("_present_")} == {f"_present_{key}" for key in UNLIKE}


def test_whole_episodes_are_padded_to_the_longest_of_their_batch(buffers):
    batch = next(iter(mixed(buffers, weights=(1, 1), view=Trajectory(fields=("step",)))))
    assert batch["step"].shape[1] == 12 and {*batch["_lens"].tolist()} == {9, 12}


def test_transforms_make_unlike_keys_alike_and_may_be_random(buffers):
    def even(batch, rng):
        noise = rng.random((len(batch["action"]), 2))
        return {"action": batch["action"][..., :2] + noise[:, None] * 0, "noise": noise, "step": batch["step"]}

    def loader(**options):
        sources = {name: Source(b, transform=even, view=Window(2)) for name, b in zip("ab", buffers, strict=True)}
        return mixture_loader(sources, 6, seed=1, **options)

    each = contents(loader())
    assert [*each[0]] == ["action", "noise", "step", "_source"]
    assert contents(loader(num_workers=2)) == each
    assert len({tuple(row) for batch in each for row in batch["noise"]}) == sum(len(batch["noise"]) for batch in each)


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_later_items_may_have_longer_texts_and_other_numbers_than_the_first(buffers, format):
    def described(batch):
        values = batch["step"][:, 0].tolist()
        return {
            "text": ["first" if n < 2 else f"of step {n}" for n in values],
            "n": [n if n < 2 else n + 0.5 for n in values],
        }

    sources = {"arm": Source(buffers[0], view=Window(1), transform=described)}
    for batch in mixture_loader(sources, 8, seed=1, format=format):
        for text, n in zip(batch["text"], batch["n"].tolist(), strict=True):
            assert str(text) == ("first" if n < 2 else f"of step {int(n)}") and (n < 2 or n % 1 == 0.5)


def test_the_steps_of_shorter_windows_and_of_sources_without_them_are_none(buffers):
    views = (Window(2, return_steps=True), Window(4, return_steps=True), Window(4))
    pair = (buffers[0], buffers[1], buffers[1])
    sources = {str(i): Source(buffer, view=view) for i, (buffer, view) in enumerate(zip(pair, views, strict=True))}
    for batch in mixture_loader(sources, 9, seed=1):
        steps, offset = batch["_steps"], torch.tensor([0, 10_000, 0])[batch["_source"]][:, None]
        there = steps[..., 0] >= 0
        assert (steps[~there] == -1).all() and (there.sum(dim=1) == batch["_lens"])[batch["_source"] < 2].all()
        assert not there[batch["_source"] == 2].any()
        assert (steps @ torch.tensor([100, 1]) + offset)[there].equal(batch["step"][there])


# Which items


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.9, 0.1)])
def test_every_run_of_items_has_the_shares_and_each_source_is_gone_round_before_it_repeats(buffers, weights):
    order = [item for batch in items(mixed(buffers, weights=weights)) for item in batch]
    source = np.array([item[0] for item in order])
    share = weights[1] / sum(weights)
    for size in (1, 7, 8, 50):
        sums = np.convolve(source, np.ones(size, int), "valid")
        assert np.abs(sums - share * size).max() <= 1.0001
    for number, count in ((0, 48), (1, 36)):
        own = [item for item in order if item[0] == number]
        rounds = [own[i : i + count] for i in range(0, len(own), count)]
        assert all(len({*one}) == len(one) for one in rounds)
        assert len(rounds) < 2 or rounds[0] != rounds[1]
    assert any(len({item for item in order if item[0] == k}) == count for k, count in ((0, 48), (1, 36)))


@pytest.mark.parametrize("length", ["longest", "shortest"])
@pytest.mark.parametrize("shares", ["exact", "chance"])
@pytest.mark.parametrize("count", [3, 40_000])
def test_each_source_is_gone_round_before_an_item_comes_again(tmp_path, shares, length, count):
    names = ("few", "many")
    for name, steps in zip(names, (count, 2 * count), strict=True):
        with ReplayBuffer(tmp_path / name, 1, steps, {"n": "int"}) as buffer:
            buffer.store_episode(n=np.arange(steps))
    sources = {
        name: Source(tmp_path / name, weight, timestep_level=True) for name, weight in zip(names, (1, 3), strict=True)
    }
    seen = [[], []]
    for batch in mixture_loader(sources, 1000, seed=1, shares=shares, length=length, format="numpy"):
        for number in (0, 1):
            seen[number] += batch["n"][batch["_source"] == number].tolist()
    for number, size in ((0, count), (1, 2 * count)):
        for begin in range(0, len(seen[number]), size):
            once = seen[number][begin : begin + size]
            assert len({*once}) == len(once)
    lengths = [len(each) / size for each, size in zip(seen, (count, 2 * count), strict=True)]
    assert min(lengths) == 1 if length == "longest" else 1 - 1 / count < max(lengths) <= 1


def test_by_chance_each_item_is_of_a_source_by_its_weight(buffers):
    sources = [b["_source"] for b in mixed(buffers, shares="chance", length=4000, batch_size=50, shuffle=True)]
    counts = [int(source.sum()) for source in sources]
    assert abs(sum(counts) / 4000 - 0.25) < 0.03
    assert len({*counts}) > 5  # exact shares give 12 or 13
    again = [b["_source"] for b in mixed(buffers, shares="chance", length=4000, batch_size=50)]
    assert all(torch.equal(a, b) for a, b in zip(sources, again, strict=True))


@pytest.mark.parametrize(("length", "expected"), [("longest", 144), ("shortest", 64), (100, 100)])
def test_an_epoch_ends_by_the_longest_or_shortest_source_or_after_so_many_items(buffers, length, expected):
    loader = mixed(buffers, length=length)
    assert sum(len(batch) for batch in items(loader)) == expected
    assert len(loader) == -(-expected // 8)
    first, second = items(loader), items(loader)
    assert first != second  # epochs count up


def test_filters_splits_and_weights_are_those_of_each_source(tmp_path, buffers):
    with ReplayBuffer(tmp_path / "more", 8, 12, HAND) as more:
        for serial in range(2):
            more.store_episode(**hand(serial))
        both = ConcatBuffer([buffers[1], more], weights=[0.5, 0.5])
        sources = {
            "arm": Source(buffers[0], timestep_level=True, filter_fields={"_start": 0}, fields=["step"]),
            "hands": Source(both, timestep_level=True, fields=["step"], return_indices=True),
        }
        batches = list(mixture_loader(sources, 8, seed=0, length=160))
    steps = np.concatenate([batch["step"][batch["_source"] == 0] for batch in batches])
    assert {*steps.tolist()} == {0, 100, 200, 300}
    folders = np.concatenate([batch["_indices"][batch["_source"] == 1][:, 0] for batch in batches])
    assert Counter(folders.tolist()) == {0: 40, 1: 40}


def test_a_source_may_be_a_folder_a_root_or_a_url(tmp_path, buffers):
    from memmap_buffer import publish

    root = tmp_path / "root"
    for serial in range(5):
        with ReplayBuffer(root, 2, 12, ARM, shard="auto") as shard:
            shard.store_episode(**arm(serial))
    places = {"folder": buffers[0].folder, "root": root}
    if pytest.importorskip("fsspec"):
        publish(buffers[1].folder, f"file://{tmp_path}/url")
        places["url"] = f"file://{tmp_path}/url"
    sources = {name: Source(place, timestep_level=True, fields=["step"]) for name, place in places.items()}
    batches = list(mixture_loader(sources, 6, seed=0))
    assert Counter(torch.cat([batch["_source"] for batch in batches]).tolist()) == {0: 60, 1: 60, 2: 60}


# Where it stands


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"prefetch": 3}], ids=["alone", "workers", "prefetch"])
@pytest.mark.parametrize("shares", ["exact", "chance"])
@pytest.mark.parametrize("view", [Window(4), RandomCrop(3)], ids=["windows", "crops"])
def test_an_epoch_goes_on_to_the_bit_wherever_it_was_stopped(buffers, options, shares, view):
    def loader(**more):
        return mixed(buffers, view=view, shares=shares, length=70, **more)

    whole, second = contents(loader()), None
    for stop in (0, 1, 4, len(whole)):
        stopped = loader(seed=5, **options)
        batches = iter(stopped)
        head = contents([next(batches) for _ in range(stop)])
        state = json.loads(json.dumps(stopped.state_dict()))
        if stop == len(whole):
            assert next(batches, None) is None
            state = json.loads(json.dumps(stopped.state_dict()))
        buffers[0].store_episode(**arm(7)) if stop == 4 and len(buffers[0]) < 5 else None
        other = loader(seed=9, **options)
        other.load_state_dict(state)
        rest = contents(other)
        if stop < len(whole):
            assert head + rest == whole
            following = contents(other)
            assert stop == 4 or second is None or following == second
            second = following
        else:
            assert rest != whole


def test_ranks_share_an_epoch_and_any_number_of_ranks_goes_on_with_it(buffers):
    whole = items(mixed(buffers, length=96))
    parts = [items(mixed(buffers, length=96, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [batch for pair in zip(*parts, strict=True) for batch in pair] == whole
    stopped = mixed(buffers, length=96, rank=0, world_size=2)
    batches = iter(stopped)
    next(batches), next(batches)
    alone = mixed(buffers, seed=0, length=96)
    alone.load_state_dict(stopped.state_dict())
    assert items(alone) == whole[4:]


def test_episodes_that_are_gone_are_told_of_or_drawn_again(tmp_path, buffers):
    with ReplayBuffer(tmp_path / "ring", 4, 12, ARM, circular=True) as ring:
        for serial in range(4):
            ring.store_episode(**arm(serial))
        loader = mixed((ring, buffers[1]))
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        ring.store_episode(**arm(4))
        again = mixed((ring, buffers[1]))
        with pytest.raises(StaleEpisodeError, match="1 episodes of the epoch"):
            again.load_state_dict(state)
        again.load_state_dict(state, on_stale="redraw")
        rest = items(again)
    assert sum(map(len, rest)) == 144 - 8 and all(item[:2] != (0, 0) for batch in rest for item in batch)


def test_a_source_that_was_emptied_is_named_when_the_next_epoch_begins(buffers):
    loader = mixed(buffers)
    buffers[1].clear()
    with pytest.raises(NotEnoughDataError, match="hand: nothing to read"):
        iter(loader)


def test_what_a_view_tells_of_its_items_has_no_mask(buffers):
    views = (Window(4), Window(2), Window(3))
    sources = {str(i): Source(buffers[0], view=view) for i, view in enumerate(views)}
    batch = next(iter(mixture_loader(sources, 9, seed=1)))
    assert batch["_mask"].sum(dim=1).tolist() == batch["_lens"].tolist()
    assert not [key for key in batch if key.startswith("_present__")]


def test_a_seed_of_numpy_is_one_of_python_in_the_state(buffers):
    state = next_state(mixed(buffers, seed=np.int64(3)))
    other = mixed(buffers, seed=9)
    other.load_state_dict(json.loads(json.dumps(state)))
    assert items(other) == items(mixed(buffers, seed=3))[1:]


def test_a_state_of_other_sources_is_refused(buffers):
    state = next_state(mixed(buffers))
    other = mixture_loader({"arm": Source(buffers[0])}, 4, seed=1)
    with pytest.raises(SchemaError, match=r"is of \['arm', 'hand'\], this mixture of \['arm'\]"):
        other.load_state_dict(state)
    with pytest.raises(SchemaError, match="expected what state_dict gave"):
        other.load_state_dict({"seed": 1})


@pytest.mark.parametrize("change", [{"weights": (1, 1)}, {"shares": "chance"}])
def test_a_state_of_other_shares_is_refused(buffers, change):
    with pytest.raises(
        SchemaError, match=r"the epoch has \{'shares': 'exact', 'weights': \[3.0, 1.0\]\}, this mixture"
    ):
        mixed(buffers, **change).load_state_dict(next_state(mixed(buffers)))


@pytest.mark.parametrize("change", [{"delivered": -1}, {"items": "12"}, {"weights": None}])
def test_a_state_that_no_loader_gave_is_refused(buffers, change):
    loader, state = mixed(buffers), next_state(mixed(buffers))
    with pytest.raises(SchemaError, match="load_state_dict: "):
        loader.load_state_dict(state | change)


def next_state(loader):
    next(iter(loader))
    return loader.state_dict()


def test_workers_that_are_spawned_read_it(buffers):
    loader = mixed(buffers, length=32, num_workers=1, multiprocessing_context="spawn")
    assert contents(loader) == contents(mixed(buffers, length=32))


# What cannot be mixed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shares": "even"}, "shares: got 'even'"),
        ({"length": "middle"}, "length: got 'middle'"),
        ({"length": 0}, "length"),
        ({"batch_size": 0}, "batch_size"),
        ({"format": "jax"}, "format: got 'jax'"),
        ({"num_worker": 1}, "num_worker"),
        ({"format": "numpy", "device": "cpu"}, "arrays stay where they are"),
        ({"weights": (1, 0)}, "weight: got 0"),
        ({"weights": (1, float("nan"))}, "weight: got nan"),
        ({"weights": (1, True)}, "weight: got True"),
    ],
)
def test_options_that_cannot_be_meant_are_named(buffers, change, text):
    with pytest.raises(SchemaError, match=text):
        mixed(buffers, **change)


UNJOINED = {
    "text and numbers": (["a"], np.ones(1), r"'k' is of \['str32', 'float64'\]"),
    "no exact dtype": (np.ones(1, np.uint64), np.ones(1, np.int64), r"'k' is of \['uint64', 'int64'\]"),
    "objects": ([{"a": {}}["a"]], [None], r"'k' is of \['object'\]"),
    "a group": (np.ones(1), {"k": np.ones(1)}, "'k' is a key of one source, and a group of another"),
}


@pytest.mark.parametrize("case", UNJOINED)
def test_values_that_no_key_can_hold_are_named(buffers, case):
    one, other, text = UNJOINED[case]

    def repeated(value, batch):
        return (
            {key: repeated(each, batch) for key, each in value.items()}
            if isinstance(value, dict)
            else [*value] * len(batch["step"])
        )

    sources = {
        name: Source(
            buffers[0], timestep_level=True, transform=lambda batch, value=value: {"k": repeated(value, batch)}
        )
        for name, value in (("one", one), ("other", other))
    }
    with pytest.raises(SchemaError, match=text):
        mixture_loader(sources, 4, seed=1)


def test_keys_that_the_mixture_makes_are_its_own(buffers):
    for key in ("_source", "_present_wrist.image"):
        sources = {
            "arm": Source(
                buffers[0], timestep_level=True, transform=lambda batch, key=key: {**batch, key: batch["step"]}
            ),
            "hand": Source(buffers[1], timestep_level=True),
        }
        with pytest.raises(SchemaError, match=f"'{key}' is a key of one source, and made by the mixture"):
            mixture_loader(sources, 4, seed=1)


@pytest.mark.parametrize("change", [lambda n: {"more": n}, lambda n: {"step": n[:, None]}], ids=["a key", "an axis"])
def test_a_transform_that_gives_other_keys_for_later_items_is_named(buffers, change):
    def moody(batch):
        return {"step": batch["step"], **(change(batch["step"]) if batch["step"].max() > 0 else {})}

    loader = mixture_loader({"arm": Source(buffers[0], timestep_level=True, transform=moody)}, 4, seed=1)
    with pytest.raises(SchemaError, match="source 'arm': got keys of"):
        list(loader)


def test_what_cannot_be_joined_is_named(tmp_path, buffers):
    with ReplayBuffer(tmp_path / "flat", 2, 12, {"image": ("uint8", (5,)), "action": "U4"}) as flat:
        flat.store_episode(image=np.zeros((3, 5)), action=["a"] * 3)
        pair = {"arm": Source(buffers[0], timestep_level=True), "flat": Source(flat, timestep_level=True)}
        with pytest.raises(SchemaError, match=r"'image' has \{'arm': 3, 'flat': 1\} axes"):
            mixture_loader(pair, 4)
        only = {"arm": Source(buffers[0], view=Window(2, fields=["action"])), "flat": Source(flat, fields=["action"])}
        with pytest.raises(SchemaError, match="'action'"):
            mixture_loader(only, 4)
    with pytest.raises(SchemaError, match="prioritized is no option of one source"):
        Source(buffers[0], prioritized=True)
    for sources in ({}, {"arm": buffers[0]}, {1: Source(buffers[0])}):
        with pytest.raises(SchemaError, match="sources: got"):
            mixture_loader(sources, 4)
    wrong = {"arm": Source(buffers[0], transform=lambda batch: {"action": batch["action"][:0]})}
    with pytest.raises(SchemaError, match="source 'arm': 'action' has shape"):
        mixture_loader(wrong, 4)
    tiny = [Source(buffers[0]), Source(buffers[1], 1e-300)]
    with pytest.raises(SchemaError, match=r"weights: got \[1.0, 1e-300\]"):
        mixture_loader(dict(zip("ab", tiny, strict=True)), 4)
    with ReplayBuffer(tmp_path / "empty", 2, 12, ARM) as empty, pytest.raises(NotEnoughDataError, match="empty"):
        mixed((buffers[0], empty))
