"""Types of tensors: every change is exact, or within its bound, or refused with the place."""

import math
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.convert import convert
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import open_slice, write_rows_slice
from forebay.errors import DatasetError, UsageError
from forebay.formats.cast import DTYPES, cast, dtype_name, narrow_bf16, quantize, widen_bf16
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.load.loader import Loader
from forebay.load.rows import dequantize, tensor_dtypes
from support.foreign_datasets import made_table

INTEGERS = [name for name in DTYPES if name[0] in "UI"]


def a_table(**arrays: np.ndarray) -> TableSource:
    columns = {
        name: pa.FixedShapeTensorArray.from_numpy_ndarray(array) if array.ndim > 1 else pa.array(array)
        for name, array in arrays.items()
    }
    return made_table(columns, 3)


def test_the_names_of_types():
    names = {"f16": "F16", "float16": "F16", "fp16": "F16", "bfloat16": "BF16", "uint16": "U16", "I8": "I8"}
    for text, name in {**names, "bool": "BOOL", "q8": "q8", " Q8": "q8"}.items():
        assert dtype_name(text) == name
    with pytest.raises(UsageError, match=r"expected one of bool, u8, .*q8, got 'complex'"):
        dtype_name("complex")


FLOATS = {"F16": (11, 65504), "BF16": (8, 2**127), "F32": (24, 2**127), "F64": (53, 2**127)}  # Bits, and a limit.


def can_hold(to: str, value: Any) -> bool:
    """Return whether a type has exactly this number; one of the two is a type of integers."""
    if to in INTEGERS:
        limits = np.iinfo(DTYPES[to])
        return math.isfinite(value) and float(value).is_integer() and limits.min <= int(value) <= limits.max
    bits, limit = FLOATS[to]
    size = abs(int(value))
    return size <= limit and (size == 0 or size // (size & -size) < 1 << bits)


@given(
    st.sampled_from([*INTEGERS, "F16", "F32", "F64"]).flatmap(lambda source: hnp.arrays(DTYPES[source], (3,))),
    st.sampled_from([*INTEGERS, *FLOATS]),
)
@example(np.array([2.0**63]), "I64")
@example(np.array([2.0**64]), "U64")
@example(np.array([2**63 - 1, 65505]), "F64")
@example(np.array([65504, 65505, 2**24 + 1]), "F16")
@settings(max_examples=150)
def test_numbers_are_kept_or_refused(values, to):
    """Between integers, from integers to floats, and from floats to integers."""
    if values.dtype.kind == "f" and to in FLOATS:
        to = "I32"
    fits = [can_hold(to, value) for value in values.tolist()]
    if all(fits):
        result = cast(values, to, "x")["x"]
        assert result.dtype == DTYPES[to]
        assert [int(v) for v in (widen_bf16(result) if to == "BF16" else result)] == [int(v) for v in values]
    else:
        row = fits.index(False)
        got = re.escape(f"{values[row]}")
        with pytest.raises(DatasetError, match=rf"tensor 'x' to {to.lower()}: .* got {got} \(row {row}\)"):
            cast(values, to, "x")


@pytest.mark.parametrize(
    "number, bits",
    [
        (1 + 2**-8, 0x3F80),
        (1 + 3 * 2**-8, 0x3F82),
        (1 + 2**-8 + 2**-40, 0x3F81),
        (-1 - 2**-8 + 2**-40, 0xBF80),
        (2**-133 * 0.75, 1),
        (float.fromhex("0x1.fefp127"), 0x7F7F),
        (float.fromhex("0x1.ffp127"), 0x7F80),
        (-math.inf, 0xFF80),
    ],
)
def test_bf16_is_the_nearest_and_ties_are_even(number, bits):
    """Rounded once, also from 64 bits."""
    assert narrow_bf16(np.array([number])).tolist() == [bits]
    assert np.isnan(widen_bf16(narrow_bf16(np.array([math.nan]))))


def test_floats_that_overflow_are_refused():
    values = np.array([[1.0, 2.0], [70000.0, 3.0]], np.float32)
    with pytest.raises(DatasetError, match=r"'x' to f16: .* got 70000.0 \(row 8, at \[0\]\)\. Take bf16"):
        cast(values, "F16", "x", first_row=7)
    retained = cast(np.array([np.inf, np.nan], np.float32), "F16", "x")["x"]
    assert np.isinf(retained[0]) and np.isnan(retained[1])
    assert (cast(np.array([0.1, 1 / 3], np.float32), "F16", "x")["x"] == np.float16([0.1, 1 / 3])).all()


def test_quantizing_what_is_not_finite():
    with pytest.raises(DatasetError, match=r"'x' to q8: .* got inf \(row 5, at \[1\]\)"):
        quantize(np.array([[0.0, 0.0], [0.0, np.inf]], np.float32), "x", first_row=4)
    with pytest.raises(DatasetError, match=r"got nan \(row 3, at \[0\]\)"):
        cast(np.array([[np.nan]]), "q8", "x", first_row=3)


# Through a dataset.


def test_a_loader_gives_what_was_quantized(tmp_path):
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((10, 4, 3)) * np.exp(rng.standard_normal((10, 1, 1)))).astype(np.float32)
    source = a_table(features=values, labels=np.arange(10), text=np.array(["a"] * 10))
    options = ConvertOptions(tensors={"features": "q8"}, slice_bytes=400)
    report = convert(source, tmp_path / "ds", "forebay", options)
    assert report.written.notes == ("left out columns without numbers (1): text; --to parquet or jsonl keeps them",)
    dataset = open_dataset(tmp_path / "ds")
    assert dataset.manifest.slices > 1
    converted = dataset.manifest.lineage["converted"]
    assert converted["changed"]["features"] == ["F32", "q8"] and converted["tensors"]["features"][1:] == [4, 3]
    for batch in Loader(tmp_path / "ds", batch_size=4):
        result = dequantize(batch.tensors, tensor_dtypes(dataset))
        assert set(result) == {"features", "labels"}
        bound = batch.tensors["features.scale"].reshape(-1, 1, 1) / 2 * (1 + 1e-5)
        assert (np.abs(result["features"] - values[batch.sample_ids]) <= bound).all()


def test_bf16_is_bf16_in_the_file(tmp_path):
    values = np.array([[1.0, 2.5], [3.0e38, -0.1]], np.float32)
    convert(a_table(x=values), tmp_path / "ds", "forebay", ConvertOptions(tensors={"x": "bf16"}))
    dataset = open_dataset(tmp_path / "ds")
    item = dataset.open_slice(0)
    assert item.dtypes == {"x": "BF16"} and tensor_dtypes(dataset) == {"x": "BF16"}
    assert (item.tensors["x"] == narrow_bf16(values)).all()
    batch = next(iter(Loader(tmp_path / "ds", batch_size=2, shuffle=False)))
    result = dequantize(batch.tensors, tensor_dtypes(dataset))["x"]
    assert result.dtype == np.float32 and np.allclose(result, values, rtol=2**-8)
    convert(tmp_path / "ds", tmp_path / "same", "forebay", ConvertOptions())
    assert open_dataset(tmp_path / "same").open_slice(0).dtypes == {"x": "BF16"}
    convert(tmp_path / "ds", tmp_path / "wide", "forebay", ConvertOptions(tensors={"x": "f32"}))
    assert (open_dataset(tmp_path / "wide").open_slice(0).tensors["x"] == result).all()


def test_a_refused_value_leaves_nothing_behind(tmp_path):
    with pytest.raises(
        DatasetError, match=r"tensor 'n' to u8: .* got 300 \(row 4\)\. A wider type is --set tensors\.n=i64"
    ):
        convert(a_table(n=np.array([1, 2, 3, 4, 300])), tmp_path / "ds", "forebay", ConvertOptions(tensors={"n": "u8"}))
    assert not list(tmp_path.iterdir())


def test_types_of_slices_and_of_imported_files(tmp_path):
    bits = narrow_bf16(np.ones((2, 3), np.float32))
    write_rows_slice(tmp_path / "a.safetensors", {"x": bits, "n": np.arange(2)}, {"x": "BF16"})
    assert open_slice(tmp_path / "a.safetensors").dtypes == {"x": "BF16", "n": "I64"}
    assert tensor_dtypes(import_slices(tmp_path)) == {"n": "I64", "x": "BF16"}
    with pytest.raises(UsageError, match="tensor 'n' of a slice"):
        write_rows_slice(tmp_path / "b.safetensors", {"n": np.arange(2)}, {"n": "BF16"})


def test_names_to_dequantize():
    with pytest.raises(UsageError, match=r"dequantize: expected some of \['x'\], got \['y'\]"):
        dequantize({"x": np.ones((1, 1), np.int8), "x.scale": np.ones(1, np.float32), "y": np.ones(1)}, names=["y"])
    remaining = dequantize({"x": np.ones((1, 1), np.int8), "x.scale": np.ones(1, np.float32)}, names=[])
    assert set(remaining) == {"x", "x.scale"}
