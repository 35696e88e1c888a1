"""Shards to one's own bucket or directory: judged on the way, shard by shard, gone on with after a kill.

Disk: one pair at a time on its way to a bucket. Every object put there carries its sha256; one that is there with it
is not sent again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from millrace.dataset.slices import hash_file
from millrace.errors import UsageError
from millrace.formats.foreign import token_kind
from millrace.load.shard_check import SampleCheck
from millrace.store.large import Workers
from millrace.store.origins import Origin, open_origin
from millrace.store.shards import ShardFolder
from millrace.store.targets import open_target

log = logging.getLogger("millrace.load")


def mirror_shards(
    source: str | Path | Origin,
    destination: str | Path,
    *,
    temporary: str | Path,
    shards: Iterable[int] | None = None,
    sequence_length: int = 2048,
    token_dtype: Any = None,
    generation: Literal["auto", "bin", "npy"] = "auto",
    prefix: str = "train",
    max_workers: Workers = None,
    chunk_size: int | None = None,
) -> list[int]:
    """Copy shards; which were copied now. What was copied before and is whole there is left out.

    Args:
        destination: A directory, `s3://`, `r2://` (with `R2_DATASET_WRITE_*`), `gs://` or `az://`.
        temporary: A directory of its own, with room for one pair; on the destination's disk, if that is a directory.
        shards: Indexes; by default all there are.

    Raises:
        MillraceError: If a shard cannot be had or written, or a sample has not its id; what was copied stays.
    """
    origin = open_origin(source) if isinstance(source, (str, Path)) else source
    temporary = Path(temporary)
    kind = None if token_dtype is None else token_kind(token_dtype)
    folder = ShardFolder(
        origin,
        temporary,
        lambda index, ids, size: SampleCheck(index, ids, size, sequence_length, kind),
        generation=generation,
        prefix=prefix,
        max_workers=max_workers,
        chunk_size=chunk_size,
    )
    if str(destination) == origin.url:
        raise UsageError(f"mirror: expected another place than {origin.url}. Name one.")
    target = open_target(destination, temporary / "upload")
    copied = []
    try:
        for index in sorted(set(shards)) if shards is not None else range(folder.count()):
            if all(target.has(name, head.bytes, None) for name, head in folder.heads(index)):
                log.info("shard %d is there already", index)
                continue
            pair, _ = folder.obtain(index, stop=threading.Event())
            for path in (pair.ids, pair.tokens):  # The tokens last: who sees them finds their ids.
                target.place(path.name, path, hash_file(path))
            folder.remove(index)
            copied.append(index)
            log.info("shard %d copied to %s", index, target.url)
    finally:
        target.close()
        with contextlib.suppress(OSError):
            temporary.rmdir()
    return copied
