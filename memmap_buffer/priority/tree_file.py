"""The files of one named tree: the owner's lock, the head, the nodes; when they are trusted, and when made anew.

`priority/<name>.npy` holds the nodes of a `SumTree` with a leaf for each (slot, t): (|δ| + ε)^α, -0.0 for a step of
priority 0, 0.0 for one that is not shown. Node 0, which no heap uses, holds α, so that α and the leaves can only change
together.
`priority/<name>.head.npy` is (16 + 2 * slots,) u8: generation (odd while anything is stored) | ε | the maximum of
|δ| + ε so far | whether the minima are kept | clean | boot u8[2] | inode of the nodes' file | the number of the
arrangement of the nodes (`sum_tree.KIND`) | 7 reserved; then for each slot the serial + 1 of the episode that its
leaves are of, and which of its steps have one: start | stop << 32; 0 and 0 for none. `priority/<name>.lock` is held by
the owner.

The leaves are the truth: where the generation is odd, or the machine went down without `clean`, or α or the arrangement
is another, or the file is a copy (which may have been taken while something was stored), they are copied into a new
file, which then replaces the old one. Those of episodes that are gone are left to whoever follows the folder.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, FloatArray
from memmap_buffer.errors import BufferLockedError, CorruptBufferError, EpisodeStateError, SchemaError, WriterLostError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.host import available_memory, boot_id, overwrites_in_place
from memmap_buffer.format.layout import ArrayFile
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import (
    barrier,
    close_all,
    has_hole,
    is_hole,
    process_id,
    read_at,
    write_all,
    write_word,
)
from memmap_buffer.priority.sum_tree import (
    KIND,
    MAX_PRIORITY,
    STEP,
    SumTree,
    capacity_of,
    num_nodes,
    with_zeros,
)
from memmap_buffer.progress import progress

log = logging.getLogger("memmap_buffer")

GENERATION, EPSILON, MAXIMUM, MINIMA, CLEAN, BOOT, INODE, ARRANGEMENT = 0, 1, 2, 3, 4, 5, 7, 8
WORDS = 16
LOW = 2**32 - 1
PAGE = 4096
NODE_BYTES = 10  # of a leaf, and of its share in the nodes above
BLOCK_STEPS = 1 << 20  # steps that are stored together
MANY_BLOCKS = 16  # take seconds
SMALL = 1 << 15  # bytes of a tree: to ask the system whether there is room for it takes longer than to make it
NEW = "it is new"
CHUNK_BITS, PAGE_BITS = 18, 9  # words in 2 MiB, and in 4 KiB


class TreeFile:
    """A named tree of one folder, in its files or, where the folder is only read, in memory.

    Args:
        storage: the folder.
        name: of the tree.
        alpha, epsilon: the leaves are (|δ| + ε)^α.

    Attributes:
        tree: the sums.
        pairs: (slots, 2) u8, each slot's serial + 1 and its steps, start | stop << 32.
        pair_words: (2 * slots,) int64, the same words one behind the other.
        maximum: of |δ| + ε so far.
        whole: false where what `begin` began did not `end`; then `load` makes the tree anew.
        ready: whether every leaf may be stored to, without `prepare`.
    """

    def __init__(self, storage: Storage, name: str, *, alpha: float, epsilon: float) -> None:
        layout = storage.layout
        self.storage, self.name, self.alpha, self.epsilon = storage, name, alpha, epsilon
        self.leaves = layout.rows or layout.slots * layout.max_timesteps
        self.maximum, self.whole, self.ready = 1.0, False, True
        self.tree: SumTree
        self._nodes_file = nodes_file(f"priority/{name}.npy", self.leaves)
        self._head_file = ArrayFile(f"priority/{name}.head.npy", np.dtype("<u8"), (WORDS + 2 * layout.slots,))
        self._take_head(np.zeros(WORDS + 2 * layout.slots, np.uint64))
        self._words: Array = self._head  # later, where stores reach the file at once, those in the file
        self._nodes: Nodes | None = None
        self._fd: dict[str, int] = {}
        self._locks: list[Any] = []
        self._folder = Folder(storage.path)
        self._pid, self._closed = process_id(), False
        self._finalizer = weakref.finalize(self, _release, self._fd, self._locks)
        self._finalizer.atexit = False

    def _take_head(self, words: Array) -> None:
        self._head = words
        self.pairs: Array = words[WORDS:].reshape(-1, 2)
        self.pair_words: IntArray = words[WORDS:].view(np.int64)

    def steps_of(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """(start, stop) of the steps of slots (B,) that have a leaf."""
        return steps_in(self.pair_words.take(2 * slots + 1))

    @property
    def default(self) -> float:
        """The priority of a new step."""
        return float(self.maximum**self.alpha)

    def own(self) -> None:
        """Own the files, unless the folder is only read.

        Raises:
            BufferLockedError: another process does.
            WriterLostError: another folder stands at the path.
        """
        if self.storage.read_only or not self.storage.layout.writable:
            return
        self._hold()
        try:
            self._locks.append(self._folder.lock(f"priority/{self.name}.lock"))
        except BufferLockedError:
            raise BufferLockedError(
                f"{self.storage.path}: another process owns the priorities {self.name!r}; stop it, give these another "
                "name, or open the folder with read_only=True for priorities of your own",
                path=self.storage.path,
            ) from None

    def _hold(self) -> None:
        """Hold the folder. Raises WriterLostError: another one stands at the path."""
        with suppress(FileNotFoundError):
            self._folder.hold()
        self.require_place()

    def require_place(self) -> None:
        """Raise WriterLostError where another folder than the one that was opened stands at the path."""
        if not (self._folder.in_place and self.storage.is_of(self._folder)):
            raise WriterLostError(
                f"{self.storage.path}: the folder was moved, removed or overwritten, and the priorities {self.name!r} "
                "with it; open the buffer anew",
                reason="moved",
            )

    def leaves_of(self, slots: IntArray, t: IntArray) -> IntArray:
        """The leaves of steps (B,)."""
        return self.storage.first_row(slots, False) + t

    def blocks(self, slots: IntArray, start: IntArray, stop: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """(slots, t) of the steps start … stop - 1 of slots, some 10⁶ at a time."""
        for place, number in in_blocks(np.maximum(stop - start, 0), BLOCK_STEPS):
            yield slots[place], start[place] + number

    # Storing

    def prepare(self, leaves: IntArray) -> None:
        """Have room on the disk for stores to leaves. Raises OSError: the disk is full, and nothing has changed."""
        if self._nodes is not None:
            self._nodes.prepare(leaves)
            self.ready = self._nodes.ready

    def begin(self) -> None:
        """Begin to store to the tree; it is made anew of its leaves unless `end` follows."""
        if self._closed or process_id() != self._pid:
            self._require_process()
            raise EpisodeStateError(f"{self.storage.path}: the buffer was closed; reopen it with from_folder")
        self.whole = False
        self._head[GENERATION] = self._head.item(GENERATION) | 1  # plain: of uint64 and int numpy 1 makes a float
        self._words[GENERATION] = self._head[GENERATION]

    def _require_process(self) -> None:
        if process_id() != self._pid:
            raise WriterLostError(
                f"{self.storage.path}: a forked child does not own the priorities {self.name!r}; draw and update in "
                "the parent, or open the buffer anew in the child under another name",
                reason="forked",
            )

    def end(self) -> None:
        """End what `begin` began."""
        self._head[GENERATION] = self._head.item(GENERATION) + 1
        self._words[GENERATION] = self._head[GENERATION]
        self.whole = True

    def raise_maximum(self, value: float) -> None:
        """The maximum is at least `value` from now on."""
        if value > self.maximum:
            self.maximum = value
            self._put(MAXIMUM, _bits(value))

    def put_pairs(self, slots: IntArray, pairs: Any) -> None:
        """Give some slots other pairs (B, 2)."""
        self.pairs[slots] = pairs
        self._words[WORDS:].reshape(-1, 2)[slots] = self.pairs[slots]

    def take_epsilon(self, epsilon: float) -> None:
        """Errors that come from now on have this ε; the leaves that are there stay."""
        self.epsilon = epsilon
        self._put(EPSILON, _bits(epsilon))

    def keep_minima(self) -> None:
        """From now on `tree.minimum` is kept; the first time this looks at every step."""
        if self._nodes is not None:
            self._nodes.watch_minima()
            self.ready = self._nodes.ready
        slots = np.flatnonzero(self.pairs[:, 1])
        steps = slots, *self.steps_of(slots)
        for block in self.blocks(*steps):
            self.prepare(self.leaves_of(*block))
        self.begin()
        self.tree.minima = True
        for block in self.blocks(*steps):
            self.tree.refresh(self.leaves_of(*block))
        self._put(MINIMA, 1)
        self.end()

    def checkpoint(self) -> None:
        """Wait until all that was stored is on the disk. Raises OSError, WriterLostError."""
        if self._nodes is None or self._closed:
            return
        self.require_place()
        if not self._nodes.shared:
            write_word(self._fd["head"], int(self._head[GENERATION]) | 1, self._head_file.offset(GENERATION))
        self._nodes.checkpoint()
        self._save_head()

    def close(self) -> None:
        """Bring everything to the disk and let go; twice is fine, and in a forked child nothing is written."""
        if self._nodes is not None and self.whole and not self._closed and process_id() == self._pid:
            self._nodes.checkpoint()
            self._head[CLEAN] = 1
            self._save_head()
        self._closed = True
        self._folder.let_go()
        if process_id() == self._pid:
            self._finalizer()

    def _put(self, word: int, value: int) -> None:
        # A store, as two calls of `pwrite` take a tenth of a batch. What was stored before a kill is in the file, in
        # that order; and `load` wrote to the block, so that it is there also where the disk is full.
        self._head[word] = self._words[word] = value

    def _save_head(self) -> None:
        """Write what follows the generation, then the generation."""
        write_all(self._fd["head"], self._head[1:], self._head_file.offset(1))
        write_word(self._fd["head"], int(self._head[GENERATION]), self._head_file.offset(GENERATION))
        barrier(self._fd["head"])

    # Opening

    def load(self, distrust: str = "") -> None:
        """Map the tree where it can be trusted, else make it anew of its leaves; `distrust` says why, if it is known.

        Raises:
            CorruptBufferError: something in `priority/` is a link or no plain file.
            OSError: the disk is full.
            SchemaError: α is too large for the highest priority so far.
            WriterLostError: in a forked child, which would make its parent's file anew; or another folder stands at
                the path of a tree in memory.
        """
        self.whole = False
        if self._locks:
            self._require_process()
            self._load(distrust)
            return
        self._hold()
        try:
            self._load(distrust)
        finally:
            self._folder.let_go()  # of more folders than a process may have files open, say

    def _load(self, distrust: str) -> None:
        why = self._read_head() or distrust
        if not why and self._locks:
            self._map()
            why = self._distrusted()
        if why or not self._locks:
            self._require_room_for(self.alpha)
            self._rebuild(why, *self._kept())
        self._begin_use()

    def _begin_use(self) -> None:
        """Say in the head whose file it is, and that it is in use."""
        if self._locks:
            boot = np.frombuffer(boot_id(), np.uint64)
            words = {
                CLEAN: 0,
                INODE: self._folder.file_key(self._nodes_file.name)[1],
                BOOT: boot[0],
                BOOT + 1: boot[1],
                EPSILON: _bits(self.epsilon),
                MAXIMUM: _bits(self.maximum),
                ARRANGEMENT: KIND,
            }
            for word, value in words.items():
                self._head[word] = value
            # Before anything is stored: from here on a crash of the machine is one that is seen.
            write_all(self._fd["head"], self._head[:WORDS], self._head_file.offset(0))
            barrier(self._fd["head"])
        self.whole = True

    def _read_head(self) -> str:
        """Read the head; returns why the tree cannot be used as it is, or ""."""
        folder, file, nodes = self._folder, self._head_file, self._nodes_file
        if not folder.exists(file.name) or not folder.exists(nodes.name):
            return NEW
        data: dict[str, bytes] = {}
        for array_file, size in ((file, file.size - len(file.header)), (nodes, 0)):
            try:
                fd = {"": folder.open_to_read(array_file)}
            except CorruptBufferError as error:
                if "size" not in error.named:
                    raise
                return str(error)
            data[array_file.name] = read_at(fd[""], size, len(array_file.header))
            close_all(fd)
        head = np.frombuffer(data[file.name], np.uint64).copy()
        maximum = float(head[MAXIMUM : MAXIMUM + 1].view(np.float64)[0])
        start, stop = steps_in(head[WORDS + 1 :: 2].view(np.int64))
        first = self.storage.first_row(np.arange(len(stop)), False)
        room = np.minimum(self.leaves - first, self.storage.layout.max_timesteps)
        if not 0 < maximum <= MAX_PRIORITY or (start > stop).any() or (stop > room).any():
            return "its head is damaged"
        self._take_head(head)
        self.maximum = maximum
        boot = head[BOOT : BOOT + 2].tobytes()
        if int(head[GENERATION]) % 2:
            return "an update did not end"
        if int(head[INODE]) != folder.file_key(nodes.name)[1]:
            return "it is a copy"
        if int(head[ARRANGEMENT]) != KIND:
            return "its sums were arranged otherwise"
        if not head[CLEAN] and (boot != boot_id() or not any(boot)):
            return "the machine went down while it was in use"
        return ""

    def _map(self) -> None:
        head, minima = self._head_file, bool(self._head[MINIMA])
        self._nodes, self.ready = Nodes(self._folder, self._nodes_file, self.leaves, minima=minima), False
        self.tree = SumTree(self._nodes.array, self.leaves, minima=minima)
        close_all(self._fd)
        shared = self._nodes.shared
        self._fd["head"], self._words = self._folder.map_to_change(head, shared=shared)
        if shared and has_hole(self._fd["head"], 0, head.size):  # of a sparse copy: a store there may meet a full disk
            write_all(self._fd["head"], read_at(self._fd["head"], head.size, 0), 0)
        if not shared:
            text = "%s: this file system does not overwrite in place, so changes of the priorities %r stay in memory "
            log.info(text + "until checkpoint()", self.storage.path, self.name)

    def _distrusted(self) -> str:
        """Why a tree whose head is right cannot be used, or ""."""
        assert self._nodes is not None
        alpha = float(self._nodes.array[0])
        if alpha != self.alpha:
            return f"alpha was {alpha} and is {self.alpha}"
        return "" if self.tree.sound else "its sums are damaged"

    def _rebuild(self, why: str, *kept: Any) -> None:
        """A new tree of leaves that are kept, as `_kept` gives them."""
        self._head[WORDS:] = 0
        self._head[MINIMA] = 0
        if not self._locks:
            require_memory(self.storage, self.leaves, f"priorities {self.name!r}")
            self.tree = SumTree.empty(self.leaves)
            self._restore(*kept)
            return
        if why != NEW:
            log.warning("%s: priorities %r are made anew of their leaves: %s", self.storage.path, self.name, why)
        self._doubt_head()
        folder, final = self._folder, self._nodes_file
        self._nodes_file = nodes_file(f"{final.name}.new", self.leaves)
        try:
            folder.unlink(self._nodes_file.name, missing_ok=True)
            folder.create_array(self._nodes_file)
            self._map()
            self._restore(*kept)
            assert self._nodes is not None
            self._nodes.checkpoint()
            folder.rename(self._nodes_file.name, final.name)
        finally:
            self._nodes_file = final
        self._head[GENERATION] = 2
        self._save_head()

    def _doubt_head(self) -> None:
        """A head whose generation is odd, on the disk before anything else is changed."""
        folder, head = self._folder, self._head_file
        try:
            with folder.writing(head) as fd:
                write_word(fd, 1, head.offset(GENERATION))
        except CorruptBufferError:  # missing or torn
            words = np.zeros(head.shape, np.uint64)
            words[GENERATION], words[MAXIMUM] = 1, _bits(self.maximum)
            folder.replace_file(head.name, head.header, words.tobytes())

    def stored(self) -> tuple[float | None, float | None]:
        """(α, ε) that the files tell of; None where there are none, or they are damaged."""
        head, nodes = self._head_file, self._nodes_file
        if not self._folder.exists(head.name):
            return None, None
        try:
            words = self._folder.map(head)
            alpha = float(self._folder.map(nodes)[0])
        except CorruptBufferError:
            return None, None
        epsilon = float(words[EPSILON : EPSILON + 1].view(np.float64)[0])
        return alpha if 0 <= alpha <= 100 else None, epsilon if 0 <= epsilon <= 1e100 else None

    def rescale(self, alpha: float) -> None:
        """Give all leaves another α. They and α change together: the tree is made anew in a new file.

        Raises:
            OSError: the disk is full.
            SchemaError: the highest priority would be too large; nothing was changed.
        """
        self._require_room_for(alpha)
        before, shown, self.alpha = self.alpha, self.pairs.copy(), alpha
        slots = np.flatnonzero(shown[:, 1])
        if self._nodes is not None:
            self._require_process()
            self.whole = False
            self._rebuild(f"alpha was {before} and is {alpha}", slots, shown[slots], self._nodes.array)
            self._begin_use()
        else:
            self.begin()
            for block in self.blocks(slots, *self.steps_of(slots)):
                leaves = self.leaves_of(*block)
                self.tree.put(leaves, self._scaled(self.tree.get(leaves), before))
            self.end()
        assert np.array_equal(self.pairs, shown)  # each step that was shown still has its leaf

    def _require_room_for(self, alpha: float) -> None:
        if alpha * np.log(self.maximum) > np.log(MAX_PRIORITY):
            raise SchemaError(
                f"{self.storage.path}: alpha: got {alpha}, and the highest |δ| + ε of the priorities {self.name!r} so "
                f"far, {self.maximum:.3g}, would be a priority above {MAX_PRIORITY:.0e}; give a lower alpha or another "
                "name"
            )

    def _scaled(self, leaves: FloatArray, alpha: float) -> FloatArray:
        """Leaves that had α as those of now; the default where that cannot be known."""
        good = ((leaves > 0) & (leaves <= MAX_PRIORITY)) | ((leaves == 0) & np.signbit(leaves))
        good &= alpha > 0  # else all leaves were 1, and tell nothing
        if self.alpha != alpha and alpha > 0:
            with np.errstate(over="ignore"):
                leaves = np.where(good, np.abs(leaves), 1.0) ** (self.alpha / alpha)
            good &= leaves <= MAX_PRIORITY
        return with_zeros(np.where(good, leaves, self.default))

    def _kept(self) -> tuple[IntArray, Array, FloatArray]:
        """(slots, their pairs, the old nodes) of all leaves; whoever follows takes those out whose episode is gone."""
        file, none = self._nodes_file, (np.zeros(0, np.int64), np.zeros((0, 2), np.uint64), np.zeros(3))
        if not self._folder.exists(file.name):
            return none
        try:
            old = self._folder.map(file)
        except CorruptBufferError:  # torn
            return none
        slots = np.flatnonzero(self.pairs[:, 0])
        return slots, self.pairs[slots], old

    def _restore(self, slots: IntArray, pairs: Array, old: FloatArray) -> None:
        if self._nodes is not None:
            self._nodes.array[0] = self.alpha  # in the block that the header is in, so it is there
        alpha = old.item(0) if 0 < old.item(0) < np.inf else 0.0
        for block in self.blocks(slots, *steps_in(pairs[:, 1].view(np.int64))):
            leaves = self.leaves_of(*block)
            self.prepare(leaves)
            self.tree.set(leaves, self._scaled(old.take(leaves + len(old) // 3), alpha))
        self.pairs[slots] = pairs


def require_memory(storage: Storage, leaves: int, what: str) -> None:
    """Raise SchemaError where a tree in memory, of the steps that a folder shows, takes more than there is.

    Pages that no step lies in take none. A system that gives more memory than it has would end the process later.
    """
    if NODE_BYTES * leaves <= SMALL:
        return
    table, available = storage.refresh(), available_memory()
    needed = min(NODE_BYTES * leaves, NODE_BYTES * table.steps + PAGE * len(table))
    if available is not None and needed > available:
        raise SchemaError(
            f"{storage.path}: {what} of {table.steps} timesteps in {len(table)} episodes take {needed / 2**30:.1f} GiB "
            f"of memory, and {available / 2**30:.1f} are free; open the folder to write, where those of TD errors are "
            "in a file, and draw timesteps, or draw from fewer of them"
        )


def nodes_file(name: str, leaves: int) -> ArrayFile:
    """The file of a tree's nodes."""
    return ArrayFile(name, np.dtype("<f8"), (num_nodes(leaves),))


class Nodes:
    """The nodes of one tree, mapped from an existing file so that the disk may be full, and no store ever kills.

    Shared: stores go to the file, and survive the process. Before the first one into a chunk of 2 MiB, the chunk and
    all that lies above it in the tree are written by `pwrite`, which raises where the disk is full; a later store into
    a written block allocates nothing, where the file system overwrites in place. Elsewhere the map is private: what was
    stored is in memory, and written by `pwrite` at `checkpoint`.

    Chunks lie in the file at multiples of 2 MiB, and one that was a hole, as all but the first one are, is written by
    one call: then Linux keeps it in one large page, where it can (ext4 from 6.16 on), and an update of a large tree
    waits for fewer addresses.

    Args:
        folder, file: the existing file.
        leaves: of the tree.
        minima: whether the heap of minima is stored to, too.

    Attributes:
        array: (num_nodes(leaves),) float64.
        shared: whether stores reach the file at once.
        ready: whether all blocks of leaves may be stored to.
    """

    def __init__(self, folder: Folder, file: ArrayFile, leaves: int, *, minima: bool) -> None:
        self.shared = overwrites_in_place(folder.path)
        self.minima = minima
        self._file = file
        self._first = capacity_of(leaves)
        self._bits = CHUNK_BITS if self.shared else PAGE_BITS
        self._lead = file.offset(0) // 8  # words before node 0
        fd, self.array = folder.map_to_change(file, shared=self.shared)
        self._fd = {"": fd}
        weakref.finalize(self, close_all, self._fd).atexit = False
        blocks = ((file.shape[0] + self._lead) >> self._bits) + 1
        self._marked = np.zeros(blocks, np.bool_)  # leaves: shared, they may be stored to; private, they were
        self._written = np.zeros(blocks, np.bool_)
        low, high = self._block(self._first + np.array([0, leaves - 1])).tolist()
        self._of_leaves = slice(low, high + 1)
        self.ready = False

    def prepare(self, leaves: IntArray) -> None:
        """Have room on the disk for stores to leaves and the nodes above. Raises OSError: the disk is full."""
        if self.ready:
            return
        blocks = self._block(leaves + self._first)
        if not self.shared:
            self._marked[blocks] = True
        elif not self._marked.take(blocks).all():
            new = np.unique(blocks)
            self._fill(self._with_above(new))
            self._marked[new] = True
            self.ready = bool(self._marked[self._of_leaves].all())

    def watch_minima(self) -> None:
        """From now on the heap of minima is stored to."""
        self.minima = True
        if self.shared:
            self._marked[:] = self.ready = False

    def checkpoint(self) -> None:
        """Bring all stores to the disk. Raises OSError; then the same stores are tried again the next time."""
        if not self.shared:
            changed = self._with_above(np.flatnonzero(self._marked))
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1):
                start, stop = int(self._nodes(run[:1])[0][0]), int(self._nodes(run[-1:])[1][0]) + 1
                write_all(self._fd[""], self.array[start:stop], self._file.offset(start))
        barrier(self._fd[""])
        if not self.shared:
            self._marked[:] = False

    def _block(self, nodes: IntArray) -> IntArray:
        """In which block of the file nodes lie."""
        return (nodes + self._lead) >> self._bits

    def _nodes(self, blocks: IntArray) -> tuple[IntArray, IntArray]:
        """The first and the last node that lies in blocks."""
        first = (blocks << self._bits) - self._lead
        return np.maximum(first, 0), np.minimum(first + (1 << self._bits), len(self.array)) - 1

    def _with_above(self, blocks: IntArray) -> IntArray:
        """Blocks of leaves, and of the nodes kept above them, each of which has an eighth of the number."""
        every, level = [np.zeros(1, np.int64), blocks], blocks
        while len(level) and level[-1] > 0:
            first, last = (nodes >> STEP for nodes in self._nodes(level))
            level = np.unique(self._block(np.concatenate([first, last])))
            every.append(level)
            if self.minima:
                every += self._keys(first, last)
        if self.minima:
            every += self._keys(np.zeros(1, np.int64), np.array([1 << self._bits]))
        return np.unique(np.concatenate(every))

    def _keys(self, first: IntArray, last: IntArray) -> list[IntArray]:
        """The blocks of the second heap that the keys of nodes first … last, at most a block of each, lie in."""
        ends = (np.minimum(nodes + 2 * self._first, len(self.array) - 1) for nodes in (first, last))
        return [self._block(nodes) for nodes in ends]

    def _fill(self, blocks: IntArray) -> None:
        fd, size = self._fd[""], 8 << self._bits
        for block in blocks[~self._written[blocks]].tolist():
            start, stop = max(self._file.offset(0), block * size), min(self._file.size, (block + 1) * size)
            if stop > start and has_hole(fd, start, stop):
                zeros = is_hole(fd, start, stop)  # to read them would put small pages in the place of the large one
                write_all(fd, bytes(stop - start) if zeros else read_at(fd, stop - start, start), start)
            self._written[block] = True


def in_blocks(count: IntArray, size: int) -> Iterator[tuple[IntArray, IntArray]]:
    """(of which run, its number in it, from 0) of each item of runs of so many items, `size` items at a time."""
    ends = np.cumsum(count)
    starts = range(0, int(ends[-1]) if len(ends) else 0, size)
    for at in starts if len(starts) < MANY_BLOCKS else progress(starts, "priorities"):
        i = np.arange(at, min(at + size, int(ends[-1])))
        place = np.searchsorted(ends, i, side="right")
        yield place, i - ends[place] + count[place]


def steps_in(words: IntArray) -> tuple[IntArray, IntArray]:
    """(start, stop) of second words of pairs."""
    return words & LOW, words >> 32 & LOW


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.uint64))


def _release(descriptors: dict[str, int], locks: list[Any]) -> None:
    close_all(descriptors)
    while locks:
        locks.pop().release()
