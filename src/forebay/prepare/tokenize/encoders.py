"""What turns texts into ids: a reference library, or a faster one that has been seen to give the same.

Hides: which library that is. The reference for a tokenizer.json is the tokenizers library, for a tiktoken encoding
tiktoken. gigatoken, if installed, gave the same ids for each of 10 million texts made to tell them apart (all of
Unicode in nine contexts, random mixtures, long runs), many times as fast: benchmarks/prepare/tokens.py. It is used
where it knows the tokenizer and agrees with the reference on a probe when it is loaded; then a piece of text of every
eighth batch goes through both, and a difference ends the task.

Costs: gigatoken remembers words for ever (8 bytes a byte of random text): it is loaded anew, in 0.1 s, when the process
has grown by 192 MiB. The tokenizers library takes some 100 bytes a character, so a text longer than 2 Mi characters
goes to it in pieces: cut at a space between ASCII characters where that changes no id (byte-level BPE that GPT-2's or
tiktoken's patterns cut first; BPE over `▁` as Llama's). Where there is no such place within 256 Ki characters (a wall
of Chinese, a million dots), or the tokenizer is of another kind, it is cut all the same, and the tokens that would have
reached over the cut are others than the library's: at most one place in 2 Mi characters.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.prepare.documents import text_buffers
from forebay.prepare.tokenize.tiktoken import FAMILIES, ranks_of
from forebay.prepare.tokenize.tokenizers import TokenizerFile, encode_batch, parse

CODER_VERSION = 2
"""Raised when a text would get other ids."""
LONG_CHARS = 2 << 20
_SLACK_CHARS = 256 << 10
_CHECK_BYTES = 8 << 20
_SPACE = re.compile("[!-~] (?=[!-~])")
_GROWTH_BYTES = 192 << 20
_CALL_BYTES = 1 << 20  # The tokenizers library keeps some 100 bytes a token until a call ends.
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
class CoderSpec:
    """What a worker needs to encode: a tokenizer.json by path and hash, what it is, and the ids around a document."""

    path: str
    sha256: str
    kind: str
    dtype: str
    eos_id: int | None
    bos_id: int | None = None

    @classmethod
    def of(cls, found: TokenizerFile, path: Path | str) -> CoderSpec:
        """Of a tokenizer whose bytes lie at `path`."""
        return cls(str(path), found.sha256, found.kind, found.dtype, found.eos_id, found.bos_id)

    @property
    def facts(self) -> list[Any]:
        """All that ids depend on, and no path: for the name of a task."""
        return [CODER_VERSION, self.sha256, self.kind, self.dtype, self.eos_id, self.bos_id]


class Coder(Protocol):
    """Texts to ids, without BOS or EOS."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The ids of each text, unsigned."""


def coder_for(spec: CoderSpec) -> Coder:
    """The fastest coder of these ids that is installed; one is kept a process."""
    return _coder(spec.path, spec.sha256, spec.kind, os.environ.get("FOREBAY_CODER", ""))


@lru_cache(maxsize=2)
def _coder(path: str, sha256: str, kind: str, wanted: str) -> Coder:
    return make_coder(b"" if kind == "bytes" else Path(path).read_bytes(), kind, wanted)


def make_coder(data: bytes, kind: str, wanted: str = "") -> Coder:
    """The fastest coder for the bytes of a tokenizer.json of that kind; `wanted="reference"`: the reference itself."""
    if kind == "bytes":
        return ByteCoder()
    reference = reference_coder(data, kind)
    fast = None if wanted == "reference" else fast_coder(data, kind, reference)
    return Cutting(fast or reference, _safe_cut(data, kind))


def reference_coder(data: bytes, kind: str) -> Coder:
    """The library that defines the ids of a tokenizer.json of that kind."""
    return TiktokenCoder(data, kind.partition(":")[2]) if kind.startswith("tiktoken:") else LibraryCoder(data)


def encode_column(spec: CoderSpec, texts: pa.LargeStringArray) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The tokens of a column of texts, each with its BOS and EOS, in the spec's type; and the length of each with them.

    An empty text has length 0 and no BOS or EOS.
    """
    dtype = np.dtype("<u2" if spec.dtype == "U16" else "<u4")
    before, after = spec.bos_id is not None, spec.eos_id is not None
    if spec.kind == "bytes":
        offsets, data = text_buffers(texts)
        lengths, ids = np.diff(offsets), data[offsets[0] : offsets[-1]]
    else:
        arrays = coder_for(spec).encode(texts.to_pylist())
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        ids = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe")
    whole = lengths + (int(before) + int(after)) * (lengths > 0)
    if not (before or after):
        return ids.astype(dtype), whole
    stops = np.cumsum(whole)
    out, is_text = np.empty(int(stops[-1]) if len(stops) else 0, dtype), np.ones(int(whole.sum()), bool)
    for present, token, places in ((before, spec.bos_id, stops - whole), (after, spec.eos_id, stops - 1)):
        if present:
            out[places[lengths > 0]] = token
            is_text[places[lengths > 0]] = False
    out[is_text] = ids
    return out, whole


def encode_long(spec: CoderSpec, text: str) -> Iterator[NDArray[Any]]:
    """The tokens of one long text as `encode_column` gives them, a stretch at a time."""
    dtype = np.dtype("<u2" if spec.dtype == "U16" else "<u4")
    coder = coder_for(spec)
    if spec.bos_id is not None:
        yield np.array([spec.bos_id], dtype)
    for piece in cut_long(text, coder.cut if isinstance(coder, Cutting) else ""):
        yield coder.encode([piece])[0].astype(dtype)
    yield np.array([] if spec.eos_id is None else [spec.eos_id], dtype)


class ByteCoder:
    """Ids are the UTF-8 bytes."""

    name = "bytes"

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class LibraryCoder:
    name = "tokenizers"

    def __init__(self, data: bytes) -> None:
        self._tokenizer = parse(data, "tokenizer.json")

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """As `Coder` says; by all its threads, unless TOKENIZERS_PARALLELISM is false."""
        found: list[NDArray[Any]] = []
        for batch in _batches(texts):
            found += [np.array(encoding.ids, np.uint32) for encoding in encode_batch(self._tokenizer, batch)]
        return found


class TiktokenCoder:
    """tiktoken; where its regular expressions give up (a million spaces before a letter), the tokenizers library."""

    name = "tiktoken"

    def __init__(self, data: bytes, family: str) -> None:
        import tiktoken

        self._data = data
        self._encoding = tiktoken.Encoding(
            family, pat_str=FAMILIES[family].pattern, mergeable_ranks=ranks_of(data), special_tokens={}
        )

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> NDArray[Any]:
        try:
            return np.array(self._encoding.encode_to_numpy(text, disallowed_special=()), np.uint32)
        except ValueError:
            return LibraryCoder(self._data).encode([text])[0]


class FastCoder:
    """gigatoken, compared with its reference as it goes."""

    name = "gigatoken"

    def __init__(self, data: bytes, kind: str, reference: Coder) -> None:
        self._data, self._kind, self._reference = data, kind, reference
        self._calls = 0
        self._load()

    def _load(self) -> None:
        self._engine: Any = None  # The old one's memory goes first.
        self._engine = _load_gigatoken(self._data, self._kind)
        self._base_bytes = _resident_bytes()

    def agrees(self, texts: Sequence[str]) -> bool:
        ours = [self._engine.encode(text) for text in texts]
        return all(np.array_equal(a, b) for a, b in zip(ours, self._reference.encode(texts)))

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """As `Coder` says. Raises PrepareError if it differs from the reference on a text that both encoded."""
        if self._calls % _CHECK_EVERY == 0 and texts:
            text = texts[self._calls // _CHECK_EVERY % len(texts)][:_CHECK_CHARS]
            if not self.agrees([text]):
                raise PrepareError(
                    f"tokenizer: expected gigatoken's ids to be those of {self._reference.name}, got others for "
                    f"{text[:80]!r}. Nothing is written. Set FOREBAY_CODER=reference and run again."
                )
        self._calls += 1
        found = []
        for batch in _batches(texts, _CHECK_BYTES):
            found += [self._engine.encode(text) for text in batch]
            if _resident_bytes() - self._base_bytes > _GROWTH_BYTES:
                self._load()
        return found


def fast_coder(data: bytes, kind: str, reference: Coder) -> FastCoder | None:
    """gigatoken for this tokenizer; None if it is not installed, does not know it, or differs on the probe."""
    try:
        found = FastCoder(data, kind, reference)
    except Exception:  # noqa: BLE001 - whatever a faster library cannot do, the reference can
        return None
    return found if found.agrees(_PROBE) else None


def _load_gigatoken(data: bytes, kind: str) -> Any:
    from gigatoken.gigatoken_rs import load_hf_json

    plain = json.loads(data)
    # Special tokens' names in a text are ordinary text: the engine must not know them.
    plain["added_tokens"] = [token for token in plain.get("added_tokens") or [] if not token.get("special")]
    plain.update(truncation=None, padding=None, post_processor=None)
    if "dropout" in plain["model"]:
        plain["model"]["dropout"] = None
    return load_hf_json(json.dumps(plain)) if not kind.startswith("tiktoken:") else _load_ranks(data, kind)


def _load_ranks(data: bytes, kind: str) -> Any:
    import base64
    import tempfile

    from gigatoken.gigatoken_rs import BPETokenizer

    ranks = sorted(ranks_of(data).items(), key=lambda pair: pair[1])
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
    scheme = {"gpt2": "gpt2", "cl100k": "gpt4", "o200k": "o200k"}[kind.partition(":")[2]]
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.write(lines)
        file.flush()
        return BPETokenizer.from_tiktoken(file.name, scheme, {})


Cut = Literal["before", "at", ""]
"""Which cut of a long text changes no id: before a space, at one that is left out, or none that is known."""


class Cutting:
    """A coder to which no text much longer than `LONG_CHARS` is given; `name` is that of the coder behind it."""

    def __init__(self, coder: Coder, cut: Cut) -> None:
        self.coder, self.name, self.cut = coder, coder.name, cut

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        if all(len(text) <= LONG_CHARS for text in texts):
            return self.coder.encode(texts)
        return [np.concatenate([self.coder.encode([piece])[0] for piece in cut_long(text, self.cut)]) for text in texts]


def cut_long(text: str, cut: Cut = "before") -> Iterator[str]:
    """A text in pieces of about `LONG_CHARS` characters; they depend on it and on `cut` alone.

    With `cut` they end at a space, if there is one between two ASCII characters soon after; else anywhere but before a
    combining mark.
    """
    start = 0
    while len(text) - start > LONG_CHARS + _SLACK_CHARS:
        at = start + LONG_CHARS
        space = _SPACE.search(text, at - 1, at + _SLACK_CHARS) if cut else None
        if space is not None:
            at = space.end() - 1
            yield text[start:at]
            start = at + (cut == "at")
            continue
        while unicodedata.combining(text[at]) and at < start + LONG_CHARS + _SLACK_CHARS:
            at += 1
        yield text[start:at]
        start = at
    yield text[start:]


def _safe_cut(data: bytes, kind: str) -> Cut:
    plain = json.loads(data)
    added = [token for token in plain.get("added_tokens") or [] if not token.get("special")]
    if any(" " in token["content"].strip(" ") for token in added):
        return ""
    if kind.startswith("tiktoken:"):
        return "before"
    model, first = plain["model"], plain.get("pre_tokenizer") or {}
    if model["type"] != "BPE":
        return ""
    normal = plain.get("normalizer") or {"type": "NFC"}
    byte_level = first.get("type") == "ByteLevel" and first.get("use_regex", True) and not first.get("add_prefix_space")
    if byte_level and normal["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return "before"
    # Each text gets a `▁` before it, each space becomes one, and no token holds one after anything else: then no merge
    # reaches over a space, and the `▁` of the next piece stands for the space that is left out.
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    marked = not first and normal.get("normalizers") == steps
    names = [*model["vocab"], *(token["content"].replace(" ", "▁") for token in added)]
    whole = all(token.get("normalized") and not re.match("[ ▁]", token["content"]) for token in added)
    return "at" if marked and whole and not any(re.search("[^▁]▁", name) for name in names) else ""


def _batches(texts: Sequence[str], limit: int = _CALL_BYTES) -> Iterator[Sequence[str]]:
    start, size = 0, 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size >= limit:
            yield texts[start:stop]
            start, size = stop, 0
    if start < len(texts):
        yield texts[start:]


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if os.uname().sysname == "Darwin" else peak * 1024
