"""Datasets that grow: the child has its parent's slices first, the same bytes for any run, and nothing twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from forebay import prepare_dataset
from forebay.dataset.chunks import CHUNKS_FILE
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset, open_dataset, verify_dataset
from forebay.errors import DatasetError, PrepareError, UsageError
from forebay.prepare.config import load_recipe
from forebay.prepare.extend import ParentDocuments
from forebay.prepare.run import PrepareResult
from support.paths import GOLDEN

RECIPE: dict[str, Any] = {"name": "d", "slice": {"bytes": 1 << 14}, "tokenize": {"tokenizer": "bytes"}}
FORMAT_1 = GOLDEN / "format1" / "dataset"
WORDS = [f"{a}{b}{c}" for a in ("lo", "ki", "ma", "tu") for b in ("ra", "ne", "so") for c in ("", "n", "st")]


def write_texts(folder: Path, first: int, count: int) -> list[str]:
    """`count` documents of some 1 KB, which depend on their number alone."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for number in range(first, first + count):
        chance = random.Random(number)
        lines = [f"{number} " + " ".join(chance.choices(WORDS, k=40)) for _ in range(5)]
        texts.append("\n".join(lines))
        (folder / f"{number:05d}.txt").write_text(texts[-1])
    return texts


def prepare(inputs: Path, out: Path, extend: Path | None = None, workers: int = 1, **more: Any) -> PrepareResult:
    recipe = {**RECIPE, **{key: value for key, value in more.items() if key not in ("document_ids", "write_ids")}}
    options = {key: value for key, value in more.items() if key in ("document_ids", "write_ids")}
    return prepare_dataset(
        [inputs], out, recipe=load_recipe(settings=recipe), extend=extend, workers=workers, **options
    )


def texts_of(dataset: Dataset) -> list[str]:
    return [dataset.document(index).text for index in range(len(dataset))]


def rows_of(dataset: Dataset) -> list[tuple[str, str]]:
    return [(row.name, row.sha256) for row in map(dataset.table.row, range(dataset.num_slices))]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    write_texts(tmp_path / "first", 0, 40)
    prepare(tmp_path / "first", tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_child_has_the_slices_of_its_parent_first(tmp_path: Path, shuffle: bool) -> None:
    settings = {"slice": {"bytes": 1 << 14, "shuffle": shuffle}}
    before = write_texts(tmp_path / "first", 0, 40)
    after = write_texts(tmp_path / "second", 40, 30)
    parent = prepare(tmp_path / "first", tmp_path / "old", **settings).open()
    result = prepare(tmp_path / "second", tmp_path / "new", tmp_path / "old", **settings)
    child = result.open()
    assert rows_of(child)[: parent.num_slices] == rows_of(parent)
    assert child.manifest.lineage["parent"] == {"id": parent.id, "slices": parent.num_slices}
    assert result.documents_out == 30 and result.slices == child.num_slices - parent.num_slices >= 2
    assert texts_of(child)[:40] == texts_of(parent)
    assert sorted(texts_of(child)) == sorted(before + after)
    assert (texts_of(child)[40:] == after) != shuffle
    alone = prepare(tmp_path / "second", tmp_path / "alone", **settings).open()
    assert rows_of(alone) != rows_of(child)[parent.num_slices :]  # other names, the same bytes
    assert [sha256 for _, sha256 in rows_of(alone)] == [sha256 for _, sha256 in rows_of(child)[parent.num_slices :]]
    assert verify_dataset(child.path).ok and verify_dataset(parent.path).ok
    assert child.slice_path(0).samefile(parent.slice_path(0))
    assert (child.path / CHUNKS_FILE).read_bytes().startswith((parent.path / CHUNKS_FILE).read_bytes())


def test_the_same_bytes_for_any_workers_and_a_second_run_changes_nothing(old: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "second", 40, 30)
    results = [prepare(tmp_path / "second", tmp_path / f"new{n}", old, n, name="n") for n in (1, 2)]
    assert results[0].id == results[1].id
    again = prepare(tmp_path / "second", tmp_path / "new1", old, name="n")
    assert again.already_exists and again.id == results[0].id
    with pytest.raises(UsageError, match="A dataset never changes"):
        prepare(tmp_path / "second", tmp_path / "new1", name="n")


def test_a_child_is_extended_again(old: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "second", 40, 10)
    write_texts(tmp_path / "third", 50, 10)
    child = prepare(tmp_path / "second", tmp_path / "new", old).open()
    grandchild = prepare(tmp_path / "third", tmp_path / "newer", tmp_path / "new").open()
    assert rows_of(grandchild)[: child.num_slices] == rows_of(child) and len(grandchild) == 60
    parent = open_dataset(old)
    assert grandchild.manifest.lineage["parent"] == {
        "id": child.id, "slices": child.num_slices, "ancestors": [{"id": parent.id, "slices": parent.num_slices}]
    }  # fmt: skip
    assert verify_dataset(grandchild.path).ok


@pytest.mark.parametrize(
    "kinds",
    [
        ["exact"], ["exact", "minhash"], ["lines"], ["sentences"], ["substring"],
        ["exact", "minhash", "signatures"], ["lines", "sentences", "signatures"],
    ],
)  # fmt: skip
def test_new_documents_are_compared_with_the_parents(
    tmp_path: Path, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dedup = {"dedup": dict.fromkeys(kinds, True)}
    before = write_texts(tmp_path / "first", 0, 40)
    parent = prepare(tmp_path / "first", tmp_path / "old", **dedup).open()
    assert texts_of(parent) == before
    for number in (3, 17, 39):  # of the parent, across its slices
        shutil.copy(tmp_path / f"first/{number:05d}.txt", tmp_path / "first-again.txt")
        (tmp_path / "second").mkdir(exist_ok=True)
        shutil.move(tmp_path / "first-again.txt", tmp_path / f"second/a{number}.txt")
    after = write_texts(tmp_path / "second", 40, 20)
    shutil.copy(tmp_path / "second/00045.txt", tmp_path / "second/z.txt")
    if "signatures" in kinds:  # then the parent's tokens are not read
        monkeypatch.setattr(ParentDocuments, "read", None)
    result = prepare(tmp_path / "second", tmp_path / "new", tmp_path / "old", **dedup)
    assert texts_of(result.open()) == before + after
    assert (result.documents_in, result.documents_out) == (24, 20) and sum(result.dropped.values()) == 4
    without = prepare(tmp_path / "second", tmp_path / "without", **dedup)
    assert without.documents_out == 23


def test_signatures_go_on_to_children_and_are_files_of_the_dataset(tmp_path: Path) -> None:
    dedup = {"dedup": {"exact": True, "lines": True, "signatures": True}}
    first, second = write_texts(tmp_path / "first", 0, 30), write_texts(tmp_path / "second", 30, 10)
    shutil.copy(tmp_path / "first/00007.txt", tmp_path / "first/z.txt")
    parent = prepare(tmp_path / "first", tmp_path / "old", **dedup).open()
    child = prepare(tmp_path / "second", tmp_path / "new", parent.path, **dedup).open()
    whole = np.load(child.path / "signatures-000000.npz")
    assert (
        whole["documents"] == 40 and len(whole["exact"]) == 40 and len(whole["units"]) == whole["counts"].sum() == 200
    )
    (tmp_path / "third").mkdir()
    for name in ("first/00011.txt", "second/00035.txt"):
        shutil.copy(tmp_path / name, tmp_path / "third")
    (tmp_path / "third/new.txt").write_text("new")
    grandchild = prepare(tmp_path / "third", tmp_path / "newer", child.path, **dedup, workers=2).open()
    assert texts_of(grandchild) == [*first, *second, "new"] and verify_dataset(grandchild.path).ok
    # Other settings: the text of the tokens is compared, as without signatures.
    other = prepare(tmp_path / "third", tmp_path / "other", child.path, dedup={"minhash": True})
    assert texts_of(other.open()) == [*first, *second, "new"]
    (child.path / "signatures-000000.npz").write_bytes(b"PK")
    with pytest.raises(PrepareError, match=r"signatures-000000\.npz: expected the signatures that the manifest lists"):
        prepare(tmp_path / "third", tmp_path / "again", child.path, **dedup)
    for wrong in ({"substring": True}, {}, {"lines": True, "max_cut_share": 0.5}):
        with pytest.raises(UsageError, match="signatures: expected exact, url"):
            prepare(tmp_path / "first", tmp_path / "x", dedup={**wrong, "signatures": True})
    with pytest.raises(UsageError, match="expected --to dataset, got jsonl"):
        prepare_dataset([tmp_path / "first"], tmp_path / "x", settings=dedup, to="jsonl")


def test_lines_of_the_parent_are_cut_and_counted_for_new_documents_alone(tmp_path: Path) -> None:
    before = write_texts(tmp_path / "first", 0, 20)
    prepare(tmp_path / "first", tmp_path / "old")
    (tmp_path / "second").mkdir()
    known = before[4].splitlines()[2]
    for name in "ab":
        (tmp_path / f"second/{name}.txt").write_text(f"{name * 30}\n{known}\n{name * 31}")
    result = prepare(tmp_path / "second", tmp_path / "new", tmp_path / "old", dedup={"lines": True})
    assert texts_of(result.open())[20:] == [f"{name * 30}\n{name * 31}" for name in "ab"]
    (funnel,) = [stage for stage in result.report["funnel"] if stage["stage"] == "dedup"]
    assert funnel["changed"] == {"lines cut": 2} and funnel["documents_out"] == 2


def test_addresses_are_compared_where_the_parent_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one text", "url": "https://x.org/1"}\n{"text": "b", "url": ""}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "other", "url": "http://www.x.org/1"}\n{"text": "c", "url": ""}\n')
    parent = prepare(tmp_path / "a.jsonl", tmp_path / "old", document_ids=True).open()
    child = prepare(tmp_path / "b.jsonl", tmp_path / "new", parent.path, dedup={"url": True}, document_ids=True).open()
    assert texts_of(child) == ["one text", "b", "c"]
    rows = pq.read_table(child.path / "documents.parquet").to_pylist()
    assert rows[:2] == pq.read_table(parent.path / "documents.parquet").to_pylist()
    assert [row["id"] for row in rows] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:2"]
    assert (child.document(2).id, verify_dataset(child.path).ok) == ("b.jsonl:2", True)
    prepare(tmp_path / "a.jsonl", tmp_path / "plain")
    with pytest.raises(UsageError, match=r"documents\.parquet, which has the addresses"):
        prepare(tmp_path / "b.jsonl", tmp_path / "c", tmp_path / "plain", dedup={"url": True})
    with pytest.raises(UsageError, match="for --document-ids, got none"):
        prepare(tmp_path / "b.jsonl", tmp_path / "c", tmp_path / "plain", document_ids=True)


def test_documents_of_the_parent_are_read_in_parts(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(old)
    monkeypatch.setattr("forebay.prepare.extend._PART_TOKENS", 1000)
    source = ParentDocuments(str(old), dataset.id, False)
    assert len(source.parts()) >= 5 and dataset.num_slices == 7
    assert [document["text"] for part in source.parts() for document in source.read(part)] == texts_of(dataset)


def test_a_trained_tokenizer_is_taken_over(tmp_path: Path) -> None:
    write_texts(tmp_path / "first", 0, 40)
    write_texts(tmp_path / "second", 40, 10)
    trained = {"tokenize": {"tokenizer": "train:300"}}
    parent = prepare(tmp_path / "first", tmp_path / "old", **trained).open()
    children = [
        prepare(tmp_path / "second", tmp_path / f"new{i}", parent.path, dedup={"exact": True}, **settings).open()
        for i, settings in enumerate([trained, {"tokenize": {}}])
    ]
    for child in children:
        assert (child.path / "tokenizer.json").read_bytes() == (parent.path / "tokenizer.json").read_bytes()
        assert child.manifest.tokenizer == "train:300" and len(child) == 50


def test_rows_are_extended(tmp_path: Path) -> None:
    rows = {"rows": {"max_tokens": 128}}
    write_texts(tmp_path / "first", 0, 20)
    write_texts(tmp_path / "second", 20, 10)
    parent = prepare(tmp_path / "first", tmp_path / "old", **rows).open()
    child = prepare(tmp_path / "second", tmp_path / "new", parent.path, **rows).open()
    assert (len(parent), len(child)) == (20, 30) and rows_of(child)[: parent.num_slices] == rows_of(parent)
    with pytest.raises(UsageError, match="expected its rows"):
        prepare(tmp_path / "second", tmp_path / "other", parent.path, rows={"max_tokens": 64})
    with pytest.raises(UsageError, match="plain text to compare with, got rows"):
        prepare(tmp_path / "second", tmp_path / "other", parent.path, dedup={"exact": True}, **rows)


def test_what_cannot_be_is_refused_before_any_work(old: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "second", 40, 5)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "other.json"))
    own = {"tokenizer": str(tmp_path / "other.json"), "eos": False}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("expected its tokenizer", {"tokenize": own}),
        ("its own tokenizer, got train:300", {"tokenize": {"tokenizer": "train:300"}}),
        ("expected its layout 'tokens', got 'rows'", {"rows": {"max_tokens": 64}}),
        ("expected its bos False", {"tokenize": {"tokenizer": "bytes", "bos": "auto"}}),
        ("expected its eos_id 256, got None", {"tokenize": {"tokenizer": "bytes", "eos": False}}),
        (r"dedup\.keep = 'first'", {"dedup": {"exact": True, "keep": "longest"}}),
        ("methods that compare text, got semantic", {"dedup": {"semantic": True, "dimension": 4}}),
    ]
    for message, settings in cases:
        with pytest.raises(UsageError, match=message):
            prepare(tmp_path / "second", tmp_path / "new", old, **settings)
    with pytest.raises(UsageError, match="another --out, got the directory of the dataset itself"):
        prepare(tmp_path / "second", old, old)
    with pytest.raises(UsageError, match="expected --to dataset, got parquet"):
        prepare_dataset([tmp_path / "second"], tmp_path / "new", extend=old, to="parquet")
    with pytest.raises(UsageError, match=r"got format 1\. Upgrade it: forebay import"):
        prepare(tmp_path / "second", tmp_path / "new", FORMAT_1)
    shutil.copytree(FORMAT_1, tmp_path / "imported")
    import_slices(tmp_path / "imported")
    with pytest.raises(UsageError, match="expected its tokenizer 'none'"):
        prepare(tmp_path / "second", tmp_path / "new", tmp_path / "imported")
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_that_changes_text_cannot_deduplicate(tmp_path: Path) -> None:
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(tmp_path / "nfc.json"))
    settings = {"tokenize": {"tokenizer": str(tmp_path / "nfc.json"), "eos": False}}
    write_texts(tmp_path / "first", 0, 5)
    write_texts(tmp_path / "second", 5, 5)
    prepare(tmp_path / "first", tmp_path / "old", **settings)
    with pytest.raises(UsageError, match="ids decode to the same text"):
        prepare(tmp_path / "second", tmp_path / "new", tmp_path / "old", dedup={"exact": True}, **settings)
    assert prepare(tmp_path / "second", tmp_path / "new", tmp_path / "old", **settings).documents_out == 5


def test_a_damaged_parent_is_refused(old: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "second", 40, 5)
    path = old / "slices/000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"000001\.safetensors: expected the dataset's bytes"):
        prepare(tmp_path / "second", tmp_path / "new", old)
    assert not (tmp_path / "new/manifest.json").exists()


def test_without_hard_links_slices_are_copied(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "second", 40, 5)
    linked = prepare(tmp_path / "second", tmp_path / "linked", old, name="n")

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    copied = prepare(tmp_path / "second", tmp_path / "copied", old, name="n").open()
    assert copied.id == linked.id and verify_dataset(copied.path).ok
    assert not copied.slice_path(0).samefile(old / "slices/000000.safetensors")


def test_an_unfinished_run_of_another_plan_is_not_taken_for_this_one(old: Path, tmp_path: Path) -> None:
    """Slices of equal sizes under one name: a run without --extend, killed, one with it, and again the first."""
    write_texts(tmp_path / "second", 40, 30)
    sizes = {"slice": {"tokens": 5000}}
    expected = prepare(tmp_path / "second", tmp_path / "plain", name="n", **sizes)
    extended = prepare(tmp_path / "second", tmp_path / "extended", old, name="n", **sizes)
    out = tmp_path / "out"
    for extend in (None, old, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("forebay.prepare.outputs.dataset.Manifest.of", _stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(tmp_path / "second", out, extend, name="n", **sizes)
    assert prepare(tmp_path / "second", out, old, name="n", **sizes).id == extended.id
    assert verify_dataset(out).ok
    shutil.rmtree(out)
    for extend in (old, None, old):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("forebay.prepare.outputs.dataset.Manifest.of", _stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(tmp_path / "second", out, extend, name="n", **sizes)
    assert prepare(tmp_path / "second", out, name="n", **sizes).id == expected.id
    assert verify_dataset(out).ok and verify_dataset(old).ok


def _stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


_SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from unit.prepare.test_extend import prepare

if __name__ == "__main__":
    settings = {"slice": {"bytes": 1 << 14, "shuffle": True}, "dedup": {"exact": True}}
    print(prepare(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), 2, name="n", **settings).id)
"""


def test_a_run_that_is_killed_goes_on_and_gives_the_same_bytes(old: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "second", 30, 200)  # ten are the parent's
    (tmp_path / "run.py").write_text(_SCRIPT)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}

    def start(out: Path) -> subprocess.Popen[str]:
        arguments = [str(tmp_path / "second"), str(out), str(old), str(Path(__file__).parent)]
        command = [sys.executable, str(tmp_path / "run.py"), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)

    reference = start(tmp_path / "reference")
    expected = reference.communicate()[0].strip()
    assert reference.returncode == 0 and len(expected) == 64
    out, kills = tmp_path / "out", 0
    # After the first text, some slices linked, some written, and before the manifest.
    for reached in (
        lambda: any(out.glob(".work/done/process_split/*.json")),
        lambda: any(out.glob("slices/000001*")),
        lambda: len(list(out.glob("slices/*.safetensors"))) > 5,
        lambda: (out / "slices.parquet").exists(),
    ):
        process = start(out)
        while process.poll() is None and not reached():
            time.sleep(0.001)
        if process.poll() is None:  # Else there is no such group.
            kills += 1
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert kills >= 2
    process = start(out)
    assert process.communicate()[0].strip() == expected and process.returncode == 0
    assert verify_dataset(out).ok and verify_dataset(out).extra == []
    assert len(open_dataset(out)) == 230
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert np.array_equal(open_dataset(out).table.sha256, open_dataset(tmp_path / "reference").table.sha256)
