"""The PyTorch contract: what items and batches are, and that they are gathered whole."""

import json
import pickle

import numpy as np
import pytest
import torch
from conftest import assert_same, flat
from inside import get_inside, set_inside
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate

from memmap_buffer import ConcatBuffer, NotEnoughDataError, NStep, Offsets, Prioritized, SchemaError, Trajectory, Window

FIELDS = {
    "number": ((), torch.int64),
    "t": ((), torch.int64),
    "observation": ((3,), torch.float32),
    "camera.left": ((2, 2), torch.uint8),
    "camera.right": ((2, 2), torch.uint8),
    "half": ((), torch.bfloat16),
    "text": ((), str),
    "reward": ((), torch.float32),
    "terminated": ((), torch.bool),
}
META = {"task_id": ((), torch.int64), "name": ((), str), "success": ((), torch.bool)}


def fields(*lead, prefix="", names=FIELDS):
    return {f"{prefix}{name}": ((*lead, *FIELDS[name][0]), FIELDS[name][1]) for name in names}


def whole(*shape):
    return shape, torch.int64


def mask(*shape):
    return shape, torch.bool


# name -> (options, what an item of the first episode, of 3 timesteps, looks like: key -> (shape, dtype))
VIEWS = {
    "trajectory": (
        {"return_mask": True, "return_indices": True},
        fields(3) | {"_lens": whole(), "_mask": mask(3), "_index": whole()},
    ),
    "trajectory padded to max_timesteps": ({"slice_by_episode_len": False}, fields(12) | {"_lens": whole()}),
    "trajectory with final observation": (
        {"view": Trajectory(final_observation=True)},
        fields(3) | fields(4, names=["observation"]) | {"_lens": whole(), "_has_final": mask()},
    ),
    "timestep": ({"timestep_level": True, "return_indices": True}, fields() | {"_indices": whole(2)}),
    "timestep of some fields": (
        {"timestep_level": True, "fields": ["camera", "t"]},
        fields(names=["camera.left", "camera.right", "t"]),
    ),
    "n-step": (
        {"n_steps": 4, "sequence_fields": ["reward", "text"], "gamma": 0.9, "return_indices": True},
        fields()
        | fields(prefix="next_")
        | fields(4, prefix="seq_", names=["reward", "text"])
        | {"n_step_lens": whole(), "_return": ((), torch.float32), "_discount": ((), torch.float32)}
        | {"_indices": whole(2)},
    ),
    "crop": (
        {"window_length": 2, "return_indices": True},
        fields(2) | {"_lens": whole(), "_start": whole(), "_reaches_episode_end": mask(), "_index": whole()},
    ),
    "window": (
        {"view": Window(4, stride=2), "return_indices": True},
        fields(4)
        | {"_lens": whole(), "_mask": mask(4), "_start": whole(), "_reaches_episode_end": mask(), "_indices": whole(2)},
    ),
    "offsets": (
        {"view": Offsets(observation=(-1, 0), camera=range(3), half=(0,))},
        fields(2, names=["observation"])
        | fields(3, names=["camera.left", "camera.right"])
        | fields(1, names=["half"])
        | {"_mask_observation": mask(2), "_mask_camera.left": mask(3), "_mask_camera.right": mask(3)}
        | {"_mask_half": mask(1)},
    ),
}
every_view = pytest.mark.parametrize(("options", "item"), VIEWS.values(), ids=VIEWS)


def described(data):
    """key -> (shape, dtype), dotted; text is nested lists of str."""
    out = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out |= {f"{key}.{name}": what for name, what in described(value).items()}
        elif isinstance(value, torch.Tensor):
            out[key] = (tuple(value.shape), value.dtype)
        else:
            out[key] = (np.shape(value), type(np.ravel(value)[0].item()))
    return out


def numbers_and_steps(batches):
    return [(int(n), int(t)) for batch in batches for n, t in zip(batch["number"], batch["t"], strict=True)]


# Items and batches


@every_view
def test_an_item_has_the_keys_shapes_and_dtypes_of_its_view(recorded, options, item):
    assert described(recorded().dataset(**options)[0]) == item | META


@every_view
def test_a_batch_is_its_items_with_one_more_axis(recorded, options, item):
    batch = next(iter(recorded((3, 3)).dataloader(2, **options)))
    assert described(batch) == {key: ((2, *shape), dtype) for key, (shape, dtype) in (item | META).items()}


@every_view
def test_sample_gives_the_same_keys_shapes_and_dtypes_as_a_loader(recorded, options, item):
    buffer = recorded((3, 3))
    sampled, loaded = buffer.sample(2, **options), next(iter(buffer.dataloader(2, **options)))
    assert list(flat(sampled)) == list(flat(loaded))
    assert described(sampled) == described(loaded)


@every_view
def test_an_item_is_what_the_unshuffled_loader_gives_at_its_place(recorded, options, item):
    if "window_length" in options:
        options = {"view": Window(2)}  # a crop's place is chance
    buffer = recorded((3, 3))
    dataset, loader = buffer.dataset(**options), buffer.dataloader(1, **options)
    assert len(dataset) == len(loader) > 1
    for i, batch in enumerate(loader):
        assert_same({k: v[None] if hasattr(v, "dim") else [v] for k, v in flat(dataset[i]).items()}, flat(batch))


def test_fields_declared_nested_come_back_nested(recorded):
    batch = next(iter(recorded().dataloader(4, timestep_level=True)))
    assert set(batch["camera"]) == {"left", "right"}
    assert batch["camera"]["left"][:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    transition = next(iter(recorded(name="b").dataloader(4, n_steps=1, current_fields=["t"], next_fields=["camera"])))
    assert transition["next_camera"]["right"][:, 1].tolist() == [[0, 1], [0, 2], [0, 0], [1, 1]]


def test_text_comes_back_as_lists_of_str(recorded):
    buffer = recorded()
    batch = buffer.sample(3, timestep_level=True, return_indices=True)
    assert batch["text"] == [f"{n}:{t}" for n, t in batch["_indices"].tolist()]
    assert batch["name"] == [f"e{n}" for n, _ in batch["_indices"].tolist()]


@pytest.mark.parametrize("options", [{}, {"window_length": 6}, {"view": Window(6)}, {"view": Offsets(text=range(6))}])
def test_text_that_does_not_exist_is_empty(recorded, options):
    item = recorded((3, 6)).dataset(**options)
    batch = next(iter(DataLoader(item, batch_size=2, collate_fn=lambda batch: batch.data)))
    assert batch["text"][0] == ["0:0", "0:1", "0:2", "", "", ""]


def test_text_of_a_successor_that_does_not_exist_is_empty(recorded):
    item = recorded((3,)).dataset(n_steps=5, sequence_fields=["text"])[2]
    assert (item["next_text"], item["seq_text"]) == ("", ["0:2", "", "", "", ""])


def test_bfloat16_comes_back_as_torch_bfloat16(recorded):
    half = next(iter(recorded().dataloader(3, timestep_level=True)))["half"]
    assert half.dtype is torch.bfloat16
    assert half.tolist() == [0.5, 1.5, 2.5]
    assert recorded(name="b").get_all_data()["half"].dtype is torch.bfloat16


@every_view
def test_changing_a_batch_in_place_leaves_the_files_unchanged(recorded, options, item):
    """Fault 38."""
    buffer = recorded()
    files = {path: path.read_bytes() for path in buffer.folder.rglob("*.npy")}
    dataset = buffer.dataset(**options)
    anchors = [0, 1, 1]
    for batch in (buffer.sample(3, **options), dataset.__getitems__(anchors).data, dataset[0], buffer[0]):
        for tensor in flat(batch).values():
            if isinstance(tensor, torch.Tensor):
                tensor.logical_not_() if tensor.dtype is torch.bool else tensor.add_(1)
    assert {path: path.read_bytes() for path in buffer.folder.rglob("*.npy")} == files
    assert buffer.episode(1)["number"].tolist() == [1, 1, 1, 1]


# Gathered whole


def test_a_batch_is_gathered_once_however_large_it_is(recorded, monkeypatch):
    calls = []
    copy = get_inside("copy_rows")

    def copied(self, batch):
        columns = copy(self, batch)
        calls.extend(columns)
        return columns

    set_inside(monkeypatch, copy_rows=copied)
    dataset = recorded().dataset(timestep_level=True)
    for indices in ([0], list(range(18))):
        calls.clear()
        dataset.__getitems__(indices)
        assert sorted(calls) == sorted([*FIELDS, *META])


def test_the_items_of_a_batch_are_views_of_its_rows(recorded):
    batch = recorded().dataset(timestep_level=True).__getitems__([4, 2, 9])
    assert len(batch) == 3
    rows = batch.data["camera"]["left"]
    for i, item in enumerate(batch):
        left = item["camera"]["left"]
        assert left.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        assert left.data_ptr() == rows[i].data_ptr()
    assert [item["t"].item() for item in batch[1:]] == [2, 2]
    assert batch[-1]["number"] == 2
    with pytest.raises(IndexError, match="3"):
        batch[3]


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "crop"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_own_dataloader_with_default_collate_gives_our_batches(recorded, name, num_workers):
    options, buffer = VIEWS[name][0], recorded()
    theirs = DataLoader(buffer.dataset(**options), batch_size=4, num_workers=num_workers)
    ours = buffer.dataloader(4, **options)
    for a, b in zip(theirs, ours, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("subset", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(len(dataset)))])
def test_a_users_own_dataloader_gives_our_named_tuples_and_sequences_without_padding(recorded, num_workers, subset):
    options = {"ragged": True, "to_named_tuple": ("t", "camera", "text", "_lens", "task_id")}
    buffer = recorded()
    theirs = DataLoader(subset(buffer.dataset(**options)), batch_size=2, num_workers=num_workers)
    for got, want in zip(theirs, buffer.dataloader(2, **options), strict=True):
        assert got._fields == want._fields == ("t", "camera", "text", "lens", "task_id")
        assert (got.text, got.lens.tolist()) == (want.text, want.lens.tolist())
        for a, b in ((got.t, want.t), (got.camera["left"], want.camera["left"])):
            assert a.layout is torch.jagged
            assert all(map(torch.equal, a.unbind(), b.unbind()))


def test_items_are_named_tuples_and_of_their_own_length_for_a_collate_of_ones_own(recorded):
    dataset = recorded().dataset(ragged=True, to_named_tuple=("t", "text"))
    own = DataLoader(dataset, batch_size=4, collate_fn=lambda items: [(type(item), item) for item in items])
    ((of_batch, item), *_) = next(iter(own))
    assert of_batch is type(dataset[0])
    assert (
        (item.t.tolist(), item.text) == (dataset[0].t.tolist(), dataset[0].text) == ([0, 1, 2], ["0:0", "0:1", "0:2"])
    )


@pytest.mark.parametrize("options", [{"return_indices": True}, {"to_named_tuple": ("t", "camera", "name")}])
def test_the_default_collate_takes_items_that_were_gathered_apart(recorded, options):
    dataset = recorded().dataset(timestep_level=True, **options)
    apart, batch = dataset.__getitems__([0, 5])[:] + dataset.__getitems__([9])[:], dataset.__getitems__([0, 5, 9])
    for got in (default_collate(apart), next(iter(DataLoader(ConcatDataset([Subset(dataset, [0, 5, 9])]), 3)))):
        assert type(got) is type(batch.whole)
        pairs = (got, batch.whole) if isinstance(got, dict) else (got._asdict(), batch.whole._asdict())
        assert_same(*pairs)


@pytest.mark.parametrize("kind", [Prioritized(), Prioritized(weight_field="task_id"), True])
def test_what_draws_by_priority_gives_no_items_by_position(recorded, kind):
    buffer = recorded()
    dataset = buffer.dataset(timestep_level=True, prioritized=kind)
    for ask in (
        lambda: dataset[0],
        lambda: next(iter(DataLoader(dataset, batch_size=2))),
        lambda: buffer.batch([0], timestep_level=True, prioritized=kind),
    ):
        with pytest.raises(
            SchemaError, match=r"prioritized=Prioritized\(.*use buffer.dataloader\(.*or leave prioritized"
        ):
            ask()
    assert "_weights" in next(iter(buffer.dataloader(2, dataset=dataset)))


def test_a_users_own_dataloader_cannot_give_the_shares_of_weights(recorded):
    buffer = recorded()
    by_meta = buffer.dataset(timestep_level=True, weight_by="task_id")
    by_source = ConcatBuffer([buffer, buffer], weights=[1, 3]).dataset(timestep_level=True)
    for dataset, match in (
        (by_meta, "weight_by='task_id' says which .*shuffle=True"),
        (by_source, r"weights=\[1, 3\]"),
    ):
        with pytest.raises(SchemaError, match=match):
            next(iter(DataLoader(dataset, batch_size=2)))
        assert dataset[0]["t"] == 0  # which item it is was said
    assert buffer.batch([0, 1], timestep_level=True, weight_by="task_id")["number"].tolist() == [1, 1]
    assert set(next(iter(buffer.dataloader(8, dataset=by_meta, shuffle=True)))["task_id"].tolist()) == {1}


def test_a_users_own_shuffled_dataloader_covers_every_item_once(recorded):
    dataset = recorded().dataset(timestep_level=True)
    seen = numbers_and_steps(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2))
    assert sorted(seen) == [(n, t) for n, length in enumerate((3, 4, 5, 6)) for t in range(length)]


def test_an_item_that_does_not_exist_raises_index_error(recorded):
    dataset = recorded().dataset(timestep_level=True)
    assert dataset[-1]["t"] == 5
    with pytest.raises(IndexError, match="item 18: the dataset has 18"):
        dataset[18]


@pytest.mark.parametrize("position", [1.5, "1", slice(2), None])
def test_a_position_that_is_no_whole_number_is_refused(recorded, position):
    with pytest.raises(SchemaError, match=r"dataset: got .*, expected whole numbers"):
        recorded().dataset(timestep_level=True)[position]


def test_no_positions_give_a_batch_of_no_items(recorded):
    buffer = recorded()
    for both in (buffer, ConcatBuffer([buffer])):
        assert len(both.dataset(n_steps=2).__getitems__([])) == 0


@pytest.mark.parametrize("seed", [-1, "1", 1.5])
def test_a_seed_that_is_no_whole_number_is_refused(recorded, seed):
    buffer = recorded()
    with pytest.raises(SchemaError, match="seed: got"):
        buffer.sample(2, seed=seed)
    with pytest.raises(SchemaError, match="seed: got"):
        buffer.dataloader(2, shuffle=True, seed=seed)


def test_numbers_of_numpy_make_a_loader_whose_state_is_of_pythons(recorded):
    buffer = recorded()
    loader, plain = buffer.dataloader(np.int64(2), seed=np.int64(1)), buffer.dataloader(2, seed=1)
    next(iter(loader))
    next(iter(plain))
    assert json.loads(json.dumps(loader.state_dict())) == plain.state_dict()


# Names and devices


def test_to_named_tuple_gives_batches_in_that_order_and_drops_leading_underscores(recorded):
    loader = recorded().dataloader(2, return_mask=True, to_named_tuple=("t", "task_id", "_mask", "_lens", "camera"))
    t, task_id, mask_, lens, camera = batch = next(iter(loader))
    assert batch._fields == ("t", "task_id", "mask", "lens", "camera")
    assert t.shape == mask_.shape == (2, 4)
    assert (task_id.tolist(), lens.tolist(), set(camera)) == ([0, 1], [3, 4], {"left", "right"})
    assert batch.lens is lens


def test_a_key_that_is_a_word_of_pythons_gets_an_underscore_behind(recorded):
    options = {"n_steps": 2, "gamma": 0.5, "fieldname_map": {"next_t": "class"}}
    batch = recorded().sample(2, **options, to_named_tuple=("_return", "_discount", "class"))
    assert batch._fields == ("return_", "discount", "class_")
    assert pickle.loads(pickle.dumps(batch))._fields == batch._fields


@pytest.mark.parametrize(
    ("names", "renamed", "match"),
    [
        (("t", "reward"), {"reward": "_t"}, r"got 'reward'"),
        (("t", "_t"), {"reward": "_t"}, r"\['t', '_t'\] would all be 't'; leave all but one out"),
        (("t", "t"), {}, r"\['t', 't'\] would all be 't'"),
        (("a b",), {"t": "a b"}, "'a b' is no name that a tuple can have; rename it by fieldname_map"),
        (("_1",), {"t": "_1"}, "'_1' is no name that a tuple can have"),
    ],
)
def test_a_key_without_a_name_of_its_own_in_a_tuple_is_refused(recorded, names, renamed, match):
    with pytest.raises(SchemaError, match=f"to_named_tuple: {match}"):
        recorded().dataset(timestep_level=True, to_named_tuple=names, fieldname_map=renamed)


def test_fieldname_map_renames_keys_of_items_batches_and_named_tuples(recorded):
    buffer = recorded()
    renamed = {"seq_reward": "rewards", "next_camera.left": "next_image", "task_id": "goal"}
    options = {"n_steps": 2, "sequence_fields": ["reward"], "next_fields": ["camera.left"], "fieldname_map": renamed}
    assert {"rewards", "next_image", "goal"} <= set(buffer.dataset(**options)[0])
    batch = buffer.sample(5, **options, to_named_tuple=("rewards", "next_image", "goal"))
    assert [tuple(value.shape) for value in batch] == [(5, 2), (5, 2, 2), (5,)]


def test_device_moves_every_tensor_of_a_batch(recorded):
    buffer = recorded()
    for device in ("cpu", torch.device("meta")):
        batch = next(iter(buffer.dataloader(2, n_steps=2, device=device)))
        named = buffer.sample(2, timestep_level=True, device=device, to_named_tuple=("t", "camera", "text"))
        everything = buffer.get_all_data(device=device)
        for data in (batch, named._asdict(), everything):
            tensors = [value for value in flat(data).values() if isinstance(value, torch.Tensor)]
            assert {tensor.device.type for tensor in tensors} == {torch.device(device).type}
        assert named.text[0] in {f"{n}:{t}" for n in range(4) for t in range(6)}


def third_fails(batch):
    if 2 in batch["_index"]:
        raise ZeroDivisionError("no good")
    return batch


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"prefetch": 2}, {"prefetch": 2, "device": "cpu"}])
def test_after_a_batch_that_fails_the_epoch_goes_on_and_counts_it(recorded, options, workers):
    options = {"transform": third_fails, "return_indices": True, "num_workers": workers, **options}
    batches = iter(loader := recorded([2] * 6).dataloader(1, **options))
    served = [int(next(batches)["_index"]) for _ in range(2)]
    with pytest.raises(ZeroDivisionError, match="no good"):
        next(batches)
    assert loader.state_dict()["delivered"] == 3
    assert [*served, *(int(batch["_index"]) for batch in batches)] == [0, 1, 3, 4, 5]


# Nothing to read


@pytest.mark.parametrize("read", ["dataset", "dataloader", "sample"])
@pytest.mark.parametrize(
    ("lengths", "options", "why"),
    [
        ((), {}, "it is empty"),
        ((3, 4), {"filter_meta": {"task_id": 7}}, "none of 2 episodes has an item"),
        ((3, 4), {"timestep_level": True, "filter_fields": {"t": 9}}, "none of 2 episodes has an item"),
        ((3, 4), {"view": Window(9, boundary="drop")}, "none of 2 episodes has an item"),
        ((3, 4), {"min_episode_len": 5}, "none of 2 episodes has an item"),
    ],
)
def test_nothing_to_read_raises_not_enough_data(recorded, read, lengths, options, why):
    arguments = () if read == "dataset" else (2,)
    with pytest.raises(NotEnoughDataError, match=why) as caught:
        getattr(recorded(lengths), read)(*arguments, **options)
    assert caught.value.episodes == len(lengths)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_another_order_is_refused_with_the_way_to_get_it(recorded, name):
    with pytest.raises(SchemaError, match=f"{name}: the order is the library's"):
        recorded().dataloader(2, **{name: [0]})


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_a_batch_size_that_is_no_positive_whole_number_is_refused(recorded, batch_size):
    with pytest.raises(SchemaError, match="batch_size: got"):
        recorded().dataloader(batch_size)


def test_a_loader_over_a_dataset_refuses_options_that_it_would_ignore(recorded):
    buffer = recorded()
    dataset = buffer.dataset(view=NStep(2))
    assert "next_t" in next(iter(buffer.dataloader(2, dataset=dataset)))
    with pytest.raises(SchemaError, match="timestep_level"):
        buffer.dataloader(2, dataset=dataset, timestep_level=True)


def test_an_unknown_option_of_a_loader_names_the_closest(recorded):
    with pytest.raises(SchemaError, match="did you mean 'timestep_level'"):
        recorded().dataloader(2, timestep_levle=True)


@pytest.mark.parametrize(
    "options", [{"view": Window(3)}, {"view": Trajectory()}, {"n_steps": 2}, {"timestep_level": True}], ids=repr
)
def test_what_is_written_into_a_batch_is_not_in_the_anchors_that_it_was_read_of(recorded, options):
    reader = recorded().dataset(**options, return_indices=True).reader
    anchors = reader.index().locate(np.arange(4))
    weight, probability = np.full(4, 0.5, np.float32), np.full(4, 0.25)
    anchors = anchors._replace(weight=weight, probability=probability)
    first = reader.read(anchors)
    before = {key: values.copy() for key, values in first.items()}
    for values in first.values():
        values[...] = values.dtype.type(7)
    again = reader.read(anchors)
    for key, values in again.items():
        np.testing.assert_array_equal(values, before[key], err_msg=key)
