"""Datasets of several files: Forebay's own, plain SafeTensors, Megatron, MDS, saved Hugging Face datasets, LitData.

Hides: nothing of the formats: what opens and verifies them says what does not fit; the tokens are then looked at as in
any file.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.dataset.reader import Dataset, open_dataset, verify_dataset
from forebay.dataset.slices import Slice, check_document_ends, open_slice
from forebay.doctor.passages import row_hashes
from forebay.doctor.report import LIKELY, POSSIBLE, Options
from forebay.doctor.tokens import WINDOW_TOKENS, TokenCounts, Window
from forebay.doctor.verdicts import Report, judge, true_dtype
from forebay.errors import DatasetError, UsageError
from forebay.formats import litdata, open_foreign
from forebay.formats.blocks import INDEX_FILE
from forebay.formats.foreign import TOKEN_COLUMNS, ForeignDataset, map_file

_GUESSES = ("int64", "uint32", "uint16")


def examine_ours(path: Path, options: Options) -> Report:
    """A dataset with a manifest: every hash if it is small or all is asked for, then what is in the slices."""
    report = Report(path)
    try:
        dataset = open_dataset(path, verify="never")
    except DatasetError as error:
        report.say("damaged", "manifest", str(error))
        return report
    m = dataset.manifest
    report.total_bytes = m.bytes
    report.facts.update({k: v for k, v in dataset.describe().items() if v not in ("", None)})
    if options.full or m.bytes <= options.most_bytes:
        verified = verify_dataset(path)
        report.read_bytes = m.bytes
        for name in verified.bad:
            state = "is missing" if name in verified.missing else "is listed nowhere" if name in verified.extra else ""
            report.say("damaged", name, state or "does not match its hash")
        if verified.bad:
            return report
    options = replace(
        options,
        vocab_size=options.vocab_size or m.vocab_size,
        eos_id=m.eos_id if options.eos_id is None else options.eos_id,
    )
    _look_into(report, dataset, options)
    return report


def examine_foreign(path: Path, options: Options) -> Report:
    """Megatron, MDS or a saved Hugging Face dataset: whatever contradicts its index, then its tokens."""
    report = Report(path)
    try:
        dataset, guessed = _open(path, options)
    except UsageError as error:
        report.say("unclear", "index", str(error), POSSIBLE)
        return report
    except DatasetError as error:
        report.say("index-mismatch", "index", str(error))
        return report
    m = dataset.manifest
    report.total_bytes = m.bytes
    if guessed:
        report.facts["stored_as"] = f"{guessed} (guessed)"
    report.facts.update(dtype=m.dtype, tokens=m.tokens, documents=m.documents, files=len(dataset.files))
    if options.full or m.bytes <= options.most_bytes:
        for name in dataset.verify().bad:
            report.say("damaged", name, "its tokens are not what the index, its hashes or 31-bit ids allow")
    if not report.findings:
        _look_into(report, dataset, options)
    return report


def examine_litdata(path: Path, options: Options) -> Report:
    """LitData's chunks against their index: each there, its items and their tokens as it says; compressed ones, too."""
    report = Report(path)
    try:
        layout, chunks = litdata.read_index(path, needs_tokens=False)
    except DatasetError as error:
        report.say("index-mismatch", INDEX_FILE, str(error))
        return report
    report.facts.update(chunks=len(chunks), items=sum(one.items for one in chunks))
    report.depth = "structure" if layout is None else "all"
    report.facts["format"] = ", ".join(layout.formats) if layout is not None else "no tokens"
    if not chunks:
        report.say("empty", INDEX_FILE, "expected chunks, got none")
    sizes = {one: one.path.stat().st_size for one in chunks if one.path.is_file()}
    for one in chunks:
        if one not in sizes:
            report.say("index-mismatch", one.path.name, "expected it beside the index, got none")
        elif one.wrap != "chunk" and sizes[one] != one.num_bytes:
            evidence = f"expected {one.num_bytes} bytes, as the index says, got {sizes.pop(one)}"
            report.say("index-mismatch", one.path.name, evidence)
    report.total_bytes = sum(sizes.values())
    report.counts = counts = TokenCounts(options)
    there = list(sizes)
    for index in _chosen(len(there), report.total_bytes, options):
        one = there[index]
        report.read_bytes += sizes[one]
        try:
            if layout is None:
                litdata.body_of(one, litdata.unwrap(one, map_file(one.path)))
                continue
            tokens, ends = litdata.tokens_of(one, layout, map_file(one.path))
        except DatasetError as error:
            report.say("index-mismatch", one.path.name, str(error))
            continue
        kinds = {"tokens": f"U{8 * tokens.itemsize}", "document_ends": "U64"}
        _slice(report, Slice(one.path, {"tokens": tokens, "document_ends": ends}, kinds), counts, False)
    listed = {one.path.name for one in chunks}
    for extra in sorted(p.name for p in path.glob("chunk-*.bin*") if p.name not in listed):
        report.say("index-mismatch", extra, "a chunk that the index does not list")
    report.findings += judge(counts, str(path))
    return report


def _open(path: Path, options: Options) -> tuple[ForeignDataset, str]:
    """The dataset, and the type of its tokens if that had to be guessed: the first that makes sense of them."""
    try:
        return _opened(path, options.dtype), ""
    except UsageError:
        if options.dtype is not None:
            raise
    for kind in _GUESSES:
        try:
            found = _opened(path, kind)
            counts = TokenCounts(Options(), rows=True)
            counts.feed(Window("", 0, found.open_slice(0).tokens[:WINDOW_TOKENS]))
        except DatasetError:
            continue
        if not true_dtype(counts):
            return found, kind
    raise UsageError(f"{path}: tokens of no known type. Say it: --dtype int64 (LLM Foundry's), uint16 …")


def _opened(path: Path, dtype: Any) -> ForeignDataset:
    found = open_foreign(path, dtype=dtype)
    if found is None:
        raise DatasetError(f"{path}: expected an index and its data, got {path.stat().st_size} bytes of none.")
    return found


def examine_safetensors(path: Path, options: Options) -> Report:
    """One SafeTensors file: header against size, document ends, token columns."""
    report = Report(path, total_bytes=path.stat().st_size)
    try:
        one = open_slice(path)
    except DatasetError as error:
        report.say("damaged", "header", str(error))
        return report
    shapes = {name: f"{one.dtypes[name]} {list(array.shape)}" for name, array in one.tensors.items()}
    report.facts.update(layout=one.layout, tensors=", ".join(f"{k} {v}" for k, v in list(shapes.items())[:16]))
    if not any(array.size for array in one.tensors.values()):
        report.say("empty", "header", "expected values, got tensors without any")
        return report
    report.counts = TokenCounts(options, rows=one.layout == "rows")
    _slice(report, one, report.counts, None)
    report.findings += judge(report.counts, str(path))
    return report


def _look_into(report: Report, dataset: Dataset, options: Options) -> None:
    layout = dataset.manifest.layout
    report.counts = counts = TokenCounts(options, rows=layout == "rows")
    report.read_bytes = 0
    if not dataset.num_slices:
        report.say("empty", "manifest", "expected slices, got none")
    for index in _chosen(dataset.num_slices, int(dataset.table.bytes.sum()), options):
        report.read_bytes += int(dataset.table.bytes[index])
        if int(dataset.table.count[index]) == 0:
            report.say("empty", dataset.table.row(index).name, "a slice without a token or row", LIKELY)
            continue
        try:
            one = dataset.open_slice(index)
        except DatasetError as error:
            report.say("damaged", dataset.table.row(index).name, str(error))
            continue
        start = dataset.parts[index].start if isinstance(dataset, ForeignDataset) else 0
        _slice(report, one, counts, None if dataset.manifest.documents else False, start)
    found = list(judge(counts, str(report.path)))
    if isinstance(dataset, ForeignDataset) and not dataset.manifest.tokens:
        report.say("empty", "index", "expected tokens, got none")
    report.findings += found


def _chosen(num: int, total: int, options: Options) -> Iterator[int]:
    """Slices to report at of `num` with `total` bytes: all, or some at even distances within the bound."""
    if options.full or total <= options.most_bytes or num < 3:
        yield from range(num)
        return
    most = max(2, min(num, num * options.most_bytes // total))
    yield from np.unique(np.linspace(0, num - 1, most).astype(np.int64)).tolist()


def _slice(report: Report, one: Slice, counts: TokenCounts, with_ends: bool | None, start: int = 0) -> None:
    if one.layout == "rows":
        _rows(one, counts)
        return
    try:
        tokens, ends = one.tokens, one.document_ends
    except DatasetError as error:
        report.say("damaged", one.path.name, str(error))
        return
    problem = check_document_ends(ends, len(tokens))
    if problem:
        where = np.flatnonzero(ends[1:] < ends[:-1]) if len(ends) > 1 else np.empty(0)
        place = f"document {int(where[0]) + 1}" if len(where) else "document ends"
        report.say("document-ends", f"{one.path.name}, {place}", problem)
        with_ends = False
    for first in range(0, len(tokens), WINDOW_TOKENS):
        last = min(first + WINDOW_TOKENS, len(tokens))
        inside = None
        if with_ends is not False:
            a, b = np.searchsorted(ends, [first, last], "right")
            inside = ends[a:b].astype(np.int64) - first
        counts.feed(Window(str(one.path), start + first, tokens[first:last], inside))


def _rows(one: Slice, counts: TokenCounts) -> None:
    for name in TOKEN_COLUMNS:
        array = one.tensors.get(name)
        if array is None or array.dtype.kind not in "iu" or array.dtype.itemsize < 2 or array.ndim < 1:
            continue
        flat = array.reshape(-1)
        for first in range(0, len(flat), WINDOW_TOKENS):
            counts.feed(Window(str(one.path), first, flat[first : first + WINDOW_TOKENS]))
        if array.ndim == 2:
            step = max(1, WINDOW_TOKENS // max(1, array.shape[1]))
            for first in range(0, len(array), step):
                counts.samples.add(row_hashes(array[first : first + step]))
        return
