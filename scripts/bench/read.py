"""Batches from pages in memory: `sample` and the DataLoader, against `index_select` into a given output."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.data import LONGEST, TRANSITIONS, Array, Arrays, Run, Store
from bench.measure import BOUND, OURS, Call, Row, medians, throughput
from bench.peers import contenders
from memmap_buffer import ReplayBuffer, Window, pack
from memmap_buffer.loading.datasets import collate

GAMMA = 0.99
TRAINED = 50  # batches of a call


def transitions(run: Run, kind: str, goals: tuple[float, float]) -> Iterator[Row]:
    """256 random transitions with the next observation, by `sample` and by a shuffled DataLoader."""
    store = run.store(kind)
    loader = endless(store.buffer.dataloader(256, shuffle=True, **TRANSITIONS))
    check_transitions(store)
    bounds, repeats = gather_transitions(store), repeats_of(run, kind)
    for how, goal, ours in (
        ("sample", goals[0], lambda: store.buffer.sample(256, **TRANSITIONS)),
        ("loader", goals[1], lambda: next(loader)),
    ):
        calls = {OURS: ours, **bounds, **contenders(run, kind, how)}
        yield throughput(f"{how}(256) transitions, {kind}", medians(calls, repeats), goal, unit="batches/s")


def gather_transitions(store: Store) -> dict[str, Call]:
    """The bounds by torch and by numpy, since torch's own threads help only on an idle machine."""
    now, after = store.outputs(256), store.outputs(256, names=("observation",))
    picks = store.picks(256, ahead=1)
    plan = [(store.rows[name], 0, out) for name, out in now.items()]
    plan.append((store.rows["observation"], 1, after["observation"]))
    arrays = [(rows.numpy(), ahead, out.numpy()) for rows, ahead, out in plan]

    def by_torch() -> None:
        rows = next(picks)
        for source, ahead, out in plan:
            torch.index_select(source, 0, rows + ahead if ahead else rows, out=out)

    def by_numpy() -> None:
        rows = next(picks).numpy()
        for source, ahead, out in arrays:
            source.take(rows + ahead if ahead else rows, axis=0, out=out, mode="clip")

    return {f"{BOUND} torch": by_torch, f"{BOUND} numpy": by_numpy}


def packed(run: Run, kind: str, goals: tuple[float, float]) -> Iterator[Row]:
    """The same from a packed copy of the folder, beside the grid; the bounds read the grid."""
    store = run.store(kind)
    folder = run.once(("packed", kind), lambda: run.folder(f"packed-{kind}"))
    pack(store.buffer.folder, folder)
    copy = ReplayBuffer.from_folder(folder, read_only=True)
    check_transitions(store, copy)
    bounds, loaders = (
        gather_transitions(store),
        [endless(b.dataloader(256, shuffle=True, **TRANSITIONS)) for b in (copy, store.buffer)],
    )
    for how, goal, ours, grid in (
        ("sample", goals[0], lambda: copy.sample(256, **TRANSITIONS), lambda: store.buffer.sample(256, **TRANSITIONS)),
        ("loader", goals[1], lambda: next(loaders[0]), lambda: next(loaders[1])),
    ):
        seconds = medians({OURS: ours, **bounds, "grid": grid}, repeats_of(run, kind))
        yield throughput(f"{how}(256) transitions, {kind}, packed", seconds, goal, unit="batches/s")


def check_transitions(store: Store, buffer: ReplayBuffer | None = None) -> None:
    """Check batches of the buffer, or of a copy, against plain indexing of the store."""
    options: dict[str, Any] = {**TRANSITIONS, "return_indices": True}
    buffer = buffer or store.buffer
    for batch in (buffer.sample(256, **options), first(buffer.dataloader(256, shuffle=True, **options))):
        rows = store.rows_of(batch["_indices"])
        same(batch, {name: store.rows[name][rows] for name in store.fields})
        last = (
            batch["_indices"][:, 1] + 1
            == torch.from_numpy(store.records["length"].astype(np.int64))[batch["_indices"][:, 0]]
        )
        expected = store.rows["observation"][rows + 1]
        same(batch, {"next_observation": torch.where(column(last, expected), 0, expected)})


def windows(run: Run, kind: str, goal: float) -> Iterator[Row]:
    """32 windows of 64 steps that lie inside their episodes."""
    store = run.store(kind)
    options: dict[str, Any] = {"view": Window(64, boundary="drop")}
    batch = store.buffer.sample(32, **options, return_indices=True)
    rows = store.rows_of(batch["_indices"])[:, None] + torch.arange(64)
    same(batch, {name: store.rows[name][rows] for name in store.fields})
    views = {name: windowed(rows, 64) for name, rows in store.rows.items()}
    out, picks = store.outputs(32, 64), store.picks(32, ahead=63)
    plan = [(views[name], out[name]) for name in views]
    arrays = [(view.numpy(), target.numpy()) for view, target in plan]

    def by_torch() -> None:
        rows = next(picks)
        for view, target in plan:
            torch.index_select(view, 0, rows, out=target)

    def by_slices() -> None:
        rows = next(picks).tolist()
        for view, target in arrays:
            for i, row in enumerate(rows):
                target[i] = view[row]

    calls = {
        OURS: lambda: store.buffer.sample(32, **options),
        f"{BOUND} torch": by_torch,
        f"{BOUND} slices": by_slices,
        **contenders(run, kind, "windows"),
    }
    yield throughput(f"32 windows of 64 steps, {kind}", medians(calls, repeats_of(run, kind)), goal, unit="batches/s")


def windowed(rows: torch.Tensor, length: int) -> torch.Tensor:
    """A view (rows - length + 1, length, *field) in which row i is the window from row i on."""
    return rows.as_strided((len(rows) - length + 1, length, *rows.shape[1:]), (rows.stride(0), *rows.stride()))


def whole_episodes(run: Run) -> Iterator[Row]:
    """16 whole episodes, padded and masked, against one slice copy an episode and field."""
    store = run.store("low-dim")
    lengths, rng = store.records["length"].astype(np.int64), np.random.default_rng(3)
    out = {name: values.numpy() for name, values in store.outputs(16, LONGEST).items()}
    mask = np.empty((16, LONGEST), np.bool_)

    def copy(slots: Array) -> Arrays:
        longest = int(lengths[slots].max())
        np.less(np.arange(longest), lengths[slots][:, None], out=mask[:, :longest])
        episodes = list(zip(slots.tolist(), lengths[slots].tolist(), strict=True))
        for name, rows in store.plain.items():
            target = out[name]
            for i, (slot, length) in enumerate(episodes):
                target[i, :length] = rows[slot * LONGEST : slot * LONGEST + length]
                target[i, length:longest] = 0
        return {name: values[:, :longest] for name, values in (*out.items(), ("_mask", mask))}

    batch = store.buffer.sample(16, return_mask=True, return_indices=True)
    same(batch, {name: torch.from_numpy(values) for name, values in copy(batch["_index"].numpy()).items()})
    calls = {
        OURS: lambda: store.buffer.sample(16, return_mask=True),
        BOUND: lambda: copy(rng.integers(0, len(lengths), 16)),
        **contenders(run, "low-dim", "episodes"),
    }
    yield throughput("16 whole episodes, padded, masked", medians(calls, run.repeats), 0.75, unit="batches/s")


def n_step(run: Run) -> Iterator[Row]:
    """256 transitions over 5 steps with return and discount."""
    store = run.store("low-dim")
    options: dict[str, Any] = {"n_steps": 5, "next_fields": ("observation",), "gamma": GAMMA}
    check_returns(store, store.buffer.sample(256, **options, return_indices=True))
    now, after = store.outputs(256), store.outputs(256, names=("observation",))
    rewards, powers = windowed(store.rows["reward"], 5), GAMMA ** torch.arange(5, dtype=torch.float32)
    five, returns, discount = torch.empty(256, 5), torch.empty(256), torch.empty(256)
    ended, picks = torch.empty(256, dtype=torch.bool), store.picks(256, ahead=5)

    def bound() -> None:
        rows = next(picks)
        for name, out in now.items():
            torch.index_select(store.rows[name], 0, rows, out=out)
        torch.index_select(store.rows["observation"], 0, rows + 5, out=after["observation"])
        torch.index_select(rewards, 0, rows, out=five)
        torch.mv(five, powers, out=returns)
        torch.index_select(store.rows["terminated"], 0, rows + 4, out=ended)
        torch.mul(ended.logical_not_(), GAMMA**5, out=discount)

    calls = {OURS: lambda: store.buffer.sample(256, **options), BOUND: bound, **contenders(run, "low-dim", "n-step")}
    yield throughput("256 5-step transitions with return", medians(calls, run.repeats), 0.7, unit="batches/s")


def check_returns(store: Store, batch: dict[str, torch.Tensor]) -> None:
    """Check returns and discounts against the definition, an item at a time."""
    reward, records = store.rows["reward"].numpy(), store.records
    for i, (serial, t) in enumerate(batch["_indices"].tolist()):
        length, row = int(records["length"][serial]), serial * LONGEST + t
        ended = bool(store.rows["terminated"][serial * LONGEST + length - 1])
        k = min(5, length - t - (not ended))
        expected = sum(GAMMA**j * float(reward[row + j]) for j in range(k))
        discount = 0 if ended and t + k == length else GAMMA**k
        assert abs(float(batch["_return"][i]) - expected) < 1e-4, "a return differs from its definition"
        assert abs(float(batch["_discount"][i]) - discount) < 1e-6, "a discount differs from its definition"
        same({"row": batch["observation"][i]}, {"row": store.rows["observation"][row]})


def slow_collate(batch: Any) -> Any:
    """Collate with 2 ms of Python for every batch, as a user's transform may take."""
    stop = time.perf_counter() + 0.002
    while time.perf_counter() < stop:
        pass
    return collate(batch)


def workers(run: Run) -> Iterator[Row]:
    """A shuffled DataLoader with 2 worker processes, over itself without."""
    store, batches = run.store("low-dim"), 200
    slow: dict[str, Any] = {"collate_fn": slow_collate}
    two: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    for what, goal, extra in (("", 0.5, {}), (" and 2 ms of Python", 1.0, slow)):
        loaders = {
            name: store.buffer.dataloader(256, shuffle=True, seed=0, **TRANSITIONS, **extra, **how)
            for name, how in ((OURS, two), (BOUND, {}))
        }
        same(first(loaders[OURS]), first(loaders[BOUND]))
        streams = {name: endless(loader) for name, loader in loaders.items()}
        calls = {name: lambda s=stream: [next(s) for _ in range(batches)] for name, stream in streams.items()}
        seconds = medians(calls, max(3, run.repeats // 200), burst=1)
        yield throughput(f"loader, 2 workers over none{what}", seconds, goal, per_call=batches, unit="batches/s")
        del streams, loaders, calls


def prefetched(run: Run) -> Iterator[Row]:
    """A loader with `prefetch=2`, beside a step of 2 ms outside of Python, over one without; and with 2 workers."""
    hows: dict[str, dict[str, Any]] = {OURS: {"prefetch": 2}, BOUND: {}, "2 workers": {"num_workers": 2}}
    for kind in ("low-dim", "image"):
        buffer = run.store(kind).buffer
        loaders = {n: buffer.dataloader(256, shuffle=True, seed=0, **TRANSITIONS, **how) for n, how in hows.items()}
        same(first(loaders[OURS]), first(loaders[BOUND]))
        calls = {name: partial(trained, endless(loader)) for name, loader in loaders.items()}
        seconds = medians(calls, max(3, run.repeats // 200), burst=1)
        case = f"loader, prefetch=2, and a step of 2 ms, {kind}"
        yield throughput(case, seconds, 1.0, per_call=TRAINED, unit="batches/s")
        del loaders, calls


def trained(batches: Iterator[Any]) -> None:
    for _ in range(TRAINED):
        next(batches)
        time.sleep(0.002)


def repeats_of(run: Run, kind: str) -> int:
    return run.repeats if kind == "low-dim" else max(4, run.repeats // 5)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def first(loader: Iterable[Any]) -> Any:
    return next(iter(loader))


def column(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def same(batch: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    """Check a batch against plain numpy and torch."""
    for name, values in expected.items():
        assert torch.equal(batch[name], values), f"{name} differs from what is on the disk"
