"""Finds personal numbers that countries give, by shape, check digits and dates, and the words before them.

google-re2 finds what has the shape of any; its own shape and a check in Python decide what it is. A number whose shape
and check digit others have too needs a word such as `SSN` or `Steuer-ID` in the 64 bytes before it. Linear in any text.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple

from forebay.prepare.clean.pii_context import OTHER_NUMBER, compiled, without_masks

CONTEXT_BYTES = 64
MAX_BYTES = 64  # No number is longer.


class Identifier(NamedTuple):
    """A way to write a number.

    Args:
        kind: The name under which it is masked.
        shape: A regular expression for all of it.
        check: Whether its letters and digits, in capitals, can be such a number.
        context: A regular expression, without case, for the text before it; "" if none is needed.
    """

    kind: str
    shape: str
    check: Callable[[str], bool]
    context: str = ""


def _digits(number: str) -> list[int]:
    return [int(char) for char in number]


def luhn(number: str) -> bool:
    """Source: ISO/IEC 7812-1, annex B."""
    return sum(d if i % 2 == 0 else d * 2 - 9 * (d > 4) for i, d in enumerate(reversed(_digits(number)))) % 10 == 0


def _weighted(weights: Iterable[int | str], number: str) -> int:
    """The sum of the digits by weights, which may be digits of a string."""
    return sum(int(weight) * digit for weight, digit in zip(weights, _digits(number)))


def _is_date(text: str) -> bool:
    """Whether it is a date: YYMMDD of any century, or YYYYMMDD from 1890 to 2030."""
    any_century = len(text) == 6
    try:
        year = date.fromisoformat(f"20{text}" if any_century else text).year
    except ValueError:
        return False
    return any_century or 1890 <= year <= 2030


def _is_day_first(text: str) -> bool:
    """Whether it is a date DDMMYY of any century."""
    return _is_date(text[4:6] + text[2:4] + text[:2])


def _not_one_digit(number: str) -> bool:
    return len(set(number)) > 1


def _sum_of(weights: Iterable[int | str], modulus: int) -> Callable[[str], bool]:
    """The check that the weighted sum of the digits, which are not all the same, is a multiple."""
    return lambda n: _not_one_digit(n) and _weighted(weights, n) % modulus == 0


def _last_digits(*weights: Sequence[int | str]) -> Callable[[str], bool]:
    """The check of the digits behind those that each list weighs: 11 less the remainder, 0 where that is above 9."""
    return lambda n: _not_one_digit(n) and all(-_weighted(w, n) % 11 % 10 == int(n[len(w)]) for w in weights)


_NL_BSN = _sum_of((9, 8, 7, 6, 5, 4, 3, 2, -1), 11)  # Source: Rijksdienst voor Identiteitsgegevens, the test of eleven.
_EAN = _sum_of((1, 3) * 7, 10)  # Source: GS1, as the Swiss AHVN13 uses it.
_AU_TFN = _sum_of((1, 4, 3, 7, 5, 8, 6, 9, 10), 11)  # Source: Australian Taxation Office, tax file number algorithm.
_UK_NHS = _sum_of(range(10, 0, -1), 11)  # Source: NHS Data Model and Dictionary, NHS Number.
_BR_CPF = _last_digits(range(10, 1, -1), range(11, 1, -1))  # Source: Receita Federal, Instrução Normativa 1548/2015.
# Source: Receita Federal, Cadastro Nacional da Pessoa Jurídica.
_BR_CNPJ = _last_digits("543298765432", "6543298765432")
_JP_NUMBER = _last_digits("65432765432")  # Source: Ministerial ordinance 85 of 2014.
_PT_NIF = _last_digits(range(9, 1, -1))  # Source: Decreto-Lei 14/2013.


def _us_ssn(n: str) -> bool:
    """Source: 20 CFR 422.103 and the Social Security Administration's list of numbers that it does not give."""
    area = n[:3]
    return area not in ("000", "666") and area < "900" and n[3:5] != "00" and n[5:] != "0000"


def _de_tax(n: str) -> bool:
    """Source: Bundeszentralamt für Steuern, section 139b AO; ISO 7064, mod 11, 10."""
    counts = sorted(n[:10].count(digit) for digit in set(n[:10]))
    product = 10
    for digit in _digits(n[:10]):
        product = ((digit + product) % 10 or 10) * 2 % 11
    return n[0] != "0" and counts[-1] in (2, 3) and counts[-2] == 1 and (11 - product) % 10 == int(n[10])


def _fr_nir(n: str) -> bool:
    """Source: INSEE, numéro d'inscription au répertoire: sex, year, month, place, and a key modulo 97."""
    department = n[5:7].replace("2A", "19").replace("2B", "18")
    month = int(n[3:5])
    return (1 <= month <= 12 or 20 <= month <= 42) and 97 - int(n[:5] + department + n[7:13]) % 97 == int(n[13:])


_CF = "[0-9L-NP-V]"  # a digit, or the letter that replaces it where two persons had the same code
_CF_ODD = dict(zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", [1, 0, 5, 7, 9, 13, 15, 17, 19, 21] * 2 + [
    2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23]))  # fmt: skip


def _it_cf(n: str) -> bool:
    """Source: Decreto ministeriale 23 dicembre 1976, article 12."""
    even = sum(int(char) if char.isdigit() else ord(char) - 65 for char in n[1:15:2])
    return chr(65 + (even + sum(_CF_ODD[char] for char in n[:15:2])) % 26) == n[15]


def _pl_pesel(n: str) -> bool:
    """Source: Ustawa o ewidencji ludności, article 15."""
    century, month = divmod(int(n[2:4]), 20)
    is_born = century < 2 and _is_date(f"{19 + century}{n[:2]}{month:02}{n[4:6]}")
    return is_born and _weighted("13791379131", n) % 10 == 0


_D5 = ["0123456789", "1234067895", "2340178956", "3401289567", "4012395678", "5987604321", "6598710432", "7659821043",
       "8765932104", "9876543210"]  # fmt: skip
_P5 = ["0123456789", "1576283094", "5803796142", "8916043527", "9453126870", "4286573901", "2793806415", "7046913258"]


def _in_aadhaar(n: str) -> bool:
    """Source: Verhoeff 1969, as the Unique Identification Authority of India uses it."""
    check = 0
    for i, char in enumerate(reversed(n)):
        check = int(_D5[check][int(_P5[i % 8][int(char)])])
    return check == 0 and _not_one_digit(n)


def _cn_resident(n: str) -> bool:
    """Source: GB 11643-1999; ISO 7064, mod 11-2."""
    rest = sum(int(digit) * pow(2, 17 - i, 11) for i, digit in enumerate(n[:17])) % 11
    return _is_date(n[6:14]) and "10X98765432"[rest] == n[17]


def _be_national(n: str) -> bool:
    """Source: Arrêté royal du 3 avril 1984; 97 less the remainder, with a 2 before it for births from 2000 on."""
    born = _is_date(n[:6]) or n[2:6] == "0000"
    return born and any(97 - int(century + n[:9]) % 97 == int(n[9:]) for century in ("", "2"))


def _mx_curp(n: str) -> bool:
    """Source: Instructivo normativo para la asignación de la CURP, DOF 2018."""
    values = ["0123456789ABCDEFGHIJKLMN?OPQRSTUVWXYZ".index(char) for char in n[:17]]
    return _is_date(n[4:10]) and (-sum(v * (18 - i) for i, v in enumerate(values))) % 10 == int(n[17])


def _tr_identity(n: str) -> bool:
    """Source: Nüfus ve Vatandaşlık İşleri, T.C. kimlik numarası."""
    d = _digits(n)
    return d[0] > 0 and (7 * sum(d[:9:2]) - sum(d[1:8:2])) % 10 == d[9] and sum(d[:10]) % 10 == d[10]


def _written(number: str) -> bool:
    """Of numbers without a check digit, which need their context."""
    return _not_one_digit("".join(filter(str.isdigit, number)))


_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


def _wallet(n: str) -> bool:
    """Source: Bitcoin's Base58Check, and Bech32 of BIP 173 and BIP 350; of Ethereum's the form alone counts."""
    if n.startswith("0x"):
        return len(set(n[2:].lower())) > 6
    if n.startswith("bc1"):
        values = [3, 3, 0, 2, 3, *(_BECH32.index(char) for char in n[3:])]
        check = 1
        for value in values:
            top, check = check >> 25, (check & 0x1FFFFFF) << 5 ^ value
            for i, generator in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
                check ^= generator if top >> i & 1 else 0
        return check in (1, 0x2BC830A3)
    value = functools.reduce(lambda total, char: total * 58 + _BASE58.index(char), n, 0)
    data = value.to_bytes(26, "big")[-25:] if value < 1 << 200 else b""
    return bool(data) and hashlib.sha256(hashlib.sha256(data[:21]).digest()).digest()[:4] == data[21:]


def _point(n: str) -> bool:
    latitude, longitude = (float(part) for part in n.replace(",", " ").split())
    return abs(latitude) <= 90 and abs(longitude) <= 180


_TAX_ID = r"steuer.?(?:id|identifikations?.?)|steueridentifikation|\bidnr|tax.?id|\btin\b"
IDENTIFIERS = (
    Identifier("us_ssn", r"\d{3}-\d{2}-\d{4}", _us_ssn),
    Identifier("us_ssn", r"\d{3} ?\d{2} ?\d{4}", _us_ssn, r"\bssn|social.?security|\bsoc\.? sec"),
    Identifier("us_itin", r"9\d{2}[ -]?[5-9]\d[ -]?\d{4}", _not_one_digit, r"\bitin\b|taxpayer id"),
    # Source: HMRC, National Insurance Manual, NIM39110.
    Identifier(
        "uk_nino", r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d{2} ?\d{2} ?\d{2} ?[A-D]",
        lambda n: n[:2] not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ"),
    ),
    Identifier("uk_nhs", r"\d{3}[ -]?\d{3}[ -]?\d{4}", _UK_NHS, r"\bnhs\b"),
    Identifier("de_tax_id", r"\d{2} ?\d{3} ?\d{3} ?\d{3}", _de_tax, _TAX_ID),
    Identifier("fr_nir", r"[12] ?\d{2} ?\d{2} ?(?:\d{2}|2[AB]) ?\d{3} ?\d{3} ?\d{2}", _fr_nir),
    # Source: Real Decreto 1553/2005; the letter is the number modulo 23.
    Identifier(
        "es_dni", r"(?:\d{8}|[XYZ]-?\d{7})-?[A-HJ-NP-TV-Z]",
        lambda n: "TRWAGMYFPDXBNJZSQVHLCKE"[int(n[:-1].translate(str.maketrans("XYZ", "012"))) % 23] == n[-1],
    ),
    Identifier("it_fiscal_code", rf"(?i)[A-Z]{{6}}{_CF}{{2}}[A-EHLMPRST]{_CF}{{2}}[A-Z]{_CF}{{3}}[A-Z]", _it_cf),
    Identifier("pl_pesel", r"\d{11}", _pl_pesel, r"pesel"),
    Identifier("nl_bsn", r"\d{4}[ .]?\d{2}[ .]?\d{3}|\d{3}[ .]\d{3}[ .]\d{3}", _NL_BSN, r"\bbsn|burgerservice|sofi"),
    Identifier("br_cpf", r"\d{3}\.\d{3}\.\d{3}-\d{2}", _BR_CPF),
    Identifier("br_cpf", r"\d{11}", _BR_CPF, r"\bcpf\b"),
    Identifier("br_cnpj", r"\d{2}\.\d{3}\.\d{3}/\d{4}-\d{2}", _BR_CNPJ),
    Identifier("in_aadhaar", r"[2-9]\d{3}[ -]?\d{4}[ -]?\d{4}", _in_aadhaar, r"aadh?aa?r|आधार|\buidai"),
    Identifier("in_pan", r"[A-Z]{3}[ABCFGHJLPT][A-Z]\d{4}[A-Z]", _written),
    Identifier("ca_sin", r"\d{3}[ -]?\d{3}[ -]?\d{3}", luhn, r"\bsin\b|social insurance|assurance sociale|\bnas\b"),
    Identifier("cn_resident_id", r"[1-8]\d{16}[\dXx]", _cn_resident),
    # Source: Skatteverket, SKV 704.
    Identifier("se_personal_id", r"(?:\d{2})?\d{6}[-+]\d{4}", lambda n: luhn(n[-10:]) and _is_date(n[-10:-4])),
    # Source: Väestötietoasetus 128/2010; remainder of 31.
    Identifier(
        "fi_personal_id", r"\d{6}[-+A-FU-Y]\d{3}[0-9A-FHJ-NPR-Y]",
        lambda n: _is_day_first(n) and "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(n[:6] + n[-4:-1]) % 31] == n[-1],
    ),
    # Source: Skatteetaten, fødselsnummer.
    Identifier(
        "no_birth_number", r"\d{6} ?\d{5}",
        lambda n: _weighted("3761894521", n) % 11 == _weighted("54327654321", n) % 11 == 0 and _is_day_first(n),
    ),
    Identifier("dk_cpr", r"\d{6}-?\d{4}", _is_day_first, r"\bcpr\b|personnummer"),
    Identifier("be_national_id", r"\d{2}\.\d{2}\.\d{2}-\d{3}\.\d{2}", _be_national),
    Identifier("ch_ahv", r"756\.?\d{4}\.?\d{4}\.?\d{2}", _EAN),
    Identifier("pt_nif", r"\d{3} ?\d{3} ?\d{3}", lambda n: n[0] != "0" and _PT_NIF(n), r"\bnif\b|contribuinte"),
    # Source: Legea 105/1996.
    Identifier(
        "ro_cnp", r"[1-8]\d{12}",
        lambda n: _is_date(n[1:7]) and _weighted("279146358279", n) % 11 % 10 == int(n[12]),
        r"\bcnp\b|cod numeric personal",
    ),
    Identifier("tr_identity", r"[1-9]\d{10}", _tr_identity, r"\bt\.?c\.?\b|kimlik"),
    # Source: Resident Registration Act, enforcement rules; numbers given from October 2020 on have no check digit.
    Identifier(
        "kr_rrn", r"\d{6}-[1-8]\d{6}",
        lambda n: n[6] in "12345678" and _is_date(n[:6])
        and (n[:2] <= "25" or (11 - _weighted("234567892345", n) % 11) % 10 == int(n[12])),
    ),
    Identifier("jp_my_number", r"\d{4}[ -]?\d{4}[ -]?\d{4}", _JP_NUMBER, r"マイナンバー|個人番号|my number"),
    Identifier("mx_curp", r"[A-Z][AEIOUX][A-Z]{2}\d{6}[HMX][A-Z]{5}[0-9A-Z]\d", _mx_curp),
    Identifier("au_tfn", r"\d{3} ?\d{3} ?\d{3}", _AU_TFN, r"\btfn\b|tax file"),
    # Source: Department of Home Affairs, Identification Act 68 of 1997.
    Identifier(
        "za_id", r"\d{6} ?\d{4} ?\d{3}",
        lambda n: n[10] in "012" and luhn(n) and _is_date(n[:6]), r"\bid (?:no|num)|identity n|rsa id|south african id",
    ),
    Identifier("passport", r"[A-Z]{0,2}\d{6,9}", _written, r"passp?ort|reisepass|passeport|pasaporte|护照|паспорт"),
    Identifier(
        "driving_licence", r"[A-Z]{0,2}\d{6,14}|\d{4}-\d{2}-\d{4}", _written,
        r"driv(?:er'?s?|ers|ing)\W{0,2} ?licen[cs]e|f.{1,2}hrerschein|permis de conduire",
    ),
    Identifier("wallet", r"[13][1-9A-HJ-NP-Za-km-z]{25,34}|bc1[02-9ac-hj-np-z]{39,59}|0x[0-9A-Fa-f]{40}", _wallet),
    Identifier("mac", r"(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}|(?:[0-9A-Fa-f]{2}-){5}[0-9A-Fa-f]{2}", _written),
    Identifier("coordinates", r"\d{1,2}\.\d{4,10}, ?-?\d{1,3}\.\d{4,10}", _point),
)  # fmt: skip
"""The last three are match only if asked for by name."""
_AS_WRITTEN = ("wallet", "coordinates")  # Checked with their separators and cases.
_BEFORE, _AFTER = frozenset(b"-./_@#$%&=:+\\"), frozenset(b"_@%")


@functools.cache
def _contexts(kinds: frozenset[str]) -> Any:
    """What finds a word that any of those kinds needs."""
    return compiled("(?i)" + "|".join(item.context or "$^" for item in IDENTIFIERS if item.kind in kinds), True)


@functools.lru_cache(256)
def _shapes(identifiers: tuple[Identifier, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What finds any of them, and each."""
    shapes = [rf"\b(?:{item.shape})\b" for item in identifiers]
    any_of = compiled("|".join(f"(?:{shape})" for shape in dict.fromkeys(shapes)), True)
    return any_of, tuple(compiled(shape, True) for shape in shapes)


@functools.cache
def _items(kinds: frozenset[str], with_context: bool) -> tuple[Identifier, ...]:
    return tuple(item for item in IDENTIFIERS if item.kind in kinds and (with_context or not item.context))


def find_ids(text: bytes, kinds: frozenset[str]) -> Iterator[tuple[int, int, str]]:
    """Start, stop and kind of each number of those kinds in a document (UTF-8), in order and apart."""
    free = 0
    for candidate in _shapes(_items(kinds, True))[0].finditer(text):
        start = candidate.start()
        before = without_masks(text[max(0, start - CONTEXT_BYTES) : start])
        items = _items(kinds, _contexts(kinds).search(before) is not None)
        candidates, shapes = _shapes(items)
        if not items or candidates.match(text, start, start + MAX_BYTES) is None:
            continue
        for shape, item in zip(shapes, items):
            match = shape.match(text, start, start + MAX_BYTES)
            if match is None or start < free or not _stands_alone(text, start, stop := match.end()):
                continue
            if item.context and _context(item).search(before) is None:
                continue
            if item.kind == "us_ssn" and not item.context and compiled(OTHER_NUMBER).search(before):
                continue
            plain = match.group().decode()
            if item.kind not in _AS_WRITTEN:
                plain = "".join(filter(str.isalnum, plain)).upper()
            if item.check(plain):
                yield start, stop, item.kind
                free = stop
                break


def _context(item: Identifier) -> Any:
    """A word of the context, and then no other number; or a list of numbers alone."""
    return compiled(rf"(?i)(?:{item.context})\pL*(?:[^0-9]*|[^\pL]*)$", True)


def _stands_alone(text: bytes, start: int, stop: int) -> bool:
    """Whether neither a letter or digit, nor a mark that makes it part of something longer, touches it."""
    before, after = text[start - 1 : start], text[stop : stop + 2]
    if before and (before.isalnum() or (before[0] in _BEFORE and text[max(start - 2, 0) : start - 1].isalnum())):
        return False
    if before in (b"$", b"#", b"_", b"@", b"/", b"=", b"&", b"%", b"\\"):
        return False
    if after and (after[:1].isalnum() or after[0] in _AFTER):
        return False
    return not (len(after) == 2 and after[0] in b"-./:," and after[1:].isdigit())
