"""Episodes as pictures: `plot` by matplotlib, `video` by PyAV and Pillow, `view` by Rerun. All only read the folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from memmap_buffer import ReplayBuffer
from memmap_buffer.adapters import Array, extra, frames_of, is_image, progress
from memmap_buffer.cli.episodes import read_at, read_episode, serial_of, serials_of, table_of
from memmap_buffer.cli.folders import name_of, new_file, opened
from memmap_buffer.cli.minimal import say
from memmap_buffer.cli.terminal import Episode, Episodes, Fields, Place, Problem, Reward, Yes
from memmap_buffer.interop.video import grid_of, pillow_images, write_gif, write_mp4

SHEET = 16  # frames of a contact sheet
TILE, LABEL = 96, 14  # pixels in a contact sheet: the least width of a frame, the height of the number below it
BINS = 30  # bars of a histogram
SMOOTH = 20  # episodes over which returns are averaged
NEWEST = 10  # so many of the newest episodes are shown if none are named
LOOPBACK = "127.0.0.1"
SIGNALS = 64  # the most entries a step of a field that is drawn as lines

Out = Annotated[Path, typer.Option("--out", help="The file to write.")]
OneEpisode = Annotated[str | None, typer.Option("--episode", help="Its fields over time, not all episodes.")]


def plot(
    folder: Place,
    out: Out = Path("episodes.png"),
    episode: OneEpisode = None,
    field: Fields = None,
    reward: Reward = "reward",
    yes: Yes = False,
) -> None:
    """Draw lengths and returns over the episodes, or with --episode one episode's images and numbers over time."""
    with extra("plot"):
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    endings = sorted(FigureCanvasBase.filetypes)
    if out.suffix.lower().removeprefix(".") not in endings:
        raise Problem(f"--out {out}: expected a name that ends in one of {', '.join(f'.{end}' for end in endings)}")
    if field and episode is None:
        raise Problem("--field: names fields of one episode; say which by --episode, or leave it out")
    with opened(folder) as buffer:
        empty = Figure(layout="constrained")
        figure = _figure_of_all(empty, buffer, reward) if episode is None else _figure_of_one(buffer, episode, field)
    figure.suptitle(f"{name_of(folder)}: {figure.get_suptitle()}")
    with new_file(out, yes) as place:
        figure.savefig(place, dpi=120)


def video(
    folder: Place,
    episode: Episode,
    field: Annotated[str | None, typer.Option("--field", help="The field of images; default: the only one.")] = None,
    out: Annotated[Path, typer.Option("--out", help="An .mp4 or .gif, or a .png for a contact sheet.")] = Path(
        "episode.mp4"
    ),
    fps: Annotated[int, typer.Option("--fps", min=1, max=240, help="Frames a second.")] = 30,
    yes: Yes = False,
) -> None:
    """Write one episode's images as a film (.mp4, .gif) or as a contact sheet (.png)."""
    write = {".mp4": write_mp4, ".gif": write_gif, ".png": _write_sheet}.get(out.suffix.lower())
    if write is None:
        raise Problem(f"--out {out}: expected a name that ends in .mp4, .gif or .png")
    with opened(folder) as buffer:
        name = _image_field(buffer, field)
        serial = serial_of(buffer, episode)
        frames = frames_of(read_episode(buffer, serial)[name], name)
    with new_file(out, yes) as place:
        write(place, frames, fps)


def view(
    folder: Place,
    episode: Episodes = None,
    field: Fields = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write a .rrd file instead of opening a viewer.")] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve the viewer to a browser on this machine.")] = False,
    port: Annotated[int, typer.Option("--port", min=1024, max=65534, help="With --web: its port.")] = 9090,
    yes: Yes = False,
) -> None:
    """Show episodes in Rerun: every image field and every signal on one timeline; the newest 10 if none is named."""
    with extra("rerun"):
        import rerun  # noqa: F401 - an ImportError must come before anything is written
    if save is not None and web:
        raise Problem("--save and --web exclude each other; open a saved file by: rerun FILE")
    with opened(folder) as buffer:
        serials = serials_of(buffer, episode) if episode else buffer.serials[-NEWEST:].tolist()
        if not serials:
            raise Problem(f"{folder}: there is no episode to show")
        chosen = buffer.schema.require(field or buffer.schema.all, "--field")
        if save is not None:
            with new_file(save, yes) as place:
                record(buffer, serials, chosen, place)
            return
        with tempfile.TemporaryDirectory(prefix="memmap-buffer-") as temporary:
            place = Path(temporary) / f"{name_of(folder)}.rrd"
            record(buffer, serials, chosen, place)
            _open_viewer(place, web, port)


def _image_field(buffer: ReplayBuffer, wanted: str | None) -> str:
    fields = buffer.schema.fields
    names = images = tuple(name for name, field in fields.items() if is_image(field))
    if wanted is not None:
        names = buffer.schema.require([wanted], "--field", fields)
    if len(names) != 1:
        raise Problem(f"--field: name one; the fields that look like images are {', '.join(images) or 'none'}")
    return names[0]


# Plots


def _figure_of_all(figure: Any, buffer: ReplayBuffer, reward: str) -> Any:
    """An empty figure of matplotlib, on which lengths and returns of all episodes are drawn."""
    table = table_of(buffer, reward)
    if not len(table["serial"]):
        raise Problem(f"{buffer.folder}: there is no episode to draw")
    panels = 3 if "return" in table else 2
    figure.set_size_inches(8, 2.4 * panels)
    first, last = table["serial"][[0, -1]]
    figure.suptitle(f"episodes {first} to {last}")
    lengths, over_time, *returns = figure.subplots(panels)
    low, high = table["length"].min(), table["length"].max()
    width = -(-(high - low + 1) // BINS)  # lengths are whole numbers: each bar has equally many
    lengths.hist(table["length"], bins=np.arange(low, high + width + 1, width) - 0.5, color="tab:blue")
    lengths.set(xlabel="length (timesteps)", ylabel="episodes")
    over_time.plot(table["serial"], table["length"], ".", markersize=3)
    over_time.set(xlabel="episode (number)", ylabel="length (timesteps)")
    for axes in returns:
        axes.plot(table["serial"], table["return"], ".", markersize=3, alpha=0.5, label="an episode")
        smooth = min(SMOOTH, len(table["serial"]))
        mean = np.convolve(table["return"], np.ones(smooth) / smooth, mode="valid")
        axes.plot(table["serial"][smooth - 1 :], mean, color="tab:orange", label=f"mean of the last {smooth}")
        axes.set(xlabel="episode (number)", ylabel=f"return (sum of {reward})")
        axes.legend(loc="best", fontsize="small")
    return figure


def _figure_of_one(buffer: ReplayBuffer, episode: str, fields: list[str] | None) -> Any:
    """The figure of one episode; of the fields that are named, or of all that can be drawn."""
    serial = serial_of(buffer, episode)
    named = fields and buffer.schema.require(fields, "--field", buffer.fieldnames)
    return read_at(buffer, serial, lambda position: buffer.show(position, named)).figure


# Films


def _write_sheet(place: Path, frames: Array, fps: int) -> None:
    """Write frames spread over the episode, in rows from left to right, each above the number of its timestep."""
    chosen = np.linspace(0, len(frames) - 1, min(SHEET, len(frames))).round().astype(int)
    scale = -(-TILE // frames.shape[2])
    tiles = np.pad(frames[chosen].repeat(scale, 1).repeat(scale, 2), ((0, 0), (0, LABEL), (0, 0), (0, 0)))
    columns = int(np.ceil(np.sqrt(len(chosen))))
    sheet = pillow_images(grid_of(tiles, columns)[None])[0]
    from PIL import ImageDraw  # is installed, or `pillow_images` had raised ImportError

    pen, (height, width) = ImageDraw.Draw(sheet), tiles.shape[1:3]
    for i, t in enumerate(chosen):
        pen.text((i % columns * width + 3, (i // columns + 1) * height - LABEL + 1), f"t = {t}", fill="white")
    sheet.save(place)


# Rerun


def record(buffer: ReplayBuffer, serials: list[int], fields: tuple[str, ...], place: Path) -> None:
    """Write episodes to a .rrd file, one after another on the timeline "step".

    There is no second timeline that begins anew with each episode: Rerun would open that one, and show the rows of all
    episodes at once.

    Args:
        buffer: the buffer that has the episodes.
        serials: of the episodes.
        fields: the fields and meta fields to write.
        place: the file.
    """
    with extra("rerun"):
        import rerun
    with rerun.RecordingStream("memmap-buffer") as recording:
        recording.save(place)
        begin = 0
        for serial in progress(serials, "episodes"):
            data = read_episode(buffer, serial)
            length = max(len(data[name]) for name in buffer.fieldnames)
            _log_episode(recording, buffer, {name: data[name] for name in fields}, serial, begin)
            begin += length


def _log_episode(recording: Any, buffer: ReplayBuffer, data: dict[str, Any], serial: int, begin: int) -> None:
    import rerun

    meta = {name: data.pop(name) for name in buffer.meta_fieldnames if name in data}
    recording.set_time("step", sequence=begin)
    facts = "\n".join(f"- {name}: {value}" for name, value in {"episode": serial, "from step": begin, **meta}.items())
    recording.log("episode", rerun.TextDocument(facts))
    for name, values in data.items():
        array, entity = np.asarray(values), name.replace(".", "/")
        times = rerun.TimeColumn("step", sequence=np.arange(begin, begin + len(array)))
        if is_image(buffer.schema.fields[name]):
            for t, frame in enumerate(frames_of(array, name)):
                recording.set_time("step", sequence=begin + t)
                recording.log(entity, rerun.Image(frame))
        elif array.dtype.kind == "U":
            texts = [" ".join(row) for row in array.reshape(len(array), -1)]
            recording.send_columns(entity, indexes=[times], columns=rerun.TextLog.columns(text=texts))
        elif array.dtype.kind in "biuf" and np.prod(array.shape[1:]) <= SIGNALS:
            lines = array.reshape(len(array), -1).astype(np.float64)
            recording.send_columns(entity, indexes=[times], columns=rerun.Scalars.columns(scalars=lines))


def _open_viewer(place: Path, web: bool, port: int) -> None:
    """Start Rerun's own program, which stays until it is closed or interrupted."""
    command = [sys.executable, "-m", "rerun", str(place), "--bind", LOOPBACK]
    if web:
        command += ["--serve-web", "--web-viewer-port", str(port), "--port", str(port + 1)]
        data = f"rerun%2Bhttp%3A%2F%2F{LOOPBACK}%3A{port + 1}%2Fproxy"
        say(f"open http://{LOOPBACK}:{port}/?url={data} in a browser; end with Ctrl+C")
        sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):  # even if `&` has set it to be ignored: the viewer must end with us
        signal.signal(number, signal.default_int_handler)
    viewer = subprocess.Popen(command)
    try:
        code = viewer.wait()
    except KeyboardInterrupt:
        viewer.send_signal(signal.SIGINT)  # the viewer runs another program, which only this signal ends
        viewer.wait()
        return
    if code:
        raise Problem(f"rerun ended with {code}; `--save FILE.rrd` needs no viewer")
