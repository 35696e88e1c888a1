"""A worker to start from a program: open, train, stop.

    worker = WorkerClient(WorkerConfig(dataset_name="tiny_shakespeare"))
    await worker.start()
    report = await worker.run_training()
    await worker.stop()

Training runs in its own thread, so that the event loop stays free; cancelling it (Ctrl-C under asyncio.run) ends it
after the current step.
"""

import asyncio
import secrets
import socket
import sys
import threading
from dataclasses import dataclass, replace

from forebay.errors import UsageError
from forebay.worker.config import WorkerConfig
from forebay.worker.training import Log, OnStep, Training, TrainingReport

__all__ = ["TrainingReport", "WorkerClient"]


def log_to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


_WAKE_S = 0.5


@dataclass(eq=False)
class WorkerClient:
    """One worker of a run, alone or with others.

    Args:
        config: The settings. Without a worker_id one is made of the machine's name.
        log: Called with each line of progress; by default they go to stderr.
        on_step: Called after each step, in the training thread, with its number in the run, from 0, this worker's batch
            and the loss; an exception ends the run.
    """

    config: WorkerConfig
    log: Log = log_to_stderr
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        worker_id = self.config.worker_id or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.config = replace(self.config, worker_id=worker_id)
        self._stop = threading.Event()
        self._training: Training | None = None
        self._running: asyncio.Task[TrainingReport] | None = None

    @property
    def report(self) -> TrainingReport:
        """The report up to now."""
        return self._opened().report

    async def start(self) -> None:
        """Open the dataset and its tokenizer. A second call begins a new run.

        Raises:
            UnknownDatasetError: No dataset has that name. It is a FileNotFoundError, too.
            DownloadError: The hub does not respond. It is a ConnectionError, too.
            MissingPackageError: A package is missing. It is an ImportError, too.
        """
        await self.stop()
        self._stop.clear()
        self._training = await asyncio.to_thread(Training, self.config, self._stop, self.log, self.on_step)

    async def run_training(self, use_distributed: bool = False) -> TrainingReport:
        """Train until num_steps are done, or `stop`; a call after a stop continues.

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
            raise UsageError("worker: expected one run_training at a time. Wait for the current one, or stop it.")
        if training.report.finished:
            raise UsageError("worker: expected steps to do, got a finished run. Call start() for a new one.")
        self._stop.clear()
        self._running = asyncio.create_task(asyncio.to_thread(self._train, training, use_distributed))
        try:
            # Wakes up: a SIGINT that arrives just before the loop blocks in its selector is seen at the next turn only.
            while not self._running.done():
                await asyncio.wait([self._running], timeout=_WAKE_S)
            return self._running.result()
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.wait([self._running])
            raise
        finally:
            self._running = None

    async def stop(self) -> None:
        """End a run after its current step, and close the data. May be called twice, or from another task."""
        self._stop.set()
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._training is not None:
            await asyncio.to_thread(self._training.close)

    async def __aenter__(self) -> "WorkerClient":
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
        from forebay.worker.distributed import train_distributed

        return train_distributed(training)
