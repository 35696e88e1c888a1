"""A batch as PyTorch has it: the only other file here that imports PyTorch beside the models."""

from __future__ import annotations

from typing import Any

import torch

from forebay.load.batch import Batch


def as_tensors(batch: Batch) -> tuple[Any, Any]:
    """(inputs, labels), int64 [B, L], on the memory of the batch."""
    return torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
