"""Every slice of a local dataset is hashed before its first use, and again once its file changed."""

import os
from pathlib import Path

import pytest

import forebay
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import DatasetError, UsageError
from support.token_slices import write_tokens

NUM_SLICES = 4


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    return write_tokens(tmp_path / "data", [1000] * NUM_SLICES).path


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that are hashed."""
    names = []

    leaves = Dataset.leaves  # Which are read to hash a slice.

    def counting(self, index):
        names.append(f"{index}.safetensors")
        return leaves(self, index)

    monkeypatch.setattr(Dataset, "leaves", counting)
    return names


def flip(path: Path, keep_times: bool = False):
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_all(path: Path):
    dataset = open_dataset(path)
    for index in range(dataset.num_slices):
        dataset.open_slice(index)


def test_once_each_also_for_other_readers(folder, hashed):
    dataset = open_dataset(folder)
    assert hashed == []
    for _ in range(3):
        dataset.open_slice(1)
    assert hashed == ["1.safetensors"]
    open_dataset(folder).open_slice(0)
    dataset.open_slice(0)  # Another reader marked it while this dataset was open.
    assert hashed == ["1.safetensors", "0.safetensors"]
    read_all(folder)
    assert hashed[2:] == ["2.safetensors", "3.safetensors"]
    os.utime(folder / "2.safetensors")
    read_all(folder)
    assert hashed[4:] == ["2.safetensors"]


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_changed_byte_is_never_used(folder, keep_times):
    read_all(folder)
    flip(folder / "2.safetensors", keep_times)
    with pytest.raises(DatasetError, match=r"2.safetensors: bytes \[0, "):
        read_all(folder)
    loader = forebay.Loader(folder, seq_len=10, batch_size=1)
    with loader, pytest.raises(DatasetError, match="are not the dataset's"):
        for _ in loader:
            pass


def test_never(folder, hashed):
    flip(folder / "2.safetensors")
    assert len(open_dataset(folder, verify="never").open_slice(2).tokens) == 1000 and hashed == []
    with pytest.raises(UsageError, match="'once' or 'never'"):
        open_dataset(folder, verify="always")


def test_without_a_place_for_marks_each_process_hashes(folder, hashed, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE", str(folder / "0.safetensors" / "below-a-file"))
    dataset = open_dataset(folder)
    for _ in range(2):
        dataset._open.clear()
        dataset.open_slice(0)
    assert hashed == ["0.safetensors"]
    read_all(folder)
    assert len(hashed) == 1 + NUM_SLICES


def test_torn_or_foreign_marks_only_cost_a_hash(folder, hashed, tmp_path):
    read_all(folder)
    (marks,) = (tmp_path / "cache" / "verified").iterdir()
    marks.write_bytes(marks.read_bytes()[:20] + b"\xff" * 100)
    read_all(folder)
    assert sorted(hashed) == sorted([*(f"{i}.safetensors" for i in range(4)), *(f"{i}.safetensors" for i in (1, 2, 3))])
