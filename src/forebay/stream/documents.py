"""One epoch's documents on their way to tokens: read, dealt to ranks if asked, mixed, encoded.

Hides: how many are encoded at a time. Which tokens come out, and in which order, does not depend on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats.records import Record
from forebay.prepare.tokenize.encoders import Encoder, make_encoder
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.stream.buffer import ShuffleBuffer
from forebay.stream.records import Reading

FIRST_BYTES, MOST_BYTES = 64 << 10, 1 << 20
"""Text encoded at a time: little at first, for an early first batch; then twice as much each time, up to the most."""
MOST_MALFORMED = 1000


@dataclass(frozen=True)
class Malformed:
    """A record that was skipped: the file or dataset, where in it, and what is wrong."""

    name: str
    location: str
    problem: str


@dataclass
class Tally:
    """What was counted of a run, and the first `MOST_MALFORMED` malformed records."""

    counts: dict[str, int]
    malformed: list[Malformed]

    def record_malformed(self, record: Record, name: str, problem: str) -> None:
        """Count a malformed record."""
        self.counts["malformed"] += 1
        if len(self.malformed) < MOST_MALFORMED:
            self.malformed.append(Malformed(name, record.location, problem))


class Documents:
    """The documents of an epoch that a rank encodes, in the order in which it does.

    `share` (rank, world size): every world-size-th record from number `rank` on; `records`: sound ones read before.
    """

    def __init__(
        self, reading: Reading, buffer: ShuffleBuffer, tally: Tally, share: tuple[int, int], records: int
    ) -> None:
        self.reading, self.buffer, self.records = reading, buffer, records
        self._tally, self._share = tally, share
        self._texts = self._mixed()

    def take(self, num_bytes: int) -> list[bytes]:
        """The next documents, UTF-8, of about that many bytes together; none at the epoch's end."""
        texts: list[bytes] = []
        while num_bytes > 0 and (text := next(self._texts, None)) is not None:
            texts.append(text)
            num_bytes -= len(text)
        return texts

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._texts.close()  # type: ignore[attr-defined]  # a generator

    def _mixed(self) -> Iterator[bytes]:
        sound = self._sound()
        while True:
            while self.buffer.full:
                yield self.buffer.pop()
            text = next(sound, None)
            if text is None:
                break
            self.buffer.push(text)
        while len(self.buffer):
            yield self.buffer.pop()

    def _sound(self) -> Iterator[bytes]:
        rank, world_size = self._share
        for record, name in self.reading:
            if record.problem:
                if record.problem != "blank":
                    self._tally.record_malformed(record, name, record.problem)
                continue
            if record.html:
                raise DatasetError(
                    f"{name}: expected text, got HTML ({record.location or 'its first record'}), which would be learnt "
                    "with its markup. Make a dataset of it with `forebay prepare`."
                )
            try:
                text = record.text.encode()
            except UnicodeEncodeError:
                self._tally.record_malformed(record, name, "half a surrogate pair in the text")
                continue
            self.records += 1
            if (self.records - 1) % world_size == rank:
                yield text


class TextEncoder:
    """Texts to one run of tokens, each with its BOS and EOS; an empty text gives none."""

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self._tokenizer = tokenizer
        self._coder: Encoder | None = None
        self.next_bytes = FIRST_BYTES  # How much text to bring next.

    def encode(self, texts: list[bytes], counts: dict[str, int]) -> NDArray[Any]:
        """The tokens, in the tokenizer's type [T]; `counts` grows by what they were."""
        if self._coder is None:
            self._coder = make_encoder(self._tokenizer.data, self._tokenizer.kind)
        self.next_bytes = min(2 * self.next_bytes, MOST_BYTES)
        dtype = self._tokenizer.numpy_dtype
        before, after = (
            np.array([] if token is None else [token], dtype)
            for token in (self._tokenizer.bos_id, self._tokenizer.eos_id)
        )
        parts: list[NDArray[Any]] = [np.zeros(0, dtype)]
        for ids in self._coder.encode([text.decode() for text in texts if text]):
            parts += (before, ids, after)
        tokens = np.concatenate(parts, dtype=dtype, casting="unsafe")
        counts["documents"] += len(texts)
        counts["empty"] += sum(not text for text in texts)
        counts["text_bytes"] += sum(map(len, texts))
        counts["tokens"] += len(tokens)
        return tokens
