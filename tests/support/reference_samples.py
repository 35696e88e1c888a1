"""The samples that a Loader must have, by loops over lists of Python integers that share no code with the package."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset

IGNORED = -100
Slices = Sequence[tuple[list[int], list[int]]]  # Of each slice its tokens, and the ends of its documents.
Sizes = Sequence[tuple[list[int], int]]  # Of each slice the sizes of the documents that end in it, and of a last one.
# Document 6 is in slices 1, 2 and 3.
SLICES = (([5, 14, 1], 3), ([2, 6, 9], 7), ([], 11), ([4, 4, 30, 13], 0), ([8], 2))
# More documents than are read at once; some are empty.
MANY = tuple(
    (np.random.default_rng(seed).integers(0, 20, num_documents).tolist(), rest)
    for seed, (num_documents, rest) in enumerate(((300, 3), (0, 40), (65, 0)))
)


def to_lists(slices: Sizes, first: int = 0) -> Slices:
    """The slices of a dataset whose token k is k + first: so every token is known by its value."""
    result = []
    for sizes, rest in slices:
        stop = first + sum(sizes) + rest
        result.append((list(range(first, stop)), list(accumulate(sizes))))
        first = stop
    return result


def write_slices(folder: Path, slices: Sizes, dtype: Any = np.uint16, first: int = 0) -> Dataset:
    folder.mkdir()
    for i, (tokens, stops) in enumerate(to_lists(slices, first)):
        tensors = {"tokens": np.array(tokens, dtype), "document_ends": np.array(stops, np.uint64)}
        save_file(tensors, folder / f"{i:03d}.safetensors")
    return import_slices(folder, folder.name)


class Sample(NamedTuple):
    """A row; the last two only with document masks."""

    inputs: list[int]
    labels: list[int]
    document_ids: list[int]
    position_ids: list[int]


class _Part(NamedTuple):
    """Consecutive tokens of one document in one slice."""

    document: int
    tokens: list[int]


def _split(slices: Slices) -> list[list[_Part]]:
    """The parts of documents in each slice. A document without an end in its slice goes on in the next."""
    parts, document = [], 0
    for tokens, stops in slices:
        parts.append([])
        for start, stop in zip([0, *stops], [*stops, len(tokens)]):
            if stop > start:
                parts[-1].append(_Part(document, tokens[start:stop]))
            document += 1
        document -= 1  # What follows the last end is of the document that the next slice's first end ends.
    return parts


def _chosen(
    parts: list[list[_Part]], exclude: Collection[int], min_tokens: int, max_tokens: int | None
) -> list[list[_Part]]:
    sizes = {}
    for part in [part for item in parts for part in item]:
        sizes[part.document] = sizes.get(part.document, 0) + len(part.tokens)
    high = max(sizes.values()) if max_tokens is None else max_tokens
    selected = {document for document, size in sizes.items() if document not in exclude and min_tokens <= size <= high}
    return [[part for part in item if part.document in selected] for item in parts]


def samples_of(
    slices: Slices, seq_len: int, *, packing: str = "concat", masks: bool = False, exclude: Collection[int] = (),
    min_tokens: int = 0, max_tokens: int | None = None, pad_id: int = 0,
) -> dict[int, Sample]:  # fmt: skip
    """Each sample of a dataset by its id. Slices must be smaller than a section of `best_fit`."""
    rows = []
    for parts in _chosen(_split(slices), exclude, min_tokens, max_tokens):
        rows += _fitted(parts, seq_len, pad_id) if packing == "best_fit" else _consecutive(parts, seq_len, masks)
    return dict(enumerate(rows))


def _consecutive(parts: list[_Part], seq_len: int, masks: bool) -> Iterator[Sample]:
    stream = [(token, part.document) for part in parts for token in part.tokens]
    for first in range(0, len(stream) - seq_len + 1, seq_len):
        row, following = stream[first : first + seq_len], stream[first + 1 : first + seq_len + 1]
        labels = [token for token, _ in following] + [IGNORED] * (seq_len - len(following))
        if masks:
            labels = [
                label if i < len(following) and following[i][1] == row[i][1] else IGNORED
                for i, label in enumerate(labels)
            ]
        yield Sample([token for token, _ in row], labels, *_numbered([document for _, document in row]))


def _fitted(parts: list[_Part], seq_len: int, pad_id: int) -> list[Sample]:
    """Best fit, longest first, of the parts' remainders after whole rows; ordered by the offset of the first token."""
    rows = []  # For each row: offset, tokens, label after them.
    short, offset = [], 0
    for part in parts:
        tokens = part.tokens
        while len(tokens) >= seq_len:
            rows.append([(offset, tokens[:seq_len], tokens[seq_len] if len(tokens) > seq_len else IGNORED)])
            tokens, offset = tokens[seq_len:], offset + seq_len
        if tokens:
            short.append((offset, tokens, IGNORED))
            offset += len(tokens)
    fitted = []
    for item in sorted(short, key=lambda item: (-len(item[1]), item[0])):
        free = [seq_len - sum(len(tokens) for _, tokens, _ in row) for row in fitted]
        fitting = [(size, i) for i, size in enumerate(free) if size >= len(item[1])]
        if fitting:
            fitted[min(fitting)[1]].append(item)
        else:
            fitted.append([item])
    result = []
    for row in sorted(map(sorted, rows + fitted)):
        inputs = [token for _, tokens, _ in row for token in tokens]
        labels = [label for _, tokens, last in row for label in [*tokens[1:], last]]
        missing = seq_len - len(inputs)
        ids, positions = _numbered([i for i, (_, tokens, _) in enumerate(row) for _ in tokens])
        inputs += [pad_id] * missing
        labels += [IGNORED] * missing
        result.append(Sample(inputs, labels, ids + [-1] * missing, positions + list(range(missing))))
    return result


def _numbered(documents: list[int]) -> tuple[list[int], list[int]]:
    """The number of each token's document within the row, and its position in it."""
    ids, positions = [], []
    for i, document in enumerate(documents):
        is_new = i == 0 or document != documents[i - 1]
        ids.append((ids[-1] + is_new) if ids else 0)
        positions.append(0 if is_new else positions[-1] + 1)
    return ids, positions
