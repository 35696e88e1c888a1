"""The shuffle's laws: a permutation, a pure function of seed and inputs, equal to sorting in memory, uniform."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.tasks import shuffle as shuffling
from forebay.prepare.tasks.encode import EncodeTask, encode
from forebay.prepare.tasks.shuffle import EncodedPart, Shuffle, document_keys, plan_shuffle, shuffle
from support.token_parts import coder, documents, text_part


def parts_of(folder: Path, groups: list[list[str]], seed: int = 1, with_ids: bool = True) -> list[EncodedPart]:
    seen: dict[str, int] = {}
    parts = []
    for texts in groups:
        part = text_part(folder, texts)
        occurrence = seen[part.name] = seen.get(part.name, -1) + 1
        task = EncodeTask(part, coder(folder), str(folder), shuffle=Shuffle(seed, occurrence), with_ids=with_ids)
        parts.append(encode(task).part)
    return parts


def texts_of(parts: list[EncodedPart]) -> list[str]:
    return [bytes(tokens[:-1]).decode() for tokens in documents(parts)]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(st.text("abü", min_size=1, max_size=8), max_size=12), min_size=1, max_size=4),
    st.integers(200, 5000), st.integers(0, 3), st.integers(0, 1),
)  # fmt: skip
def test_equals_sorting_in_memory(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[str]], bucket: int, seed: int, scale: int
) -> None:
    folder = tmp_path_factory.mktemp("s")
    parts = parts_of(folder, groups, seed)
    result = [shuffle(task, scale) for task in plan_shuffle(parts, folder, bucket)]
    expected, seen = [], {}
    for texts in groups:
        name = text_part(folder / "names", texts).name
        occurrence = seen[name] = seen.get(name, -1) + 1
        keys = document_keys(Shuffle(seed, occurrence), name, np.arange(len(texts)))
        expected += list(zip(keys.tolist(), texts, [f"id{i}" for i in range(len(texts))]))
    expected.sort(key=lambda row: row[0])
    assert texts_of(result) == [text for _, text, _ in expected]
    ids = [json.loads(line) for part in result for line in part.file("ids").read_bytes().splitlines()]
    assert [line[2] for line in ids] == [name for _, _, name in expected]
    assert sorted(texts_of(result)) == sorted(text for texts in groups for text in texts)


def test_another_seed_another_order_and_equal_parts_do_not_collide(tmp_path: Path) -> None:
    groups = [[f"{i}" for i in range(50)]] * 2
    orders = {}
    for seed in (1, 2):
        parts = parts_of(tmp_path, groups, seed, with_ids=False)
        orders[seed] = texts_of([shuffle(task) for task in plan_shuffle(parts, tmp_path)])
    assert orders[1] != orders[2] and sorted(orders[1]) == sorted(orders[2])
    # Were their keys the same, copies would stand side by side.
    assert sum(a == b for a, b in zip(orders[1], orders[1][1:])) < 10


def test_ties_stand_in_the_order_of_parts_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.prepare.tasks import encode as encoding

    monkeypatch.setattr(encoding, "document_keys", lambda s, name, rows: (rows % 2).astype(np.uint64))
    parts = parts_of(tmp_path, [["a0", "a1", "a2"], ["b0", "b1", "b2"]])
    assert texts_of([shuffle(t) for t in plan_shuffle(parts, tmp_path)]) == ["a0", "a2", "b0", "b2", "a1", "b1"]


def test_positions_are_uniform(tmp_path: Path) -> None:
    # 40 seeds, 64 documents: where each document lands, in 8 ranges, against chance; chi-square with 7 x 64 freedom.
    counts = np.zeros((64, 8), int)
    for seed in range(40):
        keys = np.concatenate([document_keys(Shuffle(seed), f"part {p}", np.arange(16)) for p in range(4)])
        counts[np.argsort(keys), np.arange(64) // 8] += 1
    expected = 40 / 8
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = 64 * 7
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)
    assert counts.sum() == 40 * 64


def test_a_finished_task_is_taken_up_and_a_lost_file_is_noticed(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, [["a", "b"], ["c"]])
    (task,) = plan_shuffle(parts, tmp_path)
    first = shuffle(task)
    keys, tokens = parts[0].file("keys").read_bytes(), parts[0].file("tokens")
    parts[0].file("keys").unlink()
    assert shuffle(task) == first
    first.file("json").unlink()
    parts[0].file("keys").write_bytes(keys)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    for scale in (0, 1):
        with pytest.raises(PrepareError):
            shuffle(task, scale)
    assert plan_shuffle([], tmp_path) == []


def test_a_giant_document_is_copied_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [["x" * 5000, "a", "b" * 300], ["y" * 9000, "c"]]
    parts = parts_of(tmp_path, groups)
    expected = texts_of([shuffle(task) for task in plan_shuffle(parts, tmp_path)])
    monkeypatch.setattr(shuffling, "_MEMORY_BYTES", 100)
    monkeypatch.setattr(shuffling, "_WRITE_BYTES", 64)
    assert texts_of([shuffle(task) for task in plan_shuffle(parts, tmp_path, 4000)]) == expected
