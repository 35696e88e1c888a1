"""Tokens to Megatron's indexed dataset: `<name>_text_document.bin` and `.idx`, one sequence a document.

Hides: that the index comes as three columns, of which only the lengths are kept as they come (4 bytes a document, in a
file); the other two are made of them, a run at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import settle
from forebay.errors import UsageError
from forebay.formats.detect import MEGATRON_MAGIC

_CODES = {"U16": 8, "U32": 4}  # uint16, int32.
_MOST_LENGTH = (1 << 31) - 1
_RUN = 1 << 18


def write_megatron(source: TokenSource, out: Path, options: Options) -> Written:
    """A pair of files in a new directory. Tokens of U32 are written as int32."""
    stream = settle(source, options, "rows", signed=True)
    out.mkdir()
    base = f"{options.name or 'dataset'}_text_document"
    data, idx, lengths = (out / f"{base}{suffix}" for suffix in (".bin", ".idx", ".lengths"))
    before = reached = count = 0
    with data.open("wb") as tokens, lengths.open("wb") as sizes:
        for part in stream.parts():
            tokens.write(np.ascontiguousarray(part.tokens).view(np.uint8).data)
            ends = part.ends.astype(np.int64) + reached
            found = np.diff(ends, prepend=before)
            if len(found) and int(found.max()) > _MOST_LENGTH:
                raise UsageError(
                    f"megatron: expected documents of at most {_MOST_LENGTH} tokens, got one of {int(found.max())}. "
                    "Give --seq-len N, or --eos-id N if a token ends each."
                )
            sizes.write(found.astype("<i4").tobytes())
            before = int(ends[-1]) if len(ends) else before
            reached += len(part.tokens)
            count += len(ends)
    with lengths.open("rb") as sizes, idx.open("wb") as index:
        index.write(MEGATRON_MAGIC + (1).to_bytes(8, "little") + bytes([_CODES[stream.dtype]]))
        index.write(count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little"))
        _write_columns(index, sizes, count, stream.itemsize)
    lengths.unlink()
    return stream.written([Path(data.name), Path(idx.name)])


def _write_columns(index: BinaryIO, lengths: BinaryIO, count: int, itemsize: int) -> None:
    """Lengths, pointers and document bounds."""
    for _ in range(0, count, _RUN):
        index.write(lengths.read(4 * _RUN))
    lengths.seek(0)
    pointer = 0
    for _ in range(0, count, _RUN):
        sizes = np.frombuffer(lengths.read(4 * _RUN), "<i4").astype(np.int64) * itemsize
        stops = np.cumsum(sizes) + pointer
        index.write((stops - sizes).astype("<i8").tobytes())
        pointer = int(stops[-1])
    for start in range(0, count + 1, _RUN):
        index.write(np.arange(start, min(start + _RUN, count + 1), dtype="<i8").tobytes())
