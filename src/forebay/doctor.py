"""Finds what training-data files are, what is wrong with them, and what to do about it.

Formats are detected by content; a suffix counts only where the content says nothing. Nothing is changed. By default 256
MiB of each file or dataset are read, less where there are many (1 GiB of all, at least 4 MiB of each).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forebay.errors import DatasetError
from forebay.files import nothing_there
from forebay.formats import dataset_format
from forebay.formats.base import get_format, names_with
from forebay.formats.detect import RAW_TOKENS, detect, format_of_suffix
from forebay.formats.encodings import ARCHIVES
from forebay.formats.megatron import is_index
from forebay.formats.report import CheckOptions, Finding, Report
from forebay.formats.vectors import IDS_PREFIX, ids_of

__all__ = ["CheckOptions", "Finding", "Report", "examine"]

_ALL_BYTES = 1 << 30
_MIN_BYTES = 4 << 20


def examine(paths: Sequence[Path], options: CheckOptions) -> list[Report]:
    """Examine files, directories and patterns. DatasetError if they have no file of a known kind."""
    chosen, others = list[tuple[Path, str]](), list[tuple[Path, str]]()
    for path in paths:
        for file, kind in _find_files(path, options):
            is_misnamed = kind == "unknown" and _misnamed(file) and detect(file).reason not in ARCHIVES.values()
            is_checked = file == path or kind in names_with("check") or is_misnamed
            (chosen if is_checked else others).append((file, kind))
    if not chosen and not others:
        raise DatasetError(
            f"{', '.join(map(str, paths))}: expected training data, got no file of a kind known here. Name a file."
        )
    if not options.full:
        limit = max(_MIN_BYTES, min(options.max_bytes, _ALL_BYTES // max(1, len(chosen))))
        options = replace(options, max_bytes=limit)
    reports = [_examine_one(path, kind, options) for path, kind in chosen]
    return [*reports, _count(paths[0], others, options, bool(reports))] if others else reports


def _count(path: Path, others: Sequence[tuple[Path, str]], options: CheckOptions, is_beside: bool) -> Report:
    """Return a report on files that are not examined: how many of each kind, and what their first bytes show."""
    report, kinds, encodings = Report(path, options, "other files"), Counter[str](), Counter[str]()
    for file, kind in others:
        kinds[kind] += 1
        encodings[detect(file).encoding] += 1
    empty = sum(not file.stat().st_size for file, _ in others)
    guessed = {f"guessed to be {name}": n for name, n in encodings.items() if name}
    report.metadata = {"not examined": len(others), **kinds, **({"empty": empty} if empty else {}), **guessed}
    report.depth = "kinds" if is_beside or kinds.keys() & set(names_with("read_text")) else "none"
    report.total_bytes = sum(file.stat().st_size for file, _ in others)
    return report


def _find_files(path: Path, options: CheckOptions) -> Iterator[tuple[Path, str]]:
    if path.is_dir():
        if name := dataset_format(path):
            yield path, name
            return
        entries = sorted(p for p in path.iterdir() if not p.name.startswith("."))
        for file in (p for p in entries if p.is_file() and not p.name.startswith(IDS_PREFIX)):
            kind = kind_of(file, options)
            if not (kind == "megatron" and file.suffix == ".bin"):  # the data of an index
                yield file, kind
        for folder in filter(Path.is_dir, entries):
            yield from _find_files(folder, options)
    elif path.is_file():
        yield path, kind_of(path, options)
    elif "*" in path.name or "?" in path.name:
        yield from ((p, kind_of(p, options)) for p in sorted(path.parent.glob(path.name)) if p.is_file())
    elif path.with_name(path.name + ".idx").is_file():
        yield path.with_name(path.name + ".idx"), "megatron"
    else:
        yield path, "missing"


def kind_of(path: Path, options: CheckOptions) -> str:
    """Return the format of a file; where its content says nothing, files beside it or the type of tokens decide."""
    if path.name.startswith(IDS_PREFIX):
        return "sample ids"
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file() and is_index(path.with_suffix(".idx")):
        return "megatron"
    detection = detect(path)
    is_unknown = not detection.format and not detection.problem and not detection.compression
    if is_unknown and detection.reason not in ARCHIVES.values():
        try:
            is_tokens = options.dtype is not None or ids_of(path) is not None
        except DatasetError:
            is_tokens = True
        return RAW_TOKENS if is_tokens else "unknown"
    return detection.format or "unknown"


def _examine_one(path: Path, kind: str, options: CheckOptions) -> Report:
    report = Report(path, options, kind)
    if kind in names_with("check"):
        get_format(kind).check(path, report)
    else:
        report.depth = "kinds" if kind in names_with("read_text") else "none"
        if encoding := detect(path).encoding if path.is_file() else "":
            report.metadata["encoding"] = f"{encoding} (guessed)"
        if not path.exists():
            report.add_finding("missing", "byte 0", f"expected a file or directory, got {nothing_there(path)}")
        elif evidence := _misnamed(path):
            report.add_finding("not-the-data", "byte 0", evidence)
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    report.total_bytes = max(report.total_bytes or sum(p.stat().st_size for p in files), report.read_bytes)
    if report.depth == "all":
        report.read_bytes = report.total_bytes
    return report


def _misnamed(path: Path) -> str:
    if path.name.startswith(IDS_PREFIX):
        return ""
    detection = detect(path)
    if detection.problem:
        return detection.problem
    by_name = format_of_suffix(path.name)
    if detection.format or by_name not in names_with("check"):
        return ""
    return f"expected {by_name}, as its name says, got {detection.reason}"
