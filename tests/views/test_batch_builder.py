"""Batches, however they are drawn: each is what its items are alone, and is its own."""

import io
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import assert_same, flat, record_episode
from damage import rewrite_record
from inside import get_inside, place_of_row, set_inside, slot_of, storage_of

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Offsets,
    ReplayBuffer,
    SchemaError,
    StaleEpisodeError,
    Trajectory,
    View,
    Window,
)

LENGTHS = (3, 9, 12, 1, 7, 12, 5, 11)
VIEWS = {
    "trajectory": {"return_mask": True},
    "trajectory with final observation": {"view": Trajectory(final_observation=True, return_mask=True)},
    "trajectory padded to max_timesteps": {"slice_by_episode_len": False},
    "timestep": {"timestep_level": True},
    "n-step": {"n_steps": 3, "sequence_fields": ["reward", "text"]},
    "window": {"view": Window(5, pad_before=2)},
    "window by edge": {"view": Window(5, padding="edge")},
    "window that fits": {"view": Window(4, boundary="drop")},
    "offsets": {"view": Offsets(observation=(-1, 0), camera=range(3), half=(0, 2), padding="default")},
}
STEPS = {"timestep_level": True, "return_indices": True}
every_view = pytest.mark.parametrize("options", VIEWS.values(), ids=VIEWS)


@pytest.fixture(params=[1 << 20, 2000], ids=["many together", "a few together"])
def together(request, monkeypatch):
    """How many bytes of batches are read as one."""
    set_inside(monkeypatch, sampler_bytes=request.param)


def tensors(batch):
    return {key: value for key, value in flat(batch).items() if isinstance(value, torch.Tensor)}


def indices(batch):
    """What names each item of a batch."""
    return [tuple(np.ravel(index)) for index in batch["_index" if "_index" in batch else "_indices"].numpy()]


@every_view
@pytest.mark.parametrize("both", [False, True])
def test_each_batch_of_a_loader_is_what_its_items_are_alone(recorded, options, both):
    buffer = recorded(LENGTHS)
    if both:
        buffer = ConcatBuffer([buffer, recorded(LENGTHS[1:], name="other")])
    dataset, size = buffer.dataset(return_indices=True, **options), 3
    for i, batch in enumerate(buffer.dataloader(size, return_indices=True, **options)):
        positions = list(range(i * size, min((i + 1) * size, len(dataset))))
        assert_same(batch, dataset.__getitems__(positions).data)


@every_view
def test_each_batch_of_sample_is_what_its_items_are_alone(recorded, together, options):
    buffer = recorded(LENGTHS)
    dataset = buffer.dataset(return_indices=True, **options)
    places = {index: i for i, index in enumerate(indices(dataset.__getitems__(list(range(len(dataset)))).data))}
    for _ in range(40):
        batch = buffer.sample(3, return_indices=True, **options)
        assert_same(batch, dataset.__getitems__([places[index] for index in indices(batch)]).data)


@every_view
def test_batches_share_no_memory_and_a_saved_one_is_no_larger_than_itself(recorded, together, options):
    buffer, held = recorded(LENGTHS), []
    for batch in [*buffer.dataloader(2, **options), *(buffer.sample(2, **options) for _ in range(20))]:
        for tensor in tensors(batch).values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            saved = io.BytesIO()
            torch.save(tensor, saved)
            assert len(saved.getvalue()) < 2000 + tensor.nbytes
            held.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor))
    held.sort(key=lambda each: each[:2])
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(held))


@every_view
def test_changing_a_batch_changes_none_that_comes_later(recorded, options):
    buffer = recorded(LENGTHS)
    expected = list(buffer.dataloader(2, **options))
    for batch, untouched in zip(buffer.dataloader(2, **options), expected, strict=True):
        assert_same(batch, untouched)
        for tensor in tensors(batch).values():
            tensor.fill_(1)


def test_anchors_that_are_read_twice_give_batches_of_their_own(recorded):
    buffer = recorded(LENGTHS)
    dataset = buffer.dataset(timestep_level=True)
    for anchors in list(buffer.dataloader(4, dataset=dataset, shuffle=True, seed=0).batch_sampler)[::-1]:
        once = dataset.__getitems__(anchors).data
        kept = {key: value.clone() for key, value in tensors(once).items()}
        for tensor in tensors(once).values():
            tensor.zero_()
        again = tensors(dataset.__getitems__(anchors).data)
        assert_same(again, kept)


@every_view
@pytest.mark.parametrize("draw", ["loader", "sample"])
def test_what_changes_between_batches_is_served_as_it_is_then(recorded, together, options, draw):
    buffer = recorded(LENGTHS, circular=True)
    options = options | {"return_indices": True}
    batches = (
        iter(buffer.dataloader(2, **options)) if draw == "loader" else (buffer.sample(2, **options) for _ in range(30))
    )
    for number, batch in enumerate(batches):
        assert set(batch["task_id"].tolist()) <= ({0, 1} if not number else {number})
        for position in range(len(buffer)):
            buffer.update(position, task_id=number + 1)


def test_a_batch_may_be_as_large_as_one_alone_however_many_are_read_together(recorded, monkeypatch):
    buffer = recorded(LENGTHS)
    options = {"view": Window(5), "filter_meta": {"task_id": {0, 1}}}
    set_inside(monkeypatch, max_batch_bytes=4 * 5 * get_inside("index_bytes"))
    for _ in range(20):
        assert len(buffer.sample(4, **options)["t"]) == 4
    assert sum(len(batch["t"]) for batch in buffer.dataloader(4, **options)) == sum(LENGTHS)


@every_view
@pytest.mark.parametrize("both", [False, True])
def test_a_batch_of_no_items_asks_the_disk_for_nothing(recorded, options, both, monkeypatch):
    buffer = recorded(LENGTHS)
    if both:
        buffer = ConcatBuffer([buffer, recorded(LENGTHS, name="other")])
    expected = buffer.batch_spec(**options)
    set_inside(monkeypatch, disk_took=lambda self, seconds: None)  # it stays slow, as it begins
    assert buffer.batch_spec(**options) == expected


def test_threads_draw_batches_of_one_buffer(tmp_path):
    with ReplayBuffer(tmp_path, 50, 40, {"x": "int"}) as buffer:
        for number in range(50):
            buffer.store_episode(x=np.arange(40) + 1000 * number)
        options = {"timestep_level": True, "return_indices": True}

        def draw(_):
            batch = buffer.sample(64, **options)
            return bool((batch["x"] == batch["_indices"][:, 0] * 1000 + batch["_indices"][:, 1]).all())

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(4) as pool:
                assert all(pool.map(draw, range(2000)))
        finally:
            sys.setswitchinterval(interval)


def test_a_batch_that_was_drawn_before_a_change_is_read_as_it_is_then(tmp_path):
    with ReplayBuffer(tmp_path, 4, 8, {"x": "int"}) as buffer:
        for number in range(4):
            buffer.store_episode(x=np.full(8, number))
        loader = iter(buffer.dataloader(4, timestep_level=True, shuffle=True, seed=0, return_indices=True))
        for _ in range(3):
            next(loader)
        buffer.update(None, x=np.full((4, 8), 7))
        assert set(next(loader)["x"].tolist()) == {7}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    "remove", [lambda ring: ring.delete([0, 1]), lambda ring: ring.clear()], ids=["delete", "clear"]
)
def test_what_is_removed_after_it_was_drawn_is_not_served_though_the_table_was_read_again(recorded, remove, both):
    """Its rows and its generation stay as they are."""
    ring = recorded([8] * 4)
    buffer = ConcatBuffer([ring, recorded([8] * 4, name="other")]) if both else ring
    loader = iter(buffer.dataloader(1, timestep_level=True, shuffle=True, seed=0, return_indices=True))
    for _ in range(10):
        next(loader)
    remove(ring)
    if not len(buffer):
        record_episode(ring, 4, 8)
    buffer.refresh()
    served = {tuple(index) for batch in loader for index in batch["_indices"][:, :-1].tolist()}
    gone = {(0, serial) if both else (serial,) for serial in range(4)} - {(*[0] * both, int(n)) for n in ring.serials}
    assert served and not served & gone


def test_what_is_being_rewritten_when_it_is_copied_is_looked_at_again(recorded):
    """The change counter moves when that is done; until then nothing but the generation tells."""
    buffer = recorded(LENGTHS)
    dataset = buffer.dataset(timestep_level=True, on_stale="raise")
    parts = list(buffer.dataloader(4, dataset=dataset).batch_sampler)
    assert all(len(dataset.__getitems__(part)) for part in parts)
    slot = int(parts[-1].anchors.slot[0])
    rewrite_record(buffer.folder, slot, generation=3)
    with pytest.raises(StaleEpisodeError, match="were overwritten"):
        dataset.__getitems__(parts[-1])


def test_an_episode_that_fails_its_checksums_is_drawn_again_though_it_holds_what_is_no_text(recorded):
    recorded([4] * 9, max_episodes=9, max_timesteps=4).close()
    folder = recorded((), max_episodes=9, max_timesteps=4).folder
    path, offset = place_of_row(folder, "text", 5)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 4)
    buffer = ReplayBuffer.from_folder(folder, read_only=True, verify="read")
    batches = buffer.dataloader(4, timestep_level=True, shuffle=True, seed=0, return_indices=True)
    assert {int(serial) for batch in batches for serial in batch["_indices"][:, 0]} == set(range(9)) - {5}


@dataclass(frozen=True)
class Every(View):
    """The fields, and which of their timesteps exist, at a range of offsets."""

    offsets: range

    def keys(self, schema):
        return ["t", "seen", "_mask", "_masked"]

    def anchors(self, schema, episodes, has_final, terminated):
        return episodes

    def cut(self, builder):
        builder.put(["t"], self.offsets)
        builder.batch["seen"] = builder.look("t", self.offsets)
        builder.batch["_mask"] = builder.exists(self.offsets)
        builder.put_mask("_masked", self.offsets)


@pytest.mark.parametrize("offsets", [range(4), range(0, 6, 2), range(3, -3, -2), range(-4, 1, 4), range(0)], ids=str)
def test_a_range_of_offsets_of_any_step_gives_the_timesteps_that_it_names(tmp_path, offsets):
    with ReplayBuffer(tmp_path, 2, 10, {"t": "int"}) as buffer:
        buffer.store_episode(t=np.arange(10, 17))
        batch = buffer.batch(view=Every(offsets))
    wanted = np.arange(7)[:, None] + np.array(offsets, np.int64)
    exists = (wanted >= 0) & (wanted < 7)
    np.testing.assert_array_equal(batch["t"], np.where(exists, wanted + 10, 0))
    np.testing.assert_array_equal(batch["seen"], batch["t"])
    np.testing.assert_array_equal(batch["_mask"], exists)
    np.testing.assert_array_equal(batch["_masked"], exists)


def test_an_episode_that_is_found_damaged_between_two_batches_is_not_drawn_any_more(recorded):
    buffer = recorded([8] * 6)
    seen = {int(serial) for _ in range(8) for serial in buffer.sample(16, **STEPS)["_indices"][:, 0]}
    assert seen == set(range(6))
    storage_of(buffer).void([(slot_of(buffer.folder, 2), "has been damaged")])
    assert {int(serial) for _ in range(8) for serial in buffer.sample(16, **STEPS)["_indices"][:, 0]} == seen - {2}


@pytest.mark.parametrize("change", [True, False])
def test_shares_are_exact_though_anchors_are_drawn_ahead(recorded, change):
    """Also of batches that do not divide them: what was drawn and not given is not counted."""
    first, second = recorded([8] * 4, circular=True), recorded([8] * 4, name="other")
    buffer, given = ConcatBuffer([first, second], weights=[1, 2]), []
    for number in range(60):
        given += buffer.sample(4, **STEPS)["_indices"][:, 0].tolist()
        if change and number % 7 == 6:
            record_episode(first, number, 8)
    assert given.count(0) == len(given) // 3


def test_the_same_seed_gives_the_same_batches_however_many_are_drawn_ahead(recorded):
    path, batches = recorded(LENGTHS, name="other").folder, []
    for _ in range(2):
        torch.manual_seed(3)
        buffer = ReplayBuffer.from_folder(path, read_only=True)
        batches.append([buffer.sample(4, **STEPS)["_indices"].tolist() for _ in range(20)])
    assert batches[0] == batches[1]


def test_what_cannot_be_read_is_told_by_its_own_batch_and_takes_no_other_with_it(recorded, monkeypatch):
    buffer = recorded([8] * 6)
    read, given, refused = get_inside("read_batch"), [], 0

    def read_without_3(self, drawn):
        anchors = getattr(drawn, "anchors", drawn)
        if 3 in anchors.serial:
            raise CorruptBufferError("3 is damaged")
        return read(self, drawn)

    set_inside(monkeypatch, read_batch=read_without_3)
    for _ in range(400):
        try:
            given += buffer.sample(2, **STEPS)["_indices"][:, 0].tolist()
        except CorruptBufferError:
            refused += 1
    assert 400 * 11 / 36 * 0.7 < refused < 400 * 11 / 36 * 1.3
    assert set(given) == set(range(6)) - {3}


def test_shares_are_exact_over_threads(recorded, monkeypatch):
    read = get_inside("read_batch")
    set_inside(monkeypatch, samplers_kept=3, read_batch=lambda self, drawn: time.sleep(0.001) or read(self, drawn))
    buffer = ConcatBuffer([recorded([8] * 4), recorded([8] * 4, name="other")], weights=[1, 2])

    def draw(_):
        return sum(int(buffer.sample(1, **STEPS)["_indices"][0, 0] == 0) for _ in range(150))

    with ThreadPoolExecutor(8) as pool:  # they read at a time
        assert sum(pool.map(draw, range(8))) == 8 * 150 // 3


def test_a_reward_that_is_looked_at_takes_memory_to_be_found_too(recorded, monkeypatch):
    buffer = recorded([8] * 4)
    set_inside(monkeypatch, max_batch_bytes=4 * 5 * get_inside("index_bytes"))
    options = {"reward": "t", "gamma": 0.9, "current_fields": ["t"], "next_fields": [], "terminated": None}
    assert len(buffer.batch(range(4), n_steps=5, **options)["_return"]) == 4
    with pytest.raises(SchemaError, match="field 't': a batch of 4 items takes"):
        buffer.batch(range(4), n_steps=6, **options)
