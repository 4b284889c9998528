"""What `test_ray.py` runs in a process of its own, against the real Ray on two CPUs."""

import itertools
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from pages import blocks_alone, blocks_of

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    NotABufferError,
    NStep,
    ReplayBuffer,
    SchemaError,
    StaleEpisodeError,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Data's own of 2.60, about options that it sets itself
    import ray
    import ray.data
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from memmap_buffer.interop.ray import ID, Outbox, Recorder, read_ray, shard_folder, start_recorders, write_ray

pytestmark = pytest.mark.filterwarnings("ignore")  # what Ray says of its own parts

FIELDS = {
    "number": "int",
    "observation": Field("float32", (3,), final=True),
    "camera": {"left": ("uint8", (2, 2))},
    "half": "bfloat16",
    "text": "U8",
    "terminated": "bool",
}
META_FIELDS = {"task": "int", "name": "U8"}
SIZES = {"max_episodes": 200, "max_timesteps": 12}


def content(number):
    """Everything in an episode; odd ones end by `terminated` and have no final observation."""
    rng = np.random.default_rng(number)
    length, ends = int(rng.integers(1, 13)), bool(number % 2)
    return {
        "number": np.full(length, number),
        "observation": rng.random((length + (not ends), 3), np.float32),
        "camera.left": rng.integers(0, 255, (length, 2, 2), np.uint8),
        "half": np.arange(length) / 2,
        "text": np.array([f"{number}:{t}" for t in range(length)]),
        "terminated": (np.arange(length) == length - 1) & ends,
        "task": number % 3,
        "name": f"e{number}",
    }


def flatten(tree, prefix=""):
    out = {}
    for name, value in tree.items():
        out |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def assert_episode(got, number):
    expected = content(number)
    assert expected.keys() <= got.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(got[name]), values, err_msg=f"{name} of {number}")


def assert_root(buffer, numbers):
    """The root holds these episodes, each once and whole."""
    found = [flatten(buffer.episode(i)) for i in range(len(buffer))]
    assert sorted(int(episode["number"][0]) for episode in found) == sorted(numbers)
    for episode in found:
        assert_episode(episode, int(episode["number"][0]))


@pytest.fixture(scope="session", autouse=True)
def cluster(tmp_path_factory):
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield
    ray.shutdown()


@pytest.fixture
def root(tmp_path):
    """Three shards with the episodes 0 … 8, 9 … 17 and 18 … 26."""
    for shard in range(3):
        with ReplayBuffer(shard_folder(tmp_path / "root", shard), 20, 12, FIELDS, META_FIELDS) as buffer:
            for number in range(9 * shard, 9 * shard + 9):
                buffer.store_episode(**content(number))
    return tmp_path / "root"


# Reading


@pytest.mark.parametrize("blocks", [1, 2, 7, 1000])
def test_every_episode_is_a_row_whole_and_unpadded_whatever_the_number_of_tasks(root, blocks):
    rows = read_ray(root, override_num_blocks=blocks).take_all()
    assert [int(row["number"][0]) for row in rows] == list(range(27))
    for number, row in enumerate(rows):
        assert_episode(row, number)
        assert row["_lens"] == len(content(number)["number"])


def test_rows_end_with_their_episodes_whatever_the_lengths_are_called(root):
    rows = read_ray(root, fieldname_map={"_lens": "length"}).take_all()
    assert all(len(row["number"]) == row["length"] for row in rows)


def test_one_folder_is_read_as_a_root_is(root):
    rows = read_ray(shard_folder(root, 1)).take_all()
    assert [row["name"] for row in rows] == [f"e{number}" for number in range(9, 18)]


def test_filters_and_columns_are_those_of_the_library_and_are_applied_before_ray_sees_a_row(root):
    chosen = {"filter_meta": {"task": 1}, "fields": ["text"], "return_indices": True}
    found = read_ray(root, **chosen)
    assert found.count() == 9
    assert set(found.schema().names) == {"text", "_lens", "task", "name", "_source", "_serial"}
    rows = found.take_all()
    for row in rows:
        assert_text = content(int(row["name"][1:]))["text"].tolist()
        assert list(row["text"]) == assert_text
        assert row["_source"] * 9 + row["_serial"] == int(row["name"][1:])
    parts = [read_ray(root, split={"a": 0.5, "b": 0.5}, part=part, fields="number").take_all() for part in "ab"]
    names = [row["name"] for part in parts for row in part]
    assert sorted(names) == sorted(f"e{number}" for number in range(27))


@pytest.mark.parametrize(
    "options", [{"timestep_level": True}, {"view": NStep(2, gamma=0.9, reward="half")}, {"n_steps": 1}], ids=str
)
def test_items_of_a_view_are_those_of_the_library_in_its_order(root, options):
    options = {**options, "return_indices": True}
    table = read_ray(root, override_num_blocks=5, **options).take_all()
    batch = flatten(ConcatBuffer.from_root(root).batch(**options))
    indices = np.array([[row["_source"], row["_serial"], row["_t"]] for row in table])
    np.testing.assert_array_equal(indices, batch.pop("_indices"))
    for name, values in batch.items():
        got = np.array([row[name] for row in table])
        if isinstance(values, list):
            assert got.tolist() == values
        else:  # sums of discounted rewards are rounded in another order in a batch of another size
            np.testing.assert_allclose(got, values.float().numpy(), rtol=1e-6 * (name == "_return"), err_msg=name)


def test_an_episode_that_is_gone_when_its_turn_comes_is_an_error_and_not_another_episode(root):
    later = read_ray(root, override_num_blocks=1)
    with ReplayBuffer.from_folder(shard_folder(root, 0)) as buffer:
        buffer.delete(0)
    with pytest.raises(ray.exceptions.RayTaskError, match="overwritten or cleared before they were read") as caught:
        later.take_all()
    assert isinstance(caught.value, StaleEpisodeError) or "StaleEpisodeError" in str(caught.value)


def test_what_is_no_root_or_no_option_is_refused_at_once(root, tmp_path):
    with pytest.raises(NotABufferError, match="no subfolder holds a buffer"):
        read_ray(tmp_path)
    with pytest.raises(SchemaError, match="option 'filter_mata' is unknown; did you mean 'filter_meta'"):
        read_ray(root, filter_mata={})


# Writing


@pytest.mark.parametrize("num_shards", [None, 2])
def test_episodes_that_go_through_ray_come_back_to_the_bit(root, tmp_path, num_shards):
    copied = write_ray(
        read_ray(root, override_num_blocks=4), tmp_path / "copy", FIELDS, META_FIELDS, num_shards=num_shards
    )
    assert_root(copied, range(27))
    assert len(copied.folders) == (num_shards or 4)


def test_steps_in_any_order_are_grouped_into_their_episodes(root, tmp_path):
    steps = read_ray(root, n_steps=1, return_indices=True, filter_meta={"task": {0, 2}}).random_shuffle(seed=3)
    fields = {"number": "int", "observation": Field("float32", (3,), final=True), "text": "U8"}
    written = write_ray(
        steps, tmp_path / "copy", fields, {"name": "U8"}, key=["_source", "_serial"], order="_t", num_shards=2
    )
    expected = [number for number in range(27) if number % 3 != 1]
    found = {int(written.episode(i)["number"][0]): written.episode(i) for i in range(len(written))}
    assert sorted(found) == expected == sorted(int(e["name"][1:]) for e in found.values())
    for number, episode in found.items():
        whole = content(number)
        np.testing.assert_array_equal(episode["text"], whole["text"])
        steps = len(whole["text"])
        np.testing.assert_array_equal(episode["observation"][:steps], whole["observation"][:steps])
        if not number % 2:  # without a final observation `next_` of the last step is zeros
            np.testing.assert_array_equal(episode["observation"], whole["observation"])


def test_a_field_that_no_column_gives_has_its_default_also_if_it_is_the_first(root, tmp_path):
    fields = {"note": Field("int", default=7), "number": "int"}
    written = write_ray(read_ray(root), tmp_path / "copy", fields, num_shards=1)
    assert written.num_episodes == 27 and (written.get_all_data(["note"])["note"][0] == 7).any()


def test_lists_keep_their_lengths_by_whole_episodes_and_by_steps(tmp_path):
    fields = {"ids": Field("int16", (None,), final=True), "points": ("float32", (None, 2))}
    given = {}
    with ReplayBuffer(shard_folder(tmp_path / "root", 0), 3, 9, fields, {"number": "int"}) as buffer:
        for number in range(3):
            ids = [list(range(t % 3 * number)) for t in range(5)]
            given[number] = ids, [np.full((t, 2), number).tolist() for t in range(4)]
            buffer.store_episode(ids=ids, points=given[number][1], number=number)
    whole = write_ray(read_ray(tmp_path / "root"), tmp_path / "whole", fields, {"number": "int"})
    steps = read_ray(tmp_path / "root", n_steps=1, next_fields=["ids"], return_indices=True).random_shuffle(seed=3)
    options = {"key": "_serial", "order": "_t", "num_shards": 2}
    again = write_ray(steps, tmp_path / "again", fields, {"number": "int"}, **options)
    for copied in (whole, again):
        assert len(copied) == 3
        for i in range(3):
            episode = copied.episode(i)
            found = [
                [row[:n].tolist() for row, n in zip(episode[name], episode[f"_lens_{name}"], strict=True)]
                for name in fields
            ]
            assert found == [*given[int(episode["number"])]]


def test_a_root_that_holds_buffers_is_not_written_into(root):
    with pytest.raises(SchemaError, match="it holds buffers already"):
        write_ray(read_ray(root), root, FIELDS, META_FIELDS)


# Recording


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Rollout:
    """Sends episodes whose content follows from their number, and notes which were answered."""

    def __init__(self, recorder, notes):
        self.recorder, self.notes = recorder, Path(notes) / f"{os.getpid()}.txt"

    def pid(self):
        return os.getpid()

    def play(self, numbers):
        outbox, sent = Outbox(self.recorder, max_pending=3), []
        with self.notes.open("a") as file:
            for number in numbers:
                outbox.send({**content(number), ID: f"n{number}"})
                sent.append(number)
                if len(sent) == 5 or number == numbers[-1]:
                    outbox.flush()
                    file.write("".join(f"{n}\n" for n in sent))
                    file.flush()
                    sent.clear()
        return outbox.num_published


@ray.remote(num_cpus=0)
class Probe(Recorder):
    """A recorder that tells its process."""

    def pid(self):
        return os.getpid()


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Learner:
    """Draws from the root as it grows."""

    def __init__(self, root):
        self.buffer = ConcatBuffer.from_root(root)

    def pid(self):
        return os.getpid()

    def learn(self, batches):
        done = 0
        while done < batches:
            if not self.buffer.num_steps:
                time.sleep(0.01)
                continue
            batch = self.buffer.sample(32, timestep_level=True)
            for number, text in zip(batch["number"].tolist(), batch["text"], strict=True):
                assert text.split(":")[0] == str(number)
            done += 1
        return len(self.buffer)


def recorders(root, count, **options):
    return start_recorders(root, count, **{**SIZES, "fields": FIELDS, "meta_fields": META_FIELDS, **options})


def answered(notes):
    return {int(line) for path in Path(notes).glob("*.txt") for line in path.read_text().split()}


def numbers_of(root):
    buffer = ConcatBuffer.from_root(root)
    return [int(buffer.episode(i)["number"][0]) for i in range(len(buffer))]


@pytest.mark.parametrize("durability", ["process", "power"])
def test_two_rollouts_publish_through_two_recorders_what_a_learner_reads_meanwhile(tmp_path, durability):
    actors = recorders(tmp_path / "root", 2, durability=durability)
    rollouts = [Rollout.remote(actor, tmp_path) for actor in actors]
    learner = Learner.remote(tmp_path / "root")
    learning = learner.learn.remote(20)
    played = [rollouts[i].play.remote(range(30 * i, 30 * i + 30)) for i in range(2)]
    assert ray.get(played) == [30, 30]
    assert 0 < ray.get(learning) <= 60
    assert_root(ConcatBuffer.from_root(tmp_path / "root"), range(60))
    for actor in (*actors, *rollouts, learner):
        ray.kill(actor)


def test_an_episode_that_is_sent_again_is_stored_once_also_by_a_recorder_that_was_restarted(tmp_path):
    for _ in range(2):
        actor = Probe.remote(shard_folder(tmp_path, 0), 200, 12, FIELDS, META_FIELDS)
        for number in (1, 2, 1):
            ray.get(actor.record.remote({**content(number), ID: f"n{number}"}))
        ray.get(actor.record.remote(*[{**content(number), ID: f"n{number}"} for number in (2, 3, 3)]))
        ray.kill(actor)
    assert sorted(numbers_of(tmp_path)) == [1, 2, 3]


def test_an_episode_without_an_id_or_that_does_not_fit_is_told_to_who_sent_it(tmp_path):
    [actor] = recorders(tmp_path, 1)
    with pytest.raises(ray.exceptions.RayTaskError, match="without 'episode_id'"):
        ray.get(actor.record.remote(content(1)))
    outbox = Outbox(actor)
    outbox.send({"rewrad": np.zeros(3)})
    with pytest.raises(ray.exceptions.RayTaskError, match="rewrad"):
        outbox.flush()
    outbox.send(content(4))
    outbox.flush()
    assert outbox.num_published == 1
    assert numbers_of(tmp_path) == [4]
    ray.kill(actor)


def test_a_recorder_forgets_the_oldest_ids_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("memmap_buffer.interop.ray.MAX_KNOWN", 3)
    recorder = Recorder(tmp_path, 200, 12, FIELDS, META_FIELDS)
    send = [{**content(number), ID: f"n{number}"} for number in range(5)]
    assert recorder.record(*send) == 5
    assert recorder.record(*send[2:]) == 0
    assert recorder.record(send[1]) == 1


# Nodes that share nothing


def test_recorders_publish_what_any_node_reads_by_its_url(tmp_path):
    """One of them is killed twice in the middle: each episode is there once."""
    url, cache = f"file://{tmp_path}/url", tmp_path / "cache"
    actors = recorders(tmp_path / "root", 2, publish_to=url, publish_every=4, keep_published=2)
    outboxes = [Outbox(actor, max_pending=2) for actor in actors]
    for number in range(40):
        outboxes[number % 2].send({**content(number), ID: f"n{number}"})
        if number in (13, 25):
            ray.kill(actors[1], no_restart=False)
    for outbox in outboxes:
        outbox.flush()
    ray.get([actor.close.remote() for actor in actors])
    rows = read_ray(url, cache=cache, override_num_blocks=3).take_all()
    assert sorted(int(row["number"][0]) for row in rows) == list(range(40))
    assert len({row["episode_id"] for row in rows}) == 40
    for row in rows:
        assert_episode(row, int(row["number"][0]))
    shard = next((tmp_path / "url").glob("*/shard.json")).parent.name
    assert 0 < read_ray(f"{url}/{shard}", cache=cache).count() <= 4
    folders = sorted(path.name for path in (tmp_path / "root").iterdir())
    assert folders == ["recorder-00000", "recorder-00001"]
    assert all(len([*path.glob("published/*")]) <= 2 for path in (tmp_path / "root").iterdir())
    for actor in actors:
        ray.kill(actor)


def test_what_belongs_to_urls_is_refused_for_folders_and_a_recorder_keeps_a_shard(root, tmp_path):
    with pytest.raises(SchemaError, match="got cache, which belong to a URL"):
        read_ray(root, cache=tmp_path)
    with pytest.raises(SchemaError, match="keep_published: got 0, expected 1 or more"):
        Recorder(tmp_path, 9, 12, FIELDS, publish_to=f"file://{tmp_path}/url", keep_published=0)


def test_a_damaged_shard_of_a_predecessor_stops_no_recorder_and_is_named(tmp_path, caplog):
    place, url = tmp_path / "root", f"file://{tmp_path}/url"
    first = Recorder(place, 200, 12, FIELDS, META_FIELDS, publish_to=url)
    first.record(*[{**content(number), ID: f"n{number}"} for number in range(2)])
    first.close()
    damaged = place / "host-0123456789ab-00000"
    with ReplayBuffer(damaged, 200, 12, FIELDS, {**META_FIELDS, ID: "U32"}) as buffer:
        buffer.store_episode(**content(2), **{ID: "n2"})
    with open(damaged / "data" / "number.npy", "ab") as file:
        file.write(bytes(8))
    again = Recorder(place, 200, 12, FIELDS, META_FIELDS, publish_to=url)
    assert any(str(damaged) in text and "is stored again" in text for text in caplog.messages)
    assert again.record(*[{**content(number), ID: f"n{number}"} for number in range(4)]) == 2
    with pytest.raises(CorruptBufferError, match=damaged.name):  # all others are published
        again.close()
    data = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    assert sorted(int(data.episode(i)["number"][0]) for i in range(len(data))) == [0, 1, 2, 3]


@ray.remote(num_cpus=0)
class Elsewhere:
    """On a node that lacks the folder."""

    def rows(self, dataset, root):
        try:
            found = os.listdir(root)
        except FileNotFoundError:
            found = []
        return found, [row["name"] for row in dataset.take_all()]

    def refused(self, root):
        with pytest.raises(NotABufferError, match="no subfolder holds a buffer") as told:
            read_ray(root)
        return str(told.value)


@pytest.fixture
def lacking(tmp_path):
    """A second node, in a mount namespace in which the test's folder is empty; its id."""
    address = ray.get_runtime_context().gcs_address
    start = f"ray start --address={address} --num-cpus=1 --block --disable-usage-stats --object-store-memory=100000000"
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f"mount -t tmpfs none {tmp_path} && mount -t tmpfs none /tmp/ray && exec {sys.executable} -m {start}",
    ]
    command[-1] = command[-1].replace("-m ray", "-m ray.scripts.scripts")
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", tmp_path], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    here, deadline = ray.get_runtime_context().get_node_id(), time.monotonic() + 60
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as node:
        try:
            while not (new := [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here]):
                assert node.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            yield new[0]
        finally:
            os.killpg(node.pid, signal.SIGKILL)


@pytest.mark.slow
def test_rows_of_folders_that_one_node_has_are_read_there_whichever_node_consumes_them(root, lacking, tmp_path):
    there = Elsewhere.options(scheduling_strategy=NodeAffinitySchedulingStrategy(lacking, soft=False)).remote()
    names = [f"e{number}" for number in range(27)]
    lazy = read_ray(root, override_num_blocks=3)
    assert ray.get(there.rows.remote(lazy, root)) == ([], names)
    text = ray.get(there.refused.remote(root))
    assert str(root) in text


@pytest.mark.slow
@pytest.mark.timeout(120)  # without an error of ours Ray would run a task there again for ever
def test_folders_that_are_said_to_be_shared_and_are_not_are_named_by_the_task_that_lacks_them(root, lacking, tmp_path):
    there = {"scheduling_strategy": NodeAffinitySchedulingStrategy(lacking, soft=False)}
    rows = read_ray(root, override_num_blocks=3, shared=True, ray_remote_args=there)
    with pytest.raises(NotABufferError, match=f"{root}: .*on the node .*with shared=True every node must see it"):
        rows.take_all()


@pytest.mark.slow
def test_recorders_on_nodes_that_share_nothing_publish_to_one_root(lacking, tmp_path, tmp_path_factory):
    bucket = tmp_path_factory.mktemp("bucket")  # which both nodes see
    url, private = f"file://{bucket}/url", tmp_path / "lab"
    actors = recorders(private, 2, publish_to=url, publish_every=3)
    for number in range(10):
        ray.get(actors[number % 2].record.remote({**content(number), ID: f"n{number}"}))
    ray.get([actor.close.remote() for actor in actors])
    assert len([*private.iterdir()]) == 1  # the other recorder's lies on the other node
    there = NodeAffinitySchedulingStrategy(lacking, soft=False)
    rows = read_ray(url, cache=tmp_path / "cache", ray_remote_args={"scheduling_strategy": there}).take_all()
    assert sorted(int(row["number"][0]) for row in rows) == list(range(10))
    for row in rows:
        assert_episode(row, int(row["number"][0]))
    for actor in actors:
        ray.kill(actor)


# The page


@pytest.mark.parametrize("number", [None, 1, 2])
def test_the_blocks_of_the_page_run(number, tmp_path, monkeypatch):
    """All blocks in order, and each alone behind the set-up."""
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "ray.md"
    assert len(blocks_of(page)) == 3
    blocks = blocks_of(page) if number is None else blocks_alone(page, number)
    Path("page.py").write_text("\n".join(block["code"] for block in blocks))
    runpy.run_path("page.py")


# Kills


def finished(reference):
    """What a task returns, within a minute: it goes on, whoever was killed."""
    return ray.get(reference, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollout", "recorder", "learner"])
def test_twenty_kills_lose_no_published_episode_double_none_and_the_run_goes_on(tmp_path, victim):
    rng, chunk, root = np.random.default_rng(0), 150, tmp_path / "root"
    actors = recorders(root, 2, max_episodes=20_000)
    rollouts = [Rollout.remote(actor, tmp_path) for actor in actors]
    learner = Learner.remote(root)
    numbers = (range(start, start + chunk) for start in itertools.count(0, chunk))
    running = {actor: rollout.play.remote(next(numbers)) for actor, rollout in enumerate(rollouts)}
    learning, sent = learner.learn.remote(200), 2 * chunk
    for kill in range(20):
        which = kill % 2
        time.sleep(rng.uniform(0, 0.3))
        ray.kill({"rollout": rollouts[which], "recorder": actors[which], "learner": learner}[victim], no_restart=False)
        assert finished(running[which]) == chunk
        running[which] = rollouts[which].play.remote(next(numbers))
        sent += chunk
        if victim == "learner":
            assert finished(learning) > 0
            learning = learner.learn.remote(200)
    assert [finished(reference) for reference in running.values()] == [chunk, chunk]
    assert 0 < finished(learning) <= sent
    assert answered(tmp_path) == set(range(sent))
    assert_root(ConcatBuffer.from_root(root), range(sent))
    for actor in (*actors, *rollouts, learner):
        ray.kill(actor)
