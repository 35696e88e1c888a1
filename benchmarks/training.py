"""Training a GPT on the batches of several feeds: model FLOPs utilization (MFU), wait share, idle share of the GPU.

    python -m benchmarks.training DATASET                                             a tiny model on the CPU
    python -m benchmarks.training DATASET --device cuda --model 1.3b --batch-size 8   with the trace of a step's kernels

Feeds, in turn on one compiled model: `resident`, one batch that stays on the device (the bound); `pinned`, one batch in
pinned memory, copied at each step (the bound of what reaches the device when nothing trains); `local`, a Loader of
DATASET; `node`, a Loader with an empty cache, fed by a data node of a network with mutual TLS on this machine;
`dataloader`, a DataLoader of PyTorch with worker processes and pinned memory over all tokens in memory.

MFU is that of `forebay.load.mfu`, where N are the weights without positions. `product` is the share of the rate of one
large product that is measured here. Needs PyTorch 2.4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.inference import Servers, start_network
from torch.nn import functional
from torch.utils.data import DataLoader

import forebay
from forebay.load.mfu import flops_per_token, peak_flops
from forebay.worker.config import SIZES, Size
from forebay.worker.gpt import Gpt

MODELS = SIZES | {"350m": Size(1024, 24, 16, 16), "1.3b": Size(2048, 24, 16, 8)}
FEEDS = ("resident", "pinned", "local", "node", "dataloader")
WARM_UP = 5


@dataclass
class Run:
    """What is timed: a model, its optimizer, and how many steps."""

    model: Gpt
    optimizer: torch.optim.Optimizer
    compute_loss: Callable[[Any, Any], Any]
    device: torch.device
    num_steps: int
    step_tokens: int

    def step(self, batch: Any) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.compute_loss(batch[0], batch[1])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, batches: Iterator[Any]) -> dict[str, float]:
        """Tokens a second, the share of the time that the loop waited for batches, and the mean losses."""
        losses = [self.step(next(batches)) for _ in range(WARM_UP)]
        self.wait()
        waited_s, started = 0.0, time.perf_counter()
        for _ in range(self.num_steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited_s += time.perf_counter() - asked
            losses.append(self.step(batch))
        self.wait()
        elapsed_s = time.perf_counter() - started
        values = torch.stack(losses).tolist()
        return {
            "tokens_per_s": self.num_steps * self.step_tokens / elapsed_s,
            "wait_share": waited_s / elapsed_s,
            "loss_first": values[0],
            "loss_last": statistics.fmean(values[-5:]),
        }

    def trace(self, batches: Iterator[Any], path: Path | None) -> float:
        """The share of the time of some steps in which no kernel ran on the GPU; the trace is written to `path`."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(WARM_UP):
                self.step(next(batches))
            self.wait()
        if path is not None:
            profile.export_chrome_trace(str(path))
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        )
        busy_us, reached = 0.0, spans[0][0]
        for start, end in spans:
            busy_us += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return 1 - busy_us / (reached - spans[0][0])


class Feeds:
    """Endless batches (inputs, labels) on the device, by the name of the feed."""

    def __init__(self, stack: ExitStack, dataset: Path, seq_len: int, batch_size: int, device: torch.device) -> None:
        self._stack, self._dataset, self._device = stack, dataset, device
        samples = forebay.SampleOptions(drop_last=True)  # PyTorch compiles for each shape of a batch.
        self._arguments: dict[str, Any] = {
            "seq_len": seq_len, "batch_size": batch_size, "epochs": None, "samples": samples,
        }  # fmt: skip
        self._pool: Any = None

    def resident(self) -> Iterator[Any]:
        batch = next(self.local())
        while True:
            yield batch

    def pinned(self) -> Iterator[Any]:
        size = self._arguments["batch_size"], self._arguments["seq_len"] + 1
        host = torch.randint(0, 256, size, pin_memory=self._device.type == "cuda")
        while True:
            tokens = host.to(self._device, non_blocking=True)
            yield tokens[:, :-1], tokens[:, 1:]

    def local(self) -> Iterator[Any]:
        return self._of(forebay.Loader(self._dataset, **self._arguments))

    def node(self) -> Iterator[Any]:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        start_network(
            self._stack.enter_context(Servers()), folder, self._dataset, "--seq-len", self._arguments["seq_len"]
        )
        network = forebay.NetworkOptions(identity=folder / "carol")
        url = f"forebay://network/{self._dataset.name}"
        return self._of(forebay.Loader(url, cache_dir=folder / "cache", network=network, **self._arguments))

    def dataloader(self) -> Iterator[Any]:
        if self._pool is None:
            with forebay.Loader(self._dataset, shuffle=False, **{**self._arguments, "epochs": 1}) as loader:
                rows = np.concatenate([np.c_[batch.inputs, batch.labels[:, -1:]] for batch in loader])
            self._pool = DataLoader(
                [torch.from_numpy(row) for row in rows],  # type: ignore[arg-type]
                batch_size=self._arguments["batch_size"],
                shuffle=True,
                drop_last=True,
                num_workers=4 if self._device.type == "cuda" else 0,
                persistent_workers=self._device.type == "cuda",
                pin_memory=self._device.type == "cuda",
            )
        while True:
            for tokens in self._pool:
                tokens = tokens.to(self._device, non_blocking=True)
                yield tokens[:, :-1], tokens[:, 1:]

    def _of(self, loader: Any) -> Iterator[Any]:
        self._stack.callback(loader.close)
        for batch in loader.to_torch(self._device):
            yield batch.inputs, batch.labels


def bare_rate(feed: Iterator[Any], step_tokens: int, wait: Callable[[], None]) -> float:
    """Tokens a second that reach the device when nothing trains, waited for every 20 batches."""
    for _ in range(20):
        next(feed)
    wait()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < 2:
        for _ in range(20):
            next(feed)
        wait()  # Copies that nothing waits for would queue without a bound.
        count += 20
    return count * step_tokens / (time.perf_counter() - started)


def product_rate(device: torch.device) -> float:
    """Operations a second of one large bf16 product."""
    size, rounds = (8192, 20) if device.type == "cuda" else (1024, 4)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for count in (3, rounds):
        started = time.perf_counter()
        for _ in range(count):
            result = left @ right
        result[0, 0].item()
    return rounds * 2 * size**3 / (time.perf_counter() - started)


def measure(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[dict[str, Any]]:
    device, size = torch.device(arguments.device), MODELS[arguments.model]
    dataset = forebay.open_dataset(arguments.dataset)
    vocab_size = -(-(dataset.manifest.vocab_size or 1 << 16) // 128) * 128
    batch_size = arguments.batch_size or size.batch_size
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Gpt(vocab_size, arguments.seq_len, size).to(device)

    def compute_loss(inputs: Any, labels: Any) -> Any:
        return functional.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())

    if device.type == "cuda":
        for block in model.blocks.layers:
            block.compile()
        compute_loss = torch.compile(compute_loss)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), fused=True)
    run = Run(model, optimizer, compute_loss, device, arguments.steps, batch_size * arguments.seq_len)
    feeds = Feeds(stack, Path(arguments.dataset), arguments.seq_len, batch_size, device)
    flops = flops_per_token(size.num_parameters(vocab_size, 0), size.num_layers, size.width, arguments.seq_len)
    product = product_rate(device)
    name, peak = "CPU", None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        with suppress(forebay.ForebayError):
            peak = peak_flops(name)
    started = {name: getattr(feeds, name)() for name in arguments.feeds}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.feeds}
    for _ in range(arguments.rounds):
        for feed, batches in started.items():
            rounds[feed].append(run.time(batches))
    for feed, batches in started.items():
        middle = sorted(rounds[feed], key=lambda line: line["tokens_per_s"])[len(rounds[feed]) // 2]
        rate = middle["tokens_per_s"]
        line: dict[str, Any] = {"feed": feed, "device": name, "model": arguments.model, **middle}
        line |= {"mfu": None if peak is None else rate * flops / peak, "product": rate * flops / product}
        line["rates"] = [round(item["tokens_per_s"]) for item in rounds[feed]]
        if device.type == "cuda":
            path = Path(f"{arguments.trace}.{feed}.json.gz") if arguments.trace else None
            line["gpu_idle_share"] = run.trace(batches, path)
        yield line | {"bare_tokens_per_s": bare_rate(batches, run.step_tokens, run.wait)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on the batches of several feeds.")
    parser.add_argument("dataset", help="a dataset of layout tokens in a local directory")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, help="samples of a step; by default the model's")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--feeds", nargs="+", choices=FEEDS, default=FEEDS)
    parser.add_argument("--trace", help="with a GPU, write the traces to TRACE.FEED.json.gz")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device: expected one of this machine, got {arguments.device}. Use cpu.")
    try:
        with ExitStack() as stack:
            for line in measure(arguments, stack):
                print(
                    json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()}),
                    flush=True,
                )
    except forebay.ForebayError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
