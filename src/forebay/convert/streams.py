"""A source of tokens as one sink writes it: its type, its documents and its length settled, hashed as it passes.

Hides: that sources differ in all three. Pieces hold at most 4 Mi tokens, whatever the source's parts are, so that a
conversion takes tens of MB beside what its source maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.convert.content import Digest, Options, TokenPart, TokenSource, Written, documents
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.dataset.slices import TOKEN_HEADER_BYTES
from forebay.errors import DatasetError, UsageError
from forebay.prepare.tasks.slicing import next_cut

Documents = Literal["source", "eos", "samples", "none"]

MOST_TOKENS = 4 << 20  # Of one piece.
_NO_TOKENS = np.empty(0, np.uint64)


@dataclass
class Stream:
    """The tokens that are written, with the ends that are written."""

    source: TokenSource
    dtype: str  # `U16` or `U32`.
    documents: Documents  # Whose ends: the source's, after each `eos_id`, each `seq_len` tokens, or nobody's.
    num_tokens: int  # The first so many of the source; what follows is left out.
    closed: bool  # Give the tokens after the last end one of their own.
    most_id: int  # The largest token that can be written.
    options: Options
    notes: list[str] = field(default_factory=list)  # What was left out or made.
    digest: Digest = field(default_factory=Digest)  # Of the last whole reading.

    @property
    def num_documents(self) -> int:
        """Ends that were written, once all is read."""
        return self.digest.num_documents

    @property
    def seq_len(self) -> int | None:
        """Tokens of every document, where all but the last have as many."""
        return self.options.seq_len if self.documents == "samples" else None

    @property
    def itemsize(self) -> int:
        """Bytes of a token as written."""
        return TOKEN_DTYPES[self.dtype].itemsize

    def written(self, files: Sequence[Path], num_rows: int | None = None) -> Written:
        """What a sink reports once all parts were read."""
        tokens, documents = self.num_tokens, self.num_documents
        return Written(tuple(files), tokens, num_rows, documents, self.digest.whole, tuple(self.notes))

    def parts(self) -> Iterator[TokenPart]:
        """Pieces of at most 4 Mi tokens, in the type to be written."""
        digest, after_end, ended = Digest(), 0, 0
        for piece in self._pieces():
            tokens = self._fit(piece, digest.num_tokens, ended)
            ended += len(piece.ends)
            part = TokenPart(tokens, self._ends(piece, digest.num_tokens))
            after_end = len(tokens) - int(part.ends[-1]) if len(part.ends) else after_end + len(tokens)
            digest.add(part)
            self.options.advance(len(tokens))
            yield part
        if digest.num_tokens != self.num_tokens:
            raise DatasetError(
                f"{self.source.kind}: expected {self.num_tokens} tokens, as it says, got {digest.num_tokens}. "
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
        left = self.num_tokens
        for part in self.source.parts():
            first = start = 0
            while start < len(part.tokens) or first < len(part.ends):
                stop = min(len(part.tokens), start + MOST_TOKENS, start + left)
                last = int(np.searchsorted(part.ends, np.uint64(stop), "right"))
                yield TokenPart(part.tokens[start:stop], part.ends[first:last] - np.uint64(start))
                left -= stop - start
                if not left and stop < len(part.tokens):
                    return
                start, first = stop, last

    def _ends(self, piece: TokenPart, before: int) -> NDArray[np.uint64]:
        match self.documents:
            case "source":
                return piece.ends
            case "eos":
                return (np.flatnonzero(piece.tokens == self.options.eos_id) + 1).astype(np.uint64)
            case "samples":
                assert self.options.seq_len is not None
                seq_len = self.options.seq_len
                return np.arange(-before % seq_len or seq_len, len(piece.tokens) + 1, seq_len, dtype=np.uint64)
        return _NO_TOKENS

    def _fit(self, piece: TokenPart, before: int, ended: int) -> NDArray[Any]:
        """The tokens in the type to be written, given how many tokens and document ends of the source went before."""
        tokens, kind = piece.tokens, TOKEN_DTYPES[self.dtype]
        if len(tokens) and int(np.iinfo(tokens.dtype).max) > self.most_id and int(tokens.max()) > self.most_id:
            at = int(np.argmax(tokens > self.most_id))
            ended += int(np.searchsorted(piece.ends, np.uint64(at), "right"))
            advice = "Write them with --dtype uint32." if self.dtype == "U16" else "They are no token ids."
            raise UsageError(
                f"{self.source.kind}: expected token ids of at most {self.most_id} to write {kind}, got "
                f"{int(tokens[at])} at token {before + at}, after {ended} documents. {advice}"
            )
        return tokens.astype(kind, copy=False)


def settle(
    source: TokenSource,
    options: Options,
    ends: Literal["keep", "rows", "none"],
    *,
    signed: bool = False,
    whole: int = 1,
) -> Stream:
    """How a source is written.

    Args:
        ends: `keep` those there are; `rows` where the format needs every token in one; `none` where it has none.
        signed: Whether U32 is written as signed numbers.
        whole: Tokens of a sample where only whole samples can be written.
    """
    dtype = options.dtype or source.dtype
    most_id = (1 << 16) - 1 if dtype == "U16" else (1 << 31) - 1 if signed else (1 << 32) - 1
    notes = []
    kept = source.num_tokens // whole * whole
    if kept < source.num_tokens:
        notes.append(f"the last {source.num_tokens - kept} tokens are no whole sample of {whole}: they were left out")
    whose: Documents = "none"
    if ends != "none":
        if ends == "rows" and options.seq_len:
            whose = "samples"
        elif source.num_documents:
            whose = "source"
        elif options.eos_id is not None:
            whose = "eos"
        elif ends == "rows":
            raise UsageError(
                f"{source.kind}: expected to know where documents end, as each becomes a record, got a source that "
                "tells none. Give --eos-id N, if a token ends each, or --seq-len N for samples of equal length."
            )
    if source.num_documents and whose in ("none", "samples"):
        notes.append(f"the ends of {source.num_documents} documents are not in what was written")
    return Stream(source, dtype, whose, kept, ends == "rows", most_id, options, notes)


def slices_of(stream: Stream, slice_bytes: int, slice_tokens: int | None = None) -> Iterator[TokenPart]:
    """The stream in slices: as large as fits in `slice_bytes` with their ends, or of `slice_tokens`."""
    most = slice_tokens or max(1, (slice_bytes - TOKEN_HEADER_BYTES) // stream.itemsize)
    held: list[TokenPart] = []
    count = 0
    for part in stream.parts():
        held.append(part)
        count += len(part.tokens)
        while count >= most + 1:  # One more, so that no end at the cut is still to come.
            one, rest = _cut(_joined(held), most, stream.itemsize, slice_bytes if not slice_tokens else 0)
            yield one
            held, count = [rest], len(rest.tokens)
    while held and (count or len(held[-1].ends)):
        one, rest = _cut(_joined(held), most, stream.itemsize, slice_bytes if not slice_tokens else 0)
        yield one
        held, count = ([rest], len(rest.tokens)) if len(rest.tokens) else ([], 0)


def shards_of(
    stream: Stream, most_bytes: int, record_bytes: int, most_tokens: int | None
) -> Iterator[list[NDArray[Any]]]:
    """The documents in groups whose bytes, with `record_bytes` for each, stay within `most_bytes`, or their tokens
    within `most_tokens`; a document larger than that is a group of its own."""
    group: list[NDArray[Any]] = []
    size = tokens = 0
    for document in documents(stream.parts()):
        added = document.nbytes + record_bytes
        full = tokens + len(document) > most_tokens if most_tokens else size + added > most_bytes
        if group and full:
            yield group
            group, size, tokens = [], 0, 0
        group.append(document)
        size, tokens = size + added, tokens + len(document)
    if group:
        yield group


def _joined(parts: list[TokenPart]) -> TokenPart:
    if len(parts) == 1:
        return parts[0]
    bases = np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.uint64)
    ends = [part.ends + base for part, base in zip(parts, bases)]
    return TokenPart(np.concatenate([part.tokens for part in parts]), np.concatenate(ends))


def _cut(part: TokenPart, most: int, itemsize: int, slice_bytes: int) -> tuple[TokenPart, TokenPart]:
    """The first slice of what is held, and the rest."""
    stop = min(most, len(part.tokens))
    if slice_bytes and len(part.tokens):
        stop = next_cut(part.ends, 0, 0, len(part.tokens), itemsize, slice_bytes)[0]
    last = int(np.searchsorted(part.ends, np.uint64(stop), "right"))
    rest = TokenPart(part.tokens[stop:], part.ends[last:] - np.uint64(stop))
    return TokenPart(part.tokens[:stop], part.ends[:last]), rest
