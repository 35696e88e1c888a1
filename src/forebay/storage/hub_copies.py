"""Copies of the hub's files on this machine, in huggingface_hub's own cache (`HF_HUB_CACHE`).

Each file is checked against the hub's hash after its download. An index beside the repository's files says which of
them, at which commit, a dataset's name stands for, so that a copy is used when the hub does not respond or
HF_HUB_OFFLINE=1. Cost: the bytes of a file are read once more for its hash (1.5 GB/s).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import constants

from forebay.errors import DownloadError, IntegrityError, PrepareError
from forebay.files import atomic_write
from forebay.storage.base import TransientError
from forebay.storage.http import asked_wait_s, is_transient_status
from forebay.storage.hub import API_TRIES, HubFile, HubRepo, find_repo, hub_endpoint, missing_packages, refusal, retry
from forebay.storage.hub_splits import PREFIX, find_split, parse_url

_NUM_THREADS = 4
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
        raise PrepareError(f"{url}: expected a name on the hub, got a directory, which is here already.")
    quoted = urllib.parse.quote(f"{name.config or 'default'}:{name.split}@{name.revision}", safe="@:")
    index = Path(constants.HF_HUB_CACHE) / f"datasets--{name.name.replace('/', '--')}" / f"forebay-{quoted}.json"
    previous = _read_index(index)
    try:
        dataset = find_split(url, tries=1 if previous is not None else API_TRIES)
        if dataset is None:
            raise missing_packages(f"{url} has files that are not read without them")
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
        files = [file for page, _ in repo.pages() for file in page]
        chosen = [file for file in files if file.path in ("tokenizer.json", "tokenizer_config.json")]
        if all(file.path != "tokenizer.json" for file in chosen):
            chosen = [f for f in files if f.path.endswith(_TOKENIZER_SUFFIXES) and f.size <= _MAX_TOKENIZER_BYTES]
        paths = _download(repo, chosen, revision="main")
    except DownloadError:
        if cached is None:
            raise
        return cached.parent
    return paths[0].parent


def _find_cached(kind: str, name: str, path: str, revision: str, size: int | None = None) -> Path | None:
    """The file in the cache, if it is there and has that size."""
    from huggingface_hub import try_to_load_from_cache  # 0.15 s of CPU, as for hf_hub_download

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


def _download(repo: HubRepo, files: Sequence[HubFile], revision: str | None = None) -> tuple[Path, ...]:
    """The paths of the files in the cache, after a download of those that are missing."""
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
        return tuple(pool.map(lambda file: _download_file(repo, file, revision or repo.commit), files))


def _download_file(repo: HubRepo, file: HubFile, revision: str) -> Path:
    cached = _cached_copy(repo, file)
    if cached is not None:
        return cached
    path = Path(retry(repo.label, lambda: _try_download(repo, file, revision), API_TRIES))
    digest = _hash(path, file)
    if digest not in (file.sha256, file.oid):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise IntegrityError(
            f"{repo.label}: expected {file.path} to have the hash {file.sha256 or file.oid}, got {digest}. The bytes "
            "were damaged on the way, or at the hub. Try again."
        )
    return path


def _try_download(repo: HubRepo, file: HubFile, revision: str) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path: str = hf_hub_download(
            repo.name, file.path, repo_type=repo.kind, revision=revision, endpoint=hub_endpoint(),
            cache_dir=constants.HF_HUB_CACHE,
        )  # fmt: skip
        return path
    except HfHubHTTPError as error:
        status, code = error.response.status_code, error.response.headers.get("X-Error-Code", "")
        if is_transient_status(status):
            raise TransientError(f"HTTP status {status}", wait_s=asked_wait_s(error.response.headers)) from error
        raise refusal(repo.label, status, code, f"HTTP status {status}") from error
    except Exception as error:  # of the HTTP library, which is another in each major version
        if isinstance(error, OSError) and error.errno is not None:
            raise PrepareError(
                f"{constants.HF_HUB_CACHE}: cannot write the copy: {error.strerror or error}. Check the disk."
            ) from error
        raise TransientError(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error


def _hash(path: Path, file: HubFile) -> str:
    """The SHA-256 of a large file; of a small one git's hash."""
    with path.open("rb") as data:
        if file.sha256:
            return hashlib.file_digest(data, "sha256").hexdigest()
        header = b"blob %d\0" % path.stat().st_size
        return hashlib.sha1(header + data.read(), usedforsecurity=False).hexdigest()
