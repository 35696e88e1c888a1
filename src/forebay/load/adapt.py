"""What the adapters to frameworks share: a batch's arrays by name, and how long a pass is. No framework."""

from typing import Any

import numpy as np

from forebay.errors import UsageError
from forebay.load.batch import IGNORE_INDEX, Batch
from forebay.load.loader import Loader

STYLES = ("plain", "transformers")
_OPTIONAL = ("position_ids", "document_ids", "cu_seqlens", "sources")


def check_style(style: str) -> None:
    """Raises UsageError unless it is one of STYLES."""
    if style not in STYLES:
        raise UsageError(f"style: expected one of {', '.join(STYLES)}, got {style!r}.")


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
    """The state `steps` steps after `state`, which is this loader's. Arithmetic; an iteration is not disturbed.

    Raises:
        UsageError: If the run ends before.
    """
    return loader.state_at(state["step"] + steps - loader.state_at(0)["step"])


def steps_left(loader: Loader, state: dict[str, Any]) -> int | None:
    """Steps from `state` to the end of its epoch, or of the run; None if neither comes.

    Cost: some 40 states, by bisection: a tenth of a millisecond.
    """

    def inside(steps: int) -> bool:
        try:
            return bool(state_after(loader, state, steps)["epoch"] == state["epoch"])
        except UsageError:
            return False  # The run ends before.

    high = 1
    while inside(high):
        high *= 2
        if high > 1 << 48:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if inside(middle) else (low, middle)
    try:
        state_after(loader, state, high)
    except UsageError:
        return low
    return high
