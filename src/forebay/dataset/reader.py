"""Open and verify a local dataset; access its slices and documents by index.

Opening reads two files and no slice. A slice is hashed when it is first used, once per user and machine (`verified`).
A dataset keeps at most 64 slices mapped; arrays that callers keep stay valid.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias
from urllib.parse import unquote

import numpy as np

from forebay.arrays import I64, U64
from forebay.base import Json
from forebay.dataset.chunks import CHUNKS_FILE, HASH_BYTES, first_chunks, hash_slice, read_leaves, root_of
from forebay.dataset.lengths import read_document_ends
from forebay.dataset.manifest import LENGTHS_FILE, MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.slices import Slice, hash_file, open_slice
from forebay.dataset.verified import VerifiedChunks
from forebay.errors import DatasetError, UsageError
from forebay.files import nothing_there, open_below, path_below
from forebay.maps import release_pages
from forebay.units import numbered

if TYPE_CHECKING:
    from forebay.dataset.documents import Document, Documents

# Files that preparation writes beside a dataset; no byte of a slice depends on them.
_COMPANIONS = (
    "report.html", "report.json", "rejects.jsonl", "skipped.jsonl", "contamination.jsonl", ".inputs.json",
    ".progress.json",
)  # fmt: skip
_SIGNATURES = "signatures"
_WRITERS = "`forebay prepare --out` or `forebay import`"
LEAVES_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class VerifyReport:
    """Result of verifying a dataset; lists of names are sorted."""

    ok: bool
    bad: list[str]  # name: contract of `verify --json`; changed or missing files, and unlisted slices.
    changed: list[str] = field(default_factory=list)  # Present with other bytes, or cut.
    missing: list[str] = field(default_factory=list)  # Listed and absent.
    extra: list[str] = field(default_factory=list)  # Present and not listed; only slices among them are in `bad`.
    cut: list[str] = field(default_factory=list)  # Slices of `changed` that are too short.
    has_hashes: bool = True  # Whether every byte was compared with a hash.
    checks: tuple[str, ...] = ("SHA-256 of every file",)  # What was checked, in words.
    reason: str = ""  # What is wrong with the manifest, if that is bad: it may be of another version.

    @property
    def level(self) -> str:
        """`hash`: every byte matches; `structure`: the structure is valid, bytes were not compared; or `bad`."""
        return "bad" if not self.ok else "hash" if self.has_hashes else "structure"

    def to_json(self) -> Json:
        """`{"ok", "bad", "level", "checks", "changed", "missing", "extra", "cut"}`."""
        lists = {name: getattr(self, name) for name in ("bad", "changed", "missing", "extra", "cut")}
        return {"ok": self.ok, "level": self.level, "checks": list(self.checks), **lists}


Verify: TypeAlias = Literal["once", "never"]


class Dataset:
    """An immutable dataset in a directory. Opening reads manifest and table; threads may share it.

    `len(dataset)` is its documents, of layout `rows` its rows; `dataset[i]` is a document's tokens, or a row as a
    dictionary of arrays.
    """

    max_open_slices = 64
    is_local = True
    """Whether its slices are files of this machine, which are read in place."""
    has_peers = False
    """Whether nodes of a network serve it: readers may share its slices with each other."""
    has_hashes = True
    """Whether slices and their chunks have hashes, which `verify` compares with their bytes."""
    format = "safetensors"
    files: Sequence[Path] = ()  # The files that it reads, if they are in another tool's format.
    left_out: Sequence[str] = ()  # Columns of its source that are not in it.
    _num_hashers = 4

    def __init__(
        self, path: Path, manifest: Manifest, table: SliceTable, id: str, verified: VerifiedChunks | None = None
    ) -> None:
        self.path = path
        self.url = str(path)
        """The path or URL by which another process opens it."""
        self.manifest = manifest
        self.table = table
        self.id = id
        self.fetched_bytes = self.requests = 0  # Those of small files, since it was opened; slices are not counted.
        self._verified = verified
        self._open: OrderedDict[int, Slice] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        totals = f"{self.manifest.rows:,} rows"
        if self.manifest.layout == "tokens":
            totals = f"{self.num_tokens:,} tokens" + f" in {numbered(len(self), 'document')}" * bool(len(self))
        location = f"{numbered(self.num_slices, 'slice')}, {self.manifest.bytes:,} bytes, url={self.url!r}"
        return f"{type(self).__name__}({self.name!r}, id={self.id[:12]}…, {totals}, {location})"

    def _repr_html_(self) -> str:
        """Totals, and the first documents of a local dataset."""
        try:
            documents = self.head() if self.manifest.layout == "tokens" else []
        except (DatasetError, UsageError):  # Remote, or a slice is missing; a card must not fail.
            documents = []
        texts = [[document.text or " ".join(map(str, document.tokens[:64].tolist()))] for document in documents]
        fields = {name: value for name, value in self.describe().items() if name != "name"}
        from forebay import html

        return html.card(self.name, {**fields, "path": self.url}, html.coloured(texts))

    def __len__(self) -> int:
        return self.manifest.documents if self.manifest.layout == "tokens" else self.manifest.rows

    def __getitem__(self, index: int) -> Any:
        """Document `index` as U16 or U32 [T]; of layout `rows`, row `index` as arrays by name.

        Raises:
            IndexError: If it is outside [-len, len).
            DatasetError: If a slice is missing or damaged.
        """
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"dataset {self.name!r}: expected an index in [0, {len(self)}), got {index}.")
        if self.manifest.layout == "rows":
            stops = np.cumsum(self.table.count)
            slice_index = int(np.searchsorted(stops, number, "right"))
            inside = number - int(stops[slice_index]) + int(self.table.count[slice_index])
            return {name: array[inside] for name, array in self.open_slice(slice_index).tensors.items()}
        return self._documents.tokens(number)

    def document(self, index: int) -> "Document":
        """Document `index` with its tokens, its source, and its text if the dataset has its tokenizer.

        Raises:
            IndexError, DatasetError: As `dataset[index]`.
            UsageError: If the layout is `rows`.
        """
        from forebay.dataset.documents import Document

        if self.manifest.layout == "rows":
            raise UsageError(f"document: expected a dataset of layout tokens, got rows in {self.url}. Use dataset[i].")
        tokens, number = self[index], index + len(self) if index < 0 else index
        id, source = self._documents.ids([number]).get(number, ("", ""))
        return Document(number, id, source, tokens, self._documents.text(tokens))

    def head(self, n: int = 3) -> list[Any]:
        """The first `n` documents, as `document`; of layout `rows` the first `n` rows, as `dataset[i]`."""
        get_item = self.document if self.manifest.layout == "tokens" else self.__getitem__
        return [get_item(index) for index in range(min(n, len(self)))]

    @cached_property
    def _documents(self) -> "Documents":
        from forebay.dataset.documents import Documents

        return Documents(self)

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self.manifest.name

    @property
    def num_tokens(self) -> int:
        """Tokens in all slices; 0 for layout `rows`."""
        return self.manifest.tokens

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.table)

    def file(self, name: str) -> Path:
        """Return the path of a file. Raises DatasetError if it is missing, or a link."""
        return path_below(self.path, name)

    def slice_path(self, index: int) -> Path:
        """The path of slice `index`. Raises UsageError if it is outside [0, num_slices)."""
        return self.path / self.table.row(index).name

    def open_slice(self, index: int) -> Slice:
        """Slice `index`, mapped; the last 64 stay open. Hashed at its first use unless opened with `verify="never"`.

        Raises:
            UsageError: If the index is outside [0, num_slices).
            DatasetError: If the file is missing or has another hash, size, type or count than the table says.
        """
        with self._lock:
            opened = self._open.get(index)
            if opened is not None:
                self._open.move_to_end(index)
                return opened
        opened = self.read_slice(index)
        with self._lock:
            self._open[index] = opened
            while len(self._open) > self.max_open_slices:
                self._open.popitem(last=False)
        return opened

    def read_slice(self, index: int) -> Slice:
        """As `open_slice`, without caching: for reading once, from end to end."""
        opened = self.map_slice(index)
        self.verify_chunks(index)
        return opened

    def map_slice(self, index: int) -> Slice:
        """As `read_slice`, without hashing any byte: `verify_chunks` does, of what is used."""
        row = self.table.row(index)
        opened = open_slice(self.file(row.name))
        size = opened.path.stat().st_size
        if size != row.bytes:
            raise DatasetError(f"{opened.path}: expected {row.bytes} bytes, got {size}. Fetch or prepare it again.")
        self.check_slice(row, opened)
        return opened

    def release(self, index: int, opened: Slice) -> None:
        """Release the pages of slice `index`, which is `opened`; views of it stay valid, and are read again."""
        release_pages(opened.tokens)

    def first_token(self, index: int) -> int:
        """The place of a slice's first token in its file."""
        return 0

    def is_verified(self, index: int) -> bool:
        """Whether every byte of a slice was hashed since its file changed, or none is to be."""
        return self._verified is None or self._verified.is_verified(index, self.table.row(index))

    def verify_chunks(self, index: int, first: int = 0, last: int | None = None) -> None:
        """Hash chunks [first, last) of a slice, or all, unless they were. Raises DatasetError if one is damaged."""
        if self._verified is not None:
            self._verified.verify(index, self.table.row(index), lambda: self.leaves(index), first, last)

    @cached_property
    def first_chunks(self) -> I64:
        """The number of each slice's first chunk among those of all slices, and their total: [S + 1]."""
        return first_chunks(self.table.bytes, self.table.chunk_bytes)

    def leaves(self, index: int) -> bytes:
        """The hashes of the chunks of a slice, 32 bytes each, checked against its id.

        Raises:
            DatasetError: If `chunks.sha256` is missing or damaged.
        """
        if self.first_chunks[index + 1] - self.first_chunks[index] == 1:
            return bytes(self.table.sha256[index])
        return self._leaves_of(index, index + 1)[0]

    def all_leaves(self) -> Iterator[bytes]:
        """The leaves of each slice, in order, as `leaves`: about 1 MiB is read at once."""
        start = 0
        while start < self.num_slices:
            last_chunk = int(self.first_chunks[start]) + LEAVES_AT_ONCE
            stop = max(start + 1, int(np.searchsorted(self.first_chunks, last_chunk, "right")) - 1)
            yield from self._leaves_of(start, stop)
            start = stop

    def _leaves_of(self, start: int, stop: int) -> list[bytes]:
        """The leaves of slices [start, stop), of the first source whose leaves have the ids of these slices."""
        edges = (self.first_chunks[start : stop + 1] - self.first_chunks[start]) * HASH_BYTES
        wrong = start
        for data in self._read_leaves(int(self.first_chunks[start]), int(edges[-1]) // HASH_BYTES):
            leaves = [data[first:last] for first, last in pairwise(edges.tolist())]
            roots = (root_of(of_slice) if of_slice else "" for of_slice in leaves)
            hashes = (sha256.tobytes().hex() for sha256 in self.table.sha256[start:stop])
            wrong = next((start + i for i, (a, b) in enumerate(zip(roots, hashes)) if a != b), -1)
            if wrong < 0 and len(data) == edges[-1]:
                return leaves
        raise DatasetError(
            f"{self.url}/{CHUNKS_FILE}: its hashes are not those of {self.table.row(max(wrong, start)).name}. Fetch or "
            "prepare the file again."
        )

    def _read_leaves(self, first: int, count: int) -> Iterator[bytes]:
        """Leaves [first, first + count) of the file, as each of its sources has them; not verified."""
        try:
            with open_below(self.path, CHUNKS_FILE) as file:
                yield read_leaves(file, first, count)
        except OSError as error:
            raise DatasetError(
                f"{self.path / CHUNKS_FILE}: cannot be read: {error.strerror or error}. Fetch it again."
            ) from error

    def all_document_ends(self) -> Iterator[U64]:
        """Yield the document ends of each slice of layout `tokens`, U64 [D], in order; no slice is read.

        Raises:
            DatasetError: If `lengths.zst` is missing or damaged, or contradicts the table.
            NetworkError: If no source of a remote dataset has it.
        """
        with self.open_lengths() as file:
            yield from read_document_ends(file, self.manifest, self.table, f"{self.url}/{LENGTHS_FILE}")

    @contextmanager
    def open_lengths(self) -> Iterator[BinaryIO]:
        """Open `lengths.zst`, verified. Errors as of `all_document_ends`."""
        path = self.path / LENGTHS_FILE
        try:
            with open_below(self.path, LENGTHS_FILE) as file:
                if self._verified is not None and (got := hash_file(file)) != self.manifest.lengths_sha256:
                    raise DatasetError(
                        f"{path}: expected sha256 {self.manifest.lengths_sha256}, got {got}. Fetch or prepare it again."
                    )
                file.seek(0)
                yield file
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read: {error.strerror or error}. Fetch it again.") from error

    def check_slice(self, row: SliceInfo, opened: Slice) -> None:
        count = len(opened.tokens) if self.manifest.layout == "tokens" else opened.num_rows
        kind = opened.dtypes["tokens"] if self.manifest.layout == "tokens" else ""
        documents = len(opened.document_ends) if self.manifest.layout == "tokens" else row.documents
        if (count, documents, kind) != (row.count, row.documents, self.manifest.dtype):
            raise DatasetError(
                f"{opened.path}: expected {row.count} {self.manifest.layout} {self.manifest.dtype} in "
                f"{row.documents} documents, got {count} {kind} in {documents}. Fetch or prepare it again."
            )

    def describe(self) -> Json:
        """The output of `forebay inspect --json`."""
        m = self.manifest
        fields: Json = {"id": self.id, "name": m.name, "layout": m.layout}
        if m.layout == "rows":
            fields |= {"rows": m.rows, "columns": self._columns()}
        else:
            fields |= {"dtype": m.dtype, "tokens": m.tokens, "documents": m.documents, "tokenizer": m.tokenizer}
            fields |= {"vocab_size": m.vocab_size or None, "eos_id": m.eos_id}
        return {**fields, "slices": m.slices, "bytes": m.bytes}

    def _columns(self) -> dict[str, str]:
        try:
            first = open_slice(self.file(self.table.row(0).name))
        except (DatasetError, UsageError):
            return {}
        return {name: f"{first.dtypes[name]} {list(array.shape[1:])}" for name, array in first.tensors.items()}

    def verify(self, on_progress: Callable[[int], None] | None = None, workers: int | None = None) -> VerifyReport:
        """Hash every file and compare; the report names every changed, missing or unlisted slice.

        Args:
            on_progress: Called with the bytes hashed since the last call, from one thread.
            workers: Threads that hash; by default 4, of a remote dataset 8.
        """
        files: list[tuple[str, int | None, str]] = [(TABLE_FILE, None, self.manifest.table_sha256)]
        files += ((name, None, sha256) for name, sha256 in sorted(self.manifest.listed_files.items()))
        hashes = (row.tobytes().hex() for row in self.table.sha256)
        files += zip(self.table.names.to_pylist(), self.table.bytes.tolist(), hashes)
        names: dict[str, list[str]] = {"": [], "changed": [], "missing": [], "cut": []}
        with ThreadPoolExecutor(workers or self._num_hashers) as pool:
            for (name, size, _), state in zip(files, pool.map(lambda file: self.file_state(*file), files)):
                names[state].append(name)
                if on_progress is not None:
                    on_progress(size or 0)
        names[self._state_of_chunks()].append(CHUNKS_FILE)
        cut, missing, extra = names["cut"], names["missing"], self._extra()
        changed = [*names["changed"], *cut]
        failed = sorted([*changed, *missing, *(name for name in extra if name.endswith(".safetensors"))])
        return VerifyReport(not failed, failed, changed, missing, extra, cut)

    def file_state(self, name: str, size: int | None, sha256: str) -> str:
        """ "", "changed", "cut" or "missing": how a slice, or a file without a size, compares with its hash."""
        try:
            with open_below(self.path, name) as file:
                if size not in (None, got_bytes := os.fstat(file.fileno()).st_size):
                    return "cut" if got_bytes < (size or 0) else "changed"
            path = self.path / name
            got = hash_file(path) if size is None else hash_slice(path, self.table.chunk_bytes)[0]
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        except OSError:
            return "changed"
        return "" if got == sha256 else "changed"

    def _state_of_chunks(self) -> str:
        """ "", "changed" or "missing": whether `chunks.sha256` has the hashes of all slices."""
        try:
            with open_below(self.path, CHUNKS_FILE) as file:
                if os.fstat(file.fileno()).st_size != int(self.first_chunks[-1]) * HASH_BYTES:
                    return "changed"
        except OSError:
            return "missing"
        return "" if self._has_all_leaves() else "changed"

    def _has_all_leaves(self) -> bool:
        try:
            return all(self.all_leaves())
        except DatasetError:
            return False

    def _extra(self) -> list[str]:
        own_names = {
            MANIFEST_FILE,
            TABLE_FILE,
            CHUNKS_FILE,
            *_COMPANIONS,
            *self.manifest.listed_files,
        }
        # Files of a dataset below this one (a named subset) belong to that dataset.
        others = {p.parent for p in self.path.rglob(MANIFEST_FILE)} - {self.path}
        names = sorted(
            p.relative_to(self.path).as_posix()
            for p in self.path.rglob("*")
            if not p.is_dir() and others.isdisjoint(p.parents) and p.parent.name != _SIGNATURES
        )
        listed = set(self.table.names.to_pylist())
        return [name for name in names if name not in listed and name not in own_names]


def open_dataset(path: str | Path, *, verify: Verify = "once") -> Dataset:
    """Open the dataset in a directory.

    Args:
        path: A directory or a `file://` URL.
        verify: `once`: hash each slice at its first use, and again only after its file changed; the result is kept
            in the user's cache directory. `never`: check sizes, types and counts only.

    Raises:
        DatasetError: If there is no dataset, or its manifest or table is damaged.
        UsageError: If the URL has another scheme, or `verify` another value.
    """
    if verify not in ("once", "never"):
        raise UsageError(f"verify: expected 'once' or 'never', got {verify!r}.")
    folder = local_path(path)
    manifest_bytes = _read(folder, MANIFEST_FILE)
    try:
        manifest = Manifest.from_json(manifest_bytes)
    except DatasetError as error:
        raise DatasetError(f"{folder}: {error}") from error
    table = manifest.read_table(_read(folder, TABLE_FILE), folder / TABLE_FILE)
    id = manifest.id
    return Dataset(folder, manifest, table, id, VerifiedChunks(folder, id, table) if verify == "once" else None)


def verify_dataset(path: str | Path, on_progress: Callable[[int], None] | None = None) -> VerifyReport:
    """As `Dataset.verify`; a damaged manifest or table is reported instead of raised.

    Raises:
        DatasetError: If there is no manifest.
    """
    folder = local_path(path)
    data = _read(folder, MANIFEST_FILE)
    try:
        manifest = Manifest.from_json(data)
    except DatasetError as error:
        return VerifyReport(False, [MANIFEST_FILE], changed=[MANIFEST_FILE], reason=str(error))
    try:
        with open_below(folder, TABLE_FILE) as file:
            if hash_file(file) != manifest.table_sha256:
                return VerifyReport(False, [TABLE_FILE], changed=[TABLE_FILE])
    except OSError:
        return VerifyReport(False, [TABLE_FILE], missing=[TABLE_FILE])
    return open_dataset(folder, verify="never").verify(on_progress)


def local_path(path: str | Path) -> Path:
    """Return the path that a path or `file://` URL names, decoded. Raises UsageError for a URL of another kind."""
    scheme, mark, rest = str(path).partition("://")
    if not mark:
        return Path(path)
    host, slash, inside = rest.partition("/")
    if scheme.lower() != "file" or host not in ("", "localhost"):
        raise UsageError(f"expected a path or file:///PATH, got {scheme}://. Name what is on this machine.")
    return Path(unquote(slash + inside))


def _read(folder: Path, name: str) -> bytes:
    try:
        with open_below(folder, name) as file:
            return file.read()
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise DatasetError(f"{folder / name}: cannot be read: {error.strerror or error}. Check it.") from error
        advice = (
            f"Did you mean {folder.parent}?" if (folder.parent / name).is_file() else f"Give one that {_WRITERS} wrote."
        )
        what = "a file" if folder.is_file() else f"a directory without {name}"
        what = f"{what}. {advice}" if folder.exists() else nothing_there(folder, advice)
        raise DatasetError(f"{folder}: expected a dataset (a directory with {name}), got {what}") from error
