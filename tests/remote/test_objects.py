"""Objects under a URL: what is read is what was written, failures are met by another try, texts have no secrets."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer

from memmap_buffer import RemoteError, SchemaError
from memmap_buffer.format.syscalls import System
from memmap_buffer.remote import objects
from memmap_buffer.remote.objects import Objects, shown

pytest.importorskip("aiohttp")
BYTES = np.random.default_rng(0).bytes(100_000)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(objects, "LONGEST_PAUSE", 0.002)


@pytest.fixture(params=["memory", "file", "s3", "azure"])
def store(request: pytest.FixtureRequest, new_root: Any) -> Objects:
    """An empty place to write to."""
    return Objects(*new_root(request.param))


@pytest.fixture
def server(tmp_path: Path) -> Any:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.bin").write_bytes(BYTES)
    with RangeServer(tmp_path) as running:
        yield running


def test_what_was_written_is_read_by_ranges_sizes_and_names(store: Objects, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(BYTES)
    store.write("a/b/c.bin", tmp_path / "given")
    store.write("a/b/d.bin", b"one")
    store.write("a/b/d.bin", b"two")
    assert store.read("a/b/d.bin", 3) == b"two"
    ranges = [("a/b/c.bin", i * 997, i * 997 + 500) for i in range(90)] + [("a/b/d.bin", 1, 3)]
    expected = [BYTES[start:stop] for _, start, stop in ranges[:-1]] + [b"wo"]
    assert store.read_ranges(ranges) == expected
    assert dict(store.stream(ranges)) == dict(enumerate(expected))
    assert (store.size("a/b/c.bin"), store.size("a/b/x")) == (len(BYTES), None)
    assert (sorted(store.listing("a/b")), store.listing("a/x")) == (["a/b/c.bin", "a/b/d.bin"], {})
    store.remove("a/b/d.bin")
    store.remove("a/b/d.bin")
    assert [*store.listing("a/b")] == ["a/b/c.bin"]


def test_what_is_written_to_a_folder_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = list[int]()
    for name in ("barrier", "sync_folder"):
        monkeypatch.setattr(System, name, lambda _, fd: on_disk.append(os.fstat(fd).st_ino))
    (tmp_path / "file").write_bytes(BYTES)
    for path, data in {"one": BYTES, "deep/er/two": tmp_path / "file"}.items():
        on_disk.clear()
        Objects(f"file://{tmp_path}/far").write(path, data)
        place = tmp_path / "far" / path
        assert on_disk == [place.stat().st_ino, place.parent.stat().st_ino]
        assert place.read_bytes() == BYTES


def test_a_disk_that_is_busy_with_what_others_write_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(System, "barrier", lambda _, fd: time.sleep(0.5))
    Objects(f"file://{tmp_path}", tries=1, timeout=0.1).write("one", BYTES)
    assert (tmp_path / "one").read_bytes() == BYTES


def test_a_file_system_that_cannot_sync_folders_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: System, fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(System, "sync_folder", refused)
    store, code = Objects(f"file://{tmp_path}", tries=1), errno.EINVAL
    store.write("deep/one", BYTES)
    assert store.read("deep/one", len(BYTES)) == BYTES
    code = errno.EIO
    with pytest.raises(RemoteError, match="Input/output error"):
        store.write("deep/one", BYTES)


def test_processes_of_one_number_on_two_hosts_write_to_files_of_their_own(tmp_path: Path) -> None:
    script = f"""
import os
os.getpid = lambda: 1
from fsspec.implementations.local import LocalFileSystem
LocalFileSystem.mv = lambda self, new, place: print(new)
from memmap_buffer.remote.objects import Objects
Objects("file://{tmp_path}").write("one", b"")
"""
    command = [sys.executable, "-c", script]
    names = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(names) == 2 and not any(name == b"" for name in names)


def test_what_is_missing_or_too_large_is_an_error_at_once(store: Objects) -> None:
    store.write("a.bin", b"four")
    assert store.read("x.bin", 9) is None
    with pytest.raises(RemoteError, match=r"/x\.bin: bytes 0 to 9: there is none \(tries: 1\)") as caught:
        store.read_ranges([("x.bin", 0, 9)])
    assert caught.value.missing
    with pytest.raises(RemoteError, match=r"/a\.bin: read: it has more than 3 bytes \(tries: 1\)") as caught:
        store.read("a.bin", 3)
    assert not caught.value.missing
    with pytest.raises(RemoteError, match=r"tries: 6"):
        store.read_ranges([("a.bin", 2, 9)])


@pytest.mark.parametrize("store", ["s3", "azure"], indirect=True)
def test_an_object_is_replaced_on_condition_that_nobody_else_did(store: Objects) -> None:
    assert store.replaces_on_condition
    assert store.read_tagged("root.json", 9) == (b"", "")
    assert store.replace_tagged("root.json", b"one", "")
    assert not store.replace_tagged("root.json", b"two", "")
    data, tag = store.read_tagged("root.json", 9)
    assert data == b"one"
    assert store.replace_tagged("root.json", b"three", tag)
    assert not store.replace_tagged("root.json", b"four", tag)
    assert store.read("root.json", 9) == b"three"
    with pytest.raises(RemoteError, match="more than 4 bytes"):
        store.read_tagged("root.json", 4)


@pytest.mark.parametrize("fault", ["500", "503", "429", "reset", "short", "cut"])
def test_a_fault_that_passes_is_not_seen(server: RangeServer, fault: str) -> None:
    store = Objects(server.url)
    server.fail(fault, 5)
    assert store.read_ranges([("sub/b.bin", 10, 90_000)]) == [BYTES[10:90_000]]
    assert [request.fault for request in server.requests] == [fault] * 5 + [""]


def test_bytes_that_a_check_refuses_are_fetched_again(server: RangeServer) -> None:
    server.fail("wrong", 2)
    ranges = [("sub/b.bin", first, first + 1000) for first in range(0, 10_000, 1000)]
    expected = [BYTES[start:stop] for _, start, stop in ranges]
    assert Objects(server.url).read_ranges(ranges, lambda i, data: data == expected[i]) == expected
    assert len(server.requests) == 12
    with pytest.raises(RemoteError, match="another digest than those that were published"):
        Objects(server.url, tries=2).read_ranges(ranges, lambda i, data: i != 3)


def test_a_server_that_does_not_answer_is_given_up_in_time(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "SLOWEST", 1 << 30)
    server.fail("hang", 2)
    with pytest.raises(RemoteError, match=r"bytes 0 to 5: no answer in time \(tries: 2\)"):
        Objects(server.url, tries=2, timeout=0.05).read_ranges([("sub/b.bin", 0, 5)])
    assert Objects(server.url, tries=2, timeout=5).read_ranges([("sub/b.bin", 0, 5)]) == [BYTES[:5]]


def test_a_fault_that_stays_is_an_error_with_all_that_is_known(server: RangeServer) -> None:
    server.fail("500", 3)
    with pytest.raises(RemoteError, match=r"sub/b\.bin: bytes 1 to 5: ClientResponseError: 500.*\(tries: 3\)") as got:
        Objects(server.url, tries=3).read_ranges([("sub/b.bin", 1, 5)])
    error = pickle.loads(pickle.dumps(got.value))
    assert (error.url, error.asked, error.tries, error.missing) == (f"{server.url}/sub/b.bin", "bytes 1 to 5", 3, False)
    server.fail("403")
    with pytest.raises(RemoteError, match=r"\(tries: 1\); check the credentials"):
        Objects(server.url).read("sub/b.bin", 5)


def test_a_server_without_ranges_is_named_and_nothing_large_is_read_from_it(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(bytes(1 << 24))
    (tmp_path / "small").write_bytes(b"small")
    with RangeServer(tmp_path, ranges=False) as server:
        assert Objects(server.url).read("small", 10) == b"small"
        with pytest.raises(RemoteError, match=r"sends the whole object, it has no ranges \(tries: 1\)"):
            Objects(server.url).read_ranges([("b.bin", 0, 5)])
        with pytest.raises(RemoteError, match="more than 10 bytes"):
            Objects(server.url).read("b.bin", 10)


def test_the_end_of_an_object_is_told_from_a_short_answer(server: RangeServer) -> None:
    assert Objects(server.url).read("sub/b.bin", len(BYTES)) == BYTES
    for start, stop, got in ((99_999, 100_005, "got 1 bytes"), (100_001, 100_005, "it has fewer bytes")):
        with pytest.raises(RemoteError, match=got):
            Objects(server.url, tries=2).read_ranges([("sub/b.bin", start, stop)])


@pytest.mark.parametrize(
    ("fault", "tries", "remedy"), [("503", 2, "check the store"), ("403", 1, "check the credentials")]
)
def test_azure_is_asked_as_often_as_said(server: RangeServer, fault: str, tries: int, remedy: str) -> None:
    pytest.importorskip("adlfs")
    account = "DefaultEndpointsProtocol=http;AccountName=someone;AccountKey=bm9uZQ=="
    store = Objects("az://sub", {"connection_string": f"{account};BlobEndpoint={server.url}"}, tries=2, timeout=5)
    server.fail(fault, 99)
    for call in (lambda: store.read("b.bin", 9), lambda: store.read_tagged("b.bin", 9)):
        with pytest.raises(RemoteError, match=rf"HttpResponseError: .*\(tries: {tries}\); {remedy}"):
            call()
    assert [request.fault for request in server.requests] == [fault] * 2 * tries


@pytest.mark.parametrize("name", ["ClientAuthenticationError", "CredentialUnavailableError"])
def test_azure_without_a_token_is_not_asked_again(name: str) -> None:
    pytest.importorskip("adlfs")
    import azure.core.exceptions
    import azure.identity

    class WithoutToken:
        """A credential that has no token, so that nothing is sent."""

        async def get_token(self, *_: str, **__: Any) -> None:
            raise (vars(azure.core.exceptions) | vars(azure.identity))[name]("no token")

        async def close(self) -> None:
            pass

    with pytest.raises(RemoteError, match=rf"{name}: no token \(tries: 1\); check the credentials"):
        Objects("az://sub", {"account_name": "someone", "credential": WithoutToken()}).read("b.bin", 9)


def test_no_text_has_a_user_a_password_or_a_query(server: RangeServer) -> None:
    place = server.url.replace("//", "//me:secret@") + "/sub?signature=secret"
    store = Objects(place)
    assert store.read("b.bin", len(BYTES)) == BYTES
    server.fail("500", 99)
    for call in (lambda: Objects(place, tries=1).read("b.bin", 9), lambda: Objects(place, tries=1).size("x")):
        with pytest.raises(RemoteError, match="tries: 1") as caught:
            call()
        assert "secret" not in f"{caught.value} {caught.value.named} {store}"
        assert caught.value.__suppress_context__
    assert shown("a s3://k:s@host/b/c?x=1#f, 'https://u@h/p@1?q' /p@th") == "a s3://host/b/c 'https://h/p@1' /p@th"


def test_a_url_that_will_not_do_says_so() -> None:
    with pytest.raises(SchemaError, match=r"nothing://x: .*; give a URL and storage_options that fsspec takes"):
        Objects("nothing://x").read("y", 1)


def read_in_child(store: Objects, connection: Any) -> None:
    connection.send(store.read_ranges([("sub/b.bin", 3, 9)]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_makes_connections_of_its_own(server: RangeServer, method: str) -> None:
    store, context = Objects(server.url), multiprocessing.get_context(method)
    assert store.read("sub/b.bin", len(BYTES)) == BYTES
    here, there = context.Pipe()
    child = context.Process(target=read_in_child, args=(store, there))
    child.start()
    there.close()
    assert here.recv() == [BYTES[3:9]]
    child.join()
    assert store.read_ranges([("sub/b.bin", 3, 9)]) == [BYTES[3:9]]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_connections_alone(server: RangeServer) -> None:
    """What waits for their bytes is one thing for both: closed by the child, the parent would wait in vain."""
    store = Objects(server.url, tries=1)
    assert store.read("sub/b.bin", len(BYTES)) == BYTES
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(200)
            code = store.read_ranges([("sub/b.bin", 3, 9)]) != [BYTES[3:9]]
            gc.collect()  # the file system of the parent is part of a cycle
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("sub/b.bin", len(BYTES)) == BYTES


def test_who_stops_reading_leaves_nothing_in_flight(server: RangeServer) -> None:
    store = Objects(server.url)
    stream = store.stream([("sub/b.bin", first, first + 10) for first in range(0, 5000, 10)])
    server.fail("", 1)
    server.fail("hang", 500)
    next(stream)
    stream.close()
    server.heal()
    assert store.read_ranges([("sub/b.bin", 0, 1)]) == [BYTES[:1]]
    assert len(server.requests) <= 1 + objects.IN_FLIGHT + 1


def test_bytes_in_flight_are_bounded_and_come_in_order_and_a_small_object_waits_for_none(server, monkeypatch):
    monkeypatch.setattr(objects, "BYTES_IN_FLIGHT", 20_000)
    store, server.latency = Objects(server.url), 0.05
    wanted = [("sub/b.bin", first, first + 10_000) for first in range(0, 60_000, 5_000)]
    store.read_ranges(wanted)
    assert server.most_together == 2
    begun = [request.range[0] for request in server.requests]
    assert all(abs(place - begun.index(first)) <= 1 for place, (_, first, _) in enumerate(wanted))
    (server.folder / "a.bin").write_bytes(b"small")
    server.fail("hang", times=2, match="sub/b.bin")
    reader = threading.Thread(target=store.read_ranges, args=(wanted[:4],), daemon=True)
    reader.start()
    while server.faults:
        time.sleep(0.01)
    assert store.read("a.bin", 5) == b"small"
    assert reader.is_alive()
