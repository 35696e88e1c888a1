"""Preparation of everyday folders: bad files are set aside, each input is accounted for, and content alone decides."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.cli import main
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError, UsageError
from forebay.formats import text as lines
from forebay.prepare.report import load_report
from support.preparing import InProcessWorker, prepare, read_lines, write_jsonl


@pytest.fixture
def everyday(tmp_path: Path) -> Path:
    """Return a folder as people have them."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", (f"good text number {i}" for i in range(60)))
    (folder / "brief.txt").write_bytes("Schöne Grüße an Jürgen".encode("latin-1"))
    pq.write_table(pa.table({"label": [1, 2, 3]}), folder / "labels.parquet")
    (folder / "README.md").write_text("# What this is")
    (folder / "crawl.warc").write_bytes(b"WARC/1.0\r\nWARC-Type: request\r\nContent-Length: 3\r\n\r\nGET\r\n\r\n")
    (folder / "locked").symlink_to(folder.parent)
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    return folder


def skipped(out: Path) -> dict[str, tuple[str, str]]:
    """Return status and the beginning of the reason by name."""
    items = read_lines(out / "skipped.jsonl")
    return {Path(item["path"]).name: (item["status"], item["reason"][:25]) for item in items}


@pytest.mark.parametrize("to", ["dataset", "parquet"])
def test_a_bad_file_is_set_aside(everyday: Path, tmp_path: Path, to: str) -> None:
    out, messages = tmp_path / "out", list[str]()
    result = prepare(everyday, out, to=to, on_message=messages.append)
    assert (result.documents_out, result.documents_in) == (62, 64)
    assert skipped(out) == {
        "locked": ("skipped", "a link that leads out of "),
        "logo.png": ("skipped", "a file of the format imag"),
        "labels.parquet": ("failed", "expected a text column 't"),
        "crawl.warc": ("failed", "expected responses of HTM"),
    }
    assert sum(result.to_json()["skipped"].values()) == 4
    assert [message.startswith("left out 1: ") for message in messages] == [True] * 4
    report = load_report(out)
    assert report["skipped"] == result.skipped and len(report["skipped_files"]) == 4
    assert "labels.parquet" in (out / "report.html").read_text("utf-8").partition("<script")[0]
    assert prepare(everyday, out, to=to).skipped == result.skipped
    assert to != "dataset" or not open_dataset(out).verify().extra


def test_failed_files_count_against_the_error_rate(everyday: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = (
        r"expected at most 2\.0% malformed documents, got 2 of 64: .*request record.*--set max_error_rate=0\.04\.$"
    )
    with pytest.raises(PrepareError, match=message):
        prepare(everyday, out, settings={"max_error_rate": 0.02})
    assert len(skipped(out)) == 4 and load_report(out)["totals"]["malformed"] == 2
    assert not (out / "manifest.json").exists()
    assert prepare(everyday, out, settings={"max_error_rate": 0.04}).documents_out == 62
    assert load_report(out)["totals"]["documents_out"] == 62
    (tmp_path / "broken.jsonl").write_text("broken\n")
    with pytest.raises(PrepareError, match=r"got 1 of 1: .*broken\.jsonl:1: .* Fix them\.$"):  # no rate would do
        prepare(tmp_path / "broken.jsonl", tmp_path / "none")


def test_strict_stops_at_what_would_be_left_out(everyday: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for message, names in (
        (r"prepare --strict: expected to read all inputs, got 2 .*locked: a link", ("locked", "logo.png")),
        (r"prepare --strict: .* got 2 .*labels\.parquet: expected a text column", ("crawl.warc", "labels.parquet")),
    ):
        with pytest.raises(PrepareError, match=message):
            prepare(everyday, out, strict=True)
        for name in names:
            (everyday / name).unlink()
    assert prepare(everyday, out, strict=True).skipped == {} and not (out / "skipped.jsonl").exists()


def test_when_all_is_dropped_the_report_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["too short", "short"])
    for to in ("dataset", "parquet"):
        with pytest.raises(PrepareError, match=r"got none: 2 read, dropped by length \((\w+) 2\)\. See .*report\.html"):
            prepare(path, tmp_path / to, settings={"length": {"min_chars": 100}}, to=to)
        report = load_report(tmp_path / to)
        assert report["totals"]["documents_in"] == 2 and report["funnel"][1]["documents_out"] == 0
        assert len(report["samples"]) == 2


def test_a_document_over_which_the_stages_end_is_rejected_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/slow/prepare/test_sandbox.py` has processes that end."""

    class Worker(InProcessWorker):
        def call(self, run: Any, task: Any, data: Any, limits: tuple[float, int]) -> Any:
            texts = pa.ipc.open_stream(data).read_all()["text"].to_pylist()
            return "it ended" if "poison" in texts else super().call(run, task, data, limits)

    monkeypatch.setattr("forebay.prepare.tasks.stages.worker_for", lambda stages, warm: Worker())
    path = write_jsonl(tmp_path / "a.jsonl", ("poison" if i in (7, 203) else f"text {i}" for i in range(300)))
    result = prepare(path, tmp_path / "d", settings={"length": {"min_chars": 1}})
    assert result.documents_out == 298 and result.dropped == {"malformed": 2}
    rejects = [(reject["where"], reject["reason"]) for reject in read_lines(tmp_path / "d/rejects.jsonl")]
    assert rejects == [(f"{path}:8", "it ended"), (f"{path}:204", "it ended")]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of two files, which are read in many pieces."""
    monkeypatch.setattr(lines, "SPLIT_BYTES", 500)
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"corpus/{name}.jsonl", (f"text {name} {i} " * 5 for i in range(50)))
    return tmp_path / "corpus"


def stop_in_stage(stage: str) -> Callable[[Any], None]:
    def stop(progress: Any) -> None:
        if progress.stage == stage:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("settings", [{"slice": {"shuffle": True}}, {"sample": 0.5}])
def test_the_same_content_is_the_same_dataset(tmp_path: Path, corpus: Path, settings: dict[str, Any]) -> None:
    """Wherever it is, whenever it was written, whatever an earlier run left."""
    first = prepare(corpus, tmp_path / "one/d", settings=settings)
    moved = tmp_path / "else/where/corpus"
    shutil.copytree(corpus, moved)
    os.utime(moved / "a.jsonl", (1, 1))
    assert prepare(moved, tmp_path / "two/d", settings=settings).id == first.id
    assert b"corpus/a.jsonl" in (tmp_path / "one/d/report.html").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "one/d/manifest.json").read_bytes()


def test_a_file_that_changed_between_runs_is_read_again(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "d", on_progress=stop_in_stage("encode"))
    data = (corpus / "a.jsonl").read_text()
    (corpus / "a.jsonl").write_text(data.replace("text a", "TEXT a"))
    resumed = prepare(corpus, tmp_path / "d").open()
    assert resumed.id == prepare(corpus, tmp_path / "fresh", name="d").id
    inputs = resumed.manifest.lineage["inputs"]
    assert [item["sha256"] for item in inputs] == [hash_file(corpus / name) for name in ("a.jsonl", "b.jsonl")]
    (corpus / "a.jsonl").write_text(data)
    with pytest.raises(UsageError, match="which holds dataset"):
        prepare(corpus, tmp_path / "d")


def test_a_dataset_of_other_versions_is_kept_and_reported(tmp_path: Path, corpus: Path) -> None:
    first = prepare(corpus, tmp_path / "d", to="parquet")
    fields = json.loads((tmp_path / "d/text.json").read_bytes())
    fields["lineage"]["versions"]["pyarrow"] = "0.1"
    (tmp_path / "d/text.json").write_text(json.dumps(fields))
    messages: list[str] = []
    again = prepare(corpus, tmp_path / "d", to="parquet", on_message=messages.append)
    assert again.already_exists and again.documents_out == first.documents_out
    assert f"was made with other versions: pyarrow 0.1 (here: {pa.__version__})" in messages[-1]


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xfcde.txt"))
    path.write_text("text")
    prepare(path, tmp_path / "t", to="parquet")
    assert pq.read_table(tmp_path / "t/text")["id"].to_pylist() == [f"{tmp_path}/m\ufffdde.txt"]
    prepare(path, tmp_path / "d", document_ids=True)
    assert pq.read_table(tmp_path / "d/documents.parquet")["id"].to_pylist() == ["m?de.txt"]


def test_the_command_says_what_it_leaves_out(
    everyday: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", str(everyday), "--tokenizer", "bytes", "--workers", "1", "--json"]
    assert main([*command, "--out", str(tmp_path / "d"), "--quiet"]) == 0
    shown = capsys.readouterr()
    assert sum(json.loads(shown.out)["skipped"].values()) == 4 and shown.err.count("forebay: left out 1: ") == 4
    assert main([*command, "--dry-run"]) == 0
    assert len(json.loads(capsys.readouterr().out)["skipped"]) == 2
    assert main([*command, "--out", str(tmp_path / "s"), "--strict"]) == 1
    assert "prepare --strict" in capsys.readouterr().err
