"""Runs on datasets that grow: a state of a dataset continues on one that extends it (`forebay prepare --extend`).

The epoch of the state is finished on the slices that it began with; the next epoch has all samples. In a mixture that
is so of each dataset by itself: an epoch is a pass through its samples. A dataset's lineage names what it extends, so
its slices belong to generations; owners are assigned to each generation by itself, and each is split into training and
validation by itself, so that appended data move no slice.

A state names the order of each dataset (`Order.shape`). A run continues in that order, also where the defaults of its
own batch sizes are others.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from forebay.arrays import I64, U8
from forebay.errors import StateError, UsageError
from forebay.order.plan import Order
from forebay.order.run import Run, assign_owners

State: TypeAlias = dict[str, Any]
_MAX = 1 << 40  # The largest number in a state.
Lineage: TypeAlias = Mapping[str, Any]  # What a manifest tells about the origin of its slices.


def ancestors(lineage: Lineage) -> dict[str, int]:
    """The ids of the datasets that a dataset extends, the first one first, and how many of its slices each has."""
    parent = lineage.get("parent")
    earlier = parent.get("ancestors", []) if isinstance(parent, dict) else []
    entries = [parent, *(earlier if isinstance(earlier, list) else [])]
    return {
        entry["id"]: entry["slices"]
        for entry in reversed(entries)
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and type(entry.get("slices")) is int
    }


def generations(lineage: Lineage, num_slices: int) -> list[tuple[int, int]]:
    """The slices [first, stop) of the first of a dataset's ancestors, then those that each descendant added."""
    starts = [size for size in ancestors(lineage).values() if 0 <= size <= num_slices]
    return list(pairwise(sorted({0, num_slices, *starts})))


def owners_of(hashes: U8, lineage: Lineage, workers: Sequence[str], slack: float | None) -> I64:
    """The worker that owns each slice, as `assign_owners` of each generation: appended slices move no others."""
    parts = [assign_owners(hashes[first:stop], workers, slack) for first, stop in generations(lineage, len(hashes))]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def grow(state: object, identity: State, run: Run, lineages: Sequence[Lineage]) -> tuple[Run, State, object]:
    """The run, the identity and the state to give to `step_of_state`, for a state of datasets or of what they extend.

    Args:
        identity, run: Of a run of the datasets alone, from `run_identity`.
        lineages: Of the manifest of each dataset.

    Returns:
        The run in the order of the state. `growth` of the identity and the state has, by the name of each dataset, the
        smaller ones that the run reads first: [id, shape, the epoch that is of the next one], ...

    Raises:
        StateError: If the state's order is malformed.
    """
    own = _by_name(identity["dataset_id"])
    ids = _by_name(state.get("dataset_id")) if isinstance(state, dict) else {}
    if not isinstance(state, dict) or not isinstance(ids, dict) or ids.keys() != own.keys():
        return run, identity, state  # `step_of_state` says what differs.
    sizes = [
        ancestors(lineage) | {own[name]: len(order.samples_per_slice)}
        for name, lineage, order in zip(own, lineages, run.orders)
    ]
    if state.get("version") != identity["version"] or any(str(ids[name]) not in of for name, of in zip(own, sizes)):
        return run, identity, state
    try:
        growth = {name: list(state.get("growth", {}).get(name, [])) for name in own}
        earlier = [
            [(epoch, _order_of(order, of[dataset_id], shape)) for dataset_id, shape, epoch in growth[name]]
            for name, order, of in zip(own, run.orders, sizes)
        ]
        epochs = [[0, *(epoch for epoch, _ in of)] for of in earlier]
        if any(type(stop) is not int or not start < stop < _MAX for of in epochs for start, stop in pairwise(of)):
            raise ValueError
        orders = [
            order if ids[name] == own[name] and order.is_fixed else _order_of(order, of[ids[name]], shape)
            for name, order, of, shape in zip(own, run.orders, sizes, state["order"], strict=True)
        ]
        if ids != own:
            before = run.of([order.after(of) for order, of in zip(orders, earlier)], state["streams"])
            for source, (name, epoch) in enumerate(zip(own, before.unread_epochs(state["step"]))):
                if ids[name] == own[name]:
                    continue
                if epoch > epochs[source][-1]:
                    growth[name].append([ids[name], orders[source].shape, epoch])
                    earlier[source].append((epoch, orders[source]))
                orders[source] = run.orders[source]
        grown = run.of([order.after(of) for order, of in zip(orders, earlier)], state["streams"])
    except (AttributeError, KeyError, TypeError, ValueError, UsageError) as error:
        raise StateError(
            f"loader state: expected a step, an order of each dataset, and growth from datasets that they extend, got "
            f"step {state.get('step')!r:.50}, order {state.get('order')!r:.200}, growth {state.get('growth')!r:.200} "
            f"({error!s:.200}). Use a state from state_dict()."
        ) from error
    if ids == own and grown.shape == run.shape and not any(growth.values()):
        return run, identity, state
    changed = {"growth": {name: of for name, of in growth.items() if of}, "streams": grown.streams}
    moved = {"dataset_id": identity["dataset_id"], "order": grown.shape["order"]} if ids != own else {}
    return grown, identity | changed | {"order": grown.shape["order"]}, state | changed | moved


def _by_name(dataset_id: Any) -> Any:
    return {"": dataset_id} if isinstance(dataset_id, str) else dataset_id


def _order_of(order: Order, num_slices: int, shape: Mapping[str, int]) -> Order:
    """The order of the first slices in a state's shape."""
    if shape.keys() != order.shape.keys() or not all(0 < int(number) < _MAX for number in shape.values()):
        raise ValueError(f"{shape}"[:99])
    return order.reshaped(**shape, num_slices=num_slices)
