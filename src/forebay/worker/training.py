"""One worker's run: data, a trainer, and steps until all are done or it is told to stop."""

import json
import math
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forebay.errors import StateError, UsageError
from forebay.files import open_atomic, remove_stale
from forebay.load.batch import Batch
from forebay.worker.batches import Batches
from forebay.worker.config import WorkerConfig
from forebay.worker.dummy import DummyDataset
from forebay.worker.hub_data import create_huggingface_dataset
from forebay.worker.trainer import Integers, Trainer, trainer_class

CHECKPOINT = "checkpoint.zip"


def write_checkpoint(directory: Path, state: dict[str, Any], trainer: bytes) -> None:
    """Write `state` (plain JSON values) and a trainer's bytes as one zip file, in place of the one before."""
    directory.mkdir(parents=True, exist_ok=True)
    with open_atomic(directory / CHECKPOINT) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("state.json", json.dumps(state))
        archive.writestr("trainer.bin", trainer)


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], bytes] | None:
    """What was kept, or None; StateError if it is damaged."""
    path = directory / CHECKPOINT
    remove_stale(directory)
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            state = json.loads(archive.read("state.json"))
            if not isinstance(state, dict):
                raise ValueError(f"expected an object, got {type(state).__name__}")
            return state, archive.read("trainer.bin")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise StateError(f"checkpoint {path}: cannot be read: {error}. Remove it to start anew.") from error


PROGRESS_S = 2.0
Tell = Callable[[str], None]
OnStep = Callable[[int, Batch, float], None]


@dataclass
class TrainingReport:
    """What a worker did.

    Attributes:
        steps: Taken here; `step` counts those of the run, before a resumed checkpoint and by others included.
        samples, tokens: Of this worker's batches.
        losses: Of each step, in nats a token, before it was learnt; over all workers where they train together.
        first_batch_s: Until the first batch was there, from the run's beginning.
        tokens_per_s, wait_share: Since then; the second is the part of the time that steps waited for data, in [0, 1].
        generations: Memberships that the run went through here; 1 alone.
        epochs: Begun of the data.
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
        """All of it as plain values, the losses as those of the first and the last step."""
        plain = asdict(self)
        losses = plain.pop("losses")
        return {**plain, "loss_first": losses[0] if losses else None, "loss_last": losses[-1] if losses else None}


def open_data(config: WorkerConfig) -> Batches:
    """The dataset of a configuration, as the only rank reads it; `dealt` gives another's share."""
    common: dict[str, Any] = {
        "num_batches": config.num_steps, "batch_size": config.batch_size, "seq_len": config.resolved_seq_len(),
        "seed": config.seed, "tensors": "numpy",
    }  # fmt: skip
    if config.dataset_name is None:
        is_dealt = config.dataset_type == "distributed_dummy"
        return DummyDataset(vocab_size=config.vocab_size, distributed=is_dealt, **common)
    return create_huggingface_dataset(
        config.dataset_name, streaming=config.streaming, tokenizer_name=config.tokenizer_name,
        buffer_size=config.shuffle_buffer, partition=config.partition, text_key=config.text_key, **common,
    )  # fmt: skip


class Training:
    """A run in one thread; `stop` may be set from any, and ends it after the step under way.

    `tell` is told a line at the beginning, every two seconds, and at the end; `bar` draws a bar on stderr in place of
    those on the way. `on_step` is called after each step with its number, from 0, this rank's batch, and the loss.
    """

    def __init__(
        self,
        config: WorkerConfig,
        stop: threading.Event,
        tell: Tell,
        on_step: OnStep | None = None,
        *,
        bar: bool = False,
    ) -> None:
        self.config, self.stop, self.tell, self.on_step = config, stop, tell, on_step
        self._wants_bar = bar
        self._bar: Any = None
        self.data = open_data(config)
        self.report = TrainingReport(worker_id=config.worker_id or "")
        self.samples_taken = 0
        self._trainer: Trainer | None = None
        self._batches: Generator[Batch, None, None] | None = None
        self._waited_s = self._begun = self._told_at = 0.0
        self._introduced = False

    def adopt(self, config: WorkerConfig) -> None:
        """Take over settings that a run agreed on; the data are opened again if they are others. Before any step."""
        if config != self.config or config.resolved_seq_len() != self.config.resolved_seq_len():
            self.close()
            self.config, self._trainer, self._introduced = config, None, False
            self.data = open_data(config)

    @property
    def step(self) -> int:
        """Steps of the run that are done."""
        return self.report.step

    @property
    def trainer(self) -> Trainer:
        """What learns; made when first asked for."""
        if self._trainer is None:
            config = self.config
            self._trainer = trainer_class(config.trainer)(
                vocab_size=self.data.vocab_size,
                seq_len=config.resolved_seq_len(),
                model_size=config.model_size,
                seed=config.seed,
                learning_rate=config.learning_rate,
                device=config.device,
            )
        return self._trainer

    def run(self) -> TrainingReport:
        """Train alone to the end, or until told to stop; OutOfMemory if a step does not fit its device."""
        self.resume()
        self.begin()
        self.dealt(0, 1)
        while self.step < self.config.num_steps and not self.stop.is_set():
            batch = self.next_batch()
            self.count(batch, self.learn(self.trainer.step, batch))
        return self.end()

    def dealt(self, rank: int, world_size: int) -> None:
        """Take the data's share of a rank from here on, and say what a step is over all ranks."""
        self.close_batches()
        if (self.data.rank, self.data.world_size) != (rank, world_size):
            self.data = self.data.dealt(rank, world_size)
        report = self.report
        report.rank, report.world_size = rank, world_size
        report.effective_batch_size = self.config.effective_batch_size(world_size)
        self.tell(
            f"rank {rank} of {world_size}: effective batch size {report.effective_batch_size} "
            f"({self.config.batch_size} x {world_size}), sequences of {self.data.seq_len} tokens"
        )

    def begin(self) -> None:
        """Make the trainer, and say what learns from what, if that was not done before; then start the clocks."""
        if not self._introduced:
            self.tell(f"{self.data.describe()}; {self.trainer.describe()}")
            self._introduced = True
        self._begun = self._told_at = time.monotonic()

    def next_batch(self) -> Batch:
        """This rank's part of the next step."""
        began = time.monotonic()
        if self._batches is None:
            self._batches = self.data.endless()
        batch = next(self._batches)
        now = time.monotonic()
        if self.report.first_batch_s:
            self._waited_s += now - began
        else:
            self.report.first_batch_s, self._begun = now - self._begun, now
            self.tell(f"first batch after {self.report.first_batch_s:.2f} s")
        return batch

    def learn(self, step: Callable[[Integers, Integers], float], batch: Batch) -> float:
        """Calls `step` with a batch; if memory is short, says which settings would need less."""
        try:
            return step(batch.inputs, batch.labels)
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(error, self.config) from error
            raise

    def count(self, batch: Batch, loss: float) -> None:
        """One step is done: counts, a line of progress now and then, a checkpoint if it is time."""
        if not math.isfinite(loss):
            raise StateError(
                f"step {self.step}: expected a finite loss, got {loss}. Use a smaller learning_rate than "
                f"{self.config.learning_rate:g}, or go back to an earlier checkpoint."
            )
        report = self.report
        report.steps += 1
        report.step += 1
        report.samples += len(batch)
        report.tokens += len(batch) * self.data.seq_len
        report.losses.append(loss)
        report.epochs = max(report.epochs, batch.epoch + 1)
        self.samples_taken += report.effective_batch_size
        now = time.monotonic()
        elapsed = max(now - self._begun, 1e-9)
        report.tokens_per_s = report.tokens / elapsed
        report.wait_share = min(1.0, self._waited_s / elapsed)
        if self._wants_bar:
            self._draw()
        elif now - self._told_at >= PROGRESS_S:
            self._told_at = now
            self.tell(f"step {report.step}/{self.config.num_steps}  {self._progress()}")
        if self.on_step is not None:
            self.on_step(report.step - 1, batch, loss)
        if report.step % self.config.checkpoint_steps == 0 and report.step < self.config.num_steps:
            self.keep()

    def _progress(self) -> str:
        report = self.report
        loss = f"loss {report.losses[-1]:.3f}  " if report.losses else ""
        return f"{loss}{report.tokens_per_s:,.0f} tokens/s  waited for data {100 * report.wait_share:.0f} %"

    def _draw(self) -> None:
        report = self.report
        if self._bar is None:
            self._bar = tqdm(
                total=self.config.num_steps,
                initial=report.step - 1,
                bar_format="step {n_fmt}/{total_fmt} |{bar:30}| {postfix}  {remaining} left",
                file=sys.stderr,
                leave=False,
            )
        self._bar.set_postfix_str(self._progress(), refresh=False)
        self._bar.update(report.step - self._bar.n)

    def _end_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def end(self) -> TrainingReport:
        """The report, after the last checkpoint."""
        self.close_batches()
        self._end_bar()
        self.report.finished = self.step >= self.config.num_steps
        if self.report.steps:
            self.keep()
        done = "done" if self.report.finished else "stopped"
        self.tell(f"{done}: step {self.step}/{self.config.num_steps}  {self._progress()}")
        return self.report

    def close_batches(self) -> None:
        """End the iteration over the data; its place stays."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def close(self) -> None:
        """Close the data. May be called twice."""
        self.close_batches()
        self._end_bar()
        self.data.close()

    def keep(self) -> None:
        """A checkpoint, if there is a directory for it. Of ranks, the first keeps it."""
        if self.config.checkpoint_dir is None or self.report.rank:
            return
        state = {"step": self.step, "samples_taken": self.samples_taken, "data": self.data.state_dict()}
        write_checkpoint(Path(self.config.checkpoint_dir), state, self.trainer.to_bytes())

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one and nothing was done yet."""
        if self.config.checkpoint_dir is None or self.step:
            return
        found = read_checkpoint(Path(self.config.checkpoint_dir))
        if found is None:
            return
        state, trainer = found
        step, samples = self._counts_of(state)
        self.data.load_state_dict(state["data"])
        self.trainer.from_bytes(trainer)
        self.report.step, self.samples_taken = step, samples
        self.tell(f"resumed at step {step} from {self.config.checkpoint_dir}")

    def checkpointed(self) -> tuple[int, int]:
        """Steps done, and samples of all ranks that they took, of this run or of the checkpoint it would resume."""
        if self.config.checkpoint_dir is not None and not self.step:
            found = read_checkpoint(Path(self.config.checkpoint_dir))
            if found is not None:
                return self._counts_of(found[0])
        return self.step, self.samples_taken

    def _counts_of(self, state: dict[str, Any]) -> tuple[int, int]:
        counts = [state.get(name) for name in ("step", "samples_taken")]
        if not all(type(count) is int and count >= 0 for count in counts) or "data" not in state:
            raise StateError(
                f"checkpoint in {self.config.checkpoint_dir}: expected a step and a place, got {sorted(state)}. "
                "Take another checkpoint_dir."
            )
        return int(counts[0] or 0), int(counts[1] or 0)


_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


class OutOfMemory(UsageError, RuntimeError):  # noqa: N818 - as PyTorch calls it
    """A step did not fit the memory of its device; also a RuntimeError. The settings that were tried are attributes."""

    def __init__(self, message: str, batch_size: int, seq_len: int) -> None:
        super().__init__(message)
        self.batch_size, self.seq_len = batch_size, seq_len


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed as its device's memory was full, however the framework says so."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).casefold() for sign in _SIGNS)


def out_of_memory(error: BaseException, config: WorkerConfig) -> OutOfMemory:
    """The failure in its own words, then the settings that it happened with and the next smaller ones."""
    first = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    batch_size, seq_len = config.batch_size, config.resolved_seq_len()
    advice = []
    if batch_size > 1:
        advice.append(f"batch_size={max(1, batch_size // 2)}")
    if seq_len > 16:
        advice.append(f"seq_len={seq_len // 2}")
    if config.model_size != "tiny":
        advice.append(f"model_size={('tiny' if config.model_size == 'small' else 'small')!r}")
    return OutOfMemory(
        f"{first}. The step was of batch_size={batch_size}, seq_len={seq_len} and model_size={config.model_size!r}. "
        f"Try {', or '.join(advice) or 'a device with more memory'}.",
        batch_size,
        seq_len,
    )
