"""What a file is: a format of the registry, decided by content first and by name second.

`prepare`, `stream`, `convert` and `doctor` all ask here, so a file is the same to each of them. Content decides where
it is distinctive (magic numbers, checksums, a first line that parses). The suffix decides between formats that fit the
content equally, and alone where content says nothing (CSV, headerless tokens). A file whose suffix promises data and
which holds an HTML page or a Git LFS pointer has no format but a `problem`. Reads 64 KiB, up to 1 MB of bzip2.
"""

import codecs
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from forebay.formats.base import formats, get_format
from forebay.formats.external import reading
from forebay.storage.compression import COMPRESSIONS, sniff_compression, unpacked_head

HEAD_BYTES = 4096
SAMPLE_BYTES = 64 << 10
RAW_TOKENS = "raw tokens"
ARCHIVES = {b"PK\x03\x04": "a ZIP archive", b"7z\xbc\xaf'\x1c": "a 7-Zip archive", b"Rar!\x1a\x07": "a RAR archive"}
HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--[^>]*-->\s*)*<(!doctype html|html)", re.IGNORECASE)
_MAY_BE_HTML = ("", "html", "text", "api")


@dataclass(frozen=True)
class Detection:
    """What a file is."""

    format: str  # Its format's name; "" if it is of none, then `reason` says what it is instead.
    compression: str = ""  # "" or `gz`, `zst`, `bz2`, `xz`, `lz4`.
    reason: str = ""  # What decided.
    problem: str = ""  # If it is not what its name promises: what was expected, what it is, and what to do.
    encoding: str = ""  # Of text that is not UTF-8, by Python's name; else "".


def detect(source: Path | BinaryIO, name: str | None = None) -> Detection:
    """Return the format of a file or an open stream, by its first bytes and its name.

    By default the name is the path's; of a stream without one the content alone decides.
    """
    if isinstance(source, Path):
        with reading(source), source.open("rb") as file:
            return detect(file, source.name if name is None else name)
    sample, name = source.read(SAMPLE_BYTES), name or ""
    compression = sniff_compression(sample)
    if compression:
        source.seek(0)
        sample = unpacked_head(source, compression, SAMPLE_BYTES)
    detection = _detected(sample[:HEAD_BYTES], compression, name)
    # Bytes of no format may be text in UTF-16, which looks like binary data.
    is_text = not detection.format or get_format(detection.format).is_plain_text
    if not detection.problem and is_text and (encoding := find_encoding(sample)):
        text = codecs.getincrementaldecoder(encoding)("replace").decode(sample).encode("utf-8", "replace")
        return replace(_detected(text[:HEAD_BYTES], compression, name), encoding=encoding)
    return detection


def format_of_suffix(name: str) -> str:
    """Return the format that a file's suffix stands for, without the compression's; "" if none."""
    name = name.lower()
    stem, _, last = name.rpartition(".")
    name = stem if "." + last in COMPRESSIONS else name
    matches = [(len(suffix), entry.name) for entry in formats() for suffix in entry.suffixes if name.endswith(suffix)]
    return max(matches, key=lambda match: match[0])[1] if matches else ""


def _detected(head: bytes, compression: str, name: str) -> Detection:
    by_name = format_of_suffix(name)
    if not head:
        return Detection(by_name, compression, "an empty file")
    problem = _find_placeholder(head, by_name)
    if problem:
        return Detection("", compression, problem.partition(". ")[0], problem)
    by_content = [entry.name for entry in formats() if entry.sniff(head)]
    if by_content:
        return Detection(by_name if by_name in by_content else by_content[0], compression, "its first bytes")
    archive = next((name for magic, name in ARCHIVES.items() if head.startswith(magic)), "")
    if by_name == RAW_TOKENS and (archive or (len(head) >= 16 and is_text(head))):
        by_name = ""
    if by_name:
        return Detection(by_name, compression, "its suffix")
    if is_text(head):
        return Detection("text", compression, "text of no particular format")
    return Detection("", compression, archive or "binary data of no known format")


def _find_placeholder(head: bytes, by_name: str) -> str:
    expected = f"expected {by_name or 'data'}{', as its name says' if by_name else ''}"
    if head.startswith(b"version https://git-lfs.github.com/spec/") and len(head) < 1024:
        return f"{expected}, got a pointer of Git LFS. Run `git lfs pull` to fetch the file itself."
    if by_name not in _MAY_BE_HTML and HTML.match(head.removeprefix(codecs.BOM_UTF8)):
        return f"{expected}, got an HTML page: the server sent an error page or a login form. Fetch the file again."
    return ""


def is_text(head: bytes) -> bool:
    """Return whether first bytes are UTF-8 with few control characters (terminal escape sequences are allowed)."""
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return sum(head.count(bytes([c])) for c in (*range(1, 7), *range(14, 27))) * 50 <= len(head)


_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_CONTROLS = bytes((*range(7), *range(14, 27), *range(28, 32), 127))
_TYPOGRAPHY = frozenset("‘’‚“”„–—…«»‹›°§£€©®™·•¡¿ ´¨º¹²³½¼")


def find_encoding(sample: bytes) -> str:
    """Return the encoding of text, by Python's name; "" if it is UTF-8 (perhaps damaged), or no text."""
    for mark, marked in _MARKS:
        if sample.startswith(mark):
            return marked
    if b"\0" in sample:
        return ""
    as_utf8 = _decode(sample, "utf-8", "replace")
    damaged = as_utf8.count("\ufffd")
    if not damaged or sum(c > "\x7f" for c in as_utf8) >= 2 * damaged:  # Most of what is not ASCII is valid UTF-8.
        return ""
    if len(sample) - len(sample.translate(None, _CONTROLS)) > len(sample) // 50:
        return ""
    try:
        from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

        name: str = map_encoding_to_html5(detect_encoding(sample) or "") or ""
        return name if _is_plausible(_decode(sample, name, "strict")) else ""
    except (ImportError, LookupError, UnicodeDecodeError):
        return ""


def _decode(sample: bytes, name: str, errors: str) -> str:
    return codecs.getincrementaldecoder(name)(errors).decode(sample)


def _is_plausible(text: str) -> bool:
    """Whether what is not ASCII is letters beside letters, or typography: a stray byte in a file is neither."""
    others = [i for i, c in enumerate(text) if c > "\x7f"]
    good = sum(
        text[i] in _TYPOGRAPHY or (text[i].isalpha() and (text[i - 1 : i].isalpha() or text[i + 1 : i + 2].isalpha()))
        for i in others
    )
    return 10 * good >= 8 * len(others)
