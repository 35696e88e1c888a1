"""A batch's fields, and rows stacked into one."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from forebay.dataset.import_slices import import_slices
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import DocumentMasks, NumpyTokens, RowBatch, TokenBatch, new_batch
from forebay.load.batch_planner import make_collator
from forebay.load.collate import BatchArrays, MappedArray
from forebay.load.rows import plan_rows, stack_rows
from forebay.load.samples import plan_samples

Tensors = dict[str, NDArray[Any]]


FIELDS = {"epoch": 4, "step": 25, "epoch_step": 5, "sample_ids": np.arange(2)}


def test_the_fields_of_a_batch_of_tokens():
    inputs = np.zeros((2, 3), np.int64)
    labels = np.array([[1, 2, -100], [3, -100, -100]])
    batch = TokenBatch(inputs=inputs, labels=labels, **FIELDS)
    assert (
        batch.inputs is inputs and batch.labels is labels and (batch.weight, len(batch), batch.num_labels) == (1, 2, 3)
    )
    assert (batch.epoch, batch.step, batch.epoch_step) == (4, 25, 5) and batch.dataset_index.tolist() == [0, 0]
    for name in ("position_ids", "document_ids", "cu_seqlens", "max_seqlen"):
        with pytest.raises(UsageError, match=f"{name}: .* Open it with document_masks=True"):
            getattr(batch, name)
    with pytest.raises(AttributeError):
        batch.other = 1
    plain = batch.as_dict()
    assert plain["inputs"] is inputs and set(plain) == {
        "inputs", "labels", "sample_ids", "dataset_index", "epoch", "step", "epoch_step", "weight"
    }  # fmt: skip
    with pytest.raises(UsageError, match="style: expected one of"):
        batch.as_dict("other")
    copy = pickle.loads(pickle.dumps(batch))
    assert (copy.inputs == inputs).all() and copy.step == 25


def masked(edges: list[int]) -> NumpyTokens:
    inputs = np.arange(8).reshape(2, 4)
    masks = DocumentMasks(np.array(edges, np.int32), np.array([0, 1, 0, -1], np.int32), inputs.shape)
    labels = np.array([[1, -100, 3, -100], [-100, -100, -100, -100]])
    batch = new_batch(inputs, labels, {}, masks, **FIELDS)
    assert isinstance(batch, TokenBatch)
    return batch


def test_document_masks_and_the_names_of_transformers():
    batch = masked([0, 2, 4, 5, 8])
    assert batch.max_seqlen == 3 and batch.cu_seqlens.tolist() == [0, 2, 4, 5, 8] and batch.num_labels == 2
    assert batch.as_dict()["max_seqlen"] == 3 and batch.as_dict()["document_ids"] is batch.document_ids
    named = batch.as_dict("transformers")
    assert named.pop("labels").tolist() == [[-100, 1, -100, 3], [-100, -100, -100, -100]]
    assert named == {
        "input_ids": batch.inputs, "position_ids": batch.position_ids, "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens, "max_length_q": 3, "max_length_k": 3,
    }  # fmt: skip


def test_cu_seqlens_of_a_fixed_length():
    batch = masked([0, 2, 4, 5, 8]).pad_documents(6)
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 8, 8, 8] and batch.cu_seqlens.dtype == np.int32
    with pytest.raises(UsageError, match=r"max_documents: expected at least 4, .* got 3\. Give more"):
        masked([0, 2, 4, 5, 8]).pad_documents(3)


def test_the_fields_of_a_batch_of_rows():
    images = np.zeros((2, 3, 3), np.uint8)
    batch = new_batch(None, None, {"images": images}, **FIELDS)
    assert isinstance(batch, RowBatch) and batch["images"] is batch.inputs is images
    with pytest.raises(UsageError, match=r"batch\['labels'\]: expected one of \['images'\]"):
        _ = batch.labels
    labels = np.array([1, -100])
    learned = new_batch(images, labels, {"images": images}, **FIELDS)
    assert learned.labels is labels and learned.num_labels == 1
    assert "images=(2, 3, 3)" in repr(learned) and learned.as_dict("transformers").keys() == {"images", "labels"}


def stack_all(folder: Path, slices: list[Tensors], **settings: Any) -> BatchArrays:
    """All rows of several files as one batch, though they may differ where a dataset's may not."""
    created = []
    for i, tensors in enumerate(slices):
        (folder / str(i)).mkdir()
        save_file(tensors, folder / str(i) / "0.safetensors")
        created.append(import_slices(folder / str(i), str(i)))
    collator = make_collator([plan_samples(item, None) for item in created], **settings)
    for i, item in enumerate(created):
        collator.open(i, 0, item.open_slice(0))
    counts = [len(next(iter(tensors.values()))) for tensors in slices]
    plan = collator.plan(np.repeat(np.arange(len(slices)), counts), np.concatenate([np.arange(n) for n in counts]))
    return collator.make(plan, 0, sum(counts))


@pytest.mark.parametrize(
    "first, second",
    [
        ({"x": np.zeros((1, 2))}, {"y": np.zeros((1, 2))}),
        ({"x": np.zeros((1, 2))}, {"x": np.zeros((1, 2), np.float32)}),
        ({"x": np.zeros((1, 2, 2))}, {"x": np.zeros((1, 2, 3))}),
        ({"x": np.zeros((1, 2))}, {"x": np.zeros(1)}),
        ({"labels": np.zeros((1, 2), np.uint16)}, {"labels": np.zeros((1, 3), np.uint16)}),
    ],
)
def test_rows_that_do_not_go_together(first, second):
    sources = [{name: MappedArray(array, "") for name, array in tensors.items()} for tensors in (first, second)]
    plan = plan_rows(sources, np.arange(2), np.zeros(2, np.int64))
    with pytest.raises(DatasetError, match="rows of a batch"):
        stack_rows(plan, 0, 2, {"labels": -100})
