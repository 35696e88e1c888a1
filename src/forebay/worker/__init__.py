"""Workers: settings, data by name, a client that trains alone or with a coordinator, and the worker of leases.

    config = WorkerConfig(dataset_name="tiny_shakespeare", batch_size=16, seq_len=256)
    worker = WorkerClient(config)

Each name is imported on first use, so that the worker of leases imports none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.worker.batches import DummyDataset
    from forebay.worker.catalog import list_available_datasets
    from forebay.worker.client import TrainingReport, WorkerClient
    from forebay.worker.config import WorkerConfig
    from forebay.worker.hub_data import HubDataset, create_huggingface_dataset

__all__ = [
    "DummyDataset", "HubDataset", "TrainingReport", "WorkerClient", "WorkerConfig", "create_huggingface_dataset",
    "list_available_datasets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module in ("config", "catalog", "batches", "hub_data", "client") if name in __all__ else ():
        if hasattr(imported := import_module(f"forebay.worker.{module}"), name):
            return getattr(imported, name)
    raise AttributeError(f"module 'forebay.worker' has no attribute {name!r}")
