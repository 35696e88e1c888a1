"""What a file is: one closed list of formats, decided by content first and by name second.

`prepare`, `stream`, `convert` and `doctor` all ask here, so a file is the same to each of them. Content decides where
it is distinctive (magic numbers, checksums, a first line that parses). The suffix decides between formats that fit the
content equally, and alone where content says nothing (CSV, headerless tokens). A file whose suffix promises data and
which holds an HTML page or a Git LFS pointer has no format but a `problem`. Reads 64 KiB, up to 1 MB of bzip2.
"""

import codecs
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from forebay.formats.compression import COMPRESSIONS, sniff_compression, unpacked_head
from forebay.formats.foreign import reading

HEAD_BYTES = 4096
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
NPY_MAGIC = b"\x93NUMPY"
RAW_TOKENS = "raw tokens"
RAW_SUFFIXES = (".bin", ".npy", ".ds", ".u16", ".u32", ".tokens")
"""Of token files without a header; .npy too, because shards exist that are named so and lack NumPy's header."""
LLMC_TYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""First int32 of llm.c's header: its second (the version), and the type of a token."""
IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_BOM = b"\xef\xbb\xbf"
_WARC = re.compile(rb"WARC/\d\.\d{1,2}[ \t\r]{0,8}\n(?=[A-Za-z-]{1,64}[ \t]{0,8}:)")
_ARC = re.compile(rb"[a-z][a-z0-9+.-]{1,20}:[^\n]{1,3000} [0-9a-fA-F.:]{2,45} \d{8,20} [^\n]{1,900}\n")
_HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--[^>]*-->\s*)*<(!doctype html|html)", re.IGNORECASE)
_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
_BMP = re.compile(rb"BM.{4}\0{4}", re.DOTALL)
_NETPBM = re.compile(rb"P[56]\s+(#[^\n]*\s+)*\d+\s+\d+\s+\d+\s")


@dataclass(frozen=True)
class Detected:
    """What a file is."""

    format: str  # Its format's name; "" if it is of none, then `why` says what it is instead.
    compression: str = ""  # "" or `gz`, `zst`, `bz2`, `xz`, `lz4`.
    why: str = ""  # What decided.
    problem: str = ""  # If it is not what its name promises: what was expected and found, and what to do.
    encoding: str = ""  # Of text that is not UTF-8, by Python's name; else "".


def detect(source: Path | BinaryIO, name: str | None = None) -> Detected:
    """The format of a file or an open stream, by its first bytes and its name.

    By default the name is the path's; a stream without one is judged by content alone.
    """
    if isinstance(source, Path):
        with reading(source), source.open("rb") as file:
            return detect(file, source.name if name is None else name)
    sample, name = source.read(SAMPLE_BYTES), name or ""
    compression = sniff_compression(sample)
    if compression:
        source.seek(0)
        sample = unpacked_head(source, compression, SAMPLE_BYTES)
    found = _detected(sample[:HEAD_BYTES], compression, name)
    if not found.problem and found.format in _OF_TEXT and (encoding := find_encoding(sample)):
        text = codecs.getincrementaldecoder(encoding)("replace").decode(sample).encode("utf-8", "replace")
        return replace(_detected(text[:HEAD_BYTES], compression, name), encoding=encoding)
    return found


def promised(name: str) -> str:
    """The format that a file's suffix stands for, without the compression's; "" if none."""
    name = name.lower()
    stem, _, last = name.rpartition(".")
    name = stem if "." + last in COMPRESSIONS else name
    return next((format for suffix, format in _SUFFIXES.items() if name.endswith(suffix)), "")


def is_image(head: bytes) -> bool:
    """Whether first bytes (64 suffice) are those of a PNG, JPEG, GIF, BMP, TIFF, WebP or binary PGM or PPM image."""
    if head.startswith(_IMAGES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    return _BMP.match(head) is not None or _NETPBM.match(head) is not None


def is_idx(head: bytes) -> bool:
    """Whether first bytes are those of an idx file, as MNIST has them."""
    return len(head) >= 8 and head[:2] == b"\0\0" and head[2] in IDX_TYPES and 1 <= head[3] <= 8


def _detected(head: bytes, compression: str, name: str) -> Detected:
    by_name = promised(name)
    if not head:
        return Detected(by_name, compression, "an empty file")
    problem = _impostor(head, by_name)
    if problem:
        return Detected("", compression, problem.partition(". ")[0], problem)
    by_content = [format for format, holds in _CONTENT.items() if holds(head)]
    if by_name == RAW_TOKENS:
        by_content = [format for format in by_content if format != "idx"]  # Tokens may begin with its four bytes.
    if by_content:
        return Detected(by_name if by_name in by_content else by_content[0], compression, "its first bytes")
    if by_name == RAW_TOKENS and (head.startswith(b"PK\x03\x04") or (len(head) >= 16 and is_text(head))):
        by_name = ""
    if by_name:
        return Detected(by_name, compression, "its suffix")
    if is_text(head):
        return Detected("text", compression, "text of no particular format")
    zipped = head.startswith(b"PK\x03\x04")
    return Detected("", compression, "a ZIP archive" if zipped else "binary data of no known format")


def _impostor(head: bytes, by_name: str) -> str:
    expected = f"expected {by_name or 'data'}{', as its name says' if by_name else ''}"
    if head.startswith(b"version https://git-lfs.github.com/spec/") and len(head) < 1024:
        return f"{expected}, got a pointer of Git LFS. Run `git lfs pull` to fetch the file itself."
    if by_name not in ("", "html", "text", "api") and _HTML.match(head.removeprefix(_BOM)):
        return f"{expected}, got an HTML page: the server sent an error page or a login form. Fetch the file again."
    return ""


def is_text(head: bytes) -> bool:
    """Whether first bytes are UTF-8 with few control characters; escape sequences of terminals count as such."""
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return sum(head.count(bytes([c])) for c in (*range(1, 7), *range(14, 27))) * 50 <= len(head)


def _is_safetensors(head: bytes) -> bool:
    return re.match(rb'\{[\s"}]', head[8:10]) is not None and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000


def _is_arrow(head: bytes) -> bool:
    stream = head.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(head[4:8], "little") < 1 << 24
    return head.startswith((b"ARROW1", b"FEA1")) or (stream and head[8:9] in b"\x0c\x10\x14\x18")


def _is_npz(head: bytes) -> bool:
    """A ZIP archive whose first member is named .npy."""
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")


def _is_llmc(head: bytes) -> bool:
    first, second = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
    return len(head) >= 12 and first in LLMC_TYPES and LLMC_TYPES[first][0] == second


def _is_tfrecord(head: bytes) -> bool:
    if len(head) < 16 or int.from_bytes(head[:8], "little") >= 1 << 40 or not any(head[:12]):
        return False
    crc = 0xFFFFFFFF  # CRC-32C of the length, masked as TensorFlow does it.
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == int.from_bytes(head[8:12], "little")


def _is_tar(head: bytes) -> bool:
    try:
        return head[257:262] == b"ustar" and bool(tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape"))
    except tarfile.HeaderError:
        return False


def _is_posts(head: bytes) -> bool:
    start = head[:1024]
    return b"<posts" in start or re.search(rb'<row Id="\d+" PostTypeId="', start) is not None


def _is_reddit(head: bytes) -> bool:
    line = head.partition(b"\n")[0]
    return (
        line.startswith(b"{")
        and re.search(rb'"subreddit(_id)?"\s*:', line) is not None
        and re.search(rb'"(body|selftext|link_id|num_comments)"\s*:', line) is not None
        and re.search(rb'"text"\s*:', line) is None
    )


def _is_api(head: bytes) -> bool:
    return (
        re.search(rb"(?m)^(?:url|preset)\s*=\s*\"", head) is not None
        and re.search(rb"(?m)^(?:preset|items|next)\s*=\s*\"", head) is not None
    )


def _is_jsonl(head: bytes) -> bool:
    line, newline, _ = head.removeprefix(_BOM).lstrip(b"\r\n").partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not newline and len(head) >= HEAD_BYTES:
        return re.match(rb'\{\s*"[^"\\]*"\s*:', line) is not None
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_json(head: bytes) -> bool:
    return re.match(rb'\s*(\[\s*)?\{\s*("|$)', head.removeprefix(_BOM)) is not None and not _is_jsonl(head)


# In order: where several fit and the name chooses none, the first is taken.
_CONTENT: dict[str, Callable[[bytes], bool]] = {
    "megatron": lambda head: head.startswith(MEGATRON_MAGIC),
    "npy": lambda head: head.startswith(NPY_MAGIC),
    "npz": _is_npz,
    "llm.c": _is_llmc,
    "parquet": lambda head: head.startswith(b"PAR1"),
    "arrow": _is_arrow,
    "safetensors": _is_safetensors,
    "7z": lambda head: head.startswith(b"7z\xbc\xaf\x27\x1c"),
    "images": is_image,
    "tfrecord": _is_tfrecord,
    "webdataset": _is_tar,
    "idx": is_idx,
    "warc": lambda head: _WARC.match(head) is not None or _ARC.match(head) is not None,
    "wikipedia": lambda head: b"<mediawiki" in head[:1024],
    "stackexchange": _is_posts,
    "reddit": _is_reddit,
    "api": _is_api,
    "jsonl": _is_jsonl,
    "json": _is_json,
    "html": lambda head: _HTML.match(head.removeprefix(_BOM)) is not None,
}
_SUFFIXES = {
    **dict.fromkeys((".warc.wet", ".wet"), "wet"),
    **dict.fromkeys((".warc", ".arc"), "warc"),
    **dict.fromkeys(("-articles.xml", ".mediawiki.xml"), "wikipedia"),
    "posts.xml": "stackexchange",
    ".7z": "7z",
    ".api.toml": "api",
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ftr", ".ipc"), "arrow"),
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
    **dict.fromkeys((".tar", ".tgz"), "webdataset"),
    ".safetensors": "safetensors",
    **dict.fromkeys(RAW_SUFFIXES, RAW_TOKENS),
    ".npz": "npz",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm"), "images"),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    ".json": "json",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}
_OF_TEXT = ("", "jsonl", "json", "csv", "text")
"""Formats whose files may be in any encoding; "" as UTF-16 looks like binary data."""
FORMATS = tuple(dict.fromkeys((*_CONTENT, *_SUFFIXES.values())))  # Every format by name.


SAMPLE_BYTES = 64 << 10
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_CONTROLS = bytes((*range(7), *range(14, 27), *range(28, 32), 127))
_TYPOGRAPHY = frozenset("‘’‚“”„–—…«»‹›°§£€©®™·•¡¿ ´¨º¹²³½¼")


def find_encoding(sample: bytes) -> str:
    """The encoding of text, by Python's name; "" if it is UTF-8 (perhaps damaged), or no text."""
    for mark, marked in _MARKS:
        if sample.startswith(mark):
            return marked
    if b"\0" in sample:
        return _utf_16(sample)
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


def _utf_16(sample: bytes) -> str:
    """UTF-16 without a mark, of text that is mostly ASCII: every other byte is zero."""
    pairs = len(sample) // 2
    low, high = sample[: 2 * pairs : 2].count(0), sample[1 : 2 * pairs : 2].count(0)
    if min(low, high) * 50 > pairs or max(low, high) * 2 < pairs:
        return ""
    return "utf-16-le" if high > low else "utf-16-be"


def _decode(sample: bytes, name: str, errors: str) -> str:
    """The sample as text; it may end within a character."""
    return codecs.getincrementaldecoder(name)(errors).decode(sample)


def _is_plausible(text: str) -> bool:
    """Whether what is not ASCII is letters beside letters, or typography: a stray byte in a file is neither."""
    others = [i for i, c in enumerate(text) if c > "\x7f"]
    good = sum(text[i] in _TYPOGRAPHY or (text[i].isalpha() and _is_beside_letter(text, i)) for i in others)
    return 10 * good >= 8 * len(others)


def _is_beside_letter(text: str, i: int) -> bool:
    return text[i - 1 : i].isalpha() or text[i + 1 : i + 2].isalpha()
