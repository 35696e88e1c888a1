"""Extractors: objects that turn the HTML of a page into its main text; and the stage `[extract]`, which uses them."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Protocol

import pyarrow as pa

from forebay.errors import UsageError, package_for
from forebay.formats.html import HtmlError, parse_html
from forebay.formats.records import strip_turn_marks
from forebay.plugins import load_plugin
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column
from forebay.prepare.settings import Code

FOREBAY = "forebay"


class Extractor(Protocol):
    """Turns a page into text. Made once a process by its class, with the settings of `[extract] options`."""

    version: int | str
    """Changed when the same page would give another text, so that old results are not used."""

    def extract(self, html: str, markdown: bool) -> str:
        """Return the main text of a page; "" if it has none.

        Args:
            html: The page.
            markdown: Whether headings, lists, tables and code are marked as in Markdown; else a line each.

        Raises:
            HtmlError: If the page is malformed; it is counted and listed.
        """


class ForebayExtractor:
    """Forebay's own: compiled, linear in the page, with a learned model of main text.

    Args:
        favor_precision: Keep what is more surely main text: fewer words of the menu, and fewer of the text.
    """

    def __init__(self, favor_precision: bool = False) -> None:
        from forebay.prepare.extract.model import MODEL_VERSION, PRECISE_SHARE, SHARE

        self.version = MODEL_VERSION
        self._share = PRECISE_SHARE if favor_precision else SHARE

    def extract(self, html: str, markdown: bool) -> str:
        from forebay.prepare.extract.layout import page_text
        from forebay.prepare.extract.model import block_probabilities, choose_blocks, load_model
        from forebay.prepare.extract.scan import scan_page

        model = load_model()
        page = scan_page(html.encode("utf-8", "replace"), model.class_words, model.text_words)
        keep = choose_blocks(page, block_probabilities(page, model), self._share, title=markdown)
        return strip_turn_marks(page_text(page, keep, markdown))


class Trafilatura:
    """trafilatura's `extract`; its keyword arguments are the options: `{include_comments = false}`."""

    def __init__(self, **options: Any) -> None:
        self._extract = _library("trafilatura").extract
        self._options = options
        self.version = version("trafilatura")

    def extract(self, html: str, markdown: bool) -> str:
        text = self._extract(html, output_format="markdown" if markdown else "txt", **self._options)
        return strip_turn_marks(text or "")


class Resiliparse:
    """resiliparse's `extract_plain_text` with `main_content`; further arguments are the options."""

    def __init__(self, **options: Any) -> None:
        _library("resiliparse")
        self._options = {"main_content": True, "alt_texts": False, **options}
        self.version = version("resiliparse")

    def extract(self, html: str, markdown: bool) -> str:
        from resiliparse.extract.html2text import extract_plain_text

        if markdown:
            raise UsageError("extract: expected the extractor forebay or trafilatura with markdown, got resiliparse.")
        return strip_turn_marks(extract_plain_text(parse_html(html), **self._options))


BUILT_IN: dict[str, Any] = {FOREBAY: ForebayExtractor, "trafilatura": Trafilatura, "resiliparse": Resiliparse}


@lru_cache(8)
def open_extractor(name: str, options: tuple[tuple[str, Any], ...]) -> Extractor:
    """The extractor of that name: a built-in one, an entry point of `forebay.extractors`, or `module:Class`."""
    cls = BUILT_IN.get(name) or load_plugin("forebay.extractors", name, allow_code=True)
    try:
        extractor: Extractor = cls(**dict(options))
    except TypeError as error:
        raise UsageError(f"options: expected settings of the extractor {name}, got {dict(options)}: {error}") from error
    return extractor


def extract_html(
    html: str, *, extractor: str = FOREBAY, markdown: bool = False, options: Mapping[str, Any] = {}
) -> str:
    """Return the main text of a page: paragraphs, headings, list items and rows, a line each; "" if there is none.

    Args:
        html: The page.
        extractor: `forebay`, `trafilatura`, `resiliparse`, an entry point of `forebay.extractors` or `module:Class`.
        markdown: Mark headings, lists, tables, quotations and code as in Markdown.
        options: Settings of the extractor.

    Raises:
        HtmlError: If another extractor refuses the page. Forebay's reads any.
    """
    return open_extractor(extractor, tuple(options.items())).extract(html, markdown)


@package_for("extract: this extractor")
def _library(name: str) -> Any:
    return importlib.import_module(name)


@dataclass(frozen=True)
class Extract(Stage):
    """Replace HTML by the main text of the page; pages without any are dropped. Other documents stay as they are.

    Args:
        extractor: `forebay`, `trafilatura`, `resiliparse`, an entry point of `forebay.extractors` or `module:Class`.
        markdown: Mark headings, lists, tables, quotations and code as in Markdown.
        options: Settings of the extractor, such as `{include_comments = false}` for trafilatura.
    """

    extractor: Code = FOREBAY
    markdown: bool = False
    options: tuple[tuple[str, bool | int | float | str], ...] = ()

    name = "extract"
    reasons = ("no_text", "malformed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extractor == "resiliparse" and self.markdown:
            raise UsageError("markdown: expected false with the extractor resiliparse, got true")

    @property
    def version(self) -> str:  # type: ignore[override]
        """Of the extractor, too."""
        return f"3 {open_extractor(self.extractor, self.options).version}"

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The batch with text in place of HTML; counts `extracted`."""
        drop = keep_all(batch.num_rows)
        html = batch.column("html").to_pylist()
        if not any(html):
            return StageResult(batch, drop)
        extractor = open_extractor(self.extractor, self.options)
        texts = batch.column("text").to_pylist()
        problems = {}
        for row, is_html in enumerate(html):
            if not is_html:
                continue
            try:
                texts[row] = extractor.extract(texts[row], self.markdown)
            except HtmlError as error:
                drop[row], texts[row], problems[row] = 1, "", str(error)
                continue
            if not texts[row]:
                drop[row] = 0
        batch = replace_column(batch, "text", pa.array(texts, pa.large_string()))
        batch = replace_column(batch, "html", pa.array([False] * batch.num_rows, pa.bool_()))
        return StageResult(batch, drop, {"extracted": sum(html) - int((drop >= 0).sum())}, problems)


__all__ = ["Extractor", "HtmlError", "extract_html", "open_extractor"]
