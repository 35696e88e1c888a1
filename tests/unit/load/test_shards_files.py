"""Shards written, and every sample compared with its id."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.formats import open_external
from forebay.formats.shard_writer import write_shards
from forebay.formats.vectors import npy_header, sample_id
from forebay.load.shard_files import (
    SampleCheck,
    ShardDataset,
    ShardInfo,
    find_shard,
    pair_map,
    read_layout,
    verify_pair,
)
from forebay.storage.base import PathOrigin

L = 16


def make_tokens(count: int, dtype: Any = np.uint16, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(dtype)


@pytest.mark.parametrize(
    "generation, header, dtype", [("bin", True, "uint16"), ("npy", False, "uint16"), ("npy", True, "uint32")]
)
def test_both_generations_are_written_and_read(tmp_path, generation, header, dtype):
    """Also without NumPy's header, as the first generation wrote them."""
    tokens = make_tokens(100 * L + 5, dtype)
    pieces = np.split(tokens, [3, 40, 41, 900])
    shards = write_shards(pieces, tmp_path, seq_len=L, shard_tokens=40 * L + 7, generation=generation)
    assert [shard.num_samples for shard in shards] == [40, 40, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"train_{i:06d}.npy" for i in range(3)] + [f"sample_ids_{i:06d}.{generation}" for i in range(3)]
    )
    got = []
    for shard in shards:
        raw = shard.tokens.read_bytes()
        assert raw.startswith(b"\x93NUMPY")
        if not header:
            shard.tokens.write_bytes(raw := raw[128:])
        item = np.load(shard.tokens) if header else np.frombuffer(raw, dtype)
        read = verified(tmp_path, shard.index)
        ids = read.sample_ids
        assert read[np.arange(len(ids))].tolist() == item.reshape(-1, L).tolist() and read[0].dtype == dtype
        written = np.fromfile(shard.ids, "<u8") if generation == "bin" else np.load(shard.ids)
        assert ids.tolist() == written.tolist() == [sample_id(row) for row in item.reshape(-1, L)]
        got.append(item)
    assert np.concatenate(got).tolist() == tokens[: 100 * L].tolist()
    for location in (tmp_path, tmp_path / "train_*.npy"):
        dataset = open_external(location)
        assert dataset is not None and dataset.seq_len == L and dataset.verify().ok
        slices = [dataset.open_slice(index).tokens for index in range(dataset.num_slices)]
        assert np.concatenate(slices).tolist() == tokens[: 100 * L].tolist()


def test_wrong_arguments_of_the_writer_are_refused(tmp_path):
    for wrong in [{"seq_len": 0}, {"shard_tokens": 3}, {"generation": "x"}, {"dtype": "int64"}]:
        with pytest.raises(UsageError):
            write_shards([make_tokens(64)], tmp_path, **{"seq_len": L, **wrong})
    with pytest.raises(UsageError, match="vectors of integers"):
        write_shards([make_tokens(64).reshape(2, -1)], tmp_path, seq_len=L)
    for tokens, dtype in (([1] * 20 + [70_000], np.uint32), ([-1] * 20, np.int64)):
        with pytest.raises(UsageError, match=r"70000|>= 0"):
            write_shards([np.array(tokens, dtype)], tmp_path, seq_len=L, dtype="uint16")
    for nothing in ([], [make_tokens(3)]):
        with pytest.raises(DatasetError):
            write_shards(nothing, tmp_path, seq_len=L)
    assert not list(tmp_path.iterdir())


def shard(folder: Path, count: int = 300) -> tuple[Path, Path]:
    created = write_shards([make_tokens(count * L)], folder, seq_len=L)[0]
    return created.tokens, created.ids


def read_shard(folder: Path, index: int = 0, seq_len: int = L) -> ShardInfo:
    return read_layout(find_shard(PathOrigin(folder), index), seq_len)


def verified(folder: Path, index: int = 0, seq_len: int = L) -> ShardDataset:
    shard = read_shard(folder, index, seq_len)
    return ShardDataset(shard, *verify_pair(folder, shard))


def test_a_whole_shard_is_judged_once(tmp_path, monkeypatch):
    tokens, ids = shard(tmp_path)
    assert len(verified(tmp_path)) == 300
    with monkeypatch.context() as patched:
        patched.setattr(SampleCheck, "__call__", None)
        assert len(verified(tmp_path)) == 300  # Not hashed again.
        os.utime(tokens, ns=(0, 0))
        with pytest.raises(TypeError):  # It was written to.
            verified(tmp_path)
    assert verified(tmp_path, seq_len=0).sample_ids.tolist() == verified(tmp_path).sample_ids.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [tokens.name, ids.name, pair_map(tmp_path, read_shard(tmp_path)).name]
    )


@given(st.data())
def test_any_flipped_bit_is_noticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flipped")
    tokens, _ = shard(folder, 2500)
    raw = bytearray(tokens.read_bytes()[data.draw(st.sampled_from([0, 128])) :])
    offset = len(raw) % 1000
    index = data.draw(st.integers(offset, len(raw) - 1))
    raw[index] ^= 1 << data.draw(st.integers(0, 7))
    tokens.write_bytes(raw)
    wrong = (index - offset) // (2 * L)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"sample {wrong} at byte {offset + wrong * 2 * L} .*remap={{0: "):
            verified(folder)
    assert tokens.read_bytes() == raw


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    tokens, ids = shard(tmp_path)
    size = tokens.stat().st_size

    def refused(match, seq_len=L):
        with pytest.raises(DatasetError, match=match):
            read_shard(tmp_path, seq_len=seq_len)

    refused("another sequence_length", 2 * L)
    os.truncate(tokens, size - 2)  # an odd tail
    refused("as its header says")
    tokens.write_bytes(npy_header(np.dtype("<u2"), 300 * L).replace(b"(4800,), ", b"(300, 16)") + bytes(600 * L))
    refused("vector of tokens")
    tokens.write_bytes(npy_header(np.dtype("<i8"), 300 * L) + bytes(2400 * L))
    refused("got int64")
    tokens, ids = shard(tmp_path)
    full = ids.read_bytes()
    ids.write_bytes(npy_header(np.dtype("<u8"), 299) + full[128:-8])  # short ids
    refused("expected 4784 tokens, 16 for each of 299 ids")
    ids.write_bytes(npy_header(np.dtype("<u4"), 600) + bytes(2400))
    refused("sample ids of uint64, got uint16, and 600 sample ids of uint32")
    ids.write_bytes(b"")
    refused("sample ids")
    ids.write_bytes(full[:128])  # Nothing after the header.
    refused("as its header says")
    ids.write_bytes(full)
    tokens.write_bytes(b"\x93NUMPY")
    refused("NumPy header")
