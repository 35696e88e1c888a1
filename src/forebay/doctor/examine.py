"""Examines paths: which formats there are, what is wrong with each file or dataset, and what several have in common.

Hides how much is read: 256 MiB of each file or dataset by default, less where there are many (1 GiB of all, at least
4 MiB of each).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from forebay.doctor.passages import shared
from forebay.doctor.rules import find_faults
from forebay.doctor.token_counts import TokenCounts
from forebay.errors import DatasetError
from forebay.formats import dataset_format
from forebay.formats.detect import RAW_TOKENS, ZIP_ARCHIVE, detect, format_of_suffix
from forebay.formats.external import file_size
from forebay.formats.megatron import is_index
from forebay.formats.registry import get_format, names_with
from forebay.formats.report import CERTAIN, LIKELY, POSSIBLE, CheckOptions, Finding, Report
from forebay.formats.vectors import IDS_PREFIX, ids_of

_ALL_BYTES = 1 << 30
_MIN_BYTES = 4 << 20
_MAX_COMPARED = 64
_MIN_SHARED = 16
_MAX_FILES = 100_000  # Of a directory.
_HELD_OUT = ("val", "test", "eval", "dev", "heldout")


def examine(paths: Sequence[Path], options: CheckOptions) -> list[Report]:
    """Examine files, directories and patterns; then compare those that hold tokens with one another.

    Raises:
        DatasetError: If there is nothing at a path.
    """
    chosen = [(i, *subject) for i, path in enumerate(paths) for subject in _subjects(path, options)]
    if not chosen:
        raise DatasetError(
            f"{', '.join(map(str, paths))}: expected training data, got no file of a kind known here. Name a file."
        )
    if not options.full:
        limit = max(_MIN_BYTES, min(options.max_bytes, _ALL_BYTES // len(chosen)))
        options = replace(options, max_bytes=limit)
    examined = [(i, *_examine_one(path, kind, options)) for i, path, kind in chosen]
    counted = [(i, report, counts) for i, report, counts in examined if counts.tokens][:_MAX_COMPARED]
    for number, (i, report, counts) in enumerate(counted):
        for k, other, other_counts in counted[:number]:
            _compare((other, other_counts), (report, counts), same_argument=i == k)
    return [report for _, report, _ in examined]


def _subjects(path: Path, options: CheckOptions) -> list[tuple[Path, str]]:
    """The files and datasets at a path with their formats, by name; of a directory none of unknown formats."""
    if path.is_dir():
        return list(_in_directory(path, options))
    if path.is_file():
        return [(path, kind_of(path, options))]
    if "*" in path.name or "?" in path.name:
        return [(p, kind_of(p, options)) for p in sorted(path.parent.glob(path.name)) if p.is_file()]
    if path.with_name(path.name + ".idx").is_file():
        return [(path.with_name(path.name + ".idx"), "megatron")]
    raise DatasetError(f"{path}: expected a file or directory, got nothing there. Check the path.")


def _in_directory(path: Path, options: CheckOptions) -> Iterator[tuple[Path, str]]:
    if name := dataset_format(path):
        yield path, name
        return
    entries = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    files = [p for p in entries if p.is_file()][:_MAX_FILES]
    for file in files:
        if file.name.startswith(IDS_PREFIX):
            continue
        if file.suffix == ".bin" and file.with_suffix(".idx") in files and is_index(file.with_suffix(".idx")):
            continue  # Examined with its index.
        kind = kind_of(file, options)
        is_misnamed = kind == "unknown" and _unknown(file) and detect(file).reason != ZIP_ARCHIVE
        if kind in names_with("check") or is_misnamed:
            yield file, kind
    for folder in entries:
        if folder.is_dir():
            yield from _in_directory(folder, options)


def kind_of(path: Path, options: CheckOptions) -> str:
    """Return the format of a file; where its content says nothing, files beside it or the type of tokens decide."""
    if path.name.startswith(IDS_PREFIX):
        return "sample ids"
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file() and is_index(path.with_suffix(".idx")):
        return "megatron"
    detection = detect(path)
    is_unknown = not detection.format and not detection.problem and not detection.compression
    if is_unknown and detection.reason != ZIP_ARCHIVE:
        try:
            is_tokens = options.dtype is not None or ids_of(path) is not None
        except DatasetError:
            is_tokens = True
        return RAW_TOKENS if is_tokens else "unknown"
    return detection.format or "unknown"


def _total_bytes(path: Path) -> int:
    """Of a file, or of all files below a directory."""
    if path.is_file():
        return file_size(path)
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _examine_one(path: Path, kind: str, options: CheckOptions) -> tuple[Report, TokenCounts]:
    """One file or dataset."""
    start = time.perf_counter()
    report = Report(path, options, kind)
    report.counter = counts = TokenCounts(report)
    if kind in names_with("check"):
        get_format(kind).check(path, report)
        faults = [fault for fault in find_faults(counts) if fault.fault not in report.ignored_faults]
        report.findings = _unique([*report.findings, *faults])
    else:
        report.findings, report.depth = _unknown(path), "none"
    if "compression" in report.metadata:
        report.total_bytes = max(file_size(path), report.read_bytes)
    report.total_bytes = report.total_bytes or _total_bytes(path)
    if len(counts.first):
        report.metadata["first_tokens"] = " ".join(map(str, counts.first[:16].tolist()))
        if options.tokenizer is not None:
            ids = [token for token in counts.first.tolist() if 0 <= token < 1 << 31]
            report.metadata["first_text"] = options.tokenizer.decode(ids, skip_special_tokens=False)[:200]
    is_complete = report.read_bytes >= report.total_bytes
    is_complete |= report.is_sequential and report.read_bytes <= options.max_bytes
    if report.depth == "all" and not options.full and not is_complete:
        report.depth = "part"
    report.read_bytes = min(report.read_bytes, report.total_bytes)
    report.seconds = time.perf_counter() - start
    return report, counts


def _unknown(path: Path) -> list[Finding]:
    """The finding on a file that is not what its name says; none on others of unknown formats."""
    if path.name.startswith(IDS_PREFIX):
        return []  # Examined with their tokens.
    detection = detect(path)
    evidence = detection.problem
    if not evidence and not detection.format and (by_name := format_of_suffix(path.name)) in names_with("check"):
        evidence = f"expected {by_name}, as its name says, got {detection.reason}"
    return [Finding("not-the-data", CERTAIN, str(path), "byte 0", evidence)] if evidence else []


def _compare(first: tuple[Report, TokenCounts], second: tuple[Report, TokenCounts], same_argument: bool) -> None:
    """Report what of `second` occurs in `first`; of a held-out and a training set, what of the former."""
    last = second[0]
    are_held_out = [_is_held_out(name) for name in _distinct_names(first[0].path, second[0].path)]
    if are_held_out == [True, False]:
        first, second = second, first
    (report, counts), (other, other_counts) = first, second
    what, hashes = "passages of 64 tokens", (counts.passages, other_counts.passages)
    if report.is_rows or other.is_rows:
        what, hashes = "samples", (counts.samples, other_counts.samples)  # type: ignore[assignment]
    same, total = shared(*hashes)
    if same < min(_MIN_SHARED, max(1, total)):
        return
    share, fault, confidence = same / total, "", LIKELY
    if are_held_out[0] != are_held_out[1] or not same_argument:
        if share >= 0.01:
            fault, confidence = "overlap", LIKELY if share >= 0.1 else POSSIBLE
    elif share >= 0.9:
        fault = "same-data"
    if fault:
        evidence = f"{share:.0%} of its {what} occur in {report.path}"
        last.findings.append(Finding(fault, confidence, str(other.path), what, evidence))


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """Two paths without the directories that they share."""
    a, b = first.absolute(), second.absolute()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.parts, b.parts)))
    return " ".join(a.parts[same:]), " ".join(b.parts[same:])


def _is_held_out(name: str) -> bool:
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return any(word.startswith(_HELD_OUT) for word in words)


def _unique(findings: list[Finding]) -> list[Finding]:
    """The first of each fault at each location of each file, in order."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        seen.setdefault((finding.fault, finding.path, finding.location), finding)
    return list(seen.values())
