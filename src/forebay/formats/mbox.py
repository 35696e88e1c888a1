"""Mail: mbox files, and files of one message, plain or compressed; a document a message.

The text is that of a message's plain parts, decoded by their charsets, flowed lines joined; of its HTML part if it has
no plain one. Attachments and attached messages are no text. The subject is no part of the text: `[read.columns]` may
name `subject`, `date` (ISO 8601, in UTC) or any header, such as `from` or `list-id`. The id is the Message-ID, the
address Archived-At. A message begins with a line `From … 10:30:00 2005` after an empty one; lines `>From` lose a `>`.

A file that is not compressed is read in parts: a message is of the part in which it begins. Memory: one message.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from forebay.errors import CorruptInputError
from forebay.formats.http_message import body_text
from forebay.formats.inputs import InputSplit, ReadOptions, open_input
from forebay.formats.records import Record, column_values, malformed, shown, strip_turn_marks, without_surrogates
from forebay.formats.text import LineFormat, skip_line

_START = re.compile(rb"From [^\n]+ \d{1,2}:\d\d(?::\d\d)?[ \t][^\n]*\d{4}\b")
_STRICT = re.compile(rb"From \S+ +[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:[A-Z+-]\w+ )?\d{4}\s*$")
"""The first line of a message, even where no empty line is before it."""
_HEADER = re.compile(rb"From [^\n]*\n(?:>?[!-9;-~]+:|[ \t])")
_QUOTED = re.compile(rb"^>(>*From )", re.MULTILINE)
_ENCODINGS = ("", "7bit", "8bit", "binary", "quoted-printable", "base64", "x-uuencode", "uuencode", "uue", "x-uue")
_OTHER_TEXT = re.compile("text/(?!calendar|x-vcard|vcard|x-amp)|application/(pgp-encrypted|(x-)?pkcs7-mime)")
_ATTACHED = re.compile(
    r"^begin [0-7]{3} .*\n(?:[ -`]{1,61}\r?\n)*(?:`|\s)?\r?\n?end\b.*|^=ybegin [^\0]*?^=yend .*"
    r"|^\(This file must be converted with BinHex[^\0]*?:\s*^:[^:]*:",
    re.MULTILINE,
)
"""Files within a text: uuencode, yEnc, BinHex."""
_MAX_LINE = 1 << 20
_MAX_HEADER = 10_000
_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError)
"""What the standard library raises for malformed messages."""


class Mbox(LineFormat):
    """Files of mail."""

    name = "mbox"
    suffixes = (".mbox", ".eml", ".mht", ".mhtml")
    is_plain_text = False  # Each part says its charset.

    def sniff(self, head: bytes) -> bool:
        return _START.match(head) is not None and _HEADER.match(head) is not None

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        with open_input(split.files[0], options) as file:
            for index, (offset, data, problem) in enumerate(_messages(file, options, split.start, split.stop)):
                record = malformed(0, data, problem) if problem else _document(data, options)
                yield replace(record, index=index, location=f"byte {offset}", start=offset)


def _messages(file: BinaryIO, options: ReadOptions, start: int, stop: int) -> Iterator[tuple[int, bytes, str]]:
    """The offset and bytes of each message that begins in `[start, stop)`, without its first line, and a problem."""
    offset, is_after_blank = _first_line(file, start)
    message_start, size, lines, problem = -1, 0, list[bytes](), ""
    is_first = True
    while not problem:
        try:
            line = file.readline(_MAX_LINE)
        except CorruptInputError as error:
            line, problem = b"", str(error)
        if not line or (is_first and (_START if is_after_blank else _STRICT).match(line)):
            if message_start >= 0:
                is_large = size > options.max_document_bytes
                yield (
                    message_start,
                    b"".join(lines),
                    f"a message of {size} bytes is longer than max_document_bytes, {options.max_document_bytes}"
                    if is_large
                    else problem,
                )
            elif problem:
                yield offset, b"", problem
            if not line or (stop and offset >= stop):
                return
            message_start, size, lines = offset, 0, []
        elif message_start >= 0:
            size += len(line)
            if size <= options.max_document_bytes:
                lines.append(line)
        elif not start and line.strip():
            message_start, lines, size = offset, [line], len(line)  # What stands before the first message is none.
        is_after_blank = is_first and line in (b"\n", b"\r\n")
        is_first = line.endswith(b"\n")
        offset += len(line)


def _first_line(file: BinaryIO, start: int) -> tuple[int, bool]:
    """Go to the first line that begins at or after `start`; its offset, and whether it follows an empty line."""
    if not start:
        return 0, True
    file.seek(max(0, start - 3))
    before = file.read(min(3, start))
    if before.endswith(b"\n"):
        return start, before.endswith((b"\n\n", b"\n\r\n"))
    size = skip_line(file)
    return start + size, size == 1 and before.endswith(b"\n\r")


def _document(data: bytes, options: ReadOptions) -> Record:
    try:
        message = message_from_bytes(_QUOTED.sub(rb"\1", data))
        if not message.keys() and data.strip():
            return malformed(0, data, "a message without headers")
        plain, html = list[str](), list[str]()
        problem = _collect(message, plain, html)
        text = "\n\n".join(part for part in plain if part.strip()).strip("\r\n")
        is_html = not text and bool(html)
        name = _decoded(message.get("Message-ID", "")).strip("<> \t\r\n")
        if not text and not html:
            return Record(0, name, shown(data) if problem else "", problem=problem)
        url = _decoded(message.get("Archived-At", "")).strip("<> \t\r\n")
        values = column_values(options, lambda column: _value(message, column))
        text = strip_turn_marks((html[0] if is_html else text).replace("\r\n", "\n"))
        return Record(0, name, text, url if "://" in url else "", is_html, values=values)
    except _ERRORS as error:
        return malformed(0, data, f"a malformed message: {type(error).__name__}: {error}"[:300])


def _collect(part: "Message[Any, Any]", plain: list[str], html: list[str]) -> str:
    """Add the text of a part and those in it; return what is wrong with parts that hold none, if anything."""
    kind = part.get_content_type()
    if part.get_content_maintype() == "multipart":
        children: Any = part.get_payload()
        if not isinstance(children, list):
            return f"{kind} without its boundary"
        return next(filter(None, [_collect(child, plain, html) for child in children]), "")
    if part.get_content_disposition() == "attachment":
        return ""
    if kind not in ("text/plain", "text/html"):
        return f"expected a plain or HTML part, got {kind}" if _OTHER_TEXT.match(kind) else ""
    encoding = str(part.get("Content-Transfer-Encoding", "")).strip().lower()
    if encoding not in _ENCODINGS:
        return f"{kind} in the unknown transfer encoding {encoding[:40]!r}"
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return f"{kind} without a body"
    if any("Base64" in type(defect).__name__ for defect in part.defects):
        return f"{kind} in malformed base64"
    text = body_text(payload, part.get_content_charset("") or "", kind == "text/html")
    if "-----BEGIN PGP MESSAGE-----" in text:
        return "an encrypted message (PGP)"
    text = _ATTACHED.sub("", text)
    if kind == "text/html":
        html.append(text)
        return ""
    if str(part.get_param("format", "")).lower() == "flowed":
        text = _join_flowed(text, str(part.get_param("delsp", "")).lower() == "yes")
    plain.append(text)
    return ""


def _join_flowed(text: str, drops_space: bool) -> str:
    """The text with its soft line breaks joined: a line that ends in a blank goes on in the next (RFC 3676)."""
    lines: list[tuple[int, str]] = []
    for line in re.split("\r?\n", text.removesuffix("\n")):
        body = line.lstrip(">")
        depth = len(line) - len(body)
        body = body.removeprefix(" ")
        if lines and lines[-1][0] == depth and lines[-1][1].endswith(" ") and lines[-1][1] != "-- ":
            lines[-1] = (depth, (lines[-1][1][:-1] if drops_space else lines[-1][1]) + body)
        else:
            lines.append((depth, body))
    return "\n".join((">" * depth + " " if depth else "") + body for depth, body in lines)


def _value(message: "Message[Any, Any]", column: str) -> str:
    value = _decoded(message.get(column, ""))
    if column.lower() != "date" or not value:
        return value
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError, TypeError, IndexError):
        return ""
    return (moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


def _decoded(value: object) -> str:
    """A header's text: encoded words (RFC 2047) decoded, one line."""
    raw = str(value)[:_MAX_HEADER]
    try:
        text = str(make_header(decode_header(raw)))
    except _ERRORS:
        text = raw
    return " ".join(without_surrogates(text).split())
