"""The chosen blocks of a page as text: a line each, or as Markdown."""

from typing import NamedTuple

from forebay.arrays import BOOL
from forebay.prepare.extract.page import (
    CELL,
    ELEMENT,
    FLAGS,
    HASH,
    PARENT,
    PATH,
    ROW,
    START,
    STOP,
    TAG,
    WORDS,
    ScannedPage,
)
from forebay.prepare.extract.tags import QUOTE, TAGS

_HEADINGS = {TAGS[f"h{level}"]: level for level in range(1, 7)}
_LISTS = (TAGS["ul"], TAGS["ol"], TAGS["menu"])
_LI, _OL, _PRE, _TABLE = TAGS["li"], TAGS["ol"], TAGS["pre"], TAGS["table"]
_MAX_INDENTS = 16
_COPY_WORDS = 6
"""A block of at least so many words is left out if an equal one stands before it in another kind of element: pages
have copies for small screens."""


def page_text(page: ScannedPage, keep: BOOL, markdown: bool) -> str:
    """The text of the blocks that are kept; cells of a row are on one line, with tabs between them."""
    data = page.text.tobytes()
    seen: dict[int, int] = {}
    out = _Markdown(page) if markdown else _Lines(page)
    for block in page.blocks[keep]:
        if block[WORDS] >= _COPY_WORDS:
            path = int(page.elements[block[ELEMENT], PATH])
            if seen.setdefault(int(block[HASH]), path) != path:
                continue
        element = int(block[ELEMENT])
        row, cell = page.elements[element, [ROW, CELL]].tolist()
        out.add(data[block[START] : block[STOP]].decode("utf-8", "replace"), element, row, cell)
    return out.finish()


class _Lines:
    def __init__(self, page: ScannedPage) -> None:
        self.elements = page.elements
        self.parts: list[str] = []
        self.row = self.cell = 0

    def add(self, text: str, element: int, row: int, cell: int) -> None:
        self.parts += ["\t" if row and row == self.row and cell != self.cell else "\n", text]
        self.row, self.cell = row, cell

    def finish(self) -> str:
        return "".join(self.parts).strip("\n")


class _Markdown(_Lines):
    """Headings, lists, quotations, code and tables of CommonMark with the tables of GitHub."""

    def __init__(self, page: ScannedPage) -> None:
        super().__init__(page)
        self.item = self.pre = self.table = self.columns = 0
        self.is_first_row = False
        self.contexts = {0: _Context()}

    def add(self, text: str, element: int, row: int, cell: int) -> None:
        heading, item, pre, table, depth, is_numbered = self._ancestors(element)
        if self.pre and pre != self.pre:
            self.parts.append("\n```")
        if self.row and row != self.row:
            self._end_row()
        if pre:
            self.parts += ["\n" if pre == self.pre else "\n\n```\n", text]
        elif row:
            text = " ".join(text.split()).replace("|", "\\|")
            if row == self.row:
                self.parts += [" " if cell == self.cell else " | ", text]
                self.columns += cell != self.cell
            else:
                self.is_first_row = table != self.table
                self.parts += ["\n\n| " if self.is_first_row else "\n| ", text]
                self.columns = 1
            self.table = table
        elif heading:
            self.parts += ["\n\n", "#" * heading, " ", " ".join(text.split())]
        elif item:
            indent = "  " * min(depth - 1, _MAX_INDENTS)
            if item == self.item:
                self.parts += ["\n", indent, "  ", text]
            else:
                self.parts += ["\n" if self.item else "\n\n", indent, "1. " if is_numbered else "- ", text]
        else:
            quote = "> " if self.elements[element, FLAGS] & QUOTE else ""
            self.parts += ["\n\n", quote, text.replace("\n", f"\n{quote}")]
        self.row, self.cell, self.item, self.pre = row, cell, item, pre

    def finish(self) -> str:
        if self.pre:
            self.parts.append("\n```")
        if self.row:
            self._end_row()
        return super().finish()

    def _end_row(self) -> None:
        self.parts.append(" |")
        if self.is_first_row:
            self.parts += ["\n|", " --- |" * self.columns]

    def _ancestors(self, element: int) -> "_Context":
        """What is around an element; each is computed once."""
        chain = []
        while element not in self.contexts:
            chain.append(element)
            element = int(self.elements[element, PARENT])
        for inner in reversed(chain):
            tag, around = int(self.elements[inner, TAG]), self.contexts[element]
            if tag in _HEADINGS:
                around = around._replace(heading=_HEADINGS[tag])
            elif tag == _LI:
                around = around._replace(item=inner, is_numbered=int(self.elements[element, TAG]) == _OL)
            elif tag in _LISTS:
                around = around._replace(depth=around.depth + 1)
            elif tag == _TABLE:
                around = _Context(heading=around.heading, pre=around.pre, table=inner)
            elif tag == _PRE:
                around = around._replace(pre=around.pre or inner)
            self.contexts[inner] = around
            element = inner
        return self.contexts[element]


class _Context(NamedTuple):
    heading: int = 0
    item: int = 0
    pre: int = 0
    table: int = 0
    depth: int = 0
    is_numbered: bool = False
