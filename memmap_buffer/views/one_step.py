"""One-step transitions of the one folder that is written to: the columns of `NStep(1)` in as few calls as may be.

`NStep.cut` says what they are. A batch that is drawn right after each step costs calls, not bytes: a builder, which
does for every view what this does for one, takes twice the time.
"""

from __future__ import annotations

import numpy as np

from memmap_buffer.dtypes import any_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import FINAL, FIRST_ROW, FLAGS, STOP, TERMINATED
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.batch_builder import INDEX_BYTES, MAX_BATCH_BYTES, Columns, taken
from memmap_buffer.views.folders import Folders
from memmap_buffer.views.n_step import NStep
from memmap_buffer.views.transforms import n_step_return
from memmap_buffer.views.view import View


class OneStep:
    """The columns of one-step transitions.

    Args:
        view: of which `reads` is true.
        folders: the one folder.
    """

    def __init__(self, view: NStep, folders: Folders) -> None:
        self._folders, self._view = folders, view
        fields, (current, following) = folders.schema.fields, view.names(folders.schema)
        self._current = [(name, name, fields[name].final) for name in current]
        self._following = [(f"next_{name}", name, fields[name].final) for name in following]
        self._reward_final = view.gamma is not None and fields[view.reward].final
        self._ends = FINAL | TERMINATED * (view.ends(folders.schema).terminated is not None)
        self._most = MAX_BATCH_BYTES // max(INDEX_BYTES, folders.schema.largest)

    @staticmethod
    def reads(view: View, folders: Folders) -> bool:
        """Whether such items can be read here: the records tell all of their episodes, and rows are as stored."""
        if type(view) is not NStep or view.n != 1 or view.stack or view.timeline or view.sequence_fields != ():
            return False
        ends, schema = view.ends(folders.schema), folders.schema
        known = ends.marked and (ends.recorded or ends.terminated is None)
        plain = all(field.dtype != "bfloat16" for field in schema.fields.values())
        return known and plain and folders.single and not (folders.coded or folders.mirrored)

    def columns(self, anchors: Anchors, since: int) -> Columns | None:
        """The batch at some anchors, as a builder gives it; None where that is to be asked.

        Args:
            anchors: (B,) that were all shown when the change counter was `since`.
            since: see there.
        """
        storage, pool, slot, t = self._folders.storages[0], self._folders.pool, anchors.slot, anchors.t
        if len(slot) > self._most:
            return None
        stored, words = storage.maps.rows, storage.maps.words.take(slot, axis=0)
        halves, row, k = words.view(np.uint32), words.view(np.int64)[:, FIRST_ROW] + t, np.empty(len(slot), np.int64)
        rows = row, row + slot  # in files without and with `final`
        k.fill(1)
        out = {key: taken(stored[name], rows[final], pool) for key, name, final in self._current}
        over = t + k == halves[:, STOP].astype(np.int64)
        unknown: tuple[IntArray, ...] = ()  # whose successors do not exist, of fields without and with `final`
        if any_of(over):
            last = np.flatnonzero(over)
            flags = halves[last, FLAGS]
            unknown = last, last[flags & FINAL == 0]
            over[last[flags & self._ends == FINAL]] = False
        after: dict[bool, IntArray] = {}
        for key, name, final in self._following:
            if final not in after:
                after[final] = rows[final] + k
                if unknown:
                    after[final][unknown[final]] -= 1
            out[key] = values = taken(stored[name], after[final], pool)
            if unknown and len(unknown[final]):
                values[unknown[final]] = values.dtype.type()
        out["n_step_lens"] = k
        if self._view.gamma is not None:
            rewards = taken(stored[self._view.reward], rows[self._reward_final], pool)
            out["_return"], out["_discount"] = n_step_return(rewards[:, None], k, over, self._view.gamma)
        return out if storage.changes == since else None  # else an episode may have moved while it was copied
