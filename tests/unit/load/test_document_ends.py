"""Document ends of remote slices, and counts that are cached."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import DatasetError
from forebay.load.packing import DocumentSubset
from forebay.load.samples import ends_reader, plan_samples
from forebay.storage.origins import open_remote
from support.origin_server import OriginServer


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Slices whose ends are in the head, beyond it, and behind a header longer than it; and one without any."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for i, (count, record) in enumerate(((100, 0), (20_000, 0), (300, 100_000), (0, 0))):
        stops = np.arange(10, 10 * count + 1, 10, dtype=np.uint64)
        tokens = np.zeros(400_000, np.uint16)
        if record:
            save_file({"tokens": tokens, "document_ends": stops}, folder / f"{i}.safetensors", {"note": "x" * record})
        else:
            write_token_slice(folder / f"{i}.safetensors", tokens, stops)
    return import_slices(folder, "documents")


def test_ends_are_read_without_their_slices(dataset: Dataset) -> None:
    with OriginServer(dataset.path) as server:
        remote = open_remote(server.url)
        read = ends_reader(remote)
        server.reset()
        for index in range(4):
            assert (read(index) == ends_reader(dataset)(index)).all()
            assert read(index).dtype == np.uint64 and len(read(index)) == dataset.table.documents[index]
        for name, sent in server.bytes_sent.items():
            assert sent / 3 <= 250_000 < dataset.table.bytes.min(), name
        server.reset()
        for settings in ({"packing": "best_fit"}, {"documents": DocumentSubset([3], 2, 90)}):
            local, fetched = (plan_samples(item, 64, **settings) for item in (dataset, remote))
            assert local.counts.tolist() == fetched.counts.tolist()


def test_a_passing_fault_is_passed_over_and_a_lasting_one_is_named(dataset: Dataset) -> None:
    with OriginServer(dataset.path) as server:
        read = ends_reader(open_remote(server.url))
        server.faults.truncate = 0.5
        assert (read(0) == ends_reader(dataset)(0)).all()
        server.faults.truncate = 0
        server.faults.missing.add("1.safetensors")
        with pytest.raises(DatasetError, match=r"1\.safetensors"):
            read(1)
        # Another file under the name: as many bytes, with fewer documents.
        size = dataset.table.row(0).bytes
        write_token_slice(dataset.slice_path(0), np.zeros(400_004, np.uint16), np.arange(99, dtype=np.uint64))
        assert dataset.slice_path(0).stat().st_size == size
        with pytest.raises(DatasetError, match=r"0\.safetensors: expected the dataset's bytes, got others"):
            read(0)


@pytest.mark.parametrize("settings", [{"packing": "best_fit"}, {"documents": DocumentSubset([7])}])
def test_counts_are_cached(dataset: Dataset, tmp_path: Path, settings: dict) -> None:
    read = []

    def read_ends(index):
        read.append(index)
        return dataset.open_slice(index).document_ends

    def plan(seq_len=64):
        """A sample index, and if ends were read for it."""
        read.clear()
        index = plan_samples(dataset, seq_len, **settings, read_ends=read_ends, cache_dir=tmp_path / "counts")
        return index, bool(read)

    (first, counted), (second, counted_again) = plan(), plan()
    assert (counted, counted_again, plan(seq_len=32)[1]) == (True, False, True)
    for name in ("counts", "offsets", "bases", "tokens_beyond"):
        assert (getattr(first, name) == getattr(second, name)).all()
    assert first.tail_tokens == second.tail_tokens
    for path in (tmp_path / "counts").iterdir():
        path.write_bytes(path.read_bytes()[:-8])  # Damaged: counted again.
    third, counted = plan()
    assert counted and (third.counts == first.counts).all()
