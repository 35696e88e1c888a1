"""Values of one type as another, checked: an integer that does not fit is refused, with its tensor, row and value.

Integers and booleans change only without loss; floats round to the nearest, ties to even, and are refused where a
finite value would become infinite. `q8` is eight bits with a scale for each row: x is about
q * scale, |x - q * scale| <= scale / 2, a quarter of the bytes of F32.

BF16 has no NumPy type: its values travel as their bits, uint16. Cost: about 1 ns a value, 4 ns for `q8`.
"""

import numpy as np
from numpy.typing import NDArray

from forebay.arrays import BOOL, F32, U16, Array, DType
from forebay.dataset import slices
from forebay.errors import DatasetError, UsageError

QUANTIZED = "q8"
SCALE_SUFFIX = ".scale"  # Of the tensor, F32 [N], that holds the scales of the rows of another.

DTYPES = {name: kind for name, kind in slices.DTYPES.items() if not name.startswith("F8")}
"""Types that values are cast to; 8-bit floats are only copied."""
_LEVELS = 127  # Of q8, to either side of zero.


def dtype_name(text: str) -> str:
    """`F16` of `f16`, `float16` or `FP16`; `q8` as it is."""
    lowered = text.strip().lower()
    if lowered == QUANTIZED:
        return lowered
    short = lowered.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    name = short.replace("fp", "f").upper()
    if name not in DTYPES:
        raise UsageError(
            f"type of a tensor: expected one of {', '.join(n.lower() for n in DTYPES)}, {QUANTIZED}, got "
            f"{text!r}. Say --set tensors.NAME=TYPE."
        )
    return name


def name_of_dtype(dtype: DType) -> str:
    """SafeTensors' name of a NumPy type (bits of BF16 are `U16`). Raises UsageError if it has none."""
    for name, numpy_dtype in DTYPES.items():
        if name != "BF16" and dtype.newbyteorder("<") == numpy_dtype:
            return name
    raise UsageError(f"type of a tensor: expected booleans, integers or floats of at most 64 bits, got {dtype}.")


def cast(values: Array, to: str, name: str, *, source: str | None = None, first_row: int = 0) -> dict[str, Array]:
    """A tensor's rows in another type, by name: the values [N, …] and, if they are quantized, `<name>.scale` F32 [N].

    `to` and `source` are SafeTensors' names of types (or `q8`), `source` by default the array's; BF16 comes as bits.
    """
    kind = source or name_of_dtype(values.dtype)
    if kind == to:
        return {name: values}
    if kind == "BF16":
        values, kind = widen_bf16(values), "F32"
    if to == QUANTIZED:
        quantized, scale = quantize(values, name, first_row=first_row)
        return {name: quantized, name + SCALE_SUFFIX: scale}
    change = _between_floats if kind[0] == "F" and "F" in to else _exactly
    return {name: change(values, to, name, first_row)}


def _exactly(values: Array, to: str, name: str, first_row: int) -> Array:
    with np.errstate(all="ignore"):
        if to == "BF16":
            changed = narrow_bf16(values.astype(np.float64))
            is_same = _same(widen_bf16(changed), values)
        else:
            changed = values.astype(DTYPES[to])
            is_same = _same(changed, values)
    if not is_same.all():
        advice = "q8 quantizes." if values.dtype.kind == "f" else f"A wider type is --set tensors.{name}=i64."
        raise _refused(values, ~is_same, to, name, first_row, advice)
    return changed


def _same(changed: Array, values: Array) -> BOOL:
    if "f" in (changed.dtype.kind, values.dtype.kind):
        # 2**63 and 2**64 are floats that no integer of 64 bits is, and casting them back would wrap.
        integers, number = (values, changed) if changed.dtype.kind == "f" else (changed, values)
        if integers.dtype.kind == "f":
            return np.asarray(changed == values)
        bits = np.iinfo(np.uint8 if integers.dtype.kind == "b" else integers.dtype)
        inside = np.isfinite(number) & (number >= float(bits.min)) & (number < float(bits.max) + 1)
        back = np.where(inside, number, 0).astype(integers.dtype)
        return np.asarray(inside & (back == integers) & (back.astype(number.dtype) == number))
    signed = changed.dtype.kind == "i" or values.dtype.kind == "i"
    back = changed.astype(values.dtype) == values
    return np.asarray(back & ((changed < 0) == (values < 0)) if signed else back)


def _between_floats(values: Array, to: str, name: str, first_row: int) -> Array:
    with np.errstate(all="ignore"):
        changed = narrow_bf16(values) if to == "BF16" else values.astype(DTYPES[to])
    over = np.isfinite(values) & np.isinf(widen_bf16(changed) if to == "BF16" else changed)
    if over.any():
        raise _refused(values, over, to, name, first_row, "Take bf16, which reaches as far as f32.")
    return changed


def narrow_bf16(values: Array) -> U16:
    """The bits of the nearest BF16, ties to even; a NaN stays one."""
    with np.errstate(over="ignore"):
        singles = values.astype(np.float32)
    bits = singles.view(np.uint32)
    if values.dtype.itemsize > 4:
        # Rounding twice may end on the wrong side: the first rounding is to odd, so that the second sees what was cut.
        beyond = np.abs(singles.astype(np.float64)) > np.abs(values)
        bits = bits - beyond.astype(np.uint32)
        inexact = ~np.isnan(values) & (bits.view(np.float32).astype(np.float64) != values)
        bits = bits | inexact.astype(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.asarray(np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16))


def widen_bf16(bits: Array) -> F32:
    """F32 of the bits of BF16, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantize(values: Array, name: str = "values", *, first_row: int = 0) -> tuple[NDArray[np.int8], F32]:
    """I8 [N, …] in [-127, 127] and a scale for each row, F32 [N], 0 for zeros: |x - q * scale| <= scale / 2."""
    infinite = ~np.isfinite(values)
    if infinite.any():
        raise _refused(values, infinite, "q8", name, first_row, "Only finite values can be quantized.")
    rows = values.reshape(len(values), -1).astype(np.float64)
    largest = np.abs(rows).max(1, initial=0.0)
    with np.errstate(over="ignore"):
        scale = (largest / _LEVELS).astype(np.float32)
        if np.isinf(scale).any():
            raise _refused(values, largest >= largest.max(), "q8", name, first_row, "Scale the values down first.")
        # Rounded up, the largest scale's 127 steps could end beyond F32; rounded down, a subnormal one's too early.
        scale = np.where(np.isinf(scale * np.float32(_LEVELS)), np.nextafter(scale, np.float32(0)), scale)
        wide = scale.astype(np.float64)
        scale = np.where(largest - wide * _LEVELS > wide / 2, np.nextafter(scale, np.float32(np.inf)), scale)
    steps = np.where(scale == 0, 1.0, scale.astype(np.float64))[:, None]
    quantized = np.clip(np.rint(rows / steps), -_LEVELS, _LEVELS)
    assert (np.abs(rows - quantized * scale[:, None].astype(np.float64)) <= steps / 2 * (1 + 1e-12)).all()
    return quantized.astype(np.int8).reshape(values.shape), scale


def _refused(values: Array, invalid: Array, to: str, name: str, first_row: int, advice: str) -> DatasetError:
    index = [int(i) for i in np.argwhere(invalid)[0]]
    value = values[tuple(index)] if invalid.shape == values.shape else values[index[0]].reshape(-1)[0]
    within = f"[{', '.join(map(str, index[1:]))}]" if len(index) > 1 else ""
    return DatasetError(
        f"tensor {name!r} to {to.lower()}: expected values that {to.lower()} can hold, got {value} "
        f"(row {first_row + index[0]}{within and ', at ' + within}). {advice}"
    )
