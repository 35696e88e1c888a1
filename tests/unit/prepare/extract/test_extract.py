"""HTML to main text: real pages by what must and must not be in it, and pages that attack."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats.html import HtmlError, html_to_text
from forebay.prepare.documents import SCHEMA
from forebay.prepare.extract import extract_html, layout, model, scan
from forebay.prepare.extract.extractors import Extract
from support.gold_pages import gold_articles, word_scores
from support.hostile_pages import HOSTILE

PAGE = """<html><head><title>T</title><style>x{}</style></head><body class="has-sidebar">
<header>Site name</header><nav><a href=/>Home</a></nav><div class="cookie-notice">We use cookies</div>
<main><article><h1>The title</h1><p>First <b>bold</b> words.</p><ul><li>one</li><li>two</li></ul></article></main>
<div id=sidebar>Related</div><script>var x = "evil"</script><footer>Copyright</footer></body></html>"""


@pytest.mark.parametrize("html", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_pages_give_text_of_their_own(html):
    """A tenth of each; slow/prepare/extract measures that the time is linear."""
    html = html[: len(html) // 10]
    text = extract_html(html)
    assert "\0" not in text
    assert len(text) <= len(html)
    extract_html(html, markdown=True)


PIECES = """<p> </p> <li> </ul> <ul> <table> <tr> <td> </table> <a href=x> </a> <br> <pre> </pre> <b> </i> <svg> <math
alttext='x&lt;y'> <script> </script> <select> <h1> </h2> <!-- --> <noscript> <x-y class=aB> & < &amp; &notin; &#0;
&#x1F600; <blockquote> <ol> </td> <body> </html> " ' > é 中文"""


@given(st.lists(st.sampled_from(PIECES.split()) | st.text(max_size=8), max_size=60))
def test_any_page_gives_text_of_its_own(parts):
    html = " ".join(parts)
    text = extract_html(html)
    assert text == extract_html(html)
    assert len(text) <= 2 * len(html) + 2
    assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
    extract_html(html, markdown=True).encode()


@pytest.mark.parametrize(
    "html, message",
    [
        ("<p " + " ".join(f"a{i}" for i in range(50_000)) + ">x", "more than 1000 attributes"),
        ("<p " + " ".join(f"a{i}='>'" for i in range(5000)) + ">x", "more than 1000 attributes"),
        ("".join(f"<body b{i}>" for i in range(5000)), "5000 times"),
        ("<ul><li>x" * 30_000, "lists nested 30000 deep"),
        ("<ol>" * 400 + "x<br>" * 2000, "lists nested 400 deep"),
    ],
)
def test_pages_for_which_resiliparse_is_not_linear_are_refused(html, message):
    with pytest.raises(HtmlError, match=message):
        extract_html(html, extractor="resiliparse")
    with pytest.raises(HtmlError, match=message):
        html_to_text(html)


def test_a_wrapper_that_misleads_does_not_lose_the_page():
    words = "Many words of a real article. " * 40
    page = f'<body><form id="aspnetForm"><div class="with-sidebar menu-open"><p>{words}</p></div></form></body>'
    assert words.strip() in extract_html(f"<html>{page}</html>")


def test_stage():
    rows = [
        {"place": 0, "id": "", "url": "", "html": True, "text": PAGE},
        {"place": 1, "id": "", "url": "", "html": False, "text": "<b>plain</b>"},
        {"place": 2, "id": "", "url": "", "html": True, "text": "<img src=only.png>"},
        {"place": 3, "id": "", "url": "", "html": True, "text": "<script>x()</script>"},
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    verdict = Extract().apply(batch)
    assert verdict.drop.tolist() == [-1, -1, 0, 0]
    assert verdict.batch.schema == SCHEMA
    texts = verdict.batch.column("text").to_pylist()
    assert texts[0].startswith("The title")
    assert texts[1] == "<b>plain</b>"
    assert verdict.counts == {"extracted": 1}
    assert Extract().reasons[verdict.drop[2]] == "no_text"
    assert verdict.batch.column("html").to_pylist() == [False] * 4
    refused = batch.set_column(4, SCHEMA.field(4), pa.array(["", "", "", "<ul>" * 10_000], pa.large_string()))
    verdict = Extract("resiliparse").apply(refused)
    assert verdict.drop[3] == 1 and list(verdict.problems) == [3] and Extract().reasons[1] == "malformed"
    plain = batch.slice(1, 1)
    assert Extract().apply(plain).batch.equals(plain)


STRUCTURED = """<html><head><title>Rivers</title></head><body><nav><ul><li><a href=/>Home</a></li></ul></nav><article>
<h1>About rivers</h1><p>A river is a natural stream of water. It flows towards an ocean, a lake or another river.</p>
<h2>Kinds of rivers</h2><ul><li>Perennial rivers flow all year round, whatever the weather is like.
<ol><li>Most large rivers are perennial, and have many tributaries.</li></ol></li><li>Ephemeral rivers flow only after
heavy rain has fallen.</li></ul><table><tr><th>River</th><th>Length in km</th></tr><tr><td>Nile</td><td>6,650</td></tr>
<tr><td>Amazon | Ucayali</td><td>6,400</td></tr></table><pre><code>def flow(river):
    return river.speed</code></pre><blockquote><p>No man ever steps in the same river twice.</p></blockquote>
<p>The discharge is <math alttext="Q=A&lt;v"><mi>Q</mi></math>, measured in cubic metres a second.</p></article>
</body></html>"""
MARKDOWN = """# About rivers

A river is a natural stream of water. It flows towards an ocean, a lake or another river.

## Kinds of rivers

- Perennial rivers flow all year round, whatever the weather is like.
  1. Most large rivers are perennial, and have many tributaries.
- Ephemeral rivers flow only after heavy rain has fallen.

| River | Length in km |
| --- | --- |
| Nile | 6,650 |
| Amazon \\| Ucayali | 6,400 |

```
def flow(river):
    return river.speed
```

> No man ever steps in the same river twice.

The discharge is $Q=A<v$, measured in cubic metres a second."""


def test_markdown_marks_the_structure():
    assert extract_html(STRUCTURED, markdown=True) == MARKDOWN
    plain = extract_html(STRUCTURED)
    assert "River\tLength in km\nNile\t6,650" in plain
    assert "#" not in plain and "Home" not in plain


@pytest.mark.parametrize(
    "html, text",
    [
        ("<p>one<p>two<div>three", "one\ntwo\nthree"),
        ("a&nbsp;b &eacute;&#233;&#xE9; &lt;x&gt; &amp &bogus; &#x80;", "a b ééé <x> & &bogus; €"),
        ("<p>one<br>two<br><br>three", "one\ntwo\nthree"),
        ("<pre>  a\n    b</pre>", "a\n    b"),
        ("<p>before<!-- no <p> --><script>if (a < b) {}</script> after", "before after"),
        ("<p>in <a href=x>a link</a> and <svg><text>no</text></svg> out", "in a link and out"),
        ("<noscript><p>Content for readers without scripts</p></noscript>", "Content for readers without scripts"),
        ("<p title='a > b'>text", "text"),
        ("1 < 2 and 3 <4", "1 < 2 and 3 <4"),
        ("<table><tr><td>a<td>b<tr><td>c</table>", "a\tb\nc"),
        (
            "<p>one two three four five six<p style='display: none'>one two three four five six",
            "one two three four five six",
        ),
        (
            "<p>one two three four five six<p style=top:0;visibility:hidden>One two three four five, six",
            "one two three four five six",
        ),
        (
            "<p>one two three four five six<p style='overflow:hidden'>One two three four five, six",
            "one two three four five six\nOne two three four five, six",
        ),
    ],
)
def test_text_is_read_as_a_browser_reads_it(html, text):
    words = model.load_model()
    page = scan.scan_page(f"<html><body>{html}</body></html>".encode(), words.class_words, words.text_words)
    assert layout.page_text(page, np.ones(len(page.blocks), np.bool_), False) == text


def test_quality_on_real_articles():
    """Benchmarks measure a mean F1 of 0.957 on pages that a model was not trained on; this one was trained on these."""
    names = {"001", "003-metadata-preferred", "ars-1", "blogger", "gitlab-blog", "topicseed-1", "royal-road", "dev418"}
    pages = gold_articles(names).values()
    scores = [word_scores(extract_html(html), gold) for html, gold in pages]
    assert sum(f1 for f1, _ in scores) / len(scores) > 0.957
    precise = [word_scores(extract_html(html, options={"favor_precision": True}), gold) for html, gold in pages]
    assert min(f1 for f1, _ in precise) > 0.9  # No article is lost.
    assert sum(after - before for (_, after), (_, before) in zip(precise, scores)) / len(scores) > 0.005


@pytest.mark.parametrize("name", ["trafilatura", "resiliparse"])
def test_other_extractors(name):
    pytest.importorskip(name)
    text = extract_html(STRUCTURED, extractor=name)
    assert "A river is a natural stream of water." in text and "Home" not in text


def test_an_extractor_that_is_not_there():
    with pytest.raises(UsageError, match=r"expected an entry point of forebay\.extractors"):
        extract_html("x", extractor="nothing")
    with pytest.raises(UsageError, match="expected settings of the extractor forebay"):
        extract_html("x", options={"speed": 2})
    with pytest.raises(UsageError, match="markdown: expected false with the extractor resiliparse"):
        Extract("resiliparse", markdown=True)
