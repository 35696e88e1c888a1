from pathlib import Path

import pytest

from forebay.prepare.clean.toxic import Toxic
from support.batches import drop_codes, stage_texts, to_batch


@pytest.fixture
def lists(tmp_path) -> Path:
    (tmp_path / "en").write_text("darn\nBad Word\nsm\n\nüble\nx y x z\ny x y\n")
    (tmp_path / "zh").write_text("坏话\n")
    (tmp_path / "hi").write_text("गधा\n")
    return tmp_path


def test_words_stand_apart(lists):
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
        "x y x y",
        "y x yx z",
        "",
    ]
    assert drop_codes(Toxic(str(lists), language="en"), texts) == [0, -1, 0, 0, -1, -1, -1, 0, -1, -1, 0, -1, -1]
    assert stage_texts(Toxic(str(lists)), texts) == texts


def test_annotation_scores_and_drops_nothing(lists):
    for stage in (Toxic(), Toxic(str(lists))):
        result = stage.annotation().apply(to_batch(["fuck " * 20, "A walk by the river."]))
        assert result.drop.tolist() == [-1, -1]
    assert Toxic().annotation().apply(to_batch(["fuck " * 20, "A walk."])).batch["toxic_score"].to_pylist()[0] > 1


def test_languages_choose_the_list(lists):
    texts, languages = ["说坏话的人", "darn", "坏话", "darn", "गधा", "गधाा"], ["zh", "zh", "en", "xx", "hi", "hi"]
    verdict = Toxic(str(lists)).apply(to_batch(texts, languages))
    assert verdict.drop.tolist() == [0, -1, -1, -1, 0, -1]
    assert verdict.counts == {"no_list": 1}
    assert drop_codes(Toxic(str(lists / "en")), texts, languages) == [-1, 0, -1, 0, -1, -1]
    assert drop_codes(Toxic(str(lists), language="../en"), ["darn"]) == [-1]


def test_lexicon_without_any_setting():
    texts = ["You are a fucking moron.", "The blue tit and the cock.", "word " * 600 + "fuck", "Du Arschficker", ""]
    result = Toxic().apply(to_batch(texts, ["en", "en", "en", "de", "en"]))
    assert [result.batch["toxic_score"][i].as_py() for i in (0, 4)] == [100.0, 0.0]
    assert drop_codes(Toxic(), texts) == [1, -1, -1, -1, -1] and drop_codes(Toxic(max_score=0.5), texts[2:3]) == [1]
    assert drop_codes(Toxic(allow=("fucking",)), texts[:1]) == [-1]
    assert Toxic().apply(to_batch(["Text"], ["la"])).counts == {"no_list": 1}
    assert drop_codes(Toxic(), ["这个 傻屄 他妈的 操你妈"], ["cmn_Hani"]) == [1]


def test_precision_and_recall_of_the_lexicon():
    """The texts are ours, written for this test; so is the judgement. Threats in polite words are beyond a lexicon."""
    lines = (Path(__file__).parent / "toxic_texts.tsv").read_text("utf-8").splitlines()
    labels, languages, texts = zip(*(line.split("\t") for line in lines))
    for column in (None, list(languages)):
        drops = drop_codes(Toxic(), texts, column)
        limits = {language: (0.95, 0.7) if language == "en" else (1, 0.8) for language in languages}
        for language, (min_precision, min_recall) in limits.items():
            verdicts = [(a == "1", d >= 0) for a, x, d in zip(labels, languages, drops) if x == language]
            hits = sum(toxic and drop for toxic, drop in verdicts)
            assert hits >= min_precision * sum(drop for _, drop in verdicts)
            assert hits >= min_recall * sum(toxic for toxic, _ in verdicts)
    english = [text for text, language in zip(texts, languages) if language == "en"]
    drops = drop_codes(Toxic("ldnoobw"), english)
    hits = sum(a == "1" and d >= 0 for a, d in zip(labels, drops))
    assert hits / sum(d >= 0 for d in drops) < 0.5  # what weights are for
