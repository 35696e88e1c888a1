"""Sample indexes and collators against a reference of loops over lists."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, UsageError
from forebay.load import packing
from forebay.load.batch_planner import make_collator
from forebay.load.collate import BatchArrays
from forebay.load.packing import DocumentSubset
from forebay.load.samples import SampleIndex, plan_samples
from support.reference_samples import MANY, SLICES, Sample, samples_of, to_lists, write_slices

SEQ_LEN = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return write_slices(tmp_path_factory.mktemp("data") / "documents", SLICES)


def batch_parts(batch: BatchArrays) -> tuple:
    """(inputs, labels, tensors, document_ids, position_ids, cu_seqlens)."""
    masks = batch.masks
    return (*batch[:3], *((None,) * 3 if masks is None else (masks.document_ids, masks.position_ids, masks.cu_seqlens)))


def everything(dataset: Dataset, sample_index: SampleIndex, **settings: Any) -> tuple:
    """All samples of an index as one batch, by slice."""
    collator = make_collator([sample_index], **settings)
    for index in range(dataset.num_slices):
        collator.open(index, index, dataset.open_slice(index))
    keys = np.repeat(np.arange(len(sample_index.counts)), sample_index.counts)
    samples = np.concatenate([np.arange(count) for count in sample_index.counts])
    plan = collator.plan(keys, samples)
    for index in range(dataset.num_slices):
        collator.close(index)
    return batch_parts(collator.make(plan, 0, len(keys)))


filters = st.builds(
    DocumentSubset, st.lists(st.integers(0, 13), max_size=5), st.integers(0, 15), st.none() | st.integers(15, 40)
)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Dataset:
    """Slices of more documents than are read at once; some are empty."""
    return write_slices(tmp_path_factory.mktemp("data") / "many", MANY)


def reference(slices: Any, documents: DocumentSubset | None, seq_len: int, **settings: Any) -> list[Sample]:
    filters = {} if documents is None else {
        "exclude": documents.numbers.tolist(), "min_tokens": documents.min_tokens, "max_tokens": documents.max_tokens
    }  # fmt: skip
    return list(samples_of(to_lists(slices), seq_len, **filters, **settings).values())


@given(
    st.none() | filters | st.builds(DocumentSubset, st.lists(st.integers(0, 370), max_size=60), st.integers(0, 9)),
    st.booleans(),
    st.sampled_from([("concat", False), ("concat", True), ("best_fit", True)]),
    st.sampled_from([None, 0, 7]),
    st.sampled_from([np.int64, np.int32]),
    st.integers(1, 14),
)
def test_samples_are_those_of_the_reference(
    dataset, many, documents, is_many,
    kind, pad_id, dtype, seq_len,
):  # fmt: skip
    packing, masks = kind
    item, slices = (many, MANY) if is_many else (dataset, SLICES)
    expected = reference(slices, documents, seq_len, packing=packing, masks=masks, pad_id=pad_id or 0)
    try:
        index = plan_samples(item, seq_len, packing=packing, documents=documents)
    except UsageError:
        assert not expected
        return
    num_kept = len(reference(slices, documents, 1))
    assert index.tail_tokens == (num_kept - seq_len * len(expected) if packing == "concat" else 0)
    padding = {"pad_id": pad_id} if packing == "best_fit" else {}
    batch = everything(item, index, document_masks=masks, dtype=dtype, **padding)
    inputs, labels, _, numbers, positions, edges = batch
    assert inputs.dtype == labels.dtype == dtype and inputs.tolist() == [row.inputs for row in expected]
    assert labels.tolist() == [row.labels for row in expected]
    if not masks:
        assert numbers is positions is edges is None
        return
    assert (numbers.dtype, positions.dtype, edges.dtype) == (np.int64, np.int64, np.int32)
    assert numbers.tolist() == [row.document_ids for row in expected]
    assert positions.tolist() == [row.position_ids for row in expected]
    assert edges.tolist() == [*np.flatnonzero(positions.reshape(-1) == 0), inputs.size]


@given(st.none() | filters, st.integers(1, 40))
def test_sections_of_a_fit_have_every_kept_token_once(dataset, documents, size):
    expected = reference(SLICES, documents, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SECTION_ROWS", 0)
        patch.setattr(packing, "_MIN_SECTION_TOKENS", size)
        try:
            index = plan_samples(dataset, SEQ_LEN, packing="best_fit", documents=documents)
        except UsageError:
            assert not expected
            return
        inputs, _, _, numbers, _, _ = everything(dataset, index)
    assert sorted(inputs[numbers >= 0].tolist()) == [token for row in expected for token in row.inputs]
    assert len(index.sections) == sum(-(-len(tokens) // size) for tokens, _ in to_lists(SLICES))
    assert index.sections.sum() == index.num_samples == len(inputs)


@given(st.floats(0, 1), st.sampled_from(["concat", "best_fit"]), st.none() | filters)
def test_splits_are_exact_disjoint_and_together_all(dataset, validation, packing, documents):
    def ids(split):
        try:
            settings = {} if split is None else {"split": split, "validation": validation}
            sample_index = plan_samples(dataset, SEQ_LEN, packing=packing, documents=documents, **settings)
        except UsageError:
            return []
        slices = np.repeat(np.arange(len(sample_index.counts)), sample_index.counts)
        samples = np.concatenate([np.arange(count) for count in sample_index.counts])
        return ((sample_index.bases + sample_index.offsets)[slices] + samples).tolist()

    full, train, held_out = ids(None), ids("train"), ids("validation")
    assert full == list(range(len(full)))
    assert len(held_out) == round(validation * len(full))
    assert sorted([*train, *held_out]) == full


def test_a_split_reads_few_slices_and_a_longer_one_contains_a_shorter(tmp_path):
    many = write_slices(tmp_path / "many", [([60], 0)] * 50)
    taken = set()
    for part in (0.01, 0.1, 0.3):
        sample_index = plan_samples(many, SEQ_LEN, split="validation", validation=part)
        used = set(np.flatnonzero(sample_index.counts).tolist())
        assert taken <= used and len(used) == -(-round(part * 500) // 10)
        taken = used
    assert taken != set(range(len(taken)))


def test_slices_of_different_types_are_refused(tmp_path):
    datasets = [write_slices(tmp_path / dtype, SLICES, dtype) for dtype in ("uint16", "uint32")]
    collator = make_collator([plan_samples(dataset, SEQ_LEN) for dataset in datasets])
    for i, dataset in enumerate(datasets):
        collator.open(5 * i, 0, dataset.open_slice(0))
    with pytest.raises(DatasetError, match=r"expected one type in all slices, got .*uint16.*uint32"):
        collator.plan(np.array([0, 5]), np.zeros(2, np.int64))


def test_indexes_that_do_not_go_together_are_refused(dataset, tmp_path):
    concat, fit = plan_samples(dataset, SEQ_LEN), plan_samples(dataset, SEQ_LEN, packing="best_fit")
    save_file({"images": np.zeros((4, 2))}, tmp_path / "0.safetensors")
    images = import_slices(tmp_path, "rows")
    for wrong in ({"packing": "best_fit"}, {"documents": DocumentSubset([1])}):
        with pytest.raises(UsageError, match="layout 'tokens'"):
            plan_samples(images, None, **wrong)
    rows = plan_samples(images, None, split="train", validation=0.25)
    assert rows.counts.tolist() == [3] and rows.offsets.tolist() == [1]
    for indexes, options in (
        ([concat, rows], {}),
        ([concat, fit], {}),
        ([rows], {"document_masks": True}),
    ):
        with pytest.raises(UsageError):
            make_collator(indexes, **options)


def test_a_slice_or_sample_outside_the_index_is_refused(dataset):
    sample_index = plan_samples(dataset, SEQ_LEN, split="train", validation=0.4)
    none = np.empty(0, np.int64)
    for masks in (False, True):
        collator = make_collator([sample_index], document_masks=masks)
        assert collator.make(collator.plan(none, none), 0, 0)[0].shape == (0, SEQ_LEN)
        for key, index in ((1, 0), (5, 0), (-1, -1)):
            with pytest.raises(UsageError, match="slice key"):
                collator.open(key, index, dataset.open_slice(0))
        with pytest.raises(DatasetError, match="verify"):
            collator.open(3, 3, dataset.open_slice(0))
        with pytest.raises(DatasetError, match="open slice"):
            collator.plan(np.zeros(1, np.int64), np.zeros(1, np.int64))
        collator.open(3, 3, dataset.open_slice(3))
        with pytest.raises(DatasetError, match="expected one of"):
            collator.plan(np.array([3]), sample_index.counts[3:4])
    with pytest.raises(UsageError, match="pad_id"):
        make_collator([sample_index], document_masks=True, pad_id=1 << 16).open(3, 3, dataset.open_slice(3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"packing": "best"},
        {"split": "test", "validation": 0.1},
        {"split": "train", "validation": 1.1},
        {"split": "train", "validation": float("nan")},
        {"split": "train", "validation": 1.0},
        {"split": "validation"},
        {"validation": 0.1},
        {"documents": [1, 2]},
        {"documents": DocumentSubset(min_tokens=1000)},
        {"seq_len": None},
        {"seq_len": 1000},
    ],
)
def test_wrong_settings(dataset, wrong):
    settings = {"seq_len": SEQ_LEN, **wrong}
    with pytest.raises(UsageError):
        plan_samples(dataset, settings.pop("seq_len"), **settings)
