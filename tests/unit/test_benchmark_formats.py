"""The comparison of formats: each holds the same documents, and those that cannot be measured say so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.formats import figures as formats_bench
from benchmarks.formats.__main__ import main
from benchmarks.formats.figures import FORMATS, bench_formats, make_corpus, table


def test_a_corpus_is_a_function_of_its_size_and_seed() -> None:
    item, other = make_corpus(50_000), make_corpus(50_000)
    assert item.texts == other.texts and np.array_equal(item.tokens, other.tokens)
    assert 30_000 < item.num_bytes < 80_000 and int(item.document_ends[-1]) == len(item.tokens)
    assert [len(text.split()) for text in item.texts] == np.diff(item.document_ends, prepend=np.uint64(0)).tolist()


@pytest.mark.parametrize("kind", formats_bench._KINDS, ids=lambda k: k.name)
def test_a_document_at_random_is_the_same_in_each_format(kind, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(formats_bench, "_SLICE_TOKENS", 3000)
    corpus = make_corpus(100_000)
    kind.write(corpus, tmp_path)
    get = kind.index(tmp_path)
    stops = [0, *corpus.document_ends.tolist()]
    for number in (0, 1, len(corpus.texts) // 2, len(corpus.texts) - 1):
        expected = (
            corpus.texts[number] if kind.gives == "text" else corpus.tokens[stops[number] : stops[number + 1]].tolist()
        )
        result = get(number)
        assert (result.tolist() if kind.gives == "tokens" else result) == expected


def test_all_are_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench_formats(tmp_path, 100_000, samples=20, rounds=1)
    assert [item.name for item in figures] == list(FORMATS)
    for item in figures:
        assert item.file_bytes and item.parse_mb_per_s and item.random_p50_s and item.random_p99_s >= item.random_p50_s
    assert table(figures, 100_000).count("\n") == len(FORMATS)
    assert main(["--bytes", "50kB", "--format", "slices", "--rounds", "1", "--json"]) == 0
    assert [item["name"] for item in json.loads(capsys.readouterr().out)] == ["slices"]
    assert main(["--format", "stone"]) == 2
