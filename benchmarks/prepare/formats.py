"""The same corpus in each format: how large it is, how fast it is read, how long one document takes to find.

Run: `python -m benchmarks.prepare.formats [MB]`. CPU seconds of one process; random access is warm (page cache), by an
index that was made beforehand where the format has none of its own.
"""

from __future__ import annotations

import io
import json
import random
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.prepare.corpus import make_corpus
from forebay.formats.inputs import ReadOptions
from forebay.formats.tfrecord import parse_example
from forebay.prepare.inputs import find_inputs, read_split, split_files

ROW_GROUP = 256
LOOKUPS = 400
Find = Callable[[int], str]


def _write_table(folder: Path, table: pa.Table) -> None:
    for codec in ("snappy", "zstd"):
        pq.write_table(table, folder / f"{codec}.parquet", compression=codec, row_group_size=ROW_GROUP)
    with pa.OSFile(str(folder / "corpus.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=ROW_GROUP)


def _field(number: int, data: bytes) -> bytes:
    size, varint = len(data), b""
    while size > 127:
        varint += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + varint + bytes([size]) + data


def _frame(row: dict[str, str]) -> bytes:
    pairs = (_field(1, k.encode()) + _field(2, _field(1, _field(1, v.encode()))) for k, v in row.items())
    data = _field(1, b"".join(_field(1, pair) for pair in pairs))

    def masked(part: bytes) -> bytes:
        crc = google_crc32c.value(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    head = struct.pack("<Q", len(data))
    return head + masked(head) + data + masked(data)


def _write(folder: Path, num_bytes: int) -> list[dict[str, str]]:
    lines = folder / "corpus.jsonl"
    make_corpus(lines, num_bytes)
    rows = [{"id": str(row["id"]), "text": str(row["text"])} for row in map(json.loads, lines.open("rb"))]
    lines.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=3).compress(lines.read_bytes()))
    _write_table(folder, pa.Table.from_pylist(rows))
    (folder / "corpus.tfrecord").write_bytes(b"".join(map(_frame, rows)))
    with tarfile.open(folder / "corpus.tar", "w") as archive:
        for index, row in enumerate(rows):
            data = row["text"].encode()
            info = tarfile.TarInfo(f"{index:08}.txt")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return rows


def _finders(folder: Path) -> dict[str, Find]:
    """How one document is found by its number, with each format's own means."""
    jsonl = (folder / "corpus.jsonl").open("rb")
    starts = [0]
    for line in jsonl:
        starts.append(starts[-1] + len(line))
    records = (folder / "corpus.tfrecord").open("rb")
    places = list(_record_places(records))
    with tarfile.open(folder / "corpus.tar") as archive:
        members = [(member.offset_data, member.size) for member in archive]
    tar = (folder / "corpus.tar").open("rb")
    arrow = pa.ipc.open_file(pa.memory_map(str(folder / "corpus.arrow")))

    def in_jsonl(index: int) -> str:
        jsonl.seek(starts[index])
        return str(orjson.loads(jsonl.readline())["text"])

    def in_arrow(index: int) -> str:
        return str(arrow.get_batch(index // ROW_GROUP).column("text")[index % ROW_GROUP].as_py())

    def in_records(index: int) -> str:
        records.seek(places[index][0])
        return str(parse_example(records.read(places[index][1])[:-4])["text"])

    def in_tar(index: int) -> str:
        tar.seek(members[index][0])
        return tar.read(members[index][1]).decode()

    def in_parquet(name: str) -> Find:
        file = pq.ParquetFile(folder / name)
        return lambda index: str(file.read_row_group(index // ROW_GROUP, ["text"])["text"][index % ROW_GROUP].as_py())

    return {
        "corpus.jsonl": in_jsonl,
        "snappy.parquet": in_parquet("snappy.parquet"),
        "zstd.parquet": in_parquet("zstd.parquet"),
        "corpus.arrow": in_arrow,
        "corpus.tfrecord": in_records,
        "corpus.tar": in_tar,
    }


def _record_places(file: io.BufferedReader) -> Iterator[tuple[int, int]]:
    at = 0
    while head := file.read(12):
        size = struct.unpack("<Q", head[:8])[0]
        yield at + 12, size + 4
        at += 16 + size
        file.seek(at)


def _read_speed(path: Path, num_rows: int) -> float:
    """MB of text read in a CPU second; the better of two runs."""
    options, best = ReadOptions(), 0.0
    pieces = split_files(find_inputs(path, options).files, options)
    for _ in range(2):
        start, count, size = time.process_time(), 0, 0
        for piece in pieces:
            for record in read_split(piece, options):
                assert not record.problem, record
                count += 1
                size += len(record.text)
        best = max(best, size / 1e6 / (time.process_time() - start))
        assert count == num_rows
    return best


def _latency(find: Find, num_rows: int) -> tuple[float, float]:
    """p50 and p99 of finding one document, in microseconds."""
    chance, taken = random.Random(0), []
    for _ in range(LOOKUPS):
        index = chance.randrange(num_rows)
        start = time.perf_counter()
        find(index)
        taken.append((time.perf_counter() - start) * 1e6)
    taken.sort()
    return taken[LOOKUPS // 2], taken[LOOKUPS * 99 // 100]


def main(num_bytes: int = 60_000_000) -> None:
    """Print a table; under a minute."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = _write(folder, num_bytes)
        text = sum(len(row["text"].encode()) for row in rows)
        print(f"{len(rows)} documents, {text / 1e6:.0f} MB of text, row groups of {ROW_GROUP}")
        print(f"{'format':18} {'size/text':>9} {'MB/CPU s':>9} {'p50 us':>9} {'p99 us':>9}")
        finders = _finders(folder)
        for path in sorted(folder.iterdir(), key=lambda p: (p.suffix, p.name)):
            speed = _read_speed(path, len(rows))
            found = finders.get(path.name)
            middle, late = _latency(found, len(rows)) if found else (float("nan"), float("nan"))
            print(f"{path.name:18} {path.stat().st_size / text:9.2f} {speed:9.0f} {middle:9.0f} {late:9.0f}")


if __name__ == "__main__":
    main(*(int(float(argument) * 1e6) for argument in sys.argv[1:2]))
