"""Leftover lines and toxic text: what is still there after extraction, and what is dropped as toxic, beside peers.

    python -m benchmarks.prepare.leftovers

Leftovers: pages of the crawls in FOREBAY_TEST_DATA/warc; a page has leftovers if a short line of its text has a phrase
of menus, logins, cookie notices or copyright (PHRASES, which are not those of `[boilerplate]`). An empty text has none,
so the texts and their characters are counted too.
Toxic text: the 85 texts of tests/unit/prepare/clean/toxic_texts.tsv, written and labelled by us, and what is dropped of
honest text. datatrove gets the list of LDNOOBW that it would download.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.extract import gold_pages
from benchmarks.prepare.peers import EXTRACTORS, ask
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.formats.warc import Warc
from forebay.prepare.clean.boilerplate import Boilerplate
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.documents import Stage
from forebay.prepare.extract import extract_html
from forebay.prepare.filters.lines import LineRules

CRAWLS = (
    "dolma/sample-0000",
    "pywb/iana",
    "jwarc/cc",
    "fastwarc/clueweb-quirk",
    "fastwarc/warcfile",
    "aut/example.docs",
)
PHRASES = re.compile(
    r"\b(cookies?|privacy (policy|statement)|terms of (use|service)|all rights reserved|sign (in|up)|log ?(in|out)|"
    r"subscribe|newsletter|share (this|on)|(read|learn|show|view|see) (more|all)|follow us|skip to|"
    r"leave a (reply|comment)|contact us|about us|site ?map|advertise|"
    r"related (posts|articles|links)|(next|previous) (post|page))\b|"
    r"©|^\W*(home|menu|search)\W*$",
    re.IGNORECASE,
)
EXTRACT_PEERS = """
import logging; logging.disable(logging.CRITICAL)
import justext, trafilatura
def of_justext(html):
    paragraphs = justext.justext(html.encode(), justext.get_stoplist("English"), encoding="utf-8")
    return "\\n".join(p.text for p in paragraphs if not p.is_boilerplate)
precise = {"favor_precision": True, "include_comments": False}
peers = {"trafilatura": trafilatura.extract,
         "trafilatura, precision (datatrove)": lambda html: trafilatura.extract(html, **precise),
         "jusText, English (NeMo Curator)": of_justext}
def attempt(run, html):
    try: return run(html) or ""
    except Exception: return ""
answer = {name: [attempt(run, html) for html in request] for name, run in peers.items()}
"""
TOXIC_PEERS = """
import re
from datatrove.data import Document
from datatrove.pipeline.filters.c4_filters import C4BadWordsFilter
texts, words = request
c4 = C4BadWordsFilter()
c4._badwords_regex["en"] = re.compile(r"(?:\\W|^)({})(?:\\W|$)".format("|".join(map(re.escape, words))))
def drops(text):
    return c4.filter(Document(text=text, id="", metadata={"language": "en"})) is not True
answer = {"datatrove C4BadWordsFilter": [drops(text) for text in texts]}
try:
    from profanity_check import predict_prob
    answer["alt-profanity-check"] = [bool(p >= 0.5) for p in predict_prob(texts)]
except ImportError: pass
"""


def applied(stages: list[Stage], texts: list[str]) -> list[str]:
    """The texts after the stages; "" for one that is dropped."""
    out = []
    for batch in to_batches([Record(i, text=text) for i, text in enumerate(texts)]):
        alive = [True] * batch.num_rows
        for stage in stages:
            result = stage.apply(batch)
            batch, alive = result.batch, [a and d < 0 for a, d in zip(alive, result.drop.tolist())]
        out += [text if a else "" for a, text in zip(alive, batch.column("text").to_pylist())]
    return out


def show_leftovers() -> None:
    """Print the first table."""
    pages = []
    for name in CRAWLS:
        path = data_folder() / f"warc/{name}.warc.gz"
        file = InputFile(str(path), name, "warc", "gz", path.stat().st_size, "")
        pages += [r.text for r in Warc().read_text(InputSplit((file,)), ReadOptions()) if r.html and not r.problem]
    ours = [extract_html(page) for page in pages]
    rows = {
        "forebay": ours,
        "forebay, [boilerplate]": applied([Boilerplate()], ours),
        "forebay, [boilerplate] [lines]": applied([Boilerplate(), LineRules()], ours),
        **(ask(EXTRACT_PEERS, pages, EXTRACTORS) or {}),
    }
    print(f"{len(pages)} pages{'':30}{'texts':>6}{'characters':>12}{'with leftovers':>16}{'lines':>7}")
    for name, texts in rows.items():
        lines = [
            [line for line in text.splitlines() if len(line.split()) <= 12 and PHRASES.search(line)] for text in texts
        ]
        number, some = sum(map(bool, texts)), sum(map(bool, lines))
        share = f"{some / max(1, number):16.2f}"
        print(f"{name:40}{number:6}{sum(map(len, texts)):12}{share}{sum(map(len, lines)):7}")


def show_toxic() -> None:
    """Print the second table."""
    path = Path(__file__).parents[2] / "tests/unit/prepare/clean/toxic_texts.tsv"
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()]
    articles = (data_folder() / "neardup/articles_1000.train").read_text("utf-8").splitlines()
    sets = {
        "labelled": [text for _, text in rows],
        "web pages": [page.text for page in gold_pages("wcxb")],
        "news": [line.partition(" ")[2] for line in articles],
    }
    texts = [text for some in sets.values() for text in some]
    (batch,) = to_batches([Record(i, text=text) for i, text in enumerate(texts)], 1 << 30)
    drops: dict[str, Any] = {
        "forebay, lexicon": (Toxic().apply(batch).drop >= 0).tolist(),
        "forebay, lists = ldnoobw": (Toxic("ldnoobw").apply(batch).drop >= 0).tolist(),
    }
    words = [word for word in (data_folder() / "badwords/en").read_text().splitlines() if word]
    drops |= ask(TOXIC_PEERS, [texts, words]) or {}
    toxic = [label == "1" for label, _ in rows]
    print(
        f"\n{'':30}{'precision':>10}{'recall':>8}" + "".join(f"{f'of {len(sets[n])} {n}':>20}" for n in list(sets)[1:])
    )
    for name, dropped in drops.items():
        hits = sum(a and b for a, b in zip(dropped, toxic))
        start, cells = len(rows), []
        for some in list(sets.values())[1:]:
            cells.append(f"{sum(dropped[start : start + len(some)]):20}")
            start += len(some)
        precision, recall = hits / max(1, sum(dropped[: len(rows)])), hits / sum(toxic)
        print(f"{name:30}{precision:10.2f}{recall:8.2f}" + "".join(cells))


def measure() -> list[Figure]:
    """Print both tables."""
    show_leftovers()
    show_toxic()
    return []


if __name__ == "__main__":
    measure()
