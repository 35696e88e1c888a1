"""The examination: what lies at each path, what is wrong with it, and what several have in common.

Hides: which examiner looks at which kind, and how much is read: 256 MiB of each file or dataset by default, less where
there are many (1 GiB of all, at least 4 MiB of each).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.doctor import datasets, streams, tables, vectors
from forebay.doctor.passages import Held, shared
from forebay.doctor.report import CERTAIN, LIKELY, POSSIBLE, Finding, Options
from forebay.doctor.verdicts import Report
from forebay.errors import DatasetError
from forebay.formats import arrow, litdata, mds, megatron, npy
from forebay.formats.detect import RAW_TOKENS, detect, promised
from forebay.formats.foreign import size_of

_ALL_BYTES = 1 << 30
_FEWEST_BYTES = 4 << 20
_MOST_COMPARED = 64
_FEWEST_SHARED = 16
_IDS_PREFIX = "sample_ids"
_ZIPPED = "a ZIP archive"  # As `detect` says: a model, more likely than damaged data.
_MOST_FILES = 100_000  # Of a directory.
_HELD_OUT = ("val", "test", "eval", "dev", "heldout")


def examine(paths: Sequence[Path], options: Options) -> list[Report]:
    """Examine files, directories and patterns; then compare what holds tokens with one another.

    Raises:
        DatasetError: If there is nothing at a path.
    """
    chosen = [(i, *one) for i, path in enumerate(paths) for one in _subjects(path, options)]
    if not chosen:
        raise DatasetError(
            f"{', '.join(map(str, paths))}: expected training data, got no file of a kind known here. Name a file."
        )
    if not options.full:
        most = max(_FEWEST_BYTES, min(options.most_bytes, _ALL_BYTES // len(chosen)))
        options = replace(options, most_bytes=most)
    reports = [_examine_one(path, kind, options) for _, path, kind in chosen]
    found = [(i, report) for (i, *_), report in zip(chosen, reports) if report.counts is not None][:_MOST_COMPARED]
    for number, (i, second) in enumerate(found):
        for k, first in found[:number]:
            _compare(first, second, same_argument=i == k)
    return reports


def _subjects(path: Path, options: Options) -> list[tuple[Path, str]]:
    """What lies at a path, and of which kind, in the order of names; of a directory without files of no known kind."""
    if path.is_dir():
        return list(_in_directory(path, options))
    if path.is_file():
        return [(path, kind_of(path, options))]
    if "*" in path.name or "?" in path.name:
        return [(p, kind_of(p, options)) for p in sorted(path.parent.glob(path.name)) if p.is_file()]
    if path.with_name(path.name + ".idx").is_file():
        return [(path.with_name(path.name + ".idx"), "megatron")]
    raise DatasetError(f"{path}: expected a file or directory, got nothing there. Check the path.")


def _in_directory(path: Path, options: Options) -> Iterator[tuple[Path, str]]:
    whole = _dataset_kind(path)
    if whole:
        yield path, whole
        return
    entries = sorted(p for p in path.iterdir() if not p.name.startswith("."))
    files = [p for p in entries if p.is_file()][:_MOST_FILES]
    for file in files:
        if file.name.startswith(_IDS_PREFIX):
            continue
        if file.with_suffix(".idx") in files and file.suffix == ".bin" and megatron.is_index(file.with_suffix(".idx")):
            continue  # Examined with its index.
        kind = kind_of(file, options)
        if kind in _EXAMINERS or (kind == "unknown" and _unknown(file) and detect(file).why != _ZIPPED):
            yield file, kind
    for folder in entries:
        if folder.is_dir():
            yield from _in_directory(folder, options)


def _dataset_kind(folder: Path) -> str:
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
    if path.name.startswith(_IDS_PREFIX):
        return "sample ids"
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file() and megatron.is_index(path.with_suffix(".idx")):
        return "megatron"
    found = detect(path)
    if not found.format and not found.problem and found.why != _ZIPPED and not found.compression:
        try:
            is_tokens = options.dtype is not None or npy.ids_of(path) is not None
        except DatasetError:
            is_tokens = True
        return RAW_TOKENS if is_tokens else "unknown"
    return found.format or "unknown"


def _total_bytes(path: Path) -> int:
    """Of a file, or of all files below a directory."""
    if path.is_file():
        return size_of(path)
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _examine_one(path: Path, kind: str, options: Options) -> Report:
    """One file or dataset."""
    began = time.perf_counter()
    examiner = _EXAMINERS.get(kind)
    report = examiner(path, options) if examiner is not None else Report(path, findings=_unknown(path), depth="none")
    report.kind, report.findings = kind, _unique(report.findings)
    report.total_bytes = report.total_bytes or _total_bytes(path)
    counts, read = report.counts, report.read_bytes
    if counts is not None and len(counts.first):
        report.facts["first_tokens"] = " ".join(map(str, counts.first[:16].tolist()))
        if options.tokenizer is not None:
            ids = [one for one in counts.first.tolist() if 0 <= one < 1 << 31]
            report.facts["first_text"] = options.tokenizer.decode(ids, skip_special_tokens=False)[:200]
    is_whole = read >= report.total_bytes
    is_whole |= read <= options.most_bytes and kind in (*streams.WALKERS, "parquet", "arrow")
    if report.depth == "all" and not options.full and not is_whole:
        report.depth = "part"
    report.read_bytes = min(read, report.total_bytes)
    report.seconds = time.perf_counter() - began
    return report


_EXAMINERS: dict[str, Callable[[Path, Options], Report]] = {
    **dict.fromkeys(("npy", "llm.c", RAW_TOKENS), vectors.survey),
    **{kind: partial(streams.walk, kind) for kind in streams.WALKERS},
    "parquet": tables.examine_parquet,
    "arrow": tables.examine_arrow,
    "forebay": datasets.examine_ours,
    "safetensors": datasets.examine_safetensors,
    "megatron": datasets.examine_foreign,
    "mds": datasets.examine_foreign,
    "saved arrow": datasets.examine_foreign,
    "litdata": datasets.examine_litdata,
}


def _unknown(path: Path) -> list[Finding]:
    """A file that is not what its name says, or nothing to find."""
    if path.name.startswith(_IDS_PREFIX):
        return []  # Examined with their tokens.
    found = detect(path)
    if found.problem:
        return [Finding("not-the-data", CERTAIN, str(path), "byte 0", found.problem)]
    if not found.format and promised(path.name) in _EXAMINERS:
        evidence = f"expected {promised(path.name)}, as its name says, got {found.why}"
        return [Finding("not-the-data", CERTAIN, str(path), "byte 0", evidence)]
    return []


def _compare(first: Report, second: Report, same_argument: bool) -> None:
    """Report what of `second` occurs in `first`; of a held-out and a training set, what of the former."""
    held = [_is_held_out(name) for name in _apart(first.path, second.path)]
    last = second
    if held == [True, False]:
        first, second = second, first
    assert first.counts is not None and second.counts is not None
    both: tuple[Held, Held] = (first.counts.passages, second.counts.passages)
    what = "passages of 64 tokens"
    if first.counts.rows or second.counts.rows:
        both, what = (first.counts.samples, second.counts.samples), "samples"
    same, total = shared(*both)
    if same < min(_FEWEST_SHARED, max(1, total)):
        return
    share, fault, sure = same / total, "", LIKELY
    if held[0] != held[1] or not same_argument:
        if share >= 0.01:
            fault, sure = "overlap", LIKELY if share >= 0.1 else POSSIBLE
    elif share >= 0.9:
        fault = "same-data"
    if fault:
        evidence = f"{share:.0%} of its {what} occur in {first.path}"
        last.findings.append(Finding(fault, sure, str(second.path), what, evidence))


def _apart(first: Path, second: Path) -> tuple[str, str]:
    """Two paths without the directories that they share."""
    a, b = first.absolute(), second.absolute()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.parts, b.parts)))
    return " ".join(a.parts[same:]), " ".join(b.parts[same:])


def _is_held_out(name: str) -> bool:
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return any(word.startswith(_HELD_OUT) for word in words)


def _unique(findings: list[Finding]) -> list[Finding]:
    """The first of each fault at each place of each file, in order."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for one in findings:
        seen.setdefault((one.fault, one.path, one.place), one)
    return list(seen.values())
