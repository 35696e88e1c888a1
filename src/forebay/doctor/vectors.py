"""One file of tokens: .npy, llm.c's .bin, or no header at all; with its sample ids, where it has some.

Hides: where the tokens lie once every mistake is taken into account: `survey` finds that (a `Survey`: bytes, type,
parts to leave out), and the findings come of it. Of sample ids the known ways to compute them wrongly are tried: tokens
widened or narrowed first, a .npy with its header, and 4-byte spans over 2-byte tokens, of which the second half is
empty. The id is the 8-byte BLAKE2b of a sample's bytes, little endian; 0.5 GB/s a thread.
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

from forebay.doctor.report import CERTAIN, LIKELY, Finding, Options
from forebay.doctor.tokens import BLOCK_BYTES, WINDOW_TOKENS, TokenCounts, Window, spans
from forebay.doctor.verdicts import Report, judge, true_dtype
from forebay.errors import DatasetError
from forebay.formats import npy
from forebay.formats.detect import LLMC_TYPES, NPY_MAGIC, detect
from forebay.formats.foreign import U64, Bytes8, head_of, map_file

_MOST_EXTENTS = 100_000
_LENGTHS = tuple(1 << n for n in range(5, 18))
_Sample = Callable[[int, int], NDArray[Any]]


@dataclass(frozen=True)
class Header:
    """NumPy's, as it stands at some byte: how long it is, and what it says follows."""

    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_bytes: int


@dataclass(kw_only=True)
class Survey(Report):
    """What a file of tokens is."""

    memory: Bytes8
    start: int  # Byte of the first token.
    stop: int  # Byte after the last.
    dtype: np.dtype[Any]  # As a reader takes them: little endian unless a header says otherwise.
    skips: list[tuple[int, int]] = field(default_factory=list)  # Bytes [a, b) between that are no tokens.
    ids: npy.Vector | None = None  # The sample ids beside it.
    seq_len: int = 0  # Tokens of a sample, where told or found.

    @property
    def count(self) -> int:
        """Whole tokens as a reader takes them."""
        return (self.stop - self.start) // self.dtype.itemsize

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), a view."""
        width = self.dtype.itemsize
        return self.memory[self.start + start * width : self.start + stop * width].view(self.dtype)


def header_at(memory: Bytes8, at: int) -> Header | None:
    """NumPy's header at a byte, if a whole one stands there."""
    head = memory[at : at + npy.MOST_HEADER + 12].tobytes()
    if not head.startswith(NPY_MAGIC):
        return None
    file = io.BytesIO(head)
    try:
        shape, _, dtype = npy.read_header(file)
    except ValueError:
        return None
    return Header(file.tell(), dtype, shape, math.prod(shape) * dtype.itemsize)


def survey(path: Path, options: Options) -> Survey:
    """Look at one file of tokens, and all that is wrong with it."""
    memory = map_file(path)
    found = _open(path, memory, options)
    _ids(found)
    _trailing_zeros(found)
    if found.dtype.kind in "iu" and found.dtype.itemsize in (2, 4, 8):
        _samples(found, options)
        _tokens(found, options)
    found.facts["tokens"] = found.count
    return found


def _open(path: Path, memory: Bytes8, options: Options) -> Survey:
    kind = detect(path).format
    if kind == "npy":
        return _open_npy(path, memory)
    if kind == "llm.c":
        return _open_llmc(path, memory)
    dtype = options.dtype or _guess(memory, options)
    found = Survey(path, memory=memory, start=0, stop=len(memory), dtype=dtype)
    found.facts["dtype"] = f"{dtype} ({'told' if options.dtype else 'guessed'})"
    if not len(memory):
        found.say("empty", "byte 0", "expected tokens, got no byte")
    elif path.suffix == ".npy":
        first = memory[:6].tobytes()
        found.say(
            "no-header", "byte 0", f"named .npy, and begins with {first!r}, not with NumPy's header: np.load refuses it"
        )
    if len(memory) % dtype.itemsize:
        evidence = f"expected whole {dtype.itemsize}-byte tokens, got {len(memory)} bytes"
        found.say("truncated", f"byte {len(memory)}", evidence)
        found.stop -= len(memory) % dtype.itemsize
    return found


def _open_npy(path: Path, memory: Bytes8) -> Survey:
    header = header_at(memory, 0)
    if header is None:
        found = Survey(path, memory=memory, start=len(memory), stop=len(memory), dtype=np.dtype("<u2"))
        evidence = f"expected NumPy's header, got its magic and then {memory[6:40].tobytes()!r}"
        found.say("damaged-header", "byte 0", evidence)
        return found
    kind = header.dtype.newbyteorder("<")
    stop = min(len(memory), header.num_bytes + header.data_bytes)
    found = Survey(path, memory=memory, start=header.num_bytes, stop=stop, dtype=kind)
    found.facts["dtype"] = str(header.dtype)
    if path.suffix != ".npy":
        evidence = (
            f"named {path.suffix or 'without a suffix'}, and begins with NumPy's header of {header.num_bytes} bytes: "
            f"a reader of raw tokens puts {header.num_bytes // kind.itemsize} tokens before the first (20115 19797 …)"
        )
        found.say("header-as-tokens", "byte 0", evidence)
    if kind.kind not in "iu" or kind.itemsize not in (2, 4, 8):
        evidence = f"expected token ids of uint16 or uint32, got {header.dtype}"
        found.say("wrong-dtype", "byte 0", evidence)
        return found
    if header.dtype.byteorder == ">":
        found.say("byte-order", "byte 0", f"the header says {header.dtype.str}: big endian, which loaders refuse")
    elif kind.kind == "i" or kind.itemsize == 8:
        found.say("wrong-dtype", "byte 0", f"expected uint16 or uint32, got {kind}: loaders of tokens refuse it")
    if len(header.shape) != 1:
        found.say("shape", "byte 0", f"expected a vector, got shape {list(header.shape)}")
    _end_of_npy(found, header)
    return found


def _end_of_npy(found: Survey, header: Header) -> None:
    wanted, size = header.num_bytes + header.data_bytes, len(found.memory)
    if size < wanted:
        found.say("truncated", f"byte {size}", f"expected {wanted} bytes, as its header says, got {size}")
        found.stop -= (size - found.start) % found.dtype.itemsize
    elif size > wanted:
        second = header_at(found.memory, wanted)
        if second is not None and second.dtype == header.dtype:
            _join(found, wanted, second)
            return
        evidence = f"expected {wanted} bytes, as its header says, got {size}: something was appended"
        found.say("appended", f"byte {wanted}", evidence)


def _join(found: Survey, at: int, header: Header | None) -> None:
    """Files of .npy put one after the other: their tokens follow one another, without the headers between."""
    while header is not None and header.dtype.itemsize == found.dtype.itemsize:
        evidence = "expected the end, got another header: .npy files were put one after the other (cat a.npy b.npy)"
        found.say("header-as-tokens", f"byte {at}", evidence)
        found.skips.append((at, at + header.num_bytes))
        found.stop = min(len(found.memory), at + header.num_bytes + header.data_bytes)
        at = found.stop
        header = header_at(found.memory, at)


def _open_llmc(path: Path, memory: Bytes8) -> Survey:
    code, _, count = (int(n) for n in np.frombuffer(head_of(path, 12), "<i4"))
    dtype = np.dtype(LLMC_TYPES[code][1])
    wanted = npy.LLMC_BYTES + count * dtype.itemsize
    start, stop = min(npy.LLMC_BYTES, len(memory)), min(len(memory), wanted) if count > 0 else len(memory)
    found = Survey(path, memory=memory, start=start, stop=stop - (stop - start) % dtype.itemsize, dtype=dtype)
    found.facts["dtype"] = str(dtype)
    if len(memory) != wanted:
        fault = "truncated" if len(memory) < wanted else "appended"
        evidence = f"expected {wanted} bytes by its header, got {len(memory)}"
        found.say(fault, f"byte {min(len(memory), wanted)}", evidence)
    return found


def _guess(memory: Bytes8, options: Options) -> np.dtype[Any]:
    """The type of tokens without a header: by their halves, U16 where nothing else shows."""
    counts = TokenCounts(replace(options, seq_len=0, eos_id=None, vocab_size=0), rows=True)
    head = memory[: min(len(memory), 2 * WINDOW_TOKENS) & ~7]
    counts.feed(Window("", 0, head.view("<u2")))
    found = true_dtype(counts)
    return np.dtype("<" + found[1:]) if found and found != ">u2" else np.dtype("<u2")


def _ids(found: Survey) -> None:
    try:
        found.ids = npy.ids_of(found.path)
    except DatasetError as error:
        found.say("damaged-ids", "byte 0", str(error))


def _trailing_zeros(found: Survey) -> None:
    stop = max(found.start, min(found.stop, _data_end(found.path, found.stop)))
    while stop > found.start:
        piece = found.memory[max(found.start, stop - (1 << 20)) : stop]
        nonzero = np.flatnonzero(piece)
        if len(nonzero):
            stop += int(nonzero[-1]) + 1 - len(piece)
            break
        stop -= len(piece)
    zeros = found.stop - stop
    if zeros < BLOCK_BYTES:
        return
    stat = found.path.stat()
    sparse = (
        f"; {stat.st_blocks * 512:,} of its {stat.st_size:,} bytes take room on disk"
        if hasattr(stat, "st_blocks")
        else ""
    )
    evidence = (
        f"the last {zeros:,} bytes are zero, {zeros // found.dtype.itemsize:,} tokens 0: room that was set aside and "
        f"not written{sparse}"
    )
    stop += -(stop - found.start) % found.dtype.itemsize
    found.say("trailing-zeros", f"byte {stop}", evidence, sure=LIKELY)
    found.stop = stop


def _data_end(path: Path, size: int) -> int:
    """Where a sparse file's last data ends, holes passed at once; `size` where the system does not tell."""
    if not hasattr(os, "SEEK_HOLE"):
        return size
    with path.open("rb") as file:
        end = 0
        for _ in range(_MOST_EXTENTS):
            try:
                end = os.lseek(file.fileno(), os.lseek(file.fileno(), end, os.SEEK_DATA), os.SEEK_HOLE)
            except OSError as error:
                return end if error.errno == errno.ENXIO else size  # The former: no data from here on.
    return size


def _samples(found: Survey, options: Options) -> None:
    """Compare sample ids with their tokens; of large files some samples at even distances, unless `options.full`."""
    found.seq_len = options.seq_len
    if found.ids is None:
        return
    ids = map_file(found.ids.path)[found.ids.offset :].view("<u8")
    found.seq_len, faults = _check_ids(found, ids, options)
    found.facts["sample_ids"] = len(ids)
    found.facts["sample_tokens"] = found.seq_len or None
    found.findings += [Finding(fault, CERTAIN, str(found.ids.path), place, said) for fault, place, said in faults]


def _check_ids(found: Survey, ids: U64, options: Options) -> tuple[int, list[tuple[str, str, str]]]:
    """Tokens of a sample, 0 if no length fits; and (fault, place, evidence) of what is wrong."""
    count = found.count
    faults: list[tuple[str, str, str]] = []
    if not len(ids):
        return options.seq_len, [("phantom-ids", "sample 0", "expected an id for each sample, got none")]
    views = _views(found.memory, found.start, found.dtype)
    length, view = _find(views, ids, count, options.seq_len)
    empty = np.flatnonzero(ids == np.uint64(npy.NO_SAMPLE))
    if len(empty):
        evidence = f"{len(empty)} of {len(ids)} ids are {npy.NO_SAMPLE}, the id of no bytes at all"
        faults.append(("phantom-ids", f"sample {int(empty[0])}", evidence))
    elif len(ids) > 1 and bool((ids == ids[0]).all()):
        faults.append(("phantom-ids", "sample 0", f"all {len(ids)} ids are {int(ids[0])}"))
    if not length:
        if not faults:
            evidence = f"the ids of {len(ids)} samples fit the {count} tokens {found.dtype} under no known reading"
            faults.append(("ids-mismatch", "sample 0", evidence))
        return options.seq_len or (count // len(ids) if count and count % len(ids) == 0 else 0), faults
    whole = count // length
    if len(ids) > whole:
        evidence = f"expected {whole} ids for {count} tokens in samples of {length}, got {len(ids)}"
        faults.append(("phantom-ids", f"sample {whole}", evidence))
    elif len(ids) < whole or count % length:
        evidence = f"expected ids for {count} tokens in samples of {length}: {whole} and {count % length} tokens over, "
        faults.append(("ids-count", f"sample {min(len(ids), whole)}", evidence + f"got {len(ids)}"))
    if view != "own":
        return length, [*faults, ("ids-of-another-view", "sample 0", _WHY[view])]
    most, num_bytes = min(len(ids), whole), len(ids) * length * found.dtype.itemsize
    chosen = np.arange(most)
    if not options.full and num_bytes > options.most_bytes:
        chosen = np.unique(np.linspace(0, most - 1, max(2, most * options.most_bytes // num_bytes)).astype(np.int64))
    sample = views["own"]
    wrong = [
        i for i in chosen.tolist() if npy.sample_id(sample(i, length)) != int(ids[i]) and int(ids[i]) != npy.NO_SAMPLE
    ]
    if wrong:
        evidence = (
            f"{len(wrong)} of {len(chosen)} samples are not what their ids say, the others are: their tokens were "
            f"changed, such as by a damaged download (samples {', '.join(map(str, wrong[:8]))})"
        )
        faults.append(("ids-mismatch", f"sample {wrong[0]}", evidence))
    return length, faults


_WHY = {
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
        def one(i: int, n: int) -> NDArray[Any]:
            piece = memory[start + i * n * width : start + (i + 1) * n * width]
            return piece[: len(piece) - len(piece) % width].view(dtype).astype(to)

        return one

    views = {"own": raw(start, width), "swapped": cast(dtype.newbyteorder(">"))}
    views["widened" if width == 2 else "narrowed"] = cast("<u4" if width == 2 else "<u2")
    if start:
        views["header"] = raw(0, width)
    if width == 2:
        views["double"] = raw(start, 4)
    return views


def _find(views: dict[str, _Sample], ids: U64, count: int, told: int) -> tuple[int, str]:
    """(tokens of a sample, view) under which some id fits; (0, '') if none does.

    Spans of 4 bytes a token are those of samples twice as long: they are tried at the length that the counts give only.
    """
    guesses = dict.fromkeys([told] if told else [count // len(ids), -(-count // len(ids))])
    tries = [(view, n) for n in guesses for view in views if 0 < n <= count]
    if not told:
        tries += [(view, n) for view in views if view != "double" for n in _LENGTHS if n <= count]
    for i in dict.fromkeys([0, 1, len(ids) // 3, len(ids) // 2]):
        if i >= len(ids) or int(ids[i]) == npy.NO_SAMPLE:
            continue
        for view, length in tries:
            if i < count // length and npy.sample_id(views[view](i, length)) == int(ids[i]):
                return length, view
    return 0, ""


def _tokens(found: Survey, options: Options) -> None:
    counts = TokenCounts(replace(options, seq_len=found.seq_len))
    found.counts = counts
    found.read_bytes = found.start + len(found.memory) - found.stop
    for start, stop in _windows(found, options):
        tokens = found.tokens(start, stop)
        counts.feed(Window(str(found.path), start, tokens))
        found.read_bytes += tokens.nbytes
    said = {one.fault for one in found.findings} & {"byte-order"}  # By the header.
    found.findings += [one for one in judge(counts, str(found.path)) if one.fault not in said]


def _windows(found: Survey, options: Options) -> Iterator[tuple[int, int]]:
    """Windows that leave out what is known to be no tokens."""
    width, reached = found.dtype.itemsize, found.start
    for a, b in [*found.skips, (found.stop, found.stop)]:
        first = (reached - found.start) // width
        for start, stop in spans((a - reached) // width, width, options):
            yield first + start, first + stop
        reached = b
