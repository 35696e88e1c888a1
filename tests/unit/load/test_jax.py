"""Batches through JAX, on one device, on four, and on two processes of two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.errors import UsageError
from forebay.load.loader import Loader
from support.ports import free_port

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")

PROGRAM = """
import json, sys
import jax, numpy as np
data, out, processes, index, address = sys.argv[1:6]
if int(processes) > 1:
    jax.distributed.initialize(address, int(processes), int(index))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import forebay
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
arguments = {"seq_len": 16, "global_batch_size": 8, "seed": 3, "epochs": 2}
rank = {"rank": jax.process_index(), "world_size": jax.process_count()}
def shards(batch):
    return [[s.index[0].start or 0, np.asarray(s.data).tolist()] for s in batch.inputs.addressable_shards]
seen = []
loader = forebay.Loader(data, **rank, **arguments)
for step, batch in enumerate(loader.to_jax(sharding)):
    assert batch.inputs.shape == (8, 16) and batch.inputs.dtype == np.int32, batch.inputs
    assert isinstance(batch.sample_ids, np.ndarray) and batch.sample_ids.dtype == np.int64
    seen.append(shards(batch))
    if step == 4:
        break
state = loader.state_dict()
assert state["step"] == 5, state
again = forebay.Loader(data, **rank, **arguments)
again.load_state_dict(state)
for batch in again.to_jax(sharding):
    seen.append(shards(batch))
rest = [batch for batch in loader.to_jax(sharding)]
assert len(rest) == len(seen) - 5
plain = next(iter(forebay.Loader(data, seq_len=16, batch_size=4, rank=0, world_size=1).to_jax()))
assert isinstance(plain.labels, jax.Array) and plain.labels.shape == (4, 16)
json.dump(seen, open(out, "w"))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for i in range(3):
        tokens = np.arange(i * 400, i * 400 + 16 * 20, dtype=np.uint16)
        write_token_slice(folder / f"{i}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(folder, "tiny")
    return folder


@needs_jax
@pytest.mark.parametrize("processes", [1, 2])
def test_global_arrays_are_the_global_batches(data: Path, tmp_path: Path, processes: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    devices = f"--xla_force_host_platform_device_count={4 // processes}"
    environment = os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(data), str(tmp_path / f"{i}.json"), str(processes), str(i), address],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    for item in running:
        _, errors = item.communicate()
        assert item.returncode == 0, errors
    arguments: Any = {"seq_len": 16, "global_batch_size": 8, "seed": 3, "epochs": 2, "world_size": processes}
    shares = [[b.inputs.tolist() for b in Loader(data, rank=rank, **arguments)] for rank in range(processes)]
    rows = 8 // processes
    expected = [  # The shares of a short batch are padded.
        [*chain.from_iterable([*share, *[[0] * 16] * (rows - len(share))] for share in step)] for step in zip(*shares)
    ]
    parts = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(processes)]
    got = [[row for _, rows in sorted(chain(*step)) for row in rows] for step in zip(*parts)]
    assert got == expected and len(expected) == 16


class FakeJax(ModuleType):
    """What `forebay.load.jax` calls of JAX, on NumPy arrays."""

    def __init__(self) -> None:
        super().__init__("jax")
        self.sharding = SimpleNamespace(Sharding=object)

    def device_put(self, array: Any) -> Any:
        assert array.dtype != np.int64  # JAX would cut it, with a warning.
        return array.copy()

    def make_array_from_process_local_data(self, sharding: Any, array: Any) -> Any:
        return self.device_put(array)


def test_shapes_never_change_and_padding_has_no_labels(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", FakeJax())
    monkeypatch.delitem(sys.modules, "forebay.load.jax", raising=False)
    arguments: dict[str, Any] = {"seq_len": 16, "seed": 3, "rank": 1, "world_size": 2}
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
    monkeypatch.delitem(sys.modules, "forebay.load.jax", raising=False)
