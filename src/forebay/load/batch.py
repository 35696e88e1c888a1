"""Batches, as the Loader returns them: `TokenBatch` and `RowBatch`, of NumPy, PyTorch or JAX arrays.

In layout `tokens` inputs and labels of NumPy are usually two views of one [B, L + 1] array: 8 bytes a token are written
instead of 16, and the views are not contiguous from row to row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay.base import Json
from forebay.errors import UsageError
from forebay.load.arguments import check_choice

IGNORE_INDEX = -100  # The label that torch's cross entropy ignores by default.
STYLES = ("batch", "plain", "transformers")  # `to_torch` takes all of them, `as_dict` the last two.
Style: TypeAlias = Literal["batch", "plain", "transformers"]
Array = TypeVar("Array")
_MAX_ROWS_SHOWN = 8
_MASKS = ("position_ids", "document_ids", "cu_seqlens")


class DocumentMasks:
    """The fields of a TokenBatch that need document masks; those of NumPy batches are computed when they are read.

    Args:
        cu_seqlens: int32 [n + 1], where each part of a document begins in B * L positions; and their end.
        numbers: int32 [n], of each part within its row, -1 for padding.
        shape: (B, L).
    """

    def __init__(self, cu_seqlens: Any, numbers: NDArray[np.int32], shape: tuple[int, ...]) -> None:
        self.cu_seqlens = cu_seqlens
        self.numbers = numbers
        self.shape = shape

    @cached_property
    def max_seqlen(self) -> int:
        return int(self._lengths().max(initial=0))

    @cached_property
    def document_ids(self) -> Any:
        return self.numbers.astype(np.int64).repeat(self._lengths()).reshape(self.shape)

    @cached_property
    def position_ids(self) -> Any:
        starts = self.cu_seqlens[: len(self.numbers)].repeat(self._lengths())
        return (np.arange(len(starts)) - starts).reshape(self.shape)

    def with_arrays(self, **arrays: Any) -> DocumentMasks:
        """These masks with other arrays, by the names of the fields."""
        masks = DocumentMasks(self.cu_seqlens, self.numbers, self.shape)
        vars(masks).update(arrays, max_seqlen=self.max_seqlen)
        return masks

    def _lengths(self) -> NDArray[np.int32]:
        lengths: NDArray[np.int32] = np.diff(self.cu_seqlens[: len(self.numbers) + 1])
        return lengths


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class _Batch(Generic[Array]):
    """What all batches have.

    Attributes:
        sample_ids: int64 [B] of NumPy, global sample numbers, each of its own dataset. Empty if this rank has no sample
            of an epoch's last step: the arrays then hold one sample of another step, and `weight` is 0.
        epoch: From 0; 0 for a mixture.
        step: Of the run, over all epochs, from 0.
        epoch_step: Of the epoch, from 0.
        weight: Samples of this rank * world size / samples of the step: 1 where all ranks have equally many. The mean
            of `weight * loss` over ranks (as DDP computes it of gradients) is the mean over samples.
    """

    sample_ids: NDArray[np.int64]
    epoch: int
    step: int
    epoch_step: int
    weight: float = 1.0
    _dataset_index: NDArray[np.int64] | None = None
    _num_labels: int | None = None
    _text: Any = None  # Decodes tokens to text; used by the display of notebooks only.

    @property
    def dataset_index(self) -> NDArray[np.int64]:
        """int64 [B] of NumPy: the index of each sample's dataset in the mixture; 0 without a mixture."""
        return np.zeros(len(self.sample_ids), np.int64) if self._dataset_index is None else self._dataset_index

    @property
    def labels(self) -> Array:
        raise NotImplementedError

    @property
    def num_labels(self) -> int:
        """How many labels are not -100. Costs a pass over the labels, for those of another device before the copy."""
        if self._num_labels is None:
            learned: Any = self.labels != IGNORE_INDEX
            self._num_labels = int(np.count_nonzero(learned) if isinstance(learned, np.ndarray) else learned.sum())
        return self._num_labels

    def __len__(self) -> int:
        return len(self.sample_ids)

    def arrays(self) -> dict[str, Array]:
        """The arrays by name."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Array:
        """An array [B, ...]. Raises UsageError if the batch has none of that name; also where a batch is unpacked."""
        arrays = self.arrays()
        if name not in arrays:
            raise UsageError(f"batch[{name!r}]: expected one of {sorted(arrays)}. Use one of these names.")
        return arrays[name]

    def _others(self) -> Json:
        """The fields that are no arrays of a batch; `dataclasses.replace` takes four times as long."""
        return {
            "sample_ids": self.sample_ids, "epoch": self.epoch, "step": self.step, "epoch_step": self.epoch_step,
            "weight": self.weight, "_dataset_index": self._dataset_index, "_num_labels": self._num_labels,
            "_text": self._text,
        }  # fmt: skip

    def _numbers(self) -> Json:
        names = ("sample_ids", "dataset_index", "epoch", "step", "epoch_step", "weight")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class TokenBatch(_Batch[Array]):
    """A rank's part of a global batch of layout `tokens`. Its arrays are not reused for later batches.

    Attributes:
        inputs: Token ids [B, L]. Read only.
        labels: The next tokens [B, L], -100 where there is none to learn. Read only.
        sample_ids, epoch, step, epoch_step, weight: As the Loader's documentation of batches says.
    """

    inputs: Array
    labels: Array
    _masks: DocumentMasks | None = None

    @property
    def position_ids(self) -> Array:
        """Integers [B, L], from 0 within each document of a row, and within its padding. UsageError without masks."""
        return self._mask("position_ids")  # type: ignore[no-any-return]

    @property
    def document_ids(self) -> Array:
        """Integers [B, L], from 0 within a row, -1 on padding. UsageError without masks."""
        return self._mask("document_ids")  # type: ignore[no-any-return]

    @property
    def cu_seqlens(self) -> Array:
        """int32 [n + 1], edges of the n documents in the B * L positions of the flattened batch, from 0 to B * L.

        Padding counts as a document. With `max_documents` it is int32 [max_documents + 1], and the last edges are
        equal. UsageError without masks.
        """
        return self._mask("cu_seqlens")  # type: ignore[no-any-return]

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document in a row. UsageError without masks."""
        return self._mask("max_seqlen")  # type: ignore[no-any-return]

    def arrays(self) -> dict[str, Array]:
        """The arrays by name: inputs, labels and, with masks, position_ids, document_ids, cu_seqlens."""
        masks = () if self._masks is None else _MASKS
        return {"inputs": self.inputs, "labels": self.labels, **{name: getattr(self._masks, name) for name in masks}}

    def with_arrays(self, arrays: Mapping[str, Any]) -> TokenBatch[Any]:
        """This batch with other arrays, of the names of `arrays()`."""
        masks = self._masks
        if masks is not None:
            masks = masks.with_arrays(**{name: arrays[name] for name in _MASKS})
        return TokenBatch(inputs=arrays["inputs"], labels=arrays["labels"], _masks=masks, **self._others())

    def as_dict(self, style: str = "plain") -> Json:
        """The batch as a dict; the arrays are not copied.

        "plain": `inputs`, `labels`, with masks `position_ids`, `document_ids`, `cu_seqlens`, `max_seqlen`;
        `sample_ids`, `dataset_index`, and the numbers `epoch`, `step`, `epoch_step`, `weight`.
        "transformers": `input_ids`, `labels`, with masks `position_ids`, `cu_seq_lens_q`, `cu_seq_lens_k`,
        `max_length_q`, `max_length_k`. Models of Hugging Face shift labels themselves, so `labels` are not shifted: the
        last of L predictions is not trained.
        """
        check_choice("style", style, STYLES[1:])
        masks = self._masks
        if style == "plain":
            longest = {} if masks is None else {"max_seqlen": masks.max_seqlen}
            return {**self.arrays(), **longest, **self._numbers()}
        if masks is None:
            return {"input_ids": self.inputs, "labels": self.inputs}
        return {
            "input_ids": self.inputs, "labels": self._unshifted_labels(), "position_ids": masks.position_ids,
            "cu_seq_lens_q": masks.cu_seqlens, "cu_seq_lens_k": masks.cu_seqlens,
            "max_length_q": masks.max_seqlen, "max_length_k": masks.max_seqlen,
        }  # fmt: skip

    def pad_documents(self, max_documents: int) -> Self:
        """Make `cu_seqlens` [max_documents + 1], in place. Raises UsageError if the batch has more documents."""
        if self._masks is not None:
            edges = self._masks.cu_seqlens
            if len(edges) > max_documents + 1:
                raise UsageError(
                    f"max_documents: expected at least {len(edges) - 1}, the documents of step {self.step}'s batch, "
                    f"got {max_documents}. Give more."
                )
            padded = np.full(max_documents + 1, edges[-1], np.int32)
            padded[: len(edges)] = edges
            self._masks = self._masks.with_arrays(cu_seqlens=padded)
        return self

    def _mask(self, name: str) -> Any:
        if self._masks is None:
            raise UsageError(f"{name}: expected a loader with document masks. Open it with document_masks=True.")
        return getattr(self._masks, name)

    def _unshifted_labels(self) -> Any:
        labels: Any = self.labels
        shifted = labels.clone() if hasattr(labels, "clone") else np.array(labels)
        shifted[:, 1:] = labels[:, :-1]
        shifted[:, 0] = IGNORE_INDEX
        return shifted

    def __repr__(self) -> str:
        shape = tuple(self.inputs.shape)  # type: ignore[attr-defined]
        return f"TokenBatch(step={self.step}, epoch={self.epoch}, inputs={shape}, samples={len(self)})"

    def _repr_html_(self) -> str:
        """The text of the first rows, a colour for each document; token ids if the dataset has no tokenizer."""
        inputs: Any = self.inputs
        rows = [np.asarray(row.cpu() if hasattr(row, "cpu") else row) for row in inputs[:_MAX_ROWS_SHOWN]]
        edges = [[0, len(row)] for row in rows]
        if self._masks is not None:
            ids: Any = self._masks.document_ids
            changes = [np.flatnonzero(np.diff(np.asarray(row.cpu() if hasattr(row, "cpu") else row))) for row in ids]
            edges = [[0, *(change + 1).tolist(), len(row)] for change, row in zip(changes, rows)]
        body = [
            [self._decode(row[start:stop]) for start, stop in pairwise(stops)]
            for row, stops in zip(rows, edges)
        ]  # fmt: skip
        from forebay import html

        return html.card(repr(self), {}, html.coloured(body))

    def _decode(self, tokens: NDArray[Any]) -> str:
        text = self._text(tokens) if self._text is not None else ""
        return text or " ".join(map(str, tokens.tolist()))


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class RowBatch(_Batch[Array]):
    """A rank's part of a global batch of layout `rows`; `batch["images"]` is a tensor. Its arrays are not reused.

    Attributes:
        tensors: Every tensor of the dataset by name, each [B, ...]; and `labels`, made of `input_ids` if it has none.
    """

    tensors: Mapping[str, Array] = field(default_factory=dict)

    @property
    def inputs(self) -> Array:
        """The tensor `input_ids`, else `images`."""
        return self["input_ids" if "input_ids" in self.tensors else "images"]

    @property
    def labels(self) -> Array:
        """The tensor `labels`; of rows with `input_ids` and no labels, these with -100 on padding."""
        return self["labels"]

    def arrays(self) -> dict[str, Array]:
        """The tensors by name."""
        return dict(self.tensors)

    def with_arrays(self, arrays: Mapping[str, Any]) -> RowBatch[Any]:
        """This batch with other tensors."""
        return RowBatch(tensors=arrays, **self._others())

    def as_dict(self, style: str = "plain") -> Json:
        """The tensors by name; of style "plain" also `sample_ids`, `epoch`, ... as of a TokenBatch."""
        check_choice("style", style, STYLES[1:])
        return {**self.tensors, **(self._numbers() if style == "plain" else {})}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(array.shape)}" for name, array in self.tensors.items())  # type: ignore[attr-defined]
        return f"RowBatch(step={self.step}, epoch={self.epoch}, {shapes}, samples={len(self)})"

    def _repr_html_(self) -> str:
        dtypes: Json = {name: f"{a.dtype} {list(a.shape)}" for name, a in self.tensors.items()}  # type: ignore[attr-defined]
        from forebay import html

        return html.card(repr(self).partition(", ")[0] + ")", dtypes)


NumpyTokens: TypeAlias = TokenBatch[NDArray[Any]]
NumpyRows: TypeAlias = RowBatch[NDArray[Any]]


def new_batch(
    inputs: NDArray[Any] | None, labels: NDArray[Any] | None, tensors: Mapping[str, NDArray[Any]],
    masks: DocumentMasks | None = None, **numbers: Any,
) -> NumpyTokens | NumpyRows:  # fmt: skip
    """A batch of the arrays of a collator, `BatchArrays`, and the fields that all batches have."""
    if tensors:
        return RowBatch(tensors=tensors if labels is None else {"labels": labels, **tensors}, **numbers)
    assert inputs is not None and labels is not None
    return TokenBatch(inputs=inputs, labels=labels, _masks=masks, **numbers)


def owner_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array of which `array` is a view, if that is contiguous, of its type, and little larger; else `array`."""
    base = array.base
    if type(base) is not np.ndarray or base.dtype != array.dtype or not base.flags.c_contiguous:
        return array
    return base if base.nbytes <= 2 * array.nbytes and min(array.strides, default=0) >= 0 else array
