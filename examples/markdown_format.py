"""A file format of your own: Markdown with front matter, as static site generators keep it.

    ---
    title: A page
    url: https://example.org/a
    ---
    The text …

A package makes it known to Forebay by one line of its pyproject.toml:

    [project.entry-points."forebay.formats"]
    markdown = "markdown_format:Markdown"
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from forebay.formats.base import Format
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record, to_record
from forebay.formats.text import read_document


class Markdown(Format):
    """Files of Markdown that begin with front matter; each is a document."""

    name = "markdown"
    suffixes = (".mdoc",)
    is_plain_text = True
    is_grouped = True

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"---\n") and b"\n---\n" in head

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, file in enumerate(split.files):
            _, record = read_document(index, file, options)
            if record.problem:
                yield record
                continue
            front, separator, body = record.text.removeprefix("---\n").partition("\n---\n")
            if not separator:
                yield Record(index, problem="front matter without an end", location=file.name)
                continue
            fields = dict(line.split(": ", 1) for line in front.splitlines() if ": " in line)
            title = fields.get("title", "")
            row = {**fields, options.text_key: f"{title}\n\n{body.strip()}" if title else body.strip()}
            yield to_record(index, row, options, file.name)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.mdoc"
        page.write_text("---\ntitle: A page\nurl: https://example.org/a\n---\nThe text.\n")
        file = InputFile(str(page), page.name, "markdown", "", page.stat().st_size, "")
        for record in Markdown().read_text(InputSplit((file,)), ReadOptions()):
            print(record)
