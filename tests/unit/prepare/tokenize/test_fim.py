"""Fill in the middle: the parts put together again are the document; choices depend on the text and the seed alone."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from forebay.errors import UsageError
from forebay.prepare.tokenize.renderings import FillInTheMiddle
from support.preparing import prepare
from support.token_parts import coder
from support.trained_tokenizer import trained_bpe

NAMES = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    text = "def main(argument):\n    return argument + 1\n"
    return trained_bpe(tmp_path_factory.mktemp("fim") / "tokenizer.json", ["<eos>", *NAMES], text, 400)


def encode(path: Path, folder: Path, texts: list[str], **fields: object) -> tuple[list[list[int]], dict[str, int]]:
    spec = coder(folder, str(path), eos="<eos>")
    stage = FillInTheMiddle(**fields)
    tokens, lengths, counts = stage.encode(spec, pa.array(texts, pa.large_string()))
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])], counts


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6), st.sampled_from([0.0, 0.5, 1.0]))
def test_parts_make_the_document(tokenizer, tmp_path_factory, texts, spm_rate):
    documents, counts = encode(tokenizer, tmp_path_factory.mktemp("x"), texts, rate=1, spm_rate=spm_rate)
    model = Tokenizer.from_file(str(tokenizer))
    prefix, suffix, middle = NAMES
    for text, ids in zip(texts, documents):
        expected = f"{text}<eos>" if text else ""
        if len(text) >= 3:
            cut = FillInTheMiddle(rate=1, spm_rate=spm_rate).cuts(text)
            before, between, after = text[: cut[0]], text[cut[0] : cut[1]], text[cut[1] :]
            expected = f"{prefix}{before}{suffix}{after}{middle}{between}<eos>"
            if cut[2]:
                expected = f"{prefix}{suffix}{after}{middle}{before}{between}<eos>"
        assert model.decode(ids, skip_special_tokens=False) == expected
    assert counts["fill_in_the_middle"] == sum(len(text) >= 3 for text in texts)


def test_choices_follow_the_rates():
    texts = [f"document number {i}" for i in range(100)]
    for spm_rate in (0, 1):
        assert {FillInTheMiddle(rate=1, spm_rate=spm_rate).cuts(text)[2] for text in texts} == {bool(spm_rate)}
    cuts = [[FillInTheMiddle().cuts(text) for text in texts] for _ in range(2)]
    assert cuts[0] == cuts[1] and 0 < cuts[0].count(None) < 100


def test_a_share_of_a_dataset_is_cut(tokenizer, tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"def function_{i}(argument):\n    return argument + {i}\n")
    files = sorted(tmp_path.glob("*.txt"))
    table = {"tokenize": {"tokenizer": str(tokenizer), "eos": "<eos>"}}
    results = [
        prepare(files, tmp_path / str(rate), settings={**table, "fim": {"rate": rate}}, tokenizer=None)
        for rate in (0.5, 0)
    ]
    stage = next(stage for stage in results[0].report["funnel"] if stage["stage"] == "tokenize")
    assert 8 < stage["changed"]["fill_in_the_middle"] < 32
    assert results[1].tokens < results[0].tokens


def test_tokens_that_are_missing(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    for name, spec in (("bytes", "bytes"), ("other", str(tokenizer))):
        table = {"tokenize": {"tokenizer": spec}, "fim": {"prefix": "<none>"}}
        with pytest.raises(UsageError, match=r"fim\.prefix: expected a token of the tokenizer, got '<none>'"):
            prepare(tmp_path / "a.txt", tmp_path / name, settings=table, tokenizer=None)
    with pytest.raises(UsageError, match=r"fim: expected a dataset of tokens, got \[rows\]"):
        table = {"tokenize": {"tokenizer": str(tokenizer)}, "fim": {}, "rows": {}}
        prepare(tmp_path / "a.txt", tmp_path / "rows", settings=table, tokenizer=None)
