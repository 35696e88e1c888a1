"""Data-parallel training on two ranks with DDP; saved in mid-epoch and gone on with.

    python examples/train_ddp.py [DATASET CHECKPOINT.pt]                          starts two ranks itself
    torchrun --nproc-per-node 8 examples/train_ddp.py DATASET CHECKPOINT.pt       or as you start yours

The loader reads rank and world size from the process group. The checkpoint may be loaded on any number of ranks.
torchrun chooses a free port; when a rank fails, it ends the others and says which one failed and why (`record`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from inference import call, end, exit_on_sigterm
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import forebay

PREPARE = ["prepare", __file__, "--tokenizer", "bytes", "--slice-bytes", "4096"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
STOP = 7


@record
def train(dataset: str, checkpoint: Path) -> None:
    dist.init_process_group("gloo")  # "nccl" with GPUs
    torch.manual_seed(0)
    # The one line: each rank reads its part, and all have as many steps. The global batch is what a run keeps.
    loader = forebay.Loader(dataset, seq_len=32, global_batch_size=6, seed=1)
    vocabulary = loader.dataset.manifest.vocab_size or 1 << 16  # Unknown of tokens in files of no format.
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    length = len(loader)
    saved = torch.load(checkpoint) if checkpoint.exists() else None
    if saved is not None:
        model.module.load_state_dict(saved["model"])
        loader.load_state_dict(saved["data"])
    for batch in loader.to_torch():  # device="cuda": pinned, and copied ahead
        logits = model(batch.inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss = loss * batch.weight  # Ranks may have unequally many samples at an epoch's end.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if saved is None and loader.step == STOP:
            break
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, up to step {loader.step}, {length} an epoch: loss {loss.item():.2f}")
        torch.save({"model": model.module.state_dict(), "data": loader.state_dict()}, checkpoint)
    loader.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DDP keeps gloo's threads after `destroy_process_group`; they can abort an interpreter that ends.


def launch(ranks: int, program: str, *arguments: str) -> None:
    """Run a program on this machine's ranks by torchrun, which ends with us; exit with an error if it fails."""
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), program, *arguments]
    torchrun = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        status = torchrun.wait()
    finally:
        end(torchrun)
    if status:
        sys.exit(f"{Path(program).stem}: torchrun ended with status {status}; if a rank failed, it is named above")


def main(arguments: list[str]) -> None:
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as directory:
        dataset, checkpoint = arguments or [f"{directory}/dataset", f"{directory}/checkpoint.pt"]
        if not arguments:
            call(*PREPARE, "--out", dataset)
        forebay.open_dataset(dataset)  # One that is missing is an error before there are ranks.
        launch(2, __file__, dataset, checkpoint)
        launch(1, __file__, dataset, checkpoint)  # With what is left, on one rank.


if __name__ == "__main__":
    if len(sys.argv) != 3 and (len(sys.argv) != 1 or "RANK" in os.environ):
        sys.exit("train_ddp: expected DATASET CHECKPOINT.pt, or nothing if torchrun does not start it")
    try:
        if "RANK" in os.environ:
            train(sys.argv[1], Path(sys.argv[2]))
        else:
            main(sys.argv[1:])
    except forebay.ForebayError as error:
        sys.exit(f"train_ddp: {error}")
