"""Training a Kneser-Ney model: by hand, by its laws, by KenLM."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError, UsageError
from forebay.prepare.filters.perplexity import Perplexity
from forebay.prepare.kneser_ney import train_lm
from support.batches import to_batch

Model = dict[tuple[str, ...], tuple[float, float]]


def read_arpa(path: Path) -> Model:
    """N-gram -> log10 of probability and of backoff."""
    model = {}
    for line in path.read_text("utf-8").splitlines():
        parts = line.split("\t")
        if len(parts) > 1:
            model[tuple(parts[1].split(" "))] = (float(parts[0]), float(parts[2]) if len(parts) > 2 else 0.0)
    return model


def log_probability(model: Model, context: tuple[str, ...], word: str) -> float:
    gram = (*context, word)
    if gram in model:
        return model[gram][0]
    if not context:
        return model[("<unk>",)][0]
    return model.get(context, (0.0, 0.0))[1] + log_probability(model, context[1:], word)


def score(model: Model, order: int, line: str) -> float:
    registered = [word if (word,) in model else "<unk>" for word in line.split()]
    words = ["<s>", *registered, "</s>"]
    return sum(log_probability(model, tuple(words[max(0, i - order + 1) : i]), words[i]) for i in range(1, len(words)))


CORPUS = ["the cat sat on the mat .\nthe cat ran .", "a dog sat on a mat .\n\na dog ran !", "the dog and the cat"]


def trained(tmp_path: Path, texts: Iterable[str], **options: Any) -> Path:
    train_lm(texts, tmp_path / "m.arpa", **options)
    return tmp_path / "m.arpa"


def test_probabilities_by_hand(tmp_path):
    """ "a b a c . a b": counts of counts give no discounts, so that they are 0.5, 1 and 1.5.

    Bigrams: <s>a ab(2) ba ac c. .a b</s>. Left neighbours: a 3 (<s> b .), b 1, c 1, . 1, </s> 1; 7 in all.
    """
    model = read_arpa(trained(tmp_path, ["a b a c . a b"], order=2))
    spare = (1.5 + 4 * 0.5) / 7
    words = 6  # a b c . </s> <unk>
    p = {"a": (3 - 1.5) / 7 + spare / words, "b": (1 - 0.5) / 7 + spare / words, "<unk>": spare / words}
    for word, expected in p.items():
        assert 10 ** model[(word,)][0] == pytest.approx(expected, rel=1e-6)
    # after a: b twice, c once
    assert 10 ** model[("a",)][1] == pytest.approx((1 + 0.5) / 3, rel=1e-6)
    assert 10 ** model[("a", "b")][0] == pytest.approx((2 - 1) / 3 + 0.5 * p["b"], rel=1e-6)
    assert 10 ** model[("<s>", "a")][0] == pytest.approx((1 - 0.5) / 1 + 0.5 * p["a"], rel=1e-6)
    assert model[("<s>",)][0] == -99 and ("</s>", "a") not in model


WORDS = st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12).map(" ".join), min_size=1, max_size=20)


@given(WORDS, st.integers(2, 4), st.randoms())
def test_probabilities_sum_to_one(
    tmp_path_factory,
    texts,
    order,
    chance,
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.prepare.kneser_ney.CHUNK", 16)
        path = trained(tmp_path_factory.mktemp("lm"), texts, order=order)
    model = read_arpa(path)
    words = [gram[0] for gram in model if len(gram) == 1 and gram[0] != "<s>"]
    for _ in range(5):
        context = tuple(chance.choices([*"abcdez", "<s>"], k=chance.randrange(order)))
        assert sum(10 ** log_probability(model, context, word) for word in words) == pytest.approx(1, abs=1e-5)


def test_limits_of_vocabulary(tmp_path):
    summary = train_lm(CORPUS * 2, tmp_path / "m.arpa", order=3, vocab_limit=4)
    model = read_arpa(tmp_path / "m.arpa")
    assert {gram[0] for gram in model if len(gram) == 1} == {"<unk>", "<s>", "</s>", "the", ".", "a", "cat"}
    assert summary.vocabulary == 4 and summary.lines == 10 and 0.3 < summary.unknown_share < 0.7
    assert summary.ngrams == tuple(sum(len(gram) == n for gram in model) for n in (1, 2, 3))


def test_refusals(tmp_path):
    out = tmp_path / "m.arpa"
    for texts in ([], [""], [" \n\t"]):
        with pytest.raises(PrepareError, match="no word"):
            train_lm(texts, out)
    assert not out.exists() and not list(tmp_path.iterdir())


def perplexities(stage: Perplexity, texts: list[str]) -> tuple[list[float], list[int]]:
    verdict = stage.apply(to_batch(texts))
    return verdict.batch.column("perplexity").to_pylist(), verdict.drop.tolist()


def test_prose_ranks_under_noise(tmp_path):
    pytest.importorskip("kenlm")
    path = trained(tmp_path, CORPUS)
    prose, noise = "The cat sat on the mat.", "Mat the on sat cat the ."
    (low, high, empty), drop = perplexities(Perplexity(model=str(path), max_perplexity=1e6), [prose, noise, ""])
    assert 1 < low < high < empty == math.inf and drop == [-1, -1, 1]
    _, drop = perplexities(Perplexity(str(path), min_perplexity=low + 0.01, max_perplexity=high), [prose, noise, ""])
    assert drop == [0, -1, 1]
    (exact,), drop = perplexities(Perplexity(str(path), low, low), [prose])
    assert exact == low and drop == [-1]
    line = "the cat sat on the mat ."
    assert low == pytest.approx(10 ** (-score(read_arpa(path), 3, line) / 8), rel=1e-4)


def test_models_that_are_none(tmp_path):
    pytest.importorskip("kenlm")
    (tmp_path / "bad.arpa").write_text("not a model")
    for name in ("bad.arpa", "missing.arpa"):
        with pytest.raises(UsageError, match=r"^model: expected a KenLM model"):
            perplexities(Perplexity(model=str(tmp_path / name)), ["text"])
