"""The report page and its terminal form: figures right, hostile text harmless, nothing fetched."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DatasetError
from forebay.prepare import report as figures
from forebay.prepare.driver import prepare_dataset
from forebay.prepare.report import load_report, load_times, render, render_text, write_report
from forebay.storage.store import open_store

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> \0 \x1b[31m &amp; ' \" \u202eRTL\u202d "
    "שלום مرحبا Z" + "\u0301" * 200 + " \ud800 \ufdd0question\ufdd1answer --> ]]>"
)


def example() -> dict[str, Any]:
    """A run of the size of a small crawl."""
    text = "The mill by the race has ground corn since 1683, and its wheel still turns in wet years. "
    funnel = [
        ("read", 1_284_113, {"malformed": 412}, {}),
        ("extract", 0, {"no_main_text": 41_207, "too_small": 12_404}, {}),
        ("language", 0, {"not_in_list": 389_200, "low_score": 51_344}, {}),
        ("gopher_repetition", 0, {"top_2_gram": 40_118, "duplicate_lines": 33_010, "top_4_gram": 9_203}, {}),
        (
            "gopher_quality",
            0,
            {
                "few_stop_words": 61_223,
                "short": 48_127,
                "symbol_ratio": 8_313,
                "bullets": 2_011,
                "mean_word_length": 1_022,
            },
            {},
        ),
        ("c4", 0, {"no_terminal_punctuation": 20_412, "lorem_ipsum": 14, "curly_bracket": 2_113}, {}),
        ("pii", 0, {}, {"email": 48_121, "phone": 20_113, "ipv4": 3_044, "iban": 12, "payment_card": 7}),
        ("perplexity", 0, {"above_p95": 25_112}, {}),
        ("exact_dedup", 0, {"duplicate": 48_221}, {}),
        ("minhash_dedup", 0, {"near_duplicate": 101_873}, {}),
    ]
    stages, documents, size = [], funnel[0][1], 9_814_223_991
    for stage, _, dropped, changed in funnel:
        remaining = documents - sum(dropped.values())
        out = int(size * remaining / documents * (0.41 if stage == "extract" else 1))
        stages.append(
            {"stage": stage, "documents_in": documents, "documents_out": remaining, "bytes_in": size, "bytes_out": out}
            | {"dropped": dropped, "changed": changed}
        )
        documents, size = remaining, out
    edges = [round(10 ** (1 + i / 6)) for i in range(31)]
    read = [int(90_000 * 2.718 ** (-(((i - 13) / 5) ** 2))) for i in range(30)]
    retained = [int(n * min(1, max(0, (i - 6) / 10)) * 0.7) for i, n in enumerate(read)]
    samples = [
        {
            "stage": "",
            "reason": "kept",
            "where": f"warc/CC-MAIN-0{i}.warc.gz:{i * 37}",
            "url": f"https://example.org/{i}",
        }
        | {"text": text * 4}
        for i in range(2)
    ]
    samples += [
        {"stage": s["stage"], "reason": r, "where": f"warc/CC-MAIN-00.warc.gz:{n}", "url": "", "text": text + r}
        for s in stages
        for r, n in s["dropped"].items()
    ]
    samples.append(
        {"stage": "c4", "reason": "curly_bracket", "where": "x", "url": "javascript:alert(1)", "text": HOSTILE}
    )
    return {
        "name": "fineweb-small",
        "id": "7d1e5c0f9ab3427d8e61f5a2c4b7d09e1f3a5c7e9b2d4f60718293a4b5c6d7e8",
        "created_with": "forebay 0.1.0",
        "recipe": {
            "name": "fineweb-small",
            "input": [{"path": "warc/*.warc.gz", "format": "warc"}, {"path": "wet/*.wet.gz"}],
            "extract": {"library": "resiliparse"},
            "language": {"keep": ["en", "de"], "score": 0.65},
            "dedup": {"minhash": {"hashes": 112, "bands": 14, "ngram": 5}},
            "tokenizer": "gpt2",
        },
        "totals": {
            "documents_in": 1_284_113,
            "documents_out": documents,
            "bytes_in": 9_814_223_991,
            "bytes_out": size,
            "tokens": 391_223_114,
            "slices": 12,
            "malformed": 412,
        },
        "inputs": [
            {"name": f"warc/CC-MAIN-{i:02d}.warc.gz", "format": "warc", "bytes": 98_142_239 + i}
            | {"documents": 12_841, "malformed": 4}
            for i in range(64)
        ],
        "funnel": stages,
        "histograms": {
            "length (characters)": {"edges": edges, "read": read, "kept": retained, "log": True},
            "perplexity": {
                "edges": [50 * 1.25**i for i in range(25)],
                "read": read[4:28],
                "kept": [n // 2 if i < 15 else 0 for i, n in enumerate(read[4:28])],
                "log": True,
            },
            "language score": {
                "edges": [i / 20 for i in range(21)],
                "read": [i**3 for i in range(20)],
                "kept": [0] * 13 + [i**3 for i in range(13, 20)],
                "log": False,
            },
        },
        "languages": {
            name: {"read": n, "kept": n * 6 // 10 if name in ("en", "de") else 0}
            for name, n in {
                "en": 612_001,
                "de": 180_332,
                "ru": 121_002,
                "fr": 80_123,
                "zh": 61_200,
                "ja": 44_021,
            }.items()
        },
        "samples": samples,
        "rejects": [
            {"where": f"warc/CC-MAIN-{i:02d}.warc.gz: byte {i * 5120}", "reason": "the gzip member ends early"}
            for i in range(9)
        ],
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


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = Page(render(example()))
    assert page.open == []
    for _, attrs in page.tags:
        assert not {"src", "onerror", "onclick", "onload"} & set(attrs)
        assert (attrs.get("href") or "#").startswith("#") or attrs["href"] in ("rejects.jsonl", "skipped.jsonl")
    assert len(page.all("script")) == 1 and not page.all("img") and not page.all("link")
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy
    css = render(example()).split("<style>")[1].split("</style>")[0]
    assert "url(" not in css and "@import" not in css


def test_each_rule_leads_to_what_it_dropped() -> None:
    report = example()
    report["rejected"], report["skipped"] = {"the gzip member ends early": 412}, {"hidden": 3}
    page = Page(render(report))
    ids = [str(attrs["id"]) for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [str(attrs["href"]) for attrs in page.all("a")]
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    rules = [reason for stage in report["funnel"] for reason in stage["dropped"]]
    assert len({link for link in links if link.startswith("#dropped-")}) == len(rules) - 1
    assert {"#malformed-records", "rejects.jsonl", "skipped.jsonl"} <= set(links)
    assert "48,127 dropped, 1 of them here." in page.text


def test_times_are_a_section_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 9}) + "\n" for i in range(50)))
    result = prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", filters=["length"], workers=1)
    times = load_times(tmp_path / "d")
    assert times is not None and times == load_times(tmp_path / "d" / "report.html")
    written = (tmp_path / "d" / "report.html").read_text("utf-8")
    section = written.partition('<section id="times">')[2].partition("</section>")[0]
    assert all(f"<bdi>{name}</bdi>" in section for name in ("read", "length", "tokenize", "slice"))
    assert render(result.report, times).partition('id="times"')[0] == written.partition('id="times"')[0]
    assert "time  " in render_text(result.report, times) and "of CPU: " in render_text(result.report, times)
    assert load_times(tmp_path) is None and "time  " not in render_text(result.report)


def test_it_shows_the_figures() -> None:
    text = Page(render(example())).text
    for expected in (
        "1,284,113",
        "391 M",
        "minhash_dedup",
        "few_stop_words",
        "61,223",
        "48,121",
        "14 more inputs",
        "zh",
    ):
        assert expected in text, expected
    assert "403 more are not shown" in text
    assert '"ngram": 5' in text
    assert render(example()) == render(example())


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    report = example()
    for sample in report["samples"]:
        sample.update(stage=HOSTILE, reason=HOSTILE, where=HOSTILE, url=HOSTILE, text=HOSTILE)
    report["name"] = report["id"] = report["created_with"] = HOSTILE
    report["funnel"][0] |= {"stage": HOSTILE, "dropped": {HOSTILE: 412}, "changed": {HOSTILE: 2}}
    report["histograms"] = {HOSTILE: report["histograms"]["perplexity"]}
    report["languages"] = {HOSTILE: {"read": 2, "kept": 1}}
    report["rejects"] = [{"where": HOSTILE, "reason": HOSTILE}]
    report["inputs"] = [{"name": HOSTILE, "format": HOSTILE, "bytes": 1, "documents": 1, "malformed": 0}]
    report["recipe"] = {"a": HOSTILE, "b": {"c": [HOSTILE]}}
    write_report(open_store(tmp_path), report)
    written = (tmp_path / "report.html").read_text("utf-8")
    page = Page(written)
    assert page.open == [] and len(page.all("script")) == 1 and not page.all("img")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", written)
    assert "␀" in page.text and "⟨prompt⟩ question" in page.text
    assert load_report(tmp_path) == report
    shown = render_text(report)
    assert "\x1b" not in shown and "\u202e" not in shown


def test_each_stage_counts_what_came_in_and_what_left_and_why(tmp_path: Path) -> None:
    good, short = "It is a truth that the mill and the race have to be seen by all who pass. " * 8, "a b"
    texts = [f"{good}Number {i // 2} of them." if i % 5 else f"{short} {i}" for i in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{", "[]"]) + "\n")
    prepare_dataset(
        [tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", filters=["gopher_quality", "fineweb"],
        dedup=["exact"], settings={"read": {"max_malformed": 0.5}}, workers=1,
    )  # fmt: skip
    funnel = load_report(tmp_path / "d")["funnel"]
    assert [stage["documents_in"] for stage in funnel[1:]] == [stage["documents_out"] for stage in funnel[:-1]]
    for stage in funnel:
        assert stage["documents_in"] - sum(stage["dropped"].values()) == stage["documents_out"], stage
    dropped = {reason: n for stage in funnel for reason, n in stage["dropped"].items()}
    assert dropped["malformed"] == 2 and dropped["gopher_short"] == 12 and dropped["exact_duplicate"] > 0


def test_the_page_carries_its_report(tmp_path: Path) -> None:
    write_report(open_store(tmp_path), example())
    assert load_report(tmp_path / "report.html") == example()
    for name, content in (("other.html", "<html></html>"), ("cut.html", render(example())[:-9000])):
        (tmp_path / name).write_text(content, "utf-8", "surrogatepass")
        with pytest.raises(DatasetError, match="expected a report"):
            load_report(tmp_path / name)
    with pytest.raises(DatasetError, match="there is no report"):
        load_report(tmp_path / "none")


@pytest.mark.parametrize(
    "report", [{}, {"name": "empty", "totals": {}, "funnel": [{"stage": "read"}], "histograms": {"x": {}}}]
)
def test_little_is_needed(report: dict[str, Any]) -> None:
    assert Page(render(report)).open == []
    assert "documents: 0 of 0 kept" in render_text(report)


def test_the_terminal_form() -> None:
    text = render_text(example())
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == "documents: 388,774 of 1,284,113 kept (30.3 %)"
    assert any(re.fullmatch(r"read +1,283,701 +>99\.9 %", line) for line in lines)
    assert any(re.fullmatch(r"  − few_stop_words +61,223 +4\.8 %", line) for line in lines)
    assert any(re.fullmatch(r"  ~ email +48,121", line) for line in lines)  # changes are no share of the documents


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_recipe_is_shown(value: Any) -> None:
    assert Page(render({"recipe": {"a": value}})).open == []


def test_figures() -> None:
    assert [figures.share(a, 1000) for a in (0, 0.5, 612, 999.5, 1000)] == [
        "0 %",
        "<0.1 %",
        "61.2 %",
        ">99.9 %",
        "100 %",
    ]
    assert figures.share(1, 0) == "–"
    assert [figures.short(n) for n in (9_999, 12_345, 999_600, 1.5e12)] == ["9,999", "12.3 k", "1.00 M", "1.50 T"]


def test_histograms() -> None:
    data = {"edges": [0, 1, 2, 3, 4], "read": [0, 4, 2, 0], "kept": [0, 1, 2, 0]}
    text = Page(render({"histograms": {"n": data}})).text.split()
    assert text[text.index("Kept") + 1 :][:10] == ["1", "to", "2", "4", "1", "2", "to", "3", "2", "2"]
    for data in ({}, {"edges": [1], "read": []}, {"edges": [1, 2], "read": [0]}, {"edges": [1, 2], "read": [1, 2]}):
        assert "Distribution" not in render({"histograms": {"n": data}})


def test_the_example_is_json() -> None:
    assert json.loads(json.dumps(example())) == copy.deepcopy(example())
