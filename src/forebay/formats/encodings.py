"""Which encoding the bytes of a text file are in, where they are not UTF-8: `find_encoding(first bytes)`.

Hides: byte order marks, UTF-16 without one, and when damaged UTF-8 is not mistaken for another encoding. Uses
resiliparse (uchardet), 0.1 ms for 64 KiB; without that package only UTF-16 and UTF-32 are recognized.
"""

from __future__ import annotations

import codecs

SAMPLE_BYTES = 64 << 10
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_CONTROLS = bytes((*range(7), *range(14, 27), *range(28, 32), 127))
_TYPOGRAPHY = frozenset("‘’‚“”„–—…«»‹›°§£€©®™·•¡¿ ´¨º¹²³½¼")


def find_encoding(sample: bytes) -> str:
    """The encoding of text, by Python's name; "" if it is UTF-8 (perhaps damaged), or no text."""
    for mark, marked in _MARKS:
        if sample.startswith(mark):
            return marked
    if b"\0" in sample:
        return _utf_16(sample)
    as_utf8 = _decode(sample, "utf-8", "replace")
    damaged = as_utf8.count("\ufffd")
    if not damaged or sum(c > "\x7f" for c in as_utf8) >= 2 * damaged:  # Most of what is not ASCII is valid UTF-8.
        return ""
    if len(sample) - len(sample.translate(None, _CONTROLS)) > len(sample) // 50:
        return ""
    try:
        from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

        name: str = map_encoding_to_html5(detect_encoding(sample) or "") or ""
        return name if _is_plausible(_decode(sample, name, "strict")) else ""
    except (ImportError, LookupError, UnicodeDecodeError):
        return ""


def _utf_16(sample: bytes) -> str:
    """UTF-16 without a mark, of text that is mostly ASCII: every other byte is zero."""
    pairs = len(sample) // 2
    low, high = sample[: 2 * pairs : 2].count(0), sample[1 : 2 * pairs : 2].count(0)
    if min(low, high) * 50 > pairs or max(low, high) * 2 < pairs:
        return ""
    return "utf-16-le" if high > low else "utf-16-be"


def _decode(sample: bytes, name: str, errors: str) -> str:
    """The sample as text; it may end within a character."""
    return codecs.getincrementaldecoder(name)(errors).decode(sample)


def _is_plausible(text: str) -> bool:
    """Whether what is not ASCII is letters beside letters, or typography: a stray byte in a file is neither."""
    others = [i for i, c in enumerate(text) if c > "\x7f"]
    good = sum(text[i] in _TYPOGRAPHY or (text[i].isalpha() and _is_beside_letter(text, i)) for i in others)
    return 10 * good >= 8 * len(others)


def _is_beside_letter(text: str, i: int) -> bool:
    return text[i - 1 : i].isalpha() or text[i + 1 : i + 2].isalpha()
