"""Which samples a run reads of a dataset: how many each slice has, for a packing, a document subset and a split.

Consecutive tokens of whole slices need the table only. Packing `best_fit` and subsets of documents need the lengths of
all documents, which are in one file (`dataset.lengths`); no slice is read, and the counts are cached. A split consists
of whole slices, by a permutation that depends on their number only, with at most one cut: a larger validation split
contains a smaller one. Of a dataset that extends others, each generation of slices is split so.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import I32, I64, U64
from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.files import atomic_write, remove_stale
from forebay.load.arguments import check_choice
from forebay.load.packing import DocumentSubset, count_sections, document_spans, section_tokens
from forebay.order.bijection import derive_key, permute
from forebay.order.growth import generations, owners_of
from forebay.order.plan import samples_per_slice

PACKINGS = ("concat", "best_fit")
SPLITS = (None, "train", "validation")
MAX_IMBALANCE = 0.1
"""A worker owns at most this fraction more slices than the mean, rounded up to a whole slice: with few slices much more
than a tenth (81 slices on 8 workers: at most 12, 1.19 times the mean)."""
_COUNTING_VERSION = 5  # The version of the cached counts.


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """The samples that a run reads of one dataset. Arrays are int64 with one value a slice, [S]."""

    layout: str  # `tokens` or `rows`.
    seq_len: int | None  # L; None for rows.
    packing: str  # `concat` or `best_fit`.
    documents: DocumentSubset | None  # None for all.
    counts: I64  # Samples of each slice that the run reads.
    offsets: I64  # The first of them, counted in the slice.
    bases: I64  # Global number of each slice's sample 0, over the whole dataset: splits share no number.
    first_documents: I64  # Global number of the document in which each slice begins.
    tokens_beyond: I64  # [2, S], tokens of its first and last document in other slices; 0 if no slice was counted.
    sections: I32  # [C], samples of each section of `best_fit`, slice after slice.
    first_sections: I64  # [S + 1], each slice's first in `sections`; zeros without `best_fit`.
    pad_id: int  # EOS, or 0.
    split: tuple[str, float] | None  # (name, validation fraction).
    tail_tokens: int  # Tokens of the whole dataset in no sample, fewer than seq_len at a slice's end.

    @property
    def num_samples(self) -> int:
        """Samples that the run reads."""
        return int(self.counts.sum())

    def describe(self) -> dict[str, Any]:
        """What decides the samples besides dataset and seq_len, as plain JSON; part of a state."""
        return {
            "packing": self.packing,
            "documents": None if self.documents is None else self.documents.digest(),
            "split": None if self.split is None else list(self.split),
        }


def plan_samples(
    dataset: Dataset, seq_len: int | None, *, packing: str = "concat", documents: DocumentSubset | None = None,
    split: str | None = None, validation: float = 0.0, cache_dir: Path | None = None,
) -> SampleIndex:  # fmt: skip
    """The index of a dataset's samples. Depends on the dataset and these settings, those of the Loader, only.

    Args:
        validation: Fraction of all samples in the split `validation`: round(validation * N) samples, of each generation
            of a dataset that was extended: what was for training or validation stays so.
        cache_dir: Directory for the counts, 32 bytes a slice and, for `best_fit`, 4 a section; None: none are cached.

    Raises:
        UsageError: If a setting is wrong, or no sample remains.
        DatasetError, NetworkError: If the lengths of the documents are damaged or cannot be read.
    """
    layout, table = dataset.manifest.layout, dataset.table
    _check_settings(layout, packing, documents, split, validation)
    first_documents = np.cumsum(table.documents) - table.documents
    counted = np.zeros((4, len(table)), np.int64)
    counted[0], counted[1] = samples_per_slice(table.count, seq_len, layout), table.count
    first_sections, sections = np.zeros(len(table) + 1, np.int64), np.empty(0, np.int32)
    if packing == "best_fit" or documents is not None:
        assert seq_len is not None
        if packing == "best_fit":
            first_sections[1:] = np.cumsum(-(-table.count // section_tokens(seq_len)))
        counted, sections = _count_samples(
            dataset, seq_len, documents, first_documents, first_sections, counted, cache_dir
        )
    counts, tokens, beyond = counted[0], counted[1], counted[2:]
    # Samples of `best_fit` hold padding and all tokens.
    tail = max(0, int(tokens.sum()) - int(counts.sum()) * (seq_len or 1))
    bases = np.cumsum(counts) - counts
    offsets = np.zeros(len(counts), np.int64)
    counts = counts.copy()
    if split is not None:
        for first, stop in generations(dataset.manifest.lineage, len(table)):
            counts[first:stop], offsets[first:stop] = _split(counts[first:stop], split, validation)
    if not counts.any():
        raise UsageError(
            f"{dataset.name}: expected at least one sample, got none of {seq_len} tokens (packing {packing}, split "
            f"{split}). Ask for shorter samples, or leave out less."
        )
    return SampleIndex(
        layout, seq_len if layout == "tokens" else None, packing, documents, counts, offsets, bases, first_documents,
        beyond, sections, first_sections, dataset.manifest.eos_id or 0,
        None if split is None else (split, float(validation)), tail,
    )  # fmt: skip


def owned_samples(
    dataset: Dataset, index: SampleIndex, rank: int, world_size: int, worker_names: Sequence[str]
) -> tuple[SampleIndex, I64, list[str]]:
    """The slices that a rank owns by rendezvous hashing of their hashes and the workers' names.

    Args:
        worker_names: By rank; if there are none, the ranks' numbers.

    Returns:
        The rank's index; the rank of each slice, int64 [S]; the names by rank.

    Raises:
        UsageError: If there is not a name for each rank, or a rank would own no sample.
    """
    names = list(map(str, worker_names or range(world_size)))
    if len(names) != world_size:
        raise UsageError(f"worker_names: expected a name for each of {world_size} ranks, got {len(names)}.")
    owners = owners_of(dataset.table.sha256, dataset.manifest.lineage, names, MAX_IMBALANCE)
    owned = np.bincount(owners, weights=index.counts, minlength=world_size).astype(np.int64)
    if not owned.all():
        raise UsageError(
            f"assignment='owned': expected samples for each of {world_size} workers, got none for "
            f"{names[int(owned.argmin())]!r}: {np.count_nonzero(index.counts)} slices are too few. Prepare smaller "
            "slices (--slice-bytes), or use assignment='global'."
        )
    return replace(index, counts=np.where(owners == rank, index.counts, 0)), owners, names


def _check_settings(
    layout: str, packing: str, documents: DocumentSubset | None, split: str | None, validation: float
) -> None:
    check_choice("packing", packing, PACKINGS)
    check_choice("split", split, SPLITS)
    if layout == "rows" and (packing != "concat" or documents is not None):
        raise UsageError("packing, documents: expected a dataset of layout 'tokens', got 'rows'. Leave them out.")
    if documents is not None and not isinstance(documents, DocumentSubset):
        raise UsageError(f"documents: expected a DocumentSubset, got {type(documents).__name__}.")
    is_number = isinstance(validation, (int, float, np.floating)) and not isinstance(validation, bool)
    if not is_number or not 0 <= validation <= 1:
        raise UsageError(f"validation_fraction: expected a fraction in [0, 1], got {validation!r}.")
    if split is None and validation:
        raise UsageError(
            f"validation_fraction: expected a split with it, got {validation} and none. Add split='train'."
        )


def _split(counts: I64, split: str, validation: float) -> tuple[I64, I64]:
    num_validation = round(validation * int(counts.sum()))
    order = permute(np.arange(len(counts), dtype=np.uint64), len(counts), derive_key(0, "split")).astype(np.int64)
    stops = np.cumsum(counts[order])
    validation_counts = np.empty_like(counts)
    validation_counts[order] = np.clip(num_validation - (stops - counts[order]), 0, counts[order])
    if split == "validation":
        return validation_counts, np.zeros_like(counts)
    return counts - validation_counts, validation_counts


def _count_samples(
    dataset: Dataset, seq_len: int, documents: DocumentSubset | None, first_documents: I64, first_sections: I64,
    counts: I64, cache_dir: Path | None,
) -> tuple[I64, I32]:  # fmt: skip
    """Fill `counts`, int64 [4, S]: samples, tokens of the subset, `tokens_beyond`; and `sections`, as SampleIndex.

    Packing is `best_fit` if there are sections.
    """
    table, sections = dataset.table, np.zeros(first_sections[-1], np.int32)
    settings = f"{seq_len};{len(sections) > 0};{'' if documents is None else documents.digest()}"
    digest = hashlib.sha256(f"{_COUNTING_VERSION};{dataset.id};{settings}".encode()).hexdigest()
    path = None if cache_dir is None else cache_dir / f"samples-{digest}.counts"
    with contextlib.suppress(FileNotFoundError):
        data = b"" if path is None else path.read_bytes()
        if len(data) == counts.nbytes + sections.nbytes:
            counts = np.frombuffer(data, "<i8", counts.size).reshape(counts.shape).astype(np.int64)
            return counts, np.frombuffer(data, "<i4", offset=counts.nbytes).astype(np.int32)
    waiting: list[tuple[int, U64]] = []  # Slices whose last document ends in a later one.

    def count(after: int) -> None:
        """Count the waiting slices; `after`: tokens of the document in progress in the slice that follows them."""
        for index, document_ends in reversed(waiting):
            counts[3, index], size = after, int(table.count[index])
            before, first = int(counts[2, index]), int(first_documents[index])
            spans = document_spans(document_ends, size, documents, first, before, after)
            counts[0, index], counts[1, index] = spans.num_tokens // seq_len, spans.num_tokens
            if len(sections):
                rows = count_sections(spans, size, seq_len)
                sections[first_sections[index] : first_sections[index + 1]] = rows
                counts[0, index] = rows.sum()
            after += 0 if len(document_ends) else size
        waiting.clear()

    before = 0
    for index, document_ends in enumerate(dataset.all_document_ends()):
        if len(document_ends):
            count(int(document_ends[0]))
        waiting.append((index, document_ends))
        counts[2, index] = before
        before = int(table.count[index]) + (-int(document_ends[-1]) if len(document_ends) else before)
    count(0)
    if path is not None:
        with contextlib.suppress(OSError):  # The cache is full or read-only.
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(path.parent)
            atomic_write(path, counts.astype("<i8").tobytes() + sections.astype("<i4").tobytes())
    return counts, sections
