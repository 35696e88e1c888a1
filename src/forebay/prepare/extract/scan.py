"""One pass over the bytes of an HTML page: its text in blocks, and the tree of elements around them.

A block is text without an element that breaks it (`p`, `div`, `li`, `td` …; two `br`). The pass follows the HTML
standard where it matters for text: raw text elements, optional end tags, elements closed out of order, character
references. Its time is linear in the page (about 300 MB/s), and its memory is bounded: deeper than MAX_DEPTH and beyond
MAX_ROWS elements or blocks, text goes to the enclosing element and the last block.
"""

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.extract.attributes import read_attributes, read_class_words
from forebay.prepare.extract.page import (
    BLOCK_PARENT,
    BREAKS,
    CELL,
    CHILDREN,
    DEPTH,
    FLAGS,
    IMAGES,
    IN_DESCRIPTION,
    INPUTS,
    LAST,
    LAST_WEIGHT,
    LINKS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    OWN_WEIGHT,
    PARENT,
    PATH,
    ROW,
    SUM_WEIGHT,
    TAG,
    TAG_START,
    TAG_STOP,
    ScannedPage,
    Vocabulary,
    read_head,
)
from forebay.prepare.extract.tags import (
    BLOCK,
    CELLS,
    CUSTOM,
    FOREIGN,
    HEADING,
    HIDDEN,
    ITEM,
    PRE,
    RAW,
    ROOT,
    ROWS,
    SCOPE,
    SECTION,
    SKIP,
    TAGS,
    TERM,
    VOID,
    reference_table,
    tag_tables,
)
from forebay.prepare.extract.text import (
    AT_ELEMENT,
    BR,
    GAP_TAGS,
    IN_LINK,
    IN_PRE,
    IN_WORD,
    NUM_BLOCKS,
    OPEN,
    PENDING,
    POS,
    close_block,
    end_word,
    head_table,
    put,
    put_formula,
    put_next,
)
from forebay.prepare.filters.points import find, hash_end, hash_step, look_up
from forebay.prepare.filters.word_tables import character_table

MAX_DEPTH = 512
MAX_ROWS = 100_000

_P, _A, _BR, _HR, _IMG, _INPUT, _TABLE, _BODY, _HTML, _OPTION, _MATH, _SCRIPT = (
    TAGS[tag] for tag in ("p", "a", "br", "hr", "img", "input", "table", "body", "html", "option", "math", "script")
)


def scan_page(html: bytes, class_words: Vocabulary, text_words: Vocabulary) -> ScannedPage:
    """Scan a page, which must be valid UTF-8."""
    data = np.frombuffer(html, np.uint8)
    rows = min(html.count(b"<") + 2, MAX_ROWS)
    elements, weights = np.zeros((rows, TAG_STOP + 1), np.int64), np.zeros((rows, LAST_WEIGHT + 1), np.float32)
    blocks, block_weights = np.zeros((rows, LAST + 1), np.int64), np.zeros((rows, IN_DESCRIPTION + 1), np.float32)
    text = np.empty(2 * len(data) + 64, np.uint8)
    (tag_keys, tag_numbers), bits, flags = tag_tables()
    (ref_keys, ref_numbers), ref_points, windows = reference_table()
    tags = (tag_keys, tag_numbers, bits, flags)
    references = (ref_keys, ref_numbers, ref_points, windows)
    title, description, kinds = read_head(html)
    words = (text_words, *head_table(title, description, character_table()))
    counts = _scan(
        data, tags, references, class_words, words, character_table(), elements, weights, blocks, block_weights, text
    )
    return ScannedPage(text[: counts[2]], elements[: counts[0]], weights[: counts[0]], blocks[: counts[1]],
                block_weights[: counts[1]], kinds)  # fmt: skip


@jit()
def _find_end(data, i, name_start, name_stop):  # type: ignore[no-untyped-def]
    """Where the end tag of a raw text element begins, or -1."""
    n = len(data)
    size = name_stop - name_start
    while i + size + 2 < n:
        if data[i] == 60 and data[i + 1] == 47:
            k = 0
            while k < size and data[i + 2 + k] | 32 == data[name_start + k] | 32:
                k += 1
            if k == size:
                return i
        i += 1
    return -1


@jit()
def _skip_declaration(data, i):  # type: ignore[no-untyped-def]
    """Where a comment, a declaration or a nameless end tag that begins at byte i ends."""
    n = len(data)
    if i + 3 < n and data[i + 1] == 33 and data[i + 2] == 45 and data[i + 3] == 45:
        i += 4
        if i < n and data[i] == 62:  # <!-->
            return i + 1
        i -= 2
        while i + 2 < n and not (data[i] == 45 and data[i + 1] == 45 and data[i + 2] == 62):
            i += 1
        return min(n, i + 3)
    return find(data, i, n, 62) + 1


@jit()
def _read_tag(data, i, tag_keys, tag_numbers):  # type: ignore[no-untyped-def]
    """The number of the tag whose name begins at byte i (0: unknown, CUSTOM: with a hyphen), and the name's end."""
    h, hyphen = np.uint64(0), False
    while i < len(data) and data[i] > 32 and data[i] != 62 and data[i] != 47:
        hyphen = hyphen or data[i] == 45
        h = hash_step(h, data[i] | 32 if 65 <= data[i] <= 90 else data[i])
        i += 1
    tag = np.int64(look_up(tag_keys, tag_numbers, hash_end(h)))
    if tag < 0:
        tag = np.int64(CUSTOM) if hyphen else np.int64(0)
    return tag, i


@jit()
def _open_level(tag, tag_bits, stack_tags, top):  # type: ignore[no-untyped-def]
    """The level of the open element that an end tag closes; 0 if there is none within the same cell or table."""
    in_table = tag == _TABLE or tag_bits[tag] & (CELLS | ROWS | SECTION)
    level = top
    while level > 0 and stack_tags[level] != tag:
        other = stack_tags[level]
        if other == _TABLE or (not in_table and tag_bits[other] & CELLS):
            return 0
        level -= 1
    return level


@jit()
def _implied_end(tag, tag_bits, stack_tags, top):  # type: ignore[no-untyped-def]
    """The level of the open element that the start of a block ends, as its end tag may be left out; 0 if none."""
    bits = tag_bits[tag]
    level, first = top, 0
    if bits & ITEM:
        while level > max(0, top - 64):
            other = tag_bits[stack_tags[level]]
            if stack_tags[level] == tag or (bits & TERM and other & TERM):
                return level
            if other & SCOPE:
                return 0
            level -= 1
    elif bits & (CELLS | ROWS | SECTION):
        while level > 0 and stack_tags[level] != _TABLE:
            other = tag_bits[stack_tags[level]]
            if other & CELLS or (other & ROWS and not bits & CELLS) or (other & SECTION and bits & SECTION):
                first = level
            level -= 1
    else:
        while level > 0 and not tag_bits[stack_tags[level]] & BLOCK:
            level -= 1
        if level > 0 and (stack_tags[level] == _P or (bits & HEADING and tag_bits[stack_tags[level]] & HEADING)):
            first = level
    return first


@jit()
def _pop(level, top, stack_tags, num_open, s):  # type: ignore[no-untyped-def]
    """Close the open elements from `level` on; returns the new top of the stack."""
    while top >= level:
        if stack_tags[top]:
            num_open[stack_tags[top]] -= 1
            if stack_tags[top] == _A:
                s[IN_LINK] = 0
        top -= 1
    return top


@jit()
def _add_element(element, parent, tag, flags, total, tag_bits, tag_flags, elements, weights):  # type: ignore[no-untyped-def]
    bits = tag_bits[tag]
    row, up = elements[element], elements[parent]
    own = np.int64(total[2]) | tag_flags[tag] | flags
    row[PARENT] = parent
    row[TAG] = tag
    row[FLAGS] = up[FLAGS] | own
    row[DEPTH] = up[DEPTH] + 1
    row[PATH] = ((up[PATH] * 31 + tag) * 1000003 + np.int64(total[3]) + (flags & HIDDEN)) & 0x7FFFFFFFFFFF
    row[ROW] = element if bits & ROWS else 0 if tag == _TABLE else up[ROW]
    row[CELL] = element if bits & CELLS else 0 if tag == _TABLE else up[CELL]
    row[BLOCK_PARENT] = parent if tag_bits[up[TAG]] & BLOCK or parent == 0 else up[BLOCK_PARENT]
    up[CHILDREN] += 1
    w, pw = weights[element], weights[parent]
    weight = np.float32(total[0] / total[1]) if total[1] else np.float32(0)
    w[OWN_WEIGHT] = weight
    w[SUM_WEIGHT] = pw[SUM_WEIGHT] * np.float32(0.7) + weight
    w[MIN_WEIGHT] = min(pw[MIN_WEIGHT], weight)
    w[MAX_WEIGHT] = max(pw[MAX_WEIGHT], weight)
    w[LAST_WEIGHT] = weight if total[1] else pw[LAST_WEIGHT]


@jit()
def _close_element(tag, tag_bits, stack, stack_tags, top, num_open, elements, s):  # type: ignore[no-untyped-def]
    """Close the open element that an end tag ends, if there is one; the new top of the stack."""
    if num_open[tag] == 0 or tag == 0 or tag_bits[tag] & ROOT:
        return top
    level = _open_level(tag, tag_bits, stack_tags, top)
    if level == 0:
        return top
    if tag_bits[tag] & BLOCK:
        top = _pop(level, top, stack_tags, num_open, s)
    else:
        num_open[tag] -= 1
        stack_tags[level] = 0
        if tag == _A:
            s[IN_LINK] = 0
    while top > 0 and stack_tags[top] == 0:
        top -= 1
    s[AT_ELEMENT] = stack[top]
    s[IN_PRE] = elements[stack[top], FLAGS] & PRE
    return top


@jit()
def _end_link(stack_tags, top, num_open):  # type: ignore[no-untyped-def]
    """Close the open link, which a link within it ends; the new top of the stack."""
    k = top
    while k > 0 and stack_tags[k] != _A:
        k -= 1
    stack_tags[k] = 0
    num_open[_A] -= 1
    while top > 0 and stack_tags[top] == 0:
        top -= 1
    return top


@jit()
def _break_line(sink):  # type: ignore[no-untyped-def]
    s, _, blocks, block_weights, words, _ = sink
    if s[OPEN] >= 0:
        s[BR] += 1
        if s[IN_WORD]:
            end_word(s, words, block_weights)
            s[IN_WORD] = 0
        blocks[s[OPEN], BREAKS] += 1
        if s[BR] >= 2 and not s[IN_PRE]:
            close_block(sink)
        else:
            s[PENDING] = 2


@jit()
def _scan(  # type: ignore[no-untyped-def]
    data, tags, references, class_words, words, chars, elements, weights, blocks, block_weights, out
):
    tag_keys, tag_numbers, tag_bits, tag_flags = tags
    n = len(data)
    s = np.zeros(12, np.int64)
    s[OPEN] = -1
    sink = s, out, blocks, block_weights, words, chars
    stack, stack_tags = np.zeros(MAX_DEPTH + 1, np.int64), np.zeros(MAX_DEPTH + 1, np.int64)
    num_open, no_end = np.zeros(CUSTOM + 1, np.int64), np.zeros(CUSTOM + 1, np.bool_)
    total = np.zeros(7, np.float64)
    top, num_elements, deeper = 0, 1, 0
    skip, skip_depth = np.int64(0), 0
    i = 0
    while i < n:
        if data[i] != 60:
            if skip:
                i += 1
                continue
            i = put_next(data, i, n, references, sink)
            continue
        following = data[i + 1] if i + 1 < n else np.uint8(0)
        is_end = following == 47
        name = i + 2 if is_end else i + 1
        first = data[name] | 32 if name < n else 0
        if not 97 <= first <= 122:
            if following == 33 or following == 63 or is_end:
                i = _skip_declaration(data, i)
            else:
                if not skip:
                    put(np.int64(60), sink)
                i += 1
            continue
        tag, j = _read_tag(data, name, tag_keys, tag_numbers)
        total[:] = 0
        if tag == CUSTOM:
            read_class_words(data, name, j, class_words, total)
        flags, link, i = read_attributes(data, j, class_words, total)
        bits = tag_bits[tag]
        s[GAP_TAGS] += 1
        if skip:
            if tag == skip:
                skip_depth += -1 if is_end else 1
            foreign = tag_bits[skip] & FOREIGN
            if skip_depth <= 0 or (foreign and bits & BLOCK and not is_end and tag not in (_OPTION, CUSTOM)):
                skip = np.int64(0)
            if skip or tag == skip or is_end:
                continue
        if is_end:
            if bits & BLOCK:
                close_block(sink)
            if deeper and bits & BLOCK:
                deeper -= 1
            else:
                top = _close_element(tag, tag_bits, stack, stack_tags, top, num_open, elements, s)
            continue
        if tag == _BR:
            _break_line(sink)
            continue
        if tag == 0 or tag == _HTML or (tag == _BODY and num_open[_BODY]):
            continue
        if bits & BLOCK:
            close_block(sink)
            implied = _implied_end(tag, tag_bits, stack_tags, top)
            if implied:
                top = _pop(implied, top, stack_tags, num_open, s)
        elif tag == _HR:
            close_block(sink)
        parent = stack[top]
        if bits & VOID:
            if tag == _IMG:
                elements[parent, IMAGES] += 1
            elif tag == _INPUT:
                elements[parent, INPUTS] += 1
            continue
        if bits & RAW:
            end = -1 if no_end[tag] else _find_end(data, i, name, j)
            no_end[tag] |= end < 0
            if end >= 0:
                if tag == _SCRIPT and total[6]:
                    put_formula(data, i, end, references, sink)
                i = _skip_declaration(data, end)
            continue
        if bits & SKIP:
            if tag == _MATH and total[5] > total[4]:
                start, stop = np.int64(total[4]), np.int64(total[5])
                put_formula(data, start, stop, references, sink)
            if data[i - 2] != 47 and (tag != _MATH or total[5] > total[4]):
                skip, skip_depth = tag, 1
            continue
        if tag == _A:
            if s[IN_LINK]:
                top = _end_link(stack_tags, top, num_open)
                parent = stack[top]
            if not link:
                continue
            if s[OPEN] >= 0:
                blocks[s[OPEN], LINKS] += 1
        if top >= MAX_DEPTH - 1 or num_elements >= len(elements):
            deeper += 1 if bits & BLOCK else 0
            continue
        element = num_elements
        num_elements += 1
        _add_element(element, parent, tag, flags, total, tag_bits, tag_flags, elements, weights)
        elements[element, TAG_START], elements[element, TAG_STOP] = name, i
        top += 1
        stack[top], stack_tags[top] = element, tag
        num_open[tag] += 1
        s[AT_ELEMENT] = element
        s[IN_PRE] = elements[element, FLAGS] & PRE
        if tag == _A:
            s[IN_LINK] = 1
    close_block(sink)
    return num_elements, s[NUM_BLOCKS], s[POS]
