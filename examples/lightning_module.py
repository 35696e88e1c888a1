"""Lightning: the loader's state goes into its checkpoints by itself; a run resumed in mid-epoch sees the rest of it.

Run: python examples/lightning_module.py
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

try:
    import lightning
except ImportError:
    sys.exit("lightning_module: lightning is not installed. Run: pip install lightning")
import torch
from inference import call, exit_on_sigterm
from torch import nn

import forebay

PREPARE = ["prepare", __file__, "--tokenizer", "bytes", "--slice-bytes", "4096"]

STEPS, SAVED_AT = 14, 5


class Bigram(lightning.LightningModule):
    def __init__(self, dataset: Path) -> None:
        super().__init__()
        self.dataset, self.model = dataset, nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 512))
        self.seen: list[list[int]] = []

    def train_dataloader(self) -> Any:
        # Made here, where the process group exists, it takes its rank from torch.distributed.
        return forebay.Loader(self.dataset, seq_len=32, batch_size=8, seed=1).to_torch(style="plain")

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        self.seen.append(batch["sample_ids"].tolist())
        loss = nn.functional.cross_entropy(self.model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())
        return batch["weight"] * loss  # Ranks may have unequally many samples at an epoch's end.

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(dataset: Path, steps: int, resume: Path | None, save: Path | None) -> list[list[int]]:
    module = Bigram(dataset)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.seen


def main() -> None:
    exit_on_sigterm()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        dataset, checkpoint = Path(directory) / "dataset", Path(directory) / "last.ckpt"
        call(*PREPARE, "--out", dataset)
        unbroken = fit(dataset, STEPS, None, None)
        before = fit(dataset, SAVED_AT, None, checkpoint)
        after = fit(dataset, STEPS, checkpoint, None)
        print(f"{len(before)} batches, and {len(after)} after a resume in mid-epoch, of {len(unbroken)}")
        if before + after != unbroken:
            sys.exit("resumed, the run saw other batches")


if __name__ == "__main__":
    main()
