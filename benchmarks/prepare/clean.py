"""The cleaning stages beside their peers, on the same text: MB per CPU second of one process.

Run as `python -m benchmarks.prepare.clean`. Real text is found as the tests find it (FOREBAY_TEST_DATA); peers that
are not dependencies run in the interpreter that FOREBAY_PEERS names (`.venv-peers/bin/python` if unset).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ftfy
import re2

from benchmarks.prepare.batches import to_batches
from forebay.formats.records import Record
from forebay.prepare.clean.boilerplate import Boilerplate
from forebay.prepare.clean.pii import Pii
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.clean.unicode import Unicode
from forebay.prepare.documents import Stage

ROUNDS = 3
PATTERNS = (
    r"\b[A-Za-z0-9_][A-Za-z0-9._%+'&-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
    r"\b(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)\b",
    r"(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)|\d{2,4})[ .-]\d{3,4}[ .-]\d{3,4}\b",
    r"\b(?:\d[ -]?){12,19}\b",
    r"\b[A-Za-z]{2}\d{2}(?: ?[A-Za-z0-9]){11,30}\b",
)
"""E-mail, IPv4, telephone, card and IBAN, about as dolma and others write them: for engines of regular expressions."""
PEERS = r"""
import json, re, sys, time
texts, words, patterns = json.load(open(sys.argv[1]))
size = sum(len(text.encode()) for text in texts) / 1e6
def speed(work):
    best = 1e9
    for _ in range(2):
        start = time.process_time(); work(); best = min(best, time.process_time() - start)
    return size / best
found = {}
def measure(name, make):
    try:
        found[name] = speed(make())
    except Exception as error:
        found[name] = repr(error)
def formatter():
    from datatrove.pipeline.formatters.pii import PIIFormatter
    one = PIIFormatter()
    return lambda: [one.format(text) for text in texts]
def badwords():
    from datatrove.pipeline.filters.c4_filters import C4BadWordsFilter
    from datatrove.data import Document
    one = C4BadWordsFilter()
    one._badwords_regex["en"] = re.compile(r"(?:\W|^)({})(?:\W|$)".format("|".join(map(re.escape, words))))
    documents = [Document(text=text, id="", metadata={"language": "en"}) for text in texts]
    return lambda: [one.filter(document) for document in documents]
def scan(expressions, flags):
    import hyperscan
    database, raw = hyperscan.Database(), [text.encode() for text in texts]
    database.compile(expressions=[e.encode() for e in expressions], ids=list(range(len(expressions))),
                     elements=len(expressions), flags=[getattr(hyperscan, flags)] * len(expressions))
    return lambda: [database.scan(text, match_event_handler=lambda *a: None) for text in raw]
def pyahocorasick():
    import ahocorasick
    automaton = ahocorasick.Automaton()
    for word in words: automaton.add_word(word, word)
    automaton.make_automaton()
    return lambda: [sum(1 for _ in automaton.iter(text.lower())) for text in texts]
def rust():
    import ahocorasick_rs
    automaton = ahocorasick_rs.BytesAhoCorasick([word.encode() for word in words])
    return lambda: [automaton.find_matches_as_indexes(text.lower().encode(), overlapping=True) for text in texts]
measure("datatrove PIIFormatter (e-mail, IPv4)", formatter)
measure("hyperscan, five patterns", lambda: scan(patterns, "HS_FLAG_SOM_LEFTMOST"))
measure("datatrove C4BadWordsFilter", badwords)
measure("hyperscan, words without boundaries", lambda: scan([re.escape(w) for w in words], "HS_FLAG_CASELESS"))
measure("pyahocorasick, without boundaries", pyahocorasick)
measure("ahocorasick-rs, without boundaries", rust)
print(json.dumps(found))
"""


def data() -> Path:
    test_data = os.environ.get("FOREBAY_TEST_DATA")
    return Path(test_data) if test_data else Path(__file__).parents[2] / "../shared/data"


def corpora(folder: Path) -> dict[str, list[str]]:
    """Some 8 MB of web text, of English books in ASCII, and of German ones."""
    web = [
        json.loads(line)["text"] for line in gzip.decompress((folder / "jsonl/000.json.gz").read_bytes()).splitlines()
    ]
    english = "".join(path.read_text("latin-1") for path in sorted((folder / "books/gutenberg_en").glob("*.txt")))
    ascii_only = english.encode("ascii", "ignore").decode().replace("\r", "")
    german = "".join(path.read_text("utf-8") for path in sorted((folder / "books/de").glob("*.txt")))
    cut = {name: [t[i : i + 4000] for i in range(0, len(t), 4000)] for name, t in (("en", ascii_only), ("de", german))}
    return {"web": web * 140, "English": cut["en"], "German": cut["de"]}


def megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def speed(texts: Sequence[str], work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """MB per CPU second, the best round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return megabytes(texts) / best


def stages_speed(texts: Sequence[str], stages: Sequence[Stage]) -> float:
    batches = list(to_batches(Record(i, text=text) for i, text in enumerate(texts)))

    def work() -> None:
        for batch in batches:
            for stage in stages:
                batch = stage.apply(batch).batch

    work()  # kernels are compiled or loaded
    return speed(texts, work)


def peers(texts: Sequence[str], words: Sequence[str]) -> dict[str, float | str]:
    python = Path(os.environ.get("FOREBAY_PEERS", ".venv-peers/bin/python"))
    if not python.exists():
        print(f"peers are not measured: expected an interpreter at {python}; set FOREBAY_PEERS to one with datatrove")
        return {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([texts, words, PATTERNS], file)
        file.flush()
        done = subprocess.run([python, "-c", PEERS, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"peers failed: {done.stderr[-500:]}")
        return {}
    speeds: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return speeds


def row(name: str, value: float | str, ours: float = 0.0) -> None:
    if isinstance(value, str):
        print(f"  {name:48} {value[:60]}")
    else:
        print(f"  {name:48} {value:8.1f} MB/s" + (f"   ours {ours / value:6.1f}x" if ours else ""))


def main() -> int:
    folder = data()
    if not (folder / "badwords").is_dir():
        print(f"clean: expected real text below {folder}, got none. Set FOREBAY_TEST_DATA")
        return 1
    texts = corpora(folder)
    some = {name: part[: len(part) // 40] for name, part in texts.items()}
    words = sorted({line.strip().lower() for line in (folder / "badwords/en").read_text().splitlines()} - {""})
    lists = Toxic(str(folder / "badwords"))
    print("clean: MB per CPU second of one process")
    for name, part in texts.items():
        print(f"{name}, {megabytes(part):.1f} MB, {len(part)} documents")
        measured: list[tuple[str, list[Stage]]] = [
            ("unicode", [Unicode()]),
            ("pii", [Pii()]),
            ("pii without keys", [Pii(kinds=("email", "ipv4", "ipv6", "iban", "card", "phone"))]),
            ("toxic, LDNOOBW", [lists]),
            ("boilerplate", [Boilerplate()]),
            ("all four", [Unicode(), Pii(), lists, Boilerplate()]),
        ]
        for label, stages in measured:
            row(label, stages_speed(part, stages))
    clean = stages_speed(texts["German"], [Unicode()])
    few = some["German"]
    print("peers of unicode (German)")
    row("ftfy.fix_encoding alone", speed(few, lambda: [ftfy.fix_encoding(text) for text in few], 1), clean)
    row("ftfy.fix_text", speed(few, lambda: [ftfy.fix_text(text) for text in few], 1), clean)
    print("peers of pii and toxic (web)")
    few = some["web"]
    pii, toxic = stages_speed(texts["web"], [Pii()]), stages_speed(texts["web"], [lists])
    plain = [re.compile(pattern) for pattern in PATTERNS]
    row("re, five patterns", speed(few, lambda: [p.sub("", text) for text in few for p in plain], 1), pii)
    linear = re2.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS))
    row("google-re2, one alternation of five", speed(few, lambda: [linear.sub("", text) for text in few], 1), pii)
    for name, value in peers(few, words).items():
        row(name, value, toxic if "ords" in name or "boundaries" in name else pii)
    return 0


if __name__ == "__main__":
    sys.exit(main())
