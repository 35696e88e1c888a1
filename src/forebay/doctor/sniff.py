"""What lies at a path: its kind by content, and the files or datasets in a directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.doctor.report import Options
from forebay.errors import DatasetError
from forebay.formats import arrow, litdata, mds, megatron, npy
from forebay.formats.detect import RAW_TOKENS, detect, promised
from forebay.formats.foreign import size_of

_MOST_FILES = 100_000
IDS_PREFIX = "sample_ids"
EXAMINED = (
    "megatron", "npy", "llm.c", RAW_TOKENS, "parquet", "arrow", "safetensors", "webdataset", "tfrecord",
    "jsonl", "reddit",
)  # fmt: skip
"""Formats of files that are looked into; of others the doctor says what they are."""


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
        if kind in EXAMINED or kind == "sample ids" or (kind == "unknown" and _is_not_the_data(file)):
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
    """What a file is; where it says nothing itself, what stands beside it or the type given for tokens decides."""
    if path.name.startswith(IDS_PREFIX):
        return "sample ids"
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file() and megatron.is_index(path.with_suffix(".idx")):
        return "megatron"
    found = detect(path)
    if not found.format and not found.problem and found.why != "a ZIP archive" and not found.compression:
        try:
            is_tokens = options.dtype is not None or npy.ids_of(path) is not None
        except DatasetError:
            is_tokens = True
        return RAW_TOKENS if is_tokens else "unknown"
    return found.format or "unknown"


def _is_not_the_data(path: Path) -> bool:
    found = detect(path)
    return bool(found.problem) or (promised(path.name) in EXAMINED and found.why != "a ZIP archive")


def total_bytes(path: Path) -> int:
    """Of a file, or of all files below a directory."""
    if path.is_file():
        return size_of(path)
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
