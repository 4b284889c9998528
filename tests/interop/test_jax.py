"""The functional buffers give what those of flashbax give, from a folder; also within jit and scan."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
import jax
from jax import numpy as jnp
from pages import run_blocks

from memmap_buffer import NotEnoughDataError, ReplayBuffer
from memmap_buffer.interop import jax as ours

ROOT = Path(__file__).resolve().parents[2]
STEP = {
    "obs": jnp.zeros(3),
    "action": jnp.zeros((), jnp.int32),
    "more": (jnp.zeros((), jnp.float16), jnp.zeros((1,), jnp.bfloat16)),
    "prev_done": jnp.zeros((), bool),
}


def steps(start: int, *axes: int) -> Any:
    """Steps that all differ."""
    n = start + np.arange(int(np.prod(axes))).reshape(axes)
    more = n.astype(np.float16), jnp.asarray(n[..., None] % 256, jnp.bfloat16)
    obs = np.stack([n, -n, 2 * n], -1).astype(np.float32)
    return {"obs": obs, "action": n.astype(np.int32), "more": more, "prev_done": n % 7 == 0}


def require_equal(one: Any, other: Any) -> None:
    assert jax.tree.map(lambda leaf: leaf.dtype, one) == jax.tree.map(lambda leaf: leaf.dtype, other)
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


KINDS = {  # arguments, what `add` is given, how often
    "flat": ("make_flat_buffer", (64, 8, 16, False, 4), (4,)),
    "flat, one by one": ("make_flat_buffer", (20, 8, 16), ()),
    "flat, sequences": ("make_flat_buffer", (40, 8, 16, True, 2), (2, 5)),
    "trajectory": ("make_trajectory_buffer", (3, 16, 5, 1, 7, None, 30), (3, 4)),
    "trajectory with a period": ("make_trajectory_buffer", (3, 16, 5, 3, 7, None, 30), (3, 4)),
    "as long as the buffer": ("make_trajectory_buffer", (2, 16, 13, 1, 13, None, 13), (2, 4)),
    "item": ("make_item_buffer", (30, 8, 16, True, True), (2, 3)),
    "item, one by one": ("make_item_buffer", (30, 8, 16), ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_key_gives_the_batch_that_flashbax_gives(tmp_path: Path, kind: str) -> None:
    flashbax = pytest.importorskip("flashbax", reason="flashbax is not installed")
    name, arguments, axes = KINDS[kind]
    theirs = getattr(flashbax, name)(*arguments)
    buffer = getattr(ours, name)(*arguments, folder=tmp_path)
    expected, state = theirs.init(STEP), buffer.init(STEP)
    draw, put = jax.jit(theirs.sample), jax.jit(theirs.add)
    for i in range(30):
        batch = steps(100 * i, *axes)
        expected, state = put(expected, batch), buffer.add(state, batch)
        assert (state.current_index, state.is_full) == (expected.current_index, expected.is_full)
        assert buffer.can_sample(state) == theirs.can_sample(expected)
        if i % 5 == 4 and theirs.can_sample(expected):
            key = jax.random.PRNGKey(i)
            found, wanted = buffer.sample(state, key).experience, draw(expected, key).experience
            require_equal(jax.tree.leaves(found), jax.tree.leaves(wanted))
        if i == 20:
            state.disk.close()
            state = buffer.init(STEP)  # another process goes on
            if state.is_full:
                require_equal(state.experience, expected.experience)


def test_priorities_are_those_of_flashbax(tmp_path: Path) -> None:
    flashbax = pytest.importorskip("flashbax", reason="flashbax is not installed")
    sizes = {"add_batch_size": 2, "sample_batch_size": 64, "sample_sequence_length": 4, "period": 2}
    sizes |= {"min_length_time_axis": 4, "max_length_time_axis": 40, "priority_exponent": 0.5}
    theirs = flashbax.make_prioritised_trajectory_buffer(**sizes)
    buffer = ours.make_prioritised_trajectory_buffer(**sizes, folder=tmp_path)
    batch = steps(0, 2, 30)
    expected = theirs.add(theirs.init(STEP), jax.tree.map(jnp.asarray, batch))
    state = buffer.add(buffer.init(STEP), batch)

    drawn = buffer.sample(state, jax.random.key(0))
    numbers = drawn.experience["action"][:, 0]  # of each step; windows of 30 steps begin at every second
    row, time = numbers // 30, numbers % 30
    priorities = (1.0 + numbers % 5).astype(np.float32)
    state = buffer.set_priorities(state, drawn.indices, priorities)
    expected = theirs.set_priorities(expected, jnp.asarray(row * 20 + time // 2), jnp.asarray(priorities))
    assert np.allclose(state.disk.priorities(drawn.indices), np.sqrt(priorities))
    found, wanted = (
        dict(zip(np.asarray(one.experience["action"])[:, 0].tolist(), np.asarray(one.probabilities), strict=True))
        for one in (buffer.sample(state, jax.random.key(1)), theirs.sample(expected, jax.random.key(1)))
    )
    both = sorted(found.keys() & wanted.keys())
    assert len(both) > 15 and np.allclose([found[n] for n in both], [wanted[n] for n in both])


def test_items_are_drawn_in_proportion_to_their_priority(tmp_path: Path) -> None:
    buffer = ours.make_prioritised_item_buffer(4000, 10, 4000, True, priority_exponent=0.5, folder=tmp_path)
    state = buffer.add(buffer.init(STEP), steps(0, 10))
    assert buffer.can_sample(state)
    drawn = buffer.sample(state, jax.random.key(0))
    numbers = drawn.experience["action"]
    state = buffer.set_priorities(state, drawn.indices, np.square(numbers).astype(np.float32))
    again = buffer.sample(state, jax.random.key(1))
    numbers = again.experience["action"]
    assert np.allclose(again.probabilities, numbers / 45, rtol=1e-4)
    counts = np.bincount(numbers, minlength=10)
    assert counts[0] == 0 and np.abs(counts / 4000 - np.arange(10) / 45).max() < 0.03


def test_within_jit_and_scan_the_calls_are_the_same(tmp_path: Path) -> None:
    made = [ours.make_prioritised_flat_buffer(40, 4, 8, folder=tmp_path / name) for name in ("eager", "jit")]
    uniform = ours.make_flat_buffer(40, 4, 8, folder=tmp_path / "uniform")

    def one(buffer: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        state = buffer.add(state, batch)

        def learnt() -> Any:
            drawn = buffer.sample(state, key)
            priorities = jnp.asarray(drawn.experience.first["obs"])[:, 0] + 1
            return drawn.experience.first["obs"], buffer.set_priorities(state, drawn.indices, priorities).time

        obs, _ = jax.lax.cond(buffer.can_sample(state), learnt, lambda: (jnp.zeros((8, 3)), state.time))
        return state, obs

    batches, keys = jax.tree.map(jnp.asarray, steps(0, 12)), jax.random.split(jax.random.key(0), 12)

    def scanned(state: Any) -> Any:
        return jax.lax.scan(lambda state, given: one(made[1], state, *given), state, (batches, keys))

    state, observations = jax.jit(scanned)(jax.jit(made[1].init)(STEP))
    other = made[0].init(STEP)
    for t in range(12):
        other = made[0].add(other, jax.tree.map(lambda leaf, t=t: leaf[t], batches))
        if made[0].can_sample(other):
            drawn = made[0].sample(other, keys[t])
            assert np.array_equal(observations[t], drawn.experience.first["obs"])
            made[0].set_priorities(other, drawn.indices, drawn.experience.first["obs"][:, 0] + 1)
    assert int(state.time) == int(other.time) == 12
    state = uniform.add(uniform.init(STEP), steps(0))
    for t in range(1, 9):
        state = uniform.add(state, steps(t))
    jitted = uniform.replace(sample=jax.jit(uniform.sample))
    require_equal(jitted.sample(state, keys[0]).experience, uniform.sample(state, keys[0]).experience)


def test_windows_begin_where_episodes_do(tmp_path: Path) -> None:
    for name, make in (("a", ours.make_episode_buffer), ("b", ours.make_prioritised_episode_buffer)):
        buffer = make(100, 10, 32, 5, add_sequences=True, folder=tmp_path / name)
        state = buffer.add(buffer.init(STEP), steps(0, 50))
        experience = buffer.sample(state, jax.random.key(0)).experience
        assert set(experience["action"][:, 0].tolist()) == {0, 7, 14, 21, 28, 35, 42}
        assert (experience["action"] == experience["action"][:, :1] + np.arange(5)).all()


def test_batches_are_determined_by_the_key(tmp_path: Path) -> None:
    for name, make in (("a", ours.make_flat_buffer), ("b", ours.make_prioritised_flat_buffer)):
        buffer = make(64, 8, 16, True, folder=tmp_path / name)
        state = buffer.add(buffer.init(STEP), steps(0, 30))
        one, same, other = (buffer.sample(state, jax.random.key(i)) for i in (0, 0, 1))
        require_equal(one, same)
        assert not np.array_equal(one.experience.first["action"], other.experience.first["action"])


def test_an_old_state_is_read_and_not_added_to(tmp_path: Path) -> None:
    buffer = ours.make_item_buffer(10, 1, 4, True, folder=tmp_path)
    before = buffer.add(buffer.init(STEP), steps(0, 5))
    state = buffer.add(before, steps(5, 5))
    assert buffer.sample(deepcopy(before), jax.random.key(0)).experience["action"].max() < 5
    with pytest.raises(ValueError, match="last `add` returned"):
        buffer.add(before, steps(5, 5))
    buffer.add(state, steps(10, 30))
    with pytest.raises(NotEnoughDataError, match="rows have the steps from"):
        buffer.sample(before, jax.random.key(0))


def test_the_folder_is_one_like_any_other(tmp_path: Path) -> None:
    buffer = ours.make_flat_buffer(1000, 1, 4, folder=tmp_path, durability="power")
    state = buffer.init(STEP)
    for t in range(5):
        state = buffer.add(state, steps(t))
    there = ReplayBuffer.from_folder(tmp_path, read_only=True)
    assert there.fieldnames == ("action", "more.n0", "more.n1", "obs", "prev_done")
    assert there.episode(0)["action"].tolist() == [0, 1, 2, 3, 4]


def test_prefetched_batches_are_those_that_were_asked_for(tmp_path: Path) -> None:
    buffer = ours.make_item_buffer(100, 1, 4, True, folder=tmp_path)
    state = buffer.add(buffer.init(STEP), steps(0, 50))
    keys = list(jax.random.split(jax.random.key(0), 7))
    found = list(ours.prefetch((buffer.sample(state, key) for key in keys), size=3))
    assert len(found) == 7 and isinstance(found[0].experience["obs"], jax.Array)
    for key, batch in zip(keys, found, strict=True):
        require_equal(batch, buffer.sample(state, key))

    def failing() -> Any:
        yield buffer.sample(state, keys[0])
        raise OSError("gone")

    ahead = ours.prefetch(failing())
    next(ahead)
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    left = ours.prefetch(buffer.sample(state, key) for key in keys)
    next(left)
    left.close()


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    where = {"folder": tmp_path}
    for make, arguments, text in (
        (ours.make_flat_buffer, (8, 4, 16), "sample_batch_size"),
        (ours.make_flat_buffer, (8, 9, 4), "min_length"),
        (ours.make_flat_buffer, (8, 2, 4, False, 5), "add_batch_size"),
        (ours.make_item_buffer, (8, 9, 4), "min_length"),
        (ours.make_trajectory_buffer, (1, 4, 5, 1, 5), "give one of the two"),
        (ours.make_trajectory_buffer, (1, 4, 5, 1, 5, None, 4), "max_length_time_axis"),
        (ours.make_prioritised_flat_buffer, (64, 4, 16, False, None, 2.0), "priority_exponent"),
    ):
        with pytest.raises(ValueError, match=text):
            make(*arguments, **where)
    buffer = ours.make_flat_buffer(64, 4, 16, False, 2, folder=tmp_path)
    state = buffer.init(STEP)
    with pytest.raises(ValueError, match="expected PyTreeDef"):
        buffer.add(state, {"obs": np.zeros((2, 3), np.float32)})
    for batch in (steps(0, 3), steps(0), {**steps(0, 2), "action": np.int32(0)}):
        with pytest.raises(ValueError, match=r"leading axes \(2,\)"):
            buffer.add(state, batch)
    with pytest.raises(ValueError, match="'obs': got float64"):
        buffer.add(state, {**steps(0, 2), "obs": np.zeros((2, 3))})
    with pytest.raises(NotEnoughDataError, match="add more"):
        buffer.sample(state, jax.random.key(0))


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(ROOT / "docs" / "jax.md").count == 1


def test_the_example_learns_and_goes_on_with_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    for told in ("mean return of the first", "going on with 600 steps"):
        command = [sys.executable, "-W", "error", ROOT / "examples" / "jax_dqn.py", "--folder", tmp_path]
        done = subprocess.run([*map(str, command), "--steps", "600"], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and told in done.stdout, done.stderr
