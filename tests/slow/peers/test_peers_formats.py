"""Forebay reads datasets that the real libraries write, and they read those that Forebay writes.

Needs interpreters that have them, one or several: FOREBAY_FORMAT_PEERS=/path/to/python:/path/to/another (pip install
mosaicml-streaming zstd; litdata webdataset datasets megatron-core zstd).
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from forebay import prepare_dataset
from forebay.convert import convert
from forebay.formats.conversion import ConvertOptions
from slow.peers.formats_peer import BLOCK
from support.foreign_datasets import COLUMNS, DOCUMENTS, STOPS, STREAM, made_table, made_tokens, read_tokens
from support.preparing import write_jsonl

PEERS = [path for path in os.environ.get("FOREBAY_FORMAT_PEERS", "").split(os.pathsep) if path]
pytestmark = [
    pytest.mark.skipif(not PEERS, reason="FOREBAY_FORMAT_PEERS names no interpreter with others' libraries"),
    pytest.mark.xdist_group("mosaicml"),  # Two of its readers that start at once take one name of shared memory.
]


TOKENS = made_tokens(STREAM, STOPS.tolist())


def answer(peer: str, *words: str) -> Any:
    script = str(Path(__file__).with_name("formats_peer.py"))
    done = subprocess.run([peer, script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def theirs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for i, peer in enumerate(PEERS):
            (Path(folder) / str(i)).mkdir()
            answer(peer, "write", str(Path(folder) / str(i)))
        yield Path(folder)


def test_every_document_that_they_wrote_is_read(theirs):
    result = sorted(path for path in theirs.glob("*/*") if path.is_dir())
    assert result
    for path in result:
        assert read_tokens(path) == DOCUMENTS, str(path)


def read_rows(library: str, folder: Path) -> list:
    """The rows that a library reads, by the first interpreter that has it."""
    for peer in PEERS:
        rows = answer(peer, "read", library, str(folder))
        if isinstance(rows, list):
            return rows
    return pytest.skip(f"no interpreter of FOREBAY_FORMAT_PEERS has what reads {library}")


@pytest.mark.parametrize(
    "to, library, compress",
    [
        ("mds", "mds", ""), ("mds", "mds", "zstd"),
        ("litdata", "litdata", ""), ("litdata", "litdata", "zstd"),
        ("webdataset", "webdataset", ""), ("webdataset", "webdataset", "gzip"),
        ("jsonl", "datasets", ""), ("jsonl", "datasets", "gzip"), ("jsonl", "datasets", "zstd"),
        ("parquet", "datasets", "snappy"), ("parquet", "datasets", "zstd"),
        ("arrow", "datasets", ""), ("arrow", "datasets", "zstd"),
    ],
)  # fmt: skip
def test_their_libraries_read_text_with_its_columns(tmp_path, to, library, compress):
    columns = {"text": COLUMNS["text"]}
    columns |= {name: COLUMNS[name] for name in ("digits", "url", "float64", "int64", "flag", "words", "uint16", "ids")}
    options = ConvertOptions(slice_bytes=8000, compress=compress)
    convert(made_table(columns, 25), tmp_path / "out", to, options)
    rows = [{name.removesuffix(".txt").removesuffix(".npy"): value for name, value in row.items()} for row in
            read_rows(library, tmp_path / "out")]  # fmt: skip
    expected = pa.table(columns).to_pylist()
    if library == "webdataset":
        rows = [{"text": row.pop("txt"), **row} for row in rows]
        expected = [{"__key__": f"{i:09d}", **row} for i, row in enumerate(expected)]
    assert rows == expected


@pytest.mark.parametrize(
    "to, compress", [("mds", ""), ("mds", "zstd"), ("litdata", ""), ("litdata", "zstd"), ("megatron", "")]
)
def test_their_libraries_read_tokens(tmp_path, to, compress):
    settings = ConvertOptions(slice_bytes=1 << 20 if to == "litdata" else 3000, compress=compress)
    convert(TOKENS, tmp_path / "out", to, settings)
    rows = read_rows(to, tmp_path / "out")
    if to == "litdata":  # Blocks of equal length, across documents; the tokens after a chunk's last are left out.
        assert [token for row in rows for token in row] == STREAM[: len(STREAM) // BLOCK * BLOCK].tolist()
    else:
        assert [row["tokens"] if to == "mds" else row for row in rows] == DOCUMENTS


@pytest.mark.parametrize("to", ["mds", "litdata"])
def test_their_libraries_read_what_prepare_writes(tmp_path, to):
    """One dataset of the files of three tasks, in place and fetched: shards are copied by their names in the index."""
    expected = []
    (tmp_path / "in").mkdir()
    for k in range(3):
        rows = [
            {"id": f"{i:03}", "url": f"http://a/{i}", "text": f"row {i} “ä”\n" * (1 + i % 3), "licence": f"l{i % 4}"}
            | ({"quality": i / 7} if i % 3 else {})
            for i in range(40 * k, 40 * k + 40)
        ]
        write_jsonl(tmp_path / f"in/{k}.jsonl", rows)
        expected += [{"quality": None, **row} for row in rows]
    settings = {"read": {"columns": {"quality": "number", "licence": "text"}}}
    prepare_dataset([tmp_path / "in"], tmp_path / "out", to=to, settings=settings, workers=1)
    for library in (to, f"remote {to}"):
        rows = read_rows(library, tmp_path / "out/text")
        assert [{n: None if v != v else v for n, v in row.items()} for row in rows] == expected
