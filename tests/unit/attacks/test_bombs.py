"""Many small files that each unpack to what one file may: the run has one budget, whatever the order of its tasks."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import zstandard

from forebay.convert import convert
from forebay.errors import CorruptInputError, DatasetError, PrepareError
from forebay.formats import inputs, sources
from forebay.formats.conversion import ConvertOptions
from forebay.formats.inputs import InputFile, InputSplit, OutputBudget, ReadOptions
from forebay.prepare.driver import prepare_dataset

NUM = 5
FLOOR = 1 << 20
FEW = ConvertOptions(max_unpacked_ratio=10)


def make_corpus(folder: Path, num_bytes: int) -> Path:
    line = json.dumps({"text": "good text here, said the fox to the dog. " * 50}) + "\n"
    folder.mkdir()
    for i in range(NUM):
        data = line.encode() * (num_bytes // len(line) + i)
        (folder / f"{i}.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(data))
    return folder


@pytest.mark.parametrize("to", ["dataset", "parquet", "report"])
def test_files_that_are_no_bomb_alone_are_one_together(tmp_path, monkeypatch, to):
    monkeypatch.setattr(inputs, "MIN_UNPACKED_BYTES", FLOOR)
    corpus = make_corpus(tmp_path / "in", FLOOR * 3 // 4)
    alone = prepare_dataset(corpus / "3.jsonl.zst", tmp_path / "one", tokenizer="bytes", workers=1, to=to)
    assert alone.documents_out > 300 and not alone.skipped
    for _ in range(2):  # Finished work counts, too.
        with pytest.raises(PrepareError, match=r"jsonl\.zst and the inputs before it: more text came out"):
            prepare_dataset(corpus, tmp_path / "out", tokenizer="bytes", workers=1, to=to)
    read = {"read": {"max_unpacked_ratio": 50_000}}
    trusted = prepare_dataset(corpus, tmp_path / "out2", tokenizer="bytes", workers=1, to=to, settings=read)
    assert trusted.documents_out > 4 * alone.documents_out


def test_a_conversion_has_one_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MIN_UNPACKED_BYTES", FLOOR)
    corpus = make_corpus(tmp_path / "in", FLOOR * 3 // 4)
    assert convert(corpus / "3.jsonl.zst", tmp_path / "one", "parquet", FEW).written.num_rows > 300
    with pytest.raises(DatasetError, match=r"expected at most 1,048,576 bytes of rows in all"):
        convert(corpus, tmp_path / "out", "parquet", FEW)
    assert (
        convert(corpus, tmp_path / "out", "parquet", ConvertOptions(max_unpacked_ratio=50_000)).written.num_rows > 999
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
@pytest.mark.parametrize("over", [False, True])
def test_the_verdict_is_the_same_in_any_order(order, over):
    sizes = [400_000, 100, 1000, 1_000_000]
    files = tuple(InputFile(f"{size}", f"{size}", "jsonl", "zst", size, "") for size in sizes)
    texts = [1_000_000, 300, 200 * sum(sizes) - 3_000_300 + over, 2_000_000]
    budget = OutputBudget(InputSplit(files), ReadOptions())
    with pytest.raises(CorruptInputError) if over else nullcontext():
        for index in order:
            budget.spend(texts[index])
