"""A Loader's state: what resumes it exactly, in a few hundred bytes of plain JSON.

Epoch, samples taken of it and run step are the position; the rest must agree for them to mean the same samples. A state
contains no rank, world size or helper process. Weights of a mixture and batch sizes may differ from the state's step
on, not before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.base import Json
from forebay.dataset.reader import Dataset
from forebay.errors import StateError, UsageError
from forebay.load.samples import SampleIndex
from forebay.order.run import Run

STATE_VERSION = 6


def run_identity(run: Run, datasets: Mapping[str, Dataset], indexes: Sequence[SampleIndex], seed: int) -> Json:
    """What decides a run's samples at every step. Plain JSON values."""
    mixed = run.weights is not None
    ids = {name: dataset.id for name, dataset in datasets.items()}
    return {
        "version": STATE_VERSION,
        "dataset_id": ids if mixed else next(iter(ids.values())),
        "seed": seed,
        "seq_len": indexes[0].seq_len,
        **indexes[0].describe(),
        **({"datasets": list(ids), "documents": [of.describe()["documents"] for of in indexes]} if mixed else {}),
        **run.shape,
        "growth": {},
    }


def make_state(identity: Mapping[str, Any], run: Run, step: int) -> Json:
    """The state before run step `step`."""
    progress = run.progress(step)
    return {
        **identity,
        "global_batch_size": _sizes(run, step),
        **({} if run.weights is None else {"weights": run.weights.digest(step)}),
        "epoch": progress.epoch,
        "samples_taken": progress.samples_taken,
        "step": step,
    }


def step_of_state(state: object, identity: Mapping[str, Any], run: Run) -> int:
    """The run step before which a state was taken. Raises StateError if it is not one of this run."""
    state = check_kind(state, "Loader")
    _check_same("version", identity["version"], state.get("version"))
    for name in ("epoch", "samples_taken", "step"):
        number = state.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateError(f"loader state: expected {name} an integer from 0, got {number!r}.")
    step = int(state["step"])
    for name, value in {**identity, "global_batch_size": _sizes(run, step)}.items():
        _check_same(name, value, state.get(name))
    if run.weights is not None and state.get("weights") != run.weights.digest(step):
        raise StateError(
            f"loader state: its weights until step {step} are not this mixture's. Resuming would change the order of "
            "the data. Change weights from a later step on, or start a new run."
        )
    try:
        progress = run.progress(step)
    except UsageError as error:
        raise StateError(f"loader state: {error}") from error
    if (progress.epoch, progress.samples_taken) != (state["epoch"], state["samples_taken"]):
        raise StateError(
            f"loader state: expected epoch {progress.epoch} and samples_taken {progress.samples_taken} at step {step}, "
            f"got {state['epoch']} and {state['samples_taken']}. Use a state from state_dict()."
        )
    return step


_MARKS = {"Loader": "dataset_id", "TextStream": "lane_states"}
"""A key that only the state of an object has."""


def check_kind(state: object, kind: str) -> Json:
    """Return a state of this kind. Raises StateError for one of another kind, and for what holds it."""
    if not isinstance(state, dict):
        raise StateError(f"{kind} state: expected a dict from state_dict(), got {type(state).__name__}.")
    if _MARKS[kind] not in state:
        inside = [key for key, value in state.items() if isinstance(value, dict) and _MARKS[kind] in value]
        advice = [f"Did you mean state[{key!r}]?" for key in inside]
        advice += [f"Load it into a {other}." for other, mark in _MARKS.items() if mark in state]
        advice += ["Load it into an object of the kind that wrote it."]
        got = str(list(state))[:200]
        raise StateError(f"{kind} state: expected one of its state_dict(), got the keys {got}. {advice[0]}")
    return state


def _sizes(run: Run, step: int) -> Any:
    changes = run.batches.before(max(step, 1))
    return changes[0][1] if len(changes) == 1 else [list(change) for change in changes]


def _check_same(name: str, expected: Any, actual: Any) -> None:
    if actual != expected or type(actual) is not type(expected):
        advice = {
            "version": "Resume with the release of Forebay that wrote the state",
            "dataset_id": "Open the dataset that the state was taken of",
            "datasets": "Name the mixture's datasets in that order",
            "order": "Leave lanes and window_bytes out",
        }.get(name, f"Open the loader with {name}={actual!r}")
        raise StateError(
            f"loader state: expected {name} {expected!r}, got {actual!r}. Resuming would change the order of the data. "
            f"{advice}, or start a new run."
        )
