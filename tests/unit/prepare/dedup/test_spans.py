"""Sentences, substrings and the share that is cut, against plain references; addresses, and the best copy."""

import math
import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.dedup.deduplicate import deduplicate
from forebay.prepare.dedup.methods import Dedup, normalise_url
from forebay.storage.store import open_store
from support.dedup_bench import Bench, drop_codes
from support.stores import contents, resuming

SENTENCES = st.lists(
    st.sampled_from(["One a.", "Two b!", "三つ目。", 'He said "four."', "five", "Six?", "", "3.5 is no end."]),
    max_size=9,
)
DOCUMENT = st.lists(SENTENCES.map(" ".join), max_size=3).map("\n".join)


def sentences_of(text: str) -> list[str]:
    """A sentence with the blanks after it, or what ends at a line feed, with it."""
    pieces, i = [], 0
    while i < len(text):
        match = re.compile(r"[^\n]*?(?:[.!?][.!?\"\])]*(?=[ \t\n]|\Z)|。)[ \t]*|[^\n]*\n|[^\n]+\Z").match(text, i)
        pieces.append(match[0])
        i = match.end()
    return pieces


def without_spans(texts: list[str], span: int, min_characters: int) -> list[str]:
    seen = set()
    out = []
    for text in texts:
        pieces = sentences_of(text)
        keys = [" ".join(piece.split()) for piece in pieces]
        full = [i for i, key in enumerate(keys) if key]
        removed = set()
        for k in range(len(full) - span + 1):
            window = tuple(keys[i] for i in full[k : k + span])
            if sum(len(key.replace(" ", "")) for key in window) < min_characters:
                continue
            if window in seen:
                removed |= set(range(full[k], full[k + span - 1] + 1))
            seen.add(window)
        rest = "".join(piece for i, piece in enumerate(pieces) if i not in removed)
        out.append(rest if not removed else rest.rstrip("\n") if rest.strip() else "")
    return out


@given(texts=st.lists(DOCUMENT, max_size=8), cut=st.integers(0, 8))
def test_spans_of_sentences_are_cut(fresh: Callable[[], Bench], texts, cut):
    config = Dedup(sentences=True, min_characters=8)
    expected = without_spans(texts, 3, 8)
    assert fresh().remaining([texts[:cut], texts[cut:]], config, 1 << 16) == expected


def without_runs(texts: list[list[str]], min_words: int) -> list[list[str]]:
    """The definition: a window of words that occurred before goes; of one that overlaps its copy, what is new."""
    seen = set()
    out = []
    for words in texts:
        removed = set()
        for w in range(len(words) - min_words + 1):
            window = tuple(words[w : w + min_words])
            if window in seen:
                near = (d for d in range(1, min(min_words, w + 1)) if tuple(words[w - d : w - d + min_words]) == window)
                removed |= set(range(w + min_words - next(near, min_words), w + min_words))
            seen.add(window)
        out.append([word for i, word in enumerate(words) if i not in removed])
    return out


@given(
    texts=st.lists(st.lists(st.sampled_from(["a", "b", "c", "東", "Éa"]), max_size=40), max_size=8),
    copies=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 39), st.integers(0, 40)), max_size=6),
    min_words=st.integers(4, 9), cut=st.integers(0, 8),
)  # fmt: skip
def test_repeated_runs_of_words_are_cut(fresh: Callable[[], Bench], texts, copies, min_words, cut):
    for k, (source, start, size) in enumerate(copies):
        if texts:
            words = texts[k % len(texts)]
            words[len(words) // 2 : len(words) // 2] = texts[source % len(texts)][start : start + size]
    joined = ["\n ".join(words) if i % 2 else ", ".join(words).upper() for i, words in enumerate(texts)]
    remaining = fresh().remaining([joined[:cut], joined[cut:]], Dedup(substring=True, min_words=min_words), 1 << 16)
    for text, rest in zip(joined, remaining, strict=True):
        characters = iter(text)
        assert all(character in characters for character in rest)
    words_left = [re.findall(r"\w+", text.lower().replace("é", "e")) for text in remaining]
    expected = without_runs([[word.lower().replace("é", "e") for word in words] for words in texts], min_words)
    assert words_left == expected


def without_overlap(texts: list[str], ngram: int, share: float) -> list[str]:
    """The definition: paragraphs, and texts, of whose n-grams a share stood in earlier texts, go."""
    seen = set()
    out = []
    for text in texts:
        rows = [re.findall(r"\w+", line.lower()) for line in text.split("\n")]
        lines = [[tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)] for words in rows]
        all_ngrams = [gram for line in lines for gram in line]
        removed = [bool(line) and sum(gram in seen for gram in line) >= share * len(line) for line in lines]
        if all_ngrams and sum(gram in seen for gram in all_ngrams) >= share * len(all_ngrams):
            removed = [True] * len(lines)
        seen |= set(all_ngrams)
        rest = "\n".join(line for line, gone in zip(text.split("\n"), removed) if not gone)
        out.append(text if not any(removed) else rest.rstrip("\n") if rest.strip() else "")
    return out


PARAGRAPH = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 5, 12, 13, 14, 30])).map(
        lambda part: " ".join(("abcd" * 9)[part[0] : part[0] + part[1]])
    ),
    max_size=3,
).map(" ".join)


@given(texts=st.lists(st.lists(PARAGRAPH, min_size=1, max_size=4).map("\n".join), max_size=9), cut=st.integers(0, 9))
def test_paragraphs_whose_ngrams_were_seen_are_cut(fresh: Callable[[], Bench], texts, cut):
    config = Dedup(overlap=True)
    bench = fresh()
    expected = without_overlap(texts, 13, 0.8)
    assert bench.remaining([texts[:cut], texts[cut:]], config, 1 << 16) == expected
    result = bench.deduplicate([bench.sign(texts, config)], config)
    lost = [int(bool(text) and not rest) for text, rest in zip(texts, expected)]
    assert drop_codes(result) == lost and result.dropped == (sum(lost),)


def test_stopped_at_any_task_and_run_again(bench: Bench, tmp_path):
    rng = np.random.default_rng(4)
    texts = [" ".join(f"w{i}" for i in rng.integers(0, 60, 40)) + ".\n" for _ in range(60)]
    texts += [texts[i] + texts[i + 1][:90] + "\n" + texts[i + 2] for i in range(0, 50, 3)]
    config = Dedup(
        exact=True, lines=True, sentences=True, substring=True, min_words=12, overlap=True, max_cut_share=0.7
    )
    parts = [bench.sign(some, config) for some in (texts[:50], texts[50:])]

    def run(store, stop):
        done = 0

        def map(function, tasks):
            nonlocal done
            results = []
            for task in tasks:
                if done == stop:
                    raise InterruptedError
                results += resuming(store)(function, [task])
                done += 1
            return results

        deduplicate(parts, config, store, map, memory_bytes=1 << 17)
        return done

    full_store = open_store(tmp_path / "whole")
    tasks, expected = run(full_store, -1), contents(full_store)
    assert tasks > 20
    for stop in range(1, tasks, 7):
        store = open_store(tmp_path / str(stop))
        with pytest.raises(InterruptedError):
            run(store, stop)
        run(store, -1)
        assert contents(store) == expected


def test_documents_of_which_most_is_cut_are_dropped(bench: Bench):
    lines = [f"This is line number {i} of the text that is copied." for i in range(10)]
    own = "A line of its own that no one has written before."
    texts = ["\n".join(lines), "\n".join([*lines[:9], own]), "\n".join([*lines[:8], *([own.upper()] * 3)]), "short"]
    config = Dedup(lines=True, exact=True, max_cut_share=0.6)
    part = bench.sign(texts, config)
    result = bench.deduplicate([part], config)
    assert drop_codes(result) == [0, 2, 2, 0]
    assert result.dropped == (0, 2) and config.reasons == ("exact_duplicate", "mostly_duplicate")
    loose = Dedup(lines=True, exact=True, max_cut_share=0.95)
    assert bench.deduplicate([bench.sign(texts, loose)], loose).dropped == (0, 0)


@pytest.mark.parametrize(
    "url, expected",
    [
        ("https://www.Example.org/A/b/?utm_source=x&b=2&a=1#top", "example.org/A/b?a=1&b=2"),
        ("http://example.org:80/A/b?a=1&fbclid=z&b=2", "example.org/A/b?a=1&b=2"),
        ("http://example.org:8080/", "example.org:8080"),
        ("http://[broken/", "http://[broken/"),
        ("", ""),
    ],
)
def test_addresses(url, expected):
    assert normalise_url(url) == expected


def test_equal_addresses_and_the_best_copy(bench: Bench):
    urls = ["http://a.org/x", "https://www.a.org/x/", "http://a.org/x#y", "", "", "http://b.org/x"]
    scores = pa.array([1.0, math.nan, 3.0, 5.0, 5.0, None], pa.float64())
    columns = {"url": pa.array(urls, pa.large_string()), "edu": scores}
    texts = [f"text {i}" for i in range(6)]
    drops = {}
    for keep, score in (("first", ""), ("best", "edu")):
        config = Dedup(url=True, keep=keep, score=score)
        drops[keep] = bench.deduplicate([bench.sign(texts, config, **columns)], config).drop[0].load().tolist()
    assert drops == {"first": [0, 1, 1, 0, 0, 0], "best": [1, 1, 0, 0, 0, 0]}
    with pytest.raises(PrepareError, match=r"dedup.score: expected a column of numbers 'other', got columns text"):
        bench.sign(texts, Dedup(exact=True, keep="best", score="other"))
