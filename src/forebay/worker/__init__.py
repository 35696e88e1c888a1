"""Workers: settings, data by name, a client that trains alone or with a coordinator, and the worker of leases.

    config = WorkerConfig(dataset_name="tiny_shakespeare", batch_size=16, seq_len=256)
    worker = WorkerClient(config)

Each name is imported on first use, so that the worker of leases imports none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.worker.catalog import list_available_datasets
    from forebay.worker.client import TrainingReport, WorkerClient
    from forebay.worker.config import WorkerConfig
    from forebay.worker.dummy import DummyDataset
    from forebay.worker.hub_data import HubDataset, create_huggingface_dataset

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
        raise AttributeError(f"module 'forebay.worker' has no attribute {name!r}")
    value = getattr(import_module(f"forebay.worker.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
