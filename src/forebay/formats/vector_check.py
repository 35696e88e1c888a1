"""The check of one file of tokens: .npy, llm.c's .bin, or no header at all; with its sample ids, if it has some.

Of files without a header the type is guessed from the numbers: one type read as another leaves traces in the 16-bit
halves. Margins are wide: what is reported does not occur in text by any tokenizer whose ids rise with rarity.
"""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError
from forebay.formats import vectors
from forebay.formats.detect import detect
from forebay.formats.external import Bytes8, map_file
from forebay.formats.report import Report

_HEAD_BYTES = 4 << 20
_WINDOW_BYTES = 1 << 20
_ZERO_BYTES = 4096
_MIN_TOKENS = 64
_MIN_FOR_BYTE_ORDER = 1024
_Extent = tuple[int, int, np.dtype[Any]]  # The bytes of the first token and after the last, and their type.


def check_vector(path: Path, report: Report) -> None:
    """Add to a report what a file of tokens holds, and all that is wrong with it."""
    memory = map_file(path)
    report.total_bytes = len(memory)
    find = {"npy": _find_in_npy, "llm.c": _find_in_llmc}.get(detect(path).format, _find_in_raw)
    start, stop, dtype = find(report, memory)
    if (stop - start) % dtype.itemsize:
        evidence = f"expected whole tokens of {dtype.itemsize} bytes, got {stop - start} bytes"
        report.add_finding("truncated", f"byte {stop}", evidence)
        stop -= (stop - start) % dtype.itemsize
    if stop - start > _ZERO_BYTES and not memory[stop - _ZERO_BYTES : stop].any():
        evidence = f"the last {_ZERO_BYTES} bytes or more are zero: room that was set aside and not written"
        report.add_finding("trailing-zeros", f"byte {stop - _ZERO_BYTES}", evidence)
    tokens = memory[start:stop].view(dtype)
    report.metadata.setdefault("dtype", str(dtype))
    report.metadata["tokens"] = len(tokens)
    is_misread = any(finding.fault in ("byte-order", "wrong-dtype") for finding in report.findings)
    if not is_misread and dtype.kind in "iu" and dtype.itemsize in (2, 4, 8):
        _check_windows(report, tokens)
        if not report.findings:
            _check_ids(report, dtype)


def _find_in_npy(report: Report, memory: Bytes8) -> _Extent:
    file = io.BytesIO(memory[: vectors.MAX_HEADER_BYTES + 12].tobytes())
    try:
        shape, _, stored = vectors.read_header(file)
    except ValueError:
        evidence = f"expected NumPy's header, got its magic and then {memory[6:40].tobytes()!r}"
        report.add_finding("damaged-header", "byte 0", evidence)
        return len(memory), len(memory), np.dtype("<u2")
    dtype, start = stored.newbyteorder("<"), file.tell()
    if report.path.suffix != ".npy":
        evidence = (
            f"named {report.path.suffix or 'without a suffix'}, and begins with NumPy's header of {start} bytes: a "
            f"reader of raw tokens puts {start // dtype.itemsize} tokens before the first (20115 19797 …)"
        )
        report.add_finding("header-as-tokens", "byte 0", evidence)
    if stored.byteorder == ">":
        evidence = f"the header says {stored.str}: big endian, which loaders refuse"
        report.add_finding("byte-order", "byte 0", evidence)
    elif dtype not in (np.dtype("<u2"), np.dtype("<u4")):
        evidence = f"expected uint16 or uint32, got {stored}: loaders of tokens refuse it"
        report.add_finding("wrong-dtype", "byte 0", evidence)
    if len(shape) != 1:
        report.add_finding("shape", "byte 0", f"expected a vector, got shape {list(shape)}")
    return start, _stop_of(report, memory, start + math.prod(shape) * dtype.itemsize), dtype


def _find_in_llmc(report: Report, memory: Bytes8) -> _Extent:
    start = vectors.LLMC_HEADER_BYTES
    code, _, count = (int(number) for number in memory[:12].view("<i4"))
    dtype = np.dtype(vectors.LLMC_TYPES[code][1])
    stop = _stop_of(report, memory, start + max(0, count) * dtype.itemsize)
    return min(start, stop), stop, dtype


def _stop_of(report: Report, memory: Bytes8, expected: int) -> int:
    if len(memory) != expected:
        fault = "truncated" if len(memory) < expected else "appended"
        evidence = f"expected {expected} bytes, as its header says, got {len(memory)}"
        report.add_finding(fault, f"byte {min(len(memory), expected)}", evidence)
    return min(len(memory), expected)


def _find_in_raw(report: Report, memory: Bytes8) -> _Extent:
    expected = report.options.dtype
    head = memory[: min(len(memory), _HEAD_BYTES) & ~7]
    other = other_dtype(head.view(expected or "<u2"))
    dtype = expected or np.dtype("<" + other[1:] if other and other != ">u2" else "<u2")
    report.metadata["dtype"] = f"{dtype} ({'given' if expected else 'guessed'})"
    if not len(memory):
        report.add_finding("empty", "byte 0", "expected tokens, got no byte")
    elif report.path.suffix == ".npy":
        evidence = f"named .npy, and begins with {memory[:6].tobytes()!r}, not with NumPy's header: np.load refuses it"
        report.add_finding("no-header", "byte 0", evidence)
    if other.startswith(">"):
        evidence = "with the bytes of each swapped most ids are small, as in text: the file is big endian"
        report.add_finding("byte-order", "every token", evidence)
    elif other and expected is not None:
        evidence = f"the halves of the numbers are not those of {expected}. The tokens are {np.dtype(other)}"
        report.add_finding("wrong-dtype", "every token", evidence)
    return 0, len(memory), dtype


def _check_windows(report: Report, tokens: NDArray[Any]) -> None:
    step = _WINDOW_BYTES // tokens.itemsize
    starts = np.arange(0, len(tokens), step)
    if len(starts) > 2 and report.is_enough(tokens.nbytes):
        chosen = max(2, report.options.max_bytes // _WINDOW_BYTES)
        starts = starts[np.unique(np.linspace(0, len(starts) - 1, chosen).astype(np.int64))]
    for start in starts.tolist():
        window = tokens[start : start + step]
        if (offset := np.ascontiguousarray(window).tobytes().find(vectors.NPY_MAGIC)) >= 0:
            evidence = "expected tokens, got NumPy's header: a .npy file was appended as raw tokens"
            report.add_finding("header-as-tokens", f"token {start + offset // tokens.itemsize}", evidence)
        report.add_tokens(report.path.name, start, window)
        report.read_bytes += window.nbytes


def _check_ids(report: Report, dtype: np.dtype[Any]) -> None:
    """Compare the sample ids beside the file with its tokens: some samples, all of a file that is read as a whole."""
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


def other_dtype(tokens: NDArray[Any]) -> str:
    """Return the NumPy type of which the bytes of tokens seem to be; "" where it is that of the array.

    Args:
        tokens: Integers of 2, 4 or 8 bytes, a multiple of 8 bytes.
    """
    halves, words, width = tokens.view("<u2"), tokens.view("<u4"), tokens.itemsize
    even, odd = halves[::2], halves[1::2]
    if len(tokens) < _MIN_TOKENS:
        return ""
    # Below 16 are the upper halves of ids below 2**20; zero the upper words of 8-byte numbers.
    is_varied = np.count_nonzero(even >= 16) >= len(even) // 4
    has_upper = np.count_nonzero(odd >= 16) >= len(odd) // 2
    is_wide = not words[1::2].any() and np.count_nonzero(words[::2]) > len(words) // 4
    if width == 2 and is_varied and int(odd.max()) < 16:
        return "<i8" if is_wide else "<u4"
    if width == 4 and is_varied and is_wide:
        return "<i8"
    if width in (2, 4) and has_upper and not (even & 0xF0FF).any():
        return ">u4"
    if width == 4 and has_upper and np.count_nonzero(even >= 16) >= len(even) // 2:
        return "<u2"
    return ">u2" if width == 2 and _looks_swapped(halves) else ""


def _looks_swapped(halves: NDArray[np.uint16]) -> bool:
    """Whether 2-byte ids with their bytes swapped are those of text: most of them small.

    In text 30 to 60 % of the ids are below 1024 and 2 to 5 % are that with bytes swapped. No token counts for more
    than a hundredth, so that padding decides nothing.
    """
    counts = np.bincount(halves, minlength=1 << 16)
    distinct = np.count_nonzero(counts)
    if len(halves) < _MIN_FOR_BYTE_ORDER or distinct < 16:
        return False
    weights, ids = np.minimum(counts, max(1, len(halves) // 100)), np.arange(1 << 16)
    total = int(weights.sum())
    if int(weights[ids & 255 == 0].sum()) * 20 >= total * 19:
        return True  # Bytes, each in the upper half.
    straight, swapped = int(weights[ids < 1024].sum()), int(weights[ids & 255 < 4].sum())
    return bool(distinct >= 256 and swapped > total // 5 and swapped > 3 * straight)
