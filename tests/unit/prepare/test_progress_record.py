"""The record of a preparation: true rates, bounded samples, and what it has at the end, after a stop and a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forebay import text_filter
from forebay.errors import PrepareError
from forebay.prepare.progress import FINISHED_FILE, RUNNING_FILE, ProgressRecord, read_progress
from forebay.prepare.rates import Progress
from forebay.storage.store import open_store
from support.handlers import FOREVER_S
from support.paths import ROOT
from support.preparing import prepare, write_jsonl

NO_PROCESS = 1 << 30


@text_filter("tenth", version="1", per_document=True)
def tenth(document: dict[str, Any]) -> bool:
    """Drop the documents whose id ends in 0."""
    return not document["id"].endswith("0")


def test_a_record_has_the_keys_of_its_page_whoever_wrote_it(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/preparation-record.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    for member in ("", "0"):
        record = ProgressRecord(open_store(tmp_path / f"of{member}"), name="x", member=member)
        record.start("key")
        for message in ["a worker was lost", *["there are no CPUs"] * 30, "a worker was lost"]:
            record.notify(message)
        record.write()
        assert read_progress(tmp_path / f"of{member}").keys() == keys, member
    record.complete()
    complete = read_progress(tmp_path / "of0")
    assert complete.keys() == keys
    shown = [message["text"] for message in complete["messages"]]
    assert shown == ["a worker was lost", "there are no CPUs", "a worker was lost"]


def test_the_record_of_a_run_that_fails_and_files_that_are_not_records(tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out"
    with pytest.raises(PrepareError, match="expected documents with text"):
        prepare(path, out, filters=["gopher_quality"])
    record = read_progress(out)
    assert record["state"] == "failed" and "gopher_short" in record["error"] and (out / RUNNING_FILE).exists()
    assert record["funnel"][1]["dropped"] == {"gopher_short": 1} and record["workers"] == []
    with pytest.raises(PrepareError, match="expected the directory of a preparation"):
        read_progress(tmp_path)
    for content in ("{", "[]", '{"version": 9}'):
        (tmp_path / FINISHED_FILE).write_text(content)
        with pytest.raises(PrepareError, match=r"\.progress\.json: expected"):
            read_progress(tmp_path)


def test_the_record_of_a_run_that_is_stopped_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.prepare.inputs.GROUP_BYTES", 1)
    monkeypatch.setattr("forebay.prepare.progress.WRITE_S", FOREVER_S)  # Between tasks alone.
    inputs, out = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    for number in range(12):
        rows = ({"text": f"{number} {i} " + "the word and that " * 4 * i, "id": str(i)} for i in range(40))
        write_jsonl(inputs / f"{number:02}.jsonl", rows)
    (inputs / "bad.jsonl").write_text('{"text": "a", "id": "a"}\nbroken\n')
    (inputs / "other.xyz").write_bytes(bytes(range(256)))
    options = {"filters": [tenth(), "gopher_quality"], "settings": {"max_error_rate": 0.5, "dedup": {"exact": True}}}

    def stop(state: Progress) -> None:
        if state.documents >= 160:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, out, on_progress=stop, **options)
    first = read_progress(out)
    assert first["state"] == "interrupted" and first["documents_in"] == 160
    dropped = {stage["stage"]: stage["dropped"] for stage in first["funnel"]}
    assert dropped["tenth"] == {"tenth": 12} and "tenth" in {sample["reason"] for sample in first["samples"]}
    running = json.loads((out / RUNNING_FILE).read_text()) | {"state": "running", "pid": NO_PROCESS}
    (out / RUNNING_FILE).write_text(json.dumps(running))
    gone = read_progress(out)
    assert gone["state"] == "interrupted" and "process is gone" in gone["error"] and gone["workers"] == []

    result = prepare(inputs, out, **options)
    record = read_progress(out)
    assert (record["state"], record["error"], record["output"], record["name"]) == ("done", "", "dataset", "out")
    assert record["started_at"] == first["started_at"] and record["wall_s"] > first["wall_s"]
    assert record["cpu_s"]["read"] >= first["cpu_s"]["read"]
    counts = {stage["stage"]: stage for stage in result.report["funnel"]}
    assert all(stage.items() <= counts[stage["stage"]].items() for stage in record["funnel"])
    assert (record["documents_in"], record["documents_out"]) == (482, result.documents_out)
    assert record["malformed"] == 1 and sum(record["skipped"].values()) == 1 and record["workers"] == []
    assert record["rejects"][0]["where"].endswith("bad.jsonl:2") and record["rejects"][0]["reason"]
    assert all(stage["done"] == stage["total"] and stage["stopped_at"] for stage in record["stages"])
    rules = [(sample["stage"], sample["reason"]) for sample in record["samples"]]
    assert ("gopher_quality", "gopher_short") in rules and max(map(rules.count, rules)) <= 3
    assert all(len(sample["text"]) <= 300 and sample["where"] for sample in record["samples"])
