"""Episodes that are overwritten, updated, cleared or deleted between drawing and reading, or during the copy."""

import os
import pickle
import sys

import numpy as np
import pytest
from conftest import flat
from inside import around, get_inside, place_of, set_inside
from torch.utils.data import DataLoader

from memmap_buffer import ConcatBuffer, NotEnoughDataError, Offsets, StaleEpisodeError, Trajectory, Window

LENGTHS = (5, 5, 5, 5)
VIEWS = {
    "trajectory": {},
    "timestep": {"timestep_level": True},
    "n-step": {"n_steps": 3, "sequence_fields": ["number"], "current_fields": ["number", "t", "camera"]},
    "crop": {"window_length": 3},
    "window": {"view": Window(3)},
    "offsets": {"view": Offsets(number=(-1, 0, 1), t=(0,), camera=(0, 1))},
}


class Scene:
    """A ring of four episodes that is full, and what may happen to them: afterwards `live` may be read."""

    def __init__(self, buffer, record):
        self.buffer, self.record, self.next = buffer, record, len(LENGTHS)

    def publish(self, count):
        for _ in range(count):
            self.record(self.buffer, self.next, 5)
            self.next += 1

    def overwrite(self):
        self.publish(7)  # every slot, the spare one too

    def clear(self):
        self.buffer.clear()
        self.publish(1)

    def delete(self):
        self.buffer.delete([0, 1, 2])

    @property
    def live(self):
        return set(self.buffer.serials.tolist())


@pytest.fixture
def scene(recorded, record):
    return Scene(recorded(LENGTHS, max_episodes=4, circular=True), record)


def drawn(buffer, **options):
    """A dataset and the anchors of all its items, as the sampler of a loader draws them in advance."""
    dataset = buffer.dataset(return_indices=True, **options)
    (anchors,) = buffer.dataloader(1000, dataset=dataset).batch_sampler
    return dataset, anchors


def read(dataset, anchors):
    return flat(dataset.__getitems__(anchors).data)


def anchors_table(anchors):
    """(B, 2) serials and timesteps."""
    return np.stack([anchors.anchors.serial, anchors.anchors.t], axis=1)


def serials(batch):
    return batch["_index"].tolist() if "_index" in batch else batch["_indices"][:, -2].tolist()


def assert_of_one_episode(batch):
    """Each row holds the number of the episode that its index names, in every field, or padding."""
    for i, serial in enumerate(serials(batch)):
        numbers = {key: batch[key][i] for key in ("number", "next_number", "seq_number") if key in batch}
        numbers |= {"camera.left": batch["camera.left"][i][..., 0, 0]} if "camera.left" in batch else {}
        for key, found in numbers.items():
            assert set(np.unique(found.numpy()).tolist()) <= {serial, 0}, key
        assert batch["name"][i] == f"e{serial}"


def test_an_undisturbed_batch_is_what_was_drawn(scene):
    batch = read(*drawn(scene.buffer, timestep_level=True))
    assert serials(batch) == [serial for serial in range(4) for _ in range(5)]
    assert_of_one_episode(batch)


@pytest.mark.parametrize("what", ["overwrite", "clear", "delete"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_gone_is_drawn_again_from_episodes_that_live(scene, in_the_middle, view, when, what):
    """Faults 28 and 30."""
    dataset, anchors = drawn(scene.buffer, **VIEWS[view])
    if when == "before":
        getattr(scene, what)()
    else:
        in_the_middle(getattr(scene, what))
    batch = read(dataset, anchors)
    assert len(serials(batch)) == len(anchors)
    assert set(serials(batch)) <= scene.live
    assert_of_one_episode(batch)


@pytest.mark.parametrize("what", ["overwrite", "clear", "delete"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_what_is_gone_raises_where_that_was_asked_for(scene, in_the_middle, when, what):
    dataset, anchors = drawn(scene.buffer, timestep_level=True, on_stale="raise")
    if when == "before":
        getattr(scene, what)()
    else:
        in_the_middle(getattr(scene, what))
    with pytest.raises(StaleEpisodeError, match="were overwritten or cleared") as caught:
        read(dataset, anchors)
    assert caught.value.serials == sorted({0, 1, 2, 3} - scene.live)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("view", VIEWS)
def test_without_the_check_rows_of_other_episodes_are_served(scene, monkeypatch, in_the_middle, view):
    """The guard of the tests above: they can see wrong rows."""
    dataset, anchors = drawn(scene.buffer, **VIEWS[view])
    set_inside(monkeypatch, unchanged=lambda self: np.ones(self.anchors.size, bool))
    in_the_middle(scene.overwrite)
    with pytest.raises(AssertionError, match=r"."):
        assert_of_one_episode(read(dataset, anchors))


@pytest.mark.parametrize("what", ["overwrite", "delete"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_window_that_runs_on_is_drawn_again_where_any_of_its_episodes_is_gone(scene, in_the_middle, when, what):
    dataset, anchors = drawn(scene.buffer, view=Window(7, boundary="continue"))

    def delete():
        scene.buffer.delete([2])  # windows from episode 0 stay, those from 1 went on in it

    happen = scene.overwrite if what == "overwrite" else delete
    happen() if when == "before" else in_the_middle(happen)
    batch = read(dataset, anchors)
    assert len(batch["number"]) == len(anchors) == 14
    assert batch["_mask"].all() and batch["number"][:, 0].tolist() == serials(batch)
    assert set(batch["number"].flatten().tolist()) <= scene.live
    if what == "delete":
        assert (batch["_indices"][:4] == anchors_table(anchors)[:4]).all()
    for numbers, t, first, start in zip(batch["number"], batch["t"], batch["_is_first"], batch["_start"], strict=True):
        new = np.append(True, np.diff(numbers.numpy()) > 0)
        assert new.tolist() == first.tolist()
        assert t.tolist() == [
            start + k if not new[1 : k + 1].any() else k - np.flatnonzero(new[: k + 1])[-1] for k in range(7)
        ]


def test_a_window_that_runs_on_raises_where_a_later_episode_is_gone(scene):
    dataset, anchors = drawn(scene.buffer, view=Window(7, boundary="continue"), on_stale="raise")
    scene.buffer.delete([2])
    kept = anchors.anchors.where(slice(4))
    assert serials(read(dataset, kept)) == [0] * 4
    with pytest.raises(StaleEpisodeError, match="were overwritten or cleared"):
        read(dataset, anchors)


@pytest.mark.parametrize("on_stale", ["redraw", "raise"])
def test_an_episode_that_lives_is_served_though_its_neighbour_is_gone(scene, on_stale):
    dataset, anchors = drawn(scene.buffer, timestep_level=True, on_stale=on_stale)
    scene.publish(2)  # 0 and 1 retire; 0 is overwritten
    kept = anchors.anchors.where(anchors.anchors.serial >= 2)
    assert serials(read(dataset, kept)) == kept.serial.tolist()


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_an_updated_episode_is_served_whole_old_or_new_and_none_of_its_items_is_lost(scene, in_the_middle, when):
    dataset, anchors = drawn(scene.buffer, timestep_level=True)
    scene.buffer.dataset()  # another reader does not matter

    def update():
        scene.buffer.update(1, number=np.full(5, 101), reward=np.full(5, 101.0))

    if when == "before":
        update()
    else:
        in_the_middle(update)
    batch = read(dataset, anchors)
    assert ((batch["number"] == 101) == (batch["reward"] == 101)).all()
    assert batch["_indices"].tolist() == [[serial, t] for serial in range(4) for t in range(5)]
    assert batch["number"].tolist() == [0] * 5 + [101] * 5 + [2] * 5 + [3] * 5


def test_one_loader_epoch_covers_every_item_though_episodes_are_updated_meanwhile(scene):
    seen = []
    for batch in scene.buffer.dataloader(3, timestep_level=True, return_indices=True):
        seen += batch["_indices"].tolist()
        for serial in batch["_indices"][:, 0].unique().tolist():
            scene.buffer.update(serial, reward=[0.0])
    assert seen == [[serial, t] for serial in range(4) for t in range(5)]


def test_a_ring_that_turns_during_many_copies_costs_a_batch_time_but_does_not_end_it(scene, in_the_middle):
    dataset, anchors = drawn(scene.buffer, timestep_level=True, fields=["number"])
    in_the_middle(scene.overwrite, times=30)  # a copy each
    batch = read(dataset, anchors)
    assert len(serials(batch)) == len(anchors)
    assert set(serials(batch)) <= scene.live
    assert_of_one_episode(batch)


@pytest.mark.parametrize("view", VIEWS)
def test_what_was_copied_and_checked_stays_whatever_becomes_of_the_rest(scene, monkeypatch, view):
    """The rest is copied alone: an episode that was right in the first try may be gone by the second."""
    dataset, anchors = drawn(scene.buffer, **VIEWS[view])
    kept = anchors.anchors.serial >= 2
    scene.publish(2)  # 0 is overwritten, 1 retired
    tries, build = [], get_inside("build_batch")

    def built(self, anchors, *since):
        tries.append(anchors.serial.tolist())
        if len(tries) == 2:
            scene.overwrite()
        return build(self, anchors, *since)

    set_inside(monkeypatch, build_batch=built)
    batch = read(dataset, anchors)
    assert np.array(serials(batch))[kept].tolist() == anchors.anchors.serial[kept].tolist()
    assert not set(np.array(serials(batch))[~kept].tolist()) & {0, 1, 2, 3}
    assert [len(tried) for tried in tries[1:3]] == [np.count_nonzero(~kept)] * 2
    assert_of_one_episode(batch)


@pytest.mark.parametrize("longest_is_gone", [True, False])
def test_a_batch_drawn_in_several_tries_is_as_long_as_its_longest_episode(recorded, record, longest_is_gone):
    buffer = recorded((9, 2, 3, 4) if longest_is_gone else (1, 2, 9, 4), max_episodes=4, circular=True)
    dataset, anchors = drawn(buffer, view=Trajectory(return_mask=True, final_observation=True))
    for number, length in ((4, 6), (5, 7)):
        record(buffer, number, length)
    batch = read(dataset, anchors)
    lens, longest = batch["_lens"], int(batch["_lens"].max())
    assert (longest == 9) != longest_is_gone
    assert batch["number"].shape == batch["_mask"].shape == (4, longest)
    for i, serial in enumerate(serials(batch)):
        alone = buffer.episode(buffer.serials.tolist().index(serial))
        assert batch["_mask"][i].tolist() == [t < lens[i] for t in range(longest)]
        np.testing.assert_array_equal(batch["number"][i][: lens[i]], alone["number"])
        np.testing.assert_array_equal(batch["camera.left"][i][: lens[i]], alone["camera"]["left"][: lens[i]])
        assert not batch["number"][i][lens[i] :].any() and not batch["camera.left"][i][lens[i] + 1 :].any()
        assert batch["name"][i] == f"e{serial}"


def test_a_reader_that_never_reads_a_thing_raises_in_the_end(scene, monkeypatch):
    monkeypatch.setattr("memmap_buffer.loading.batch_reader.PATIENCE", 0.05)
    set_inside(monkeypatch, unchanged=lambda self: np.zeros(self.anchors.size, bool))
    dataset, anchors = drawn(scene.buffer, timestep_level=True)
    with pytest.raises(StaleEpisodeError, match="make the ring larger"):
        read(dataset, anchors)


def test_nothing_left_to_draw_from_raises_not_enough_data(scene):
    dataset, anchors = drawn(scene.buffer, timestep_level=True)
    scene.buffer.clear()
    with pytest.raises(NotEnoughDataError, match="it is empty"):
        read(dataset, anchors)


def test_an_item_drawn_again_passes_the_filters_too(scene):
    dataset, anchors = drawn(scene.buffer, timestep_level=True, filter_meta={"task_id": 1}, filter_fields={"t": {2, 3}})
    scene.overwrite()
    batch = read(dataset, anchors)
    assert set(serials(batch)) <= scene.live
    assert set(batch["task_id"].tolist()) == {1}
    assert set(batch["t"].tolist()) <= {2, 3}


def test_the_items_of_a_dataset_keep_their_places_until_it_is_refreshed(scene):
    dataset = scene.buffer.dataset(timestep_level=True, return_indices=True)
    kept = [[serial, t] for serial in (1, 2, 3) for t in range(5)]
    scene.publish(2)  # 4 and 5; 0 is gone, 1 retired
    own = [item for batch in DataLoader(dataset, batch_size=4) for item in batch["_indices"].tolist()]
    assert len(own) == len(dataset) == 20
    assert own[10:] == kept[5:]
    dataset.refresh()
    assert [dataset[i]["_indices"].tolist() for i in range(10)] == kept[5:]


def test_an_index_that_another_thread_makes_of_fewer_episodes_hides_none(recorded, record, monkeypatch):
    """At each line of `BatchReader.index` of that thread, others get the items of now."""
    buffer, late = recorded(LENGTHS, max_episodes=9), [len(LENGTHS)]

    def look(*_):
        assert late or serials(buffer.batch(return_indices=True)) == buffer.serials.tolist()
        return look

    def overtake():
        if late:
            record(buffer, late.pop(), 5)
            look()

    around(monkeypatch, *place_of("make_index"), after=overtake)
    code = get_inside("index_of_reader").__code__
    sys.settrace(lambda frame, *_: look if frame.f_code is code else None)
    try:
        buffer.batch(return_indices=True)
    finally:
        sys.settrace(None)
    assert len(buffer) == 5


def test_sample_and_new_epochs_never_meet_what_is_gone(scene):
    options = {"timestep_level": True, "return_indices": True, "on_stale": "raise"}
    loader = scene.buffer.dataloader(64, **options)
    for _ in range(3):
        scene.overwrite()
        (epoch,) = loader
        assert set(serials(flat(epoch))) == scene.live
        assert set(serials(flat(scene.buffer.sample(64, **options)))) <= scene.live
        scene.clear()


# Several folders


@pytest.mark.parametrize("when", ["before", "in the middle"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.5]])
def test_of_several_folders_what_is_gone_is_drawn_again(scene, recorded, in_the_middle, when, weights):
    other = recorded(LENGTHS, name="other")
    both = ConcatBuffer([scene.buffer, other], weights=weights)
    dataset = both.dataset(timestep_level=True, return_indices=True)
    (anchors,) = both.dataloader(40, dataset=dataset).batch_sampler
    if when == "before":
        scene.overwrite()
    else:
        in_the_middle(scene.overwrite)
    batch = read(dataset, anchors)
    assert_of_one_episode(batch)
    of_ring = batch["_indices"][:, 0] == 0
    assert set(batch["_indices"][of_ring, 1].tolist()) <= scene.live
    kept = anchors.anchors.folder == 1
    assert batch["_indices"][kept].tolist() == [[1, serial, t] for serial in range(4) for t in range(5)]
    if weights:
        assert int(of_ring.sum()) == 20  # the shares of a batch stay exact


# Callable filters, which stay in the main process: a worker knows what they chose, not why


def test_in_a_worker_what_a_callable_did_not_choose_is_never_drawn(scene):
    dataset, anchors = drawn(scene.buffer, timestep_level=True, filter_meta={"task_id": lambda column: column == 0})
    worker = pickle.loads(pickle.dumps(dataset))
    scene.publish(2)  # 4 and 5; 0 is gone, so 2 is all that is left of what was chosen
    batch = read(worker, anchors.anchors)
    assert set(serials(batch)) == {2}
    assert_of_one_episode(batch)


def test_in_a_worker_where_all_that_a_callable_chose_is_gone_not_enough_data_is_raised(scene):
    dataset, anchors = drawn(scene.buffer, timestep_level=True, filter_meta={"task_id": lambda column: column == 0})
    worker = pickle.loads(pickle.dumps(dataset))
    scene.overwrite()
    with pytest.raises(NotEnoughDataError, match="none of 4 episodes has an item"):
        read(worker, anchors.anchors)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_callable_filter_is_not_called_in_a_forked_worker_that_draws_again(scene):
    here = os.getpid()

    def in_this_process(column):
        assert os.getpid() == here, "a filter was evaluated in a worker"
        return column == 0

    dataset, anchors = drawn(scene.buffer, timestep_level=True, filter_meta={"task_id": in_this_process})
    scene.publish(2)
    forked = DataLoader(dataset, batch_sampler=[anchors], num_workers=1, multiprocessing_context="fork")
    (batch,) = forked
    assert set(batch["number"].tolist()) == {2}
