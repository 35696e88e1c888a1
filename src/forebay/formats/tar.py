"""The members of a tar archive, read forward.

Hides the headers of tar (ustar, GNU, pax) and the maps of sparse members, read so that a hostile header cannot take
memory and a damaged one costs its member alone. Nothing is ever written to disk: names are only names; links and
devices that have the name of a text are members without data.

Source: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format" and
"Storing Sparse Files".
"""

import io
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from forebay.errors import CorruptInputError
from forebay.formats.inputs import ReadOptions
from forebay.storage.compression import COMPRESSIONS, MIN_UNPACKED_BYTES, unpack_stream

_BLOCK = 512
_STEP = 1 << 20
_MAX_NAME_BYTES = 64 << 10
_CUT_OFF = "the archive ends within this member"


@dataclass(frozen=True)
class Member:
    """A member, or a problem at an offset of the archive; `data` is empty if the member is of no kind that is read.

    `start` is the offset of the first header that belongs to it, at or before `offset`, its own.
    """

    name: str
    offset: int
    data: bytes = b""
    problem: str = ""
    start: int = -1

    @property
    def key(self) -> str:
        """The sample that it belongs to."""
        folder, slash, last = self.name.rpartition("/")
        return folder + slash + last.partition(".")[0]

    @property
    def kind(self) -> str:
        """Its last suffix without that of a compression, lower case."""
        return _kind(self.name)[0]


def _kind(name: str) -> tuple[str, str]:
    parts = name.rpartition("/")[2].lower().split(".")[1:]
    compression = COMPRESSIONS.get("." + parts[-1], "") if parts else ""
    if compression:
        parts.pop()
    return parts[-1] if parts else "", compression


class TarReader:
    """Reads an archive once from its front.

    Args:
        start: The offset of the stream in the archive.
        kinds: Suffixes of members whose data is read; None for all.

    Attributes:
        offset: How far the archive was read.
        has_end: Whether the archive's own end mark was read.
    """

    def __init__(
        self, file: BinaryIO, options: ReadOptions, start: int = 0, kinds: Container[str] | None = None
    ) -> None:
        self.has_end = False
        self.offset = start
        self._file, self._options, self._kinds = file, options, kinds
        self._limit = options.max_document_bytes
        self._unpacked_bytes = 0
        self._long_name, self._long_size = "", -1
        self._sparse: dict[str, str] = {}

    def __iter__(self) -> Iterator[Member]:
        is_lost, start = False, self.offset
        while True:
            offset = self.offset
            try:
                header = self._read(_BLOCK)
                if len(header) < _BLOCK:
                    if header:
                        yield Member("", offset, problem="the archive ends within a header")
                    return
                self.has_end = not any(header)
                if self.has_end:
                    start = self.offset
                    continue  # Two such blocks are the end, but archives may be joined.
                info = _parse_header(header)
                if info is None:
                    if not is_lost:
                        yield Member("", offset, problem="a damaged header", start=offset)
                    is_lost, start = True, self.offset
                    continue
                is_lost = False
                member = self._member(info, header, offset)
            except CorruptInputError as error:
                yield Member("", offset, problem=str(error))
                return
            if member is not None:
                yield replace(member, start=start)
                if member.problem.endswith(_CUT_OFF):
                    return
                start = self.offset

    def _member(self, info: tarfile.TarInfo, header: bytes, offset: int) -> Member | None:
        flag, size = header[156:157], info.size
        if flag in b"LKxgX":
            self._apply_extension(flag, self._body(size, _MAX_NAME_BYTES) or b"")
            return None
        sparse, self._sparse = self._sparse, {}
        if flag == b"S":
            sparse = self._old_sparse(header)
        name = sparse.get("name") or self._long_name or _name_of(header)
        size = self._long_size if self._long_size >= 0 else size
        self._long_name, self._long_size = "", -1
        kind, compression = _kind(name)

        def fault(text: str) -> Member:
            return Member(name, offset, problem=f"{name}: {text}")

        is_other = name.endswith("/") or "/._" in f"/{name}"  # A directory, or what macOS keeps about a file.
        if flag not in b"0\x007S" or is_other:
            self._skip(0 if b"1" <= flag <= b"6" else size)
            if flag in b"1236" and self._kinds is not None and kind in self._kinds:
                return Member(name, offset)
            is_known = is_other or flag in b"123456DNVAI"
            return None if is_known else fault(f"a member of the type {flag.decode('latin-1')!r}, which is not read")
        if self._kinds is not None and kind not in self._kinds:
            return Member(name, offset) if self._skip(size) else fault(_CUT_OFF)
        data = self._body(size, self._limit)
        if data is None:
            return fault(f"larger than max_document_bytes, {self._limit}")
        if len(data) < size:
            return fault(_CUT_OFF)
        if sparse:
            try:
                data = _expanded(data, sparse, self._limit)
            except ValueError as error:
                return fault(f"a sparse member: {error}")
        return self._unpack(name, offset, data, compression) if compression else Member(name, offset, data)

    def _unpack(self, name: str, offset: int, data: bytes, compression: str) -> Member:
        options = self._options
        try:
            with unpack_stream(
                io.BytesIO(data),
                compression,
                max_ratio=options.max_unpacked_ratio,
                max_window_bytes=options.max_window_bytes,
            ) as file:
                text = file.read(self._limit + 1)
                text += file.read(1)
        except CorruptInputError as error:
            return Member(name, offset, problem=f"{name}: {error}")
        self._unpacked_bytes += len(text)
        if self._unpacked_bytes > max(MIN_UNPACKED_BYTES, options.max_unpacked_ratio * self.offset):
            raise CorruptInputError(f"{name}: {self._unpacked_bytes} bytes were unpacked from members: a bomb.")
        if len(text) > self._limit:
            return Member(name, offset, problem=f"{name}: larger than max_document_bytes, {self._limit}")
        return Member(name, offset, text)

    def _apply_extension(self, flag: bytes, body: bytes) -> None:
        if flag == b"L":
            self._long_name = body.rstrip(b"\0").decode("utf-8", "replace")
        elif flag == b"x":
            keywords = _parse_pax(body)
            self._long_name = keywords.get("path", self._long_name)
            start = "GNU.sparse."
            self._sparse = {key.removeprefix(start): value for key, value in keywords.items() if key.startswith(start)}
            size = keywords.get("size", "")
            self._long_size = int(size) if size.isascii() and size.isdigit() and len(size) < 20 else -1

    def _old_sparse(self, header: bytes) -> dict[str, str]:
        entries, more = header[386:482], header[482]
        while more and len(block := self._read(_BLOCK)) == _BLOCK and len(entries) < self._limit:
            entries, more = entries + block[:504], block[504]
        numbers = [entries[i : i + 12] for i in range(0, len(entries), 12)]
        places = [_number(field) for field in numbers if field[0]]
        return {"map": ",".join(places), "size": _number(header[483:495])}

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.offset += len(data)
        return data

    def _body(self, size: int, limit: int) -> bytes | None:
        if size > limit:
            self._skip(size)
            return None
        data = self._read(size)
        if len(data) == size:
            self._read(-size % _BLOCK)
        return data

    def _skip(self, size: int) -> bool:
        remaining = size + -size % _BLOCK
        while remaining and (data := self._read(min(remaining, _STEP))):
            remaining -= len(data)
        return remaining < _BLOCK  # Some writers leave out the last padding.


def _parse_header(header: bytes) -> tarfile.TarInfo | None:
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "replace")
    except tarfile.HeaderError:
        return None
    return info if info.size >= 0 else None


def _name_of(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "replace")


def _number(field: bytes) -> str:
    """A number of a header in decimal digits: octal ones, or bytes after one of 128."""
    text = field.strip(b" \0")
    number = int.from_bytes(field[1:]) if field[0] & 128 else -1 if text.strip(b"01234567") else int(text or b"0", 8)
    return str(number)


def _expanded(data: bytes, sparse: dict[str, str], limit: int) -> bytes:
    """A sparse member with its holes: its map is in the headers, or (1.0) lines before the data."""
    numbers = [int(number) for number in sparse.get("map", "").split(",") if number]
    if sparse.get("major") == "1":
        count = 2 * int(data[:20].partition(b"\n")[0])
        lines = data.split(b"\n", count + 1)[: count + 1]
        numbers = [int(line) for line in lines[1:]]
        used = sum(map(len, lines)) + len(lines)
        data = data[used + -used % _BLOCK :]
    size = int(sparse.get("realsize") or sparse.get("size") or 0)
    if size > limit:
        raise ValueError(f"larger than max_document_bytes, {limit}")
    text, offset = bytearray(size), 0
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        if not 0 <= start <= start + length <= size:
            raise ValueError("a map that leads beyond it")
        text[start : start + length] = data[offset : offset + length]
        offset += length
    if offset != len(data) or len(text) != size:
        raise ValueError(f"a map of {offset} bytes, got {len(data)}")
    return bytes(text)


def _parse_pax(body: bytes) -> dict[str, str]:
    """Keywords and values of a pax header: `length keyword=value newline`, repeated."""
    keywords: dict[str, str] = {}
    start = 0
    while start < len(body):
        digits, _, _ = body[start : start + 20].partition(b" ")
        if not digits.isdigit() or int(digits) <= len(digits):
            break
        keyword, _, value = body[start + len(digits) + 1 : start + int(digits) - 1].partition(b"=")
        name, text = keyword.decode("utf-8", "replace"), value.decode("utf-8", "replace")
        if name in ("GNU.sparse.offset", "GNU.sparse.numbytes"):
            name, text = "GNU.sparse.map", f"{keywords.get('GNU.sparse.map', '')},{text}"
        keywords[name] = text
        start += int(digits)
    return keywords
