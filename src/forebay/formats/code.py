"""Source trees: every file of text is a document as it lies, whatever its suffix, with its language and licence.

Columns that `[read.columns]` may name: `language`, by the file's name or its `#!` line, in the spelling of the library
`identify` (`python`, `c++`, `rust`); `licence` or `license`, SPDX ids: of an SPDX-License-Identifier in the file, else
of the licence files of the nearest directory up to the input's root that has any, all of them joined by AND, and
NOASSERTION for a text that is none of choosealicense.com's. Licence files are looked for in local directories alone.

Hides: which of a file's tags is its language, and the comparison of licence texts: the share of common runs of three
words, 0.9 or more. Cost: listing each directory once for a split, and 60 ms once for the texts.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path, PurePosixPath

from forebay.formats.base import Format
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions, local_version
from forebay.formats.records import Record, column_values
from forebay.formats.text import read_document

_BINARY_BYTES = 8000  # As Git decides.
_MAX_LICENCE_BYTES = 256 << 10
_HEADER_CHARS = 4096
_MIN_SIMILARITY = 0.9
_LICENCE_FILE = re.compile(r"(un)?licen[cs]e([.-].*)?|copying([.-].*)?|\w+-licen[cs]e([.].*)?", re.IGNORECASE)
_SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+() -]+)")
_COPYRIGHT = re.compile(
    r"^\W*(copyright\s*(\(c\)|©|[\d\[<{]|by ).*|(\(c\)|©).*|all rights reserved.*)$", re.IGNORECASE | re.MULTILINE
)
_WORDS = re.compile(r"[a-z0-9]+")
_KINDS = ("text", "binary", "header", "plain-text", "executable", "non-executable", "file")
_LANGUAGES = {".h": "c", ".ipynb": "jupyter", ".mm": "objective-c++"}
"""Where the most common of several tags is not the language."""


class SourceCode(Format):
    """Files of a source tree, each a document; only used where a user forces it. Binary files are left out."""

    name = "code"
    is_plain_text = True
    is_grouped = True

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        licences: dict[Path, str] = {}
        for index, file in enumerate(split.files):
            data, record = read_document(index, file, options)
            if b"\0" in data[:_BINARY_BYTES]:
                yield Record(index, problem="blank")
                continue
            if not record.problem:
                find = partial(_value, file=file, text=record.text, licences=licences)
                record = replace(record, id=file.name, values=column_values(options, find))
            yield record


def _value(column: str, file: InputFile, text: str, licences: dict[Path, str]) -> str:
    if column == "language":
        return language_of(file.name.rpartition(".")[0] if file.compression else file.name, text)
    if column in ("licence", "license"):
        if licence := spdx_of(text):
            return licence
        for folder in _folders(file):
            if folder not in licences:
                licences[folder] = _licence_of_folder(folder)
            if licences[folder]:
                return licences[folder]
    return ""


def language_of(name: str, text: str = "") -> str:
    """Return the language of a file by its name, else by its `#!` line; "" if neither tells."""
    from identify.identify import parse_shebang, tags_from_filename, tags_from_interpreter

    if language := _LANGUAGES.get(PurePosixPath(name).suffix.lower()):
        return language
    tags = tags_from_filename(name)
    if not tags and text.startswith("#!") and (words := parse_shebang(io.BytesIO(text[:1000].encode()))):
        tags = tags_from_interpreter(words[0])
    return max(sorted(tags.difference(_KINDS)), key=_tag_counts().__getitem__, default="")


@cache
def _tag_counts() -> Counter[str]:
    """How many suffixes have a tag: `xml` more than `svg`."""
    from identify.extensions import EXTENSIONS

    return Counter(tag for tags in EXTENSIONS.values() for tag in tags)


def spdx_of(text: str) -> str:
    """Return the SPDX expression in the first lines of a file; "" if there is none."""
    match = _SPDX.search(text, 0, _HEADER_CHARS)
    return " ".join(match[1].split()).rstrip(" -") if match else ""


def licence_versions(file: InputFile) -> list[tuple[str, str]]:
    """The paths and versions of the files that may say the licence of one without an identifier of its own."""
    nearest = next((paths for folder in _folders(file) if (paths := _licence_files(folder))), [])
    return [(str(path), local_version(path)) for path in sorted(nearest)]


def _folders(file: InputFile) -> Sequence[Path]:
    """Those of a local file, up to the input's root."""
    return () if "://" in file.path else Path(file.path).parents[: max(1, file.name.count("/"))]


def _licence_files(folder: Path) -> list[Path]:
    try:
        return _list_licence_files(folder, local_version(folder))
    except OSError:
        return []


@lru_cache(maxsize=1024)
def _list_licence_files(folder: Path, version: str) -> list[Path]:
    paths = [path for path in folder.iterdir() if _LICENCE_FILE.fullmatch(path.name) and path.is_file()]
    return [path for path in paths if language_of(path.name) in ("", "markdown", "rst")]


def _licence_of_folder(folder: Path) -> str:
    ids = set()
    for path in _licence_files(folder):
        try:
            with path.open("rb") as stream:
                text = stream.read(_MAX_LICENCE_BYTES).decode("utf-8", "replace")
        except OSError:
            text = ""
        ids.update((licence_of(text) or "NOASSERTION").split(" AND "))
    return " AND ".join(sorted(ids))


def licence_of(text: str) -> str:
    """Return the SPDX id of the licence that a text is, with those of others in it; "" if it is none that is known."""
    runs = _runs(text)
    shares = {name: 2 * len(runs & other) / max(1, len(runs) + len(other)) for name, other in _licences().items()}
    similarity, best = max((share, name) for name, share in shares.items())
    if similarity < _MIN_SIMILARITY:
        return ""
    first = _licences()[best]
    rest = runs - first
    own = {name: other - first for name, other in _licences().items()}
    others = (name for name, other in own.items() if other and len(rest & other) >= _MIN_SIMILARITY * len(other))
    return " AND ".join(sorted({best, *others}))


@cache
def _licences() -> dict[str, frozenset[tuple[str, ...]]]:
    from identify.vendor.licenses import LICENSES

    return {name: _runs(text) for name, text in LICENSES}


def _runs(text: str) -> frozenset[tuple[str, ...]]:
    words = _WORDS.findall(_COPYRIGHT.sub("", text).lower())
    return frozenset(zip(words, words[1:], words[2:]))
