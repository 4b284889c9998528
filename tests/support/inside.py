"""Parts of the library that no public door shows, each named here alone: a rebuild changes this one place.

A test asks for one of them only where neither a public method nor the files on the disk tell what it must know. What
only some tests need is imported when it is asked for: others fork, which takes the longer the more was imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import ConcatBuffer, ReplayBuffer, Schema, View
from memmap_buffer.format import layout, lock, syscalls
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.storage import Storage
from memmap_buffer.items import epoch
from memmap_buffer.loading import prioritized
from memmap_buffer.priority import anchor_priorities, kernels
from memmap_buffer.priority.leaves import Leaves

if TYPE_CHECKING:
    import pytest


def around(patch: pytest.MonkeyPatch, place: Any, name: str, before: Any = None, after: Any = None) -> None:
    """Work before or after each call of a function."""
    real = getattr(place, name)

    def called(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before()
        value = real(*arguments, **options)
        if after is not None:
            after()
        return value

    patch.setattr(place, name, called)


# Limits, functions and classes of the inside, by a name of their own


def get_inside(name: str) -> Any:
    """What a name of `PLACES` stands for, as it is now."""
    owner, attribute = place_of(name)
    return getattr(owner, attribute)


def set_inside(patch: pytest.MonkeyPatch, **others: Any) -> None:
    """Put others in the place of what names of `PLACES` stand for."""
    for name, other in others.items():
        patch.setattr(*place_of(name), other)


def place_of(name: str) -> tuple[Any, str]:
    """The module or class, and its attribute, that a name of `PLACES` stands for."""
    module, _, path = PLACES[name].partition(":")
    *owners, attribute = path.split(".")
    return reduce(getattr, owners, import_module(f"memmap_buffer.{module}")), attribute


PLACES = {
    # limits
    "staged_bytes": "writing.episode:CHUNK_BYTES",
    "first_capacity": "writing.episode:FIRST_CAPACITY",
    "staging": "writing.episode:Staging",
    "leave_scope": "api.recording:Scope.leave",
    "leave_episode": "writing.episode:Episode.leave",
    "leave_group": "writing.episode_group:EpisodeGroup.leave",
    "look_of_round": "writing.rounds:Round.look",
    "ended_statement": "format.open_episodes:ended_statement",
    "open_episodes": "format.open_episodes:OpenEpisodes",
    "turn": "format.lock:Turn",
    "encoded_bytes": "writing.blob_column:PART_BYTES",
    "piece_bytes": "writing.commit:PIECE",
    "redo_bytes": "writing.redo:PART",
    "round_block": "writing.rounds:BLOCK",
    "round_ahead": "writing.rounds:AHEAD",
    "given_back_bytes": "writing.commit:BLOCK",
    "punched_bytes": "format.syscalls:BLOCK",
    "in_memory_systems": "writing.commit:MEMORY",
    "path_look_seconds": "format.lock:LOOK_SECONDS",
    "root_look_seconds": "remote.shards:LOOK_SECONDS",
    "marks_look_seconds": "items.marked:LOOK_SECONDS",
    "first_pause": "remote.objects:FIRST_PAUSE",
    "longest_pause": "remote.objects:LONGEST_PAUSE",
    "tries": "remote.objects:TRIES",
    "settle_seconds": "maintenance.publish:SETTLE_SECONDS",
    "merged_heads": "maintenance.publish:MERGED",
    "merged_bytes": "maintenance.publish:MERGED_BYTES",
    "max_root_bytes": "remote.layout:MAX_ROOT_BYTES",
    "removed_together": "maintenance.garbage:TOGETHER",
    "joined_files": "maintenance.compaction:MAX_FILES",
    "joined_slots": "maintenance.compaction:MAX_SLOTS",
    "joined_bytes": "maintenance.compaction:MAX_DERIVED_BYTES",
    "publisher_wait_seconds": "maintenance.publisher:WAIT_SECONDS",
    "pack_rounds": "maintenance.pack:ROUNDS",
    "recoded_bytes": "maintenance.recoding:CHUNK",
    "recoded_chunk": "maintenance.recoding:CODED_CHUNK",
    "max_dictionary": "maintenance.recoding:MAX_DICTIONARY",
    "snapshot_rounds": "maintenance.snapshot:ROUNDS",
    "statistics_block_bytes": "maintenance.statistics:BLOCK_BYTES",
    "statistics_sample": "maintenance.statistics:SAMPLE",
    "disk_sample": "maintenance.disk:SAMPLE",
    "in_memory_share": "maintenance.disk:IN_MEMORY",
    "dictionary_samples_a_byte": "maintenance.recoding:SAMPLES_A_BYTE",
    "filtered_steps": "items.filters:CHUNK_STEPS",
    "most_touched": "items.live_index:MOST_TOUCHED",
    "shared_least": "items.shared_arrays:LEAST",
    "epoch_chunk": "loading.epochs:CHUNK",
    "sampler_bytes": "loading.samplers:MOST_BYTES",
    "samplers_kept": "loading.samplers:MOST",
    "index_bytes": "views.batch_builder:INDEX_BYTES",
    "widest_address": "views.by_address:WIDE",
    "most_at": "format.syscalls:MOST_AT",
    "max_batch_bytes": "views.batch_builder:MAX_BATCH_BYTES",
    "batch_bytes": "views.gather:MAX_BATCH_BYTES",
    "max_head_bytes": "maintenance.publish:MAX_HEAD_BYTES",
    "max_schema_bytes": "format.layout:MAX_SCHEMA_BYTES",
    "max_serial": "format.records:MAX_SERIAL",
    "npy_header": "format.syscalls:npy_header",
    "max_slots": "format.layout:MAX_SLOTS",
    "answer_seconds": "loading.batch_reader:ANSWER_SECONDS",
    "disk_answer_seconds": "loading.read_ahead:ANSWER_SECONDS",
    "gap_bytes": "loading.read_ahead:GAP_BYTES",
    "row_gap": "loading.read_ahead:ROW_GAP",
    "anchor_block": "priority.anchor_priorities:BLOCK",
    "columns_chunk_bytes": "episode_columns:CHUNK_BYTES",
    "group_steps": "interop.parquet:GROUP_STEPS",
    "lerobot_group": "interop.lerobot:GROUP",
    "frames_at_once": "interop.lerobot:AT_ONCE",
    "video_mb": "interop.lerobot:VIDEO_MB",
    "lerobot_data": "interop.lerobot:DATA",
    "lerobot_episodes": "interop.lerobot:EPISODES",
    # of the system
    "system": "format.syscalls:system",
    "add_map": "format.syscalls:FileMaps.add",
    "can_forget": "format.syscalls:CAN_FORGET",
    "in_memory": "format.folder:in_memory",
    "ask_kernel": "format.folder:will_need",
    "write_all": "format.syscalls:write_all",
    "punch": "format.syscalls:punch",
    "file_lock": "format.folder:FileLock",
    "lock_clock": "format.lock:time.monotonic",
    "file_system": "writing.commit:file_system",
    "stores_are_writes": "writing.commit:stores_are_writes",
    "allocate_for_commit": "writing.commit:allocate",
    "allocate_for_rounds": "writing.rounds:allocate",
    "write_word": "writing.commit:write_word",
    "write_of_rounds": "writing.rounds:write_all",
    "barrier_of_commit": "writing.commit:barrier",
    "free_bytes": "format.folder:Folder.free_bytes",
    "require_free": "format.folder:Folder.require_free",
    "copy_file": "format.folder:Folder.copy_file",
    "create_folder": "format.folder:Folder.create",
    "create_array": "format.folder:Folder.create_array",
    "rename_file": "format.folder:Folder.rename",
    "map_arrays": "format.folder:Folder.map_all",
    "create_buffer": "format.creation:create",
    # writing
    "commit": "writing.writer:commit",
    "free_slots": "writing.writer:Writer._free_slots",
    "begin_writing": "writing.writer:Writer.begin",
    "flush": "writing.writer:Writer.flush",
    "take_over": "writing.writer:Writer._take_over",
    "commit_pending": "writing.writer:Writer.commit_pending",
    "append_round": "writing.writer:Writer.append_round",
    "tell_readers": "writing.commit:WriteHandles.changed",
    "publish_episode": "writing.writer:Writer.publish",
    "publish_stream": "writing.vector_env:EpisodeStream.publish",
    "give_back": "writing.commit:WriteHandles.give_back",
    "map_for_writing": "writing.commit:WriteHandles.map",
    "write_state": "writing.commit:WriteHandles.write_state",
    "sum_updated_rows": "writing.redo:add_rows",
    "add_field": "maintenance.schema_changes:add",
    # reading
    "columns_of": "format.journal:columns_of",
    "changed_records": "format.journal:changed_records",
    "damaged": "format.storage:Storage.damaged",
    "coded_rows": "format.blobs:CodedRows",
    "runs": "views.anchors:Runs",
    "columns": "format.storage:Storage.columns",
    "withdraw": "format.storage:Storage.withdraw",
    "refresh_storage": "format.storage:Storage.refresh",
    "change_marks": "format.marks:Marks.change",
    "parse_marks": "format.marks:parsed",
    "decode_rows": "format.blobs:CodedRows.decode_into",
    "unchanged": "views.folders:Found.unchanged",
    "folder_at": "views.folders:Folders.at",
    "refresh_folders": "views.folders:Folders.refresh",
    "copy_rows": "views.gather:Gather.copy",
    "open_storage": "format.storage:Storage.open",
    "make_index": "items.selection:Selection.index",
    "index_of_reader": "loading.batch_reader:BatchReader.index",
    "read_batch": "loading.batch_reader:BatchReader.read",
    "build_batch": "loading.batch_reader:BatchReader.build",
    "batch_reader": "api.reading:BatchReader",
    "option_key": "api.reading:key_of",
    "agree": "loading.distributed:ProcessRanks.agree",
    "disk_took": "loading.read_ahead:Disk.took",
    "disk_ask": "loading.read_ahead:Disk.ask",
    "disk_reads": "loading.read_ahead:disk_reads",
    "will_need": "loading.read_ahead:will_need",
    "ask_for_blobs": "loading.read_ahead:ask_for_blobs",
    "row_gather": "views.gather:RowGather",
    "row_ranges": "views.row_ranges:RowRanges",
    "matches": "items.filters:matches",
    "left_of": "items.live_index:LiveIndex.left_of",
    "new_anchors": "items.new_items:Anchors",
    "episode_column": "items.weights:episode_column",
    # priorities
    "spread": "loading.prioritized:spread",
    "ranks": "items.rank_partition:Ranks",
    "in_turn": "priority.priorities:in_turn",
    "while_locked": "priority.priorities:while_locked",
    "by_tree": "priority.sum_tree:by_tree",
    "open_priorities": "priority.priorities:Priorities.open",
    "row_of_priorities": "priority.priorities:Priorities.row",
    "end_of_tree": "priority.tree_file:TreeFile.end",
    # copies and what is published
    "publish": "maintenance.publisher:publish",
    "begin_publishing": "maintenance.publisher:Publisher.begin",
    "publisher_sleep": "maintenance.publisher:time.sleep",
    "shards_in": "maintenance.publisher:shards_in",
    "folders_in": "api.concat:folders_in",
    "require_fields": "maintenance.publish:require_fields",
    "settle": "maintenance.publish:settle",
    "publish_clock": "maintenance.publish:time.time_ns",
    "encode_many": "maintenance.recoding:encode_many",
    "close_up": "maintenance.pack:close_up",
    "replace_schema": "maintenance.pack:_replace_schema",
    "write_counters": "maintenance.pack:write_counters",
    "running_statistics": "maintenance.statistics:RunningStatistics",
    "survey_state": "maintenance.verification:Survey.state",
    "survey": "maintenance.verification:Survey",
    "repaired_record": "maintenance.verification:repaired_record",
    "most_records_tried": "maintenance.verification:MAX_TRIED",
    "disk_file_system": "maintenance.disk:file_system",
    "mounts": "format.host:MOUNTS",
    "network_file_system": "maintenance.disk:network_filesystem",
    "write_object": "remote.objects:Objects.write",
    "swap_object": "remote.objects:Objects.replace_tagged",
    "remove_older_objects": "remote.objects:Objects.remove_older",
    "stream_object": "remote.objects:Objects.stream",
    "list_objects": "remote.objects:Objects.listing",
    "head_object": "remote.layout:head_object",
    "root_of": "remote.published:read_root",
    "shard_of": "remote.published:read_shard",
    "store_clock": "remote.objects:time.time",
    "read_root": "remote.shards:read_root",
    # the command
    "available_memory": "cli.doctor_bench:available_memory",
    "disk_speed": "cli.doctor_bench:measure_disk_speed",
    "table_of": "cli.inspection:table_of",
    "write_gif": "cli.pictures:write_gif",
    "bench_levels": "cli.doctor_bench:LEVELS",
    "histogram_bins": "episode_columns:BINS",
    "new_folder": "cli.folders:new_folder",
    "bytes_of": "cli.terminal:bytes_of",
    "shards_of": "cli.minimal:shards_of",
    # loops and trees
    "compiled_loops": "priority.kernels:compiled",
    "tree_loops": "priority.sum_tree:SumTree.loops",
}

# What a folder is, and what is written to it


def num_remembered_as_gone(buffer: ReplayBuffer) -> int:
    """The number of episodes that are gone, and that the journal of a buffer still remembers."""
    return len(storage_of(buffer).journal._gone)


def storage_of(buffer: ReplayBuffer) -> Any:
    """The folder as it is mapped: its files, layout, episode table and journal."""
    return buffer._storage


def opened(folder: Path, **options: Any) -> Any:
    """A folder as it is mapped, without a buffer; options as for `from_folder`."""
    return Storage.open(folder, **options)


def place_of_row(folder: Path, name: str, slot: int) -> tuple[Path, int]:
    """The file of a field, and where in it the first row of a slot begins."""
    array = layout.Layout.from_json((folder / "schema.json").read_bytes(), "schema.json").arrays[name]
    return folder / array.name, array.offset(slot)


def layout_of_capacity(schema: Schema, max_timesteps: int, capacity: int) -> Any:
    """The sizes and files of a ring that is not made."""
    return layout.Layout.derived(schema, None, max_timesteps, capacity=capacity)


def create_empty(folder: Path, schema: Schema, max_episodes: int, max_timesteps: int) -> None:
    """A folder without an episode, of which nothing is mapped."""
    target = Folder(folder)
    target.create()
    with import_module("memmap_buffer.format.creation").creating(
        target, layout.Layout(schema, max_episodes, max_timesteps)
    ):
        pass


def checksums_of(folder: Path, slot: int, length: int, has_final: bool, columns: int) -> tuple[bytes, int]:
    """The row of checksums.npy that the rows of a slot should have, and its digest."""
    checksums = import_module("memmap_buffer.format.checksums")
    storage = Storage(folder, read_only=True, verify="never")
    row = checksums.checksum_row(storage.layout, storage.checksums_of(slot, length, has_final))
    return row, checksums.digest_of(row, columns)


def lock_folder(folder: Path) -> Any:
    """The lock of a folder's writer, until nobody refers to it."""
    return Folder(folder).lock()


def schema_written_again(text: bytes) -> bytes:
    """A schema.json, parsed and written again."""
    return layout.Layout.from_json(text, "schema.json").to_json()


def slot_of(folder: Path, serial: int) -> int:
    """The slot of an episode, as the records on the disk tell it."""
    records = np.load(folder / "episodes.npy")
    (slots,) = np.nonzero((records["serial"] == serial) & (records["check"] != 0))  # 0: it was never used
    return int(slots[-1])


def changes_of(folder: Path) -> int:
    """The change counter, as the file tells it."""
    return int(np.load(folder / "state.npy")["changes"].item())


def take_lock(buffer: ReplayBuffer) -> None:
    """Make it the writer of its folder, which settles what a dead one left, and write nothing else."""
    buffer.begin_episode().abort()


def files_of(buffer: ReplayBuffer) -> Any:
    """The files of the folder's writer, which has its lock then."""
    return buffer._writer.begin()


def turn_of(buffer: ReplayBuffer) -> Any:
    """The lock of the threads that write to the folder."""
    return buffer._writer.lock.turn


def open_episodes(buffer: ReplayBuffer) -> list[Any]:
    """The episodes that the folder's writer has open."""
    return buffer._writer.lock.episodes.every()


def most_open_episodes(buffer: ReplayBuffer) -> int:
    """How many episodes its folder's writer counts as open; some may be over."""
    return len(buffer._writer.lock.episodes)


# What batches are drawn from


def folders_of(buffer: ReplayBuffer | ConcatBuffer) -> Any:
    """The folders that it reads as one."""
    return buffer._folders


def batch_reader_of(buffer: ReplayBuffer | ConcatBuffer, options: dict[str, Any]) -> Any:
    """What reads batches by a set of options: its index has the anchors of all items."""
    return import_module("memmap_buffer.loading.batch_reader").BatchReader(folders_of(buffer), options)


def live_index_of(buffer: ReplayBuffer, view: View) -> Any:
    """The index of all items of a view, which follows each change."""
    selection = import_module("memmap_buffer.items.selection").Selection(view)
    return import_module("memmap_buffer.items.live_index").LiveIndex(selection, folders_of(buffer))


def samplers_of(buffer: ReplayBuffer | ConcatBuffer) -> list[Any]:
    """The samplers that are kept, one for each set of options."""
    return [*buffer._samplers.values()]


def expect_no_slow_disk(buffer: ReplayBuffer) -> None:
    """As once it is known that no batch waits for a disk: what is traced takes as long as one that does."""
    for sampler in samplers_of(buffer):
        sampler.reader._disk.watches = False


# The writer


def shows_steps(buffer: ReplayBuffer) -> bool:
    """Whether each timestep is published at once."""
    return buffer._writer.how.publish == "step"


def slots_taken(buffer: ReplayBuffer) -> int:
    """How many slots are taken for open episodes."""
    return len(buffer._writer._slot_writers)


def next_serial(buffer: ReplayBuffer) -> int:
    """The number of the next episode, once it has the lock."""
    return buffer._writer._slots.next


def leave_out_serials(buffer: ReplayBuffer, count: int) -> None:
    """Leave a gap of numbers before the next episode, as a ring leaves behind that lived for long."""
    buffer._writer._slots.next += count


def hand_on(buffer: ReplayBuffer, other: ReplayBuffer) -> None:
    """Have another folder get the episodes that are open, as the next shard does."""
    other._writer.begin()
    buffer._writer.move_episodes(other._writer)


def round_of(buffer: ReplayBuffer) -> Any:
    """The part of `add` that stores a timestep of all environments together; None where each is written by itself."""
    joint = None if buffer._stream is None else buffer._stream._round
    return None if type(joint).__name__ == "WrittenRound" else joint


def publishing_turn_of(buffer: ReplayBuffer) -> Any:
    """The lock of the threads that hand on a shard to be published."""
    return buffer._publisher.turn


def without_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that cannot give back a part of a file."""
    monkeypatch.setattr(syscalls, "_fallocate", None)


def let_go(buffer: ReplayBuffer) -> None:
    """Give the lock of its folder to others, as at the end of the process."""
    buffer._writer.close()


def forgotten_lock_of(buffer: ReplayBuffer) -> Any:
    """The lock of its folder, of which this process knows no more that it has it."""
    holder = lock._holders.pop(buffer._writer.lock._folder.lock_key())
    return holder._lock


def transitions_of(memory: Any, env: Any = None) -> Any:
    """All transitions of a replay buffer of Stable-Baselines3 on the disk, as it gives them to its algorithm."""
    return memory._samples(memory.disk.batch(**memory._options), env)


# Copies and what is published


@contextmanager
def after_each_call(patch: pytest.MonkeyPatch, module: str, name: str, work: Callable[[int], Any]) -> Iterator[None]:
    """`work(n)` after the n-th call of a function of `maintenance`, as if a writer did it meanwhile."""
    count = itertools.count()
    around(patch, import_module(f"memmap_buffer.maintenance.{module}"), name, after=lambda: work(next(count)))
    yield


def after_each_packed_episode(patch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> AbstractContextManager[None]:
    """`work(n)` after the rows of the n-th episode were packed."""
    return after_each_call(patch, "pack", "_copy_arrays", work)


def after_each_copied_slot(patch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> AbstractContextManager[None]:
    """`work(n)` after the rows of the n-th episode were copied for a snapshot."""
    return after_each_call(patch, "snapshot", "_copy_slot", work)


def before_the_rest_is_asked_for(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work before a snapshot asks whether the episodes that it has not have retired."""
    around(patch, import_module("memmap_buffer.maintenance.snapshot"), "_retired", before=work)


def publish_now(buffer: ReplayBuffer) -> None:
    """Begin a thread that publishes each shard that is finished, as a recorder does with the next one."""
    buffer._publisher.begin()


def root_with_shards(store: Any, root: Any, new: dict[str, Any]) -> Any:
    """The list of a root at a URL with more shards, each with its head."""
    return import_module("memmap_buffer.maintenance.publish")._with_shards(store, root, new, {})


def before_requests(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work before each request to a store."""
    objects = import_module("memmap_buffer.remote.objects").Objects
    around(patch, objects, "_try", before=work)


def disk_sample_of(storage: Any) -> Any:
    """The timesteps by which the speed of a disk is measured."""
    return import_module("memmap_buffer.maintenance.disk")._Sample(storage)


def sampled_rows(sample: Any, name: str) -> Any:
    """The rows of a field that a sample has."""
    return sample._places[name].begin


# Folders at a URL


def mirrors_of(buffer: ReplayBuffer | ConcatBuffer) -> list[Any]:
    """The local copies, in part, of the folders at a URL that it reads."""
    return [storage.mirror for storage in folders_of(buffer).storages]


def mirror_of(buffer: ReplayBuffer) -> Any:
    """The local copy, in part, of the folder at a URL that it reads."""
    (mirror,) = mirrors_of(buffer)
    return mirror


def locks_of(buffer: ConcatBuffer) -> list[Any]:
    """The locks that its threads hold while they look for folders and fetch blocks."""
    mirrors = mirrors_of(buffer)
    return [*(mirror.blocks._changed for mirror in mirrors), folders_of(buffer)._lock, mirrors[0].cache._turn]


def store_at(url: str, options: Any = None) -> Any:
    """The objects at a URL."""
    return import_module("memmap_buffer.remote.objects").Objects(url, options)


def retry(buffer: ConcatBuffer, tries: int) -> None:
    """Have each request of its store be made so often before it is given up."""
    for store in {mirror.objects for mirror in mirrors_of(buffer)}:
        store._tries = tries


def before_asking_again(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work after each request that failed, before it is known whether it is made again."""
    around(patch, import_module("memmap_buffer.remote.objects"), "_may_pass", before=work)


def give_back(mirror: Any, block: int) -> bool:
    """Give the space of a block back, unless somebody is at it."""
    return bool(mirror.blocks.give_back(np.array([block])))


def look_at_the_boot(mirror: Any) -> None:
    """Look whether the machine was started since the blocks were noted, as who opens it does."""
    mirror.blocks._begin_boot()


def keep_blocks(patch: pytest.MonkeyPatch) -> None:
    """As where every block is in use, so that none can be given back."""
    cache = import_module("memmap_buffer.remote.cache")
    patch.setattr(cache.Cache, "_give_back", lambda self, size, keep: 0)


def forget_schemas() -> None:
    """As in a process that has opened no folder."""
    layout._schema_of.cache_clear()
    layout._like.cache_clear()


def num_schemas_parsed() -> int:
    """How many documents were parsed since they were forgotten."""
    return layout._schema_of.cache_info().misses


# Batches on their way


def begin_anew(buffer: ReplayBuffer, seed: int) -> None:
    """Have what is drawn from now on follow from a seed."""
    buffer._rng = np.random.default_rng(seed)


def pool_lock(pool: Any) -> Any:
    """The lock of a pool of memory."""
    return pool._lock


def blocks_at(arrivals: Any) -> set[Any]:
    """The blocks of shared memory that the receiver of batches knows."""
    return {block for _, block in arrivals._blocks}


def blocks_kept(carrier: Any) -> set[Any]:
    """The blocks of shared memory that the sender of batches keeps."""
    return set(carrier._blocks._blocks)


def sent_to_workers(loader: Any) -> Any:
    """The dataset as the workers of a loader get it."""
    return loader._processes.dataset


def ranges_told(text: str) -> Any:
    """The serials that a loader's state names, as ranges."""
    return epoch._ranges(text)


# Priorities

LOOPS = kernels.Kernels(*(getattr(kernels, name) for name in kernels.Kernels._fields))  # as the Python that they are
COMPILED = kernels.compiled


def loops() -> Any:
    """The loops of trees as numba compiles them, or where there is none as they are."""
    return COMPILED() or LOOPS


def priorities_named(buffer: ReplayBuffer | ConcatBuffer, name: str = "td") -> Any:
    """The priorities of a name, of all its folders."""
    return buffer._priorities[name]


def before_priorities_are_opened(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work each time that priorities of a name are opened."""
    around(patch, prioritized.NamedPriorities, "open", before=work)


def priorities_of(buffer: ReplayBuffer | ConcatBuffer, part: ReplayBuffer | None = None) -> Any:
    """The priorities of the steps of one of its folders."""
    return priorities_named(buffer).of(storage_of(part or buffer))


def each_opened(named: Any) -> list[Any]:
    """The priorities of each folder that are open."""
    return [*named.opened.values()]


def anchor_priorities_of(draws: Any) -> list[Any]:
    """The priorities of the anchors of each folder that a sampler draws from."""
    return [*draws._by_storage.values()]


def before_weighing(draws: Any, work: Callable[[], Any]) -> Callable[[], None]:
    """Work in each draw of a sampler before items are weighed, until the function that is given back is called."""
    weigh = draws._weigh

    def late(*arguments: Any) -> Any:
        work()
        return weigh(*arguments)

    draws._weigh = late
    return partial(setattr, draws, "_weigh", weigh)


def words_of(priorities: Any) -> Any:
    """The words of a tree's file that tell of each slot's leaves."""
    return priorities.file.pair_words


def map_anew(priorities: Any) -> None:
    """Have a tree and its words read from new maps."""
    priorities._load("as it is wanted")


def nodes_of(tree: Any) -> Any:
    """The nodes of a sum tree, the root first."""
    return tree._words


def top_of(tree: Any) -> Any:
    """The level of nodes whose sums are taken one after another."""
    return tree._words[tree._top : 2 * tree._top]


def nodes_below_top(tree: Any) -> Any:
    """The nodes from that level on."""
    return tree._words[tree._top :]


def keys_of(tree: Any) -> Any:
    """The words of a sum tree behind its nodes."""
    return tree._keys.view(np.float64)


def store_leaves_alone(tree: Any, leaves: Any, priorities: Any, of: Any) -> None:
    """Store leaves of several trees, and none of their sums."""
    tree._words[tree._offsets[0].take(of) + tree._first + leaves] = priorities


def blocks_made_ready(nodes: Any, chosen: Any) -> set[int]:
    """The blocks of a tree's file that are made ready for stores to some of its nodes."""
    return set(nodes._with_above(np.unique(nodes._block(chosen))).tolist())


def block_size(nodes: Any) -> int:
    """The bytes of such a block."""
    return 8 << nodes._bits


def compiled_by(numba: Any, loop: Any) -> Any:
    """A loop as numba compiles it, where it has no folder to keep machine code in."""
    return kernels._compiled(numba, None, loop)


def after_the_look_at_folders(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work in each draw by priority once it knows what its folders hold, before it draws."""
    around(patch, prioritized.PrioritizedDraws, "_follow", after=work)


def before_a_folder_is_followed(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work in each draw by priority before it looks at what a folder holds."""
    around(patch, prioritized.PrioritizedDraws, "_followed_by", before=work)


def before_the_draw(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work in each draw by priority before it draws."""
    around(patch, prioritized.PrioritizedDraws, "_draw", before=work)


def before_anchors_enter(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work before the tree of a view's anchors takes in those that came."""
    around(patch, anchor_priorities.AnchorPriorities, "_enter", before=work)


def before_errors_are_taken_in(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work before priorities are given the errors that all ranks have gathered."""
    around(patch, prioritized.NamedPriorities, "update", before=work)


def after_a_change_of_columns(patch: pytest.MonkeyPatch, buffer: ReplayBuffer) -> None:
    """Have it look like one whose columns another thread has changed, once."""
    others = iter([object()])
    patch.setattr(type(buffer), "_settled", lambda self: next(others))


def followed_items(draws: Any) -> int:
    """How many items a sampler by priority knows, of the one folder, once it has looked."""
    _, (priorities,) = draws._follow()
    return priorities.count


def count_cuts(priorities: Any, cut: Callable[..., Any], cuts: list[Any]) -> None:
    """Have the tree of a view's anchors say, in a list, of what it cuts anchors."""
    priorities._anchors._cut = lambda *of: cuts.append(of) or cut(*of)


def leaves_of_anchors(priorities: Any) -> Any:
    """(slots, t) of the anchors that a tree has, part by part."""
    return priorities._each(priorities._anchors.runs())


def forget_places(patch: pytest.MonkeyPatch) -> None:
    """As where each value leads to a leaf that is no step, as the sums are damaged."""
    patch.setattr(Leaves, "_located", lambda self, of, leaves, _: (leaves, leaves, leaves, np.zeros(len(leaves), bool)))
