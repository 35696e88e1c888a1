"""The texts that a tokenizer learns from: a deterministic sample of all parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from forebay.errors import PrepareError
from forebay.prepare.tokens.encode import TextPart
from forebay.prepare.tokens.tokenizers import SAMPLE_BYTES

_PART_BYTES = 4 << 20


def sample_texts(parts: Sequence[TextPart], seed: int, limit: int = SAMPLE_BYTES) -> Iterator[str]:
    """Texts of at most `limit` bytes: parts in the order of a keyed hash, from the beginning of each at most 4 MiB, or
    an equal share of the limit if that is more. A function of the parts' names and contents, the seed and the limit.

    Raises:
        PrepareError: If a part cannot be read.
    """

    def key(part: TextPart) -> bytes:
        return hashlib.sha256(f"forebay sample {seed} {part.name}".encode()).digest()

    share, left = max(_PART_BYTES, limit // max(1, len(parts))), limit
    for part in sorted(parts, key=key):
        here = min(share, left)
        for text in _texts(part):
            data = text.encode()[:here]
            piece = data.decode("utf-8", "ignore")
            here, left = here - len(data), left - len(data)
            if piece:
                yield piece
            if here <= 0:
                break
        if left <= 0:
            return


def _texts(part: TextPart) -> Iterator[str]:
    try:
        with pa.OSFile(part.arrow, "rb") as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield from reader.get_batch(number).column("text").to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise PrepareError(
            f"{part.arrow}: cannot read the documents of an earlier run: {error}. Remove .work and run again."
        ) from error
