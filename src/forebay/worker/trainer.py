"""What consumes batches: a one-method Protocol, and a NumPy model that runs anywhere."""

import importlib.util
import io
import os
import sys
import zipfile
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import StateError, UsageError
from forebay.extras import install_command

IGNORE_INDEX = -100
TRAINERS = ("auto", "gpt", "count", "none")

Integers = NDArray[np.integer[Any]]


class Trainer(Protocol):
    """Learns from one batch at a time; nothing else is asked of it."""

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


class CountTrainer:
    """Counts which token follows which, and says how surprising each batch was before it was counted.

    Add-one smoothing; contexts and successors beyond `max_side` share cells, so memory is at most
    8 * max_side**2 bytes whatever the vocabulary: 32 MB by default.
    """

    def __init__(self, vocab_size: int, max_side: int = 2048) -> None:
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
        advice = "" if has_torch() else f" ({install_command('torch')} trains a GPT)"
        return f"counts which token follows which{advice}"

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


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def make_trainer(name: str, *, vocab_size: int, dtype: str, seq_len: int, layout: str) -> Trainer | None:
    """The trainer of a name, None for `none`; `auto` is the GPT where PyTorch is installed, else counts.

    Args:
        vocab_size: 0 where the dataset does not say (adopted files): then all that a U16 can be, for U32
            counting only.

    Raises:
        UsageError: If the name is unknown, or the trainer cannot learn from this layout.
    """
    if name not in TRAINERS:
        raise UsageError(f"trainer: expected one of {', '.join(TRAINERS)}, got {name!r}.")
    if layout != "tokens":
        if name in ("auto", "none"):
            return None
        raise UsageError(
            f"trainer {name}: expected layout tokens, got {layout}. Train in a program of your own "
            "(forebay.worker.leasing.run_worker with on_batch, or forebay.Loader), or use trainer 'none', which "
            "learns nothing."
        )
    if name == "none":
        return None
    if vocab_size == 0 and dtype == "U32" and name == "gpt":
        raise UsageError("trainer gpt: the dataset does not say its vocabulary's size. Use trainer 'count'.")
    if vocab_size == 0:
        name = "count" if dtype == "U32" else name
        vocab_size = 1 << 16
    if name == "gpt" or (name == "auto" and has_torch()):
        share_processors()
        from forebay.worker.gpt import GptTrainer

        return GptTrainer(vocab_size, seq_len)
    return CountTrainer(vocab_size)


def make_sized_trainer(
    name: str, model_size: str, *, vocab_size: int, seq_len: int, seed: int, learning_rate: float, device: str | None
) -> Trainer:
    """The trainer of a `WorkerConfig`: the GPT of a size, or counts; `auto` is the GPT where PyTorch is installed."""
    if name == "gpt" or (name == "auto" and has_torch()):
        share_processors()
        from forebay.worker.config import SIZES
        from forebay.worker.gpt import GptTrainer

        size = SIZES[model_size]
        return GptTrainer(
            vocab_size,
            seq_len,
            width=size.width,
            num_layers=size.num_layers,
            num_heads=size.num_heads,
            learning_rate=learning_rate,
            seed=seed,
            device=device,
        )
    return CountTrainer(vocab_size)
