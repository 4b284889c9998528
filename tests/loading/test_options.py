"""What becomes of a batch after it was cut: kept dimensions, no padding, functions of the user's and their chance."""

from __future__ import annotations

import functools
from collections import namedtuple

import numpy as np
import pytest
import torch
from conftest import assert_same, flat

from memmap_buffer import NStep, Offsets, RandomCrop, SchemaError, Trajectory, Window
from memmap_buffer.compat import can_sample

FIELDS = ("number", "t", "reward", "observation", "text", "half")


class TestKeepdim:
    @pytest.mark.parametrize(
        "how",
        [
            {"timestep_level": True},
            {"n_steps": 2, "gamma": 0.5, "sequence_fields": FIELDS, "prioritized": True},
            {"return_mask": True, "return_indices": True},
            {"view": Window(3), "return_indices": True},
        ],
        ids=["timesteps", "transitions", "episodes", "windows"],
    )
    def test_numbers_get_one_more_axis_and_all_else_stays(self, recorded, how):
        """S3-15; and the decision on the shape of scalars"""
        buffer = recorded()
        plain, kept = (flat(buffer.sample(5, seed=1, expand_scalars=keep, **how)) for keep in (False, True))
        for key, value in plain.items():
            name = key.removeprefix("next_").removeprefix("seq_")
            number = key in ("_return", "_discount", "_weights", "_probabilities", "n_step_lens") or (
                name in buffer.schema.all and not buffer.schema.all[name].shape and isinstance(value, torch.Tensor)
            )
            if number:
                assert kept[key].shape == (*value.shape, 1), key
                assert torch.equal(kept[key][..., 0], value)
            else:
                assert_same({key: kept[key]}, {key: value})

    def test_it_goes_by_the_stored_name_where_keys_are_renamed(self, recorded):
        batch = recorded().sample(4, timestep_level=True, expand_scalars=True, fieldname_map={"reward": "r"})
        assert batch["r"].shape == (4, 1)
        assert batch["observation"].shape == (4, 3)


class TestRagged:
    @pytest.mark.parametrize(
        ("view", "prefix", "lens"),
        [
            (Trajectory(FIELDS), "", "_lens"),
            (Window(4, fields=FIELDS), "", "_lens"),
            (RandomCrop(4, FIELDS), "", "_lens"),
            (NStep(3, ("number",), ("number",), FIELDS), "seq_", "n_step_lens"),
            (NStep(3, ("number",), FIELDS, timeline=True), "next_", "n_step_lens"),
        ],
        ids=["episodes", "windows", "crops", "sequences", "timeline"],
    )
    def test_sequences_come_without_their_padding(self, recorded, view, prefix, lens):
        """S3-18: of each item as many steps as it has, as jagged nested tensors"""
        buffer = recorded()
        padded, ragged = (buffer.sample(6, seed=2, view=view, ragged=on) for on in (False, True))
        for name in FIELDS:
            got, want = ragged[prefix + name], padded[prefix + name]
            if name != "text":
                assert got.layout is torch.jagged
                assert got.dtype == want.dtype
                got = got.unbind()
            for row, all_, n in zip(got, want, padded[lens].tolist(), strict=True):
                assert row == all_[:n] if name == "text" else torch.equal(row, all_[:n])

    def test_they_come_through_workers_and_prefetching_and_into_transforms_and_tuples(self, recorded):
        buffer = recorded()
        how = {"n_steps": 2, "ragged": True, "sequence_fields": ["reward"], "shuffle": True, "seed": 1}
        alone = [batch["seq_reward"].unbind() for batch in buffer.dataloader(5, **how)]
        for more in ({"num_workers": 1}, {"prefetch": 1}, {"transform": total_of}):
            for batch, want in zip(buffer.dataloader(5, **how, **more), alone, strict=True):
                assert all(map(torch.equal, batch["seq_reward"].unbind(), want))
        named = buffer.sample(3, ragged=True, to_named_tuple=("reward", "_lens"))
        assert [len(row) for row in named.reward.unbind()] == named.lens.tolist()

    @pytest.mark.parametrize(
        "how",
        [
            {"timestep_level": True},
            {"n_steps": 2},
            {"view": Window(3, pad_before=1)},
            {"view": Offsets(reward=(0, 1))},
            {"return_episode_lens": False},
        ],
    )
    def test_where_nothing_is_padded_behind_a_known_end_it_is_refused(self, recorded, how):
        with pytest.raises(SchemaError, match=r"ragged: \w+ gives no sequences that differ in length"):
            recorded().dataset(ragged=True, **how)


def total_of(batch):
    return batch | {"total": torch.stack([row.sum() for row in batch["seq_reward"].unbind()])}


def zeroed(batch):
    for value in flat(batch).values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    return batch


def doubled(batch):
    return batch | {"reward": batch["reward"] * 2}


def plus_one(batch):
    return batch | {"reward": batch["reward"] + 1}


def noisy(batch, rng):
    return batch | {"reward": batch["reward"] + torch.from_numpy(rng.normal(size=len(batch["reward"])))}


Pair = namedtuple("Pair", "t reward name")


def in_a_tuple(batch):
    return batch["t"], {"twice": batch["reward"]}, batch["name"]


def in_a_named_tuple(batch):
    return Pair(*in_a_tuple(batch))


def in_a_list(batch):
    return [*in_a_tuple(batch)]


class TestTransforms:
    def test_each_of_several_gets_what_the_one_before_it_gave(self, recorded):
        """S5-06"""
        buffer = recorded()
        how = {"timestep_level": True, "seed": 4}
        plain = buffer.sample(6, **how)["reward"]
        assert torch.equal(buffer.sample(6, transform=[doubled, plus_one], **how)["reward"], plain * 2 + 1)
        assert torch.equal(buffer.sample(6, transform=(plus_one, doubled), **how)["reward"], (plain + 1) * 2)
        assert torch.equal(buffer.sample(6, transform=[], **how)["reward"], plain)

    def test_what_is_stored_stays_as_it_is(self, recorded):
        buffer = recorded()
        before = buffer.get_all_data()
        for _ in buffer.dataloader(4, timestep_level=True, transform=zeroed):
            pass
        assert_same(buffer.get_all_data(), before)

    def test_chance_of_a_transform_follows_from_the_seed_with_any_number_of_workers(self, recorded):
        """Nor does it matter whether a thread fetches ahead, or where an epoch was resumed."""
        buffer = recorded()
        how = {"timestep_level": True, "transform": [doubled, noisy], "shuffle": True}
        alone = list(buffer.dataloader(4, seed=3, **how))
        for more in ({"num_workers": 1}, {"num_workers": 2}, {"prefetch": 3}):
            for got, want in zip(buffer.dataloader(4, seed=3, **how, **more), alone, strict=True):
                assert_same(got, want)
        loader = buffer.dataloader(4, seed=3, **how)
        next(iter(loader))
        rest = buffer.dataloader(4, **how)
        rest.load_state_dict(loader.state_dict())
        for got, want in zip(rest, alone[1:], strict=True):
            assert_same(got, want)
        assert_same(*(buffer.sample(4, seed=1, timestep_level=True, transform=noisy) for _ in range(2)))

    def test_no_two_batches_and_no_two_epochs_have_the_same_chance(self, recorded):
        seen = []
        transform = functools.partial(remember, seen)
        loader = recorded().dataloader(4, timestep_level=True, transform=transform, seed=3)
        for _ in range(2):
            assert len(list(loader)) == 5
        assert len(set(seen)) == 10

    def test_a_dataset_in_a_loader_of_ones_own_has_chance_from_torch(self, recorded):
        dataset = recorded().dataset(timestep_level=True, transform=noisy)
        values = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            values.append(dataset[3]["reward"].item())
        assert values[0] == values[1] != values[2]

    @pytest.mark.parametrize("transform", [in_a_tuple, in_a_named_tuple, in_a_list])
    def test_the_batch_is_whatever_the_last_of_them_returns(self, recorded, transform):
        buffer = recorded()
        how = {"timestep_level": True, "transform": [doubled, transform]}
        plain = buffer.batch(timestep_level=True)
        for got in (buffer.batch(**how), buffer.batch(**how, device="cpu"), *buffer.dataloader(18, **how)):
            assert type(got) is type(transform(plain))
            assert torch.equal(got[0], plain["t"]) and torch.equal(got[1]["twice"], 2 * plain["reward"])
            assert got[2] == plain["name"]
        want = list(buffer.dataloader(4, **how))
        for more in ({"num_workers": 1}, {"prefetch": 2}):
            for one, other in zip(buffer.dataloader(4, **how, **more), want, strict=True):
                assert type(one) is type(other) and torch.equal(one[0], other[0])
        item = buffer.dataset(**how)[5]
        assert type(item) is type(want[0])
        assert (item[0], item[1]["twice"], item[2]) == (plain["t"][5], 2 * plain["reward"][5], plain["name"][5])

    def test_a_number_for_the_whole_batch_is_that_of_each_item(self, recorded):
        dataset = recorded().dataset(timestep_level=True, transform=lambda batch: (batch["t"], 0.5, torch.tensor(3)))
        assert dataset[2] == (2, 0.5, 3)

    @pytest.mark.parametrize(
        ("how", "match"),
        [
            ({"transform": lambda batch: None}, r"transform: .* returned None, expected the batch; return it"),
            (
                {"transform": in_a_tuple, "to_named_tuple": ["t"]},
                "it returned tuple, and to_named_tuple makes its tuple",
            ),
        ],
    )
    def test_no_batch_and_a_tuple_of_a_tuple_are_refused(self, recorded, how, match):
        with pytest.raises(SchemaError, match=match):
            recorded().sample(3, timestep_level=True, **how)

    @pytest.mark.parametrize("given", [3, [doubled, None], "doubled", {doubled}])
    def test_what_is_no_function_is_refused(self, recorded, given):
        with pytest.raises(
            SchemaError, match=r"transform: got .*, expected a function from batch to batch, or several"
        ):
            recorded().dataset(transform=given)


def remember(seen, batch, rng):
    seen.append(float(rng.random()))
    return batch


class TestElements:
    @pytest.mark.parametrize(
        "how",
        [
            {"timestep_level": True, "return_indices": True},
            {"n_steps": 2, "gamma": 0.5, "sequence_fields": FIELDS, "prioritized": True},
            {"n_steps": 2, "stack": {"camera": 3}, "expand_scalars": True},
            {"return_mask": True},
            {"view": Trajectory(return_mask=True, final_observation=True), "fieldname_map": {"observation": "seen"}},
            {"slice_by_episode_len": False},
            {"window_length": 3, "fieldname_map": {"reward": "r"}},
            {"view": Offsets(observation=(-1, 0), t=range(3))},
            {"ragged": True},
        ],
    )
    def test_they_are_the_shapes_and_dtypes_of_a_batch(self, recorded, how):
        """S3-19: told without reading, by a buffer that may be empty"""
        buffer, empty = recorded(), recorded((), name="empty")
        spec = empty.batch_spec(5, **how)
        batch = flat(buffer.sample(5, **how))
        assert spec.keys() == batch.keys()
        for key, array in spec.items():
            value = batch[key]
            if not isinstance(value, torch.Tensor):
                assert array.dtype == "str"
                continue
            assert array.dtype == str(value.dtype).removeprefix("torch.")
            assert len(array.shape) == value.ndim
            if value.layout is torch.strided:
                assert all(a in (None, b) for a, b in zip(array.shape, value.shape, strict=True))

    def test_what_only_a_batch_can_tell_is_none(self, recorded):
        buffer = recorded()
        assert buffer.batch_spec()["observation"] == ((None, None, 3), "float32")
        assert buffer.batch_spec(8, timestep_level=True)["observation"] == ((8, 3), "float32")
        assert buffer.batch_spec(8, view=Window(4))["half"] == ((8, 4), "bfloat16")
        assert buffer.batch_spec(8, slice_by_episode_len=False)["text"] == ((8, 12), "str")
        final = Trajectory(final_observation=True)
        assert buffer.batch_spec(8, view=final)["observation"] == ((8, None, 3), "float32")
        assert buffer.batch_spec(8, view=Trajectory(to_length=20, final_observation=True))["observation"].shape[1] == 21

    def test_sequences_may_be_longer_than_the_whole_folder(self, recorded):
        spec = recorded((), max_episodes=1, max_timesteps=3).batch_spec(8, n_steps=100, sequence_fields="t")
        assert spec["seq_t"] == ((8, 100), "int64")

    def test_what_is_not_stored_is_in_no_batch_spec(self, recorded):
        """S3-19"""
        with pytest.raises(SchemaError, match=r"fields: got 'rewards', .*did you mean 'reward'"):
            recorded().batch_spec(timestep_level=True, fields=["rewards"])


class TestBatches:
    @pytest.mark.parametrize("how", [{"timestep_level": True}, {"n_steps": 2}, {"view": Window(3)}, {}])
    def test_a_batch_of_positions_is_what_the_dataset_has_there(self, recorded, how):
        """S3-13, S4-18, S5-04: explicit indices, nothing is drawn"""
        buffer = recorded()
        dataset = buffer.dataset(**how)
        wanted = [2, 0, -1, 2]
        batch = buffer.batch(wanted, **how)
        for b, i in enumerate(wanted):
            item = dataset[i]
            for key, value in flat({k: v for k, v in item.items()}).items():
                got = flat(batch)[key][b]
                if isinstance(value, torch.Tensor):
                    assert torch.equal(got[: len(value)] if value.ndim and not how else got, value)

    def test_all_items_are_one_batch_if_no_positions_are_given(self, recorded):
        """S3-12"""
        buffer = recorded()
        (want,) = buffer.dataloader(999, n_steps=2)
        assert_same(buffer.batch(n_steps=2), want)

    @pytest.mark.parametrize(
        ("indices", "error", "match"),
        [
            ([99], IndexError, "item 99: the dataset has 18"),
            ([], SchemaError, r"batch: got \[\], expected positions"),
            ([0.5], SchemaError, r"batch: got \[0.5\], expected positions"),
            ([[[1, 2]]], SchemaError, "batch: got .*, expected positions"),
            (np.empty(0, int), SchemaError, "batch: got .*, expected positions"),
        ],
    )
    def test_positions_that_do_not_exist_are_refused(self, recorded, indices, error, match):
        with pytest.raises(error, match=match):
            recorded().batch(indices, timestep_level=True)

    def test_without_replacement_no_item_is_drawn_twice_and_each_alike(self, recorded):
        """S5-03, S5-18"""
        buffer = recorded()
        counts = np.zeros(18)
        for seed in range(200):
            indices = buffer.sample(6, timestep_level=True, replacement=False, seed=seed, return_indices=True)
            pairs = [tuple(pair) for pair in indices["_indices"].tolist()]
            assert len(set(pairs)) == 6
            counts[[number * 2 + number * (number + 1) // 2 + t for number, t in pairs]] += 1
        assert ((counts - 1200 / 18) ** 2 / (1200 / 18)).sum() < 40
        every = buffer.sample(4, replacement=False, return_indices=True)
        assert sorted(every["_index"].tolist()) == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("how", "match"),
        [
            ({"batch_size": 19}, "got batch_size 19, there are 18 items"),
            ({"batch_size": 2, "weight_by": "task_id"}, "replacement=False draws every item alike"),
            ({"batch_size": 2, "prioritized": True}, "draws by priority are with replacement"),
        ],
    )
    def test_what_cannot_be_drawn_without_replacement_is_refused(self, recorded, how, match):
        """S5-03: ValueError"""
        with pytest.raises(ValueError, match=match):
            recorded().sample(timestep_level=True, replacement=False, **how)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"view": 5}, r"view: got 5, expected a view, such as Timestep\(\)"),
        ({"view": Window}, r"view: got <class .*, expected a view"),
        ({"n_steps": 2, "gamma": "a"}, "gamma: got 'a', expected a number from 0 to 1"),
        ({"n_steps": 2, "stack": 3}, "stack: got 3, expected a dict"),
        ({"n_steps": 2, "stack": {"number": "a"}}, "stack of 'number': got 'a', expected a whole number from 1"),
        ({"fieldname_map": ["number"]}, r"fieldname_map: got \['number'\], expected a dict"),
        ({"fieldname_map": {"number": 5}}, "fieldname_map: 'number' is to be 5, expected a name"),
        ({"fields": 3}, "fields: got 3, expected a name, or several"),
        ({"n_steps": 2, "next_fields": 3}, "next_fields: got 3, expected a name, or several"),
        ({"to_named_tuple": 3}, "to_named_tuple: got 3, expected a name, or several"),
        ({"n_steps": 1, "hindsight": 4}, r"hindsight: got 4, expected Hindsight\(...\)"),
        ({"split": {"a": "x"}, "part": "a"}, "split: got .*, expected fractions"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_its_name(recorded, how, match):
    with pytest.raises(SchemaError, match=match):
        recorded().dataset(**how)


def test_how_much_can_be_sampled_is_asked_in_whole_numbers(recorded):
    with pytest.raises(SchemaError, match="min_steps: got 'a', expected a whole number from 0"):
        can_sample(recorded(), min_steps="a")
