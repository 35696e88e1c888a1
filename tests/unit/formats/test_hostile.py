"""Small files that claim to be large: an error that names the file, in bounded memory."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from forebay.convert import convert
from forebay.errors import DatasetError, UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.sources import open_source
from forebay.storage.compression import bounded_unpack, check_unpacked

GIB = 1 << 30
MOST_MIB = 600  # Above what the interpreter with all imports takes.

CHILD = """
import json, resource, sys
from pathlib import Path
from forebay.cli import main
import forebay.convert, forebay.formats.base, forebay.doctor, forebay.load.sources
[*forebay.formats.base.formats()]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = [main(argv) for argv in json.loads(sys.argv[1])]
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"codes": codes, "mib": (after - before) >> 10}))
"""


@pytest.fixture(scope="module")
def zeros() -> bytes:
    """1 GiB of zeros in 32 KB."""
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=GIB)
    return b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()


def mds(folder: Path, packed: bytes, compression: str, samples: int = 1000, claimed: int = GIB) -> None:
    folder.mkdir()
    (folder / "shard.00000.mds.x").write_bytes(packed)
    entry = {
        "column_encodings": ["ndarray:uint16"],
        "column_names": ["tokens"],
        "column_sizes": [None],
        "compression": compression,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": claimed, "hashes": {}},
        "samples": samples,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": {"basename": "shard.00000.mds.x", "bytes": len(packed), "hashes": {}},
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))


def npy(shape: tuple[int, ...], dtype: str) -> bytes:
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head + bytes(64)


def npz(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", npy((448 << 20,), "|u1")[:-64] + bytes(448 << 20))


def tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def test_small_files_do_not_take_gigabytes(tmp_path: Path, zeros: bytes) -> None:
    makes: dict[str, Callable[[Path], None]] = {
        "mds": lambda path: mds(path, zeros, "zstd"),
        "mds_brotli": lambda path: mds(
            path, pa.compress(bytes(1 << 20), "brotli", asbytes=True), "br", claimed=(1 << 32) - 1
        ),
        "mds_snappy": lambda path: mds(path, b"\xff\xff\xff\xff\x0f" + bytes(100), "snappy", claimed=(1 << 32) - 1),
        "mds_samples": lambda path: mds(path, zstandard.compress(bytes(100 << 20)), "zstd", 25 << 20, 100 << 20),
        "bomb.npz": npz,
        "rows.npy": lambda path: path.write_bytes(npy((10, 10**12), "<f8")) and None,
        "array.tar": lambda path: tar(path, [("a.npy", npy((10**11,), "<f8"))]),
    }
    arguments = []
    for name, make in makes.items():
        make(tmp_path / name)
        arguments.append(["convert", str(tmp_path / name), str(tmp_path / "out"), "--to", "parquet", "--quiet"])
        if "." not in name:
            arguments += [["inspect", str(tmp_path / name)], ["doctor", str(tmp_path / name)]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=_limit)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["codes"]) == {1}, list(zip(arguments, report["codes"]))
    assert report["mib"] < MOST_MIB
    assert "Traceback" not in done.stderr
    for name in makes:
        assert name in done.stderr, name
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


def test_blocks_within_bounds_are_unpacked() -> None:
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


def test_a_damaged_index_is_no_table(tmp_path: Path) -> None:
    """The index of a token dataset that cannot be read is not converted in its place."""
    mds(tmp_path / "mds", b"x", "zstd", 1, 100)
    with pytest.raises(DatasetError, match="shard"):
        convert(tmp_path / "mds", tmp_path / "out", "jsonl", ConvertOptions())


@pytest.mark.parametrize("stream", [False, True])
def test_every_word_of_an_arrow_file_may_be_wrong(tmp_path: Path, stream: bool) -> None:
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
