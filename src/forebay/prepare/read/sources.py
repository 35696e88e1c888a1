"""What there is to read: finds input files, says what they are, and cuts them into pieces.

Hides: directories, URLs, and how a format is known: by its first unpacked bytes; then by its suffix; then, if they are
text, as text. Sources, pieces and their order depend on the inputs alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError, UsageError
from forebay.prepare.read.base import GROUP_BYTES, GROUP_FILES, Format, Piece, ReadOptions, Source
from forebay.prepare.read.formats import FORMATS
from forebay.prepare.read.hub import PREFIX, find_dataset, hub_source
from forebay.prepare.read.hub_api import Lost
from forebay.prepare.read.lines import TEXT, is_text
from forebay.prepare.read.opening import COMPRESSIONS, Damaged, open_packed, open_source, sniff_compression

_HEAD = 4096
_SIDECARS = ("dataset_info.json", "dataset_dict.json", "state.json", "cursor.json", "_SUCCESS")


@dataclass(frozen=True)
class Found:
    """The sources behind some inputs, and the files that were passed over, each with the reason."""

    sources: tuple[Source, ...]
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _File:
    """A file before it is known: `given` if the user named it, rather than a directory above it."""

    path: str
    name: str
    given: bool
    bytes: int
    version: str = ""


def find_sources(
    inputs: Sequence[str | Path] | str | Path,
    options: ReadOptions,
    *,
    workers: int = 4,
    leave_out: Path | None = None,
    hashed: bool = True,
) -> Found:
    """The files behind the inputs, hashed: as given, directories in sorted order without hidden files.

    A file in a directory that no reader knows (an image, a program) is passed over; one that the user names is an
    error.

    Args:
        inputs: Paths of files and directories; URLs of http, https, s3, gs, az (also prefixes) and hf.
        options: A `format` other than `auto` is that of all inputs.
        workers: Threads that hash and sniff.
        leave_out: Files below are no input: a dataset may be written inside the directory that it is made of.
        hashed: False reads no file whole: the `sha256` of a local one is then `head:` and that of its first 4 KiB.

    Raises:
        PrepareError: If an input does not exist, cannot be read or is of no known format, or there is no file at all.
        UsageError: If there is no input, or the forced format is none of ours.
    """
    if options.format != "auto" and options.format not in FORMATS:
        names = ", ".join(FORMATS)
        raise UsageError(f"read: expected a format among auto, {names}, got {options.format!r}. Choose one of them.")
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if not inputs:
        raise UsageError("prepare: expected inputs (files, directories, URLs), named or in the recipe, got none.")
    files = [file for given in inputs for file in _files(given, leave_out)]
    with ThreadPoolExecutor(workers) as pool:
        known = list(
            pool.map(lambda f: settle(f, options) if isinstance(f, Source) else _known(f, options, hashed), files)
        )
    sources = tuple(source for source in known if isinstance(source, Source))
    skipped = tuple(pair for pair in known if not isinstance(pair, Source))
    if not sources:
        seen = f" ({len(skipped)} files were passed over; the first: {': '.join(skipped[0])})" if skipped else ""
        told = ", ".join(map(str, inputs))
        raise PrepareError(f"prepare: expected input files, got none in {told}{seen}. Check the path.")
    return Found(sources, skipped)


def _files(given: str | Path, leave_out: Path | None) -> Iterator[_File | Source]:
    if isinstance(given, str) and given.startswith(PREFIX):
        source = hub_source(given)
        dataset = find_dataset(given)
        yield from [source] if dataset is None else filter(None, map(dataset.source, range(len(dataset.files()))))
    elif isinstance(given, str) and "://" in given:
        from forebay.prepare.read.remote import find_urls

        base = given.partition("?")[0].rstrip("/").rpartition("/")[0] + "/"
        for found in find_urls(given):
            name = found.url.removeprefix(base).partition("?")[0]
            yield _File(found.url, name, found.url == given, found.size, found.version)
    elif Path(given).is_dir():
        yield from _below(Path(given), leave_out)
    elif Path(given).is_file():
        yield _File(str(given), _written(Path(given).name), True, Path(given).stat().st_size)
    else:
        raise PrepareError(f"prepare: expected a file or directory, got {given}, which does not exist. Check the path.")


def settle(source: Source, options: ReadOptions) -> Source:
    """The source with its format: the one that is forced, its own, or what its first bytes say.

    Raises:
        PrepareError: If they are of no known format.
    """
    if source.format == "hub":
        return source
    if options.format != "auto":
        return replace(source, format=options.format)
    if source.format:
        return source
    found = _known(_File(source.path, source.name, True, source.bytes, source.sha256), options, False)
    assert isinstance(found, Source)  # one that is given is never passed over
    return replace(found, sha256=source.sha256)


def _below(directory: Path, leave_out: Path | None) -> Iterator[_File]:
    root = directory.resolve().name
    ours = leave_out.resolve() if leave_out is not None else None
    for file in sorted(directory.rglob("*"), key=lambda path: path.relative_to(directory).parts):
        relative = file.relative_to(directory)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and file.is_file() and (ours is None or not file.resolve().is_relative_to(ours)):
            yield _File(str(file), _written(f"{root}/{relative.as_posix()}"), False, file.stat().st_size)


def _written(name: str) -> str:
    """A file name, which may be any bytes, as text."""
    return name.encode("utf-8", "replace").decode()


def _known(file: _File, options: ReadOptions, hashed: bool) -> Source | tuple[str, str]:
    """The file as a source; or, with the reason, one to pass over."""
    try:
        with open_packed(file.path, file.bytes) as packed:
            head = packed.read(_HEAD)
        compression = sniff_compression(head)
        source = Source(file.path, file.name, "", compression, file.bytes, file.version)
        why = ""
        if options.format != "auto":
            name = options.format
        else:
            name, why = _sniff(source, head, file.given, options)
        if not name:
            if file.given:
                raise PrepareError(
                    f"{file.path}: expected one of {', '.join(FORMATS)}, got {why} that begins with bytes "
                    f"{head[:8].hex(' ')}. Force a format with --format, or leave the file out."
                )
            return file.path, why
        version = file.version
        if "://" not in file.path:
            version = hash_file(Path(file.path)) if hashed else f"head:{hashlib.sha256(head).hexdigest()}"
        return Source(file.path, file.name, name, compression, file.bytes, version)
    except Lost as lost:
        raise lost.error from lost
    except OSError as error:
        raise PrepareError(f"{file.path}: cannot read input: {error.strerror or error}.") from error


def _sniff(source: Source, head: bytes, given: bool, options: ReadOptions) -> tuple[str, str]:
    """The name of a file's format; or "" and why there is none."""
    if not given and PurePosixPath(source.name).name in _SIDECARS:
        return "", "a file that describes others"
    if source.compression:
        head = _unpacked_head(source, options)
    name = _without_compression(source.name)
    sure = [known for known in FORMATS.values() if known.sniff(head)]
    alike = [known for known in FORMATS.values() if known.suffixes and name.endswith(known.suffixes)]
    for known in [known for known in sure if known in alike] + sure + alike:
        return known.name, ""
    if not head:
        return "", "an empty file"
    return (TEXT.name, "") if is_text(head) else ("", "binary data of no known format")


def _unpacked_head(source: Source, options: ReadOptions) -> bytes:
    try:
        with open_source(source, options.max_unpacked_ratio, options.max_window_bytes) as file:
            return file.read(_HEAD)
    except Damaged:
        return b""


def _without_compression(name: str) -> str:
    stem, dot, last = name.lower().rpartition(".")
    return stem if dot + last in COMPRESSIONS else name.lower()


def cut(sources: Sequence[Source], options: ReadOptions) -> list[Piece]:
    """All pieces, in the order of the sources: parts of large files, files, and groups of small ones."""
    pieces: list[Piece] = []
    group: list[Source] = []

    def end_group() -> None:
        if group:
            pieces.append(Piece(tuple(group), bytes=sum(source.bytes for source in group)))
            group.clear()

    for source in sources:
        known = FORMATS[source.format]
        if not known.grouped:
            end_group()
            pieces += _parts(source, known, options)
            continue
        held = sum(member.bytes for member in group) + source.bytes
        if group and (group[0].format != source.format or held > GROUP_BYTES or len(group) >= GROUP_FILES):
            end_group()
        group.append(source)
    end_group()
    return pieces


def _parts(source: Source, known: Format, options: ReadOptions) -> Iterator[Piece]:
    if known.cut is None or source.compression or not source.bytes:
        yield Piece((source,), bytes=source.bytes)
        return
    try:
        for start, stop, size in known.cut(source, options):
            yield Piece((source,), start, stop, size)
    except Lost as lost:
        raise lost.error from lost
