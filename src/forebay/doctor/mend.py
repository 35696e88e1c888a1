"""Mended copies of files of tokens, written as they should have been, and of what is whole of Megatron's pairs.

Hides: the writing, in pieces of 4 Mi tokens, whatever the size; each file under a temporary name until it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.doctor.report import Options
from forebay.doctor.vectors import LLMC_BYTES, Survey, survey
from forebay.errors import DatasetError, UsageError
from forebay.formats.detect import MEGATRON_MAGIC
from forebay.formats.foreign import head_of, map_file, size_of
from forebay.formats.megatron import HEADER_BYTES, KINDS, columns_of
from forebay.formats.npy import npy_head, sample_id
from forebay.storage.atomic import atomic_write

_PIECE_TOKENS = 4 << 20


def mend_vector(path: Path, out: Path, options: Options) -> list[Path]:
    """Write a file of tokens, and its sample ids if it has some, to directory `out` without what was wrong.

    Headers among tokens, trailing zeros and parts of tokens or samples are left out; bytes are put in order; types are
    U16 or U32; ids are computed anew; a .npy gets its header.

    Returns:
        What was written.

    Raises:
        UsageError: If nothing mechanical mends what is wrong.
    """
    found = survey(path, options)
    stuck = [one for one in found.findings if one.is_wrong and "doctor" not in one.mend]
    if stuck:
        raise UsageError(
            f"{path}: {stuck[0].fault}: {stuck[0].evidence}. Nothing mechanical mends it: {stuck[0].mend}."
        )
    kind, target = found.true, _target(found)
    parts = _kept(found)
    count = sum(b - a for a, b in parts) // kind.itemsize
    length = found.seq_len if found.ids is not None else 0
    if length:
        count -= count % length
    if not count:
        raise UsageError(f"{path}: expected some tokens once it is mended, got none. Fetch or write it again.")
    written = [out / path.name]
    atomic_write(written[0], _file(found, target, count, parts))
    if found.ids is not None and length:
        written.append(out / found.ids.path.name)
        whole = np.memmap(written[0], np.uint8, "r")[-count * target.itemsize :].view(target)
        atomic_write(written[1], _ids(whole.reshape(-1, length), written[1].suffix == ".npy"))
    return written


def _target(found: Survey) -> np.dtype[Any]:
    """U16 for 2 bytes, else U32."""
    if found.true.kind not in "iu":
        raise UsageError(f"{found.path}: expected integers, got {found.true}. Write the tokens again.")
    return np.dtype("<u2" if found.true.itemsize == 2 else "<u4")


def _kept(found: Survey) -> list[tuple[int, int]]:
    """The bytes [a, b) that are tokens, each a whole number of them."""
    parts, reached = [], found.start
    for a, b in sorted(found.skips):
        if a >= reached:
            parts.append((reached, a))
            reached = b
    parts.append((reached, max(reached, found.stop)))
    width = found.true.itemsize
    return [(a, b - (b - a) % width) for a, b in parts if b - a >= width]


def _file(
    found: Survey, target: np.dtype[Any], count: int, parts: list[tuple[int, int]]
) -> Iterator[memoryview | bytes]:
    if found.path.suffix == ".npy":
        yield npy_head(target, count)
    elif found.kind == "llm.c":
        head = found.memory[:LLMC_BYTES].tobytes()
        yield head[:8] + count.to_bytes(4, "little") + head[12:]
    for tokens in _pieces(found, parts):
        some = tokens[:count]
        count -= len(some)
        if target.itemsize != found.true.itemsize or found.true.kind == "i":
            _check(found, some, target)
        yield np.ascontiguousarray(some.astype(target)).view(np.uint8).data


def _pieces(found: Survey, parts: list[tuple[int, int]]) -> Iterator[NDArray[Any]]:
    step = _PIECE_TOKENS * found.true.itemsize
    for a, b in parts:
        for start in range(a, b, step):
            yield found.memory[start : min(start + step, b)].view(found.true)


def _check(found: Survey, tokens: NDArray[Any], target: np.dtype[Any]) -> None:
    bound = 1 << (8 * target.itemsize)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < bound:
        raise DatasetError(
            f"{found.path}: expected ids in [0, {bound}), got {int(tokens.min())} to {int(tokens.max())}. "
            "Tokenize the text again."
        )


def _ids(samples: NDArray[Any], with_header: bool) -> Iterator[bytes]:
    if with_header:
        yield npy_head(np.dtype("<u8"), len(samples))
    for row in samples:
        yield sample_id(row).to_bytes(8, "little")


def can_mend(idx: Path, data: Path) -> bool:
    """Whether an index is whole and has some data beside it."""
    if not (idx.is_file() and data.is_file() and data.stat().st_size):
        return False
    head = head_of(idx, HEADER_BYTES)
    whole = len(head) == HEADER_BYTES and head[:17] == MEGATRON_MAGIC + (1).to_bytes(8, "little")
    return whole and head[17] in KINDS and size_of(idx) >= _wanted(head)


def _wanted(head: bytes) -> int:
    """Bytes of an index without modes."""
    return HEADER_BYTES + 12 * int.from_bytes(head[18:26], "little") + 8 * int.from_bytes(head[26:34], "little")


def mend_megatron(idx: Path, data: Path, out: Path) -> list[Path]:
    """Write a pair to directory `out` with the sequences of the index that lie whole in its data.

    Raises:
        DatasetError: If the index itself is cut off or is none.
        UsageError: If no sequence is whole.
    """
    if not can_mend(idx, data):
        raise DatasetError(f"{idx}: expected Megatron's whole index, and {data.name}, got less. Fetch both again.")
    raw = map_file(idx)
    head = raw[:HEADER_BYTES].tobytes()
    sequences, bounds = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    width = KINDS[head[17]].itemsize
    lengths, pointers, documents = columns_of(raw, sequences, bounds)
    lengths = lengths.astype(np.int64)
    size = size_of(data)
    bad = (lengths < 0) | (pointers < 0) | (pointers > size)
    bad |= lengths * width > size - np.where(bad, 0, pointers)
    whole = int(np.flatnonzero(bad)[0]) if bad.any() else sequences
    sound = (documents >= 0) & (documents <= whole) & (np.diff(documents, prepend=0) >= 0)
    kept = documents[: len(documents) if sound.all() else int(np.argmin(sound))]
    kept = kept if len(kept) > 1 and not kept[0] else kept[:0]
    if len(kept):
        whole = int(kept[-1])  # A document of which a sequence is lost goes whole.
    stop = int((pointers[:whole] + lengths[:whole] * width).max()) if whole else 0
    if not stop:
        raise UsageError(f"{idx}: expected some sequence whole in {data.name}, got none. Fetch both again.")
    head = head[:18] + whole.to_bytes(8, "little") + len(kept).to_bytes(8, "little")
    parts = [lengths[:whole].astype("<i4"), pointers[:whole], kept]
    targets = [out / data.name, out / idx.name]
    memory = map_file(data)
    atomic_write(targets[0], (memory[a : min(a + (1 << 22), stop)].data for a in range(0, stop, 1 << 22)))
    atomic_write(targets[1], head + b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    return targets
