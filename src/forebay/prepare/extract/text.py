"""Characters of a page to blocks of text, in compiled code: white space, words and their weights, references.

The state `s` of the scanner is int64 [12]: the block that is open or -1, the end of the text, whether a blank (1) or a
line break (2) stands before the next character, and so on.
"""

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.extract.page import (
    CAPITALS,
    CHARS,
    COMMAS,
    DIGITS,
    ELEMENT,
    GAP,
    HASH,
    IDEOGRAPHS,
    IN_DESCRIPTION,
    IN_TITLE,
    LAST,
    LINK_WORDS,
    START,
    STOP,
    TERMINALS,
    TEXT_COUNT,
    TEXT_FIRST,
    TEXT_MIN,
    TEXT_SUM,
    UPPERS,
    WORDS,
)
from forebay.prepare.filters.points import encode_point, hash_end, hash_step, kind, look_up, next_point, table_size
from forebay.prepare.filters.word_tables import DIGIT, LETTER, SPACE, TERMINAL, UPPER

# Of the state `s` of the scanner.
OPEN, POS, PENDING, IN_LINK, NUM_BLOCKS, GAP_TAGS, IN_WORD, WORD, WORD_CHARS, AT_ELEMENT, BR, IN_PRE = range(12)


@jit()
def head_table(title, description, chars):  # type: ignore[no-untyped-def]
    """An open-addressed table of the words of the title (1) and the description (2)."""
    size = table_size(len(title) + len(description))
    keys, numbers = np.zeros(size, np.uint64), np.zeros(size, np.int32)
    for source, data in enumerate((title, description)):
        h, n, i = np.uint64(0), 0, 0
        while i <= len(data):
            point, end = 32, i + 1
            if i < len(data):
                point, end = next_point(data, i) if i + 4 <= len(data) or data[i] < 0x80 else (32, i + 1)
            if kind(chars, point) & (LETTER | DIGIT):
                h = hash_step(h, _lower(np.int64(point)))
                n += 1
            elif n:
                h = hash_end(h)
                slot = h & np.uint64(size - 1)
                while keys[slot] != 0 and keys[slot] != h:
                    slot = (slot + np.uint64(1)) & np.uint64(size - 1)
                keys[slot] = h
                numbers[slot] |= source + 1
                h, n = np.uint64(0), 0
            i = end
    return keys, numbers


@jit(forceinline=True)
def _lower(point):  # type: ignore[no-untyped-def]
    if 65 <= point <= 90 or 0xC0 <= point <= 0xDE or 0x391 <= point <= 0x3A9 or 0x410 <= point <= 0x42F:
        return point + 32
    return point


@jit()
def end_word(s, words, block_weights):  # type: ignore[no-untyped-def]
    if s[WORD_CHARS] > 0 and s[OPEN] >= 0:
        h = hash_end(np.uint64(s[WORD]))
        number = look_up(words[0].keys, words[0].numbers, h)
        weight = words[0].weights[number] if number >= 0 else np.float32(0)
        row = block_weights[s[OPEN]]
        if row[TEXT_COUNT] == 0:
            row[TEXT_FIRST] = weight
        row[TEXT_COUNT] += 1
        row[TEXT_SUM] += weight
        row[TEXT_MIN] = min(row[TEXT_MIN], weight)
        number = look_up(words[1], words[2], h)
        if number > 0:
            row[IN_TITLE] += number & 1
            row[IN_DESCRIPTION] += number >> 1
    s[WORD] = 0
    s[WORD_CHARS] = 0


@jit()
def close_block(sink):  # type: ignore[no-untyped-def]
    s, out, blocks, block_weights, words, _ = sink
    if s[OPEN] >= 0:
        end_word(s, words, block_weights)
        while out[s[POS] - 1] <= 32:
            s[POS] -= 1
        blocks[s[OPEN], STOP] = s[POS]
        s[OPEN] = -1
    s[PENDING] = 0
    s[IN_WORD] = 0
    s[BR] = 0


@jit()
def put(c, sink):  # type: ignore[no-untyped-def]
    """Append a character to the block that is open, or to a new one.

    `sink`: the state, the text, the blocks, the weights of their words, the tables of words, the table of characters.
    """
    s, out, blocks, block_weights, words, chars = sink
    k = kind(chars, c)
    if k & SPACE or c == 0x3164:
        if s[OPEN] >= 0:
            if s[IN_PRE]:
                out[s[POS]] = 10 if c == 10 else 32
                s[POS] += 1
            elif s[PENDING] == 0:
                s[PENDING] = 1
            if s[IN_WORD]:
                end_word(s, words, block_weights)
                s[IN_WORD] = 0
        return
    if c < 32 or 0x7F <= c < 0xA0 or c == 0x200B or c == 0xFEFF or c == 0xAD:
        return
    if s[OPEN] < 0:
        number = s[NUM_BLOCKS]
        if number < len(blocks):
            s[NUM_BLOCKS] += 1
            blocks[number, START] = s[POS]
            blocks[number, ELEMENT] = s[AT_ELEMENT]
            blocks[number, GAP] = s[GAP_TAGS]
        else:
            number -= 1
            out[s[POS]] = 10
            s[POS] += 1
        s[OPEN] = number
        s[GAP_TAGS] = 0
        s[PENDING] = 0
    elif s[PENDING]:
        out[s[POS]] = 32 if s[PENDING] == 1 else 10
        s[POS] += 1
        s[PENDING] = 0
    s[BR] = 0
    b = blocks[s[OPEN]]
    s[POS] = encode_point(c, out, s[POS])
    b[CHARS] += 1
    b[LAST] = c
    ideograph = 0x2E80 <= c < 0xA000 or 0xE00 <= c < 0xF00 or 0x1000 <= c < 0x10A0 or 0x1780 <= c < 0x1800
    if ideograph:
        b[IDEOGRAPHS] += 1
        if s[IN_LINK]:
            b[LINK_WORDS] += b[IDEOGRAPHS] & 1
        b[WORDS] += b[IDEOGRAPHS] & 1
    elif not s[IN_WORD]:
        b[WORDS] += 1
        if s[IN_LINK]:
            b[LINK_WORDS] += 1
        if k & UPPER and k & LETTER and _lower(c) != c:
            b[CAPITALS] += 1
    s[IN_WORD] = 1
    if k & (LETTER | DIGIT):
        low = _lower(c)
        if low != c:
            b[UPPERS] += 1
        if k & DIGIT:
            b[DIGITS] += 1
        s[WORD] = np.int64(hash_step(np.uint64(s[WORD]), low))
        s[WORD_CHARS] += 1
        b[HASH] = (b[HASH] ^ low) * 1099511628211
    else:
        if s[WORD_CHARS]:
            end_word(s, words, block_weights)
        if c == 44 or c == 0x3001 or c == 0xFF0C or c == 0x60C:
            b[COMMAS] += 1
        elif k & TERMINAL:
            b[TERMINALS] += 1


@jit()
def read_reference(data, i, stop, references):  # type: ignore[no-untyped-def]
    """The characters of the reference after the `&` at byte i (packed as in `reference_table`), and its end; or -1."""
    keys, numbers, points, windows = references
    j = i + 1
    if j < stop and data[j] == 35:
        j += 1
        base = 10
        if j < stop and data[j] | 32 == 120:
            base = 16
            j += 1
        value, begin = 0, j
        while j < stop and j - begin < 16:
            c = data[j]
            if 48 <= c <= 57:
                digit = c - 48
            elif base == 16 and 97 <= c | 32 <= 102:
                digit = (c | 32) - 87
            else:
                break
            value = min(value * base + digit, 0x110000)
            j += 1
        if j == begin:
            return np.int64(-1), i
        if j < stop and data[j] == 59:
            j += 1
        if 0x80 <= value < 0xA0:
            value = windows[value - 0x80]
        if value == 0 or value > 0x10FFFF or 0xD800 <= value < 0xE000:
            value = 0xFFFD
        return np.int64(value), j
    h = np.uint64(0)
    begin = j
    while j < stop and j - begin < 33:
        c = data[j]
        if not (48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122):
            break
        h = hash_step(h, c)
        j += 1
    if j < stop and data[j] == 59:
        number = look_up(keys, numbers, hash_end(hash_step(h, 59)))
        if number >= 0:
            return points[number], j + 1
    number = look_up(keys, numbers, hash_end(h)) if j > begin else np.int32(-1)
    return (points[number], j) if number >= 0 else (np.int64(-1), i)


@jit(forceinline=True)
def put_next(data, i, stop, references, sink):  # type: ignore[no-untyped-def]
    """`put` the character, or what the reference means, that begins at byte i; where the next one begins."""
    points, end = read_reference(data, i, stop, references) if data[i] == 38 else (np.int64(-1), i)
    if points < 0:
        point, end = next_point(data, i)
        points = np.int64(point)
    put(points & 0x1FFFFF, sink)
    if points >> 21:
        put(points >> 21, sink)
    return end


@jit()
def put_formula(data, i, stop, references, sink):  # type: ignore[no-untyped-def]
    put(np.int64(36), sink)
    while i < stop:
        i = put_next(data, i, stop, references, sink)
    put(np.int64(36), sink)
