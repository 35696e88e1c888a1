import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from benchmarks.prepare.batches import to_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats.records import Record
from forebay.prepare.clean.toxic import Toxic
from forebay.prepare.documents import Stage

TextsOf = Callable[[Stage, Sequence[str]], list[str]]
Growth = Callable[[Stage, str, int], float]


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    (tmp_path / "en").write_text("darn\nBad Word\nsm\n\nüble\n")
    (tmp_path / "zh").write_text("坏话\n")
    (tmp_path / "hi").write_text("गधा\n")
    return tmp_path


def batch_of(texts: Sequence[str], languages: Sequence[str] | None = None) -> pa.RecordBatch:
    (batch,) = to_batches([Record(i, text=text) for i, text in enumerate(texts)])
    return batch.append_column("language", pa.array(languages)) if languages else batch


def dropped(stage: Toxic, texts: Sequence[str], languages: Sequence[str] | None = None) -> list[int]:
    drop: list[int] = stage.apply(batch_of(texts, languages)).drop.tolist()
    return drop


def test_words_stand_apart(lists: Path, texts_of: TextsOf) -> None:
    texts = [
        "DARN it",
        "darned",
        "un-darn",
        "a bad word.",
        "bad words",
        "bad  word",
        "sm",
        "Üble",
        "übles",
        "édarn",
        "",
    ]
    assert dropped(Toxic(str(lists)), texts) == [0, -1, 0, 0, -1, -1, -1, 0, -1, -1, -1]
    assert texts_of(Toxic(str(lists)), texts) == texts


def test_languages_choose_the_list(lists: Path) -> None:
    texts, languages = ["说坏话的人", "darn", "坏话", "darn", "गधा", "गधाा"], ["zh", "zh", "en", "xx", "hi", "hi"]
    verdict = Toxic(str(lists)).apply(batch_of(texts, languages))
    assert verdict.drop.tolist() == [0, -1, -1, -1, 0, -1]
    assert verdict.counts == {"no_list": 1}
    assert dropped(Toxic(str(lists / "en")), texts, languages) == [-1, 0, -1, 0, -1, -1]
    assert dropped(Toxic(str(lists), language="../en"), ["darn"]) == [-1]


def test_limits(lists: Path) -> None:
    texts = ["darn", "darn darn", "darn darn darn", "darn and a long text after it"]
    assert dropped(Toxic(str(lists), max_matches=2), texts) == [-1, -1, 0, -1]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab ", min_size=1, max_size=4).filter(lambda w: bool(w.strip())), min_size=1, max_size=6),
    st.text("ab .", max_size=40),
)
def test_finds_what_a_regular_expression_finds(phrases: list[str], text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "list"
        path.write_text("\n".join(phrases))
        result = dropped(Toxic(str(path)), [text]) == [0]
    words = "|".join(re.escape(phrase.strip()) for phrase in phrases)
    assert result == (re.search(rf"(?:\W|^)(?:{words})(?:\W|$)", text) is not None)


def test_real_lists_agree_with_the_rule_of_c4(data: Path) -> None:
    texts = [
        (data / f"books/gutenberg_en/{name}.txt").read_text("latin-1") for name in ("carroll-alice", "whitman-leaves")
    ]
    texts = [text[i : i + 2000] for text in texts for i in range(0, len(text), 2000)][:250]
    words = [re.escape(line.strip()) for line in (data / "badwords/en").read_text().splitlines() if line.strip()]
    pattern = re.compile(r"(?:\W|^)(?:{})(?:\W|$)".format("|".join(words)))
    theirs = [pattern.search(text.lower()) is not None for text in texts]
    ours = [drop == 0 for drop in dropped(Toxic(str(data / "badwords")), texts)]
    assert ours == theirs and 0 < sum(ours) < len(ours)
    for language in ("zh", "ja", "th", "ru", "hi", "ar"):
        word = (data / "badwords" / language).read_text().splitlines()[-1].strip()
        assert dropped(Toxic(str(data / "badwords")), [word, "ok"], [language] * 2) == [0, -1], language


def test_fasttext_model(data: Path) -> None:
    pytest.importorskip("fasttext")
    stage = Toxic(model=str(data / "lid/lid.176.ftz"), label="__label__de", threshold=0.6)
    assert dropped(stage, ["Das ist ein deutscher Satz\nund noch einer.", "This is an English sentence."]) == [1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lists: expected a file or directory"),
        ({"lists": "/nowhere"}, "lists: .*does not exist"),
        ({"model": "/nowhere"}, "model: expected a fastText model"),
        ({"lists": "/", "threshold": 2}, "threshold: expected at most 1, got 2"),
        ({"lists": "/", "max_matches": -2}, "max_matches: expected at least -1, got -2"),
        ({"lists": "/", "allow": "x"}, "allow: expected a list"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Toxic(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", ["darn", "darn ", "bad ", "a", "\u0301"])
def test_time_is_linear(piece: str, lists: Path, growth: Growth) -> None:
    assert growth(Toxic(str(lists)), piece, 4_000_000) < 8
