"""What every buffer can be asked: its counts, whole episodes, everything at once, and single batches."""

import numpy as np
import pytest
import torch
from conftest import assert_same, flat
from inside import samplers_of

from memmap_buffer import ConcatBuffer, NotEnoughDataError, Offsets, ReplayBuffer, SchemaError, StaleEpisodeError


@pytest.fixture
def ring(recorded):
    """Four episodes have been; 1, 2 and 3 are left."""
    return recorded(max_episodes=3, circular=True)


@pytest.fixture
def both(recorded, record):
    """Two folders read as one: episodes 0 and 1, then 7."""
    first, second = recorded((3, 4), name="a"), recorded((), name="b")
    record(second, 7, 5)
    return ConcatBuffer([first, second])


# Counts


def test_counts_are_of_the_visible_episodes_oldest_first(ring):
    assert (len(ring), ring.num_episodes, ring.num_steps) == (3, 3, 15)
    assert (ring.episode_lens.tolist(), ring.serials.tolist()) == ([4, 5, 6], [1, 2, 3])
    assert (ring.max_episodes, ring.max_timesteps, ring.circular) == (3, 12, True)


def test_counts_of_an_empty_buffer_are_zero(recorded):
    buffer = recorded(())
    assert (len(buffer), buffer.num_steps, buffer.episode_lens.tolist(), buffer.serials.tolist()) == (0, 0, [], [])
    assert not buffer


def test_counts_of_several_folders_are_their_sums(both):
    assert (len(both), both.num_steps, both.max_episodes, both.max_timesteps) == (3, 12, 16, 12)
    assert (both.episode_lens.tolist(), both.serials.tolist()) == ([3, 4, 5], [0, 1, 0])


def test_fieldnames_are_dotted_and_in_the_order_of_the_schema(ring):
    assert ring.fieldnames[:5] == ("number", "t", "observation", "camera.left", "camera.right")
    assert ring.meta_fieldnames == ("task_id", "name", "success")


def test_a_second_object_sees_what_the_first_publishes_without_being_asked_to_refresh(recorded, record):
    buffer = recorded((3,))
    reader = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    assert reader.num_episodes == 1
    record(buffer, 1, 4)
    assert (reader.num_episodes, reader.episode_lens.tolist()) == (2, [3, 4])
    assert reader.episode(-1)["number"].tolist() == [1] * 4
    assert set(reader.sample(64, timestep_level=True)["number"].tolist()) == {0, 1}


# Whole episodes


def test_an_episode_is_what_was_stored(ring):
    oldest = ring.episode(0)
    assert oldest["number"].tolist() == [1] * 4
    assert oldest["text"].tolist() == ["1:0", "1:1", "1:2", "1:3"]
    assert oldest["camera"]["left"][:, 0].tolist() == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert oldest["terminated"].tolist() == [False, False, False, True]
    assert (oldest["half"].tolist(), oldest["half"].dtype) == ([0.5, 1.5, 2.5, 3.5], np.float32)
    assert (oldest["task_id"], oldest["name"], oldest["success"]) == (1, "e1", True)


def test_an_episode_has_one_more_observation_if_its_final_one_was_stored(ring):
    assert ring.episode(0)["observation"].shape == (4, 3)
    assert ring.episode(1)["observation"].tolist() == [[2, t, 1] for t in range(6)]
    assert ring.episode(1)["t"].shape == (5,)


def test_episodes_are_counted_from_the_oldest_and_from_the_newest(ring, both):
    assert [ring.episode(i)["name"] for i in (0, 1, 2, -1, -2, -3)] == ["e1", "e2", "e3", "e3", "e2", "e1"]
    assert [both.episode(i)["name"] for i in (0, 1, 2, -1)] == ["e0", "e1", "e7", "e7"]


@pytest.mark.parametrize("i", [3, -4])
def test_an_episode_that_does_not_exist_raises_index_error(ring, i):
    for read in (ring.episode, ring.__getitem__):
        with pytest.raises(IndexError, match=rf"{i}: the .* has 3"):
            read(i)


def test_what_episode_returns_can_be_changed_without_changing_the_store(ring):
    ring.episode(0)["number"][:] = 99
    ring[0]["number"].fill_(99)
    ring.get_all_data()["number"].fill_(99)
    assert ring.episode(0)["number"].tolist() == [1] * 4


def test_episodes_gives_several_padded_and_only_what_is_asked_for(ring):
    got = ring.episodes([2, 0], fields=("t", "half"), return_indices=True)
    assert got.keys() == {"t", "half", "_lens", "task_id", "name", "success", "_index"}
    for row, position in enumerate((2, 0)):
        whole, length = ring.episode(position), got["_lens"][row]
        for name in ("t", "half"):
            assert got[name][row, :length].tolist() == whole[name].tolist()
            assert not got[name][row, length:].any()
        assert (got["name"][row], got["_index"][row]) == (whole["name"], ring.serials[position])


def test_episodes_chooses_by_the_options_of_a_dataset_and_loads_no_field_that_is_not_wanted(ring, both):
    chosen = ring.episodes(fields=(), filter_meta={"task_id": 1}, return_indices=True)
    assert set(chosen) & set(ring.fieldnames) == set()
    assert chosen["_index"].tolist() == [n for n in ring.serials if n % 2 == 1]
    assert both.episodes(fields=(), return_indices=True)["_index"].tolist() == [[0, 0], [0, 1], [1, 0]]


def test_episodes_names_the_position_that_does_not_exist_and_refuses_parts_of_episodes(ring):
    with pytest.raises(IndexError, match="episode 9: the buffer has"):
        ring.episodes([0, 9])
    with pytest.raises(SchemaError, match="cut episodes into parts"):
        ring.episodes(timestep_level=True)


def test_indexing_gives_the_item_of_the_dataset(ring):
    assert_same(ring[1], ring.dataset()[1])
    assert ring[-1]["number"].tolist() == [3] * 6
    assert ring[0]["_lens"] == 4


def test_iterating_a_buffer_gives_its_episodes(ring, both, recorded):
    assert [episode["name"] for episode in ring] == ["e1", "e2", "e3"]
    assert [episode["name"] for episode in both] == ["e0", "e1", "e7"]
    assert list(recorded((), name="empty")) == []


# Everything


def test_get_all_data_is_padded_to_the_longest_episode(ring):
    data = ring.get_all_data()
    assert data["number"].tolist() == [[1] * 4 + [0] * 2, [2] * 5 + [0], [3] * 6]
    assert (data["observation"].shape, data["camera"]["left"].shape) == ((3, 6, 3), (3, 6, 2, 2))
    assert (data["episode_lens"].tolist(), data["task_id"].tolist()) == ([4, 5, 6], [1, 0, 1])
    assert (data["name"], data["text"][0]) == (["e1", "e2", "e3"], ["1:0", "1:1", "1:2", "1:3", "", ""])


def test_get_all_data_gives_only_what_is_asked_for(ring):
    assert set(ring.get_all_data(fields=["t"])) == {"t"}
    assert set(ring.get_all_data(meta_fields=["name", "episode_lens"])) == {"name", "episode_lens"}
    assert set(flat(ring.get_all_data(fields=["camera"], meta_fields=["name"]))) == {
        "camera.left",
        "camera.right",
        "name",
    }
    with pytest.raises(SchemaError, match="did you mean 'reward'"):
        ring.get_all_data(fields=["rewards"])
    with pytest.raises(SchemaError, match="'success'"):
        ring.get_all_data(meta_fields=["sucess"])


def test_get_all_data_of_several_folders_is_padded_together(both):
    data = both.get_all_data(fields=["number"], meta_fields=["name"])
    assert data["number"].tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [7] * 5]
    assert data["name"] == ["e0", "e1", "e7"]


def test_get_all_data_of_an_empty_buffer_is_empty(recorded):
    assert recorded(()).get_all_data() == {}


# A writer goes on in the middle of a read: positions are looked up again, and nothing else takes their place


@pytest.fixture
def full(recorded):
    return recorded((5, 5, 5), max_episodes=3, circular=True)


@pytest.mark.parametrize("read", ["episode", "indexing", "get_all_data"])
def test_a_writer_in_the_middle_of_a_read_of_whole_episodes_changes_neither_place_nor_length(
    full, record, in_the_middle, read
):
    def publish():
        for number, length in ((3, 8), (4, 9), (5, 7), (6, 8)):
            record(full, number, length)

    in_the_middle(publish)
    if read == "get_all_data":
        data = full.get_all_data()
        assert data["episode_lens"].tolist() == [9, 7, 8]
        assert data["number"].tolist() == [[4] * 9, [5] * 7 + [0] * 2, [6] * 8 + [0]]
    else:
        episode = full.episode(0) if read == "episode" else full[0]
        assert episode["number"].tolist() == [4] * 9
        assert episode["t"].tolist() == list(range(9))
        assert episode["name"] == "e4"


@pytest.mark.parametrize("read", ["episode", "indexing", "get_all_data"])
def test_whole_episodes_that_are_overwritten_again_and_again_are_read_in_the_end(full, record, in_the_middle, read):
    in_the_middle(lambda: [record(full, number, 5) for number in range(4)], times=30)
    {"episode": full.episode, "indexing": full.__getitem__, "get_all_data": lambda _: full.get_all_data()}[read](0)


@pytest.mark.parametrize("read", ["episode", "indexing", "get_all_data"])
def test_whole_episodes_that_are_overwritten_whenever_they_are_read_raise(
    full, record, in_the_middle, monkeypatch, read
):
    monkeypatch.setattr("memmap_buffer.loading.batch_reader.PATIENCE", 0.05)
    in_the_middle(lambda: [record(full, number, 5) for number in range(4)], times=10_000)
    with pytest.raises(StaleEpisodeError, match="were overwritten or cleared"):
        {"episode": full.episode, "indexing": full.__getitem__, "get_all_data": lambda _: full.get_all_data()}[read](0)


# Single batches


def test_sample_draws_with_replacement_as_many_as_asked_for(recorded):
    buffer = recorded((3,))
    batch = buffer.sample(100, timestep_level=True)
    assert batch["t"].shape == (100,)
    assert set(batch["t"].tolist()) == {0, 1, 2}


def test_sample_with_a_seed_gives_the_same_batch(recorded, record):
    buffer = recorded()
    options = {"n_steps": 3, "return_indices": True}
    batches = [buffer.sample(32, seed=7, **options) for _ in range(2)]
    again = ReplayBuffer.from_folder(buffer.folder, read_only=True).sample(32, seed=7, **options)
    other = buffer.sample(32, seed=8, **options)
    assert_same(batches[0], batches[1])
    assert_same(batches[0], again)
    assert not torch.equal(batches[0]["_indices"], other["_indices"])


def test_sample_with_a_seed_gives_the_same_batch_of_weighted_folders(recorded, record):
    first, second = recorded((5, 5), name="a"), recorded((4, 4), name="b")
    both = ConcatBuffer([first, second], weights=[0.3, 0.7])
    batches = [both.sample(5, seed=7, timestep_level=True, return_indices=True) for _ in range(3)]
    assert_same(batches[0], batches[1])
    assert_same(batches[0], batches[2])


def test_sample_without_a_seed_gives_different_batches(recorded):
    buffer = recorded()
    batches = [buffer.sample(64, timestep_level=True, return_indices=True)["_indices"] for _ in range(2)]
    assert not torch.equal(*batches)


def test_sample_sees_what_was_published_since_and_forgets_what_was_cleared(recorded, record):
    buffer = recorded((3,))
    assert set(buffer.sample(64, timestep_level=True)["number"].tolist()) == {0}
    record(buffer, 1, 4)
    assert set(buffer.sample(64, timestep_level=True)["number"].tolist()) == {0, 1}
    buffer.clear()
    with pytest.raises(NotEnoughDataError, match="it is empty"):
        buffer.sample(64, timestep_level=True)
    record(buffer, 2, 4)
    assert set(buffer.sample(64, timestep_level=True)["number"].tolist()) == {2}


@pytest.mark.parametrize(
    "condition", [1, {1}, [1], (1, 2), (1, None), np.array([1]), np.int64(1), lambda column: column == 1]
)
def test_sample_takes_every_spelling_of_a_filter_and_keeps_them_apart(recorded, condition):
    buffer = recorded()
    for _ in range(2):
        kept = buffer.sample(64, timestep_level=True, filter_meta={"task_id": condition})
        assert set(kept["task_id"].tolist()) == {1}
        rest = buffer.sample(64, timestep_level=True, filter_meta={"task_id": 0})
        assert set(rest["task_id"].tolist()) == {0}


def test_sample_takes_view_objects(recorded):
    buffer = recorded()
    for view in (Offsets(t=(-1, 0)), Offsets({"camera.left": range(2)})):
        assert set(buffer.sample(4, view=view)) >= {key.split(".")[0] for key in view.offsets}


def test_an_option_that_sample_does_not_know_names_the_closest(recorded):
    with pytest.raises(SchemaError, match="did you mean 'n_steps'"):
        recorded().sample(4, n_step=3)


def test_many_different_options_do_not_pile_up(recorded):
    buffer = recorded()
    for n in range(1, 100):
        buffer.sample(2, n_steps=n)
    assert len(samplers_of(buffer)) <= 32


@pytest.mark.parametrize("position", [slice(0, 2), "0", 1.5, [0, 1], None])
def test_one_episode_has_one_position(ring, position):
    for read in (ring.episode, ring.__getitem__):
        with pytest.raises(SchemaError, match=r"episode: got .*, expected one position"):
            read(position)


@pytest.mark.parametrize("positions", [[1.5], ["0"], [[0]]])
def test_positions_of_episodes_are_whole_numbers(ring, positions):
    with pytest.raises(SchemaError, match=r"episodes: got .*, expected whole numbers"):
        ring.episodes(positions)


def test_positions_of_episodes_may_be_a_number_or_a_slice(ring):
    assert ring.episodes(1, return_indices=True)["_index"].tolist() == [2]
    assert ring.episodes(slice(1, None), return_indices=True)["_index"].tolist() == [2, 3]
