"""One batch: what a loader gives out, and how samples of one slice become one.

Inputs and labels are mostly two views of one [B, L + 1] array, so that a token is written once. Cost: 8 bytes a token
are written where 16 would be with two arrays; the views are not contiguous row to row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError, UsageError

IGNORE_INDEX = -100  # What torch's cross entropy leaves out by default.


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """A rank's part of a global batch. Its arrays are its own: they stay as they are when the next one comes.

    Attributes:
        sample_ids: int64 [B], global sample numbers, each of its own dataset. Empty where this rank has no sample of an
            epoch's last step: then `inputs` and the rest hold one sample of another step, and `weight` is 0.
        epoch: From 0.
        step: Of the epoch, from 0.
        tensors: Every tensor of layout `rows` by name, each [B, ...]; empty in layout `tokens`.
        document_ids: int32 [B, L], from 0 within a row, -1 on padding; None without document masks.
        position_ids: Integers [B, L], from 0 within each document of a row, and within its padding; or None.
        cu_seqlens: int32 [n + 1], edges of the n documents (padding counts as one) in the B * L positions of the
            flattened batch, from 0 to B * L; or None.
        sources: int64 [B], the dataset of each sample of a mixture; None without one.
        run_step: Of the run, over all epochs, from 0.
        weight: Samples of this rank * world size / samples of the step: 1 where all ranks have equally many. A mean
            over ranks of `weight * loss` is the mean over samples, as DDP's of the gradients.
    """

    _inputs: NDArray[Any] | None
    _labels: NDArray[Any] | None
    sample_ids: NDArray[np.int64]
    epoch: int
    step: int
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    document_ids: NDArray[np.int32] | None = None
    position_ids: NDArray[Any] | None = None
    cu_seqlens: NDArray[np.int32] | None = None
    sources: NDArray[np.int64] | None = None
    run_step: int = 0
    weight: float = 1.0

    @property
    def inputs(self) -> NDArray[Any]:
        """Integers [B, L] (layout `tokens`); `input_ids` or `images`, else UsageError (`rows`). Do not write to it."""
        return self._array(self._inputs, "input_ids or images")

    @property
    def labels(self) -> NDArray[Any]:
        """Integers [B, L], the next tokens, -100 where there is none to learn; of rows the tensor `labels`.

        Those of layout `tokens` may overlap `inputs` in memory: do not write to them.
        """
        return self._array(self._labels, "labels")

    def _array(self, array: NDArray[Any] | None, names: str) -> NDArray[Any]:
        if array is None:
            raise UsageError(f"batch: expected a tensor {names}, got {sorted(self.tensors)}. Use batch.tensors[NAME].")
        return array

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __repr__(self) -> str:
        shape = None if self._inputs is None else self._inputs.shape
        return f"Batch(epoch={self.epoch}, step={self.step}, inputs={shape}, samples={len(self)})"


def make_batch(
    slice_tokens: NDArray[Any], sample_indexes: NDArray[np.int64], seq_len: int, dtype: Any = np.int64
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(inputs, labels) of the samples [B] of a slice, each in [0, T // seq_len), as int64 or int32.

    Two overlapping views [B, L] of one new array. The label after the slice's last token is -100.
    """
    buffer = np.empty((len(sample_indexes), seq_len + 1), dtype)
    for row, start in zip(buffer, (sample_indexes * seq_len).tolist()):
        piece = slice_tokens[start : start + seq_len + 1]
        if len(piece) < seq_len:
            raise DatasetError(
                f"sample at token {start}: expected {seq_len} tokens, got {len(piece)} of a slice of "
                f"{len(slice_tokens)}. The dataset changed while it was open; verify it."
            )
        row[seq_len] = IGNORE_INDEX
        row[: len(piece)] = piece  # Assignment casts as it copies; uint32 to int32 keeps every id below 2**31.
    return buffer[:, :-1], buffer[:, 1:]
