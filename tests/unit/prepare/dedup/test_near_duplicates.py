"""MinHash finds what theory says: the S-curve, planted pairs, and nothing among strangers."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from forebay.prepare.dedup.methods import Dedup, MinHash
from forebay.prepare.documents import text_column
from support.dedup_bench import Bench, similar_pairs
from support.shared_data import shared_data


def share_that_meets(texts: Any, config: Dedup) -> float:
    """The share of the pairs (rows 2i, 2i + 1) that have an equal band."""
    signatures = config.methods[0].sign_texts(texts)
    return float((signatures[::2] == signatures[1::2]).any(axis=1).mean())


@pytest.mark.parametrize("bands, rows", [(14, 8), (16, 7)])
def test_the_curve_is_that_of_theory(bands, rows):
    n = 1000
    for seed, expected in enumerate((0.5, 0.8, 0.9)):
        texts, jaccard = similar_pairs(np.random.default_rng(seed), np.full(n, expected), 108)
        p = 1 - (1 - float(jaccard[0]) ** rows) ** bands
        error = 4 * (p * (1 - p) / n) ** 0.5 + 1 / n
        share = share_that_meets(texts, Dedup(minhash=True, bands=bands, rows=rows))
        assert share == pytest.approx(p, abs=error)
        assert expected != 0.8 or share_that_meets(texts, Dedup(minhash=True)) >= 0.95


@pytest.mark.parametrize("count", ["100", "1000"])
def test_articles_with_known_pairs(bench: Bench, count):
    folder = shared_data("neardup")
    lines = [line.split(" ", 1) for line in (folder / f"articles_{count}.train").read_text().splitlines()]
    truth = [line.split() for line in (folder / f"articles_{count}.truth").read_text().splitlines()]
    config = Dedup(minhash=True)
    result = bench.deduplicate([bench.sign([text for _, text in lines], config)], config)
    dropped = {name for (name, _), code in zip(lines, result.drop[0].load()) if code}
    # The truth is pairs: of each the first in the corpus stays.
    order = {name: index for index, (name, _) in enumerate(lines)}
    assert dropped == {max(pair, key=order.__getitem__) for pair in truth}


def test_what_words_are():
    def signature(text):
        data = np.frombuffer(text.encode(), np.uint8)
        result = MinHash().sign_texts(text_column(np.array([0, len(data)], np.int64), data))[0].tolist()
        return result

    plain = signature("the cafe was closed on monday 12 may")
    assert signature("  The CAFÉ -- was closed; on Monday,\n\n12 May!") == plain
    assert signature("The cafe\u0301 was clo\u00adsed on Monday １２ May") == plain
    assert signature("the cafe was closed on monday 13 may") != plain
    assert signature("天地玄黄宇宙洪荒") == signature("天地玄黄，宇宙洪荒。") != signature("天地玄黄宇宙洪")
    assert signature("Ελλάδα") == signature("ελλαδα")
    assert signature("one two") != signature("one") and signature("one two") != signature("two one")
    for empty in ("", "   ", "...!?", "\n\t\x00", "😀 😀"):
        assert not any(signature(empty))


def test_damaged_text_is_signed():
    # Arrow does not check UTF-8; what claims to be longer than its text must not be read past its end.
    data = np.frombuffer(b"ab\xf0\x9fcd \xff\xfe\x80 ef\xe2", np.uint8)
    offsets = np.array([0, 4, len(data)], np.int64)
    assert MinHash().sign_texts(text_column(offsets, data)).all()


def test_a_long_text_is_signed_in_blocks_like_any_other():
    words = [f"w{i}" for i in range(30_000)]
    config = Dedup(minhash=True, bands=128, rows=1)
    pair = ["\n".join(words), " ".join(words[15_000:] + words[:15_000])]
    signatures = config.methods[0].sign_texts(as_column(pair))
    # All shingles but 8 of 30 000 are shared, wherever the blocks are cut.
    assert (signatures[0] == signatures[1]).mean() > 0.97


def as_column(texts: list[str]) -> Any:
    return pa.array(texts, pa.large_string())
