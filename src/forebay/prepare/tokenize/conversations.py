"""Layout `rows` for fine-tuning: conversations with marked turns to rows of fixed length with masked labels.

A text whose turns begin with `documents.PROMPT_MARK` or `RESPONSE_MARK` becomes U32 tokens whose highest bit says
whether the token is trained on, until a slice is written. Encoding, subsets, shuffling are those of any document.

Each piece of a turn (what the template puts before it, the turn, what it puts after it) is encoded apart, so that no
mask falls inside a token. Names of special tokens in the template are these tokens; in a turn they are ordinary text.

Tensors of a slice, N rows of L = `max_tokens`: `input_ids` U16 or U32 [N, L] (padding is EOS, or 0), `labels` I64 or
I32 [N, L], -100 where not learnt (at the same position as the token: the model shifts), `attention_mask` U8 [N, L].
Packed, several whole conversations share a row: `position_ids` I32 [N, L] begin anew with each, `segment_ids` I32
[N, L] count them from 1 (0: padding).
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.prepare.documents import PROMPT_MARK, RESPONSE_MARK
from forebay.prepare.settings import Settings
from forebay.prepare.tasks.shuffle import TokenPart
from forebay.prepare.tasks.slicing import Ends, SlicePlan, write_plan
from forebay.prepare.tokenize.encoders import CoderSpec, coder_for
from forebay.prepare.tokenize.tokenizers import parse, special_names

LEARNT = 1 << 31
"""The bit of a token that is learnt; ids lie below it."""
IGNORED = -100
_HEADER_BYTES = 1024
_MARKS = re.compile(f"([{PROMPT_MARK}{RESPONSE_MARK}])")


@dataclass(frozen=True)
class Template:
    """What stands before and after a turn that is given, or learnt. What stands before is never learnt; what stands
    after a learnt turn is. EOS, learnt, ends the last turn if that is learnt.
    """

    given_prefix: str = ""
    given_suffix: str = "\n"
    learnt_prefix: str = ""
    learnt_suffix: str = ""


TEMPLATES = {
    "plain": Template(),
    "chatml": Template(
        "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n"
    ),  # Source: OpenAI's chat markup, as Qwen and others took it up.
}


def split_turns(text: str) -> list[tuple[bool, str]]:
    """The turns of a text as (learnt, what is said). A text without marks is one learnt turn; what stands before the
    first mark is given; empty turns are left out.
    """
    first, *rest = _MARKS.split(text)
    if not rest:
        return [(True, text)] if text else []
    turns = [(False, first), *((mark == RESPONSE_MARK, said) for mark, said in zip(rest[::2], rest[1::2]))]
    return [(learnt, said) for learnt, said in turns if said]


@dataclass(frozen=True)
class Conversations(Settings):
    """Encodes marked texts; what `EncodeTask.rendering` takes.

    One of more than `max_tokens` tokens is `cut` at its end (counted as `truncated`), or `drop`ped as `too_long`.
    """

    max_tokens: Annotated[int, Field(ge=2)]
    template: Template = TEMPLATES["plain"]
    too_long: Literal["cut", "drop"] = "cut"

    @property
    def dtype(self) -> str:
        """Always `U32`: a bit is the mask's."""
        return "U32"

    @property
    def facts(self) -> list[Any]:
        """All that the result depends on."""
        return ["conversations", 1, asdict(self)]

    def encode(
        self, spec: CoderSpec, texts: pa.LargeStringArray
    ) -> tuple[NDArray[Any], NDArray[np.int64], dict[str, int]]:
        """Tokens with `LEARNT` set where learnt, lengths (0: dropped), counts.

        Dropped: `empty`; `too_long`; `nothing_learnt`, where no learnt token is left.
        """
        shapes = [split_turns(text) for text in texts.to_pylist()]
        said = iter(coder_for(spec).encode([words for turns in shapes for _, words in turns]))
        counts = {"empty": 0, "too_long": 0, "nothing_learnt": 0, "truncated": 0}
        found: list[NDArray[Any]] = []
        lengths = np.zeros(len(shapes), np.int64)
        for row, turns in enumerate(shapes):
            whole = self._one(spec, [(learnt, next(said)) for learnt, _ in turns])
            reason = "" if len(turns) else "empty"
            if len(whole) > self.max_tokens:
                reason = "too_long" if self.too_long == "drop" else ""
                cut = whole[: self.max_tokens]
                if not reason and (cut & LEARNT).any():
                    counts["truncated"] += 1
                whole = cut
            reason = reason or ("" if (whole & LEARNT).any() else "nothing_learnt")
            if reason:
                counts[reason] += 1
            else:
                found.append(whole)
                lengths[row] = len(whole)
        return np.concatenate([np.empty(0, np.uint32), *found]), lengths, counts

    def _one(self, spec: CoderSpec, turns: list[tuple[bool, NDArray[Any]]]) -> NDArray[Any]:
        parts = [np.array([] if spec.bos_id is None else [spec.bos_id], np.uint32)]
        for learnt, ids in turns:
            t = self.template
            before, after = (t.learnt_prefix, t.learnt_suffix) if learnt else (t.given_prefix, t.given_suffix)
            bit = np.uint32(LEARNT if learnt else 0)
            parts += [_fixed(spec, before), ids.astype(np.uint32) | bit, _fixed(spec, after) | bit]
        if turns and turns[-1][0] and spec.eos_id is not None:
            parts.append(np.array([spec.eos_id | LEARNT], np.uint32))
        return np.concatenate(parts)


@lru_cache(maxsize=64)
def _fixed(spec: CoderSpec, text: str) -> NDArray[Any]:
    """The ids of a template's string, in which names of special tokens are these tokens."""
    if not text:
        return np.empty(0, np.uint32)
    special: dict[str, int] = {}
    if spec.kind != "bytes":
        data = Path(spec.path).read_bytes()
        vocab = parse(data, spec.path).get_vocab(with_added_tokens=True)
        special = {name: vocab[name] for name in special_names(data) if name in text}
    names = sorted(special, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    found = [np.array([special[p]], np.uint32) if p in special else coder_for(spec).encode([p])[0] for p in pieces if p]
    return np.concatenate(found).astype(np.uint32)


@dataclass(frozen=True)
class RowShape(Settings):
    """The tensors of a row: their width and types, what pads, and whether conversations share rows."""

    max_tokens: int
    dtype: Annotated[str, Field(pattern="^U(16|32)$")]
    pad_id: int = 0
    labels: Literal["I32", "I64"] = "I64"
    packed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a slice."""
        each = TOKEN_DTYPES[self.dtype].itemsize + int(self.labels[1:]) // 8 + 1 + (8 if self.packed else 0)
        return each * self.max_tokens

    def tensors(self, tokens: NDArray[np.uint32], ends: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows of these conversations, by name; `ends` are exclusive."""
        firsts = _pack(ends, 0, self.max_tokens, len(ends))[0] if self.packed else np.arange(len(ends) + 1)
        n, width = len(firsts) - 1, self.max_tokens
        edges = np.concatenate([[0], ends])
        row_starts = edges[firsts[:-1]]
        lengths = edges[firsts[1:]] - row_starts
        places = np.arange(len(tokens)) + np.repeat(np.arange(n) * width - row_starts, lengths)
        ids = tokens & np.uint32(LEARNT - 1)
        learnt = (tokens & np.uint32(LEARNT)) != 0

        def spread(values: NDArray[Any], rest: int, dtype: Any) -> NDArray[Any]:
            out = np.full(n * width, rest, dtype)
            out[places] = values
            return out.reshape(n, width)

        labels = np.dtype(f"<i{int(self.labels[1:]) // 8}")
        tensors = {
            "input_ids": spread(ids, self.pad_id, TOKEN_DTYPES[self.dtype]),
            "labels": spread(np.where(learnt, ids.astype(np.int64), IGNORED), IGNORED, labels),
            "attention_mask": spread(np.ones(len(tokens), np.uint8), 0, np.uint8),
        }
        if self.packed:
            counts = np.diff(edges)
            owner = np.repeat(np.arange(len(ends)), counts)
            row_of = np.repeat(np.arange(n), np.diff(firsts))
            tensors["position_ids"] = spread(np.arange(len(tokens)) - edges[owner], 0, np.int32)
            tensors["segment_ids"] = spread(owner - firsts[row_of[owner]] + 1, 0, np.int32)
        return tensors


def plan_row_slices(
    parts: Sequence[TokenPart], folder: Path | str, shape: RowShape, *, slice_bytes: int = 64 << 20, slice_rows: int = 0
) -> SlicePlan:
    """Cut conversations, in their order, into slices of `slice_rows` rows, or as many as fit in `slice_bytes`; the last
    may have fewer.

    `plan.tasks(out, shape)` write them. Conversations stay whole.
    """
    rows = slice_rows or (slice_bytes - _HEADER_BYTES) // shape.row_bytes
    if rows < 1:
        raise UsageError(
            f"slice_bytes: expected at least a row ({shape.row_bytes + _HEADER_BYTES}), got {slice_bytes}."
        )

    def cut(ends: Ends, start: int) -> tuple[int, int]:
        # No row takes more tokens than it has, nor fewer than one: a window of ends is enough, mostly far more.
        wanted = rows + 1 if not shape.packed else 1 << 62
        near = ends.until(min(ends.total, start + (rows + 1) * shape.max_tokens), wanted)
        taken = len(near[:rows]) if not shape.packed else _pack(near, start, shape.max_tokens, rows)[1]
        return int(near[taken - 1]), ends.first + taken

    return write_plan(parts, folder, ["rows", asdict(shape), rows], cut)


def _pack(ends: NDArray[np.int64], start: int, width: int, rows: int) -> tuple[NDArray[np.int64], int]:
    """Whole conversations into rows, as they come: the first conversation of each row and the end, and how many."""
    firsts, at = [0], 0
    while at < len(ends) and len(firsts) <= rows:
        begin = int(ends[at - 1]) if at else start
        at = max(at + 1, int(np.searchsorted(ends, begin + width, "right")))
        firsts.append(at)
    return np.array(firsts), at
