"""Files that a stranger wrote: tables that unfold, and names that lead out of a folder."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay.convert import convert
from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.dataset.parquet_pages import read_footer
from forebay.errors import DatasetError
from forebay.formats.conversion import ConvertOptions

in_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
MOST_KIB = 250 << 10  # of a process that imports what it needs, and refuses
REFUSE = """
import sys
from pathlib import Path
from forebay.dataset.manifest import SliceTable
from forebay.errors import DatasetError
try:
    SliceTable.from_parquet(Path(sys.argv[1]).read_bytes())
except DatasetError as error:
    # Not ru_maxrss: it begins with that of the process which started this one.
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory_kib(data: bytes, folder: Path) -> int:
    """What a process takes that refuses a table."""
    (folder / "table").write_bytes(data)
    done = subprocess.run([sys.executable, "-c", REFUSE, folder / "table"], capture_output=True, text=True, check=True)
    assert done.stdout, "the table was accepted"
    return int(done.stdout.split()[0])


def parquet(columns: dict, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd", store_schema=False, write_statistics=False, **options)
    return sink.getvalue()


def columns(num: int, **other: Any) -> dict:
    ones = np.ones(num, np.int64)
    hashes = pa.array([bytes(32)] * num, pa.binary(32))
    names = pa.array([f"{i}.safetensors" for i in range(num)])
    return {"name": names, "bytes": ones, "sha256": hashes, "count": ones, "documents": ones} | other


@in_linux
def test_a_hash_that_is_a_text_is_refused_before_it_is_read(tmp_path):
    """Finding 10: 65,536 rows whose hash is the same 20 KB, told once."""
    num = 1 << 16
    hashes = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), pa.array([b"\x07" * 20_000], pa.binary()))
    assert memory_kib(parquet(columns(num, sha256=hashes)), tmp_path) < MOST_KIB


@in_linux
def test_a_page_that_unfolds_is_refused_by_its_own_header(tmp_path):
    """The footer's totals may say anything: a reader allocates what the page's header says."""
    data = parquet(columns(256, name=pa.repeat("n" * (1 << 20), 256)), use_dictionary=False)
    assert len(data) < 2 << 20 and memory_kib(data, tmp_path) < MOST_KIB


@in_linux
def test_a_name_repeated_by_a_dictionary_is_counted(tmp_path):
    num, name = (1 << 18), "n" * 1000 + ".safetensors"
    names = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), pa.array([name]))
    noise = np.random.default_rng(1).integers(0, 1 << 60, num)  # rows that cost bytes
    assert memory_kib(parquet(columns(num, name=names, bytes=noise, count=noise)), tmp_path) < MOST_KIB


@pytest.mark.parametrize("kind", ["list", "struct", "float", "extra", "missing", "delta", "wide"])
def test_a_table_of_another_form_is_refused(kind):
    other = columns(4)
    options = {}
    match kind:
        case "list":
            other["bytes"] = pa.array([[1], [1], [1], [1]])
        case "struct":
            other["name"] = pa.array([{"a": "x"}] * 4)
        case "float":
            other["count"] = np.ones(4)
        case "extra":
            other["more"] = pa.array([[b"x"]] * 4)
        case "missing":
            del other["documents"]
        case "wide":
            other["sha256"] = pa.array([bytes(64)] * 4, pa.binary(64))
        case "delta":
            options = {"use_dictionary": False, "column_encoding": {"name": "DELTA_BYTE_ARRAY"}}
    with pytest.raises(DatasetError):
        SliceTable.from_parquet(parquet(other, **options))


def test_footers_are_read_within_bounds():
    good = SliceTable.from_rows([SliceInfo(0, "a.safetensors", 1, "ab" * 32, 1, 1)]).to_parquet()
    assert [column.name for column in read_footer(good).columns] == ["name", "bytes", "sha256", "count", "documents"]
    nested = b"\x1c" * 100_000
    for footer in (b"", b"\x00", b"\x15", b"\x19\xfc\xff\xff\xff\x7f", nested, zstandard.compress(bytes(1000))):
        with pytest.raises(DatasetError):
            SliceTable.from_parquet(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")


CLIMBING = ("../../climb", "/absolute/path", "a/../../b", "a\\..\\b", "a\x1b[2J")


@pytest.mark.parametrize("key", CLIMBING)
def test_keys_that_lead_out_of_a_folder_are_not_written(key, tmp_path):
    """Finding 12."""
    pq.write_table(pa.table({"__key__": ["good", key], "text": ["a", "b"]}), tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match="outside a folder"):
        convert(tmp_path / "rows.parquet", tmp_path / "out", "webdataset", ConvertOptions())
    assert not list(tmp_path.rglob("*.tar"))


@pytest.mark.parametrize("key", CLIMBING)
def test_names_that_lead_out_of_a_folder_are_not_read(key, tmp_path):
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        for name in ("./fine/0001.txt", f"{key}.txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(DatasetError, match="a place inside a folder"):
        convert(tmp_path / "in.tar", tmp_path / "out", "parquet", ConvertOptions())
