"""The file of documents' lengths: what it says, and that no other contents are believed."""

import io
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dataset.lengths import encode_lengths, read_document_ends
from forebay.dataset.manifest import LENGTHS_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, NetworkError
from forebay.load.samples import plan_samples
from forebay.storage.base import PathOrigin
from forebay.storage.origins import read_dataset
from support.reference_samples import MANY, to_lists, write_slices


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return write_slices(tmp_path / "d", MANY)


def read(data: bytes, *slices: tuple[int, int]) -> list:
    """The document ends in these bytes, of slices of so many tokens and documents."""
    table = SliceTable.from_rows([SliceInfo(i, f"{i}.safetensors", 1, "ab" * 32, *s) for i, s in enumerate(slices)])
    manifest = Manifest.of(table, {}, name="d", layout="tokens", dtype="U16")
    return [(part.dtype, part.tolist()) for part in read_document_ends(io.BytesIO(data), manifest, table, "x")]


def frame(*lengths: int, num_tokens: int = 9) -> bytes:
    return encode_lengths(np.cumsum(np.array(lengths, np.uint64), dtype=np.uint64), num_tokens)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1 << 31), max_size=9), st.sampled_from([0, 5, 1 << 32, 1 << 50]))))
def test_lengths_of_any_slices_are_read_as_they_were_written(slices):
    sizes = [(sum(lengths) + rest, len(lengths)) for lengths, rest in slices]
    data = b"".join(frame(*lengths, num_tokens=count) for (lengths, _), (count, _) in zip(slices, sizes))
    assert read(data, *sizes) == [(np.uint64, np.cumsum(lengths, dtype=int).tolist()) for lengths, _ in slices]


FIRST, LAST, WRAPPING = frame(*range(99)), frame(5, 600), frame(1, (1 << 64) - 1, num_tokens=1 << 33)
SLICES = (4851, 99), (40, 0), (605, 2)


@pytest.mark.parametrize(
    "data, slices, message",
    [
        (b"", SLICES, "expected 396 bytes of lengths of 0.safetensors, got 0"),
        (FIRST, SLICES, "expected 8 bytes of lengths of 2.safetensors, got 0"),
        (FIRST + LAST[:-2], SLICES, "frames of zstd|8 bytes of lengths of 2.safetensors, got"),
        (frame(*range(98)) + LAST, SLICES, "expected lengths that fit the 4851 tokens of 0.safetensors"),
        (FIRST + frame(5, 601), SLICES, "expected lengths that fit the 605 tokens of 2.safetensors"),
        (FIRST + LAST + LAST, SLICES, "expected the lengths of 101 documents, got more"),
        (pa.Codec("zstd").compress(bytes(10_000_000), asbytes=True), SLICES, "documents, got more"),
        (b"PAR1" * 99, SLICES, "expected frames of zstd, got"),
        (WRAPPING, [(1 << 33, 2)], "fit the 8589934592 tokens"),
        (FIRST, [(9, 1 << 40)], "at most 67108864 bytes of lengths of a slice, got 4398046511104"),
    ],
)
def test_lengths_that_contradict_the_table_are_refused(data, slices, message):
    with pytest.raises(DatasetError, match=f"x: .*({message})"):
        read(data, *slices)


def test_damage_is_found_before_a_sample_is_counted(dataset):
    path = dataset.path / LENGTHS_FILE
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DatasetError, match=f"{LENGTHS_FILE}: expected sha256"):
        plan_samples(dataset, 8, packing="best_fit")
    path.unlink()
    assert dataset.verify().missing == [LENGTHS_FILE]
    with pytest.raises(DatasetError, match=f"{LENGTHS_FILE}: cannot be read: No such file"):
        plan_samples(dataset, 8, packing="best_fit")


def test_the_first_source_with_the_right_bytes_is_read(dataset, tmp_path):
    data, origin = (dataset.path / LENGTHS_FILE).read_bytes(), PathOrigin(dataset.path)
    for name, content in (("short", data[:-1]), ("wrong", bytes(len(data))), ("right", data)):
        (tmp_path / name).mkdir()
        (tmp_path / name / LENGTHS_FILE).write_bytes(content)
    for names, message in (
        ("short", "ends at byte"), ("short wrong", "expected sha256"), ("", "a source"), ("wrong short right", ""),
    ):  # fmt: skip
        remote, sources = read_dataset(origin, None), [PathOrigin(tmp_path / name) for name in names.split()]
        remote.origin = SimpleNamespace(url="here", sources=lambda: sources)  # noqa: B023
        with pytest.raises((DatasetError, NetworkError), match=message) if message else nullcontext():
            assert [part.tolist() for part in remote.all_document_ends()] == [stops for _, stops in to_lists(MANY)]


def test_counts_are_cached(dataset, tmp_path):
    plan = partial(plan_samples, dataset, packing="best_fit", cache_dir=tmp_path / "counts")
    first = plan(64)
    (dataset.path / LENGTHS_FILE).unlink()
    second = plan(64)
    for name in ("counts", "bases", "tokens_beyond", "sections"):
        assert (getattr(first, name) == getattr(second, name)).all()
    for cached in (tmp_path / "counts").iterdir():
        cached.write_bytes(cached.read_bytes()[:-8])
    for seq_len in (32, 64):  # another count; a damaged file
        with pytest.raises(DatasetError):
            plan(seq_len)
