"""Batches for JAX: shapes that never change. Real devices: tests/slow/load/test_jax.py."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.load.loader import Loader
from support.feeding import ROW_DTYPES, make_dataset, write_typed_rows


class FakeJax(ModuleType):
    """The functions of JAX that `forebay.load.jax` calls, on NumPy arrays."""

    numpy = SimpleNamespace(bfloat16=np.float16)

    def __init__(self):
        super().__init__("jax")
        self.sharding = SimpleNamespace(Sharding=object)

    def device_put(self, array: Any) -> Any:
        assert array.dtype != np.int64  # JAX would cut it, with a warning.
        return array.copy()

    def make_array_from_process_local_data(self, sharding: Any, array: Any) -> Any:
        return self.device_put(array)


def test_shapes_never_change_and_padding_has_no_labels(tmp_path, monkeypatch):
    data = make_dataset(tmp_path / "data", 3, 20, 16)
    monkeypatch.setitem(sys.modules, "jax", FakeJax())
    monkeypatch.delitem(sys.modules, "forebay.load.jax", raising=False)
    arguments = {"seq_len": 16, "seed": 3, "rank": 1, "world_size": 2}
    loader = Loader(data, global_batch_size=8, document_masks=True, **arguments)
    plain = list(Loader(data, global_batch_size=8, **arguments))
    for batch, item in zip(loader.to_jax(object()), plain, strict=True):
        assert batch.inputs.shape == batch.labels.shape == batch.document_ids.shape == (4, 16)
        count = len(item)
        assert (batch.inputs[:count] == item.inputs).all() and batch.sample_ids.tolist() == item.sample_ids.tolist()
        assert not batch.inputs[count:].any() and (batch.labels[count:] == -100).all()
        assert (batch.document_ids[count:] == -1).all() and batch.num_labels == (item.labels != -100).sum()
    assert len(plain[-1]) < 4 and loader.step == len(plain) == 8
    with pytest.raises(UsageError, match="expected a multiple of 2 processes, got 7"):
        Loader(data, global_batch_size=7, **arguments).to_jax(object())
    assert [batch.step for batch in loader.take(2).to_jax()] == [8, 9] and loader.step == 8
    assert {len(batch.inputs) for batch in Loader(data, global_batch_size=7, **arguments).to_jax()} == {4}
    write_typed_rows(tmp_path / "rows")
    (rows,) = Loader(tmp_path / "rows", batch_size=4).to_jax()
    got = {name: str(array.dtype) for name, array in rows.tensors.items()}
    assert got == {name: "int32" if kind == "int64" else kind for name, kind in ROW_DTYPES.items()} | {
        "bits": "float16"
    }
    monkeypatch.delitem(sys.modules, "forebay.load.jax", raising=False)
