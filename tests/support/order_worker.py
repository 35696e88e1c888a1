"""A process that reads a Loader and writes a line for each batch: `forks.py` starts it, tests kill it.

The settings are JSON, so that tests and processes open the same Loaders; see `open_loader`.
"""

import json
import os
import time
from typing import Any

import numpy as np

from forebay import DocumentSubset, Loader, Mixture, NetworkOptions, OrderOptions, SampleOptions


def open_loader(spec: dict, **more: Any) -> Loader[Any]:
    """`spec` has the Loader's arguments as JSON; `more` the arguments that are not."""
    arguments = {**spec, **more}
    if isinstance(arguments["dataset"], dict):
        arguments["dataset"] = Mixture(arguments["dataset"], [tuple(change) for change in arguments.pop("weights")])
    for name, kind in (("order", OrderOptions), ("network", NetworkOptions), ("samples", SampleOptions)):
        if isinstance(options := arguments.get(name), dict):
            if "documents" in options:
                options = {**options, "documents": DocumentSubset(**options["documents"])}
            if "worker_names" in options:
                options = {**options, "worker_names": tuple(options["worker_names"])}
            arguments[name] = kind(**options)
    return Loader(**arguments)


def describe(batch: Any, has_content: bool) -> dict:
    """A batch as JSON."""
    tensors = getattr(batch, "tensors", None)
    arrays = batch.arrays() if tensors is None else dict(sorted(tensors.items()))
    line = {
        "step": batch.step, "epoch": batch.epoch, "weight": batch.weight, "at": time.monotonic(),
        "ids": batch.sample_ids.tolist(), "sources": batch.dataset_index.tolist(),
        "rows": len(next(iter(arrays.values()))),
    }  # fmt: skip
    if has_content:
        names = arrays if tensors is not None else ["inputs", "labels", "document_ids", "position_ids"]
        values = [np.asarray(arrays[name]).tolist() for name in names if name in arrays]
        line["content"] = [list(row) for row in zip(*values)]
    return line


def write(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")  # One write: a kill tears no line.


def main(text: str) -> None:
    """One process. Settings: `loader`, `pause_s`."""
    settings = json.loads(text)
    with open_loader(settings["loader"]) as loader:
        write(ready=True, at=time.monotonic())
        for batch in loader:
            write(**describe(batch, False))
            time.sleep(settings["pause_s"])
        loader.close()  # Only then is it known of the last batches whether their use is on record.
        write(
            done=True, stats={name: value for name, value in loader.stats().items() if isinstance(value, (int, float))}
        )
