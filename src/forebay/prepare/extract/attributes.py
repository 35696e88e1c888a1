"""Attributes of a start tag, in compiled code: words that say what an element is for, links, what hides it, TeX."""

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.extract.tags import ARIA_HIDDEN, HIDDEN, HIDDEN_ATTRIBUTE
from forebay.prepare.filters.points import find, hash_end, hash_step, look_up, starts_with


def _name(text: str) -> int:
    """The hash that `_attributes` gives to an attribute's name."""
    h = 0
    for char in text.encode():
        h = (h * 131 + char) & 0xFFFFFFFF
    return h


_CLASS, _HREF, _HIDE, _ARIA_HIDDEN, _STYLE, _ALTTEXT, _TYPE_OF = (
    _name(n) for n in ("class", "href", "hidden", "aria-hidden", "style", "alttext", "type")
)
NAMING = "class id role itemprop itemtype aria-label data-testid data-test-id data-component data-qa data-type"
"""Attributes whose words say what an element is for."""
_NAMING = np.array([_name(name) for name in NAMING.split()], np.int64)


@jit()
def read_class_words(data, start, stop, words, total):  # type: ignore[no-untyped-def]
    """Add the words of an attribute's value (`postBody main-text` has four) to `total`: weight, count and flags."""
    h, n = np.uint64(0), 0
    before = np.uint8(0)
    for i in range(start, stop + 1):
        c = data[i] if i < stop else np.uint8(32)
        letter = 97 <= c | 32 <= 122
        if n and (not letter or (c <= 90 and before > 90)):
            if 2 <= n <= 24:
                number = look_up(words.keys, words.numbers, hash_end(h))
                if number >= 0:
                    total[0] += words.weights[number]
                    total[1] += 1
                    total[2] = np.float64(np.int64(total[2]) | words.flags[number])
            h, n = np.uint64(0), 0
        if letter:
            h = hash_step(h, c | 32)
            n += 1
        before = c


@jit()
def _contains(data, start, stop, word):  # type: ignore[no-untyped-def]
    for i in range(start, stop):  # noqa: SIM110 - numba has no generators here
        if starts_with(data, i, stop, word):
            return True
    return False


_TEX, _TRUE, _DISPLAY, _NONE, _VISIBILITY, _HIDDEN = (
    np.frombuffer(word, np.uint8) for word in (b"math/tex", b"true", b"display", b"none", b"visibility", b"hidden")
)
_HIDING = ((_DISPLAY, _NONE), (_VISIBILITY, _HIDDEN))


@jit()
def read_attributes(data, i, words, total):  # type: ignore[no-untyped-def]
    """Parse attributes up to `>`; adds class words to `total`; returns flags, whether there is a link, and the end."""
    n = len(data)
    flags, link = 0, False
    while i < n:
        c = data[i]
        if c == 62:
            return flags, link, i + 1
        if c <= 32 or c == 47:
            i += 1
            continue
        h = 0
        while i < n and data[i] > 32 and data[i] != 61 and data[i] != 62 and data[i] != 47:
            h = (h * 131 + (data[i] | 32 if 65 <= data[i] <= 90 else data[i])) & 0xFFFFFFFF
            i += 1
        if i < n and data[i] == 61 and h == 0:
            i += 1
            continue
        j = i
        while j < n and data[j] <= 32:
            j += 1
        start = stop = i
        if j < n and data[j] == 61:
            j += 1
            while j < n and data[j] <= 32:
                j += 1
            if j < n and (data[j] == 34 or data[j] == 39):
                quote = data[j]
                start = j + 1
                stop = find(data, start, n, quote)
                i = stop + 1
            else:
                start = stop = j
                while stop < n and data[stop] > 32 and data[stop] != 62:
                    stop += 1
                i = stop
        naming = False
        for named in _NAMING:
            naming = naming or h == named
        if naming:
            read_class_words(data, start, min(stop, start + 512), words, total)
            if h == _CLASS:
                for k in range(start, min(stop, start + 512)):
                    total[3] = np.float64((np.int64(total[3]) * 31 + data[k]) & 0xFFFFFFFF)
        elif h == _HREF:
            link = True
        elif h == _ALTTEXT:
            total[4], total[5] = start, stop
        elif h == _TYPE_OF:
            total[6] = _contains(data, start, min(stop, start + 8), _TEX)
        elif h == _HIDE:
            flags |= HIDDEN_ATTRIBUTE
        elif h == _ARIA_HIDDEN:
            if _contains(data, start, min(stop, start + 8), _TRUE):
                flags |= ARIA_HIDDEN
        elif h == _STYLE:
            stop = min(stop, start + 512)
            for k in range(start, stop):
                for name, value in _HIDING:
                    if data[k] == 58 and _contains(data, max(start, k - len(name) - 1), k, name):
                        flags |= HIDDEN * _contains(data, k, min(stop, k + len(value) + 3), value)
    return flags, link, n
