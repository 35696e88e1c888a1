"""The report page and its terminal form: figures right, hostile text harmless, nothing fetched."""

import html
import re

import pytest

from forebay.errors import DatasetError
from forebay.prepare import report as figures
from forebay.prepare.report import load_report, load_times, render, render_text, write_report
from forebay.storage.store import open_store
from support.preparing import prepare, write_jsonl

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> \0 \x1b[31m &amp; ' \" \u202eRTL\u202d "
    "שלום مرحبا Z" + "\u0301" * 200 + " \ud800 \ufdd0question\ufdd1answer --> ]]>"
)


def example(text: str = "") -> dict:
    """Return the report of a small crawl; with `text`, each name and text in it is that."""
    stages, documents, size = [], 1_284_113, 9_814_223_991
    for stage, dropped, changed in (
        ("read", {"malformed": 412}, {}),
        ("gopher_quality", {"short": 48_127, "few_stop_words": 61_223}, {}),
        ("pii", {}, {text or "email": 48_121}),
        (text or "minhash_dedup", {text or "near_duplicate": 785_577}, {}),
    ):
        retained = documents - sum(dropped.values())
        counts = {"documents_in": documents, "documents_out": retained, "bytes_in": size, "bytes_out": size // 2}
        stages.append({"stage": stage, **counts, "dropped": dropped, "changed": changed})
        documents, size = retained, size // 2
    samples = [
        {"stage": stage["stage"], "reason": reason, "where": text, "url": text or "https://a/5", "text": text}
        for stage in stages
        for reason in stage["dropped"]
    ]
    samples += [{**samples[0], "stage": "", "reason": "kept"}, {**samples[1], "url": "javascript:alert(1)"}]
    return {
        **{key: {} for key in ("skipped_files", "rules", "thresholds", "subsets")},
        "version": 1,
        "failed": {"inputs": 0, "bytes": 0},
        "name": text or "small",
        "id": text,
        "created_with": text,
        "recipe": {"dedup": {"ngram": 5, "text": [text]}, "tokenize": {"tokenizer": text or "bytes"}},
        "totals": {**counts, "tokens": 391_223_114, "slices": 12, "malformed": 412},
        "inputs": [
            {"name": text or str(i), "format": text, "bytes": 98, "documents": 12, "malformed": 0} for i in range(64)
        ],
        "funnel": stages,
        "histograms": {text or "n": {"edges": list(range(31)), "read": [9] * 30, "kept": [3] * 30}},
        "languages": {"en": {"read": 612_001, "kept": 367_200}, text or "zh": {"read": 61_200, "kept": 0}},
        "samples": samples,
        "rejects": [{"where": text, "reason": text} for _ in range(9)],
        "rejected": {text or "the member ends early": 412},
        "skipped": {text or "hidden": 3},
    }


def page_text(page: str) -> str:
    return html.unescape(re.sub(r"<style>.*?</style>|<script.*?</script>|<[^>]*>", "\n", page, flags=re.DOTALL))


def test_the_page_loads_nothing_and_each_rule_leads_to_what_it_dropped():
    page = render(example())
    assert not re.search(r"<(img|link)|\s(src|onerror|onclick|onload)=|url\(|@import", page)
    assert page.count("<script") == 1 and "default-src 'none'" in page and "script-src" not in page
    ids, links = re.findall(r'\sid="([^"]+)"', page), set(re.findall(r'\shref="([^"]+)"', page))
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link[0] == "#"} <= set(ids)
    assert {link for link in links if link[0] != "#"} == {"rejects.jsonl", "skipped.jsonl"}
    assert len({link for link in links if link.startswith("#dropped-")}) == 3 and "#malformed-records" in links
    assert "48,127 dropped, 2 of them here." in page_text(page)


def test_it_shows_the_figures():
    text = page_text(render(example()))
    shown = (
        "1,284,113",
        "tokens (bytes)\n\n\n391 M",
        "minhash_dedup",
        "61,223",
        "48,121",
        "14 more inputs",
        "zh",
        '"ngram": 5',
    )
    assert all(figure in text for figure in shown) and "403 more are not shown" in text
    lines = render_text(example()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == "documents: 388,774 of 1,284,113 kept (30.3 %)"
    for pattern in (r"read +1,283,701 +>99\.9 %", r"  − few_stop_words +61,223 +4\.8 %", r"  ~ email +48,121"):
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    shares = [figures.share(a, 1000) for a in (0, 0.5, 612, 999.5, 1000)] + [figures.share(1, 0)]
    assert shares == ["0 %", "<0.1 %", "61.2 %", ">99.9 %", "100 %", "–"]
    assert [figures.short(n) for n in (9_999, 12_345, 999_600, 1.5e12)] == ["9,999", "12.3 k", "1 M", "1.5 T"]


def test_hostile_text_is_only_text(tmp_path):
    write_report(open_store(tmp_path), example(HOSTILE))
    written = (tmp_path / "report.html").read_text("utf-8")
    assert written.count("<script") == 1 and "<img" not in written
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", written)
    assert "␀" in page_text(written) and "⟨prompt⟩ question" in page_text(written)
    assert load_report(tmp_path) == load_report(tmp_path / "report.html") == example(HOSTILE)
    assert not {"\x1b", "\u202e"} & set(render_text(example(HOSTILE)))
    for name, content in (("other.html", "<html></html>"), ("cut.html", written[:-3000])):
        (tmp_path / name).write_text(content)
        with pytest.raises(DatasetError, match="expected a report"):
            load_report(tmp_path / name)
    with pytest.raises(DatasetError, match="there is no report"):
        load_report(tmp_path / "none")


def test_each_stage_counts_what_came_in_and_what_left_and_why(tmp_path):
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
    assert (
        dropped["malformed"] == dropped["empty"] == 1
        and dropped["gopher_short"] == 12
        and dropped["exact_duplicate"] > 0
    )
    # Times are a section of their own; all else is the same from run to run.
    times = load_times(tmp_path / "d")
    assert times is not None and times == load_times(tmp_path / "d" / "report.html")
    before, _, section = (tmp_path / "d" / "report.html").read_text("utf-8").partition('<section id="times">')
    assert all(f"<bdi>{name}</bdi>" in section for name in ("read", "gopher_quality", "tokenize", "slice"))
    assert render(result.report, times).partition('<section id="times">')[0] == before
    assert "time  " in render_text(result.report, times) and "time  " not in render_text(result.report)
    assert load_times(tmp_path) is None
