"""What the adapters to frameworks share: a batch's arrays by name, and how long a pass is. No framework."""

from typing import Any

import numpy as np

from forebay.load.batch import IGNORE_INDEX, Batch
from forebay.load.loader import Loader

STYLES = ("plain", "transformers")
_OPTIONAL = ("position_ids", "document_ids", "cu_seqlens", "sources")


def named_arrays(batch: Batch, style: str = "plain") -> dict[str, Any]:
    """A batch as a dict, nothing copied.

    "plain": `inputs`, `labels` and what there is of `position_ids`, `document_ids`, `cu_seqlens`, `sources`, or the
    tensors of layout `rows` by name; `sample_ids`; and as numbers `epoch`, `step`, `run_step`, `weight`.
    "transformers": `input_ids`, `labels`, `position_ids` if there are any, or the tensors of layout `rows`. Models of
    Hugging Face shift labels themselves, so `labels` are not shifted here: of L predictions the last is not learned.
    """
    plain = style == "plain"
    found: dict[str, Any]
    if batch.tensors:
        found = dict(batch.tensors)
        if batch._labels is not None:
            found.setdefault("labels", batch._labels)
    elif plain:
        found = {"inputs": batch.inputs, "labels": batch.labels}
    else:
        found = {"input_ids": batch.inputs, "labels": _unshifted(batch)}
    for name in _OPTIONAL if plain else _OPTIONAL[:1]:
        value = getattr(batch, name)
        if value is not None:
            found[name] = value
    if plain:
        found["sample_ids"], found["epoch"] = batch.sample_ids, batch.epoch
        found["step"], found["run_step"], found["weight"] = batch.step, batch.run_step, batch.weight
    return found


def _unshifted(batch: Batch) -> Any:
    """[B, L]: at position i + 1 what position i should predict. Position 0 is what nobody predicts."""
    if batch.document_ids is None:
        return batch.inputs
    labels = np.full_like(batch.labels, IGNORE_INDEX)
    labels[:, 1:] = batch.labels[:, :-1]
    return labels


def state_after(loader: Loader, state: dict[str, Any], steps: int) -> dict[str, Any]:
    """The state `steps` steps after `state`, which is this loader's. Arithmetic; an iteration is not disturbed."""
    return loader.state_at(state["step"] + steps - loader.state_at(0)["step"])


def steps_left(loader: Loader, state: dict[str, Any]) -> int | None:
    """Steps from `state` to the end of its epoch, or of the run; None if neither comes."""
    run, step = loader.run, int(state["step"])
    if run.num_steps is not None and step >= run.num_steps:
        return 0
    end = run.num_steps if run.weights is not None else run.epoch_of(step, 0)[1]
    return None if end is None else end - step
