"""The settings of a deduplication, and which of them decide the contents of signatures."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from forebay.errors import UsageError
from forebay.prepare.dedup.methods import SIGNATURE_VERSION, Exact, Method, MinHash
from forebay.prepare.settings import Positive, check_fields

UNITS = ("paragraphs", "lines")
KINDS = (Exact.name, *UNITS, MinHash.name)
"""The names of `--dedup`."""


@dataclass(frozen=True)
class Dedup:
    """The `[dedup]` table of a recipe: what is compared, and which copy stays.

    Args:
        exact: Drop whole documents that are equal.
        paragraphs: Cut paragraphs (between blank lines) that stood in the corpus before. Not together with `lines`,
            which finds repeated paragraphs too.
        lines: Cut lines that stood in the corpus before.
        minhash: Drop documents that share most of their word n-grams.
        bands, rows: Of the MinHash signature: two documents of Jaccard similarity J meet with chance
            1 - (1 - J^rows)^bands.
        ngram: Words in a shingle.
        seed: Of the hash functions of MinHash.
        keep: Which document of a cluster stays: the `first` in the corpus, the `longest` in bytes, or the `best` by the
            column `score`; the first of several equals.
        score: The column of numbers for `keep = "best"`; a missing one is the worst.
        normalise: What may differ in equal documents, lines and paragraphs. `none`: nothing. `space`: white space.
            Empty: nothing in documents, white space in lines and paragraphs.
            `words`: also case, punctuation and accents. MinHash always compares words.
        min_characters: A line or paragraph with fewer characters, blanks not counted, is never cut: `}` is no
            duplicate.
        against: Other datasets that were prepared with these settings, or their folders of signatures. Their documents
            come first in the corpus and always stay.
        own: Methods of your own, after the others; in a recipe each is a table `[dedup.NAME]` with a key `use`.

    Source: bands, rows and ngram as in FineWeb (Penedo et al. 2024), 3.4.
    """

    exact: bool = False
    paragraphs: bool = False
    lines: bool = False
    minhash: bool = False
    bands: Annotated[int, Field(ge=1, le=1024)] = 14
    rows: Annotated[int, Field(ge=1, le=256)] = 8
    ngram: Annotated[int, Field(ge=1, le=256)] = 5
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    keep: Literal["first", "longest", "best"] = "first"
    score: str = ""
    normalise: Literal["", "none", "space", "words"] = ""
    min_characters: Positive = 24
    against: tuple[str, ...] = ()
    own: tuple[Method, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bands * self.rows > 4096:
            raise UsageError(f"bands: expected at most 4096 hashes in bands x rows, got {self.bands * self.rows}")
        if (self.keep == "best") != bool(self.score):
            expected = "the name of a column" if self.keep == "best" else 'none without keep = "best"'
            raise UsageError(f"score: expected {expected}, got {self.score!r}")
        if self.lines and self.paragraphs:
            raise UsageError("lines: expected false where paragraphs is true, got true")
        if self.against and not self.active:
            raise UsageError(f"against: expected one of {', '.join(KINDS)} to be true, got none")
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
        """What is cut out of documents: `line`, `paragraph` or nothing."""
        return "line" if self.lines else "paragraph" if self.paragraphs else ""

    def normalise_of(self, unit: str) -> str:
        """What may differ in equal lines or paragraphs, or in documents for the unit ""."""
        return self.normalise or ("space" if unit else "none")

    def signature(self) -> dict[str, Any]:
        """What decides the contents of each signature file, by its ending."""
        settings: dict[str, Any] = {method.name: method.settings for method in self.methods}
        if self.unit:
            settings["units"] = [SIGNATURE_VERSION, self.unit, self.normalise_of(self.unit), self.min_characters]
        if self.keep != "first":
            settings["weight"] = [SIGNATURE_VERSION, self.keep, self.score]
        return settings

    def describe(self) -> str:
        """What is compared, in a line."""
        kinds = [kind for kind in KINDS if getattr(self, kind)] + [method.name for method in self.own]
        return f"{', '.join(kinds)}; keeps the {self.keep}"
