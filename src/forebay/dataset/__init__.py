"""The dataset: an immutable, content-addressed directory of SafeTensors slices. It knows no network."""

from forebay.dataset.adopt import adopt
from forebay.dataset.manifest import FORMAT_VERSION, Manifest, SliceInfo, SliceTable, dataset_id
from forebay.dataset.reader import Dataset, VerifyReport, open_dataset, verify_dataset
from forebay.dataset.slices import Slice, open_slice

__all__ = [
    "FORMAT_VERSION",
    "Dataset",
    "Manifest",
    "Slice",
    "SliceInfo",
    "SliceTable",
    "VerifyReport",
    "adopt",
    "dataset_id",
    "open_dataset",
    "open_slice",
    "verify_dataset",
]
