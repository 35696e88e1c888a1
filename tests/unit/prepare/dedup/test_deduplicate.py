"""Decisions over a corpus: against plain references, for any cut, interrupted, incremental, hostile and large."""

import re
from collections import Counter
from collections.abc import Callable

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
from support.dedup_bench import Bench, drop_codes, make_chains
from support.stores import contents


def column(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def reference_clusters(texts: list[str], config: Dedup) -> list[set[int]]:
    """Components through equal texts and equal bands, by repeated merging."""
    signatures = config.methods[-1].sign_texts(column(texts))
    keys = {}
    for index, row in enumerate(signatures.tolist()):
        for key in {hash_ for hash_ in row if hash_} | ({" ".join(texts[index].split())} - {""}):
            keys.setdefault(key, set()).add(index)
    clusters = []
    for group in keys.values():
        joined = group.union(*(c for c in clusters if c & group))
        clusters = [c for c in clusters if not c & group] + [joined]
    return [c for c in clusters if len(c) > 1]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), keep=st.sampled_from(["first", "longest"]), cut=st.integers(0, 60))
def test_clusters_and_who_stays(fresh: Callable[[], Bench], seed, keep, cut):
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
    """Lines cut out that stood in earlier documents, as often as there, of documents that stay."""
    seen = set()
    out = []
    for text, code in zip(texts, drop):
        retained, full, times = [], True, Counter[str]()
        for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
            words = " ".join(piece.split())
            times[words] += 1
            key = words, times[words]
            if code == 0 and len(words) >= min_value and key in seen:
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
def test_lines_are_cut(fresh: Callable[[], Bench], texts, cut, exact):
    bench = fresh()
    config = Dedup(exact=exact, lines=True, min_characters=2)
    pieces = [texts[:cut], texts[cut:]]
    result = bench.deduplicate([bench.sign(some, config) for some in pieces], config)
    assert bench.remaining(pieces, config, 1 << 16) == reference_cut(texts, drop_codes(result), 2)
    assert result.units_cut == {"lines cut": sum(int(cut.flags.load().sum()) for (cut,) in result.cut)}


def test_without_normalisation_blanks_count(bench: Bench):
    assert bench.codes(["a b", "a  b", "", "a b", ""], Dedup(exact=True, normalise="none")) == [0, 0, 0, 1, 0]


def test_cutting_other_texts_is_refused(bench: Bench):
    config = Dedup(lines=True, min_characters=1)
    result = bench.deduplicate([bench.sign(["a\nb", "a"], config)], config)
    with pytest.raises(PrepareError, match="have changed since"):
        Cutter(result.cut[0]).cut(column(["a\nb\nc\nd\ne"]), 0)


def test_the_same_files_for_any_parts_memory_and_scale(bench: Bench, tmp_path):
    config, corpus = Dedup(exact=True, minhash=True), make_chains()
    full = bench.deduplicate([bench.sign(corpus, config)], config)
    assert min(full.dropped) > 20
    parts = [bench.sign(corpus[i : i + 171], config) for i in range(0, len(corpus), 171)]
    cut = bench.deduplicate(parts, config, 1 << 16)
    assert drop_codes(cut) == drop_codes(full)

    def backwards_at_scale_2(run, tasks):
        return [run(task, 2) for task in reversed(tasks)][::-1]

    store = open_store(tmp_path / "again")
    again = deduplicate(parts, config, store, backwards_at_scale_2, memory_bytes=1 << 16)
    assert contents(store) == contents(cut.drop[0].store) and len(contents(store)) == 2
    assert drop_codes(again) == drop_codes(full)
