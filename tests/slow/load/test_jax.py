"""Batches through JAX, on four devices of one process, and on two processes of two."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain

import pytest

from forebay.load.loader import Loader
from support.feeding import make_dataset
from support.ports import free_port

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")

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


@pytest.mark.parametrize("processes", [1, 2])
def test_global_arrays_are_the_global_batches(tmp_path, processes):
    data = make_dataset(tmp_path / "data", 3, 20, 16)
    address = f"127.0.0.1:{free_port()}"  # JAX takes the address of a coordinator that it starts itself.
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
    arguments = {"seq_len": 16, "global_batch_size": 8, "seed": 3, "epochs": 2, "world_size": processes}
    shares = [[b.inputs.tolist() for b in Loader(data, rank=rank, **arguments)] for rank in range(processes)]
    rows = 8 // processes
    expected = [  # The shares of a short batch are padded.
        [*chain.from_iterable([*share, *[[0] * 16] * (rows - len(share))] for share in step)] for step in zip(*shares)
    ]
    parts = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(processes)]
    got = [[row for _, rows in sorted(chain(*step)) for row in rows] for step in zip(*parts)]
    assert got == expected and len(expected) == 16
