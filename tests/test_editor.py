"""What stands at the door of an editor: options that are checked and completed, and what objects say of themselves."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memmap_buffer import (
    ConcatBuffer,
    EpisodeIndexError,
    Hindsight,
    Offsets,
    Prioritized,
    ReplayBuffer,
    RunningStatistics,
    Scale,
    Schema,
    SchemaError,
    Window,
)

ROOT = Path(__file__).resolve().parent.parent
CODE = ROOT / "tests" / "support" / "editor.py"


def test_a_type_checker_finds_wrong_options_and_no_others():
    pytest.importorskip("torch", reason="the types of batches are torch's")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", str(CODE)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found: dict[int, str] = {}
    for line, text in re.findall(rf"^[^:]*{CODE.name}:(\d+): error: (.*)$", out, re.MULTILINE):
        found[int(line)] = found.get(int(line), "") + text
    marked = {
        number: line.rsplit("# E: ", 1)[1]
        for number, line in enumerate(CODE.read_text().splitlines(), 1)
        if "  # E: " in line
    }
    assert found.keys() == marked.keys(), out
    unnamed = {number: found[number] for number, name in marked.items() if name not in found[number]}
    assert all("No overload variant" in text for text in unnamed.values()), unnamed
    assert len(unnamed) <= 3


def doubled(batch):
    return batch


def test_a_dataset_says_where_it_reads_and_what(recorded):
    buffer = recorded()
    path = repr(str(buffer.folder))
    how = {"n_steps": 2, "gamma": 0.9, "filter_meta": {"task_id": 1}, "filter_fields": {"t": (1, None)}}
    assert repr(buffer.dataset(**how)) == (
        f"<EpisodeDataset of {path}, NStep(n=2, gamma=0.9), filter_meta={{'task_id': 1}}, "
        "filter_fields={'t': (1, None)}: 8 items>"
    )
    how = {"split": {"a": 2, "b": 1}, "part": "b", "min_episode_len": 2, "format": "numpy", "transform": doubled}
    assert repr(buffer.dataset(**how)) == (
        f"<ItemDataset of {path}, Trajectory(), split={{'a': 2, 'b': 1}}, part='b', min_episode_len=2, "
        "transform=doubled, format='numpy': 1 items>"
    )
    dataset = buffer.dataset(view=Window(3, stride=2), hindsight=Hindsight(doubled, "number", "t", strategy="final"))
    assert "Window(length=3, stride=2), hindsight=Hindsight(reward_fn=doubled, goal='number'" in repr(dataset)
    dataset = pickle.loads(pickle.dumps(buffer.dataset(timestep_level=True)))
    assert repr(dataset) == f"<EpisodeDataset of {path}, Timestep(): 18 items>"
    assert repr(buffer.dataset().at([1, 2])).startswith("<Batch of 2 items: number, t, observation,")


def test_loaders_and_buffers_say_what_they_hold(recorded):
    buffer = recorded()
    loader = buffer.dataloader(4, timestep_level=True, shuffle=True, seed=3)
    assert repr(loader).startswith("<EpisodeLoader: 5 batches of 4, shuffle=True, seed=3, num_workers=0, of <Episode")
    loader = buffer.dataloader(4, timestep_level=True, prioritized=Prioritized(alpha=1))
    assert "Timestep(), prioritized=Prioritized(alpha=1): 18 items>>" in repr(loader)
    both = ConcatBuffer([buffer, recorded(name="b"), recorded(name="c")])
    assert re.fullmatch(r"<ConcatBuffer of '.*buffer', '.*b' and 1 more: 12 episodes, 54 steps, fields .*>", repr(both))
    assert repr(buffer.create_collector(3, ["t"])) == "<Collector of 3 groups: 0 steps, fields t>"
    with buffer.one_episode() as episode:
        assert repr(episode) == "<Episode: open, 0 timesteps>"
        episode.abort()


def test_values_are_shown_as_they_are_written():
    schema = Schema({"x": "float"}, {"name": "U8"})
    assert repr(schema).startswith("Schema({'x': Field(dtype='float32'")
    view = Offsets(x=(-1, 0), boundary="drop")
    assert repr(view) == "Offsets({'x': (-1, 0)}, boundary='drop', padding='zero', stride=1)"
    assert repr(Offsets(x=(0,), drop_last=3, pad_after=0)).endswith("stride=1, drop_last=3, pad_after=0)")
    assert repr(Scale("x")) == "Scale(fields=('x',), by=255.0)"


def test_statistics_say_of_what_they_are(recorded):
    assert repr(recorded().statistics(["reward", "t"])) == "<Statistics of 4 episodes, the newest 3: reward, t>"
    running = RunningStatistics((2,), 10)
    running.add(np.zeros((4, 2)))
    assert repr(running) == "<RunningStatistics: 4 entries so far, of 10 a sample is kept>"


def test_a_notebook_shows_the_fields_as_a_table(recorded):
    buffer = recorded()
    for held in (buffer, ConcatBuffer([buffer])):
        html = held._repr_html_()
        assert html.count("<tr>") == 1 + len(buffer.schema.all)
        assert "<td>observation</td><td>float32</td><td>(3,)</td><td>timestep, and a final one</td>" in html
        assert "&lt;" in html
        assert "<ReplayBuffer" not in html


@pytest.fixture
def filmed(tmp_path):
    fields = {
        "image": ("uint8", (8, 10, 3)),
        "gray": ("float", (9, 8)),
        "x": ("float", 3),
        "text": "U4",
        "big": ("float", 99),
    }
    with ReplayBuffer(tmp_path, 4, 20, fields) as buffer:
        for length in (12, 3):
            steps = {
                name: np.zeros((length, *field.shape)) for name, field in buffer.schema.fields.items() if name != "text"
            }
            steps["image"][:] = np.arange(length).reshape(-1, 1, 1, 1)
            buffer.store_episode(**steps, text=["a"] * length)
        yield buffer


def test_an_episode_is_shown_as_frames_and_curves(filmed):
    pytest.importorskip("matplotlib")
    picture = filmed.show(0)
    assert repr(picture).startswith("<Picture of episode 0: 12 timesteps: 3 panels")
    assert [axes.get_title(loc="left") for axes in picture.figure.axes] == ["image", "gray", "x"]
    image, gray, curves = picture.figure.axes
    shown = image.images[0].get_array()
    assert shown.shape == (8, 8 * 10, 3)
    assert shown[0, ::10, 0].tolist() == [0, 2, 3, 5, 6, 8, 9, 11]
    assert gray.images[0].get_array().shape == (9, 8 * 8, 3)
    assert [len(line.get_xdata()) for line in curves.lines] == [12] * 3
    assert picture._repr_png_()[:4] == b"\x89PNG"
    assert filmed.show().figure.axes[0].images[0].get_array().shape == (8, 3 * 10, 3)
    assert [axes.get_title(loc="left") for axes in ConcatBuffer([filmed]).show(1, ["x"]).figure.axes] == ["x"]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((5,), EpisodeIndexError, "episode 5: the buffer has 2"),
        ((0, ["images"]), SchemaError, "fields: got 'images'"),
        ((0, ["text", "big"]), SchemaError, "fields: text, big: no images, and no numbers of at most 32"),
    ],
)
def test_what_cannot_be_shown_is_refused(filmed, given, error, match):
    pytest.importorskip("matplotlib")
    with pytest.raises(error, match=match):
        filmed.show(*given)
