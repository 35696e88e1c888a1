"""What every reader is given and gives: sources, pieces, options, and the description of a format.

Hides: nothing; the vocabulary of `read/`. A source is one input file (or URL); a piece is the part of one, or a group
of small ones, that one task reads. Pieces and their order depend on the inputs alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from forebay.errors import UsageError
from forebay.prepare.documents import OWN_COLUMNS, Record

PIECE_BYTES = 16 << 20
GROUP_BYTES = 8 << 20
GROUP_FILES = 1024
MAX_SOURCE_BYTES = 64 << 40
"""A file that is said to be larger is refused: a server may say anything."""
MAX_PIECES = 100_000
"""Pieces of one source, at most."""


@dataclass(frozen=True)
class Source:
    """An input file.

    Args:
        path: The path or URL as given.
        name: The same without the directories above what was given.
        format: The name of its format: `warc`, `jsonl`.
        compression: "", `gz`, `zst`, `bz2`, `xz` or `lz4`.
        bytes: Its size as it lies there; 0 if the origin does not say.
        sha256: What its content is named by: `head:` and the SHA-256 of its first bytes until the whole was read; for
            a URL what the origin says its version is (`etag:…`).
        version: What must not change between listing and the last byte: size, time and inode of a local file, the
            ETag or time of a URL. "" is not checked.
        encoding: Of a text file that is not UTF-8; it is read as UTF-8 all the same.
    """

    path: str
    name: str
    format: str
    compression: str
    bytes: int
    sha256: str
    version: str = ""
    encoding: str = ""


@dataclass(frozen=True)
class Piece:
    """What one task reads: `[start, stop)` of a source in the units of its format (bytes, row groups), or whole files.

    `bytes` is what it weighs in the progress of the whole.
    """

    sources: tuple[Source, ...]
    start: int = 0
    stop: int = 0
    bytes: int = 0

    @property
    def format(self) -> str:
        return self.sources[0].format


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read: the `[read]` table of a recipe.

    Args:
        format: A format by name, or `auto` to detect that of each file.
        encoding: Of text files: a name such as `latin-1` or `utf-16`; `auto`: UTF-8, or what the first bytes show.
        text_key: The field or column with the text.
        id_key, url_key: The same for ids and URLs; a document without is no error.
        max_document_bytes: A document, line or member larger than this when unpacked is malformed; what follows it is
            read on.
        max_unpacked_ratio: Text that comes out of a file, whatever its format, is at most this many times its size (and
            256 MiB in any case): what follows is left out as a bomb.
        max_window_bytes: Memory that a zstd stream may ask for, its window: 2GiB for dumps made by `zstd --long=31`.
        max_malformed: Once 1,000 records of a piece and more than this fraction of it are malformed, the rest of the
            piece is left out.
        prompt_key, response_key, messages_key: For the rows layout. If `messages_key` is given (a list of
            `{"role", "content"}`), or both others, the text is the turns, each begun by `documents.PROMPT_MARK` or
            `documents.RESPONSE_MARK` (an assistant's).
        columns: Fields of the input that stages and `dedup.score` see as columns, each `number` or `text`:
            `{"quality" = "number"}`. A document without one has NaN, or "".
        options: What only one format knows: `{"namespaces": [0]}` for Wikipedia.
    """

    format: str = "auto"
    encoding: str = "auto"
    text_key: str = "text"
    id_key: str = "id"
    url_key: str = "url"
    max_document_bytes: int = 32 << 20
    max_unpacked_ratio: int = 200
    max_window_bytes: int = 128 << 20
    max_malformed: float = 0.5
    prompt_key: str = ""
    response_key: str = ""
    messages_key: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in self.columns.items():
            if kind not in ("number", "text") or name in OWN_COLUMNS:
                raise UsageError(f"columns: expected names of fields, each number or text, got {name!r} = {kind!r}")
        try:
            known = self.encoding == "auto" or "x".encode(self.encoding).decode(self.encoding) == "x"
        except (LookupError, ValueError, TypeError):
            known = False
        if not known:
            raise UsageError(f"encoding: expected auto or a text encoding such as latin-1, got {self.encoding!r}")

    @property
    def facts(self) -> list[tuple[str, object]]:
        """The settings that differ from the defaults: a setting added later changes no name made of them."""
        own = ((one.name, getattr(self, one.name)) for one in fields(self))
        return [(name, value) for name, value in own if value != getattr(_DEFAULTS, name)]


_DEFAULTS = ReadOptions()


Read = Callable[[Piece, ReadOptions], Iterator[Record]]
Cut = Callable[[Source, ReadOptions], Iterator[tuple[int, int, int]]]


@dataclass(frozen=True)
class Format:
    """How files of one kind are cut and read; `forebay.formats.detect` says which kind a file is.

    Args:
        name: As users force it: `--format warc`.
        read: The records of a piece, in order. Damage is a Record with a `problem`, then what can still be read;
            it raises only for what is not in the data (a file that is gone, a missing package).
        cut: `(start, stop, bytes)` of the pieces of an uncompressed source; None if it is read as a whole.
        grouped: Whether small files share a piece (then `Record.place` is the file's number in it, for one-document
            files).
    """

    name: str
    read: Read
    cut: Cut | None = None
    grouped: bool = False
