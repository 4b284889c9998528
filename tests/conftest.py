"""Buffers in which every value tells where it belongs, so that a row of another episode or timestep is seen."""

import importlib.util
import itertools
import shutil
import subprocess
import sys
import warnings

import parts
import pytest
from azure_server import azure_server, make_container
from inside import get_inside, loops, set_inside
from s3_server import make_bucket, s3_server

from memmap_buffer import Field, ReplayBuffer

TORCH = importlib.util.find_spec("torch") is not None


class LeftOut:
    """Where scripts/install left these out, whatever comes upon one is skipped: a test, or the file that imports it."""

    NAMES = ("torch", "accelerate", "lightning", "memmap_replay_buffer", "mujoco", "stable_baselines3")

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.NAMES:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


sys.meta_path.append(LeftOut)  # the last that is asked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A child process that failed is heard; the test of one that came upon torch, where there is none, is skipped."""
    report = yield
    error = call.excinfo and call.excinfo.value
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        for name in ("stdout", "stderr"):
            text = getattr(error, name) or ""
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            report.sections.append((f"{name} of the child process", text))
    told = [report.longreprtext, *(text for _, text in report.sections)]
    text = "" if TORCH or not report.failed else "\n".join(told)
    if "No module named 'torch'" in text or "torch is not installed" in text:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "torch is not installed, for a child process")
    return report


def pytest_addoption(pluginmanager):
    pluginmanager.register(parts)


FIELDS = {
    "number": "int",
    "t": "int",
    "observation": Field("float32", (3,), final=True),
    "camera": {"left": ("uint8", (2, 2)), "right": ("uint8", (2, 2))},
    "half": "bfloat16",
    "text": "U8",
    "reward": "float",
    "terminated": "bool",
}
META_FIELDS = {"task_id": "int", "name": "U8", "success": "bool"}


def record_episode(buffer, number, length):
    """Record episode `number`: odd ones end by `terminated` and have no final observation, even ones are cut short."""
    with buffer.one_episode(task_id=number % 2, name=f"e{number}") as episode:
        for t in range(length):
            episode.store(
                number=number,
                t=t,
                observation=[number, t, 1],
                camera={"left": [[number, t], [0, 0]], "right": [[0, 0], [number, t]]},
                half=t + 0.5,
                text=f"{number}:{t}",
                reward=t + 1.0,
                terminated=bool(number % 2) and t == length - 1,
            )
        if number % 2 == 0:
            episode.final(observation=[number, length, 1])
        episode["success"] = True


@pytest.fixture(autouse=True)
def no_loops(monkeypatch):
    """Each test goes without the loops of `kernels`, as where numba is not installed."""
    set_inside(monkeypatch, tree_loops=None, compiled_loops=lambda: None)


@pytest.fixture(scope="session")
def s3():
    """The URL of a server of S3, one for all tests."""
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package)
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3):
    """(URL, storage options) of a new bucket."""
    return make_bucket(s3, f"test-{next(NUMBERS)}")


@pytest.fixture(scope="session")
def azure():
    """The URL of a server of Azure Blob Storage, one for all tests."""
    pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not in the PATH: npm install -g azurite")
    with azure_server(program) as url:
        yield url


@pytest.fixture
def new_root(request, tmp_path):
    """`new_root(kind)`: (URL, storage options) of a new root in a store of that kind."""

    def make(kind):
        if kind == "s3":
            return request.getfixturevalue("bucket")
        if kind == "azure":
            warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)  # azure-core does so
            return make_container(request.getfixturevalue("azure"), f"test-{next(NUMBERS)}")
        return f"{kind}://{tmp_path}/url", {}

    return make


NUMBERS = itertools.count()


@pytest.fixture(params=["numpy", "loops"])
def both_ways(request, monkeypatch, no_loops):
    """Once by numpy, once by the loops."""
    if request.param == "loops":
        set_inside(monkeypatch, tree_loops=loops())


@pytest.fixture
def record():
    """`record(buffer, number, length)`."""
    return record_episode


@pytest.fixture
def recorded(tmp_path):
    """`recorded(lengths, name=..., **options)`: a buffer of episodes 0, 1, … of these lengths."""
    made = []

    def make(lengths=(3, 4, 5, 6), name="buffer", **options):
        options = {"max_episodes": 8, "max_timesteps": 12, "fields": FIELDS, "meta_fields": META_FIELDS} | options
        buffer = ReplayBuffer(tmp_path / name, **options)
        made.append(buffer)
        for number, length in enumerate(lengths):
            record_episode(buffer, number, length)
        return buffer

    yield make
    for buffer in made:
        buffer.close()


@pytest.fixture
def in_the_middle(monkeypatch):
    """`in_the_middle(action)`: it happens after the first field of the next batch was copied, before the others are."""

    def arrange(action, times=1):
        copy, gather, left = get_inside("copy_rows"), get_inside("row_gather"), [action] * times

        def copied(self, whole):
            if not left:
                return copy(self, whole)
            batch = dict(field_by_field(whole))
            first = next((key for key, column in batch.items() if isinstance(column, gather)), None)
            columns = copy(self, {first: batch[first]} if first is not None else {})
            left.pop()()
            columns |= copy(self, {key: column for key, column in batch.items() if key != first})
            return {key: columns[key] for key in batch} | columns  # lengths of lists have no column of their own

        def field_by_field(batch):
            for key, column in batch.items():
                if not isinstance(column, gather):
                    yield key, column
                    continue
                for one, name in zip(column.group.keys, column.group.names, strict=True):
                    yield one, column._replace(group=column.group._replace(keys=(one,), names=(name,)))

        set_inside(monkeypatch, copy_rows=copied)

    return arrange


def flat(data):
    """Dotted key -> tensor or list."""
    if not isinstance(data, dict):
        return {"": data}
    return {f"{key}.{rest}".strip("."): leaf for key, value in data.items() for rest, leaf in flat(value).items()}


def assert_same(got, expected):
    """Two batches or items are equal, text included."""
    import torch

    got, expected = flat(got), flat(expected)
    assert got.keys() == expected.keys()
    for key, value in got.items():
        same = torch.equal(value, expected[key]) if isinstance(value, torch.Tensor) else value == expected[key]
        assert same, key
