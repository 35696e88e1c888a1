"""Filters against datatrove's on the same texts: CPU seconds of one process each, and whether they decide alike.

    python -m benchmarks.prepare.filters          about 3 MB of real text (under a minute)

The texts: crawled pages, Wikipedia, Stack Exchange, news, books and plays cut into 3 kB; and as many made from them
that lie near a threshold on purpose (about 50 words, about 80 % of words with a letter, lines and phrases repeated).
Both keep the words that they cut last (datatrove of a text, ours of a batch), so that Gopher's first filter pays for
all that look at words: the ratio to look at is that of both Gopher filters. The peer runs with the interpreter in
FOREBAY_PEERS, which has datatrove and spaCy installed; NeMo Curator's is FOREBAY_NEMO.
"""

from __future__ import annotations

import collections
import json
import random
import time

from benchmarks.measure import Figure, show
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.corpus import data_folder, passages
from benchmarks.prepare.peers import NEMO, ask
from forebay.formats.records import Record
from forebay.prepare.documents import Stage
from forebay.prepare.filters.c4 import C4
from forebay.prepare.filters.quality import FineWeb, GopherQuality, GopherRepetition

STAGES: tuple[Stage, ...] = (GopherQuality(), GopherRepetition(), FineWeb(), C4())

PEER = r"""
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
filters = [f(language="eng") for f in (
    GopherQualityFilter, GopherRepetitionFilter, FineWebQualityFilter, C4QualityFilter)]
for f in filters:
    f.filter(Document(text="It is warm.", id="0"))
reasons, spent = [], [0.0] * len(filters)
for text in request:
    row = []
    for i, f in enumerate(filters):
        begun = time.process_time()
        try:
            result = f.filter(Document(text=text, id="0"))
        except ZeroDivisionError:
            result = (False, "zero division")
        spent[i] += time.process_time() - begun
        row.append("" if result is True else result[1])
    reasons.append(row)
answer = [reasons, spent]
"""


NEMO_PEER = """
from nemo_curator.stages.text.filters.heuristic import repetition as r, string as s
quality = [s.WordCountFilter(50, 100_000), s.MeanWordLengthFilter(3, 10), s.SymbolsToWordsFilter(0.1),
           s.BulletsFilter(0.9), s.EllipsisFilter(0.3), s.WordsWithoutAlphabetsFilter(0.8),
           s.CommonEnglishWordsFilter(2)]
shares = (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)
repetition = [r.RepeatedLinesFilter(0.7), r.RepeatedParagraphsFilter(0.7), r.RepeatedLinesByCharFilter(0.8),
              r.RepeatedParagraphsByCharFilter(0.8),
              *(r.RepeatingTopNGramsFilter(n, share) for n, share in ((2, 0.2), (3, 0.18), (4, 0.16))),
              *(r.RepeatingDuplicateNGramsFilter(n, share) for n, share in zip(range(5, 11), shares))]
def keeps(f, text):
    try: return bool(f.keep_document(f.score_document(text)))
    except ZeroDivisionError: return False
answer = []
for filters in (quality, repetition):
    begun = time.process_time()
    answer.append([[all(keeps(f, text) for f in filters) for text in request], time.process_time() - begun])
"""
"""NeMo Curator's own filters with Gopher's thresholds: its words are `text.split()`, and its symbols are others."""


def real_texts() -> list[str]:
    """Documents of a few kB, in a fixed order."""
    folder = data_folder()
    texts: list[str] = []
    for path in sorted(folder.glob("jsonl/cc_en*.jsonl")):
        texts += [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
    for path in sorted([*folder.glob("books/gutenberg_en/*.txt"), *folder.glob("shakespeare/works/*")]):
        text = path.read_text("utf-8", errors="replace")
        texts += [text[i : i + 3000] for i in range(0, min(len(text), 300_000), 3000)]
    texts += [
        line.split(" ", 1)[-1] for line in (folder / "neardup/articles_1000.train").read_text("utf-8").splitlines()
    ]
    chance = random.Random(0)
    pool = passages(folder)
    while len(texts) < 5000:
        start = chance.randrange(len(pool))
        texts.append("\n\n".join(pool[start : start + chance.randrange(1, 12)])[:6000])
    chance.shuffle(texts)
    return texts


def borderline(text: str, chance: random.Random) -> str:
    """A text made of this one that lies near some threshold."""
    words = text.split(" ")
    match chance.randrange(4):
        case 0:
            return " ".join(words[: chance.randrange(35, 60)])
        case 1:
            share = chance.uniform(0.05, 0.15)
            return " ".join(str(chance.randrange(9999)) if chance.random() < share else word for word in words)
        case 2:
            lines = text.splitlines() or [text]
            return "\n".join([*lines, *chance.choices(lines, k=max(1, int(len(lines) * chance.uniform(0.1, 0.6))))])
        case _:
            phrase = words[: chance.randrange(3, 14)]
            return " ".join([*words, *(phrase * chance.randrange(1, 2 + len(words) // 60))])


def ours(texts: list[str]) -> tuple[list[list[str]], list[float]]:
    """Reasons by text and stage ("" for a kept one), and CPU seconds by stage."""
    batches = list(to_batches([Record(i, text=text) for i, text in enumerate(texts)]))
    columns: list[list[str]] = [[] for _ in STAGES]
    spent = [0.0] * len(STAGES)
    for stage in STAGES:
        stage.apply(batches[0].slice(0, 1))
    for batch in batches:
        for i, stage in enumerate(STAGES):
            started = time.process_time()
            drops = stage.apply(batch).drop.tolist()
            spent[i] += time.process_time() - started
            columns[i] += [stage.reasons[drop] if drop >= 0 else "" for drop in drops]
    return [list(row) for row in zip(*columns, strict=True)], spent


def show_differences(title: str, mine: list[list[str]], peer: list[list[str]]) -> float:
    """Print the rules by which decisions differ; the share of documents that both Gopher filters decide alike."""
    both = sum(
        bool(m) == bool(p) for a, b in zip(mine, peer, strict=True) for m, p in [("".join(a[:2]), "".join(b[:2]))]
    )
    print(f"\n{title}: {len(mine)} documents; kept or dropped alike by both Gopher filters: {both / len(mine):.3%}")
    for i, stage in enumerate(STAGES):
        pairs = collections.Counter((a[i], b[i]) for a, b in zip(mine, peer, strict=True) if bool(a[i]) != bool(b[i]))
        differ = sum(pairs.values())
        dropped = sum(bool(b[i]) for b in peer)
        print(f"  {stage.name:18} alike {1 - differ / len(mine):.3%} ({dropped} dropped by datatrove)")
        for (m, p), count in pairs.most_common(4):
            print(f"      {count:4} ours: {m or 'kept'}; theirs: {p or 'kept'}")
    return both / len(mine)


def measure(num_texts: int = 900) -> list[Figure]:
    """The tables, printed, and what the targets are set for; nothing without the peer."""
    chance = random.Random(1)
    texts = real_texts()[:num_texts]
    near_texts = [borderline(text, chance) for text in texts[: len(texts) // 3]]
    answer = ask(PEER, texts + near_texts)
    if answer is None:
        return []
    peer, peer_spent = answer
    mine, spent = ours(texts + near_texts)
    megabytes = sum(len(text.encode()) for text in texts + near_texts) / 1e6
    print(f"{megabytes:.1f} MB; MB/s of one core: ours, datatrove, ratio")
    for stage, a, b in zip(STAGES, spent, peer_spent, strict=True):
        print(f"  {stage.name:18} {megabytes / a:8.2f} {megabytes / b:8.2f} {b / a:6.1f}x")
    a, b = sum(spent[:2]), sum(peer_spent[:2])
    print(f"  {'both Gopher':18} {megabytes / a:8.2f} {megabytes / b:8.2f} {b / a:6.1f}x")
    for stage, cost, own, (keeps, nemo_s) in zip(
        STAGES, spent, zip(*mine), ask(NEMO_PEER, texts + near_texts, NEMO) or []
    ):
        alike = sum((not reason) == keep for reason, keep in zip(own, keeps)) / len(own)
        print(f"  {stage.name:18} NeMo Curator {megabytes / nemo_s:8.2f} {nemo_s / cost:6.1f}x, alike {alike:.3%}")
    real = show_differences("Real text", mine[: len(texts)], peer[: len(texts)])
    near = show_differences("Near a threshold on purpose", mine[len(texts) :], peer[len(texts) :])
    return [
        Figure("Gopher filters / datatrove", b / a, "x CPU"),
        Figure("Gopher decisions alike", 100 * real, "%"),
        Figure("Gopher decisions alike, near thresholds", 100 * near, "%"),
    ]


if __name__ == "__main__":
    show("prepare: filters", measure())
