"""The tree over a slice's chunks, and damage of them."""

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dataset.chunks import (
    CHUNKS_FILE,
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    ChunkHasher,
    chunk_size,
    num_chunks,
    root_of,
    wrong_chunks,
)
from forebay.dataset.reader import open_dataset, verify_dataset
from forebay.errors import DatasetError
from support.token_slices import write_tokens

TOKENS = [100, 40_000, 3000, 9000]  # Slices of 1, 20, 2 and 5 chunks.


def tree(chunks: list[bytes]) -> bytes:
    """The definition of RFC 6962 without its prefixes: the left part is the largest full tree."""
    if len(chunks) == 1:
        return hashlib.sha256(chunks[0]).digest()
    split = 1 << (len(chunks) - 1).bit_length() - 1
    return hashlib.sha256(tree(chunks[:split]) + tree(chunks[split:])).digest()


@given(data=st.binary(max_size=300), chunk_bytes=st.integers(1, 40), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_the_root_is_that_of_the_definition(data, chunk_bytes, cuts):
    chunks = [data[start : start + chunk_bytes] for start in range(0, max(1, len(data)), chunk_bytes)]
    hasher = ChunkHasher(chunk_bytes)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in pairwise(edges):
        hasher.update(data[start:stop])
    leaves = hasher.leaves()
    assert leaves == b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    assert len(leaves) == HASH_BYTES * num_chunks(len(data), chunk_bytes)
    assert root_of(leaves) == tree(chunks).hex()
    assert list(wrong_chunks(memoryview(data), leaves, chunk_bytes)) == []


@given(st.integers(0, 1 << 40))
def test_chunk_sizes(slice_bytes):
    size = chunk_size(slice_bytes)
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES and size & (size - 1) == 0
    assert slice_bytes // size >= 256 or size == MIN_CHUNK_BYTES
    assert slice_bytes // size < 512 or size == MAX_CHUNK_BYTES


def test_every_damage_of_the_hashes_is_named(tmp_path):
    folder = write_tokens(tmp_path / "d", TOKENS).path
    path, first = folder / CHUNKS_FILE, open_dataset(folder).first_chunks.tolist()
    data = path.read_bytes()
    assert len(data) == first[-1] * HASH_BYTES and first[-1] == 28
    for damaged in (data[:-1], data[:-HASH_BYTES], data + b"\0", b""):
        path.write_bytes(damaged)
        assert verify_dataset(folder).changed == [CHUNKS_FILE]
    for index in range(1, len(TOKENS)):  # the first has one chunk: its hash is the id
        offset = first[index] * HASH_BYTES + 5
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        with pytest.raises(DatasetError, match=f"hashes are not those of {index}.safetensors"):
            open_dataset(folder).open_slice(index)
        open_dataset(folder).open_slice(0)
    path.write_bytes(data[: first[2] * HASH_BYTES])
    open_dataset(folder).open_slice(1)
    with pytest.raises(DatasetError, match=r"hashes are not those of 3.safetensors"):
        open_dataset(folder).open_slice(3)
    path.unlink()
    report = verify_dataset(folder)
    assert (report.bad, report.missing) == ([CHUNKS_FILE], [CHUNKS_FILE])
    with pytest.raises(DatasetError, match=f"{CHUNKS_FILE}: cannot be read"):
        open_dataset(folder).open_slice(2)


def test_damage_of_a_slice_is_found_in_its_chunk(tmp_path):
    folder = write_tokens(tmp_path / "d", TOKENS).path
    path = folder / "1.safetensors"
    data = bytearray(path.read_bytes())
    for position in (1000, 4096, 50_000, len(data) - 1):
        data[position] ^= 1
        path.write_bytes(data)
        start = position // MIN_CHUNK_BYTES * MIN_CHUNK_BYTES
        span = rf"\[{start}, {min(len(data), start + MIN_CHUNK_BYTES)}\)"
        with pytest.raises(DatasetError, match=f"1.safetensors: bytes {span} are not the dataset's"):
            open_dataset(folder).open_slice(1)
        assert verify_dataset(folder).changed == ["1.safetensors"]
        data[position] ^= 1
    path.write_bytes(data[:-3])
    with pytest.raises(DatasetError, match=r"1\.safetensors"):
        open_dataset(folder).open_slice(1)
    assert verify_dataset(folder).changed == ["1.safetensors"]
