"""Datasets that grow: the child has its parent's slices first, the same bytes after any stop, and nothing twice."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset, open_dataset, verify_dataset
from forebay.errors import DatasetError, PrepareError, UsageError
from forebay.prepare.extend import ParentDocuments
from forebay.prepare.run import PrepareResult
from forebay.prepare.tasks import slicing
from support.outputs import contents
from support.preparing import prepare, write_jsonl
from support.store import stored
from support.token_slices import check_lengths

RECIPE = {"name": "d", "slice": {"bytes": 1 << 14}, "tokenize": {"tokenizer": "bytes"}}
WORDS = [f"{a}{b}{c}" for a in ("lo", "ki", "ma", "tu") for b in ("ra", "ne", "so") for c in ("", "n", "st")]


def write_texts(folder: Path, first: int, count: int) -> list[str]:
    """Write `count` documents of some 1 KB, which depend on their number alone."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for number in range(first, first + count):
        chance = random.Random(number)
        lines = [f"{number} " + " ".join(chance.choices(WORDS, k=40)) for _ in range(5)]
        texts.append("\n".join(lines))
        (folder / f"{number:05d}.txt").write_text(texts[-1])
    return texts


def grow(inputs: Path, out: Path, extend: Path | None = None, ids: bool = False, **tables: Any) -> PrepareResult:
    settings = {**RECIPE, **tables}
    return prepare(inputs, out, tokenizer=None, extend=extend, document_ids=ids, settings=settings)


def make_parent(folder: Path):
    write_texts(folder / "first", 0, 40)
    write_texts(folder / "second", 40, 30)
    grow(folder / "first", folder / "old")


@pytest.fixture
def second() -> Path:
    """Return 30 documents beside `old`, which has 40."""
    return stored(make_parent) / "second"


@pytest.fixture
def old(second) -> Path:
    return second.parent / "old"


def all_texts(dataset: Dataset) -> list[str]:
    return [dataset.document(index).text for index in range(len(dataset))]


def rows(dataset: Dataset) -> list[tuple[str, str]]:
    return [(row.name, row.sha256) for row in map(dataset.table.row, range(dataset.num_slices))]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_child_has_the_slices_of_its_parent_first(tmp_path, shuffle, monkeypatch):
    monkeypatch.setattr(slicing, "_GATHERED", 2)
    settings = {"slice": {"bytes": 1 << 14, "shuffle": shuffle}}
    before = write_texts(tmp_path / "first", 0, 40)
    after = write_texts(tmp_path / "second", 40, 30)
    parent = grow(tmp_path / "first", tmp_path / "old", **settings).open()
    result = grow(tmp_path / "second", tmp_path / "new", tmp_path / "old", **settings)
    child = result.open()
    assert rows(child)[: parent.num_slices] == rows(parent)
    assert child.manifest.lineage["parent"] == {"id": parent.id, "slices": parent.num_slices}
    assert grow(tmp_path / "second", child.path, parent.path, **settings).already_exists
    assert result.documents_out == 30 and result.slices == child.num_slices - parent.num_slices >= 2
    assert all_texts(child)[:40] == all_texts(parent) and sorted(all_texts(child)) == sorted(before + after)
    assert (all_texts(child)[40:] == after) != shuffle
    alone = grow(tmp_path / "second", tmp_path / "alone", **settings).open()
    assert rows(alone) != rows(child)[parent.num_slices :]  # other names, the same bytes
    assert [sha256 for _, sha256 in rows(alone)] == [sha256 for _, sha256 in rows(child)[parent.num_slices :]]
    assert verify_dataset(child.path).ok and child.slice_path(0).samefile(parent.slice_path(0))
    check_lengths(child)


@pytest.mark.parametrize(
    "methods", ["exact", "lines", "sentences", "substring", "exact minhash signatures", "lines sentences signatures"]
)
def test_new_documents_are_compared_with_the_parents(tmp_path, methods, monkeypatch):
    dedup = {"dedup": dict.fromkeys(methods.split(), True)}
    before = write_texts(tmp_path / "first", 0, 40)
    parent = grow(tmp_path / "first", tmp_path / "old", **dedup)
    assert all_texts(parent.open()) == before
    after = write_texts(tmp_path / "second", 40, 20)
    for number in (3, 17, 39):  # of the parent, across its slices
        shutil.copy(tmp_path / f"first/{number:05d}.txt", tmp_path / f"second/a{number}.txt")
    shutil.copy(tmp_path / "second/00045.txt", tmp_path / "second/z.txt")
    if "signatures" in methods:  # then the parent's tokens are not read
        monkeypatch.setattr(ParentDocuments, "read", None)
    result = grow(tmp_path / "second", tmp_path / "new", tmp_path / "old", **dedup)
    assert all_texts(result.open()) == before + after
    assert (result.documents_in, result.documents_out) == (24, 20) and sum(result.dropped.values()) == 4
    assert grow(tmp_path / "second", tmp_path / "without", **dedup).documents_out == 23


def test_inputs_without_documents_leave_no_signatures(tmp_path):
    empty, full = write_jsonl(tmp_path / "a.jsonl", [" "]), write_jsonl(tmp_path / "b.jsonl", ["a text", "another"])
    result = prepare([empty, full], tmp_path / "out", settings={"dedup": {"exact": True, "signatures": True}})
    assert len(np.load(tmp_path / "out/signatures-000000.npz")["exact"]) == result.documents_out == 2


def test_signatures_go_on_to_children_and_are_files_of_the_dataset(tmp_path):
    dedup = {"dedup": {"exact": True, "lines": True, "signatures": True}}
    first, second = write_texts(tmp_path / "first", 0, 30), write_texts(tmp_path / "second", 30, 10)
    shutil.copy(tmp_path / "first/00007.txt", tmp_path / "first/z.txt")
    parent = grow(tmp_path / "first", tmp_path / "old", **dedup).open()
    child = grow(tmp_path / "second", tmp_path / "new", parent.path, **dedup).open()
    signatures = np.load(child.path / "signatures-000000.npz")
    assert (signatures["documents"], len(signatures["exact"])) == (40, 40)
    assert len(signatures["units"]) == signatures["counts"].sum() == 200
    third = tmp_path / "third"
    third.mkdir()
    for name in ("first/00011.txt", "second/00035.txt"):
        shutil.copy(tmp_path / name, third)
    (third / "new.txt").write_text("new")
    grandchild = grow(third, tmp_path / "newer", child.path, **dedup).open()
    ancestors = [{"id": parent.id, "slices": parent.num_slices}]
    assert grandchild.manifest.lineage["parent"] == {"id": child.id, "slices": child.num_slices, "ancestors": ancestors}
    assert all_texts(grandchild) == [*first, *second, "new"] and verify_dataset(grandchild.path).ok
    (child.path / "signatures-000000.npz").write_bytes(b"PK")
    with pytest.raises(PrepareError, match=r"signatures-000000\.npz: expected the signatures that the manifest lists"):
        grow(third, tmp_path / "again", child.path, **dedup)
    for wrong in ({"substring": True}, {}, {"lines": True, "max_cut_share": 0.5}):
        with pytest.raises(UsageError, match="signatures: expected one of exact, url"):
            grow(third, tmp_path / "x", dedup={**wrong, "signatures": True})
    with pytest.raises(UsageError, match="expected --to dataset, got jsonl"):
        prepare(third, tmp_path / "x", settings=dedup, to="jsonl")


def test_lines_of_the_parent_are_cut_and_counted_for_new_documents_alone(old, tmp_path):
    line = open_dataset(old).document(4).text.splitlines()[2]
    path = write_jsonl(tmp_path / "in.jsonl", [f"{name * 30}\n{line}\n{name * 31}" for name in "ab"])
    result = grow(path, tmp_path / "new", old, dedup={"lines": True})
    assert all_texts(result.open())[40:] == [f"{name * 30}\n{name * 31}" for name in "ab"]
    (funnel,) = [stage for stage in result.report["funnel"] if stage["stage"] == "dedup"]
    assert funnel["changed"] == {"lines cut": 2} and funnel["documents_out"] == 2


def test_addresses_are_compared_where_the_parent_has_them(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": "a text", "url": "https://x.org/1"}, {"text": "b", "url": ""}])
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "c text", "url": "http://www.x.org/1"}, {"text": "c", "url": ""}])
    dedup = {"dedup": {"url": True}}
    parent = grow(a, tmp_path / "old", ids=True).open()
    child = grow(b, tmp_path / "new", parent.path, ids=True, **dedup).open()
    assert all_texts(child) == ["a text", "b", "c"]
    documents = pq.read_table(child.path / "documents.parquet").to_pylist()
    assert documents[:2] == pq.read_table(parent.path / "documents.parquet").to_pylist()
    assert [row["id"] for row in documents] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:2"]
    assert (child.document(2).id, verify_dataset(child.path).ok) == ("b.jsonl:2", True)
    grow(a, tmp_path / "plain")
    with pytest.raises(UsageError, match=r"documents\.parquet, which has the addresses"):
        grow(b, tmp_path / "c", tmp_path / "plain", **dedup)
    with pytest.raises(UsageError, match="for --document-ids, got none"):
        grow(b, tmp_path / "c", tmp_path / "plain", ids=True)


def test_documents_of_the_parent_are_read_in_parts(old, monkeypatch):
    dataset = open_dataset(old)
    monkeypatch.setattr("forebay.prepare.extend._PART_TOKENS", 1000)
    source = ParentDocuments(str(old), dataset.id, False)
    assert len(source.parts()) >= 5 and dataset.num_slices == 7
    assert [document["text"] for part in source.parts() for document in source.read(part)] == all_texts(dataset)


def test_a_trained_tokenizer_is_inherited(second, tmp_path):
    trained = {"tokenize": {"tokenizer": "train:300"}}
    parent = grow(second, tmp_path / "old", **trained).open()
    write_texts(tmp_path / "third", 70, 10)
    for name, settings in (("same", trained), ("none", {"tokenize": {}})):
        child = grow(tmp_path / "third", tmp_path / name, parent.path, dedup={"exact": True}, **settings).open()
        assert (child.path / "tokenizer.json").read_bytes() == (parent.path / "tokenizer.json").read_bytes()
        assert child.manifest.tokenizer == "train:300" and len(child) == 40


def test_rows_are_extended(second, tmp_path):
    table = {"rows": {"max_tokens": 128}}
    parent = grow(second.parent / "first", tmp_path / "old", **table).open()
    child = grow(second, tmp_path / "new", parent.path, **table).open()
    assert (len(parent), len(child)) == (40, 70) and rows(child)[: parent.num_slices] == rows(parent)
    with pytest.raises(UsageError, match="expected its rows"):
        grow(second, tmp_path / "other", parent.path, rows={"max_tokens": 64})
    with pytest.raises(UsageError, match="plain text to compare with, got rows"):
        grow(second, tmp_path / "other", parent.path, dedup={"exact": True}, **table)


def save_letters(path: Path, normalizer: Any = None) -> dict:
    """Save a tokenizer of single letters and return the table that names it."""
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.save(str(path))
    return {"tokenize": {"tokenizer": str(path), "eos": False}}


def test_what_cannot_be_extended_is_refused_before_any_work(old, second, tmp_path):
    shutil.copytree(old / "slices", tmp_path / "imported" / "slices")
    import_slices(tmp_path / "imported")
    cases = [
        ("expected its tokenizer", old, save_letters(tmp_path / "other.json")),
        ("its own tokenizer, got train:300", old, {"tokenize": {"tokenizer": "train:300"}}),
        ("expected its layout 'tokens', got 'rows'", old, {"rows": {"max_tokens": 64}}),
        ("expected its bos False", old, {"tokenize": {"tokenizer": "bytes", "bos": "auto"}}),
        ("expected its eos_id 256, got 'none'", old, {"tokenize": {"tokenizer": "bytes", "eos": False}}),
        (r"dedup\.keep = 'first'", old, {"dedup": {"exact": True, "keep": "longest"}}),
        ("expected its tokenizer 'none'", tmp_path / "imported", {}),
    ]
    for message, parent, settings in cases:
        with pytest.raises(UsageError, match=message):
            grow(second, tmp_path / "new", parent, **settings)
    with pytest.raises(UsageError, match="another --out, got the directory of the dataset itself"):
        grow(second, old, old)
    with pytest.raises(UsageError, match="expected --to dataset, got parquet"):
        prepare(second, tmp_path / "new", extend=old, to="parquet")
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_that_changes_text_cannot_deduplicate(second, tmp_path):
    settings = save_letters(tmp_path / "nfc.json", normalizers.NFC())
    grow(second, tmp_path / "old", **settings)
    with pytest.raises(UsageError, match="ids decode to the same text"):
        grow(second, tmp_path / "new", tmp_path / "old", dedup={"exact": True}, **settings)
    assert grow(second, tmp_path / "new", tmp_path / "old", **settings).documents_out == 30


def test_a_damaged_parent_is_refused(old, second, tmp_path):
    shutil.copytree(old, tmp_path / "old")
    path = tmp_path / "old/slices/000001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(DatasetError, match=r"000001\.safetensors: bytes"):
        grow(second, tmp_path / "new", tmp_path / "old")
    assert not (tmp_path / "new/manifest.json").exists()


def test_without_hard_links_slices_are_copied(old, second, tmp_path, monkeypatch):
    linked = grow(second, tmp_path / "linked", old)

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    copied = grow(second, tmp_path / "copied", old).open()
    assert copied.id == linked.id and verify_dataset(copied.path).ok
    assert not copied.slice_path(0).samefile(old / "slices/000000.safetensors")


@pytest.mark.parametrize("extended", [True, False])
def test_an_unfinished_run_of_another_plan_is_not_taken_for_this_one(old, second, tmp_path, extended):
    """Slices of equal sizes under one name: runs with and without --extend that were stopped, and one that was not."""
    sizes, before = {"slice": {"tokens": 5000}}, contents(old)
    plans = [old, None] if extended else [None, old]
    expected = grow(second, tmp_path / "expected", plans[0], **sizes)

    def stop(*_, **__):
        raise KeyboardInterrupt

    for extend in (plans[1], plans[0], plans[1]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("forebay.prepare.outputs.tokens.Manifest.of", stop)
            grow(second, tmp_path / "out", extend, **sizes)
    assert grow(second, tmp_path / "out", plans[0], **sizes).id == expected.id
    verified = verify_dataset(tmp_path / "out")
    assert verified.ok and verified.extra == [] and contents(old) == before
