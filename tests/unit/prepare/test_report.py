"""The report page and its terminal form: figures right, hostile text harmless, nothing fetched."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DatasetError
from forebay.prepare import report as figures
from forebay.prepare.report import load_report, load_times, render, render_text, write_report
from forebay.storage.store import open_store
from support.preparing import prepare, write_jsonl

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> \0 \x1b[31m &amp; ' \" \u202eRTL\u202d "
    "שלום مرحبا Z" + "\u0301" * 200 + " \ud800 \ufdd0question\ufdd1answer --> ]]>"
)


def example() -> dict[str, Any]:
    """Return the report of a small crawl."""
    stages, documents, size = [], 1_284_113, 9_814_223_991
    for stage, dropped, changed in (
        ("read", {"malformed": 412}, {}),
        ("gopher_quality", {"short": 48_127, "few_stop_words": 61_223}, {}),
        ("pii", {}, {"email": 48_121}),
        ("minhash_dedup", {"near_duplicate": 785_577}, {}),
    ):
        kept = documents - sum(dropped.values())
        counts = {"documents_in": documents, "documents_out": kept, "bytes_in": size, "bytes_out": size // 2}
        stages.append({"stage": stage, **counts, "dropped": dropped, "changed": changed})
        documents, size = kept, size // 2
    samples = [
        {"stage": stage["stage"], "reason": reason, "where": "a.warc.gz:5", "url": "https://a/5", "text": reason}
        for stage in stages
        for reason in stage["dropped"]
    ]
    samples += [{**samples[0], "stage": "", "reason": "kept"}, {**samples[1], "url": "javascript:alert(1)"}]
    return {
        "name": "small",
        "id": "7d1e",
        "created_with": "forebay 0.1.0",
        "recipe": {"dedup": {"minhash": {"ngram": 5}}},
        "totals": {"documents_out": documents, "tokens": 391_223_114, "slices": 12, "malformed": 412},
        "inputs": [{"name": f"{i}.warc.gz", "format": "warc", "bytes": 98, "documents": 12} for i in range(64)],
        "funnel": stages,
        "histograms": {"length": {"edges": list(range(31)), "read": [9] * 30, "kept": [3] * 30, "log": True}},
        "languages": {"en": {"read": 612_001, "kept": 367_200}, "zh": {"read": 61_200, "kept": 0}},
        "samples": samples,
        "rejects": [{"where": f"a.warc.gz: byte {i}", "reason": "the member ends early"} for i in range(9)],
        "rejected": {"the member ends early": 412},
        "skipped": {"hidden": 3},
    }


class Page(HTMLParser):
    """The elements of a page, and its text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + "\n"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def test_the_page_loads_nothing_and_each_rule_leads_to_what_it_dropped() -> None:
    written = render(example())
    page = Page(written)
    assert not any({"src", "onerror", "onclick", "onload"} & set(attrs) for _, attrs in page.tags)
    assert len(page.all("script")) == 1 and not page.all("img") and not page.all("link")
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy
    css = written.split("<style>")[1].split("</style>")[0]
    assert "url(" not in css and "@import" not in css
    ids = [str(attrs["id"]) for _, attrs in page.tags if "id" in attrs]
    links = {str(attrs["href"]) for attrs in page.all("a")}
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link[0] == "#"} <= set(ids)
    assert {link for link in links if link[0] != "#"} == {"rejects.jsonl", "skipped.jsonl"}
    assert len({link for link in links if link.startswith("#dropped-")}) == 3 and "#malformed-records" in links
    assert "48,127 dropped, 2 of them here." in page.text


def test_it_shows_the_figures() -> None:
    text = Page(render(example())).text
    shown = ("1,284,113", "391 M", "minhash_dedup", "61,223", "48,121", "14 more inputs", "zh", '"ngram": 5')
    assert all(figure in text for figure in shown) and "403 more are not shown" in text
    lines = render_text(example()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == "documents: 388,774 of 1,284,113 kept (30.3 %)"
    for pattern in (r"read +1,283,701 +>99\.9 %", r"  − few_stop_words +61,223 +4\.8 %", r"  ~ email +48,121"):
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    shares = [figures.share(a, 1000) for a in (0, 0.5, 612, 999.5, 1000)] + [figures.share(1, 0)]
    assert shares == ["0 %", "<0.1 %", "61.2 %", ">99.9 %", "100 %", "–"]
    assert [figures.short(n) for n in (9_999, 12_345, 999_600, 1.5e12)] == ["9,999", "12.3 k", "1.00 M", "1.50 T"]


def test_histograms() -> None:
    data = {"edges": [0, 1, 2, 3, 4], "read": [0, 4, 2, 0], "kept": [0, 1, 2, 0]}
    text = Page(render({"histograms": {"n": data}})).text.split()
    assert text[text.index("Kept") + 1 :][:10] == ["1", "to", "2", "4", "1", "2", "to", "3", "2", "2"]
    for data in ({}, {"edges": [1], "read": []}, {"edges": [1, 2], "read": [0]}, {"edges": [1, 2], "read": [1, 2]}):
        assert "Distribution" not in render({"histograms": {"n": data}})


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    report = example()
    for sample in report["samples"]:
        sample.update(stage=HOSTILE, reason=HOSTILE, where=HOSTILE, url=HOSTILE, text=HOSTILE)
    report["name"] = report["id"] = report["created_with"] = HOSTILE
    report["funnel"][0] |= {"stage": HOSTILE, "dropped": {HOSTILE: 412}, "changed": {HOSTILE: 2}}
    report["histograms"] = {HOSTILE: report["histograms"]["length"]}
    report["languages"] = {HOSTILE: {"read": 2, "kept": 1}}
    report["rejects"] = [{"where": HOSTILE, "reason": HOSTILE}]
    report["inputs"] = [{"name": HOSTILE, "format": HOSTILE}]
    report["recipe"] = {"a": HOSTILE, "b": {"c": [HOSTILE]}}
    write_report(open_store(tmp_path), report)
    written = (tmp_path / "report.html").read_text("utf-8")
    page = Page(written)
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", written)
    assert "␀" in page.text and "⟨prompt⟩ question" in page.text
    assert load_report(tmp_path) == report
    assert not {"\x1b", "\u202e"} & set(render_text(report))


def test_the_page_carries_its_report(tmp_path: Path) -> None:
    write_report(open_store(tmp_path), example())
    assert load_report(tmp_path / "report.html") == example()
    for name, content in (("other.html", "<html></html>"), ("cut.html", render(example())[:-3000])):
        (tmp_path / name).write_text(content)
        with pytest.raises(DatasetError, match="expected a report"):
            load_report(tmp_path / name)
    with pytest.raises(DatasetError, match="there is no report"):
        load_report(tmp_path / "none")


def test_each_stage_counts_what_came_in_and_what_left_and_why(tmp_path: Path) -> None:
    good, short = "It is a truth that the mill and the race have to be seen by all who pass. " * 8, "a b"
    texts = [f"{good}Number {i // 2} of them." if i % 5 else f"{short} {i}" for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, {}, {"text": 5}])
    options = {"filters": ["gopher_quality", "fineweb"], "dedup": ["exact"], "settings": {"max_error_rate": 0.5}}
    result = prepare(path, tmp_path / "d", **options)
    funnel = load_report(tmp_path / "d")["funnel"]
    assert [stage["documents_in"] for stage in funnel[1:]] == [stage["documents_out"] for stage in funnel[:-1]]
    for stage in funnel:
        assert stage["documents_in"] - sum(stage["dropped"].values()) == stage["documents_out"], stage
    dropped = {reason: n for stage in funnel for reason, n in stage["dropped"].items()}
    assert dropped["malformed"] == 2 and dropped["gopher_short"] == 12 and dropped["exact_duplicate"] > 0
    # Times are a section of their own; all else is the same from run to run.
    times = load_times(tmp_path / "d")
    assert times is not None and times == load_times(tmp_path / "d" / "report.html")
    written = (tmp_path / "d" / "report.html").read_text("utf-8")
    before, _, section = written.partition('<section id="times">')
    names = ("read", "gopher_quality", "tokenize", "slice")
    assert all(f"<bdi>{name}</bdi>" in section.partition("</section>")[0] for name in names)
    assert render(result.report, times).partition('<section id="times">')[0] == before
    shown = render_text(result.report, times)
    assert "time  " in shown and "of CPU: " in shown and "time  " not in render_text(result.report)
    assert load_times(tmp_path) is None


@pytest.mark.parametrize(
    "report", [{}, {"name": "empty", "totals": {}, "funnel": [{"stage": "read"}], "histograms": {"x": {}}}]
)
def test_little_is_needed(report: dict[str, Any]) -> None:
    assert Page(render(report)).all("script")
    assert "documents: 0 of 0 kept" in render_text(report)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_recipe_is_shown(value: Any) -> None:
    assert Page(render({"recipe": {"a": value}})).all("script")
