"""Finds e-mail and IP addresses, IBANs, payment cards and telephone numbers in one compiled pass.

Each grammar is tried only at its trigger (`@`, `:`, the first digit of a run, `+`, `(`) and examines a bounded number
of bytes around it (64 before an `@`, 255 after; 8 groups of digits), so that the pass is linear in any text.
"""

import functools
import ipaddress
from typing import Any

import numpy as np

from forebay.arrays import I64, U8
from forebay.prepare.clean.pii_phone import MAYBE, alnum, can_end, digit, letter, phone
from forebay.prepare.compiled import Kernel, jit

EMAIL, IPV4, IPV6, IBAN, CARD, PHONE, MAYBE_PHONE = range(7)
PUBLIC_ONLY = 1 << 8  # Among the wanted kinds: leave private, loopback, documentation and multicast addresses.
MIN_SPAN_BYTES = 6  # No span is shorter: `a@b.co`.

_IBAN_COUNTRIES = (
    "15 NO; 16 BE; 18 DK FI FK FO GL NL SD; 19 MK SI; 20 AT BA EE KZ LT LU MN XK; 21 CH HR LI LV; 22 BG BH CR DE "
    "GB GE IE ME RS VA; 23 AE GI IL IQ OM SO TL; 24 AD CZ ES MD PK RO SA SE SK TN VG; 25 LY PT ST; 26 IS TR; 27 "
    "BI DJ FR GR IT MC MR SM; 28 AL AZ BY CY DO GT HN HU LB NI PL SV; 29 BR EG PS QA UA; 30 JO KW MU YE; 31 MT "
    "SC; 32 LC; 33 RU"
)
"""Countries by length. Source: the IBAN registry of ISO 13616."""


@functools.cache
def iban_table() -> U8:
    """uint8 [676]: the length by the country's two letters in base 26; 0 for none."""
    table = np.zeros(676, np.uint8)
    for entry in _IBAN_COUNTRIES.split(";"):
        length, *countries = entry.split()
        for country in countries:
            table[(ord(country[0]) - 65) * 26 + ord(country[1]) - 65] = int(length)
    return table


@jit()
def _hex(b):  # type: ignore[no-untyped-def]
    if 48 <= b <= 57:
        return b - 48
    return (b | 32) - 87 if 97 <= (b | 32) <= 102 else -1


@jit()
def _email(data, free, stop, pos):  # type: ignore[no-untyped-def]
    start = pos
    while start > free and pos - start < 64:
        b = data[start - 1]
        if not (alnum(b) or b == 46 or b == 95 or b == 45 or b == 43 or b == 37 or b == 39 or b == 38):
            break
        start -= 1
    while start < pos and not (alnum(data[start]) or data[start] == 95):  # it begins with no dot, quote or dash
        start += 1
    if start == pos or data[pos - 1] == 46:
        return pos, pos
    end, label, i, letters, labels = pos, pos + 1, pos + 1, True, 0
    limit = min(stop, pos + 256)
    while i < limit:
        b = data[i]
        if alnum(b) or b == 45:
            letters = letters and letter(b)
            i += 1
            if i < limit:
                continue
        length = i - label
        if length == 0 or length > 63 or data[label] == 45 or data[i - 1] == 45:
            break
        labels += 1
        if labels > 1 and letters and 2 <= length <= 24:
            end = i
        if i >= limit or data[i] != 46:
            break
        i += 1
        label, letters = i, True
    return (start, end) if end > pos else (pos, pos)


def _networks(text: str) -> I64:
    """int64 [networks, 2]: the leading bits of each network, and by how much the first 32 of an address are shifted."""
    networks = [ipaddress.ip_network(network) for network in text.split()]
    return np.array([(int(n[0]) >> (n.max_prefixlen - n.prefixlen), 32 - n.prefixlen) for n in networks], np.int64)


_PRIVATE4 = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_PRIVATE6 = _networks("::/16 64::/16 100::/16 2001::/23 2001:db8::/32 fc00::/7 fe80::/9 ff00::/8")
"""Addresses that are no public hosts. Source: IANA's special-purpose registry (RFC 6890 and its updates)."""


@jit()
def _is_private(address, networks):  # type: ignore[no-untyped-def]
    for k in range(len(networks)):  # noqa: SIM110 - numba has no generators here
        if address >> networks[k, 1] == networks[k, 0]:
            return True
    return False


@jit()
def _ipv4(data, start, stop, i, public):  # type: ignore[no-untyped-def]
    if i > start and (alnum(data[i - 1]) or data[i - 1] == 46 or data[i - 1] == 95):
        return i
    address, pos = 0, i
    for octet in range(4):
        value, digits = 0, 0
        while pos < stop and digits < 4 and digit(data[pos]):
            value = value * 10 + data[pos] - 48
            pos += 1
            digits += 1
        if digits == 0 or digits > 3 or value > 255 or (digits > 1 and data[pos - digits] == 48):
            return i
        address = address << 8 | value
        if octet < 3:
            if pos >= stop or data[pos] != 46:
                return i
            pos += 1
    if pos < stop and (alnum(data[pos]) or data[pos] == 95):
        return i
    if pos + 1 < stop and data[pos] == 46 and digit(data[pos + 1]):
        return i
    return i if public and _is_private(address, _PRIVATE4) else pos


@jit()
def _ipv6(data, free, stop, colon, public):  # type: ignore[no-untyped-def]
    """The IPv6 address whose first colon is at `colon`, or an empty span.

    A group has three digits or more: `01:02:03:04:05:06:07:08` is a hardware address. With `::` it begins with what is
    given to hosts (2000::/3), or is private: `face::bead` is a C++ name.
    """
    start = colon
    while start > free and colon - start < 5 and _hex(data[start - 1]) >= 0:
        start -= 1
    if colon - start == 0 or colon - start > 4:  # those that begin with :: are loopback, mapped, unspecified
        return colon, colon
    if start > free and (
        alnum(data[start - 1]) or data[start - 1] == 46 or data[start - 1] == 58 or data[start - 1] == 95
    ):
        return colon, colon
    pos, end, groups, gap, digits, longest, first, second = start, start, 0, False, False, 0, 0, 0
    while groups < 8:
        value, length = 0, 0
        while pos < stop and length < 5 and _hex(data[pos]) >= 0:
            value = value * 16 + _hex(data[pos])
            digits = digits or digit(data[pos])
            pos += 1
            length += 1
        if length == 0 or length > 4:
            break
        if groups == 0:
            first = value
        elif groups == 1 and not gap:
            second = value
        longest = max(longest, length)
        groups += 1
        end = pos
        if pos + 1 < stop and data[pos] == 58 and data[pos + 1] == 58 and not gap:
            gap = True
            pos += 2
            end = pos
        elif pos < stop and data[pos] == 58 and groups < 8:
            pos += 1
        else:
            break
    hosts = not gap or first >> 13 == 1 or _is_private(first << 16 | second, _PRIVATE6)
    complete = longest > 2 and digits and hosts and (groups == 8) != gap
    if end < stop and (
        alnum(data[end])
        or data[end] == 95
        or (end + 1 < stop and (data[end] == 46 or data[end] == 58) and (alnum(data[end + 1]) or data[end + 1] == 58))
    ):
        return colon, colon
    return (
        (start, end) if complete and not (public and _is_private(first << 16 | second, _PRIVATE6)) else (colon, colon)
    )


@jit()
def _iban(data, free, stop, i, lengths):  # type: ignore[no-untyped-def]
    """Where the IBAN ends whose check digits begin at i, or i. Source: ISO 13616; ISO 7064 (mod 97-10)."""
    if i - 2 < free or not (letter(data[i - 1]) and letter(data[i - 2])):
        return i
    if i - 3 >= free and (alnum(data[i - 3]) or data[i - 3] == 95):
        return i
    length = lengths[((data[i - 2] | 32) - 97) * 26 + (data[i - 1] | 32) - 97]
    if length == 0:
        return i
    pos, count, rest, head = i - 2, 0, 0, 0
    while count < length:
        if pos >= stop:
            return i
        b = data[pos]
        if (b == 32 or b == 45) and count % 4 == 0 and count > 0 and data[pos - 1] != b:
            pos += 1
            continue
        if not alnum(b) or (2 <= count < 4 and not digit(b)):
            return i
        value = b - 48 if digit(b) else (b | 32) - 87
        if count < 4:
            head = head * (10 if value < 10 else 100) + value
        else:
            rest = (rest * (10 if value < 10 else 100) + value) % 97
        pos += 1
        count += 1
    if pos < stop and (alnum(data[pos]) or data[pos] == 95):
        return i
    return pos if (rest * 1000000 + head) % 97 == 1 else i


_ISSUERS = (
    "4000-4999 13 13; 4000-4999 16 16; 4000-4999 19 19; "  # Visa
    "5100-5599 16 16; 2221-2720 16 16; 2200-2204 16 16; "  # Mastercard, Mir
    "3400-3499 15 15; 3700-3799 15 15; "  # American Express
    "3500-3599 16 19; 2131-2131 15 15; 1800-1800 15 15; "  # JCB, which is given 3528 to 3589; others are seen
    "3600-3699 14 19; 3800-3999 14 19; 3000-3059 14 19; 3095-3095 14 19; "  # Diners Club
    "6200-6299 16 19; 6440-6599 16 19; 6000-6099 16 19; "  # UnionPay, Discover, RuPay
    "5018-5018 12 19; 5020-5020 12 19; 5038-5038 12 19; 6304-6304 12 19; 5600-5899 12 19; 6700-6799 12 19"  # Maestro
)
"""The first four digits of cards, and their lengths. Source: ISO/IEC 7812 issuer ranges as networks publish them."""
_CARDS = np.array([entry.replace("-", " ").split() for entry in _ISSUERS.split("; ")], np.int64)


@jit()
def _issued(four, n):  # type: ignore[no-untyped-def]
    """Return whether cards of n digits begin with these four."""
    for k in range(len(_CARDS)):  # noqa: SIM110 - numba has no generators here
        if _CARDS[k, 0] <= four <= _CARDS[k, 1] and _CARDS[k, 2] <= n <= _CARDS[k, 3]:
            return True
    return False


@jit()
def _card(data, start, stop, i):  # type: ignore[no-untyped-def]
    """Where the payment card number that begins at i ends, or i: 12 to 19 digits in one, or 4-4-4-4, 4-6-5, 4-6-4."""
    if i > start and (
        alnum(data[i - 1]) or data[i - 1] == 43 or data[i - 1] == 45 or data[i - 1] == 46 or data[i - 1] == 95
    ):
        return i
    pos, n, group, groups, shape, sep, four = i, 0, 0, 0, 0, 0, 0
    odd, even = 0, 0  # Luhn's sums with the digits at odd, or even, places doubled
    while pos < stop and n < 20:
        b = data[pos]
        if digit(b):
            value = b - 48
            twice = value * 2 - 9 if value > 4 else value * 2
            odd, even = (odd + twice, even + value) if n % 2 else (odd + value, even + twice)
            four = four * 10 + value if n < 4 else four
            n += 1
            group += 1
            pos += 1
            continue
        if groups > 3 or (group != 4 and group != 6) or (b != 32 and b != 45) or (sep != 0 and b != sep):
            break
        if pos + 1 >= stop or not digit(data[pos + 1]) or n == 16:  # what follows is its date or check number
            break
        shape = shape * 10 + group
        sep, group = b, 0
        groups += 1
        pos += 1
    shape = shape * 10 + group
    if (groups and shape != 4444 and shape != 465 and shape != 464) or n < 12 or n > 19:
        return i
    if not can_end(data, stop, pos) or (even if n % 2 == 0 else odd) % 10 != 0:
        return i
    return pos if _issued(four, n) else i


@jit()
def _address(data, start, free, stop, i, wanted_bits, lengths, groups):  # type: ignore[no-untyped-def]
    """The kind, start and end of the IPv4 address at i; an empty span if it is none."""
    if digit(data[i]) and wanted_bits & (1 << IPV4):
        return IPV4, i, _ipv4(data, start, stop, i, wanted_bits & PUBLIC_ONLY != 0)
    return 0, i, i


@jit()
def _number(data, start, free, stop, i, wanted_bits, lengths, groups):  # type: ignore[no-untyped-def]
    """The kind, start and end of the number at i, its first digit, `+` or `(`; an empty span if it is none."""
    kind, first, end = _address(data, start, free, stop, i, wanted_bits, lengths, groups)
    if end > first:
        return kind, first, end
    if digit(data[i]):
        if wanted_bits & (1 << IBAN):
            end = _iban(data, free, stop, i, lengths)
            if end > i:
                return IBAN, i - 2, end
        if wanted_bits & (1 << CARD):
            end = _card(data, start, stop, i)
            if end > i:
                return CARD, i, end
    if wanted_bits & (1 << PHONE):
        shape, end = phone(data, start, stop, i, groups)
        if end > i:
            return MAYBE_PHONE if shape == MAYBE else PHONE, i, end
    return 0, i, i


def _scan_with(number: Kernel) -> Any:
    """Return a kernel that finds e-mail and IPv6 addresses, and with `number` what begins with a digit, `+` or `(`.

    It writes the spans of all rows to `starts`, `stops`, `kinds` [data bytes // MIN_SPAN_BYTES + 1] and returns how
    many they are; they ascend and do not overlap. `wanted_bits`: the sum of `1 << kind`, and PUBLIC_ONLY; `lengths`:
    `iban_table()`.
    """

    @jit()
    def scan(offsets, data, wanted_bits, lengths, starts, stops, kinds):  # type: ignore[no-untyped-def]
        n, groups = 0, np.zeros((3, 8), np.int64)
        for row in range(len(offsets) - 1):
            start, stop = offsets[row], offsets[row + 1]
            free = i = start
            while i < stop:
                b = data[i]
                if b > 64 or b < 40:  # a letter or a space: most bytes
                    i += 1
                    continue
                kind, first, end = 0, i, i
                if b == 64:
                    if wanted_bits & (1 << EMAIL):
                        first, end = _email(data, free, stop, i)
                elif b == 58:
                    if wanted_bits & (1 << IPV6):
                        kind = IPV6
                        first, end = _ipv6(data, free, stop, i, wanted_bits & PUBLIC_ONLY != 0)
                elif b == 43 or b == 40 or 48 <= b <= 57:
                    kind, first, end = number(data, start, free, stop, i, wanted_bits, lengths, groups)
                if end > first:
                    starts[n], stops[n], kinds[n] = first, end, kind
                    n += 1
                    free = i = end
                    continue
                i += 1
                if 48 <= b <= 57:
                    while i < stop and digit(data[i]):
                        i += 1
        return n

    return scan


scan_addresses, scan_all = _scan_with(_address), _scan_with(_number)
