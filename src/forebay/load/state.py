"""A loader's state: what resumes it exactly, in a few hundred bytes of plain JSON.

Three numbers say where it stands: epoch, samples taken of it, and run step. The rest is what must agree for them to
mean the same samples. No rank, no world size and no helper process is in it. What changes at later steps (weights of
a mixture, batch sizes) may differ from when the state was taken: only what was before it must agree.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.dataset.reader import Dataset
from forebay.errors import StateError, UsageError
from forebay.load.samples import View
from forebay.order.run import Run

STATE_VERSION = 3


def identity_of(
    run: Run, datasets: Mapping[str, Dataset], views: Sequence[View], seed: int, drop_last: bool
) -> dict[str, Any]:
    """What decides a run's samples whatever the step. Plain JSON values."""
    orders = run.orders
    first = orders[0]
    mixed = run.weights is not None
    return {
        "version": STATE_VERSION,
        "dataset_id": {name: one.id for name, one in datasets.items()} if mixed else next(iter(datasets.values())).id,
        "seed": seed,
        "seq_len": views[0].seq_len,
        **views[0].describe(),
        **({"documents": [view.describe()["documents"] for view in views]} if mixed else {}),
        "shuffle": first.shuffle,
        "drop_last": drop_last,
        "lanes": [order.num_lanes for order in orders] if mixed else first.num_lanes,
        "window": [order.window_samples for order in orders] if mixed else first.window_samples,
        "head": [order.head_samples for order in orders] if mixed else first.head_samples,
    }


def make_state(identity: Mapping[str, Any], run: Run, step: int) -> dict[str, Any]:
    """The state before run step `step`."""
    place = run.progress(step)
    return {
        **identity,
        "global_batch_size": _sizes(run, step),
        **({} if run.weights is None else {"weights": run.weights.digest(step)}),
        "epoch": place.epoch,
        "samples_taken": place.samples_taken,
        "step": step,
    }


def step_of_state(state: object, identity: Mapping[str, Any], run: Run) -> int:
    """The run step before which `state` was taken."""
    if not isinstance(state, dict):
        raise StateError(f"loader state: expected a dict from state_dict(), got {type(state).__name__}.")
    if "version" not in state or "dataset_id" not in state:
        raise StateError(
            f"loader state: expected one from a Loader's state_dict(), got the keys {str(list(state))[:200]}. Give it "
            "to an object of the kind it was taken of: a TextStream, or a DataLoader with as many workers."
        )
    for name, value in identity.items():
        _same(name, value, state.get(name))
    for name in ("epoch", "samples_taken", "step"):
        number = state.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateError(f"loader state: expected {name} an integer from 0, got {number!r}.")
    step = state["step"]
    _same("global_batch_size", _sizes(run, step), state.get("global_batch_size"))
    if run.weights is not None and state.get("weights") != run.weights.digest(step):
        raise StateError(
            f"loader state: expected the mixture's weights until step {step} as they are here, got others. Resuming "
            "would change the order of the data. Change weights from a later step on, or start anew."
        )
    try:
        place = run.progress(step)
    except UsageError as error:
        raise StateError(f"loader state: {error}") from error
    if (place.epoch, place.samples_taken) != (state["epoch"], state["samples_taken"]):
        raise StateError(
            f"loader state: expected epoch {place.epoch} and samples_taken {place.samples_taken} at step {step}, got "
            f"{state['epoch']} and {state['samples_taken']}. Take the state from state_dict()."
        )
    return int(step)


def _sizes(run: Run, step: int) -> Any:
    """The batch sizes before a step: the one size, or the list of changes."""
    changes = run.batches.before(max(step, 1))
    return changes[0][1] if len(changes) == 1 else [list(change) for change in changes]


def _same(name: str, expected: Any, got: Any) -> None:
    if got != expected or type(got) is not type(expected):
        step = {
            "version": "Resume with the release of Forebay that wrote the state",
            "dataset_id": "Open the dataset that the state was taken of",
        }.get(name, f"Open the loader with {name}={got!r}")
        raise StateError(
            f"loader state: expected {name} {expected!r}, got {got!r}. Resuming would change the order of the data. "
            f"{step}, or start anew."
        )
