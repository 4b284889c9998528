"""Ray: episodes into `ray.data` and back, and actors that publish the episodes of rollouts on any node.

Ray schedules, restarts and transports; this file only reads and writes folders. A root is a folder of buffers of equal
fields, one for each writer: `root/shard-00000`, `root/shard-00001`, … Tasks and actors that read or write a root run on
the node of the caller, where the folder is, unless `shared` says that all nodes see the folder. Nodes that share no
folder record on disks of their own, publish to the URL of a root, and read from that URL.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import (
    BufferFullError,
    BufferLockedError,
    ConcatBuffer,
    CorruptBufferError,
    Field,
    MemmapBufferError,
    NotABufferError,
    ReplayBuffer,
    Schema,
    SchemaError,
    Trajectory,
)
from memmap_buffer.adapters import AnyPath, Target, extra, flatten, import_episodes, is_url, path_of
from memmap_buffer.interop.columns import LENGTHS, VIEW_OPTIONS, as_episode, columns_of

with extra("ray"):
    import ray
    import ray.data
    from ray.data.block import BlockAccessor, BlockMetadata
    from ray.data.datasource import Datasink, Datasource, ReadTask
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ID = "episode_id"  # the meta field by which a recorder recognises an episode that it has stored
MAX_KNOWN = 1 << 16  # ids of the newest episodes that a recorder remembers: Ray sends again only recent ones
MAX_BLOCK = 32 << 20  # bytes that a read task gathers at once
LOCK_TIMEOUT = 60.0  # seconds that a recorder waits for the lock of its predecessor
log = logging.getLogger("memmap_buffer")


def shard_folder(root: AnyPath, number: int) -> Path:
    """The folder of shard `number` of a root, absolute: Ray's processes have another working directory."""
    return path_of(root).absolute() / f"shard-{number:05d}"


# Reading


def open_root(root: AnyPath, **how: Any) -> ConcatBuffer:
    """The buffers of a root, or a single buffer, opened as one; `how`, only for a URL: see `ConcatBuffer.from_root`."""
    if is_url(root):
        try:
            return ConcatBuffer.from_root(root, **how)
        except NotABufferError:  # a single published folder lacks the list of shards that a root has
            return ConcatBuffer([ReplayBuffer.from_folder(root, **how)])
    if how:
        raise SchemaError(f"{root}: got {', '.join(how)}, which belong to a URL; leave them out")
    whole = path_of(root).absolute()
    return ConcatBuffer([whole]) if (whole / "schema.json").exists() else ConcatBuffer.from_root(whole)


def read_ray(
    root: AnyPath,
    *,
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    shared: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cache: AnyPath | None = None,
    cache_bytes: int | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """A Ray dataset of the items that a view shows now, a row for each, read in parallel.

    Columns are the keys of a batch, with dotted names; bfloat16 comes as float32. Without an option that names a view
    a row is a whole episode: fields (T, *field); a field with `final` is (T + 1, *field) if the episode has its final
    observation.

    Args:
        root: a folder of buffers, or a single buffer; or the URL that they were published to, which any node can read.
        override_num_blocks: as for `ray.data.read_datasource`.
        concurrency: as for `ray.data.read_datasource`.
        ray_remote_args: as for `ray.data.read_datasource`.
        shared: whether every node sees the folder. If not, all tasks run on this node, whichever node uses the rows.
        storage_options: for a URL, as for `ConcatBuffer.from_root`.
        cache: for a URL, as for `ConcatBuffer.from_root`; a path on each node.
        cache_bytes: for a URL, as for `ConcatBuffer.from_root`.
        options: those of `Options`, such as fields, filter_meta, split, part, n_steps. If an episode is overwritten
            before it is read, StaleEpisodeError is raised, unless on_stale="redraw". `return_indices` adds the columns
            `_source`, `_serial` and, but for whole episodes, `_t`: numbers, by which Ray can group and sort.

    Raises:
        NotABufferError: there is no buffer at the root.
        SchemaError: options contradict each other or the schema.
        NotEnoughDataError: there are no items.
    """
    if all(not options.get(name) for name in VIEW_OPTIONS):
        names = options.pop("fields", None)
        names = (names,) if isinstance(names, str) else names and tuple(names)
        options |= {"view": Trajectory(names, final_observation=True)}
    url_options = {"storage_options": storage_options, "cache": cache, "cache_bytes": cache_bytes}
    buffer = open_root(root, **{name: value for name, value in url_options.items() if value is not None})
    return ray.data.read_datasource(
        _Items(buffer, {"on_stale": "raise"} | options, shared or is_url(root)),
        override_num_blocks=override_num_blocks,
        concurrency=concurrency,
        ray_remote_args=dict(ray_remote_args or {}),
    )


class _Items(Datasource):  # type: ignore[misc]
    """The items of a dataset, cut into tasks. A task gets the dataset, pickled as paths and the index of now.

    Only the tasks open the folders: Ray may call `get_read_tasks` on a node that does not have them.
    """

    def __init__(self, buffer: ConcatBuffer, options: Mapping[str, Any], shared: bool) -> None:
        super().__init__()
        self._shared = shared
        dataset = buffer.dataset(**options)
        self._dataset, self._count = ray.put(dataset), len(dataset)
        self._row_bytes = _row_bytes(buffer, options)
        renamed = options.get("fieldname_map") or {}
        view = options.get("view")
        whole = getattr(view, "final_observation", False) and getattr(view, "return_lens", False)
        fields = buffer.schema.fields if whole else {}
        finals = {renamed.get(name, name): field.final for name, field in fields.items()}
        keys = {key: renamed.get(f"_{key}", f"_{key}") for key in ("lens", "has_final")}
        self._columns_of = partial(columns_of, finals=finals, **keys)

    def estimate_inmemory_data_size(self) -> int:
        return self._row_bytes * self._count

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[Any]:
        """Tasks that each read neighbouring items, so that each opens few folders."""
        bounds = np.linspace(0, self._count, min(max(parallelism, 1), self._count) + 1).astype(int).tolist()
        most = max(1, MAX_BLOCK // self._row_bytes)
        tasks = []
        for start, stop in pairwise(bounds):
            size = self._row_bytes * (stop - start)
            about = BlockMetadata(num_rows=stop - start, size_bytes=size, input_files=None, exec_stats=None)
            read = partial(_read, self._dataset, range(start, stop), most, self._columns_of)
            tasks.append(ReadTask(read, about, per_task_row_limit=per_task_row_limit))
        return tasks

    @property
    def supports_distributed_reads(self) -> bool:
        return self._shared


def _row_bytes(buffer: ConcatBuffer, options: Mapping[str, Any]) -> int:
    """An estimate of an item's bytes: an axis whose length the schema leaves open is as long as a mean episode."""
    mean = max(1, round(buffer.num_steps / max(1, buffer.num_episodes)))
    sizes = {"str": 32, "bfloat16": 4}
    total = 0
    for spec in buffer.batch_spec(**options).values():
        itemsize = sizes.get(spec.dtype) or np.dtype(spec.dtype).itemsize
        total += itemsize * math.prod(mean if n is None else n for n in spec.shape[1:])
    return max(1, total)


def _read(dataset: Any, items: range, most: int, columns: Callable[[Any], Any]) -> Iterator[Any]:
    dataset = _opened_here(dataset)
    for start in range(0, len(items), most):
        batch = dataset.__getitems__(items[start : start + most]).data
        table = columns(flatten(batch))
        if "_serial" in table:  # a batch of a single folder has no `_source`
            table = {"_source": np.zeros(len(table["_serial"]), np.int64)} | table
        yield BlockAccessor.batch_to_arrow_block(table)


def _opened_here(dataset: Any) -> Any:
    """A dataset from Ray's object store, with its folders opened on this node.

    Raises:
        MemmapBufferError: they cannot be opened. Ray would retry its own RaySystemError for ever.
    """
    try:
        return ray.get(dataset)
    except ray.exceptions.RaySystemError as error:
        if not isinstance(error.client_exc, MemmapBufferError):
            raise
        why, node = error.client_exc, ray.util.get_node_ip_address()
        raise type(why)(f"{why} (on the node {node}; with shared=True every node must see it)", **why.named) from None


# Writing


def write_ray(
    dataset: ray.data.Dataset,
    root: AnyPath,
    fields: Mapping[str, Any] | Schema,
    meta_fields: Mapping[str, Any] | None = None,
    *,
    key: str | Sequence[str] | None = None,
    order: str | None = None,
    num_shards: int | None = None,
    shared: bool = False,
    **options: Any,
) -> ConcatBuffer:
    """Write the episodes of a Ray dataset into an empty root, one shard for each task that writes.

    A task that Ray runs again writes its shard anew. After an error the shards that were written stay.

    Args:
        dataset: a row for each episode, as `read_ray` gives them; or with `key` a row for each timestep, in any order.
        root: a folder without buffers; it is made if it is missing.
        fields: as for `ReplayBuffer`; other columns are left out.
        meta_fields: as for `ReplayBuffer`.
        key: the columns that identify the episode of a step. A meta field is taken from the episode's first step; a
            final observation from `next_<field>` of its last step, if all fields with `final` have such a column.
        order: the column by which the steps of an episode are sorted; None: they stay in the order of the dataset.
        num_shards: the most shards; default: as many as the dataset has blocks; with `key` as many as Ray makes
            partitions of the groups, 200.
        shared: whether every node sees the root. If not, all tasks that write run on this node.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as a shard needs.

    Returns:
        The root, read as one buffer.

    Raises:
        SchemaError: the root holds buffers already, or a column is missing or does not fit its field.
    """
    schema = fields if isinstance(fields, Schema) else Schema(fields, meta_fields)
    place = path_of(root).absolute()
    if any(place.glob("*/schema.json")):
        raise SchemaError(f"{place}: it holds buffers already; write into a folder without")
    if key is not None:
        grouped = dataset.groupby(key if isinstance(key, str) else list(key), num_partitions=num_shards)
        dataset = grouped.map_groups(partial(as_episode, schema, order), batch_format="numpy")
    elif num_shards is not None:
        dataset = dataset.repartition(num_shards)
    place.mkdir(parents=True, exist_ok=True)
    dataset.write_datasink(_Shards(place, schema, options, shared))
    return ConcatBuffer.from_root(place)


class _Shards(Datasink):  # type: ignore[misc]
    """A sink in which each task writes its rows as the episodes of a shard of its own."""

    def __init__(self, root: Path, schema: Schema, options: Mapping[str, Any], shared: bool) -> None:
        self._root, self._schema, self._options, self._shared = root, schema, options, shared

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        episodes = [episode for block in blocks for episode in _rows(self._schema, block)]
        if not episodes:
            return 0
        steps = ([len(episode[name]) for name in self._schema.fields if name in episode] for episode in episodes)
        lengths = [min(counts, default=0) for counts in steps]  # without a final entry; some fields may have defaults
        target = Target.checked(shard_folder(self._root, ctx.task_idx), "overwrite", self._options)
        import_episodes(target, episodes, self._schema, lengths=lengths).close()
        return len(episodes)

    @property
    def supports_distributed_writes(self) -> bool:
        return self._shared


def _rows(schema: Schema, block: Any) -> Iterator[dict[str, Any]]:
    columns = BlockAccessor.for_block(block).to_numpy()
    names = [*schema.all, *(LENGTHS + name for name in schema.lists)]
    fields = {name: columns[name] for name in names if name in columns}
    for i in range(BlockAccessor.for_block(block).num_rows()):
        yield {name: _text(column[i]) for name, column in fields.items()}


def _text(value: Any) -> Any:
    """A value as `store_episode` takes it: Ray gives text as an array of objects, which becomes a list."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind == "O" else value


# Recording


class Recorder:
    """A recorder, to be run as a Ray actor: it publishes the episodes that rollouts send into a folder of its own.

    It goes on with a folder that is there, so Ray may restart it. Each episode has an id, a meta field. An episode that
    is sent again, because the first answer was lost, is stored only once.

    Args:
        folder: the folder of this recorder alone; see `shard_folder`.
        max_episodes: as for `ReplayBuffer`.
        max_timesteps: as for `ReplayBuffer`.
        fields: as for `ReplayBuffer`.
        meta_fields: as for `ReplayBuffer`; `episode_id`, "U32", is added.
        options: of `ReplayBuffer`. With `durability="power"` the answer comes when the episodes are on the disk. With
            `publish_to`, `folder` is a root of this recorder's shards. By their ids the recorder recognises episodes
            that are sent again, so at least one published shard must stay there (`keep_published`).

    Raises:
        SchemaError: as `ReplayBuffer` raises it; or `keep_published` is 0.
        BufferLockedError: another process has held the folder's lock for a minute.
    """

    def __init__(
        self,
        folder: AnyPath,
        max_episodes: int,
        max_timesteps: int,
        fields: Mapping[str, Any] | Schema,
        meta_fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        base = fields if isinstance(fields, Schema) else Schema(fields, meta_fields)
        schema = base.with_fields(base.fields, {ID: Field("U32"), **base.meta_fields})
        make = partial(ReplayBuffer, folder, max_episodes, max_timesteps, schema, **options)
        self._synced = options.get("durability") == "power"
        if options.get("publish_to") is None:
            self._buffer = _opened_for_writing(make)
            ids = _ids_of(self._buffer)
        else:
            if options.get("keep_published") == 0:
                raise SchemaError(
                    "keep_published: got 0, expected 1 or more: by the shards on its disk the recorder recognises "
                    "episodes that are sent again"
                )
            ids = _ids_of_shards(path_of(folder))
            self._buffer = make(shard="auto")
        self._ids = OrderedDict.fromkeys(ids)

    def record(self, *episodes: Mapping[str, Any]) -> int:
        """Publish whole episodes, and return when all of them are published.

        Args:
            episodes: each as for `store_episode`, with its `episode_id`.

        Returns:
            The number of episodes that were not stored before.

        Raises:
            SchemaError: an episode has no id, or does not fit the schema. The episodes before it are published.
        """
        return self.record_all(episodes)

    def record_all(self, episodes: Sequence[Mapping[str, Any]]) -> int:
        """`record` of a sequence: one argument costs Ray less than many (for four episodes of 200 steps 0.7 of it)."""
        stored: dict[str, None] = {}
        try:
            for episode in episodes:
                if not episode.get(ID):
                    raise SchemaError(f"record: got an episode without {ID!r}; give it one of its own, or use `Outbox`")
                if episode[ID] not in self._ids and episode[ID] not in stored:
                    self._buffer.store_episode(**episode)
                    stored[episode[ID]] = None
        finally:
            if self._synced:
                self._buffer.flush()
            self._ids |= stored
        while len(self._ids) > MAX_KNOWN:
            self._ids.popitem(last=False)
        return len(stored)

    def ready(self) -> Path:
        """The recorder's folder, which exists when this returns."""
        return self._buffer.folder

    def close(self) -> None:
        """Close the buffer; with `publish_to` publish the rest first. Nothing can be recorded afterwards.

        Raises:
            MemmapBufferError: as `ReplayBuffer.close` raises it.
        """
        self._buffer.close()


def _ids_of(buffer: ReplayBuffer) -> list[str]:
    """The ids of the newest episodes, the newest last."""
    count = len(buffer)
    newest = range(max(0, count - MAX_KNOWN), count)
    ids: list[str] = buffer.episodes(newest, fields=())[ID].tolist() if count else []
    return ids


def _ids_of_shards(root: Path) -> list[str]:
    """The newest ids in the shards of a recorder that publishes; waits until its predecessor writes to no shard."""
    done: set[Path] = set()
    while waiting := {path.parent for path in root.glob("*/schema.json")} - done:
        for path in waiting:
            with suppress(SchemaError, CorruptBufferError):  # published and moved meanwhile; the loop below logs damage
                _opened_for_writing(partial(ReplayBuffer.from_folder, path)).close()
        done |= waiting
    paths = [path for place in (root, root / "published") for path in place.glob("*/schema.json")]
    ids: list[str] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        if len(ids) < MAX_KNOWN:
            try:
                ids = _ids_of(ReplayBuffer.from_folder(path.parent, read_only=True)) + ids
            except (SchemaError, CorruptBufferError) as error:
                log.warning("%s; an episode in it that is sent again is stored again", error)
    return ids[-MAX_KNOWN:]


def _opened_for_writing(make: Callable[[], ReplayBuffer]) -> ReplayBuffer:
    """The buffer of `make`, with its lock taken: its episodes are final, as no predecessor is still publishing.

    Raises:
        BufferLockedError: the predecessor has not ended after `LOCK_TIMEOUT`.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            buffer = make()
            with suppress(BufferFullError):
                buffer.begin_episode().abort()
            return buffer
        except BufferLockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def start_recorders(
    root: AnyPath,
    count: int,
    *,
    max_episodes: int,
    max_timesteps: int,
    fields: Mapping[str, Any] | Schema,
    meta_fields: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Start actors that record into the shards 0 … count - 1 of a root, on this node.

    Ray restarts an actor that dies, and sends again the episodes that it had not answered.

    With `publish_to` the actors run on all nodes in turn, each on a disk of its own: in the folder `recorder-00000`, …
    of `root`, a path that names another folder on each node. Call `close` of each actor at the end, which publishes the
    rest.

    Args:
        root: the folder of the shards.
        count: how many actors.
        max_episodes: of each shard.
        max_timesteps: see `Recorder`.
        fields: see `Recorder`.
        meta_fields: see `Recorder`.
        ray_actor_options: as for `options` of a Ray actor. By default num_cpus is 0, and scheduling_strategy this node,
            with `publish_to` one node after the other; an actor is restarted on the same node.
        options: see `Recorder`.

    Returns:
        `count` handles of `Recorder` actors, whose folders exist.

    Raises:
        ray.exceptions.RayActorError: a `Recorder` could not be made; the text has its error.
    """
    how = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    publishes = options.get("publish_to") is not None
    nodes = _nodes() if publishes else [this_node()]
    recorders = []
    for number in range(count):
        folder = shard_folder(root, number)
        if publishes:
            folder = folder.with_name(f"recorder-{number:05d}")
        actor_options = how | {"scheduling_strategy": nodes[number % len(nodes)]} | dict(ray_actor_options or {})
        start = ray.remote(Recorder).options(**actor_options).remote
        recorders.append(start(folder, max_episodes, max_timesteps, fields, meta_fields, **options))
    ray.get([recorder.ready.remote() for recorder in recorders])
    return recorders


def _nodes() -> list[Any]:
    """The scheduling strategy of each node that is alive."""
    alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    return [NodeAffinitySchedulingStrategy(node, soft=False) for node in alive]


def this_node() -> Any:
    """The scheduling strategy of an actor that must run, and be restarted, on this node, where its folder is."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class Outbox:
    """An outbox of a rollout: it sends episodes to a recorder, and keeps those that are not answered yet.

    While the recorder is restarted, Ray holds the messages, and sends them again. A rollout must stay with one
    recorder: no other recognises the episodes that this one has stored.

    Args:
        recorder: a handle of `start_recorders`.
        max_pending: how many messages may be without an answer before `send` waits for one.

    Attributes:
        num_published: how many episodes the recorder has answered.
    """

    def __init__(self, recorder: Any, *, max_pending: int = 8) -> None:
        self._recorder = recorder
        self._max_pending = max_pending
        self._pending: dict[Any, int] = {}
        self.num_published = 0

    def send(self, *episodes: Mapping[str, Any]) -> None:
        """Send whole episodes in one message; each gets an `episode_id` unless it has one.

        Args:
            episodes: each as for `store_episode`.

        Raises:
            ray.exceptions.RayTaskError: the recorder's error for episodes that were sent before.
        """
        while len(self._pending) >= self._max_pending:
            self._receive()
        named = [{ID: uuid.uuid4().hex, **episode} for episode in episodes]
        self._pending[self._recorder.record_all.remote(named)] = len(named)

    def flush(self) -> None:
        """Wait until all episodes that were sent are published. Raises RayTaskError as `send` does."""
        while self._pending:
            self._receive()

    def _receive(self) -> None:
        done, _ = ray.wait(list(self._pending), num_returns=1)
        count = self._pending.pop(done[0])
        ray.get(done[0])
        self.num_published += count
