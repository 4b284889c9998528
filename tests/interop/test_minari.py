"""Minari data sets in and out: what Minari gives of the original and of the copy of the copy is equal to the bit."""

import json
import warnings
from contextlib import contextmanager
from functools import partial
from hashlib import sha1
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.interop.minari import export_minari, import_minari
from memmap_buffer.interop.record import RecordEpisodes

# Minari before 0.5.4, the last for Python 3.10, stores every array of uint8 as JPEG.
AS_THEY_ARE = {"jpeg_encoding": False} if "jpeg_encoding" in signature(MinariStorage.new).parameters else {}
OBSERVATION = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (32, 32, 3), np.uint8 if AS_THEY_ARE else np.int16),
        "pose": spaces.Tuple(
            (spaces.Box(-9, 9, (2,), np.float64), spaces.Dict({"gear": spaces.Discrete(9, start=-3)}))
        ),
        "order": spaces.Text(6),
        "flags": spaces.MultiBinary(3),
    }
)
ACTION = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([3, 4])))
LENGTHS = (3, 1, 5)
FORMATS = ("hdf5", "arrow", "parquet")
every_format = pytest.mark.parametrize("data_format", FORMATS)


@pytest.fixture(autouse=True)
def local_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def stack(values):
    """Elements of a space as Minari's storages take them: columns."""
    if isinstance(values[0], dict):
        return {key: stack([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(stack([value[i] for value in values]) for i in range(len(values[0])))
    return list(values) if isinstance(values[0], str) else np.stack(values)


def episode(number, length, rng, data_format):
    contacts, distance = rng.integers(9, size=(length + 1, 2)), rng.normal(size=length + 1)
    # Minari's other formats keep an episode as a table: all its infos have one length
    infos = {
        "contacts": contacts[1:] if data_format == "hdf5" else contacts,
        "goal": {"distance": list(distance), "word": ["ab", "cde", "f", "g", "h", "i"][: length + 1]},
        "distance": list(distance),
    }
    return EpisodeBuffer(
        id=None,
        seed=100 + number if number else None,
        observations=stack([OBSERVATION.sample() for _ in range(length + 1)]),
        actions=stack([ACTION.sample() for _ in range(length)]),
        rewards=rng.normal(size=length),
        terminations=np.arange(length) == length - 1 if number % 2 else np.zeros(length, bool),
        truncations=np.zeros(length, bool) if number % 2 else np.arange(length) == length - 1,
        infos=infos,
    )


def make(data_format="hdf5", dataset_id="maze/test-v0", with_infos=True):
    """A local data set of nested observations."""
    rng = np.random.default_rng(1)
    OBSERVATION.seed(2)
    ACTION.seed(3)
    episodes = [episode(number, length, rng, data_format) for number, length in enumerate(LENGTHS)]
    if not with_infos:
        episodes = [EpisodeBuffer(**{**vars(each), "infos": None}) for each in episodes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = minari.create_dataset_from_buffers(
            dataset_id,
            episodes,
            observation_space=OBSERVATION,
            action_space=ACTION,
            algorithm_name="random",
            author={"a", "b"},
            description="for a test",
            data_format=data_format,
            **AS_THEY_ARE,
        )
    extra = {"level": 3, "note": "left", "score": 0.1}
    dataset.storage.update_episode_metadata(
        [extra, {"level": 4, "note": "right turn", "score": 0.7, "late": 1}], [0, 1]
    )
    return minari.load_dataset(dataset_id)


def assert_equal_trees(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal_trees(got[key], value)
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal_trees(one, other)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        if got.dtype == object:
            assert_equal_trees(tuple(got.reshape(-1)), tuple(expected.reshape(-1)))
        else:
            assert got.tobytes() == expected.tobytes()
    else:
        assert got == expected


def assert_equal_sets(got, expected):
    assert got.total_episodes == expected.total_episodes
    assert got.total_steps == expected.total_steps
    assert (got.observation_space, got.action_space) == (expected.observation_space, expected.action_space)
    assert got.env_spec == expected.env_spec
    for one, other in zip(got.iterate_episodes(), expected.iterate_episodes(), strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            assert_equal_trees(getattr(one, name), getattr(other, name))
        assert_equal_trees(one.infos or {}, other.infos or {})
    metadata = [each.storage.get_episode_metadata(range(each.total_episodes)) for each in (got, expected)]
    for one, other in zip(*metadata, strict=True):
        assert one == other
    of_the_copy = {"dataset_id", "dataset_size"}
    one, other = ({k: v for k, v in each.storage.metadata.items() if k not in of_the_copy} for each in (got, expected))
    assert one == other


@every_format
def test_a_data_set_comes_back_equal_to_the_bit(tmp_path, data_format):
    original = make(data_format)
    with import_minari("maze/test-v0", tmp_path / "b") as buffer:
        copy = export_minari(buffer, "maze/copy-v0", data_format=data_format)
    assert_equal_sets(copy, original)
    assert_equal_sets(minari.load_dataset("maze/copy-v0"), original)


@every_format
def test_what_is_imported_is_what_the_data_set_gives(tmp_path, data_format):
    original = make(data_format)
    buffer = import_minari(original.storage.data_path, tmp_path / "b")
    assert buffer.episode_lens.tolist() == list(LENGTHS)
    assert buffer.max_timesteps == max(LENGTHS)
    for i, expected in enumerate(original.iterate_episodes()):
        got = buffer.episode(i)
        assert_equal_trees(got["observation"]["camera"], expected.observations["camera"])
        assert_equal_trees(got["observation"]["pose"]["item1"]["gear"], expected.observations["pose"][1]["gear"])
        assert got["observation"]["order"].tolist() == expected.observations["order"]
        assert_equal_trees(got["action"]["item0"], expected.actions[0])
        assert_equal_trees(got["reward"], expected.rewards)
        np.testing.assert_array_equal(got["info"]["contacts"], expected.infos["contacts"])
        assert (int(got["seed"]), bool(got["given"]["seed"])) == ((100 + i, True) if i else (0, False))
        assert (bool(got["given"]["level"]), bool(got["given"]["late"])) == (i < 2, i == 1)
    assert buffer.sample(4, n_steps=1)["next_observation"]["camera"].shape == (4, 32, 32, 3)
    buffer.close()


GOALS = ("bottom burner", "bottom_burner", "slide cabinet", "1st", "Kettle", "kettle")
KITCHEN = spaces.Dict(  # as FrankaKitchen's: its goals have names with spaces
    {
        "observation": spaces.Box(-9, 9, (3,), np.float64),
        "desired_goal": spaces.Dict({name: spaces.Box(-9, 9, (2,), np.float64) for name in GOALS}),
    }
)
ARM = spaces.Dict({"left arm": spaces.Box(-1, 1, (2,), np.float32)})
SEEDS = (None, 7, 2**63, 2**64 - 1)  # Minari draws them from 64 bits


def make_kitchen(data_format):
    """A data set of which neither spaces nor infos nor metadata have identifiers as their keys."""
    KITCHEN.seed(1)
    ARM.seed(2)
    episodes = [
        EpisodeBuffer(
            seed=seed,
            options={"start at": {"x-y": 2}} if seed == 7 else None,
            observations=stack([KITCHEN.sample() for _ in range(4)]),
            actions=stack([ARM.sample() for _ in range(3)]),
            rewards=np.arange(3.0),
            terminations=np.arange(3) == 2,
            truncations=np.zeros(3, bool),
            infos={"tasks to do": [1, 2, 3, 4], "step-wise": {"is done?": [True, False] * 2, "deep": {"1": np.eye(4)}}},
        )
        for seed in SEEDS
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minari.create_dataset_from_buffers(
            "kitchen/test-v0",
            episodes,
            observation_space=KITCHEN,
            action_space=ARM,
            data_format=data_format,
            **AS_THEY_ARE,
        )


@every_format
def test_keys_that_are_no_identifiers_and_seeds_of_64_bits_come_back(tmp_path, data_format):
    original = make_kitchen(data_format)
    with import_minari("kitchen/test-v0", tmp_path / "b") as buffer:
        assert {name for name in buffer.fieldnames if "goal" in name} == {
            f"observation.desired_goal.{name}"
            for name in ("n1st", "Kettle", "bottom_burner_2", "bottom_burner", "kettle_2", "slide_cabinet")
        }
        others = {"action.left_arm", "info.tasks_to_do", "info.step_wise.is_done_", "info.step_wise.deep.n1"}
        assert others <= set(buffer.fieldnames)
        goals = next(original.iterate_episodes()).observations["desired_goal"]
        got = buffer.episode(0)["observation"]["desired_goal"]
        assert_equal_trees((got["bottom_burner_2"], got["kettle_2"]), (goals["bottom burner"], goals["kettle"]))
        assert buffer.get_all_data(meta_fields=["seed"])["seed"].tolist() == [seed or 0 for seed in SEEDS]
        assert [bool(buffer.episode(i)["given"]["seed"]) for i in range(4)] == [False, True, True, True]
        copy = export_minari(buffer, "kitchen/copy-v0", data_format=data_format)
    assert_equal_sets(copy, original)


def test_a_data_set_in_nested_namespaces_is_fetched_from_a_server(tmp_path, monkeypatch):
    """A server of files that answers as Hugging Face's does; nothing but this machine is asked."""
    dataset = make(dataset_id="maze/inner/test-v0")
    assert (tmp_path / "minari/maze/inner/namespace_metadata.json").exists()
    listed = {"datasets": [dataset.id], "namespaces": ["maze/inner"]}
    (tmp_path / "minari/maze/namespace_metadata.json").write_text(json.dumps(listed))
    with hub(tmp_path / "minari/maze", monkeypatch, tmp_path / "cache"):
        monkeypatch.setenv("MINARI_REMOTE", "hf://someone")
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "fetched"))
        with pytest.raises(FileNotFoundError, match="not found locally"):
            import_minari(dataset.id, tmp_path / "b")
        with import_minari(dataset.id, tmp_path / "b", download=True) as buffer:
            monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "again"))
            assert_equal_sets(export_minari(buffer, "other/place/deeper/test-v3"), dataset)
    assert minari.namespace.list_local_namespaces() == ["other", "other/place", "other/place/deeper"]


class Hub(SimpleHTTPRequestHandler):
    """The files of a folder as one repository, and what Hugging Face says of it."""

    def do_GET(self):
        route, root = self.path.partition("?")[0], Path(self.directory)
        paths = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        about = {"id": "someone/maze", "sha": COMMIT, "siblings": [{"rfilename": path} for path in paths]}
        if route == "/api/datasets":
            self.answer(json.dumps([about]).encode())
        elif route.startswith("/api/") and "/tree/" in route:
            files = [{"path": path, "size": (root / path).stat().st_size} for path in paths]
            self.answer(json.dumps([{"type": "file", "oid": COMMIT} | file for file in files]).encode())
        elif route.startswith("/api/"):
            self.answer(json.dumps(about).encode())
        else:
            path = root / unquote(route.partition("/resolve/")[2].partition("/")[2])
            self.answer(path.read_bytes() if path.is_file() else None)

    do_HEAD = do_GET

    def answer(self, content):
        self.send_response(200 if content is not None else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", f'"{sha1(content or b"").hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    def log_message(self, *arguments):
        pass


COMMIT = "0123456789" * 4


@contextmanager
def hub(folder, monkeypatch, cache):
    constants = pytest.importorskip("huggingface_hub.constants")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield
        server.shutdown()
        thread.join()


def test_a_filtered_data_set_and_chosen_infos_are_imported_alone(tmp_path):
    longer = make().filter_episodes(lambda each: len(each) > 1)
    buffer = import_minari(longer, tmp_path / "b", infos=["contacts"], max_episodes=9)
    assert buffer.episode_lens.tolist() == [3, 5]
    assert [name for name in buffer.fieldnames if name.startswith("info")] == ["info.contacts"]
    assert (buffer.max_episodes, buffer.episode(1)["seed"]) == (9, 102)
    assert not [name for name in import_minari(longer, tmp_path / "c", infos=False).fieldnames if "info" in name]


def test_what_was_recorded_becomes_a_data_set_of_its_environment(tmp_path):
    with RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "b", max_episodes=9) as env:
        for seed in range(3):
            env.reset(seed=seed)
            while not any(env.step(seed % 2)[2:4]):
                pass
    buffer = ReplayBuffer.from_folder(tmp_path / "b")
    with pytest.raises(SchemaError, match=r"does not say of which environment it is; pass env="):
        export_minari(buffer, "cart-v0")
    dataset = export_minari(buffer, "cart-v0", env="CartPole-v1", author={"me"})
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    assert dataset.storage.metadata["author"] == {"me"}
    for i, each in enumerate(dataset.iterate_episodes()):
        assert_equal_trees(each.observations, buffer.episode(i)["observation"])
    assert [each["seed"] for each in dataset.storage.get_episode_metadata(range(3))] == [0, 1, 2]
    back = import_minari("cart-v0", tmp_path / "c")
    for i in range(3):
        assert_equal_trees(
            {k: np.asarray(v) for k, v in back.episode(i).items()},
            {k: np.asarray(v) for k, v in buffer.episode(i).items()},
        )


def test_the_environment_of_a_data_set_outlives_the_way_through_a_folder(tmp_path):
    with RecordEpisodes(gymnasium.make("CartPole-v1"), tmp_path / "b", max_episodes=9) as env:
        env.reset(seed=1)
        while not any(env.step(1)[2:4]):
            pass
        first = export_minari(env.buffer, "cart-v0", env=env)
    with import_minari(first, tmp_path / "c") as buffer:
        assert_equal_sets(export_minari(buffer, "cart-v1"), first)


@pytest.mark.parametrize("truncated", ["limits.time", None])
def test_the_fields_that_are_declared_to_end_episodes_become_terminations_and_truncations(tmp_path, truncated):
    fields = {
        "observation": Field("float", (4,), final=True),
        "action": "int",
        "reward": "float",
        "over": ("uint8", 1),
        "limits": {"time": "bool", "space": "bool"},
        "terminated": "int",
    }
    with ReplayBuffer(tmp_path / "b", 2, 3, fields, terminated="over", truncated=truncated) as buffer:
        for over in (0, 2):
            limits = {"time": [0, 1 - over // 2], "space": [1, 1]}
            steps = {"action": [0, 1], "reward": [0, 1], "over": [[0], [over]], "terminated": [7, 8]}
            buffer.store_episode(observation=np.zeros((3, 4)), limits=limits, **steps)
        dataset = export_minari(buffer, "cart-v0", env="CartPole-v1")
    first, second = dataset.iterate_episodes()
    assert first.terminations.tolist() == second.truncations.tolist() == [False, False]
    assert second.terminations.tolist() == [False, True]
    assert first.truncations.tolist() == [False, truncated is not None]
    assert first.infos["terminated"].tolist() == [7, 8]
    assert set(first.infos["limits"]) == ({"space"} if truncated else {"space", "time"})


def test_a_buffer_without_rewards_is_refused(tmp_path):
    fields = {"observation": Field("float", (4,), final=True), "action": "int"}
    buffer = ReplayBuffer(tmp_path / "b", 2, 3, fields)
    with buffer, pytest.raises(SchemaError, match="it has no field 'reward', which Minari needs"):
        export_minari(buffer, "cart-v0", env="CartPole-v1")


def test_an_episode_without_its_final_observation_is_refused(tmp_path):
    fields = {
        "observation": ("float", 4),
        "action": "int",
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
    }
    buffer = ReplayBuffer(tmp_path / "b", 2, 3, fields)
    buffer.store_episode(
        observation=np.zeros((2, 4)), action=[0, 1], reward=[0, 1], terminated=[0, 0], truncated=[0, 1]
    )
    with pytest.raises(SchemaError, match="episode 0: it has no final observation"):
        export_minari(buffer, "cart-v0", env="CartPole-v1")
    buffer.close()


def test_a_minari_that_stores_images_as_jpeg_alone_is_given_none_and_all_else(tmp_path, monkeypatch):
    def new(*spaces, env_spec, data_format, make=MinariStorage.new):
        return make(*spaces, env_spec=env_spec, data_format=data_format, **AS_THEY_ARE)

    monkeypatch.setattr(MinariStorage, "new", new)
    fields = {"observation": Field("float", (4,), final=True), "action": "int", "reward": "float", "byte": "uint8"}
    steps = {"observation": np.zeros((3, 4)), "action": [0, 1], "reward": [0, 1], "byte": [1, 2]}
    with ReplayBuffer(tmp_path / "b", 2, 3, fields) as buffer:
        buffer.store_episode(**steps)
        (episode,) = export_minari(buffer, "cart-v0", env="CartPole-v1").iterate_episodes()
        assert episode.infos["byte"].tolist() == [1, 2]
        buffer.add_field("camera", Field("uint8", (32, 32, 3), default=0))
        with pytest.raises(SchemaError, match=r"camera: got arrays of uint8.*JPEG.*install Minari 0\.5\.4"):
            export_minari(buffer, "cart-v1", env="CartPole-v1")


def test_infos_that_fit_no_field_are_named(tmp_path):
    dataset = make(with_infos=False)
    one = dict(next(iter(dataset.storage.get_episodes([0]))))
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    for infos in ({"laps": np.arange(2)}, {"x": np.arange(3)}):
        dataset.update_dataset_from_buffer([EpisodeBuffer(**{name: one[name] for name in names}, infos=infos)])
    with pytest.raises(
        SchemaError, match=r"info\.laps: got 2 entries in an episode of 3 steps, expected 3 or one more"
    ):
        import_minari(dataset, tmp_path / "b")
    with pytest.raises(SchemaError, match=r"info\.x.*: only 1 of 5 episodes have it; leave it out"):
        import_minari(dataset, tmp_path / "b", infos=["x"])
    assert not (tmp_path / "b").exists()
    import_minari(dataset, tmp_path / "b", infos=False).close()
