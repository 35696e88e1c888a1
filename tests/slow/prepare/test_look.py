"""A recipe is tried on a sample, and two reports are compared, as a user does it."""

import json
import shutil
from pathlib import Path

import pytest

from forebay.prepare.report import load_report
from support.processes import run_command
from support.shared_data import shared_data

pytest.importorskip("numba")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("look")
    (folder / "in").mkdir()
    shutil.copy(shared_data("warc/dolma/sample-0000.warc.gz"), folder / "in")
    for path in shared_data("jsonl").glob("cc_en_head-0???.jsonl"):
        shutil.copy(path, folder / "in")
    return folder


def test_a_sample_without_out_gives_the_report_alone(pages: Path, tmp_path):
    arguments = ("prepare", pages / "in", "--recipe", "fineweb", "--tokenizer", "bytes", "--workers", 1)
    shown = run_command(*arguments, "--sample", "60%", cwd=tmp_path).stdout
    assert "dropped of what reaches a rule" in shown and "gopher_short < 50" in shown
    assert all(label in shown for label in ("whole input", "documents kept", "disk while it runs", "time", "memory"))
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])
    folder = tmp_path / "sample-report"
    assert {path.name for path in folder.iterdir()} <= {
        "report.html", "report.json", "rejects.jsonl", "skipped.jsonl", ".progress.json",
    }  # fmt: skip
    report = load_report(folder)
    assert 0 < report["sample"]["documents"] == report["totals"]["documents_in"]
    assert report["estimate"]["documents_in"][0] >= report["totals"]["documents_in"]
    seconds = report["cost"]["cpu_s"]
    assert {"read", "extract", "gopher_quality", "tokenize", "dedup"} <= set(seconds)
    assert all(total >= sampled - 0.01 for name, (sampled, total) in seconds.items() if name != "start")
    assert report["cost"]["wall_s"][1] < report["cost"]["wall_s"][0] < report["cost"]["wall_s"][2]
    # Again, with other settings: the earlier report is replaced.
    run_command(*arguments, "--sample", "60%", "--set", "gopher_quality.min_words=5", cwd=tmp_path)
    assert {r["threshold"] for r in load_report(folder)["rules"] if r["reason"] == "gopher_short"} == {5}


def test_two_reports_are_compared(pages: Path, tmp_path):
    for name, words, extra in (("a", 50, ()), ("b", 5, ("--filter", "c4"))):
        limit = f"gopher_quality.min_words={words}"
        arguments = ("prepare", pages / "in", "--recipe", "gopher", "--tokenizer", "bytes", "--set", limit, *extra)
        run_command(*arguments, "--out", tmp_path / name, "--write-ids", tmp_path / f"{name}.ids", cwd=tmp_path)
    both = ("report", tmp_path / "a", tmp_path / "b" / "report.html", "--ids", tmp_path / "a.ids", tmp_path / "b.ids")
    comparison = json.loads(run_command(*both, "--json", cwd=tmp_path).stdout)
    changed = {entry["key"]: (entry["a"], entry["b"]) for entry in comparison["recipe"]}
    assert changed == {"gopher_quality.min_words": (50, 5), "[c4]": (None, True)}
    rules = {rule["reason"]: rule for rule in comparison["rules"]}
    assert rules["gopher_short"]["a"]["dropped"] > rules["gopher_short"]["b"]["dropped"]
    assert rules["gopher_short"]["difference"] < 0
    ids = [set((tmp_path / f"{name}.ids").read_text().splitlines()) for name in "ab"]
    documents = comparison["documents"]
    assert (documents["both"], documents["only_a"], documents["only_b"]) == (
        len(ids[0] & ids[1]), len(ids[0] - ids[1]), len(ids[1] - ids[0]),
    )  # fmt: skip
    assert set(documents["examples_b"]) <= ids[1] - ids[0] and set(documents["examples_a"]) <= ids[0] - ids[1]
    shown = run_command(*both, "--html", tmp_path / "page.html", cwd=tmp_path).stdout
    assert "gopher_quality.min_words" in shown and "[c4]" in shown and "kept by both" in shown and "CPU time" in shown
    assert comparison["times"][0]["name"] == "all" and comparison["times"][0]["b"] > 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") >= 2 * 20 and "<script" not in page
    assert json.loads(run_command("report", "a", "a", "--json", cwd=tmp_path).stdout)["recipe"] == []
