"""Values of quantized rows again: eight bits times their row's scale; bits of BF16 as the numbers they are.

    for batch in loader:
        images = dequantize(batch.tensors, kinds_of(loader.dataset))["images"]

Cost: one multiplication a value, about 1 ns. The product is rounded to F32: it is within scale / 2 and half a unit in
the last place of what was quantized.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.errors import UsageError

Array: TypeAlias = NDArray[Any]
SCALE_SUFFIX = ".scale"


def kinds_of(dataset: Dataset) -> dict[str, str]:
    """What SafeTensors calls the type of each tensor of layout `rows`; {} where neither manifest nor slice tells.

    `forebay convert` and `adopt` write it into the manifest; of other datasets the first slice is opened.
    """
    for entry in ("converted", "adopted"):
        told = dataset.manifest.lineage.get(entry)
        if isinstance(told, dict) and isinstance(told.get("tensors"), dict):
            return {name: str(kind) for name, (kind, *_) in told["tensors"].items()}
    return dict(dataset.open_slice(0).dtypes) if dataset.num_slices else {}


def dequantize(
    tensors: Mapping[str, Array], kinds: Mapping[str, str] | None = None, names: Iterable[str] | None = None
) -> dict[str, Array]:
    """The tensors of a batch with quantized ones as F32; scales are left out, all else is as it was.

    Args:
        tensors: By name, each [B, …]: those of a Batch, or of a slice.
        kinds: Types as `kinds_of` gives them; without, bits of BF16 stay bits, for nothing in an array tells.
        names: The tensors to dequantize; by default every I8 tensor with a scale beside it, and every BF16.

    Raises:
        UsageError: If a tensor that is named is not there, or is neither quantized nor BF16.
    """
    kinds = kinds or {}
    quantized = {name for name, array in tensors.items() if array.dtype == np.int8 and name + SCALE_SUFFIX in tensors}
    halves = {name for name in tensors if kinds.get(name) == "BF16"}
    wanted = quantized | halves if names is None else set(names)
    if not wanted <= quantized | halves:
        raise UsageError(
            f"dequantize: expected some of {sorted(quantized | halves)}, got {sorted(wanted - quantized - halves)}."
        )
    scales = {name + SCALE_SUFFIX for name in quantized & wanted}
    out: dict[str, Array] = {}
    for name, array in tensors.items():
        if name in wanted & quantized:
            scale = tensors[name + SCALE_SUFFIX].reshape(-1, *[1] * (array.ndim - 1))
            out[name] = array.astype(np.float32) * scale
        elif name in wanted:
            out[name] = (array.astype(np.uint32) << 16).view(np.float32)
        elif name not in scales:
            out[name] = array
    return out
