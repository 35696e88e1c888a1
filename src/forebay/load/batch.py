"""A batch, as the Loader returns it.

In layout `tokens` inputs and labels are usually two views of one [B, L + 1] array: 8 bytes a token are written instead
of 16, and the views are not contiguous from row to row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError, UsageError

IGNORE_INDEX = -100  # The label that torch's cross entropy ignores by default.
STYLES = ("plain", "transformers")  # Of `Batch.as_dict`.


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """A rank's part of a global batch. Its arrays are not reused for later batches.

    Attributes:
        sample_ids: int64 [B], global sample numbers, each of its own dataset. Empty if this rank has no sample of an
            epoch's last step: the arrays then hold one sample of another step, and `weight` is 0.
        epoch: From 0.
        step: Of the epoch, from 0.
        tensors: Every tensor of layout `rows` by name, each [B, ...]; empty in layout `tokens`.
        document_ids: int32 [B, L], from 0 within a row, -1 on padding; None without document masks.
        position_ids: Integers [B, L], from 0 within each document of a row, and within its padding; or None.
        cu_seqlens: int32 [n + 1], edges of the n documents (padding counts as one) in the B * L positions of the
            flattened batch, from 0 to B * L; or None.
        sources: int64 [B], index of each sample's dataset in a mixture; None without a mixture.
        run_step: Of the run, over all epochs, from 0.
        weight: Samples of this rank * world size / samples of the step: 1 where all ranks have equally many. The mean
            of `weight * loss` over ranks (as DDP computes it of gradients) is the mean over samples.
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
        """Token ids [B, L]; in layout `rows` the tensor `input_ids`, else `images`. Read only.

        Raises:
            UsageError: If a batch of layout `rows` has neither.
        """
        return self._array(self._inputs, "input_ids or images")

    @property
    def labels(self) -> NDArray[Any]:
        """The next tokens [B, L], -100 where there is none to learn; in layout `rows` the tensor `labels`. Read only.

        Raises:
            UsageError: If a batch of layout `rows` has none.
        """
        return self._array(self._labels, "labels")

    def as_dict(self, style: str = "plain") -> dict[str, Any]:
        """The batch as a dict; the arrays are not copied.

        "plain": `inputs`, `labels` and, if present, `position_ids`, `document_ids`, `cu_seqlens`, `sources`, or the
        tensors of layout `rows` by name; `sample_ids`; and the numbers `epoch`, `step`, `run_step`, `weight`.
        "transformers": `input_ids`, `labels`, `position_ids` if present, or the tensors of layout `rows`. Models of
        Hugging Face shift labels themselves, so `labels` are not shifted: the last of L predictions is not trained.
        """
        plain = style == "plain"
        if self.tensors:
            arrays = dict(self.tensors)
            if self._labels is not None:
                arrays.setdefault("labels", self._labels)
        elif plain:
            arrays = {"inputs": self.inputs, "labels": self.labels}
        else:
            arrays = {"input_ids": self.inputs, "labels": self._unshifted_labels()}
        for name in ("position_ids", "document_ids", "cu_seqlens", "sources") if plain else ("position_ids",):
            if (value := getattr(self, name)) is not None:
                arrays[name] = value
        if not plain:
            return arrays
        numbers = {"epoch": self.epoch, "step": self.step, "run_step": self.run_step, "weight": self.weight}
        return {**arrays, "sample_ids": self.sample_ids, **numbers}

    def _unshifted_labels(self) -> NDArray[Any]:
        if self.document_ids is None:
            return self.inputs
        labels = np.full_like(self.labels, IGNORE_INDEX)
        labels[:, 1:] = self.labels[:, :-1]
        return labels

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
    """(inputs, labels) of samples of one slice: two overlapping views [B, L] of one new array.

    Args:
        slice_tokens: U16 or U32 [T].
        sample_indexes: [B], each in [0, T // seq_len).
        seq_len: Tokens of a sample, L.
        dtype: int64 or int32.

    Raises:
        DatasetError: If the slice has no such sample.
    """
    buffer = np.empty((len(sample_indexes), seq_len + 1), dtype)
    for row, start in zip(buffer, (sample_indexes * seq_len).tolist()):
        tokens = slice_tokens[start : start + seq_len + 1]
        if len(tokens) < seq_len:
            raise DatasetError(
                f"sample at token {start}: expected {seq_len} tokens, got {len(tokens)} of a slice of "
                f"{len(slice_tokens)}. The dataset changed while it was open; verify it."
            )
        row[seq_len] = IGNORE_INDEX  # The label after the last token of the slice.
        row[: len(tokens)] = tokens  # uint32 is cast to int32; every id below 2**31 stays the same.
    return buffer[:, :-1], buffer[:, 1:]
