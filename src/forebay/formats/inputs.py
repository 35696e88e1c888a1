"""Input files and the ranges of them that one task reads.

Hides compression, encodings and URLs: `open_input` gives the bytes of any input as UTF-8 where it is text. Splits and
their order depend on the inputs alone, never on the number of tasks.
"""

import codecs
import copy
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar, TypeAlias

from forebay.errors import CorruptInputError, PrepareError, UnreadableInputError, UsageError
from forebay.storage.compression import MAX_WINDOW_BYTES, MIN_UNPACKED_BYTES, ChunkStream, unpack_stream

SPLIT_BYTES = 16 << 20
GROUP_BYTES = 8 << 20
GROUP_FILES = 1024
MAX_INPUT_BYTES = 64 << 40  # A larger size is refused: a server may claim any.
MAX_SPLITS = 100_000  # Splits of one file, at most.
TEXT_KEYS = ("text", "content", "contents", "body", "raw_content", "raw_text", "document", "article")
"""Fields with the text of a document: of a file without `text` the first that it has is read."""
RESERVED_COLUMNS = frozenset(("place", "id", "url", "html", "text", "where", "text_bytes", "copies", "subset"))
"""Columns that readers, tasks and `[[subset]]` make; fields of the input may not take their names."""
ALL_FIELDS = "*"
_BUFFER_BYTES = 256 << 10
_STEP_BYTES = 64 << 10


Extents: TypeAlias = Iterator[tuple[int, int, int]]
"""(start, stop, bytes) of splits."""


class ReadTrace:
    """How far a reader came in its files.

    Attributes:
        read: The path of the file that was read last, and the byte where its last read began.
        unpacked: The path of the file that was unpacked last, and the stream of its unpacked bytes.
    """

    read: tuple[str, int] = "", 0
    unpacked: tuple[str, Any] = "", None

    def unread_bytes(self, split: "InputSplit") -> int:
        """Return how many bytes of a split were not read when reading it just ended: all if that is not known.

        A local file was read at least up to the beginning of its last read.
        """
        file, (path, reached) = split.files[0], self.read
        stop = split.stop or file.bytes
        is_known = path == file.path and split.start <= reached <= stop <= file.bytes
        return stop - reached if is_known else split.bytes

    def damage(self, split: "InputSplit") -> str:
        """Return the damage that ended the unpacking of a split's first file; "" if there is none."""
        path, stream = self.unpacked
        return str(stream.error) if path == split.files[0].path and getattr(stream, "error", None) else ""


@dataclass(frozen=True)
class InputFile:
    """An input file.

    Args:
        path: The path or URL as the user named it.
        name: The same without the directories above what the user named.
        format: The name of its format: `warc`, `jsonl`.
        compression: "" or a name of `storage.compression`.
        bytes: Its size as stored; 0 if the origin does not tell.
        sha256: The name of its content: `head:` and the SHA-256 of its first bytes until all of it was read; of a URL
            the version that the origin reports (`etag:…`).
        version: What must not change between listing and the last byte: size, time and inode of a local file, the
            ETag or time of a URL. "" is not checked.
        encoding: Of a text file that is not UTF-8; `open_input` gives UTF-8.
        is_guessed: Neither the user nor a mark of byte order says the encoding.
        is_listed: Named by a list at a URL: the task that reads it downloads it first.
        text_key: The field with its text, where it is not that of the options.
        missing: What most of its first records lack: text.
        is_textless: All of them lack it, and no other place of the file has its key, as far as that is known.
        extent: Bytes `[start, stop)` that a part of the file needs. A URL is then not read ahead beyond them.
        trace: Notes how far the file is read, if its reader wants to know.
    """

    path: str
    name: str
    format: str
    compression: str
    bytes: int
    sha256: str
    version: str = ""
    encoding: str = ""
    is_guessed: bool = False
    is_listed: bool = False
    text_key: str = ""
    missing: str = ""
    is_textless: bool = False
    extent: tuple[int, int] | None = None
    trace: ReadTrace | None = field(default=None, compare=False, repr=False)

    @property
    def format_read(self) -> str:
        """The name of its format, the field of its text if not that of the options, its encoding if not UTF-8."""
        how = f", read as {self.encoding}" + " (guessed)" * self.is_guessed if self.encoding else ""
        return self.format + (f", {self.text_key}" if self.text_key else "") + how


@dataclass(frozen=True)
class InputSplit:
    """What one task reads: `[start, stop)` of a file in the units of its format (bytes, row groups), or whole files.

    `bytes` is its weight in the progress of a run.
    """

    files: tuple[InputFile, ...]
    start: int = 0
    stop: int = 0
    bytes: int = 0

    @property
    def format(self) -> str:
        """The name of the files' format."""
        return self.files[0].format

    @property
    def kind(self) -> str:
        """Return what the pace of a task and its documents depend on: format, compression, whether there is text."""
        words = (word for f in self.files[:1] for word in (f.format, f.compression, "without text" * f.is_textless))
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read: the `[read]` table of a recipe.

    Args:
        format: A format by name, or `auto` to detect that of each file.
        encoding: Of text files: a name such as `latin-1` or `utf-16`; `auto`: UTF-8, or what the first bytes show.
        text_key: The field or column with the text. `text`: of each file the first of `text`, `content`, `contents`,
            `body`, `raw_content`, `raw_text`, `document` and `article` that it has. A list: several fields, whose texts
            (those in lists and objects too) are joined by an empty line; `*`: every field but the id and the URL.
        id_key, url_key: The same for ids and URLs; a document without is no error.
        max_document_bytes: A document, line or member larger than this when unpacked is malformed; reading goes on
            after it.
        max_unpacked_ratio: Text that comes out of a file, whatever its format, is at most this many times its size (and
            256 MiB in any case): the rest is left out as a decompression bomb.
        max_window_bytes: Memory that a zstd stream may ask for, its window: 2GiB for dumps made by `zstd --long=31`.
        max_malformed: Once 1,000 records of a split and more than this fraction of it are malformed, the rest of the
            split is left out.
        prompt_key, response_key, messages_key: For the rows layout. If `messages_key` is set (a list of
            `{"role", "content"}`), or both others, the text is the turns, each after `records.PROMPT_MARK` or
            `records.RESPONSE_MARK` (an assistant's).
        columns: Fields of the input that stages see as columns, each `number` or `text`:
            `{"quality" = "number"}`. A document without one has NaN, or "". Of WARC and WET: `date`, `language`, or
            any header of a record by its name.
        options: What only one format knows: `{"namespaces": [0]}` for Wikipedia.
    """

    format: str = "auto"
    encoding: str = "auto"
    text_key: str | tuple[str, ...] = "text"
    id_key: str = "id"
    url_key: str = "url"
    max_document_bytes: int = 32 << 20
    max_unpacked_ratio: int = 200
    max_window_bytes: int = MAX_WINDOW_BYTES
    max_malformed: float = 0.5
    prompt_key: str = ""
    response_key: str = ""
    messages_key: str = ""
    keep_roles: bool = field(default=False, init=False)  # See `with_roles`.
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    former: ClassVar[Mapping[str, object]] = MappingProxyType({"text_keys": []})

    def __post_init__(self) -> None:
        for name, kind in self.columns.items():
            if kind not in ("number", "text") or name in RESERVED_COLUMNS:
                raise UsageError(f"columns: expected names of fields, each number or text, got {name!r} = {kind!r}")
        try:
            is_text = self.encoding == "auto" or "x".encode(self.encoding).decode(self.encoding) == "x"
        except (LookupError, ValueError, TypeError):
            is_text = False
        if not is_text:
            raise UsageError(f"encoding: expected auto or a text encoding such as latin-1, got {self.encoding!r}")

    @property
    def text_keys(self) -> tuple[str, ...]:
        """The fields that are joined; none if the text is one field."""
        return () if isinstance(self.text_key, str) else self.text_key

    def with_roles(self) -> "ReadOptions":
        """Return the options under which a text has the roles and other fields of messages, for a chat template."""
        copied = copy.copy(self)
        object.__setattr__(copied, "keep_roles", True)
        return copied

    @property
    def changed(self) -> list[tuple[str, object]]:
        """The settings that differ from the defaults: a setting added later changes no name made of them."""
        values = ((setting.name, getattr(self, setting.name)) for setting in fields(self))
        return [(name, value) for name, value in values if value != getattr(_DEFAULTS, name)]


_DEFAULTS = ReadOptions()


class OutputBudget:
    """Counts the bytes that come out of a split or a run: at most a share of `max(256 MiB, max_unpacked_ratio * size)`.

    A file whose size is not known has no limit here; that of its compression holds.
    """

    def __init__(self, split: InputSplit, options: ReadOptions) -> None:
        size = sum(file.bytes for file in split.files)
        self._ratio = options.max_unpacked_ratio
        limit = max(MIN_UNPACKED_BYTES, self._ratio * size) if size else 1 << 62
        self._remaining = limit * split.bytes // size if 0 < split.bytes < size else limit

    def spend(self, size: int) -> None:
        """Count bytes. Raises CorruptInputError if they are more than remain."""
        self._remaining -= size
        if self._remaining < 0:
            raise CorruptInputError(
                f"more text came out than 256 MiB and {self._ratio} times their size: a bomb. Raise "
                "max_unpacked_ratio if you trust it."
            )


def open_input(file: InputFile, options: ReadOptions) -> BinaryIO:
    """Open the unpacked bytes of a file, as UTF-8 if it is text; buffered, and seekable if it is not compressed.

    A read raises CorruptInputError where bytes cannot be unpacked, end early or are a bomb; PrepareError if they
    cannot be fetched.
    """
    raw = open_stored(file)
    if file.compression:
        raw = unpack_stream(
            raw, file.compression, max_ratio=options.max_unpacked_ratio, max_window_bytes=options.max_window_bytes
        )
        if file.trace is not None:
            file.trace.unpacked = file.path, raw
    if file.encoding:
        raw = ChunkStream(_transcoded(raw, file.encoding), raw.close)
    return raw


def _transcoded(raw: BinaryIO, encoding: str) -> Iterator[bytes]:
    try:
        for text in codecs.iterdecode(iter(lambda: raw.read(_STEP_BYTES), b""), encoding, "replace"):
            yield text.encode("utf-8", "replace")
    except UnicodeError as error:  # An escape of ISO 2022 that does not end.
        raise CorruptInputError(f"{encoding}: {error}") from error


def open_stored(file: InputFile, *, is_random: bool = False) -> BinaryIO:
    """Open the bytes of a file as stored at its path or URL, of its version; buffered and seekable.

    `is_random`: the reader seeks back and forth, so a URL is read in blocks that are kept for a while.
    """
    if "://" in file.path:
        from forebay.storage.remote_file import open_url  # Loads an HTTP client, which local files do not need.

        return open_url(file.path, file.bytes, file.version, file.extent, is_random=is_random)
    try:
        opened = _TracedFile(file.path)
    except OSError as error:
        raise UnreadableInputError(
            f"{file.path}: cannot read input: {error.strerror or error}. Check that it exists and may be read."
        ) from error
    opened.trace = file.trace
    return io.BufferedReader(opened, _BUFFER_BYTES)


class _TracedFile(io.FileIO):
    """A local file that notes in its `trace`, if it has one, where the last read began."""

    trace: ReadTrace | None = None

    def readinto(self, buffer: Any, /) -> int | None:
        size = super().readinto(buffer)
        if size and self.trace is not None:
            self.trace.read = str(self.name), self.tell() - size
        return size


def skip_to(file: BinaryIO, offset: int) -> None:
    """Skip the first bytes of an opened input: at once if it is not compressed, else by unpacking them."""
    if file.seekable():
        file.seek(offset)
        return
    remaining = offset
    while remaining and (data := file.read(min(remaining, _BUFFER_BYTES))):
        remaining -= len(data)


def local_version(path: str | Path) -> str:
    """Return what tells a file from another one and from itself after a change: size, time of change and inode."""
    stat = Path(path).stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ino}"


def local_file(path: Path, name: str) -> InputFile:
    """Return the file at a path as an input of unknown format. Raises OSError."""
    version = local_version(path)
    name = name.encode("utf-8", "replace").decode()
    return InputFile(str(path), name, "", "", int(version.partition("-")[0]), "", version)


def check_unchanged(file: InputFile) -> None:
    """Raise PrepareError if a local file is another one, or has other bytes, than when it was listed.

    A URL's version is compared where it is opened.
    """
    if file.version and "://" not in file.path:
        try:
            version = local_version(file.path)
        except FileNotFoundError:
            version = ""
        except OSError:
            return  # Opening it raises with the reason.
        if version != file.version:
            raise PrepareError(f"{file.path}: the input changed while it was read. Start again.")
