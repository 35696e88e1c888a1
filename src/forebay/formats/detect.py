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
from forebay.formats.encodings import ARCHIVES, find_encoding
from forebay.formats.external import reading
from forebay.storage.compression import COMPRESSIONS, sniff_compression, unpacked_head

HEAD_BYTES = 4096
SAMPLE_BYTES = 64 << 10
RAW_TOKENS = "raw tokens"
HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--[^>]*-->\s*)*<(!doctype html|html)", re.IGNORECASE)
_MAY_BE_HTML = ("", "html", "text", "api")


@dataclass(frozen=True)
class Detection:
    """What a file is."""

    format: str  # Its format's name; "" if it is of none, then `reason` says what it is instead.
    compression: str  # "" or `gz`, `zst`, `bz2`, `xz`, `lz4`.
    reason: str  # What decided.
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
    compression = sniff_compression(sample) or ("br" if name.lower().endswith(".br") else "")
    if compression:
        source.seek(0)
        sample = unpacked_head(source, compression, SAMPLE_BYTES)
    detection = _detected(sample[:HEAD_BYTES], compression, name)
    # Bytes of no format may be text in UTF-16, which looks like binary data.
    is_text = not detection.format or get_format(detection.format).is_plain_text
    if not detection.problem and is_text and (encoding := find_encoding(sample)):
        text = sample.decode(encoding, "replace").encode()
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
    if compression and sniff_compression(head):
        archive = "data that is packed twice, to be unpacked once"
    elif name.lower().endswith(".snappy"):
        archive = archive or "blocks of Snappy without frames, to be unpacked"
    if archive and (by_name in ("", RAW_TOKENS) or get_format(by_name).is_plain_text):
        return Detection("", compression, archive)
    if by_name == RAW_TOKENS and len(head) >= 16 and is_text(head):
        by_name = ""
    if by_name:
        return Detection(by_name, compression, "its suffix")
    if is_text(head):
        return Detection("text", compression, "text of no particular format")
    return Detection("", compression, "binary data of no known format")


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
