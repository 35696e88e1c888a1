"""Dequantizes rows: I8 values times their row's scale, and bits of BF16, as F32.

    for batch in loader:
        images = dequantize(batch.tensors, tensor_dtypes(loader.dataset))["images"]

Cost: one multiplication a value, about 1 ns. The product is rounded to F32: within scale / 2 and half a unit in the
last place of the original value.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.errors import UsageError

Array: TypeAlias = NDArray[Any]
SCALE_SUFFIX = ".scale"


def tensor_dtypes(dataset: Dataset) -> dict[str, str]:
    """The SafeTensors type of each tensor of layout `rows`, from the manifest, else from the first slice; {} if empty.

    `forebay convert` and `forebay import` write the types into the manifest.
    """
    for entry in ("converted", "imported"):
        lineage = dataset.manifest.lineage.get(entry)
        if isinstance(lineage, dict) and isinstance(lineage.get("tensors"), dict):
            return {name: str(dtype) for name, (dtype, *_) in lineage["tensors"].items()}
    return dict(dataset.open_slice(0).dtypes) if dataset.num_slices else {}


def dequantize(
    tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None, names: Iterable[str] | None = None
) -> dict[str, Array]:
    """The tensors of a batch with quantized ones as F32, without scales; other tensors unchanged.

    Args:
        tensors: By name, each [B, ...]: those of a Batch, or of a slice.
        dtypes: The types from `tensor_dtypes`; without them BF16 stays bits, as its arrays do not tell.
        names: The tensors to dequantize; by default every I8 tensor with a scale beside it, and every BF16.

    Raises:
        UsageError: If a named tensor is missing, or is neither quantized nor BF16.
    """
    dtypes = dtypes or {}
    quantized = {name for name, array in tensors.items() if array.dtype == np.int8 and name + SCALE_SUFFIX in tensors}
    possible = quantized | {name for name in tensors if dtypes.get(name) == "BF16"}
    chosen = possible if names is None else set(names)
    if not chosen <= possible:
        raise UsageError(f"dequantize: expected some of {sorted(possible)}, got {sorted(chosen - possible)}.")
    scales = {name + SCALE_SUFFIX for name in quantized & chosen}
    out: dict[str, Array] = {}
    for name, array in tensors.items():
        if name in quantized & chosen:
            out[name] = array.astype(np.float32) * tensors[name + SCALE_SUFFIX].reshape(-1, *[1] * (array.ndim - 1))
        elif name in chosen:
            out[name] = (array.astype(np.uint32) << 16).view(np.float32)
        elif name not in scales:
            out[name] = array
    return out
