"""A scanned page: its text in blocks, the tree of elements around them, and what its head says of it."""

import re
from typing import NamedTuple

import numpy as np

from forebay.arrays import F32, I32, I64, U8, U64

_HEAD_BYTES = 1 << 17
_TITLE = re.compile(rb"<title[^>]{0,99}>([^<]{0,999})", re.I)
_META = re.compile(rb"""<meta\b([^>]{0,999}\b(?:description|og:type|og:title)\b[^>]{0,9999})""", re.I)
_CONTENT = re.compile(rb"""content\s{0,9}=\s{0,9}(["'])(.*?)\1""", re.I | re.S)
_TYPE = re.compile(rb"""@type["']\s{0,9}:\s{0,9}["\[]{0,2}\s{0,9}["']?(\w{1,40})""")
_KINDS = (
    "article newsarticle blogposting blog techarticle report",
    "product productgroup item offer",
    "qapage discussionforumposting question forum",
    "itemlist collectionpage collection searchresultspage product.group",
    "faqpage",
    "organization localbusiness service corporation store",
    "website webpage",
    "recipe howto",
    "videoobject video movie podcastepisode",
    "profile person profilepage",
)
KINDS = {word.encode(): 1 << index for index, row in enumerate(_KINDS) for word in row.split()}
"""Bits of what a page says of itself, in `og:type` and in JSON-LD."""
NUM_KINDS = len(_KINDS)
# Columns of `ScannedPage.elements`.
PARENT, TAG, FLAGS, DEPTH, PATH, ROW, CELL, IMAGES, INPUTS, CHILDREN, BLOCK_PARENT, TAG_START, TAG_STOP = range(13)
# Columns of `ScannedPage.element_weights`: of its class words, and of those of its ancestors too.
OWN_WEIGHT, SUM_WEIGHT, MIN_WEIGHT, MAX_WEIGHT, LAST_WEIGHT = range(5)
# Columns of `ScannedPage.blocks`.
(
    ELEMENT, START, STOP, CHARS, WORDS, LINK_WORDS, LINKS, COMMAS, TERMINALS, DIGITS, UPPERS, CAPITALS, IDEOGRAPHS,
    BREAKS, HASH, GAP, LAST,
) = range(17)  # fmt: skip
# Columns of `ScannedPage.block_weights`: of its words.
TEXT_SUM, TEXT_COUNT, TEXT_FIRST, TEXT_MIN, IN_TITLE, IN_DESCRIPTION = range(6)


class ScannedPage(NamedTuple):
    """A scanned page. The text of block i is `text[blocks[i, START]:blocks[i, STOP]]`, UTF-8."""

    text: U8
    elements: I64
    element_weights: F32
    blocks: I64
    block_weights: F32
    kinds: int


class Vocabulary(NamedTuple):
    """Weights of words: hashes, the number of each, and by number its weight and, of class words, its concepts."""

    keys: U64
    numbers: I32
    weights: F32
    flags: I64


def read_head(html: bytes) -> tuple[U8, U8, int]:
    """The bytes of the title and of the description, and what kind of page it says it is, as bits of KINDS."""
    title = description = b""
    kinds = 0
    if match := _TITLE.search(html, 0, _HEAD_BYTES):
        title = match[1]
    for tag in _META.finditer(html, 0, _HEAD_BYTES):
        content = _CONTENT.search(tag[0])
        if content is None:
            continue
        if b"description" in tag[1].lower():
            description = max(description, content[2], key=len)
        elif b"og:type" in tag[1]:
            kinds |= KINDS.get(content[2].lower().rpartition(b".")[2], 0)
        elif b"og:title" in tag[1]:
            title += b" " + content[2]
    offset = -1
    for _ in range(200):
        if (offset := html.find(b"@type", offset + 1)) < 0:
            break
        if match := _TYPE.match(html, offset):
            kinds |= KINDS.get(match[1].lower(), 0)
    return np.frombuffer(title, np.uint8), np.frombuffer(description, np.uint8), kinds
