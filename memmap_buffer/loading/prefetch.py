"""Batches that a thread makes ahead and moves to a device. The copy of rows releases the GIL, so a thread is enough.

Read `Prefetched` first, the iterator that `datasets.EpisodeLoader` returns when it prefetches. Its thread runs `_make`.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import torch

from memmap_buffer.loading.transport import map_leaves

Device = torch.device | str | int | None
JOIN_SECONDS = 5.0  # the longest that an abandoned iterator waits for the batch which its thread is making


def to_device(batch: Any, device: Device) -> Any:
    """A batch, however nested, on a device; pinned memory is copied asynchronously."""
    return map_leaves(batch, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))


class Move:
    """Moves batches to a device: `start` in the prefetching thread, `finish` in the thread that uses the batch.

    On a GPU the copies run on a stream of their own, beside the computations.

    Args:
        device: the target; None leaves batches where they are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        on_gpu = device is not None and torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def start(self, batch: Any) -> tuple[Any, Any]:
        """(the batch on the device, the CUDA event after which it is complete, or None)."""
        if self._device is None:
            return batch, None
        if self._stream is None:
            return to_device(batch, self._device), None
        with torch.cuda.stream(self._stream):
            return to_device(batch, self._device), self._stream.record_event()

    def finish(self, batch: Any, event: Any) -> Any:
        """The batch, with this thread's current stream waiting for the copy."""
        if event is None or self._stream is None:
            return batch
        stream = torch.cuda.current_stream(self._stream.device)
        stream.wait_event(event)

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        return map_leaves(batch, torch.Tensor, used_here)


class Prefetched:
    """An iterator whose next items are made by a thread, in the same order.

    The thread starts when the first item is asked for. It ends after the last item, at `close`, when this object is
    collected (as when a loop breaks), or when the interpreter exits. An exception of the source is raised by
    `__next__`, with its traceback, in the place of the item that was not made.

    Args:
        source: an iterator, used by the thread alone.
        count: how many items are kept ready.
        move: moves the items to a device.
    """

    def __init__(self, source: Iterator[Any], count: int, move: Move) -> None:
        self._move = move
        self._ready: SimpleQueue[tuple[Any, Any, BaseException | None]] = SimpleQueue()
        # True for each item that may be made, False to stop. A SimpleQueue, as a finaliser may `put` to it safely.
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        for _ in range(count):
            self._wanted.put(True)
        stopped: list[bool] = []
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpu = torch.cuda.current_device() if in_use else None
        arguments = (source, self._ready, self._wanted, move, stopped, gpu)
        self._thread: threading.Thread | None = threading.Thread(
            target=_make, args=arguments, name="memmap_buffer prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, self._thread, self._wanted, stopped)
        self._stop.atexit = False
        _not_collected.add(self)

    def close(self) -> None:
        """End the thread, after the item that it is making. Closing twice is fine."""
        thread, self._thread = self._thread, None
        self._stop()
        if thread is not None and thread.ident is not None:
            thread.join()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._thread is None:
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        batch, event, error = self._ready.get()
        self._wanted.put(True)
        if error is None:
            return self._move.finish(batch, event)
        if _is_end(error):
            self.close()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


_not_collected: weakref.WeakSet[Prefetched] = weakref.WeakSet()


@atexit.register  # after the import of PyTorch, so called before PyTorch ends the workers that a thread waits for
def _stop_all() -> None:
    for prefetched in list(_not_collected):
        prefetched._stop()


def _make(
    source: Iterator[Any],
    ready: SimpleQueue[Any],
    wanted: SimpleQueue[bool],
    move: Move,
    stopped: list[bool],
    gpu: int | None,
) -> None:
    """Body of the thread. No argument refers to the `Prefetched`, which could then never be collected."""
    if gpu is not None:
        torch.cuda.set_device(gpu)  # the current device is per thread, and pinning makes a context on it
    item: tuple[Any, Any, BaseException | None]
    while wanted.get() and not stopped:
        try:
            item = (*move.start(next(source)), None)
        except BaseException as error:
            item = (None, None, error)
        is_over = _is_end(item[2])
        ready.put(item)
        del item  # not held while the next one is made
        if is_over:
            return


def _is_end(error: BaseException | None) -> bool:
    """Whether the source gives no more items: at its end or an interrupt. After an `Exception` it may give others."""
    return isinstance(error, StopIteration) or not (error is None or isinstance(error, Exception))


def _stop(thread: threading.Thread, wanted: SimpleQueue[bool], stopped: list[bool]) -> None:
    stopped.append(True)
    wanted.put(False)
    # The garbage collector may run this in any thread, the prefetching one included.
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
