"""`view`: episodes on one timeline in Rerun, to be scrubbed through; its viewer listens on this machine alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.cli.arguments import Episodes, Fields, FolderArgument, Yes
from memmap_buffer.cli.episodes import Array, opened, read_episode, serials_of
from memmap_buffer.cli.outputs import new_file
from memmap_buffer.cli.plot_video import frames_of, is_image
from memmap_buffer.cli.terminal import Problem, progress, say
from memmap_buffer.extras import extra

NEWEST = 10  # episodes that are shown, if none are named
LOOPBACK = "127.0.0.1"
SIGNALS = 64  # entries a step that are drawn as lines


def view(
    folder: FolderArgument,
    episode: Episodes = None,
    field: Fields = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write a .rrd file instead of opening a viewer.")] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve the viewer to a browser on this machine.")] = False,
    port: Annotated[int, typer.Option("--port", min=1024, max=65534, help="With --web: its port.")] = 9090,
    yes: Yes = False,
) -> None:
    """Show episodes in Rerun: every image field and every signal on one timeline; the newest 10 if none is named."""
    with extra("rerun"):
        import rerun  # noqa: F401 - asked for first, before anything is written
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
            place = Path(temporary) / f"{folder.resolve().name}.rrd"
            record(buffer, serials, chosen, place)
            _open_viewer(place, web, port)


def record(buffer: ReplayBuffer, serials: list[int], fields: tuple[str, ...], place: Path) -> None:
    """Write episodes to a .rrd file, one after the other on the timeline "step".

    There is no second timeline that begins anew with each episode: Rerun would open it, and show all rows at once.

    Args:
        buffer: the source.
        serials: of the episodes.
        fields: fields and meta fields.
        place: the file.
    """
    with extra("rerun"):
        import rerun
    with rerun.RecordingStream("memmap-buffer") as recording, progress("episodes", len(serials)) as tell:
        recording.save(place)
        begin = 0
        for count, serial in enumerate(serials):
            data = read_episode(buffer, serial)
            length = max(len(data[name]) for name in buffer.fieldnames)
            _log_episode(recording, buffer, {name: data[name] for name in fields}, serial, begin)
            begin += length
            tell(count + 1)


def _log_episode(recording: Any, buffer: ReplayBuffer, data: dict[str, Any], serial: int, begin: int) -> None:
    import rerun

    meta = {name: data.pop(name) for name in buffer.meta_fieldnames if name in data}
    recording.set_time("step", sequence=begin)
    facts = "\n".join(f"- {name}: {value}" for name, value in {"episode": serial, "from step": begin, **meta}.items())
    recording.log("episode", rerun.TextDocument(facts))
    for name, values in data.items():
        array, entity = np.asarray(values), name.replace(".", "/")
        if is_image(buffer.schema.fields[name]):
            _log_images(recording, entity, frames_of(array, name), begin)
        elif array.dtype.kind == "U":
            texts = [" ".join(row) for row in array.reshape(len(array), -1)]
            _log_columns(recording, entity, begin, len(array), rerun.TextLog.columns(text=texts))
        elif array.dtype.kind in "biuf" and np.prod(array.shape[1:]) <= SIGNALS:
            lines = array.reshape(len(array), -1).astype(np.float64)
            _log_columns(recording, entity, begin, len(array), rerun.Scalars.columns(scalars=lines))


def _log_images(recording: Any, entity: str, frames: Array, begin: int) -> None:
    import rerun

    for t, frame in enumerate(frames):
        recording.set_time("step", sequence=begin + t)
        recording.log(entity, rerun.Image(frame))


def _log_columns(recording: Any, entity: str, begin: int, length: int, columns: Any) -> None:
    import rerun

    times = rerun.TimeColumn("step", sequence=np.arange(begin, begin + length))
    recording.send_columns(entity, indexes=[times], columns=columns)


def _open_viewer(place: Path, web: bool, port: int) -> None:
    """Start Rerun's own program, which stays until it is closed or interrupted."""
    command = [sys.executable, "-m", "rerun", str(place), "--bind", LOOPBACK]
    if web:
        command += ["--serve-web", "--web-viewer-port", str(port), "--port", str(port + 1)]
        data = f"rerun%2Bhttp%3A%2F%2F{LOOPBACK}%3A{port + 1}%2Fproxy"
        say(f"open http://{LOOPBACK}:{port}/?url={data} in a browser; end with Ctrl+C")
        sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):  # no signal leaves the viewer behind, nor is one ignored, as by `&`
        signal.signal(number, signal.default_int_handler)
    viewer = subprocess.Popen(command)
    try:
        code = viewer.wait()
    except KeyboardInterrupt:
        viewer.send_signal(signal.SIGINT)  # it waits for a program of its own, which this signal alone ends
        viewer.wait()
        return
    if code:
        raise Problem(f"rerun ended with {code}; `--save FILE.rrd` needs no viewer")
