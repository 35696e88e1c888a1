"""See `forebay.worker.hub_data`, `forebay.worker.catalog` and `forebay.worker.batches`."""

from forebay.worker.batches import DummyDataset
from forebay.worker.catalog import list_available_datasets
from forebay.worker.hub_data import create_huggingface_dataset

__all__ = ["DummyDataset", "create_huggingface_dataset", "list_available_datasets"]
