"""Renderings, in place of the plain tokens of a text: conversations, and fill in the middle.

Conversations: a template around the turns, and a bit for the tokens that are trained on. A text whose turns begin with
`records.PROMPT_MARK` or `RESPONSE_MARK` becomes U32 tokens whose highest bit says whether the token is trained on,
until a slice of rows is written. Each part of a turn (the template's prefix, the turn, the template's suffix) is
encoded by itself, so that no mask falls inside a token. Names of special tokens in the template are these tokens; in a
turn they are ordinary text.

Fill in the middle: some documents as prefix, suffix and middle, with sentinel tokens before each. A document is cut at
two characters at random, and its parts are encoded by themselves; which, where and in which order is a function of its
text and the seed. Source: Bavarian et al. 2022: sections 3 (PSM, and SPM with the sentinels of a prefix and a suffix
side by side) and 4.4 (cuts at characters); Lozhkov et al. 2024 (StarCoder2) for the rate.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import I64, Array
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.formats.records import HEADER_MARK, PROMPT_MARK, RESPONSE_MARK
from forebay.prepare.settings import Settings, Share
from forebay.prepare.tokenize.encoders import EncoderSpec, encoder_for, vocabulary_of

TRAINED = 1 << 31  # The bit of a token that is trained on; ids are below it.
_MARKS = re.compile(f"([{PROMPT_MARK}{RESPONSE_MARK}])")
_HEADERS = re.compile(f"{HEADER_MARK}[^{HEADER_MARK}]*{HEADER_MARK}?")


@dataclass(frozen=True)
class Template:
    """The text around the turns of prompts and responses.

    Prefixes are masked, suffixes of responses are trained on. EOS, trained on, ends a last turn that is a response.
    """

    prompt_prefix: str = ""
    prompt_suffix: str = "\n"
    response_prefix: str = ""
    response_suffix: str = ""


TEMPLATES = {
    "plain": Template(),
    "chatml": Template(
        "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n"
    ),  # Source: OpenAI's chat markup, as Qwen and others use it.
}


def split_turns(text: str) -> list[tuple[bool, str]]:
    """The turns of a text as (whether it is trained on, the words); empty turns are left out.

    A text without marks is one response; text before the first mark is a prompt.
    """
    first, *rest = _MARKS.split(_HEADERS.sub("", text) if HEADER_MARK in text else text)
    if not rest:
        return [(True, text)] if text else []
    turns = [(False, first), *((mark == RESPONSE_MARK, words) for mark, words in zip(rest[::2], rest[1::2]))]
    return [(trained, words) for trained, words in turns if words]


@dataclass(frozen=True)
class Conversations(Settings):
    """Encodes marked texts; the `rendering` of an EncodeTask.

    One of more than `max_tokens` tokens is `cut` at its end (counted as `truncated`), or `drop`ped as `too_long`.
    """

    max_tokens: Annotated[int, Field(ge=2)]
    template: Template = TEMPLATES["plain"]
    too_long: Literal["cut", "drop"] = "cut"
    chat_template: str = ""

    @property
    def dtype(self) -> str:
        """Always `U32`, for the bit."""
        return "U32"

    @property
    def fields(self) -> list[Any]:
        """All that the result depends on."""
        return ["conversations", 2, asdict(self)]

    def missing_tokens(self, spec: EncoderSpec) -> list[str]:
        """Return the special tokens that the template names and the tokenizer lacks: they are spelt out."""
        text = self.chat_template or "".join(astuple(self.template))
        _, special = vocabulary_of(spec)
        return [name for name in dict.fromkeys(re.findall(r"<\|\w+\|>", text)) if name not in special]

    def encode(self, spec: EncoderSpec, texts: pa.LargeStringArray) -> tuple[Array, I64, dict[str, int]]:
        """Tokens with `TRAINED` set where they are, lengths (0: dropped), counts.

        Dropped: `empty`; `too_long`; `nothing_learnt`, where no token to train on is left.
        """
        counts = {"empty": 0, "too_long": 0, "nothing_learnt": 0, "truncated": 0}
        tokens: list[Array] = []
        lengths = np.zeros(len(texts), np.int64)
        written = self._with_chat_template if self.chat_template else self._with_template
        for row, (ids, reason) in enumerate(written(spec, texts.to_pylist())):
            if not reason and len(ids) > self.max_tokens:
                reason = "too_long" if self.too_long == "drop" else ""
                ids = ids[: self.max_tokens]
                counts["truncated"] += bool(not reason and (ids & TRAINED).any())
            reason = reason or ("" if (ids & TRAINED).any() else "nothing_learnt")
            if reason:
                counts[reason] = counts.get(reason, 0) + 1
            else:
                tokens.append(ids)
                lengths[row] = len(ids)
        return np.concatenate([np.empty(0, np.uint32), *tokens]), lengths, counts

    def _with_template(self, spec: EncoderSpec, texts: list[str]) -> Iterator[tuple[Array, str]]:
        """The tokens of each text, or why there are none."""
        conversations = [split_turns(text) for text in texts]
        encoded = iter(encoder_for(spec).encode([words for turns in conversations for _, words in turns]))
        for turns in conversations:
            rendered = self._render(spec, [(trained, next(encoded)) for trained, _ in turns])
            yield rendered, "" if len(turns) else "empty"

    def _with_chat_template(self, spec: EncoderSpec, texts: list[str]) -> Iterator[tuple[Array, str]]:
        from forebay.prepare.tokenize.chat_template import UnfitConversationError, guarded, pieces, render

        _, vocab = vocabulary_of(spec)
        names = {number: name for name, number in vocab.items()}
        bos, eos = (names.get(-1 if token is None else token, "") for token in (spec.bos_id, spec.eos_id))
        hide, show = guarded(list(vocab))
        rendered = []
        for text in texts:
            parts, reason = list[tuple[bool, bool, str]](), "" if text else "empty"
            try:
                for trained, span in render(self.chat_template, text, bos, eos, hide) if text else []:
                    parts += [(trained, is_name, part) for is_name, part in pieces(span, list(vocab))]
            except UnfitConversationError as error:
                parts, reason = [], str(error)
            rendered.append((parts, reason))
        plain = [show(part) for parts, _ in rendered for _, is_name, part in parts if not is_name]
        encoded = iter(encoder_for(spec).encode(plain))
        for parts, reason in rendered:
            ids = [np.empty(0, np.uint32)]
            for trained, is_name, part in parts:
                words = np.array([vocab[part]]) if is_name else next(encoded)
                ids.append(words.astype(np.uint32) | np.uint32(TRAINED if trained else 0))
            yield np.concatenate(ids), reason

    def _render(self, spec: EncoderSpec, turns: list[tuple[bool, Array]]) -> Array:
        parts = [np.array([] if spec.bos_id is None else [spec.bos_id], np.uint32)]
        for trained, ids in turns:
            t = self.template
            before, after = (t.response_prefix, t.response_suffix) if trained else (t.prompt_prefix, t.prompt_suffix)
            bit = np.uint32(TRAINED if trained else 0)
            parts += [_fixed(spec, before), ids.astype(np.uint32) | bit, _fixed(spec, after) | bit]
        if turns and turns[-1][0] and spec.eos_id is not None:
            parts.append(np.array([spec.eos_id | TRAINED], np.uint32))
        return np.concatenate(parts)


@lru_cache(maxsize=64)
def _fixed(spec: EncoderSpec, text: str) -> Array:
    if not text:
        return np.empty(0, np.uint32)
    from forebay.prepare.tokenize.chat_template import pieces

    (_, special), encoder = vocabulary_of(spec), encoder_for(spec)
    parts = pieces(text, [name for name in special if name in text])
    ids = [np.array([special[part]], np.uint32) if named else encoder.encode([part])[0] for named, part in parts]
    return np.concatenate(ids).astype(np.uint32)


MIN_CHARS = 3


@dataclass(frozen=True)
class FillInTheMiddle(Settings):
    """`[fim]`: documents as prefix, suffix and middle, for models that complete code.

    Args:
        rate: Share of documents that are cut: 0.5.
        spm_rate: Share of those with the suffix first: 0.5.
        prefix, suffix, middle: Tokens of the vocabulary.
    """

    rate: Share = 0.5
    spm_rate: Share = 0.5
    prefix: str = "<fim_prefix>"
    suffix: str = "<fim_suffix>"
    middle: str = "<fim_middle>"
    seed: int = field(default=0, init=False)

    dtype = ""  # that of the tokenizer

    @property
    def fields(self) -> list[Any]:
        """All that the result depends on."""
        return ["fim", 1, asdict(self)]

    def sentinels(self, spec: EncoderSpec) -> tuple[int, int, int]:
        """The ids of the three tokens. Raises UsageError if the tokenizer lacks one."""
        vocab, _ = vocabulary_of(spec)
        for key in ("prefix", "suffix", "middle"):
            if (name := getattr(self, key)) not in vocab:
                raise UsageError(
                    f"fim.{key}: expected a token of the tokenizer, got {name!r}, which it does not have. "
                    "Name one that it has, or choose a tokenizer for code."
                )
        return vocab[self.prefix], vocab[self.suffix], vocab[self.middle]

    def cuts(self, text: str) -> tuple[int, int, bool] | None:
        """Where the middle of a text begins and ends, in characters, and whether the suffix is first; None: uncut."""
        if len(text) < MIN_CHARS:
            return None
        digest = hashlib.sha256(f"forebay fim {self.seed} ".encode() + text.encode()).digest()
        whether, order, first, second = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
        if whether >= self.rate * 2**64:
            return None
        start, stop = sorted((first % (len(text) + 1), second % (len(text) + 1)))
        return start, stop, order < self.spm_rate * 2**64

    def encode(self, spec: EncoderSpec, texts: pa.LargeStringArray) -> tuple[Array, I64, dict[str, int]]:
        """Tokens, lengths (0: empty) and counts: `empty`, and the `fill_in_the_middle` among those kept."""
        prefix, suffix, middle = ([token] for token in self.sentinels(spec))
        plain, cuts = texts.to_pylist(), list(map(self.cuts, texts.to_pylist()))
        pieces = [
            [text] if cut is None else [text[: cut[0]], text[cut[1] :], text[cut[0] : cut[1]]]
            for text, cut in zip(plain, cuts)
        ]
        encoded = iter(encoder_for(spec).encode([piece for parts in pieces for piece in parts]))
        dtype = TOKEN_DTYPES[spec.dtype]
        begin, end = ([] if token is None else [token] for token in (spec.bos_id, spec.eos_id))
        out: list[Array] = [np.empty(0, dtype)]
        for text, cut in zip(plain, cuts):
            body: list[Any] = [next(encoded)] if cut is None else []
            if cut is not None:
                before, after, between = (next(encoded) for _ in range(3))
                body = [prefix, before, suffix, after, middle, between]
                if cut[2]:
                    body = [prefix, suffix, after, middle, before, between]
            parts = [begin, *body, end] if text else []
            out.append(np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="unsafe"))
        lengths = np.array([len(ids) for ids in out[1:]], np.int64)
        counts = {"empty": plain.count(""), "fill_in_the_middle": sum(cut is not None for cut in cuts)}
        return np.concatenate(out), lengths, counts
