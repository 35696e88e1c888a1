"""Each stage that cleans or filters: plain data, rows and order kept, the same for any cut of a batch; and what it must
never change. A second time it changes and drops nothing, but for a few whose source or context says otherwise."""

import dataclasses
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unicodedata import is_normalized, normalize

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.prepare.clean.boilerplate import Boilerplate
from forebay.prepare.clean.pii import KINDS, Pii
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.clean.unicode import Unicode
from forebay.prepare.decontaminate import Decontaminate
from forebay.prepare.documents import Stage
from forebay.prepare.extract.extractors import Extract
from forebay.prepare.filters.c4 import C4
from forebay.prepare.filters.code import Code
from forebay.prepare.filters.language import Language
from forebay.prepare.filters.lines import LineRules
from forebay.prepare.filters.perplexity import Perplexity
from forebay.prepare.filters.quality import FineWeb, GopherQuality, GopherRepetition, Length
from forebay.prepare.filters.url import Url
from forebay.prepare.recipe import STAGES
from forebay.prepare.scores.columns import Repeat, Select, Subset
from support.batches import to_batch

WORDS = str(Path(__file__))  # any file of lines serves as a list, and as an evaluation set
ONCE = "pii", "c4", "decontaminate"


def is_unchanged(text, out):
    return text == out


def is_normal(text, out, form="NFC"):
    return is_normalized(form, out) and not re.search("[\0-\b\v-\x1f\x7f-\x9f\u200b\ufeff]|[ \t]$", out, re.M)


def has_letters(form, text, out):
    """White space, controls and what is neither seen nor joins letters aside."""
    first, second = (re.sub(r"[\s\0-\xa0\xad\u200b\u2060\ufeff]", "", normalize(form, some)) for some in (text, out))
    return first == second


def has_lines(text, out):
    lines = iter(text.splitlines())
    return all(line in lines for line in out.splitlines())


def has_sentences(text, out):
    text = re.sub(r"\[[0-9]*\]|\[edit\]|\[citation needed\]", "", text)
    return has_lines(*("\n".join(map(str.strip, some.splitlines())) for some in (text, out)))


def is_masked(text, out):
    pieces = re.split(f"<(?:{'|'.join(KINDS)})>", out)
    return re.fullmatch("[^\n]+?".join(map(re.escape, pieces)), text) is not None


def is_cut(text, out):
    return re.search(".+".join(map(re.escape, out.split("\n\n"))), text, re.S) is not None


CASES: list[tuple[Stage, Callable]] = [
    (Unicode(), is_normal), (Unicode(form="NFKC"), partial(is_normal, form="NFKC")),
    (Unicode(mojibake=False, form="none"), partial(has_letters, "NFD")),
    (Unicode(mojibake=False), partial(has_letters, "NFC")),
    (Pii(), is_masked), (Pii(max_count=1), is_masked),
    (Pii(style="fineweb"), lambda text, out: text.count("\n") == out.count("\n")),
    (Boilerplate(), has_lines), (LineRules(), has_lines),
    (LineRules(max_removed_words=0.1), has_lines),
    (C4(), has_sentences), (C4(min_sentences=1, terminal_punctuation=False), has_sentences),
    (Decontaminate((WORDS,), method="ngram", ngram=3, action="cut"), is_cut),
    *(
        (stage, is_unchanged)
        for stage in (
            Toxic(WORDS), Toxic(), Code(), Url(), Length(), GopherQuality(), GopherRepetition(), FineWeb(), Extract(),
            Decontaminate((WORDS,), ngram=3), Language(("de",), model="column"), Perplexity("column", max_perplexity=3),
            Select("perplexity", max=2), Subset("language", one_of=("de",), subset="german"), Repeat("perplexity"),
        )
    ),
]  # fmt: skip


def test_every_table_of_a_recipe_is_here():
    assert {stage.name.partition(".")[0] for stage, _ in CASES} == set(STAGES)


@pytest.mark.parametrize("stage, _", CASES)
def test_is_plain_data_and_adds_no_row(stage, _):
    assert pickle.loads(pickle.dumps(stage)) == stage and hash(stage) == hash(stage)
    assert dataclasses.is_dataclass(stage) and stage.version
    assert all(Path(file).is_file() for file in stage.files())
    none = to_rows([("", None)]).slice(1)
    assert len(stage.apply(none).batch) == 0
    assert texts(stage.apply(to_rows([("", None)] * 2)).batch) == ["", ""]


VOCABULARY = (
    "the|and|word.|Wort. Noch ein Satz.|🎉|日本|你好世界，再见。|\n|\n\n|...|שלום\u200f|# [1]|• a|0x41,|v1.2.3.4|\t|"
    "2024-01-15|می\u200cخواهم|e\u0301|iPhone|    return x|a@mail.org|+49 89 1234567|Sign in|नमस्ते|\u202eabc\u202c|"
    "3 likes|\nHome\n|\nMenu\n|\nSport\n|\nWe use cookies on this site and others.\n|\nIt is a long line of text.\n|"
    "[edit]|\r\n|ﬁne|schÃ¶n|\u200b|\u00ad|👩\u200d👩|8.8.8.8|app 9.8.7.6|call 467 3395|what it must never change|{|"
    "lorem ipsum|GB29 NWBK 6016 1331 9268 19|Mr. Smith said: “It’s 5 o’clock.”|Ã|â|€|™|\u0327|\u0344|\x85|\x92|½|"
    "\u1100|\u1161|\u11a8|Γ|Ç|√|Р|\u09c7|\u09be|fuck|  |QUJD"
)
WORD = st.sampled_from(VOCABULARY.split("|"))
JOINED = st.tuples(st.sampled_from(["", " "]), st.lists(WORD | st.characters(codec="utf-8"), max_size=100)).map(
    lambda pair: pair[0].join(pair[1])
)
TEXT = st.text(max_size=40) | st.text("ab. \n-•…#[1]{", max_size=300) | JOINED
LANGUAGE = st.sampled_from(["de", "en", "zh", "", None])


def to_rows(rows):
    """A batch of texts and languages, with two columns of numbers."""
    batch = to_batch([text for text, _ in rows], [code for _, code in rows])
    number = pa.array([len(text) % 5 / 1 for text, _ in rows])
    return batch.append_column("perplexity", number).append_column("language_score", number)


def texts(batch):
    return batch.column("text").to_pylist()


@pytest.mark.parametrize("stage, holds", CASES)
@given(rows=st.lists(st.tuples(TEXT, LANGUAGE), min_size=1, max_size=4), cut=st.integers(0, 4))
def test_laws(stage, holds, rows, cut):
    batch = to_rows(rows)
    full, *parts = (stage.apply(part) for part in (batch, batch.slice(0, cut), batch.slice(cut)))
    full.batch.column("text").validate(full=True)
    assert texts(full.batch) == [text for part in parts for text in texts(part.batch)]
    assert full.drop.dtype == np.int16 and full.drop.tolist() == [i for part in parts for i in part.drop.tolist()]
    assert dict(full.counts) == {kind: sum(part.counts.get(kind, 0) for part in parts) for kind in full.counts}
    others = batch.drop_columns("text")
    assert full.batch.select(others.schema.names).equals(others)
    retained = full.batch.filter(pa.array(full.drop < 0))
    assert all(map(holds, texts(batch.filter(pa.array(full.drop < 0))), texts(retained)))
    if stage.name not in ONCE:
        again = stage.apply(retained)
        assert texts(again.batch) == texts(retained) and max(again.drop, default=-1) < 0
