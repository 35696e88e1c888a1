"""What bytes without a label are: text, and in which encoding; or which kind of binary data.

An encoding is scored by how often the letters that it makes of the bytes beyond ASCII occur in a language: `_LETTERS`
has those of each, the most frequent first. A letter of no such language, of another script than the letter beside it,
a capital within a word and a quotation mark between letters count against it. Where two encodings fit, the one that
comes first wins, which is the commoner. Bytes that no encoding explains well have none. Cost: about 0.1 s a file.
"""

import codecs
import math
import re
from collections import Counter
from functools import cache

ARCHIVES = {
    b"PK\x03\x04": "a ZIP archive",
    b"PK\x05\x06": "a ZIP archive",
    b"PK\x07\x08": "a ZIP archive in parts",
    b"7z\xbc\xaf'\x1c": "a 7-Zip archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"MSCF": "a CAB archive",
    b"LZIP": "an LZIP stream",
    b"\x1f\x9d": "a stream of `compress`",
    b"\x89LZO\0": "an LZOP stream",
    b"\x02\x21\x4c\x18": "an LZ4 stream of the old format",
    b"\x82SNAPPY\0": "a Snappy stream of Java",
    b"{\\rtf": "an RTF document",
    b"%!PS": "a PostScript document",
}
"""What is to be unpacked or converted before it is read, by its first bytes."""
_BINARY = {
    b"%PDF-": "a PDF document",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x7fELF": "a program",
}
_LETTERS = {
    "cp1252 iso8859_15 mac_roman cp850": "éèàêçùôîâœûïëæ äüößé óíáéñúü çãáéíõóêàúâô àèòùéì äåöé øæåé íáðþöóéúýæ ëéïöü"
    " óéàíèúçò·ï éïüèñçöàê",
    "cp1250 iso8859_2": "ęłążśćóńź áíéýěžčřšůúťňďó áýíčžéúťšľňôäďóŕĺ éáőöóüíúű ăţîşâ čšžćđ äüöß",
    "cp1254": "ışüçğöiâ",
    "cp1257": "ėąšųžįęūč īāēšņūļģķžč õäüöšž",
    "cp1251 koi8_r koi8_u cp866 iso8859_5 mac_cyrillic": "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё"
    " оаинівтресклдупмязьбгчйхїжцюшєщфґ аоиентрсвлкдпмзугябъчщцжхйфюшь аоиенрстувјдкмплзгбњчцшљжћхђфџѓќѕ"
    " анаіяеорвыстлкдумпцзйўьбгчшжхюэёф",
    "cp1253 iso8859_7": "ατοιεσνηςυρπκμλίόάγδήέθωχύφβξώζψϊϋΐΰ",
    "cp1255 iso8859_8": "יוהלאתרבמשנכםדקחעגטפסזןצךףץ",
    "cp1256 iso8859_6": "اليونمتربدعةسفقهكحجأشصطخىضذغءثظإؤئآًُّپچژگ",
    "cp874": "ารนกอมิงทะัด้สลเ่คยีวตแหจปบใุขชธืไพ็ศโูำถภึษ์ผซณฐญฏฎฆฒฌฮฯๆ",
    "euc_jp cp932 iso2022_jp": "のいるにをたはしとてがなれすらこりかさもっまそうでくけよきわめせだ、。ーンスル",
    "gb18030 hz": "的一是了不在有人这中国大来上个到说们为子和，。",
    "big5hkscs": "的一是了不在有人這中國大來上個到說們為子和，。",
    "cp949 iso2022_kr": "이다는의에을가하고지한로를은사기어리자도서인나해아있그정시들",
}
_FREQUENT = {"gb18030": ("gb2312", 0xB0, 0xD8), "big5hkscs": ("big5", 0xA4, 0xC7), "euc_jp": ("euc_jp", 0xB0, 0xD0),
             "cp949": ("euc_kr", 0xB0, 0xC9)}  # fmt: skip
"""Of the scripts with thousands of letters: an encoding, and the range of lead bytes there of the frequent ones."""
_TYPOGRAPHY = "’‘‚“”„–—…«»‹›°§£€©®™·•¡¿\xa0´¨º¹²³½¼，。、：；「」『』（）！？《》"
_WITHIN = "’–—·\xa0，。、「」"
_UNKNOWN, _RARE, _COMMON, _MARK = -9.0, -18.0, -8.0, -4.0
_MIN_SCORE = -5.8  # of a character, on average
_ASCII = re.compile(rb"(?<=[\0-\x7f]{4})[\0-\x7f]{64,}(?=[\0-\x7f]{4})")
_JAVA = re.compile(rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]|\xc0[\x80\xaf]")
"""Surrogates, NUL and slash as Java and Oracle write them: UTF-8 that is not allowed, and no other encoding."""
_BEYOND = re.compile("[^\\x00-\\x7f]")
_CONTROLS = bytes((*range(7), *range(14, 27), *range(28, 32), 127))
_BOMS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
         (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
_WIDE = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")
_SAMPLE_BYTES = 64 << 10
_SCORED_BYTES = 8 << 10


def find_encoding(sample: bytes) -> str:
    """Return the encoding of text, by Python's name; "" if it is UTF-8 (perhaps damaged), or no text."""
    for mark, marked in _BOMS:
        if sample.startswith(mark):
            return marked
    if b"\0" in sample:
        return next((name for name in _WIDE if _is_wide(sample[:_SAMPLE_BYTES], name)), "")
    if sample.isascii():
        escapes = {"iso2022_jp": (b"\x1b$B", b"\x1b$@"), "iso2022_kr": (b"\x1b$)C",), "hz": (b"~{",)}
        names = [name for name, marks in escapes.items() if any(mark in sample for mark in marks)]
    else:
        as_utf8 = _decode(_JAVA.sub(b"", sample), "utf-8")
        damaged = as_utf8.count("\ufffd")
        # Most of what is not ASCII is valid UTF-8, or there are too many control characters.
        if not damaged or sum(c > "\x7f" for c in as_utf8) >= 2 * damaged or has_controls(sample):
            return ""
        sample = _ASCII.sub(b"\n", sample)[:_SCORED_BYTES]
        names = [name for names in _LETTERS for name in names.split()]
    scores = {name: _score(sample, name) for name in names}
    best = max(scores, key=scores.__getitem__, default="")
    return best if scores.get(best, _UNKNOWN) > _MIN_SCORE else ""


def is_noise(text: str) -> bool:
    """Return whether a tenth of a text's beginning are control characters, or marks of what was no text."""
    head = text[:1024].encode("utf-8", "replace")
    num_marks = len(head) - len(head.translate(None, _CONTROLS)) + head.count(b"\xef\xbf\xbd")
    return num_marks > max(16, min(len(text), 1024) // 10)


def binary_kind(head: bytes) -> str:
    """Return what kind of binary data begins with these bytes; "" if they may be text."""
    kinds = (kind for magic, kind in (ARCHIVES | _BINARY).items() if head.startswith(magic))
    if kind := next(kinds, ""):
        return kind
    is_wide = b"\0" in head and find_encoding(head)
    return "binary data" if not is_wide and (b"\0" in head or has_controls(head)) else ""


def has_controls(sample: bytes) -> bool:
    """Return whether bytes have more control characters than text has."""
    return len(sample) - len(sample.translate(None, _CONTROLS)) > max(1, len(sample) // 50)


def _decode(sample: bytes, name: str) -> str:
    return sample.decode(name, "replace").rstrip("\ufffd")  # The last character may be cut.


def _is_wide(sample: bytes, name: str) -> bool:
    """Whether it is text in UTF-16 or UTF-32: its characters are known, and some are blanks or ASCII."""
    text = _decode(sample, name)
    num_letters = sum(
        c in "\t\n\r"
        or " " <= c < "\x7f"
        or c in _known_letters()
        or "\u3040" <= c <= "\u9fff"
        or "\uac00" <= c <= "\ud7a3"
        or "\uff01" <= c <= "\uff5e"
        for c in text
    )
    return any(c in text for c in " \n{") and 20 * num_letters > 19 * len(text)


@cache
def _known_letters() -> frozenset[str]:
    letters = "".join(_LETTERS.values()) + _TYPOGRAPHY
    return frozenset(letters + letters.upper())


@cache
def _languages(letters: str) -> list[dict[str, float]]:
    """Of each language the logarithm of the frequency of its letters beyond ASCII."""
    return [
        {c: math.log(1 - math.exp(-3.5 / len(own))) - 3.5 * rank / len(own) for rank, c in enumerate(own)}
        for own in letters.split(" ")
    ]


def _score(sample: bytes, name: str) -> float:
    """The logarithm of the probability of the bytes beyond ASCII, on average."""
    group = next(names for names in _LETTERS if name in names.split())
    languages, others = _languages(_LETTERS[group]), group.split()
    frequent = _FREQUENT.get(others[0])
    is_latin = _LETTERS[group] < "\u0250"
    text, counts = f" {_decode(sample, name)} ", Counter[str]()
    total = -2.0 * others.index(name) - (1 if is_latin else 8) * (name != "cp1252")
    for match in _BEYOND.finditer(text):
        char, before, after = match[0], text[match.start() - 1], text[match.end()]
        counts[char.lower()] += 1
        if char in _TYPOGRAPHY:
            total -= 6 * (before.isalpha() and after.isalpha() and char not in _WITHIN)
        elif not frequent:
            total -= char.isupper() + 5 * (char.isupper() and before.islower())
            total -= 3 * (not before.isalpha() and not after.isalpha())
            if not is_latin:
                total -= 6 * ((before.isascii() and before.isalpha()) + (after.isascii() and after.isalpha()))
    if not counts:
        return _UNKNOWN
    sums = (sum(n * _weight(c, own, frequent) for c, n in counts.items()) for own in languages)
    return (total + max(sums)) / (sum(byte > 127 for byte in sample) or 2 * counts.total())


def _weight(char: str, own: dict[str, float], frequent: tuple[str, int, int] | None) -> float:
    if char in own:
        return own[char] - 1.5 * bool(frequent)
    if char in _TYPOGRAPHY:
        return _MARK
    if not frequent:
        return _UNKNOWN if char.isprintable() and char != "\ufffd" else _RARE
    codec, start, stop = frequent
    return _COMMON if start <= char.encode(codec, "replace")[0] < stop else _RARE
