"""One worker's run: data, a trainer, and steps until all are done or it is stopped."""

import functools
import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import StateError, UsageError, error_text, package_for
from forebay.load.batch import NumpyTokens
from forebay.worker.batches import Batches, DummyDataset
from forebay.worker.config import WorkerConfig
from forebay.worker.hub_data import create_huggingface_dataset
from forebay.worker.trainer import CountTrainer, Integers, Trainer, check_trainer, share_processors

PROGRESS_S = 2.0
_OF_TEXT = ("tokenizer_name", "streaming", "shuffle_buffer", "text_key")  # settings
Log = Callable[[str], None]
OnStep = Callable[[int, NumpyTokens, float], None]


@functools.cache
def trainer_class(name: str) -> Callable[..., Trainer]:
    """The class of a trainer: of the counter, the GPT, or NAME of FILE.py:NAME, which is executed."""
    if name == "count":
        return CountTrainer
    share_processors()
    if name == "gpt":
        with package_for("model_size: training a GPT"):
            from forebay.worker.gpt import GptTrainer
        return GptTrainer
    path, _, attribute = check_trainer(name).rpartition(":")
    spec = importlib.util.spec_from_file_location(f"forebay_trainer_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None  # of a name that ends in .py
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        trainer: Callable[..., Trainer] = getattr(module, attribute)
    except (OSError, ImportError, AttributeError) as error:
        raise UsageError(f"trainer {name}: cannot be loaded: {error}. Give the FILE.py:NAME of a class.") from error
    return trainer


@dataclass
class TrainingReport:
    """What a worker did.

    Attributes:
        steps: Taken by this worker; `step` counts those of the run, also by others.
        samples, tokens: Of this worker's batches.
        losses: Of each step, in nats a token, before it was learnt; over all workers where they train together.
        first_batch_s: From the start of the run to the first batch.
        tokens_per_s, wait_share: Since then; the latter is the part of the time that steps waited for data, in [0, 1].
        generations: Memberships that the run went through here; 1 alone.
        epochs: Of the data, the current one included.
        finished: Whether all num_steps are done.
    """

    worker_id: str = ""
    rank: int = 0
    world_size: int = 1
    effective_batch_size: int = 0
    steps: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    first_batch_s: float = 0.0
    tokens_per_s: float = 0.0
    wait_share: float = 0.0
    generations: int = 1
    epochs: int = 0
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values; of the losses the first and the last."""
        plain = asdict(self)
        losses = plain.pop("losses")
        return {**plain, "loss_first": losses[0] if losses else None, "loss_last": losses[-1] if losses else None}


def open_data(config: WorkerConfig) -> Batches:
    """The dataset of a configuration for a single rank; `join_world` makes it another rank's share."""
    common = {
        "num_batches": config.num_steps, "batch_size": config.batch_size, "seq_len": config.resolved_seq_len(),
        "seed": config.seed,
    }  # fmt: skip
    if config.dataset_name is None:
        distributed = config.dataset_type == "distributed_dummy"
        return DummyDataset(distributed=distributed, **common)
    return create_huggingface_dataset(
        config.dataset_name, streaming=config.streaming, tokenizer_name=config.tokenizer_name,
        buffer_size=config.shuffle_buffer, text_key=config.text_key, **common,
    )  # fmt: skip


@dataclass(eq=False)
class Training:
    """A run in one thread; `stop` may be set from any, and ends it after the current step.

    `log` gets a line at the start, every two seconds, and at the end. `on_step` is called after each step with its
    number, from 0, this rank's batch, and the loss.
    """

    config: WorkerConfig
    stop: threading.Event
    log: Log
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        self.report = TrainingReport(worker_id=self.config.worker_id or "")
        self._trainer: Trainer | None = None
        self._batches: Generator[NumpyTokens, None, None] | None = None
        self._waited_s = self._started_at = self._logged_at = 0.0
        self._described = False

    def apply_config(self, config: WorkerConfig) -> None:
        """Replace the settings before the first step; the data are opened again if the settings differ."""
        if config != self.config or config.resolved_seq_len() != self.config.resolved_seq_len():
            self.close()
            vars(self).pop("data", None)
            self.config = config
            self.__post_init__()

    @functools.cached_property
    def data(self) -> Batches:
        """The data of the configuration, opened on first use: a coordinator may change it before."""
        return open_data(self.config)

    @property
    def step(self) -> int:
        """Steps of the run that are done."""
        return self.report.step

    @property
    def trainer(self) -> Trainer:
        """The trainer of the configuration, made on first use."""
        if self._trainer is None:
            config = self.config
            self._trainer = trainer_class(config.resolved_trainer())(
                vocab_size=self.data.vocab_size, seq_len=config.resolved_seq_len(), seed=config.seed,
                model_size=config.model_size or "tiny", learning_rate=config.learning_rate or 1e-3,
                device=config.device,
            )  # fmt: skip
        return self._trainer

    def run(self) -> TrainingReport:
        """Train alone to the end, or until `stop`; OutOfMemoryError if a step does not fit its device."""
        self.start(is_alone=True)
        self.set_rank(0, 1)
        while self.step < self.config.num_steps and not self.stop.is_set():
            batch = self.next_batch()
            self.record_step(batch, self.learn(self.trainer.step, batch))
        return self.finish()

    def set_rank(self, rank: int, world_size: int, samples_taken: int | None = None) -> None:
        """Read the data's share of a rank from a sample of the run on; None: from here on, as it is."""
        self.close_batches()
        if samples_taken is not None:
            self.data.join_world(rank, world_size, samples_taken)
        report = self.report
        report.rank = rank
        report.world_size = world_size
        report.effective_batch_size = self.config.effective_batch_size(world_size)
        self.log(
            f"rank {rank} of {world_size}: effective batch size {report.effective_batch_size} "
            f"({self.config.batch_size} x {world_size}), sequences of {self.data.seq_len} tokens"
        )

    def start(self, *, is_alone: bool = False) -> None:
        """Make the trainer, log data, trainer and settings without effect once, and start the clocks."""
        if not self._described:
            self.log(f"{self.data.about}; {self.trainer.describe()}")
            for is_unused, names, what in (
                (
                    self.config.resolved_trainer() == "count",
                    ("model_size", "learning_rate", "device"),
                    "counts; leave trainer='count' out",
                ),
                (self.config.dataset_name is None, _OF_TEXT, "random samples; name a dataset, dataset_name=NAME"),
                (is_alone, ("coordinator", "identity", "timeout_s"), "a worker alone; train together, --distributed"),
            ):
                changed = [name for name in names if getattr(self.config, name) != getattr(WorkerConfig, name)]
                if is_unused and changed:
                    self.log(f"{', '.join(changed)}: without effect on {what}")
            self._described = True
        self._started_at = self._logged_at = time.monotonic()

    def next_batch(self) -> NumpyTokens:
        """This rank's part of the next step."""
        requested_at = time.monotonic()
        if self._batches is None:
            self._batches = self.data.endless()
        batch = next(self._batches)
        now = time.monotonic()
        if self.report.first_batch_s:
            self._waited_s += now - requested_at
        else:
            self.report.first_batch_s = now - self._started_at
            self._started_at = now
            self.log(f"first batch after {self.report.first_batch_s:.2f} s")
        return batch

    def learn(self, step: Callable[[Integers, Integers], float], batch: NumpyTokens) -> float:
        """Call `step` with a batch; if memory is short, the error names settings that need less."""
        try:
            return step(batch.inputs, batch.labels)
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(error, self.config) from error
            raise

    def record_step(self, batch: NumpyTokens, loss: float) -> None:
        """Count a step, and log the progress if it is due."""
        if not math.isfinite(loss):
            raise StateError(
                f"step {self.step}: expected a finite loss, got {loss}. Use a smaller learning_rate than "
                f"{self.config.learning_rate or 1e-3:g}."
            )
        report = self.report
        report.steps += 1
        report.step += 1
        report.samples += len(batch)
        report.tokens += len(batch) * self.data.seq_len
        report.losses.append(loss)
        report.epochs = max(report.epochs, batch.epoch + 1)
        now = time.monotonic()
        elapsed_s = max(now - self._started_at, 1e-9)
        report.tokens_per_s = report.tokens / elapsed_s
        report.wait_share = min(1.0, self._waited_s / elapsed_s)
        if now - self._logged_at >= PROGRESS_S:
            self._logged_at = now
            self._log_progress()
        if self.on_step is not None:
            self.on_step(report.step - 1, batch, loss)

    def _log_progress(self, prefix: str = "") -> None:
        report = self.report
        loss = f"loss {report.losses[-1]:.3f}  " if report.losses else ""
        self.log(
            f"{prefix}step {report.step}/{self.config.num_steps}  {loss}{report.tokens_per_s:,.0f} tokens/s  "
            f"waited for data {100 * report.wait_share:.0f} %"
        )

    def finish(self) -> TrainingReport:
        """Log the end; returns the report."""
        self.close_batches()
        self.report.finished = self.step >= self.config.num_steps
        if self.report.finished and not self.report.steps:
            self.log(
                f"nothing to do: the run's {self.step} steps were done before this worker joined. For a new run start "
                "the coordinator again; if it has --state DIR, with another directory."
            )
        else:
            self._log_progress("done: " if self.report.finished else "stopped: ")
        return self.report

    def close_batches(self) -> None:
        """End the iteration over the data; its position stays."""
        batches = self._batches
        self._batches = None
        if batches is not None:
            batches.close()

    def close(self) -> None:
        """Close the data. May be called twice."""
        self.close_batches()
        if "data" in vars(self):
            self.data.close()


class OutOfMemoryError(UsageError, RuntimeError):
    """A step did not fit the memory of its device; also a RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device's memory is full, in the words of any framework."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    signs = ("out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, RuntimeError) and any(sign in str(error).casefold() for sign in signs)


def out_of_memory(error: BaseException, config: WorkerConfig) -> OutOfMemoryError:
    """The error with the settings of the step and the next smaller ones."""
    reason = error_text(error)
    batch_size = config.batch_size
    seq_len = config.resolved_seq_len()
    advice = []
    if batch_size > 1:
        advice.append(f"batch_size={batch_size // 2}")
    if seq_len > 16:
        advice.append(f"seq_len={seq_len // 2}")
    if config.model_size not in (None, "tiny"):
        advice.append(f"model_size={('tiny' if config.model_size == 'small' else 'small')!r}")
    return OutOfMemoryError(
        f"{reason}. The step was of batch_size={batch_size}, seq_len={seq_len} and model_size="
        f"{config.model_size or 'tiny'!r}. Try {', or '.join(advice) or 'a device with more memory'}."
    )
