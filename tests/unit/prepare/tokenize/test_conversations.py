"""Rows for fine-tuning: what is given is masked, what is learnt is not, and no token is lost uncounted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.dataset.chunks import CHUNKS_FILE
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceTable
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import UsageError
from forebay.formats.records import PROMPT_MARK as G
from forebay.formats.records import RESPONSE_MARK as L
from forebay.prepare.tasks.encode import EncodeResult, EncodeTask, encode
from forebay.prepare.tasks.slicing import RowShape, plan_slices, slice_tasks, write_plan, write_slice
from forebay.prepare.tokenize.renderings import (
    TEMPLATES,
    TRAINED,
    Conversations,
    Template,
)
from forebay.storage.store import open_store
from support.token_parts import coder, text_part
from support.trained_tokenizer import trained_bpe

BARE = Template(prompt_suffix="")


def encode_rows(folder: Path, texts: list[str], length: int, **how: Any) -> EncodeResult:
    rendering = Conversations(length, how.pop("template", BARE), **how)
    return encode(EncodeTask(text_part(folder, texts), coder(folder), open_store(folder), rendering=rendering))


def write_dataset(folder: Path, encoded: EncodeResult, shape: RowShape, slice_bytes: int = 4096) -> Dataset:
    (folder / "out/slices").mkdir(parents=True)
    plans = plan_slices([encoded.part], open_store(folder), slice_bytes=slice_bytes, shape=shape)
    tasks = slice_tasks(plans, [write_plan(plan) for plan in plans], open_store(folder / "out"), shape, 1 << 16, 0)
    infos = [write_slice(task) for task in tasks]
    table = SliceTable.from_rows(infos)
    manifest = Manifest.of(table, {}, name="r", layout="rows")
    (folder / "out" / TABLE_FILE).write_bytes(table.to_parquet())
    (folder / "out" / CHUNKS_FILE).write_bytes(table.sha256.tobytes())
    (folder / "out" / MANIFEST_FILE).write_bytes(manifest.to_json())
    dataset = open_dataset(folder / "out")
    assert dataset.verify().ok and max(table.bytes.tolist()) <= slice_bytes
    return dataset


def tensors(dataset: Dataset) -> dict:
    slices = [dataset.open_slice(i).tensors for i in range(dataset.num_slices)]
    return {name: np.concatenate([item[name] for item in slices]) for name in slices[0]}


def test_a_conversation_becomes_a_row(tmp_path):
    result = tensors(write_dataset(tmp_path, encode_rows(tmp_path, [f"{G}ab{L}cd"], 6), RowShape(6, "U16", 256)))
    assert {name: (values.dtype.str, values.tolist()) for name, values in result.items()} == {
        "input_ids": ("<u2", [[97, 98, 99, 100, 256, 256]]),
        "labels": ("<i8", [[-100, -100, 99, 100, 256, -100]]),
        "attention_mask": ("|u1", [[1, 1, 1, 1, 1, 0]]),
    }


def test_too_long_is_cut_or_dropped_and_counted(tmp_path):
    texts = [f"{G}ab{L}cdefgh", f"{G}abcdefgh{L}x", "", f"{G}only", "ok"]
    cut = encode_rows(tmp_path / "a", texts, 5)
    assert cut.changed == {"truncated": 1} and cut.dropped == {"empty": 1, "nothing_learnt": 2}
    dropped = encode_rows(tmp_path / "b", texts, 5, too_long="drop")
    assert dropped.changed == {} and dropped.dropped == {"empty": 1, "nothing_learnt": 1, "too_long": 2}
    assert cut.documents_out == 2 and dropped.documents_out == 1
    tokens = [np.fromfile(tmp_path / "a" / cut.part.object("tokens"), "<u4")]
    assert sum(int((some >= TRAINED).sum()) for some in tokens) == 3 + 3


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.text("xyz", min_size=1, max_size=6)), max_size=4), min_size=1, max_size=80
    )
)
def test_packing_loses_nothing(tmp_path_factory, conversations):
    texts = ["".join((L if learnt else G) + words for learnt, words in turns) for turns in conversations]
    texts.append(f"{L}end")
    folder = tmp_path_factory.mktemp("r")
    encoded = encode_rows(folder, texts, 30)
    shape = RowShape(30, "U16", 0, packed=True)
    result = tensors(write_dataset(folder, encoded, shape, 8192))
    rows = []
    for ids, labels, mask, places, owner in zip(*(result[n] for n in (
        "input_ids", "labels", "attention_mask", "position_ids", "segment_ids"))):  # fmt: skip
        assert (mask == (owner > 0)).all() and (labels[mask == 0] == -100).all()
        for segment in range(1, owner.max() + 1):
            mine = owner == segment
            assert places[mine].tolist() == list(range(mine.sum()))
            rows.append((ids[mine].tolist(), labels[mine].tolist()))
    expected = []
    for turns in [*conversations, [(True, "end")]]:
        ids = [(byte, learnt) for learnt, words in turns for byte in words.encode()]
        ids += [(256, True)] if turns and turns[-1][0] else []
        if any(learnt for _, learnt in ids):
            expected.append(([i for i, _ in ids], [i if learnt else -100 for i, learnt in ids]))
    assert rows == expected


def test_special_tokens_of_a_template_are_tokens_there_only(tmp_path):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    path = trained_bpe(tmp_path / "t.json", special, "user assistant hello", 300)
    spec = coder(tmp_path, str(path))
    part = text_part(tmp_path, [f"{G}hi<|im_end|>{L}yo"])
    rendering = Conversations(100, TEMPLATES["chatml"])
    assert not rendering.missing_tokens(spec) and rendering.missing_tokens(coder(tmp_path)) == special[1:]
    encoded = encode(EncodeTask(part, spec, open_store(tmp_path), rendering=rendering))
    tokens = np.fromfile(tmp_path / encoded.part.object("tokens"), "<u4")
    ids, learnt = tokens & 0x7FFFFFFF, tokens >> 31
    assert (ids == 1).sum() == 2 and (ids == 2).sum() == 2  # Two turns begin and end; what was said is no token.
    assert ids[-1] == 0 and learnt[-1] and ids[learnt == 1][-3] == 2


def test_misuse_is_refused(tmp_path):
    with pytest.raises(UsageError):
        Conversations(1)
    with pytest.raises(UsageError):
        Conversations(10, too_long="split")
    with pytest.raises(UsageError):
        RowShape(10, "U8")
    with pytest.raises(UsageError, match="at least a row"):
        plan_slices([], open_store(tmp_path), slice_bytes=4096, shape=RowShape(10_000, "U16"))
