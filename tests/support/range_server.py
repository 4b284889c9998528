"""An HTTP server of a folder, with ranges, that is as slow and as faulty as a test wants it.

In the process of a test: `with RangeServer(folder) as server: … server.url`; faults by `server.fail`, all that was
asked in `server.requests`. As one of its own, for measurements: `python range_server.py FOLDER [LATENCY BANDWIDTH]`,
whose first line is its URL; to each line that it gets it answers with one, what was asked since the last, as JSON.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

CHUNK = 1 << 16
BURST = 0.1  # seconds in which nothing was sent that may be caught up: a thread that was woken late is no slower line
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Request(NamedTuple):
    """A request that was made: the path, the bytes (first, stop) or None for all, and which fault it met."""

    path: str
    range: tuple[int, int] | None
    fault: str


class RangeServer:
    """A server on a free port of this machine, until the end of its block.

    Args:
        folder: what it serves.
        latency: seconds before each answer.
        bandwidth: bytes a second of all connections together; None for any.
        ranges: whether it knows ranges; else it always sends a whole file.
        port: default: a free one.

    Attributes:
        url: of the folder; it has the port.
        requests: all that were made.
        sent: bytes of bodies.
        trips: requests that came while none was being answered.
        most_together: the most that were being answered at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        latency: float = 0.0,
        bandwidth: float | None = None,
        ranges: bool = True,
        port: int = 0,
    ) -> None:
        self.folder, self.latency, self.bandwidth, self.ranges = Path(folder), latency, bandwidth, ranges
        self.requests: list[Request] = []
        self.sent = self.trips = self.most_together = self._answering = 0
        self._faults: list[tuple[str, str]] = []
        self._lock, self._free_at, self.stopping = threading.Lock(), 0.0, threading.Event()
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._http = _Server(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> RangeServer:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()

    def fail(self, fault: str, times: int = 1, match: str = "") -> None:
        """Have the next requests for paths that match a pattern fail.

        Args:
            fault: a status, as "500" or "403"; "reset": the connection breaks within the body; "short": the body is,
                and the headers say so; "cut": it ends before what they say; "wrong": a byte is another; "hang": no
                answer comes.
            times: how many of them.
            match: searched in the path.
        """
        with self._lock:
            self._faults += [(fault, match)] * times

    @property
    def faults(self) -> int:
        """How many are still to come."""
        with self._lock:
            return len(self._faults)

    def heal(self) -> None:
        """No fault that is still to come, comes."""
        with self._lock:
            self._faults.clear()

    def _take(self, path: str, asked: tuple[int, int] | None) -> str:
        with self._lock:
            found = next((i for i, (_, match) in enumerate(self._faults) if re.search(match, path)), None)
            fault = "" if found is None else self._faults.pop(found)[0]
            self.requests.append(Request(path, asked, fault))
            self.trips += not self._answering
            self._answering += 1
            self.most_together = max(self.most_together, self._answering)
        return fault

    def _answered(self) -> None:
        with self._lock:
            self._answering -= 1

    def told(self) -> dict[str, int]:
        """What was asked since this was asked: requests, round trips, bytes sent."""
        with self._lock:
            found = {"requests": len(self.requests), "trips": self.trips, "sent": self.sent}
            self.sent = self.trips = 0
            self.requests.clear()
        return found

    def _wait_for(self, size: int) -> None:
        """Take the time that bytes need on a line that all connections share."""
        with self._lock:
            self.sent += size
            if self.bandwidth is None:
                return
            self._free_at = max(self._free_at, time.monotonic() - BURST) + size / self.bandwidth
            pause = self._free_at - time.monotonic()
        self.stopping.wait(max(0.0, pause))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # of 5, as it is else, connections that come together wait for a second


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_of: Any

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client went away
            super().handle()

    def _answer(self, body: bool) -> None:
        server, path = self.server_of, self.path.partition("?")[0].lstrip("/")
        file = server.folder / path
        size = file.stat().st_size if file.is_file() else -1
        found = _RANGE.fullmatch(self.headers.get("Range", "")) if server.ranges else None
        first, stop = 0, size
        if found is not None:
            first, stop = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        fault = server._take(path, (first, stop) if found is not None else None)
        try:
            self._answer_with(file, range(first, stop), size, found is not None, fault, body)
        finally:
            server._answered()

    def _answer_with(self, file: Path, wanted: range, size: int, ranged: bool, fault: str, body: bool) -> None:
        server, first, stop = self.server_of, wanted.start, wanted.stop
        server.stopping.wait(server.latency)
        if fault == "hang":
            server.stopping.wait(60)
            self.close_connection = True
        elif fault.isdigit() or size < 0:
            self._status(int(fault or 404), 0)
        elif first >= size:
            self._status(416, 0)
        else:
            with file.open("rb") as opened:
                opened.seek(first)
                data = bytearray(opened.read(stop - first))
            extra = {"Content-Range": f"bytes {first}-{stop - 1}/{size}"} if ranged else {}
            self._send(206 if ranged else 200, data, extra, fault, body)

    def _status(self, status: int, size: int, **extra: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        for name, value in extra.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, status: int, data: bytearray, extra: dict[str, str], fault: str, body: bool) -> None:
        if fault == "wrong":
            data[len(data) // 2] ^= 1
        if fault == "short":
            del data[len(data) // 2 :]
        self._status(status, len(data), Accept_Ranges="bytes", **extra)
        if not body:
            return
        if fault in ("reset", "cut"):
            del data[len(data) // 2 :]
        for begin in range(0, len(data), CHUNK):
            part = data[begin : begin + CHUNK]
            self.server_of._wait_for(len(part))
            self.wfile.write(part)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault in ("reset", "cut"):
            self.close_connection = True


if __name__ == "__main__":
    folder, *speed = sys.argv[1:]
    latency, bandwidth = (float(speed[0]), float(speed[1])) if speed else (0.0, None)
    with RangeServer(Path(folder), latency=latency, bandwidth=bandwidth) as one:
        sys.stdout.write(f"{one.url}\n")
        sys.stdout.flush()
        for _ in sys.stdin:  # until whoever started it goes
            sys.stdout.write(f"{json.dumps(one.told())}\n")
            sys.stdout.flush()
