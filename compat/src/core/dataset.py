"""See `millrace.worker.hub_data`, `millrace.worker.catalog` and `millrace.worker.dummy`."""

from millrace.worker.catalog import list_available_datasets
from millrace.worker.dummy import DummyDataset
from millrace.worker.hub_data import create_huggingface_dataset

__all__ = ["DummyDataset", "create_huggingface_dataset", "list_available_datasets"]
