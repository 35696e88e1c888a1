"""Small files that claim to be large: an error that names the file, in bounded memory."""

import json
import struct
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from forebay.cli import main
from forebay.convert import convert
from forebay.errors import DatasetError, UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.sources import open_source
from forebay.storage.compression import bounded_unpack, check_unpacked
from support.archives import tar_bytes
from support.peak_memory import peak_growth_mib

SIZE = 256 << 20  # Of what a file says that it holds.
MAX_MIB = 150  # Of memory above what was taken before.


@pytest.fixture(scope="module")
def zeros() -> bytes:
    """256 MiB of zeros in 8 KB."""
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=SIZE)
    return b"".join(packer.compress(bytes(1 << 24)) for _ in range(SIZE >> 24)) + packer.flush()


def mds(folder: Path, packed: bytes, compression: str, samples: int = 1000, claimed: int = SIZE):
    folder.mkdir()
    (folder / "shard.00000.mds.x").write_bytes(packed)
    entry = {
        "column_encodings": ["ndarray:uint16"], "column_names": ["tokens"], "column_sizes": [None], "format": "mds",
        "compression": compression, "hashes": [], "samples": samples, "size_limit": 1 << 26, "version": 2,
        "raw_data": {"basename": "shard.00000.mds", "bytes": claimed, "hashes": {}},
        "zip_data": {"basename": "shard.00000.mds.x", "bytes": len(packed), "hashes": {}},
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))


def npy(shape: tuple[int, ...], dtype: str) -> bytes:
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head + bytes(64)


def npz(path: Path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", npy((SIZE,), "|u1")[:-64] + bytes(SIZE))


def refused(command: list[str]):
    assert main(command) == 1, command


def test_small_files_do_not_take_their_claimed_memory(tmp_path, zeros, capsys):
    packed = pa.compress(bytes(1 << 20), "brotli", asbytes=True)
    makes = {
        "mds": lambda path: mds(path, zeros, "zstd"),
        "mds_brotli": lambda path: mds(path, packed, "br", claimed=(1 << 32) - 1),
        "mds_snappy": lambda path: mds(path, b"\xff\xff\xff\xff\x0f" + bytes(100), "snappy", claimed=(1 << 32) - 1),
        "mds_samples": lambda path: mds(path, zstandard.compress(bytes(100 << 20)), "zstd", 25 << 20, 100 << 20),
        "bomb.npz": npz,
        "rows.npy": lambda path: path.write_bytes(npy((10, 10**12), "<f8")),
        "array.tar": lambda path: path.write_bytes(tar_bytes({"a.npy": npy((10**11,), "<f8")})),
    }
    for name, make in makes.items():
        make(path := tmp_path / name)
        commands = [["convert", str(path), str(tmp_path / "out"), "--to", "parquet", "--quiet"]]
        if "." not in name:
            commands += [["inspect", str(path)], ["doctor", str(path)]]
        for command in commands:
            assert peak_growth_mib(lambda command=command: refused(command)) < MAX_MIB, command
        assert name in capsys.readouterr().err
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]


def test_blocks_within_bounds_are_unpacked():
    data = bytes(range(256)) * 400
    for name, packed in {
        "zstd": zstandard.compress(data),
        "br": pa.compress(data, "brotli", asbytes=True),
        "snappy": pa.compress(data, "snappy", asbytes=True),
    }.items():
        for size in (10, len(data), len(data) + 1):
            assert bounded_unpack(packed, name, size, "here") == data[:size]
        with pytest.raises(DatasetError, match="here: expected"):
            bounded_unpack(b"\xff" * 9, name, len(data), "here")
    check_unpacked("here", 1 << 30, 200 << 30)
    with pytest.raises(DatasetError, match="here: expected at most 134217728 bytes"):
        check_unpacked("here", 1000, (128 << 20) + 1)


def test_a_damaged_index_is_no_table(tmp_path):
    """The index of a token dataset that cannot be read is not converted in its place."""
    mds(tmp_path / "mds", b"x", "zstd", 1, 100)
    with pytest.raises(DatasetError, match="shard"):
        convert(tmp_path / "mds", tmp_path / "out", "jsonl", ConvertOptions())


@pytest.mark.parametrize("stream", [False, True])
def test_every_word_of_an_arrow_file_may_be_wrong(tmp_path, stream):
    path, out = tmp_path / "a.arrow", pa.BufferOutputStream()
    batch = pa.record_batch({"text": ["some words", "others"] * 8})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    full, refused = out.getvalue().to_pybytes(), 0
    for index in range(0, len(full) - 8, 4):
        for word in (-1, 1 << 62):
            path.write_bytes(full[:index] + struct.pack("<q", word) + full[index + 8 :])
            try:
                for rows in open_source(path, ConvertOptions()).batches():
                    rows.validate(full=True)
            except DatasetError as error:
                assert path.name in str(error)
                refused += 1
            except UsageError:
                assert index == 0  # No Arrow by its first bytes.
    assert refused > 50
