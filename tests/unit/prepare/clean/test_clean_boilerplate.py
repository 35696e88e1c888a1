from forebay.formats.records import RESPONSE_MARK
from forebay.prepare.clean.boilerplate import Boilerplate
from support.batches import stage_texts, to_batch


def test_lines_go_and_text_stays():
    page = (
        "Home\nNews\n\nSport\nWeather\nMore About Us\n"
        "The council met on Tuesday.\nShare\n  READ MORE  \nWe use cookies to improve this site.\n"
        "It was a long meeting, they said.\n© 2024 The Paper\nCopyright (c) 2024\nAll rights reserved."
    )
    two = "Sport\nMusic\nFilm\nWe use cookies on this site to make it better for you.\nBooks\nGames\nHere is the text."
    assert stage_texts(Boilerplate(), [two, page, "Share the bread.\nHome is where it is."]) == [
        "Here is the text.",
        "\nThe council met on Tuesday.\nIt was a long meeting, they said.\n",
        "Share the bread.\nHome is where it is.",
    ]


def test_what_is_not_boilerplate():
    long = "He read the privacy policy. " * 8  # a long line is text, whatever it speaks of
    texts = [
        "a\nb\nc\nd\nhello, my friend.",
        "a\nb\nc\nd\ne f g h\ni",
        "share this with them",
        "reprint",
        long,
        f"{RESPONSE_MARK}yes\n" * 9,
    ]
    assert stage_texts(Boilerplate(), texts) == texts


def test_counts_and_empty():
    batch = to_batch(["Menu\nHome", "Menu\nText is here.", "\n \n", "a\n" * 5])
    verdict = Boilerplate().apply(batch)
    assert verdict.drop.tolist() == [0, -1, 0, 0] and Boilerplate().reasons == ("empty",)
    assert verdict.counts == {"phrase_lines": 1}
    assert Boilerplate(menu_lines=0).apply(batch).drop.tolist() == [0, -1, 0, -1]


def test_patterns_of_the_user(tmp_path):
    path = tmp_path / "patterns"
    path.write_text("# ours\nanywhere here\n^Starts\n=Whole Line\n\n=Über uns\n")
    stage = Boilerplate(patterns=str(path), menu_lines=0)
    text = "it is ANYWHERE HERE too\nstarts so\nit starts so\nwhole line\na whole line\nÜber uns\nHome\nanywhere hereby"
    assert stage_texts(stage, [text]) == ["it starts so\na whole line\nanywhere hereby"]
    assert stage.files() == (str(path),)
