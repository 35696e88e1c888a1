"""Finds telephone numbers: groups of digits whose number, lengths and separators some country writes so.

`SURE` shapes are those that little else has: a `+` or 00 and 8 to 15 digits, North America's 3-3-4, a prefix in
brackets, a trunk 0 and 9 to 11 digits. Other groups of 7 to 12 digits are `MAYBE`: the caller looks for a word such as
`call` before them.
"""

from forebay.prepare.compiled import jit

SURE, MAYBE = 1, 2
LENGTH, SEPARATOR, END = range(3)


@jit()
def digit(b):  # type: ignore[no-untyped-def]
    return 48 <= b <= 57


@jit()
def letter(b):  # type: ignore[no-untyped-def]
    return 97 <= (b | 32) <= 122


@jit()
def alnum(b):  # type: ignore[no-untyped-def]
    return 48 <= b <= 57 or 97 <= (b | 32) <= 122


@jit()
def can_end(data, stop, pos):  # type: ignore[no-untyped-def]
    """Whether a number may end at `at`: no letter, digit or decimal follows."""
    if pos >= stop:
        return pos == stop
    b = data[pos]
    if alnum(b) or b == 95 or b == 64 or b == 37:
        return False
    return not (pos + 1 < stop and (44 <= b <= 47 or b == 58) and digit(data[pos + 1]))


@jit()
def _separated(data, stop, pos):  # type: ignore[no-untyped-def]
    """The separator at `at` and where the group after it begins; (0, at) if no group follows."""
    sep, after = 0, pos
    if pos < stop and (data[pos] == 32 or 45 <= data[pos] <= 47):
        sep, after = int(data[pos]), pos + 1
    elif pos + 1 < stop and data[pos] == 0xC2 and data[pos + 1] == 0xA0:  # no-break space
        sep, after = 32, pos + 2
    elif pos + 2 < stop and data[pos] == 0xE2 and data[pos + 1] == 0x80 and 0x90 <= data[pos + 2] <= 0x93:  # dashes
        sep, after = 45, pos + 3
    if after + 2 < stop and data[after - 1] == 32 and data[after] == 45 and data[after + 1] == 32:  # " - "
        sep, after = 45, after + 2
    if after < stop and digit(data[after]):
        return (sep if sep else 41), after  # 41: nothing stands between, but the end of brackets
    if after + 1 < stop and sep and data[after] == 40 and digit(data[after + 1]):
        return sep, after
    return 0, pos


@jit()
def _groups(data, stop, pos, groups):  # type: ignore[no-untyped-def]
    n, total, sep = 0, 0, 0
    while n < 8:
        bracket = pos < stop and data[pos] == 40
        first = pos = pos + 1 if bracket else pos
        while pos < stop and pos - first < 16 and digit(data[pos]):
            pos += 1
        length = pos - first
        if length == 0 or total + length > 15:
            break
        if bracket:
            if pos >= stop or data[pos] != 41 or length > 5:
                break
            pos += 1
        total += length
        groups[LENGTH, n], groups[SEPARATOR, n], groups[END, n] = length, sep, pos
        n += 1
        sep, pos = _separated(data, stop, pos)
        if sep == 0:
            break
    return n


@jit()
def _shape(data, i, n, total, groups):  # type: ignore[no-untyped-def]
    """Whether the first n groups, of `total` digits, that begin at i make a number: 0, SURE or MAYBE."""
    lengths, bracket = groups[LENGTH], data[i] == 40
    first = i + 1 if bracket else i
    zero = data[first] == 48
    if data[i] == 43:
        return SURE if 8 <= total <= 15 and data[i + 1] != 48 and _has_length(data, i + 1, total) else 0
    if zero and data[first + 1] == 48:
        international = 10 <= total <= 15 and n > 1 and not bracket and _has_length(data, first + 2, total - 2)
        return SURE if international else 0
    for k in range(1, n):
        if lengths[k] < 2 or (groups[SEPARATOR, k] == 41 and not (k == 1 and bracket)):
            return 0
    country = 1 if n == 4 and lengths[0] == 1 and data[i] == 49 else 0
    if n - country == 3 and lengths[country] == 3 and lengths[country + 1] == 3 and lengths[country + 2] == 4:
        area = groups[END, country] - 3 - (data[groups[END, country] - 1] == 41)
        if data[area] >= 50 and data[groups[END, country + 1] - 3] >= 50:
            return SURE
    if bracket:
        return SURE if 2 <= n <= 5 and 7 <= total <= 11 and 2 <= lengths[0] <= (5 if zero else 3) else 0
    # 27.01.2023 and 2023-01-27, also before a time; 3-2-4 is how the United States write a social security number.
    dated = n >= 3 and lengths[1] <= 2 and ((lengths[0] <= 3 and lengths[2] == 4) or (lengths[0] == 4 and total == 8))
    same = True
    for k in range(2, n):
        same = same and groups[SEPARATOR, k] == groups[SEPARATOR, k - 1]
    if dated or (not same and groups[SEPARATOR, 1] != 47):
        return 0
    if zero and 2 <= n <= 5 and 9 <= total <= 11 and lengths[0] >= 2 and not _ascending(data, n, groups):
        return SURE
    if _years(data, n, groups) or _thousands(data, n, groups):
        return 0
    return MAYBE if n <= 5 and 7 <= total <= 12 else 0


@jit()
def _has_length(data, i, total):  # type: ignore[no-untyped-def]
    """Return whether an international number has a length that its country uses. Source: ITU-T E.164."""
    return total == 11 or (data[i] != 49 and data[i] != 55)  # North America, Russia and Kazakhstan


@jit()
def _ascending(data, n, groups):  # type: ignore[no-untyped-def]
    """Return whether the groups are two digits each, and ascend to at most 50: numbers of a lottery or of a list."""
    last = -1
    for k in range(n):
        end = groups[END, k]
        value = (data[end - 2] - 48) * 10 + data[end - 1] - 48
        if groups[LENGTH, k] != 2 or value <= last:
            return False
        last = value
    return last <= 50


@jit()
def _years(data, n, groups):  # type: ignore[no-untyped-def]
    if n != 2 or groups[LENGTH, 0] != 4 or groups[LENGTH, 1] != 4 or groups[SEPARATOR, 1] == 32:
        return False
    for k in range(2):
        pos = groups[END, k] - 4
        century = (data[pos] - 48) * 10 + data[pos + 1] - 48
        if not 15 <= century <= 20:
            return False
    return True


@jit()
def _thousands(data, n, groups):  # type: ignore[no-untyped-def]
    if n < 3 or groups[LENGTH, 0] > 3:
        return False
    for k in range(1, n):
        if groups[LENGTH, k] != 3 or groups[SEPARATOR, k] != 32:
            return False
    end = groups[END, n - 1]
    return bool(data[end - 1] == 48 and data[end - 2] == 48 and data[end - 3] == 48)


@jit()
def phone(data, start, stop, i, groups):  # type: ignore[no-untyped-def]
    """SURE, MAYBE or 0 for the number whose first digit, `+` or `(` is at i, and where it ends.

    The row is `[start, stop)`; `groups` (int64 [3, 8]) is written.
    """
    if i > start:
        b = data[i - 1]
        if alnum(b) or b == 43 or b == 45 or b == 46 or b == 47 or 35 <= b <= 38 or b == 61 or b == 64 or b == 95:
            return 0, i
        if b == 44 and i - 1 > start and digit(data[i - 2]):
            return 0, i
    pos = i + 1 if data[i] == 43 else i
    n = _groups(data, stop, pos, groups)
    total = 0
    for k in range(n):
        total += groups[LENGTH, k]
    while n > 0:
        end = groups[END, n - 1]
        shape = _shape(data, i, n, total, groups) if total >= 7 else 0
        if shape:
            extended = _extension(data, stop, end)
            if extended > end or can_end(data, stop, end):
                return shape, extended
        n -= 1
        total -= groups[LENGTH, n]
    return 0, i


@jit()
def _extension(data, stop, end):  # type: ignore[no-untyped-def]
    pos = end
    while pos < stop and pos - end < 2 and (data[pos] == 32 or data[pos] == 44):
        pos += 1
    if pos + 3 < stop and data[pos] | 32 == 101 and data[pos + 1] | 32 == 120 and data[pos + 2] | 32 == 116:  # ext
        pos += 3
    elif pos < stop and data[pos] | 32 == 120:  # x
        pos += 1
    else:
        return end
    while pos < stop and pos - end < 8 and (data[pos] == 46 or data[pos] == 32):
        pos += 1
    first = pos
    while pos < stop and pos - first < 7 and digit(data[pos]):
        pos += 1
    return pos if 1 <= pos - first <= 6 and (pos >= stop or not alnum(data[pos])) else end
