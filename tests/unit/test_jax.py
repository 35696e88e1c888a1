"""Batches through JAX, on one device, on four, and on two processes of two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.load.loader import Loader
from support.calibration import scaled

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")

PROGRAM = """
import json, sys
import jax, numpy as np
data, out, processes, index, address = sys.argv[1:6]
if int(processes) > 1:
    jax.distributed.initialize(address, int(processes), int(index))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from forebay.load.jax import JaxLoader
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
arguments = {"seq_len": 16, "global_batch_size": 8, "seed": 3, "epochs": 2}
def shards(batch):
    return [[s.index[0].start or 0, np.asarray(s.data).tolist()] for s in batch["inputs"].addressable_shards]
seen = []
loader = JaxLoader(data, sharding=sharding, **arguments)
for step, batch in enumerate(loader):
    assert batch["inputs"].shape == (8, 16) and batch["inputs"].dtype == np.int32, batch["inputs"]
    assert isinstance(batch["sample_ids"], np.ndarray) and batch["sample_ids"].dtype == np.int64
    seen.append(shards(batch))
    if step == 4:
        break
state = loader.state_dict()
assert state["step"] == 5, state
again = JaxLoader(data, sharding=sharding, **arguments)
again.load_state_dict(state)
for batch in again:
    seen.append(shards(batch))
rest = [batch for batch in loader]
assert len(rest) == len(seen) - 5
plain = next(iter(JaxLoader(data, seq_len=16, batch_size=4)))
assert isinstance(plain["labels"], jax.Array) and plain["labels"].shape == (4, 16)
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


@pytest.mark.parametrize("processes", [1, 2])
def test_global_arrays_are_the_global_batches(data: Path, tmp_path: Path, processes: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
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
        _, errors = item.communicate(timeout=scaled(120))
        assert item.returncode == 0, errors
    expected = [
        b.inputs.tolist() for b in Loader(data, seq_len=16, global_batch_size=8, seed=3, epochs=2, drop_last=True)
    ]
    parts = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(processes)]
    got = [[row for _, rows in sorted(chain(*step)) for row in rows] for step in zip(*parts)]
    assert got == expected and len(expected) == 14
