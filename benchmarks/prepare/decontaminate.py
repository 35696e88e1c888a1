"""Decontamination beside datatrove's on the same documents: who finds what was planted, and CPU seconds of one process.

    python -m benchmarks.prepare.decontaminate

1,000 instances, each a question and an answer that are paragraphs of real text, of which 200 are planted in documents:
verbatim; with other case, punctuation, white space and Unicode; or apart from each other in a long document. The other
documents are other paragraphs. datatrove compares 13-grams (its index is made by its own functions, without lighteval).
The peer runs with the interpreter in FOREBAY_PEERS.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import time
import unicodedata
from pathlib import Path

from benchmarks.measure import Figure, show
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.corpus import data_folder, passages
from benchmarks.prepare.peers import ask
from forebay.formats.records import Record
from forebay.prepare.decontaminate import Decontaminate

INSTANCES, PLANTED = 1000, 200

PEER = r"""
import numpy as np
from datatrove.data import Document
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
instances, texts, folder = request
config = NGramsDecontConfig(n_grams=13, find_query_ngrams=True, find_overlap_ngrams=True)
indexer = object.__new__(NGramsDecontIndexer)
matcher = NGramsDecontFilter(folder, config)
indexer.config, indexer.tokenizer, indexer.hash_func = config, matcher.tokenizer, matcher.hash_func
hashes = {h for query, label in instances for h in indexer.compute_hashes(label, query)}
np.array(list(hashes), dtype=config.hash_config.np_descr).tofile(folder + "/all.index.hashes")
matcher.filter(Document(text="It is warm.", id="0"))
begun = time.process_time()
dropped = [matcher.filter(Document(text=text, id="0")) is not True for text in texts]
answer = [time.process_time() - begun, dropped]
"""


def disguised(kind: int, question: str, answer: str, around: list[str]) -> str:
    """A document with the instance in it."""
    if kind == 0:
        return f"{question}\n{answer}"
    if kind == 1:
        text = re.sub(r"[,;:]", " --", f"{question} {answer}").replace(" ", " \n\t").replace("'", "’")
        return unicodedata.normalize("NFD", text.swapcase()).replace("an", "a\u200bn")
    return "\n\n".join([*around[:8], question, *around[8:16], answer, *around[16:]])


def make_texts() -> tuple[list[tuple[str, str]], list[str], list[bool]]:
    """Instances; documents; and which of these are contaminated."""
    data_folder()
    chance = random.Random(3)
    pool = list(
        dict.fromkeys(p for text in passages(data_folder()) if 20 <= len((p := " ".join(text.split())).split()) <= 200)
    )
    chance.shuffle(pool)
    instances = list(zip(pool[:INSTANCES], pool[INSTANCES : 2 * INSTANCES]))
    rest = pool[2 * INSTANCES :]
    documents = [(disguised(i % 3, *instances[i], chance.sample(rest, 24)), True) for i in range(PLANTED)]
    documents += [("\n\n".join(rest[i : i + 8]), False) for i in range(0, min(len(rest), 16_000), 8)]
    chance.shuffle(documents)
    return instances, [text for text, _ in documents], [planted for _, planted in documents]


def ours(folder: Path, instances: list[tuple[str, str]], texts: list[str], method: str) -> tuple[float, list[bool]]:
    """CPU seconds, and which documents are dropped. The index is there before, as the peer's is."""
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in instances), "utf-8")
    stage = Decontaminate(sets=(str(path),), method=method)  # type: ignore[arg-type]
    batches = list(to_batches([Record(i, text=text) for i, text in enumerate(texts)]))
    stage.apply(batches[0].slice(0, 1))
    started = time.process_time()
    drops = [code >= 0 for batch in batches for code in stage.apply(batch).drop.tolist()]
    return time.process_time() - started, drops


def measure() -> list[Figure]:
    """The table, printed, and the ratios; without the peer ours alone."""
    instances, texts, planted = make_texts()
    size = sum(len(text.encode()) for text in texts)
    os.environ.setdefault("FOREBAY_CACHE", tempfile.mkdtemp())
    with tempfile.TemporaryDirectory() as name:
        rows = {f"forebay, {method}": ours(Path(name), instances, texts, method) for method in ("overlap", "ngram")}
        index = Path(name, "index")
        index.mkdir()
        if answer := ask(PEER, [instances, texts, str(index)]):
            rows["datatrove, 13-grams"] = answer
    print(f"Decontamination, {size / 1e6:.1f} MB in {len(texts)} documents, {sum(planted)} contaminated, one core")
    for title, (spent, dropped) in rows.items():
        hits = sum(d and p for d, p in zip(dropped, planted))
        print(
            f"{title:24} {size / spent / 1e6:8.2f} MB/s, found {hits} of {sum(planted)} and {sum(dropped) - hits} more"
        )
    figures = [
        Figure(
            "contaminated found",
            100 * sum(d and p for d, p in zip(rows["forebay, overlap"][1], planted)) / sum(planted),
            "%",
        )
    ]
    if "datatrove, 13-grams" in rows:
        (peer_s, theirs_dropped), (own_s, own_dropped) = rows["datatrove, 13-grams"], rows["forebay, ngram"]
        alike = sum(a == b for a, b in zip(own_dropped, theirs_dropped))
        print(f"13-grams: {alike} of {len(texts)} documents decided alike")
        ratio = peer_s / own_s
        figures.append(Figure("decontaminate / datatrove", ratio, "x CPU", "13-grams"))
    return figures


if __name__ == "__main__":
    show("decontaminate", measure())
