"""Taking a folder over: the term, what may still be trusted, and what a dead writer left half done."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.format.checksums import checksum_row, digest_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.host import anyone_may_rename, boot_id, host_name, network_filesystem
from memmap_buffer.format.records import CUT, FINAL, MAX_SERIAL, MAX_TERM, OPEN, RECORD
from memmap_buffer.format.syscalls import process_id, random_bytes
from memmap_buffer.writing import redo
from memmap_buffer.writing.commit import WriteHandles
from memmap_buffer.writing.slots import SlotAllocator

log = logging.getLogger("memmap_buffer")


def take_over(files: WriteHandles) -> SlotAllocator:
    """Raise the term, put right what a dead writer left, and count the slots. The lock is held."""
    storage, state = files.storage, files.storage.state
    host, boot = host_name().encode()[:64], boot_id()
    kind = network_filesystem(storage.path)
    if kind:
        log.warning("%s lies on %s: write from one host only, and read on that host", storage.path, kind)
    if anyone_may_rename(storage.path):
        log.warning("%s lies in a folder that anyone may write to, who could put another in its place", storage.path)
    storage.reread()  # a writer that was killed may not have told what it wrote
    _require_counters(files)
    files.lock.term = state("term") + 1
    words = {
        "term": files.lock.term,
        "nonce": int.from_bytes(random_bytes(8), "little"),
        "pid": process_id(),
        "time": time.time_ns(),
    }
    doubts = _doubts(files)
    for name, value in {**words, "clean": doubts.pop("clean")}.items():
        files.write_state(name, value)
    files.sync("/state")
    # Before anything is less trusted: steps of an open episode that were on the disk have no checksums.
    if redo.finish(files):
        storage.check_always()  # before what that brought back is closed as it is
    close_abandoned(files, storage.refresh().visible)
    for name, value in doubts.items():
        files.write_state(name, value)
    for name, text in {"boot": boot, "host": host.ljust(64, b"\0")}.items():
        for i in range(len(text) // 8):
            files.write_state(name, int.from_bytes(text[8 * i : 8 * i + 8], "little"), word=i)
    files.sync("/state")
    device, inode = storage.state_file or (0, 0)
    files.write_state("inode", inode)  # behind the barrier: a copy is one until it is doubted
    files.write_state("device", device)
    slots = _slots_of(files, storage.refresh())
    if files.storage.state("next") < slots.next:
        files.write_state("next", slots.next)  # before `base`, in the same sector: never `base` beyond what is known
    return slots


def count(files: WriteHandles) -> SlotAllocator:
    """The slots as they are on the disk, whatever the change counter says."""
    return _slots_of(files, files.storage.reread())


def _slots_of(files: WriteHandles, table: EpisodeTable) -> SlotAllocator:
    rounds = _rounds(files.storage.maps.words.view(RECORD))
    return SlotAllocator(files.layout, table, _following(files), rounds, files.storage.path)


def _rounds(records: Any) -> IntArray:
    """(slots,) the round of each record's last step; they are counted modulo 2**32, from the last episode back."""
    rounds, serials = records["round"][:, 0].copy(), records["serial"][:, 0]
    growing = np.flatnonzero(records["flags"][:, 0] & OPEN)
    rounds[growing] += records["stop"][growing, 0] - 1  # of an open one it is the round of its first step
    newest = rounds[np.argmax(np.where(serials < MAX_SERIAL, serials, 0))]
    behind: IntArray = (newest - rounds).astype(np.int32).astype(np.int64)
    return int(newest) + 2**32 - behind


def _require_counters(files: WriteHandles) -> None:
    """Raise CorruptBufferError where the counters say that what is published next would never be seen."""
    state, following = files.storage.state, _following(files)
    if following >= MAX_SERIAL or state("base") > following or state("term") >= MAX_TERM:
        path = files.storage.path / "state.npy"
        raise CorruptBufferError(f"{path} holds counters that cannot be; `memmap-buffer repair` mends it", path=path)


def _following(files: WriteHandles) -> int:
    """The next serial: beyond every record that can be read, also of an episode that fails its checksums.

    One that were given again would stand in two slots, which voids both. The table was read under the lock.
    """
    return max(files.storage.state("next"), files.storage.highest_serial + 1)


def _doubts(files: WriteHandles) -> dict[str, int]:
    """The words of the state that say what of earlier writers is trusted (`format`, "Creating, opening, trusting")."""
    state, first = files.storage.state, files.storage.first_unsettled
    words = {"clean": 0}
    if first is not None:
        # Also what stands under an odd generation: a redo file may bring it back.
        words["suspect"] = max(_following(files), files.storage.written_serials)
    if not files.power or first == 0:
        words["synced"] = 0
    elif state("clean") and not state("suspect"):
        words["synced"] = _following(files)
    return words


def close_abandoned(files: WriteHandles, slots: IntArray) -> None:
    """Episodes that nobody goes on with are complete as far as they go: flag the open ones as cut short.

    Those that a ring gave up, whose records are void, stay as they are.
    """
    storage = files.storage
    table = storage.refresh()
    for slot in slots[table.valid[slots] & (table.flags[slots] & OPEN != 0)].tolist():
        if not storage.trust(np.array([slot])):
            continue  # its steps did not survive a crash of the machine
        flags, length, record = int(table.flags[slot]), int(table.length[slot]), storage.record(slot)
        row = checksum_row(files.layout, storage.checksums_of(slot, length, bool(flags & FINAL)))
        # Its record may be older than the step that ended it.
        flags = flags & ~OPEN | CUT | redo.ending(storage, slot, length, {})
        ended = {"flags": flags, "length": length, "stop": length}
        ended |= {"round": (record["round"] + length - 1) % 2**32, "digest": digest_of(row, record["columns"])}
        # With barriers whatever the durability of this writer: that of the dead one may have been "power".
        files.write_checksums(slot, row)
        files.sync("/checksums")
        files.amend(slot, **ended)
        files.sync("/episodes")
        files.changed([slot])
