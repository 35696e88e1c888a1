"""The methods by which documents are compared, and the `[dedup]` settings. Imports no numba.

A method turns a document into keys, and a shared key makes copies. One of your own has the attributes of `Method`:
`[dedup.NAME]` with `use = "module:Class"` names it in a recipe, an entry point of `forebay.dedup` by its name, and
Python callers pass the object.
"""

import re
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Any, ClassVar, Literal, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import U32, U64
from forebay.base import Json
from forebay.errors import UsageError
from forebay.order.bijection import derive_key, random_words
from forebay.prepare.documents import text_buffers
from forebay.prepare.settings import Positive, Share, check_fields

SIGNATURE_VERSION = 2
"""Changed when the same text gets another signature, so that old ones are not compared with new ones."""


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
    name = "exact"
    reason = "exact_duplicate"
    columns = 2
    key_columns = 2

    @property
    def settings(self) -> list[Any]:
        return [SIGNATURE_VERSION, self.normalise]

    def sign(self, batch: pa.RecordBatch) -> U64:
        from forebay.prepare.dedup.kernels import hash_texts

        return hash_texts(batch.column("text"), self.normalise)


@dataclass(frozen=True)
class EqualUrl:
    """Equal addresses, after scheme, `www.`, port, fragment, trailing slash and tracking parameters are removed."""

    name = "url"
    reason = "url_duplicate"
    columns = 2
    key_columns = 2

    @property
    def settings(self) -> list[Any]:
        return [SIGNATURE_VERSION]

    def sign(self, batch: pa.RecordBatch) -> U64:
        from forebay.prepare.dedup.kernels import hash_texts

        urls = [normalise_url(url) for url in batch.column("url").to_pylist()]
        return hash_texts(pa.array(urls, pa.large_string()), "none")


_TRACKING = re.compile(
    r"utm_\w+|[a-z]*clid|gclsrc|_ga|_gl|mc_[ce]id|igshid|mkt_tok|yclid|_openstat|ref_src|s_cid|vero_id|wt_mc", re.I
)
"""Parameters that say where a reader came from."""


def normalise_url(url: str) -> str:
    """The address without what does not change the page; "" for none, and as it is where it cannot be parsed."""
    try:
        parts = urlsplit(url.strip())
        host = (parts.hostname or "").removeprefix("www.").rstrip(".")
        port = f":{parts.port}" if parts.port not in (None, 80, 443) else ""
    except ValueError:  # such as an unclosed bracket
        return url
    pairs = [pair for pair in parts.query.split("&") if pair and not _TRACKING.fullmatch(pair.partition("=")[0])]
    query = "?" + "&".join(sorted(pairs)) if pairs else ""
    return f"{host}{port}{parts.path.rstrip('/')}{query}"


@dataclass(frozen=True)
class MinHash:
    """Texts that share most of their runs of `ngram` words: `bands` keys, of `rows` min-wise hashes each."""

    bands: int = 16
    rows: int = 7
    ngram: int = 5
    seed: int = 1
    name = "minhash"
    reason = "near_duplicate"
    key_columns = 1

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

    def hash_functions(self) -> tuple[U32, U32]:
        """The odd factors and the terms of the min-wise hashes."""
        numbers = random_words(derive_key(self.seed, "minhash"), np.arange(self.bands * self.rows, dtype=np.uint64))
        return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1), numbers.astype(np.uint32)


@dataclass(frozen=True)
class Unit:
    """Parts of documents that are compared by themselves: runs of `span` lines or sentences.

    Args:
        ending: Of its signature files: `ENDING` has the hashes, `COUNTS` their number by document.
        label: Under which the report counts what is cut.
    """

    ending: str
    counts: str
    kind: Literal["line", "sentence"]
    span: int
    normalise: str
    min_characters: int
    label: str

    @property
    def settings(self) -> list[Any]:
        last = REPEATS_NUMBERED if self.span == 1 else self.span
        return [SIGNATURE_VERSION, self.kind, self.normalise, self.min_characters, last]


@dataclass(frozen=True)
class Overlap:
    """Paragraphs and documents of whose runs of `ngram` words a `share` stood in earlier documents.

    Source: Li et al. 2024 (DCLM), appendix L, for both figures.
    """

    ngram = 13
    share = 0.8
    ending = "ngrams"
    counts = "ngram_counts"

    @property
    def label(self) -> str:
        return f"runs of {self.ngram} words seen"

    @property
    def settings(self) -> list[Any]:
        return [SIGNATURE_VERSION, self.ngram]


@dataclass(frozen=True)
class Substring:
    """Runs of `min_words` words, wherever they begin: see `substring`."""

    min_words: int
    ending = "anchors"
    counts = "anchor_counts"

    @property
    def label(self) -> str:
        return f"spans of {self.min_words} words cut"

    @property
    def settings(self) -> list[Any]:
        return [SIGNATURE_VERSION, self.min_words]


SPAN = 3  # Sentences in a row that are compared. Source: Raffel et al. 2020 (C4), 2.2.
CutMethod = Unit | Overlap | Substring
KINDS = (
    Exact.name,
    EqualUrl.name,
    MinHash.name,
    "lines",
    "sentences",
    "substring",
    "overlap",
)  # The names of `--dedup`.
MOSTLY_CUT, REPEATS_NUMBERED = "mostly_duplicate", 1


@dataclass(frozen=True)
class Signed:
    """The signatures of a split: the prefix of their names, how many documents and rows of each unit, their hash."""

    prefix: str
    documents: int
    rows: dict[str, int]
    sha256: str


@dataclass(frozen=True)
class Dedup:
    """The `[dedup]` table of a recipe: what is compared, and which copy stays.

    Args:
        exact: Drop whole documents that are equal.
        url: Drop documents of equal addresses, after scheme, `www.`, port, fragment, trailing slash and tracking
            parameters are removed.
        minhash: Drop documents that share most of their word n-grams.
        lines: Cut lines that stood in earlier documents, as often as they stood in one: a refrain stays.
        sentences: Cut spans of three sentences that stood in the corpus before, as C4 does.
        substring: Cut every run of `min_words` words or more that stood in the corpus before, wherever it begins. Words
            are those of MinHash: case, punctuation and accents may differ.
        overlap: Cut paragraphs (lines) of which 80 % of the runs of 13 words stood in earlier documents, and drop such
            documents, as DCLM does.
        bands, rows: Of the MinHash signature: two documents of Jaccard similarity J meet with chance
            1 - (1 - J^rows)^bands.
        ngram: Words in a shingle.
        keep: Which document of a cluster stays: the `first` in the corpus, the `longest` in bytes, or the `best` by the
            column `score`; the first of several equals.
        score: A column of numbers: a stage's, or one of `[read] columns`. A missing score counts as the worst.
        normalise: What may differ in equal documents, lines and sentences. `none`: nothing. `space`: white space.
            Empty: nothing in documents, white space in lines and sentences.
            `words`: also case, punctuation and accents. MinHash and `substring` always compare words.
        min_characters: A line or span with fewer characters, blanks not counted, is never cut: `}` is no
            duplicate.
        min_words: Of `substring`.
        max_cut_share: A document is dropped if more than this share of its bytes is cut; 1: none is.
        signatures: Write the signatures of documents that stay beside the dataset's slices, for `--extend`: it then
            compares new documents without reading the dataset's tokens. Not with methods that read the text again:
            `substring`, `overlap`, `max_cut_share`.
        own: Methods of your own, after the others; in a recipe each is a table `[dedup.NAME]` with a key `use`.

    Source: ngram as in FineWeb (Penedo et al. 2024), 3.4, which has 14 bands of 8; min_words as in Lee et al.
    2021, 4.1, in words in place of BPE tokens.
    """

    exact: bool = False
    url: bool = False
    minhash: bool = False
    lines: bool = False
    sentences: bool = False
    substring: bool = False
    overlap: bool = False
    bands: Annotated[int, Field(ge=1, le=1024)] = 16
    rows: Annotated[int, Field(ge=1, le=256)] = 7
    ngram: Annotated[int, Field(ge=1, le=256)] = 5
    keep: Literal["first", "longest", "best"] = "first"
    score: str = ""
    normalise: Literal["", "none", "space", "words"] = ""
    min_characters: Positive = 24
    min_words: Annotated[int, Field(ge=4, le=1024)] = 50
    max_cut_share: Share = 1.0
    signatures: bool = False
    own: tuple[Method, ...] = ()
    former: ClassVar[Json] = {
        "semantic": False, "embedding": "embedding", "dimension": 0, "similarity": 0.95, "clusters": 0, "seed": 1,
        "span": SPAN, "overlap_ngram": Overlap.ngram, "overlap_share": Overlap.share, "overlap_sample": 1,
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bands * self.rows > 4096:
            raise UsageError(f"bands: expected at most 4096 hashes in bands x rows, got {self.bands * self.rows}")
        names = [method.name for method in self.methods]
        if len(set(names)) != len(names):
            raise UsageError(f"own: expected methods of different names, got {', '.join(names)}")
        if (self.keep == "best") != bool(self.score):
            raise UsageError(f"score: expected a column with keep = 'best', and none else, got {self.score!r}")
        got = ", ".join(names) or "none"
        if self.signatures and not (self.active and self.has_signatures):
            raise UsageError(f"signatures: expected one of exact, url, minhash, lines and sentences, got {got}")
        if self.max_cut_share < 1 and not self.cuts:
            raise UsageError(f"max_cut_share: expected lines, sentences, substring or overlap with it, got {got}")

    @property
    def methods(self) -> tuple[Method, ...]:
        """What compares whole documents, in order. The drop code of a document is 1 + the method's index."""
        methods: tuple[Any, ...] = (
            Exact(self.normalise or "none"),
            EqualUrl(),
            MinHash(self.bands, self.rows, self.ngram),
        )
        return (*compress(methods, (self.exact, self.url, self.minhash)), *self.own)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why documents are dropped, by drop code - 1."""
        return (*(method.reason for method in self.methods), *([MOSTLY_CUT] if self.drops_cut else []))

    @property
    def drops_cut(self) -> bool:
        """Whether documents are dropped for what is cut out of them."""
        return self.max_cut_share < 1 or self.overlap

    @property
    def active(self) -> bool:
        """Whether it compares anything, and so needs signatures."""
        return bool(self.methods or self.cuts)

    @property
    def has_signatures(self) -> bool:
        """Whether signatures are all that is compared: documents are not read again."""
        return not (self.substring or self.drops_cut)

    @property
    def cuts(self) -> tuple[CutMethod, ...]:
        """What is cut out of documents, in order."""
        normalise, characters = self.normalise or "space", self.min_characters
        label = f"spans of {SPAN} sentences cut"
        cuts: tuple[CutMethod, ...] = (
            Unit("units", "counts", "line", 1, normalise, characters, "lines cut"),
            Unit("sentences", "span_counts", "sentence", SPAN, normalise, characters, label),
            Overlap(),
            Substring(self.min_words),
        )
        return tuple(compress(cuts, (self.lines, self.sentences, self.overlap, self.substring)))

    def signature(self) -> Json:
        """What decides the contents of each signature file, by its ending."""
        settings: Json = {method.name: method.settings for method in self.methods}
        settings |= {cut.ending: cut.settings for cut in self.cuts}
        if self.keep != "first":
            settings["weight"] = [SIGNATURE_VERSION, self.keep, *([self.score] if self.score else [])]
        return settings
