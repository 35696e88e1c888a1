"""The `Origin` protocol that all sources of bytes implement, its errors, and the simplest origin, a local directory.

An origin is one URL below which objects have names. It reads byte ranges and stores nothing; `fetch`
retries, resumes, chooses among origins and verifies. The errors say what the caller can do: `TransientError` (try
again), `PermanentError` (this origin will not send the object), `UsageError` (wrong URL or installation).
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, ForebayError, NetworkError, UsageError
from forebay.files import open_below
from forebay.storage.retry import backoff_s, log_while_waiting

log = logging.getLogger("forebay.storage")
CHUNK_BYTES = 256 << 10  # read between two checks of the time; 4 x this is no faster on loopback
_FIRST_WAIT_S = 0.25
_T = TypeVar("_T")
_ENV_NAMES = (
    "DATASET_BINS_PATH",
    *(f"R2_DATASET_{name}" for name in ("ACCOUNT_ID", "BUCKET_NAME", "ENDPOINT")),
    *(f"R2_DATASET_{right}_{name}" for right in ("READ", "WRITE") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")),
)
_ENV_LINE = re.compile(
    r"""\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(?:'([^']*)'|"([^"]*)"|([^\s'"#][^\s'"]*)?)\s*((?<!\S)#.*)?""", re.ASCII
)
_OWN_LINE = re.compile(r"\s*(?:export\s+)?(?:R2_DATASET_|DATASET_BINS_PATH\b)")


class TransientError(NetworkError):
    """A fault that another try may not have, after `tries` in `elapsed_s`.

    `wait_s`: what the origin asked to wait; `throttled`: it is overloaded.
    """

    tries, elapsed_s = 1, 0.0

    def __init__(self, message: str, *, wait_s: float = 0.0, throttled: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.throttled = throttled


class PermanentError(NetworkError):
    """An origin will not send an object: it does not exist, or access is denied.

    `status` is the HTTP status, 0 if there is none; `code` is the hub's own code (X-Error-Code).
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ChangedError(PermanentError):
    """The ETag or size of an object changed while it was downloaded."""


@dataclass(frozen=True)
class ObjectMeta:
    """Size and ETag of an object (or time of change). It changes with the bytes; empty if the origin sends none."""

    bytes: int
    etag: str


@dataclass(frozen=True)
class Timeouts:
    """Limits of one request in seconds: to connect, and until some bytes must have come."""

    connect_s: float = 10.0
    stall_s: float = 30.0

    @classmethod
    def within(cls, timeout_s: float) -> Timeouts:
        """Return the defaults, or shorter ones if several requests must fit into `timeout_s`."""
        return cls(min(cls.connect_s, timeout_s / 4), min(cls.stall_s, timeout_s / 4))


class Origin(Protocol):
    """Objects below one URL. Threads share it. It connects at the first request."""

    url: str  # for messages; contains no secret
    is_last: bool = False  # whether it is asked only where no other source can be
    is_steered: bool = False  # whether others name the sources: a slow one is reported, and another is named
    is_renamed: bool = False  # whether a source that refused, or was slow, may be named again: it is asked again then
    table: SliceTable | None = None  # of the dataset there, once that is open

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes [start, stop) of an object; each chunk is valid until the next is requested.

        A broken body yields fewer bytes, never more. Close the iterator to cancel the request.

        Raises:
            TransientError: If another try may succeed.
            PermanentError: If no other try will.
            ProtocolError: If the response is of another range.
        """

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return a small object. Errors as of `read`; PermanentError if it is larger than `max_bytes`."""
        raise PermanentError(f"{self.url}: expected the name of a slice, got {name}")

    def size(self, name: str) -> int:
        """Return the bytes of an object. Errors as of `read`; UsageError if the origin does not say it."""
        return as_object_origin(self).head(name).bytes

    def leaves(self, name: str, info: SliceInfo) -> bytes:
        """Return the hashes of the chunks of a slice, not verified. Errors as of `read`."""
        raise PermanentError(f"{self.url}: has no hashes of the chunks of {name}")

    def sources(self) -> Sequence[Origin]:
        """Return the origins to request from one by one: itself, or the peers of a dataset. May look them up."""
        return [self]

    def report(self, source: Origin, error: NetworkError) -> bool:
        """A request to one of the `sources` failed. Return whether these have changed."""
        return False

    def verified(self, num_bytes: int) -> None:
        """Bytes that one of the `sources` sent have their hash."""
        return


class ObjectOrigin(Origin, Protocol):
    """An origin that tells the size and ETag of its objects."""

    def head(self, name: str) -> ObjectMeta:
        """Return size and ETag of an object. Errors as of `read`."""

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        """See Origin. ChangedError if the object has another ETag."""


class PinnedOrigin(Origin):
    """One version of the objects of an origin."""

    def __init__(self, origin: ObjectOrigin, etag: str) -> None:
        self._origin, self._etag, self.url = origin, etag, origin.url

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        return self._origin.read(name, start, stop, self._etag)


def as_object_origin(origin: Origin) -> ObjectOrigin:
    """Return the origin if it can describe its objects, else raise UsageError; peers cannot."""
    if not hasattr(origin, "head"):
        raise UsageError(f"{origin.url}: expected a directory, http(s)://, s3://, r2://, gs:// or az://. Give one.")
    return cast(ObjectOrigin, origin)


def check_etag(what: str, expected: str, etag: str) -> None:
    """Raise ChangedError if both ETags are known and differ."""
    if expected and etag and expected != etag:
        raise ChangedError(f"{what} changed while it was read: expected ETag {expected}, got {etag}")


@dataclass(frozen=True)
class Patience:
    """When a request is sent again: after a TransientError, `tries` times in all and for `timeout_s`.

    The pauses double from 0.25 s up to `max_wait_s` and a quarter of `timeout_s`. One that the server asks for is kept
    if there is a `timeout_s`, else cut to `max_wait_s`.
    """

    tries: float = math.inf
    timeout_s: float = math.inf
    max_wait_s: float = 15.0

    def retry(self, attempt: Callable[[], _T], what: str, stop: threading.Event | None = None) -> _T:
        """Return the result of `attempt`; a line says what it waits for, and the last fault.

        Raises the last TransientError, with `tries` and `elapsed_s`, also once `stop` is set; another error at once.
        """
        began, answer, failures = time.monotonic(), "no response yet", 0
        with log_while_waiting(log, lambda: f"{what}: {answer}"):
            while True:
                try:
                    return attempt()
                except TransientError as error:
                    answer, failures = str(error).removeprefix(f"{what}: "), failures + 1
                    error.tries, error.elapsed_s = failures, time.monotonic() - began
                    asked_s = error.wait_s if self.timeout_s < math.inf else min(error.wait_s, self.max_wait_s)
                    longest_s = min(self.max_wait_s, self.timeout_s / 4)
                    pause_s = backoff_s(failures, _FIRST_WAIT_S, longest_s, asked_s)
                    if failures >= self.tries or error.elapsed_s + pause_s >= self.timeout_s:
                        raise
                    if stop is None:
                        time.sleep(pause_s)
                    elif stop.wait(pause_s):
                        raise

    def ask(self, attempt: Callable[[], _T], what: str, stop: threading.Event | None = None) -> _T:
        """Return what `retry` does.

        Raises:
            DatasetError: If the object does not exist or access is denied.
            NetworkError: If the origin is unreachable.
        """
        try:
            return self.retry(attempt, what, stop)
        except PermanentError as error:
            raise DatasetError(f"{error}. Check the URL, the name and the credentials.") from error
        except TransientError as error:
            raise NetworkError(
                f"{what}: no answer after {error.tries} attempts in {error.elapsed_s:.1f} s; the last: "
                f"{str(error).removeprefix(f'{what}: ')}. Check the network and the endpoint, then run the same "
                "command again."
            ) from error


_SMALL = Patience(timeout_s=25.0)


def read_range(
    origin: Origin, name: str, start: int, stop: int, patience: Patience, what: str = ""
) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of an object; a cut connection is resumed, and each byte begins the patience again.

    A chunk is valid until the next is requested. `what`: in the log. Errors as of Origin.read.
    """
    body = None

    def next_chunk() -> memoryview:
        nonlocal body
        body = body or origin.read(name, start, stop)
        try:
            if (chunk := next(body, None)) is not None:
                return chunk
            raise TransientError(f"the connection was closed {stop - start} bytes before the end")
        except TransientError:
            body = None
            raise

    while start < stop:
        chunk = patience.retry(next_chunk, what or f"{name} from {origin.url}")
        start += len(chunk)
        body = body if start < stop else None  # The connection is free before the last chunk is used.
        yield chunk


def read_whole(origin: Origin, name: str, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of an object, all of one response. Errors as of Origin.read; also if it is cut."""
    data = b"".join(map(bytes, origin.read(name, start, stop)))
    if len(data) < stop - start:
        raise TransientError(f"the connection was closed {stop - start - len(data)} bytes before the end")
    return data


def read_small(origin: Origin, name: str, max_bytes: int, *, start: int | None = None) -> bytes:
    """Return a small object, or with `start` the `max_bytes` bytes from there on. Errors as of `Patience.ask`."""

    def attempt() -> bytes:
        return origin.get(name, max_bytes) if start is None else read_whole(origin, name, start, start + max_bytes)

    return _SMALL.ask(attempt, f"{name} from {origin.url}")


def head_object(
    origin: ObjectOrigin, name: str, *, timeout_s: float = 300.0, stop: threading.Event | None = None
) -> ObjectMeta:
    """Return size and ETag of an object. Errors as of `Patience.ask`."""
    return Patience(timeout_s=timeout_s).ask(lambda: origin.head(name), f"{name} from {origin.url}", stop)


def download(body: Callable[[int], Iterator[memoryview]], size: int, path: Path, *, resumes: bool) -> int:
    """Append to a file what it lacks of `size` bytes, from `body(start)`; return `start`, 0 if a longer one is dropped.

    What was received is in the file after an error, too.
    """
    with path.open("ab") as out:
        if not resumes or out.tell() > size:
            out.truncate(0)
        start = out.seek(0, os.SEEK_END)
        for chunk in body(start):
            out.write(chunk)
            out.flush()
    return start


class PathOrigin(ObjectOrigin):
    """A directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def head(self, name: str) -> ObjectMeta:
        try:
            with open_below(self.folder, name) as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            raise _path_error(error) from error
        return ObjectMeta(status.st_size, f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}")

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names of the files that begin with `prefix`, without those of subdirectories."""
        return sorted(path.name for path in self.folder.glob(f"{prefix}*") if path.is_file())

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        if etag:
            check_etag(str(self.folder / name), etag, self.head(name).etag)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(stop - start, 1))))
        try:
            with open_below(self.folder, name) as file:
                file.seek(start)
                while start < stop and (count := cast("io.BufferedReader", file).readinto(buffer[: stop - start])):
                    start += count
                    yield buffer[:count]
        except OSError as error:
            raise _path_error(error) from error
        if start < stop:
            raise PermanentError(f"{self.folder / name} ends at byte {start}, before {stop}")

    def get(self, name: str, max_bytes: int) -> bytes:
        if (size := self.head(name).bytes) > max_bytes:
            raise PermanentError(f"{self.folder / name} is larger than {max_bytes} bytes")
        return read_whole(self, name, 0, size)


def origin_of(dataset: Dataset) -> Origin:
    """Return the origin of a dataset's files: its directory, if it is local."""
    return getattr(dataset, "origin", None) or PathOrigin(dataset.path.absolute())


def _path_error(error: OSError) -> ForebayError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)):
        return PermanentError(f"{error.filename}: {error.strerror}")
    return TransientError(str(error))


def require_env(name: str, user: str) -> str:
    """Return an environment variable that `user` needs; UsageError, without any value, if it is not set or empty."""
    value = read_env(name)
    if not value:
        problem = "it is empty" if name in os.environ else "got none"
        raise UsageError(f"{user}: expected the environment variable {name}, {problem}. Set it.")
    return value


def read_env(name: str) -> str:
    """Return an environment variable; where it is not set or empty, that of the file FOREBAY_ENV_FILE, or ""."""
    if not os.environ.get(name) and (path := os.environ.get("FOREBAY_ENV_FILE")):
        load_env_file(path)
    return os.environ.get(name, "")


def load_env_file(path: str | Path) -> None:
    """Set the variables of a file that the environment has not, or has empty: lines `KEY=VALUE`, quoted or not.

    Only `R2_DATASET_*` and `DATASET_BINS_PATH` are taken from it; other lines may be anything. Raises UsageError,
    without any value, if it cannot be read, or one of these lines or names is wrong.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {type(error).__name__}. Check the path and its permissions."
        ) from None
    for number, line in enumerate(lines, 1):
        match = _ENV_LINE.fullmatch(line)
        if not _OWN_LINE.match(line):
            if match is not None and match[1].startswith(("AWS_", "GOOGLE_", "AZURE_")) and match[1] not in os.environ:
                log.warning("%s:%d: %s is not read. Set it in the environment.", path, number, match[1])
            continue
        if match is None:
            raise UsageError(f"{path}:{number}: expected KEY=VALUE. Quote a value with spaces.")
        name, value = match[1], match[2] or match[3] or match[4] or ""
        if name not in _ENV_NAMES:
            raise UsageError(f"{path}:{number}: expected one of {', '.join(_ENV_NAMES)}, got {name}. Correct it.")
        os.environ[name] = os.environ.get(name) or value
