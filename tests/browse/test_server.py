"""The server of the page: who may ask, and what it answers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from memmap_buffer import Field, Mark, ReplayBuffer, SchemaError, Zstd, publish

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

FIELDS = {
    "image": Field("uint8", (16, 24, 3), final=True, codec=Zstd()),
    "wide": ("uint8", (400, 16, 3)),
    "state": Field("float32", 2, final=True),
    "reward": "float32",
    "terminated": "bool",
    "text": "U20",
}


def frames(number: int, steps: int) -> np.ndarray:
    return np.arange(steps)[:, None, None, None] + np.full((16, 24, 3), 20 * number)


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(tmp_path / "data", 6, 3000, FIELDS, meta_fields={"who": "U40"}, circular=True) as buffer:
        for number in range(4):
            steps = 2000 if number == 3 else 5
            state = np.zeros((steps + 1, 2))
            state[steps // 2, 1] = 99
            state[0, 0] = np.nan
            buffer.store_episode(
                image=frames(number, steps + 1) % 256,
                wide=np.zeros((steps, 400, 16, 3)),
                state=state,
                reward=np.ones(steps),
                terminated=np.arange(steps) == steps - 1,
                text=["<script>alert(1)</script>"[:20]] * steps,
                who="<img src=x onerror=alert(1)>",
            )
        yield buffer


class Client:
    """What asks the page, with whatever headers."""

    def __init__(self, address: str) -> None:
        self.address = urlsplit(address)
        self.host, self.token = self.address.netloc, self.address.path.strip("/")

    def ask(
        self, path: str, *, method: str = "GET", body: Any = None, token: str = "", **headers: str
    ) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port or 0, timeout=60)
        given = {"Host": self.host} | {name.replace("_", "-"): value for name, value in headers.items()}
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, f"/{token or self.token}/{path}", content, given)
        answer = connection.getresponse()
        out = answer.status, answer.headers, answer.read()
        connection.close()
        return out

    def json(self, path: str) -> Any:
        status, _, content = self.ask(path)
        assert status == 200, content
        return json.loads(content)

    def mark(self, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, content = self.ask(
            "marks", method="POST", body=body, **{"Content_Type": "application/json", **headers}
        )
        return status, json.loads(content)


@pytest.fixture
def client(buffer: ReplayBuffer) -> Iterator[Client]:
    with buffer.browse() as page:
        yield Client(page.address)


def test_the_page_and_its_parts_are_there_and_may_load_nothing_else(client: Client) -> None:
    status, headers, content = client.ask("")
    assert status == 200
    assert b"<!doctype html>" in content
    assert "default-src 'none'" in headers["content-security-policy"]
    for name in ("app.js", "style.css", "tabulator.js", "uplot.js", "tabulator.css", "uplot.css"):
        assert f'"{name}"'.encode() in content
        assert client.ask(name)[0] == 200


@pytest.mark.parametrize(
    ("token", "headers"),
    [
        ("x", {}),
        ("../data/schema.json", {}),
        ("", {"Host": "evil.example:80"}),
        ("", {"Host": "evil.example"}),
        ("", {"Origin": "http://evil.example"}),
        ("", {"Origin": "null"}),
        ("é", {}),
    ],
)
def test_who_lacks_the_token_or_comes_from_another_site_is_refused(
    client: Client, token: str, headers: dict[str, str]
) -> None:
    quoted = "%C3%A9" if token == "é" else token
    for path in ("", "episodes", "app.js"):
        status, _, content = client.ask(path, token=quoted, **headers)
        assert status == 403
        assert b"secret part" in content
    status, _, _ = client.ask("marks", method="POST", body={"episodes": ["1"], "add": ["bad"]}, token=quoted, **headers)
    assert status == 403


@pytest.mark.parametrize(
    "path", ["schema.json", "../schema.json", "%2e%2e/schema.json", "page/app.js", "vendor/x", "frame"]
)
def test_no_path_reaches_the_file_system(client: Client, path: str) -> None:
    assert client.ask(path)[0] == 404


def test_a_page_for_the_network_answers_to_addresses_but_to_no_other_name(buffer: ReplayBuffer) -> None:
    with buffer.browse(host="0.0.0.0") as page:
        client = Client(page.address.replace(f"//{socket.gethostname().lower()}:", "//127.0.0.1:"))
        port = client.address.port
        for host in (f"127.0.0.1:{port}", f"10.1.2.3:{port}", f"[fe80::1]:{port}", f"{socket.gethostname()}:{port}"):
            assert client.ask("info", Host=host, Origin=f"http://{host}")[0] == 200
        for host in (f"evil.example:{port}", f"1.2.3.4.evil.example:{port}", "", "127.0.0.1:1:x"):
            assert client.ask("info", Host=host)[0] in (400, 403)


def test_frames_are_those_that_were_recorded(client: Client) -> None:
    from PIL import Image

    for path, value in (("1/image/3", 23), ("1/image/-1", 24), ("1/image/4?final=1", 25)):
        status, headers, content = client.ask(f"frame/{path}")
        assert (status, headers["content-type"]) == (200, "image/png")
        assert (np.asarray(Image.open(BytesIO(content))) == value).all()
    status, headers, content = client.ask("frame/1/wide/0?size=300")
    assert headers["content-type"] == "image/jpeg"
    assert Image.open(BytesIO(content)).size == (12, 300)
    assert Image.open(BytesIO(client.ask("frame/1/wide/0?size=100000")[2])).size == (16, 400)


def test_curves_are_thinned_without_losing_a_peak(client: Client) -> None:
    whole = client.json("curve/3/state?points=100")
    assert len(whole["x"]) == 100
    assert max(v for v in whole["lines"][1] if v is not None) == 99
    part = client.json("curve/3/state?points=100&begin=990&stop=1010")
    assert part["x"] == [*range(990, 1010)]
    assert part["lines"][1][10] == 99
    assert client.json("curve/3/state?points=5000")["lines"][0][0] is None  # NaN
    assert client.json("curve/3/reward?total=1")["lines"][0][-1] == 2000
    assert client.json("episode/3") == {"length": 2000, "final": True}


def test_values_are_told_as_text(client: Client) -> None:
    told = client.json("values/1/2")
    assert told == {"state": "[0, 99]", "reward": "1", "terminated": "False", "text": "<script>alert(1)</sc"}
    assert client.json("values/1/4?final=1") == {"state": "[0, 0]"}


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("curve/99/state", 410, "not there any more"),
        ("frame/99/image/0", 410, "not there any more"),
        ("curve/1/image", 400, "is not shown as a curve"),
        ("curve/1/none", 400, "is not shown as a curve"),
        ("frame/1/state/0", 400, "is not shown as a image"),
        ("frame/1/image/77", 400, ""),
        ("frame/1/image/x", 400, "invalid literal"),
        ("curve/x/state", 400, "expected its number"),
        ("episodes?where=nonsense", 400, "expected a column"),
        ("episodes?sort=nothing", 400, "there is no column"),
        ("episodes?page=x", 400, "invalid literal"),
        ("episodes?size=0", 400, "by zero"),
        (f"curve/1/state?begin={10**30}", 400, "too large"),
    ],
)
def test_what_cannot_be_answered_is_told(client: Client, path: str, status: int, told: str) -> None:
    got, _, content = client.ask(path)
    assert (got, told in json.loads(content)["error"]) == (status, True), content


def test_marks_are_set_for_all_episodes_or_for_none(client: Client, buffer: ReplayBuffer) -> None:
    status, told = client.mark({"episodes": ["1", "2"], "add": ["bad"], "note": "slow"})
    assert (status, told["gone"]) == (200, 0)
    assert buffer.marks() == {1: Mark(("bad",), "slow"), 2: Mark(("bad",), "slow")}
    assert client.json("episodes?where=mark%3Dbad")["last_row"] == 2
    for wrong in ({"episodes": ["1", "x"], "add": ["x"]}, {"add": ["x"]}, {"episodes": ["1"], "add": "x"}, b"{", [], 3):
        status, told = client.mark(wrong)
        assert (status, told["error"].startswith("nothing was marked")) == (409, True)
    assert client.mark({"episodes": ["1"], "add": ["x"]}, Content_Type="text/plain")[0] == 403
    assert client.mark(b"x" * (1 << 20 | 1))[0] == 413
    assert client.ask("marks")[0] == 405
    assert len(buffer.marks()) == 2


def test_a_page_that_is_read_only_shows_no_marks_and_sets_none(buffer: ReplayBuffer) -> None:
    buffer.mark([1], add=["good"])
    with buffer.browse(read_only=True) as page:
        client = Client(page.address)
        assert client.json("info")["marks"] is False
        assert "mark" not in client.json("episodes")["data"][0]
        assert client.mark({"episodes": ["1"], "add": ["bad"]})[0] == 403
    assert buffer.marks() == {1: Mark(("good",))}


def test_marks_of_a_folder_that_may_not_be_written_to_are_in_a_file(buffer: ReplayBuffer, tmp_path: Path) -> None:
    reader, file = ReplayBuffer.from_folder(buffer.folder, read_only=True), tmp_path / "marks.json"
    with reader.browse() as page:
        assert Client(page.address).json("info")["marks"] is False
    with reader.browse(marks=file) as page:
        assert Client(page.address).mark({"episodes": ["2"], "add": ["good"]})[0] == 200
    assert reader.marks(file) == {2: Mark(("good",))}


def test_episodes_are_played_as_they_were_recorded(buffer: ReplayBuffer) -> None:
    rates = []
    for content, given in (("", None), ('{"fps": 30}', None), ('{"fps": 30}', 5), ('{"fps": "x"}', None), ("[", None)):
        if content:
            (buffer.folder / "extra").mkdir(exist_ok=True)
            (buffer.folder / "extra" / "lerobot.json").write_text(content)
        with buffer.browse(rate=given) as page:
            rates.append(Client(page.address).json("info")["rate"])
    assert rates == [10, 30, 5, 10, 10]


def test_statistics_are_there_when_all_episodes_are_checked(client: Client) -> None:
    while not (report := client.json("statistics"))["done"]:
        assert not report["failure"]
    assert report["odd"]["nan"] == {"state": 4, "reward": 0, "terminated": 0}
    assert [row["entry"] for row in report["rows"]] == ["state[0]", "state[1]", "reward", "terminated"]
    assert report["dead"][-1] == {"entries": "reward", "number": 1, "of": 1}


def test_large_whole_numbers_that_differ_are_not_told_to_be_one_value(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "large", 2, 9, {"near": "int64", "same": "int64"}) as buffer:
        for number in range(2):
            buffer.store_episode(near=[2**60 + number] * 3, same=[2**50] * 3)
        with buffer.browse() as page:
            client = Client(page.address)
            while not (report := client.json("statistics"))["done"]:
                assert not report["failure"]
    assert report["dead"] == [{"entries": "same", "number": 1, "of": 1}]


def test_a_slow_client_does_not_keep_the_page_from_ending(buffer: ReplayBuffer) -> None:
    page = buffer.browse()
    client = Client(page.address)
    with socket.create_connection((client.address.hostname or "", client.address.port or 0)) as slow:
        head = f"POST /{client.token}/marks HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        time.sleep(0.3)
        begun = time.monotonic()
        page.close()
        assert time.monotonic() - begun < 30  # it would wait for ever


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_port(buffer: ReplayBuffer) -> None:
    page = buffer.browse()
    port = Client(page.address).address.port
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        page.close()
        buffer.browse(port=port or 0).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_page_that_cannot_begin_leaves_no_thread(buffer: ReplayBuffer) -> None:
    before = threading.active_count()
    with pytest.raises(SchemaError, match="reward: got 'rewards', which was not declared"):
        buffer.browse(reward="rewards")
    with buffer.browse() as page, pytest.raises(OSError, match="in use"):
        buffer.browse(port=int(page.address.split(":")[2].split("/")[0]))
    assert threading.active_count() == before


def test_a_page_that_is_closed_answers_no_more(buffer: ReplayBuffer) -> None:
    page = buffer.browse()
    client = Client(page.address)
    assert client.ask("")[0] == 200
    assert page.address in page._repr_html_()
    page.close()
    page.close()
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset
        client.ask("")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_one_address_and_ends_with_a_signal(buffer: ReplayBuffer, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "memmap_buffer", "browse", str(buffer.folder), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert Client(address).json("info")["title"] == "data"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (out, "Traceback" in err) == ("", False)
    assert process.returncode in (0, 130, -number)


def test_the_command_finds_the_shards_of_a_root_whose_store_asks_for_options(
    bucket: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = bucket
    for name in ("shard-00000", "shard-00001"):
        with ReplayBuffer(tmp_path / name, 1, 5, {"reward": "float"}) as shard:
            shard.store_episode(reward=np.ones(5))
        publish(shard.folder, url, storage_options=options)
    command = [sys.executable, "-m", "memmap_buffer", "browse", url, "--storage-options", json.dumps(options)]
    command += ["--no-open", "--read-only", "--cache", str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            client = Client(process.stdout.readline().strip())
            while client.json("version")["progress"] < 1:
                pass
            assert len(client.json("episodes")["data"]) == 2
        finally:
            process.terminate()


def test_episodes_that_a_recorder_adds_appear(client: Client, buffer: ReplayBuffer) -> None:
    before = client.json("version")["version"]
    buffer.store_episode(
        image=frames(0, 3),
        wide=np.zeros((2, 400, 16, 3)),
        state=np.zeros((3, 2)),
        reward=[1, 1],
        terminated=[0, 1],
        text=["", ""],
        who="",
    )
    while (now := client.json("version"))["version"] == before or now["progress"] < 1:
        pass
    assert client.json("episodes")["data"][0]["_id"] == "4"
