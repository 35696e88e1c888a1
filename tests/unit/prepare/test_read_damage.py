"""Reading what is cut off, altered or hostile: nothing crashes or hangs, and good documents are kept."""

import gzip
import io
import json
import tarfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CorruptInputError, PrepareError
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions, open_input
from forebay.prepare.inputs import read_split
from forebay.storage.compression import unpack_stream
from support.archives import tar_bytes
from support.preparing import problems
from support.preparing import read_records as records

LINES = b"".join(json.dumps({"id": i, "text": f"document {i * 7919}"}).encode() + b"\n" for i in range(300))


def lz4(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKERS = {"gz": gzip.compress, "zst": zstandard.compress, "lz4": lz4}


def all_before_damage(packed: bytes, name: str, size: int) -> tuple[bytes, bool]:
    stream, got = unpack_stream(io.BytesIO(packed), name, max_ratio=2000), b""
    try:
        while data := stream.read(size):
            got += data
    except CorruptInputError:
        with pytest.raises(CorruptInputError):
            stream.readline()
        return got, True
    return got, False


@pytest.mark.parametrize("name", PACKERS)
def test_cut_off_anywhere(name):
    """Each stream that was cut gives the beginning of the text, and says that it was cut."""
    packed = PACKERS[name](LINES[:3000]) + PACKERS[name](LINES[3000:])
    border = len(PACKERS[name](LINES[:3000]))
    for stop in range(1, len(packed), 3):
        got, damaged = all_before_damage(packed[:stop], name, 1000)
        if name == "gz":
            parts = (packed[: min(stop, border)], packed[border:stop])
            assert got == b"".join(zlib.decompressobj(31).decompress(part) for part in parts)
        assert LINES.startswith(got)
        assert damaged == (stop != border)
    assert all_before_damage(packed, name, 777) == (LINES, False)


@given(st.sampled_from(["gz", "zst", "lz4", "bz2", "xz"]), st.binary(max_size=300), st.integers(1, 400))
def test_any_bytes_may_be_given_as_packed(name, data, size):
    assert isinstance(all_before_damage(data, name, size)[0], bytes)


def test_damage_in_a_table_costs_its_row_group(tmp_path):
    texts = [f"document {i} " + "y" * 500 for i in range(40)]
    sink = io.BytesIO()
    table = pa.table({"text": texts})
    pq.write_table(table, sink, row_group_size=10, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(sink.getvalue())
    index = data.index(b"document 15 ")
    data[index] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    assert [r.text for r in records(tmp_path / "a.parquet") if not r.problem] == texts[:10] + texts[20:]
    assert ["crc checksum" in problem.lower() for problem in problems(tmp_path / "a.parquet")] == [True]


def test_damaged_tar_headers_cost_their_member(tmp_path):
    data = bytearray(tar_bytes({f"{index}.txt": b"%d" % index * 700 for index in range(5)}, tarfile.GNU_FORMAT))
    data[3 * 512 + 130] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    expected = [(name, "" if name else "a damaged header") for name in ("0", "", "2", "3", "4")]
    assert [(r.id, r.problem) for r in records(tmp_path / "a.tar")] == expected


def test_files_that_vanish_are_reported(tmp_path):
    source = InputFile(str(tmp_path / "gone"), "gone", "jsonl", "gz", 5, "")
    with pytest.raises(PrepareError, match="cannot read input"), open_input(source, ReadOptions()):
        pass
    (failed,) = read_split(InputSplit((source,)), ReadOptions())
    assert failed.failed and "cannot read input" in failed.problem


def test_zstd_windows_of_2_gib_are_read_where_they_are_allowed(tmp_path):
    """As of `zstd --long=31`: a stream asks for its window as memory, however little of it there is."""
    long = zstandard.ZstdCompressionParameters.from_level(1, window_log=31)
    packer = zstandard.ZstdCompressor(compression_params=long).compressobj()
    packed = packer.compress(LINES) + packer.flush()
    assert packed[5] >> 3 == 31 - 10
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert [r.problem for r in records(tmp_path / "a.jsonl.zst", max_window_bytes=1 << 31)] == [""] * 300
    (refused,) = records(tmp_path / "a.jsonl.zst", format="jsonl")
    assert "its window is 2147483648 bytes" in refused.problem and "read.max_window_bytes" in refused.problem
