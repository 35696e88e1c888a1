"""Tables for the HTML scanner: tags and how they nest, character references, and words of class names.

All are open-addressed hash tables for compiled code, built once a process (about 20 ms).
"""

import html.entities
from functools import lru_cache

import numpy as np

from forebay.arrays import I64
from forebay.prepare.filters.word_tables import HashTable, hash_table

BLOCK, VOID, RAW, SKIP, HEADING, ITEM, TERM, CELLS, ROWS, SECTION, SCOPE, FOREIGN, ROOT = (
    1 << bit for bit in range(13)
)
"""Bits of a tag: breaks the text; has no end tag; its content is no markup and no text; its content is left out; h1 to
h6; `li`, `dt`, `dd`; of these `dt`, `dd`; `td`, `th`; `tr`; `tbody` …; ends the search for an open item; ends where a
block begins; `html` and `body`."""

_BLOCKS = (
    "address article aside blockquote body button caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form frameset h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu nav ol p pre search "
    "section summary table tbody td tfoot th thead tr ul label option noscript"
)
_INLINE = (
    "a abbr b bdi bdo big cite code del dfn em font i ins kbd mark q ruby s samp small span strike strong sub sup time "
    "tt u var rt rp data output picture"
)
_VOIDS = "area base br col embed hr img input link meta param source track wbr"
_RAWS = "script style title textarea iframe noembed noframes xmp"
_SKIPS = "svg math annotation annotation-xml template select object canvas audio video datalist map"

TAGS = {
    name: index
    for index, name in enumerate(dict.fromkeys(" ".join((_BLOCKS, _INLINE, _VOIDS, _RAWS, _SKIPS)).split()), 1)
}
CUSTOM = len(TAGS) + 1
"""The number of all elements whose name has a hyphen: containers as a rule."""

NAV, FOOTER, HEADER, ASIDE, ARTICLE, MAIN, FORM, TABLE, LIST, LINK, BUTTON, FIGURE, QUOTE, PRE, TITLE = (
    1 << bit for bit in range(15)
)
HIDDEN, HIDDEN_ATTRIBUTE, ARIA_HIDDEN, DETAILS, NOSCRIPT = (1 << bit for bit in range(15, 20))
"""Bits of an element that its descendants inherit; HIDDEN is by style; those of CONCEPTS follow."""

_TAG_FLAGS = {
    "nav": NAV, "menu": NAV, "footer": FOOTER, "header": HEADER, "aside": ASIDE, "article": ARTICLE, "main": MAIN,
    "form": FORM, "fieldset": FORM, "table": TABLE, "ul": LIST, "ol": LIST, "dl": LIST, "a": LINK, "button": BUTTON,
    "label": BUTTON, "option": BUTTON, "figure": FIGURE, "figcaption": FIGURE, "blockquote": QUOTE, "pre": PRE,
    "noscript": NOSCRIPT, "details": DETAILS, "h1": TITLE, "h2": TITLE, "h3": TITLE, "h4": TITLE, "h5": TITLE,
    "h6": TITLE,
}  # fmt: skip
CONCEPTS = (
    "comment comments reply replies respond discussion disqus",
    "sidebar side rail aside complementary widget widgets",
    "related recommended recommend recommendations more similar also trending popular latest teaser teasers suggested",
    "share sharing social follow facebook twitter instagram pinterest whatsapp telegram",
    "meta byline author date time published posted info timestamp bio",
    "ad ads advert advertisement banner promo promotion sponsor sponsored outbrain taboola dfp",
    "cookie cookies consent gdpr modal popup overlay dialog toast privacy",
    "product price cart buy sku shop checkout add basket",
    "nav navbar navigation menu menubar header masthead toolbar topbar breadcrumb breadcrumbs crumb skip",
    "content article body entry post story text main page prose markdown richtext wysiwyg",
    "forum thread message topic answer question posts",
    "title headline heading subtitle lead intro dek summary abstract excerpt description",
    "caption credit image img gallery photo media video player carousel slider slide",
    "tag tags category categories label labels badge",
    "newsletter subscribe subscription signup login register signin account form search input",
    "footer foot copyright legal disclaimer terms colophon contentinfo",
    "list listing grid card cards item items row tile result results",
    "review reviews rating ratings stars testimonial",
    "toc contents pagination pager paging next prev previous",
    "hidden hide sr visually offscreen print noprint mobile desktop",
)
"""Words of class, id, role and itemprop that mean about the same; each row is a bit."""
NUM_FLAGS = NOSCRIPT.bit_length() + len(CONCEPTS)
SHARES = (ARTICLE, MAIN, LIST, TABLE, FORM, HIDDEN | HIDDEN_ATTRIBUTE | ARIA_HIDDEN, NOSCRIPT)
"""Bits of which the model sees how much of a page's text has any."""


@lru_cache(1)
def tag_tables() -> tuple[HashTable, I64, I64]:
    """Tag numbers by the hash of the name; for each number its bits (BLOCK …) and flags (NAV …)."""
    bits, flags = np.zeros(CUSTOM + 1, np.int64), np.zeros(CUSTOM + 1, np.int64)
    for names, bit in (
        (_BLOCKS, BLOCK), (_VOIDS, VOID), (_RAWS, RAW), (_SKIPS, SKIP), ("h1 h2 h3 h4 h5 h6", HEADING),
        ("li dt dd", ITEM), ("dt dd", TERM), ("td th", CELLS), ("tr", ROWS), ("tbody thead tfoot", SECTION),
        ("ul ol menu dl table td th", SCOPE), ("svg math select", FOREIGN), ("html body", ROOT),
    ):  # fmt: skip
        for name in names.split():
            bits[TAGS[name]] |= bit
    bits[CUSTOM] = BLOCK
    for name, flag in _TAG_FLAGS.items():
        flags[TAGS[name]] = flag
    return hash_table(TAGS, 1024), bits, flags


@lru_cache(1)
def reference_table() -> tuple[HashTable, I64, I64]:
    """Numbers of named references by hash of the name, with `;`; their characters (the first and, if there is one, the
    second << 21); and the characters that numeric references 128 to 159 mean."""
    names = sorted(html.entities.html5)
    values = [[ord(char) for char in html.entities.html5[name]] for name in names]
    points = np.array([chars[0] | (chars[1] << 21 if len(chars) > 1 else 0) for chars in values], np.int64)
    windows = [ord(bytes((byte,)).decode("cp1252", "ignore") or chr(byte)) for byte in range(0x80, 0xA0)]
    return hash_table({name: i for i, name in enumerate(names)}, 8192), points, np.array(windows, np.int64)


@lru_cache(1)
def concept_words() -> dict[str, int]:
    """The bit of each word of CONCEPTS."""
    words: dict[str, int] = {}
    for index, row in enumerate(CONCEPTS):
        for word in row.split():
            words[word] = words.get(word, 0) | NOSCRIPT << (index + 1)
    return words
