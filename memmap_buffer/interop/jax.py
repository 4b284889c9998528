"""JAX: the functional buffers of flashbax and memorax, their steps in a folder.

    buffer = make_flat_buffer(max_length=10**6, min_length=10**3, sample_batch_size=32, folder="runs/dqn")
    state = buffer.init(step)  # with all steps that the folder has
    state = buffer.add(state, step)
    batch = buffer.sample(state, key)

The steps are on the disk. A state is the folder's handle and a time: it stands for the steps that were added up to that
time. Steps can be added to the newest state only. Within `jit` and `scan` the calls are ordered callbacks to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer import Field, Prioritized, ReplayBuffer
from memmap_buffer.adapters import AnyPath, Names, check_count, extra
from memmap_buffer.interop.rows import Rows

with extra("jax"):
    import jax
    from jax import numpy as jnp
    from jax.experimental import io_callback

Tree = Any
START_FIELD = "prev_done"  # memorax's name of the field that is true at the first step of an episode


class TrajectorySample(NamedTuple):
    """A sample of windows of steps.

    Args:
        experience: the tree of a step with leaves (B, L, *leaf); of an item buffer (B, *leaf).
    """

    experience: Tree


class PrioritisedTrajectorySample(NamedTuple):
    """A sample that was drawn by priority.

    Args:
        experience: as of `TrajectorySample`.
        indices: (B, 2) int32, for `set_priorities`.
        probabilities: (B,) float32, with which each window was drawn.
    """

    experience: Tree
    indices: Any
    probabilities: Any


class ExperiencePair(NamedTuple):
    """Two steps, one after the other.

    Args:
        first: a tree with leaves (B, *leaf).
        second: the tree of the steps after these.
    """

    first: Tree
    second: Tree


class Handle(Rows):
    """The open folder of a state: rows whose steps are trees. Its methods run on the host.

    Args:
        experience: the tree of a step.
        folder: where the steps are; made if it is missing.
        sizes: the numbers of `Rows`.
        options: others of `memmap_buffer.ReplayBuffer`.
    """

    def __init__(self, experience: Tree, folder: AnyPath, *sizes: int, **options: Any) -> None:
        paths, self._tree = jax.tree_util.tree_flatten_with_path(experience)
        names = Names()
        leaves = {names.named(map(_key, path) if path else ["experience"]): _array(leaf) for path, leaf in paths}
        self._leaves = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        fields = {name: Field(str(leaf.dtype), leaf.shape) for name, leaf in leaves.items()}
        super().__init__(folder, fields, *sizes, **options)

    def __deepcopy__(self, _: object) -> Handle:
        return self

    def clock(self, *_: Any) -> tuple[Any, Any]:
        """(the time, the time of the oldest step that is sure to be readable), int32."""
        return np.asarray(self.time, np.int32), np.asarray(self.oldest, np.int32)

    def append(self, axes: tuple[int | None, ...], time: Any, batch: Tree) -> tuple[Any, Any]:
        """Append steps of leaves (*axes, *leaf), where None is any number; see `DiskBuffer.add`. Returns `clock`."""
        if int(time) != self.time:
            raise ValueError(
                f"{self.disk.folder}: got a state of time {int(time)}, and {self.time} steps of each row were added; "
                "add to the state that the last `add` returned, as the steps themselves are on the disk"
            )
        leaves, tree = jax.tree_util.tree_flatten(batch)
        if tree != self._tree:
            raise ValueError(f"add: got {tree}, expected {self._tree}, as init was given")
        columns = {name: np.asarray(leaf) for name, leaf in zip(self._leaves, leaves, strict=True)}
        first = next(iter(columns.values())).shape[: len(axes)]
        lead = tuple(n if size is None else size for size, n in zip_longest(axes, first))
        for name, column in columns.items():
            leaf = self._leaves[name]
            if column.dtype != leaf.dtype or column.shape != (*lead, *leaf.shape):
                expected = f"{leaf.dtype} {leaf.shape} behind leading axes {lead}"
                raise ValueError(f"add: {name!r}: got {column.dtype} {column.shape}, expected {expected}")
            column = column.astype(np.float32) if leaf.dtype == jnp.bfloat16 else column
            columns[name] = column.reshape(self.num_rows, -1, *leaf.shape)
        self.add(columns)
        return self.clock()

    def windows(self, rows: Any, times: Any) -> Tree:
        """The windows that `Rows.read` gives."""
        return self.unflatten(self.read(np.asarray(rows).astype(np.int64), np.asarray(times).astype(np.int64)))

    def drawn(self, how: Mapping[str, Any], key: Any, _: Any) -> tuple[Tree, Any, Any]:
        """(windows that `Rows.draw` gives; their indices; their probabilities, NaN if uniform)."""
        seed = int.from_bytes(np.asarray(key, np.uint32).tobytes(), "little")
        columns, indices, probabilities = self.draw(seed=seed, **how)
        if probabilities is None:
            probabilities = np.full(len(indices), np.nan)
        return self.unflatten(columns), indices.astype(np.int32), probabilities.astype(np.float32)

    def update(self, time: Any, indices: Any, priorities: Any) -> Any:
        """The time, after priorities were set."""
        self.disk.update_priorities(np.asarray(indices), np.asarray(priorities))
        return np.asarray(time, np.int32)

    def unflatten(self, columns: Mapping[str, Any]) -> Tree:
        """The tree whose leaves are the arrays of its fields."""
        leaves = [columns[name].astype(leaf.dtype, copy=False) for name, leaf in self._leaves.items()]
        return jax.tree_util.tree_unflatten(self._tree, leaves)

    def spec(self, *axes: int) -> Tree:
        """The tree of shapes and dtypes with these axes in front."""
        leaves = [jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype) for leaf in self._leaves.values()]
        return jax.tree_util.tree_unflatten(self._tree, leaves)


@partial(jax.tree_util.register_dataclass, data_fields=["time", "oldest"], meta_fields=["handle", "length"])
@dataclass(frozen=True)
class State:
    """The steps that were added up to a time.

    Args:
        time: int32, how many steps were added to each row.
        oldest: int32, the time of the oldest step that is still sure to be readable.
        handle: the open folder.
        length: windows are drawn from so many newest steps of each row.
    """

    time: Any
    oldest: Any
    handle: Handle
    length: int

    @property
    def disk(self) -> ReplayBuffer:
        """The folder's `memmap_buffer.ReplayBuffer`, to read it in other ways, to flush and to close it."""
        return self.handle.disk

    @property
    def experience(self) -> Tree:
        """All steps that are drawn from, in memory: leaves (B, length, *leaf), a ring; zeros where no step is yet."""
        handle, end = self.handle, int(self.time)
        times = np.arange(max(end - self.length, int(self.oldest), 0), end)
        ring = {}
        for name, column in handle.steps(times).items():
            ring[name] = np.zeros((handle.num_rows, self.length, *column.shape[2:]), column.dtype)
            ring[name][:, times % self.length] = column
        return handle.unflatten(ring)

    @property
    def current_index(self) -> Any:
        """The place in a ring of `length` at which the next step would be written."""
        return self.time % self.length

    @property
    def is_full(self) -> Any:
        """Whether there are `length` steps of each row."""
        return self.time >= self.length


@dataclass(frozen=True)
class Functions:
    """The functions of a buffer, of which some were replaced; see the methods of `DiskBuffer`."""

    init: Callable[..., Any]
    add: Callable[..., Any]
    sample: Callable[..., Any]
    can_sample: Callable[..., Any]
    set_priorities: Callable[..., Any]

    def replace(self, **functions: Callable[..., Any]) -> Functions:
        """A copy in which the given functions replace those of the same names."""
        return replace(self, **functions)


@dataclass(frozen=True)
class DiskBuffer:
    """A buffer with the functions `init`, `add`, `sample`, `can_sample`, `set_priorities`; see the `make_` functions.

    Args:
        folder: where the steps are; made if it is missing.
        add_batch_size: B, how many rows of steps are added side by side.
        max_length_time_axis: windows are drawn from so many newest steps of each row.
        min_length_time_axis: so many steps of each row must be there before anything can be drawn.
        sample_batch_size: windows of a batch.
        sample_sequence_length: L, the steps of a window.
        period: windows begin every so many steps.
        add_axes: the axes before those of a leaf that `add` is given: B rows, None for any number of steps.
        of_steps: makes the experience of a sample from the trees of its L steps; None: its leaves are (B, L, *leaf).
        prioritized: how windows are drawn by priority; None: uniformly.
        conditions: on the first step of a window, as `filter_fields`.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability` and `max_timesteps`.
    """

    folder: AnyPath
    add_batch_size: int
    max_length_time_axis: int
    min_length_time_axis: int
    sample_batch_size: int
    sample_sequence_length: int
    period: int
    add_axes: tuple[int | None, ...]
    of_steps: Callable[..., Tree] | None = None
    prioritized: Prioritized | None = None
    conditions: Mapping[str, Any] | None = field(default=None, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def init(self, experience: Tree) -> State:
        """Open the folder, or make it. Within `jit` it is opened once, while the function is traced.

        Args:
            experience: a tree of arrays, one step, which gives shapes and dtypes.

        Returns:
            The state, with all steps that the folder has.

        Raises:
            SchemaMismatchError: the folder holds steps of another tree, or of a buffer of other sizes.
        """
        sizes = (self.add_batch_size, self.max_length_time_axis, self.sample_sequence_length)
        handle = Handle(experience, self.folder, *sizes, 1 if self._uniform else self.period, **self.options)
        time, oldest = _on_host(handle.clock, (_INT, _INT), experience)
        return State(time, oldest, handle, self.max_length_time_axis)

    @property
    def _uniform(self) -> bool:
        return self.prioritized is None and self.conditions is None

    def add(self, state: State, batch: Tree) -> State:
        """Add steps to each row, behind its newest step.

        Args:
            state: the newest state.
            batch: a tree with leaves (B, T, *leaf), without B or T if the buffer was made so.

        Returns:
            The state with the added steps, which is the newest one now.

        Raises:
            ValueError: the state is not the newest one, or the tree, a shape or a dtype is not that of `init`.
        """
        work = partial(state.handle.append, self.add_axes)
        time, oldest = _on_host(work, (_INT, _INT), state.time, batch)
        return replace(state, time=time, oldest=oldest)

    def replace(self, **functions: Callable[..., Any]) -> Functions:
        """The functions of this buffer, some of them replaced, as by `add=jax.jit(buffer.add)`."""
        mine = Functions(self.init, self.add, self.sample, self.can_sample, self.set_priorities)
        return mine.replace(**functions)

    def sample(self, state: State, rng_key: Any) -> Any:
        """A batch; the same state and key give the same.

        Args:
            state: of `add` or `init`.
            rng_key: a key of `jax.random`.

        Returns:
            A `TrajectorySample`; by priority a `PrioritisedTrajectorySample`.

        Raises:
            NotEnoughDataError: there is nothing to draw yet, or the state is so old that its steps are overwritten.
        """
        handle, count = state.handle, self.sample_batch_size
        tree = handle.spec(count, self.sample_sequence_length)
        if self._uniform:
            sizes = (state.length, count, self.sample_sequence_length, self.period, self.add_batch_size)
            rows, times = _windows(rng_key, state.time, state.oldest, sizes)
            return TrajectorySample(self._shaped(_on_host(handle.windows, tree, rows, times)))
        how = {"count": count, "prioritized": self.prioritized, "conditions": self.conditions}
        indices, probabilities = jax.ShapeDtypeStruct((count, 2), np.int32), jax.ShapeDtypeStruct((count,), np.float32)
        key = jax.random.key_data(rng_key)
        tree, *drawn = _on_host(partial(handle.drawn, how), (tree, indices, probabilities), key, state.time)
        if self.prioritized is None:
            return TrajectorySample(self._shaped(tree))
        return PrioritisedTrajectorySample(self._shaped(tree), *drawn)

    def _shaped(self, experience: Tree) -> Tree:
        if self.of_steps is None:
            return experience
        steps = range(self.sample_sequence_length)
        return self.of_steps(*(jax.tree_util.tree_map(lambda leaf, t=t: leaf[:, t], experience) for t in steps))

    def can_sample(self, state: State) -> Any:
        """Whether each row has `min_length_time_axis` steps: bool."""
        return state.time >= min(self.min_length_time_axis, self.max_length_time_axis)

    def set_priorities(self, state: State, indices: Any, priorities: Any) -> State:
        """Set the priorities of windows; a window whose steps are gone is left out.

        Args:
            state: the newest state.
            indices: (B, 2), as a sample has them.
            priorities: (B,) |δ| + ε, without the exponent α, which is applied here.

        Returns:
            The state with these priorities.
        """
        return replace(state, time=_on_host(state.handle.update, _INT, state.time, indices, priorities))


# As in flashbax


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """A buffer of windows of consecutive steps, flashbax's `make_trajectory_buffer`.

    Args:
        add_batch_size: B, how many rows of steps are added side by side.
        sample_batch_size: windows of a batch.
        sample_sequence_length: L, the steps of a window.
        period: windows begin every so many steps, counted from the oldest one.
        min_length_time_axis: so many steps of each row, at least L, must be there before anything can be drawn.
        max_size: `max_length_time_axis` times B; give one of the two.
        max_length_time_axis: windows are drawn from so many newest steps of each row.
        folder: where the steps are; made if it is missing.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability` and `max_timesteps`.

    Returns:
        `add` takes leaves (B, T, *leaf), `sample` gives (sample_batch_size, L, *leaf).

    Raises:
        ValueError: sizes contradict each other.
    """
    if (max_size is None) == (max_length_time_axis is None):
        raise ValueError(f"got max_size={max_size}, max_length_time_axis={max_length_time_axis}; give one of the two")
    length = int(max_length_time_axis or (max_size or 0) // add_batch_size)
    shortest = max(min_length_time_axis, sample_sequence_length)
    if shortest > length:
        raise ValueError(
            f"`sample_sequence_length` and `min_length_time_axis` must be less than or equal to "
            f"`max_length_time_axis`: got {sample_sequence_length}, {min_length_time_axis} and {length}"
        )
    sizes = (add_batch_size, length, shortest, sample_batch_size, sample_sequence_length, period)
    return DiskBuffer(folder, *sizes, (add_batch_size, None), options=options)


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """A buffer of transitions, flashbax's `make_flat_buffer`: pairs of a step and the next one.

    Args:
        max_length: transitions are drawn from so many newest steps, of all rows together.
        min_length: so many steps, of all rows together, must be there before anything can be drawn.
        sample_batch_size: transitions of a batch.
        add_sequences: whether `add` is given several steps at a time.
        add_batch_size: B, how many rows of steps are added side by side; None: one, and leaves have no axis B.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Returns:
        `sample` gives `experience.first` and `experience.second`, leaves (sample_batch_size, *leaf).

    Raises:
        ValueError: sizes contradict each other.
    """
    count = add_batch_size or 1
    length, shortest = max_length // count, min_length // count + 1
    if sample_batch_size > max_length:
        raise ValueError("sample_batch_size must be less than or equal to max_length")
    if shortest > max_length:
        raise ValueError("min_length used is too large for the buffer size.")
    if length < 2:
        raise ValueError(f"max_length // add_batch_size must be 2 at least, got {max_length} // {count} = {length}")
    sizes = (count, length, shortest, sample_batch_size, 2, 1)
    return DiskBuffer(folder, *sizes, _axes(add_batch_size, add_sequences), of_steps=ExperiencePair, options=options)


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """A buffer of single steps, flashbax's `make_item_buffer`.

    Args:
        max_length: so many newest steps are drawn from.
        min_length: so many steps must be there before anything can be drawn.
        sample_batch_size: steps of a batch.
        add_sequences: whether `add` is given several steps at a time.
        add_batches: whether `add` is given several rows of steps.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Returns:
        `sample` gives leaves (sample_batch_size, *leaf).

    Raises:
        ValueError: sizes contradict each other.
    """
    if sample_batch_size > max_length:
        raise ValueError("sample_batch_size must be less than or equal to max_length")
    if min_length > max_length:
        raise ValueError("min_length used cannot be larger than max_length.")
    sizes = (1, max_length, max(min_length, 1), sample_batch_size, 1, 1)
    axes = (None,) * (add_sequences + add_batches)
    return DiskBuffer(folder, *sizes, axes, of_steps=_itself, options=options)


def make_prioritised_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """`make_trajectory_buffer` with windows drawn by priority.

    Args:
        add_batch_size: as for `make_trajectory_buffer`.
        sample_batch_size: as for `make_trajectory_buffer`.
        sample_sequence_length: as for `make_trajectory_buffer`.
        period: as for `make_trajectory_buffer`.
        min_length_time_axis: as for `make_trajectory_buffer`.
        max_size: as for `make_trajectory_buffer`.
        max_length_time_axis: as for `make_trajectory_buffer`; windows that begin up to L steps earlier are drawn, too.
        priority_exponent: α, from 0 to 1.
        device: without effect: the tree of priorities is on the disk.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Raises:
        ValueError: sizes contradict each other, or the exponent is none.
    """
    sizes = (add_batch_size, sample_batch_size, sample_sequence_length, period, min_length_time_axis)
    made = make_trajectory_buffer(*sizes, max_size, max_length_time_axis, folder=folder, **options)
    return _by_priority(made, priority_exponent)


def make_prioritised_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """`make_flat_buffer` with transitions drawn by priority.

    Args:
        max_length: as for `make_flat_buffer`.
        min_length: as for `make_flat_buffer`.
        sample_batch_size: as for `make_flat_buffer`.
        add_sequences: as for `make_flat_buffer`.
        add_batch_size: as for `make_flat_buffer`.
        priority_exponent: as for `make_prioritised_trajectory_buffer`.
        device: as for `make_prioritised_trajectory_buffer`.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Raises:
        ValueError: sizes contradict each other, or the exponent is none.
    """
    sizes = (max_length, min_length, sample_batch_size, add_sequences, add_batch_size)
    return _by_priority(make_flat_buffer(*sizes, folder=folder, **options), priority_exponent)


def make_prioritised_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """`make_item_buffer` with steps drawn by priority.

    Args:
        max_length: as for `make_item_buffer`.
        min_length: as for `make_item_buffer`.
        sample_batch_size: as for `make_item_buffer`.
        add_sequences: as for `make_item_buffer`.
        add_batches: as for `make_item_buffer`.
        priority_exponent: as for `make_prioritised_trajectory_buffer`.
        device: as for `make_prioritised_trajectory_buffer`.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Raises:
        ValueError: sizes contradict each other, or the exponent is none.
    """
    sizes = (max_length, min_length, sample_batch_size, add_sequences, add_batches)
    return _by_priority(make_item_buffer(*sizes, folder=folder, **options), priority_exponent)


# As in memorax


def make_episode_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    start_field: str | None = START_FIELD,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    min_length_time_axis: int | None = None,
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """A buffer of windows that begin where episodes begin, memorax's `make_episode_buffer`.

    Args:
        max_length: windows are drawn from so many newest steps, of all rows together.
        min_length: so many steps, of all rows together, must be there before anything can be drawn.
        sample_batch_size: windows of a batch.
        sample_sequence_length: L, the steps of a window, which may go on into the next episode.
        start_field: the field that is true at the first step of an episode, instead of `get_start_flags`; None: windows
            begin at any step.
        add_sequences: whether `add` is given several steps at a time.
        add_batch_size: B, how many rows of steps are added side by side; None: one, and leaves have no axis B.
        min_length_time_axis: without effect, as in memorax.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Returns:
        `sample` gives leaves (sample_batch_size, L, *leaf).

    Raises:
        ValueError: sizes contradict each other.
    """
    count = add_batch_size or 1
    if sample_batch_size > max_length:
        raise ValueError("sample_batch_size must be less than or equal to max_length")
    sizes = (count, sample_batch_size, sample_sequence_length, 1, min_length // count)
    made = make_trajectory_buffer(*sizes, max_length_time_axis=max_length // count, folder=folder, **options)
    conditions = None if start_field is None else {start_field: True}
    return replace(made, add_axes=_axes(add_batch_size, add_sequences), conditions=conditions)


def make_prioritised_episode_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    start_field: str | None = START_FIELD,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    folder: AnyPath,
    **options: Any,
) -> DiskBuffer:
    """`make_episode_buffer` with windows drawn by priority.

    Args:
        max_length: as for `make_episode_buffer`.
        min_length: as for `make_episode_buffer`.
        sample_batch_size: as for `make_episode_buffer`.
        sample_sequence_length: as for `make_episode_buffer`.
        start_field: as for `make_episode_buffer`.
        add_sequences: as for `make_episode_buffer`.
        add_batch_size: as for `make_episode_buffer`.
        priority_exponent: as for `make_prioritised_trajectory_buffer`.
        device: as for `make_prioritised_trajectory_buffer`.
        folder: as for `make_trajectory_buffer`.
        options: as for `make_trajectory_buffer`.

    Raises:
        ValueError: sizes contradict each other, or the exponent is none.
    """
    sizes = (max_length, min_length, sample_batch_size, sample_sequence_length, start_field)
    made = make_episode_buffer(*sizes, add_sequences, add_batch_size, folder=folder, **options)
    return _by_priority(made, priority_exponent)


def _by_priority(buffer: DiskBuffer, exponent: float) -> DiskBuffer:
    if not 0 <= exponent <= 1:
        raise ValueError(f"priority_exponent must be in the range [0, 1], but was {exponent}")
    return replace(buffer, prioritized=Prioritized(alpha=exponent, epsilon=0.0))


def _axes(add_batch_size: int | None, add_sequences: bool) -> tuple[int | None, ...]:
    """The axes that `add` is given: that of the rows unless there is one alone, and that of the steps."""
    return (*[add_batch_size] * (add_batch_size is not None), *[None] * add_sequences)


def _itself(step: Tree) -> Tree:
    return step


def prefetch(batches: Iterable[Any], size: int = 2, device: Any = None) -> Iterator[Any]:
    """Batches on a device; a thread makes the next ones while the caller works on one.

    Args:
        batches: trees of arrays, such as `(buffer.sample(state, key) for key in keys)`.
        size: how many batches are made ahead.
        device: a device or a sharding of JAX; None: JAX's default.

    Yields:
        The trees with arrays of JAX, in the order of `batches`.

    Raises:
        ValueError: `size` is below 1.
        Exception: an error of `batches`, instead of the batch that it prevented.
    """
    check_count("size", size)
    source = iter(batches)

    def next_batch() -> Any:
        batch = next(source, source)  # `source` itself marks the end, as a future cannot raise StopIteration
        return batch if batch is source else jax.device_put(batch, device)

    pool = ThreadPoolExecutor(1, "memmap_buffer prefetch")
    try:
        waiting = deque(pool.submit(next_batch) for _ in range(size))
        while (batch := waiting.popleft().result()) is not source:
            waiting.append(pool.submit(next_batch))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


# Between JAX and the host

_INT = jax.ShapeDtypeStruct((), np.int32)


def _on_host(work: Callable[..., Any], result: Tree, *arguments: Any) -> Any:
    """Call a function of arrays on the host: now; or, if it is traced, whenever the traced code runs, in its order."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(arguments))
    return io_callback(work, result, *arguments, ordered=True) if traced else work(*arguments)


@partial(jax.jit, static_argnums=3)
def _windows(key: Any, time: Any, oldest: Any, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """(rows (n,), times (n,) of their first steps) of windows drawn uniformly.

    Source: flashbax, `trajectory_buffer.sample`.
    """
    length, count, window, period, num_rows = sizes
    begin = jnp.maximum(jnp.maximum(time - length, 0), oldest)
    last = time - begin - window
    number = jnp.where(last >= 0, last // period + 1, 0)
    key, of_items = jax.random.split(key)
    _, of_rows = jax.random.split(key)
    items = jax.random.randint(of_items, (count,), 0, number)
    return jax.random.randint(of_rows, (count,), 0, num_rows), begin + items * period


def _key(part: Any) -> Any:
    """The key, attribute or position that a part of a path in a tree stands for."""
    return next(getattr(part, name) for name in ("key", "name", "idx") if hasattr(part, name))


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
