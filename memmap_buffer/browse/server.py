"""The server of the browser's page: its answers, who may ask for them, and how it is started.

The address holds a random token, which every request must have as the first part of its path. `Host` must be the
server's own, and so must `Origin`, if a request has it: so neither a page of another site nor a name that was bound to
this machine afterwards (DNS rebinding) reads or changes anything. No part of a path is used as the name of a file: the
files of the page are loaded at the start, and names of episodes and fields are looked up.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.browse.checks import Checks
from memmap_buffer.browse.episode_list import EpisodeList
from memmap_buffer.browse.one_episode import LARGE, EpisodeReader, recorded_rate
from memmap_buffer.errors import MemmapBufferError, StaleEpisodeError
from memmap_buffer.extras import extra

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from memmap_buffer import ConcatBuffer, ReplayBuffer

LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::")
HTML, SCRIPT, STYLE = (f"text/{kind}; charset=utf-8" for kind in ("html", "javascript", "css"))
PAGE = {
    "": ("index.html", HTML),
    "app.js": ("app.js", SCRIPT),
    "style.css": ("style.css", STYLE),
    "tabulator.js": ("vendor/tabulator.min.js", SCRIPT),
    "tabulator.css": ("vendor/tabulator_simple.min.css", STYLE),
    "uplot.js": ("vendor/uPlot.iife.min.js", SCRIPT),
    "uplot.css": ("vendor/uPlot.min.css", STYLE),
}
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
REFUSAL = "Open the address that was printed when the page was started: this one lacks its secret part.\n"
MAX_ROWS = 500  # of a page of the table
MAX_POINTS = 10_000  # of a curve
MAX_BODY = 1 << 20
BODY_SECONDS = 10
RATE = 10.0  # steps a second


class Page:
    """The page of a buffer, served by a thread until `close`, which `with` calls.

    Args:
        buffer: the buffer whose episodes are shown.
        title: of the page.
        places: gives the path or URL of each folder by its number; of a single folder by "".
        reward: the field whose sum is the return.
        rate: steps a second at which frames are played; None: the rate that an import stored, else 10.
        marks: the file of the marks; "" for the file in each folder; None: there are no marks.
        host: the address to listen at.
        port: the port; 0 for any.

    Attributes:
        address: of the page, with its secret part.

    Raises:
        ImportError: the extra `browse` is not installed.
        SchemaError: `reward` is no field of one number a timestep.
        OSError: the port is taken.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | ConcatBuffer,
        title: str,
        *,
        places: Callable[[], dict[str, str]],
        reward: str = "reward",
        rate: float | None = None,
        marks: str | None = None,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> None:
        with extra("browse"):
            import PIL  # noqa: F401
            import starlette  # noqa: F401
            import uvicorn
        self._answers = Answers(buffer, title, places, reward, rate or recorded_rate(buffer) or RATE, marks)
        try:
            listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError:
            self._answers.close()
            raise
        self._listening = listening.dup()
        token, port = secrets.token_urlsafe(24), listening.getsockname()[1]
        own = socket.gethostname().lower() if host in ANY else f"[{host}]" if ":" in host else host
        self.address = f"http://{own}:{port}/{token}/"
        app = Guard(
            self._answers.app(), token, {f"{name}:{port}" for name in (own, "localhost", LOOPBACK)}, host in ANY
        )
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server ends, or KeyboardInterrupt comes."""
        self._thread.join()

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join()
        with suppress(OSError):  # a forked child has this socket, too: it would accept connections and answer none
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._answers.close()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Page at {self.address}>"

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank" rel="noopener">Browse the episodes</a>'


class Guard:
    """An application behind a token, which is the first part of each path.

    Args:
        app: an ASGI application.
        token: the secret.
        hosts: the values that `Host` may have.
        by_address: whether `Host` may also be any numeric address, which the name of another site cannot be.
    """

    def __init__(self, app: Any, token: str, hosts: set[str], by_address: bool = False) -> None:
        self._app, self._token, self._hosts, self._by_address = app, token.encode(), hosts, by_address

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        first, _, rest = scope["path"].removeprefix("/").partition("/")
        mine = (host in self._hosts or (self._by_address and _is_address(host))) and origin in (None, f"http://{host}")
        if secrets.compare_digest(first.encode(errors="replace"), self._token) and mine:
            inner = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}
            await self._app(inner, receive, _adding_headers(send))
        else:
            await PlainTextResponse(REFUSAL, 403)(scope, receive, _adding_headers(send))


def _is_address(host: str) -> bool:
    """Whether a value of `Host` is a numeric address with a port."""
    import ipaddress

    try:
        ipaddress.ip_address(host.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


def _adding_headers(send: Any) -> Any:
    async def adding(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return adding


class Answers:
    """The answers to the requests of the page; arguments as for `Page`."""

    def __init__(
        self,
        buffer: ReplayBuffer | ConcatBuffer,
        title: str,
        places: Callable[[], dict[str, str]],
        reward: str,
        rate: float,
        marks: str | None,
    ) -> None:
        self.buffer, self.title, self.places, self.rate = buffer, title, places, rate
        self.list = EpisodeList(buffer, reward, marks)
        self.reader = EpisodeReader(buffer)
        self.checks = Checks(self.list, [name for name, kind in self.reader.kinds.items() if kind == "curve"])

    def close(self) -> None:
        """End the threads."""
        self.list.close()
        self.checks.close()

    def app(self) -> Any:
        """The application, without its guard."""
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route

        def file(name: str, media_type: str) -> Callable[[Request], Response]:
            content = files("memmap_buffer.browse").joinpath("page", name).read_bytes()
            return lambda _: Response(content, media_type=media_type)

        answers: dict[str, Callable[[Request], Response]] = {
            "info": self.info,
            "version": self.version,
            "episodes": self.episodes,
            "histograms": self.histograms,
            "statistics": lambda _: _json(self.checks.report()),
            "episode/{episode}": lambda request: _json(self.reader.facts(self._name(request))),
            "curve/{episode}/{field}": self.curve,
            "values/{episode}/{t:int}": self.values,
            "frame/{episode}/{field}/{t}": self.frame,
        }
        routes = [Route(f"/{path}", file(*what)) for path, what in PAGE.items()]
        routes += [Route(f"/{path}", _answering(function)) for path, function in answers.items()]
        return Starlette(routes=[*routes, Route("/marks", self.mark, methods=["POST"])])

    def info(self, request: Request) -> Response:
        columns = {name: values.dtype.kind for name, values in self.list.columns.items()}
        facts = {"title": self.title, "columns": columns, "fields": self.reader.kinds, "reward": self.list.reward}
        places = {name: shlex.quote(place) for name, place in self.places().items()}
        return _json({**facts, "rate": self.rate, "places": places, "marks": self.list.marks is not None})

    def version(self, request: Request) -> Response:
        total = len(self.list.columns["serial"])  # `columns` looks at the buffer
        return _json({"version": self.list.version, "progress": self.list.progress, "total": total})

    def episodes(self, request: Request) -> Response:
        query = request.query_params
        number, size = int(query.get("page", 1)), min(int(query.get("size", 25)), MAX_ROWS)
        return _json(self.list.page(_where(request), query.get("sort"), query.get("dir") == "desc", number, size))

    def histograms(self, request: Request) -> Response:
        return _json(self.list.histograms(_where(request)))

    def curve(self, request: Request) -> Response:
        query, field = request.query_params, request.path_params["field"]
        begin, stop = int(query.get("begin", 0)), int(query.get("stop", sys.maxsize))
        points = min(int(query.get("points", 1000)), MAX_POINTS)
        return _json(self.reader.curve(self._name(request), field, begin, stop, points, "total" in query))

    def values(self, request: Request) -> Response:
        t, final = request.path_params["t"], "final" in request.query_params
        return _json(self.reader.values(self._name(request), t, final))

    def frame(self, request: Request) -> Response:
        from starlette.responses import Response

        query, path = request.query_params, request.path_params
        size, final = int(query.get("size", LARGE)), "final" in query
        content, kind = self.reader.frame(self._name(request), path["field"], int(path["t"]), size, final)
        return Response(content, media_type=kind, headers={"cache-control": "private, max-age=600"})

    async def mark(self, request: Request) -> Response:
        import asyncio

        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect

        if self.list.marks is None or request.headers.get("content-type") != "application/json":
            return _json({"error": "marks are not changed here"}, 403)
        if int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
            return _json({"error": f"got more than {MAX_BODY} bytes"}, 413)
        try:
            body = await asyncio.wait_for(request.body(), BODY_SECONDS)
        except (ClientDisconnect, asyncio.TimeoutError):
            return _json({"error": "what was to be marked did not come"}, 408)
        return await run_in_threadpool(self._mark, body)

    def _mark(self, body: bytes) -> Response:
        import json

        try:
            wanted = json.loads(body)
            names = np.array([self.list.name_of(name) for name in wanted["episodes"]])
            indices = names[:, 0] if names.shape[1] == 1 else names
            change = {key: wanted[key] for key in ("add", "remove", "note") if key in wanted}
            gone = self.buffer.mark(indices, file=self.list.marks or None, **change)
        except (KeyError, TypeError, IndexError, ValueError, MemmapBufferError, OSError) as error:
            return _json({"error": f"nothing was marked: {error}"}, 409)
        return _json({"version": self.list.look_again(), "gone": gone})

    def _name(self, request: Request) -> tuple[int, ...]:
        return self.list.name_of(request.path_params["episode"])


def _where(request: Request) -> list[str]:
    return [text for text in request.query_params.getlist("where") if text.strip()]


def _answering(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """An endpoint that gives an answer, or the text of its error: 410 if the episode is gone, 400 or 503 for others."""

    def endpoint(request: Request) -> Response:
        try:
            return answer(request)
        except StaleEpisodeError:
            return _json({"error": "the episode is not there any more"}, 410)
        except (ValueError, ArithmeticError, MemmapBufferError) as error:
            return _json({"error": str(error)}, 400)
        except OSError as error:
            return _json({"error": str(error)}, 503)

    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(value, status)
