"""Stores of task tests, and an engine that keeps results as a run does."""

from collections.abc import Callable, Sequence
from typing import Any

from forebay.prepare.progress import name_of
from forebay.prepare.results import Committing
from forebay.storage.store import Store


def contents(store: Store, folder: str = "") -> dict[str, bytes]:
    """The objects below a name, without the results of tasks."""
    names = store.sizes(f"{folder}/" if folder else "")
    return {name: store.read(name) for name in names if not name.startswith("done/")}


def resuming(store: Store, scale: int = 0) -> Callable[[Callable[[Any, int], Any], Sequence], list]:
    """Maps in this process; tasks whose results are in the store are not run."""

    def map(run, tasks):
        commit = Committing(store, run)
        names = [name_of(task) for task in tasks]
        done = commit.load(names)
        for task, name in zip(tasks, names):
            if name not in done:
                done[name] = commit(task, scale)[0]
        return [done[name] for name in names]

    return map
