"""Preparation of everyday folders: bad files are set aside, each input is accounted for, and content alone decides."""

import gzip
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.cli import main
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError
from forebay.formats import text as lines
from forebay.formats.inputs import ReadOptions
from forebay.prepare.corpus import count_failed
from forebay.prepare.inputs import find_inputs, split_files
from forebay.prepare.progress import read_progress
from forebay.prepare.report import load_report
from forebay.storage.listing import Skipped
from support.preparing import InProcessWorker, prepare, read_lines, write_jsonl

NO_PAGES = b"WARC/1.0\r\nWARC-Type: request\r\nContent-Length: 3\r\n\r\nGET\r\n\r\n"
PAGE = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 1400\r\n\r\n%s\r\n\r\n" % (b"a text " * 200)
LENIENT = {"max_error_rate": 0.5}


@pytest.fixture
def everyday(tmp_path) -> Path:
    """Return a folder as people have them."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", (f"good text number {i}" for i in range(60)))
    (folder / "brief.txt").write_bytes("Schöne Grüße an Jürgen".encode("latin-1"))
    pq.write_table(pa.table({"label": [1, 2, 3]}), folder / "labels.parquet")
    (folder / "README.md").write_text("# What this is")
    (folder / "crawl.warc").write_bytes(NO_PAGES)
    (folder / "locked").symlink_to(folder.parent)
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    return folder


def skipped(out: Path) -> dict[str, tuple[str, str]]:
    """Return status and the beginning of the reason by name."""
    items = read_lines(out / "skipped.jsonl")
    return {Path(item["path"]).name: (item["status"], item["reason"][:25]) for item in items}


@pytest.mark.parametrize("to", ["dataset", "parquet"])
def test_a_bad_file_is_set_aside(everyday, tmp_path, to):
    out, messages = tmp_path / "out", list[str]()
    result = prepare(everyday, out, to=to, on_message=messages.append, settings=LENIENT)
    assert (result.documents_out, result.documents_in) == (62, 63)
    assert skipped(out) == {
        "locked": ("skipped", "a link that leads out of "),
        "logo.png": ("skipped", "a file of the format imag"),
        "labels.parquet": ("failed", "expected a column of text"),
        "crawl.warc": ("failed", "expected responses of HTM"),
    }
    assert sum(result.to_json()["skipped"].values()) == 4
    assert [message[:20] for message in messages] == ["left out 1: a file o", "left out 1: a link t"] + [
        "left out 1 that faile"[:20]
    ] * 2
    with pytest.raises(PrepareError, match=r"prepare --strict: .* got 3 .*labels\.parquet: .*locked: a link"):
        prepare(everyday, tmp_path / "strict", to=to, settings=LENIENT, strict=True)
    report = load_report(out)
    assert report["skipped"] == result.skipped and len(report["skipped_files"]) == 4
    assert "labels.parquet" in (out / "report.html").read_text("utf-8").partition("<script")[0]
    assert prepare(everyday, out, to=to, settings=LENIENT).skipped == result.skipped
    assert to != "dataset" or not open_dataset(out).verify().extra


BAD_ROW, GOOD_ROW = b"{broken\n", b'{"text": "a good text, and a number of words"}\n'


def parquet(**columns: list) -> bytes:
    pq.write_table(pa.table(columns), sink := io.BytesIO())
    return sink.getvalue()


def damaged(data: bytes) -> bytes:
    """Return bytes of which those after the first half are others."""
    return data[: len(data) // 2] + bytes(byte ^ 0x55 for byte in data[len(data) // 2 :])


NOISE = random.Random(5).randbytes(60_000).hex().encode()
LINES = b"".join(b'{"text": "%s"}\n' % NOISE[i : i + 2000] for i in range(0, len(NOISE), 2000))  # hardly packed
HALF = 0.5  # About so much of the file is missing.
FAILURES = {
    "no column of text": ("bad.parquet", parquet(label=[1, 2, 3]), "expected a column of text named text, content", 1),
    "no column in CSV": ("bad.csv", b"a,b\n1,2\n" * 50, "expected a column of text named text, content", 1),
    "no field in any row": ("bad.jsonl", b'{"title": "a"}\n' * 30, "got nothing among title, in every record", 1),
    "no row is JSON": ("bad.jsonl", BAD_ROW * 40, "none of 40 records is a document", 1),
    "not what its name says": ("bad.jsonl", b"<!doctype html><html>Log in</html>", "got an HTML page", 1),
    "a pointer": ("bad.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "got a pointer of Git LFS", 1),
    "damaged Parquet": ("bad.parquet", parquet(text=["a"] * 9)[:-9] + b"123456789", "", 1),
    "a text of no encoding": ("bad.txt", b"x \xf7\xd7\xb1\xf0 " * 90, "not UTF-8", 1),
    "a crawl without pages": ("bad.warc", NO_PAGES, "expected responses", 1),
    "gzip damaged in the middle": ("bad.jsonl.gz", damaged(gzip.compress(LINES)), "damaged gz", HALF),
    "gzip that is cut": ("bad.jsonl.gz", gzip.compress(LINES)[:-9], "ends early", 0),
    "a packed crawl that is cut": ("bad.warc.gz", gzip.compress(PAGE) * 9 + gzip.compress(PAGE)[:-9], "ends early", 0),
    "the rest given up": ("bad.jsonl", GOOD_ROW * 10 + BAD_ROW * 150 + GOOD_ROW * 200, "the rest is left out", 0.9),
}  # fmt: skip


@pytest.mark.parametrize("way", FAILURES)
def test_an_input_that_fails_is_told_everywhere_and_counts_by_its_bytes(way, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("forebay.formats.inputs._BUFFER_BYTES", 1 << 10)  # to which what is missing is known
    monkeypatch.setattr("forebay.prepare.inputs.MAX_MALFORMED", 100)
    name, data, reason, share = FAILURES[way]
    source, out = tmp_path / "in", tmp_path / "out"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / name).write_bytes(data)
    good = source / "good.jsonl"
    good.write_bytes(GOOD_ROW * (25 * len(data) // len(GOOD_ROW) + 1))
    command = ["prepare", "--tokenizer", "bytes", "--workers", "1", "--quiet", "--out"]

    assert main([*command, str(out), str(source)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("1 input failed, ") and "skipped.jsonl" in shown.out
    assert "forebay: left out 1 that failed: " in shown.err and reason in shown.err
    assert main([*command, str(out), str(source), "--json"]) == 0  # as it is there already
    failed = json.loads(capsys.readouterr().out)["failed"]
    (item,) = read_lines(out / "skipped.jsonl")
    assert Path(item["path"]).name == name and item["status"] == "failed" and reason in item["reason"]
    assert (failed["inputs"], failed["bytes"]) == (1, item["bytes"])
    assert item["bytes"] == pytest.approx(share * len(data), rel=0.35) and failed["share"] < 0.05
    page = (out / "report.html").read_text("utf-8").partition("<script")[0]
    assert page.index("failed inputs") < page.index("Inputs that failed") < page.index("Funnel")

    good.write_bytes(GOOD_ROW * 4)
    is_error = share > 0
    assert main([*command, str(tmp_path / "more"), str(source)]) == is_error
    if is_error:
        message = capsys.readouterr().err
        assert f"sub/{name}: " in message and "% of its bytes in 1 input that failed" in message
        assert "--set max_error_rate=" in message and "skipped.jsonl" in message
        assert not (tmp_path / "more/manifest.json").exists()
        assert len(read_lines(tmp_path / "more/skipped.jsonl")) == 1
        assert main([*command, str(tmp_path / "more"), str(source), "--set", "max_error_rate=1"]) == 0
    assert main([*command, str(tmp_path / "none"), str(source), "--strict"]) == 1

    good.write_bytes(GOOD_ROW * (25 * len(data) // len(GOOD_ROW) + 1))  # What is named is wanted, however small it is.
    assert main([*command, str(tmp_path / "named"), str(good), str(source / "sub" / name)]) == (share == 1)


def test_a_folder_and_a_file_that_may_not_be_read():
    """As another user than root, whom nothing is refused."""
    with tempfile.TemporaryDirectory() as name:
        source, user = Path(name) / "in", os.geteuid()
        for path, mode in (("a", 0o755), ("a/b", 0o755), ("locked", 0o755)):
            (source / path).mkdir(mode=mode, parents=True)
        (source / "a/x.txt").write_text("a text " * 100)
        (source / "a/b/y.txt").write_text("another text")
        (source / "locked/z.txt").write_text("never seen")
        Path(name).chmod(0o755)
        (source / "a/b/y.txt").chmod(0)
        (source / "locked").chmod(0)
        try:
            os.seteuid(65534 if user == 0 else user)
            listed = find_inputs(source, ReadOptions())
        finally:
            os.seteuid(user)
            (source / "locked").chmod(0o755)
    assert [(Path(file.name).name, file.bytes) for file in listed.files] == [("x.txt", 700)]
    assert [(item.path.removeprefix(str(source)), item.status, item.bytes) for item in listed.skipped] == [
        ("/a/b/y.txt", "failed", 12), ("/locked/", "failed", -1),
    ]  # fmt: skip
    assert count_failed(listed.skipped[:1], listed.files, 700) == {"inputs": 1, "bytes": 12, "share": 0.016854}
    assert count_failed(listed.skipped, listed.files, 700)["share"] == 1  # nobody knows what is in a folder


def test_a_folder_that_cannot_be_read_is_an_unknown_share(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ["a text"])
    entries = [path, Skipped(f"{tmp_path}/b/", "cannot be read: Permission denied", "failed", -1)]
    monkeypatch.setattr("forebay.prepare.inputs.list_files", lambda *_, **__: entries)
    with pytest.raises(PrepareError, match=r"got an unknown share in 1 input that failed: .*max_error_rate=1\."):
        prepare(tmp_path, tmp_path / "d")
    started_at = 0.0
    write_jsonl(path, ["a text", *[{"text": 5}] * 9])
    entries.pop()
    for settings in ({}, {"max_error_rate": 1}):  # the same work goes on, and its time
        with suppress(PrepareError):
            prepare(tmp_path, tmp_path / "d", settings=settings)
        record = read_progress(tmp_path / "d")
        assert started_at in (0, record["started_at"])
        started_at = record["started_at"]


def test_a_dataset_a_report_and_scripts_among_the_inputs_are_no_text(tmp_path):
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt", "style.css", "sub/code.js", "logo.svg", "a.cdx.gz", "a.warc.md5",
                 "x-multistream-index1.txt", "_temporary", "_SUCCESS"):  # fmt: skip
        (source / name).write_text("<svg>some words</svg>")
    prepare(source, source / "dataset")
    prepare(source, source / "sub/report", to="report")
    prepare(str(source / "*.txt"), source / "text", to="jsonl")
    result = prepare([source, source / "a.txt"], tmp_path / "out")
    assert result.documents_out == 3  # with that of the prepared text, which is text
    assert result.skipped["an output of Forebay: a dataset (forebay.Loader reads it) or a report"] == 2
    assert result.skipped["a script, style sheet, drawing, index or checksum (read.format=code reads them)"] == 6
    assert prepare(source, tmp_path / "code", settings={"read": {"format": "code"}}).documents_out > 3


@pytest.mark.parametrize(
    "name, data, key",
    [
        ("a.jsonl", b'{"body": "t", "content": "w"}\n{"text": 5}\n', "content"),
        ("a.json", b'[{"id": 1, "article": "t"}, {"art', "article"),
        ("a.csv", b"id;raw_text\n1;t\n", "raw_text"),
        ("a.parquet", parquet(document=["t"], content=[1]), "document"),
        ("a.parquet", parquet(body=["t"], text=["x"]), ""),
        ("a.jsonl", b'{"meta": {"content": "t"}}\n', ""),
    ],
)  # fmt: skip
def test_the_field_of_the_text_is_that_of_each_file(name, data, key, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert [file.text_key for file in find_inputs(tmp_path, ReadOptions()).files] == [key]
    assert find_inputs(tmp_path, ReadOptions(text_key=("text",))).files[0].text_key == ""


@pytest.mark.parametrize("key", ["text", "revew", ["revew", "bdy"]])
def test_inputs_whose_first_records_have_no_text_end_the_run_before_it_reads(key, tmp_path, monkeypatch):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(3):
        rows = [json.dumps({"meta": {"review": "some words"}, f"x{number}": i}) for i in range(150)]
        (source / f"{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    if key != "text":  # otherwise they are left out
        (source / "a.parquet").write_bytes(parquet(review=["some words"]))
        (source / "a.csv").write_text("review\nsome words\n")
    monkeypatch.setattr("forebay.prepare.driver.process_split", None)
    with pytest.raises(PrepareError, match=r"--set read\.text_key=meta\.review") as error:
        prepare(source, out, settings={"read": {"text_key": key}})
    assert str(error.value).count("expected text under") == 1 and "0.jsonl.gz and 2 more: " in str(error.value)
    assert len(read_lines(out / "skipped.jsonl")) == (3 if key == "text" else 5)


def test_records_without_text_count_once_and_are_a_kind_of_input(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "a"}\n' * 30)
    write_jsonl(tmp_path / "good.jsonl", ["a text"])
    kinds = [split.kind for split in split_files(find_inputs(tmp_path, ReadOptions()).files, ReadOptions())]
    assert kinds == ["jsonl without text", "jsonl"]  # each with a pace of its own
    result = prepare(tmp_path, tmp_path / "out", settings={"max_error_rate": 1})
    assert (result.documents_in, result.dropped, result.failed["inputs"]) == (31, {"empty": 30}, 1)
    assert load_report(result.path)["totals"]["malformed"] == 0 and not (tmp_path / "out/rejects.jsonl").exists()


def test_what_most_of_the_first_records_lack_is_told(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Hi"}]}] * 300
    rows[50] = {"text": "a text"}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    messages: list[str] = []
    prepare(tmp_path, tmp_path / "out", on_message=messages.append)
    assert (
        len(messages) == 1
        and "in 99 of the first 100 records. These are chats: forebay prepare --recipe sft" in messages[0]
    )


def test_when_all_is_dropped_the_report_says_why(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["too short", "short"])
    for to in ("dataset", "parquet"):
        with pytest.raises(
            PrepareError, match=r"got none: 2 read, dropped by length \((\w+) 2\)\. Loosen .*report\.html"
        ):
            prepare(path, tmp_path / to, settings={"length": {"min_chars": 100}}, to=to)
        report = load_report(tmp_path / to)
        assert report["totals"]["documents_in"] == 2 and report["funnel"][1]["documents_out"] == 0
        assert len(report["samples"]) == 2


def test_a_document_over_which_the_stages_end_is_rejected_alone(tmp_path, monkeypatch):
    """`tests/slow/prepare/test_sandbox.py` has processes that end."""

    class Worker(InProcessWorker):
        def call(self, run, task, data, limits):
            texts = pa.ipc.open_stream(data).read_all()["text"].to_pylist()
            return "it ended" if "poison" in texts else super().call(run, task, data, limits)

    monkeypatch.setattr("forebay.prepare.tasks.stages.worker_for", lambda stages, warm: Worker())
    path = write_jsonl(tmp_path / "a.jsonl", ("poison" if i in (7, 203) else f"text {i}" for i in range(300)))
    result = prepare(path, tmp_path / "d", settings={"length": {"min_chars": 1}})
    assert result.documents_out == 298 and result.dropped == {"malformed": 2}
    rejects = [(reject["where"], reject["reason"]) for reject in read_lines(tmp_path / "d/rejects.jsonl")]
    assert rejects == [(f"{path}:8", "it ended"), (f"{path}:204", "it ended")]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """Return a folder of two files, which are read in many pieces."""
    monkeypatch.setattr(lines, "SPLIT_BYTES", 500)
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"corpus/{name}.jsonl", (f"text {name} {i} " * 5 for i in range(50)))
    return tmp_path / "corpus"


def stop_in_stage(stage: str) -> Callable[[Any], None]:
    def stop(progress):
        if progress.stage == stage:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("settings", [{"slice": {"shuffle": True}}, {"sample": 0.5}])
def test_the_same_content_is_the_same_dataset(tmp_path, corpus, settings):
    """Wherever it and the evaluation sets are, whenever they were written; with other sets it is another one."""
    exam = write_jsonl(corpus.parent / "exam.jsonl", ["Not one document of the corpus has these words of a question."])
    first = prepare(corpus, tmp_path / "one/d", settings={**settings, "decontaminate": {"sets": [str(exam)]}})
    moved = tmp_path / "else/where/corpus"
    shutil.copytree(corpus, moved)
    shutil.move(exam, moved.parent)
    os.utime(moved / "a.jsonl", (1, 1))
    settings = {**settings, "decontaminate": {"sets": [str(moved.parent / "exam.jsonl")]}}
    assert prepare(moved, tmp_path / "two/d", settings=settings).id == first.id
    write_jsonl(moved.parent / "exam.jsonl", ["Another question of the same test in as many words."])
    assert prepare(moved, tmp_path / "three/d", settings=settings).id != first.id
    assert b"corpus/a.jsonl" in (tmp_path / "one/d/report.html").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "one/d/manifest.json").read_bytes()


def test_a_file_that_changed_between_runs_is_read_again(tmp_path, corpus):
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "d", on_progress=stop_in_stage("encode"))
    data = (corpus / "a.jsonl").read_text()
    (corpus / "a.jsonl").write_text(data.replace("text a", "TEXT a"))
    resumed = prepare(corpus, tmp_path / "d").open()
    assert resumed.id == prepare(corpus, tmp_path / "fresh", name="d").id
    inputs = resumed.manifest.lineage["inputs"]
    assert [item["sha256"] for item in inputs] == [hash_file(corpus / name) for name in ("a.jsonl", "b.jsonl")]


def test_a_dataset_of_other_versions_is_kept_and_reported(tmp_path, corpus):
    first = prepare(corpus, tmp_path / "d", to="parquet")
    fields = json.loads((tmp_path / "d/text.json").read_bytes())
    fields["lineage"]["versions"]["pyarrow"] = "0.1"
    (tmp_path / "d/text.json").write_text(json.dumps(fields))
    messages = []
    again = prepare(corpus, tmp_path / "d", to="parquet", on_message=messages.append)
    assert again.already_exists and again.documents_out == first.documents_out
    assert f"was made with other versions: pyarrow 0.1 (here: {pa.__version__})" in messages[-1]


def test_names_that_are_not_utf_8(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xfcde.txt"))
    path.write_text("text")
    prepare(path, tmp_path / "t", to="parquet")
    assert pq.read_table(tmp_path / "t/text")["id"].to_pylist() == [f"{tmp_path}/m\\udcfcde.txt"]
    prepare(path, tmp_path / "d", document_ids=True)
    assert pq.read_table(tmp_path / "d/documents.parquet")["id"].to_pylist() == ["m?de.txt"]
