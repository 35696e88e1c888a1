"""What a dataset keeps of its signatures, so that later data is deduplicated against it.

Hides: which rows those are. The form is that of a signed part, without `.counts` and `.weight`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.prepare.dedup.config import Dedup
from forebay.prepare.dedup.corpus import STORED, DedupResult, Part
from forebay.prepare.dedup.links import read_u64
from forebay.prepare.dedup.settle import EXACT, KEPT
from forebay.prepare.dedup.signer import Signed, read_signed
from forebay.storage.atomic import atomic_write, open_atomic, remove_stale

_CHUNK_ROWS = 1 << 15


def store_signatures(parts: Sequence[Part], result: DedupResult, config: Dedup, folder: Path) -> None:
    """Keep what later data is compared against: a folder for the `against` of its settings.

    The rows are of the documents that stayed and of those that were dropped as near duplicates: what is near one of
    these belongs to the cluster, and would have been dropped with it. (Equal documents have equal signatures.) Of lines
    and paragraphs those that stayed. That is 128 bytes a document by default, and 16 a line.

    Raises:
        OSError: If it cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    settings = {ending: value for ending, value in config.signature().items() if ending != "weight"}
    digest = hashlib.sha256()
    documents = units = 0
    for ending in settings:
        rows = 0
        with open_atomic(folder / f"{STORED}.{ending}") as file:
            for index in range(len(parts)):
                for stored in _stored_rows(parts[index], result, config, index, ending):
                    file.write(stored.data)
                    digest.update(stored.data)
                    rows += len(stored)
        documents, units = (documents, rows) if ending == "units" else (rows, units)
    signed = Signed(documents, units, settings, digest.hexdigest())
    atomic_write(folder / f"{STORED}.signatures", json.dumps(asdict(signed)).encode())


def find_stored(path: str, config: Dedup) -> tuple[str, str]:
    """The folder of signatures that a user names, by itself or by the dataset around it, and a hash of what is there.

    Raises:
        UsageError: If there are none.
        PrepareError: If they are of other settings than `config`.
    """
    for folder in (Path(path), Path(path) / STORED):
        if (folder / f"{STORED}.signatures").is_file():
            signed = read_signed(str(folder / STORED), config, ignore=("weight",))
            return str(folder), hashlib.sha256(json.dumps(asdict(signed)).encode()).hexdigest()
    raise UsageError(
        f"dedup.against: expected a dataset that was prepared with deduplication, or its {STORED!r} folder, "
        f"got {path}, which holds no {STORED}. Check the path; a dataset without them is prepared again, with the same "
        "[dedup]."
    )


def _stored_rows(
    part: Part, result: DedupResult, config: Dedup, index: int, ending: str
) -> Iterator[NDArray[np.uint64]]:
    drop = result.drop[index].load()
    if ending == "units":
        counts: NDArray[Any] = np.fromfile(f"{part.prefix}.counts", "<u4")
        keep = np.repeat(drop == KEPT, counts) & (result.cut[index].load() == 0)
    else:
        keep = drop != EXACT
    width = config.bands if ending == "minhash" else 2
    for start in range(0, len(keep), _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, len(keep))
        rows = read_u64(f"{part.prefix}.{ending}", start * width, stop * width).reshape(-1, width)
        yield np.ascontiguousarray(rows[keep[start:stop]])
