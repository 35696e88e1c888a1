"""What every source of bytes has in common: the `Origin` protocol, its errors, and a local directory as the simplest.

An origin is one URL below which objects are named as in the dataset's table. It reads byte ranges and keeps nothing:
retries, resuming, choice among origins and verification are done by `storage.transfers`. Its errors say what the caller
may do: `TransientError` (ask again, perhaps later), `PermanentError` (this origin will not give the object),
`UsageError` (the URL or the installation is wrong).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from forebay.errors import DatasetError, ForebayError, NetworkError, UsageError
from forebay.network.retry import backoff_s, waiting

log = logging.getLogger("forebay.storage")
_T = TypeVar("_T")
STEP_BYTES = 256 << 10  # as much as lies between two looks at the clock; 4 x this is no faster on loopback
_SMALL_S = 25.0
_SMALL_TRIES, _SMALL_WAIT_S, _SMALL_MOST_S = 8, 0.25, 4.0  # Where 3 of 10 fail, 1 start in 15 000 does.


class TransientError(NetworkError):
    """A fault that may pass. `wait_s`: what the origin asked to wait; `throttled`: it said that it is too busy."""

    def __init__(self, message: str, *, wait_s: float = 0.0, throttled: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.throttled = throttled


class PermanentError(NetworkError):
    """An origin will not give an object, however often it is asked: not there, or not for us.

    `status` is the HTTP status, 0 if it is none; `code` is what the hub says beside it (X-Error-Code).
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ChangedError(PermanentError):
    """An object is another one than the one that was begun with: its ETag or its size changed."""


@dataclass(frozen=True)
class Head:
    """What an origin says of an object. `etag` changes with its bytes; empty if the origin tells none."""

    bytes: int
    etag: str


@dataclass(frozen=True)
class Timeouts:
    """How long one request may take: to connect, and between two looks at which bytes must have come."""

    connect_s: float = 10.0
    stall_s: float = 30.0

    @classmethod
    def within(cls, patience_s: float) -> Timeouts:
        """The usual limits, or less, so that several requests fit into so many seconds."""
        return cls(min(cls.connect_s, patience_s / 4), min(cls.stall_s, patience_s / 4))


class Origin(Protocol):
    """Objects below one URL. Threads share it; it opens nothing before it is asked."""

    url: str  # names it in messages; holds no secret

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop) of the object `name`, in pieces; each is valid until the next is asked for.

        Fewer bytes mean that the body broke off; never more. Close the iterator to give it up.

        Raises:
            TransientError: If another try may succeed.
            PermanentError: If none will.
            ProtocolViolation: If it answers other than the range that was asked for.
        """

    def get(self, name: str, max_bytes: int) -> bytes:
        """A whole small object; errors as of `read`, and PermanentError if it is larger than `max_bytes`."""
        raise PermanentError(f"{self.url}: expected a slice to be asked for, got {name}")

    def sources(self) -> Sequence[Origin]:
        """Who is asked one by one: itself, or the peers that stand behind it now. May look them up."""
        return [self]


class HeadOrigin(Origin, Protocol):
    """An origin that describes objects, and can hold them to what it said."""

    def head(self, name: str) -> Head:
        """Size and ETag of an object. Errors as of `read`."""

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        """As of Origin; ChangedError if the object has another ETag than the one given."""


def check_etag(what: str, wanted: str, got: str) -> None:
    """Raise ChangedError where an origin tells another ETag than before."""
    if wanted and got and wanted != got:
        raise ChangedError(f"{what} changed while it was read: expected ETag {wanted}, got {got}")


def retry_transient(attempt: Callable[[], _T], tries: int, first_wait_s: float, max_wait_s: float) -> _T:
    """The result of `attempt`, repeated after a TransientError with back-off; the last one is raised."""
    for tried in range(1, tries):
        try:
            return attempt()
        except TransientError as error:
            time.sleep(min(max_wait_s, backoff_s(tried, first_wait_s, max_wait_s, error.wait_s)))
    return attempt()


def read_small(
    origin: Origin,
    name: str,
    max_bytes: int,
    *,
    start: int | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> bytes:
    """A whole small object, or with `start` the `max_bytes` bytes from there on; asked for up to eight times within
    some 15 s, or 25 s where each answer takes long.

    DatasetError if the origin says that it is not there, or not for us; NetworkError if it cannot be had now.
    """
    began, answers = time.monotonic(), ["no answer yet"]
    for tried in range(1, _SMALL_TRIES + 1):
        try:
            with waiting(log, lambda: f"{name} from {origin.url}: {answers[-1]}"):
                if start is None:
                    return origin.get(name, max_bytes)
                data = b"".join(map(bytes, origin.read(name, start, start + max_bytes)))
                if len(data) < max_bytes:
                    raise TransientError(f"{name} broke off after {len(data)} of {max_bytes} bytes")
                return data
        except PermanentError as error:
            raise DatasetError(
                f"{origin.url}: expected a dataset, with {name}, got: {error}. Check the URL and the credentials."
            ) from error
        except TransientError as error:
            answers.append(str(error))
            if tried == _SMALL_TRIES or time.monotonic() - began > _SMALL_S:
                raise NetworkError(
                    f"{name} from {origin.url}: no whole answer after {tried} attempts in "
                    f"{time.monotonic() - began:.1f} s; the last: {error}. Check the network and the endpoint."
                ) from error
            sleep(backoff_s(tried, _SMALL_WAIT_S, _SMALL_MOST_S, error.wait_s))
    raise AssertionError


class PathOrigin(HeadOrigin):
    """A directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def head(self, name: str) -> Head:
        try:
            found = (self.folder / name).stat()
        except OSError as error:
            raise _path_error(error) from error
        return Head(found.st_size, f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}")

    def names(self, prefix: str) -> list[str]:
        """Of the objects that begin so, sorted; not below directories."""
        return sorted(path.name for path in self.folder.glob(f"{prefix}*") if path.is_file())

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        if etag:
            check_etag(str(self.folder / name), etag, self.head(name).etag)
        buffer = memoryview(bytearray(min(STEP_BYTES, max(stop - start, 1))))
        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                file.seek(start)
                while start < stop and (got := file.readinto(buffer[: stop - start])):
                    start += got
                    yield buffer[:got]
        except OSError as error:
            raise _path_error(error) from error
        if start < stop:
            raise PermanentError(f"{self.folder / name} ends at byte {start}, before {stop}")

    def get(self, name: str, max_bytes: int) -> bytes:
        try:
            with (self.folder / name).open("rb") as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise _path_error(error) from error
        return at_most(data, max_bytes, str(self.folder / name))


def at_most(data: bytes, max_bytes: int, what: str) -> bytes:
    """`data`, or PermanentError if there is more of it than `max_bytes`."""
    if len(data) > max_bytes:
        raise PermanentError(f"{what} is larger than {max_bytes} bytes")
    return data


def _path_error(error: OSError) -> ForebayError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)):
        return PermanentError(f"{error.filename}: {error.strerror}")
    return TransientError(str(error))


def environment(name: str, why: str) -> str:
    """An environment variable that must be set; the error names it and no value."""
    value = os.environ.get(name, "")
    if not value:
        raise UsageError(f"{why}: expected the environment variable {name}, got none. Set it.")
    return value
