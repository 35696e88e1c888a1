"""Masks personal data: e-mail, telephone, IP address, IBAN, payment card, keys and tokens, numbers of persons.

Keys are found by google-re2, in the rows that hold one of their fixed beginnings; numbers that countries give by
`pii_ids`; all else by the compiled pass of `pii_scan`. Chosen by measuring `re`, re2 and hyperscan:
`benchmarks/prepare/clean.py`.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, get_args

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import I64
from forebay.prepare.clean import pii_context, pii_scan
from forebay.prepare.clean.pii_context import compiled
from forebay.prepare.clean.pii_ids import find_ids
from forebay.prepare.clean.spans import splice
from forebay.prepare.documents import Measure, Stage, StageResult, check_rules, replace_column, text_buffers
from forebay.prepare.settings import Number

Kind = Literal[
    "email", "ipv4", "ipv6", "iban", "card", "phone", "key", "us_ssn", "us_itin", "uk_nino", "uk_nhs", "de_tax_id",
    "fr_nir", "es_dni", "it_fiscal_code", "pl_pesel", "nl_bsn", "br_cpf", "br_cnpj", "in_aadhaar", "in_pan", "ca_sin",
    "cn_resident_id", "se_personal_id", "fi_personal_id", "no_birth_number", "dk_cpr", "be_national_id", "ch_ahv",
    "pt_nif", "ro_cnp", "tr_identity", "kr_rrn", "jp_my_number", "mx_curp", "au_tfn", "za_id", "passport",
    "driving_licence", "wallet", "mac", "coordinates",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)  # The first in the order of the numbers of `pii_scan`.
NOT_PERSONAL: tuple[Kind, ...] = ("wallet", "mac", "coordinates")
DEFAULT_KINDS = tuple(kind for kind in KINDS if kind not in NOT_PERSONAL)
assert tuple(range(6)) == (pii_scan.EMAIL, pii_scan.IPV4, pii_scan.IPV6, pii_scan.IBAN, pii_scan.CARD, pii_scan.PHONE)
FINEWEB_MASKS = {
    "email": (b"email@example.com", b"firstname.lastname@example.org"),
    "ipv4": tuple(b"22.214.171.124 126.96.36.199 188.8.131.52 184.108.40.206 220.127.116.11 18.104.22.168".split()),
}
"""What FineWeb puts in their place, one after the other. Source: datatrove's PIIFormatter, its defaults. It goes round
over a whole run; here it begins again in each document, so that no document depends on another."""
STARTS = (
    r"A[KS]IA|gh[pousr]_|github_pat_|xox[abeoprs]-|AIza|[rs]k_(?:live|test)_|sk-[A-Za-z0-9]|eyJ[A-Za-z0-9]|-----BEGIN "
    r"|(?i:api.?key|access.?key|secret|token|passw)[A-Za-z_\"']{0,12} {0,2}(?::=|=>|=|:) {0,2}[\"']"
)
"""One of these stands in every row that holds a key."""
TAIL = r"[A-Za-z0-9_-]"
KEYS = (
    r"\bA[KS]IA[A-Z0-9]{16}\b",  # AWS
    r"\bgh[pousr]_[A-Za-z0-9]{36,251}\b",  # GitHub
    r"\bgithub_pat_[A-Za-z0-9_]{22,255}\b",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{10,250}",  # Slack
    rf"\bAIza{TAIL}{{35}}",  # Google
    r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,247}\b",  # Stripe
    rf"\beyJ{TAIL}{{8,}}\.eyJ{TAIL}{{8,}}\.{TAIL}{{8,}}",  # JSON Web Token
)
RANDOM_KEYS = (
    rf"\bsk-(?:proj-|ant-|or-|svcacct-)?({TAIL}{{20,500}})",  # OpenAI and its like
    r"(?i)(?:api.?key|access.?key|secret|token|passw)[A-Z_\"']{0,12} {0,2}(?::=|=>|=|:) {0,2}[\"']"
    r"([A-Z0-9_+/=.~-]{16,256})[\"']",
)
"""These count if what is in brackets looks random: it has a digit and a letter, and MIN_ENTROPY_BITS."""
MIN_ENTROPY_BITS = 3.0
"""Per character, of its own distribution. Source: Yelp's detect-secrets, its limit for hexadecimal strings (4.5 for
base64 cannot be met by 16 characters)."""
PEM = r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
MAX_PEM_BYTES = 1 << 14

Spans = tuple[I64, I64, I64]
Country = Literal[
    "us", "uk", "de", "fr", "es", "it", "pl", "nl", "br", "in", "ca", "cn", "se", "fi", "no", "dk", "be", "ch", "pt",
    "ro", "tr", "kr", "jp", "mx", "au", "za",
]  # fmt: skip
SCANNED = KINDS[:6]
IDS = frozenset(KINDS[7:])
_NUMBERS: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}
_KEY = _NUMBERS["key"]


@dataclass(frozen=True)
class Pii(Stage):
    """Masks personal data, and drops documents with too much of it.

    Args:
        kinds: Which; or `us`, `uk`, `de` …: all numbers of a country. All but `wallet`, `mac` and `coordinates`.
        style: `mask` puts `<kind>` in its place; `fineweb` what FineWeb does for e-mail and IPv4 addresses.
        public_only: Leave private, loopback, documentation and multicast IP addresses, as FineWeb does.
        max_count: Drop a document with more: any number (Dolma: 5).

    Source: FineWeb masks e-mail and public IP addresses alone (datatrove's PIIFormatter, its defaults); for that set
    `kinds = ["email", "ipv4", "ipv6"]` and `style = "fineweb"`. Soldaini et al. 2024 (Dolma), section 3, drop documents
    with more than 5. Cost: linear in any text.
    """

    name = "pii"
    version = 6
    reasons = ("pii_many",)
    kinds: Annotated[tuple[Kind | Country, ...], Field(min_length=1)] = DEFAULT_KINDS
    style: Literal["mask", "fineweb"] = "mask"
    public_only: bool = True
    max_count: Number = math.inf

    @functools.cached_property
    def _selected(self) -> frozenset[str]:
        return frozenset(kind for kind in KINDS if kind in self.kinds or kind.split("_")[0] in self.kinds)

    @property
    def finds_numbers(self) -> bool:
        """Whether a kind is wanted that begins with a digit and is no address: its kernel takes longer to compile."""
        return bool(self._selected & {"iban", "card", "phone"})

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The batch with its texts masked, and how many of each kind in those that stay."""
        column = batch.column("text")
        offsets, _ = text_buffers(column)
        starts, stops, kinds = self.find(column)
        fineweb = FINEWEB_MASKS if self.style == "fineweb" else {}
        masks = [fineweb.get(kind, (f"<{kind}>".encode(),)) for kind in KINDS]
        first = np.cumsum([0, *map(len, masks)])
        puts = [mask for of_kind in masks for mask in of_kind]
        rows = np.searchsorted(offsets, starts, side="right")
        which = first[kinds]
        for kind in np.flatnonzero(np.diff(first) > 1).tolist():  # the masks of a kind in turn, from the first in a row
            mine = np.flatnonzero(kinds == kind)
            turn = np.arange(len(mine)) - np.searchsorted(rows[mine], rows[mine], side="left")
            which[mine] += turn % len(masks[kind])
        number = np.bincount(rows - 1, minlength=len(batch))
        checked = check_rules(batch, self.reasons, (Measure(number, high=self.max_count),))
        drop = checked.drop
        column = splice(column, starts, stops, puts, which)
        kinds = kinds[drop[rows - 1] < 0]
        counts: dict[str, int] = dict(zip(KINDS, np.bincount(kinds, minlength=len(KINDS)).tolist()))
        return StageResult(replace_column(batch, "text", column), drop, counts, measures=checked.measures)

    def find(self, column: pa.LargeStringArray) -> Spans:
        """Starts and stops in the data buffer and indices of KINDS; ascending, not overlapping."""
        spans, ids = self._scanned(column), self._selected & IDS
        searches = [functools.partial(_ids, kinds=ids)] * bool(ids) + [_keys] * ("key" in self._selected)
        offsets, data = text_buffers(column)
        for search in searches:
            entries: list[tuple[int, int, int]] = []
            for first, stop in pairwise(offsets.tolist()):
                matches = search(data[first:stop].tobytes())
                entries += _apart((first + start, first + end, kind) for start, end, kind in matches)
            spans = _over(spans, entries)
        return spans

    def _scanned(self, column: pa.LargeStringArray) -> Spans:
        offsets, data = text_buffers(column)
        wanted_bits = sum(1 << kind for kind in range(len(SCANNED)) if KINDS[kind] in self._selected)
        size = int(offsets[-1] - offsets[0]) // pii_scan.MIN_SPAN_BYTES + 1
        starts, stops, scanned = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint8)
        wanted_bits |= pii_scan.PUBLIC_ONLY if self.public_only else 0
        scan = pii_scan.scan_all if self.finds_numbers else pii_scan.scan_addresses
        n = scan(offsets, data, wanted_bits, pii_scan.iban_table(), starts, stops, scanned)
        starts, stops, kinds = starts[:n].copy(), stops[:n].copy(), scanned[:n].astype(np.int64)
        rows = np.searchsorted(offsets, starts, side="right")
        personal = np.ones(n, bool)
        version_stop = -1  # where the last version ends
        for i in _in_turn(np.flatnonzero((kinds != pii_scan.IPV6) & (kinds != pii_scan.IBAN))):
            start, stop, kind = int(starts[i]), int(stops[i]), kinds[i]
            first, last = int(offsets[rows[i] - 1]), int(offsets[rows[i]])
            before = pii_context.without_masks(data[max(first, start - pii_context.BEFORE_BYTES) : start].tobytes())
            after = pii_context.without_masks(data[stop : min(last, stop + pii_context.AFTER_BYTES)].tobytes())
            if kind == pii_scan.EMAIL:
                personal[i] = pii_context.is_email(before, data[start:stop].tobytes(), after)
            elif kind == pii_scan.IPV4:
                follows = first < version_stop and pii_context.joins(data[version_stop:start].tobytes())
                personal[i] = pii_context.is_ipv4(before, data[start:stop].tobytes(), after, follows)
                version_stop = version_stop if personal[i] else stop
            elif kind == pii_scan.CARD:
                personal[i] = pii_context.is_card(before, after)
            else:
                called = kind == pii_scan.PHONE or compiled(pii_context.CALL).search(before[-48:]) is not None
                personal[i] = called and pii_context.is_number(before, after)
        kinds[kinds == pii_scan.MAYBE_PHONE] = pii_scan.PHONE
        return starts[personal], stops[personal], kinds[personal]


def _in_turn(numbers: I64) -> Iterator[int]:
    """As Python's numbers, of which millions together would take hundreds of MB."""
    for start in range(0, len(numbers), 4096):
        yield from numbers[start : start + 4096].tolist()


def _over(spans: Spans, entries: Sequence[tuple[int, int, int]]) -> Spans:
    """The entries, and the spans that touch none of them: a key wins over what seems to be within it."""
    if not entries:
        return spans
    starts, stops, kinds = spans
    first, last, which = np.array(entries, np.int64).T
    free = np.searchsorted(last, starts, side="right") == np.searchsorted(first, stops, side="left")
    starts, stops = np.concatenate((starts[free], first)), np.concatenate((stops[free], last))
    order = np.argsort(starts, kind="stable")
    return starts[order], stops[order], np.concatenate((kinds[free], which))[order]


def _ids(text: bytes, kinds: frozenset[str]) -> Iterator[tuple[int, int, int]]:
    return ((start, end, _NUMBERS[kind]) for start, end, kind in find_ids(text, kinds))


def _apart(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    apart: list[tuple[int, int, int]] = []
    for span in sorted(spans):
        if not apart or span[0] >= apart[-1][1]:
            apart.append(span)
    return apart


def _keys(text: bytes) -> Iterator[tuple[int, int, int]]:
    if not compiled(STARTS).search(text):
        return
    for start, end in _pem_blocks(text):
        yield start, end, _KEY
    for match in compiled("|".join(KEYS)).finditer(text):
        yield *match.span(), _KEY
    for pattern in RANDOM_KEYS:
        for match in compiled(pattern).finditer(text):
            if _random(match.group(1)):
                quoted = match.group()[-1:] in b"\"'"  # then what was assigned, else with its beginning
                yield match.start(1) if quoted else match.start(), match.end(1), _KEY


def _pem_blocks(text: bytes) -> Iterator[tuple[int, int]]:
    """Private keys from BEGIN to the end of the END line, or of the header alone if no END is near."""
    end = 0
    for match in compiled(PEM).finditer(text):
        if end >= 0 and end < match.end():
            end = text.find(b"-----END ", match.end())
        near = match.end() <= end <= match.end() + MAX_PEM_BYTES
        close = text.find(b"-----", end + 9, end + 80) if near else -1
        yield match.start(), close + 5 if close >= 0 else match.end()


def _random(text: bytes) -> bool:
    counts = Counter(text)
    entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())
    digits = any(48 <= b <= 57 for b in counts)
    return digits and any(b >= 65 for b in counts) and entropy >= MIN_ENTROPY_BITS
