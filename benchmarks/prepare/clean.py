"""The cleaning stages beside ftfy and datatrove, on the same text: MB per CPU second of one process.

Run as `python -m benchmarks.prepare.clean`. Real text is found by FOREBAY_TEST_DATA, datatrove by FOREBAY_PEERS.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ftfy

from benchmarks.measure import Figure
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.peers import ask
from forebay.formats.records import Record
from forebay.prepare.clean.boilerplate import Boilerplate
from forebay.prepare.clean.pii import Pii
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.clean.unicode import Unicode
from forebay.prepare.documents import Stage

PEER = r"""
import re
from datatrove.data import Document
from datatrove.pipeline.filters.c4_filters import C4BadWordsFilter
from datatrove.pipeline.formatters.pii import PIIFormatter
texts, words = request
formatter, c4 = PIIFormatter(), C4BadWordsFilter()
c4._badwords_regex["en"] = re.compile(r"(?:\W|^)({})(?:\W|$)".format("|".join(map(re.escape, words))))
documents = [Document(text=text, id="", metadata={"language": "en"}) for text in texts]
def seconds(work, items):
    start = time.process_time()
    for item in items: work(item)
    return time.process_time() - start
answer = {"datatrove PIIFormatter (e-mail, IPv4)": seconds(formatter.format, texts),
          "datatrove C4BadWordsFilter": seconds(c4.filter, documents)}
"""


def corpora(folder: Path) -> dict[str, list[str]]:
    """Some 8 MB of web text, of English books in ASCII, and of German ones."""
    lines = gzip.decompress((folder / "jsonl/000.json.gz").read_bytes()).splitlines()
    english = "".join(path.read_text("latin-1") for path in sorted((folder / "books/gutenberg_en").glob("*.txt")))
    ascii_only = english.encode("ascii", "ignore").decode().replace("\r", "")
    german = "".join(path.read_text("utf-8") for path in sorted((folder / "books/de").glob("*.txt")))
    cut = {name: [t[i : i + 4000] for i in range(0, len(t), 4000)] for name, t in (("en", ascii_only), ("de", german))}
    return {"web": [json.loads(line)["text"] for line in lines] * 140, "English": cut["en"], "German": cut["de"]}


def megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def speed(texts: Sequence[str], work: Callable[[], object], rounds: int = 3) -> float:
    """MB per CPU second, the best round."""
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return megabytes(texts) / min(spent)


def stages_speed(texts: Sequence[str], stages: Sequence[Stage]) -> float:
    batches = list(to_batches(Record(i, text=text) for i, text in enumerate(texts)))

    def work() -> None:
        for batch in batches:
            for stage in stages:
                batch = stage.apply(batch).batch

    work()  # kernels are compiled or loaded
    return speed(texts, work)


def print_row(name: str, value: float, ours: float = 0.0) -> None:
    print(f"  {name:48} {value:8.1f} MB/s" + (f"   ours {ours / value:6.1f}x" if ours else ""))


def measure() -> list[Figure]:
    """Print the tables."""
    folder = data_folder()
    texts = corpora(folder)
    toxic = Toxic(str(folder / "badwords"))
    stages: dict[str, list[Stage]] = {
        "unicode": [Unicode()],
        "pii": [Pii()],
        "toxic, LDNOOBW": [toxic],
        "boilerplate": [Boilerplate()],
        "all four": [Unicode(), Pii(), toxic, Boilerplate()],
    }
    print("clean: MB per CPU second of one process")
    speeds: dict[tuple[str, str], float] = {}
    for name, part in texts.items():
        print(f"{name}, {megabytes(part):.1f} MB, {len(part)} documents")
        for label, chosen in stages.items():
            speeds[name, label] = stages_speed(part, chosen)
            print_row(label, speeds[name, label])
    few = texts["German"][: len(texts["German"]) // 40]
    fixed = speed(few, lambda: [ftfy.fix_text(text) for text in few], 1)
    print_row("ftfy.fix_text (German)", fixed, speeds["German", "unicode"])
    few = texts["web"][: len(texts["web"]) // 40]
    words = sorted({line.strip().lower() for line in (folder / "badwords/en").read_text().splitlines()} - {""})
    for name, seconds in (ask(PEER, [few, words]) or {}).items():
        ours = speeds["web", "toxic, LDNOOBW" if "Bad" in name else "pii"]
        print_row(f"{name} (web)", megabytes(few) / seconds, ours)
    return []


if __name__ == "__main__":
    measure()
