"""Files of tokens without NumPy's header: none at all (nanoGPT's `bin`, Psyche's `ds`), or llm.c's; and their check.

The type of tokens without a header is guessed from the 16-bit halves: the upper halves of ids below 2^20 are below 16.
"""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import U8, Array, DType
from forebay.errors import ForebayError, UsageError
from forebay.formats import vectors
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TokenSource, Written
from forebay.formats.detect import RAW_TOKENS, detect
from forebay.formats.external import ExternalDataset, map_file
from forebay.formats.report import Report, choose_slices
from forebay.formats.token_stream import build_stream

_HEAD_BYTES = 4 << 20
_WINDOW_BYTES = 1 << 20
_ZERO_BYTES = 4096
_MIN_GUESSED_BYTES = 128
_Extent = tuple[int, int, DType]  # The bytes of the first token and after the last, and their type.


class RawTokens(Format):
    """Tokens without a header."""

    name = RAW_TOKENS
    suffixes: tuple[str, ...] = vectors.RAW_SUFFIXES

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return vectors.VectorDataset(path, [path], dtype)

    def check(self, path: Path, report: Report) -> None:
        """Check the header against the size, the type and padding; then ids in windows, and some samples."""
        memory = map_file(path)
        report.total_bytes = len(memory)
        try:
            vectors.check_no_chunks(path.parent)
        except UsageError as error:
            return report.add_finding("chunks-as-tokens", "byte 0", str(error))
        find = {"npy": _find_in_npy, "llm.c": _find_in_llmc}.get(detect(path).format, _find_in_raw)
        start, stop, dtype = find(report, memory)
        if excess := (stop - start) % dtype.itemsize:
            report.add_finding(
                "truncated",
                f"byte {stop}",
                f"expected whole tokens of {dtype.itemsize} bytes, got {stop - start} bytes",
            )
            stop -= excess
        if stop - start > _ZERO_BYTES and not memory[stop - _ZERO_BYTES : stop].any():
            report.add_finding(
                "trailing-zeros",
                f"byte {stop - _ZERO_BYTES}",
                f"the last {_ZERO_BYTES} bytes or more are zero: room that was set aside and not written",
            )
        tokens = memory[start:stop].view(dtype)
        report.metadata.setdefault("dtype", str(dtype))
        report.metadata["tokens"] = len(tokens)
        is_misread = any(finding.fault in ("byte-order", "wrong-dtype") for finding in report.findings)
        if not is_misread and dtype.kind in "iu" and dtype.itemsize in (2, 4, 8):
            _check_windows(report, tokens)
            if not report.findings:
                _check_ids(report, dtype)


class LlmC(RawTokens):
    """Tokens after llm.c's header."""

    name = "llm.c"
    suffixes: tuple[str, ...] = ()

    def sniff(self, head: bytes) -> bool:
        first, second = (int.from_bytes(head[i : i + 4], "little") for i in (0, 4))
        return len(head) >= 12 and first in vectors.LLMC_TYPES and vectors.LLMC_TYPES[first][0] == second


class Bin(Format):
    """Tokens as written without a header; they are read as `raw tokens`."""

    name = "bin"

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Little-endian tokens: one file where `out` ends in the suffix, else `<name>.bin` in a directory."""
        suffix = f".{self.name}"
        stream = build_stream(source, options, "none")
        is_file = out.suffix == suffix
        path = out if is_file else out / f"{options.name or 'train'}{suffix}"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            for part in stream.parts():
                file.write(np.ascontiguousarray(part.tokens).view(np.uint8).data)
        return stream.written([Path() if is_file else Path(path.name)])


class Ds(Bin):
    """As `bin`, under Psyche's suffix."""

    name = "ds"


def _find_in_npy(report: Report, memory: U8) -> _Extent:
    file = io.BytesIO(memory[: vectors.MAX_HEADER_BYTES + 12].tobytes())
    try:
        shape, _, stored = vectors.read_header(file)
    except ValueError:
        report.add_finding(
            "damaged-header", "byte 0", f"expected NumPy's header, got its magic and then {memory[6:40].tobytes()!r}"
        )
        return len(memory), len(memory), np.dtype("<u2")
    dtype, start = stored.newbyteorder("<"), file.tell()
    if report.path.suffix != ".npy":
        report.add_finding(
            "header-as-tokens",
            "byte 0",
            f"named {report.path.suffix or 'without a suffix'}, and begins with NumPy's header of {start} bytes: a "
            f"reader of raw tokens puts {start // dtype.itemsize} tokens before the first (20115 19797 …)",
        )
    if stored.byteorder == ">":
        report.add_finding("byte-order", "byte 0", f"the header says {stored.str}: big endian, which loaders refuse")
    elif dtype not in (np.dtype("<u2"), np.dtype("<u4")):
        report.add_finding(
            "wrong-dtype", "byte 0", f"expected uint16 or uint32, got {stored}: loaders of tokens refuse it"
        )
    if len(shape) != 1:
        report.add_finding("shape", "byte 0", f"expected a vector, got shape {list(shape)}")
    return start, _find_stop(report, memory, start + math.prod(shape) * dtype.itemsize), dtype


def _find_in_llmc(report: Report, memory: U8) -> _Extent:
    start = vectors.LLMC_HEADER_BYTES
    code, _, count = (int(number) for number in memory[:12].view("<i4"))
    dtype = np.dtype(vectors.LLMC_TYPES[code][1])
    stop = _find_stop(report, memory, start + max(0, count) * dtype.itemsize)
    return min(start, stop), stop, dtype


def _find_stop(report: Report, memory: U8, expected: int) -> int:
    if len(memory) != expected:
        fault = "truncated" if len(memory) < expected else "appended"
        report.add_finding(
            fault,
            f"byte {min(len(memory), expected)}",
            f"expected {expected} bytes, as its header says, got {len(memory)}",
        )
    return min(len(memory), expected)


def _find_in_raw(report: Report, memory: U8) -> _Extent:
    expected = report.options.dtype
    head = memory[: min(len(memory), _HEAD_BYTES) & ~7]
    guessed = vectors.guess_dtype(head) if len(head) >= _MIN_GUESSED_BYTES else None
    dtype = expected or guessed or np.dtype("<u2")
    report.metadata["dtype"] = f"{dtype} ({'given' if expected else 'guessed'})"
    if not len(memory):
        report.add_finding("empty", "byte 0", "expected tokens, got no byte")
    elif report.path.suffix == ".npy":
        report.add_finding(
            "no-header",
            "byte 0",
            f"named .npy, and begins with {memory[:6].tobytes()!r}, not with NumPy's header: np.load refuses it",
        )
    if expected is not None and guessed is not None and guessed.itemsize != expected.itemsize:
        report.add_finding(
            "wrong-dtype",
            "every token",
            f"the halves of the numbers are not those of {expected}. The tokens are {guessed}",
        )
    return 0, len(memory), dtype


def _check_windows(report: Report, tokens: Array) -> None:
    step = _WINDOW_BYTES // tokens.itemsize
    for index in choose_slices(-(-len(tokens) // step), tokens.nbytes, report):
        start, window = index * step, tokens[index * step : (index + 1) * step]
        if (offset := np.ascontiguousarray(window).tobytes().find(vectors.NPY_MAGIC)) >= 0:
            report.add_finding(
                "header-as-tokens",
                f"token {start + offset // tokens.itemsize}",
                "expected tokens, got NumPy's header: a .npy file was appended as raw tokens",
            )
        report.add_tokens(report.path.name, start, window)
        report.read_bytes += window.nbytes


def _check_ids(report: Report, dtype: DType) -> None:
    try:
        ids = vectors.ids_of(report.path)
        if ids is None:
            return
        dataset = vectors.VectorDataset(report.path, [report.path], dtype)
        report.metadata.update(sample_ids=ids.count, sample_tokens=dataset.seq_len)
        if report.depth == "all" and not dataset.verify().ok:
            report.add_finding("ids-mismatch", ids.path.name, "expected ids of the tokens, got some of others")
    except ForebayError as error:
        report.add_finding("ids-mismatch", "sample ids", str(error))
