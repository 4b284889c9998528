"""`pack` and `unpack` of compressed fields: blobs are copied, or decoded and encoded anew where that is asked for."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_folder
import damage
import numpy as np
import pytest
from coded_folder import copy_of, episodes, example, no_barriers, open_blobs, open_index
from fault_injection import KILLED, in_child, listing, system
from inside import after_each_packed_episode, get_inside, set_inside

from memmap_buffer import Field, Jpeg, ReplayBuffer, SchemaError, Zstd, pack, unpack, verify

__all__ = ["no_barriers"]  # a fixture


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (_, _, content) in listing(folder).items() if name != ".lock"}


def codecs_of(folder: Path) -> dict[str, Any]:
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        return {name: field.codec for name, field in buffer.schema.fields.items()}


def blobs_by_hand(folder: Path, name: str) -> list[bytes]:
    """The blobs of a packed folder, row by row, which must lie end to end."""
    index = np.load(folder / "data" / f"{name}.npy").reshape(-1, 2)
    data = np.load(folder / "data" / f"{name}.blobs.npy").reshape(-1).tobytes()
    lengths = (index[:, 1] & 0xFFFFFFFF).tolist()
    assert index[:, 0].tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
    assert sum(lengths) == len(data)
    return [data[a : a + n] for a, n in zip(index[:, 0].tolist(), lengths, strict=True)]


# Blobs are copied


@pytest.mark.parametrize("kind", ["grid", "packed", "spread"])
def test_a_copy_has_the_blobs_of_the_source(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = example(kind)
    set_inside(monkeypatch, encode_many=None)  # none is encoded again
    assert pack(source, tmp_path / "packed") == unpack(source, tmp_path / "grid", 5) == []
    for copy in ("packed", "grid"):
        assert episodes(tmp_path / copy) == episodes(example(kind))
        assert verify(tmp_path / copy) == []
    for name in ("frame", "camera.left", "noise"):
        packed = np.load(tmp_path / "packed/data" / f"{name}.blobs.npy")
        assert blobs_by_hand(tmp_path / "packed", name)
        assert packed.nbytes < np.load(tmp_path / "grid/data" / f"{name}.blobs.npy").nbytes


def test_the_same_blobs_give_the_same_bytes_whatever_they_are_copied_from(tmp_path: Path) -> None:
    for kinds in (("grid", "packed"), ("spread", "dense")):
        wanted = bytes_of(example(kinds[1]))
        for kind in kinds:
            pack(example(kind), tmp_path / kind)
            assert bytes_of(tmp_path / kind) == wanted, kind


def test_what_is_unpacked_is_written_on_with_its_old_dictionary_beside(tmp_path: Path) -> None:
    folder = copy_of("spread", tmp_path / "grid")
    with ReplayBuffer.from_folder(folder) as buffer:
        coded_folder.record(buffer, 4, 20)
        buffer.update(0, number=list(range(30)))
    assert verify(folder) == []
    now = episodes(folder)
    assert now[4]["frame"] == [coded_folder.frame(4, t).tolist() for t in range(21)]
    assert now[1] == episodes(example())[1]


# Fields that change their codec


def test_a_field_that_is_named_is_encoded_anew_and_the_others_are_copied(tmp_path: Path) -> None:
    wanted = {"frame": "zstd", "camera.left": None, "noise": None, "depth": Zstd(5)}
    assert pack(example(), tmp_path / "packed", codec=wanted) == []
    assert verify(tmp_path / "packed") == []
    assert episodes(tmp_path / "packed") == episodes(example())
    codecs = {"frame": Zstd(12), "camera.left": None, "noise": None, "depth": Zstd(5), "number": None}
    assert codecs_of(tmp_path / "packed") == codecs
    unpack(tmp_path / "packed", tmp_path / "grid", codec={"frame": None, "depth": "zstd"})
    assert episodes(tmp_path / "grid") == episodes(example())
    assert codecs_of(tmp_path / "grid")["depth"] == Zstd(3)
    assert not (tmp_path / "grid/data/frame.dictionary.npy").exists()


def test_a_dictionary_is_trained_over_all_episodes_and_is_the_same_each_time(tmp_path: Path) -> None:
    dense, live = example("dense"), example("packed")
    assert np.load(dense / "data/frame.dictionary.npy").nbytes <= get_inside("max_dictionary")
    sizes = [np.load(folder / "data/frame.blobs.npy").nbytes for folder in (dense, live)]
    assert sizes[0] < sizes[1] / 6
    assert {int(word) >> 32 for word in np.load(dense / "data/frame.npy").reshape(-1, 2)[:, 1]} == {
        0,  # final observations that are none
        coded_folder.number_of(dense, "frame"),
    }
    pack(dense, tmp_path / "again", codec={"frame": "zstd"})
    assert bytes_of(tmp_path / "again") == bytes_of(dense)


@pytest.mark.parametrize("values", ["few", "noise", "zeros"])
def test_a_dictionary_that_does_not_pay_for_itself_is_left_out(tmp_path: Path, values: str) -> None:
    count = 15 if values == "few" else 200
    rows = np.zeros((count, 1000), np.uint8)
    if values == "noise":
        rows = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    with ReplayBuffer(tmp_path / "buffer", 2, 200, {"x": ("uint8", (1000,))}) as buffer:
        buffer.store_episode(x=rows)
    pack(tmp_path / "buffer", tmp_path / "packed", codec={"x": "zstd"})
    assert not (tmp_path / "packed/data/x.dictionary.npy").exists()
    assert episodes(tmp_path / "packed") == episodes(tmp_path / "buffer")


def test_a_lossy_codec_that_a_field_has_already_is_not_applied_again(tmp_path: Path) -> None:
    pack(example(), tmp_path / "same", codec={"camera": Jpeg(90)})
    assert bytes_of(tmp_path / "same") == bytes_of(example("packed"))
    pack(example(), tmp_path / "other", codec={"camera": Jpeg(30)})
    small, large = (np.load(f / "data/camera.left.blobs.npy") for f in (tmp_path / "other", example("packed")))
    assert small.nbytes < large.nbytes
    got, before = episodes(tmp_path / "other")[1], episodes(example())[1]
    assert np.abs(np.array(got["camera.left"], int) - before["camera.left"]).mean() < 12


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ({"frames": "zstd"}, "codec: got 'frames', which was not declared here; did you mean 'frame'"),
        ({"frame": "png"}, "codec: got 'png', expected 'zstd'"),
        ({"task": "zstd"}, "which is a meta field"),
        ({"number": "jpeg"}, "codec: field 'number': Jpeg: got a field of int64"),
    ],
    ids=str,
)
def test_a_codec_that_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, codec: dict[str, Any], text: str
) -> None:
    for way in (pack, unpack):
        with pytest.raises(SchemaError, match=text):
            way(example(), tmp_path / "copy", codec=codec)
        assert not (tmp_path / "copy").exists()


def test_a_field_that_ends_episodes_is_not_compressed(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", 1, 3, {"x": "int", "terminated": "bool"}) as buffer:
        buffer.store_episode(x=range(3), terminated=[False, False, True])
    with pytest.raises(SchemaError, match="'terminated' tells where episodes end"):
        pack(tmp_path / "buffer", tmp_path / "packed", codec={"terminated": "zstd"})


# What is damaged, or changes meanwhile


@pytest.mark.parametrize("codec", [None, {"frame": "zstd"}, {"frame": None}], ids=str)
@pytest.mark.parametrize("what", ["a blob", "an offset", "a length", "a number"])
def test_an_episode_with_a_damaged_blob_is_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, codec: dict[str, Any] | None
) -> None:
    folder = copy_of("grid", tmp_path / "buffer")
    row = open_index(folder, "frame")[coded_folder.first_row(folder, "frame", 1) + 7]
    if what == "a blob":
        open_blobs(folder, "frame")[int(row[0]) + 5] ^= 4
    elif what == "an offset":
        row[0] = 2**63
    else:
        row[1] ^= np.uint64(1 if what == "a length" else 1 << 40)
    assert pack(folder, tmp_path / "packed", codec=codec) == [1]
    assert "episode 1 " in caplog.text
    whole = episodes(example())
    del whole[1]
    assert episodes(tmp_path / "packed") == whole
    assert verify(tmp_path / "packed") == []


def test_a_blob_that_cannot_be_decoded_is_found_without_checksums_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with coded_folder.make(tmp_path / "buffer", (20, 20), checksum=None):
        pass
    row = open_index(tmp_path / "buffer", "camera.left")[3]
    open_blobs(tmp_path / "buffer", "camera.left")[int(row[0]) :][:8] = 0
    assert pack(tmp_path / "buffer", tmp_path / "packed", codec={"camera": "zstd"}) == [0]
    assert "episode 0 has a blob of 'camera.left' that cannot be decoded" in caplog.text


def test_an_update_to_larger_blobs_meanwhile_moves_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coded_folder.make(tmp_path / "buffer") as buffer:
        for high in (2**16, 1):
            depth, copied = np.random.default_rng(3).integers(0, high, (30, 8, 8)), list[int]()

            def work(number: int, depth: Any = depth, copied: list[int] = copied) -> None:
                copied.append(number)
                if number == 1:
                    buffer.update(0, depth=depth)

            with monkeypatch.context() as patch, after_each_packed_episode(patch, work):
                pack(tmp_path / "buffer", tmp_path / f"{high}", codec={"depth": "zstd"})
            assert len(copied) == len(coded_folder.LENGTHS) + 1  # one was copied twice
            assert episodes(tmp_path / f"{high}") == episodes(tmp_path / "buffer")
            assert verify(tmp_path / f"{high}") == []
            assert len(blobs_by_hand(tmp_path / f"{high}", "depth")) == sum(coded_folder.LENGTHS)


@pytest.mark.parametrize("way", [pack, unpack])
def test_a_copy_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[..., Any]
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    for name in ("close_up", "replace_schema", "write_counters"):
        if way is unpack and name != "write_counters":
            continue
        with monkeypatch.context() as patch:
            set_inside(patch, **{name: fail})
            with pytest.raises(OSError, match="No space"):
                way(example(), tmp_path / "copy")
        assert [path for path in (tmp_path / "copy").rglob("*.npy")] == []
        way(example(), tmp_path / "copy")
        assert episodes(tmp_path / "copy") == episodes(example())
        for path in sorted((tmp_path / "copy").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_a_copy_that_is_killed_is_none_or_whole_and_can_be_made_again(tmp_path: Path) -> None:
    """At each operation from the moment on that the blobs are moved together."""
    codec = {"depth": "zstd"}
    pack(example(), tmp_path / "whole", codec=codec)
    wanted = bytes_of(tmp_path / "whole")
    count = damage.count_of(lambda: pack(example(), tmp_path / "counted", codec=codec))
    seen = set()
    for at in range(count - 45, count + 1, 3):
        copy = tmp_path / f"{at}"

        def killed(tell: Any, at: int = at, copy: Path = copy) -> None:
            with system(at, kill=True):
                pack(example(), copy, codec=codec)

        assert in_child(killed).status == KILLED
        seen.add(tuple(sorted(path.name for path in copy.glob("schema*"))))
        if (copy / "schema.json").exists():
            assert {name: content for name, content in bytes_of(copy).items() if name in wanted} == wanted
        else:
            pack(example(), copy, codec=codec)
            assert bytes_of(copy) == wanted
        shutil.rmtree(copy)
    assert seen >= {("schema.json.new",), ("schema.json.new", "schema.json.old"), ("schema.json",)}


def test_a_field_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    fields = {"x": Field("uint8", (1 << 20,), codec="zstd"), "y": Field("uint8", (1 << 20,))}
    with ReplayBuffer(tmp_path / "buffer", 4, 60, fields) as buffer:
        for i in range(2):
            rows = np.broadcast_to(np.uint8(i), (60, 1 << 20))
            buffer.store_episode(x=rows, y=rows)
    tracemalloc.start()
    pack(tmp_path / "buffer", tmp_path / "packed", codec={"x": None, "y": Zstd(1)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * get_inside("recoded_chunk")  # several threads have some each
    assert np.load(tmp_path / "packed/data/y.blobs.npy").nbytes < 1 << 20
