"""Preparation of everyday folders: bad files are set aside, each input is accounted for, and content alone decides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import prepare_dataset
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError, UsageError
from forebay.formats import text as lines
from forebay.prepare import load_recipe
from forebay.prepare.report import load_report
from forebay.prepare.run import plan
from forebay.prepare.tasks.encode import EncodeTask
from forebay.prepare.tasks.text import TextTask


def everyday(folder: Path) -> Path:
    """A folder as people have them."""
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"good text number {i}"}) + "\n" for i in range(60)))
    (folder / "brief.txt").write_bytes("Schöne Grüße an Jürgen".encode("latin-1"))
    pq.write_table(pa.table({"label": [1, 2, 3]}), folder / "labels.parquet")
    (folder / "README.md").write_text("# What this is")
    (folder / "crawl.warc").write_bytes(b"WARC/1.0\r\nWARC-Type: request\r\nContent-Length: 3\r\n\r\nGET\r\n\r\n")
    (folder / "locked").symlink_to(folder.parent)
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    return folder


def skipped(out: Path) -> dict[str, tuple[str, str]]:
    """By name: status, and the beginning of the reason."""
    result = [json.loads(line) for line in (out / "skipped.jsonl").read_text("utf-8").splitlines()]
    return {Path(item["path"]).name: (item["status"], item["reason"][:25]) for item in result}


@pytest.mark.parametrize("to", ["dataset", "parquet"])
def test_a_bad_file_is_set_aside(tmp_path: Path, to: str) -> None:
    folder, out, message = everyday(tmp_path / "in"), tmp_path / "out", list[str]()
    summary = prepare_dataset([folder], out, tokenizer="bytes", to=to, workers=1, on_message=message.append)
    assert (summary.documents_out, summary.documents_in) == (62, 64)
    assert skipped(out) == {
        "locked": ("skipped", "a link that leads out of "),
        "logo.png": ("skipped", "a file of the format imag"),
        "labels.parquet": ("failed", "expected a text column 't"),
        "crawl.warc": ("failed", "expected responses of HTM"),
    }
    assert sum(summary.to_json()["skipped"].values()) == 4 and len(message) == 4
    assert [line.startswith("left out 1: ") for line in message] == [True] * 4
    report = load_report(out)
    assert report["skipped"] == summary.skipped and len(report["skipped_files"]) == 4
    assert "labels.parquet" in (out / "report.html").read_text("utf-8").partition("<script")[0]
    assert prepare_dataset([folder], out, tokenizer="bytes", to=to, workers=1).skipped == summary.skipped
    if to == "dataset":
        assert not open_dataset(out).verify().extra


def test_failed_files_count_against_the_error_rate(tmp_path: Path) -> None:
    folder = everyday(tmp_path / "in")
    with pytest.raises(
        PrepareError, match=r"expected at most 2\.0% malformed documents, got 2 of 64: .*request record"
    ) as caught:
        prepare_dataset([folder], tmp_path / "out", tokenizer="bytes", workers=1, settings={"max_error_rate": 0.02})
    assert str(caught.value).endswith("--set max_error_rate=0.04.")
    assert len(skipped(tmp_path / "out")) == 4 and load_report(tmp_path / "out")["totals"]["malformed"] == 2
    prepare_dataset([folder], tmp_path / "out", tokenizer="bytes", workers=1, settings={"max_error_rate": 0.04})
    assert load_report(tmp_path / "out")["totals"]["documents_out"] == 62
    (tmp_path / "broken.jsonl").write_text("broken\n")
    with pytest.raises(PrepareError, match=r"got 1 of 1: .* Fix them\.$"):  # no rate would do
        prepare_dataset([tmp_path / "broken.jsonl"], tmp_path / "none", tokenizer="bytes", workers=1)


def test_strict_stops_at_what_would_be_left_out(tmp_path: Path) -> None:
    folder = everyday(tmp_path / "in")
    with pytest.raises(PrepareError, match=r"prepare --strict: expected to read all inputs, got 2 .*locked: a link"):
        prepare_dataset([folder], tmp_path / "out", tokenizer="bytes", workers=1, strict=True)
    for name in ("locked", "logo.png"):
        (folder / name).unlink()
    with pytest.raises(PrepareError, match=r"prepare --strict: .* got 2 .*labels\.parquet: expected a text column"):
        prepare_dataset([folder], tmp_path / "out", tokenizer="bytes", workers=1, strict=True)
    for name in ("crawl.warc", "labels.parquet"):
        (folder / name).unlink()
    assert prepare_dataset([folder], tmp_path / "out", tokenizer="bytes", workers=1, strict=True).skipped == {}
    assert not (tmp_path / "out/skipped.jsonl").exists()


def test_links_are_followed_if_asked(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("elsewhere")
    (tmp_path / "in/a.txt").write_text("here")
    (tmp_path / "in/b.txt").symlink_to(tmp_path / "secret.txt")
    assert prepare_dataset([tmp_path / "in"], tmp_path / "x", tokenizer="bytes", workers=1).documents_out == 1
    assert (
        prepare_dataset(
            [tmp_path / "in"], tmp_path / "y", tokenizer="bytes", workers=1, follow_links=True
        ).documents_out
        == 2
    )


def test_when_all_is_dropped_the_report_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "too short"}\n{"text": "short"}\n')
    recipe = load_recipe(settings={"length": {"min_chars": 100}})
    for to in ("dataset", "parquet"):
        with pytest.raises(PrepareError, match=r"got none: 2 read, dropped by length \((\w+) 2\)\. See .*report\.html"):
            prepare_dataset([tmp_path / "a.jsonl"], tmp_path / to, recipe=recipe, tokenizer="bytes", to=to, workers=1)
        report = load_report(tmp_path / to)
        assert report["totals"]["documents_in"] == 2 and report["funnel"][1]["documents_out"] == 0
        assert len(report["samples"]) == 2
    (tmp_path / "b.csv").write_text("label\n1\n")
    with pytest.raises(PrepareError, match="expected a column 'text', got columns label"):
        prepare_dataset([tmp_path / "b.csv"], tmp_path / "none", tokenizer="bytes", workers=1)
    assert skipped(tmp_path / "none")["b.csv"][0] == "failed" and load_report(tmp_path / "none")["skipped"]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed whole."""
    names: list[str] = []

    def counting(path: Path) -> str:
        names.append(path.name)
        return hash_file(path)

    for module in ("tasks.keys", "inputs", "driver"):
        monkeypatch.setattr(f"forebay.prepare.{module}.hash_file", counting, raising=False)
    monkeypatch.setattr(lines, "SPLIT_BYTES", 500)
    return names


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        texts = "".join(json.dumps({"text": f"text {name} {i} " * 5}) + "\n" for i in range(50))
        (tmp_path / f"in/{name}.jsonl").write_text(texts)
    return tmp_path / "in"


def test_each_file_is_hashed_once_and_by_the_task_that_reads_it(
    tmp_path: Path, corpus: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(settings={"slice": {"shuffle": True}})
    assert plan([corpus], recipe)["tasks"] > 10 and not hashed
    stopped = tmp_path / "d"
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset([corpus], stopped, recipe=recipe, tokenizer="bytes", workers=1, on_progress=_stop_at("encode"))
    assert sorted(hashed) == ["a.jsonl", "b.jsonl"]
    summary = prepare_dataset([corpus], stopped, recipe=recipe, tokenizer="bytes", workers=1)
    assert prepare_dataset([corpus], stopped, recipe=recipe, tokenizer="bytes", workers=1).already_exists
    assert sorted(hashed) == ["a.jsonl", "b.jsonl"]
    inputs = open_dataset(stopped).manifest.lineage["inputs"]
    assert [item["sha256"] for item in inputs] == [hash_file(corpus / name) for name in ("a.jsonl", "b.jsonl")]
    assert prepare_dataset([corpus], tmp_path / "whole/d", recipe=recipe, tokenizer="bytes", workers=1).id == summary.id


def _stop_at(stage: str) -> Callable[[Any], None]:
    def stop(progress: Any) -> None:
        if progress.stage == stage:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("settings", [{"slice": {"shuffle": True}}, {"sample": 0.5}])
def test_the_same_content_is_the_same_dataset(tmp_path: Path, corpus: Path, settings: dict[str, Any]) -> None:
    """Wherever it lies, whenever it was written, whatever an earlier run left."""
    recipe = load_recipe(settings=settings)
    first = prepare_dataset([corpus], tmp_path / "one", recipe=recipe, tokenizer="bytes", name="d", workers=1)
    shutil.copytree(corpus, tmp_path / "else/where/in")
    os.utime(tmp_path / "else/where/in/a.jsonl", (1, 1))
    again = prepare_dataset(
        [tmp_path / "else/where/in"], tmp_path / "two", recipe=recipe, tokenizer="bytes", name="d", workers=1
    )
    assert again.id == first.id
    assert (tmp_path / "one/report.html").read_bytes().count(b"in/a.jsonl") > 0


def test_a_file_that_changed_between_runs_is_read_again(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset([corpus], tmp_path / "d", tokenizer="bytes", workers=1, on_progress=_stop_at("encode"))
    data = (corpus / "a.jsonl").read_text()
    (corpus / "a.jsonl").write_text(data.replace("text a", "TEXT a"))
    resumed = prepare_dataset([corpus], tmp_path / "d", tokenizer="bytes", workers=1)
    fresh = prepare_dataset([corpus], tmp_path / "fresh", tokenizer="bytes", name="d", workers=1)
    assert resumed.id == fresh.id
    with pytest.raises(UsageError, match="which holds dataset"):
        (corpus / "a.jsonl").write_text(data)
        prepare_dataset([corpus], tmp_path / "d", tokenizer="bytes", workers=1)


def test_a_task_is_named_once(monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path) -> None:
    """However often its name is asked for, and nothing of the recipe is hashed for it."""
    calls: list[object] = []
    for kind in (TextTask, EncodeTask):
        plain = kind.name.func  # type: ignore[attr-defined]
        monkeypatch.setattr(kind.name, "func", lambda task, plain=plain: calls.append(task) or plain(task))
    prepare_dataset([corpus], tmp_path / "d", tokenizer="bytes", workers=1)
    assert len(calls) == len({id(task) for task in calls}) == 4


def test_a_dataset_of_other_versions_is_kept_and_told(tmp_path: Path, corpus: Path) -> None:
    first = prepare_dataset([corpus], tmp_path / "d", tokenizer="bytes", to="parquet", workers=1)
    fields = json.loads((tmp_path / "d/text.json").read_bytes())
    fields["lineage"]["versions"]["pyarrow"] = "0.1"
    (tmp_path / "d/text.json").write_text(json.dumps(fields))
    messages: list[str] = []
    again = prepare_dataset(
        [corpus], tmp_path / "d", tokenizer="bytes", to="parquet", workers=1, on_message=messages.append
    )
    assert again.already_exists and again.documents_out == first.documents_out
    assert f"was made with other versions: pyarrow 0.1 (here: {pa.__version__})" in messages[-1]


STAGE = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from forebay.prepare.documents import StageResult

@dataclass(frozen=True)
class Licensed:
    name: ClassVar[str] = "licensed"
    version: ClassVar[int] = 1
    reasons = ("licence",)
    def files(self):
        return ()
    def apply(self, batch):
        wanted = [licence == "cc0" for licence in batch.column("meta.licence").to_pylist()]
        return StageResult(batch, np.where(wanted, -1, 0).astype(np.int16))
"""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fields_of_the_input_are_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    (tmp_path / "licensed_stage.py").write_text(STAGE)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"id": f"{licence}{score}", "text": "the same", "score": score, "meta": {"licence": licence}}
            for licence, score in (("cc0", 1), ("cc0", 3), ("none", 9), ("cc0", None), ("cc0", 2))]  # fmt: skip
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    columns = {"read": {"columns": {"meta.licence": "text", "score": "number"}}, "dedup": {"exact": True}}
    recipe = load_recipe(settings=columns | {"licensed": {"use": "licensed_stage:Licensed"}}, allow_code=True)
    prepare_dataset([path], tmp_path / "text", recipe=recipe, to="parquet", workers=1)
    table = pq.read_table(tmp_path / "text/text/000000.parquet")
    assert table.select(["id", "score", "meta.licence"]).to_pylist() == [
        {"id": "cc01", "score": 1.0, "meta.licence": "cc0"}
    ]


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xfcde.txt"))
    path.write_text("text")
    prepare_dataset([path], tmp_path / "t", to="parquet", workers=1)
    assert pq.read_table(tmp_path / "t/text")["id"].to_pylist() == [f"{tmp_path}/m\ufffdde.txt"]
    prepare_dataset([path], tmp_path / "d", tokenizer="bytes", workers=1, document_ids=True)
    assert pq.read_table(tmp_path / "d/documents.parquet")["id"].to_pylist() == ["m?de.txt"]


def test_the_command_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = everyday(tmp_path / "in")
    command = [sys.executable, "-m", "forebay", "prepare", str(folder), "--tokenizer", "bytes", "--json"]
    ran = subprocess.run([*command, "--out", str(tmp_path / "d"), "--quiet"], capture_output=True, text=True)
    assert ran.returncode == 0 and sum(json.loads(ran.stdout)["skipped"].values()) == 4
    assert ran.stderr.count("forebay: left out 1: ") == 4
    ran = subprocess.run([*command, "--dry-run"], capture_output=True, text=True)
    assert len(json.loads(ran.stdout)["skipped"]) == 2
    ran = subprocess.run([*command, "--out", str(tmp_path / "s"), "--strict"], capture_output=True, text=True)
    assert ran.returncode != 0 and "prepare --strict" in ran.stderr and "Traceback" not in ran.stderr
