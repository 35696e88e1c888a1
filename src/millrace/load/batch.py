"""One batch: tokens or rows of open slices, gathered into arrays of the batch's own.

Hides the one copy there is: from the map of a slice to a [B, L + 1] buffer, cast on the way. `inputs` is the
buffer without its last column and `labels` the buffer without its first, so that the next token is written once.
Cost: 8 bytes a token are written where 16 would be with two arrays; the views are not contiguous row to row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import DatasetError

IGNORE_INDEX = -100  # What torch's cross entropy leaves out by default.


class Batch:
    """A rank's part of a global batch. Its arrays are its own: they stay as they are when the next one comes.

    Attributes:
        inputs: Integers [B, L] (layout `tokens`); `input_ids`, else `images`, else None (layout `rows`).
        labels: Integers [B, L], the next tokens; -100 where there is none to learn. In layout `rows` the tensor
            `labels`, or None. `inputs` and `labels` of layout `tokens` may overlap in memory: do not write to them.
        sample_ids: int64 [B], global sample numbers, each of its own dataset.
        epoch: From 0.
        step: Of the epoch, from 0.
        tensors: Every tensor of layout `rows` by name, each [B, ...]; empty in layout `tokens`.
        document_ids: int32 [B, L], from 0 within a row, -1 on padding; None without document masks.
        position_ids: Integers [B, L], from 0 within each document of a row, and within its padding; or None.
        cu_seqlens: int32 [n + 1], edges of the n documents (padding counts as one) in the B * L positions of the
            flattened batch, from 0 to B * L; or None.
        sources: int64 [B], the dataset of each sample of a mixture; None without one.
        run_step: Of the run, over all epochs, from 0.
    """

    __slots__ = (
        "cu_seqlens", "document_ids", "epoch", "inputs", "labels", "position_ids", "run_step", "sample_ids", "sources",
        "step", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        inputs: NDArray[Any] | None,
        labels: NDArray[Any] | None,
        sample_ids: NDArray[np.int64],
        epoch: int,
        step: int,
        tensors: Mapping[str, NDArray[Any]] | None = None,
        document_ids: NDArray[np.int32] | None = None,
        position_ids: NDArray[Any] | None = None,
        cu_seqlens: NDArray[np.int32] | None = None,
        sources: NDArray[np.int64] | None = None,
        run_step: int = 0,
    ) -> None:
        self.inputs = inputs
        self.labels = labels
        self.sample_ids = sample_ids
        self.epoch = epoch
        self.step = step
        self.tensors: Mapping[str, NDArray[Any]] = {} if tensors is None else tensors
        self.document_ids = document_ids
        self.position_ids = position_ids
        self.cu_seqlens = cu_seqlens
        self.sources = sources
        self.run_step = run_step

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __repr__(self) -> str:
        shape = None if self.inputs is None else self.inputs.shape
        return f"Batch(epoch={self.epoch}, step={self.step}, inputs={shape}, samples={len(self)})"


def make_batch(
    slice_tokens: NDArray[Any], sample_indexes: NDArray[np.int64], seq_len: int, dtype: Any = np.int64
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Samples of one slice as (inputs, labels).

    Args:
        slice_tokens: Unsigned integers [T].
        sample_indexes: [B], each in [0, T // seq_len).
        seq_len: L.
        dtype: Of the result: int64 or int32.

    Returns:
        Two overlapping views [B, L] of one new array. The label after the slice's last token is -100.
    """
    buffer = np.empty((len(sample_indexes), seq_len + 1), dtype)
    return gather([slice_tokens] * len(sample_indexes), sample_indexes, buffer)


def gather(
    tokens: Sequence[NDArray[Any]], sample_indexes: NDArray[np.int64], buffer: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Fill `buffer` [B, L + 1] with sample `sample_indexes[i]` of `tokens[i]` in row i; the two views of it.

    Raises:
        DatasetError: If a sample is not inside its slice.
    """
    seq_len = buffer.shape[1] - 1
    for row, source, start in zip(buffer, tokens, (sample_indexes * seq_len).tolist()):
        piece = source[start : start + seq_len + 1]
        if len(piece) > seq_len:
            row[...] = piece  # Assignment casts as it copies; uint32 to int32 keeps every id below 2**31.
        elif len(piece) == seq_len:
            row[:seq_len] = piece
            row[seq_len] = IGNORE_INDEX
        else:
            raise DatasetError(
                f"sample at token {start}: expected {seq_len} tokens, got {len(piece)} of a slice of {len(source)}. "
                "The dataset changed while it was open; verify it."
            )
    return buffer[:, :-1], buffer[:, 1:]


def gather_rows(
    tensors: Sequence[Mapping[str, NDArray[Any]]], row_indexes: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Row `row_indexes[i]` of every tensor in `tensors[i]`, stacked in new arrays of the tensors' own types.

    Raises:
        DatasetError: If two slices disagree in names, or in a row's shape or type.
    """
    if not tensors:
        return {}
    first = tensors[0]
    out = {name: np.empty((len(tensors), *array.shape[1:]), array.dtype) for name, array in first.items()}
    for i, (source, row) in enumerate(zip(tensors, row_indexes.tolist())):
        if source is not first and source.keys() != first.keys():
            raise DatasetError(
                f"rows of a batch: expected tensors {sorted(first)}, got {sorted(source)}. "
                "All slices of a dataset must hold the same tensors."
            )
        for name, target in out.items():
            array = source[name]
            if array.dtype != target.dtype or array.shape[1:] != target.shape[1:]:
                raise DatasetError(
                    f"rows of a batch: expected {name} of {target.dtype} {list(target.shape[1:])}, got "
                    f"{array.dtype} {list(array.shape[1:])}. Make the rows of all slices alike (pad them)."
                )
            target[i] = array[row]
    return out


class BufferPool:
    """Batch buffers that nobody holds any more, used again.

    A fresh array of half a megabyte costs more in page faults than in copying. A buffer is free again when no
    view of it is referenced from anywhere, which the reference count tells; a batch that is kept stays whole.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._buffers: list[NDArray[Any]] = []

    def take(self, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """A buffer of undefined content: one given out before and dropped since, or a new one."""
        for i in range(len(self._buffers)):
            # Two references: the list's, and getrefcount's own argument.
            if sys.getrefcount(self._buffers[i]) == 2 and self._buffers[i].shape == shape:
                return self._buffers[i]
        buffer = np.empty(shape, dtype)
        if len(self._buffers) >= self._most:
            self._buffers.pop(0)
        self._buffers.append(buffer)
        return buffer
