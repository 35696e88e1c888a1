"""A document that kills, hangs or bloats a stage is rejected, named, and costs itself alone."""

import contextlib
import functools
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.formats import jsonl as lines
from forebay.formats.inputs import InputSplit
from forebay.prepare import driver as pipeline
from forebay.prepare.engines import sandbox as guard
from forebay.prepare.filters.quality import Length
from forebay.prepare.tasks.text import process_split
from support.preparing import prepare, read_lines, write_jsonl

DOCUMENTS = 300


def attack(what: str):
    if what == "abort":
        os.abort()
    if what == "memory error":
        raise MemoryError
    if what == "spin":
        while True:
            pass
    if what == "memory":
        current = []
        while True:
            if len(current) < 128:  # 1 GiB: no more, where the one who looks stands still meanwhile
                current.append(bytearray(b"x" * (8 << 20)))
            time.sleep(0.002)


@pytest.fixture
def hostile(monkeypatch):
    """The stage `length`, which does what a document says."""
    plain = Length.apply

    def apply(self, batch):
        for text in batch.column("text").to_pylist():
            attack(text.partition("!")[0])
        return plain(self, batch)

    monkeypatch.setattr(Length, "apply", apply)


def write_corpus(path: Path, texts: dict[int, str]) -> Path:
    return write_jsonl(path, (texts.get(i, f"an honest document, number {i}") for i in range(DOCUMENTS)))


def children() -> set[str]:
    result = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # A thread that ended meanwhile.
            result.update((task / "children").read_text().split())
    return result


@pytest.mark.parametrize(
    "what, reason",
    [
        ("abort", "stage length ended its process (SIGABRT)"),
        ("spin", "stage length took more than 0.2 s of CPU time"),
        ("memory", "stage length needed more than 64 MiB of memory"),
        ("memory error", "stage length ran out of memory"),
    ],
)
@pytest.mark.usefixtures("hostile")
def test_only_the_document_is_rejected(tmp_path, what: str, reason: str):
    source = write_corpus(tmp_path / "a.jsonl", {7: f"{what}!", 203: f"{what}! again"})
    seconds = 0.2 if what == "spin" else 60.0
    limits = {"seconds": seconds, "memory_bytes": 64 << 20}
    before = children()
    summary = prepare(source, tmp_path / "d", settings={"length": {"min_chars": 1}, "limits": limits})
    assert children() <= before
    assert (summary.documents_in, summary.documents_out) == (DOCUMENTS, DOCUMENTS - 2)
    assert summary.dropped == {"malformed": 2}
    rejects = read_lines(tmp_path / "d/rejects.jsonl")
    assert [(r["where"], r["reason"]) for r in rejects] == [(f"{source}:{i}", reason) for i in (8, 204)]
    assert rejects[0]["text"] == f"{what}!"


def abort_over_second(split: InputSplit):
    if split.files[0].name == "1.parquet":
        os.abort()


def slow_copy(task: str, data: Any) -> tuple[str, bytes]:
    time.sleep(0.3)  # so that its memory is looked at
    return task, bytes(data)


def test_the_next_process_is_not_measured_from_the_last_one(monkeypatch):
    """One that ended takes 0 bytes; against that the next, which is just being forked, would be over any limit."""
    taken = itertools.chain([0], itertools.repeat(1 << 30))
    monkeypatch.setattr(guard, "resident_bytes", lambda pid: next(taken))
    worker = guard.SandboxWorker("copies")
    try:
        for text in ("one", "another"):
            assert worker.call(slow_copy, text, text.encode(), (5.0, 64 << 20)) == (text, text.encode())
    finally:
        worker.end()


def test_a_file_over_which_its_library_aborts(tmp_path, monkeypatch):
    """As pyarrow does over the metadata of some damaged files of Parquet."""
    monkeypatch.setattr("forebay.prepare.tasks.text.read_metadata", abort_over_second)
    sources = [tmp_path / f"{i}.parquet" for i in range(3)]
    for path in sources:
        texts = [f"document {path.stem} {i}" for i in range(20)]
        pq.write_table(pa.table({"text": texts, "id": texts}), path)
    summary = prepare(sources, tmp_path / "d", settings={"max_error_rate": 1.0})
    assert (summary.documents_out, summary.dropped) == (40, {"malformed": 1})
    (reject,) = read_lines(tmp_path / "d/rejects.jsonl")
    assert "reading ended its process (SIGABRT)" in reject["reason"] and "1.parquet" in reject["where"]


def test_a_record_over_which_the_reader_dies(tmp_path, monkeypatch):
    source = write_corpus(tmp_path / "a.jsonl", {203: "abort!"})
    plain = lines.to_record

    def to_record(position, row, *more, **named):
        attack(str(row["text"]).partition("!")[0])
        return plain(position, row, *more, **named)

    monkeypatch.setattr(lines, "to_record", to_record)

    @functools.wraps(process_split)
    def after_a_death(task, scale):
        return process_split(task, 1)

    monkeypatch.setattr(pipeline, "process_split", after_a_death)
    summary = prepare(source, tmp_path / "d", settings={"max_error_rate": 1.0})
    assert (summary.documents_out, summary.dropped) == (203, {"malformed": 1})
