"""Signatures beside datasketch, rensa and datatrove on the same texts, and what it costs to cut: seconds and bytes.

    python -m benchmarks.prepare.dedup

CPU seconds of one process each, all with 112 hashes over 5-grams of words. datasketch and rensa take their 5-grams as
strings, joined by Python: each is shown with that (a user's cost), and with strings that are there already, which ours
never makes. The last lines compare the min-wise hashes alone, of shingle hashes that are there already.
"""

from __future__ import annotations

import re
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import Figure, show
from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.peers import ask
from forebay.prepare.dedup import kernels
from forebay.prepare.dedup.cutting import Cutter
from forebay.prepare.dedup.deduplicate import DedupResult, deduplicate
from forebay.prepare.dedup.methods import Dedup, MinHash, Signed
from forebay.prepare.tasks.text import open_documents
from forebay.storage.store import Store, open_store

PEER = r"""
import logging, os, re
import numpy as np, rensa
logging.disable(logging.CRITICAL)
texts, answer = request, {}
def timed(name, make, texts=texts):
    start = time.process_time()
    out = make()
    answer[name] = (time.process_time() - start) / sum(len(t.encode()) for t in texts)
    return out
WORD = re.compile(r"[^\W_]+")
def grams(text):
    words = WORD.findall(text.lower())
    return [" ".join(words[i : i + 5]) for i in range(max(len(words) - 4, 1))]
shingles = timed("shingles", lambda: list(map(grams, texts)))
def updates(kind):
    for one in shingles:
        sketch = kind(112, 1)
        sketch.update(one)
        sketch.digest()
timed("rensa R-MinHash, update", lambda: updates(rensa.RMinHash))
timed("rensa R-MinHash, bulk", lambda: rensa.RMinHash.digest_matrix_from_token_sets(shingles, 112, 1))
timed("rensa C-MinHash, update", lambda: updates(rensa.CMinHash))
timed("rensa C-MinHash, bulk", lambda: rensa.CMinHash.digests_from_token_sets(shingles, 112, 1))
hashes = rensa.RMinHash.hash_token_sets(shingles)
timed("hashes", lambda: rensa.RMinHash.digest_matrix_from_token_hash_sets(hashes, 112, 1))
from datasketch import MinHash
some, few = len(texts) // 8, len(texts) // 16
def sketch():
    for one in shingles[:some]:
        minhash = MinHash(num_perm=112)
        minhash.update_batch([s.encode() for s in one])
timed("datasketch", sketch, texts[:some])
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.pipeline.dedup.sentence_dedup import SentDedupConfig, SentenceDedupSignature
signer = MinhashDedupSignature("/tmp", MinhashConfig())
signer.get_signature(signer.get_shingles(texts[0]))
timed("datatrove", lambda: [signer.get_signature(signer.get_shingles(t)) for t in texts[:few]], texts[:few])
spans = SentenceDedupSignature("/tmp", config=SentDedupConfig())
spans.get_hashes(Document(text=texts[0], id="0"), 0)
timed("sentences", lambda: [spans.get_hashes(Document(text=t, id="0"), 0) for t in texts[:few]], texts[:few])
"""


def cpu(run: Callable[[], object]) -> float:
    """Processor seconds of this process."""
    start = time.process_time()
    run()
    return time.process_time() - start


@dataclass(frozen=True)
class Costs:
    """CPU seconds, and bytes on disk: of the signatures, of the steps' files at their most, and of those that stay."""

    signing_s: float
    finding_s: float
    signed_bytes: int
    peak_bytes: int
    final_bytes: int
    result: DedupResult


def measure_method(store: Store, splits: Iterable[Iterable[pa.RecordBatch]], config: Dedup, **options: Any) -> Costs:
    """Sign the splits' documents, and find what is to be dropped or cut, one task after the other."""
    signed: list[Signed] = []
    results: list[DedupResult] = []
    peak_bytes = 0

    def sign() -> None:
        for index, batches in enumerate(splits):
            with open_documents(store, f"part{index}", config) as documents:
                for batch in batches:
                    documents.add(batch)
            assert documents.signed is not None
            signed.append(documents.signed)

    def run(function: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[Any]:
        nonlocal peak_bytes
        done = [function(task, 0) for task in tasks]
        peak_bytes = max(peak_bytes, sum(store.sizes("dedup/").values()))
        return done

    signing_s = cpu(sign)
    signed_bytes = sum(size for name, size in store.sizes().items() if not name.endswith(".arrow"))
    finding_s = cpu(lambda: results.append(deduplicate(signed, config, store, run, **options)))
    return Costs(signing_s, finding_s, signed_bytes, peak_bytes, sum(store.sizes("dedup/").values()), results[0])


def corpus(megabytes: int) -> list[str]:
    """Documents of about 3 kB of English books."""
    paths = sorted((data_folder() / "books/gutenberg_en").glob("*.txt"))
    text = "".join(path.read_text("utf-8", "replace") for path in paths)[: megabytes << 20]
    return [text[i : i + 3000] for i in range(0, len(text), 3000)]


def print_signatures(texts: Sequence[str], theirs: dict[str, float]) -> list[Figure]:
    """The table of signatures, printed, and what the targets are set for; ours alone without the peers."""
    column, size = pa.array(texts, pa.large_string()), sum(len(text.encode()) for text in texts)
    shingles = np.random.default_rng(0).integers(0, 1 << 32, 448, dtype=np.uint32)  # of about 3 kB of English
    lowest = np.full(112, 0xFFFFFFFF, np.uint32)
    method = MinHash()
    factors, terms = method.hash_functions()

    def hash_alone() -> None:
        for _ in texts:
            kernels.take_lowest(shingles, len(shingles), factors, terms, lowest)

    def best(run: Callable[[], object]) -> float:
        return min(cpu(run) for _ in range(4)) / size

    ours, hashes = best(lambda: method.sign_texts(column)), best(hash_alone)
    print(f"MinHash signatures, {size / 1e6:.1f} MB in {len(texts)} documents, one core")
    print(f"{'':40}{'MB/s':>10}{'forebay is':>14}")

    def line(name: str, cost: float, base: float = ours) -> None:
        print(f"{name:40}{1e-6 / cost:10.2f}{cost / base:13.1f}x")

    line("forebay, from text", ours)
    for name, cost in theirs.items():
        if name.startswith(("rensa", "datasketch")):
            line(f"{name}, from text", cost + theirs["shingles"])
            line(f"{name}, its 5-grams given", cost)
    if not theirs:
        return []
    line("datatrove, from text", theirs["datatrove"])
    line("forebay, shingle hashes given", hashes, hashes)
    line("rensa R-MinHash, shingle hashes given", theirs["hashes"], hashes)
    fastest = min(cost + theirs["shingles"] for name, cost in theirs.items() if name.startswith("rensa"))
    return [
        Figure("MinHash / datasketch", (theirs["datasketch"] + theirs["shingles"]) / ours, "x CPU", "from text"),
        Figure("MinHash / rensa", fastest / ours, "x CPU", "its fastest, from text"),
        Figure("MinHash / rensa, hashes given", theirs["hashes"] / hashes, "x CPU", "min-wise hashes alone"),
    ]


def print_cuts(texts: Sequence[str], peer: float | None) -> None:
    """What is cut out of documents of which a tenth quote 120 words of others: cost, disk, and whether it is all."""
    rng = np.random.default_rng(0)
    documents = list(texts)
    for i in rng.integers(1, len(texts), len(texts) // 10).tolist():
        words = texts[int(rng.integers(i))].split()
        start = int(rng.integers(max(1, len(words) - 120)))
        documents[i] = f"{documents[i][:1500]} {' '.join(words[start : start + 120])} {documents[i][1500:]}"
    column = pa.array(documents, pa.large_string())
    batches = pa.table({"text": column}).to_batches(1024)
    size, num_words = column.nbytes, sum(len(split_words(text)) for text in documents)
    print(f"\nCutting, {size / 1e6:.1f} MB, a tenth of the documents quote 120 words of others, one core")
    for kind in ("lines", "sentences", "substring", "overlap"):
        config = Dedup(**{kind: True})
        # In the first, kernels are compiled or loaded, and rows sorted in several runs, as those of a large corpus are.
        peaks: list[int] = []
        for memory_bytes in (1 << 20, 256 << 20):
            with tempfile.TemporaryDirectory() as name:
                costs = measure_method(open_store(name), [batches], config, memory_bytes=memory_bytes)
                peaks.append(costs.peak_bytes)
                cutter = Cutter(costs.result.cut[0])
                cutter.cut(column.slice(0, 1), 0)
                start_s = time.process_time()
                remaining = cutter.cut(column, 0).to_pylist()
                cutting_s = time.process_time() - start_s
        times = {"sign": costs.signing_s, "find": costs.finding_s, "cut": cutting_s}
        print(f"{kind:14}" + "".join(f"{name} {size / seconds / 1e6:7.1f} MB/s  " for name, seconds in times.items()))
        signed, peak = costs.signed_bytes / num_words, max(peaks) / num_words
        print(f"{'':14}{signed:.2f} bytes a word signed, {peak:.2f} at most, then")
        if kind == "substring":
            expected = remove_repeated(documents, config.min_words)
            same = sum(split_words(text) == words for text, words in zip(remaining, expected))
            print(f"{'':14}{same} of {len(documents)} documents equal to a plain reference")
        if kind == "sentences" and peer:
            ratio = peer * size / costs.signing_s
            print(f"{'':14}datatrove signs {1e-6 / peer:.2f} MB/s: forebay is {ratio:.0f}x")


def split_words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", text)
    return re.findall(r"[^\W_]+", "".join(c for c in plain if not unicodedata.combining(c)).lower())


def remove_repeated(texts: Sequence[str], min_words: int) -> list[list[str]]:
    """The definition: words of each text that are in no window that occurred before."""
    seen: set[tuple[str, ...]] = set()
    out = []
    for words in map(split_words, texts):
        removed: set[int] = set()
        for w in range(len(words) - min_words + 1):
            window = tuple(words[w : w + min_words])
            if window in seen:
                removed |= set(range(w, w + min_words))
            seen.add(window)
        out.append([word for i, word in enumerate(words) if i not in removed])
    return out


def measure(megabytes: int = 4) -> list[Figure]:
    """Both tables, printed, and the ratios."""
    texts = corpus(megabytes)
    theirs = ask(PEER, texts) or {}
    figures = print_signatures(texts, theirs)
    print_cuts(texts, theirs.get("sentences"))
    return figures


if __name__ == "__main__":
    show("dedup", measure())
