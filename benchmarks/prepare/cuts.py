"""Lines, sentences and substrings that are cut: MB a second of one core, bytes on disk, whether it is all."""

from __future__ import annotations

import re
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.prepare.dedup.cutting import Cutter
from forebay.prepare.dedup.deduplicate import DedupResult, deduplicate
from forebay.prepare.dedup.methods import Dedup, Signed
from forebay.prepare.tasks.text import open_documents
from forebay.storage.store import Store, open_store


def cpu(run: Callable[[], object]) -> float:
    """Processor seconds of this process."""
    start = time.process_time()
    run()
    return time.process_time() - start


def print_cuts(texts: Sequence[str], peer: float | None) -> None:
    """What is cut out of documents of which a tenth quote 120 words of others: cost, disk, and whether it is all."""
    rng = np.random.default_rng(0)
    documents = list(texts)
    for i in rng.integers(1, len(texts), len(texts) // 10).tolist():
        words = texts[int(rng.integers(i))].split()
        start = int(rng.integers(max(1, len(words) - 120)))
        documents[i] = f"{documents[i][:1500]} {' '.join(words[start : start + 120])} {documents[i][1500:]}"
    column = pa.array(documents, pa.large_string())
    size, words_in_all = sum(len(text.encode()) for text in documents), sum(len(_words(text)) for text in documents)
    print(f"\nCutting, {size / 1e6:.1f} MB, a tenth of the documents quote 120 words of others, one core")
    kinds = {"lines": Dedup(lines=True), "sentences": Dedup(sentences=True), "substring": Dedup(substring=True)}
    kinds |= {"overlap": Dedup(overlap=True), "overlap, 1/8": Dedup(overlap=True, overlap_sample=8)}
    for kind, config in kinds.items():
        with tempfile.TemporaryDirectory() as name:
            store, peak_bytes = open_store(name), 0
            signed: list[Signed] = []

            def run(function: Callable[[Any, int], Any], tasks: Sequence[Any], store: Store = store) -> list[Any]:
                nonlocal peak_bytes
                done = [function(task, 0) for task in tasks]
                peak_bytes = max(peak_bytes, sum(store.sizes("dedup/").values()))
                return done

            results: list[DedupResult] = []

            def find(
                store: Store = store, signed: list[Signed] = signed, config: Dedup = config,
                results: list[DedupResult] = results,
            ) -> None:  # fmt: skip
                store.remove(store.sizes("dedup/"))
                results.append(deduplicate(signed[-1:], config, store, run))

            def sign(store: Store = store, signed: list[Signed] = signed, config: Dedup = config) -> None:
                signed.append(_sign_documents(store, column, config))

            sign()
            find()  # compiled now
            cpu_signing, cpu_solving = cpu(sign), cpu(find)
            sizes = {name: size for name, size in store.sizes().items() if name.startswith("part.")}
            signed_bytes = sum(sizes.values()) - sizes["part.arrow"]
            cutter = Cutter(results[-1].cut[0])
            cutter.cut(column.slice(0, 1), 0)
            start = time.process_time()
            remaining = cutter.cut(column, 0).to_pylist()
            cpu_cutting = time.process_time() - start
            rates = (size / 1e6 / seconds for seconds in (cpu_signing, cpu_solving, cpu_cutting))
            print(
                f"{kind:14}"
                + "".join(f"{what} {rate:7.1f} MB/s  " for what, rate in zip(("sign", "find", "cut"), rates))
            )
            a_word = signed_bytes / words_in_all, peak_bytes / words_in_all
            print(f"{'':14}{a_word[0]:.2f} bytes a word signed, {a_word[1]:.2f} at most, then")
            if kind == "substring":
                expected = _without_runs(documents, config.min_words)
                same = sum(_words(text) == words for text, words in zip(remaining, expected))
                print(f"{'':14}{same} of {len(documents)} documents equal to a plain reference")
            if kind == "sentences" and peer:
                print(f"{'':14}datatrove signs {1e-6 / peer:.2f} MB/s: forebay is {peer * size / cpu_signing:.0f}x")


def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", text)
    return re.findall(r"[^\W_]+", "".join(c for c in plain if not unicodedata.combining(c)).lower())


def _without_runs(texts: Sequence[str], min_words: int) -> list[list[str]]:
    """The definition: words of each text that are in no window that occurred before."""
    seen: set[tuple[str, ...]] = set()
    out = []
    for words in map(_words, texts):
        removed: set[int] = set()
        for w in range(len(words) - min_words + 1):
            window = tuple(words[w : w + min_words])
            if window in seen:
                removed |= set(range(w, w + min_words))
            seen.add(window)
        out.append([word for i, word in enumerate(words) if i not in removed])
    return out


def _sign_documents(store: Store, texts: pa.LargeStringArray, config: Dedup) -> Signed:
    with open_documents(store, "part", config) as documents:
        for start in range(0, len(texts), 1024):
            documents.add(pa.record_batch({"text": texts.slice(start, 1024)}))
    assert documents.signed is not None
    return documents.signed
