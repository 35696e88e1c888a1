"""Requests out of bytes, strictly, so that nobody reads one where another reads two. Pure: no sockets here.

HTTP/1.1 as our clients and common programs write it: lines end in CR LF, names are tokens, values are printable
ASCII; no folded lines, no second Content-Length or Host, no Transfer-Encoding. Whatever is else is refused, and the
connection ends with the refusal.

What the choice costs: an exotic client gets 400. In return a head takes some 10 us, a fifth of the stdlib's parser.
"""

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

MAX_BODY_BYTES = 1 << 20
MAX_HEAD_BYTES = 32 << 10
MAX_LINE_BYTES = 24 << 10
MAX_HEADERS = 64
METHODS = ("GET", "POST")
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e]*)")
_ONCE = frozenset({"content-length", "content-type", "expect", "host", "origin", "range"})


class RefusedError(Exception):
    """Bytes that are no request of ours; `discard`: how many more the client is about to send for it."""

    def __init__(self, status: int, code: str, message: str, discard: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.discard = discard


class Headers(Mapping[str, str]):
    """Header values by name, in any case."""

    def __init__(self, lower: dict[str, str]) -> None:
        self._lower = lower

    def __getitem__(self, name: str) -> str:
        return self._lower[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._lower

    def __iter__(self) -> Iterator[str]:
        return iter(self._lower)

    def __len__(self) -> int:
        return len(self._lower)


@dataclass(frozen=True)
class Head:
    """A request's line and headers. `length`: of the body, bytes; `keep`: whether the client may ask again."""

    method: str
    path: str
    query: dict[str, str]
    headers: Headers
    length: int
    keep: bool


class Incoming:
    """The bytes of one connection, of which requests are cut as they become whole."""

    __slots__ = ("_data", "_head", "_line_checked", "_searched")

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: Head | None = None
        self._line_checked = False
        self._searched = 0

    @property
    def phase(self) -> Literal["rest", "head", "body"]:
        """What is awaited: a request's first byte, the end of its head, or of its body."""
        if self._head is not None:
            return "body"
        return "head" if self._data else "rest"

    @property
    def missing_bytes(self) -> int:
        """Of the body that is coming in; 0 while none is."""
        return self._head.length - len(self._data) if self._head is not None else 0

    def feed(self, piece: bytes) -> None:
        """Add what was read."""
        self._data += piece

    def next(self) -> tuple[Head, bytes] | None:
        """The next whole request, cut off; None if there is none yet.

        Raises:
            RefusedError: If it is none that this server takes; nothing after it can be read.
        """
        if self._head is None and not self._cut_head():
            return None
        head = self._head
        assert head is not None
        if len(self._data) < head.length:
            return None
        body = bytes(memoryview(self._data)[: head.length])
        del self._data[: head.length]
        self._head, self._line_checked, self._searched = None, False, 0
        return head, body

    def _cut_head(self) -> bool:
        data = self._data
        end = data.find(b"\r\n\r\n", max(0, self._searched - 3), MAX_HEAD_BYTES + 4)
        self._searched = len(data)
        if end < 0:
            self._check_line()  # garbage is told at once, not when it ends
            if len(data) > MAX_HEAD_BYTES:
                raise RefusedError(431, "refused", f"expected a head of at most {MAX_HEAD_BYTES} bytes")
            return False
        self._head = parse_head(bytes(memoryview(data)[:end]))
        del data[: end + 4]
        return True

    def _check_line(self) -> None:
        """Looks at the request line once it is there."""
        data = self._data
        if self._line_checked:
            return
        if (newline := data.find(b"\n", 0, MAX_LINE_BYTES + 2)) >= 0:
            if newline == 0 or data[newline - 1] != 13:
                raise RefusedError(400, "bad_request", "expected lines that end in CR LF")
            _request_line(data[: newline - 1].decode("latin-1"))
            self._line_checked = True
        elif len(data) > MAX_LINE_BYTES:
            raise RefusedError(414, "refused", f"expected a request line of at most {MAX_LINE_BYTES} bytes")


def parse_head(data: bytes) -> Head:
    """A request's head, without the empty line that ends it.

    Raises:
        RefusedError: If it is not strictly one.
    """
    try:
        line, *lines = data.decode("ascii").split("\r\n")
    except UnicodeDecodeError as error:
        raise RefusedError(400, "bad_request", "expected a head of ASCII") from error
    method, target, version = _request_line(line)
    if len(lines) > MAX_HEADERS:
        raise RefusedError(431, "refused", f"expected at most {MAX_HEADERS} headers, got {len(lines)}")
    headers: dict[str, str] = {}
    for text in lines:
        match = _HEADER.fullmatch(text)
        if match is None:
            raise RefusedError(400, "bad_request", f"expected a header NAME: VALUE, got {text[:80]!r}")
        name, value = match.group(1).lower(), match.group(2).rstrip(" \t")
        if name in headers:
            if name in _ONCE:
                raise RefusedError(400, "bad_request", f"expected one {name}, got several")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    length = _body_length(headers)
    if "expect" in headers:
        raise RefusedError(417, "refused", "expected the body with the head, not an Expect header", length)
    path, _, query = target.partition("?")
    options = [option.strip().lower() for option in headers.get("connection", "").split(",")]
    pairs = dict(urllib.parse.parse_qsl(query, keep_blank_values=True)) if query else {}
    return Head(method, path, pairs, Headers(headers), length, version == "1.1" and "close" not in options)


def status_line(status: int) -> str:
    """What an answer begins with."""
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"


def _request_line(line: str) -> tuple[str, str, str]:
    """Method, target and version."""
    if len(line) > MAX_LINE_BYTES:
        raise RefusedError(414, "refused", f"expected a request line of at most {MAX_LINE_BYTES} bytes")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise RefusedError(400, "bad_request", f"expected METHOD /PATH HTTP/1.1, got {line[:80]!r}")
    method, target, version = match.group(1), match.group(2), f"{match.group(3)}.{match.group(4)}"
    if version not in ("1.0", "1.1"):
        raise RefusedError(505, "refused", f"expected HTTP/1.1, got HTTP/{version}")
    if method not in METHODS:
        raise RefusedError(501, "refused", f"expected {' or '.join(METHODS)}, got {method}")
    if not target.startswith("/") or "#" in target:
        raise RefusedError(400, "bad_request", f"expected a path from /, got {target[:80]!r}")
    return method, target, version


def _body_length(headers: dict[str, str]) -> int:
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdigit():
        raise RefusedError(400, "bad_length", f"expected a Content-Length alone, got {length[:40]!r}")
    if len(length) > 12 or int(length) > MAX_BODY_BYTES:
        message = f"expected a body of at most {MAX_BODY_BYTES} bytes, got {length[:20]}"
        raise RefusedError(413, "too_large", message, min(int(length[:12]), 8 * MAX_BODY_BYTES))
    return int(length)
