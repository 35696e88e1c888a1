"""HTML to main text: word F1 and speed of the candidates on real pages; and archives read, MB a CPU second.

Gold: thirteen pages of the sample archives, read by hand. What is main text is said by its first and last line (their
beginnings), so that no page is copied here; the words between come from the page itself.

Run: `FOREBAY_TEST_DATA=../shared/data python -m benchmarks.prepare.extract`. The peers (trafilatura, readability-lxml,
jusText) run under the interpreter that FOREBAY_PEERS names (default `.venv-peers/bin/python`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

DATA = Path(os.environ.get("FOREBAY_TEST_DATA", Path(__file__).parents[3] / "shared/data"))
PEERS = os.environ.get("FOREBAY_PEERS", ".venv-peers/bin/python")
GOLD = [  # address, beginning of the first line of main text, of the last one
    ("https://www.cs.washington.edu/people/faculty/weld", "Dan Weld", "Dan has taught"),
    ("https://soldaini.net/", "Hello, visitor!", "Hop over the publications"),
    ("https://maria-antoniak.github.io/2023/07/04/notes-on-mastodon.html", "Some things to know", "Updated: July 24"),
    ("https://maria-antoniak.github.io/2023/04/11/paperpile-to-zotero.html", "Moving from", "April 11, 2023"),
    ("https://maria-antoniak.github.io/2022/07/27/topic-modeling-for-the-people.html", "Topic Modeling", "July 27"),
    ("https://maria-antoniak.github.io/2018/11/19/data-science-crash-course.html", "Data Science", "Updated: June"),
    ("https://tomhoper.github.io/", "About Me", "My work has received"),
    ("http://0900-hovenier.nl/gelderland/oosterbeek/", "Hovenier in Oosterbeek", "De Steeg"),
    ("http://commoncrawl.org/", "We build and maintain", "Don't forget"),
    ("http://www.iana.org/numbers", "Number Resources", "Locally Served DNS Zones"),
    ("http://www.iana.org/domains", "Domain Name Services", "A number of special domains"),
    ("http://www.iana.org/domains/reserved", "IANA-managed Reserved", "There is additionally"),
    ("https://an.wikipedia.org/wiki/Escopete", "Escopete ye", "(es) Escopete"),
]
HELD_OUT = [  # read after the extractor was done, to see what its choice of names is worth elsewhere
    ("https://talaugust.github.io/", "Tal August", "Best way to reach me"),
    ("https://kyleclo.com/", "Kyle Lo", "Jun 15, 2023"),
    ("https://www.cs.cmu.edu/~anaik/", "Aakanksha Naik", "I often dabble"),
    ("https://wiki.archiveteam.org/", "HISTORY IS OUR FUTURE", "Retrieved from"),
]
PEER_CODE = """
import json, sys, time
pages = json.load(sys.stdin)
def trafilatura_(h):
    import trafilatura
    return trafilatura.extract(h) or ""
def trafilatura_recall(h):
    import trafilatura
    return trafilatura.extract(h, favor_recall=True, include_comments=False) or ""
def readability_(h):
    import readability, lxml.html
    return lxml.html.fromstring(readability.Document(h).summary()).text_content()
def justext_(h):
    import justext
    found = justext.justext(h.encode(), justext.get_stoplist("English"))
    return "\\n".join(p.text for p in found if not p.is_boilerplate)
out = {}
for f in (trafilatura_, trafilatura_recall, readability_, justext_):
    texts = []
    try:
        f(pages[0])
        t = time.process_time()
        for page in pages:
            try: texts.append(f(page))
            except Exception as e: texts.append("")
        out[f.__name__.strip("_")] = (time.process_time() - t, texts)
    except ImportError as e:
        print(e, file=sys.stderr)
print(json.dumps(out))
"""


def words(text: str) -> Counter[str]:
    """Its words, counted."""
    return Counter(re.findall(r"\w+", text.lower()))


def f1(text: str, gold: str) -> tuple[float, float, float]:
    """Precision, recall and F1 over words."""
    a, b = words(text), words(gold)
    common = (a & b).total()
    p, r = common / max(1, a.total()), common / max(1, b.total())
    return p, r, 2 * p * r / max(1e-9, p + r)


def all_pages() -> list[tuple[str, str]]:
    """Address and HTML of each distinct page of the sample archives."""
    from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
    from forebay.prepare.inputs import read_split

    pages: dict[str, str] = {}
    for path in sorted((DATA / "warc").rglob("*")):
        if path.is_file() and ".warc" in path.name and "paths" not in path.name:
            packed = {".gz": "gz", ".bad": "gz", ".lz4": "lz4"}.get(path.suffix, "")
            source = InputFile(str(path), path.name, "warc", packed, path.stat().st_size, "")
            for record in read_split(InputSplit((source,)), ReadOptions()):
                if record.html and not record.problem and len(record.text) > 1000:
                    pages.setdefault(record.url, record.text)
    return list(pages.items())


def gold_of(html: str, first: str, last: str) -> str:
    """The lines of the page's whole text from one that begins so to the last one that begins so."""
    from resiliparse.extract.html2text import extract_plain_text

    text = extract_plain_text(html, list_bullets=False, alt_texts=False)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    start = [i for i, line in enumerate(lines) if line.startswith(first)]
    stop = [i for i, line in enumerate(lines) if line.startswith(last)]
    return "\n".join(lines[start[0] : stop[-1] + 1])


def own_candidates() -> dict[str, Callable[[str], str]]:
    """What is installed beside Forebay."""
    from resiliparse.extract.html2text import extract_plain_text

    from forebay.formats.html import parse_html, plain_text
    from forebay.prepare.clean.extract import _PLAIN_SKIPPED, extract_html

    candidates: dict[str, Callable[[str], str]] = {
        "forebay": extract_html,
        "tags and roles only": lambda h: plain_text(h, parse_html(h), _PLAIN_SKIPPED),
        "resiliparse main": lambda h: extract_plain_text(h, main_content=True),
        "resiliparse all": lambda h: extract_plain_text(h),
    }
    try:
        from selectolax.lexbor import LexborHTMLParser

        def selectolax(html: str) -> str:
            tree = LexborHTMLParser(html)
            tree.strip_tags(["script", "style", "nav", "header", "footer", "aside", "noscript", "form"])
            return tree.body.text(separator="\n") if tree.body else ""

        candidates["selectolax, tags only"] = selectolax
    except ImportError:
        print("selectolax is not installed: left out")
    return candidates


def timed(run: Callable[[], int]) -> tuple[float, int]:
    """CPU seconds of a second run, and what it counted."""
    run()
    start = time.process_time()
    counted = run()
    return time.process_time() - start, counted


def archives() -> None:
    """Prints how fast archives are read: our documents as text, both libraries' raw blocks."""
    import tempfile

    from fastwarc.warc import ArchiveIterator
    from warcio.archiveiterator import ArchiveIterator as WarcioIterator

    from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
    from forebay.formats.warc import read_raw
    from forebay.prepare.inputs import read_split

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.warc.gz"
        path.write_bytes((DATA / "warc/fastwarc/warcfile.warc.gz").read_bytes() * 50)
        source, options = InputFile(str(path), "a", "warc", "gz", path.stat().st_size, ""), ReadOptions()

        def warcio() -> int:
            with path.open("rb") as file:
                return sum(len(record.content_stream().read()) for record in WarcioIterator(file))

        def fastwarc() -> int:
            with path.open("rb") as file:
                return sum(len(record.reader.read()) for record in ArchiveIterator(file))

        runs: dict[str, Callable[[], int]] = {
            "forebay, decoded text": lambda: sum(len(r.text) for r in read_split(InputSplit((source,)), options)),
            "forebay, raw blocks": lambda: sum(len(r.block) for r in read_raw(source, options)),
            "fastwarc, raw blocks": fastwarc,
            "warcio, raw blocks": warcio,
        }
        print("\nArchives (.warc.gz), unpacked MB a CPU second")
        for name, run in runs.items():
            seconds, _ = timed(run)
            print(f"{name:24}{0.5278 * 50 / seconds:8.0f}")


def wikitext() -> None:
    """Prints how fast wikitext becomes text; mwparserfromhell on the first articles only."""
    import bz2
    import html

    from forebay.formats.wikitext import to_text

    (path,) = (DATA / "wikipedia").glob("enwiki-latest*.bz2")
    dump = bz2.decompress(path.read_bytes()).decode()
    pages = [html.unescape(markup) for markup in re.findall(r"<text[^>]*>([^<]*)</text>", dump)]
    pages = [page for page in pages if not page.lower().startswith("#redirect")]
    first = pages[:10]
    own, _ = timed(lambda: sum(len(to_text(page)) for page in pages))
    print("\nWikitext, MB a CPU second")
    print(f"{'forebay':24}{_megabytes(pages) / own:8.1f}")
    try:
        import mwparserfromhell
    except ImportError:
        print("mwparserfromhell is not installed: left out")
        return
    peer, _ = timed(lambda: sum(len(mwparserfromhell.parse(page).strip_code()) for page in first))
    print(f"{'mwparserfromhell':24}{_megabytes(first) / peer:8.1f}")


def _megabytes(pages: Sequence[str]) -> float:
    return sum(len(page.encode()) for page in pages) / 1e6


def main() -> None:
    """Prints the table of extractors, and the speed of reading archives and wikitext."""
    pages = all_pages()
    by_url = dict(pages)
    megabytes = sum(len(html.encode()) for _, html in pages) / 1e6
    results: dict[str, tuple[float, list[str]]] = {}
    for name, extract in own_candidates().items():
        extract(pages[0][1])
        start = time.process_time()
        texts = [extract(html) for _, html in pages]
        results[name] = (time.process_time() - start, texts)
    if Path(PEERS).exists():
        request = json.dumps([html for _, html in pages])
        answer = subprocess.run([PEERS, "-c", PEER_CODE], input=request, capture_output=True, text=True, check=False)
        results.update(json.loads(answer.stdout) if answer.stdout else {})
        print(answer.stderr[-2000:] if not answer.stdout else "", end="", file=sys.stderr)
    else:
        print(f"{PEERS} is not there: peers left out. Set FOREBAY_PEERS.")
    for title, chosen in (("Gold", GOLD), ("Held out", HELD_OUT)):
        gold = [gold_of(by_url[url], first, last) for url, first, last in chosen]
        count = words(" ".join(gold)).total()
        print(f"{title}: {len(gold)} pages, {count} words; speed on {len(pages)} pages, {megabytes:.1f} MB")
        print(f"{'':24}{'P':>7}{'R':>7}{'F1':>7}{'worst':>7}{'MB/s':>8}")
        index = {url: i for i, (url, _) in enumerate(pages)}
        for name, (seconds, texts) in sorted(results.items(), key=lambda item: item[1][0]):
            scores = [f1(texts[index[url]], text) for (url, _, _), text in zip(chosen, gold)]
            mean = [sum(column) / len(scores) for column in zip(*scores)]
            worst = min(score[2] for score in scores)
            print(f"{name:24}{mean[0]:7.3f}{mean[1]:7.3f}{mean[2]:7.3f}{worst:7.3f}{megabytes / seconds:8.1f}")
    archives()
    wikitext()


if __name__ == "__main__":
    main()
