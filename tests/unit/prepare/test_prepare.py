"""Prepare's laws: the same bytes however it ran, every document once and whole, and a clear word for bad input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from forebay import prepare_dataset
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import PrepareError, UsageError
from forebay.formats import parquet as tables
from forebay.formats import text as lines
from forebay.prepare import PrepareResult, Progress, load_recipe
from forebay.prepare import inputs as sources
from forebay.prepare.tasks import slicing
from forebay.prepare.tokenize import tokenizers
from support.outputs import contents
from support.shared_data import shared_data

TEXTS = [f"Document {i}: " + "grüße, 世界! \x00\r\n<|endoftext|> " * (i % 9) for i in range(300)]


def documents(dataset: Dataset) -> list[list[int]]:
    """Every document's tokens, put together again over the slices."""
    result: list[list[int]] = []
    rest: list[int] = []
    for i in range(dataset.num_slices):
        piece = dataset.open_slice(i)
        start = 0
        for end in piece.document_ends.tolist():
            result.append(rest + piece.tokens[start:end].tolist())
            rest, start = [], end
        rest += piece.tokens[start:].tolist()
    assert not rest
    return result


def jsonl(texts: list[str], **extra: Any) -> bytes:
    return b"".join(json.dumps({"text": text, **extra}).encode() + b"\n" for text in texts)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of little data."""
    monkeypatch.setattr(lines, "SPLIT_BYTES", 4096)
    monkeypatch.setattr(tables, "SPLIT_BYTES", 4096)
    monkeypatch.setattr(sources, "GROUP_BYTES", 4096)


def test_every_document_once_in_order(tmp_path: Path, small_pieces: None) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    summary = prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", slice_bytes=4096, workers=1)
    dataset = open_dataset(tmp_path / "d")
    assert documents(dataset) == [[*text.encode(), 256] for text in TEXTS]
    assert dataset.verify().ok and not dataset.verify().extra
    assert summary.to_json() == {
        "dataset": "d",
        "id": dataset.id,
        "documents_in": 300,
        "documents_out": 300,
        "tokens": dataset.num_tokens,
        "slices": dataset.num_slices,
        "dropped": {},
        "skipped": {},
    }
    sizes = dataset.table.bytes
    assert sizes.max() <= 4096 and dataset.num_slices > 20
    assert not (tmp_path / "d/.work").exists()


def test_every_kind_of_input_gives_the_same_documents(tmp_path: Path) -> None:
    data = jsonl(TEXTS)
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(compress(data[:5000]) + compress(data[5000:]))
    pq.write_table(pa.table({"text": TEXTS, "n": range(300)}), tmp_path / "d.parquet", row_group_size=7)
    (tmp_path / "e").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / f"e/{i:04d}.txt").write_bytes(text.encode())
    (tmp_path / "e/.hidden").write_text("no")
    expected = [[*text.encode(), 256] for text in TEXTS]
    for path in sorted(p for p in tmp_path.iterdir()):
        out = tmp_path / "out" / path.name
        prepare_dataset([path], out, tokenizer="bytes", workers=1)
        assert documents(open_dataset(out)) == expected, path


def test_slices_fill_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * (i % 50) + "." for i in range(20_000)]))
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", slice_bytes=64 << 10, workers=1)
    sizes = open_dataset(tmp_path / "d").table.bytes
    assert sizes.max() <= 64 << 10 and sizes[:-1].min() > 0.99 * (64 << 10)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    itemsize=st.sampled_from([2, 4]),
    size=st.integers(4096, 9000),
)
def test_cuts_cover_the_stream(lengths: list[int], itemsize: int, size: int) -> None:
    stops = np.cumsum(lengths).astype(np.uint64)
    start = first = 0
    while start < stops[-1]:
        stop, last = slicing.next_cut(stops, start, first, int(stops[-1]), itemsize, size)
        used = (stop - start) * itemsize + 8 * (last - first) + 256
        assert start < stop and used <= size
        assert stop == stops[-1] or used > size - itemsize - 8
        assert ((stops[first:last] > start) & (stops[first:last] <= stop)).all()
        start, first = stop, last
    assert first == len(stops)


def corpus(folder: Path) -> list[Path]:
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS) + b"{broken\n" + jsonl(["", "last"], id="x"))
    pq.write_table(pa.table({"text": TEXTS, "id": range(300)}), folder / "b.parquet", row_group_size=20)
    (folder / "c.md").write_text("# One document\n")
    return [folder]


@pytest.mark.parametrize("name", ["bytes", "train:300"])
def test_same_bytes_for_any_number_of_workers(tmp_path: Path, small_pieces: None, name: str) -> None:
    source = corpus(tmp_path / "in")
    seen = []
    for workers in (1, 2, 5):
        out = tmp_path / f"out{workers}" / "d"
        prepare_dataset(source, out, tokenizer=name, slice_bytes=8192, workers=workers, write_ids=out.parent / "ids")
        seen.append(contents(out.parent))
    assert seen[0] == seen[1] == seen[2]
    assert str(tmp_path).encode() not in seen[0]["d/manifest.json"]


def test_training_does_not_depend_on_threads(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS * 20))
    script = (
        "import sys; from forebay import prepare_dataset\n"
        "print(prepare_dataset([sys.argv[1]], sys.argv[2], tokenizer='train:500', name='d', workers=1).id)"
    )
    ids = []
    for i, threads in enumerate(("1", "2", "7")):
        run = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "a.jsonl"), str(tmp_path / f"d{i}")],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"},
            capture_output=True,
            text=True,
            check=True,
        )
        ids.append(run.stdout)
    assert ids[0] == ids[1] == ids[2]


def test_rejects_are_located(tmp_path: Path, small_pieces: None) -> None:
    lines = jsonl(TEXTS).splitlines(keepends=True)
    invalid = {
        3: b"{broken\n",
        120: b'{"text": 5}\n',
        121: b'{"no": "text"}\n',
        200: b"\xff\xfe\n",
        201: b'{"text": "\\ud800"}\n',
        202: b"[1]\n",
        250: b"\n",
        299: b"[" * 100_000,
    }
    for i, line in invalid.items():
        lines[i] = line
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(lines))
    ids = tmp_path / "ids"
    summary = prepare_dataset([path], tmp_path / "d", tokenizer="bytes", workers=1, write_ids=ids)
    # The document with no words left is still a document; the blank line is none.
    assert summary.dropped == {"malformed": 7} and summary.documents_in == 299
    rejects = [json.loads(line) for line in (tmp_path / "d/rejects.jsonl").read_text().splitlines()]
    assert [r["where"] for r in rejects] == [f"{path}:{i + 1}" for i in invalid if i != 250]
    assert all(r["reason"] for r in rejects)
    assert ids.read_text().split() == [f"{path}:{i + 1}" for i in range(300) if i not in invalid]


def test_too_much_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS[:10]) + b"nonsense\n" * 5)
    with pytest.raises(PrepareError, match=r"5 of 15: .*a\.jsonl:11"):
        prepare_dataset([path], tmp_path / "d", tokenizer="bytes", workers=1)
    assert not (tmp_path / "d/manifest.json").exists()
    assert (
        prepare_dataset(
            [path], tmp_path / "d", tokenizer="bytes", workers=1, settings={"max_error_rate": 0.5}
        ).documents_out
        == 10
    )


def test_ids_come_from_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"], id="mine") + jsonl([""], id="empty") + jsonl(["y"], id=7))
    (tmp_path / "b.txt").write_text("text")
    ids = tmp_path / "ids"
    summary = prepare_dataset(
        [tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "d", tokenizer="bytes", workers=1, write_ids=ids
    )
    assert ids.read_text().split() == ["mine", "7", str(tmp_path / "b.txt")] and summary.dropped == {"empty": 1}


def test_byte_tokenizer_file_gives_the_same_ids(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x250))) + " a  b\n\n" + TEXTS[8] + "🙂"
    real = tokenizers.byte_tokenizer()
    assert real.encode(text.replace("<|endoftext|>", ""), add_special_tokens=False).ids == [
        *text.replace("<|endoftext|>", "").encode()
    ]
    assert real.token_to_id("<|endoftext|>") == 256
    (tmp_path / "a.jsonl").write_bytes(jsonl([text, *TEXTS]))
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", workers=1)
    again = prepare_dataset(
        [tmp_path / "a.jsonl"], tmp_path / "e", tokenizer=str(tmp_path / "d/tokenizer.json"), workers=1
    )
    assert again.documents_out == 301
    assert documents(open_dataset(tmp_path / "d")) == documents(open_dataset(tmp_path / "e"))


def test_text_comes_back_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="train:400", workers=1)
    dataset = open_dataset(tmp_path / "d")
    codec = Tokenizer.from_file(str(tmp_path / "d/tokenizer.json"))
    result = documents(dataset)
    assert [codec.decode(ids[:-1], skip_special_tokens=False) for ids in result] == TEXTS
    assert {ids[-1] for ids in result} == {dataset.manifest.eos_id} and dataset.manifest.dtype == "U16"


def test_tokenizer_without_eos_and_large_vocabulary(tmp_path: Path) -> None:
    vocab = {f"w{i}": i for i in range(70_000)} | {"<unk>": 70_000}
    plain = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    plain |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    plain |= {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}}
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(plain))
    (tmp_path / "a.jsonl").write_bytes(jsonl(["w1 w69999", "  ", "w2"]))
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer=str(tmp_path / "t"), workers=1)
    dataset = open_dataset(tmp_path / "d")
    assert dataset.manifest.dtype == "U32" and dataset.manifest.eos_id is None
    assert documents(dataset) == [[1, 69_999], [2]] and dataset.manifest.lineage["counts"]["dropped"] == {"empty": 1}


def test_same_again_and_other_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))

    def run(**changes: Any) -> PrepareResult:
        return prepare_dataset(
            [tmp_path / "a.jsonl"], tmp_path / "d", **{"tokenizer": "bytes", "workers": 1, **changes}
        )

    first = run()
    assert not first.already_exists and run().already_exists and run().to_json() == first.to_json()
    for changes in ({"tokenizer": "train:300"}, {"slice_bytes": 8192}, {"name": "other"}):
        with pytest.raises(UsageError, match="holds dataset"):
            run(**changes)
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[1:]))
    with pytest.raises(UsageError, match="holds dataset"):
        run()


def test_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS))[:-20])
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.compress(jsonl(TEXTS))[:-20])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "column.parquet")
    (tmp_path / "bad.json").write_text("{}")
    good: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("none.jsonl", {}, PrepareError, "does not exist"),
        ("empty", {}, PrepareError, "got none"),
        ("empty.jsonl", {}, PrepareError, "got none"),
        ("cut.jsonl.gz", {"settings": {"max_error_rate": 0.0}}, PrepareError, "cut.jsonl.gz"),
        ("cut.jsonl.zst", {"settings": {"max_error_rate": 0.0}}, PrepareError, "cut.jsonl.zst"),
        ("bad.parquet", {}, PrepareError, "bad.parquet"),
        ("column.parquet", {}, PrepareError, "body"),
        ("a.jsonl", {"tokenizer": "no/such/file.json"}, UsageError, "no such file"),
        ("a.jsonl", {"tokenizer": str(tmp_path / "bad.json")}, PrepareError, "expected a tokenizer"),
        ("a.jsonl", {"tokenizer": "train:x"}, UsageError, "train:VOCAB"),
        ("a.jsonl", {"slice_bytes": 10}, UsageError, "4096"),
        ("a.jsonl", {"workers": 0}, UsageError, "at least 1"),
    ]
    for name, changes, error, words in cases:
        with pytest.raises(error, match=words):
            prepare_dataset([tmp_path / name], tmp_path / "d", **{**good, **changes})
    with pytest.raises(UsageError, match="which is a file"):
        prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "bad.json", **good)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slicing, "write_token_slice", full)
        with pytest.raises(PrepareError, match="no space left"):
            prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", workers=1)
    assert prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", workers=1).documents_out == 300


def test_progress_reaches_its_total(tmp_path: Path, small_pieces: None) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    seen: list[Progress] = []
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", workers=1, on_progress=seen.append)
    for stage in ("text", "encode", "slice"):
        of = [p for p in seen if p.stage == stage]
        assert of[-1].done == of[-1].total > 0 and [p.done for p in of] == sorted(p.done for p in of)


def test_real_text(tmp_path: Path) -> None:
    folder = shared_data()
    sources = [folder / "books/de", *sorted((folder / "jsonl").glob("cc_en*.jsonl*"))]
    summary = prepare_dataset(sources, tmp_path / "d", tokenizer="bytes", slice_bytes=1 << 20, workers=2)
    dataset = open_dataset(tmp_path / "d")
    assert summary.documents_out > 10 and dataset.verify().ok
    book = sorted((folder / "books/de").iterdir())[0].read_bytes().removeprefix(b"\xef\xbb\xbf")
    assert bytes(documents(dataset)[0][:-1]) == book


def test_kept_ids_are_of_what_is_left_when_repeated_lines_are_cut(tmp_path: Path) -> None:
    lines = [f"This is line number {i}, and long enough to be compared." for i in range(5)]
    first = jsonl([f"{lines[0]}\n{lines[1]}"], id="a0") + jsonl([lines[0]], id="a1")
    second = jsonl([lines[1]], id="b0") + jsonl([lines[2]], id="b1") + jsonl([lines[2]], id="b2")
    (tmp_path / "a.jsonl").write_bytes(first)
    (tmp_path / "b.jsonl").write_bytes(second)

    def run(name: str, inputs: str, **dedup: Any) -> tuple[list[str], PrepareResult]:
        recipe = load_recipe(settings={"dedup": {"lines": True, **dedup}, "tokenize": {"tokenizer": "bytes"}})
        ids = tmp_path / f"{name}.ids"
        paths = [tmp_path / f"{letter}.jsonl" for letter in inputs]
        summary = prepare_dataset(paths, tmp_path / name, recipe=recipe, write_ids=ids, workers=1)
        assert len(ids.read_text().split()) == summary.documents_out
        return ids.read_text().split(), summary

    assert run("A", "a")[0] == ["a0"]
    retained, summary = run("AB", "ab")
    assert retained == ["a0", "b1"] and summary.dropped == {"empty": 3}
