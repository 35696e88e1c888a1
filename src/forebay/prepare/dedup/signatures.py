"""The signatures of a dataset's documents beside its slices, which `--extend` compares new documents with.

`signatures-NNNNNN.npz` has the arrays of the signature files of documents that stay, by their endings, and `settings`,
JSON of `Dedup.signature`. The manifest lists each file with its hash.
"""

import hashlib
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import Array
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError
from forebay.prepare.dedup.cutting import Flags
from forebay.prepare.dedup.deduplicate import VERSION, DedupResult
from forebay.prepare.dedup.methods import Dedup, Signed
from forebay.prepare.documents import Map
from forebay.storage.store import Store

_FILE_DOCUMENTS = 1 << 18
_NAME = "signatures-{:06d}.npz"
_IS_FILE = re.compile(r"signatures-\d{6}\.npz")


@dataclass(frozen=True)
class KeepTask:
    """The signatures of documents that stay, of some splits, to the file `index`; `drop` None: all stay."""

    splits: tuple[tuple[Signed, Flags | None], ...]
    config: Dedup
    dedup_name: str
    index: int
    work: Store
    out: Store

    @property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        splits = [[signed.sha256, flags is not None] for signed, flags in self.splits]
        fields = [VERSION, self.dedup_name, self.index, self.config.signature(), splits]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def write_signatures(result: DedupResult, config: Dedup, work: Store, out: Store, map: Map) -> dict[str, str]:
    """Write the signatures of all documents that stay, also of a dataset that is extended. Returns hashes by file."""
    drops = [None] * (len(result.signed) - len(result.drop)) + [*result.drop]
    groups: list[list[tuple[Signed, Flags | None]]] = [[]]
    for split in zip(result.signed, drops):
        if sum(signed.documents for signed, _ in groups[-1]) >= _FILE_DOCUMENTS:
            groups.append([])
        groups[-1].append(split)
    tasks = [KeepTask(tuple(group), config, result.name, i, work, out) for i, group in enumerate(groups)]
    return {_NAME.format(task.index): sha256 for task, sha256 in zip(tasks, map(write_file, tasks))}


def write_file(task: KeepTask, scale: int) -> str:
    """Run a KeepTask. Returns the file's SHA-256. `scale` changes nothing."""
    units = {cut.ending: cut.counts for cut in task.config.cuts}
    columns: dict[str, list[Array]] = {}
    documents = 0
    for signed, flags in task.splits:
        retained = flags.load() == 0 if flags is not None else np.ones(signed.documents, np.bool_)
        documents += int(retained.sum())
        for ending in task.config.signature():
            rows = retained
            if ending in units:
                counts = task.work.read_array(f"{signed.prefix}.{units[ending]}", "<u4")
                columns.setdefault(units[ending], []).append(counts[retained])
                rows = np.repeat(retained, counts)
            words = task.work.read_array(f"{signed.prefix}.{ending}", "<u8")
            columns.setdefault(ending, []).append(words.reshape(len(rows), -1)[rows] if len(rows) else words)
    arrays: dict[str, Any] = {  # Empty parts do not know their columns.
        ending: np.concatenate([part for part in parts if len(part)] or parts[:1])
        for ending, parts in sorted(columns.items())
    }
    with task.out.open(_NAME.format(task.index), replace=True) as file:
        np.savez(file, settings=np.frombuffer(_settings(task.config), np.uint8), documents=documents, **arrays)
        return hash_file(file)


def _settings(config: Dedup) -> bytes:
    return json.dumps(config.signature(), sort_keys=True).encode()


@dataclass(frozen=True)
class LoadTask:
    """A file of signatures of a dataset to signature files in `work`."""

    path: str
    sha256: str
    config: Dedup
    work: Store

    @property
    def name(self) -> str:
        return self.sha256


def signature_files(dataset: Dataset, config: Dedup) -> dict[str, str]:
    """The files of signatures beside a dataset, with their hashes; none if they are of other settings."""
    files = {name: sha256 for name, sha256 in sorted(dataset.manifest.listed_files.items()) if _IS_FILE.fullmatch(name)}
    if not files or not config.has_signatures:
        return {}
    path = dataset.file(next(iter(files)))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return files if arrays["settings"].tobytes() == _settings(config) else {}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise _damaged(path, str(error)) from error


def load_signatures(task: LoadTask, scale: int) -> Signed:
    """Run a LoadTask. `scale` changes nothing. Raises PrepareError for a file that is not the listed one."""
    try:
        sha256 = hash_file(task.path)
    except OSError as error:
        raise _damaged(task.path, str(error)) from error
    if sha256 != task.sha256:
        raise _damaged(task.path, f"one of SHA-256 {sha256[:12]}")
    prefix = f"signatures/{task.sha256}"
    with np.load(task.path, allow_pickle=False) as arrays:
        for ending in arrays.files:
            if ending not in ("settings", "documents"):
                task.work.write(f"{prefix}.{ending}", arrays[ending].tobytes())
        rows = {cut.ending: int(arrays[cut.counts].sum()) for cut in task.config.cuts}
        return Signed(prefix, int(arrays["documents"]), rows, task.sha256)


def _damaged(path: Path | str, got: str) -> PrepareError:
    return PrepareError(
        f"{path}: expected the signatures that the manifest lists, got {got.rstrip('.')}. Verify the dataset."
    )
