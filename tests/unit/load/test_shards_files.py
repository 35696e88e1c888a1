"""Shards written, and every sample compared with its id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.formats import open_external
from forebay.formats.shard_writer import write_shards
from forebay.formats.vectors import npy_header, sample_id, vector_in
from forebay.load.shard_files import (
    SampleCheck,
    ShardDataset,
    ShardInfo,
    find_shard,
    list_shards,
    pair_map,
    read_layout,
    verify_pair,
)
from forebay.storage.base import PathOrigin, as_object_origin
from forebay.storage.origins import open_origin
from support.origin_server import OriginServer

L = 16


def tokens_of(count: int, dtype: Any = np.uint16, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(dtype)


@pytest.mark.parametrize("generation", ["bin", "npy"])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_both_generations_are_written_and_read(tmp_path: Path, generation: Any, header: bool, dtype: str) -> None:
    """Also without NumPy's header, as the first generation wrote them."""
    tokens = tokens_of(100 * L + 5, dtype)
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
        assert ids.tolist() == [sample_id(row) for row in item.reshape(-1, L)]
        if generation == "bin":
            assert ids.tolist() == np.fromfile(shard.ids, "<u8").tolist()
        else:
            assert ids.tolist() == np.load(shard.ids).tolist()
        got.append(item)
    assert np.concatenate(got).tolist() == tokens[: 100 * L].tolist()
    dataset = open_external(tmp_path, dtype=None if header else dtype)
    assert dataset is not None and dataset.num_tokens == 100 * L
    assert dataset.verify().ok


def test_a_dataset_becomes_shards(tmp_path: Path) -> None:
    write_shards([tokens_of(50 * L)], tmp_path / "a", seq_len=L, shard_tokens=20 * L)
    dataset = open_external(tmp_path / "a")
    assert dataset is not None
    again = write_shards(dataset, tmp_path / "b", seq_len=2 * L, dtype="uint32", generation="bin")
    assert [path.tokens.name for path in again] == ["train_000000.npy"]
    assert np.load(again[0].tokens).tolist() == tokens_of(50 * L).tolist()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for wrong in [{"seq_len": 0}, {"shard_tokens": 3}, {"generation": "x"}, {"dtype": "int64"}]:
        with pytest.raises(UsageError):
            write_shards([tokens_of(64)], tmp_path, **{"seq_len": L, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="vectors of integers"):
        write_shards([tokens_of(64).reshape(2, -1)], tmp_path, seq_len=L)
    with pytest.raises(DatasetError, match="70000"):
        write_shards([np.array([1] * 20 + [70_000], np.uint32)], tmp_path, seq_len=L, dtype="uint16")
    for nothing in ([], [tokens_of(3)]):
        with pytest.raises(DatasetError):
            write_shards(nothing, tmp_path, seq_len=L)
    assert not list(tmp_path.iterdir())


def shard(folder: Path, count: int = 300, **settings: Any) -> tuple[Path, Path]:
    header = settings.pop("header", True)
    created = write_shards([tokens_of(count * L)], folder, seq_len=L, **settings)[0]
    if not header:
        created.tokens.write_bytes(created.tokens.read_bytes()[128:])
    return created.tokens, created.ids


def layout_of(folder: Path, index: int = 0, seq_len: int = L) -> ShardInfo:
    origin = PathOrigin(folder)
    return read_layout(origin, find_shard(origin, index), seq_len)


def verified(folder: Path, index: int = 0, seq_len: int = L) -> ShardDataset:
    shard = layout_of(folder, index, seq_len)
    return ShardDataset(shard, *verify_pair(folder, shard))


def wrong_chunks_of(folder: Path, ids: Path) -> tuple[list[int], SampleCheck, ShardInfo]:
    """The chunks of the tokens that do not have the ids."""
    shard, raw = layout_of(folder), (folder / "train_000000.npy").read_bytes()
    info, id_info = shard.infos()
    check = SampleCheck(shard, np.fromfile(ids, "<u8", offset=id_info.offset))
    size, data = info.chunk_bytes, memoryview(raw)[info.offset :]
    assert len(data) == info.bytes and not size % shard.sample_bytes
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    return [chunk for chunk, part in enumerate(chunks) if not check(chunk, part)], check, shard


def test_a_whole_shard_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, ids = shard(tmp_path)
    assert wrong_chunks_of(tmp_path, ids)[0] == []
    assert len(verified(tmp_path)) == 300
    with monkeypatch.context() as patched:
        patched.setattr(SampleCheck, "__call__", None)
        assert len(verified(tmp_path)) == 300  # Not hashed again.
        os.utime(tokens)
        with pytest.raises(TypeError):  # It was written to.
            verified(tmp_path)
    assert verified(tmp_path, seq_len=0).sample_ids.tolist() == verified(tmp_path).sample_ids.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [tokens.name, ids.name, pair_map(tmp_path, layout_of(tmp_path)).name]
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("judge")
    tokens, ids = shard(folder, 6000)
    raw = bytearray(tokens.read_bytes()[data.draw(st.sampled_from([0, 128])) :])
    tokens.write_bytes(raw)
    offset = len(raw) % 1000
    index = data.draw(st.integers(offset, len(raw) - 1))
    raw[index] ^= 1 << data.draw(st.integers(0, 7))
    tokens.write_bytes(raw)
    invalid = (index - offset) // (2 * L)
    wrong, check, found = wrong_chunks_of(folder, ids)
    assert wrong == [(index - offset) // found.infos()[0].chunk_bytes] and set(check.wrong) == {invalid}
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"sample {invalid} at byte {offset + invalid * 2 * L} .*remap={{0: "):
            verified(folder)
    assert tokens.read_bytes() == raw


def test_mended_bytes_are_judged_anew(tmp_path: Path) -> None:
    tokens, _ = shard(tmp_path)
    full = tokens.read_bytes()
    tokens.write_bytes(full[:5000] + b"\xff\xff\xff" + full[5003:])
    with pytest.raises(IntegrityError):
        verified(tmp_path)
    tokens.write_bytes(full)
    assert verified(tmp_path)[7].tolist() == tokens_of(300 * L)[7 * L : 8 * L].tolist()


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    tokens, ids = shard(tmp_path)
    size = tokens.stat().st_size

    def refused(match: str, seq_len: int = L) -> None:
        with pytest.raises(DatasetError, match=match):
            layout_of(tmp_path, seq_len=seq_len)

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


def test_a_header_of_any_length_is_read_and_no_more(tmp_path: Path) -> None:
    tokens, _ = shard(tmp_path)
    full, reads = tokens.read_bytes(), list[tuple[int, int]]()
    head = full[10:128].rstrip().ljust(1013) + b"\n"
    tokens.write_bytes(full[:8] + len(head).to_bytes(2, "little") + head + full[128:])

    class Recorded(PathOrigin):
        def read(self, name: str, start: int, stop: int, etag: str = "") -> Any:
            if name == tokens.name:
                reads.append((start, stop))
            return super().read(name, start, stop, etag)

    origin = Recorded(tmp_path)
    found = read_layout(origin, find_shard(origin, 0), L)
    assert len(found.tokens.header) == 1024 and reads == [(0, 128), (0, 1024)]
    assert verified(tmp_path)[299].tolist() == tokens_of(300 * L)[299 * L :].tolist()


def test_indexes_of_terabytes_are_64_bit(tmp_path: Path) -> None:
    """A shard of 5 TB, sparse: its middle and its end are where they should be."""
    seq_len, count = 2048, 1_220_703_125  # 2.5e12 tokens of 2 bytes
    tokens = tmp_path / "train_000000.npy"
    head = npy_header(np.dtype("<u2"), count * seq_len)
    with tokens.open("wb") as file:
        file.write(head)
        try:
            file.truncate(len(head) + 2 * seq_len * count)
        except OSError:
            pytest.skip("no sparse file of 5 TB here")
        for sample in (0, count // 2, count - 1):
            file.seek(len(head) + sample * seq_len * 2)
            file.write((np.arange(seq_len) + sample % 1000).astype("<u2").tobytes())
    vector = vector_in(tokens, head, tokens.stat().st_size)
    assert vector.count == 2_500_000_000_000 and vector.count * 2 + 128 == vector.file_bytes
    samples = np.memmap(tokens, "<u2", "r", vector.offset).reshape(-1, seq_len)
    for sample in (0, count // 2, count - 1):
        assert samples[np.array([sample])][0].tolist() == [(k + sample % 1000) for k in range(seq_len)]
    dataset = open_external(tokens)
    assert dataset is not None and dataset.num_tokens == 2_500_000_000_000


def test_shards_are_counted_and_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"expected shards train_000000\.npy"):
        list_shards(PathOrigin(tmp_path))
    write_shards([tokens_of(90 * L)], tmp_path, seq_len=L, shard_tokens=30 * L)
    assert list_shards(PathOrigin(tmp_path)) == [0, 1, 2]
    with OriginServer(tmp_path) as server:
        assert list_shards(as_object_origin(open_origin(server.url))) == [0, 1, 2]  # It cannot list.
