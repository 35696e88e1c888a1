"""What lies at a path: its kind by content, and the files or datasets in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import orjson

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.doctor import litdata
from forebay.doctor.report import Options
from forebay.doctor.streams import open_unpacked
from forebay.doctor.vectors import is_vector
from forebay.errors import DatasetError, ForebayError
from forebay.formats import arrow, mds, megatron, npy
from forebay.formats.foreign import head_of, size_of
from forebay.prepare.read.opening import sniff_compression
from forebay.prepare.read.tables import ARROW, PARQUET
from forebay.prepare.read.tar import TAR
from forebay.prepare.read.tfrecord import TFRECORD

_HEAD = 64 << 10
_MOST_FILES = 100_000
KINDS_BY_SUFFIX = {
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".tar": "tar", ".tfrecord": "tfrecord",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".safetensors": "safetensors", ".npy": "npy", ".bin": "raw tokens",
    ".ds": "raw tokens",
}  # fmt: skip
"""What a suffix promises: a file that is something else is told."""
IDS_PREFIX = "sample_ids"
_ZIP = b"PK\x03\x04"  # As torch.save and np.savez write, often named .bin.
_STREAMS = ("tar", "tfrecord", "jsonl")


@dataclass(frozen=True)
class Subject:
    """One file or dataset to examine; `kind` is `unknown` where nothing tells."""

    path: Path
    kind: str


def subjects(path: Path, options: Options) -> list[Subject]:
    """What lies at a path, in the order of names; files of a directory that are nothing known are left out.

    Raises:
        DatasetError: If there is nothing at the path, or it cannot be read.
    """
    if path.is_dir():
        return list(_in_directory(path, options))
    if path.is_file():
        return [Subject(path, kind_of(path, options))]
    if "*" in path.name or "?" in path.name:
        return [Subject(p, kind_of(p, options)) for p in sorted(path.parent.glob(path.name)) if p.is_file()]
    if path.with_name(path.name + ".idx").is_file():
        return [Subject(path.with_name(path.name + ".idx"), "megatron")]
    raise DatasetError(f"{path}: expected a file or directory, got nothing there. Check the path.")


def _in_directory(path: Path, options: Options) -> Iterator[Subject]:
    whole = dataset_kind(path)
    if whole:
        yield Subject(path, whole)
        return
    entries = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    files = [p for p in entries if p.is_file()][:_MOST_FILES]
    for file in files:
        if file.name.startswith(IDS_PREFIX):
            continue
        if file.with_suffix(".idx") in files and file.suffix == ".bin" and megatron.is_index(file.with_suffix(".idx")):
            continue  # Examined with its index.
        kind = kind_of(file, options)
        if kind not in ("unknown", "text") or (_promises(file) and not head_of(file, 4).startswith(_ZIP)):
            yield Subject(file, kind)
    for folder in entries:
        if folder.is_dir():
            yield from _in_directory(folder, options)


def dataset_kind(folder: Path) -> str:
    """The kind of dataset that a directory is as a whole; empty if it is none."""
    if (folder / MANIFEST_FILE).is_file():
        return "forebay"
    if litdata.is_index(folder):
        return "litdata"
    if mds.is_index(folder):
        return "mds"
    return "saved arrow" if arrow.is_saved(folder) else ""


def kind_of(path: Path, options: Options) -> str:
    """What a file is, by its first bytes; by what stands beside it, and by suffix, only where these tell nothing."""
    head = head_of(path, _HEAD)
    if path.name.startswith(IDS_PREFIX):
        return "sample ids"
    if head.startswith(megatron.MAGIC):
        return "megatron"
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file() and megatron.is_index(path.with_suffix(".idx")):
        return "megatron"
    if not head:
        return KINDS_BY_SUFFIX.get(path.suffix, "unknown")
    if impostor(head) or head.startswith(_ZIP):
        return "unknown"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= length <= 100_000_000 and (head[8:10] == b'{"' or path.suffix == ".safetensors"):
        return "safetensors"
    if PARQUET.sniff(head) or head[:4] == b"PAR1":
        return "parquet"
    if ARROW.sniff(head):
        return "arrow"
    if npy.sniff(path):
        return npy.sniff(path)
    packed = sniff_compression(head)
    if packed:
        try:
            with closing(open_unpacked(path)) as file:
                head = file.read(_HEAD)
        except ForebayError:
            head = b""
    for name, one in (("tar", TAR), ("tfrecord", TFRECORD)):
        if one.sniff(head):
            return name
    if _is_jsonl(path, head):
        return "jsonl"
    if not packed and is_vector(path, options) and not _is_text(head):
        return "raw tokens"
    promised = _promises(path)
    if promised in _STREAMS:
        return promised
    return "text" if _is_text(head) else "unknown"


def impostor(head: bytes) -> str:
    """What a file is that stands in place of another; empty if it is none such."""
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a pointer of Git LFS"
    start = head[:256].lstrip().lower()
    return "a page of HTML" if start.startswith((b"<!doctype html", b"<html")) else ""


def _promises(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst", ".bz2", ".xz")]
    return KINDS_BY_SUFFIX.get(suffixes[-1], "") if suffixes else ""


def _is_jsonl(path: Path, head: bytes) -> bool:
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n")[:-1] if line.strip()][:2]
    if _promises(path) == "jsonl":
        lines = lines or [head]
        return bool(head.strip()) and lines[0].lstrip()[:1] in (b"{", b"[")
    try:
        return len(lines) == 2 and all(isinstance(orjson.loads(line), dict) for line in lines)
    except ValueError:
        return False


def _is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters, up to one that is cut off."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode()
    return len(text) >= 16 and all(c.isprintable() or c in "\n\r\t\f" for c in text)


def total_bytes(path: Path) -> int:
    """Of a file, or of all files below a directory."""
    if path.is_file():
        return size_of(path)
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
