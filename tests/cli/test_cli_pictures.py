"""`plot`, `video` and `view`: what is in the files that they write, read back by other programs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from cli_cases import Case, episode_of, main, make, run
from fault_injection import listing
from inside import set_inside
from matplotlib.figure import Figure
from PIL import Image

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import draw_lines, frames_of, is_image


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make(tmp_path / "buffer")


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(*arguments) == 2
    return capsys.readouterr().err


# plot


@pytest.mark.parametrize(
    "options", [[], ["--episode", "4"], ["--episode", "last", "--field", "observation.state"]], ids=str
)
def test_plot_writes_a_picture_with_something_drawn_on_it(case: Case, tmp_path: Path, options: list[str]) -> None:
    before = listing(case.folder)
    assert main("plot", case.folder, "--out", tmp_path / "plot.png", *options) == 0
    with Image.open(tmp_path / "plot.png") as picture:
        colours = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colours) > 20
    assert listing(case.folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buffer", "plot.png"]


def plotted(folder: Path, *options: str) -> tuple[str, list[Any]]:
    """The title and the axes of the picture that `plot` saves."""
    saved: list[Figure] = []

    def keep(figure: Figure, place: Path, **_: Any) -> None:
        saved.append(figure)
        place.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        assert main("plot", folder, "--out", folder.parent / "plot.png", "--yes", *options) == 0
    (figure,) = saved
    return figure.get_suptitle(), figure.axes


def test_plot_draws_the_values_that_the_library_gives(case: Case) -> None:
    lengths, _, returns = plotted(case.folder)[1]
    (one,) = plotted(case.folder, "--episode", "4", "--field", "reward")[1]
    bars = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in lengths.patches if bar.get_height()}
    assert bars == Counter(case.lengths.values())
    points, mean = returns.lines
    assert points.get_xdata().tolist() == list(case.returns)
    assert points.get_ydata() == pytest.approx(list(case.returns.values()))
    assert mean.get_ydata() == pytest.approx(np.mean(list(case.returns.values())))
    assert one.lines[0].get_ydata().tolist() == episode_of(4, case.lengths[4])["reward"].tolist()
    (frames,) = plotted(case.folder, "--episode", "4", "--field", "observation.pixels")[1]
    assert len(frames.get_images()) == 1


def test_axes_say_what_is_drawn_and_in_which_unit(case: Case) -> None:
    lengths, over_time, returns = plotted(case.folder)[1]
    title, (action, reward) = plotted(case.folder, "--episode", "4", "--field", "action", "--field", "reward")
    assert title == f"buffer: episode 4: {case.lengths[4]} timesteps"
    assert (lengths.get_xlabel(), lengths.get_ylabel()) == ("length (timesteps)", "episodes")
    assert (over_time.get_xlabel(), over_time.get_ylabel()) == ("episode (number)", "length (timesteps)")
    assert returns.get_ylabel() == "return (sum of reward)"
    assert next(text.get_text() for text in returns.get_legend().get_texts()) == "an episode"
    assert [axes.get_title(loc="left") for axes in (action, reward)] == ["action", "reward"]
    assert [axes.get_xlabel() for axes in (action, reward)] == ["", "timestep"]


@pytest.mark.parametrize(("lines", "named"), [(1, 0), (7, 7), (11, 0)])
def test_several_lines_are_told_apart_by_a_legend(lines: int, named: int) -> None:
    axes = Figure().subplots()
    draw_lines(axes, "joints", np.zeros((5, lines)))
    legend = axes.get_legend()
    assert (len(legend.get_texts()) if legend else 0) == named


def test_plot_says_what_cannot_be_drawn(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--field", "reward", "--out", tmp_path / "plot.png"]
    assert "--field: names fields of one episode; say which by --episode" in error_of(
        capsys, "plot", case.folder, *arguments
    )
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    assert "no episode to draw" in error_of(capsys, "plot", tmp_path / "empty", "--out", tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_lists_are_no_curves_and_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "ids": ("int", (None,)),
        "boxes": ("float", (None, 4)),
        "crops": ("uint8", (None, 9, 9)),
        "reward": "float",
    }
    with ReplayBuffer(tmp_path / "buffer", 3, 4, fields) as buffer:
        steps = {"ids": [[1], [2, 3]], "boxes": [np.ones((2, 4)), []], "crops": [[], np.ones((1, 9, 9))]}
        buffer.store_episode(**steps, reward=[1, 2])
        assert len(buffer.show(0).figure.axes) == 1
        with pytest.raises(SchemaError, match=r"fields: ids, boxes: no images, and no numbers .* read, but not drawn"):
            buffer.show(0, ["ids", "boxes", "reward"])
    out = tmp_path / "plot.png"
    assert main("plot", tmp_path / "buffer", "--episode", "0", "--out", out) == 0
    for name in ("ids", "boxes", "crops"):
        assert f"fields: {name}: no images, and no numbers" in error_of(
            capsys, "plot", tmp_path / "buffer", "--episode", "0", "--field", name, "--out", tmp_path / "other.png"
        )
        assert f"field '{name}': object () is no image" in error_of(
            capsys, "video", tmp_path / "buffer", "0", "--field", name, "--out", tmp_path / "film.mp4"
        )
    assert "the fields that look like images are none" in error_of(capsys, "video", tmp_path / "buffer", "0")


def test_a_picture_of_an_episode_leaves_out_no_field_that_is_named(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, 3, 4, {"state": ("float", 2), "task": {"instruction": "U8"}}) as buffer:
        buffer.store_episode(state=np.ones((2, 2)), task={"instruction": ["go", "stop"]})
        assert len(buffer.show(0).figure.axes) == len(buffer.show(0, ["state"]).figure.axes) == 1
        with pytest.raises(SchemaError, match=r"fields: task\.instruction: no images, and no numbers"):
            buffer.show(0, ["state", "task.instruction"])


# video


def test_an_mp4_has_a_frame_for_every_image_of_its_size_and_nearly_its_colours(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 12 * 64 * 48 * 3).reshape(12, 64, 48, 3).astype("uint8")
    with ReplayBuffer(tmp_path / "buffer", 3, 20, {"image": ("uint8", (64, 48, 3))}) as buffer:
        buffer.store_episode(image=smooth)
    assert main("video", tmp_path / "buffer", "0", "--out", tmp_path / "film.mp4", "--fps", 10) == 0
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert float(film.streams.video[0].average_rate) == 10
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)])
    assert frames.shape == smooth.shape
    assert np.abs(frames.astype(int) - smooth).mean() < 6


def test_an_mp4_of_odd_size_is_padded_by_its_edge(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", 3, 20, {"image": ("uint8", (9, 11))}) as buffer:
        buffer.store_episode(image=np.full((5, 9, 11), 200))
    assert main("video", tmp_path / "buffer", "first", "--out", tmp_path / "film.mp4") == 0
    with av.open(str(tmp_path / "film.mp4")) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert [frame.shape for frame in frames] == [(10, 12, 3)] * 5
    assert np.abs(np.stack(frames).astype(int) - 200).max() <= 3


def test_a_contact_sheet_has_frames_spread_over_the_episode(case: Case, tmp_path: Path) -> None:
    assert main("video", case.folder, "6", "--out", tmp_path / "sheet.png") == 0
    frames = episode_of(6, case.lengths[6])["observation"]["pixels"]
    with Image.open(tmp_path / "sheet.png") as picture:
        sheet = np.asarray(picture)
    assert sheet.shape == (
        4 * (80 + 14),
        4 * 100,
        3,
    )  # frames of 8 × 10, ten times as large, and a line for their number
    np.testing.assert_array_equal(sheet[:80:10, :100:10], frames[0])
    np.testing.assert_array_equal(sheet[-94:-14:10, -100::10], frames[-1])
    numbers = sheet.reshape(4, 94, 4, 100, 3)[:, 80:].swapaxes(1, 2).reshape(16, -1)
    assert numbers.any(axis=1).all() and len(np.unique(numbers, axis=0)) == 16


def test_a_gif_has_every_frame(case: Case, tmp_path: Path) -> None:
    assert main("video", case.folder, "9", "--field", "observation.pixels", "--out", tmp_path / "film.gif") == 0
    with Image.open(tmp_path / "film.gif") as film:
        assert (film.n_frames, film.size) == (case.lengths[9] + 1, (10, 8))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.full((2, 8, 9), 7, "uint8"), 7),
        (np.full((2, 8, 9, 1), 7, "uint8"), 7),
        (np.full((2, 3, 8, 9), 7, "uint8"), 7),
        (np.full((2, 8, 9, 4), 7, "uint8"), 7),
        (np.full((2, 8, 9), 1.0), 255),
        (np.full((2, 8, 9), np.nan), 0),
        (np.full((2, 8, 9, 3), 2.5, "float32"), 255),
        (np.full((2, 8, 9), True), 255),
        (np.full((2, 8, 9), 300, "int32"), 255),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else str(value),
)
def test_every_layout_of_an_image_becomes_bytes(values: Any, expected: int) -> None:
    frames = frames_of(values, "image")
    assert (frames.shape, frames.dtype) == ((2, 8, 9, 3), np.uint8)
    assert np.unique(frames).tolist() == [expected]


def test_a_field_that_is_no_image_is_refused_by_name(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for field, complaint in {
        "observation.state": "field 'observation.state': float32 (3,) is no image",
        "observation": "name one; the fields that look like images are observation.pixels",
        "pixels": "--field: got 'pixels'",
    }.items():
        out = ["--out", tmp_path / "film.mp4"]
        assert complaint in error_of(capsys, "video", case.folder, "4", "--field", field, *out)
    assert "ends in .mp4, .gif or .png" in error_of(capsys, "video", case.folder, "4", "--out", "film.avi")


def test_a_picture_replaces_another_only_after_a_yes(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "film.gif"
    out.write_text("mine")
    done = run("video", case.folder, "4", "--out", out, given="n\n")
    assert (done.returncode, done.stdout) == (2, f"Replace {out}? [y/N] ")
    assert done.stderr == f"memmap-buffer: {out}: it is there already, and was left as it is\n"
    assert out.read_text() == "mine"
    assert main("video", case.folder, "4", "--out", out, "--yes") == 0
    assert out.read_bytes().startswith(b"GIF")


def test_an_interrupted_picture_is_not_there(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(place: Path, *_: Any) -> None:
        place.write_bytes(b"half")
        raise KeyboardInterrupt

    set_inside(monkeypatch, write_gif=interrupted)
    assert main("video", case.folder, "4", "--out", tmp_path / "film.gif") == 130
    assert [path.name for path in tmp_path.iterdir()] == ["buffer"]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (Field("uint8", (64, 64, 3)), True),
        (Field("uint8", (3, 64, 64)), True),
        (Field("float32", (84, 84)), True),
        (Field("uint8", (4, 84, 84)), True),
        (Field("float32", (3, 3)), False),
        (Field("int64", (64, 64)), False),
        (Field("uint8", (64,)), False),
        (Field("uint8", (5, 64, 64)), False),
        (Field("uint8", (2, 64, 64, 3)), False),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}" if isinstance(value, Field) else "",
)
def test_images_are_known_by_their_shape(field: Field, expected: bool) -> None:
    assert is_image(field) is expected


@pytest.mark.parametrize(("command", "module"), [("plot", "matplotlib"), ("video", "av"), ("view", "rerun")])
def test_a_missing_extra_is_named_in_one_line(
    case: Case,
    tmp_path: Path,
    command: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (module, f"{module}.figure"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    arguments = {"plot": [], "video": ["4"], "view": []}[command]
    out = ["--save" if command == "view" else "--out", tmp_path / ("e.rrd" if command == "view" else "e.mp4")]
    err = error_of(capsys, command, case.folder, *arguments, *out)
    assert err.count("\n") == 1
    assert f"pip install 'memmap-buffer[{'rerun' if command == 'view' else command}]'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["buffer"]


@pytest.mark.parametrize(
    ("out", "text"), [("x.foo", "ends in one of .*[.]png"), ("no/x.png", "x.png: there is no folder no;")]
)
def test_a_picture_that_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch, capsys, out, text):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "b")
    assert main("plot", "b", "--out", out) == 2
    told = capsys.readouterr()
    assert re.search(text, told.err)
    assert told.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_errors_name_what_was_asked_for_and_no_temporary_place(tmp_path, monkeypatch, capsys):
    make(tmp_path / "b")
    monkeypatch.chdir(tmp_path)

    def fail(self, place, **options):
        raise OSError(28, "No space left on device", str(place))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    assert main("plot", "b", "--out", "x.png") == 2
    assert capsys.readouterr().err == "memmap-buffer: [Errno 28] No space left on device: 'x.png'\n"
    monkeypatch.setattr(ReplayBuffer, "store_episode", lambda self, **_: fail(self, self.folder / "data"))
    assert main("merge", "new", "b") == 2
    assert capsys.readouterr().err == "memmap-buffer: [Errno 28] No space left on device: 'new/data'\n"
