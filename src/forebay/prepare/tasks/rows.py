"""Slices of rows for fine-tuning: conversations as tensors of fixed length with masked labels.

N rows of L = `max_tokens`: `input_ids` U16 or U32 [N, L] (padding is EOS, or 0), `labels` I64 or I32 [N, L], -100 where
masked (at the same position as the token: the model shifts), `attention_mask` U8 [N, L]. Packed, several whole
conversations share a row: `position_ids` I32 [N, L] start at 0 in each, `segment_ids` I32 [N, L] count them from 1
(0: padding).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.prepare.settings import Settings
from forebay.prepare.tasks.shuffle import EncodedPart
from forebay.prepare.tasks.slicing import DocumentEnds, SlicePlan, write_plan
from forebay.prepare.tokenize.conversations import TRAINED

MASKED = -100
"""The label of a token that is not trained on."""
_HEADER_BYTES = 1024


@dataclass(frozen=True)
class RowShape(Settings):
    """The tensors of a row: their width and types, the padding, and whether conversations share rows."""

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

    def tensors(self, tokens: NDArray[np.uint32], document_ends: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows of these conversations, by name; `ends` are exclusive."""
        firsts = (
            _pack(document_ends, 0, self.max_tokens, len(document_ends))[0]
            if self.packed
            else np.arange(len(document_ends) + 1)
        )
        n, width = len(firsts) - 1, self.max_tokens
        edges = np.concatenate([[0], document_ends])
        row_starts = edges[firsts[:-1]]
        lengths = edges[firsts[1:]] - row_starts
        positions = np.arange(len(tokens)) + np.repeat(np.arange(n) * width - row_starts, lengths)
        ids = tokens & np.uint32(TRAINED - 1)
        trained = (tokens & np.uint32(TRAINED)) != 0

        def spread(values: NDArray[Any], rest: int, dtype: Any) -> NDArray[Any]:
            out = np.full(n * width, rest, dtype)
            out[positions] = values
            return out.reshape(n, width)

        labels = np.dtype(f"<i{int(self.labels[1:]) // 8}")
        tensors = {
            "input_ids": spread(ids, self.pad_id, TOKEN_DTYPES[self.dtype]),
            "labels": spread(np.where(trained, ids.astype(np.int64), MASKED), MASKED, labels),
            "attention_mask": spread(np.ones(len(tokens), np.uint8), 0, np.uint8),
        }
        if self.packed:
            counts = np.diff(edges)
            owner = np.repeat(np.arange(len(document_ends)), counts)
            row_of = np.repeat(np.arange(n), np.diff(firsts))
            tensors["position_ids"] = spread(np.arange(len(tokens)) - edges[owner], 0, np.int32)
            tensors["segment_ids"] = spread(owner - firsts[row_of[owner]] + 1, 0, np.int32)
        return tensors


def plan_row_slices(
    parts: Sequence[EncodedPart],
    folder: Path | str,
    shape: RowShape,
    *,
    slice_bytes: int = 64 << 20,
    slice_rows: int = 0,
) -> SlicePlan:
    """Cut conversations, in their order, into slices of `slice_rows` rows, or as many as fit in `slice_bytes`.

    The last slice may have fewer. Conversations stay whole. `plan.tasks(out, shape)` write them.
    """
    rows = slice_rows or (slice_bytes - _HEADER_BYTES) // shape.row_bytes
    if rows < 1:
        raise UsageError(
            f"slice_bytes: expected at least a row ({shape.row_bytes + _HEADER_BYTES}), got {slice_bytes}."
        )

    def cut(document_ends: DocumentEnds, start: int) -> tuple[int, int]:
        # A row has at most `max_tokens` tokens, so that a window of ends is enough.
        max_ends = rows + 1 if not shape.packed else 1 << 62
        near = document_ends.until(min(document_ends.total, start + (rows + 1) * shape.max_tokens), max_ends)
        taken = len(near[:rows]) if not shape.packed else _pack(near, start, shape.max_tokens, rows)[1]
        return int(near[taken - 1]), document_ends.first + taken

    return write_plan(parts, folder, ["rows", asdict(shape), rows], cut)


def _pack(document_ends: NDArray[np.int64], start: int, width: int, rows: int) -> tuple[NDArray[np.int64], int]:
    """Whole conversations into rows, in order: the first conversation of each row and the end, and how many."""
    firsts, count = [0], 0
    while count < len(document_ends) and len(firsts) <= rows:
        begin = int(document_ends[count - 1]) if count else start
        count = max(count + 1, int(np.searchsorted(document_ends, begin + width, "right")))
        firsts.append(count)
    return np.array(firsts), count
