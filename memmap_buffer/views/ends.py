"""`Ends`: by which fields a view knows that an episode ended, and how far around its anchor it looks for that."""

from __future__ import annotations

from typing import NamedTuple

from memmap_buffer.schema import DECLARED, Schema


class Ends(NamedTuple):
    """How a view knows that an episode ended, also in the middle of what was stored as one: no item reaches across.

    Attributes:
        terminated: the field that is true where nothing follows, or None.
        recorded: whether the records of the episodes tell whether they terminated, so that no row is looked at.
        names: the fields that are true where an episode ends, `terminated` among them.
        marked: whether the records tell whether any of `names` is true before the last step.
        before, after: how many timesteps before its anchor, and from it on, an item may have.
    """

    terminated: str | None
    recorded: bool
    names: tuple[str, ...]
    marked: bool
    before: int = 0
    after: int = 1

    @classmethod
    def of(cls, schema: Schema, terminated: str | None = DECLARED, *, before: int = 0, after: int = 1) -> Ends:
        """By a field; default: the one that was declared."""
        name = schema.terminated if terminated == DECLARED else terminated
        names = tuple(dict.fromkeys(end for end in (name, schema.truncated) if end is not None))
        recorded = terminated == DECLARED or name == schema.terminated
        return cls(name, recorded, names, marked={*names} <= {*schema.ends}, before=before, after=after)
