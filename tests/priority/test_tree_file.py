"""Which blocks of the file of a tree are written before something is stored to them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inside import block_size, blocks_made_ready

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.format import host
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.syscalls import has_hole, is_hole
from memmap_buffer.priority import anchor_priorities, tree_file
from memmap_buffer.priority.sum_tree import STEP, capacity_of
from memmap_buffer.priority.tree_file import Nodes, nodes_file

HEADER = 128


def made(path, leaves, minima=False):
    file = nodes_file("nodes.npy", leaves)
    path.mkdir(exist_ok=True)
    folder = Folder(path)
    folder.create_array(file)
    assert len(file.header) == HEADER
    return Nodes(folder, file, leaves, minima=minima), path / file.name


@pytest.mark.parametrize("in_place", [True, False])
@given(st.data())
def test_all_that_a_store_to_a_leaf_changes_lies_in_the_blocks_that_are_made_ready(tmp_path_factory, in_place, data):
    leaves, minima = data.draw(st.integers(1, 3000)), data.draw(st.booleans())
    chosen = np.unique(data.draw(st.lists(st.integers(0, leaves - 1), min_size=1, max_size=5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "IN_PLACE", host.IN_PLACE if in_place else ())
        patch.setattr(tree_file, "CHUNK_BITS", data.draw(st.integers(5, 9)))
        patch.setattr(tree_file, "PAGE_BITS", data.draw(st.integers(5, 9)))
        one, _ = made(tmp_path_factory.mktemp("tree"), leaves, minima)
    first = capacity_of(leaves)
    ready, size = blocks_made_ready(one, chosen + first), block_size(one)
    above = np.unique(np.concatenate([(chosen + first) >> STEP * level for level in range(1, 12)]))
    stored = [chosen + first, above, *([above + 2 * first] if minima else [])]
    for node in np.concatenate(stored).tolist():
        assert (HEADER + 8 * node) // size in ready


@pytest.mark.parametrize("leaves", [7, 300_000, 2_000_000])
def test_blocks_lie_at_multiples_of_two_mebibytes_and_are_written_whole(tmp_path, leaves):
    one, path = made(tmp_path, leaves)
    if not one.shared:
        pytest.skip("this file system does not overwrite in place")
    one.prepare(np.array([leaves - 1]))
    stride, size = 2 << 20, path.stat().st_size
    with path.open("rb") as file:
        at = HEADER + 8 * (capacity_of(leaves) + leaves - 1)
        start = max(HEADER, at // stride * stride)
        stop = min(size, start // stride * stride + stride)
        assert not has_hole(file.fileno(), start, stop)
        if stop + stride < size:  # what lies behind holds leaves that do not exist
            assert is_hole(file.fileno(), stop, size)
        written = path.stat().st_blocks * 512
        assert written <= 5 * stride
        file.seek(0)
        assert file.read(HEADER) == nodes_file("nodes.npy", leaves).header
        file.seek(start)
        assert not any(file.read(stop - start))


def test_what_stands_in_a_block_is_kept_when_it_is_made_ready(tmp_path):
    leaves = 300_000
    one, path = made(tmp_path, leaves)
    if not one.shared:
        pytest.skip("this file system does not overwrite in place")
    at = HEADER + 8 * (capacity_of(leaves) + 5)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.array([2.5]).tobytes())
    one.prepare(np.array([0]))
    assert one.array[capacity_of(leaves) + 5] == 2.5
    with path.open("rb") as file:
        stop = (at // (2 << 20) + 1) * (2 << 20)
        assert not has_hole(file.fileno(), at // (2 << 20) * (2 << 20), min(stop, path.stat().st_size))


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}, {"read_only": True}], ids=str)
def test_a_tree_that_memory_has_no_room_for_is_refused_before_it_begins(tmp_path, monkeypatch, options):
    """The one on the disk takes none of the process's own."""
    with ReplayBuffer(tmp_path, 4, 1000, {"x": "int"}) as buffer:
        for _ in range(4):
            buffer.store_episode(x=np.arange(1000))
        monkeypatch.setattr(tree_file, "available_memory", lambda: 20_000)
        how = options if "n_steps" in options else {"timestep_level": True} | options
        buffer = ReplayBuffer.from_folder(tmp_path, read_only=True) if how.pop("read_only", False) else buffer
        if not options:
            assert len(buffer.sample(8, prioritized=True, **how)["x"]) == 8
            return
        with pytest.raises(SchemaError, match=r"4000 timesteps in 4 episodes take .* GiB .* and 0\.0 are free"):
            buffer.sample(8, prioritized=True, **how)
        monkeypatch.setattr(tree_file, "available_memory", lambda: 10**9)
        assert len(buffer.sample(8, prioritized=True, **how)["x"]) == 8


@pytest.mark.parametrize("n_steps", [None, 3])
def test_many_priorities_that_are_made_at_once_show_a_bar(tmp_path, monkeypatch, n_steps):
    told = []
    monkeypatch.setattr(tree_file, "BLOCK_STEPS", 10)
    monkeypatch.setattr(anchor_priorities, "BLOCK", 10)
    monkeypatch.setattr(tree_file, "progress", lambda items, what: told.append((what, len(items))) or items)
    view = {"timestep_level": True} if n_steps is None else {"n_steps": n_steps}
    with ReplayBuffer(tmp_path, 40, 10, {"x": "int"}) as buffer:
        for _ in range(10):
            buffer.store_episode(x=np.arange(10))
        assert len(buffer.sample(8, prioritized=True, **view)["x"]) == 8
        assert told == []
        for _ in range(20):
            buffer.store_episode(x=np.arange(10))
        assert len(buffer.sample(8, prioritized=True, **view)["x"]) == 8
        assert {count for _, count in told} == ({20} if n_steps is None else {20, 18})
