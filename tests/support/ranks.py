"""Ranks that train a tiny model together, for test_ddp: python ranks.py CONFIG.json

The configuration is a list of runs, one after another, each of `world` processes forked from this one, which has
imported PyTorch once for all. What a run saw goes to `out`, its checkpoint to `save`.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DistributedDataParallel imports it when it is first made: seconds, for each rank.
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from forebay.load.loader import Loader
from support.calibration import scaled
from support.ports import free_port

VOCAB, SEQ_LEN = 32, 8


def train(rank: int, run: dict[str, Any], port: int, done: Any) -> None:
    faulthandler.dump_traceback_later(scaled(100), exit=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run["world"]), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).double()
    state = torch.load(run["load"]) if run.get("load") else None
    if state is not None:
        model.load_state_dict(state["model"])
    model = fully_shard(model) if run.get("wrap") == "fsdp" else DistributedDataParallel(model)
    loader = Loader(run["data"], seq_len=SEQ_LEN, global_batch_size=6, seed=9)
    if state is not None:
        loader.load_state_dict(state["data"])
    seen: list[dict[str, Any]] = []
    while len(seen) < run["steps"]:
        for batch in loader.to_torch(num_workers=run.get("helpers", 0)):
            seen.append(step(model, batch))
            if len(seen) == run["steps"]:
                break
    if run.get("save") and rank == 0:
        torch.save({"model": model.module.state_dict(), "data": loader.state_dict()}, run["save"])
    gathered: list[Any] = [None] * run["world"]
    dist.all_gather_object(gathered, [item["ids"] for item in seen])
    if rank == 0:
        report = {"ids": list(zip(*gathered)), "losses": [item["loss"] for item in seen]}
        Path(run["out"]).write_text(json.dumps(report))
    loader.close()
    done.wait()
    os._exit(0)  # Nobody talks any more: there is nothing to take down, and gloo may wait for peers that are gone.


def step(model: Any, batch: Any) -> dict[str, Any]:
    """One step on the mean over the global batch, whatever a rank's part of it: even none, which has weight 0."""
    logits = model(batch.inputs)
    labels = batch.labels if batch.weight else torch.full_like(batch.labels, -100)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    dist.all_reduce(count)
    (loss * dist.get_world_size() / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    model.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"ids": batch.sample_ids.tolist(), "loss": (total / count).item()}


def main() -> None:
    runs = json.loads(Path(sys.argv[1]).read_text())
    fork = multiprocessing.get_context("fork")
    for run in runs:
        port = free_port()
        done = fork.Barrier(run["world"])
        ranks = [fork.Process(target=train, args=(rank, run, port, done)) for rank in range(run["world"])]
        for item in ranks:
            item.start()
        for item in ranks:
            item.join()
        if any(item.exitcode for item in ranks):
            sys.exit(f"run {run}: exit codes {[item.exitcode for item in ranks]}")


if __name__ == "__main__":
    main()
