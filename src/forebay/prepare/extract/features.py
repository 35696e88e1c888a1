"""What the model sees of each block of a page: itself, its neighbours, the elements around it, and the page.

Linear in the page: a block looks column a fixed number of neighbours, and up to 2 * MAX_DEPTH elements.
"""

import numpy as np

from forebay.arrays import F32
from forebay.prepare.compiled import jit
from forebay.prepare.extract.page import (
    BLOCK_PARENT,
    BREAKS,
    CAPITALS,
    CHARS,
    CHILDREN,
    COMMAS,
    DEPTH,
    DIGITS,
    ELEMENT,
    FLAGS,
    GAP,
    HASH,
    IDEOGRAPHS,
    IMAGES,
    IN_DESCRIPTION,
    IN_TITLE,
    INPUTS,
    LAST,
    LAST_WEIGHT,
    LINK_WORDS,
    LINKS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    NUM_KINDS,
    OWN_WEIGHT,
    PARENT,
    PATH,
    SUM_WEIGHT,
    TAG,
    TERMINALS,
    TEXT_COUNT,
    TEXT_FIRST,
    TEXT_MIN,
    TEXT_SUM,
    UPPERS,
    WORDS,
    ScannedPage,
)
from forebay.prepare.extract.tags import HEADING, NUM_FLAGS, SHARES, TAGS, tag_tables
from forebay.prepare.filters.points import kind, table_size
from forebay.prepare.filters.word_tables import TERMINAL, character_table

_BASE = 35
_NEIGHBOUR = 19  # Columns of a neighbour: the first of the base.
_LEVELS = 6
_PER_LEVEL = 11
_SPANS = (4, 12)
NUM_FEATURES = _BASE + 6 * _NEIGHBOUR + NUM_FLAGS + 10 + _LEVELS * _PER_LEVEL + 5 + 3 * len(_SPANS) + 16 + NUM_KINDS
_ALIKE_LEVELS = 3
NUM_CONTEXT = 9 + _LEVELS + _ALIKE_LEVELS + 13
"""Features of the second pass: the probabilities that the first gives to the block and to what is around it."""

_H1, _P, _LI, _ARTICLE = (TAGS[name] for name in ("h1", "p", "li", "article"))
_SUM_WORDS, _SUM_LINKS, _SUM_BLOCKS, _SUM_GOOD, _SUM_COMMAS, _SUM_INPUTS, _SUM_IMAGES = range(7)


def block_features(page: ScannedPage) -> F32:
    """float32 [blocks, NUM_FEATURES]."""
    features = np.zeros((len(page.blocks), NUM_FEATURES), np.float32)
    _block_features(page, tag_tables()[1], character_table(), features)
    return features


def context_features(page: ScannedPage, probability: F32) -> F32:
    """float32 [blocks, NUM_CONTEXT] for the probabilities of the first pass, float32 [blocks]."""
    features = np.zeros((len(page.blocks), NUM_CONTEXT), np.float32)
    _context_features(page, tag_tables()[1], probability, features)
    return features


@jit(forceinline=True)
def _ratio(part, total):  # type: ignore[no-untyped-def]
    return part / max(np.float32(1), total)


@jit(forceinline=True)
def _share_between(cumulated, low, high):  # type: ignore[no-untyped-def]
    """The ratio of column 1 to column 0 over the blocks [low, high)."""
    return _ratio(cumulated[high, 1] - cumulated[low, 1], cumulated[high, 0] - cumulated[low, 0])


@jit(forceinline=True)
def _block_element(elements, tag_bits, element):  # type: ignore[no-untyped-def]
    return element if element == 0 or tag_bits[elements[element, TAG]] & 1 else elements[element, BLOCK_PARENT]


@jit()
def _common_ancestor(elements, a, b):  # type: ignore[no-untyped-def]
    while a != b:
        if a > b:  # a parent comes before its children
            a = elements[a, PARENT]
        else:
            b = elements[b, PARENT]
    return a


@jit()
def _slots(values):  # type: ignore[no-untyped-def]
    """Numbers from 0 for the values that differ, in the order of the first of each."""
    size = table_size(len(values))
    table = np.full(size, -1, np.int64)
    out = np.empty(len(values), np.int64)
    firsts = np.empty(len(values), np.int64)
    count = 0
    for i in range(len(values)):
        slot = (values[i] * 0x9E3779B97F4A7C1 >> 20) & (size - 1)
        while table[slot] >= 0 and values[firsts[table[slot]]] != values[i]:
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot] = count
            firsts[count] = i
            count += 1
        out[i] = table[slot]
    return out, count


@jit()
def _sum_elements(page):  # type: ignore[no-untyped-def]
    elements, blocks = page.elements, page.blocks
    sums = np.zeros((len(elements), 7), np.float32)
    for i in range(len(blocks)):
        b = blocks[i]
        row = sums[b[ELEMENT]]
        row[_SUM_WORDS] += b[WORDS]
        row[_SUM_LINKS] += b[LINK_WORDS]
        row[_SUM_BLOCKS] += 1
        if b[TERMINALS] > 0 and b[WORDS] >= 10 and 3 * b[LINK_WORDS] < b[WORDS]:
            row[_SUM_GOOD] += b[WORDS]
        row[_SUM_COMMAS] += b[COMMAS]
    for e in range(len(elements) - 1, -1, -1):
        sums[e, _SUM_INPUTS] += elements[e, INPUTS]
        sums[e, _SUM_IMAGES] += elements[e, IMAGES]
        if e:
            sums[elements[e, PARENT]] += sums[e]
    return sums


@jit()
def _top_candidate(page, tag_bits, sums):  # type: ignore[no-untyped-def]
    """The element that readability would choose: most text in its paragraphs, not in links."""
    elements, blocks = page.elements, page.blocks
    scores = np.zeros(len(elements), np.float32)
    for i in range(len(blocks)):
        b = blocks[i]
        if b[CHARS] < 25:
            continue
        plain = np.float32(b[WORDS] - b[LINK_WORDS]) / max(1, b[WORDS])
        score = (1 + b[COMMAS] + min(b[CHARS] / 100, 3)) * plain
        e = _block_element(elements, tag_bits, b[ELEMENT])
        if elements[e, TAG] == _P or elements[e, TAG] == _LI:
            e = elements[e, BLOCK_PARENT]
        share = 1.0
        for level in range(4):
            scores[e] += score * share
            if e == 0:
                break
            e = elements[e, BLOCK_PARENT]
            share = 0.5 if level == 0 else 0.33 / (level + 1)
    best, top = np.float32(-1), 0
    for e in range(len(elements)):
        value = scores[e] * (1 - sums[e, _SUM_LINKS] / max(1, sums[e, _SUM_WORDS]))
        if value > best:
            best, top = value, e
    return top


@jit()
def _headings(page, tag_bits):  # type: ignore[no-untyped-def]
    """int64 [blocks]: the last heading (h1 to h6) before each block, or -1."""
    out = np.full(len(page.blocks), -1, np.int64)
    last = -1
    for i in range(len(page.blocks)):
        out[i] = last
        element = _block_element(page.elements, tag_bits, page.blocks[i, ELEMENT])
        if tag_bits[page.elements[element, TAG]] & HEADING:
            last = i
    return out


@jit()
def _base(page, tag_bits, chars, features):  # type: ignore[no-untyped-def]
    elements, blocks = page.elements, page.blocks
    repeats, count = _slots(blocks[:, HASH])
    headings = _headings(page, tag_bits)
    totals = np.zeros(count, np.int64)
    before = np.zeros(len(blocks), np.int64)
    for i in range(len(blocks)):
        before[i] = totals[repeats[i]]
        totals[repeats[i]] += 1
    for i in range(len(blocks)):
        b, f = blocks[i], features[i]
        e = b[ELEMENT]
        words, length = max(1, b[WORDS]), max(1, b[CHARS])
        lexicon = page.block_weights[i]
        weights = page.element_weights[e]
        previous = blocks[i - 1, ELEMENT] if i else 0
        common = _common_ancestor(elements, previous, e)
        f[0] = words
        f[1] = b[LINK_WORDS] / words
        f[2] = elements[_block_element(elements, tag_bits, e), TAG]
        f[3] = weights[LAST_WEIGHT]
        f[4] = weights[SUM_WEIGHT]
        f[5] = weights[MIN_WEIGHT]
        f[6] = weights[MAX_WEIGHT]
        f[7] = lexicon[TEXT_SUM] / max(1, lexicon[TEXT_COUNT])
        f[8] = lexicon[TEXT_MIN]
        f[9] = lexicon[TEXT_FIRST]
        f[10] = b[COMMAS] / words
        f[11] = b[TERMINALS]
        f[12] = b[DIGITS] / length
        f[13] = b[CAPITALS] / words
        f[14] = 2 if kind(chars, b[LAST]) & TERMINAL else 1 if b[LAST] == 58 else 0
        f[15] = elements[e, DEPTH] - elements[common, DEPTH]
        f[16] = elements[previous, DEPTH] - elements[common, DEPTH]
        f[17] = totals[repeats[i]]
        f[18] = elements[e, TAG]
        f[19] = b[UPPERS] / length
        f[20] = length / words
        f[21] = b[LINKS]
        f[22] = b[GAP]
        f[23] = b[BREAKS]
        f[24] = b[IDEOGRAPHS] / length
        f[25] = lexicon[TEXT_SUM]
        f[26] = length
        f[27] = lexicon[IN_TITLE] / max(1, lexicon[TEXT_COUNT])
        f[28] = lexicon[IN_DESCRIPTION] / max(1, lexicon[TEXT_COUNT])
        f[29] = before[i]
        heading = headings[i]
        if heading >= 0:
            lexicon = page.block_weights[heading]
            f[30] = lexicon[TEXT_SUM] / max(1, lexicon[TEXT_COUNT])
            f[31] = lexicon[TEXT_MIN]
            f[32] = i - heading
            f[33] = elements[_block_element(elements, tag_bits, blocks[heading, ELEMENT]), TAG]
            f[34] = page.element_weights[blocks[heading, ELEMENT], SUM_WEIGHT]
        else:
            f[32] = -1


@jit()
def _write_levels(f, column, page, tag_bits, sums, repeats, element, page_words):  # type: ignore[no-untyped-def]
    """The features of the elements around a block, from the innermost; returns the next column."""
    elements = page.elements
    e = _block_element(elements, tag_bits, element)
    for _ in range(_LEVELS):
        total = sums[e]
        words, count = max(np.float32(1), total[_SUM_WORDS]), max(np.float32(1), total[_SUM_BLOCKS])
        level = f[column:]
        level[0] = words
        level[1] = total[_SUM_LINKS] / words
        level[2] = count
        level[3] = words / count
        level[4] = total[_SUM_GOOD] / words
        level[5] = elements[e, CHILDREN]
        level[6] = total[_SUM_INPUTS] + total[_SUM_IMAGES] / 100
        level[7] = words / page_words
        level[8] = elements[e, TAG]
        level[9] = page.element_weights[e, OWN_WEIGHT]
        level[10] = repeats[e]
        column += _PER_LEVEL
        e = elements[e, BLOCK_PARENT]
    return column


@jit()
def _write_page(f, page, sums, top, shares, num_h1, articles):  # type: ignore[no-untyped-def]
    num, page_words = len(page.blocks), max(np.float32(1), sums[0, _SUM_WORDS])
    f[0] = num
    f[1] = page_words
    f[2] = sums[0, _SUM_LINKS] / page_words
    f[3] = sums[0, _SUM_GOOD] / page_words
    for k in range(len(SHARES)):
        f[4 + k] = shares[k] / page_words
    f[11] = num_h1
    f[12] = sums[top, _SUM_WORDS] / page_words
    f[13] = _ratio(sums[top, _SUM_LINKS], sums[top, _SUM_WORDS])
    f[14] = articles
    f[15] = sums[0, _SUM_GOOD]
    for k in range(NUM_KINDS):
        f[16 + k] = page.kinds >> k & 1


@jit()
def _ancestors(elements, element):  # type: ignore[no-untyped-def]
    """bool [elements]: an element and those around it."""
    inside = np.zeros(len(elements), np.bool_)
    inside[0] = True
    while element:
        inside[element] = True
        element = elements[element, PARENT]
    return inside


@jit()
def _cumulate(blocks):  # type: ignore[no-untyped-def]
    """float32 [blocks + 1, 3]: words, words in links and words of sentences before each block."""
    sums = np.zeros((len(blocks) + 1, 3), np.float32)
    for i in range(len(blocks)):
        good = blocks[i, TERMINALS] > 0 and blocks[i, WORDS] >= 10
        sums[i + 1, 0] = sums[i, 0] + blocks[i, WORDS]
        sums[i + 1, 1] = sums[i, 1] + blocks[i, LINK_WORDS]
        sums[i + 1, 2] = sums[i, 2] + (blocks[i, WORDS] if good else 0)
    return sums


@jit()
def _write_spans(f, column, cumulated, i):  # type: ignore[no-untyped-def]
    """The features of the blocks up to each distance of _SPANS around block i; returns the next column."""
    for span in _SPANS:
        low, high = max(0, i - span), min(len(cumulated) - 1, i + span + 1)
        words = max(np.float32(1), cumulated[high, 0] - cumulated[low, 0])
        f[column] = words / (high - low)
        f[column + 1] = _share_between(cumulated, low, high)
        f[column + 2] = (cumulated[high, 2] - cumulated[low, 2]) / words
        column += 3
    return column


@jit()
def _block_features(page, tag_bits, chars, features):  # type: ignore[no-untyped-def]
    elements, blocks = page.elements, page.blocks
    num = len(blocks)
    sums = _sum_elements(page)
    _base(page, tag_bits, chars, features)
    page_words = max(np.float32(1), sums[0, _SUM_WORDS])
    top = _top_candidate(page, tag_bits, sums)
    in_top = _ancestors(elements, top)
    alike, _ = _slots(elements[:, PATH])
    repeats = np.bincount(alike)[alike]
    paths, num_paths = _slots(elements[blocks[:, ELEMENT], PATH])
    path_sums = np.zeros((num_paths, 3), np.float32)
    shares = np.zeros(len(SHARES), np.float32)
    first_h1, num_h1, before = -1, 0, np.float32(0)
    for i in range(num):
        b = blocks[i]
        path_sums[paths[i], 0] += 1
        path_sums[paths[i], 1] += b[WORDS]
        path_sums[paths[i], 2] += b[LINK_WORDS]
        flags = elements[b[ELEMENT], FLAGS]
        for k, flag in enumerate(SHARES):
            if flags & flag:
                shares[k] += b[WORDS]
        if features[i, 2] == _H1:
            num_h1 += 1
            if first_h1 < 0:
                first_h1 = i
    cumulated = _cumulate(blocks)
    articles = np.float32(0)
    for e in range(len(elements)):
        articles += elements[e, TAG] == _ARTICLE
    for i in range(num):
        b, f = blocks[i], features[i]
        column = _BASE
        for distance in (-1, 1, -2, 2, -3, 3):
            j = i + distance
            for k in range(_NEIGHBOUR):
                f[column + k] = features[j, k] if 0 <= j < num else -1
            column += _NEIGHBOUR
        flags = elements[b[ELEMENT], FLAGS]
        for k in range(NUM_FLAGS):
            f[column + k] = flags >> k & 1
        column += NUM_FLAGS
        common = b[ELEMENT]
        while not in_top[common]:
            common = elements[common, PARENT]
        position = f[column:]
        position[0] = elements[b[ELEMENT], DEPTH]
        position[1] = i / num
        position[2] = before / page_words
        position[3] = i
        position[4] = num - i
        position[5] = i - first_h1 if first_h1 >= 0 else -1000
        position[6] = elements[top, DEPTH] - elements[common, DEPTH]
        position[7] = elements[b[ELEMENT], DEPTH] - elements[common, DEPTH]
        position[8] = 1 if common == top else 0
        position[9] = 1 if b[ELEMENT] < top else 0
        before += b[WORDS]
        column += 10
        column = _write_levels(f, column, page, tag_bits, sums, repeats, b[ELEMENT], page_words)
        path = path_sums[paths[i]]
        words = max(np.float32(1), path[1])
        around = f[column:]
        around[0] = path[0]
        around[1] = words
        around[2] = path[2] / words
        around[3] = words / path[0]
        around[4] = words / page_words
        column += 5
        column = _write_spans(f, column, cumulated, i)
        _write_page(f[column:], page, sums, top, shares, num_h1, articles)


@jit()
def _expected_recall(words, probability):  # type: ignore[no-untyped-def]
    """Of each block, the share of the expected main text that is in likelier ones; and the highest expected F1."""
    shares = np.zeros(len(words), np.float32)
    total = np.float32(0.01)
    for i in range(len(words)):
        total += words[i] * probability[i]
    size, expected, best = np.float32(0), np.float32(0), np.float32(0.01)
    for i in np.argsort(-probability, kind="mergesort"):
        shares[i] = expected / total
        size += words[i]
        expected += words[i] * probability[i]
        best = max(best, 2 * expected / (size + total))
    return shares, best


@jit()
def _write_ratios(f, sums, elements, e, levels):  # type: ignore[no-untyped-def]
    """The ratio of column 1 to column 0 of the sums of an element and of those around it."""
    for level in range(levels):
        f[level] = _ratio(sums[e, 1], sums[e, 0])
        e = elements[e, BLOCK_PARENT]


@jit()
def _context_features(page, tag_bits, probability, features):  # type: ignore[no-untyped-def]
    elements, blocks = page.elements, page.blocks
    num = len(blocks)
    sums = np.zeros((len(elements), 2), np.float32)
    paths, num_paths = _slots(elements[blocks[:, ELEMENT], PATH])
    path_sums = np.zeros((num_paths, 2), np.float32)
    cumulated = np.zeros((num + 1, 2), np.float32)
    highest = np.float32(0)
    for i in range(num):
        words = np.float32(blocks[i, WORDS])
        e = blocks[i, ELEMENT]
        sums[e, 0] += words
        sums[e, 1] += words * probability[i]
        path_sums[paths[i], 0] += words
        path_sums[paths[i], 1] += words * probability[i]
        cumulated[i + 1, 0] = cumulated[i, 0] + words
        cumulated[i + 1, 1] = cumulated[i, 1] + words * probability[i]
        highest = max(highest, probability[i])
    for e in range(len(elements) - 1, 0, -1):
        sums[elements[e, PARENT]] += sums[e]
    alike, num_alike = _slots(elements[:, PATH])
    alike_sums = np.zeros((num_alike, 2), np.float32)
    for e in range(len(elements)):
        alike_sums[alike[e]] += sums[e]
    sums_of_alike = alike_sums[alike]
    shares, best = _expected_recall(blocks[:, WORDS], probability)
    headings = _headings(page, tag_bits)
    for i in range(num):
        f = features[i]
        f[0] = probability[i]
        for k, distance in enumerate((-1, 1, -2, 2, -3, 3, -4, 4)):
            j = i + distance
            f[1 + k] = probability[j] if 0 <= j < num else -1
        e = _block_element(elements, tag_bits, blocks[i, ELEMENT])
        _write_ratios(f[9:], sums, elements, e, _LEVELS)
        _write_ratios(f[9 + _LEVELS :], sums_of_alike, elements, e, _ALIKE_LEVELS)
        path = path_sums[paths[i]]
        around = f[9 + _LEVELS + _ALIKE_LEVELS :]
        around[0] = _ratio(path[1], path[0])
        around[1] = _ratio(sums[0, 1], sums[0, 0])
        around[2] = highest
        around[3] = sums[0, 1]
        for k, span in enumerate((5, 15)):
            low, high = max(0, i - span), min(num, i + span + 1)
            around[4 + k] = _share_between(cumulated, low, high)
        around[6] = _ratio(cumulated[i, 1], cumulated[num, 1])
        heading = headings[i]
        around[8] = probability[heading] if heading >= 0 else -1
        around[9] = _share_between(cumulated, max(heading, 0), i)
        j = i + 1
        while j < num and headings[j] <= i and j < i + 30:
            j += 1
        around[10] = _share_between(cumulated, i, j)
        around[7] = _ratio(cumulated[num, 1] - cumulated[i + 1, 1], cumulated[num, 1])
        around[11] = shares[i]
        around[12] = probability[i] / best
