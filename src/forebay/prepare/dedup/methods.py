"""The methods by which documents are compared: each turns a document into keys, and a shared key makes copies.

A method of your own has the attributes of `Method`: `[dedup.NAME]` with `use = "module:Class"` names it in a recipe,
an entry point of `forebay.dedup` by its name, and Python callers pass the object.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.order.bijection import derive_key, random_words
from forebay.prepare.documents import text_buffers

SIGNATURE_VERSION = 2
"""Changed when the same text gets another signature, so that old ones are not compared with new ones."""
U64 = NDArray[np.uint64]


class Method(Protocol):
    """Documents with an equal key are copies. Frozen and picklable; `sign` runs in the workers.

    A signature is `columns` words of 64 bits; each `key_columns` of them in turn are a key, of which zeros are none.
    """

    name: str
    """Its table in a recipe, and the ending of its signature files."""
    reason: str
    """Under which its duplicates are counted."""
    columns: int
    key_columns: int
    near: bool
    """Whether its copies differ, so that they are not interchangeable when later data is compared with them."""

    @property
    def settings(self) -> list[Any]:
        """All that signatures depend on, as JSON: only signatures of equal settings are compared."""

    def sign(self, batch: pa.RecordBatch) -> U64:
        """uint64 [rows, columns] for a batch of documents; rows do not influence each other."""


@dataclass(frozen=True)
class Exact:
    """Equal texts, after `normalise` (`none`, `space` or `words`): 128 bits of MurmurHash3."""

    normalise: str = "none"
    name: ClassVar[str] = "exact"
    reason: ClassVar[str] = "exact_duplicate"
    columns: ClassVar[int] = 2
    key_columns: ClassVar[int] = 2
    near: ClassVar[bool] = False

    @property
    def settings(self) -> list[Any]:
        return [SIGNATURE_VERSION, self.normalise]

    def sign(self, batch: pa.RecordBatch) -> U64:
        from forebay.prepare.dedup.kernels import hash_texts

        return hash_texts(batch.column("text"), "", self.normalise, 1)[0]


@dataclass(frozen=True)
class MinHash:
    """Texts that share most of their runs of `ngram` words: `bands` keys, of `rows` min-wise hashes each."""

    bands: int = 14
    rows: int = 8
    ngram: int = 5
    seed: int = 1
    name: ClassVar[str] = "minhash"
    reason: ClassVar[str] = "near_duplicate"
    key_columns: ClassVar[int] = 1
    near: ClassVar[bool] = True

    @property
    def columns(self) -> int:
        return self.bands

    @property
    def settings(self) -> list[Any]:
        return [SIGNATURE_VERSION, self.bands, self.rows, self.ngram, self.seed]

    def sign(self, batch: pa.RecordBatch) -> U64:
        return self.sign_texts(batch.column("text"))

    def sign_texts(self, texts: pa.LargeStringArray) -> U64:
        """uint64 [rows, bands]; a row of zeros for a text without words."""
        from forebay.prepare.dedup import kernels

        factors, terms = self.hash_functions()
        offsets, data = text_buffers(texts)
        out = np.empty((len(texts), self.bands), np.uint64)
        kernels.sign(data, offsets, kernels.character_table("words"), factors, terms, self.ngram, self.rows, out)
        return out

    def hash_functions(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The odd factors and the terms of the min-wise hashes."""
        numbers = random_words(derive_key(self.seed, "minhash"), np.arange(self.bands * self.rows, dtype=np.uint64))
        return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1), numbers.astype(np.uint32)
