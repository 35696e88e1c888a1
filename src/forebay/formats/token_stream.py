"""A source of tokens as one format writes it: with its type, documents and length resolved, hashed while it is read.

Pieces hold at most 4 Mi tokens, whatever the source's parts are, so that a conversion needs tens of MB beside what its
source maps.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from forebay.arrays import U64, Array
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.dataset.slices import TOKEN_HEADER_BYTES, next_cut
from forebay.errors import DatasetError, UsageError
from forebay.formats.conversion import ConvertOptions, TokenPart, TokenSource, Written

Documents = Literal["source", "eos", "samples", "none"]

MAX_TOKENS = 4 << 20  # Of one piece.
_NO_TOKENS = np.empty(0, np.uint64)


class TokenDigest:
    """The hash of a stream of tokens and of its document ends, whatever its type and however it is divided.

    SHA-256, which processors have instructions for, of four runs of numbers: the low 16 bits of every token; the
    positions of tokens of 65536 and above (u64), and their high 16 bits; the ends, from the stream's start, as u64.
    """

    def __init__(self) -> None:
        self._low, self._positions, self._high, self._document_ends = (hashlib.sha256() for _ in range(4))
        self.num_tokens, self.num_documents = 0, 0

    def add(self, part: TokenPart) -> None:
        """Add the next part."""
        for start in range(0, len(part.tokens), 1 << 20):
            piece = part.tokens[start : start + (1 << 20)]
            self._low.update(np.ascontiguousarray(piece.astype("<u2", copy=False)).view(np.uint8).data)
            if piece.dtype.itemsize > 2 and len(positions := np.flatnonzero(piece >> 16)):
                self._positions.update((positions + (self.num_tokens + start)).astype("<u8").view(np.uint8).data)
                self._high.update((piece[positions] >> 16).astype("<u2").view(np.uint8).data)
        self._document_ends.update(
            np.ascontiguousarray(part.document_ends + np.uint64(self.num_tokens), "<u8").view(np.uint8).data
        )
        self.num_tokens += len(part.tokens)
        self.num_documents += len(part.document_ends)

    @property
    def tokens(self) -> str:
        """Of the tokens alone, hex, 128 bits."""
        parts = (run.digest() for run in (self._low, self._positions, self._high))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:32]

    @property
    def text(self) -> str:
        """Of tokens and document ends: `<hex>:<hex>`."""
        return f"{self.tokens}:{self._document_ends.hexdigest()[:32]}"


def documents(parts: Iterable[TokenPart]) -> Iterator[Array]:
    """Yield each document of a stream, its tokens [T]; then the rest after the last end. Holds one document."""
    pending: list[Array] = []
    for part in parts:
        start = 0
        for end in part.document_ends.tolist():
            piece = part.tokens[start:end]
            if pending:
                piece, pending = np.concatenate([*pending, piece]), []
            yield piece
            start = end
        if start < len(part.tokens):
            pending.append(part.tokens[start:])
    if pending:
        yield np.concatenate(pending)


@dataclass
class TokenStream:
    """The tokens that are written, with the ends that are written.

    Attributes:
        source: Where they are from.
        dtype: `U16` or `U32`.
        documents: Which ends: the source's, after each `eos_id`, each `seq_len` tokens, or none.
        closed: Whether the tokens after the last end get an end of their own.
        max_id: The largest token that can be written.
        notes: What was left out or added.
        digest: Of the last complete reading.
        num_written: Tokens and documents that an earlier run wrote; the source begins behind them, and the digest is
            of what follows.
    """

    source: TokenSource
    dtype: str
    documents: Documents
    closed: bool
    max_id: int
    options: ConvertOptions
    notes: list[str]
    digest: TokenDigest = field(default_factory=TokenDigest)
    num_written: tuple[int, int] = (0, 0)

    def written(self, files: Sequence[Path], num_rows: int | None = None) -> Written:
        """Return the result of writing, once all parts were read."""
        tokens, documents = self.digest.num_tokens, self.digest.num_documents
        return Written(tuple(files), tokens, num_rows, documents, self.digest.text, tuple(self.notes))

    def parts(self) -> Iterator[TokenPart]:
        """Yield pieces of at most 4 Mi tokens, in the type to be written."""
        digest, after_end, num_ended = TokenDigest(), 0, self.num_written[1]
        digest.num_tokens, digest.num_documents = self.num_written
        for piece in self._pieces():
            tokens = self._cast(piece, digest.num_tokens, num_ended)
            num_ended += len(piece.document_ends)
            part = TokenPart(tokens, self._find_ends(piece, digest.num_tokens))
            after_end = (
                len(tokens) - int(part.document_ends[-1]) if len(part.document_ends) else after_end + len(tokens)
            )
            digest.add(part)
            self.options.on_progress(len(tokens))
            yield part
        if self.source.num_tokens not in (None, digest.num_tokens):
            raise DatasetError(
                f"{self.source.format}: expected {self.source.num_tokens} tokens, as it says, got {digest.num_tokens}. "
                "Fetch it again."
            )
        if self.closed and after_end:
            last = TokenPart(np.empty(0, TOKEN_DTYPES[self.dtype]), np.zeros(1, np.uint64))
            digest.add(last)
            if self.documents != "samples":
                self.notes.append(f"the last {after_end} tokens end no document of the source: they were given an end")
            yield last
        self.digest = digest

    def _pieces(self) -> Iterator[TokenPart]:
        for part in self.source.parts():
            first = start = 0
            while start < len(part.tokens) or first < len(part.document_ends):
                stop = min(len(part.tokens), start + MAX_TOKENS)
                last = int(np.searchsorted(part.document_ends, np.uint64(stop), "right"))
                yield TokenPart(part.tokens[start:stop], part.document_ends[first:last] - np.uint64(start))
                start, first = stop, last

    def _find_ends(self, piece: TokenPart, before: int) -> U64:
        match self.documents:
            case "source":
                return piece.document_ends
            case "eos":
                return (np.flatnonzero(piece.tokens == self.options.eos_id) + 1).astype(np.uint64)
            case "samples":
                assert self.options.seq_len is not None
                seq_len = self.options.seq_len
                return np.arange(-before % seq_len or seq_len, len(piece.tokens) + 1, seq_len, dtype=np.uint64)
        return _NO_TOKENS

    def _cast(self, piece: TokenPart, before: int, num_ended: int) -> Array:
        tokens, dtype = piece.tokens, TOKEN_DTYPES[self.dtype]
        if len(tokens) and int(np.iinfo(tokens.dtype).max) > self.max_id and int(tokens.max()) > self.max_id:
            index = int(np.argmax(tokens > self.max_id))
            num_ended += int(np.searchsorted(piece.document_ends, np.uint64(index), "right"))
            is_wide = self.max_id == 65535
            advice = (
                "Write them with --dtype uint32." if is_wide else "They are no token ids, or vocab_size is too small."
            )
            raise UsageError(
                f"{self.source.format}: expected token ids of at most {self.max_id} to write {dtype}, got "
                f"{int(tokens[index])} at token {before + index}, after {num_ended} documents. {advice}"
            )
        return tokens.astype(dtype, copy=False)


def build_stream(
    source: TokenSource, options: ConvertOptions, boundaries: Literal["keep", "rows", "none"], *, signed: bool = False
) -> TokenStream:
    """Resolve how a source is written.

    Args:
        boundaries: `keep` those of the source; `rows` where the format needs every token in a document; `none` where
            it has none.
        signed: Whether U32 is written as signed numbers.
    """
    dtype = options.dtype or source.dtype
    max_id = (1 << 16) - 1 if dtype == "U16" else (1 << 31) - 1 if signed else (1 << 32) - 1
    if options.vocab_size:
        max_id = min(max_id, options.vocab_size - 1)
    notes = []
    documents: Documents = "none"
    if boundaries != "none":
        if boundaries == "rows" and options.seq_len:
            documents = "samples"
        elif source.num_documents != 0:
            documents = "source"
        elif options.eos_id is not None:
            documents = "eos"
        elif boundaries == "rows":
            raise UsageError(
                f"{source.format}: expected to know where documents end, as each becomes a record, got a source that "
                "does not tell. Give --set eos_id=N, if a token ends each, or --seq-len N for samples of equal length."
            )
    if source.num_documents != 0 and documents in ("none", "samples"):
        count = "" if source.num_documents is None else f"{source.num_documents} "
        notes.append(f"the ends of {count}documents are not in what was written")
    if left_out := source.metadata.get("left_out"):
        notes.append(f"left out columns beside the tokens ({len(left_out)}): {', '.join(left_out)}")
    return TokenStream(source, dtype, documents, boundaries == "rows", max_id, options, notes)


def slices_of(stream: TokenStream, slice_bytes: int) -> Iterator[TokenPart]:
    """Yield the stream in slices, as large as fits in `slice_bytes` with their ends."""
    itemsize = TOKEN_DTYPES[stream.dtype].itemsize
    size = max(1, (slice_bytes - TOKEN_HEADER_BYTES) // itemsize)
    pending = []
    count = 0
    for part in chain(stream.parts(), [None]):  # None: no other part follows.
        if part is not None:
            pending.append(part)
            count += len(part.tokens)
        # One more, so that no end at the border is still to come.
        while count >= size + 1 or (part is None and pending and (count or len(pending[-1].document_ends))):
            first, rest = _cut(_joined(pending), size, itemsize, slice_bytes)
            yield first
            pending, count = [rest], len(rest.tokens)


def _joined(parts: list[TokenPart]) -> TokenPart:
    if len(parts) == 1:
        return parts[0]
    bases = np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.uint64)
    document_ends = [part.document_ends + base for part, base in zip(parts, bases)]
    return TokenPart(np.concatenate([part.tokens for part in parts]), np.concatenate(document_ends))


def _cut(part: TokenPart, size: int, itemsize: int, slice_bytes: int) -> tuple[TokenPart, TokenPart]:
    stop = min(size, len(part.tokens))
    if len(part.tokens):
        stop = next_cut(part.document_ends, 0, len(part.tokens), itemsize, slice_bytes)[0]
    last = int(np.searchsorted(part.document_ends, np.uint64(stop), "right"))
    rest = TokenPart(part.tokens[stop:], part.document_ends[last:] - np.uint64(stop))
    return TokenPart(part.tokens[:stop], part.document_ends[:last]), rest
