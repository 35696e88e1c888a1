"""Books and papers: PDF by its text layer (extra `books`), and EPUB; each file is a document.

The text of a PDF is the lines of its pages in PDFium's order, without the hyphens that divide words at line ends; a PDF
without text (a scan) is malformed. The text of an EPUB is that of its chapters in reading order, as a browser shows
them, without the table of contents. `[read.columns]` may name fields of the metadata: `title`, `author`; of an EPUB
`language`, `publisher`, `date` …, of a PDF `subject`, `creationdate` … Encrypted and damaged files are malformed, with
the reason. Memory: a file, and its text.
"""

import io
import posixpath
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from forebay.errors import PrepareError, error_text, package_for
from forebay.formats.base import Format
from forebay.formats.html import BLANK_LINES, HtmlError, html_to_text
from forebay.formats.http_message import body_text
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record, column_values, strip_turn_marks, without_surrogates
from forebay.formats.text import read_data

_HYPHENS = re.compile("[\x02\ufffe](?:\r?\n)?")  # As PDFium marks those that divide a word.
_MAX_METADATA_BYTES = 8 << 20
_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_DC, _OPF = "{http://purl.org/dc/elements/1.1/}", "{http://www.idpf.org/2007/opf}"
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, ElementTree.ParseError, HtmlError, struct.error, ValueError, LookupError, EOFError,
    OSError, RuntimeError, OverflowError,
)  # fmt: skip
"""What the standard library raises for damaged archives and XML."""
_pdfium = threading.Lock()  # The library is not for several threads.


class _Book(Format):
    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, file in enumerate(split.files):
            yield _record(index, file, options, _READERS[self.name], self.name.upper())


class Pdf(_Book):
    """PDF files. A task reads one file: one over which the library dies costs itself alone."""

    name = "pdf"
    suffixes = (".pdf",)

    def sniff(self, head: bytes) -> bool:
        return b"%PDF-" in head[:1024]


class Epub(_Book):
    """EPUB files."""

    name = "epub"
    suffixes = (".epub",)
    is_grouped = True

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"PK\x03\x04") and b"mimetypeapplication/epub+zip" in head[:128]


class _RefusedError(PrepareError):
    """A file that is no document, with the reason."""


def _record(index: int, file: InputFile, options: ReadOptions, read: Any, what: str) -> Record:
    data, fault = read_data(index, file, options)
    if fault is not None:
        return fault
    if not data:
        return Record(index)
    try:
        text, fields = read(data, options.max_document_bytes)
        text = strip_turn_marks(BLANK_LINES.sub("\n\n", text)).strip()
        if not text:
            raise _RefusedError(f"expected a text layer, got a {what} of images alone: it needs character recognition")
    except _RefusedError as error:
        return Record(index, problem=str(error), location=file.name)
    except _DAMAGED as error:
        return Record(index, problem=f"a damaged {what}: {error_text(error)}", location=file.name)
    text = without_surrogates(text)
    return Record(index, text=text, values=column_values(options, lambda name: fields.get(name.lower(), "")))


def _too_large(limit: int) -> _RefusedError:
    return _RefusedError(f"more text than max_document_bytes, {limit}")


def _pdf_text(data: bytes, limit: int) -> tuple[str, Mapping[str, str]]:
    with package_for("PDF"):
        import pypdfium2
    pages = []
    size = 0
    with _pdfium:
        try:
            document = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower():
                raise _RefusedError("expected a PDF that opens without a password, got an encrypted one") from error
            raise ValueError(str(error)) from error
        try:
            fields = {name.lower(): value for name, value in document.get_metadata_dict().items() if value}
            for number in range(len(document)):
                page = document[number]
                text = page.get_textpage()
                pages.append(text.get_text_bounded())
                text.close()
                page.close()
                size += len(pages[-1])
                if size > limit:
                    raise _too_large(limit)
        except pypdfium2.PdfiumError as error:
            raise ValueError(f"page {len(pages) + 1}: {error}") from error
        finally:
            document.close()
    return _HYPHENS.sub("", "\n".join(pages)).replace("\r\n", "\n"), fields


def _epub_text(data: bytes, limit: int) -> tuple[str, Mapping[str, str]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        container = ElementTree.fromstring(_member(archive, _CONTAINER, _MAX_METADATA_BYTES))
        root = container.find(".//{*}rootfile")
        if root is None:
            raise ValueError(f"no rootfile in {_CONTAINER}")
        package_name = root.attrib["full-path"]
        package = ElementTree.fromstring(_member(archive, package_name, _MAX_METADATA_BYTES))
        chapters = _chapters(package, posixpath.dirname(package_name))
        if _ENCRYPTION in archive.namelist():
            tree = ElementTree.fromstring(_member(archive, _ENCRYPTION, _MAX_METADATA_BYTES))
            encrypted = (unquote(element.get("URI", "")) for element in tree.iterfind(".//{*}CipherReference"))
            if not set(chapters).isdisjoint(encrypted):
                raise _RefusedError("expected an EPUB that is not encrypted, got one whose chapters are (DRM)")
        texts = []
        size = 0
        for name in chapters:
            chapter = _member(archive, name, limit - size)
            size += len(chapter)
            texts.append(html_to_text(body_text(chapter, "", True)))
    fields: dict[str, str] = {}
    for element in package.iterfind(f".//{_DC}*"):
        fields.setdefault(element.tag.removeprefix(_DC), " ".join((element.text or "").split()))
    return "\n\n".join(texts), {"author": fields.get("creator", ""), **fields}


def _chapters(package: ElementTree.Element, folder: str) -> list[str]:
    """The members with the book's text, in reading order."""
    items = {item.get("id", ""): item.attrib for item in package.iter(f"{_OPF}item")}
    names = []
    for reference in package.iter(f"{_OPF}itemref"):
        item = items[reference.attrib["idref"]]
        is_page = "html" in item.get("media-type", "") and "nav" not in item.get("properties", "").split()
        if is_page and reference.get("linear") != "no":
            names.append(posixpath.normpath(posixpath.join(folder, unquote(item["href"]))))
    return list(dict.fromkeys(names))


def _member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A member's bytes, whatever size it claims. Its checksum is compared at its end."""
    info = archive.getinfo(name)
    if info.flag_bits & 1:
        raise _RefusedError("expected an EPUB that opens without a password, got an encrypted one")
    with archive.open(info) as stream:
        data = stream.read(limit + 1)
        if len(data) > limit:
            raise _too_large(limit)
    return data


_READERS = {"pdf": _pdf_text, "epub": _epub_text}
