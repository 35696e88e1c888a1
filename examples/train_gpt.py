"""A small GPT as the program of a worker of leases: batches of any number of samples, until nothing is left to lease.

    python examples/train_gpt.py                                                          text of this program
    forebay worker wiki --identity carol -- python examples/train_gpt.py

The model is that of `python -m forebay.worker --model-size tiny`. MFU is reported beside the loss, and on the
scheduler's page, where the peak of the device is known; give that of another, `PEAK_FLOPS=2e11`. Needs PyTorch 2.4.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress

import forebay
from forebay.load.mfu import flops_per_token
from forebay.worker import WorkerClient, WorkerConfig
from forebay.worker.config import SIZES
from forebay.worker.gpt import GptTrainer


def train_on_leases() -> None:
    loader = forebay.Loader()
    vocab_size, size = loader.dataset.manifest.vocab_size or 1 << 16, SIZES["tiny"]
    trainer = GptTrainer(vocab_size, loader.seq_len)
    weights = size.num_parameters(vocab_size, 0)  # Positions take no products.
    flops = flops_per_token(weights, size.num_layers, size.width, loader.seq_len)
    with suppress(forebay.ForebayError):  # A device of unknown speed.
        loader.measure_mfu(flops, float(os.environ.get("PEAK_FLOPS", 0)) or "")
    loader.add_callback(lambda metrics, step: print(json.dumps({"step": step, **metrics}), flush=True), 100)
    for batch in loader:
        loss = trainer.step(batch.inputs, batch.labels)
        if batch.step % 20 == 0:
            print(json.dumps({"step": batch.step, "loss": round(loss, 3)}), flush=True)


async def main() -> None:
    config = WorkerConfig(
        dataset_name=__file__, tokenizer_name="bytes", seq_len=64, num_steps=30, model_size="tiny"
    )  # fmt: skip
    async with WorkerClient(config) as worker:
        report = await worker.run_training()
    print(f"{report.tokens:,} tokens, loss {report.losses[0]:.2f} to {report.losses[-1]:.2f}")


if __name__ == "__main__":
    if "FOREBAY_LOADER" in os.environ:
        train_on_leases()
    else:
        asyncio.run(main())
