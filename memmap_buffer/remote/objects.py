"""`Objects`: objects under a URL, read and written by path through fsspec, with retries and time-outs.

Nothing else speaks to a store, and nothing here knows of buffers. A request that fails is tried again, unless that
cannot help; in the end it raises RemoteError. Its text, like every text here, shows URLs without user, password and
query, as these are credentials.
"""

from __future__ import annotations

import asyncio
import errno
import re
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memmap_buffer.errors import RemoteError, SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.syscalls import after_fork, process_id, random_bytes

TRIES, FIRST_PAUSE, LONGEST_PAUSE = 6, 0.1, 10.0  # seconds; each pause is twice the one before
TIMEOUT, SLOWEST = 20.0, 1 << 18  # a request may take so many seconds, and one more for each so many bytes
IN_FLIGHT, BYTES_IN_FLIGHT = 64, 64 << 20  # the most ranges, and the most bytes, that are requested at a time
PART = 8 << 20  # bytes of a large object that are sent at a time
MOST_PARTS = 9000  # S3 takes 10,000
SYNCED = 1 << 26  # bytes, at `SLOWEST`, of others that may have to reach a disk before an object does: four minutes
LISTING = 1 << 30  # bytes that a listing of all objects may have, at `SLOWEST`: a thousand of S3's are a request
NO_RANGES = "the server sends the whole object, it has no ranges"
Range = tuple[str, int, int]
Result = TypeVar("Result")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/?#\s'\"<>)]*@)?([^?#\s'\"<>)]*)([?#][^\s'\"<>)]*)?")
_HOPELESS = (ImportError, LookupError, NotImplementedError, PermissionError, TypeError, ValueError)
_HOPELESS_NAMES = (  # of botocore and azure-core, which need not be there
    "NoCredentialsError",
    "PartialCredentialsError",
    "ClientAuthenticationError",
    "CredentialUnavailableError",
)
_RETRIED_STATUS = (408, 425, 429)
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_TIMES = ("LastModified", "mtime", "created", "last_modified", "updated")  # when an object was written, by stores
_CHANGED_NAMES = ("PreconditionFailed", "ConditionalRequestConflict", "ConditionNotMet", "BlobAlreadyExists")
_STARTED = int.from_bytes(random_bytes(4), "little")  # processes of other hosts may have the same number as this one
_file_systems: list[Any] = []  # all that were opened, kept: else a forked child would drop and so close its parent's


def shown(text: str) -> str:
    """A text without the users, passwords and queries of the URLs in it."""
    return _URL.sub(lambda match: match[1] + match[3], text)


class Stored(NamedTuple):
    """An object in the store: its bytes, and when it was written, in seconds as `time.time`; None: it does not tell."""

    size: int
    written: float | None

    def is_older(self, seconds: float) -> bool:
        """Whether it was written so long ago; not where the store does not tell."""
        return self.written is not None and self.written < time.time() - seconds


class _Unfit(Exception):
    """The error for an answer that is not what was asked for. Args: again: whether another try may help."""

    def __init__(self, what: str, again: bool = True) -> None:
        super().__init__(what)
        self.again = again


class _Line:
    """Room for the ranges that are in flight, given in the order in which they ask for it.

    Their bytes are bounded, too: many large ranges that share a bandwidth would all arrive at the same moment, and
    nothing would arrive while they are checked and written.
    """

    def __init__(self) -> None:
        self._room, self._turn, self._room_freed = BYTES_IN_FLIGHT, asyncio.Lock(), asyncio.Event()

    async def enter(self, size: int) -> int:
        """Wait until a range of `size` bytes has room; returns the room, which is given back by `leave`."""
        size = min(max(size, BYTES_IN_FLIGHT // IN_FLIGHT), BYTES_IN_FLIGHT)
        async with self._turn:
            while self._room < size:
                self._room_freed.clear()
                await self._room_freed.wait()
            self._room -= size
        return size

    def leave(self, room: int) -> None:
        """Give the room back of a range that is not in flight any more."""
        self._room += room
        self._room_freed.set()


class _Opened(NamedTuple):
    """The file system of a URL, as this process has opened it."""

    process: int
    fs: Any
    root: str
    loop: asyncio.AbstractEventLoop
    line: _Line


class Objects:
    """The objects under a URL. It pickles, and a forked child makes connections of its own.

    Args:
        url: any URL that fsspec knows, or a path.
        storage_options: options for the file system of fsspec, such as credentials.
        tries: how often a request is made before it is given up.
        timeout: seconds that a request may take, besides the seconds that its bytes take at `SLOWEST`.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        tries: int = TRIES,
        timeout: float = TIMEOUT,
    ) -> None:
        self.url, self.storage_options = str(url), dict(storage_options or {})
        self._tries, self._timeout = tries, timeout
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __str__(self) -> str:
        return shown(self.url)

    def name_of(self, path: str) -> str:
        """The URL of an object, without credentials."""
        return f"{shown(self.url).rstrip('/')}/{path}".rstrip("/")

    def read(self, path: str, limit: int) -> bytes | None:
        """A small object whole; None if there is none.

        Raises:
            RemoteError: it has more than `limit` bytes, or the store fails.
        """

        async def request() -> bytes:
            data = await self._get(path, 0, limit + 1, exact=False)
            if len(data) > limit:
                raise _Unfit(f"it has more than {limit} bytes", again=False)
            return data

        return self._run_or(None, "read", path, request, min(limit, PART))

    def read_ranges(self, ranges: Sequence[Range], check: Callable[[int, bytes], bool] | None = None) -> list[bytes]:
        """The bytes of each (path, start, stop), as `stream` fetches them."""
        return [data for _, data in sorted(self.stream(ranges, check))]

    def stream(
        self, ranges: Sequence[Range], check: Callable[[int, bytes], bool] | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(i, the bytes of the i-th (path, start, stop)), as they come; many requests are in flight.

        Args:
            ranges: none of them empty.
            check: (i, bytes) -> whether the bytes are right; if not, they are fetched again. Called in other threads.

        Raises:
            RemoteError: a range could not be fetched.
        """
        asked: dict[Future[bytes | RemoteError], int] = {}
        try:
            for i, wanted in enumerate(ranges):
                asked[self._submit(_outcome(self._read_range(i, wanted, check)))] = i
            for future in as_completed(asked):
                i, outcome = asked.pop(future), future.result()
                if isinstance(outcome, RemoteError):
                    raise outcome
                yield i, outcome
        finally:
            for future in reversed(asked):  # the last one first: else the room of one would go to the next that waits
                future.cancel()

    def write(self, path: str, data: bytes | Path) -> None:
        """Make or replace an object, by bytes or by the content of a file, which is sent a part at a time.

        In a folder of this machine it is on the disk at return, but for the names of new folders.

        Raises:
            RemoteError: the store fails, or cannot be written to.
        """
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        place = self._path(path)
        new = place if self._writes_whole else f"{place}.{process_id()}{_STARTED}.new"
        folder = None if self.local is None else Folder(Path(place).parent)

        async def send() -> None:
            options = {"retry_total": 0} if self._is_azure else {}  # as for `_get_from_azure`
            if isinstance(data, Path):
                if self._is_s3:
                    options["chunksize"] = max(PART, size // MOST_PARTS)
                await self._call("put_file", str(data), new, **options)
            else:
                await self._call("pipe_file", new, data, **options)
            if folder is not None:
                await asyncio.to_thread(folder.sync_array, Path(new).name)
            if new != place:
                await self._call("mv", new, place)
            if folder is not None:
                await asyncio.to_thread(_sync_names, folder)

        async def request() -> None:
            try:
                await send()
            except FileNotFoundError:
                if self._open().fs.async_impl:  # an object store has no folders: `makedirs` would make a bucket
                    raise
                await self._call("makedirs", new.rpartition("/")[0], exist_ok=True)
                await send()

        self._run("write", path, request, size if folder is None else size + SYNCED)

    def size(self, path: str) -> int | None:
        """The number of bytes of an object; None if there is none."""

        async def request() -> int:
            return _stored(await self._asked("info", self._path(path))).size

        return self._run_or(None, "size", path, request)

    def listing(self, path: str = "") -> dict[str, Stored]:
        """All objects below a folder, by their paths; none if there is no such folder."""

        async def request() -> dict[str, Stored]:
            facts = await self._asked("find", self._path(path), detail=True)
            root = self._path("") + "/"
            return {name[len(root) :]: _stored(each) for name, each in facts.items() if name.startswith(root)}

        return self._run_or({}, "list", path, request, LISTING)

    def remove(self, path: str) -> None:
        """Remove an object; one that is not there is fine."""
        self._run_or(None, "remove", path, lambda: self._call("rm_file", self._path(path)))

    def remove_older(self, path: str, seconds: float) -> bool:
        """Remove an object if, by a look directly before, it was written so long ago; whether it was removed."""

        async def request() -> bool:
            if not _stored(await self._asked("info", self._path(path))).is_older(seconds):
                return False
            await self._call("rm_file", self._path(path))
            return True

        return self._run_or(False, "remove", path, request)

    # The one object that several processes may replace

    @property
    def writable(self) -> bool:
        """Whether objects can be made and listed: a plain HTTP server can do neither."""
        return not hasattr(self._open().fs, "encode_url")

    @property
    def replaces_on_condition(self) -> bool:
        """Whether the store can refuse to replace an object that has changed."""
        return self._is_s3 or self._is_azure

    @property
    def local(self) -> Path | None:
        """The folder that the URL names, if it is on this machine; else None."""
        return Path(self._open().root) if "file" in self._protocols else None

    def read_tagged(self, path: str, limit: int) -> tuple[bytes, str]:
        """(the bytes of an object, a tag that changes with them); (b"", "") if there is no such object."""
        fs, (bucket, key, _) = self._open().fs, self._open().fs.split_path(self._path(path))

        def require(size: int) -> None:
            if size > limit:
                raise _Unfit(f"it has more than {limit} bytes", again=False)

        async def from_s3() -> tuple[bytes, str]:
            reply = await fs._call_s3("get_object", Bucket=bucket, Key=key)
            require(reply["ContentLength"])
            async with reply["Body"] as body:
                return await body.read(), reply["ETag"]

        async def from_azure() -> tuple[bytes, str]:
            data, tag = await _get_from_azure(fs, self._path(path), 0, limit + 1)
            require(len(data))
            return data, tag

        request = from_s3 if self._is_s3 else from_azure
        return self._run_or((b"", ""), "read", path, request, min(limit, PART))

    def replace_tagged(self, path: str, data: bytes, tag: str) -> bool:
        """Replace an object if its tag is still `tag`, or with "" make one if there is none; False if it is not so."""
        fs, (bucket, key, _) = self._open().fs, self._open().fs.split_path(self._path(path))

        async def to_s3() -> None:
            condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
            await fs._call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)

        async def to_azure() -> None:
            from azure.core import MatchConditions

            condition = {"etag": tag, "match_condition": MatchConditions.IfNotModified} if tag else {}
            async with fs.service_client.get_blob_client(bucket, key) as blob:
                await blob.upload_blob(data, overwrite=bool(tag), retry_total=0, **condition)

        async def request() -> bool:
            try:
                await (to_s3() if self._is_s3 else to_azure())
            except Exception as error:
                if _has_changed(error):
                    return False
                raise
            return True

        return self._run("replace", path, request, len(data))

    # Requests

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is not None and opened.process == process_id():
            return opened
        with extra("remote"):
            import fsspec.asyn
            import fsspec.core
        try:
            fs, root = fsspec.core.url_to_fs(self.url, **self.storage_options)
        except (ValueError, TypeError) as error:
            text = shown(str(error))
            raise SchemaError(f"{self}: {text}; give a URL and storage_options that fsspec takes") from None
        if fs.async_impl and not any(fs is other for other in _file_systems):
            _file_systems.append(fs)
        loop = fs.loop if fs.async_impl else fsspec.asyn.get_loop()
        self._opened = _Opened(process_id(), fs, root, loop, _Line())
        return self._opened

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocol = self._open().fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    @property
    def _is_s3(self) -> bool:
        return hasattr(self._open().fs, "_call_s3")

    @property
    def _is_azure(self) -> bool:
        return "abfs" in self._protocols

    @property
    def _writes_whole(self) -> bool:
        """Whether an object appears only when all of it was sent: object stores do that, file systems do not."""
        return self._open().fs.async_impl or bool(set(self._protocols) & {"memory", "hf"})

    def _path(self, path: str) -> str:
        root, mark, query = self._open().root.partition("?")
        return f"{root.rstrip('/')}/{path}{mark}{query}".rstrip("/")

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._open().loop)
        except BaseException:
            work.close()
            raise

    def _run(self, what: str, path: str, request: Callable[[], Awaitable[Result]], size: int = 0) -> Result:
        future = self._submit(self._try(what, path, request, size))
        try:
            return future.result()
        finally:
            future.cancel()  # after an interruption, end the request that it waited for

    def _run_or(
        self, absent: Result, what: str, path: str, request: Callable[[], Awaitable[Result]], size: int = 0
    ) -> Result:
        """The result of a request; `absent` if there is no such object."""
        try:
            return self._run(what, path, request, size)
        except RemoteError as error:
            if error.missing:
                return absent
            raise

    async def _try(
        self, what: str, path: str, request: Callable[[], Awaitable[Result]], size: int = 0, line: _Line | None = None
    ) -> Result:
        """The result of a request, made once the line has room for it, and made again after a failure that may pass."""
        pause, error = FIRST_PAUSE, Exception()
        for attempt in range(1, self._tries + 1):
            room = 0 if line is None else await line.enter(size)
            try:
                return await asyncio.wait_for(request(), self._timeout + size / SLOWEST)
            except Exception as failure:
                error = failure
            finally:
                if line is not None:
                    line.leave(room)
            if attempt == self._tries or not _may_pass(error):
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        url, missing = self.name_of(path), _is_missing(error)
        came = "there is none" if missing else _description(error)
        raise RemoteError(
            f"{url}: {what}: {came} (tries: {attempt}); {_remedy(error, missing)}",
            url=url,
            asked=what,
            came=came,
            tries=attempt,
            missing=missing,
        ) from None  # the text of the cause may contain credentials

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method of the file system, called in another thread unless it is asynchronous."""
        fs = self._open().fs
        if fs.async_impl:
            return await getattr(fs, f"_{method}")(*arguments, **options)
        return await asyncio.to_thread(getattr(fs, method), *arguments, **options)

    async def _asked(self, method: str, *arguments: Any, **options: Any) -> Any:
        """As `_call`, by the store itself rather than by what the file system keeps of earlier answers."""
        self._open().fs.invalidate_cache()
        return await self._call(method, *arguments, **options)

    async def _read_range(self, i: int, wanted: Range, check: Callable[[int, bytes], bool] | None) -> bytes:
        path, start, stop = wanted

        async def request() -> bytes:
            data = await self._get(path, start, stop, exact=True)
            if len(data) > stop - start:
                raise _Unfit(NO_RANGES, again=False)
            if len(data) < stop - start:
                raise _Unfit(f"got {len(data)} bytes")
            if check is not None and not await asyncio.to_thread(check, i, data):
                raise _Unfit("its bytes have another digest than those that were published")
            return data

        return await self._try(f"bytes {start} to {stop}", path, request, stop - start, line=self._open().line)

    async def _get(self, path: str, start: int, stop: int, exact: bool) -> bytes:
        opened = self._open()
        if hasattr(opened.fs, "encode_url"):
            return await _get_by_http(opened.fs, self._path(path), start, stop, exact)
        if self._is_azure:
            return (await _get_from_azure(opened.fs, self._path(path), start, stop))[0]
        data: bytes = await self._call("cat_file", self._path(path), start=start, end=stop)
        return data


def _after_fork() -> None:
    """Reset the lock under which fsspec makes its loop: another thread may have held it, and fsspec does not do so."""
    if "fsspec.asyn" in sys.modules:
        sys.modules["fsspec.asyn"].reset_lock()


after_fork(_after_fork)


def _sync_names(folder: Folder) -> None:
    """Have the names in a folder on the disk; where its file system cannot do that, fsync(2) gives EINVAL."""
    try:
        folder.sync_folders("")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


async def _outcome(work: Coroutine[Any, Any, bytes]) -> bytes | RemoteError:
    """The result of a request, or its error as a value: asyncio logs a raised error that nobody retrieves, and only
    the first of many errors is retrieved.
    """
    try:
        return await work
    except RemoteError as error:
        return error


async def _get_by_http(fs: Any, url: str, start: int, stop: int, exact: bool) -> bytes:
    """The bytes start … stop - 1 of a URL, at most one more. Not by fsspec: from a server without ranges it would read
    the whole object, however large it is.
    """
    options = dict(fs.kwargs)
    headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), headers=headers, **options) as reply:
        if reply.status in (404, 410):
            raise FileNotFoundError(url)
        if reply.status == 416:
            raise _Unfit("it has fewer bytes")
        reply.raise_for_status()
        if exact and reply.status != 206:
            raise _Unfit(NO_RANGES, again=False)
        data, bytes_left = bytearray(), stop - start + exact
        if reply.content_length is not None and reply.content_length <= bytes_left:
            whole: bytes = await reply.read()
            return whole
        while bytes_left > 0 and (part := await reply.content.read(bytes_left)):
            data += part
            bytes_left -= len(part)
        return bytes(data)


async def _get_from_azure(fs: Any, path: str, start: int, stop: int) -> tuple[bytes, str]:
    """The bytes start … stop - 1 of a blob, and its tag. Not by adlfs: azure-core would wait 15 s before it tries
    again, so that the time is over before the store's answer is known.
    """
    container, key, _ = fs.split_path(path)
    async with fs.service_client.get_blob_client(container, key) as blob:
        reply = await blob.download_blob(start, stop - start, retry_total=0)
        return await reply.readall(), reply.properties.etag


def _stored(facts: Mapping[str, Any]) -> Stored:
    """An object by what a file system tells of it."""
    size = facts.get("size")
    if type(size) is not int:
        raise _Unfit("the store does not tell how large it is", again=False)
    times = (_seconds(facts[name]) for name in _TIMES if name in facts)
    return Stored(size, next((seconds for seconds in times if seconds is not None), None))


def _seconds(value: Any) -> float | None:
    """A time as file systems tell it, a number, a `datetime` or a text, as seconds."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    return float(value) if isinstance(value, (int, float)) else None


def _status(error: Exception) -> int:
    """The HTTP status that an error is about; 0 if there is none."""
    # fsspec may raise another error, whose cause has the status.
    names = ("status", "status_code")  # of aiohttp and most others, of azure-core
    statuses = (getattr(cause, name, None) for cause in (error, error.__cause__) for name in names)
    return next((status for status in statuses if isinstance(status, int)), 0)


def _is_missing(error: Exception) -> bool:
    status = _status(error)
    return status in (404, 410) if status else isinstance(error, _MISSING)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, _Unfit):
        return error.again
    status = _status(error)
    if status:
        return status >= 500 or status in _RETRIED_STATUS
    hopeless = isinstance(error, _HOPELESS) or type(error).__name__ in _HOPELESS_NAMES or _is_at_exit(error)
    return not (hopeless or _is_missing(error) or getattr(error, "errno", None) == errno.EINVAL)


def _is_at_exit(error: Exception) -> bool:
    """Whether a request failed for want of a thread: while the program ends no new ones can be started."""
    return isinstance(error, RuntimeError) and "shutdown" in str(error)


def _has_changed(error: BaseException | None) -> bool:
    """Whether a conditional write was refused because the object has changed."""
    while error is not None:
        response = getattr(error, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if code in ("412", "409", *_CHANGED_NAMES) or any(name in str(error) for name in _CHANGED_NAMES):
            return True
        error = error.__cause__
    return False


def _description(error: Exception) -> str:
    if isinstance(error, _Unfit):
        return str(error)
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    text = shown(str(error)).replace("\n", " ")[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _remedy(error: Exception, missing: bool) -> str:
    if missing:
        return "check the URL, or publish it"
    if _is_at_exit(error):
        return "nothing is sent or fetched while the program ends; close() what needs it earlier"
    if isinstance(error, PermissionError) or _status(error) in (401, 403) or type(error).__name__ in _HOPELESS_NAMES:
        return "check the credentials (storage_options)"
    if isinstance(error, _Unfit) and not error.again:
        return "check the URL and the server"
    return "check the store and the way to it, then try again"
