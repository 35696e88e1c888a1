"""DDP on leases: rank 0 leases each global batch, and the ranks train on a part each; all of them are one worker.

    python examples/leased_ddp.py                                                              starts all of it here
    forebay worker wiki --identity carol -- torchrun --nproc-per-node 8 examples/leased_ddp.py      a worker of yours

Ranks that step together must not lease apart: the last leases are one rank's, and the others would wait for them while
it waits for the others. Workers of this kind on other machines may come and go: each is a model of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inference import Servers, call, exit_on_sigterm, start_network
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from train_ddp import TORCHRUN

import forebay

PREPARE = ["prepare", __file__, "--tokenizer", "bytes", "--slice-bytes", "4096"]


def shared_batches(loader: Any) -> Iterator[tuple[Any, Any, float]]:
    """This rank's inputs and labels of each batch that rank 0 leases, and their weight; of the last ones maybe none."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = None if loader is None else iter(loader)
    while True:
        batch = None if batches is None else next(batches, None)  # The one before counts as used.
        message = [None if batch is None else (batch.inputs, batch.labels)]
        dist.broadcast_object_list(message)
        if message[0] is None:
            return
        inputs, labels = (torch.from_numpy(array) for array in message[0])
        count = len(range(rank, len(inputs), world_size))
        mine = slice(rank, None, world_size) if count else slice(0, 1)  # Each rank has a step, maybe of weight 0.
        yield inputs[mine], labels[mine], count * world_size / len(inputs)


@record
def train() -> None:
    dist.init_process_group("gloo")  # "nccl" with GPUs
    torch.manual_seed(0)
    loader = forebay.Loader() if dist.get_rank() == 0 else None
    sizes = [0 if loader is None else loader.dataset.manifest.vocab_size or 1 << 16]
    dist.broadcast_object_list(sizes)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(sizes[0], 16), nn.Linear(16, sizes[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for inputs, labels, weight in shared_batches(loader):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        (weight * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    if loader is not None:
        loader.close()
        print(f"{dist.get_world_size()} ranks, {len(losses)} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DDP keeps gloo's threads after `destroy_process_group`; they can abort an interpreter that ends.


def main() -> None:
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as directory, Servers() as servers:
        folder = Path(directory)
        call(*PREPARE, "--out", folder / "text")
        scheduler = start_network(servers, folder, folder / "text", "--seq-len", 32)
        worker = ["worker", "--scheduler", scheduler, "--identity", folder / "carol", "--batch-size", 6]
        torchrun = ["--", *TORCHRUN, "--nproc-per-node", 2, __file__]
        status = servers.run(*worker, "--cache-dir", folder / "cache", *torchrun, OMP_NUM_THREADS="1")
        if status:
            sys.exit(f"leased_ddp: the worker carol ended with status {status}; torchrun names the rank above")
        call("ledger", "verify", folder / "state" / "ledger.jsonl")


if __name__ == "__main__":
    if "FOREBAY_LOADER" in os.environ:
        train()
    else:
        main()
