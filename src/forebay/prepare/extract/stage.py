"""The stage `[extract]`: main text in place of HTML."""

from dataclasses import dataclass

import pyarrow as pa

from forebay.errors import UsageError
from forebay.formats.html import HtmlError
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column
from forebay.prepare.extract.extractors import FOREBAY, open_extractor
from forebay.prepare.settings import Code


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
