"""HTTP responses as crawlers store them, and their bodies as text.

Hides chunks, content encodings, and how a page's character set is found. Crawlers often undo chunks and encodings and
leave the headers as they were: a body that does not decode as its headers say is used as it is if it looks like text,
and one that is packed without a header is unpacked. What is in a coding that is not known has a `problem`.
"""

import io
import re
from dataclasses import dataclass

from forebay.errors import CorruptInputError
from forebay.formats.encodings import binary_kind, find_encoding
from forebay.storage.compression import sniff_compression, unpack_stream

MAX_HEAD_BYTES = 256 << 10
_HEAD_END = re.compile(rb"\n\r{0,4}\n")
_STATUS = re.compile(rb"HTTP/\S{1,8}[ \t]+(\d{3})\b")
_INTERIM = re.compile(rb"\A(?:HTTP/\S{1,8}[ \t]+1\d\d\b[^\n]*\n(?:[^\r\n][^\n]*\n)*+\r?\n){1,8}")  # `100 Continue`.
_LENGTH = re.compile(rb"\ncontent-length[ \t]{0,8}:[ \t]{0,8}(\d{1,15})\b", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]{0,1000})?\r?\n")
_CHARSET = re.compile(r"charset\s{0,8}=\s{0,8}[\"']?([A-Za-z0-9_.:+-]{1,40})", re.IGNORECASE)
_META = re.compile(
    rb"<(?:meta[^>]{0,500}?charset|\?xml[^>]{0,200}?encoding)\s{0,8}=\s{0,8}[\"']?\s{0,8}([A-Za-z0-9_.:+-]{1,40})",
    re.IGNORECASE,
)
_HTML_START = re.compile(rb"\s{0,200}(?:<!--.{0,500}?-->\s{0,200})?<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+")
_MAX_CODINGS = 4
_CODINGS = {"gzip": "gz", "x-gzip": "gz", "deflate": "deflate", "zstd": "zst", "br": "br", "bzip2": "bz2", "xz": "xz"}
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_SEVEN_BIT = re.compile(r"iso-?2022|hz|utf-?16|utf-?7|utf-?32|unicode-1-1-utf-7", re.IGNORECASE)
_NOT_HTML5 = re.compile(r"iso-?2022|hz|utf-?7|utf-?32|unicode-1-1-utf-7|(?:cp|ibm|x-cp)\d|johab", re.IGNORECASE)
"""Encodings that browsers do not know, for which the library says `utf-8`."""


@dataclass(frozen=True)
class Response:
    """An HTTP response, its body decoded. `status` is 0, `mime` and `charset` are "" if the response lacks them.

    `problem`: why the body is no text. `cut`: why it is only the beginning of one.
    """

    status: int
    mime: str
    charset: str
    body: bytes
    problem: str = ""
    cut: str = ""


def parse_http(block: bytes, max_bytes: int) -> Response:
    """Return the response in a record's block; its body unpacked to at most `max_bytes`."""
    block = _INTERIM.sub(b"", block)
    match = _HEAD_END.search(block, 0, MAX_HEAD_BYTES)
    head, body = (block[: match.start()], block[match.end() :]) if match else (block[:MAX_HEAD_BYTES], b"")
    status = _STATUS.match(head)
    headers = parse_headers(head.decode("latin-1"))
    mime = headers.get("content-type", "")
    charset = _CHARSET.search(mime)
    body, problem, cut = _decoded(
        body, f"{headers.get('content-encoding', '')},{headers.get('transfer-encoding', '')}", max_bytes
    )
    return Response(int(status[1]) if status else 0, mime, charset[1] if charset else "", body, problem, cut)


def parse_headers(head: str) -> dict[str, str]:
    """Return the headers after a first line, names in lower case: the first of several, but all codings of a body.

    A line that begins blank continues the one before.
    """
    headers: dict[str, str] = {}
    name = ""
    for line in head.split("\n")[1:]:
        if line[:1] in (" ", "\t") and name:
            headers[name] += " " + line.strip()
        elif ":" in line:
            name, value = map(str.strip, line.split(":", 1))
            name = name.lower()
            if name in ("content-encoding", "transfer-encoding") and name in headers:
                value = f"{headers.pop(name)}, {value}"
            headers.setdefault(name, value)
    return headers


def http_complete(block: bytes) -> bool:
    """Return whether a response has as many bytes as its own Content-Length, though its record claims more."""
    match = _HEAD_END.search(block, 0, MAX_HEAD_BYTES)
    length = _LENGTH.search(block, 0, match.start()) if match else None
    return match is not None and length is not None and len(block) - match.end() >= int(length[1])


def media_type(header: str) -> str:
    """Return the type in a header Content-Type, the first of several; "" if it has none."""
    match = _MEDIA_TYPE.search(header)
    return match[0].lower() if match else ""


def is_html(mime: str, body: bytes) -> bool:
    """Return whether it is HTML by its type or, if it has none, by its first bytes."""
    kind = media_type(mime)
    return kind in _HTML_TYPES or (not kind and _HTML_START.match(body[:2048]) is not None)


def _unchunk(body: bytes) -> tuple[bytes, str]:
    """The body without its chunks' lines; as it is if it has none; up to the damage if one is wrong (RFC 9112, 7.1)."""
    parts: list[bytes] = []
    offset = 0
    while match := _CHUNK.match(body, offset):
        size, offset = int(match[1], 16), match.end()
        if size == 0:
            return b"".join(parts), ""
        parts.append(body[offset : offset + size])
        offset += size
        if body[offset : offset + 2] == b"\r\n":
            offset += 2
        elif body[offset : offset + 1] == b"\n":
            offset += 1
        elif offset != len(body):
            is_chunk = len(parts) > 1 or (offset > len(body) and parts[0].lstrip().startswith(b"<"))
            return (b"".join(parts), "a chunked body that ends early") if is_chunk else (body, "")
    return (b"".join(parts), "") if parts else (body, "")


def _decoded(body: bytes, codings: str, max_bytes: int) -> tuple[bytes, str, str]:
    """The body, why it is no text, and why it is not all of it."""
    names = [name for name in (name.strip().lower() for name in codings.split(",")) if name]
    if len(names) > _MAX_CODINGS:
        return b"", f"a body with more than {_MAX_CODINGS} codings", ""
    cut = problem = ""
    while body and not problem and (names or sniff_compression(body)):
        name = names.pop() if names else ""
        if name.endswith("chunked"):
            body, cut = _unchunk(body)
        else:
            body, problem, ended = _unpacked(body, name, max_bytes)
            cut = cut or ended
            if not name and not ended and sniff_compression(body):
                break
    return body, problem, cut


def _unpacked(body: bytes, name: str, max_bytes: int) -> tuple[bytes, str, str]:
    is_zlib = body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    compression = sniff_compression(body) or _CODINGS.get(name, "")
    if compression in ("gz", "deflate") and is_zlib:
        compression = "zlib"
    text, reason = b"", f"in the coding {name!r}, which is not read"
    looks_coded = binary_kind(body[:4096]) or not re.search(rb"[\s<]", body[:4096])
    if compression:
        with unpack_stream(io.BytesIO(body), compression, max_ratio=1 << 40) as stream:
            try:
                text = stream.read(max_bytes + 1)
                if len(text) > max_bytes:
                    reason = f"that {name or compression} unpacks to more than max_document_bytes = {max_bytes}"
                    return b"", f"a body {reason}", ""
                stream.read(1)
                return text, "", ""
            except CorruptInputError as error:
                reason = f"in the coding {name or compression}: {error}".rstrip(".")
        if text and ("ends early" in reason or "Truncated" in reason):
            return text, "", f"a body {reason}"
        if text and "header check" in reason:  # Bytes that follow the last member.
            return text, "", ""
    return (b"", f"a body {reason}", "") if text or looks_coded else (body, "", "")


def body_text(body: bytes, charset: str, html: bool) -> str:
    """Return the body as text: by its byte order mark, as UTF-8 if valid, else as header or page say, else as detected.

    UTF-8 goes before what header and page say: other encodings hardly ever form valid UTF-8, and many a page's header
    is wrong. Encodings that look like ASCII or hold NULs (ISO-2022-JP, UTF-16) are tried first.
    """
    for mark, name in _BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    meta = _META.search(body, 0, 2048) if html else None
    named = [name for name in (charset, meta[1].decode("ascii") if meta else "") if name]
    first = [name for name in named if _SEVEN_BIT.match(name) and b"<" not in body[:1] * html]
    for name in (*first, "utf-8", *named):
        try:
            return body.decode(_html5(name))
        except (UnicodeDecodeError, LookupError):
            continue
    return _detected(body, named)


def _html5(name: str) -> str:
    """The encoding that browsers use for a name: `iso-8859-1` is windows-1252 (WHATWG Encoding, 4.2)."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    mapped = map_encoding_to_html5(name)
    return name if mapped == "utf-8" and _NOT_HTML5.match(name) else mapped or name


def _detected(body: bytes, named: list[str]) -> str:
    """Text that is not valid in the encoding that it names: what cannot be decoded becomes U+FFFD."""
    for name in (*map(_html5, named), find_encoding(body) or "utf-8"):
        try:
            text = body.decode(name, "replace")
        except LookupError:
            continue
        if text.count("\ufffd") * 20 <= len(text):
            return text
    return body.decode("utf-8", "replace")
