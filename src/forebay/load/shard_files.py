"""The two objects of a shard, its tokens and the ids of its samples, and the check of every sample by its id.

The ids are to a shard what the leaves of its tree are to a slice: a chunk is a whole number of samples, so a wrong byte
costs one chunk. The ids themselves are verified by the samples. Cost: 1.8 processor seconds a GB.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import I64, U64, Array
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import VerifyReport
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.fetch.chunk_file import UNVERIFIED, ChunkFile, create
from forebay.fetch.downloads import plan_download
from forebay.files import commit_files, temporary_path
from forebay.formats.vectors import Vector, header_size, vector_in
from forebay.maps import map_file
from forebay.storage.base import (
    ObjectOrigin,
    PermanentError,
    PinnedOrigin,
    TransientError,
    as_object_origin,
    head_object,
    read_small,
)
from forebay.storage.origins import open_origin

_HEAD_BYTES = 128
_VERIFIED_BYTES = 8 << 20  # read at once
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 64 << 10, 1 << 20


@dataclass(frozen=True)
class ShardObject:
    """Tokens or ids at an origin. `etag`: of this version; `header`: the bytes before the numbers."""

    name: str
    num_bytes: int
    etag: str
    header: bytes = b""


@dataclass(frozen=True)
class ShardInfo:
    """What an origin says of a shard. `dtype` is of its tokens, `seq_len` tokens a sample; set by `read_layout`."""

    index: int
    origin: ObjectOrigin
    tokens: ShardObject
    ids: ShardObject
    dtype: str = ""
    seq_len: int = 0
    num_samples: int = 0

    @property
    def num_bytes(self) -> int:
        return self.tokens.num_bytes + self.ids.num_bytes

    @property
    def sample_bytes(self) -> int:
        return self.seq_len * np.dtype(self.dtype).itemsize

    def infos(self) -> tuple[SliceInfo, SliceInfo]:
        """Tokens and ids as files of chunks. Their keys (`sha256`) follow from address, version and chunk size."""
        target = min(_MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, self.tokens.num_bytes // 1024))
        chunk_bytes = self.sample_bytes * max(1, target // self.sample_bytes)
        tokens = self._info(chunk_bytes, self.tokens, self.ids)  # Verified by these ids.
        return tokens, self._info(_MAX_CHUNK_BYTES, self.ids)

    def _info(self, chunk_bytes: int, part: ShardObject, *others: ShardObject) -> SliceInfo:
        versions = [(each.name, each.num_bytes, each.etag) for each in (part, *others)]
        key = hashlib.sha256(json.dumps([self.origin.url, chunk_bytes, *versions]).encode())
        offset = len(part.header)
        return SliceInfo(0, part.name, part.num_bytes - offset, key.hexdigest(), 0, 0, chunk_bytes, offset)


class SampleCheck:
    """Compares the samples of a chunk with their ids, U64 [N]. `wrong`: how often a sample had which other id."""

    def __init__(self, shard: ShardInfo, ids: U64) -> None:
        self.shard, self.ids = shard, ids
        self._chunk_samples = shard.infos()[0].chunk_bytes // shard.sample_bytes
        self.checked: list[int] = []  # samples of each call; threads append
        self.wrong = Counter[tuple[int, int]]()

    def __call__(self, chunk: int, data: memoryview) -> bool:
        first = chunk * self._chunk_samples
        return self.compare(first, data, self.ids[first:])

    def compare(self, first: int, data: memoryview, ids: U64) -> bool:
        """Return whether samples from number `first` on have these ids."""
        width = self.shard.sample_bytes
        digests = (hashlib.blake2b(data[i : i + width], digest_size=8).digest() for i in range(0, len(data), width))
        got = np.frombuffer(b"".join(digests), "<u8")
        wrong = np.flatnonzero(got != ids[: len(got)])
        self.wrong.update((first + i, int(got[i])) for i in wrong.tolist())
        self.checked.append(len(got))
        return not len(wrong)

    def error(self) -> IntegrityError:
        shard, (first, _) = self.shard, min(self.wrong)
        offset = len(shard.tokens.header) + first * shard.sample_bytes
        return IntegrityError(
            f"shard {shard.index}: expected each sample to have its id, got {self.wrong.total()} of "
            f"{sum(self.checked)} checked that have not, the first sample {first} at byte {offset} of "
            f"{shard.origin.url}/{shard.tokens.name}. Have the shard published again, or leave it out: "
            f"remap={{{shard.index}: ANOTHER}}."
        )


class ShardDataset:
    """The samples of one shard, all verified by their ids.

    Attributes:
        index: Of the shard.
        sample_ids: U64 [N], a view of the mapped file.
    """

    def __init__(
        self, shard: ShardInfo, tokens: ChunkFile, ids: U64, unpin: Callable[[], object] = lambda: None
    ) -> None:
        self.index, self.sample_ids = shard.index, ids
        self._samples: Array | None = tokens.data.view(shard.dtype).reshape(-1, shard.seq_len)
        self._unpin = unpin

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int | I64) -> Array:
        """Tokens of a sample, U16 or U32 [L], a read-only view; or of samples [B], a copy [B, L]."""
        if self._samples is None:
            raise UsageError(f"shard {self.index}: it is closed. Read it before the next shard is active.")
        samples: Array = self._samples[index]
        return samples

    def close(self) -> None:
        """Unmap the files, so that they can be removed. A view of them keeps its disk space. May be called twice."""
        unpin, self._samples, self.sample_ids, self._unpin = self._unpin, None, np.empty(0, np.uint64), lambda: None
        unpin()


def list_shards(origin: ObjectOrigin, **waiting: Any) -> list[int]:
    """The indexes of the shards at an origin, ascending; if it cannot list them, each name is requested in turn.

    `waiting`: as of `head_object`. Raises DatasetError or NetworkError.
    """
    indexes: list[int] = []
    with suppress(PermanentError, TransientError, AttributeError):
        matches = (re.fullmatch(r"train_(\d{6})\.npy", name) for name in origin.names("train_"))  # type: ignore[attr-defined]
        indexes = sorted(int(match[1]) for match in matches if match)
    try:
        for index in itertools.count() if not indexes else ():
            head_object(origin, f"train_{index:06d}.npy", **waiting)
            indexes.append(index)
    except DatasetError as error:
        if not indexes:
            raise DatasetError(f"{origin.url}: expected shards train_000000.npy and on, got none: {error}") from error
    return indexes


def find_shard(origin: ObjectOrigin, index: int, **waiting: Any) -> ShardInfo:
    """The objects of a shard at an origin. `waiting`: as of `head_object`. Raises DatasetError or NetworkError."""

    def find(name: str) -> ShardObject:
        meta = head_object(origin, name, **waiting)
        return ShardObject(name, meta.bytes, meta.etag)

    tokens = find(f"train_{index:06d}.npy")
    try:
        ids = find(f"sample_ids_{index:06d}.npy")
    except DatasetError:
        ids = find(f"sample_ids_{index:06d}.bin")
    return ShardInfo(index, origin, tokens, ids)


def read_layout(shard: ShardInfo, seq_len: int) -> ShardInfo:
    """A shard with its headers, which must fit each other. `seq_len` 0: as the sizes say; the ids verify it.

    Raises DatasetError or NetworkError.
    """
    ids, numbers = _read_header(shard.origin, shard.ids, "<u8")
    count, kinds = numbers.count, (np.dtype("<u2"), np.dtype("<u4"))
    width = (
        shard.tokens.num_bytes // (count * seq_len) if count * seq_len else 2
    )  # The type of a file without a header.
    tokens, vector = _read_header(shard.origin, shard.tokens, kinds[width == 4])
    if numbers.kind != np.dtype("<u8") or not count or vector.kind not in kinds:
        raise DatasetError(
            f"shard {shard.index}: expected tokens of uint16 or uint32, and sample ids of uint64, got {vector.kind}, "
            f"and {count} sample ids of {numbers.kind} ({shard.origin.url}). Have the shard published again."
        )
    seq_len = seq_len or vector.count // count
    if vector.count != count * seq_len or not seq_len:
        raise DatasetError(
            f"shard {shard.index}: expected {count * seq_len} tokens, {seq_len} for each of {count} ids ({ids.name}), "
            f"got {vector.count} tokens ({shard.origin.url}). One of the two is truncated, of another shard, or of "
            "another sequence_length; fetch both again, or set sequence_length."
        )
    return replace(shard, tokens=tokens, ids=ids, dtype=vector.kind.str, seq_len=seq_len, num_samples=count)


@dataclass(frozen=True)
class SharedShards:
    """All shards at an origin, with their layouts."""

    shards: Sequence[ShardInfo]

    @classmethod
    def open(cls, url: str) -> SharedShards:
        """Read the headers of the shards at a URL. Raises DatasetError or NetworkError."""
        origin = as_object_origin(open_origin(url))
        return cls([read_layout(find_shard(origin, index), 0) for index in list_shards(origin, timeout_s=25.0)])

    def describe(self) -> dict[str, Any]:
        """Return what `inspect` prints."""
        first, samples = self.shards[0], sum(shard.num_samples for shard in self.shards)
        return {
            "format": "shared shards",
            "shards": len(self.shards),
            "dtype": str(np.dtype(first.dtype)),
            "seq_len": first.seq_len,
            "samples": samples,
            "tokens": samples * first.seq_len,
            "bytes": sum(shard.num_bytes for shard in self.shards),
            "largest_shard_bytes": max(shard.num_bytes for shard in self.shards),
            "checked": "sizes and headers; `forebay verify` compares every sample with its id",
        }

    def head(self, num_documents: int) -> list[Any]:
        """Return nothing: shards hold no documents."""
        return []

    def verify(self, on_progress: Callable[[int], object]) -> VerifyReport:
        """Compare every sample with its id; memory is that of a few thousand samples."""
        changed = []
        for shard in self.shards:
            step = max(1, _VERIFIED_BYTES // shard.sample_bytes)
            for first in range(0, shard.num_samples, step):
                positions = range(first, min(first + step, shard.num_samples))
                try:
                    read_samples(shard, positions)
                except IntegrityError:
                    changed.append(shard.tokens.name)
                    break
                on_progress(len(positions) * shard.sample_bytes)
        return VerifyReport(not changed, changed, changed=changed, checks=("the id of every sample",))


def num_requests(sizes: Sequence[tuple[int, int]], num_names: int = 2) -> int:
    """Return about how many requests a pass of the manager makes: ranges, sizes, headers, and names that it looks for.

    Args:
        sizes: Bytes of the tokens and the ids of each shard.
        num_names: Of a shard: 3 where the ids end in `.bin`, as `.npy` is tried first.
    """
    ranges = sum(plan_download(num_bytes).num_ranges for pair in sizes for num_bytes in pair)
    return ranges + (num_names + 3) * len(sizes) + 3 * num_names + 1


def read_samples(shard: ShardInfo, positions: range) -> Array:
    """Return consecutive samples, U16 or U32 [B, L]. Raises IntegrityError if one does not have its id."""

    def read(part: ShardObject, width: int) -> bytes:
        start = len(part.header) + positions.start * width
        return read_small(PinnedOrigin(shard.origin, part.etag), part.name, len(positions) * width, start=start)

    data, check = read(shard.tokens, shard.sample_bytes), SampleCheck(shard, np.frombuffer(read(shard.ids, 8), "<u8"))
    if not check.compare(positions.start, memoryview(data), check.ids):
        raise check.error()
    return np.frombuffer(data, shard.dtype).reshape(-1, shard.seq_len)


def _read_header(origin: ObjectOrigin, part: ShardObject, dtype: Any) -> tuple[ShardObject, Vector]:
    pinned, size, head = PinnedOrigin(origin, part.etag), min(part.num_bytes, _HEAD_BYTES), b""
    while size > len(head):
        head = read_small(pinned, part.name, size, start=0)
        size = min(part.num_bytes, header_size(head))
    vector = vector_in(Path(part.name), head, part.num_bytes, dtype)
    return replace(part, header=head[: vector.offset]), vector


def verify_pair(folder: Path, shard: ShardInfo) -> tuple[ChunkFile, U64]:
    """The tokens and ids of a pair in a directory, verified; a map beside them remembers that.

    Raises IntegrityError, or UsageError if the map cannot be written.
    """
    info, ids = shard.infos()
    with (folder / ids.name).open("rb") as file:
        check = SampleCheck(shard, map_file(file, 8 * shard.num_samples, ids.offset).view("<u8"))
    path, map_path = folder / info.name, pair_map(folder, shard)
    try:
        if not map_path.is_file():
            for other in set(folder.glob(f".{info.name}.*.map")) - {
                map_path
            }:  # They belong to other versions of the shard.
                other.unlink(missing_ok=True)
            new = temporary_path(map_path)
            create(path, new, info, UNVERIFIED)
            commit_files({new: map_path})
        entry = ChunkFile(path, map_path, info)
    except OSError as error:
        raise UsageError(
            f"{folder}: expected a directory to write to, got: {error.strerror}. Choose another."
        ) from error
    entry.check = check
    entry.verify(np.arange(entry.layout.num_chunks))
    if not entry.is_complete():
        map_path.unlink(missing_ok=True)
        if not check.wrong:  # Another process found it, and may have been killed.
            return verify_pair(folder, shard)
        raise check.error()
    return entry, check.ids


def pair_map(folder: Path, shard: ShardInfo) -> Path:
    """The map of a pair in a directory."""
    info, _ = shard.infos()
    return folder / f".{info.name}.{info.sha256[:16]}.map"
