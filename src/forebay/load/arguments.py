"""Checks of the Loader's arguments that need no dataset: rank and world size, batch sizes, types."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.errors import UsageError, unknown_name
from forebay.order.step_index import BatchSizes, check_integer

MAX_WORLD_SIZE = 4096
_log = logging.getLogger("forebay.load")

# (rank, world size) as launchers set them: torchrun and similar, Open MPI, MPICH and Intel MPI, MVAPICH, jsrun,
# Horovod, and last Slurm, whose steps start the daemons of the others.
_ENVIRONMENTS = [
    line.split()
    for line in """\
RANK WORLD_SIZE
OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE
PMI_RANK PMI_SIZE
MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE
JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE
HOROVOD_RANK HOROVOD_SIZE
SLURM_PROCID SLURM_STEP_NUM_TASKS
SLURM_PROCID SLURM_NTASKS""".splitlines()
]
# Ranks of this machine: torchrun, Open MPI, MPICH, MVAPICH, Slurm (`4`, `4(x2)`; the first number counts).
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
)  # fmt: skip
_SHELL_STEP = "4294967290"  # SLURM_STEP_ID of the shell of `salloc`, where it is a step of one task.
_POD_INDEX = "JOB_COMPLETION_INDEX"  # The rank in an indexed job of Kubernetes, whose manifest sets WORLD_SIZE.


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises UsageError unless `value` is one of `choices`."""
    if value not in choices:
        raise unknown_name(name, choices, value)


def rank_of_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): the arguments, else the process group's, the environment's, or (0, 1).

    Raises:
        UsageError: If they are wrong, or disagree with an initialized group of torch.distributed.
    """
    group = process_group()
    if group is not None and rank is None and world_size is None:
        return group
    # The first of those with most variables; a world size counts more than a rank.
    names = max(_ENVIRONMENTS, key=lambda pair: [name in os.environ for name in reversed(pair)])
    num_tasks = os.environ.get("SLURM_NTASKS", "1")
    is_job = names == _ENVIRONMENTS[-1] and "SLURM_JOB_ID" in os.environ and os.environ.get(names[0], "0") == "0"
    if is_job or (names[0] == "SLURM_PROCID" and os.environ.get("SLURM_STEP_ID") == _SHELL_STEP):
        # SLURM_NTASKS is the job's: its batch script has rank 0 of that many, and its shell none.
        if rank is None and world_size is None and num_tasks != "1":
            _log.warning(
                "rank 0 of 1: this process reads all data. SLURM_NTASKS is %s, but no step of the job started it. "
                "Start it with srun or torchrun, or give rank= and world_size=.", num_tasks,
            )  # fmt: skip
        names = _ENVIRONMENTS[0]
    if names[0] not in os.environ and _POD_INDEX in os.environ:
        names = [_POD_INDEX, names[1]]
    size = str(world_size or os.environ.get(names[1], "1")).strip()
    if rank is None and names[0] not in os.environ and size != "1":
        raise UsageError(
            f"rank: expected rank= or {names[0]} of the environment beside a world size of {size}, got none. Every "
            "rank would read the same data. Give rank= and world_size=, or make the loader after init_process_group."
        )
    values = []
    for argument, name, value, default in zip(("rank", "world_size"), names, (rank, world_size), ("0", "1")):
        text = os.environ.get(name, default) if value is None else value
        try:
            values.append(int(str(text)))  # No bool, no float.
        except ValueError:
            raise UsageError(
                f"{argument}: expected an integer, got {text!r} (the argument, or {name} in the environment)."
            ) from None
    rank, world_size = values
    # In a group they may be a data axis, whose size divides that of the group, or be the same.
    if group is not None and (group[1] % world_size or (world_size == group[1] and rank != group[0])):
        raise UsageError(
            f"rank, world_size: expected those of the process group, {group[0]} of {group[1]}, or of an axis of it, "
            f"got {rank} of {world_size}. Leave them out, or give the data axis' (with tensor parallelism)."
        )
    if not 0 <= rank < world_size <= MAX_WORLD_SIZE:
        raise UsageError(
            f"rank, world_size: expected 0 <= rank < world_size <= {MAX_WORLD_SIZE}, got rank {rank} of {world_size} "
            f"(arguments, or {names[0]} and {names[1]} in the environment)."
        )
    return rank, world_size


def process_group() -> tuple[int, int] | None:
    """(rank, world size) of the default group of torch.distributed, if the caller initialized it."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)  # PyTorch is not imported for this.
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def ranks_per_node(world_size: int) -> int:
    """Ranks that share a machine and its cache, by the environment; else 1."""
    text = next((os.environ[name] for name in _LOCAL_SIZES if name in os.environ), "1")
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    size = int(digits or 1)
    return size if 0 < size <= world_size and world_size % size == 0 else 1


def batch_sizes(
    batch_size: int | None, global_batch_size: int | Sequence[tuple[int, int]] | None, world_size: int
) -> BatchSizes:
    """The global batch of each run step, from a rank's or a global batch. Raises UsageError unless one is given."""
    if (batch_size is None) == (global_batch_size is None):
        raise UsageError(
            "batch size: expected one of batch_size (a rank's) and global_batch_size, got "
            f"{batch_size!r} and {global_batch_size!r}."
        )
    check_integer("batch_size", batch_size, 1)
    if batch_size is not None:
        return BatchSizes.of(int(batch_size) * world_size)
    assert global_batch_size is not None
    if not isinstance(global_batch_size, (list, tuple)):
        check_integer("global_batch_size", global_batch_size, 1)
    try:
        return BatchSizes.of(global_batch_size)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"global_batch_size: expected an integer or a list of (run step, size), got {global_batch_size!r}."
        ) from error


def token_dtype(dtype: Any, stored: str, vocab_size: int) -> np.dtype[Any]:
    """int64 or int32, for the token ids of a batch. Raises UsageError for others, or if U32 ids may not fit int32."""
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"dtype: expected int64 or int32, got {dtype!r}.") from error
    if checked not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise UsageError(f"dtype: expected int64 or int32, got {checked}. Labels of -100 need a signed type.")
    if checked == np.dtype(np.int32) and stored == "U32" and not 0 < vocab_size <= 1 << 31:
        raise UsageError(f"dtype: expected int64 for U32 tokens of a vocabulary of {vocab_size or '?'}, got int32.")
    return checked
