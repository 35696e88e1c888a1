"""Copies of the hub's files on this machine, in huggingface_hub's cache (`HF_HUB_CACHE`), which other programs share.

A file has its name in the cache only after its hash was checked; an interrupted download is continued. An index beside
a repository's files says which of them, at which commit, a name stands for, so that a copy is used when the hub does
not respond or HF_HUB_OFFLINE=1. Not hf_hub_download: it checks no hash, restarts an interrupted file, and takes a path
from the server (its ETag). Cost: a file's bytes are read once more for the hash (1.5 GB/s).
"""

import hashlib
import json
import os
import re
import shutil
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import constants

from forebay.errors import DownloadError, ForebayError, IntegrityError, PrepareError, printable_url
from forebay.files import atomic_write, commit_files
from forebay.storage import locks
from forebay.storage.base import download
from forebay.storage.hub import API_TRIES, HubFile, HubRepo, fetch_range, find_repo, hub_endpoint, missing_packages
from forebay.storage.hub_splits import PREFIX, find_split, parse_url

_NUM_THREADS = 4
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".vocab", ".bpe", ".tiktoken")
_MAX_TOKENIZER_BYTES = 64 << 20


@dataclass(frozen=True)
class HubCopy:
    """The files of one split on this machine, in order. A TextStream takes it as its input.

    `url` is the HubSplit's: a stream's state fits both. `offline`: the hub did not respond; this is an earlier copy.
    """

    url: str
    paths: tuple[Path, ...]
    files: tuple[HubFile, ...]
    offline: bool = False

    def file(self, index: int) -> HubFile | None:
        """As of HubSplit."""
        return self.files[index] if index < len(self.files) else None

    def location(self, index: int) -> str:
        """The path of the file of that number."""
        return str(self.paths[index])


def download_hub(url: str) -> HubCopy:
    """Download the files of `hf:NAME[/CONFIG][:SPLIT][@REVISION]`; those in the cache are not downloaded again.

    The hub is asked for its newest commit each time; if it does not respond, the earlier copy is returned.

    Raises:
        DownloadError: The hub does not respond, and there is no complete copy.
        IntegrityError: A file's bytes do not have the hub's hash.
        MissingPackageError: The files are of a kind that only the package `datasets` reads.
    """
    url = url if url.startswith(PREFIX) else PREFIX + url.removeprefix("hf:")
    name = parse_url(url)
    if name.is_local:
        raise PrepareError(f"{printable_url(url)}: expected a name on the hub, got a directory, which is here already.")
    quoted = urllib.parse.quote(f"{name.config or 'default'}:{name.split}@{name.revision}", safe="@:")
    index = _repo_folder("dataset", name.name) / f"forebay-{quoted}.json"
    previous = _read_index(index)
    try:
        dataset = find_split(url, tries=1 if previous is not None else API_TRIES)
        if dataset is None:
            raise missing_packages(f"{printable_url(url)} has files that are not read without them")
        files = tuple(dataset.files())
        paths = _download(dataset.repo, files)
    except DownloadError:
        if previous is None:
            raise
        return previous
    entries = {"url": dataset.url, "name": dataset.repo.name, "commit": dataset.repo.commit}
    index.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(index, json.dumps({**entries, "files": [asdict(file) for file in files]}).encode())
    return HubCopy(dataset.url, paths, files)


def fetch_tokenizer(name: str) -> Path:
    """A folder with a model's tokenizer.json and tokenizer_config.json, downloaded if the cache does not have them.

    Without a tokenizer.json it has all small files of which a tokenizer may be made.
    """
    cached = _find_cached("model", name, "tokenizer.json", "main")
    try:
        repo = find_repo("model", name, tries=1 if cached is not None else API_TRIES)
        files = list(repo.files(recursive=False))
        chosen = [file for file in files if file.path in ("tokenizer.json", "tokenizer_config.json")]
        if all(file.path != "tokenizer.json" for file in chosen):
            chosen = [f for f in files if f.path.endswith(_TOKENIZER_SUFFIXES) and f.size <= _MAX_TOKENIZER_BYTES]
        paths = _download(repo, chosen)
        reference = _repo_folder("model", repo.name) / "refs" / "main"
        reference.parent.mkdir(exist_ok=True)
        atomic_write(reference, repo.commit.encode())
    except DownloadError:
        if cached is None:
            raise
        return cached.parent
    return paths[0].parent


def _find_cached(kind: str, name: str, path: str, revision: str, size: int | None = None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # 0.15 s of CPU

    try:
        cached = try_to_load_from_cache(name, path, cache_dir=constants.HF_HUB_CACHE, revision=revision, repo_type=kind)
    except ValueError:  # no name of a repository or a file
        return None
    if not isinstance(cached, str) or (size is not None and Path(cached).stat().st_size != size):
        return None
    return Path(cached)


def _cached_copy(repo: HubRepo, file: HubFile) -> Path | None:
    return _find_cached(repo.kind, repo.name, file.path, repo.commit, file.size)


def _read_index(index: Path) -> HubCopy | None:
    """The copy that an index describes, if all its files are in the cache."""
    try:
        entries = json.loads(index.read_bytes())
        files = tuple(HubFile(**file) for file in entries["files"])
        repo = HubRepo("dataset", entries["name"], entries["commit"], {})
        paths = tuple(path for file in files if (path := _cached_copy(repo, file)) is not None)
        return HubCopy(entries["url"], paths, files, offline=True) if len(paths) == len(files) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _repo_folder(kind: str, name: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"


def _download(repo: HubRepo, files: Sequence[HubFile]) -> tuple[Path, ...]:
    cache = Path(constants.HF_HUB_CACHE)
    missing = sum(file.size for file in files if _cached_copy(repo, file) is None)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise PrepareError(
            f"{repo.label}: expected {missing / 1e9:.2f} GB free in {cache}, got {free / 1e9:.2f} GB. Stream it "
            "instead, or set HF_HUB_CACHE to a larger disk."
        )
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return tuple(pool.map(lambda file: _download_file(repo, file), files))


def _download_file(repo: HubRepo, file: HubFile) -> Path:
    """Download a file to `blobs/HASH`, with a link to it at `snapshots/COMMIT/PATH`, unless it is cached."""
    cached = _cached_copy(repo, file)
    if cached is not None:
        return cached
    digest, parts = file.sha256 or file.oid, PurePosixPath(file.path).parts
    if not _DIGEST.fullmatch(digest) or not parts or parts[0] == "/" or ".." in parts or "\0" in file.path:
        raise PrepareError(
            f"{repo.label}: expected a file below the repository and its hash, got {file.path!r:.200}, {digest!r:.80} "
            f"({hub_endpoint()}). Check HF_ENDPOINT."
        )
    folder = _repo_folder(repo.kind, repo.name)
    blob, path = folder / "blobs" / digest, folder.joinpath("snapshots", repo.commit, *parts)
    lock = folder.parent / ".locks" / folder.name / f"{digest}.lock"  # as of huggingface_hub, which locks it likewise
    try:
        for directory in (blob.parent, path.parent, lock.parent):
            directory.mkdir(parents=True, exist_ok=True)
        with locks.acquire(lock):
            if not blob.is_file() or blob.stat().st_size != file.size:
                _download_blob(repo, file, blob)
            if _cached_copy(repo, file) is None:
                path.unlink(missing_ok=True)
                path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError as error:
        if isinstance(error, ForebayError):
            raise
        raise PrepareError(f"{path}: cannot write the copy: {error.strerror or error}. Check the disk.") from error
    return path


def _download_blob(repo: HubRepo, file: HubFile, blob: Path) -> None:
    """Download a file's bytes and check their hash; what an interrupted download left is continued."""
    part = blob.with_name(f"{blob.name}.forebay.incomplete")  # A fixed name, under the lock.
    body = partial(fetch_range, repo.file_url(file.path), stop=file.size)
    for resumes in (True, False):
        start = download(body, file.size, part, resumes=resumes)
        digest = _hash(part, file)
        if digest == blob.name:
            return commit_files({part: blob})
        if not start:
            break
    part.unlink()
    raise IntegrityError(
        f"{repo.label}: expected {file.path} to have the hash {blob.name}, got {digest}. The bytes were damaged on the "
        "way, or at the hub. Try again."
    )


def _hash(path: Path, file: HubFile) -> str:
    with path.open("rb") as data:
        if file.sha256:
            return hashlib.file_digest(data, "sha256").hexdigest()
        header = b"blob %d\0" % path.stat().st_size
        return hashlib.sha1(header + data.read(), usedforsecurity=False).hexdigest()
