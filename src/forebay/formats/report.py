"""What a check of a file or dataset is asked, and what it reports.

A format's `check` fills a `Report`: metadata, findings, and the tokens, window by window. The doctor counts the tokens
and applies its rules to the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice, check_document_ends
from forebay.errors import DatasetError
from forebay.formats.external import TOKEN_COLUMNS, U64, ExternalDataset

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
WINDOW_TOKENS = 1 << 20
MAX_BYTES = 256 << 20  # Read of one file or dataset unless all of it is asked for.
_MAX_FINDINGS = 1000  # Of one file or dataset.
_MAX_HASHES = 4 << 20
_FETCH = "fetch or write it again"
_TOKENIZE = "tokenize the text again, as with: forebay prepare TEXT --tokenizer TOKENIZER --out DIR"
_DEDUP = f"{_TOKENIZE} --dedup exact,minhash"
_IDS = "move the ids away, and forebay convert TOKENS OUT --to npy --seq-len N computes others"
_CUT = "cut it there with truncate --size BYTES, or fetch it again"
_ADVICE = {
    "header-as-tokens": "forebay convert FILE OUT --to bin, which goes by content; join arrays, not their files",
    "no-header": "forebay convert FILE OUT --to npy --input-dtype TYPE --seq-len N writes one",
    "appended": _CUT,
    "trailing-zeros": _CUT,
    "byte-order": "save it again as little-endian: tokens.astype('<u2') or '<u4'",
    "wrong-dtype": "forebay convert FILE OUT --to bin --input-dtype TYPE, or save it again as uint16 or uint32",
    "shape": "save it again as a vector: tokens.reshape(-1)",
    "phantom-ids": _IDS,
    "ids-of-another-view": _IDS,
    "ids-count": _IDS,
    "ids-mismatch": "fetch the tokens and their ids again",
    "byte-order-mark": "remove its first three bytes: tail -c +4 FILE",
    "document-ends": _TOKENIZE,
    "missing-eos": _TOKENIZE,
    "padding": _TOKENIZE,
    "vocabulary-overflow": _TOKENIZE,
    "wrap-16": _TOKENIZE,
    "duplicate-lines": _DEDUP,
    "duplicate-samples": _DEDUP,
    "repeated-passages": _DEDUP,
    "overlap": f"prepare both again from texts of which each is in one: {_DEDUP}",
    "same-data": "leave out one of the two",
    "unclear": "give --dtype, or name one of the files",
}


@dataclass(frozen=True)
class CheckOptions:
    """What the caller knows of the data, and how much of it to read.

    Attributes:
        dtype: Type of tokens that no header tells; None to guess.
        vocab_size: Ids are below it; 0 if unknown.
        eos_id: Ends each document; None if unknown.
        seq_len: Tokens of a sample; 0 if unknown.
        tokenizer: Decodes the first tokens; None if unknown.
        full: Read every byte.
        max_bytes: Read of one file or dataset where `full` is False.
    """

    dtype: np.dtype[Any] | None = None
    vocab_size: int = 0
    eos_id: int | None = None
    seq_len: int = 0
    tokenizer: Tokenizer | None = None
    full: bool = False
    max_bytes: int = MAX_BYTES


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        fault: Its name, such as `header-as-tokens`; docs/how-to/doctor.md lists them.
        confidence: `certain` (by arithmetic), `likely` (by statistics with a wide margin) or `possible`.
        path: The file.
        location: Where in it: `byte 128`, `token 4096`, `sample 7`, `row group 2` …
        evidence: What was expected and what is there.
    """

    fault: str
    confidence: str
    path: str
    location: str
    evidence: str

    @property
    def advice(self) -> str:
        """What to do, as words or a command."""
        return _ADVICE.get(self.fault, _FETCH)

    @property
    def is_wrong(self) -> bool:
        """Whether it fails the check; a possible fault is only reported."""
        return self.confidence != POSSIBLE


@dataclass(frozen=True)
class Window:
    """A run of tokens.

    Attributes:
        path: The file.
        start: Its first token, counted in the file.
        tokens: Integers [T], little endian.
        ends: Exclusive document ends in it, int64 [D]; None where the format has none.
        row_tokens: Tokens of each row, where the window is whole rows of a table; else 0.
    """

    path: str
    start: int
    tokens: NDArray[Any]
    document_ends: NDArray[np.int64] | None = None
    row_tokens: int = 0


class TokenCounter(Protocol):
    """Counts the tokens of a file or dataset; the doctor's is `TokenCounts`."""

    def add(self, window: Window) -> None:
        """Count one window; windows of a file come in order, with or without gaps."""


class HashSet:
    """64-bit hashes, at most 4 Mi of them: beyond, only those that end in more and more zero bits."""

    def __init__(self, bits: int = 0) -> None:
        self._parts: list[U64] = []
        self._num = 0
        self.bits = bits

    def add(self, hashes: U64) -> None:
        """Add hashes."""
        self._parts.append(hashes[hashes & np.uint64((1 << self.bits) - 1) == 0])
        self._num += len(self._parts[-1])
        while self._num > _MAX_HASHES:
            self.bits += 1
            self._parts = [self.all(self.bits)]
            self._num = len(self._parts[0])

    def all(self, bits: int | None = None) -> U64:
        """Return all hashes, or those that end in at least so many zero bits."""
        joined = np.concatenate(self._parts) if self._parts else np.empty(0, np.uint64)
        mask = np.uint64((1 << (self.bits if bits is None else bits)) - 1)
        hashes: U64 = joined[joined & mask == 0]
        return hashes

    def repeated(self) -> tuple[int, int]:
        """Return how many hashes repeat an earlier one, and how many there are."""
        return self._num - len(np.unique(self.all())), self._num


@dataclass
class Report:
    """The report on one file or dataset.

    Attributes:
        path: Its path.
        options: What the caller knows; a format adds what the data tells, before the first window.
        kind: Its format: `npy`, `raw tokens`, `megatron`, `parquet` … or `unknown`.
        metadata: dtype, counts, first tokens …
        findings: What is wrong; empty if nothing is.
        depth: How much was checked: `all`, `part`, `structure` (sizes, counts and offsets; the contents are of no type
            that can be checked), or `none` where the format is unknown.
        read_bytes, total_bytes: Bytes that were read, and all bytes.
        seconds: Duration of the check.
        is_sequential: Whether it is read from its front, so that less than `max_bytes` read is all of it.
        is_rows: Whether the tokens are rows of a table, not one stream.
        ignored_faults: Faults that the format's tokens may have.
        counter: Counts the tokens; None where they are not counted.
    """

    path: Path
    options: CheckOptions = field(default_factory=CheckOptions)
    kind: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    depth: str = "all"
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    is_sequential: bool = False
    is_rows: bool = False
    ignored_faults: set[str] = field(default_factory=set)
    counter: TokenCounter | None = None

    def add_finding(self, fault: str, location: str, evidence: str, confidence: str = CERTAIN) -> None:
        """Add a finding, of at most 1000."""
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(Finding(fault, confidence, str(self.path), location, evidence))

    def add_tokens(self, window: Window) -> None:
        """Count a window of tokens."""
        if self.counter is not None and len(window.tokens):
            self.counter.add(window)

    def is_enough(self, read_bytes: int) -> bool:
        """Return whether so many bytes are more than the options allow to read."""
        return not self.options.full and read_bytes > self.options.max_bytes

    @property
    def is_wrong(self) -> bool:
        """Whether something certain or likely was found."""
        return any(finding.is_wrong for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether it was checked, at least in part, and nothing certain or likely was found."""
        return self.depth != "none" and not self.is_wrong

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "ok": self.ok,
            "depth": self.depth,
            "facts": self.metadata,
            "findings": [{**asdict(finding), "advice": finding.advice} for finding in self.findings],
            "read_bytes": self.read_bytes,
            "total_bytes": self.total_bytes,
            "seconds": round(self.seconds, 3),
        }


def check_external(report: Report, dataset: ExternalDataset) -> None:
    """Add to a report what an open external dataset holds: what contradicts its index and hashes, then its tokens."""
    m, options = dataset.manifest, report.options
    report.total_bytes = m.bytes
    report.metadata.update(dtype=m.dtype, tokens=m.tokens, documents=m.documents, files=len(dataset.files))
    if options.full or m.bytes <= options.max_bytes:
        for name in dataset.verify().bad:
            report.add_finding("damaged", name, "its tokens are not what the index, its hashes or 31-bit ids allow")
    if not report.findings:
        check_slices(report, dataset)
        if not m.tokens:
            report.add_finding("empty", "index", "expected tokens, got none")


def check_slices(report: Report, dataset: Dataset) -> None:
    """Add the contents of a dataset's slices to a report: all, or some at even distances."""
    report.is_rows = dataset.manifest.layout == "rows"
    report.read_bytes = 0
    if not dataset.num_slices:
        report.add_finding("empty", "manifest", "expected slices, got none")
    for index in choose_slices(dataset.num_slices, int(dataset.table.bytes.sum()), report.options):
        report.read_bytes += int(dataset.table.bytes[index])
        name = dataset.table.row(index).name
        if int(dataset.table.count[index]) == 0:
            report.add_finding("empty", name, "a slice without a token or row", LIKELY)
            continue
        try:
            opened = dataset.open_slice(index)
        except DatasetError as error:
            report.add_finding("damaged", name, str(error))
            continue
        start = dataset.parts[index].start if isinstance(dataset, ExternalDataset) else 0
        add_slice(report, opened, has_ends=dataset.manifest.documents > 0, start=start)


def choose_slices(num_slices: int, num_bytes: int, options: CheckOptions) -> Iterator[int]:
    """Yield the slices to read: all, or some at even distances within the bound of the options."""
    if options.full or num_bytes <= options.max_bytes or num_slices < 3:
        yield from range(num_slices)
        return
    chosen = max(2, min(num_slices, num_slices * options.max_bytes // num_bytes))
    yield from np.unique(np.linspace(0, num_slices - 1, chosen).astype(np.int64)).tolist()


def add_slice(report: Report, opened: Slice, has_ends: bool = True, start: int = 0) -> None:
    """Add the tokens of one slice to a report, and what is wrong with its document ends."""
    if opened.layout == "rows":
        _add_rows(report, opened)
        return
    try:
        tokens, document_ends = opened.tokens, opened.document_ends
    except DatasetError as error:
        report.add_finding("damaged", opened.path.name, str(error))
        return
    problem = check_document_ends(document_ends, len(tokens))
    if problem:
        falling = np.flatnonzero(document_ends[1:] < document_ends[:-1]) if len(document_ends) > 1 else np.empty(0)
        location = f"document {int(falling[0]) + 1}" if len(falling) else "document ends"
        report.add_finding("document-ends", f"{opened.path.name}, {location}", problem)
        has_ends = False
    for first in range(0, len(tokens), WINDOW_TOKENS):
        last = min(first + WINDOW_TOKENS, len(tokens))
        inside = None
        if has_ends:
            a, b = np.searchsorted(document_ends, [first, last], "right")
            inside = document_ends[a:b].astype(np.int64) - first
        report.add_tokens(Window(str(opened.path), start + first, tokens[first:last], inside))


def _add_rows(report: Report, opened: Slice) -> None:
    for name in TOKEN_COLUMNS:
        array = opened.tensors.get(name)
        if array is None or array.dtype.kind not in "iu" or array.dtype.itemsize < 2 or array.ndim < 1:
            continue
        row_tokens = array.shape[1] if array.ndim == 2 else 0
        flat = array.reshape(-1)
        step = max(1, WINDOW_TOKENS // max(1, row_tokens)) * max(1, row_tokens)
        for first in range(0, len(flat), step):
            window = Window(str(opened.path), first, flat[first : first + step], row_tokens=row_tokens)
            report.add_tokens(window)
        return
