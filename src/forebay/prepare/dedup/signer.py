"""Sign the documents of a piece while its batches pass: the files that a deduplication compares.

Hides: the form of signatures on disk. With a prefix `P`, little-endian, one row a document in the order of the piece:
`P.exact` u64 [documents, 2]: 128 bits of the normalised text, zeros if that is empty;
`P.minhash` u64 [documents, bands]: a hash of each band, zeros for a document without words;
`P.weight` f64 [documents]: the greater, the better (only if not the first copy is kept);
`P.counts` u32 [documents] and `P.units` u64 [sum of counts, 2]: the lines or paragraphs that are long enough;
`P.signatures`: JSON, written last: how many, of which settings, and a hash of all bytes.
That is 16 + 8 bands bytes a document (128 by default), and 16 a line. Memory: O(batch).
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write, open_atomic
from forebay.order.bijection import derive_key, random_words
from forebay.prepare.dedup import kernels
from forebay.prepare.dedup.settings import Dedup
from forebay.prepare.documents import text_buffers

GAP, IGNORED = 0, 1
ALONE = 1 << 31
"""Set for a character that is a word by itself."""
TABLE_SIZE = 1 << 17

_ALONE = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF))
"""Thai, Lao, Burmese, Khmer, kana and Han are written without spaces: a character is the only unit that is there."""


@lru_cache
def character_table(normalise: str) -> NDArray[np.uint32]:
    """uint32 [2^17]: GAP, IGNORED or a code point (with ALONE set if it is a word by itself) for each character.

    Those above stay as they are. `words`: lower case, without the accents of Latin, Greek and Cyrillic, width and
    ligature-free compatibility forms folded; punctuation, symbols, spaces and control characters are gaps, invisible
    characters are ignored. `none`: an empty table. `space`: white space is a gap, all else stays.
    """
    size = TABLE_SIZE if normalise != "none" else 0
    entry = _word_entry if normalise == "words" else _space_entry
    table = np.fromiter(map(entry, range(size)), np.uint32, size)
    if normalise == "words":
        for start, stop in _ALONE:
            codes = np.arange(start, stop + 1, dtype=np.uint32)
            part = table[start : stop + 1]
            part[:] = np.where(part > IGNORED, codes | np.uint32(ALONE), part)
    table.setflags(write=False)
    return table


def _space_entry(code: int) -> int:
    # Codes 0 and 1 are the table's own marks; as text they mean nothing, so that they may be gaps.
    return GAP if code <= 1 or chr(code).isspace() else code


def _word_entry(code: int) -> int:
    character = chr(code)
    category = unicodedata.category(character)
    if category == "Cf" or 0x0300 <= code <= 0x036F or 0xFE00 <= code <= 0xFE0F:
        return IGNORED
    if category[0] in "PSZ" or category in ("Cc", "Cs"):
        return GAP
    if not unicodedata.decomposition(character):  # of most: a table that is made in every process is to be made fast
        lower = character.lower()
        return ord(lower) if len(lower) == 1 else code
    plain = "".join(c for c in unicodedata.normalize("NFKD", character) if not "\u0300" <= c <= "\u036f")
    lower = (plain if len(plain) == 1 else character).lower()
    return ord(lower) if len(lower) == 1 else code


UNIT = {"": kernels.DOCUMENT, "paragraph": kernels.PARAGRAPH, "line": kernels.LINE}


@dataclass(frozen=True)
class Signed:
    """What `P.signatures` says: documents, lines or paragraphs, the settings by ending, and the sha256 of the files."""

    documents: int
    units: int
    settings: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""


class Signer:
    """Writes the signatures of a piece, `prefix` and an ending. A context manager; on an exception nothing is left."""

    def __init__(self, prefix: Path, config: Dedup) -> None:
        self._prefix = Path(prefix)
        self._config = config
        self._documents = self._units = 0
        self._scratch = np.empty(0, np.uint8)
        self._sha256: dict[str, Any] = {}
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Signer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        for ending in [*self._config.signature(), *(["counts"] if self._config.unit else [])]:
            self._file(ending)
        self._stack.close()
        each = [[ending, self._sha256[ending].hexdigest()] for ending in sorted(self._files)]
        sha256 = hashlib.sha256(json.dumps(each).encode()).hexdigest()
        signed = Signed(self._documents, self._units, self._config.signature(), sha256)
        atomic_write(self._path("signatures"), json.dumps(asdict(signed)).encode())

    def add(self, texts: pa.LargeStringArray, scores: pa.Array | None = None) -> None:
        """Sign the next documents; `scores` are those of the column `config.score`, where `config.keep` is `best`."""
        offsets, data = text_buffers(texts)
        config = self._config
        self._documents += len(offsets) - 1
        if config.exact:
            hashes, _ = self._hash(offsets, data, "", 1)
            self._write("exact", hashes)
        if config.minhash:
            self._write("minhash", sign_texts(offsets, data, config))
        if config.unit:
            hashes, counts = self._hash(offsets, data, config.unit, config.min_characters)
            self._units += len(hashes)
            self._write("units", hashes)
            self._write("counts", counts.astype("<u4"))
        if config.keep != "first":
            self._write("weight", _weights(offsets, scores, config))

    def _path(self, ending: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.{ending}")

    def _file(self, ending: str) -> BinaryIO:
        if ending not in self._files:
            self._files[ending] = self._stack.enter_context(open_atomic(self._path(ending)))
            self._sha256[ending] = hashlib.sha256()
        return self._files[ending]

    def _write(self, ending: str, array: NDArray[Any]) -> None:
        self._file(ending).write(array.data)
        self._sha256[ending].update(array.data)

    def _hash(
        self, offsets: NDArray[np.int64], data: NDArray[np.uint8], unit: str, least: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        self._scratch = scratch_for(offsets, self._scratch)
        rows = len(offsets) - 1
        if unit:
            rows += int(np.count_nonzero(data[offsets[0] : offsets[-1]] == 10))
        hashes, counts = np.empty((rows, 2), np.uint64), np.empty(len(offsets) - 1, np.int64)
        table = character_table(self._config.normalise_of(unit))
        n = kernels.hash_units(data, offsets, UNIT[unit], table, least, self._scratch, hashes, counts)
        return hashes[:n], counts


def scratch_for(offsets: NDArray[np.int64], old: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Room for the longest text when normalised: two bytes may become three, and a gap none."""
    longest = int(np.diff(offsets).max(initial=0))
    return old if len(old) >= 2 * longest + 16 else np.empty(2 * longest + 16, np.uint8)


def hash_functions(config: Dedup) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The odd factors and the terms of the min-wise hashes, from our own generator."""
    n = config.bands * config.rows
    numbers = random_words(derive_key(config.seed, "minhash"), np.arange(n, dtype=np.uint64))
    return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1), numbers.astype(np.uint32)


def sign_texts(offsets: NDArray[np.int64], data: NDArray[np.uint8], config: Dedup) -> NDArray[np.uint64]:
    """The MinHash signatures of texts: uint64 [rows, bands], a row of zeros for a text without words."""
    factors, terms = hash_functions(config)
    out = np.empty((len(offsets) - 1, config.bands), np.uint64)
    kernels.sign(data, offsets, character_table("words"), factors, terms, config.ngram, config.rows, out)
    return out


def _weights(offsets: NDArray[np.int64], scores: pa.Array | None, config: Dedup) -> NDArray[np.float64]:
    if config.keep == "longest":
        return np.diff(offsets).astype(np.float64)
    if scores is None:
        raise UsageError(
            f"score: expected a column {config.score!r} of numbers, got documents without it. "
            "Name it under [read] columns, or use a stage that makes it"
        )
    weights = scores.cast(pa.float64()).to_numpy(zero_copy_only=False).copy()
    weights[np.isnan(weights)] = -np.inf
    return np.asarray(weights, np.float64)


def read_signed(prefix: str, config: Dedup, ignore: Sequence[str] = ()) -> Signed:
    """What is signed at a prefix; PrepareError unless that serves a deduplication with these settings."""
    path = Path(f"{prefix}.signatures")
    try:
        signed = Signed(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise PrepareError(f"{path}: expected finished signatures, got {error}. Sign the documents again.") from error
    for ending, wanted in config.signature().items():
        if ending not in ignore and signed.settings.get(ending) != wanted:
            got = signed.settings.get(ending, "none")
            raise PrepareError(
                f"{path}: expected signatures of settings {wanted} ({ending}), got {got}. "
                "What is compared must be signed alike: use the same [dedup] settings, or sign again."
            )
    return signed
