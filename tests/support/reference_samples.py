"""What a Loader's samples must be, by loops over lists of Python integers: shares no code with the package."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

IGNORED = -100
Slices = Sequence[tuple[list[int], list[int]]]  # Of each slice its tokens, and the ends of its documents.


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


def _parts_of(slices: Slices) -> list[list[_Part]]:
    """The parts of documents in each slice. A document without an end in its slice goes on in the next."""
    parts, document = [], 0
    for tokens, ends in slices:
        parts.append([])
        for start, stop in zip([0, *ends], [*ends, len(tokens)]):
            if stop > start:
                parts[-1].append(_Part(document, tokens[start:stop]))
            document += 1
        document -= 1  # What follows the last end is of the document that the next slice's first end ends.
    return parts


def _chosen(
    parts: list[list[_Part]], exclude: Collection[int], min_tokens: int, max_tokens: int | None
) -> list[list[_Part]]:
    sizes: dict[int, int] = {}
    for part in [part for of_slice in parts for part in of_slice]:
        sizes[part.document] = sizes.get(part.document, 0) + len(part.tokens)
    high = max(sizes.values()) if max_tokens is None else max_tokens
    kept = {document for document, size in sizes.items() if document not in exclude and min_tokens <= size <= high}
    return [[part for part in of_slice if part.document in kept] for of_slice in parts]


def samples_of(
    slices: Slices, seq_len: int, *, packing: str = "concat", masks: bool = False, exclude: Collection[int] = (),
    min_tokens: int = 0, max_tokens: int | None = None, pad_id: int = 0,
) -> dict[int, Sample]:  # fmt: skip
    """Each sample of a dataset by its id. Slices must be smaller than a section of `best_fit`."""
    rows: list[Sample] = []
    for parts in _chosen(_parts_of(slices), exclude, min_tokens, max_tokens):
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
    """Best fit, longest first, of the parts' remainders behind whole rows; ordered by the place of the first token."""
    rows: list[list[tuple[int, list[int], int]]] = []  # Of each row (place, tokens, label after them).
    short, place = [], 0
    for part in parts:
        tokens = part.tokens
        while len(tokens) >= seq_len:
            rows.append([(place, tokens[:seq_len], tokens[seq_len] if len(tokens) > seq_len else IGNORED)])
            tokens, place = tokens[seq_len:], place + seq_len
        if tokens:
            short.append((place, tokens, IGNORED))
            place += len(tokens)
    fitted: list[list[tuple[int, list[int], int]]] = []
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
