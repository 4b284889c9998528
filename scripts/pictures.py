"""Draw how each view cuts an episode, learning curves, and what the command prints, into docs/pictures/.

    python scripts/pictures.py [FOLDER]

The episode has ten steps and a final observation, and every value is the number of its timestep: what a batch holds
tells where it came from. Dashed cells are padding. A curve is drawn from the numbers in the `.csv` of its name:
program, seed, steps, and the mean return of the episodes that ended since the row before. A terminal shows what the
command printed about a folder that is made here; it needs the extra `cli`.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memmap_buffer import Field, NStep, Offsets, ReplayBuffer, Timestep, Trajectory, View, Window

LENGTH, CELL, LEFT, GAP = 10, 40, 190, 12
COLOURS = {"observation": "#4477aa", "action": "#cc6677", "reward": "#b8860b"}
INK, PAPER = "#333333", "#ffffff"
PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
CURVES = {"sac": "SAC on Hopper-v5: mean return of the episodes of 1,000 steps, three seeds and their mean"}
TERMINALS = {  # name: its width, and the command
    "info": (80, ("info", "robot_data")),
    "episodes": (80, ("episodes", "robot_data", "--limit", "4")),
    "show": (80, ("show", "robot_data", "last")),
    "head": (80, ("head", "robot_data", "-n", "2")),
    "stats": (200, ("stats", "robot_data", "--field", "observation.joint_positions", "--field", "reward")),
}
WIDTH, HEIGHT, TICKS = 640, 300, 200  # of a curve's axes; a tick every so many of the return


@dataclass(frozen=True)
class Cell:
    """One entry of a row: the timestep where it is drawn, what it holds, and whether it is padding."""

    column: int
    text: str
    padding: bool = False


@dataclass(frozen=True)
class Line:
    """One row of a picture: a key of the batch, the field that it comes from, and its cells."""

    key: str
    field: str
    cells: tuple[Cell, ...]


def recorded(folder: Path) -> ReplayBuffer:
    fields = {"observation": Field("int", final=True), "action": "int", "reward": "int"}
    buffer = ReplayBuffer(folder, 1, LENGTH, fields)
    steps = np.arange(LENGTH)
    buffer.store_episode(observation=np.arange(LENGTH + 1), action=steps, reward=steps)
    return buffer


def stored() -> list[Line]:
    """What the episode has, for comparison."""
    lines = [Line(name, name, tuple(Cell(t, str(t)) for t in range(LENGTH))) for name in ("action", "reward")]
    return [Line("observation", "observation", tuple(Cell(t, str(t)) for t in range(LENGTH + 1))), *lines]


def item_at(buffer: ReplayBuffer, view: View, t: int) -> dict[str, np.ndarray]:
    """The item of a view whose first step is `t`, as arrays without the batch's axis."""
    loader = buffer.dataloader(1, view=view, return_indices=True)
    batches = ({key: value.numpy()[0] for key, value in batch.items()} for batch in loader)
    return next(b for b in batches if "_indices" not in b or b["_indices"][1] == t)


def lines_of(item: dict[str, np.ndarray], t: int, offsets: dict[str, range]) -> Iterator[Line]:
    """A row for each key: a step beyond the item's own, or masked, is padding."""
    for key, places in offsets.items():
        field = next(name for name in COLOURS if key.endswith(name))
        mask = item.get(f"_mask_{key}", item.get("_mask", np.ones(len(places), bool)))
        steps = int(item["n_step_lens"]) if key.startswith("seq_") else len(places)
        entries = enumerate(zip(places, np.atleast_1d(item[key]), np.atleast_1d(mask), strict=True))
        cells = tuple(Cell(t + o, str(value), padding=not inside or i >= steps) for i, (o, value, inside) in entries)
        yield Line(key, field, cells)


def drawing(title: str, lines: list[Line]) -> str:
    """An SVG of the episode, and of the item below it."""
    rows, first = [*stored(), *lines], min(cell.column for line in lines for cell in line.cells)
    left = LEFT - CELL * min(0, first)
    columns = max(cell.column for line in rows for cell in line.cells) + 1
    width, top = left + CELL * columns + GAP, 3 * GAP
    parts, y = [], top
    for number, line in enumerate(rows):
        if number == len(stored()):
            y += 2 * GAP
            parts.append(_text(GAP, y - GAP // 2, title, anchor="start"))
            y += GAP // 2
        parts.append(_text(left - GAP + CELL * min(0, first), y + CELL * 0.62, line.key, anchor="end"))
        parts += [_cell(left + CELL * cell.column, y, line.field, cell, faint=number < 3) for cell in line.cells]
        y += CELL + GAP // 2
    caption = _text(GAP, top - GAP, "one episode, by timestep; the last observation is its final one", anchor="start")
    return _svg(width, y + GAP, [caption, *parts])


def _svg(width: float, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([f'{head} font-size="14">', paper, *parts, "</svg>", ""])


def _cell(x: float, y: float, field: str, cell: Cell, *, faint: bool) -> str:
    dash, fill = (' stroke-dasharray="4 3"', "none") if cell.padding else ("", COLOURS[field])
    opacity = 0.15 if faint else 0.45
    box = f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 6}" rx="4" fill="{fill}" fill-opacity="{opacity}"'
    border = f' stroke="{COLOURS[field]}"{dash}/>'
    return box + border + _text(x + CELL / 2 - 1.5, y + CELL * 0.55, cell.text)


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}">{text}</text>'


def pictures(buffer: ReplayBuffer) -> Iterator[tuple[str, str]]:
    """(name, SVG) of every view."""
    names = ("observation", "action", "reward")
    whole = {"observation": range(LENGTH + 1), "action": range(LENGTH), "reward": range(LENGTH)}
    n_step = {
        "observation": range(1),
        "action": range(1),
        "seq_reward": range(4),
        "next_observation": range(4, 5),
    }
    window = dict.fromkeys(names, range(4))
    around = {"observation": range(-3, 1), "action": range(5)}
    stack = Offsets(observation=tuple(around["observation"]), action=tuple(around["action"]), padding="edge")
    transition = NStep(4, ("observation", "action"), ("observation",), ("reward",))
    cases: list[tuple[str, str, View, int, dict[str, range]]] = [
        ("trajectory", "Trajectory(final_observation=True)", Trajectory(final_observation=True), 0, whole),
        ("timestep", "Timestep(): the item at 3", Timestep(), 3, dict.fromkeys(names, range(1))),
        ("n-step", "NStep(4, …): the item at 2", transition, 2, n_step),
        ("n-step-end", "NStep(4, …): the item at 8, where the episode ends first", transition, 8, n_step),
        ("window", "Window(4): the item at 3", Window(4), 3, window),
        ("window-end", "Window(4): the item at 8, padded and masked", Window(4), 8, window),
        ("offsets", "Offsets(observation=-3…0, action=0…4, padding='edge'): the item at 1", stack, 1, around),
    ]
    for name, title, view, t, offsets in cases:
        item = item_at(buffer, view, t)
        if name == "n-step-end":  # the next observation is where the item ends
            offsets = {**offsets, "next_observation": range(int(item["n_step_lens"]), int(item["n_step_lens"]) + 1)}
        yield name, drawing(title, list(lines_of(item, t, offsets)))


def curve(name: str, title: str) -> str:
    """An SVG of the returns over steps that a `.csv` holds: a thin line each seed, a bold one their mean."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with (PICTURES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["program"]][row["seed"]][int(row["steps"])] = float(row["return"])
    lines = [line for seeds in found.values() for line in seeds.values()]
    longest, highest = max(max(line) for line in lines), max(max(line.values()) for line in lines)
    top = TICKS * (int(highest) // TICKS + 1)
    left, low = 6 * GAP, 4 * GAP + HEIGHT

    def place(steps: float, value: float) -> tuple[float, float]:
        return left + steps / longest * WIDTH, low - value / top * HEIGHT

    parts = [_text(GAP, 2 * GAP, title, anchor="start")]
    for value in range(0, top + 1, TICKS):
        x, y = place(0, value)
        parts += [_path([(x, y), place(longest, value)], INK, 0.5), _text(x - GAP / 2, y + 5, str(value), anchor="end")]
    for steps in range(0, longest + 1, longest // 3):
        parts.append(_text(place(steps, 0)[0], low + 2 * GAP, f"{steps:,}"))
    for number, ((program, seeds), colour) in enumerate(zip(found.items(), COLOURS.values(), strict=False)):
        every = sorted(set.intersection(*(set(line) for line in seeds.values())))
        mean = [(steps, float(np.mean([line[steps] for line in seeds.values()]))) for steps in every]
        parts += [_path([place(*point) for point in line.items()], colour, 1) for line in seeds.values()]
        parts.append(_path([place(*point) for point in mean], colour, 3))
        y = 5 * GAP + number * 2 * GAP
        parts += [_path([(left + GAP, y), (left + 4 * GAP, y)], colour, 3)]
        parts.append(_text(left + 5 * GAP, y + 5, program, anchor="start"))
    return _svg(left + WIDTH + 3 * GAP, low + 3 * GAP, parts)


def _path(points: list[tuple[float, float]], colour: str, width: float) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def robot(folder: Path) -> None:
    """A folder of a robot's episodes: long names, two cameras, texts."""
    camera = ("uint8", (48, 64, 3))
    state = {"joint_positions": ("float32", (7,)), "end_effector_force_torque": ("float32", (6,))}
    fields = {
        "observation": {"images": {"front_camera_rgb": camera, "wrist_camera_rgb": camera}, **state},
        "action": ("float32", (7,)),
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
    }
    rng, texts = np.random.default_rng(0), ("pick up the red cup and put it on the second shelf", "open the drawer")
    with ReplayBuffer(folder, 50, 300, fields, {"instruction": "U80", "operator": "U16", "success": "bool"}) as buffer:
        for number, length in enumerate(rng.integers(80, 200, 12)):
            images = rng.integers(0, 256, (length, 48, 64, 3), np.uint8)
            ends = np.arange(length) == length - 1
            buffer.store_episode(
                observation={
                    "images": {"front_camera_rgb": images, "wrist_camera_rgb": images[::-1]},
                    "joint_positions": rng.normal(size=(length, 7)),
                    "end_effector_force_torque": 20 * rng.normal(size=(length, 6)),
                },
                action=rng.normal(size=(length, 7)),
                reward=ends * 1.0,
                terminated=ends,
                truncated=np.zeros(length, bool),
                instruction=texts[number % 2],
                operator="anna",
                success=number % 3 > 0,
            )


def printed(folder: Path, width: int, arguments: tuple[str, ...]) -> str:
    """An SVG of a terminal in which the command was given, in the folder that its paths begin at."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    from memmap_buffer.cli import app, terminal

    before = Path.cwd()
    terminal.WIDE = width  # what a pipe is taken for
    os.chdir(folder)
    try:
        with redirect_stdout(io.StringIO()) as told:
            app.main(arguments)
    finally:
        os.chdir(before)
    lines = "\n".join(line.rstrip() for line in told.getvalue().splitlines())
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(f"$ memmap-buffer {' '.join(arguments)}\n{lines}"))
    own_fonts = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # else of another machine
    text: str = console.export_svg(title=f"{width} columns", code_format=own_fonts, unique_id="terminal")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PICTURES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, recorded(Path(place) / "buffer") as buffer:
        for name, text in pictures(buffer):
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        robot(Path(place) / "robot_data")
        for name, (width, arguments) in TERMINALS.items():
            (folder / f"terminal-{name}.svg").write_text(printed(Path(place), width, arguments), encoding="utf-8")
    for name, title in CURVES.items():
        (folder / f"{name}.svg").write_text(curve(name, title), encoding="utf-8")


if __name__ == "__main__":
    main()
