"""Ranks that train a tiny model together: `run_all` starts this file as a program.

The configuration is a list of runs, one after another, each of `world` processes forked from the program, which has
imported PyTorch once for all. What a run saw goes to `out`, its checkpoint to `save`. Ranks meet at a file, so that no
port is chosen beforehand; when one fails, the others are killed.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.load.loader import Loader
from forebay.processes import end_with_parent

VOCAB, SEQ_LEN, GLOBAL_BATCH = 32, 8, 6
SAMPLES = 40  # Batches of 6: the seventh of an epoch has 4, which is less than one each for 5 ranks.
SEED = 9


def write_data(folder: Path) -> Path:
    """A dataset of `SAMPLES` samples."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    for i in range(4):
        tokens = generator.integers(0, VOCAB, SAMPLES // 4 * SEQ_LEN, dtype=np.uint16)
        write_token_slice(folder / f"{i}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(folder, "tiny")
    return folder


def run_all(folder: Path, data: Path, runs: list[dict]) -> list[dict]:
    """Run one after another; return {"ids": of each rank at each step, "losses"}, or {"exit_codes"} of a failed run."""
    outs = [folder / f"out{i}.json" for i in range(len(runs))]
    config = folder / "config.json"
    config.write_text(json.dumps([{"data": str(data), "out": str(out), **run} for run, out in zip(runs, outs)]))
    subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(config)],
        check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    return [json.loads(out.read_text()) for out in outs]


def batches(run: dict) -> list[list[int]]:
    """The global batch of each step."""
    return [[sample for rank in step for sample in rank] for step in run["ids"]]


def train(rank: int, run: dict, done: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    end_with_parent()
    dist.init_process_group("gloo", init_method=f"file://{run['out']}.ranks", rank=rank, world_size=run["world"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).double()
    state = torch.load(run["load"]) if run.get("load") else None
    if state is not None:
        model.load_state_dict(state["model"])
    model = nn.parallel.DistributedDataParallel(model)
    loader = Loader(run["data"], seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH, seed=SEED)
    if state is not None:
        loader.load_state_dict(state["data"])
    seen = []
    while len(seen) < run["steps"]:
        for batch in loader.to_torch(num_workers=run.get("helpers", 0)):
            if len(seen) == run.get("fail_after") and rank == run["world"] - 1:
                os._exit(3)
            seen.append(step(model, batch))
            if rank == 0 and len(seen) == run.get("save_after"):
                torch.save({"model": model.module.state_dict(), "data": loader.state_dict()}, run["save"])
            if len(seen) == run["steps"]:
                break
    gathered = [None] * run["world"]
    dist.all_gather_object(gathered, [item["ids"] for item in seen])
    if rank == 0:
        report = {"ids": list(zip(*gathered)), "losses": [item["loss"] for item in seen]}
        Path(run["out"]).write_text(json.dumps(report))
    loader.close()
    done.wait()
    os._exit(0)  # Nothing has to be taken down, and gloo may wait for peers that are gone.


def step(model: Any, batch: Any) -> dict:
    """One step on the mean over the global batch, also where a rank's part of it is empty and has weight 0."""
    import torch
    import torch.distributed as dist
    from torch import nn

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
    import torch

    runs = json.loads(Path(sys.argv[1]).read_text())
    # DistributedDataParallel imports PyTorch's compiler, which takes longer than PyTorch, to ask for its mode.
    compiler = MagicMock()
    compiler.utils.get_optimize_ddp_mode.return_value = "no_optimization"
    compiler.disable.side_effect = lambda function, *_, **__: function
    sys.modules["torch._dynamo"] = torch._dynamo = compiler
    fork = multiprocessing.get_context("fork")
    for run in runs:
        done = fork.Barrier(run["world"])
        ranks = [fork.Process(target=train, args=(rank, run, done)) for rank in range(run["world"])]
        for rank in ranks:
            rank.start()
        running = list(ranks)
        while running:
            multiprocessing.connection.wait([rank.sentinel for rank in running])
            running = [rank for rank in running if rank.is_alive()]
            if any(rank.exitcode for rank in ranks):
                for rank in running:
                    rank.kill()
        if any(rank.exitcode for rank in ranks):
            Path(run["out"]).write_text(json.dumps({"exit_codes": [rank.exitcode for rank in ranks]}))


if __name__ == "__main__":
    main()
