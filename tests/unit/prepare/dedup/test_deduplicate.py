"""Decisions over a corpus: against plain references, for any cut, interrupted, incremental, hostile and large."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.dedup.cutting import Cutter
from forebay.prepare.dedup.deduplicate import deduplicate
from forebay.prepare.dedup.methods import Dedup
from forebay.storage.store import open_store
from support.dedup_bench import Bench, drop_codes, make_chains, serially
from support.stores import contents

WORDS = st.sampled_from(["a", "b", "a b", "a  b", "A b", "c\n", "\t", "é", "e\u0301", "}", ""])
TEXTS = st.lists(st.lists(WORDS, max_size=4).map(" ".join), max_size=40)


def column(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def plain(text: str, normalise: str) -> str:
    """The reference: what `none` and `space` compare."""
    return text if normalise == "none" else " ".join(text.split())


@settings(max_examples=15, deadline=None)
@given(texts=TEXTS, normalise=st.sampled_from(["none", "space"]), cut=st.integers(0, 40))
def test_exact_finds_all_and_nothing_else(
    fresh: Callable[[], Bench], texts: list[str], normalise: str, cut: int
) -> None:
    bench = fresh()
    config = Dedup(exact=True, normalise=normalise)
    parts = [bench.sign(some, config) for some in (texts[:cut], texts[cut:])]
    seen: set[str] = set()
    expected = []
    for text in texts:
        key = plain(text, normalise)
        expected.append(int(key != "" and key in seen))
        seen.add(key)
    assert drop_codes(bench.deduplicate(parts, config, 1 << 16)) == expected


def test_planted_copies_among_many_runs_and_ranges(bench: Bench) -> None:
    rng = np.random.default_rng(2)
    of = np.where(rng.random(5_000) < 0.3, rng.integers(0, 5_000, 5_000), np.arange(5_000))
    config = Dedup(exact=True)
    parts = [bench.sign([f"text {i}" for i in some], config) for some in np.array_split(of, 7)]
    first = {int(value): index for index, value in reversed(list(enumerate(of.tolist())))}
    expected = [int(first[value] != index) for index, value in enumerate(of.tolist())]
    assert drop_codes(bench.deduplicate(parts, config, 1 << 16)) == expected
    assert drop_codes(bench.deduplicate(parts, config)) == expected


def reference_clusters(texts: list[str], config: Dedup) -> list[set[int]]:
    """Components through equal texts and equal bands, by repeated merging."""
    signatures = config.methods[-1].sign_texts(column(texts))
    keys: dict[Any, set[int]] = {}
    for index, row in enumerate(signatures.tolist()):
        for key in {hash_ for hash_ in row if hash_} | ({plain(texts[index], "space")} - {""}):
            keys.setdefault(key, set()).add(index)
    clusters: list[set[int]] = []
    for group in keys.values():
        joined = group.union(*(c for c in clusters if c & group))
        clusters = [c for c in clusters if not c & group] + [joined]
    return [c for c in clusters if len(c) > 1]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), keep=st.sampled_from(["first", "longest"]), cut=st.integers(0, 60))
def test_clusters_and_who_stays(fresh: Callable[[], Bench], seed: int, keep: str, cut: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(["x", "y", "z"], rng.integers(0, 9))) + " " * int(rng.integers(3)) for _ in range(60)]
    config = Dedup(exact=True, minhash=True, bands=6, rows=2, ngram=2, keep=keep, normalise="space")
    bench = fresh()
    parts = [bench.sign(texts[a:b], config) for a, b in ((0, cut), (cut, 60))]
    result = bench.deduplicate(parts, config, 1 << 16)
    worth = {
        "first": lambda i: (0, -i),
        "longest": lambda i: (len(texts[i]), -i),
    }[keep]
    codes = [0] * 60
    clusters = reference_clusters(texts, config)
    for cluster in clusters:
        retained = max(cluster, key=worth)
        for member in cluster - {retained}:
            equals = [i for i in cluster if texts[i].split() == texts[member].split()]
            codes[member] = 1 if max(equals, key=worth) != member else 2
    assert drop_codes(result) == codes
    assert result.dropped == (codes.count(1), codes.count(2))


def reference_cut(texts: list[str], drop: list[int], min_value: int) -> list[str]:
    """Lines that stood before, in documents that stay, cut out."""
    seen: set[str] = set()
    out = []
    for text, code in zip(texts, drop):
        retained, full = [], True
        for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
            key = " ".join(piece.split())
            if code == 0 and len(key) >= min_value and key in seen:
                full = False
                continue
            if code == 0:
                seen.add(key)
            retained.append(piece)
        remaining = "".join(retained)
        out.append(remaining if full else remaining.rstrip("\n") if remaining.strip() else "")
    return out


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["same line", "other  line", "é line", "}", "", " ", "x\t"]), max_size=7).map(
            "\n".join
        ),
        max_size=12,
    ),
    cut=st.integers(0, 12),
    exact=st.booleans(),
)
def test_lines_are_cut(fresh: Callable[[], Bench], texts: list[str], cut: int, exact: bool) -> None:
    bench = fresh()
    config = Dedup(exact=exact, lines=True, min_characters=2)
    pieces = [texts[:cut], texts[cut:]]
    result = bench.deduplicate([bench.sign(some, config) for some in pieces], config, 1 << 16)
    actual: list[str] = []
    for some, flags in zip(pieces, result.cut):
        cutter = Cutter(flags)
        for start in range(0, len(some), 3):
            actual += cutter.cut(column(some).slice(start % max(len(some), 1), 3), start).to_pylist()
    codes = drop_codes(result)
    expected = reference_cut(texts, codes, 2)
    assert actual == expected
    assert result.units_cut == {"lines cut": sum(int(cut.flags.load().sum()) for (cut,) in result.cut)}


def test_cutting_other_texts_is_refused(bench: Bench) -> None:
    config = Dedup(lines=True, min_characters=1)
    result = bench.deduplicate([bench.sign(["a\nb", "a"], config)], config)
    with pytest.raises(PrepareError, match="have changed since"):
        Cutter(result.cut[0]).cut(column(["a\nb\nc\nd\ne"]), 0)


def test_the_same_files_for_any_parts_memory_and_scale(bench: Bench, tmp_path: Path) -> None:
    config, corpus = Dedup(exact=True, minhash=True), make_chains()
    full = bench.deduplicate([bench.sign(corpus, config)], config)
    assert min(full.dropped) > 20
    parts = [bench.sign(corpus[i : i + 171], config) for i in range(0, len(corpus), 171)]
    cut = bench.deduplicate(parts, config, 1 << 16)
    assert drop_codes(cut) == drop_codes(full)

    def backwards_at_scale_2(run: Any, tasks: Any) -> list[Any]:
        return [run(task, 2) for task in reversed(tasks)][::-1]

    store = open_store(tmp_path / "again")
    again = deduplicate(parts, config, store, backwards_at_scale_2, memory_bytes=1 << 16)
    assert contents(store) == contents(cut.drop[0].store) and len(contents(store)) == 2
    assert drop_codes(again) == drop_codes(full)


def test_a_finished_result_is_taken_up(bench: Bench, tmp_path: Path) -> None:
    config = Dedup(exact=True, lines=True)
    part = bench.sign(make_chains(), config)
    steps: list[tuple[str, int, int]] = []
    store = open_store(tmp_path / "out")
    first = deduplicate([part], config, store, serially, lambda *s: steps.append(s))

    def never(run: Any, tasks: Any) -> list[Any]:
        raise AssertionError("nothing is left to do")

    assert deduplicate([part], config, store, never) == first
    assert steps[-1][1] == steps[-1][2] == len(steps) - 1


def test_ten_thousand_copies(bench: Bench) -> None:
    config = Dedup(exact=True, minhash=True, lines=True)
    text = "one text that stands again and again and again in the corpus, as a footer would\n"
    part = bench.sign([text] * 10_000, config, batch=5_000)
    for memory_bytes in (1 << 20, 64 << 20):
        assert bench.deduplicate([part], config, memory_bytes).dropped == (9_999, 0)


@pytest.mark.parametrize("kind", ["substring", "overlap"])
def test_merges_have_equal_shares_of_keys_that_are_chosen_by_their_size(bench: Bench, kind: str) -> None:
    """Anchors are the words of the smallest hashes: one merge would have all of them."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in row) for row in rng.integers(0, 1 << 30, (200, 150)).tolist()]
    config = Dedup(substring=True) if kind == "substring" else Dedup(overlap=True, overlap_sample=8)
    store, merges = open_store(bench.folder / "shares"), []

    def map(run: Any, tasks: Any) -> list[Any]:
        merges.extend(task for task in tasks if hasattr(task, "runs"))
        return [run(task, 0) for task in tasks]

    parts = [bench.sign(texts[:100], config), bench.sign(texts[100:], config)]
    deduplicate(parts, config, store, map, memory_bytes=5_000, keep_used=True)
    first = merges[0]
    assert first.num_ranges > 4
    starts = [store.read_array(f"{first.stem}-{run}.starts", "<u8") for run in range(first.runs)]
    shares = np.sum([np.diff(edges.astype(int)) for edges in starts], axis=0)
    assert shares.sum() > 1000 and shares.max() < 2 * shares.mean()
