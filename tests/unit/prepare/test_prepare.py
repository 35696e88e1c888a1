"""Prepare's laws: every document once and whole, the same again, and a clear message for bad input."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import PrepareError, UsageError
from forebay.files import HOST
from forebay.formats import text as lines
from forebay.prepare.tasks import slicing
from support.preparing import prepare, read_lines, write_jsonl

TEXTS = [f"Document {i}: " + "grüße, 世界! \x00\r\n<|endoftext|> " * (i % 9) for i in range(300)]


def documents(dataset: Dataset) -> list[list[int]]:
    return [dataset.document(index).tokens.tolist() for index in range(len(dataset))]


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """Return a file of `TEXTS`, which is read in many pieces."""
    monkeypatch.setattr(lines, "SPLIT_BYTES", 4096)
    return write_jsonl(tmp_path / "a.jsonl", TEXTS)


def test_every_document_once_in_order(source, tmp_path):
    seen = []
    result = prepare(source, tmp_path / "d", slice_bytes=4096, on_progress=seen.append)
    dataset = open_dataset(tmp_path / "d")
    assert documents(dataset) == [[*text.encode(), 256] for text in TEXTS]
    assert dataset.verify().ok and not dataset.verify().extra
    assert result.to_json() == {
        "dataset": "d",
        "id": dataset.id,
        "documents_in": 300,
        "documents_out": 300,
        "tokens": dataset.num_tokens,
        "slices": dataset.num_slices,
        "dropped": {},
        "skipped": {},
        "failed": {"inputs": 0, "bytes": 0, "share": 0.0},
    }
    assert dataset.table.bytes.max() <= 4096 and dataset.num_slices > 20
    assert not (tmp_path / "d/.work").exists()
    for stage in ("text", "encode", "slice"):
        states = [state for state in seen if state.stage == stage]
        done = [state.done for state in states]
        assert done == sorted(done) and done[-1] == states[-1].total > 0


def test_rejects_are_located(source, tmp_path):
    written = source.read_bytes().splitlines(keepends=True)
    invalid = {
        120: b'{"text": 5}\n',
        250: b"\n",
        299: b"[" * 100_000,
    }
    for i, line in invalid.items():
        written[i] = line
    source.write_bytes(b"".join(written))
    ids = tmp_path / "ids"
    result = prepare(source, tmp_path / "d", write_ids=ids)
    # The blank line is no document.
    assert result.dropped == {"malformed": 2} and result.documents_in == 299
    rejects = read_lines(tmp_path / "d/rejects.jsonl")
    assert [r["where"] for r in rejects] == [f"{source}:{i + 1}" for i in invalid if i != 250]
    assert ids.read_text().split() == [f"{source}:{i + 1}" for i in range(300) if i not in invalid]


def test_ids_come_from_the_input(tmp_path):
    rows = ({"id": name, "text": text} for name, text in (("mine", "x"), ("empty", ""), (7, "y")))
    path, ids = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "ids"
    (tmp_path / "b.txt").write_text("text")
    result = prepare([path, tmp_path / "b.txt"], tmp_path / "d", write_ids=ids)
    assert ids.read_text().split() == ["mine", "7", str(tmp_path / "b.txt")] and result.dropped == {"empty": 1}


def test_tokenizer_without_eos_and_large_vocabulary(tmp_path):
    vocab = {f"w{i}": i for i in range(70_000)} | {"<unk>": 70_000}
    plain = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    plain |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    plain |= {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}}
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(plain))
    path = write_jsonl(tmp_path / "a.jsonl", ["w1 w69999", "  ", "w2"])
    dataset = prepare(path, tmp_path / "d", tokenizer=str(tmp_path / "t")).open()
    assert dataset.manifest.dtype == "U32" and dataset.manifest.eos_id is None
    assert documents(dataset) == [[1, 69_999], [2]] and dataset.manifest.lineage["counts"]["dropped"] == {"empty": 1}


def test_same_again_and_other_again(source, tmp_path):
    first = prepare(source, tmp_path / "d")
    killed = tmp_path / f"d/slices/.000000.safetensors.{HOST}.{2**22 + 1}.00000000.tmp"  # Above all ids of processes.
    killed.touch()
    again = prepare(source, tmp_path / "d")
    assert not killed.exists()
    assert not first.already_exists and again.already_exists and again.to_json() == first.to_json()
    for changes in ({"tokenizer": "train:300"}, {"slice_bytes": 8192}, {"name": "other"}):
        with pytest.raises(UsageError, match="holds dataset"):
            prepare(source, tmp_path / "d", **changes)
    write_jsonl(source, TEXTS[1:])
    with pytest.raises(UsageError, match="holds dataset"):
        prepare(source, tmp_path / "d")


def test_wrong_use(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(source.read_bytes())[:-20])
    (tmp_path / "bad.json").write_text("{}")
    strict = {"settings": {"max_error_rate": 0.0}}
    cases = [
        ("empty", {}, PrepareError, "got none"),
        ("empty.jsonl", {}, PrepareError, "got none"),
        ("cut.jsonl.gz", strict, PrepareError, "cut.jsonl.gz"),
        ("a.jsonl", {"tokenizer": str(tmp_path / "bad.json")}, PrepareError, "expected a tokenizer"),
        ("a.jsonl", {"slice_bytes": 10}, UsageError, "4096"),
    ]
    for name, changes, error, message in cases:
        with pytest.raises(error, match=message):
            prepare(tmp_path / name, tmp_path / "d", **changes)


def test_an_interrupt_ends_the_training_of_a_tokenizer(source, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.prepare.run_tokenizer.sample_texts", lambda *_: itertools.repeat("a text"))
    monkeypatch.setattr("forebay.prepare.progress.WRITE_S", 0.0)

    def interrupt(progress):
        if progress.stage == "tokenizer" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "d", tokenizer="train:300", on_progress=interrupt)


def test_full_disk(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(numbers.pop(), "No space left on device")

    messages, numbers = [], [27, 28]
    with monkeypatch.context() as patch:
        patch.setattr(slicing, "write_token_slice", full)
        for words in ("no space left", r"Raise the limit \(ulimit -f\)"):
            with pytest.raises(PrepareError, match=words):
                prepare(source, tmp_path / "d", on_message=messages.append)
    assert prepare(source, tmp_path / "d", slice_bytes=8192, on_message=messages.append).documents_out == 300
    assert [message.partition(" has ")[2] for message in messages] == [
        "an unfinished run; what is the same is kept: 18 of 18 tasks that read text",
        "an unfinished run of other inputs or settings; what is the same is kept: 18 of 18 tasks that read text",
    ]
