"""Hugging Face's Trainer: the data's place is saved with each checkpoint, and resuming skips nothing batch by batch.

Run: python examples/hf_trainer.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
except ImportError:
    sys.exit("hf_trainer: transformers is not installed. Run: pip install transformers accelerate torch")
from inference import call, exit_on_sigterm

import forebay

PREPARE = ["prepare", __file__, "--tokenizer", "bytes", "--slice-bytes", "4096"]


class DataState(TrainerCallback):
    """Saves where the loader will be after the trained steps: the Trainer itself is a batch ahead of them."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.start = loader, loader.step

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        steps = state.global_step * args.gradient_accumulation_steps
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "data.json").write_text(json.dumps(self.loader.state_at(self.start + steps)))


class ForebayTrainer(Trainer):
    """Takes batches as they come: they are the rank's own already, so that nothing may deal them out once more."""

    def __init__(self, loader: Any, **arguments: Any) -> None:
        super().__init__(callbacks=[DataState(loader)], **arguments)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        return self.loader.to_torch(style="transformers")


def train(dataset: Path, out: Path, steps: int, resume: Path | None) -> list[float]:
    torch.manual_seed(0)
    options = forebay.SampleOptions(drop_last=True)
    loader = forebay.Loader(dataset, seq_len=32, batch_size=4, seed=1, samples=options)
    config = GPT2Config(vocab_size=512, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0)
    config.attn_pdrop = 0
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, save_steps=3, logging_steps=1, lr_scheduler_type="constant",
        report_to=[], disable_tqdm=True, use_cpu=True, ignore_data_skip=True,
    )  # fmt: skip
    trainer = ForebayTrainer(loader, model=GPT2LMHeadModel(config), args=arguments)
    if resume is not None:
        loader.load_state_dict(json.loads((resume / "data.json").read_text()))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main() -> None:
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as directory:
        dataset, out = Path(directory) / "dataset", Path(directory) / "out"
        call(*PREPARE, "--out", dataset)
        unbroken = train(dataset, out, 6, None)
        resumed = train(dataset, out, 6, out / "checkpoint-3")
        print(f"losses {unbroken}; from step 3 on again {resumed[-3:]}")
        if max(abs(a - b) for a, b in zip(unbroken[3:], resumed[-3:])) > 1e-3:
            sys.exit("resumed, the run went another way")


if __name__ == "__main__":
    main()
