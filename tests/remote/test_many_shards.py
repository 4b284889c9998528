"""Ten thousand shards: what opening a root asks for, and does, that grows with their number. Counted, not timed."""

import pytest
from inside import folders_of, forget_schemas, get_inside, num_schemas_parsed, set_inside
from range_server import RangeServer

from bench.data import STEPS_OF_A_SHARD, forge_root
from memmap_buffer import ConcatBuffer

SHARDS = 2 * get_inside("merged_heads") + 10


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return forge_root(tmp_path_factory.mktemp("listed") / "root", SHARDS, episodes=2)


def test_a_root_is_opened_by_one_request_for_a_thousand_shards(root, tmp_path, monkeypatch):
    set_inside(monkeypatch, root_look_seconds=1e9)
    with RangeServer(root) as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
        assert (len(far.shards), far.num_steps) == (SHARDS, SHARDS * STEPS_OF_A_SHARD)
        asked = sorted(request.path.partition("/")[0] for request in server.requests)
        assert asked == ["heads"] * 3 + ["root.json"]
        again = ConcatBuffer.from_root(server.url, cache=tmp_path)
        assert again.num_steps == far.num_steps
        assert [request.path for request in server.requests[4:]] == ["root.json"]
    assert {path.name for path in tmp_path.iterdir()} == {"bound", "heads"}  # no folder, so no map, of any shard


def test_the_shards_of_a_root_share_their_schema_which_is_parsed_once(root, tmp_path):
    forget_schemas()
    far = ConcatBuffer.from_root(f"file://{root}", cache=tmp_path)
    assert num_schemas_parsed() == 1
    assert {id(storage.layout.schema) for storage in folders_of(far).storages} == {id(folders_of(far).schema)}
    assert len({storage.layout.id for storage in folders_of(far).storages}) == SHARDS
