"""Sharded training (FSDP2) with PyTorch's distributed checkpoints, which have the loader's state, too.

    python examples/train_fsdp.py [DATASET FOLDER]                             starts two ranks itself
    torchrun --nproc-per-node 8 examples/train_fsdp.py DATASET FOLDER          or as you start yours

Parameters, gradients and the optimizer are sharded over the ranks. `torch.distributed.checkpoint` saves anything that
has `state_dict` and `load_state_dict`, as the loader has. A run that is resumed has the losses of one that is not.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from inference import call, exit_on_sigterm
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from train_ddp import launch

import forebay

PREPARE = ["prepare", __file__, "--tokenizer", "bytes", "--slice-bytes", "4096"]
STEPS, SAVED_AT = 12, 5


def make_model(vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocabulary, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, vocabulary))
    for layer in model[1:]:
        fully_shard(layer)
    return fully_shard(model)


def train(dataset: str, steps: int, *, resume: Path | None = None, save: Path | None = None) -> list[float]:
    """The loss of each step up to `steps`, over all ranks."""
    loader = forebay.Loader(dataset, seq_len=32, global_batch_size=6, seed=1, steps=steps)
    model = make_model(loader.dataset.manifest.vocab_size or 1 << 16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if resume is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state, "data": loader}, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    losses = []
    for batch in loader.to_torch():  # device="cuda": pinned, and copied ahead
        logits = model(batch.inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss = loss * batch.weight  # Ranks may have unequally many samples at an epoch's end.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    if save is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "data": loader}, checkpoint_id=save)
    return losses


@record
def run_rank(dataset: str, folder: Path) -> None:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # Of in-place changes; there are none here.
    dist.init_process_group("gloo")  # "nccl" with GPUs
    full = train(dataset, STEPS)
    before = train(dataset, SAVED_AT, save=folder)
    after = train(dataset, STEPS, resume=folder)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: losses {full[0]:.3f} to {full[-1]:.3f}, resumed at step {SAVED_AT}")
    difference = max(abs(a - b) for a, b in zip(full, before + after))
    dist.destroy_process_group()
    if len(before + after) != len(full) or difference > 1e-5 or full[-1] > full[0]:
        sys.exit(f"resumed, the losses differ by {difference:g}: {full}, {before}, {after}")
    sys.stdout.flush()
    os._exit(0)  # Sharding keeps gloo's threads after `destroy_process_group`; they can abort an interpreter that ends.


def main(arguments: list[str]) -> None:
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as directory:
        dataset, folder = arguments or [f"{directory}/dataset", f"{directory}/checkpoint"]
        if not arguments:
            call(*PREPARE, "--out", dataset)
        forebay.open_dataset(dataset)  # One that is missing is an error before there are ranks.
        launch(2, __file__, dataset, folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 and (len(sys.argv) != 1 or "RANK" in os.environ):
        sys.exit("train_fsdp: expected DATASET FOLDER, or nothing if torchrun does not start it")
    try:
        if "RANK" in os.environ:
            run_rank(sys.argv[1], Path(sys.argv[2]))
        else:
            main(sys.argv[1:])
    except forebay.ForebayError as error:
        sys.exit(f"train_fsdp: {error}")
