"""Each stage that cleans or filters: plain data, rows and order kept, the same for any cut of a batch."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
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
from forebay.prepare.filters.quality import FineWeb, GopherQuality, GopherRepetition, Length
from forebay.prepare.filters.url import Url
from support.batches import to_batch, to_batches

WORDS = Path(__file__)  # any file of lines serves as a list
TABLE = (("de", (("min_sentences", 2),)), ("zh", (("min_words_per_line", 1),)))
STAGES = [
    Unicode(), Unicode(form="NFKC"), Pii(), Pii(style="fineweb"), Pii(max_count=1), Toxic(str(WORDS)), Boilerplate(),
    LineRules(), LineRules(max_removed_words=0.1, language=(("de", (("min_words", 0),)),)), C4(), Code(), Url(),
    Length(), GopherQuality(), GopherRepetition(), FineWeb(),
    C4(min_sentences=1, terminal_punctuation=False, language=TABLE),
]  # fmt: skip


def name(stage: Stage) -> str:
    return stage.name


@pytest.mark.parametrize("stage", STAGES, ids=name)
def test_is_plain_data_and_adds_no_row(stage: Stage) -> None:
    assert pickle.loads(pickle.dumps(stage)) == stage and hash(stage) == hash(stage)
    assert dataclasses.is_dataclass(stage) and stage.version >= 1
    assert all(Path(file).is_file() for file in stage.files())
    none = pa.record_batch([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
    assert len(stage.apply(none).batch) == 0
    (empty,) = to_batches([Record(0), Record(1)])
    assert stage.apply(empty).batch.column("text").to_pylist() == ["", ""]


WORD = st.sampled_from(
    [
        "the",
        "and",
        "word.",
        "Wort. Noch ein Satz.",
        "🎉",
        "日本",
        "你好世界，再见。",
        "\n",
        "\n\n",
        "...",
        "שלום",
        "# [1]",
        "• a",
        "0x41,",
        "QUJD",
    ]
)
TEXT = st.text(max_size=40) | st.text("ab. \n-•…#[1]{", max_size=300) | st.lists(WORD, max_size=150).map(" ".join)
LANGUAGE = st.sampled_from(["de", "en", "zh", "", None])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXT, LANGUAGE), min_size=1, max_size=6), st.sampled_from(STAGES), st.data())
def test_cuts_of_a_batch_make_no_difference(
    rows: list[tuple[str, str | None]], stage: Stage, data: st.DataObject
) -> None:
    batch = to_batch([text for text, _ in rows], [code for _, code in rows])
    cut = data.draw(st.integers(0, len(rows)))
    full, *parts = (stage.apply(part) for part in (batch, batch.slice(0, cut), batch.slice(cut)))
    full.batch.column("text").validate(full=True)
    column = [text for part in parts for text in part.batch.column("text").to_pylist()]
    assert full.batch.column("text").to_pylist() == column
    assert full.drop.dtype == np.int16 and full.drop.tolist() == [i for part in parts for i in part.drop.tolist()]
    assert dict(full.counts) == {kind: sum(part.counts.get(kind, 0) for part in parts) for kind in full.counts}
    assert (
        full.batch.drop_columns("text")
        .select(batch.drop_columns("text").schema.names)
        .equals(batch.drop_columns("text"))
    )
