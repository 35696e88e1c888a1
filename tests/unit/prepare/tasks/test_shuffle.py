"""The shuffle's laws: a permutation, a pure function of seed and inputs, equal to sorting in memory, uniform."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.tasks import shuffle as shuffling
from forebay.prepare.tasks.encode import EncodeTask, encode
from forebay.prepare.tasks.shuffle import EncodedPart, Shuffle, document_keys, shuffle_parts
from forebay.storage.store import open_store
from support.token_parts import coder, documents, text_part


def encode_parts(folder: Path, groups: list[list[str]], seed: int = 1, with_ids: bool = True) -> list[EncodedPart]:
    seen = {}
    parts = []
    for texts in groups:
        part = text_part(folder, texts)
        occurrence = seen[part.name] = seen.get(part.name, -1) + 1
        task = EncodeTask(part, coder(folder), open_store(folder), shuffle=Shuffle(seed, occurrence), with_ids=with_ids)
        parts.append(encode(task).part)
    return parts


def shuffled_texts(folder: Path, parts: list[EncodedPart]) -> list[str]:
    return [bytes(tokens[:-1]).decode() for tokens in documents(folder, parts)]


def shuffled(folder: Path, parts: list[EncodedPart], *bucket: int, scale: int = 0) -> list[EncodedPart]:
    return shuffle_parts(parts, open_store(folder), lambda run, tasks: [run(task, scale) for task in tasks], *bucket)


@settings(max_examples=10)
@given(
    st.lists(st.lists(st.text("abü", min_size=1, max_size=8), max_size=12), min_size=1, max_size=9),
    st.integers(200, 5000), st.integers(0, 3), st.integers(0, 1), st.integers(2, 5),
)  # fmt: skip
def test_equals_sorting_in_memory(tmp_path_factory, groups, bucket, seed, scale, fan_in):
    """In as many levels as the parts need."""
    folder = tmp_path_factory.mktemp("s")
    parts = encode_parts(folder, groups, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffling, "_FAN_IN", fan_in)
        if seed % 2:  # Documents are copied, not held.
            patch.setattr(shuffling, "_MEMORY_BYTES", 10)
            patch.setattr(shuffling, "_WRITE_BYTES", 4)
        result = shuffled(folder, parts, bucket, scale=scale)
    expected, seen = [], {}
    for texts in groups:
        name = text_part(folder / "names", texts).name
        occurrence = seen[name] = seen.get(name, -1) + 1
        keys = document_keys(Shuffle(seed, occurrence), name, np.arange(len(texts)))
        expected += list(zip(keys.tolist(), texts, [f"id{i}" for i in range(len(texts))]))
    expected.sort(key=lambda row: row[0])
    assert shuffled_texts(folder, result) == [text for _, text, _ in expected]
    ids = [json.loads(line) for part in result for line in (folder / part.object("ids")).read_bytes().splitlines()]
    assert [line[2] for line in ids] == [name for _, _, name in expected]


def test_another_seed_another_order_and_equal_parts_do_not_collide(tmp_path):
    groups = [[f"{i}" for i in range(50)]] * 2
    orders = {}
    for seed in (1, 2):
        parts = encode_parts(tmp_path, groups, seed, with_ids=False)
        orders[seed] = shuffled_texts(tmp_path, shuffled(tmp_path, parts))
    assert orders[1] != orders[2]
    # Were their keys the same, copies would stand side by side.
    assert sum(a == b for a, b in zip(orders[1], orders[1][1:])) < 10


def test_ties_stand_in_the_order_of_parts_and_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "forebay.prepare.tasks.encode.document_keys", lambda s, name, rows: (rows % 2).astype(np.uint64)
    )
    parts = encode_parts(tmp_path, [["a0", "a1", "a2"], ["b0", "b1", "b2"]])
    for bucket in (1, 1 << 20):
        texts = shuffled_texts(tmp_path, shuffled(tmp_path, parts, bucket))
        assert texts == ["a0", "a2", "b0", "b2", "a1", "b1"]


def test_a_truncated_part_is_noticed(tmp_path):
    parts = encode_parts(tmp_path, [["a", "b"], ["c"]])
    for kind in ("tokens", "keys"):
        path = tmp_path / parts[0].object(kind)
        data = path.read_bytes()
        path.write_bytes(data[:-2])
        for scale in (0, 1):
            with pytest.raises(PrepareError, match="got fewer bytes"):
                shuffled(tmp_path, parts, scale=scale)
        path.write_bytes(data)
    assert shuffled(tmp_path, []) == []
