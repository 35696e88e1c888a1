"""A worker to start from a program: open, train, stop.

    worker = WorkerClient(WorkerConfig(dataset_name="tiny_shakespeare"))
    await worker.start()
    report = await worker.run_training()
    await worker.stop()

Training runs in a thread of its own, so that the event loop stays free; cancelling it (Ctrl-C under asyncio.run) ends
it after the step under way.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
from dataclasses import replace

from tqdm import tqdm

from forebay.errors import UsageError
from forebay.worker.config import WorkerConfig
from forebay.worker.training import OnStep, Tell, Training, TrainingReport

__all__ = ["TrainingReport", "WorkerClient"]


def tell_stderr(line: str) -> None:
    """A line for whoever looks on, above the bar where there is one."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


class WorkerClient:
    """One worker of a run, alone or with others.

    Args:
        config: What to do. Without a worker_id it gets one of the machine's name.
        tell: Takes lines about the run's progress; by default they go to stderr.
        on_step: Called after each step, in the training thread, with its number in the run, from 0, this worker's batch
            and the loss; what it raises ends the run.
    """

    def __init__(self, config: WorkerConfig, *, tell: Tell = tell_stderr, on_step: OnStep | None = None) -> None:
        worker_id = config.worker_id or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.config = replace(config, worker_id=worker_id)
        self._tell, self._on_step = tell, on_step
        self._stop = threading.Event()
        self._training: Training | None = None
        self._running: asyncio.Task[TrainingReport] | None = None

    @property
    def report(self) -> TrainingReport:
        """What was done up to now."""
        return self._opened().report

    async def start(self) -> None:
        """Open the dataset and its tokenizer. Called again, it begins a new run.

        Raises:
            UnknownDatasetError: If nothing has the dataset's name. It is a FileNotFoundError, too.
            DownloadError: If the hub cannot be reached. It is a ConnectionError, too.
            MissingPackageError: If a package is missing. It is an ImportError, too.
        """
        await self.stop()
        self._stop.clear()
        bar = self._tell is tell_stderr and sys.stderr.isatty()
        self._training = await asyncio.to_thread(Training, self.config, self._stop, self._tell, self._on_step, bar=bar)

    async def run_training(self, use_distributed: bool = False) -> TrainingReport:
        """Train until num_steps are done, or `stop`; after a stop it may be called again and goes on.

        Args:
            use_distributed: With all workers of the coordinator: rank, world size and the common settings come from
                it, and gradients are averaged at each step. Else alone.

        Raises:
            UsageError: If `start` was not called, or the run is finished.
            OutOfMemory: If a step does not fit its device. It is a RuntimeError, too.
            CoordinatorUnreachableError: If the coordinator does not answer.
        """
        training = self._opened()
        if self._running is not None:
            raise UsageError("worker: expected one run_training at a time. Wait for the one under way, or stop it.")
        if training.report.finished:
            raise UsageError("worker: expected steps to do, got a finished run. Call start() for a new one.")
        self._stop.clear()
        self._running = asyncio.create_task(asyncio.to_thread(self._train, training, use_distributed))
        try:
            return await asyncio.shield(self._running)
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.wait([self._running])
            raise
        finally:
            self._running = None

    async def stop(self) -> None:
        """End a run after its step under way, and close the data. May be called twice, or from another task."""
        self._stop.set()
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._training is not None:
            await asyncio.to_thread(self._training.close)

    async def __aenter__(self) -> WorkerClient:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _opened(self) -> Training:
        if self._training is None:
            raise UsageError("worker: expected start() before run_training(). Call `await worker.start()`.")
        return self._training

    def _train(self, training: Training, use_distributed: bool) -> TrainingReport:
        if not use_distributed:
            return training.run()
        from forebay.worker.together import train_together

        return train_together(training)
