"""Trains the model of main text: `python scripts/train_extractor.py`, with lightgbm and rapidfuzz installed.

Data: the sets that `benchmarks.prepare.extract` reads. Three models are made: of each half of the sites, by a hash of
their names, scored on the other half; and of all sites, for the package. A page's words are aligned with its gold
(longest common subsequence), and a block's label is the share of its words that are in the gold; blocks of the set of
snippets are labelled where a snippet says so. A page's weight is about one, whatever its length. Both word lists are
log-odds of words that several sites have; what the trees are trained on was computed from other sites' pages (four
folds), and so were the first pass's probabilities that the second sees. About 10 CPU minutes.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from rapidfuzz.distance import LCSseq

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.prepare.extract import HALF_MODEL, GoldPage, describe_scores, gold_pages, one_line, words

from forebay.prepare.extract import model as extraction
from forebay.prepare.extract.attributes import NAMING
from forebay.prepare.extract.features import block_features, context_features
from forebay.prepare.extract.layout import page_text
from forebay.prepare.extract.page import ELEMENT, PARENT, START, STOP, TAG_START, TAG_STOP, ScannedPage
from forebay.prepare.extract.scan import scan_page

OUT = Path(extraction.__file__).with_name("model.npz")
FOLDS = 4
MAX_WORDS = 40_000
TREES = {"first": 150, "second": 120}
SEEDS = {"first": 1, "second": 2}
PARAMETERS = {
    "objective": "cross_entropy", "learning_rate": 0.06, "num_leaves": 63, "min_data_in_leaf": 200,
    "feature_fraction": 0.3, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 5, "max_bin": 63, "verbose": -1,
    "num_threads": 1, "deterministic": True, "force_col_wise": True,
}  # fmt: skip
_NAMING = re.compile(
    rb"""(?<![\w-])(?:%b)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""" % "|".join(NAMING.split()).encode(), re.IGNORECASE
)
_NO_WORDS = extraction.vocabulary([], np.zeros(0, np.float32))
Odds = dict[str, float]


def fold_of(host: str) -> int:
    """Of the FOLDS, by the site's name."""
    return int(hashlib.sha256(f"fold {host}".encode()).hexdigest(), 16) % FOLDS


class Example:
    """A page with its labels."""

    def __init__(self, gold: GoldPage) -> None:
        self.gold = gold
        self.html = gold.html.encode("utf-8", "replace")
        page = scan_page(self.html, _NO_WORDS, _NO_WORDS)
        data = page.text.tobytes()
        self.texts = [data[block[START] : block[STOP]].decode() for block in page.blocks]
        self.fold = fold_of(gold.host)
        self.sizes = np.array([len(words(text)) for text in self.texts], np.float32)
        self.labels = self._by_snippets() if gold.dataset == "snippets" else self._by_alignment()
        self.is_known = ~np.isnan(self.labels)
        self.weights = self._weights()
        self.class_words, self.text_words = self._word_shares(page)

    def _by_alignment(self) -> np.ndarray:
        block_words = [words(text) for text in self.texts]
        flat = [word for block in block_words for word in block][:MAX_WORDS]
        index = np.array([i for i, block in enumerate(block_words) for _ in block], np.int64)
        labels = np.zeros(len(self.texts), np.float32)
        for step in LCSseq.opcodes(flat, words(self.gold.text)[:MAX_WORDS]):
            if step.tag == "equal":
                np.add.at(labels, index[step.src_start : step.src_end], 1)
        return labels / np.maximum(self.sizes, 1)

    def _by_snippets(self) -> np.ndarray:
        labels = np.full(len(self.texts), np.nan, np.float32)
        lines = list(map(one_line, self.texts))

        def matching(snippet: str) -> Iterable[int]:
            return (i for i, t in enumerate(lines) if len(t) > 1 and (snippet in t or (len(t) >= 12 and t in snippet)))

        for snippet in self.gold.expected:
            labels[list(matching(snippet))] = 1
        for snippet in self.gold.unexpected:
            for i in matching(snippet):
                labels[i] = 0 if labels[i] != 1 else np.nan
        return labels

    def _weights(self) -> np.ndarray:
        if self.gold.dataset == "snippets":
            return self.is_known * 0.5 / max(1, self.is_known.sum())
        sizes = self.sizes + 0.3
        gold = float((sizes * self.labels).sum())
        return sizes / (gold + 0.25 * sizes.sum()) if gold >= 10 else np.zeros(len(sizes))

    def _word_shares(self, page: ScannedPage) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
        """Of each class word and each word of short blocks, how much of its text is main text, and is not."""
        known, labels = self.is_known, np.nan_to_num(self.labels)
        share = self.sizes * known / max(1, (self.sizes * known).sum())
        sums = np.zeros((len(page.elements), 2))
        np.add.at(sums, page.blocks[:, ELEMENT], np.stack([share * labels, share * (1 - labels)], 1))
        for element in range(len(sums) - 1, 0, -1):
            sums[page.elements[element, PARENT]] += sums[element]
        by_class: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for element in range(1, len(sums)):
            if (total := sums[element].sum()) > 0:
                tag = self.html[page.elements[element, TAG_START] : page.elements[element, TAG_STOP]]
                for word in class_words(tag):
                    by_class[word] += sums[element] / total * total**0.5
        by_text: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for text, label, is_known in zip(self.texts, labels, known):
            found = set(re.findall(r"[^\W_]+", text.lower())) if is_known and self.sizes.size else set()
            if len(found) <= 20:
                for word in found:
                    by_text[word] += (label, 1 - label)
        return tuple(
            {word: tuple(row / max(1, row.sum())) for word, row in counts.items()} for counts in (by_class, by_text)
        )  # type: ignore[return-value]


def class_words(tag: bytes) -> set[str]:
    """The words of a start tag's naming attributes and of a custom element's name, as the scanner cuts them."""
    name = re.match(rb"[^\s/>]+", tag)
    values = [name[0]] if name and b"-" in name[0] else []
    values += [(match[1] or match[2] or match[3] or b"")[:512] for match in _NAMING.finditer(tag)]
    found = (re.findall(r"[A-Z]*[a-z]+|[A-Z]+", value.decode("ascii", "replace")) for value in values)
    return {word.lower() for row in found for word in row if 2 <= len(word) <= 24}


def log_odds(examples: Sequence[Example], name: str, min_sites: int) -> Odds:
    """How much more often than all words each stands at main text, of those on at least `min_sites` sites."""
    expected: Counter[str] = Counter()
    unexpected: Counter[str] = Counter()
    sites: defaultdict[str, set[str]] = defaultdict(set)
    for example in examples:
        for word, (good, bad) in getattr(example, name).items():
            expected[word] += good
            unexpected[word] += bad
            sites[word].add(example.gold.host)
    good, bad = sum(expected.values()), sum(unexpected.values())
    prior = np.array([good, bad]) / (good + bad) * 2
    return {
        word: round(float(np.log((expected[word] + prior[0]) / (unexpected[word] + prior[1])) - np.log(good / bad)), 2)
        for word in sorted(expected)
        if len(sites[word]) >= min_sites
    }


def vocabularies(examples: Sequence[Example]) -> tuple[Odds, Odds]:
    """The weights of class words and of the words of short blocks."""
    return log_odds(examples, "class_words", 6), log_odds(examples, "text_words", 10)


def scan(examples: Iterable[Example], odds: tuple[Odds, Odds]) -> list[tuple[ScannedPage, np.ndarray]]:
    """Each page scanned with the vocabularies, and its features."""
    tables = [extraction.vocabulary(list(o), np.array(list(o.values()), np.float32)) for o in odds]
    pages = (scan_page(example.html, *tables) for example in examples)
    return [(page, block_features(page)) for page in pages]


def fit(examples: Sequence[Example], features: Sequence[np.ndarray], stage: str) -> list[lightgbm.Booster]:
    """The boosters of a pass, one a seed."""
    labels = np.concatenate([np.nan_to_num(example.labels) for example in examples])
    weights = np.concatenate([example.weights for example in examples]) * 100
    known = weights > 0
    data = lightgbm.Dataset(np.concatenate(features)[known], labels[known], weight=weights[known], free_raw_data=False)
    return [lightgbm.train({**PARAMETERS, "seed": s}, data, TREES[stage]) for s in range(SEEDS[stage])]


def to_arrays(boosters: Sequence[lightgbm.Booster]) -> extraction.Trees:
    """The trees as arrays; several boosters are averaged before the logistic function."""
    roots: list[int] = []
    feature: list[int] = []
    threshold: list[float] = []
    right: list[int] = []

    def add(node: dict[str, Any]) -> None:
        offset = len(feature)
        is_leaf = "leaf_value" in node
        feature.append(-1 if is_leaf else node["split_feature"])
        threshold.append(node["leaf_value"] / len(boosters) if is_leaf else node["threshold"])
        right.append(0)
        if not is_leaf:
            add(node["left_child"])
            right[offset] = len(feature)
            add(node["right_child"])

    for booster in boosters:
        for tree in booster.dump_model()["tree_info"]:
            roots.append(len(feature))
            add(tree["tree_structure"])
    return extraction.Trees(
        np.array(roots, np.int32),
        np.array(feature, np.int16),
        np.array(threshold, np.float32),
        np.array(right, np.int32),
    )


def train(pages: Iterable[GoldPage]) -> dict[str, np.ndarray]:
    """The arrays of `model.npz`, learned from these pages."""
    training = [Example(gold) for gold in pages]
    print(f"{len(training)} pages to train on, {sum(len(e.texts) for e in training)} blocks", flush=True)
    folds = np.array([example.fold for example in training])
    scanned: list[Any] = [None] * len(training)
    for fold in range(FOLDS):
        odds = vocabularies([e for e in training if e.fold != fold])
        rows = np.flatnonzero(folds == fold)
        for row, result in zip(rows, scan((training[row] for row in rows), odds)):
            scanned[row] = result
    features = [result[1] for result in scanned]
    first: list[Any] = [None] * len(training)
    for fold in range(FOLDS):
        rest = np.flatnonzero(folds != fold)
        trees = to_arrays(fit([training[i] for i in rest], [features[i] for i in rest], "first"))
        for row in np.flatnonzero(folds == fold):
            first[row] = extraction.predict(features[row].T, trees)
    with_context = [np.hstack([f, context_features(r[0], p)]) for f, r, p in zip(features, scanned, first)]
    odds = vocabularies(training)
    passes = {
        "first": to_arrays(fit(training, features, "first")),
        "second": to_arrays(fit(training, with_context, "second")),
    }
    arrays: dict[str, np.ndarray] = {}
    for name, weights in zip(("class", "text"), odds):
        arrays[f"{name}_words"] = np.frombuffer(" ".join(weights).encode(), np.uint8)
        arrays[f"{name}_weights"] = np.round(np.array(list(weights.values())) * 100).astype(np.int16)
    for name, trees in passes.items():
        arrays |= {f"{name}_{field}": getattr(trees, field) for field in trees._fields}
    return arrays


def extract_texts(pages: Iterable[GoldPage], model: extraction.Model) -> list[str]:
    """The main text of each page."""
    texts = []
    for gold in pages:
        page = scan_page(gold.html.encode("utf-8", "replace"), model.class_words, model.text_words)
        keep = extraction.choose_blocks(page, extraction.block_probabilities(page, model))
        texts.append(page_text(page, keep, False))
    return texts


def save(arrays: dict[str, np.ndarray], path: Path) -> extraction.Model:
    """Write the arrays, and load them as the package does."""
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    return extraction.load_model(path)


def main() -> None:
    """Train on each half of the sites and print the scores of the other; train on all; write two of the models."""
    pages = list(gold_pages())
    texts = [""] * len(pages)
    with tempfile.TemporaryDirectory() as folder:
        for half, path in enumerate((HALF_MODEL, Path(folder, "half_1.npz"))):
            model = save(train(page for page in pages if page.half == half), path)
            others = [i for i, page in enumerate(pages) if page.half != half]
            for i, text in zip(others, extract_texts((pages[i] for i in others), model)):
                texts[i] = text
            print(describe_scores([pages[i] for i in others], [texts[i] for i in others]), flush=True)
    print(describe_scores(pages, texts), flush=True)
    save(train(pages), OUT)


if __name__ == "__main__":
    main()
