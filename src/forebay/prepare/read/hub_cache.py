"""Copies of the hub's files on this machine: `download_hub(url)` for a dataset, `fetch_tokenizer(name)` for a model.

Hides: verification (size, and the hub's SHA-256 or git hash of each file, before it has its name), resuming a file that
was broken off, ranks that start together (one fetches, the others wait), and going on without the hub: what was once
fetched is used when it does not answer, or HF_HUB_OFFLINE=1 says not to ask.

Lies in FOREBAY_HUB_CACHE, by default ~/.cache/forebay/hub: `datasets--OWNER--NAME/COMMIT/PATH`, and beside the
commits a JSON file for each name that was asked for, which says which files at which commit it stands for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from forebay.errors import DatasetError, DownloadError, IntegrityError, PrepareError
from forebay.files import atomic_write, commit_files, remove_stale
from forebay.formats.inputs import InputFile
from forebay.prepare.read.hub import PREFIX, find_dataset, hub_file_source, missing_packages, parse_url
from forebay.prepare.read.hub_api import TRIES, HubFile, Repo, find_repo, is_commit, list_pages
from forebay.prepare.read.hub_files import fetch_range, file_url
from forebay.storage import locks

_AT_ONCE = 4
_STEP = 1 << 20


@dataclass(frozen=True)
class HubCopy:
    """A dataset's files of one split on this machine, below `folder`, in order. A TextStream takes it as its input.

    `url` is HubDataset's: a stream's state fits both. `offline`: the hub did not answer; this was fetched before.
    """

    url: str
    folder: Path
    files: tuple[HubFile, ...]
    offline: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / file.path for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def source(self, index: int) -> InputFile | None:
        """As of HubDataset."""
        if index >= len(self.files):
            return None
        return hub_file_source(self.files[index], str(self.paths[index]))


def hub_cache() -> Path:
    """Where copies lie: FOREBAY_HUB_CACHE, or ~/.cache/forebay/hub."""
    told = os.environ.get("FOREBAY_HUB_CACHE")
    return Path(told) if told else Path.home() / ".cache" / "forebay" / "hub"


def download_hub(url: str, *, progress: Callable[[int, int], None] | None = None) -> HubCopy:
    """Fetch the files of `hf:NAME[/CONFIG][:SPLIT][@REVISION]`; those that are here are not fetched again.

    The hub is asked for its newest commit each time; if it does not answer, what was fetched before is used.
    `progress` is called with the bytes that are here and those of all files, from any thread.
    """
    url = url if url.startswith(PREFIX) else PREFIX + url.removeprefix("hf:")
    name = parse_url(url)
    if name.is_local:
        raise PrepareError(f"{url}: expected a name on the hub, got a directory, which is here already.")
    folder = hub_cache() / f"datasets--{name.name.replace('/', '--')}"
    quoted = urllib.parse.quote(f"{name.config or 'default'}:{name.split}@{name.revision}", safe="@:")
    index = folder / f"{quoted}.json"
    before = _read_copy(index, folder)
    try:
        found = find_dataset(url, tries=1 if before is not None else TRIES)
        if found is None:
            raise missing_packages(f"{url} has files that are not read without them")
        files = tuple(found.files())
        _fetch(found.repo, files, folder / found.repo.commit, progress)
    except DownloadError:
        if before is None:
            raise
        return before
    copy = HubCopy(found.url, folder / found.repo.commit, files)
    _write_copy(index, copy)
    return copy


def fetch_tokenizer(name: str) -> Path:
    """A folder with the model's tokenizer.json and tokenizer_config.json; without the first, all small files that a
    tokenizer may be made of."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    index = folder / "main.json"
    before = _read_copy(index, folder)
    try:
        repo = find_repo("models", name, tries=1 if before is not None or _of_the_library(name) is not None else TRIES)
        files = tuple(_tokenizer_files([file for page, _ in list_pages(repo) for file in page]))
        _fetch(repo, files, folder / repo.commit, None)
    except DownloadError:
        found = before.folder if before is not None else _of_the_library(name)
        if found is None:
            raise
        return found
    _write_copy(index, HubCopy(f"hf://models/{repo.name}@{repo.commit}", folder / repo.commit, files))
    return folder / repo.commit


def _tokenizer_files(files: Sequence[HubFile]) -> list[HubFile]:
    named = [file for file in files if file.path in ("tokenizer.json", "tokenizer_config.json")]
    if any(file.path == "tokenizer.json" for file in named):
        return named
    endings = (".json", ".txt", ".model", ".vocab", ".bpe", ".tiktoken")
    return [file for file in files if file.path.endswith(endings) and file.size <= 64 << 20]


def _of_the_library(name: str) -> Path | None:
    """A folder with a tokenizer.json that the hub's own library fetched, if there is one."""
    from forebay.storage.http import hub_home

    home = Path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub") / f"models--{name.replace('/', '--')}"
    try:
        folder = home / "snapshots" / (home / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None
    return folder if (folder / "tokenizer.json").is_file() else None


def _read_copy(index: Path, folder: Path) -> HubCopy | None:
    """What was fetched before, if it is all there."""
    try:
        plain: dict[str, Any] = json.loads(index.read_bytes())
        files = tuple(HubFile(**file) for file in plain["files"])
        if not is_commit(plain["commit"]):
            return None
        for file in files:
            below(folder, file.path)
        copy = HubCopy(plain["url"], folder / plain["commit"], files, offline=True)
        whole = all(path.stat().st_size == file.size for path, file in zip(copy.paths, files))
    except (OSError, ValueError, KeyError, TypeError, PrepareError):
        return None
    return copy if whole else None


def _write_copy(index: Path, copy: HubCopy) -> None:
    plain = {"url": copy.url, "commit": copy.folder.name, "files": [asdict(file) for file in copy.files]}
    remove_stale(index.parent)
    atomic_write(index, json.dumps(plain).encode())


def _fetch(repo: Repo, files: Sequence[HubFile], folder: Path, progress: Callable[[int, int], None] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(file.size for file in files)
    missing = [file for file in files if not _is_here(file, folder)]
    here = total - sum(file.size for file in missing)
    free = shutil.disk_usage(folder).free
    if total - here > free:
        raise PrepareError(
            f"{repo.what}: expected {(total - here) / 1e9:.2f} GB free in {folder}, got {free / 1e9:.2f} GB. Stream it "
            "instead, or set FOREBAY_HUB_CACHE to a larger disk."
        )
    if progress is not None:
        progress(here, total)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for fetched in pool.map(lambda file: _fetch_file(repo, file, folder), missing):
            here += fetched
            if progress is not None:
                progress(here, total)


def below(folder: Path, name: str) -> Path:
    """The path of that name, which somebody else gave, below a folder; PrepareError if it leads elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise PrepareError(
            f"{folder}: expected the name of a file below it, got {name!r:.200}. Check where it is from."
        )
    return folder.joinpath(*parts)


def _is_here(file: HubFile, folder: Path) -> bool:
    path = below(folder, file.path)
    return path.is_file() and path.stat().st_size == file.size


def _fetch_file(repo: Repo, file: HubFile, folder: Path) -> int:
    path = below(folder, file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # A fixed name, under the lock: a broken-off one is resumed.
    try:
        with locks.acquire(path.with_name(f".{path.name}.lock")):
            if not _is_here(file, folder):
                _fetch_partial(repo, file, partial)
                commit_files({partial: path})
    except OSError as error:
        if isinstance(error, DownloadError | DatasetError):
            raise
        raise PrepareError(f"{path}: cannot write the copy: {error.strerror or error}. Check the disk.") from error
    return file.size


def _fetch_partial(repo: Repo, file: HubFile, partial: Path) -> None:
    """All of the file under its partial name, verified; what is there already is kept, unless it turns out wrong."""
    url = file_url(repo.kind, repo.name, repo.commit, file.path)
    for resumed in (True, False):
        with partial.open("ab") as out:
            if not resumed or out.tell() > file.size:
                out.truncate(0)
            began = out.seek(0, os.SEEK_END)
            fetch_range(url, began, file.size, out.write)
        got = _hash(partial, file)
        if got in (file.sha256, file.oid):
            return
        if not began:
            break
    partial.unlink()
    raise IntegrityError(
        f"{repo.what}: expected {file.path} to have the hash {file.sha256 or file.oid}, got {got}. The bytes were "
        "damaged on the way, or at the hub. Try again."
    )


def _hash(path: Path, file: HubFile) -> str:
    """SHA-256 of a large file; of a small one what git hashes it to."""
    found = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as data:
        while piece := data.read(_STEP):
            found.update(piece)
    return found.hexdigest()
