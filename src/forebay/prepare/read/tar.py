"""Tar files as WebDataset writes them: members with the same name up to the first dot are one sample.

Hides: the headers of tar (ustar, GNU, pax), which are read here and not by `tarfile`, so that a hostile header cannot
take memory and a damaged one costs its member alone; and which member of a sample holds its text. Nothing is ever
written to disk: names are only names, links are passed over.

Source: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

import io
import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from forebay.formats.compression import COMPRESSIONS
from forebay.prepare.documents import Record
from forebay.prepare.read.base import Format, Piece, ReadOptions
from forebay.prepare.read.lines import parse_line, whole_record
from forebay.prepare.read.opening import MIN_UNPACKED_BYTES, Damaged, open_source, skip_to, unpack

_BLOCK = 512
_STEP = 1 << 20
_NAME_BYTES = 64 << 10
_TEXTS = ("txt", "text", "json", "jsonl", "html", "htm")
_SHOWN = 200
_MAX_MEMBERS = 1000


@dataclass(frozen=True)
class Member:
    """A member, or a problem at a place of the archive; `data` is empty if the member is of no kind that is wanted.

    `start` is where the headers begin that belong to it, at or before `position`, its own.
    """

    name: str
    position: int
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
    """The kind of a member and its compression, by its suffixes."""
    parts = name.rpartition("/")[2].lower().split(".")[1:]
    packed = COMPRESSIONS.get("." + parts[-1], "") if parts else ""
    if packed:
        parts.pop()
    return parts[-1] if parts else "", packed


def _read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    places = itertools.count()
    with open_source(piece.sources[0], options) as file:
        skip_to(file, piece.start)
        members = Members(file, options, piece.start)
        for _, group in itertools.groupby(members.all(), lambda m: (m.key, m.problem and m.position)):
            sample = _bounded(group, options)
            for index, record in enumerate(_sample(sample, options)):
                yield replace(record, place=next(places), start=-1 if index else sample[0].start)


def _bounded(group: Iterator[Member], options: ReadOptions) -> list[Member]:
    """The members of a sample; one with a problem if they are more than memory should hold."""
    members: list[Member] = []
    size = 0
    for member in group:
        size += len(member.data)
        if size > 2 * options.max_document_bytes or len(members) == _MAX_MEMBERS:
            problem = f"a sample of more than {_MAX_MEMBERS} members, or twice max_document_bytes"
            members = [replace(members[0], data=b"", problem=problem)]
            break
        members.append(member)
    return members


def _sample(members: list[Member], options: ReadOptions) -> Iterator[Record]:
    """The documents of a sample: its plain text if it has some, else what its JSON or HTML holds."""
    first = members[0]
    if first.problem:
        yield Record(0, first.name, problem=first.problem, where=f"byte {first.position}")
        return
    by_kind = {member.kind: member for member in reversed(members) if member.kind in _TEXTS}
    chosen = next((by_kind[kind] for kind in _TEXTS if kind in by_kind), None)
    if chosen is None:
        names = ", ".join(member.name for member in members)[:_SHOWN]
        yield Record(0, first.key, problem=f"no text member among {names}", where=first.name)
        return
    told = parse_line(0, by_kind["json"].data, options) if "json" in by_kind else None
    if chosen.kind == "jsonl":
        for index, line in enumerate(chosen.data.splitlines()):
            if line.strip():
                yield _named(parse_line(0, line, options), f"{chosen.key}:{index}", f"{chosen.name}, line {index + 1}")
    elif chosen.kind == "json":
        assert told is not None
        yield _named(told, chosen.key, chosen.name)
    else:
        name, url = (told.id or chosen.key, told.url) if told is not None else (chosen.key, "")
        record = whole_record(0, chosen.data, chosen.name, chosen.kind in ("html", "htm"))
        yield replace(record, id=name, url="" if record.problem else url, where=chosen.name)


def _named(record: Record, name: str, where: str) -> Record:
    problem = "an empty member" if record.problem == "blank" else record.problem
    return Record(0, record.id or name, record.text, record.url, problem=problem, where=where)


class Members:
    """Walks through an archive; counts the bytes so that it can say where it is.

    `kinds` are the suffixes of members whose data is read; None for all.
    """

    def __init__(
        self, file: BinaryIO, options: ReadOptions, start: int = 0, kinds: Container[str] | None = _TEXTS
    ) -> None:
        self.has_end = False  # Whether the archive's own mark of its end was seen.
        self._kinds = kinds
        self._file = file
        self._options = options
        self._limit = options.max_document_bytes
        self._at = start
        self._unpacked_bytes = 0
        self._long_name = ""
        self._long_size = -1

    def all(self) -> Iterator[Member]:
        """Members in order: regular files, and problems. After a damaged header it seeks the next sound one."""
        lost, start = False, self._at
        while True:
            position = self._at
            try:
                header = self._take(_BLOCK)
                if len(header) < _BLOCK:
                    if header:
                        yield Member("", position, problem="the archive ends within a header")
                    return
                self.has_end = not any(header)
                if self.has_end:
                    start = self._at
                    continue  # two such blocks are the end, but archives may be joined
                size = _sound(header)
                if size is None:
                    if not lost:
                        yield Member("", position, problem="a damaged header", start=position)
                    lost, start = True, self._at
                    continue
                lost = False
                member = self._member(header, position, size)
            except Damaged as error:
                yield Member("", position, problem=str(error))
                return
            if member is not None:
                yield replace(member, start=start)
                if member.problem.endswith(_ENDS):
                    return
                start = self._at

    def _member(self, header: bytes, position: int, size: int) -> Member | None:
        flag = header[156:157]
        if flag in b"LKxg":
            self._remember(flag, self._body(size, _NAME_BYTES) or b"")
            return None
        name = self._long_name or _name(header)
        size = self._long_size if self._long_size >= 0 else size
        self._long_name, self._long_size = "", -1
        if flag not in (b"0", b"\0", b"7") or name.endswith("/"):
            self._skip(0 if b"1" <= flag <= b"6" else size)
            return None
        kind, packed = _kind(name)
        if self._kinds is not None and kind not in self._kinds:
            whole = self._skip(size)
            return Member(name, position, problem="" if whole else f"{name}: {_ENDS}")
        data = self._body(size, self._limit)
        if data is None:
            return Member(name, position, problem=f"{name}: larger than max_document_bytes, {self._limit}")
        if len(data) < size:
            return Member(name, position, problem=f"{name}: {_ENDS}")
        return self._unpacked(name, position, data, packed) if packed else Member(name, position, data)

    def _unpacked(self, name: str, position: int, data: bytes, packed: str) -> Member:
        try:
            options = self._options
            with unpack(io.BytesIO(data), packed, options) as file:
                text = file.read(self._limit + 1)
                text += file.read(1)
        except Damaged as error:
            return Member(name, position, problem=f"{name}: {error}")
        self._unpacked_bytes += len(text)
        if self._unpacked_bytes > max(MIN_UNPACKED_BYTES, options.max_unpacked_ratio * self._at):
            raise Damaged(f"{name}: {self._unpacked_bytes} bytes were unpacked from members: a bomb.")
        if len(text) > self._limit:
            return Member(name, position, problem=f"{name}: larger than max_document_bytes, {self._limit}")
        return Member(name, position, text)

    def _remember(self, flag: bytes, body: bytes) -> None:
        if flag == b"L":
            self._long_name = body.rstrip(b"\0").decode("utf-8", "replace")
        elif flag == b"x":
            found = _pax(body)
            self._long_name = found.get("path", self._long_name)
            size = found.get("size", "")
            self._long_size = int(size) if size.isascii() and size.isdigit() and len(size) < 20 else -1

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        self._at += len(data)
        return data

    def _body(self, size: int, limit: int) -> bytes | None:
        """The data of a member; None if it is larger than the limit, and then passed over."""
        if size > limit:
            self._skip(size)
            return None
        data = self._take(size)
        if len(data) == size:
            self._take(-size % _BLOCK)
        return data

    def _skip(self, size: int) -> bool:
        left = size + -size % _BLOCK
        while left and (data := self._take(min(left, _STEP))):
            left -= len(data)
        return left < _BLOCK  # some writers leave out the last padding


_ENDS = "the archive ends within this member"


def _sound(header: bytes) -> int | None:
    """The size that a header gives, None if its checksum does not match."""
    told = _number(header[148:156])
    if told is None or told != sum(header[:148]) + 8 * 32 + sum(header[156:]):
        return None
    return _number(header[124:136])


def _number(field: bytes) -> int | None:
    if field[0] & 0x80:  # GNU: base 256
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.strip(b" \0")
    return int(digits or b"0", 8) if all(48 <= digit < 56 for digit in digits) else None


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "replace")


def _pax(body: bytes) -> dict[str, str]:
    """Keywords and values of a pax header: `length keyword=value newline`, over and over."""
    found: dict[str, str] = {}
    at = 0
    while at < len(body):
        digits, _, _ = body[at : at + 20].partition(b" ")
        if not digits.isdigit() or int(digits) <= len(digits):
            break
        keyword, _, value = body[at + len(digits) + 1 : at + int(digits) - 1].partition(b"=")
        found[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        at += int(digits)
    return found


TAR = Format("webdataset", _read)
