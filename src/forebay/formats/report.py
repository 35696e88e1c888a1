"""What a check of a file or dataset is asked, and what it reports.

A format's `check` fills a `Report`: metadata, findings, and the tokens, whose ids are compared with the vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.arrays import Array, DType
from forebay.base import Json
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice, check_document_ends
from forebay.errors import DatasetError, UsageError, listed
from forebay.formats.conversion import TableSource
from forebay.formats.external import TOKEN_COLUMNS
from forebay.formats.inputs import TEXT_KEYS

_MAX_FINDINGS = 1000  # Of one file or dataset.
_FETCH = "fetch or write it again"
_CUT = "cut it there with truncate --size BYTES, or fetch it again"
_ADVICE = {
    "header-as-tokens": "forebay convert FILE OUT --to bin, which goes by content",
    "chunks-as-tokens": "give the directory with their index.json",
    "no-header": "write it again with numpy.save",
    "appended": _CUT,
    "trailing-zeros": _CUT,
    "byte-order": "save it again as little-endian: tokens.astype('<u2') or '<u4'",
    "wrong-dtype": "forebay convert FILE OUT --to bin --set input_dtype=TYPE, or save it again as uint16 or uint32",
    "shape": "save it again as a vector: tokens.reshape(-1)",
    "ids-mismatch": "fetch both again; or move the ids away, to read the tokens without",
    "document-ends": "tokenize the text again: forebay prepare TEXT --tokenizer TOKENIZER --out DIR",
    "vocabulary-overflow": "give the vocabulary of its tokenizer, or tokenize the text again with forebay prepare",
    "unclear": "give --dtype",
}


@dataclass(frozen=True)
class CheckOptions:
    """What the caller knows of the data, and how much of it to read.

    Attributes:
        dtype: Type of tokens that no header tells; None to guess.
        vocab_size: Ids are below it; 0 if unknown.
        full: Read every byte.
        max_bytes: Read of one file or dataset where `full` is False.
    """

    dtype: DType | None = None
    vocab_size: int = 0
    full: bool = False
    max_bytes: int = 256 << 20


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        fault: Its name, such as `header-as-tokens`; the page on the doctor lists them.
        path: The file.
        location: Where in it: `byte 128`, `token 4096`, `row group 2` …
        evidence: What was expected and what is there.
    """

    fault: str
    path: str
    location: str
    evidence: str

    @property
    def advice(self) -> str:
        """What to do, as words or a command."""
        return _ADVICE.get(self.fault, _FETCH)


@dataclass
class Report:
    """The report on one file or dataset.

    Attributes:
        path: Its path.
        options: What the caller knows; a format adds what the data tells, before the first tokens.
        kind: Its format: `npy`, `raw tokens`, `megatron`, `parquet` … or `unknown`.
        metadata: dtype, counts …
        findings: What is wrong; empty if nothing is.
        depth: How much was checked: `all`, `part`, `kinds` (of texts the first bytes alone, as `prepare` reports what
            is wrong with them), or `none` where the format has no check.
        read_bytes, total_bytes: Bytes that were read, and all bytes.
    """

    path: Path
    options: CheckOptions = field(default_factory=CheckOptions)
    kind: str = ""
    metadata: Json = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    depth: str = "all"
    read_bytes: int = 0
    total_bytes: int = 0

    def add_finding(self, fault: str, location: str, evidence: str) -> None:
        """Add a finding, of at most 1000."""
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(Finding(fault, str(self.path), location, evidence))

    def add_tokens(self, location: str, start: int, tokens: Array) -> None:
        """Compare ids [T], the first of which is token `start` of a file, with the vocabulary."""
        self.metadata["tokens_read"] = self.metadata.get("tokens_read", 0) + len(tokens)
        bound = self.options.vocab_size or 1 << 31
        invalid = np.flatnonzero((tokens >= bound) | (tokens < 0))
        if len(invalid) and not any(finding.fault == "vocabulary-overflow" for finding in self.findings):
            first = int(invalid[0])
            self.add_finding(
                "vocabulary-overflow",
                f"token {start + first}",
                f"{location}: expected ids below {bound}, got {int(tokens[first])}",
            )

    def add_count(self, unit: str, count: int) -> None:
        """Add how many lines, rows, records … there are; none is a finding where nothing else is wrong."""
        self.metadata[unit] = count
        if not count and not self.findings:
            self.add_finding("empty", "byte 0", f"expected {unit}, got none")

    def is_enough(self, read_bytes: int) -> bool:
        """Return whether so many bytes are more than the options allow to read; the check is then one of a part."""
        if self.options.full or read_bytes <= self.options.max_bytes:
            return False
        self.depth = "part"
        return True

    @property
    def ok(self) -> bool:
        """Whether it was checked, at least in part, and nothing was found."""
        return self.depth != "none" and not self.findings

    def to_json(self) -> Json:
        """Return the report as plain values."""
        findings = [{**asdict(finding), "advice": finding.advice} for finding in self.findings]
        values = {name: getattr(self, name) for name in ("kind", "ok", "depth", "read_bytes", "total_bytes")}
        return {"path": str(self.path), **values, "facts": self.metadata, "findings": findings}


def check_external(report: Report, open_dataset: Callable[[], Dataset]) -> None:
    """Add to a report what an external dataset holds: what contradicts its index and hashes, then its tokens."""
    try:
        dataset = open_dataset()
    except (UsageError, DatasetError) as error:
        report.add_finding("unclear" if isinstance(error, UsageError) else "index-mismatch", "index", str(error))
        return
    m = dataset.manifest
    report.total_bytes = m.bytes
    report.metadata.update(dtype=m.dtype, tokens=m.tokens, documents=m.documents, files=len(dataset.files))
    if report.options.full or m.bytes <= report.options.max_bytes:
        for name in dataset.verify().bad:
            report.add_finding("damaged", name, "its tokens are not what the index, its hashes or 31-bit ids allow")
    if not report.findings:
        check_slices(report, dataset)
        if not m.tokens:
            report.add_finding("empty", "index", "expected tokens, got none")


def check_rows(report: Report, open_table: Callable[[], TableSource]) -> None:
    """Add the rows of a table, every value of which is read, and what ends the reading of it."""
    num_rows = 0
    try:
        table = open_table()
        report.metadata["columns"] = listed(table.schema)
        if texts := [field.name for field in table.schema if "string" in str(field.type)]:
            more = f" --set read.text_key={texts[0]}" * set(TEXT_KEYS).isdisjoint(texts)
            report.metadata["text"] = f"`forebay prepare{more}` tokenizes it"
        for batch in table.batches():
            _add_row_tokens(report, batch, num_rows)
            num_rows += batch.num_rows
            report.read_bytes += batch.nbytes
            if report.is_enough(report.read_bytes):
                break
    except (DatasetError, UsageError, MemoryError) as error:
        evidence = str(error).removesuffix(" Write or fetch it again.")  # which is the advice
        report.add_finding("damaged", f"row {num_rows} or after", evidence)
    report.add_count("rows", num_rows)


def _add_row_tokens(report: Report, batch: pa.RecordBatch, first_row: int) -> None:
    for name in TOKEN_COLUMNS:
        column = batch.column(name) if name in batch.schema.names else None
        if isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray | pa.FixedShapeTensorArray):
            values = getattr(column, "storage", column).flatten()
            if pa.types.is_integer(values.type) and not values.null_count:
                tokens = values.to_numpy(zero_copy_only=False)
                report.add_tokens(f"rows from {first_row}", report.metadata.get("tokens_read", 0), tokens)
            return


def check_slices(report: Report, dataset: Dataset) -> None:
    """Add the contents of a dataset's slices to a report: all, or some at even distances."""
    report.read_bytes = 0
    if not dataset.num_slices:
        report.add_finding("empty", "manifest", "expected slices, got none")
    for index in choose_slices(dataset.num_slices, int(dataset.table.bytes.sum()), report):
        report.read_bytes += int(dataset.table.bytes[index])
        name = dataset.table.row(index).name
        if int(dataset.table.count[index]) == 0:
            report.add_finding("empty", name, "a slice without a token or row")
            continue
        try:
            opened = dataset.open_slice(index)
        except DatasetError as error:
            report.add_finding("damaged", name, str(error))
            continue
        add_slice(report, opened, dataset.first_token(index))


def choose_slices(num_slices: int, num_bytes: int, report: Report) -> Iterator[int]:
    """Yield the slices (or windows) to read: all, or some at even distances within the bound of the options."""
    if num_slices < 3 or not report.is_enough(num_bytes):
        yield from range(num_slices)
        return
    chosen = max(2, num_slices * report.options.max_bytes // num_bytes)
    yield from np.unique(np.linspace(0, num_slices - 1, chosen).astype(np.int64)).tolist()


def add_slice(report: Report, opened: Slice, start: int = 0) -> None:
    """Add the tokens of one slice to a report, and what is wrong with its document ends."""
    name = opened.path.name
    if opened.layout == "rows":
        arrays = [opened.tensors[column] for column in TOKEN_COLUMNS if column in opened.tensors]
        for array in arrays[:1]:
            if array.dtype.kind in "iu":
                report.add_tokens(name, 0, array.reshape(-1))
        return
    try:
        tokens, document_ends = opened.tokens, opened.document_ends
    except DatasetError as error:
        report.add_finding("damaged", name, str(error))
        return
    if problem := check_document_ends(document_ends, len(tokens)):
        report.add_finding("document-ends", name, problem)
    report.add_tokens(name, start, tokens)
