"""Which blocks of a page are its main text: gradient-boosted trees in two passes.

The first pass sees each block, its neighbours and the elements around it; the second also sees what the first says of
them. Blocks are then chosen so that the expected F1 of the page's words is highest. The weights, `model.npz`, are made
by `scripts/train_extractor.py`. Source: Friedman 2001 for the trees; Lipton, Elkan, Naryanaswamy 2014 for the choice.
"""

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.arrays import BOOL, F32, I16, I32
from forebay.prepare.compiled import jit
from forebay.prepare.extract.features import block_features, context_features
from forebay.prepare.extract.page import CELL, ELEMENT, ROW, TAG, WORDS, ScannedPage, Vocabulary
from forebay.prepare.extract.tags import TAGS, concept_words
from forebay.prepare.filters.word_tables import hash_table

MODEL_VERSION = 3
"""Changed with the weights, as then the same page gives another text."""
SHARE, PRECISE_SHARE = 0.55, 0.75
"""A block is kept if its probability is at least this share of the page's highest expected F1. One half is best for F1
if probabilities are exact; more rejects more boilerplate for little of F1."""
MIN_TITLE = 0.2
"""Annotators disagree on whether a title is main text; in Markdown it is wanted."""


class Trees(NamedTuple):
    """Trees as arrays of nodes. A node's children follow it: left at the next index, right at `right`; a leaf has none.

    Args:
        roots: int32 [trees].
        feature: int16 [nodes]; -1 of a leaf.
        threshold: float32 [nodes]: values at most this go left; of a leaf, its value.
        right: int32 [nodes].
    """

    roots: I32
    feature: I16
    threshold: F32
    right: I32


class Model(NamedTuple):
    """The weights of extraction."""

    class_words: Vocabulary
    text_words: Vocabulary
    first: Trees
    second: Trees


@lru_cache(2)
def load_model(path: Path | None = None) -> Model:
    """Load weights that `scripts/train_extractor.py` wrote; without a path, those of the package."""
    with (path or resources.files(__package__).joinpath("model.npz")).open("rb") as file:
        data = np.load(file, allow_pickle=False)
        arrays: dict[str, Any] = {name: data[name] for name in data.files}
    trees = [Trees(*(arrays[f"{name}_{field}"] for field in Trees._fields)) for name in ("first", "second")]
    words = [
        vocabulary(
            arrays[f"{name}_words"].tobytes().decode().split(), arrays[f"{name}_weights"].astype(np.float32) / 100
        )
        for name in ("class", "text")
    ]
    return Model(words[0], words[1], *trees)


def vocabulary(words: list[str], weights: F32) -> Vocabulary:
    """The table of words and their weights; concepts are added to it."""
    concepts = concept_words()
    number_of = {word: number for number, word in enumerate(dict.fromkeys([*words, *concepts]))}
    keys, numbers = hash_table(number_of, 1 << (4 * len(number_of)).bit_length())
    padded = np.zeros(len(number_of), np.float32)
    padded[: len(weights)] = weights
    return Vocabulary(keys, numbers, padded, np.array([concepts.get(word, 0) for word in number_of], np.int64))


def block_probabilities(page: ScannedPage, model: Model) -> F32:
    """float32 [blocks]: how likely each block is main text."""
    columns = np.ascontiguousarray(block_features(page).T)
    context = context_features(page, predict(columns, model.first))
    return predict(np.concatenate([columns, context.T]), model.second)


def choose_blocks(page: ScannedPage, probability: F32, share: float, title: bool) -> BOOL:
    """bool [blocks]: those to keep; at least one if there are any.

    A row of a data table is kept as its likeliest cell is. `title`: keep the `h1` before the text, unless it is
    unlikely.
    """
    if not len(probability):
        return np.zeros(0, np.bool_)
    probability = _same_in_rows(page, probability)
    words = page.blocks[:, WORDS] + 0.3
    order = np.argsort(-probability, kind="stable")
    expected = np.cumsum((words * probability)[order])
    best = np.max(2 * expected / (np.cumsum(words[order]) + expected[-1] + 1e-9))
    keep = np.asarray(probability >= min(share * best, probability.max()))
    if title:
        before = np.flatnonzero(page.elements[page.blocks[: np.argmax(keep), ELEMENT], TAG] == TAGS["h1"])[-1:]
        keep[before] = probability[before] >= MIN_TITLE
    return keep


def _same_in_rows(page: ScannedPage, probability: F32) -> F32:
    """The highest probability of its row for each block of a row whose cells, two or more, have a block each."""
    rows, cells = page.elements[page.blocks[:, ELEMENT]][:, [ROW, CELL]].T
    inside = np.flatnonzero(rows > 0)
    if not len(inside):
        return probability
    _, index, num_blocks = np.unique(rows[inside], return_inverse=True, return_counts=True)
    is_first = np.zeros(len(inside), bool)
    is_first[np.unique(rows[inside] << 32 | cells[inside], return_index=True)[1]] = True
    is_data = (np.bincount(index, is_first) == num_blocks) & (num_blocks > 1)
    highest = np.zeros(len(num_blocks), np.float32)
    np.maximum.at(highest, index, probability[inside])
    probability = probability.copy()
    chosen = is_data[index]
    probability[inside[chosen]] = highest[index[chosen]]
    return probability


_LN2 = 0.6931471805599453
_POWERS = 2.0 ** np.arange(-64.0, 65.0)


@jit()
def _logistic(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) by additions and multiplications alone: the same bits on every machine."""
    x = min(40.0, max(-40.0, -np.float64(x)))
    k = np.floor(x / _LN2 + 0.5)
    r = x - k * _LN2
    term, total = 1.0, 1.0
    for n in range(1, 13):
        term = term * r / n
        total = total + term
    return np.float32(1.0 / (1.0 + total * _POWERS[np.int64(k) + 64]))


def predict(columns: F32, trees: Trees) -> F32:
    """float32 [rows]: the probabilities that trees give to features, float32 [features, rows]."""
    probabilities: F32 = _predict(np.ascontiguousarray(columns), trees)
    return probabilities


@jit()
def _predict(columns, trees):  # type: ignore[no-untyped-def]
    rows = columns.shape[1]
    totals = np.zeros(rows, np.float32)
    feature, threshold, right = trees.feature, trees.threshold, trees.right
    for root in trees.roots:  # A tree's nodes stay in the cache for all rows.
        for i in range(rows):
            node = root
            column = feature[node]
            while column >= 0:
                node = node + 1 if columns[column, i] <= threshold[node] else right[node]
                column = feature[node]
            totals[i] += threshold[node]
    for i in range(rows):
        totals[i] = _logistic(totals[i])
    return totals
