"""HTML to main text: real pages by what must and must not be in it, and pages that attack."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest

from forebay.formats import warc
from forebay.formats.html import HtmlError, html_to_text
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.prepare.clean.extract import Extract, extract_html
from forebay.prepare.documents import SCHEMA
from support.shared_data import shared_data

PAGE = """<html><head><title>T</title><style>x{}</style></head><body class="has-sidebar">
<header>Site name</header><nav><a href=/>Home</a></nav><div class="cookie-notice">We use cookies</div>
<main><article><h1>The title</h1><p>First <b>bold</b> words.</p><ul><li>one</li><li>two</li></ul></article></main>
<div id=sidebar>Related</div><script>var x = "evil"</script><footer>Copyright</footer></body></html>"""
EXPECTED = {  # what must, and what must not be in the main text
    "maria-antoniak.github.io/2023/04/11/paperpile-to-zotero.html": ("Organize your Paperpile files", "Resources /"),
    "www.cs.washington.edu/people/faculty/weld": ("Professor Emeritus", "Drupal Login"),
    "www.iana.org/numbers": ("RIPE NCC", "Excellence"),
    "commoncrawl.org/": ("open repository of web crawl data", "Skip to content"),
    "an.wikipedia.org/wiki/Escopete": ("d'estilo romanico", "Politica de privacidat"),
    "0900-hovenier.nl/gelderland/oosterbeek/": ("uw tuinspecialist", "Algemene voorwaarden"),
    "soldaini.net/": ("Processing scientific PDFs", "Publications / Facts"),
}


def test_main_text() -> None:
    text = extract_html(PAGE)
    assert text.startswith("The title")
    assert "First bold words." in text
    assert not any(word in text for word in ("Site name", "Home", "cookies", "Related", "evil", "Copyright"))
    assert "Copyright" in html_to_text(PAGE)
    assert extract_html("") == extract_html("<html></html>") == ""


def test_real_pages() -> None:
    folder = shared_data("warc")
    pages: dict[str, str] = {}
    for name in ("dolma/sample-0000", "pywb/iana", "jwarc/cc", "whirlwind/whirlwind", "fastwarc/warcfile"):
        source = InputFile(str(folder / f"{name}.warc.gz"), name, "warc", "gz", 0, "")
        for record in warc.Warc().read_text(InputSplit((source,)), ReadOptions()):
            pages[record.url.partition("://")[2]] = extract_html(record.text) if record.html else record.text
    for url, (expected, unwanted) in EXPECTED.items():
        assert expected in pages[url], url
        assert unwanted not in pages[url], url


def test_a_name_that_misleads_does_not_lose_the_page() -> None:
    words = "Many words of a real article. " * 40
    page = f'<html><body><div class="content-with-sidebar menu-open"><p>{words}</p></div></body></html>'
    assert extract_html(page) == words.strip()


@pytest.mark.parametrize(
    "html",
    [
        "<div>" * 100_000 + "hello" + "</div>" * 100_000,
        "<table><tr><td>" * 30_000 + "hello",
        "<b><p>" * 30_000 + "hello",
        "<!--" * 50_000,
        "&" * 100_000 + "hello",
        "\0" * 50_000 + "<p>hel\0lo",
        "<svg><math>" * 20_000,
        "<![CDATA[" * 50_000,
        "<div class='" + "nav " * 50_000 + "'>hello",
        "<html><body>" + "<p>Some words in a paragraph " * 100_000,
    ],
    ids=range(10),
)
def test_hostile_pages(html: str) -> None:
    start = time.process_time()
    text = extract_html(html)
    assert time.process_time() - start < 4
    assert "\0" not in text
    assert len(text) <= len(html)


@pytest.mark.parametrize(
    ("html", "message"),
    [
        ("<p " + " ".join(f"a{i}" for i in range(50_000)) + ">x", "more than 1000 attributes"),
        ("<p " + " ".join(f"a{i}='>'" for i in range(5000)) + ">x", "more than 1000 attributes"),
        ("".join(f"<body b{i}>" for i in range(5000)), "5000 times"),
        ("<ul><li>x" * 30_000, "lists nested 30000 deep"),
        ("<ol>" * 400 + "x<br>" * 2000, "lists nested 400 deep"),
    ],
)
def test_pages_whose_cost_is_not_linear_are_refused(html: str, message: str) -> None:
    with pytest.raises(HtmlError, match=message):
        extract_html(html)
    with pytest.raises(HtmlError, match=message):
        html_to_text(html)


def test_limits_leave_honest_pages_alone() -> None:
    lists = "<ul>" * 30 + "".join(f"<li>item {i}</li>" for i in range(100)) + "</ul>" * 30
    attributes = "<p " + " ".join(f'a{i}="a b c > d"' for i in range(200)) + ">words</p>"
    assert "item 99" in extract_html(f"<html><body>{lists * 3}{attributes * 20}")


WORDS = "Many words of a real article. " * 40


@pytest.mark.parametrize(
    "page",
    [
        f'<body><form id="aspnetForm"><div><p>{WORDS}</p></div></form></body>',
        f"<body><div><form><p>{WORDS}</p></form></div></body>",
        f"<body><header><h1>A post</h1><p>{WORDS}</p></header></body>",
        f'<body><div class="layout-sidebar-left"><p>{WORDS * 3}</p></div><p>{"We use cookies. " * 40}</p></body>',
    ],
    ids=["form", "form within", "header", "sidebar"],
)
def test_a_wrapper_that_misleads_does_not_lose_the_page(page: str) -> None:
    assert WORDS.strip() in extract_html(f"<html>{page}</html>")


def test_stage() -> None:
    rows = [
        {"place": 0, "id": "", "url": "", "html": True, "text": PAGE},
        {"place": 1, "id": "", "url": "", "html": False, "text": "<b>plain</b>"},
        {"place": 2, "id": "", "url": "", "html": True, "text": "<nav>only</nav>"},
        {"place": 3, "id": "", "url": "", "html": True, "text": "<ul>" * 10_000},
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    verdict = Extract().apply(batch)
    assert verdict.drop.tolist() == [-1, -1, 0, 1]
    assert list(verdict.problems) == [3] and Extract().reasons[1] == "malformed"
    assert verdict.batch.schema == SCHEMA
    texts = verdict.batch.column("text").to_pylist()
    assert texts[0].startswith("The title")
    assert texts[1] == "<b>plain</b>"
    assert verdict.counts == {"extracted": 1}
    assert Extract().reasons[verdict.drop[2]] == "no_text"
    assert verdict.batch.column("html").to_pylist() == [False] * 4
    plain = batch.slice(1, 1)
    assert Extract().apply(plain).batch.equals(plain)
