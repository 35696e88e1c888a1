"""Fill in the middle: the parts put together again are the document; choices depend on the text and the seed alone."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from forebay.errors import UsageError
from forebay.prepare.tokenize.fim import FillInTheMiddle
from support.preparing import prepare
from support.token_parts import coder
from support.trained_tokenizer import trained_bpe

NAMES = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "def main(argument):\n    return argument + 1\n"
    return trained_bpe(tmp_path_factory.mktemp("fim") / "tokenizer.json", ["<eos>", *NAMES], text, 400)


def encode(path: Path, folder: Path, texts: list[str], **fields: object) -> tuple[list[list[int]], dict[str, int]]:
    spec = coder(folder, str(path), eos="<eos>")
    stage = FillInTheMiddle(**fields)  # type: ignore[arg-type]
    tokens, lengths, counts = stage.encode(spec, pa.array(texts, pa.large_string()))
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])], counts


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3))
def test_parts_make_the_document(  # type: ignore[no-untyped-def]
    tokenizer: Path, tmp_path_factory, texts: list[str], spm_rate: float, seed: int
) -> None:
    documents, counts = encode(tokenizer, tmp_path_factory.mktemp("x"), texts, rate=1, spm_rate=spm_rate, seed=seed)
    model = Tokenizer.from_file(str(tokenizer))
    eos, *sentinels = [model.token_to_id(name) for name in ("<eos>", *NAMES)]
    for text, ids in zip(texts, documents):
        if not text:
            assert ids == []
            continue
        assert ids[-1] == eos and eos not in ids[:-1]
        if len(text) < 3:
            assert model.decode(ids[:-1]) == text
            continue
        prefix, suffix, middle = (ids.index(token) for token in sentinels)
        assert sum(ids.count(token) for token in sentinels) == 3 and prefix == 0
        if suffix == 1 and FillInTheMiddle(rate=1, spm_rate=spm_rate, seed=seed).cuts(text)[2]:  # type: ignore[index]
            after, rest = ids[2:middle], ids[middle + 1 : -1]
            assert model.decode([*rest, *after], skip_special_tokens=False) == text
        else:
            parts = (ids[1:suffix], ids[middle + 1 : -1], ids[suffix + 1 : middle])
            assert model.decode([i for part in parts for i in part], skip_special_tokens=False) == text
    assert counts["fill_in_the_middle"] == sum(len(text) >= 3 for text in texts)


def test_rates(tokenizer: Path) -> None:
    stage = FillInTheMiddle()
    cuts = [stage.cuts(f"document number {i}") for i in range(1000)]
    applied = [cut for cut in cuts if cut]
    assert 0.43 < len(applied) / 1000 < 0.57 and 0.42 < sum(cut[2] for cut in applied) / len(applied) < 0.58
    assert [stage.cuts(f"document number {i}") for i in range(1000)] == cuts
    assert [FillInTheMiddle(seed=1).cuts(f"document number {i}") for i in range(1000)] != cuts
    assert not any(FillInTheMiddle(rate=0).cuts(f"text {i}") for i in range(99))


def test_a_share_of_a_dataset_is_cut(tokenizer: Path, tmp_path: Path) -> None:
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


def test_tokens_that_are_missing(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    for name, spec in (("bytes", "bytes"), ("other", str(tokenizer))):
        table = {"tokenize": {"tokenizer": spec}, "fim": {"prefix": "<none>"}}
        with pytest.raises(UsageError, match=r"fim\.prefix: expected a token of the tokenizer, got '<none>'"):
            prepare(tmp_path / "a.txt", tmp_path / name, settings=table, tokenizer=None)
    with pytest.raises(UsageError, match=r"fim: expected a dataset of tokens, got \[rows\]"):
        table = {"tokenize": {"tokenizer": str(tokenizer)}, "fim": {}, "rows": {}}
        prepare(tmp_path / "a.txt", tmp_path / "rows", settings=table, tokenizer=None)
