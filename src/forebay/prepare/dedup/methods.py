"""The methods by which documents are compared, and the `[dedup]` settings. Imports no numba.

A method turns a document into keys, and a shared key makes copies. One of your own has the attributes of `Method`:
`[dedup.NAME]` with `use = "module:Class"` names it in a recipe, an entry point of `forebay.dedup` by its name, and
Python callers pass the object.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from forebay.errors import UsageError
from forebay.order.bijection import derive_key, random_words
from forebay.prepare.documents import text_buffers
from forebay.prepare.settings import Positive, check_fields

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


KINDS = (Exact.name, "lines", MinHash.name)  # The names of `--dedup`.


@dataclass(frozen=True)
class Dedup:
    """The `[dedup]` table of a recipe: what is compared, and which copy stays.

    Args:
        exact: Drop whole documents that are equal.
        lines: Cut lines that stood in the corpus before.
        minhash: Drop documents that share most of their word n-grams.
        bands, rows: Of the MinHash signature: two documents of Jaccard similarity J meet with chance
            1 - (1 - J^rows)^bands.
        ngram: Words in a shingle.
        seed: Of the hash functions of MinHash.
        keep: Which document of a cluster stays: the `first` in the corpus, or the `longest` in bytes, the first of
            several equals.
        normalise: What may differ in equal documents and lines. `none`: nothing. `space`: white space.
            Empty: nothing in documents, white space in lines.
            `words`: also case, punctuation and accents. MinHash always compares words.
        min_characters: A line with fewer characters, blanks not counted, is never cut: `}` is no
            duplicate.
        own: Methods of your own, after the others; in a recipe each is a table `[dedup.NAME]` with a key `use`.

    Source: bands, rows and ngram as in FineWeb (Penedo et al. 2024), 3.4.
    """

    exact: bool = False
    lines: bool = False
    minhash: bool = False
    bands: Annotated[int, Field(ge=1, le=1024)] = 14
    rows: Annotated[int, Field(ge=1, le=256)] = 8
    ngram: Annotated[int, Field(ge=1, le=256)] = 5
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    keep: Literal["first", "longest"] = "first"
    normalise: Literal["", "none", "space", "words"] = ""
    min_characters: Positive = 24
    own: tuple[Method, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bands * self.rows > 4096:
            raise UsageError(f"bands: expected at most 4096 hashes in bands x rows, got {self.bands * self.rows}")
        names = [method.name for method in self.methods]
        if len(set(names)) != len(names):
            raise UsageError(f"own: expected methods of different names, got {', '.join(names)}")

    @property
    def methods(self) -> tuple[Method, ...]:
        """What compares whole documents, in order. The drop code of a document is 1 + the method's index."""
        exact = (Exact(self.normalise_of("")),) if self.exact else ()
        minhash = (MinHash(self.bands, self.rows, self.ngram, self.seed),) if self.minhash else ()
        return (*exact, *minhash, *self.own)

    @property
    def active(self) -> bool:
        """Whether it compares anything, and so needs signatures."""
        return bool(self.methods or self.unit)

    @property
    def unit(self) -> str:
        """What is cut out of documents: `line` or nothing."""
        return "line" if self.lines else ""

    def normalise_of(self, unit: str) -> str:
        """What may differ in equal lines, or in documents for the unit ""."""
        return self.normalise or ("space" if unit else "none")

    def signature(self) -> dict[str, Any]:
        """What decides the contents of each signature file, by its ending."""
        settings: dict[str, Any] = {method.name: method.settings for method in self.methods}
        if self.unit:
            settings["units"] = [SIGNATURE_VERSION, self.unit, self.normalise_of(self.unit), self.min_characters]
        if self.keep != "first":
            settings["weight"] = [SIGNATURE_VERSION, self.keep]
        return settings
