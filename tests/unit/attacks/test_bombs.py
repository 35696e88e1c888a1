"""Many small files that each unpack to what one file may: the run has one budget, whatever the order of its tasks."""

import json
from itertools import permutations
from pathlib import Path

import pytest
import zstandard

from forebay.errors import PrepareError
from forebay.formats import inputs
from forebay.formats.inputs import CorpusBudget, InputFile, InputSplit, ReadOptions
from forebay.prepare.driver import prepare_dataset

NUM = 5
FLOOR = 1 << 20


def make_corpus(folder: Path, num_bytes: int) -> Path:
    line = json.dumps({"text": "good text here, said the fox to the dog. " * 50}) + "\n"
    folder.mkdir()
    for i in range(NUM):
        data = line.encode() * (num_bytes // len(line) + i)
        (folder / f"{i}.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(data))
    return folder


@pytest.mark.parametrize("to", ["dataset", "parquet", "report"])
def test_files_that_are_no_bomb_alone_are_one_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setattr(inputs, "MIN_UNPACKED_BYTES", FLOOR)
    corpus = make_corpus(tmp_path / "in", FLOOR * 3 // 4)
    alone = prepare_dataset(corpus / "3.jsonl.zst", tmp_path / "one", tokenizer="bytes", workers=1, to=to)
    assert alone.documents_out > 300 and not alone.skipped
    for _ in range(2):  # Finished work counts, too.
        with pytest.raises(PrepareError, match=r"expected at most 1,048,576 bytes of text out of .* grew most"):
            prepare_dataset(corpus, tmp_path / "out", tokenizer="bytes", workers=1, to=to)
    read = {"read": {"max_unpacked_ratio": 50_000}}
    trusted = prepare_dataset(corpus, tmp_path / "out2", tokenizer="bytes", workers=1, to=to, settings=read)
    assert trusted.documents_out > 4 * alone.documents_out


def split_of(path: str, size: int) -> InputSplit:
    return InputSplit((InputFile(path, path, "jsonl", "zst", size, ""),), bytes=size)


def spend(splits: list[InputSplit], texts: list[int]) -> bool:
    budget = CorpusBudget(splits, ReadOptions())
    try:
        for split, num_bytes in zip(splits, texts):
            budget.spend(split, num_bytes)
    except PrepareError as error:
        assert "; bomb grew most" in str(error)
        return False
    return True


def test_the_verdict_is_the_same_in_any_order() -> None:
    names, sizes = ["a", "b", "bomb", "c"], [400_000, 100, 1000, 1_000_000]
    limit = 200 * sum(sizes)
    for over in (False, True):
        texts = [1_000_000, 300, limit - 3_000_300 + over, 2_000_000]
        for order in permutations(range(4)):
            splits = [split_of(names[i], sizes[i]) for i in order]
            assert spend(splits, [texts[i] for i in order]) is not over


def test_a_thousand_files_of_60_kb_are_no_terabyte() -> None:
    splits = [split_of(f"{i}", 60_000) for i in range(1000)]
    budget, total = CorpusBudget(splits, ReadOptions()), 0
    with pytest.raises(PrepareError):
        for split in splits:
            budget.spend(split, 256 << 20)
            total += 256 << 20
    assert total <= 200 * 60_000_000


def test_a_source_without_a_size_has_no_budget() -> None:
    hub = InputSplit((InputFile("hf://datasets/x", "x", "hub", "", 0, ""),))
    CorpusBudget([hub], ReadOptions()).spend(hub, 1 << 40)
