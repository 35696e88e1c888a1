"""Main text of HTML pages: quality and speed of Forebay's extractor beside trafilatura, resiliparse and readability.

Three sets of pages with gold (in FOREBAY_TEST_DATA/html), each split in two halves by a hash of the site's name. The
package's model was trained on both, so another one, trained on half 0 alone (`extract_half.npz`), is scored on half 1:

* `wcxb`: pages of seven kinds, with their main content. Word precision, recall and F1, means over pages.
* `articles`: readability's test pages, with the expected HTML. The same scores.
* `snippets`: multilingual pages, each with snippets that belong to the text and that do not.

Run: `python -m benchmarks.prepare.extract`, with FOREBAY_TEST_DATA set. The peers run under the interpreter that
FOREBAY_EXTRACT_PEERS names (default `.venv-peers-extract/bin/python`, which `scripts/peers.sh extract` makes).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from benchmarks.measure import Figure
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.peers import EXTRACTORS, ask

DATA = Path(os.environ.get("FOREBAY_TEST_DATA", Path(__file__).parents[3] / "shared/data"))
HALF_MODEL = Path(__file__).with_name("extract_half.npz")
PEER_CODE = """
import logging; logging.disable(logging.CRITICAL)
def trafilatura_(**options):
    import trafilatura
    return lambda html: trafilatura.extract(html, **options)
def readability_():
    import lxml.html, readability
    return lambda html: lxml.html.fromstring(readability.Document(html).summary()).text_content()
peers = {
    "trafilatura": lambda: trafilatura_(), "trafilatura, precision": lambda: trafilatura_(favor_precision=True),
    "trafilatura, recall": lambda: trafilatura_(favor_recall=True),
    "trafilatura, no comments": lambda: trafilatura_(include_comments=False), "readability": readability_,
}
answer = {}
for name, make in peers.items():
    try:
        extract = make()
    except ImportError as error:
        print(error, file=sys.stderr)
        continue
    texts, start = [], time.process_time()
    for html in request:
        try: texts.append(extract(html) or "")
        except Exception: texts.append("")
    answer[name] = [time.process_time() - start, texts]
"""


@dataclass(frozen=True)
class GoldPage:
    """A page with its gold: the main text, or snippets that belong and do not belong to it."""

    dataset: str
    key: str
    host: str
    kind: str
    html: str
    text: str = ""
    expected: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def half(self) -> int:
        """0: HALF_MODEL was trained on it; 1: it was not."""
        return int(hashlib.sha256(f"host {self.host.removeprefix('www.')}".encode()).hexdigest(), 16) % 2


SETS = ("wcxb", "articles", "snippets")


def gold_pages(*sets: str) -> Iterator[GoldPage]:
    """The pages of the sets; of all three if none is named."""
    from forebay.formats.http_message import body_text

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in sets or SETS:
            with tarfile.open(DATA / "html" / f"{'wcxb_dev' if name == 'wcxb' else name}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
        for path in sorted((folder / "wcxb/ground-truth").glob("*.json")):
            gold = json.loads(path.read_text("utf-8"))
            page = folder / "wcxb/html" / f"{path.stem}.html"
            if page.exists():
                kind = ((gold.get("_internal") or {}).get("page_type") or {}).get("primary", "article")
                host = urlsplit(gold.get("url", "")).netloc or path.stem
                text = gold["ground_truth"].get("main_content", "")
                yield GoldPage("wcxb", path.stem, host, kind, body_text(page.read_bytes(), "", True), text)
        for path in sorted((folder / "articles").glob("*")):
            html = body_text((path / "source.html").read_bytes(), "", True)
            text = _text_of((path / "expected.html").read_text("utf-8"))
            yield GoldPage("articles", path.name, re.sub(r"[-\d]+$", "", path.name), "article", html, text)
        snippets = folder / "snippets/snippets.json"
        for url, gold in json.loads(snippets.read_text("utf-8") if snippets.exists() else "{}").items():
            html = body_text((folder / "snippets/pages" / gold["file"]).read_bytes(), "", True)
            expected, unexpected = (tuple(map(one_line, gold[key])) for key in ("with", "without"))
            host = urlsplit(url).netloc or gold["file"]
            yield GoldPage("snippets", gold["file"], host, "article", html, "", expected, unexpected)


def _text_of(html: str) -> str:
    from forebay.formats.html import html_to_text

    return html_to_text(html)


def words(text: str) -> list[str]:
    """Its words, in lower case."""
    return re.findall(r"\w+", text.lower())


def one_line(text: str) -> str:
    """The text with one blank for each run of white space."""
    return re.sub(r"\s+", " ", text).strip()


def word_scores(text: str, gold: str) -> tuple[float, float, float]:
    """F1, precision and recall over words."""
    a, b = Counter(words(text)), Counter(words(gold))
    common = (a & b).total()
    precision, recall = common / a.total() if a else 0.0, common / b.total() if b else 1.0
    return 2 * precision * recall / (precision + recall) if common else 0.0, precision, recall


def describe_scores(pages: Sequence[GoldPage], texts: Sequence[str]) -> str:
    """A line for each set, with F1 by kind of page."""
    scores: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    tp = fn = tn = fp = 0
    for page, text in zip(pages, texts):
        if page.dataset == "snippets":
            line = one_line(text)
            present, absent = sum(s in line for s in page.expected), sum(s not in line for s in page.unexpected)
            tp, fn = tp + present, fn + len(page.expected) - present
            tn, fp = tn + absent, fp + len(page.unexpected) - absent
            continue
        scores[page.dataset].append(score := word_scores(text, page.text))
        if page.dataset == "wcxb":
            scores[f"  {page.kind}"].append(score)
    lines = []
    for name in ("wcxb", "articles"):
        if scores[name]:
            f1, precision, recall = (sum(column) / len(scores[name]) for column in zip(*scores[name]))
            lines.append(f"  {name:10}{len(scores[name]):5} pages  F1 {f1:.3f}  P {precision:.3f}  R {recall:.3f}")
    kinds = sorted(name for name in scores if name.startswith("  "))
    lines.append(
        "  F1 of " + ", ".join(f"{k.strip()} {sum(s[0] for s in scores[k]) / len(scores[k]):.3f}" for k in kinds)
    )
    if tp + fn:
        precision, recall = tp / max(1, tp + fp), tp / (tp + fn)
        f1 = 2 * precision * recall / (precision + recall)
        lines.append(
            f"  snippets   F1 {f1:.3f}  P {precision:.3f}  R {recall:.3f}  rejected {tn / max(1, tn + fp):.3f}"
        )
    lines.append(f"  empty: {sum(not text for text in texts)}")
    return "\n".join(lines)


def describe_filtered(pages: Sequence[GoldPage], texts: Sequence[str]) -> str:
    """How many articles the filters of the recipe fineweb keep of these texts, and how much of the kept is article."""
    from forebay.formats.records import Record
    from forebay.prepare import load_recipe

    stages = [stage for stage in load_recipe("fineweb").stages if stage.name not in ("extract", "language", "pii")]
    rows = [i for i, page in enumerate(pages) if page.dataset != "snippets" and page.kind == "article" and texts[i]]
    scores = []
    for batch in to_batches([Record(i, text=texts[i]) for i in rows]):
        for stage in stages:
            result = stage.apply(batch)
            batch = result.batch.filter(pa.array(result.drop < 0))
        rows_of = zip(batch["place"].to_pylist(), batch["text"].to_pylist())
        scores += [word_scores(text, pages[i].text)[1] for i, text in rows_of]
    purity = sum(scores) / max(1, len(scores))
    return f"  filters of fineweb keep {len(scores)} of {len(rows)} articles; {purity:.3f} of their words are gold"


def _show(name: str, pages: Sequence[GoldPage], texts: Sequence[str], cpu_s: float) -> None:
    print(f"{name}: {cpu_s / len(pages) * 1000:.2f} CPU ms a page\n{describe_scores(pages, texts)}")
    print(describe_filtered(pages, texts), flush=True)


def measure() -> list[Figure]:
    """Prints the scores and CPU milliseconds a page of each extractor, on the half that was not trained on."""
    from forebay.prepare.extract import extract_html, model

    model.load_model = partial(model.load_model, HALF_MODEL)  # type: ignore[assignment]
    pages = [page for page in gold_pages() if page.half == 1]
    size = sum(len(page.html.encode()) for page in pages) / len(pages)
    print(f"{len(pages)} pages of {size / 1000:.0f} kB")
    print(f"gold\n{describe_filtered(pages, [page.text for page in pages])}")
    for title, name, options in (
        ("forebay", "forebay", {}),
        ("forebay, precision", "forebay", {"favor_precision": True}),
        ("resiliparse", "resiliparse", {}),
    ):
        texts, cpu = [], 0.0
        extract_html(pages[0].html, extractor=name, options=options)
        for page in pages:
            start = time.process_time()
            texts.append(extract_html(page.html, extractor=name, options=options))
            cpu += time.process_time() - start
        _show(title, pages, texts, cpu)
    for name, (cpu, texts) in (ask(PEER_CODE, [page.html for page in pages], EXTRACTORS) or {}).items():
        _show(name, pages, texts, cpu)
    return []


if __name__ == "__main__":
    measure()
