"""Each rule that takes lines out, on lines on both sides of its threshold; counts; documents that lose too much."""

import pytest

from forebay.prepare.documents import StageResult
from forebay.prepare.filters.lines import LineRules
from support.batches import to_batch
from support.paths import read_cases


def apply(stage: LineRules, *texts: str, languages: tuple[str | None, ...] = ()) -> StageResult:
    return stage.apply(to_batch(texts, languages or None))


def rule(line: str, code: str | None = None, **fields: object) -> str:
    """The rule by which a line goes; "" if it stays."""
    text = f"This is the line before.\n{line}\n\nAnd this is the one after it."
    result = apply(LineRules(**fields), text, languages=(code,))
    expected = text.replace(f"{line}\n", "") if result.counts else text
    assert result.batch["text"][0].as_py() == expected
    (name,) = [*result.counts] or [""]
    return name.removeprefix("lines_")


PLAIN = "shoes sale brand online store price discount shipping free"  # nine words, none a function word


@pytest.mark.parametrize("line, expected", read_cases("lines")["lines"])
def test_rules(line, expected):
    assert rule(line) == expected


@pytest.mark.parametrize(
    "line, fields",
    [
        ("*** ==", {"max_symbols": 1, "min_words": 0}),
        ("word", {"min_words": 0}),
        ("ABC DEF", {"max_uppercase": 1}),
        (PLAIN + " cheap", {"stop_word_lines": 0}),
        (PLAIN + " cheap", {"stop_word_lines": 11}),
    ],
)
def test_rules_can_be_off(line, fields):
    assert rule(line) != "" and rule(line, **fields) == ""


def test_language_of_the_document():
    line = "unsere Kinder spielen gern draußen und lachen laut dabei abends"
    assert rule(line, "de") == rule(line) == rule(line, "tlh") == ""
    assert rule(line, "en") == "no_stop_words"
    assert rule(PLAIN + " cheap", "de") == "no_stop_words" and rule(PLAIN + " cheap", "tlh") == ""


def test_counts_and_dropped_documents():
    half = "This is a line that stays here.\n1 2 3 4 5 6 7 8"
    texts = (half, "Word\n3 likes\n", "\n\n", "", "All of this stays, and so it is.")
    result = apply(LineRules(max_removed_words=0.5), *texts)
    assert result.drop.tolist() == [-1, 0, -1, -1, -1] and result.counts == {"lines_numbers": 1}
    assert result.batch["text"].to_pylist() == ["This is a line that stays here.", *texts[1:]]
    result = apply(LineRules(max_removed_words=0.4), *texts)
    assert result.drop.tolist() == [1, 0, -1, -1, -1] and not result.counts
    assert result.batch["text"].to_pylist() == list(texts)


def test_a_line_above_the_limit_stays():
    assert not apply(LineRules(), "! " * (1 << 19) + "!").counts
    assert apply(LineRules(), "! " * (1 << 18) + "\nThis is it.").counts == {"lines_symbols": 1}
