"""A lane: an endless run of samples out of a share of the documents, the same whatever rank reads it.

Documents of an epoch are mixed, encoded, joined with EOS and cut into samples. A sample does not reach over the end of
an epoch: the tokens that remain there are counted as `tail_tokens`.

Hides how many documents are encoded at a time (which tokens come out, and in which order, does not depend on it), and
the generator of the shuffle buffer: our own, by counter, so that no library's version changes the order. Memory: the
buffer's `max_bytes` of UTF-8 and the largest document, plus 40 bytes a document.
"""

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from forebay.arrays import Array
from forebay.errors import DatasetError
from forebay.order.bijection import derive_key, random_words
from forebay.order.step_index import check_integer
from forebay.prepare.tokenize.encoders import Encoder, make_encoder
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.stream.hub import Records
from forebay.stream.records import Share
from forebay.stream.state import LaneState
from forebay.units import as_size, parse_sizes

_PART_SAMPLES = 64
_MAX_MALFORMED = 1000
FIRST_BYTES, MAX_BYTES = 64 << 10, 1 << 20
"""Text encoded at a time: little at first, for an early first batch; then twice as much each time, up to the most."""
_BLOCK = 1024


@dataclass(frozen=True)
class Malformed:
    """A record that was skipped: the file or dataset, where in it, and what is wrong."""

    name: str
    location: str
    problem: str


class ShuffleBuffer:
    """Documents, UTF-8, of which any may be next.

    Args:
        size: Documents that it holds before one goes out; 0 keeps their order.
        max_bytes: It gives one out sooner if they are longer than this together.
        key: 16 bytes that fix the choices.
        draws: How many were chosen before.
        texts: What it holds, in its own order.
        start: Documents after which the first goes out; from there it grows by one with each. None: `size`.
    """

    def __init__(
        self, size: int, max_bytes: int, key: bytes, draws: int = 0, texts: Iterable[bytes] = (),
        start: int | None = None,
    ) -> None:  # fmt: skip
        self._size, self._max_bytes, self._key = size, max_bytes, key
        self._start = size if start is None else start
        self.draws = draws
        self.texts = list(texts)
        self._bytes = sum(map(len, self.texts))
        self._words: list[int] = []
        self._block = -1

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def full(self) -> bool:
        """Whether one must go out before another comes in."""
        return len(self.texts) > min(self._size, self._start + self.draws) or self._bytes > self._max_bytes

    def push(self, text: bytes) -> None:
        """Add a document."""
        self.texts.append(text)
        self._bytes += len(text)

    def pop(self) -> bytes:
        """Remove and return any, each with the same chance; the last takes its place."""
        block, index = divmod(self.draws, _BLOCK)
        if block != self._block:
            counters = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
            self._words, self._block = (random_words(self._key, counters) >> np.uint64(32)).tolist(), block
        self.draws += 1
        slot = self._words[index] * len(self.texts) >> 32
        text, self.texts[slot] = self.texts[slot], self.texts[-1]
        self.texts.pop()
        self._bytes -= len(text)
        return text


class TextEncoder:
    """Texts to one run of tokens, each with its BOS and EOS; an empty text gives none."""

    def __init__(self, tokenizer: TokenizerFile, lanes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = MAX_BYTES // lanes  # For each of the lanes that it encodes.
        self.next_bytes = min(FIRST_BYTES, self._max_bytes)  # How much text to bring next.

    @cached_property
    def _encoder(self) -> Encoder:
        return make_encoder(self._tokenizer.data, self._tokenizer.kind)

    def encode(self, texts: list[bytes], counts: dict[str, int]) -> Array:
        """Return the tokens, in the tokenizer's type [T]; `counts` grows by what they were."""
        self.next_bytes = min(2 * self.next_bytes, self._max_bytes)
        tokenizer, dtype = self._tokenizer, self._tokenizer.numpy_dtype
        before, after = ([] if token is None else [token] for token in (tokenizer.bos_id, tokenizer.eos_id))
        parts: list[Any] = [np.zeros(0, dtype)]
        for ids in self._encoder.encode([text.decode() for text in texts if text]):
            parts += (before, ids, after)
        tokens = np.concatenate(parts, dtype=dtype, casting="unsafe")
        counts["documents"] += len(texts)
        counts["empty"] += texts.count(b"")
        counts["text_bytes"] += sum(map(len, texts))
        counts["tokens"] += len(tokens)
        return tokens


@dataclass(frozen=True)
class StreamOptions:
    """The settings of a TextStream that most runs leave alone.

    Args:
        lanes: Shares into which the documents are divided; sample k of the stream comes from lane k mod lanes. None:
            the world size, so that each rank reads one. 1: one stream, of which every rank reads everything.
        shuffle_documents: Documents of a lane that are mixed.
        shuffle_bytes: Fewer are mixed if they are longer than this together.
        warmup_documents: Documents after which the first goes out, for an early first batch; the buffer then grows by
            one with each that does. None: all of shuffle_documents are read first.
        text_key: The field or column with the text.
        format: Of all files, if they should not be sniffed.
        eos, bos: Whether a token ends and begins each document; or its name.
        drop_last: Leave out the short batch at an epoch's end; of a stream of one lane.
        dtype: int64 or int32, of `inputs` and `labels`.
        prefetch_batches: Batches made ahead by a thread; 0 makes them in the caller's.
    """

    lanes: int | None = None
    shuffle_documents: int = 10_000
    shuffle_bytes: int | str = 256 << 20
    warmup_documents: int | None = None
    text_key: str = "text"
    format: str = "auto"
    eos: bool | str = True
    bos: bool | str = False
    drop_last: bool = False
    dtype: Any = "int64"
    prefetch_batches: int = 2

    def __post_init__(self) -> None:
        parse_sizes(self)
        for name in ("shuffle_documents", "shuffle_bytes", "warmup_documents", "prefetch_batches"):
            check_integer(name, getattr(self, name), 0)
        check_integer("lanes", self.lanes, 1)


@dataclass(eq=False)
class Lane:
    """The samples of one share of the records, of `seq_len` tokens, from `state` on.

    `malformed` becomes the first 1000 records that are no text; `times` grows by the seconds of reading and mixing
    documents (`read_s`) and of encoding them (`tokenize_s`). Files are in the order of the input unless `shuffle`.
    """

    _records: Records
    _share: Share
    _encoder: TextEncoder
    _options: StreamOptions
    state: LaneState
    _: KW_ONLY
    seq_len: int
    seed: int
    shuffle: bool
    malformed: list[Malformed]
    times: dict[str, float]
    _documents: Generator[bytes, None, None] | None = None  # The documents of the epoch that is being read.

    def take(self, count: int) -> tuple[Array, int]:
        """Return the tokens of the next samples, and how many samples: fewer than `count` at an epoch's end alone.

        The tokens are those of the samples and, unless the epoch ends there, the one after, which is the last label.
        With `drop_last` an epoch's last samples are left out if they are fewer than `count`.

        Raises:
            DatasetError: If an epoch has no sample (with `drop_last`, fewer than `count`).
        """
        length, state = self.seq_len, self.state
        last = count if self._options.drop_last else 1
        required = (count + last) * length  # to know the last samples for the last
        if len(state.tokens) - state.offset < required:
            state = self._fill(required)
        num_tokens = len(state.tokens) - state.offset
        size = min(count, num_tokens // length)
        if size < last:
            raise self._too_short(num_tokens, last)
        stop = state.offset + size * length
        tokens, tail = state.tokens[state.offset : stop + 1], len(state.tokens) - stop
        if num_tokens < required and tail < length * last:
            counts = {**state.counts, "tail_tokens": state.counts["tail_tokens"] + tail}
            self.state = LaneState(state.epoch + 1, state.taken + size, tokens=state.tokens[:0], counts=counts)
            self.close()
        else:
            self.state = replace(state, taken=state.taken + size, offset=stop)
        return tokens, size

    def read_to(self, taken: int) -> Iterator[int]:
        """Read on until so many samples were given out in the run; yields how many after each part."""
        while self.state.taken < taken:
            self.take(min(_PART_SAMPLES, taken - self.state.taken))
            yield self.state.taken

    def close(self) -> None:
        """Close the files. May be called twice."""
        documents, self._documents = self._documents, None
        if documents is not None:
            documents.close()

    def _open(self) -> Generator[bytes, None, None]:
        """Return the documents of the epoch from the state on, UTF-8, in the order in which they are encoded."""
        options, state = self._options, self.state
        key = derive_key(self.seed, "stream", "files", state.epoch) if self.shuffle else None
        self._reading = self._records.open(state.epoch, key, state.position, self._share)
        self._buffer = ShuffleBuffer(
            options.shuffle_documents, as_size(options.shuffle_bytes),
            derive_key(self.seed, "stream", "documents", state.epoch, self._share.lane), state.draws, state.buffered,
            options.warmup_documents,
        )  # fmt: skip
        self._counts, self._num_records = dict(state.counts), state.records
        return self._mix(self._buffer)

    def _mix(self, buffer: ShuffleBuffer) -> Generator[bytes, None, None]:
        sound = self._read()
        while True:
            while buffer.full:  # Also at the beginning: a state may hold more than the buffer's size.
                yield buffer.pop()
            if (text := next(sound, None)) is None:
                break
            buffer.push(text)
        while len(buffer):
            yield buffer.pop()

    def _read(self) -> Iterator[bytes]:
        """Yield the sound documents, and count the others."""
        for record, name in self._reading:
            problem = record.problem or record.missing
            if record.html and not problem:
                raise DatasetError(
                    f"{name}: expected text, got HTML ({record.location or 'its first record'}), which would be learnt "
                    "with its markup. Make a dataset of it with `forebay prepare`."
                )
            try:
                text = record.text.encode()
            except UnicodeEncodeError:
                problem = problem or "half a surrogate pair in the text"
            if not problem:
                self._num_records += 1
                yield text
            elif problem != "blank":
                self._counts["malformed"] += 1
                if len(self.malformed) < _MAX_MALFORMED:
                    self.malformed.append(Malformed(name, record.location, problem))

    def _fill(self, required: int) -> LaneState:
        """The state with as many tokens to give out as required, or all of the epoch."""
        state = self.state
        documents = self._documents = self._documents or self._open()
        parts = [state.tokens[state.offset :]]
        num_tokens = len(parts[0])
        times, began = self.times, time.perf_counter()
        while num_tokens < required:
            texts, num_bytes = list[bytes](), self._encoder.next_bytes
            while num_bytes > 0 and (text := next(documents, None)) is not None:
                texts.append(text)
                num_bytes -= len(text)
            times["read_s"] += (read := time.perf_counter()) - began
            if not texts:
                break
            parts.append(self._encoder.encode(texts, self._counts))
            num_tokens += len(parts[-1])
            times["tokenize_s"] += (began := time.perf_counter()) - read
        self.state = replace(
            state, records=self._num_records, draws=self._buffer.draws, position=self._reading.position(),
            buffered=tuple(self._buffer.texts), tokens=np.concatenate(parts), offset=0, counts=dict(self._counts),
        )  # fmt: skip
        return self.state

    def _too_short(self, num_tokens: int, num_samples: int) -> DatasetError:
        advice = "Ask for shorter samples or smaller batches"
        advice += ", or for fewer lanes: lanes=1 is one stream." if self._share.lanes > 1 else "."
        for record in self.malformed[:1]:
            advice = (
                f"{self.state.counts['malformed']} records were skipped, the first at {record.location} of "
                f"{record.name}: {record.problem.rstrip('.')}. Name the column of text (text_key), or look at the file."
            )
        lane = f" of lane {self._share.lane} of {self._share.lanes}" if self._share.lanes > 1 else ""
        return DatasetError(
            f"stream: expected at least one batch an epoch, got {num_tokens} tokens of {self.state.records} records"
            f"{lane} for {num_samples} samples of {self.seq_len}. {advice}"
        )
