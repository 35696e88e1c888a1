"""What every cleaning stage keeps to, whatever it is given."""

import dataclasses
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.formats.records import Record
from forebay.prepare.clean.boilerplate import Boilerplate
from forebay.prepare.clean.pii import Pii
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.clean.unicode import Unicode
from forebay.prepare.documents import SCHEMA, Stage
from forebay.prepare.filters.c4 import C4
from forebay.prepare.filters.code import Code
from forebay.prepare.filters.lines import LineRules
from forebay.prepare.filters.url import Url
from support.batches import to_batches

WORDS = Path(__file__)  # any file of lines serves as a list
STAGES: list[Stage] = [
    Unicode(), Unicode(form="NFKC"), Pii(), Pii(style="fineweb"), Pii(max_count=1), Toxic(str(WORDS)), Boilerplate(),
    LineRules(), LineRules(max_removed_words=0.1, language=(("de", (("min_words", 0),)),)), C4(), Code(), Url(),
]  # fmt: skip


def name(stage: Stage) -> str:
    return stage.name


@pytest.mark.parametrize("stage", STAGES, ids=name)
def test_is_plain_data(stage: Stage) -> None:
    assert pickle.loads(pickle.dumps(stage)) == stage and hash(stage) == hash(stage)
    assert dataclasses.is_dataclass(stage) and stage.version >= 1
    assert all(Path(file).is_file() for file in stage.files())


@pytest.mark.parametrize("stage", STAGES, ids=name)
def test_nothing_in_nothing_out(stage: Stage) -> None:
    none = pa.record_batch([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
    assert len(stage.apply(none).batch) == 0
    (empty,) = to_batches([Record(0), Record(1)])
    assert stage.apply(empty).batch.column("text").to_pylist() == ["", ""]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=6), st.sampled_from(STAGES), st.data())
def test_cuts_of_a_batch_make_no_difference(texts: list[str], stage: Stage, data: st.DataObject) -> None:
    (batch,) = to_batches([Record(i, text=text) for i, text in enumerate(texts)])
    cut = data.draw(st.integers(0, len(texts)))
    full, *parts = (stage.apply(part) for part in (batch, batch.slice(0, cut), batch.slice(cut)))
    column = [text for part in parts for text in part.batch.column("text").to_pylist()]
    assert full.batch.column("text").to_pylist() == column
    assert full.drop.tolist() == [index for part in parts for index in part.drop.tolist()]
    total = {kind: sum(part.counts.get(kind, 0) for part in parts) for kind in full.counts}
    assert dict(full.counts) == total
    assert full.batch.drop_columns("text").equals(batch.drop_columns("text"))
