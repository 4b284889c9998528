"""The command `browse`: the episodes of a folder, a root or a URL in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from memmap_buffer import ConcatBuffer, ReplayBuffer
from memmap_buffer.cli.folders import folders_at, name_of
from memmap_buffer.cli.minimal import say
from memmap_buffer.cli.remote import CacheFolder, StorageOptions, parsed
from memmap_buffer.cli.terminal import Reward

Anywhere = Annotated[
    str,
    typer.Argument(metavar="PLACE", help="A folder, a root of folders, or the URL of one.", show_default=False),
]


def browse(
    place: Anywhere,
    marks: Annotated[
        Path | None, typer.Option("--marks", help="The file of the marks, where the folder cannot hold them.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show and set no marks.")] = False,
    reward: Reward = "reward",
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.1, max=240, help="Steps a second; default: as recorded, else 10.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for any.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    options: StorageOptions = None,
    cache: CacheFolder = None,
) -> None:
    """Look at all episodes in a browser, one by one, and mark the good and the bad; ends with Ctrl+C."""
    access = parsed(options)
    opened = ConcatBuffer.from_root if folders_at(place, access) else ReplayBuffer.from_folder
    buffer = opened(place, storage_options=access, cache=cache)
    with buffer.browse(
        reward=reward,
        title=name_of(place),
        rate=rate,
        read_only=read_only,
        marks=marks,
        host=host,
        port=port,
    ) as page:
        say(page.address)
        if not no_open:
            _open(page.address)
        page.wait()


def _open(address: str) -> None:
    """Open the page in a browser with windows, if there is one; a browser in the terminal would cover our output."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) not in (webbrowser.GenericBrowser, webbrowser.Elinks):
        browser.open(address)
