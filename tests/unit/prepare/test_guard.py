"""A document that kills, hangs or bloats a stage is rejected, named, and costs itself alone."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from forebay.errors import UsageError
from forebay.prepare import load_recipe, prepare
from forebay.prepare.documents import Verdict
from forebay.prepare.filters.length import Length
from forebay.prepare.guard import Limits

DOCUMENTS = 300


def attack(what: str) -> None:
    if what == "abort":
        os.abort()
    if what == "memory error":
        raise MemoryError
    if what == "spin":
        while True:
            pass
    if what == "memory":
        held = []
        while True:
            held.append(bytearray(b"x" * (8 << 20)))
            time.sleep(0.002)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage `length`, which does what a document says."""
    plain = Length.apply

    def apply(self: Length, batch: pa.RecordBatch) -> Verdict:
        for text in batch.column("text").to_pylist():
            attack(text.partition("!")[0])
        return plain(self, batch)

    monkeypatch.setattr(Length, "apply", apply)


def corpus(path: Path, bad: dict[int, str]) -> Path:
    texts = (bad.get(i, f"an honest document, number {i}") for i in range(DOCUMENTS))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("abort", "stage length ended its process (SIGABRT)"),
        ("spin", "stage length took more than 0.2 s of CPU time"),
        ("memory", "stage length needed more than 64 MiB of memory"),
        ("memory error", "stage length ran out of memory"),
    ],
)
@pytest.mark.usefixtures("hostile")
def test_only_the_document_is_rejected(tmp_path: Path, what: str, reason: str) -> None:
    source = corpus(tmp_path / "a.jsonl", {7: f"{what}!", 203: f"{what}! again"})
    recipe = load_recipe(settings={"length": {"min_chars": 1}})
    recipe = replace(recipe, limits=Limits(0.2, 0.001, 64 << 20))
    summary = prepare([source], tmp_path / "d", recipe=recipe, tokenizer="bytes", workers=1)
    assert (summary.documents_in, summary.documents_out) == (DOCUMENTS, DOCUMENTS - 2)
    assert summary.dropped == {"malformed": 2}
    rejects = [json.loads(line) for line in (tmp_path / "d/rejects.jsonl").read_text().splitlines()]
    assert [(r["where"], r["reason"]) for r in rejects] == [(f"{source}:{i}", reason) for i in (8, 204)]
    assert rejects[0]["text"] == f"{what}!"


@pytest.mark.usefixtures("hostile")
def test_no_process_is_left(tmp_path: Path) -> None:
    source = corpus(tmp_path / "a.jsonl", {})
    recipe = load_recipe(settings={"length": {"min_chars": 1}})
    prepare([source], tmp_path / "d", recipe=recipe, tokenizer="bytes", workers=1)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_limits_are_checked() -> None:
    with pytest.raises(UsageError, match=r"limits\.seconds"):
        load_recipe(settings={"limits": {"seconds": 0}})
    assert load_recipe(settings={"limits": {"memory_bytes": "2GiB"}}).limits == Limits(memory_bytes=2 << 30)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_DFL
