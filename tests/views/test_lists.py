"""Fields whose timesteps have lists of any length: stored, and read by every view, padded or jagged."""

import numpy as np
import pytest
import torch

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    EpisodeStateError,
    Field,
    Hindsight,
    Offsets,
    ReplayBuffer,
    Schema,
    SchemaError,
    Window,
    pack,
    unpack,
    verify,
)

FIELDS = {
    "ids": Field("int64", (None,), final=True),
    "scores": Field("float32", (None,)),
    "points": Field("float32", (None, 3), default=[]),
    "reward": Field("float32", default=0),
    "terminated": "bool",
}


def lists(rng, count):
    return [rng.integers(0, 1000, rng.integers(0, 6)) for _ in range(count)]


def record(folder, episodes, steps=9, seed=0, **options):
    """A buffer, and serial -> the lists of its episode, the final one included."""
    rng, truth = np.random.default_rng(seed), {}
    buffer = ReplayBuffer(folder, episodes, 20, FIELDS, **options)
    for serial in range(episodes):
        ids = truth[serial] = lists(rng, steps + 1)
        with buffer.one_episode() as episode:
            for t in range(steps):
                points = {"points": np.full((t % 3, 3), t)} if t % 2 else {}
                value = ids[t].tolist() if t % 3 else torch.from_numpy(ids[t])
                episode.store(ids=value, scores=ids[t] / 2, terminated=t == steps - 1, **points)
            episode.final(ids=ids[steps])
    return buffer, truth


def check(values, lens, expected):
    """Padded lists are the expected ones, and zeros behind."""
    assert values.shape[-1] == max(map(len, expected)) == int(lens.max())
    for row, count, one in zip(values, lens, expected, strict=True):
        assert row[: int(count)].tolist() == one.tolist()
        assert not row[int(count) :].any()


def test_every_timestep_comes_back_with_its_length(tmp_path):
    buffer, truth = record(tmp_path, 4)
    batch = buffer.batch(timestep_level=True, return_indices=True)
    expected = [truth[serial][t] for serial, t in batch["_indices"].tolist()]
    check(batch["ids"], batch["_lens_ids"], expected)
    check(batch["scores"], batch["_lens_scores"], [one / 2 for one in expected])
    steps = batch["_indices"][:, 1]
    assert torch.equal(batch["_lens_points"], torch.where(steps % 2 == 1, steps % 3, 0))
    assert batch["points"].shape == (36, 2, 3)


def test_a_successor_may_be_the_final_observation(tmp_path):
    buffer, truth = record(tmp_path, 3)
    batch = buffer.batch(n_steps=2, gamma=0.9, return_indices=True)
    where = batch["_indices"].tolist()
    check(batch["ids"], batch["_lens_ids"], [truth[serial][t] for serial, t in where])
    following = [truth[serial][min(t + 2, 9)] for serial, t in where]
    check(batch["next_ids"], batch["_lens_next_ids"], following)


@pytest.mark.parametrize("size", [5, 9000])
def test_a_function_of_rewards_gets_them_as_arrays(tmp_path, size):
    fields = {
        "ids": Field("int64", (None,)),
        "at": Field("float32", final=True),
        "goal": "float32",
        "reward": "float32",
    }
    with ReplayBuffer(tmp_path, 1, 4, fields) as buffer:
        buffer.store_episode(ids=[[1] * t for t in range(4)], at=np.arange(5), goal=[9] * 4, reward=[-1] * 4)
        how = Hindsight(lambda at, goal, info: [ids.sum() for ids in info["ids"]], "goal", "at", prob=1.0, info="ids")
        batch = buffer.sample(size, timestep_level=True, return_indices=True, hindsight=how)
    assert torch.equal(batch["reward"], batch["_indices"][:, 1].float())


def test_windows_and_offsets_have_an_axis_of_time_before_that_of_the_list(tmp_path):
    buffer, truth = record(tmp_path, 3)
    batch = buffer.batch(view=Window(4, pad_before=2), return_indices=True)
    for i, (serial, _) in enumerate(batch["_indices"].tolist()):
        start = int(batch["_start"][i])
        for k in range(4):
            there = 0 <= start + k < 9
            expected = truth[serial][start + k].tolist() if there else []
            count = int(batch["_lens_ids"][i, k])
            assert batch["ids"][i, k, :count].tolist() == expected
    stacked = buffer.batch(view=Offsets({"ids": [-1, 0]}), return_indices=True)
    for i, (serial, t) in enumerate(stacked["_indices"].tolist()):
        count = int(stacked["_lens_ids"][i, 1])
        assert stacked["ids"][i, 1, :count].tolist() == truth[serial][t].tolist()


def test_whole_episodes_are_padded_in_both_axes(tmp_path):
    buffer, truth = record(tmp_path, 3)
    batch = buffer.batch(fields=["ids"])
    check(batch["ids"].flatten(0, 1), batch["_lens_ids"].flatten(), [one for s in range(3) for one in truth[s][:9]])


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_jagged_they_have_no_padding(tmp_path, form):
    buffer, truth = record(tmp_path, 3)
    batch = buffer.batch(timestep_level=True, ragged=True, format=form, return_indices=True)
    expected = [truth[serial][t].tolist() for serial, t in batch["_indices"].tolist()]
    rows = batch["ids"].unbind() if form == "torch" else batch["ids"]
    assert [row.tolist() for row in rows] == expected


@pytest.mark.parametrize("names", [{"ids": "tokens"}, {"ids": "scores", "scores": "ids"}, {"next_ids": "after"}])
def test_under_another_name_they_have_their_lengths_too(tmp_path, names):
    buffer, _ = record(tmp_path, 3)
    plain, options = buffer.batch(n_steps=1), {"n_steps": 1, "fieldname_map": names}
    renamed = buffer.batch(**options)
    assert buffer.batch_spec(**options).keys() == renamed.keys()
    for key in ("ids", "scores", "next_ids"):
        for prefix in ("", "_lens_"):
            assert torch.equal(renamed[prefix + names.get(key, key)], plain[prefix + key])
    jagged = buffer.batch(**options, ragged=True)
    for key in ("ids", "next_ids"):
        rows = zip(plain[key], plain["_lens_" + key], strict=True)
        assert [row.tolist() for row in jagged[names.get(key, key)].unbind()] == [row[:n].tolist() for row, n in rows]


def test_a_batch_is_as_wide_as_its_own_longest_list(tmp_path):
    """Batches that are read together must not pad each other."""
    buffer = ReplayBuffer(tmp_path, 1, 64, {"ids": ("int64", (None,))})
    with buffer.one_episode() as episode:
        for t in range(64):
            episode.store(ids=np.arange(t))
    widths = [batch["ids"].shape[1] for batch in buffer.dataloader(8, timestep_level=True)]
    assert widths == [7, 15, 23, 31, 39, 47, 55, 63]
    for workers in (0, 2):
        loader = buffer.dataloader(8, timestep_level=True, shuffle=True, num_workers=workers, seed=1)
        for batch in loader:
            assert batch["ids"].shape[1] == int(batch["_lens_ids"].max())


def test_where_the_longest_episode_left_during_the_copy_lists_and_lengths_are_cut_alike(tmp_path, in_the_middle):
    with ReplayBuffer(tmp_path, 3, 20, {"ids": Field("int64", (None,)), "n": "int"}, circular=True) as buffer:

        def record(number, steps, members):
            buffer.store_episode(ids=[[number] * members] * steps, n=[number] * steps)

        for number, steps, members in ((0, 10, 7), (1, 3, 2), (2, 3, 2)):
            record(number, steps, members)
        in_the_middle(lambda: [record(number, 4, 3) for number in (3, 4)])
        batch = buffer.batch([0, 2], format="numpy")
    (number, kept), lens = batch["n"][:, 0], batch["_lens"]
    members = {2: 2, 3: 3, 4: 3}[number]
    assert kept == 2 and lens.tolist() == [{2: 3, 3: 4, 4: 4}[number], 3]
    assert batch["_lens_ids"].tolist() == [[members] * lens[0], [2] * 3 + [0] * (lens[0] - 3)]
    assert batch["ids"].shape == (2, lens[0], members)
    assert (batch["ids"][0] == number).all() and (batch["ids"][1, :3, :2] == 2).all()


def test_they_survive_reopening_and_are_checked(tmp_path):
    buffer, truth = record(tmp_path, 3)
    buffer.close()
    assert verify(tmp_path) == []
    again = ReplayBuffer.from_folder(tmp_path, verify="always")
    assert again.schema.fields["ids"] == FIELDS["ids"]
    batch = again.batch(timestep_level=True, return_indices=True)
    check(batch["ids"], batch["_lens_ids"], [truth[s][t] for s, t in batch["_indices"].tolist()])
    again.close()
    path = tmp_path / "data" / "ids.blobs.npy"
    data = bytearray(path.read_bytes())
    data[128] ^= 1
    path.write_bytes(data)
    assert [finding.field for finding in verify(tmp_path)] == ["ids"]


def test_the_default_is_no_blob_however_large_the_file_is(tmp_path):
    """Of more bytes than the word that stands for a default, were it the length of a blob."""
    with ReplayBuffer(tmp_path / "one", 1, 300_000, {"x": "int"}) as buffer:
        buffer.store_episode(x=[1, 2])
        buffer.add_field("ids", Field("float64", (None,), default=[1.0]))
        assert buffer.episode(0)["ids"].tolist() == [[1.0], [1.0]]
    assert (tmp_path / "one" / "data" / "ids.blobs.npy").stat().st_size > 2**32
    assert verify(tmp_path / "one") == []


def test_whole_episodes_and_several_environments_at_once(tmp_path):
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(tmp_path / "a", 4, 20, {"ids": ("int64", (None,)), "terminated": "bool"})
    ids = lists(rng, 7)
    buffer.store_episode(ids=ids, terminated=np.arange(7) == 6)
    batch = buffer.batch(timestep_level=True)
    check(batch["ids"], batch["_lens_ids"], ids)
    ring = ReplayBuffer(
        tmp_path / "b",
        max_timesteps=20,
        capacity=50,
        fields={"ids": ("int64", (None,)), "terminated": "bool"},
        publish="step",
    )
    given = []
    for t in range(40):
        step = lists(rng, 2)
        given += step
        ring.add(ids=step, terminated=np.full(2, t % 10 == 9))
    batch = ring.batch(timestep_level=True)
    assert sorted(map(tuple, (row[:n].tolist() for row, n in zip(batch["ids"], batch["_lens_ids"], strict=True)))) == (
        sorted(tuple(one.tolist()) for one in given[-50:])
    )


def test_an_episode_tells_how_long_its_lists_are_and_is_stored_again_as_it_is(tmp_path):
    buffer, truth = record(tmp_path / "a", 2)
    for i in range(2):
        again = ReplayBuffer(tmp_path / str(i), 1, 20, buffer.schema)
        again.store_episode(**buffer.episode(i))
        episode = again.episode(0)
        assert episode.keys() == buffer.episode(i).keys() and [*episode][:2] == ["ids", "_lens_ids"]
        check(episode["ids"], episode["_lens_ids"], truth[i])
        check(episode["scores"], episode["_lens_scores"], [one / 2 for one in truth[i][:9]])
        assert episode["_lens_points"].tolist() == [t % 3 if t % 2 else 0 for t in range(9)]
    everything = buffer.get_all_data(fields=["ids"])
    assert [*everything] == ["ids", "_lens_ids"]
    assert everything["_lens_ids"].tolist() == [[len(one) for one in truth[i][:9]] for i in range(2)]


def test_lengths_that_do_not_fit_their_lists_are_refused(tmp_path):
    buffer, _ = record(tmp_path, 3)
    episode = buffer.episode(0)
    wide = episode["ids"].shape[1]
    wrong = [
        {"_lens_ids": episode["_lens_ids"][:-1]},
        {"_lens_ids": np.full(10, wide + 1)},
        {"_lens_ids": np.full(10, -1)},
        {"_lens_ids": episode["_lens_ids"] / 1},
        {"ids": 3},
    ]
    for change in wrong:
        with pytest.raises(
            SchemaError, match=r"_lens_ids: got .* beside 'ids'.* give the lists alone, without padding"
        ):
            buffer.store_episode(**{**episode, **change})
    with pytest.raises(SchemaError, match="got '_lens_reward', which was not declared"):
        buffer.store_episode(**episode, _lens_reward=np.ones(9, int))
    del episode["ids"]
    with pytest.raises(SchemaError, match="got '_lens_ids', which was not declared"):
        buffer.store_episode(**episode)


def test_folders_are_read_as_one(tmp_path):
    parts = [record(tmp_path / str(i), 3, seed=i) for i in range(3)]
    both = ConcatBuffer([buffer for buffer, _ in parts])
    batch = both.sample(64, timestep_level=True, return_indices=True, seed=0)
    expected = [parts[folder][1][serial][t] for folder, serial, t in batch["_indices"].tolist()]
    check(batch["ids"], batch["_lens_ids"], expected)


def test_what_is_no_list_is_refused(tmp_path):
    buffer = ReplayBuffer(tmp_path, 2, 5, {"ids": ("int64", (None,)), "points": Field("float32", (None, 3), [])})
    with buffer.one_episode() as episode:
        for wrong, text in [(5, r"shape \(\)"), ([[5]], r"shape \(1, 1\)"), ([1.5], "not a whole number")]:
            with pytest.raises(SchemaError, match=text):
                episode.store(ids=wrong)
        with pytest.raises(SchemaError, match=r"\(2, 2\)"):
            episode.store(ids=[1], points=np.zeros((2, 2)))
        episode.store(ids=[1])
    for spec in [("U8", (None,)), ("bfloat16", (None,)), ("int64", (2, None)), ("int64", (None, None))]:
        with pytest.raises(SchemaError, match=r"list|whole numbers"):
            Field(*spec)
    with pytest.raises(SchemaError, match="per-timestep"):
        Schema({"x": "float"}, {"ids": ("int64", (None,))})
    with pytest.raises(SchemaError, match="scalar field"):
        buffer.sample(1, timestep_level=True, filter_fields={"ids": 3})


def test_an_episode_that_has_no_room_for_its_members_says_so_and_can_end(tmp_path):
    buffer = ReplayBuffer(tmp_path, 2, 2, {"ids": ("int8", (None,))})
    with pytest.raises(EpisodeStateError, match="room"):
        buffer.store_episode(ids=[np.zeros(2049, np.int8)])
    buffer.store_episode(ids=[np.zeros(2048, np.int8)])
    assert buffer.batch(timestep_level=True)["ids"].shape == (1, 2048)


@pytest.mark.parametrize("options", [{}, {"publish": "step"}, {"stage": "disk"}], ids=str)
@pytest.mark.parametrize("way", ["store", "extend", "batch", "add"])
def test_a_timestep_whose_list_has_no_room_is_refused_and_the_episode_keeps_the_others(tmp_path, way, options):
    spare = {"spare_slots": 2} if options else {}
    buffer = ReplayBuffer(tmp_path, 6, 4, {"ids": ("int64", (None,)), "number": "int"}, **spare, **options)
    given = [[1], range(5000), [2, 3]]

    def all_of(one, *rest):
        for number, ids in enumerate(given):
            if number == 1:
                with pytest.raises(EpisodeStateError, match=r"'ids': .*room"):
                    one(ids, number)
            else:
                one(ids, number)

    if way == "batch":
        with buffer.batched_episode(2):
            all_of(lambda ids, number: buffer.store_batch(ids=[[], ids], number=[number] * 2))
    elif way == "add":
        all_of(lambda ids, number: buffer.add(ids=[[], ids], number=[number] * 2))
        buffer.end_episodes()
    else:
        with buffer.one_episode() as episode:
            if way == "store":
                all_of(lambda ids, number: episode.store(ids=ids, number=number))
            else:
                all_of(lambda ids, number: episode.extend(ids=[ids], number=[number]))
    for i in range(len(buffer)):
        assert buffer.episode(i)["number"].tolist() == [0, 2]
    assert buffer.episode(-1)["ids"].tolist() == [[1, 0], [2, 3]]
    assert len(buffer) == (2 if way in ("batch", "add") else 1)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("options", [{}, {"publish": "step", "spare_slots": 2}], ids=str)
def test_a_stream_goes_on_where_a_final_observation_has_no_room(tmp_path, options, caplog):
    with ReplayBuffer(tmp_path, 6, 1, {"ids": Field("int64", (None,), final=True)}, **options) as buffer:
        buffer.add(ids=[range(700)])
        buffer.add(ids=[range(900)])
        with pytest.raises(EpisodeStateError, match="room"):
            buffer.add(ids=[range(3000)])  # what is seen after 900
        assert caplog.messages == []
        buffer.add(ids=[[7]])
    assert len([text for text in caplog.messages if "no final observation" in text]) == 1
    found = [buffer.episode(i)["ids"] for i in range(3)]
    assert [ids.shape for ids in found] == [(2, 900), (1, 900), (1, 1)]
    assert found[0][0, 699:701].tolist() == [699, 0]


def test_a_field_is_not_added_whose_lists_have_no_room(tmp_path):
    """Two episodes, the second of which is in the last slot that is written to, so both are beyond their places."""
    with ReplayBuffer(tmp_path, 2, 2, {"x": "float"}) as buffer:
        for _ in range(2):
            buffer.store_episode(x=[0.0, 1.0])
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(EpisodeStateError, match=r"'tags': .*room"):
            buffer.add_field("tags", Field("int64", (None,)), lambda episode: [np.arange(3000)] * 2)
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        buffer.add_field("tags", Field("int64", (None,)), lambda episode: [np.arange(2048), []])
        assert verify(tmp_path) == []


def test_a_final_list_that_has_no_room_is_refused_and_no_other_episode_changes(tmp_path):
    fields = {"ids": Field("int64", (None,), final=True)}
    with ReplayBuffer(tmp_path, 3, 2, fields, {"m": "int"}, publish="step", spare_slots=2) as buffer:
        first, second = (buffer.begin_episode(m=0) for _ in range(2))
        first.store(ids=[1])
        second.store(ids=[2])
        second.final(ids=[3])
        second.publish()
        first["m"] = 1
        with pytest.raises(EpisodeStateError, match="room"):
            first.final(ids=np.arange(9000))
        first.final(ids=[4])
        first.publish()
        assert [episode["ids"].ravel().tolist() for episode in map(buffer.episode, range(2))] == [[1, 4], [2, 3]]
        assert verify(tmp_path) == []


@pytest.mark.parametrize("entry", [(2**40, 8), (0, 7), (0, 8 + (1 << 32))], ids=["beyond", "length", "dictionary"])
def test_what_another_program_wrote_into_the_index_is_told(tmp_path, entry):
    buffer, _ = record(tmp_path, 2)
    buffer.close()
    path = tmp_path / "data" / "ids.npy"
    index = np.load(path, mmap_mode="r+")
    index[0, 0] = entry
    del index
    again = ReplayBuffer.from_folder(tmp_path, verify="never")
    with pytest.raises(CorruptBufferError, match=r"ids\.blobs\.npy"):
        again.batch(timestep_level=True)


def test_they_are_updated_added_recomputed_and_copied(tmp_path):
    buffer, truth = record(tmp_path / "grid", 3)
    truth[1] = [np.arange(t) for t in range(9)] + truth[1][9:]
    buffer.update(1, ids=truth[1][:9])
    buffer.add_field("tags", Field("int8", (None,), default=[7, 8]))
    buffer.add_field("more", Field("int8", (None,)), lambda episode: [np.ones(t, np.int8) for t in range(9)])
    buffer.close()
    pack(tmp_path / "grid", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "again")
    ReplayBuffer.from_folder(tmp_path / "grid").snapshot(tmp_path / "copy")
    for name in ("grid", "packed", "again", "copy"):
        assert verify(tmp_path / name) == []
        batch = ReplayBuffer.from_folder(tmp_path / name, verify="always").batch(
            timestep_level=True, return_indices=True
        )
        where = batch["_indices"].tolist()
        check(batch["ids"], batch["_lens_ids"], [truth[serial][t] for serial, t in where])
        assert batch["tags"].tolist() == [[7, 8]] * 27
        assert batch["_lens_more"].tolist() == [t for _, t in where]
    with pytest.raises(EpisodeStateError, match="room"):
        ReplayBuffer.from_folder(tmp_path / "again").update(0, ids=[np.arange(20_000)] * 9)
    with pytest.raises(SchemaError, match="lists"):
        ReplayBuffer.from_folder(tmp_path / "again").update(0, ids=5)
