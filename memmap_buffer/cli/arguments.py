"""The arguments and options that several commands share, each spelt and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FolderArgument = Annotated[Path, typer.Argument(help="A folder of episodes.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="A new folder.", show_default=False)]
Episode = Annotated[str, typer.Argument(help="The episode's number, or first or last.", show_default=False)]
Episodes = Annotated[list[str] | None, typer.Argument(help="Numbers, ranges such as 3-7, first, last.")]
Fields = Annotated[list[str] | None, typer.Option("--field", help="Only this field; may be repeated.")]
Where = Annotated[
    list[str] | None, typer.Option("--where", help="Only these, as in length>=20 or task_id=1; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reward = Annotated[str, typer.Option("--reward", help="The field whose sum is an episode's return.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
