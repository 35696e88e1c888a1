"""Files at URLs for readers that take paths: `find_paths` lists them, each of the version that the listing reports.

Hides which listing a scheme has: a repository of the hub at one commit, the objects of a bucket, one file of a web
server. Bytes are read by ranges of 1 MiB, several at a time for a reader that goes on, and are not stored on disk.
The HTTP client is imported by the first function that needs it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any

from forebay.errors import DatasetError, PrintableUrl, UsageError
from forebay.storage.addresses import fixed_folder, glob_matcher, is_hidden, location

if TYPE_CHECKING:
    from forebay.storage.remote_file import RemoteFile

_HEAD_BYTES = 64 << 10
_INDEXES = ("manifest.json", "index.json")  # of a dataset: all files below are its


class RemotePath(PosixPath):
    """A file at a URL, of one version: it may be opened for reading, its size asked with `stat`, and a file beside it
    looked up with `with_name`. It has no descriptor, so it cannot be mapped. `str` is its URL.
    """

    url = version = ""
    num_bytes = -1  # There is no such file.
    siblings: Mapping[str, RemotePath] = {}

    def __str__(self) -> str:
        return self.url or super().__str__()

    def __fspath__(self) -> str:
        raise UsageError(
            f"{self}: expected a format that is read by ranges, got one that needs the file on this machine. Download "
            "it and name its path."
        )

    def open(self, *args: Any, **options: Any) -> Any:
        """A buffered, seekable stream of its bytes. A read raises HubReadError if it changed or cannot be read."""
        from forebay.storage.remote_file import open_url

        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return open_url(self.url, self.num_bytes, self.version, self.extent, is_random=True)

    @property
    def extent(self) -> tuple[int, int]:
        """Bytes that are read in large blocks: all but the head, as that may be all that is needed."""
        return _HEAD_BYTES, self.num_bytes

    def stat(self, **options: Any) -> os.stat_result:
        """Its size; the rest says nothing."""
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, self.num_bytes, 0, 0, 0))

    def is_file(self, **options: Any) -> bool:
        """Whether it was listed."""
        return self.num_bytes >= 0

    exists = is_file

    def is_dir(self, **options: Any) -> bool:
        """False: a prefix is no file."""
        return False

    def with_name(self, name: str) -> RemotePath:
        """The file of that name beside this one; its `is_file` is false where none was listed."""
        path = PurePosixPath(*self.parts).with_name(name)
        return self.siblings.get(str(path)) or RemotePath(path)


def url_name(url: str) -> str:
    """The last part of a URL before any pattern: the name of a directory with the files below it."""
    name = _folder(url).rpartition("/")[2]
    return re.split("[@:]", name)[0] if url.startswith("hf://") else name


def find_paths(url: PrintableUrl) -> list[RemotePath]:
    """The file at a URL, or those below it, sorted by the parts of their paths, without hidden ones.

    A path begins with `url_name`, as if a directory of that name had the files.

    Args:
        url: `hf://datasets/OWNER/NAME[@REVISION][/PATH]`, without a path the files of the card's default
            configuration; `s3://`, `r2://`, `gs://`, `az://`, or `http(s)://` of one file. Parts of it may be a pattern
            (`data/*/train-*.parquet`, `**`), but of http.

    Raises:
        DatasetError: There is none, or it cannot be listed.
    """
    from forebay.storage.remote_file import find_urls

    base, files = _find_hub_files(url) if url.startswith("hf://") else find_urls(url)
    paths: dict[str, RemotePath] = {}
    for file in files:
        address = str(file.url)
        inside = address.removeprefix(base).strip("/")
        if is_hidden(inside):
            continue
        path = RemotePath(PurePosixPath(url_name(url), inside or address.rpartition("/")[2]))
        path.url, path.num_bytes, path.version, path.siblings = file.url, file.size, file.version, paths
        paths[PurePosixPath(*path.parts).as_posix()] = path
    if not paths:
        raise DatasetError(f"{url}: expected files, got none. Check the URL.")
    return sorted(paths.values(), key=lambda path: path.parts)


def _folder(url: str) -> str:
    path = location(url).rstrip("/")
    above = None if url.startswith("http") else fixed_folder(path)
    return path if above is None else above


def _find_hub_files(url: PrintableUrl) -> tuple[str, list[RemoteFile]]:
    """What the paths begin with, and the files: of a split, as `prepare` reads it, if they are of a known format."""
    from forebay.storage.hub import find_repo
    from forebay.storage.hub_splits import find_split, parse_url
    from forebay.storage.remote_file import RemoteFile

    name = parse_url(url)
    if "/" not in name.name:
        raise UsageError(f"{url}: expected hf://datasets/OWNER/NAME[@REVISION][/PATH]. Check the URL.")
    repo, path = find_repo("dataset", name.name, name.revision), (name.config or "").rstrip("/")
    above = fixed_folder(path)
    folder = path if above is None else above
    is_whole = any(file.path.endswith(_INDEXES) for file in repo.files(folder, recursive=False))
    split = None if is_whole else find_split(url, repo=repo)
    files = list(repo.files(folder) if split is None else split.files())
    if split is None and above is not None:
        matches = glob_matcher(path)
        files = [file for file in files if matches(file.path)]
    if not any(file.path.startswith(f"{folder}/") for file in files):
        folder = ""
    if len(files) == 1 and files[0].path == path:
        folder = path
    return repo.file_url(folder), [RemoteFile(repo.file_url(file.path), file.size, file.version) for file in files]
