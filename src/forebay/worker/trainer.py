"""Trainers: the protocol, and a counter in NumPy that runs anywhere."""

import os
import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import NetworkError, UsageError
from forebay.machine import num_cores

IGNORE_INDEX = -100
_MAX_SIDE = 2048

Integers = NDArray[np.integer[Any]]


class PeerLostError(NetworkError):
    """A rank did not join or did not respond: the current step was not applied here."""


class Trainer(Protocol):
    """Learns from one batch at a time.

    A class of a program is called with the vocab_size, seq_len, model_size, learning_rate, seed and device of the
    configuration, all by name, as `forebay.worker.gpt.GptTrainer` is.
    """

    def step(self, inputs: Integers, labels: Integers) -> float:
        """Learn from `inputs` and `labels` [B, L], where label -100 is ignored; returns the loss in nats a token."""

    def describe(self) -> str:
        """The model in one line, for logs."""


class LockstepTrainer(Trainer, Protocol):
    """A trainer whose gradients PyTorch averages over workers between `gradients` and `apply`."""

    model: Any  # a torch.nn.Module
    optimizer: Any  # steps its weights, as torch.optim has it; both on `device`
    device: str

    def gradients(self, inputs: Integers, labels: Integers) -> tuple[float, int]:
        """Returns the mean loss and its number of labels; sets the gradients of the model's parameters."""

    def apply(self) -> None:
        """Take one step of the optimizer."""


class CountTrainer:
    """Counts which token follows which; the loss of a batch is that of the counts before it.

    Add-one smoothing; contexts and successors beyond _MAX_SIDE share cells, so memory is at most
    8 * _MAX_SIDE**2 bytes whatever the vocabulary: 32 MB.
    """

    def __init__(self, vocab_size: int, **_: Any) -> None:
        if vocab_size < 1:
            raise UsageError(f"count trainer: expected a vocabulary of at least 1, got {vocab_size}.")
        self._side = min(vocab_size, _MAX_SIDE)
        self._pairs = np.zeros(self._side * self._side, np.int64)
        self._contexts = np.zeros(self._side, np.int64)

    def step(self, inputs: Integers, labels: Integers) -> float:
        valid = labels != IGNORE_INDEX
        context = inputs[valid].astype(np.int64) % self._side
        follower = labels[valid].astype(np.int64) % self._side
        if len(context) == 0:
            return 0.0
        cell = context * self._side + follower
        chance = (self._pairs[cell] + 1.0) / (self._contexts[context] + float(self._side))
        np.add.at(self._pairs, cell, 1)
        np.add.at(self._contexts, context, 1)
        return float(-np.log(chance).mean())

    def describe(self) -> str:
        return "counts which token follows which"


def share_processors() -> None:
    """Set the environment so that PyTorch's threads sleep while they wait, and local ranks divide the processors.

    By default the threads spin at each barrier, so that two workers on one machine slow each other down: measured 35
    times on two processors. Has no effect where OMP_NUM_THREADS or OMP_WAIT_POLICY is set, or PyTorch is imported. The
    ranks of this machine are those of LOCAL_WORLD_SIZE.
    """
    if "torch" in sys.modules or {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & os.environ.keys():
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if local.isdecimal() and int(local) > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores() // int(local)))


def check_trainer(name: str) -> str:
    """The name, unless it is neither `count`, `gpt` nor FILE.py:NAME: then UsageError."""
    path, _, attribute = name.rpartition(":")
    if name not in ("count", "gpt") and not (path.endswith(".py") and attribute.isidentifier()):
        raise UsageError(f"trainer: expected 'count', 'gpt' or FILE.py:NAME, got {name!r}.")
    return name
