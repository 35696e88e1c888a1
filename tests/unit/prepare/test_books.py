"""PDF and EPUB: text and metadata, what is encrypted, damaged, a scan or a bomb."""

import gzip
import io
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import MissingPackageError
from forebay.formats.records import Record
from support.paths import GOLDEN as GOLDEN_FILES
from support.preparing import read_records

GOLDEN = GOLDEN_FILES / "books"  # Written by ReportLab.
PDF_TEXT = "This is the first example of a divided word,\nand a wellknown one.\nGröße, naïve.\nSecond page."
COLUMNS = {"title": "text", "author": "text", "language": "text"}
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/content.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>A  book</dc:title><dc:creator>Somebody</dc:creator>
<dc:language>de</dc:language></metadata>
<manifest><item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="b" href="text/b%20c.xhtml" media-type="application/xhtml+xml"/>
<item id="a" href="text/a.xhtml" media-type="application/xhtml+xml"/>
<item id="notes" href="notes.xhtml" media-type="application/xhtml+xml"/>
<item id="image" href="a.png" media-type="image/png"/></manifest>
<spine><itemref idref="nav"/><itemref idref="a"/><itemref idref="b"/><itemref idref="notes" linear="no"/></spine>
</package>"""


def epub(**changes: str | None) -> bytes:
    """An EPUB of two chapters; members are changed by name, or left out."""
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/content.opf": PACKAGE,
        "OEBPS/text/a.xhtml": "<html><body><h1>One</h1><p>Größe &amp; more.</p></body></html>",
        "OEBPS/text/b c.xhtml": "<html><body><h1>Two</h1><p>The end.</p></body></html>",
        "OEBPS/nav.xhtml": "<html><body>Contents</body></html>",
        "OEBPS/notes.xhtml": "<html><body>Notes</body></html>",
        **changes,
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in members.items():
            if text is not None:
                kind = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
                archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text, kind)
    return out.getvalue()


def read(path: Path, **options: Any) -> list[Record]:
    return read_records(path, columns=COLUMNS, **options)


def only(path: Path, **options: Any) -> Record:
    (record,) = read(path, **options)
    return record


def test_a_book_is_a_document_with_its_metadata(tmp_path):
    (tmp_path / "book").write_bytes(epub())
    (tmp_path / "paper").write_bytes((GOLDEN / "sample.pdf").read_bytes())
    (tmp_path / "q.pdf.gz").write_bytes(gzip.compress((GOLDEN / "sample.pdf").read_bytes()))
    records = read(tmp_path)
    assert [(record.text, record.values) for record in records] == [
        ("One\n\nGröße & more.\n\nTwo\n\nThe end.", ("A book", "Somebody", "de")),
        (PDF_TEXT, ("A title", "Somebody", "")),
        (PDF_TEXT, ("A title", "Somebody", "")),
    ]


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"META-INF/container.xml": None}, "a damaged EPUB: .*container.xml"),
        ({"META-INF/container.xml": "<container/>"}, "no rootfile"),
        ({"OEBPS/content.opf": "<package"}, "a damaged EPUB: unclosed token"),
        ({"OEBPS/text/a.xhtml": None}, "a damaged EPUB: .*text/a.xhtml"),
        ({"OEBPS/content.opf": PACKAGE.replace('idref="a"', 'idref="absent"')}, "a damaged EPUB: 'absent'"),
        ({"OEBPS/content.opf": PACKAGE.replace("text/a.xhtml", "../../../etc/passwd")}, "a damaged EPUB"),
        ({"OEBPS/text/a.xhtml": "", "OEBPS/text/b c.xhtml": "<img/>"}, "of images alone"),
        ({"OEBPS/text/a.xhtml": "word " * 60_000}, "more text than max_document_bytes, 200000"),
        (
            {"META-INF/encryption.xml": '<e><CipherReference URI="OEBPS/text/b%20c.xhtml"/></e>'},
            "one whose chapters are .DRM.",
        ),
    ],
)
def test_an_epub_that_is_damaged_encrypted_or_a_bomb(tmp_path, changes, match):
    path = tmp_path / "a.epub"
    path.write_bytes(epub(**changes))
    record = only(path, max_document_bytes=200_000)
    assert re.search(match, record.problem), record.problem


def test_fonts_of_an_epub_may_be_encrypted_its_text_may_not_and_entities_do_not_explode(tmp_path):
    path = tmp_path / "a.epub"
    fonts = '<e><CipherReference URI="OEBPS/fonts/a.otf"/></e>'
    path.write_bytes(epub(**{"META-INF/encryption.xml": fonts}))
    assert only(path).text.startswith("One")
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    bomb = f'<!DOCTYPE container [<!ENTITY e0 "words">{entities}]><container>&e11;</container>'
    path.write_bytes(epub(**{"META-INF/container.xml": bomb}))
    assert only(path).problem.startswith("a damaged EPUB")
    data = bytearray(epub())
    central = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)  # The container's entry of the directory.
    data[central + 8] |= 1
    path.write_bytes(data)
    assert "encrypted" in only(path).problem


def test_a_pdf_that_is_damaged_encrypted_a_scan_or_large(tmp_path, monkeypatch):
    path, data = tmp_path / "a.pdf", (GOLDEN / "sample.pdf").read_bytes()
    assert only(GOLDEN / "encrypted.pdf").problem.startswith("expected a PDF that opens without a password")
    path.write_bytes(b"%PDF-1.7\nnothing of the kind")
    assert only(path).problem.startswith("a damaged PDF: Failed to load document")
    path.write_bytes(data.replace(b"/Contents", b"/Nothing_"))
    assert "it needs character recognition" in only(path).problem
    path.write_bytes(data)
    assert only(path, max_document_bytes=2000).text == PDF_TEXT
    assert only(path, max_document_bytes=1000).problem == "larger than max_document_bytes, 1000"
    monkeypatch.setattr("forebay.formats.books.read_data", lambda *_: (data, None))
    assert only(GOLDEN / "sample.pdf", max_document_bytes=20).problem == "more text than max_document_bytes, 20"


def test_pdf_without_its_package_is_an_error_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(MissingPackageError, match=r"pypdfium2\. Install it with: pip install"):
        read(GOLDEN / "sample.pdf")
