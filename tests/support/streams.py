"""Documents in files of each format, and short streams over them."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from forebay.stream import StreamOptions, TextStream
from support.archives import tar_bytes

Rows = list[dict[str, str]]
ROWS = [{"id": str(i), "text": f"document {i} é " + "word " * (i * 7 % 41)} for i in range(120)]


def jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def csv(rows: Rows) -> bytes:
    return b"id,text\n" + b"".join(f'{row["id"]},"{row["text"]}"\n'.encode() for row in rows)


def parquet(rows: Rows, group: int = 7) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=group)
    return out.getvalue()


def arrow(rows: Rows) -> bytes:
    out, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=13)
    return out.getvalue()


def tar(rows: Rows) -> bytes:
    members = {}
    for row in rows:
        name = f"{int(row['id']):06d}" + "long" * 30 * (int(row["id"]) % 3 == 0)
        members |= {f"{name}.txt": row["text"].encode(), f"{name}.jpg": b"\xff" * 700}
    return tar_bytes(members, tarfile.GNU_FORMAT)


def tfrecord(rows: Iterable[Mapping[str, str | None]], keys: tuple[str, ...] = ("text",)) -> bytes:
    def masked(data):
        value = google_crc32c.value(data)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def field(number, data):
        size, out = len(data), bytes([number << 3 | 2])
        while size > 127:
            out, size = out + bytes([size & 127 | 128]), size >> 7
        return out + bytes([size]) + data

    records = []
    for row in rows:
        values = {key: row[key].encode() for key in keys if row[key] is not None}
        features = (field(1, field(1, k.encode()) + field(2, field(1, field(1, v)))) for k, v in values.items())
        example = field(1, b"".join(features))
        head = struct.pack("<Q", len(example))
        records.append(head + masked(head) + example + masked(example))
    return b"".join(records)


def in_members(compress: Callable[[bytes], bytes]) -> Callable[[Rows], bytes]:
    """JSON by line in two members of a compressed file."""
    return lambda rows: compress(jsonl(rows[:15])) + compress(jsonl(rows[15:]))


WRITERS = {
    "jsonl": jsonl,
    "jsonl.gz": in_members(gzip.compress),
    "jsonl.zst": in_members(zstandard.compress),
    "parquet": parquet,
    "arrow": arrow,
    "tar": tar,
    "tar.gz": lambda rows: gzip.compress(tar(rows)),
    "tfrecord": tfrecord,
    "tfrecord.gz": lambda rows: gzip.compress(tfrecord(rows)),
    "csv": csv,
}


def write_files(folder: Path, suffix: str, number: int, form: Callable[[Rows], bytes] | None = None) -> Path:
    """Write ROWS in so many files of a format, by default that of the suffix."""
    folder.mkdir()
    form = form or WRITERS[suffix]
    for i in range(number):
        part = ROWS[len(ROWS) * i // number : len(ROWS) * (i + 1) // number]
        (folder / f"{i:03d}.{suffix}").write_bytes(form(part))
    return folder


def stream(inputs: Any, **changes: Any) -> TextStream:
    """A stream of bytes as tokens on rank 0 of 1; `changes` are its arguments and options."""
    arguments = {
        "tokenizer": "bytes", "seq_len": 32, "rank": 0, "world_size": 1, "shuffle_documents": 8,
        "prefetch_batches": 0, **changes,
    }  # fmt: skip
    arguments |= {} if {"batch_size", "global_batch_size"} & arguments.keys() else {"batch_size": 2}
    options = {field.name: arguments.pop(field.name) for field in fields(StreamOptions) if field.name in arguments}
    return TextStream(inputs, options=StreamOptions(**options), **arguments)


def as_tuples(batches: Any) -> list:
    return [
        (b.inputs.tolist(), b.labels.tolist(), b.sample_ids.tolist(), b.epoch, b.epoch_step, b.step) for b in batches
    ]


def samples(batches: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Inputs and labels by sample id; each id once."""
    rows = [row for b in batches for row in zip(b.sample_ids.tolist(), b.inputs.tolist(), b.labels.tolist())]
    assert len({row[0] for row in rows}) == len(rows)
    return {number: (inputs, labels) for number, inputs, labels in rows}


def take_state(created: TextStream, num_batches: int) -> Any:
    """The state of a stream after so many batches, as JSON has it."""
    batches = iter(created)
    for _ in range(num_batches):
        next(batches)
    return json.loads(json.dumps(created.state_dict()))


class Streamed:
    """As `datasets.IterableDataset` keeps its state: taken while iterating, loaded before, told the epoch."""

    __module__ = "datasets.fake"

    def __init__(self, texts: list[str]) -> None:
        self._texts, self._position, self._epoch = texts, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self._position, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["at"]

    def __iter__(self) -> Iterator[dict[str, str]]:
        for text in self._texts[self._position :]:
            self._position += 1
            yield {"text": f"{self._epoch}{text}"}
