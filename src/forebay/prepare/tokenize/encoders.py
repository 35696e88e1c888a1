"""Encoders: from texts to ids, by a reference library or a faster one that gives the same ids.

The reference for a tokenizer.json is the tokenizers library. gigatoken, if installed,
is used where it agrees with the reference on a probe; then a text of every eighth batch goes through both, and a
difference ends the task. Costs: gigatoken remembers words and is loaded again, in 0.1 s, when the process has grown by
192 MiB; the tokenizers library takes some 100 bytes a character, so that longer texts go to it in pieces (`cut_long`).
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, Array
from forebay.dataset.agreement import TOKENIZER_FILE
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import PrepareError
from forebay.formats.records import batched
from forebay.prepare.documents import text_buffers
from forebay.prepare.engines.base import resident_bytes
from forebay.prepare.tokenize.tokenizers import (
    OWN,
    Tokenizer,
    TokenizerFile,
    encode_batch,
    parse,
    special_names,
)
from forebay.storage.store import Store

ENCODER_VERSION = 3  # Changed when a text would get other ids.
LONG_CHARS = 2 << 20
_SLACK_CHARS = 256 << 10
_LOOK_CHARS, _TRIALS = 512, 64  # Around a place to cut; places of each kind.
_SPACE, _MARK, _WORD = re.compile(r"\s+"), re.compile(r"[^\w\s]"), re.compile(r"(?<!\S)\S|[^\w\s]")
_CALL_BYTES = 1 << 20  # The tokenizers library keeps some 100 bytes a token until a call ends.
_GROWTH_BYTES, _FAST_CALL_BYTES = 192 << 20, 8 << 20
_CHECK_EVERY, _CHECK_CHARS = 8, 4096
_PROBE = (
    "",
    " ",
    "Hello  world's\n\n\t end.  ",
    "'S'll 12345 ½² ñ e\u0301 \u1e9b\u0323 ﬁ İ ſK",
    "世界 한국어 ไทย हिन्दी العربية 🎉👩‍👩‍👧 \U000e0041\ufeff\u200b\x00\x1c\x85\u3000",
    "<|endoftext|></s><s><unk><0x0A>▁Ġ[CLS]  <|im_start|>",
    "a" * 70 + " " * 33 + "!" * 40 + "\n" * 9 + "ab" * 30,
    "def f(x):\n    return {'k': [x] * 3}\r\n\r\n# ok //\n",
)


@dataclass(frozen=True)
class EncoderSpec:
    """What a worker needs to encode: a tokenizer.json by store and hash, its kind, and the ids around a document.

    `tokenizer` is an object of the user's, which encodes in place of a library.
    """

    store: Store
    sha256: str
    kind: str
    dtype: str
    eos_id: int | None
    bos_id: int | None = None
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, file: TokenizerFile, store: Store) -> "EncoderSpec":
        """Of a tokenizer whose bytes are the `tokenizer.json` of a store."""
        return cls(store, file.sha256, file.kind, file.dtype, file.eos_id, file.bos_id, file.tokenizer)

    @property
    def fields(self) -> list[Any]:
        """All that ids depend on, without the store: for the name of a task."""
        return [ENCODER_VERSION, self.sha256, self.kind, self.dtype, self.eos_id, self.bos_id]


@lru_cache(maxsize=4)
def _vocabulary(store: Store, sha256: str) -> tuple[dict[str, int], dict[str, int]]:
    data = store.read(TOKENIZER_FILE)
    ids = parse(data, TOKENIZER_FILE).get_vocab(with_added_tokens=True)
    return ids, {name: ids[name] for name in special_names(data)}


def vocabulary_of(spec: EncoderSpec) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of all tokens by name, and those of the special ones; empty without a tokenizer.json."""
    return ({}, {}) if spec.kind in ("bytes", OWN) else _vocabulary(spec.store, spec.sha256)


class Encoder(Protocol):
    """Texts to ids, without BOS or EOS."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The ids of each text, unsigned."""


def encoder_for(spec: EncoderSpec) -> Encoder:
    """The fastest installed encoder of these ids; two are kept in a process."""
    if spec.tokenizer is not None:
        return spec.tokenizer
    return _encoder(spec.store, spec.sha256, spec.kind, os.environ.get("FOREBAY_CODER", ""))


@lru_cache(maxsize=2)
def _encoder(store: Store, sha256: str, kind: str, choice: str) -> Encoder:
    return make_encoder(b"" if kind == "bytes" else store.read(TOKENIZER_FILE), kind, choice)


def make_encoder(data: bytes, kind: str, choice: str = "") -> Encoder:
    """The fastest encoder for the bytes of a tokenizer.json of that kind; with `choice="reference"` the reference."""
    if kind == "bytes":
        return ByteEncoder()
    reference = LibraryEncoder(data)
    fast = None if choice == "reference" else fast_encoder(data, reference)
    return LongTextEncoder(fast or reference, reference)


def encode_column(spec: EncoderSpec, texts: pa.LargeStringArray) -> tuple[Array, I64]:
    """The tokens of a column of texts, each with its BOS and EOS, in the spec's type; and the length of each with them.

    An empty text has length 0 and no BOS or EOS.
    """
    dtype = TOKEN_DTYPES[spec.dtype]
    added = [token for token in (spec.bos_id, spec.eos_id) if token is not None]
    if spec.kind == "bytes":
        offsets, data = text_buffers(texts)
        lengths, ids = np.diff(offsets), data[offsets[0] : offsets[-1]]
    else:
        arrays = encoder_for(spec).encode(texts.to_pylist())
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        ids = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe")
    full = lengths + len(added) * (lengths > 0)
    if not added:
        return ids.astype(dtype), full
    stops = np.cumsum(full)
    out, is_text = np.empty(int(stops[-1]) if len(stops) else 0, dtype), np.ones(int(full.sum()), bool)
    for token, positions in ((spec.bos_id, stops - full), (spec.eos_id, stops - 1)):
        if token is not None:
            out[positions[lengths > 0]] = token
            is_text[positions[lengths > 0]] = False
    out[is_text] = ids
    return out, full


def encode_long(spec: EncoderSpec, text: str) -> Iterator[Array]:
    """The tokens of one long text as `encode_column` gives them, in several arrays."""
    dtype = TOKEN_DTYPES[spec.dtype]
    encoder = encoder_for(spec)
    if spec.bos_id is not None:
        yield np.array([spec.bos_id], dtype)
    for ids in encoder.encode_parts(text) if isinstance(encoder, LongTextEncoder) else encoder.encode([text]):
        yield ids.astype(dtype)
    yield np.array([] if spec.eos_id is None else [spec.eos_id], dtype)


class ByteEncoder:
    """Ids are the UTF-8 bytes."""

    name = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class LibraryEncoder:
    """The tokenizers library, with all its threads unless TOKENIZERS_PARALLELISM is false."""

    name = "tokenizers"

    def __init__(self, data: bytes) -> None:
        self._tokenizer = parse(data, "tokenizer.json")

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [
            np.array(encoding.ids, np.uint32)
            for batch in batched(texts, len, _CALL_BYTES, _CALL_BYTES)
            for encoding in encode_batch(self._tokenizer, batch)
        ]


class FastEncoder:
    """gigatoken, compared with its reference as it runs."""

    name = "gigatoken"

    def __init__(self, data: bytes, reference: Encoder) -> None:
        self._data, self._reference = data, reference
        self._calls = 0
        self._load()

    def _load(self) -> None:
        self._engine: Any = None  # Free the memory of the old one first.
        self._engine = _load_gigatoken(self._data)
        self._base_bytes = resident_bytes()

    def agrees(self, texts: Sequence[str]) -> bool:
        """Whether the ids of these texts are the reference's."""
        ours = [self._engine.encode(text) for text in texts]
        return all(np.array_equal(a, b) for a, b in zip(ours, self._reference.encode(texts)))

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """As `Encoder` says. Raises PrepareError if it differs from the reference on a text that both encoded."""
        if self._calls % _CHECK_EVERY == 0 and texts:
            text = texts[self._calls // _CHECK_EVERY % len(texts)][:_CHECK_CHARS]
            if not self.agrees([text]):
                raise PrepareError(
                    f"tokenizer: gigatoken's ids differ from those of {self._reference.name} for {text[:80]!r}. "
                    "Nothing is written. Set FOREBAY_CODER=reference and run again."
                )
        self._calls += 1
        ids: list[Array] = []
        for batch in batched(texts, len, _FAST_CALL_BYTES, _FAST_CALL_BYTES):
            ids += [self._engine.encode(text) for text in batch]
            if resident_bytes() - self._base_bytes > _GROWTH_BYTES:
                self._load()
        return ids


def fast_encoder(data: bytes, reference: Encoder) -> FastEncoder | None:
    """gigatoken for this tokenizer; None if it is not installed, does not know it, or differs on the probe."""
    try:
        encoder = FastEncoder(data, reference)
    except Exception:  # noqa: BLE001 - whatever a faster library cannot do, the reference can
        return None
    return encoder if encoder.agrees(_PROBE) else None


def _load_gigatoken(data: bytes) -> Any:
    from gigatoken.gigatoken_rs import load_hf_json

    plain = json.loads(data)
    # Special tokens' names in a text are ordinary text: the engine must not know them.
    plain["added_tokens"] = [token for token in plain.get("added_tokens") or [] if not token.get("special")]
    plain.update(truncation=None, padding=None, post_processor=None)
    if "dropout" in plain["model"]:
        plain["model"]["dropout"] = None
    return load_hf_json(json.dumps(plain))


class LongTextEncoder:
    """Passes an encoder no text much longer than `LONG_CHARS`; `name` is that of the encoder."""

    def __init__(self, encoder: Encoder, reference: Encoder) -> None:
        self.encoder, self.name, self.reference = encoder, encoder.name, reference

    def encode(self, texts: Sequence[str]) -> list[Array]:
        if all(len(text) <= LONG_CHARS for text in texts):
            return self.encoder.encode(texts)
        return [np.concatenate(list(self.encode_parts(text))) for text in texts]

    def encode_parts(self, text: str) -> Iterator[Array]:
        """The ids of one text in several arrays."""
        for part, skip in cut_long(text, self.reference):
            yield self.encoder.encode([part])[0][skip:]


def cut_long(text: str, reference: Encoder | None = None) -> Iterator[tuple[str, int]]:
    """A text in parts of about `LONG_CHARS` characters, each with how many of its first ids are not its own.

    A place is taken where the ids of the two sides are those of the whole, as the reference says of the characters
    around it: at white space, else at a mark, else anywhere. Where the second side alone would begin otherwise (with a
    space that the tokenizer adds), it begins up to four words or marks earlier, and the ids of those are left out. If
    no such place comes within 256 Ki characters and 256 trials, the cut is at white space, else anywhere but before a
    combining mark: tokens over that place are others than the library's.
    """
    begin = skip = start = 0
    while len(text) - start > LONG_CHARS + _SLACK_CHARS:
        stop, next_begin, next_skip = _find_cut(text, start + LONG_CHARS, reference)
        yield text[begin:stop], skip
        begin, skip, start = next_begin, next_skip, stop
    yield text[begin:], skip


def _find_cut(text: str, first: int, reference: Encoder | None) -> tuple[int, int, int]:
    """Where a part ends, where the next begins, and how many of its ids to leave out."""
    last = first + _SLACK_CHARS
    spaces = [p for match in islice(_SPACE.finditer(text, first, last), _TRIALS) for p in match.span()]
    marks = [match.end() for match in islice(_MARK.finditer(text, first, last), _TRIALS)]
    for stop in [*spaces, *marks, *range(first, first + _TRIALS)] if reference else []:
        left, right = max(0, stop - _LOOK_CHARS), stop + _LOOK_CHARS
        complete, before = _ids(reference, text[left:right]), _ids(reference, text[left:stop])
        after = complete[len(before) :]
        if not after or complete[: len(before)] != before:
            continue
        words = [match.start() for match in _WORD.finditer(text, left, stop)]
        for begin in (stop, stop + 1, *words[:-5:-1]):
            ids = _ids(reference, text[begin:right])
            skip = len(ids) - len(after)
            if skip >= 0 and ids[skip:] == after:
                return stop, begin, skip
    stop = next(iter(spaces), first)
    while not spaces and unicodedata.combining(text[stop]) and stop < last:
        stop += 1
    return stop, stop, 0


def _ids(encoder: Encoder | None, text: str) -> list[int]:
    ids: list[int] = encoder.encode([text])[0].tolist() if encoder else []
    return ids
