"""Compressed fields of a folder from a stranger: whatever its index, blobs, dictionary and schema say.

The checksums are right, as a stranger can compute them. Reading gives rows or one of our errors, in little memory.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import coded_folder
import numpy as np
import pytest
from coded_folder import first_row, no_barriers, open_blobs, open_index
from inside import checksums_of, opened
from PIL import Image
from specification import CHECKED, FINAL, sealed

from memmap_buffer import MemmapBufferError, ReplayBuffer, SchemaError, Window, pack, repair, unpack, verify

__all__ = ["no_barriers"]  # a fixture
NAMES = ("frame", "camera.left", "noise")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of few steps, with a dictionary that its frames are of."""
    here = tmp_path_factory.mktemp("small")
    unpack(coded_folder.example("dense"), here / "grid", 3, 50, episodes=[0, 2])
    assert (here / "grid/data/frame.dictionary.npy").exists()
    return here / "grid"


@pytest.fixture
def folder(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "buffer"))


def reseal(folder: Path) -> None:
    """Have the checksums be those of what stands there, as far as it can be summed."""
    storage = opened(folder, read_only=True, verify="never")
    records = np.lib.format.open_memmap(folder / "episodes.npy", mode="r+")
    rows = np.lib.format.open_memmap(folder / "checksums.npy", mode="r+")
    for slot in storage.table.visible.tolist():
        record = {name: int(records[slot][name]) for name in records.dtype.names if name != "check"}
        if record["flags"] & CHECKED:
            has_final = bool(record["flags"] & FINAL)
            row, record["digest"] = checksums_of(folder, slot, record["length"], has_final, record["columns"])
            rows[slot] = np.frombuffer(row, "<u4")
            records[slot] = np.frombuffer(sealed(**record), records.dtype)[0]


def read(folder: Path) -> None:
    for way in ("auto", "always"):
        with ReplayBuffer.from_folder(folder, read_only=True, verify=way) as buffer:
            if len(buffer):
                buffer.sample(8, view=Window(3))
                for i in range(len(buffer)):
                    buffer.episode(i)
                    buffer.batch(view=Window(2), fields=["camera", "noise"])


def write(folder: Path) -> None:
    with ReplayBuffer.from_folder(shutil.copytree(folder, folder.parent / "written")) as buffer:
        coded_folder.record(buffer, 3, 2)
        assert buffer.episode(-1)["number"].tolist() == [300, 301]


def mend(folder: Path) -> None:
    mended = shutil.copytree(folder, folder.parent / "mended")
    repair(mended)
    assert verify(mended) == []


def copy(folder: Path) -> None:
    here = folder.parent
    pack(folder, here / "packed")
    assert verify(here / "packed") == []
    unpack(here / "packed", here / "unpacked", codec=dict.fromkeys(NAMES))


def enter(folder: Path, *doors: Callable[[Path], Any]) -> None:
    """Take the folder through each door, which gives rows or an error of ours."""
    for door in doors:
        with suppress(MemmapBufferError):
            door(folder)
        for name in ("written", "mended", "packed", "unpacked"):
            shutil.rmtree(folder.parent / name, ignore_errors=True)


WORDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)


@pytest.mark.parametrize("seed", range(6))
def test_any_words_in_an_index_give_rows_or_an_error_of_ours(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    name = NAMES[seed % 3]
    index, start = open_index(folder, name), first_row(folder, name, 0)
    for _ in range(1 + seed):
        row, word = index[start + chance.randrange(30)], chance.randrange(2)
        value = chance.choice([*WORDS, int(row[word]) ^ 1 << chance.randrange(64), int(index[start][word])])
        row[word] = value
    index.flush()
    reseal(folder)
    enter(folder, read, write, verify, mend, copy)


@pytest.mark.parametrize("seed", range(6))
def test_any_bytes_in_a_blob_or_a_dictionary_give_rows_or_an_error_of_ours(folder: Path, seed: int) -> None:
    chance, name = random.Random(seed), NAMES[seed % 2]
    target = open_blobs(folder, name)
    index = open_index(folder, name)[first_row(folder, name, 0) :][:30]
    if seed >= 4:
        target = np.lib.format.open_memmap(folder / "data/frame.dictionary.npy", mode="r+")
    for begin, word in index.tolist():
        for _ in range(chance.randrange(4)):
            size = word & 0xFFFFFFFF
            at = begin + chance.randrange(size) if seed < 4 else chance.randrange(len(target))
            target[at] = chance.choice([0, 0xFF, chance.randrange(256), int(target[at]) ^ 1 << chance.randrange(8)])
    if seed >= 4:  # the blobs name what is there now
        stored = open_index(folder, "frame")
        named = stored[:, 1] >> np.uint64(32) != 0
        number = np.uint64(coded_folder.number_of(folder, "frame") << 32)
        stored[named, 1] = (stored[named, 1] & np.uint64(0xFFFFFFFF)) | number
    reseal(folder)
    enter(folder, read, verify, copy, mend)


# No bomb


def jpeg_of(height: int, width: int) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.zeros((height, width, 3), np.uint8)))


def progressive() -> bytes:
    """A picture of 16 x 24 that passes over its rows several times; for every 12 bytes more it may do so once more."""
    out = io.BytesIO()
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(out, "JPEG", progressive=True)
    return out.getvalue()


def hostile_blobs() -> dict[str, tuple[str, bytes]]:
    import zstandard

    magic, large = b"\x28\xb5\x2f\xfd", (10 * 2**30).to_bytes(8, "little")
    whole = zstandard.compress(bytes(1024))
    picture = jpeg_of(16, 24)
    at = picture.index(b"\xff\xc0") + 5
    rle = struct.pack("<I", (2**20 << 3) | 3)[:3] + b"x"  # a block of one byte, a million times
    return {
        "a frame of 10 GiB": ("frame", magic + b"\xe0" + large + rle * 100),
        "a window of 2 GiB": ("frame", magic + b"\x40\xa8" + struct.pack("<H", 1024 - 256) + rle),
        "a window of 128 MiB": ("frame", magic + b"\x40\x88" + struct.pack("<H", 1024 - 256) + rle),
        "no size": ("frame", magic + b"\x00\x88" + rle * 200),
        "a row too long": ("frame", zstandard.compress(bytes(1025))),
        "a row too short": ("frame", zstandard.compress(bytes(1023))),
        "a row and nothing": ("frame", whole[:-2]),
        "a dictionary of another": ("frame", magic + b"\x63" + b"\x07" + struct.pack("<H", 768) + b"\x01\x00\x00"),
        "a skipped frame": ("frame", struct.pack("<II", 0x184D2A50, 2**31)),
        "one byte": ("frame", b"\x28"),
        "a header of 65,000 x 65,000": ("camera.left", picture[:at] + b"\xfd\xe8\xfd\xe8" + picture[at + 4 :]),
        "a larger picture": ("camera.left", jpeg_of(17, 24)),
        "half a picture": ("camera.left", picture[: len(picture) // 2]),
        "half a header": ("camera.left", picture[:20]),
        "no picture": ("camera.left", b"\xff\xd8\xff\xd9"),
        "several passes": ("camera.left", progressive()),
        "zeros": ("camera.left", bytes(500)),
    }


def put(folder: Path, name: str, blob: bytes) -> None:
    """Have the blobs of the first steps of an episode be this one; the others are as they were."""
    index, data = open_index(folder, name)[first_row(folder, name, 0) :][:30], open_blobs(folder, name)
    begin, sizes = index[:, 0].tolist(), (index[:, 1] & np.uint64(0xFFFFFFFF)).tolist()
    others = [data[a : a + n].tobytes() for a, n in zip(begin[2:], sizes[2:], strict=True)]
    blobs = [blob, blob, *others]
    index[:2, 1] = len(blob)
    index[:, 0] = [begin[0] + sum(map(len, blobs[:t])) for t in range(30)]
    data[begin[0] :][: sum(map(len, blobs))] = np.frombuffer(b"".join(blobs), np.uint8)
    reseal(folder)


@pytest.mark.parametrize("what", hostile_blobs())
def test_a_blob_that_is_no_row_is_an_error_that_names_the_file(folder: Path, what: str) -> None:
    name, blob = hostile_blobs()[what]
    put(folder, name, blob)
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        with pytest.raises(MemmapBufferError, match=rf"{name}\.blobs\.npy: .*cannot be decoded"):
            buffer.episode(0)
        assert buffer.episode(1)["number"].tolist() == [200]
    if what.startswith(("a frame", "a header", "several")):
        enter(folder, read, verify, copy)


def test_no_blob_takes_memory_or_time(folder: Path) -> None:
    """In a process that may have little more than it has when the first batch is read."""
    code = """
        import resource, shutil, sys, time
        from pathlib import Path
        sys.path[:0] = {path!r}
        import test_hostile_blobs as cases
        from memmap_buffer import MemmapBufferError, ReplayBuffer, verify
        folder, usage = Path({folder!r}), lambda: resource.getrusage(resource.RUSAGE_SELF)

        def read(place):
            with ReplayBuffer.from_folder(place, read_only=True, verify="always") as buffer:
                for field in ("frame", "camera", "noise"):
                    try:
                        buffer.episodes(fields=[field])
                    except MemmapBufferError:
                        pass
            verify(place)

        read(folder)
        before, begin = usage().ru_maxrss, time.process_time()
        for what, (name, blob) in cases.hostile_blobs().items():
            place = shutil.copytree(folder, folder.with_name(what))
            cases.put(place, name, blob)
            read(place)
        print(usage().ru_maxrss - before >> 10, time.process_time() - begin)
    """
    told = dedent(code).format(path=sys.path, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mebibytes, seconds = done.stdout.split()
    assert int(mebibytes) < 150
    assert float(seconds) < 20


# The schema


def changes_of_schema() -> Iterator[tuple[str, Callable[[dict[str, Any]], None]]]:
    def to(**values: Any) -> Callable[[dict[str, Any]], None]:
        return lambda spec: spec.update(values)

    for codec in (
        *(None, 7, "zstd", [], ["zstd"], {}, {"name": ["zstd"]}, {"name": "zstd"}, {"name": None, "level": 3}),
        *({"name": "pickle", "level": 3}, {"name": "zstd", "level": 3, "more": 1}, {"name": "zstd", "level": 99}),
        *({"name": "zstd", "level": True}, {"name": "zstd", "level": 3.0}, {"name": "zstd", "level": "3"}),
        *({"name": "jpeg", "quality": 0, "subsampling": "420"}, {"name": "jpeg", "quality": 95, "subsampling": 4}),
    ):
        yield f"codec {codec}", to(codec=codec)
    for blobs in (0, 1, -1, 2**63, 1.5, "1", [], True):
        yield f"blobs {blobs}", to(blobs=blobs)
    for dictionary in (0, -1, 2**24 + 1, 2**63, 1.5, "1", [], True, 17, 2**24):
        yield f"dictionary {dictionary}", to(dictionary=dictionary)
    for key in ("codec", "blobs", "dictionary"):
        yield f"no {key}", lambda spec, key=key: spec.pop(key)  # type: ignore[misc]
    yield "text", to(dtype="U4")
    yield "a timestep of 4 GiB", to(shape=[2**32])
    yield "a timestep of 2**61 bytes", to(shape=[2**61])


@pytest.mark.parametrize("kind", ["grid", "dense"])
def test_no_schema_of_a_compressed_field_is_believed(tmp_path: Path, folder: Path, kind: str) -> None:
    if kind == "dense":
        pack(folder, tmp_path / "dense")
        folder = tmp_path / "dense"
    schema = (folder / "schema.json").read_text()
    for what, change in changes_of_schema():
        document = json.loads(schema)
        before = json.dumps(document["fields"]["frame"])
        change(document["fields"]["frame"])
        assert json.dumps(document["fields"]["frame"]) != before
        (folder / "schema.json").write_text(json.dumps(document))
        for door in (lambda: ReplayBuffer.from_folder(folder), lambda: pack(folder, tmp_path / "copy")):
            with pytest.raises(MemmapBufferError, match=r"schema\.json|\.npy"):
                door()
        assert any(finding.lost for finding in verify(folder)), what
        if what.startswith("codec"):
            with pytest.raises(SchemaError, match=r"schema\.json: field 'frame': "):
                ReplayBuffer.from_folder(folder, read_only=True)


def test_a_meta_field_is_not_compressed(folder: Path) -> None:
    document = json.loads((folder / "schema.json").read_text())
    document["meta_fields"]["task"] |= {"codec": {"name": "zstd", "level": 3}, "blobs": None, "dictionary": None}
    (folder / "schema.json").write_text(json.dumps(document))
    with pytest.raises(SchemaError, match="meta field 'task': `codec` is for per-timestep fields"):
        ReplayBuffer.from_folder(folder, read_only=True)


def test_a_sparse_file_of_blobs_takes_no_memory(tmp_path: Path, folder: Path) -> None:
    """It is as large as the schema says, and its index names blobs all over it."""
    pack(folder, tmp_path / "dense")
    document = json.loads((tmp_path / "dense/schema.json").read_text())
    path = tmp_path / "dense/data/noise.blobs.npy"
    size = 2**40
    document["fields"]["noise"]["blobs"] = size
    (tmp_path / "dense/schema.json").write_text(json.dumps(document))
    header = path.read_bytes()[:128].replace(f"({document['rows'] * 9},)".encode(), f"({size},)".encode())
    with path.open("r+b") as file:
        file.truncate(128 + size)
        file.write(header.rstrip(b"\n ").ljust(127) + b"\n")
    index = open_index(tmp_path / "dense", "noise")
    index[:, 0] = np.arange(len(index)) * 2**34
    index.flush()
    reseal(tmp_path / "dense")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = verify(tmp_path / "dense")
    assert "do not follow one another" in str(found[0])
    enter(tmp_path / "dense", read, copy)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
