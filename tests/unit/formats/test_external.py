"""Datasets of other tools: golden files of the real libraries, damage of every kind, sizes beyond memory."""

import bz2
import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from forebay.dataset.slices import Slice
from forebay.doctor import CheckOptions, examine
from forebay.errors import DatasetError, UsageError
from forebay.formats import GUESSED, ExternalDataset, open_external
from forebay.formats.external import MAX_TOKENS, fingerprint
from forebay.formats.vectors import npy_header, sample_id
from forebay.load.loader import Loader
from support.foreign_datasets import FOREIGN, STOPS, STREAM
from support.token_shards import write_shard


def opened(path: Path | str, **options: Any) -> ExternalDataset:
    result = open_external(path, **options)
    assert result is not None
    return result


def read_all(dataset: ExternalDataset) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, and the document ends counted over all slices."""
    slices = [dataset.open_slice(i) for i in range(dataset.num_slices)]
    bases = np.cumsum([0, *(len(item.tokens) for item in slices)])
    tokens = np.concatenate([item.tokens for item in slices])
    stops = np.concatenate([item.document_ends.astype(np.int64) + base for item, base in zip(slices, bases)])
    return tokens.astype(np.int64), stops


def is_view(item: Slice, dataset: ExternalDataset) -> bool:
    """Return whether a slice's tokens are in the map of its file."""
    memory = dataset._maps.get(item.path)
    if memory is None:
        return False
    first, last = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    return first <= item.tokens.ctypes.data and item.tokens.ctypes.data + item.tokens.nbytes <= last


def copied(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(FOREIGN / name, tmp_path / name))


@contextmanager
def changed_index(folder: Path) -> Iterator[dict]:
    """Have the index of a directory for a change; it is written at the end."""
    path = folder / "index.json"
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def pack_shard(folder: Path, shard: dict, compression: str, pack: Callable[[bytes], bytes]):
    """Replace a shard of MDS by a packed one."""
    raw = folder / shard["raw_data"]["basename"]
    packed = raw.with_name(f"{raw.name}.{compression}")
    packed.write_bytes(pack(raw.read_bytes()))
    raw.unlink()
    shard["compression"] = compression
    shard["zip_data"] = {"basename": packed.name, "bytes": packed.stat().st_size, "hashes": {}}


@pytest.mark.parametrize(
    "name, options, dtype, view, slices",
    [
        ("megatron_u16", {}, "U16", True, 1),
        ("megatron_i32", {}, "U32", True, 1),
        ("mds_raw", {}, "U16", False, 3),
        ("mds_zstd", {}, "U32", False, 6),
        ("mds_bytes", {"dtype": "int64"}, "U32", False, 2),
        ("litdata", {}, "U32", True, 3),
        ("arrow", {}, "U32", False, 2),
    ],
)
def test_golden_files_hold_the_documents_that_were_written(name, options, dtype, view, slices):
    dataset = opened(FOREIGN / name, **options)
    tokens, stops = read_all(dataset)
    assert tokens.tolist() == STREAM.tolist()
    assert stops.tolist() == STOPS.tolist()
    assert (dataset.manifest.dtype, dataset.num_tokens, dataset.manifest.documents) == (dtype, len(STREAM), len(STOPS))
    assert (dataset.num_slices, dataset.table.count.sum()) == (slices, len(STREAM))
    assert all(is_view(dataset.open_slice(i), dataset) is view for i in range(slices))
    assert not any(dataset.open_slice(i).tokens.flags.writeable for i in range(slices))
    assert dataset.verify().ok
    assert dataset.format in name and not dataset.has_hashes
    dataset.release(0, dataset.open_slice(0))
    assert read_all(dataset)[0].tolist() == STREAM.tolist()


def test_a_fixed_shape_of_mds_is_a_view_and_arrow_batches_are_mapped():
    dataset = opened(FOREIGN / "mds_fixed")
    tokens, stops = read_all(dataset)
    assert tokens.tolist() == STREAM[: len(STREAM) // 16 * 16].tolist() and set(np.diff(stops)) == {16}
    assert all(is_view(dataset.open_slice(i), dataset) for i in range(dataset.num_slices))
    rows = opened(FOREIGN / "arrow")
    with Path("/proc/self/maps").open() as maps:
        spans = [line.split()[0].split("-") for line in maps if "arrow/data-" in line]
    for i in range(rows.num_slices):
        position = rows.open_slice(i).tokens.ctypes.data
        assert any(int(a, 16) <= position < int(b, 16) for a, b in spans)


def test_chunks_of_litdata_are_not_read_as_tokens(tmp_path):
    chunk = copied(tmp_path, "litdata") / "chunk-0-0.bin"
    with pytest.raises(UsageError, match="LitData"):
        open_external(chunk, dtype="uint32")
    assert [finding.fault for finding in examine([chunk], CheckOptions())[0].findings] == ["chunks-as-tokens"]


@pytest.mark.parametrize(
    "change, match",
    [
        ({"encryption": {"algorithm": "fernet"}}, "config.encryption"),
        ({"compression_level": "batch"}, "config.compression_level"),
        ({"item_loader": "TemporalArrayLoader"}, "config.item_loader"),
        ({"data_format": ["pickle"]}, "config.data_format"),
        ({"data_spec": '[1, {"children_spec": null, "context": null}, 2]', "data_format": ["str", "str"]}, "each of 2"),
        ({"data_spec": "[" * 100_000}, "expected LitData's index"),
    ],
)
def test_an_index_of_litdata_that_is_not_read_says_why(tmp_path, change, match):
    folder = copied(tmp_path, "litdata")
    with changed_index(folder) as index:
        index["config"] |= change
    with pytest.raises(DatasetError, match=match):
        open_external(folder)


@pytest.mark.parametrize("change", [{"dim": 7}, {"chunk_size": 3}, {"chunk_bytes": 9}, {"filename": "../a.bin"}])
def test_a_chunk_of_litdata_that_its_index_contradicts_is_refused(tmp_path, change):
    folder = copied(tmp_path, "litdata")
    with changed_index(folder) as index:
        index["chunks"][1] |= change
    with pytest.raises(DatasetError):
        read_all(opened(folder))
    assert examine([folder], CheckOptions())[0].findings


@pytest.mark.parametrize("name, file", [("megatron_u16", "text_document.bin"), ("litdata", "chunk-0-0.bin")])
def test_identity_is_of_the_content_and_not_of_the_place(tmp_path, name, file):
    copy = copied(tmp_path, name)
    assert opened(copy).id == opened(FOREIGN / name).id
    data = bytearray((copy / file).read_bytes())
    data[-1] ^= 1
    (copy / file).write_bytes(data)
    assert opened(copy).id != opened(FOREIGN / name).id


def test_other_compressions_of_mds(tmp_path):
    for name, pack in (
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("br", lambda raw: pa.compress(raw, "brotli", asbytes=True)),
        ("snappy", lambda raw: pa.compress(raw, "snappy", asbytes=True)),
    ):
        folder = Path(shutil.copytree(FOREIGN / "mds_raw", tmp_path / name))
        with changed_index(folder) as index:
            for shard in index["shards"]:
                pack_shard(folder, shard, name, pack)
        assert read_all(opened(folder))[0].tolist() == STREAM.tolist()


@pytest.mark.parametrize("extra", [b"x", b"x" * 4096])
def test_a_compressed_shard_is_of_the_size_that_its_index_says(tmp_path, extra):
    folder = copied(tmp_path, "mds_raw")
    with changed_index(folder) as index:
        pack_shard(folder, index["shards"][0], "gz", lambda raw: gzip.compress(raw + extra))
    with pytest.raises(DatasetError, match="once decompressed"):
        opened(folder).open_slice(0)


def test_a_loader_guesses_the_type_of_headerless_tokens(tmp_path, caplog):
    for name, kind in {"train": "<u2", "t32": "<u4", "t64": "<i8"}.items():
        (tmp_path / f"{name}.bin").write_bytes(STREAM.astype(kind).tobytes())
        for path in (f"{name}.bin", f"{name}*.bin"):
            caplog.clear()
            batch = next(iter(Loader(tmp_path / path, seq_len=16, batch_size=1, shuffle=False)))
            assert batch.inputs[0].tolist() == STREAM[:16].tolist() and np.dtype(kind).name in caplog.text
    with pytest.raises(UsageError, match=r"one set of token files, got .*, train\*\.bin") as error:
        Loader(tmp_path, seq_len=16, batch_size=1)
    advised = str(error.value).partition("such as ")[2].rstrip(".")
    assert [path.name for path in open_external(advised, dtype=GUESSED).files] == ["train.bin"]


def test_mds_columns():
    with pytest.raises(UsageError, match="dtype='int64'"):
        open_external(FOREIGN / "mds_bytes")
    for name, column in (("mds_raw", "text"), ("mds_zstd", "source")):
        with pytest.raises(UsageError, match=r"a column of tokens.*open_external\(PATH, column='NAME'\)"):
            open_external(FOREIGN / name, column=column)


def test_an_mds_index_cannot_name_files_outside_its_directory(tmp_path):
    folder = copied(tmp_path, "mds_raw")
    outside = tmp_path / "outside.mds"
    shutil.copy(folder / "shard.00000.mds", outside)  # Right in every byte: only its place is wrong.
    (folder / "sub").mkdir()
    for name in ("../outside.mds", str(outside), "sub/../../outside.mds", "./shard.00000.mds", "", "sub//x", "a\\b"):
        with changed_index(folder) as index:
            index["shards"][0]["raw_data"]["basename"] = name
        with pytest.raises(DatasetError, match="inside the directory"):
            open_external(folder)
    shutil.copy(outside, folder / "sub" / "x.mds")  # As merged datasets have it.
    with changed_index(folder) as index:
        index["shards"][0]["raw_data"]["basename"] = "sub/x.mds"
    assert read_all(opened(folder))[0].tolist() == STREAM.tolist()


def test_a_column_of_mds_cannot_reach_into_the_next_sample(tmp_path):
    folder = copied(tmp_path, "mds_zstd")
    with changed_index(folder) as index:
        shard = index["shards"][0]
        shard["raw_data"]["hashes"] = {}
    packed, path = (folder / shard[key]["basename"] for key in ("zip_data", "raw_data"))
    raw = bytearray(zstandard.ZstdDecompressor().decompress(packed.read_bytes()))
    packed.unlink()
    path.write_bytes(raw)
    assert read_all(opened(folder))[0].tolist() == STREAM.tolist()
    position = int.from_bytes(raw[4:8], "little") + 4  # The size of `tokens` in sample 0, after that of `source`.
    size = int.from_bytes(raw[position : position + 4], "little")
    raw[position : position + 4] = (size + 4).to_bytes(4, "little")  # One token more: still well inside the shard.
    path.write_bytes(raw)
    with pytest.raises(DatasetError, match="inside its sample"):
        open_external(folder)


def test_nothing_known_is_none_and_ours_is_not_theirs(tmp_path):
    (tmp_path / "index.json").write_text('{"weight_map": {}}')
    assert open_external(tmp_path / "index.json") is open_external(tmp_path) is None
    np.save(tmp_path / "x.npy", np.arange(8, dtype=np.uint16))
    assert open_external(tmp_path) is not None
    (tmp_path / "manifest.json").write_text("{}")
    assert open_external(tmp_path) is None


def test_the_names_of_a_pair_of_files():
    for name in ("text_document.idx", "text_document.bin", "text_document"):
        assert read_all(opened(FOREIGN / "megatron_u16" / name))[0].tolist() == STREAM.tolist()


# Vectors: .npy, headerless, llm.c, Templar.


def test_the_sample_ids_of_templar():
    assert sample_id(np.arange(2048, dtype=np.uint32)) == 9727674481869147956
    assert sample_id(np.arange(2048, dtype=np.uint16)) == 8057394794387743395
    assert sample_id(np.empty(0, np.uint16)) == 13020603013274838756
    dataset = opened(FOREIGN / "templar")
    ids = dataset.sample_ids(dataset.parts[0])
    assert ids[0] == 9727674481869147956 and dataset.seq_len == 2048
    assert read_all(dataset)[0].tolist() == list(range(4096))
    assert is_view(dataset.open_slice(0), dataset) and dataset.verify().ok


def test_the_older_pair_of_files(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50000, 256).astype("<u2")
    tokens.tofile(tmp_path / "tokens.bin")
    np.array([sample_id(row) for row in tokens.reshape(-1, 32)], "<u8").tofile(tmp_path / "sample_ids.bin")
    assert read_all(opened(tmp_path))[0].tolist() == tokens.tolist()


def test_headerless_tokens_need_their_type_said(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros/a.bin").write_bytes(bytes(99))
    for path, dtype in (("train.bin", None), ("zeros/a.bin", "guessed")):
        with pytest.raises(UsageError, match=r"and no type.*open_external\(PATH, dtype='uint16'\)"):
            open_external(tmp_path / path, dtype=dtype)
    assert open_external(tmp_path) is None
    for message in ("uint16", "U16", np.uint16, np.dtype("<u2")):
        assert read_all(opened(tmp_path / "train.bin", dtype=message))[0].tolist() == tokens.tolist()
    assert opened(tmp_path, dtype="uint32").num_tokens == 500
    for wrong in ("float32", "text", ">u2", "uint8", 7):
        with pytest.raises(UsageError, match="dtype of tokens"):
            open_external(tmp_path / "train.bin", dtype=wrong)


def test_the_files_of_llm_c(tmp_path):
    for magic, version, kind in ((20240520, 1, np.uint16), (20240801, 7, np.uint32)):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, 300
        data = header.tobytes() + np.arange(300).astype(kind).tobytes()
        (tmp_path / "x_train_000001.bin").write_bytes(data)
        dataset = opened(tmp_path)
        assert read_all(dataset)[0].tolist() == list(range(300)) and is_view(dataset.open_slice(0), dataset)
    (tmp_path / "x_train_000001.bin").write_bytes(data[:-1])
    with pytest.raises(DatasetError, match="as its header says"):
        open_external(tmp_path)


def _npy(path, array):
    with path.open("wb") as file:
        np.save(file, array)


@pytest.mark.parametrize(
    "array, match",
    [
        (np.zeros((4, 64), np.uint16), r"got shape \[4, 64\]"),
        (np.zeros((), np.uint16), "got shape"),
        (np.zeros(64, np.int32), "expected tokens of uint16 or uint32"),
        (np.zeros(64, np.float32), "little-endian integers"),
        (np.zeros(64, ">u2"), "little-endian integers"),
        (np.zeros(64, [("a", "<u2")]), "little-endian integers"),
    ],
)
def test_arrays_that_are_no_vector_of_tokens(tmp_path, array, match):
    _npy(tmp_path / "train_000000.npy", array)
    with pytest.raises(DatasetError, match=match):
        open_external(tmp_path)


def test_files_and_ids_that_do_not_fit(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 32000, 640).astype(np.uint16)
    path, ids_path = write_shard(tmp_path, 0, tokens, 64)
    ids, good = np.fromfile(ids_path, "<u8"), path.read_bytes()

    def fails(match, error=DatasetError):
        with pytest.raises(error, match=match):
            open_external(tmp_path)

    for short in (9, 7, 0):  # 640 tokens are no multiple of 9 and 7.
        ids[:short].tofile(ids_path)
        fails("whole number of tokens")
    ids[:5].tofile(ids_path)  # A multiple: the ids themselves tell.
    fails("expected id")
    wrong = ids.copy()
    wrong[0] = 13020603013274838756
    wrong.tofile(ids_path)
    fails("known fault")
    ids_path.write_bytes(ids.tobytes()[:-3])
    fails("whole number of 8-byte numbers")
    _npy(ids_path, ids.astype(np.int64))
    fails("uint64")
    ids.tofile(ids_path)
    path.write_bytes(good[:-1])
    fails("truncated")
    path.write_bytes(good + b"\0\0")
    fails("appended")
    path.write_bytes(tokens.tobytes() + b"\0")
    fails("whole number of 2-byte")
    path.write_bytes(good)
    assert opened(tmp_path).num_tokens == 640


def test_verify_names_what_opening_could_not_see(tmp_path):
    tokens = np.random.default_rng(2).integers(0, 32000, 64 * 100).astype(np.uint32)
    path, _ = write_shard(tmp_path, 0, tokens, 64)
    write_shard(tmp_path, 1, tokens, 64)
    dataset = opened(tmp_path)
    assert (report := dataset.verify()).ok and report.level == "hash" and "BLAKE2b" in report.checks[-1]
    tokens[64 * 3] += 1
    path.write_bytes(path.read_bytes()[:128] + tokens.tobytes())
    assert opened(tmp_path).verify().changed == ["train_000000.npy"]
    path.unlink()
    assert dataset.verify().missing == ["train_000000.npy"]
    negative = tmp_path / "negative"
    negative.mkdir()
    np.full(100, -1, np.int32).tofile(negative / "a.bin")
    assert opened(negative / "a.bin", dtype="int32").verify().bad == ["a.bin"]


def test_a_file_that_shrinks_after_opening_is_not_read_beyond_its_end(tmp_path):
    for name, victim in (
        ("megatron_u16", "text_document.bin"),
        ("mds_raw", "shard.00000.mds"),
        ("templar", "train_000000.npy"),
    ):
        folder = copied(tmp_path, name)
        dataset = opened(folder)
        os.truncate(folder / victim, 100)
        with pytest.raises(DatasetError, match=r"expected \d+ bytes"):
            dataset.open_slice(0)
        assert not dataset.verify().ok


# Megatron.


def megatron(
    folder: Path, lengths: list[int], pointers: list[int], bounds: list[int], data: bytes, code: int = 8, **header: Any
) -> Path:
    """A pair of files by the published layout, with whatever in it."""
    raw = header.get("magic", b"MMIDIDX\x00\x00") + struct.pack("<Q", header.get("version", 1)) + bytes([code])
    raw += struct.pack("<QQ", header.get("sequences", len(lengths)), header.get("bounds", len(bounds)))
    raw += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    (folder / "t.idx").write_bytes(raw + header.get("tail", b""))
    (folder / "t.bin").write_bytes(data)
    return folder


def test_indexes_that_lie(tmp_path):
    data = np.arange(10, dtype="<u2").tobytes()
    good = {"lengths": [4, 6], "pointers": [0, 8], "bounds": [0, 1, 2], "data": data}
    assert opened(megatron(tmp_path, **good)).num_tokens == 10
    assert opened(megatron(tmp_path, **good, tail=b"\0\1")).num_tokens == 10  # Modes.
    assert opened(megatron(tmp_path, **{**good, "bounds": [0]})).manifest.documents == 2
    for change, match in (
        ({"pointers": [0, 10]}, "in the data's order"),
        ({"pointers": [0, -2]}, "in the data's order"),
        ({"pointers": [0, 1 << 62]}, "in the data's order"),
        ({"pointers": [0, (1 << 63) - 4]}, "in the data's order"),
        ({"lengths": [4, -6]}, "in the data's order"),
        ({"lengths": [4, 2**31 - 1]}, "truncated"),
        ({"bounds": [0, 3]}, "document bounds"),
        ({"bounds": [0, 2, 1]}, "document bounds"),
        ({"bounds": [1, 2]}, "document bounds"),
        ({"bounds": [0, -1]}, "document bounds"),
        ({"data": data + b"\0\0"}, "expected 20 bytes"),
        ({"data": data[:-2]}, "truncated"),
        ({"code": 6}, "integer type"),
        ({"code": 99}, "integer type"),
        ({"version": 2}, "version 1"),
        ({"sequences": 2**64 - 1}, "truncated"),
        ({"bounds": [0, 1, 2], "tail": b"\0"}, "truncated"),
    ):
        with pytest.raises(DatasetError, match=match):
            open_external(megatron(tmp_path, **{**good, **change}))
    (tmp_path / "t.bin").unlink()
    with pytest.raises(DatasetError, match=r"t\.bin beside it"):
        open_external(tmp_path)


def test_a_long_file_is_cut_at_document_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.formats.megatron.MAX_TOKENS", 64)
    monkeypatch.setattr("forebay.formats.megatron.MAX_COPIED_TOKENS", 64)
    monkeypatch.setattr("forebay.formats.megatron._CHUNK", 7)
    lengths = [5, 0, 30, 40, 64, 1, 200, 0, 0, 3, 60, 1, 0]
    total = sum(lengths)
    tokens = np.arange(total, dtype="<u2")
    pointers = (2 * np.cumsum([0, *lengths[:-1]])).tolist()
    folder = megatron(tmp_path, lengths, pointers, list(range(len(lengths) + 1)), tokens.tobytes())
    dataset = opened(folder)
    result, stops = read_all(dataset)
    assert result.tolist() == tokens.tolist()
    assert stops.tolist() == np.cumsum(lengths).tolist()
    counts = dataset.table.count.tolist()
    assert max(counts) <= 64 and counts == [35, 40, 64, 1, 64, 64, 64, 11, 61]


# Other saved datasets.


def test_a_saved_dataset_that_was_shuffled_is_refused(tmp_path):
    folder = copied(tmp_path, "arrow")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DatasetError, match="flatten_indices"):
        open_external(folder)
    for name in ("../x", "", 7):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(DatasetError, match="names of files"):
            open_external(folder)
    with pytest.raises(UsageError, match="got input_ids"):
        open_external(FOREIGN / "arrow", column="text")


@pytest.mark.parametrize(
    "change, shards, match",
    [
        ({"column_encodings": ["ndarray:uint16:x"]}, 3, "expected a shape of numbers"),
        (
            {"column_encodings": ["ndarray:uint16:3"], "column_sizes": [7]},
            3,
            "expected 6 bytes of column tokens, got 7",
        ),
        ({"column_encodings": ["pkl"]}, 3, "expected a column of tokens, lists of integers"),
        ({"column_sizes": [2]}, 3, "expected vectors of tokens, got 30 dimensions"),
        ({"column_sizes": [2]}, 1, "expected the same columns"),
        ({"column_names": []}, 3, "expected the same columns"),
        ({"samples": 1}, 1, "expected 1 samples, as its index says, got 10"),
        ({"samples": 2**40}, 1, "less than or equal to 1073741823"),
    ],
)
def test_an_mds_index_that_lies(tmp_path, change, shards, match):
    folder = copied(tmp_path, "mds_raw")
    with changed_index(folder) as index:
        for shard in index["shards"][:shards]:
            shard |= change
    with pytest.raises((DatasetError, UsageError), match=match):
        read_all(opened(folder))


# Sizes: sparse files, 64-bit arithmetic.


def test_five_terabytes_of_npy_open_at_once_and_are_indexed_to_the_last_token(tmp_path):
    count = (5 << 40) // 2 + 12345
    path = tmp_path / "train_000000.npy"
    with path.open("wb") as file:
        file.write(npy_header(np.dtype("<u2"), count))
        file.seek(2 * (count - 3), os.SEEK_CUR)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    dataset = opened(path)
    assert dataset.num_tokens == count and path.stat().st_blocks < 1000
    assert dataset.num_slices == -(-count // MAX_TOKENS)
    last = dataset.open_slice(dataset.num_slices - 1)
    assert last.tokens[-3:].tolist() == [7, 8, 9] and is_view(last, dataset)
    loader = Loader(dataset, seq_len=1 << 12, batch_size=2, shuffle=False)
    assert loader.order.num_samples * 4096 + loader.tail_tokens == count


def test_a_fingerprint_tells_size_and_pieces(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    before = fingerprint(path, 1)
    for position in (0, (1 << 20) - 1):
        path.write_bytes(bytes(position) + b"\1" + bytes((1 << 20) - position - 1))
        assert fingerprint(path, 1) != before
    path.write_bytes(bytes((1 << 20) + 1))
    assert fingerprint(path, 1) != before
