"""Streams over real files of each format: exact resume anywhere, ranks that come and go, damage passed over."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay.errors import PrepareError
from forebay.formats.inputs import ReadOptions
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.stream import StreamOptions, TextStream
from support.shared_data import shared_data

ROWS = [{"id": str(i), "text": f"document {i} é " + "word " * (i * 7 % 41)} for i in range(240)]


def jsonl(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def tar(rows: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for row in rows:
            name = f"{int(row['id']):06d}" + "long" * 30 * (int(row["id"]) % 3 == 0)
            for suffix, data in (("txt", row["text"].encode()), ("jpg", b"\xff" * 700)):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def tfrecord(rows: list[dict[str, str]]) -> bytes:
    crc = pytest.importorskip("google_crc32c").value

    def masked(data: bytes) -> bytes:
        value = crc(data)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def field(number: int, data: bytes) -> bytes:
        size, out = len(data), bytes([number << 3 | 2])
        while size > 127:
            out, size = out + bytes([size & 127 | 128]), size >> 7
        return out + bytes([size]) + data

    parts = []
    for row in rows:
        feature = field(1, field(1, row["text"].encode()))
        example = field(1, field(1, field(1, b"text") + field(2, feature)))
        head = struct.pack("<Q", len(example))
        parts.append(head + masked(head) + example + masked(example))
    return b"".join(parts)


def parquet(rows: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=17)
    return out.getvalue()


def arrow(rows: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=13)
    return out.getvalue()


def csv(rows: list[dict[str, str]]) -> bytes:
    return b"id,text\n" + b"".join(f'{row["id"]},"{row["text"]}"\n'.encode() for row in rows)


WRITERS: dict[str, Callable[[list[dict[str, str]]], bytes]] = {
    "jsonl": jsonl,
    "jsonl.gz": lambda rows: gzip.compress(jsonl(rows[:50])) + gzip.compress(jsonl(rows[50:])),
    "jsonl.zst": lambda rows: zstandard.compress(jsonl(rows[:50])) + zstandard.compress(jsonl(rows[50:])),
    "parquet": parquet,
    "arrow": arrow,
    "tar": tar,
    "tar.gz": lambda rows: gzip.compress(tar(rows)),
    "tfrecord": tfrecord,
    "tfrecord.gz": lambda rows: gzip.compress(tfrecord(rows)),
    "csv": csv,
}


def stream(inputs: Any, **changes: Any) -> TextStream:
    defaults: dict[str, Any] = {
        "tokenizer": "bytes", "seq_len": 64, "global_batch_size": 12, "rank": 0, "world_size": 1, "lanes": 1,
        "shuffle_documents": 20, "prefetch_batches": 0,
    }  # fmt: skip
    arguments = {**defaults, **changes}
    options = {field.name: arguments.pop(field.name) for field in fields(StreamOptions) if field.name in arguments}
    return TextStream(inputs, options=StreamOptions(**options), **arguments)


def facts(value: Any) -> list[Any]:
    return [(b.inputs.tolist(), b.labels.tolist(), b.sample_ids.tolist(), b.epoch, b.step) for b in value]


def state_after(created: TextStream, batches: int) -> dict[str, Any]:
    iterator = iter(created)
    for _ in range(batches):
        next(iterator)
    state: dict[str, Any] = json.loads(json.dumps(created.state_dict()))
    iterator.close()
    return state


def documents(inputs: Any, **changes: Any) -> Counter[str]:
    """What an epoch holds, by the samples of all ranks of one world together."""
    rows = sorted((i, row) for b in stream(inputs, seq_len=1, **changes) for i, row in zip(b.sample_ids, b.inputs))
    tokens = [int(row[0]) for _, row in rows]
    text = bytes(0 if token == 256 else token for token in tokens).decode()
    return Counter(text.split("\0")[:-1])


@pytest.fixture(scope="module", params=sorted(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of one format."""
    created = tmp_path_factory.mktemp("files")
    for i in range(3):
        (created / f"part-{i}.{request.param}").write_bytes(WRITERS[request.param](ROWS[80 * i : 80 * (i + 1)]))
    return created


def test_each_document_once(folder: Path) -> None:
    assert documents(folder) == Counter(row["text"] for row in ROWS)


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_is_exact(folder: Path, shuffle: bool) -> None:
    settings = {"epochs": 2, "shuffle": shuffle}
    full = facts(stream(folder, **settings))
    running = stream(folder, **settings)
    states = [running.state_dict(), *(running.state_dict() for _ in running)]
    assert len(states) == len(full) + 1
    for stop in range(0, len(states), 3 if shuffle else 7):
        second = stream(str(folder / "*"), **settings)
        second.load_state_dict(json.loads(json.dumps(states[stop])))
        assert facts(second) == full[stop:]


def test_the_readers_go_on_at_any_record(folder: Path) -> None:
    """Every record's `start` begins a piece with that record: what a place stands on."""
    from dataclasses import replace

    options = ReadOptions()
    for piece in split_files(find_inputs(folder, options).files, options):
        records = list(read_split(piece, options))
        for i, record in enumerate(records):
            if record.start >= 0:
                rest = list(read_split(replace(piece, start=record.start), options))
                assert [r.text for r in rest] == [r.text for r in records[i:]]
        if piece.format in ("jsonl", "webdataset", "tfrecord"):
            assert all(record.start >= 0 for record in records)


def test_four_ranks_resume_on_three_and_five(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_bytes(jsonl(ROWS))  # one file for all ranks
    full = facts(stream(tmp_path, epochs=2))
    states = [state_after(stream(tmp_path, epochs=2, rank=rank, world_size=4), 17) for rank in range(4)]
    assert all(state == states[0] for state in states)
    for world_size in (3, 5):
        ranks = []
        for rank in range(world_size):
            item = stream(tmp_path, epochs=2, rank=rank, world_size=world_size)
            item.load_state_dict(states[rank % 4])
            ranks.append(facts(item))
        for step, expected in enumerate(full[17:]):
            rows = sorted(
                (i, row, label) for rank in ranks for row, label, i in zip(rank[step][0], rank[step][1], rank[step][2])
            )
            assert rows == sorted(zip(expected[2], expected[0], expected[1]))
        assert {len(rank) for rank in ranks} == {len(full) - 17}


def test_malformed_records_are_counted_with_their_place(tmp_path: Path) -> None:
    lines = jsonl(ROWS[:40]).splitlines(keepends=True)
    lines[7] = b'{"text": "broken\n'
    lines[20] = b'{"no_text": 1}\n'
    lines[30] = b"\n"
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))
    full = gzip.compress(jsonl(ROWS[40:]))
    (tmp_path / "cut.jsonl.gz").write_bytes(full[: len(full) * 3 // 4])
    settings = {"shuffle": False}
    created = stream(tmp_path, **settings)
    expected = facts(created)
    assert created.stats()["malformed"] == 3
    reported = [(invalid.name.rpartition("/")[2], invalid.location) for invalid in created.malformed]
    places = [f"byte {sum(map(len, lines[:i]))}" for i in (7, 20)]
    assert reported[:2] == [("bad.jsonl", places[0]), ("bad.jsonl", places[1])]
    assert reported[2][0] == "cut.jsonl.gz" and "it ends early" in created.malformed[2].problem
    for stop in range(0, len(expected), 5):
        second = stream(tmp_path, **settings)
        second.load_state_dict(state_after(stream(tmp_path, **settings), stop))
        assert facts(second) == expected[stop:]
        assert second.stats()["malformed"] == 3


def test_a_file_that_goes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS))
    created = stream(path, prefetch_batches=2)
    path.unlink()
    with pytest.raises(PrepareError, match=r"a\.jsonl"):
        list(created)


def test_another_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    state = state_after(stream(tmp_path), 3)
    (tmp_path / "b.jsonl").write_bytes(jsonl(ROWS))
    with pytest.raises(Exception, match="expected inputs"):
        stream(tmp_path).load_state_dict(state)


def test_a_process_that_was_killed_goes_on(tmp_path: Path) -> None:
    """State through a file, taken by one process and loaded by another, with a trained tokenizer's file."""
    from forebay.prepare.tokenize.tokenizers import train_tokenizer

    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer((row["text"] for row in ROWS), 300).data)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl(ROWS)))
    code = (
        "import json, os, sys; from pathlib import Path; from forebay import TextStream\n"
        "made = TextStream('a.jsonl.zst', tokenizer='tokenizer.json', seq_len=32, batch_size=4)\n"
        "state = Path('state.json')\n"
        "if state.exists(): made.load_state_dict(json.loads(state.read_text()))\n"
        "for i, batch in enumerate(made):\n"
        "    print(batch.step, batch.inputs.tolist(), batch.labels.tolist())\n"
        "    if i == int(sys.argv[1]):\n"
        "        state.write_text(json.dumps(made.state_dict())); sys.stdout.flush(); os._exit(9)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}

    def run(stop: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, str(stop)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == (0 if stop < 0 else 9), done.stderr
        return done.stdout.splitlines()

    full = run(-1)
    assert run(11) + run(-1) == full


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("jsonl/cc_en_head-0174.jsonl.gz", "text"),
        ("jsonl/test.jsonl.zst", "message"),
        ("webdataset/txt.tar.gz", "text"),
        ("webdataset/compressed.tar", "text"),
        ("shakespeare/works", "text"),
    ],
)
def test_real_files(name: str, key: str) -> None:
    path, options = shared_data(name), ReadOptions(text_key=key)
    settings = {
        "text_key": key,
        "seq_len": 256,
        "global_batch_size": 4 if path.is_file() else 512,
        "shuffle_documents": 5,
    }
    records = [
        r for piece in split_files(find_inputs(path, options).files, options) for r in read_split(piece, options)
    ]
    sound = [r.text for r in records if not r.problem]
    full = stream(path, **settings)
    if not sound:
        pytest.skip(f"{name} holds no text under {key!r}")
    if sum(len(text.encode()) + 1 for text in sound) < 256:
        settings["seq_len"] = 1
        full = stream(path, **settings)
    expected = facts(full)
    assert full.stats()["documents"] == len(sound)
    assert full.stats()["tokens"] == sum(len(text.encode()) + 1 for text in sound if text)
    step = max(1, len(expected) // (6 if path.is_file() else 2))
    for stop in range(0, len(expected), step):
        second = stream(path, **settings)
        second.load_state_dict(state_after(stream(path, **settings), stop))
        assert facts(second) == expected[stop:]
