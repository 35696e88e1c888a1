"""The words of one text, for tests."""

import numpy as np

from forebay.prepare.filters.words import cut_words, decode, tables, word_room


def split_words(text: str) -> list[str]:
    """The words of one text, as the filters count them."""
    data = np.frombuffer(text.encode(), np.uint8)
    capacity = len(data) + 1
    points = np.empty(capacity, np.uint32)
    begins, stops, tail, kinds = word_room(capacity)
    n = decode(data, 0, len(data), points)
    count = cut_words(points, 0, n, *tables(), begins, stops, tail, kinds)
    return [text[a:b] for a, b in zip(begins[:count].tolist(), stops[:count].tolist())]
