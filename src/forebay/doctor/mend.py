"""Mended copies of files of tokens: what a survey found, written as it should have been.

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
