"""A loader's order, arguments, states, rows, and files that are missing."""

import json
import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from forebay import CacheOptions, NetworkOptions, OrderOptions, SampleOptions
from forebay.dataset.import_slices import import_slices
from forebay.errors import DatasetError, StateError, UsageError
from forebay.load.loader import Loader
from support.feeding import list_ids

SEQ_LEN = 8
LENGTHS = (83, 160, 7, 64, 131)  # Samples 10, 20, 0, 8, 16; only slices 1 and 3 end with a sample's last token.


@pytest.fixture(scope="module")
def tokens_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    first = 0
    for i, length in enumerate(LENGTHS):
        tokens = np.arange(first, first + length, dtype=np.uint16)
        save_file({"tokens": tokens, "document_ends": np.array([length], np.uint64)}, folder / f"{i}.safetensors")
        first += length
    import_slices(folder, "tiny")
    return folder


def test_an_order_is_that_of_its_seed_and_epoch_or_of_the_dataset(tokens_dir):
    def epochs(**arguments):
        loader = Loader(tokens_dir, seq_len=SEQ_LEN, batch_size=5, epochs=2, **arguments)
        assert len(loader) == 2 * loader.order.steps_per_epoch == 22 and loader.tail_tokens == sum(LENGTHS) - 54 * 8
        ids = list_ids(loader)
        return [list(chain(*ids[:11])), list(chain(*ids[11:]))]

    orders = [*epochs(seed=3), *epochs(seed=4), *epochs(seed=3)[:1]]
    assert len({tuple(order) for order in orders}) == 4 and orders[0] == orders[4]
    assert all(sorted(order) == list(range(54)) for order in orders)
    assert epochs(shuffle=False) == [list(range(54))] * 2


def loader_threads() -> set[threading.Thread]:
    """Of all loaders of this process; servers of other tests may start threads at any time."""
    return {thread for thread in threading.enumerate() if thread.name == "forebay-loader"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"global_batch_size": 4},
        {"rank": 1},
        {"world_size": 0},
        {"world_size": 4},
        {"world_size": 5000},
        {"seed": "x"},
        {"samples": SampleOptions(dtype=np.uint16)},
        {"samples": SampleOptions(dtype="no such")},
        {"samples": SampleOptions(max_documents=3)},
        {"cache": "tape"},
        {"cache": "ram", "cache_dir": "x"},
        {"cache_dir": "ram"},
        {"cache_bytes": -1},
        {"cache_bytes": 1 << 30},
        {"shuffle": "no"},
        {"split": "train", "samples": SampleOptions(validation_fraction=2.0)},
        {"samples": SampleOptions(validation_fraction=0.1)},
        {"global_batch_size": [(0, 4)], "batch_size": 4},
        {"seq_len": 10_000},
        {"network": NetworkOptions(listen="auto")},
        {"batch_size": None, "global_batch_size": 6, "rank": 0, "world_size": 7},
    ],
)
def test_wrong_arguments(tokens_dir, wrong):
    arguments = {"seq_len": SEQ_LEN, "batch_size": 2, **wrong}
    with pytest.raises(UsageError):
        Loader(tokens_dir, **arguments)


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (OrderOptions, {"lanes": 0}),
        (OrderOptions, {"window_bytes": -3}),
        (OrderOptions, {"assignment": "hash"}),
        (OrderOptions, {"worker_names": ("a",)}),
        (OrderOptions, {"max_fetch_ratio": None}),
        (CacheOptions, {"verify": True}),
        (CacheOptions, {"readahead_bytes": -1}),
        (CacheOptions, {"keep": "none"}),
        (NetworkOptions, {"connections": 0}),
        (NetworkOptions, {"listen": True}),
        (NetworkOptions, {"from_urls": "all"}),
        (SampleOptions, {"drop_last": "no"}),
        (SampleOptions, {"prefetch_batches": -1}),
        (SampleOptions, {"max_documents": 0}),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(kind, wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        kind(**wrong)


def test_state_of_something_else(tokens_dir):
    loader = Loader(tokens_dir, seq_len=SEQ_LEN, batch_size=4)
    state = loader.state_dict()
    for name, value in {
        "version": 1,
        "dataset_id": "0" * 64,
        "seed": 1,
        "seq_len": 16,
        "global_batch_size": 5,
        "shuffle": False,
        "drop_last": True,
        "order": [{"lanes": 3}],
        "packing": "best_fit",
        "split": ["train", 0.5],
        "step": 1,
        "epoch": -1,
        "samples_taken": 3,
    }.items():
        with pytest.raises(StateError, match=name):
            loader.load_state_dict({**state, name: value})
    with pytest.raises(StateError, match="global_batch_size=4"):
        Loader(tokens_dir, seq_len=SEQ_LEN, batch_size=2).load_state_dict(state)
    with pytest.raises(StateError, match="expected order"):
        Loader(tokens_dir, seq_len=SEQ_LEN, batch_size=4, order=OrderOptions(lanes=3)).load_state_dict(state)
    for invalid in ({}, [], None, {**state, "samples_taken": 10**9}, {**state, "epoch": "0"}):
        with pytest.raises(StateError):
            loader.load_state_dict(invalid)
    assert len(json.dumps(state)) < 500


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_missing_or_truncated_slice_is_named(tmp_path, prefetch):
    for i in range(3):
        tokens = np.arange(64, dtype=np.uint16)
        save_file({"tokens": tokens, "document_ends": np.array([64], np.uint64)}, tmp_path / f"{i}.safetensors")
    import_slices(tmp_path, "three")
    before, options = loader_threads(), SampleOptions(prefetch_batches=prefetch)
    loader = Loader(tmp_path, seq_len=SEQ_LEN, batch_size=4, shuffle=False, samples=options)
    data = (tmp_path / "1.safetensors").read_bytes()
    (tmp_path / "1.safetensors").write_bytes(data[:-9])
    with pytest.raises(DatasetError, match=r"1\.safetensors"):
        list(loader)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(DatasetError, match=r"1\.safetensors"):
        list(loader)
    (tmp_path / "1.safetensors").write_bytes(data)
    assert loader.state_dict()["samples_taken"] == 8
    assert [b.sample_ids[0] for b in loader] == [8, 12, 16, 20]
    assert not loader_threads() - before


def test_rows_of_different_lengths_are_padded_and_masked(tmp_path):
    rows = []
    for i, length in enumerate((5, 9)):
        ids = np.random.default_rng(i).integers(0, 99, (4, length)).astype(np.uint16)
        mask = np.ones((4, length), np.uint8)
        mask[:, -1] = 0
        rows += ids.tolist()
        tensors = {"input_ids": ids, "attention_mask": mask, "labels": ids.astype(np.int32)}
        save_file(tensors, tmp_path / f"{i}.safetensors")
    import_slices(tmp_path, "rows")
    (batch,) = Loader(tmp_path, batch_size=8, samples=SampleOptions(pad_id=3))
    assert batch.inputs is batch.tensors["input_ids"] and batch.inputs.shape == (8, 9)
    assert (batch.labels == -100).sum() == 16 == (batch["attention_mask"] == 0).sum() - 8
    assert sorted(batch.sample_ids.tolist()) == list(range(8))
    for row, sample in zip(batch.inputs.tolist(), batch.sample_ids.tolist()):
        assert row == [*rows[sample], *[3] * (9 - len(rows[sample]))]


def test_a_cache_in_memory_beyond_the_memory_is_refused(tokens_dir):
    with pytest.raises(UsageError, match="expected at most this machine's memory"):
        Loader(tokens_dir, seq_len=SEQ_LEN, batch_size=1, cache="ram", cache_bytes=10**14)
