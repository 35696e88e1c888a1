"""Workers of a coordinated run, each a process: `python distributed_workers.py COORDINATOR` reads them from stdin.

A line of JSON with the arguments of `work` begins one, forked, for PyTorch takes longer to import than the run. Workers
train a layer of four weights; a sample's number fixes its point. Each prints a JSON line for every step it applied,
this process one for every worker's begin and end.
"""

import hashlib
import json
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from forebay.worker.config import WorkerConfig
from forebay.worker.distributed import DistributedRun
from forebay.worker.training import Training


class Descent:
    """Gradient descent with momentum. PyTorch's own take a second each to import their compiler."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.state = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, speed in zip(self.parameters, self.state):
            speed.mul_(0.5).add_(parameter.grad)
            parameter.sub_(0.1 * speed)

    def state_dict(self) -> dict:
        return {"state": self.state}

    def load_state_dict(self, reported: dict) -> None:
        self.state = reported["state"]


def write(**fields: Any) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")  # one write: lines of several processes do not mix


class Layer:
    """The trainer of a run in lockstep, with four weights: a sample's first id fixes its point."""

    device = "cpu"

    def __init__(self, **settings: Any) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = Descent(self.model.parameters())

    def gradients(self, inputs: Any, labels: Any) -> tuple[float, int]:
        self.optimizer.zero_grad()
        x = torch.sin(torch.arange(1.0, 5.0) * (torch.from_numpy(inputs[:, :1] % 97) + 1))
        loss = ((self.model(x)[:, 0] - x.sum(1)) ** 2).mean()
        loss.backward()
        return float(loss.detach()), labels.size

    def apply(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def describe(self) -> str:
        return "a layer of four weights"


def work(
    coordinator: str, name: str, batch_size: int, num_steps: int, step_s: float, timeout_s: float, gate: str
) -> None:  # fmt: skip
    """`gate`: a file of as many bytes as there are steps that may be taken now."""
    torch.manual_seed(os.getpid())  # each begins elsewhere: only the source's weights count

    def on_step(step, batch, loss):
        time.sleep(step_s)
        generation = run.generation
        layer = training.trainer
        flat = torch.cat(
            [p.detach().reshape(-1) for p in layer.model.parameters()] + [s.reshape(-1) for s in layer.optimizer.state]
        )
        weights = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
        position = {"generation": generation.number, "rank": generation.rank, "world": generation.world_size}
        write(name=name, step=step, loss=loss, samples=batch.sample_ids.tolist(), weights=weights, **position)
        while Path(gate).stat().st_size <= step + 1:
            time.sleep(0.005)

    config = WorkerConfig(
        batch_size=batch_size, num_steps=num_steps, worker_id=name, coordinator=coordinator,
        timeout_s=timeout_s, seq_len=2, trainer=f"{__file__}:Layer",
    )  # fmt: skip
    training = Training(config, threading.Event(), lambda line: None, on_step)
    run = DistributedRun(training)
    run.run()


def main(coordinator: str) -> None:
    torch.set_num_threads(1)
    names = {}
    while True:
        if select.select([0], [], [], 0.02)[0]:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            fields = json.loads(line)
            pid = os.fork()
            if pid == 0:
                work(coordinator, **fields)
                os._exit(0)
            names[pid] = fields["name"]
            write(name=fields["name"], pid=pid)
        ended, code = os.waitpid(-1, os.WNOHANG) if names else (0, 0)
        if ended:
            write(name=names.pop(ended), code=os.waitstatus_to_exitcode(code))


if __name__ == "__main__":
    main(sys.argv[1])
