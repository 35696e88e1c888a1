"""Documents and rows by number, and what a dataset shows of itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from forebay import prepare_dataset
from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import write_rows_slice
from forebay.errors import UsageError
from support.store import stored

TEXTS = ["The mill stands by the river.", "A race feeds <b>the</b> wheel.", "Grain goes in, flour comes out."] * 150


def prepare(folder: Path):
    lines = (json.dumps({"id": f"d{i}", "text": f"{i}: {text}"}) + "\n" for i, text in enumerate(TEXTS))
    (folder / "in.jsonl").write_text("".join(lines))
    prepare_dataset(
        [folder / "in.jsonl"], folder / "out", tokenizer="bytes", slice_bytes=4096, document_ids=True, workers=1
    )


@pytest.fixture
def tokens() -> Path:
    return stored(prepare) / "out"


@pytest.fixture
def rows(tmp_path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for i, count in enumerate((3, 2)):
        images = np.arange(count * 4, dtype=np.float32).reshape(count, 2, 2) + 100 * i
        write_rows_slice(folder / f"{i}.safetensors", {"image": images, "label": np.arange(count) + 10 * i})
    import_slices(folder)
    return folder


def test_documents_by_number(tokens):
    dataset = open_dataset(tokens)
    assert len(dataset) == len(TEXTS) and dataset.num_slices > 3
    result = [dataset.document(i) for i in range(len(dataset))]
    assert sorted(item.text for item in result) == sorted(f"{i}: {text}" for i, text in enumerate(TEXTS))
    assert all(item.text.startswith(f"{item.id.removeprefix('d')}: ") and item.source == "in.jsonl" for item in result)
    assert all(np.array_equal(dataset[i], item.tokens) for i, item in enumerate(result))
    assert sum(len(part) for part in dataset) == dataset.num_tokens
    assert dataset.document(-1).index == len(dataset) - 1 and dataset.head(2)[1].text == result[1].text
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"got {index}"):
            dataset[index]
    assert repr(result[0]).startswith("Document(0, id='d")
    for part in (
        repr(dataset.name),
        dataset.id[:12],
        f"{dataset.num_tokens:,} tokens in {len(TEXTS)} documents",
        "bytes",
    ):
        assert part in repr(dataset)


def test_rows_by_number(rows):
    dataset = open_dataset(rows)
    assert len(dataset) == 5 and [int(row["label"]) for row in dataset] == [0, 1, 2, 10, 11]
    assert dataset[-1]["image"].tolist() == [[104, 105], [106, 107]] and len(dataset.head()) == 3
    with pytest.raises(UsageError, match=r"dataset\[i\]"):
        dataset.document(0)
    assert "5 rows" in repr(dataset)


def test_inspect_shows_rows_and_documents(tokens, rows, capsys):
    assert main(["inspect", str(rows), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["columns"]) == (5, {"image": "F32 [2, 2]", "label": "I64 []"})
    assert main(["inspect", str(rows), "--documents", "1"]) == 0
    message = capsys.readouterr().out
    assert "vocab" not in message and "label: 0" in message and "image F32 [2, 2]" in message
    assert main(["inspect", str(tokens), "--documents", "2"]) == 0
    message = capsys.readouterr().out
    assert message.count("--- ") == 2 and open_dataset(tokens).document(1).text in message and "checked" in message
    assert main(["inspect", str(tokens), "--documents", "2", "--json"]) == 0
    assert [item["id"] for item in json.loads(capsys.readouterr().out)["head"]] == [
        item.id for item in open_dataset(tokens).head(2)
    ]


def test_inspect_of_hostile_long_and_missing_text(tmp_path, capsys):
    texts = ["a \x1b[31mred\x07 \u202eturned\u202c \x00", "long " * 5000]
    lines = [json.dumps({"id": f"\x1b]0;{number}\x07", "text": text}) for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "d", tokenizer="bytes", document_ids=True, workers=1)
    assert main(["inspect", str(tmp_path / "d"), "--documents", "2"]) == 0
    message = capsys.readouterr().out
    assert not set("\x1b\x07\u202e\u202c\x00") & set(message)
    assert "a \\x1b[31mred\\x07 \\u202eturned" in message and "--- 1 \\x1b]0;1" in message
    assert len(message) < 3500 and "… 23,000 more characters; --json prints all" in message
    assert main(["inspect", str(tmp_path / "d"), "--documents", "2", "--json"]) == 0
    assert [item["text"] for item in json.loads(capsys.readouterr().out)["head"]] == texts
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    assert main(["inspect", str(tmp_path / "tokens.npy"), "--documents", "2"]) == 0
    assert "no documents: " in capsys.readouterr().out
    for path, expected in (
        (tmp_path / "none", "expected a dataset or files of tokens, got nothing there"),
        (tmp_path / "empty", "(a directory with manifest.json), got a directory without manifest.json"),
    ):
        assert main(["inspect", str(path)]) == 1
        assert expected in capsys.readouterr().err


def test_verify_says_what_it_compared(tokens, tmp_path, capsys):
    assert main(["verify", str(tokens), "--quiet"]) == 0
    assert "matches its hash" in capsys.readouterr().out
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    assert main(["verify", str(path), "--quiet"]) == 0
    message = capsys.readouterr().out
    assert (
        "matches its hash" not in message
        and "format without hashes" in message
        and "checked: size of every file" in message
    )
    assert main(["verify", str(path), "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["bad"], report["level"]) == (True, [], "structure") and report["checks"]
