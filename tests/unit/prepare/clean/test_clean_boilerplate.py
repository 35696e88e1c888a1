from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats.records import RESPONSE_MARK, Record
from forebay.prepare.clean.boilerplate import Boilerplate
from support.batches import stage_texts, to_batches


def test_lines_go_and_text_stays() -> None:
    page = (
        "Home\nNews\n\nSport\nWeather\nAbout Us\n"
        "The council met on Tuesday.\nShare\n  READ MORE  \nWe use cookies to improve this site.\n"
        "It was a long meeting, they said.\n© 2024 The Paper\nCopyright (c) 2024\nAll rights reserved."
    )
    assert stage_texts(Boilerplate(), [page, "Share the bread.\nHome is where it is."]) == [
        "\nThe council met on Tuesday.\nIt was a long meeting, they said.\n",
        "Share the bread.\nHome is where it is.",
    ]


def test_what_is_not_boilerplate() -> None:
    long = "He read the privacy policy. " * 8  # a long line is text, whatever it speaks of
    texts = ["a\nb\nc\nd\nhello, my friend.", "share this with them", "reprint", long, f"{RESPONSE_MARK}yes\n" * 9]
    assert stage_texts(Boilerplate(), texts) == texts


def test_counts_and_empty() -> None:
    (batch,) = to_batches(
        [Record(i, text=t) for i, t in enumerate(["Menu\nHome", "Menu\nText is here.", "\n \n", "a\n" * 5])]
    )
    verdict = Boilerplate().apply(batch)
    assert verdict.drop.tolist() == [0, -1, 0, 0] and Boilerplate().reasons == ("empty",)
    assert verdict.counts == {"phrase_lines": 1}
    assert Boilerplate(menu_lines=0).apply(batch).drop.tolist() == [0, -1, 0, -1]


def test_patterns_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "patterns"
    path.write_text("# ours\nanywhere here\n^Starts\n=Whole Line\n\n=Über uns\n")
    stage = Boilerplate(english=False, patterns=str(path), menu_lines=0)
    text = "it is ANYWHERE HERE too\nstarts so\nit starts so\nwhole line\na whole line\nÜber uns\nHome\nanywhere hereby"
    assert stage_texts(stage, [text]) == ["it starts so\na whole line\nHome\nanywhere hereby"]
    assert stage.files() == (str(path),)


def by_hand(text: str, phrases: set[str], menu_lines: int) -> str:
    """Boilerplate with whole-line phrases, as one would write it without a care for time."""
    lines = text.split("\n")
    short = [bool(line.strip()) and len(line.split()) <= 3 and line.strip()[-1] not in '.!?,:;"' for line in lines]
    gone = {i for i, line in enumerate(lines) if line.strip() in phrases}
    run: list[int] = []
    for i, line in [*enumerate(lines), (len(lines), "The end.")]:
        if line.strip() and not (i < len(lines) and short[i]):
            if len(run) >= menu_lines:
                gone.update(run)
            run = []
        elif line.strip():
            run.append(i)
    return "".join(line + "\n" * (i < len(lines) - 1) for i, line in enumerate(lines) if i not in gone)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["home", " menu ", "a b c", "a b c d", "text.", "", "x"]), max_size=20), st.integers(1, 4)
)
def test_agrees_with_the_plain_rule(lines: list[str], menu_lines: int) -> None:
    text = "\n".join(lines)
    (batch,) = to_batches([Record(0, text=text), Record(1, text="between\n"), Record(2, text=text)])
    result = Boilerplate(menu_lines=menu_lines).apply(batch).batch.column("text").to_pylist()
    assert result[0] == result[2] == by_hand(text, {"home", "menu"}, menu_lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": "/nowhere"}, "patterns: expected a file"),
        ({"menu_lines": -1}, "menu_lines: expected at least 0, got -1"),
        ({"max_line_bytes": 0}, "max_line_bytes: expected at least 1, got 0"),
        ({"english": "yes"}, "english: expected true or false"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Boilerplate(**options)  # type: ignore[arg-type]
