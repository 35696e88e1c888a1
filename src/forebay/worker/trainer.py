"""What learns from batches: a Protocol, a NumPy model that runs anywhere, and the trainers of programs by name."""

import functools
import importlib.util
import io
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import StateError, UsageError

IGNORE_INDEX = -100
TRAINERS = ("auto", "count", "none")

Integers = NDArray[np.integer[Any]]


class Trainer(Protocol):
    """Learns from one batch at a time; nothing else is asked of it.

    One of a program (examples/train_gpt.py) is made with vocab_size and seq_len, and by a `WorkerClient` also with
    the model_size, learning_rate, seed and device of its configuration, all by name.
    """

    def step(self, inputs: Integers, labels: Integers) -> float:
        """Learns from `inputs` and `labels` [B, L]; label -100 does not count. The loss in nats a token."""
        ...

    def describe(self) -> str:
        """What it is, for whoever looks on."""
        ...

    def to_bytes(self) -> bytes:
        """All that was learnt, for `from_bytes` of a trainer that was made alike."""
        ...

    def from_bytes(self, data: bytes) -> None:
        """Go on from what was learnt. StateError if it is of another model."""
        ...


class LockstepTrainer(Trainer, Protocol):
    """One whose gradients can be averaged over workers, by PyTorch, between `gradients` and `apply`."""

    model: Any  # a torch.nn.Module
    optimizer: Any  # steps its weights, as torch.optim has it; both on `device`
    device: str

    def gradients(self, inputs: Integers, labels: Integers) -> tuple[float, int]:
        """The mean loss and the number of labels it is of; leaves its gradient in the model's parameters."""
        ...

    def apply(self) -> None:
        """One step of the optimizer by the gradient in the parameters."""
        ...


class CountTrainer:
    """Counts which token follows which, and says how surprising each batch was before it was counted.

    Add-one smoothing; contexts and successors beyond `max_side` share cells, so memory is at most
    8 * max_side**2 bytes whatever the vocabulary: 32 MB by default.
    """

    def __init__(self, vocab_size: int, *, max_side: int = 2048, **_: Any) -> None:
        if vocab_size < 1:
            raise UsageError(f"count trainer: expected a vocabulary of at least 1, got {vocab_size}.")
        self._side = min(vocab_size, max_side)
        self._pairs = np.zeros(self._side * self._side, np.int64)
        self._contexts = np.zeros(self._side, np.int64)

    def step(self, inputs: Integers, labels: Integers) -> float:
        """See Trainer."""
        kept = labels != IGNORE_INDEX
        context = inputs[kept].astype(np.int64) % self._side
        follower = labels[kept].astype(np.int64) % self._side
        if len(context) == 0:
            return 0.0
        cell = context * self._side + follower
        chance = (self._pairs[cell] + 1.0) / (self._contexts[context] + float(self._side))
        np.add.at(self._pairs, cell, 1)
        np.add.at(self._contexts, context, 1)
        return float(-np.log(chance).mean())

    def describe(self) -> str:
        """See Trainer."""
        return "counts which token follows which"

    def to_bytes(self) -> bytes:
        """See Trainer."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, pairs=self._pairs, contexts=self._contexts)
        return buffer.getvalue()

    def from_bytes(self, data: bytes) -> None:
        """See Trainer."""
        try:
            with np.load(io.BytesIO(data)) as found:
                pairs, contexts = found["pairs"], found["contexts"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise StateError(f"checkpoint: expected counts, got {error}. Take another checkpoint_dir.") from error
        if pairs.shape != self._pairs.shape:
            raise StateError(
                f"checkpoint: expected counts of {len(self._contexts)} tokens, got {len(contexts)}. "
                "Set the tokenizer as it was, or take another checkpoint_dir."
            )
        self._pairs, self._contexts = pairs, contexts


def share_processors() -> None:
    """Before PyTorch is imported: let its threads sleep while they wait, and divide the processors among local ranks.

    By default the threads spin at each barrier, so that two workers on one machine take each other's processors:
    measured 35 times slower on two. Changes nothing where OMP_NUM_THREADS or OMP_WAIT_POLICY is set, or PyTorch is
    imported. The ranks of this machine are those of LOCAL_WORLD_SIZE.
    """
    if "torch" in sys.modules or {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & os.environ.keys():
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if local.isdecimal() and int(local) > 1:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, processors // int(local)))


@functools.cache
def trainer_class(name: str) -> Callable[..., Trainer]:
    """What makes the trainers of a name: counts, or the class NAME of a program, FILE.py:NAME, which is run for it."""
    if name in ("auto", "count"):
        return CountTrainer
    path, _, attribute = check_trainer(name).rpartition(":")
    share_processors()
    spec = importlib.util.spec_from_file_location(f"forebay_trainer_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None  # of a name that ends in .py
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made: Callable[..., Trainer] = getattr(module, attribute)
    except (OSError, ImportError, AttributeError) as error:
        raise UsageError(f"trainer {name}: cannot be loaded: {error}. Give the FILE.py:NAME of a class.") from error
    return made


def check_trainer(name: str) -> str:
    """The name of a trainer; UsageError unless it is one of `TRAINERS` or FILE.py:NAME."""
    path, _, attribute = name.rpartition(":")
    if name not in TRAINERS and not (path.endswith(".py") and attribute.isidentifier()):
        raise UsageError(f"trainer: expected one of {', '.join(TRAINERS)}, or FILE.py:NAME, got {name!r}.")
    return name


def make_trainer(name: str, *, vocab_size: int, dtype: str, seq_len: int, layout: str) -> Trainer | None:
    """The trainer of a name for a leased job, None for `none` and for `auto` with rows.

    `vocab_size` is 0 where the dataset does not say (adopted files): then all that a U16 can be, for U32 counting only.
    """
    check_trainer(name)
    if name == "none" or (layout != "tokens" and name == "auto"):
        return None
    if layout != "tokens":
        raise UsageError(
            f"trainer {name}: expected layout tokens, got {layout}. Train in a program of your own "
            "(forebay.worker.lease_worker.run_worker with on_batch, or forebay.Loader), or use trainer 'none', which "
            "learns nothing."
        )
    made = trainer_class(name)
    if vocab_size == 0 and dtype == "U32" and made is not CountTrainer:
        raise UsageError(f"trainer {name}: the dataset does not say its vocabulary's size. Use trainer 'count'.")
    return made(vocab_size=vocab_size or 1 << 16, seq_len=seq_len)
