"""The check of one file of tokens: .npy, llm.c's .bin, or no header at all; with its sample ids, if it has some.

Hides where the tokens are once every mistake is taken into account (`_TokenFile`: bytes, type, parts to leave out). Of
sample ids the known ways to compute them wrongly are tried: tokens widened or narrowed first, a .npy with its header,
and 4-byte spans over 2-byte tokens, of which the second half is empty. The id is the 8-byte BLAKE2b of a sample's
bytes, little endian; 0.5 GB/s a thread.
"""

import errno
import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats import vectors
from forebay.formats.detect import detect
from forebay.formats.external import U64, Bytes8, map_file, read_head
from forebay.formats.report import CERTAIN, LIKELY, WINDOW_TOKENS, CheckOptions, Finding, Report, Window
from forebay.formats.token_types import TypeEvidence

BLOCK_BYTES = 4096
_MAX_EXTENTS = 100_000
_LENGTHS = tuple(1 << n for n in range(5, 18))
_Sample = Callable[[int, int], NDArray[Any]]


@dataclass(frozen=True)
class Header:
    """NumPy's header at some offset: its length, and the values that it announces."""

    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_bytes: int


@dataclass
class _TokenFile:
    """Where the tokens of a file are.

    Attributes:
        start, stop: The bytes of the first token and after the last.
        dtype: As a reader takes them: little endian unless a header says otherwise.
        skips: Bytes [a, b) between that are no tokens.
        ids: The sample ids beside it.
        seq_len: Tokens of a sample, where known.
    """

    report: Report
    memory: Bytes8
    start: int
    stop: int
    dtype: np.dtype[Any]
    skips: list[tuple[int, int]] = field(default_factory=list)
    ids: vectors.Vector | None = None
    seq_len: int = 0

    @property
    def path(self) -> Path:
        return self.report.path

    @property
    def count(self) -> int:
        """Complete tokens as a reader takes them."""
        return (self.stop - self.start) // self.dtype.itemsize

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), a view."""
        width = self.dtype.itemsize
        return self.memory[self.start + start * width : self.start + stop * width].view(self.dtype)


def check_vector(path: Path, report: Report) -> None:
    """Add to a report what a file of tokens holds, and all that is wrong with it."""
    file = _open(report, map_file(path))
    _find_ids(file)
    _trailing_zeros(file)
    if file.dtype.kind in "iu" and file.dtype.itemsize in (2, 4, 8):
        _check_samples(file)
        _add_tokens(file)
    report.metadata["tokens"] = file.count


def header_at(memory: Bytes8, offset: int) -> Header | None:
    """Return NumPy's header at a byte, None if there is no complete one."""
    head = memory[offset : offset + vectors.MAX_HEADER_BYTES + 12].tobytes()
    if not head.startswith(vectors.NPY_MAGIC):
        return None
    file = io.BytesIO(head)
    try:
        shape, _, dtype = vectors.read_header(file)
    except ValueError:
        return None
    return Header(file.tell(), dtype, shape, math.prod(shape) * dtype.itemsize)


def _open(report: Report, memory: Bytes8) -> _TokenFile:
    path, options = report.path, report.options
    kind = detect(path).format
    if kind == "npy":
        return _open_npy(report, memory)
    if kind == "llm.c":
        return _open_llmc(report, memory)
    dtype = options.dtype or _guess(memory)
    file = _TokenFile(report, memory, 0, len(memory), dtype)
    report.metadata["dtype"] = f"{dtype} ({'told' if options.dtype else 'guessed'})"
    if not len(memory):
        file.report.add_finding("empty", "byte 0", "expected tokens, got no byte")
    elif path.suffix == ".npy":
        first = memory[:6].tobytes()
        file.report.add_finding(
            "no-header", "byte 0", f"named .npy, and begins with {first!r}, not with NumPy's header: np.load refuses it"
        )
    if len(memory) % dtype.itemsize:
        evidence = f"expected whole {dtype.itemsize}-byte tokens, got {len(memory)} bytes"
        file.report.add_finding("truncated", f"byte {len(memory)}", evidence)
        file.stop -= len(memory) % dtype.itemsize
    return file


def _open_npy(report: Report, memory: Bytes8) -> _TokenFile:
    path = report.path
    header = header_at(memory, 0)
    if header is None:
        file = _TokenFile(report, memory, len(memory), len(memory), np.dtype("<u2"))
        evidence = f"expected NumPy's header, got its magic and then {memory[6:40].tobytes()!r}"
        file.report.add_finding("damaged-header", "byte 0", evidence)
        return file
    kind = header.dtype.newbyteorder("<")
    stop = min(len(memory), header.num_bytes + header.data_bytes)
    file = _TokenFile(report, memory, header.num_bytes, stop, kind)
    report.metadata["dtype"] = str(header.dtype)
    if path.suffix != ".npy":
        evidence = (
            f"named {path.suffix or 'without a suffix'}, and begins with NumPy's header of {header.num_bytes} bytes: "
            f"a reader of raw tokens puts {header.num_bytes // kind.itemsize} tokens before the first (20115 19797 …)"
        )
        file.report.add_finding("header-as-tokens", "byte 0", evidence)
    if kind.kind not in "iu" or kind.itemsize not in (2, 4, 8):
        evidence = f"expected token ids of uint16 or uint32, got {header.dtype}"
        file.report.add_finding("wrong-dtype", "byte 0", evidence)
        return file
    if header.dtype.byteorder == ">":
        file.report.add_finding(
            "byte-order", "byte 0", f"the header says {header.dtype.str}: big endian, which loaders refuse"
        )
    elif kind.kind == "i" or kind.itemsize == 8:
        file.report.add_finding(
            "wrong-dtype", "byte 0", f"expected uint16 or uint32, got {kind}: loaders of tokens refuse it"
        )
    if len(header.shape) != 1:
        file.report.add_finding("shape", "byte 0", f"expected a vector, got shape {list(header.shape)}")
    _end_of_npy(file, header)
    return file


def _end_of_npy(file: _TokenFile, header: Header) -> None:
    expected, size = header.num_bytes + header.data_bytes, len(file.memory)
    if size < expected:
        file.report.add_finding(
            "truncated", f"byte {size}", f"expected {expected} bytes, as its header says, got {size}"
        )
        file.stop -= (size - file.start) % file.dtype.itemsize
    elif size > expected:
        second = header_at(file.memory, expected)
        if second is not None and second.dtype == header.dtype:
            _join(file, expected, second)
            return
        evidence = f"expected {expected} bytes, as its header says, got {size}: something was appended"
        file.report.add_finding("appended", f"byte {expected}", evidence)


def _join(file: _TokenFile, offset: int, header: Header | None) -> None:
    """Files of .npy put one after the other: their tokens follow one another, without the headers between."""
    while header is not None and header.dtype.itemsize == file.dtype.itemsize:
        evidence = "expected the end, got another header: .npy files were put one after the other (cat a.npy b.npy)"
        file.report.add_finding("header-as-tokens", f"byte {offset}", evidence)
        file.skips.append((offset, offset + header.num_bytes))
        file.stop = min(len(file.memory), offset + header.num_bytes + header.data_bytes)
        offset = file.stop
        header = header_at(file.memory, offset)


def _open_llmc(report: Report, memory: Bytes8) -> _TokenFile:
    code, _, count = (int(n) for n in np.frombuffer(read_head(report.path, 12), "<i4"))
    dtype = np.dtype(vectors.LLMC_TYPES[code][1])
    expected = vectors.LLMC_HEADER_BYTES + count * dtype.itemsize
    start, stop = min(vectors.LLMC_HEADER_BYTES, len(memory)), min(len(memory), expected) if count > 0 else len(memory)
    file = _TokenFile(report, memory, start, stop - (stop - start) % dtype.itemsize, dtype)
    report.metadata["dtype"] = str(dtype)
    if len(memory) != expected:
        fault = "truncated" if len(memory) < expected else "appended"
        evidence = f"expected {expected} bytes by its header, got {len(memory)}"
        file.report.add_finding(fault, f"byte {min(len(memory), expected)}", evidence)
    return file


def _guess(memory: Bytes8) -> np.dtype[Any]:
    """The type of tokens without a header: by their halves, U16 where nothing else shows."""
    evidence = TypeEvidence()
    head = memory[: min(len(memory), 2 * WINDOW_TOKENS) & ~7]
    if len(head):
        evidence.add(head.view("<u2"))
    other = evidence.other_dtype()
    return np.dtype("<" + other[1:]) if other and other != ">u2" else np.dtype("<u2")


def _find_ids(file: _TokenFile) -> None:
    try:
        file.ids = vectors.ids_of(file.path)
    except DatasetError as error:
        file.report.add_finding("damaged-ids", "byte 0", str(error))


def _trailing_zeros(file: _TokenFile) -> None:
    stop = max(file.start, min(file.stop, _data_end(file.path, file.stop)))
    while stop > file.start:
        piece = file.memory[max(file.start, stop - (1 << 20)) : stop]
        nonzero = np.flatnonzero(piece)
        if len(nonzero):
            stop += int(nonzero[-1]) + 1 - len(piece)
            break
        stop -= len(piece)
    zeros = file.stop - stop
    if zeros < BLOCK_BYTES:
        return
    stat = file.path.stat()
    sparse = (
        f"; {stat.st_blocks * 512:,} of its {stat.st_size:,} bytes take room on disk"
        if hasattr(stat, "st_blocks")
        else ""
    )
    evidence = (
        f"the last {zeros:,} bytes are zero, {zeros // file.dtype.itemsize:,} tokens 0: room that was set aside and "
        f"not written{sparse}"
    )
    stop += -(stop - file.start) % file.dtype.itemsize
    file.report.add_finding("trailing-zeros", f"byte {stop}", evidence, confidence=LIKELY)
    file.stop = stop


def _data_end(path: Path, size: int) -> int:
    """Where a sparse file's last data ends, holes passed at once; `size` where the system does not tell."""
    if not hasattr(os, "SEEK_HOLE"):
        return size
    with path.open("rb") as file:
        end = 0
        for _ in range(_MAX_EXTENTS):
            try:
                end = os.lseek(file.fileno(), os.lseek(file.fileno(), end, os.SEEK_DATA), os.SEEK_HOLE)
            except OSError as error:
                return end if error.errno == errno.ENXIO else size  # The former: no data from here on.
    return size


def _check_samples(file: _TokenFile) -> None:
    """Compare sample ids with their tokens; of large files some samples at even distances, unless `options.full`."""
    file.seq_len = file.report.options.seq_len
    if file.ids is None:
        return
    ids = map_file(file.ids.path)[file.ids.offset :].view("<u8")
    file.seq_len, faults = _check_ids(file, ids)
    file.report.metadata["sample_ids"] = len(ids)
    file.report.metadata["sample_tokens"] = file.seq_len or None
    file.report.findings += [
        Finding(fault, CERTAIN, str(file.ids.path), location, text) for fault, location, text in faults
    ]


def _check_ids(file: _TokenFile, ids: U64) -> tuple[int, list[tuple[str, str, str]]]:
    """Tokens of a sample, 0 if no length fits; and (fault, location, evidence) of what is wrong."""
    count, options = file.count, file.report.options
    faults: list[tuple[str, str, str]] = []
    if not len(ids):
        return options.seq_len, [("phantom-ids", "sample 0", "expected an id for each sample, got none")]
    views = _views(file.memory, file.start, file.dtype)
    length, view = _find_sample(views, ids, count, options.seq_len)
    empty = np.flatnonzero(ids == np.uint64(vectors.NO_SAMPLE))
    if len(empty):
        evidence = f"{len(empty)} of {len(ids)} ids are {vectors.NO_SAMPLE}, the id of no bytes at all"
        faults.append(("phantom-ids", f"sample {int(empty[0])}", evidence))
    elif len(ids) > 1 and bool((ids == ids[0]).all()):
        faults.append(("phantom-ids", "sample 0", f"all {len(ids)} ids are {int(ids[0])}"))
    if not length:
        if not faults:
            evidence = f"the ids of {len(ids)} samples fit the {count} tokens {file.dtype} under no known reading"
            faults.append(("ids-mismatch", "sample 0", evidence))
        return options.seq_len or (count // len(ids) if count and count % len(ids) == 0 else 0), faults
    complete = count // length
    if len(ids) > complete:
        evidence = f"expected {complete} ids for {count} tokens in samples of {length}, got {len(ids)}"
        faults.append(("phantom-ids", f"sample {complete}", evidence))
    elif len(ids) < complete or count % length:
        evidence = (
            f"expected ids for {count} tokens in samples of {length}: {complete} and {count % length} tokens over, "
        )
        faults.append(("ids-count", f"sample {min(len(ids), complete)}", evidence + f"got {len(ids)}"))
    if view != "own":
        return length, [*faults, ("ids-of-another-view", "sample 0", _READINGS[view])]
    num_checked, num_bytes = min(len(ids), complete), len(ids) * length * file.dtype.itemsize
    chosen = np.arange(num_checked)
    if not options.full and num_bytes > options.max_bytes:
        number = max(2, num_checked * options.max_bytes // num_bytes)
        chosen = np.unique(np.linspace(0, num_checked - 1, number).astype(np.int64))
    sample = views["own"]
    wrong = [
        i
        for i in chosen.tolist()
        if vectors.sample_id(sample(i, length)) != int(ids[i]) and int(ids[i]) != vectors.NO_SAMPLE
    ]
    if wrong:
        evidence = (
            f"{len(wrong)} of {len(chosen)} samples are not what their ids say, the others are: their tokens were "
            f"changed, such as by a damaged download (samples {', '.join(map(str, wrong[:8]))})"
        )
        faults.append(("ids-mismatch", f"sample {wrong[0]}", evidence))
    return length, faults


_READINGS = {
    "widened": "the ids are those of the tokens as 4-byte numbers; the file holds 2-byte ones",
    "narrowed": "the ids are those of the tokens as 2-byte numbers; the file holds 4-byte ones",
    "header": "the ids are those of the file read raw from byte 0: NumPy's header was hashed as tokens",
    "double": "each id is of 4 bytes a token, in a file of 2 a token: spans of two samples, and nothing past half",
    "swapped": "the ids are those of the tokens in the other byte order",
}


def _views(memory: Bytes8, start: int, dtype: np.dtype[Any]) -> dict[str, _Sample]:
    width = dtype.itemsize

    def raw(begin: int, step: int) -> _Sample:
        return lambda i, n: memory[begin + i * n * step : begin + (i + 1) * n * step]

    def cast(to: Any) -> _Sample:
        def sample(i: int, n: int) -> NDArray[Any]:
            piece = memory[start + i * n * width : start + (i + 1) * n * width]
            return piece[: len(piece) - len(piece) % width].view(dtype).astype(to)

        return sample

    views = {"own": raw(start, width), "swapped": cast(dtype.newbyteorder(">"))}
    views["widened" if width == 2 else "narrowed"] = cast("<u4" if width == 2 else "<u2")
    if start:
        views["header"] = raw(0, width)
    if width == 2:
        views["double"] = raw(start, 4)
    return views


def _find_sample(views: dict[str, _Sample], ids: U64, count: int, seq_len: int) -> tuple[int, str]:
    """(tokens of a sample, view) under which some id fits; (0, '') if none does.

    Spans of 4 bytes a token are those of samples twice as long: they are tried at the length that the counts give only.
    """
    guesses = dict.fromkeys([seq_len] if seq_len else [count // len(ids), -(-count // len(ids))])
    tries = [(view, n) for n in guesses for view in views if 0 < n <= count]
    if not seq_len:
        tries += [(view, n) for view in views if view != "double" for n in _LENGTHS if n <= count]
    for i in dict.fromkeys([0, 1, len(ids) // 3, len(ids) // 2]):
        if i >= len(ids) or int(ids[i]) == vectors.NO_SAMPLE:
            continue
        for view, length in tries:
            if i < count // length and vectors.sample_id(views[view](i, length)) == int(ids[i]):
                return length, view
    return 0, ""


def _add_tokens(file: _TokenFile) -> None:
    report = file.report
    report.options = replace(report.options, seq_len=file.seq_len)
    report.ignored_faults |= {finding.fault for finding in report.findings} & {"byte-order"}  # By the header.
    report.read_bytes = file.start + len(file.memory) - file.stop
    for start, stop in _windows(file):
        tokens = file.tokens(start, stop)
        report.add_tokens(Window(str(file.path), start, tokens))
        report.read_bytes += tokens.nbytes


def _windows(file: _TokenFile) -> Iterator[tuple[int, int]]:
    """Windows that leave out what is known to be no tokens."""
    width, reached = file.dtype.itemsize, file.start
    for a, b in [*file.skips, (file.stop, file.stop)]:
        first = (reached - file.start) // width
        for start, stop in _spans((a - reached) // width, width, file.report.options):
            yield first + start, first + stop
        reached = b


def _spans(count: int, width: int, options: CheckOptions) -> Iterator[tuple[int, int]]:
    """[start, stop) of the windows to read: all, or some at even distances with the first and the last."""
    starts = range(0, count, WINDOW_TOKENS)
    limit = len(starts) if options.full else max(2, options.max_bytes // (WINDOW_TOKENS * width))
    if len(starts) > limit:
        chosen = np.unique(np.linspace(0, len(starts) - 1, limit).astype(np.int64)).tolist()
        starts = [starts[i] for i in chosen]  # type: ignore[assignment]
    for start in starts:
        yield start, min(start + WINDOW_TOKENS, count)
