"""Embeddings as vectors of integers, whose products are the same on every machine."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from forebay.errors import PrepareError

VECTOR_LENGTH = 4096  # 64 products of two such vectors' members still fit in 32 bits.
Vectors = NDArray[np.int16]


def quantize(vectors: NDArray[Any]) -> Vectors:
    """The vectors scaled to VECTOR_LENGTH, rounded; zeros where one is zero or not finite."""
    values = np.asarray(vectors, np.float64)
    values = np.where(np.isfinite(values).all(1, keepdims=True), values, 0)
    largest = np.abs(values).max(1, initial=0, keepdims=True)
    values = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)
    norms = np.sqrt(np.cumsum(values * values, axis=1)[:, -1:])  # cumsum adds in order, sum does as it likes
    scaled = np.divide(values * VECTOR_LENGTH, norms, out=np.zeros_like(values), where=norms > 0)
    rounded: Vectors = np.rint(scaled).astype("<i2")
    return rounded


def embeddings_of(batch: pa.RecordBatch, name: str, dimension: int, width: int) -> Vectors:
    """int16 [rows, width]: the column of lists of `dimension` floats; zeros for a missing one, and beyond them."""
    column = batch.column(name) if name in batch.schema.names else None
    if column is None or not (_is_list(column.type) and pa.types.is_floating(column.type.value_type)):
        got = f"a column of {column.type}" if column is not None else f"columns {', '.join(batch.schema.names)}"
        raise PrepareError(
            f"dedup.embedding: expected a column {name!r} of lists of floats, got {got}. A stage makes it."
        )
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    present = np.flatnonzero(np.asarray(column.is_valid()))
    wrong = lengths[present][lengths[present] != dimension]
    if len(wrong):
        raise PrepareError(
            f"dedup.dimension: expected embeddings of {dimension} numbers, got one of {wrong[0]}. Set dimension."
        )
    out = np.zeros((len(column), width), "<i2")
    values = column.take(pa.array(present)).flatten().fill_null(np.nan).to_numpy(zero_copy_only=False)
    out[present, :dimension] = quantize(values.reshape(-1, dimension))
    return out


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
