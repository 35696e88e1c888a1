"""Near duplicates: who finds what, with 14 bands of 8 hashes over 5-grams of words.

    python -m benchmarks.prepare.copies

Two tables: the planted pairs of a set of 1,000 news articles (MinHash by chrisjmccormick; .truth names the pairs); and
pairs of real text with words changed at random, whose Jaccard similarity is computed. A pair counts if the two have an
equal band.
Beside: datasketch, rensa, datatrove, each with its own words, shingles and hashes. NeMo Curator's MinHash needs cuDF.
"""

from __future__ import annotations

import random
import re
from itertools import combinations

import numpy as np
import pyarrow as pa

from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.filters import real_texts
from benchmarks.prepare.peers import ask
from forebay.prepare.dedup.methods import MinHash

PEER = """
import re
import numpy as np, rensa, datasketch
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
WORD = re.compile(r"[^\\W_]+")
def grams(text):
    words = WORD.findall(text.lower())
    return [" ".join(words[i : i + 5]) for i in range(max(len(words) - 4, 1))]
def bands(row):
    return [hash(tuple(row[i : i + 8])) for i in range(0, 112, 8)]
def of_rensa(text):
    sketch = rensa.RMinHash(112, 1); sketch.update(grams(text)); return bands(sketch.digest())
def of_datasketch(text):
    sketch = datasketch.MinHash(num_perm=112); sketch.update_batch([g.encode() for g in grams(text)])
    return bands(sketch.hashvalues.tolist())
signer = MinhashDedupSignature("/tmp", MinhashConfig())
def of_datatrove(text):
    return [hash(tuple(band)) for band in signer.get_signature(signer.get_shingles(text))]
engines = {"datasketch": of_datasketch, "rensa": of_rensa, "datatrove": of_datatrove}
answer = {name: [bands_of(text) for text in request] for name, bands_of in engines.items()}
"""
PAIRS = 14_000


def grams(text: str) -> frozenset[tuple[str, ...]]:
    """5-grams of words in small letters."""
    words = re.findall(r"[^\W_]+", text.lower())
    return frozenset(tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1)))


def changed(text: str, chance: random.Random) -> str:
    """The text with a share of its words replaced, up to one in eight."""
    share = chance.uniform(0, 0.125) ** 1.5
    return " ".join(f"x{chance.randrange(999)}" if chance.random() < share else word for word in text.split())


def ours(texts: list[str]) -> list[list[int]]:
    """A number for each band of each text."""
    return [row.tolist() for row in MinHash().sign_texts(pa.array(texts, pa.large_string()))]


def candidate_pairs(bands: list[list[int]]) -> set[frozenset[int]]:
    """All pairs of texts that share a band."""
    places: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(bands):
        for band, value in enumerate(row):
            places.setdefault((band, value), []).append(index)
    return {frozenset(pair) for same in places.values() for pair in combinations(same, 2)}


def main() -> None:
    """Print both tables."""
    folder = data_folder() / "neardup"
    lines = (folder / "articles_1000.train").read_text("utf-8").splitlines()
    ids = [line.split(" ", 1)[0] for line in lines]
    articles = [line.split(" ", 1)[1] for line in lines]
    planted = {
        frozenset(map(ids.index, row.split())) for row in (folder / "articles_1000.truth").read_text().splitlines()
    }
    chance = random.Random(5)
    pool = [text for text in dict.fromkeys(real_texts()) if len(text.split()) > 100]
    firsts = [pool[i % len(pool)] for i in range(PAIRS)]
    seconds = [changed(text, chance) for text in firsts]
    jaccard = np.array([len(a & b) / len(a | b) for a, b in zip(map(grams, firsts), map(grams, seconds))])
    texts = [*articles, *firsts, *seconds]
    print(
        f"{'':12}{'planted':>10}{'others':>8}"
        + "".join(f"{f'J {low:.1f}-{low + 0.1:.1f}':>12}" for low in np.arange(0.5, 1, 0.1))
    )
    for name, rows in {"forebay": ours(texts), **(ask(PEER, texts) or {})}.items():
        pairs = candidate_pairs(rows[: len(articles)])
        a, b = np.array(rows[len(articles) : -PAIRS], object), np.array(rows[-PAIRS:], object)
        met = (a == b).any(1)
        shares = []
        for low in np.arange(0.5, 1, 0.1):
            inside = (jaccard >= low) & (jaccard < low + 0.1)
            shares.append(f"{met[inside].mean():.3f} /{inside.sum():4}" if inside.any() else "-")
        print(
            f"{name:12}{len(pairs & planted):4} of {len(planted)}{len(pairs - planted):8}"
            + "".join(f"{s:>12}" for s in shares)
        )
    expected = 1 - (1 - jaccard**8) ** 14
    cells = [expected[(jaccard >= low) & (jaccard < low + 0.1)] for low in np.arange(0.5, 1, 0.1)]
    print(f"{'theory':30}" + "".join(f"{f'{cell.mean():.3f}' if len(cell) else '-':>12}" for cell in cells))


if __name__ == "__main__":
    main()
