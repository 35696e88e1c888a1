"""Sample indexes and collators against an oracle that reads all tokens of a dataset into lists."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, UsageError
from forebay.load import packing
from forebay.load import tokens as tokens_module
from forebay.load.batch_planner import make_collator
from forebay.load.collate import BatchArrays
from forebay.load.packing import DocumentSubset
from forebay.load.rows import RowCollator
from forebay.load.samples import SampleIndex, plan_samples
from forebay.load.tokens import TokenCollator

law = settings(deadline=None, max_examples=60)
SEQ_LEN = 6
# Tokens of the documents that end in each slice, and of one that goes on. Document 6 lies in slices 1, 2 and 3.
SLICES = (([5, 14, 1], 3), ([2, 6, 9], 7), ([], 11), ([4, 4, 30, 13], 0), ([8], 2))


def write(folder: Path, dtype: Any = np.uint16, slices: Any = SLICES, first: int = 0) -> Dataset:
    """Token k of the dataset is k + first: so every token is known by its value."""
    folder.mkdir()
    for i, (sizes, rest) in enumerate(slices):
        stops = np.cumsum(np.array(sizes, np.uint64), dtype=np.uint64)
        length = sum(sizes) + rest
        tokens = np.arange(first, first + length, dtype=dtype)
        save_file({"tokens": tokens, "document_ends": stops}, folder / f"{i}.safetensors")
        first += length
    return import_slices(folder, folder.name)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write(tmp_path_factory.mktemp("data") / "documents")


def documents_of(slices: Any = SLICES) -> list[list[int]]:
    """The document of each token, slice by slice."""
    number, result = 0, []
    for sizes, rest in slices:
        mine = []
        for size in sizes:
            mine += [number] * size
            number += 1
        result.append([*mine, *[number] * rest])
    return result


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def kept_tokens(documents: DocumentSubset | None, slices: Any = SLICES) -> list[list[int]]:
    """The tokens of each slice that a filter leaves, by the definition."""
    owners = documents_of(slices)
    sizes: dict[int, int] = {}
    for owner in flat(owners):
        sizes[owner] = sizes.get(owner, 0) + 1
    excluded = set() if documents is None else set(documents.numbers.tolist())
    result, token = [], 0
    for mine in owners:
        retained = []
        for owner in mine:
            invalid = documents is not None and (
                owner in excluded
                or sizes[owner] < documents.min_tokens
                or (documents.max_tokens is not None and sizes[owner] > documents.max_tokens)
            )
            if not invalid:
                retained.append(token)
            token += 1
        result.append(retained)
    return result


def parts_of(batch: BatchArrays) -> tuple[Any, ...]:
    """(inputs, labels, tensors, document_ids, position_ids, cu_seqlens)."""
    masks = batch.masks
    return (*batch[:3], *((None,) * 3 if masks is None else (masks.document_ids, masks.position_ids, masks.cu_seqlens)))


def everything(dataset: Dataset, sample_index: SampleIndex, **settings: Any) -> tuple[Any, ...]:
    """All samples of an index as one batch, by slice."""
    collator = make_collator([sample_index], **settings)
    for index in range(dataset.num_slices):
        collator.open(index, index, dataset.open_slice(index))
    keys = np.repeat(np.arange(len(sample_index.counts)), sample_index.counts)
    samples = np.concatenate([np.arange(count) for count in sample_index.counts])
    plan = collator.plan(keys, samples)
    for index in range(dataset.num_slices):
        collator.close(index)
    return parts_of(collator.make(plan, 0, len(keys)))


filters = st.builds(
    DocumentSubset, st.lists(st.integers(0, 13), max_size=5), st.integers(0, 15), st.none() | st.integers(15, 40)
)


@law
@given(st.none() | filters, st.booleans())
def test_chunk_is_the_kept_stream_of_each_slice(
    dataset: Dataset, documents: DocumentSubset | None, masks: bool
) -> None:
    check_chunk(dataset, SLICES, documents, masks)


MANY = tuple(
    (np.random.default_rng(seed).integers(0, 20, num_documents).tolist(), rest)
    for seed, (num_documents, rest) in enumerate(((300, 3), (0, 40), (65, 0)))
)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Slices of more documents than are read at once; some are empty."""
    return write(tmp_path_factory.mktemp("data") / "many", slices=MANY)


@settings(deadline=None, max_examples=20)
@given(
    st.none() | st.builds(DocumentSubset, st.lists(st.integers(0, 370), max_size=60), st.integers(0, 9)), st.booleans()
)
def test_chunk_of_many_documents(many: Dataset, documents: DocumentSubset | None, masks: bool) -> None:
    check_chunk(many, MANY, documents, masks)


def check_chunk(dataset: Dataset, slices: Any, documents: DocumentSubset | None, masks: bool) -> None:
    """All samples, against a loop over lists of tokens."""
    retained = kept_tokens(documents, slices)
    try:
        sample_index = plan_samples(dataset, SEQ_LEN, documents=documents)
    except UsageError:
        assert all(len(tokens) < SEQ_LEN for tokens in retained)
        return
    assert sample_index.counts.tolist() == [len(tokens) // SEQ_LEN for tokens in retained]
    assert sample_index.tail_tokens == sum(len(tokens) % SEQ_LEN for tokens in retained)
    inputs, labels, _, numbers, positions, edges = everything(dataset, sample_index, document_masks=masks)
    owners = flat(documents_of(slices))
    row = 0
    for tokens in retained:
        for i in range(len(tokens) // SEQ_LEN):
            chunk = tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN]
            following = [*tokens, -100][i * SEQ_LEN + 1 : (i + 1) * SEQ_LEN + 1]
            if masks:
                following = [b if b >= 0 and owners[a] == owners[b] else -100 for a, b in zip(chunk, following)]
            assert (inputs[row].tolist(), labels[row].tolist()) == (chunk, following)
            row += 1
    if masks:
        check_masks(inputs, labels, numbers, positions, edges, pad_id=0, slices=slices)
    else:
        assert numbers is positions is edges is None


def check_masks(
    inputs: Any, labels: Any, numbers: Any, positions: Any, edges: Any, pad_id: int, slices: Any = SLICES
) -> None:
    """Document numbers, positions and edges tell the same of where documents are."""
    owners = flat(documents_of(slices))
    assert edges.dtype == np.int32 and edges[0] == 0 and edges[-1] == inputs.size
    assert numbers.dtype == positions.dtype == np.int32 and inputs.dtype == labels.dtype
    begins = [
        row * SEQ_LEN + index
        for row in range(len(inputs))
        for index in range(SEQ_LEN)
        if index == 0 or numbers[row, index] != numbers[row, index - 1]
    ]
    assert edges[:-1].tolist() == begins
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        row, index = divmod(begin, SEQ_LEN)
        run = slice(index, index + end - begin)
        assert positions[row, run].tolist() == list(range(end - begin))
        if numbers[row, index] < 0:
            assert (inputs[row, run] == pad_id).all() and (labels[row, run] == -100).all()
            continue
        tokens = inputs[row, run].tolist()
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert len({owners[token] for token in tokens}) == 1
        assert labels[row, run][:-1].tolist() == tokens[1:]
        last = labels[row, run][-1]
        assert last == -100 or (last == tokens[-1] + 1 and owners[last] == owners[tokens[-1]])
    for row in numbers.tolist():
        real = [number for number in row if number >= 0]
        assert sorted(set(real)) == list(range(max(real) + 1)) and row == [*real, *[-1] * (SEQ_LEN - len(real))]


@law
@given(st.none() | filters, st.sampled_from([None, 0, 7]), st.sampled_from([np.int64, np.int32]))
def test_fit_has_every_kept_token_once(
    dataset: Dataset, documents: DocumentSubset | None, pad_id: int | None, dtype: type
) -> None:
    retained = kept_tokens(documents)
    try:
        sample_index = plan_samples(dataset, SEQ_LEN, packing="best_fit", documents=documents)
    except UsageError:
        assert not any(retained)
        return
    inputs, labels, _, numbers, positions, edges = everything(dataset, sample_index, pad_id=pad_id, dtype=dtype)
    assert sorted(inputs[numbers >= 0].tolist()) == flat(retained)
    assert sample_index.tail_tokens == 0
    check_masks(inputs, labels, numbers, positions, edges, pad_id or 0)


@law
@given(st.none() | filters, st.integers(1, 40))
def test_fit_packs_the_documents_that_end_in_a_section(
    dataset: Dataset, documents: DocumentSubset | None, size: int
) -> None:
    owners, first = documents_of(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SECTION_ROWS", 0)
        patch.setattr(packing, "_MIN_SECTION_TOKENS", size)
        try:
            sample_index = plan_samples(dataset, SEQ_LEN, packing="best_fit", documents=documents)
        except UsageError:
            return
        inputs, labels, _, numbers, positions, edges = everything(dataset, sample_index)
    check_masks(inputs, labels, numbers, positions, edges, pad_id=0)
    row, samples = 0, iter(sample_index.sections.tolist())
    for mine, tokens in zip(owners, kept_tokens(documents)):
        last_of = {owner: first + i for i, owner in enumerate(mine)}
        for section in range(-(-len(mine) // size)):
            start, stop = first + section * size, first + (section + 1) * size
            expected = [token for token in tokens if start <= last_of[mine[token - first]] < stop]
            count = next(samples)
            rows = slice(row, row + count)
            assert sorted(inputs[rows][numbers[rows] >= 0].tolist()) == expected
            row += count
        first += len(mine)
    assert row == sample_index.num_samples and next(samples, None) is None


def test_a_plan_is_read_in_any_order(dataset: Dataset) -> None:
    """A plan copies rows ahead."""
    sample_index = plan_samples(dataset, SEQ_LEN)
    expected = everything(dataset, sample_index, document_masks=True)
    collator = make_collator([sample_index], document_masks=True)
    for index in range(dataset.num_slices):
        collator.open(index, index, dataset.open_slice(index))
    keys = np.repeat(np.arange(dataset.num_slices), sample_index.counts)
    plan = collator.plan(keys, np.concatenate([np.arange(count) for count in sample_index.counts]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "_READ_TOKENS", 4 * (SEQ_LEN + 1))
        for start, stop in ((0, 2), (2, 4), (3, 6), (0, 1), (4, 4), (1, 9), (len(keys) - 1, len(keys))):
            batch = parts_of(collator.make(plan, start, stop))
            assert all((made == whole[start:stop]).all() for made, whole in zip(batch[:2], expected[:2]))
            assert (batch[3] == expected[3][start:stop]).all() and (batch[4] == expected[4][start:stop]).all()


def test_fit_has_a_label_for_every_token_but_the_last_of_a_document(dataset: Dataset) -> None:
    sample_index = plan_samples(dataset, SEQ_LEN, packing="best_fit")
    _, labels, _, numbers, _, _ = everything(dataset, sample_index)
    owners = documents_of()
    # One token without a label for each document in each slice, also where it is cut into several rows.
    assert (labels[numbers >= 0] == -100).sum() == sum(len(set(mine)) for mine in owners)
    assert max(mine.count(owner) for mine in owners for owner in mine) > 3 * SEQ_LEN


@law
@given(st.floats(0, 1), st.sampled_from(["concat", "best_fit"]), st.none() | filters)
def test_splits_are_exact_disjoint_and_together_all(
    dataset: Dataset, validation: float, packing: str, documents: DocumentSubset | None
) -> None:
    def ids(split: str | None) -> list[int]:
        try:
            settings: dict[str, Any] = {} if split is None else {"split": split, "validation": validation}
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


def test_a_split_reads_few_slices_and_a_longer_one_contains_a_shorter(tmp_path: Path) -> None:
    many = write(tmp_path / "many", slices=[([60], 0)] * 50)
    taken: set[int] = set()
    for part in (0.01, 0.1, 0.3):
        sample_index = plan_samples(many, SEQ_LEN, split="validation", validation=part)
        used = set(np.flatnonzero(sample_index.counts).tolist())
        assert taken <= used and len(used) == -(-round(part * 500) // 10)
        taken = used
    assert taken != set(range(len(taken)))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_gives_the_samples_that_its_numbers_say(dataset: Dataset, split: str) -> None:
    full = everything(dataset, plan_samples(dataset, SEQ_LEN))[0]
    sample_index = plan_samples(dataset, SEQ_LEN, split=split, validation=0.4)
    slices = np.repeat(np.arange(len(sample_index.counts)), sample_index.counts)
    ids = (sample_index.bases + sample_index.offsets)[slices] + np.concatenate(
        [np.arange(count) for count in sample_index.counts]
    )
    assert (everything(dataset, sample_index)[0] == full[ids]).all()


def test_only_the_ends_that_matter_are_read(dataset: Dataset) -> None:
    read: list[int] = []

    def read_ends(index: int) -> Any:
        read.append(index)
        return dataset.open_slice(index).document_ends

    def asked(**settings: Any) -> list[int]:
        read.clear()
        plan_samples(dataset, SEQ_LEN, read_ends=read_ends, **settings)
        return sorted(set(read))

    assert asked() == asked(split="train", validation=0.1) == asked(documents=DocumentSubset()) == []
    assert asked(documents=DocumentSubset([1])) == [0]
    assert asked(documents=DocumentSubset([6])) == [1, 2, 3]  # It begins in 1, fills 2 and ends in 3.
    assert asked(documents=DocumentSubset([8, 99])) == [3]
    assert asked(packing="best_fit") == asked(documents=DocumentSubset(min_tokens=2)) == [0, 1, 2, 3, 4]


def test_lengths_are_those_of_whole_documents(dataset: Dataset) -> None:
    # Document 6 has 7 + 11 + 4 tokens; the last one, which never ends, 2.
    assert 6 not in set(np.array(flat(documents_of()))[flat(kept_tokens(DocumentSubset((), 0, 21)))])
    full = plan_samples(dataset, 1)
    assert full.num_samples - plan_samples(dataset, 1, documents=DocumentSubset((), 0, 21)).num_samples == 22 + 30
    assert full.num_samples == plan_samples(dataset, 1, documents=DocumentSubset((), 0, 30)).num_samples
    assert plan_samples(dataset, 1, documents=DocumentSubset((), 22, 29)).num_samples == 22


@pytest.mark.parametrize(("packing", "masks"), [("concat", False), ("concat", True), ("best_fit", True)])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_mixture_takes_rows_of_several_datasets(tmp_path: Path, packing: str, masks: bool, dtype: Any) -> None:
    both = [write(tmp_path / f"{i}", dtype, first=1000 * i) for i in range(2)]
    indexes = [plan_samples(item, SEQ_LEN, packing=packing) for item in both]
    alone = [everything(item, sample_index, document_masks=masks) for item, sample_index in zip(both, indexes)]
    collator = make_collator(indexes, document_masks=masks)
    for key in range(10):
        collator.open(key, key % 5, both[key // 5].open_slice(key % 5))
    counts = np.concatenate([sample_index.counts for sample_index in indexes])
    keys = np.repeat(np.arange(10), counts)
    samples = np.concatenate([np.arange(count) for count in counts])
    mixed = np.random.default_rng(0).permutation(len(keys))
    plan = collator.plan(keys[mixed], samples[mixed])
    for part, created in enumerate(parts_of(collator.make(plan, 0, len(keys)))):
        if part not in (2, 5) and created is not None:
            assert (created == np.concatenate([item[part] for item in alone])[mixed]).all()
    if masks:
        for start, stop in ((0, 0), (3, 4), (5, 12)):
            some = parts_of(collator.make(plan, start, stop))
            assert some[0].shape == (stop - start, SEQ_LEN)
            assert some[5].tolist()[-1] == some[0].size


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_alignment_does_not_matter(tmp_path: Path, odd: int) -> None:
    """Others' files may have headers of any length."""
    dataset = write(tmp_path / "aligned", np.uint32)
    shifted = tmp_path / "shifted"
    shifted.mkdir()
    for path in sorted((tmp_path / "aligned").glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + size].rstrip() + b" " * (8 + odd)
        (shifted / path.name).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    other = import_slices(shifted, "shifted")
    for masks in (False, True):
        for item, two in zip(
            *(everything(d, plan_samples(d, SEQ_LEN), document_masks=masks) for d in (dataset, other))
        ):
            assert item is two is None or (isinstance(item, dict)) or (item == two).all()


def test_slices_of_different_types_are_refused(tmp_path: Path) -> None:
    datasets = [write(tmp_path / dtype, dtype) for dtype in ("uint16", "uint32")]
    collator = make_collator([plan_samples(dataset, SEQ_LEN) for dataset in datasets])
    for i, dataset in enumerate(datasets):
        collator.open(5 * i, 0, dataset.open_slice(0))
    with pytest.raises(DatasetError, match=r"expected one type in all slices, got .*uint16.*uint32"):
        collator.plan(np.array([0, 5]), np.zeros(2, np.int64))


def test_a_plan_outlives_its_slices(tmp_path: Path) -> None:
    write(tmp_path / "gone")
    for masks in (False, True):
        dataset = Dataset(*(lambda d: (d.path, d.manifest, d.table, d.id))(import_slices(tmp_path / "gone")))
        sample_index = plan_samples(dataset, SEQ_LEN)
        collator = make_collator([sample_index], document_masks=masks)
        collator.open(0, 0, dataset.open_slice(0))
        plan = collator.plan(np.zeros(2, np.int64), np.arange(2))
        collator.close(0)
        del dataset
        gc.collect()
        assert collator.make(plan, 0, 2)[0].tolist() == [[*range(6)], [*range(6, 12)]]
        with pytest.raises(DatasetError, match="open slice"):
            collator.plan(np.zeros(1, np.int64), np.zeros(1, np.int64))


def test_a_rank_without_samples_gets_empty_batches(dataset: Dataset) -> None:
    none = np.empty(0, np.int64)
    for masks in (False, True):
        collator = make_collator([plan_samples(dataset, SEQ_LEN)], document_masks=masks)
        inputs, labels, *_ = collator.make(collator.plan(none, none), 0, 0)
        assert inputs is not None and labels is not None and inputs.shape == labels.shape == (0, SEQ_LEN)


def test_makers_are_chosen_by_what_is_asked(dataset: Dataset, tmp_path: Path) -> None:
    chunk, fit = plan_samples(dataset, SEQ_LEN), plan_samples(dataset, SEQ_LEN, packing="best_fit")
    some = plan_samples(dataset, SEQ_LEN, documents=DocumentSubset([1]))
    for indexes, masks in (([chunk, chunk], False), ([chunk], True), ([fit], False), ([chunk, some], False)):
        assert isinstance(make_collator(indexes, document_masks=masks), TokenCollator)
    save_file({"images": np.zeros((4, 2))}, tmp_path / "0.safetensors")
    rows = plan_samples(import_slices(tmp_path, "rows"), None, split="train", validation=0.25)
    assert rows.counts.tolist() == [3] and rows.offsets.tolist() == [1]
    assert isinstance(make_collator([rows]), RowCollator)
    wrong: list[Callable[[], Any]] = [
        lambda: make_collator([chunk, rows]),
        lambda: make_collator([chunk, fit]),
        lambda: make_collator([rows], document_masks=True),
        lambda: make_collator([chunk], trim_padding=True),
    ]
    for item in wrong:
        with pytest.raises(UsageError):
            item()


def test_a_slice_or_sample_that_is_not_of_the_view_is_refused(dataset: Dataset) -> None:
    sample_index = plan_samples(dataset, SEQ_LEN, split="train", validation=0.4)
    for masks in (False, True):
        collator = make_collator([sample_index], document_masks=masks)
        for key, index in ((1, 0), (5, 0), (-1, -1)):
            with pytest.raises(UsageError, match="slice key"):
                collator.open(key, index, dataset.open_slice(0))
        with pytest.raises(DatasetError, match="verify"):
            collator.open(3, 3, dataset.open_slice(0))
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
        {"split": "train", "validation": -0.1},
        {"split": "train", "validation": float("nan")},
        {"split": "train", "validation": "0.1"},
        {"split": "train", "validation": 1.0},
        {"split": "validation"},
        {"validation": 0.1},
        {"documents": [1, 2]},
        {"documents": DocumentSubset(min_tokens=1000)},
        {"seq_len": None},
        {"seq_len": 0},
        {"seq_len": 1000},
    ],
)
def test_wrong_settings(dataset: Dataset, wrong: dict[str, Any]) -> None:
    settings = {"seq_len": SEQ_LEN, **wrong}
    with pytest.raises(UsageError):
        plan_samples(dataset, settings.pop("seq_len"), **settings)


def test_rows_take_no_packing(tmp_path: Path) -> None:
    save_file({"x": np.zeros((4, 2))}, tmp_path / "0.safetensors")
    rows = import_slices(tmp_path, "rows")
    for wrong in ({"packing": "best_fit"}, {"documents": DocumentSubset([1])}):
        with pytest.raises(UsageError, match="layout 'tokens'"):
            plan_samples(rows, None, **wrong)  # type: ignore[arg-type]


def test_damaged_ends_are_named(dataset: Dataset) -> None:
    with pytest.raises(DatasetError, match="document_ends"):
        plan_samples(dataset, SEQ_LEN, packing="best_fit", read_ends=lambda _: np.array([9, 3], np.uint64))


def test_what_decides_a_view_is_plain(dataset: Dataset) -> None:
    item = plan_samples(dataset, SEQ_LEN, documents=DocumentSubset([1]), split="train", validation=0.25).describe()
    assert item == {"packing": "concat", "documents": DocumentSubset([1]).digest(), "split": ["train", 0.25]}
    assert plan_samples(dataset, SEQ_LEN).describe() == {"packing": "concat", "documents": None, "split": None}
