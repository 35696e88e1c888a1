"""What trains: settings, data by name, a client with or without a coordinator, and the worker that leases slices.

    config = WorkerConfig(dataset_name="tiny_shakespeare", batch_size=16, seq_len=256)
    worker = WorkerClient(config)

Each name is loaded when it is first used, so that the worker that leases pays for none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.worker.catalog import list_available_datasets
    from millrace.worker.client import TrainingReport, WorkerClient
    from millrace.worker.config import WorkerConfig
    from millrace.worker.dummy import DummyDataset
    from millrace.worker.hub_data import HubDataset, create_huggingface_dataset

__all__ = [
    "DummyDataset", "HubDataset", "TrainingReport", "WorkerClient", "WorkerConfig", "create_huggingface_dataset",
    "list_available_datasets",
]  # fmt: skip

_HOME = {
    "DummyDataset": "dummy",
    "HubDataset": "hub_data",
    "TrainingReport": "client",
    "WorkerClient": "client",
    "WorkerConfig": "config",
    "create_huggingface_dataset": "hub_data",
    "list_available_datasets": "catalog",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'millrace.worker' has no attribute {name!r}")
    value = getattr(import_module(f"millrace.worker.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
