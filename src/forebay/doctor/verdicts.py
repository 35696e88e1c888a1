"""What counts of tokens mean: from `TokenCounts` to findings.

Hides: the thresholds, each with what a clean file has instead.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.doctor.report import CERTAIN, LIKELY, POSSIBLE, Finding
from forebay.doctor.tokens import TokenCounts

_FEWEST = 1024  # Tokens, below which statistics say nothing.
_FEWEST_FOR_EOS = 100_000
_LONG_GAP = 4 << 20  # Tokens: the longest novels have about one million.
_NUMPY = {2: "uint16", 4: "uint32", 8: "int64"}
_MOST_FINDINGS = 1000  # Of one file or dataset.


@dataclass
class Report:
    """One file or dataset, examined.

    Attributes:
        path: What it is called.
        kind: What it is: `npy`, `raw tokens`, `megatron`, `parquet` … or `unknown`.
        facts: What is known of it: dtype, counts, first tokens …
        findings: What is wrong; empty if nothing.
        depth: How much was checked: `all`, `part`, `structure` (sizes, counts and offsets; the contents are of no type
            that can be checked), or `none` where nothing here knows the format.
        read_bytes, total_bytes: Read, and there.
        seconds: Taken.
        counts: Of its tokens, if it holds some.
    """

    path: Path
    kind: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    depth: str = "all"
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    counts: TokenCounts | None = None

    def say(self, fault: str, place: str, evidence: str, sure: str = CERTAIN) -> None:
        """Add a finding, of at most 1000."""
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(Finding(fault, sure, str(self.path), place, evidence))

    @property
    def is_wrong(self) -> bool:
        """Whether something certain or likely was found."""
        return any(one.is_wrong for one in self.findings)

    @property
    def ok(self) -> bool:
        """Whether it was checked, at least in part, and nothing certain or likely was found."""
        return self.depth != "none" and not self.is_wrong

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "ok": self.ok,
            "depth": self.depth,
            "facts": self.facts,
            "findings": [{**asdict(one), "advice": one.advice} for one in self.findings],
            "read_bytes": self.read_bytes,
            "total_bytes": self.total_bytes,
            "seconds": round(self.seconds, 3),
        }


def judge(counts: TokenCounts, path: str) -> Iterator[Finding]:
    """The findings of one file or dataset."""
    if not counts.tokens:
        return
    misread = list(_types(counts, path))
    yield from misread
    yield from _header(counts)
    if misread:
        return  # Whatever else the numbers say, they are not the tokens.
    yield from _vocabulary(counts, path)
    if not counts.rows:
        yield from _runs(counts, path)
        yield from _documents(counts, path)
        yield from _repeats(counts, path)


def true_dtype(counts: TokenCounts) -> str:
    """The NumPy type that the bytes seem to be of; empty where it is the one they were read as."""
    halves, width = counts.halves, counts.width
    if counts.tokens < 64 or not halves.count:
        return ""
    n, pairs = halves.count, halves.pairs
    varied = n - halves.even_small >= n // 4
    if width == 2:
        if halves.odd_small == n and varied:
            return "<i8" if halves.odd_pairs_zero == pairs and halves.even_pairs_zero < pairs // 2 else "<u4"
        if halves.even_small_swapped == n and n - halves.odd_small >= n // 2:
            return ">u4"
        return ">u2" if _looks_swapped(counts) else ""
    if width == 4:
        if halves.odd_pairs_zero == pairs and halves.even_pairs_zero < pairs // 2 and varied:
            return "<i8"
        upper = n - halves.odd_small
        if halves.swapped == 2 * pairs and upper >= n // 2:
            return ">u4"
        # Ids of 2**20 and more in most places: two tokens in one.
        if upper >= n // 2 and n - halves.even_small >= n // 2:
            return "<u2"
    return ""


def _looks_swapped(counts: TokenCounts) -> bool:
    """Whether ids read the other way round are those of text: most of them small.

    In text 30 to 60 % of the ids are below 1024 and 2 to 5 % are that with bytes swapped. No token counts for more
    than a hundredth, so that padding decides nothing.
    """
    distinct = np.count_nonzero(counts.low)
    if counts.tokens < _FEWEST or distinct < 16:
        return False
    weights = np.minimum(counts.low, max(1, counts.tokens // 100))
    ids = np.arange(1 << 16)
    total = int(weights.sum())
    if int(weights[ids & 255 == 0].sum()) * 20 >= total * 19:
        return True  # Bytes, each in the upper half.
    if distinct < 256:
        return False
    straight = int(weights[ids < 1024].sum())
    swapped = int(weights[ids & 255 < 4].sum())
    return swapped > total // 5 and swapped > 3 * straight


def _types(counts: TokenCounts, path: str) -> Iterator[Finding]:
    found = true_dtype(counts)
    if not found:
        return
    read_as, width = _NUMPY[counts.width], int(found[2])
    if found[0] == ">":
        evidence = (
            f"read as little-endian {_NUMPY[width]} the ids are those of no text; with the bytes of each swapped most "
            "are small, as in text: the file is big endian"
        )
        yield Finding("byte-order", LIKELY, path, "every token", evidence)
        return
    why = {
        ("uint16", "<u4"): "every second number is below 16: the upper half of a 4-byte id",
        ("uint16", "<i8"): "three of four numbers are 0: the upper halves of 8-byte ids",
        ("uint32", "<i8"): "every second number is 0: the upper half of an 8-byte id",
        ("uint32", "<u2"): "most numbers are 1048576 and more: two 2-byte ids in one",
    }[read_as, found]
    evidence = f"read as {read_as}, {why}. The tokens are {_NUMPY[width]}"
    yield Finding("wrong-dtype", LIKELY, path, "every token", evidence)


def _header(counts: TokenCounts) -> Iterator[Finding]:
    for place in counts.headers[:8]:
        evidence = (
            "expected tokens, got NumPy's header (20115 19797 20569 …): a .npy file was read or appended as raw tokens"
        )
        yield Finding("header-as-tokens", CERTAIN, place.path, f"token {place.token}", evidence)


def _vocabulary(counts: TokenCounts, path: str) -> Iterator[Finding]:
    options = counts.options
    if counts.over is not None:
        bound = f"below {options.vocab_size}" if options.vocab_size else "from 0 to 2147483647"
        evidence = f"expected ids {bound}, got {counts.over.value}, and {counts.num_over} such in all"
        yield Finding("vocabulary-overflow", CERTAIN, counts.over.path, f"token {counts.over.token}", evidence)
    if options.vocab_size <= 1 << 16 or counts.maximum >= 1 << 16:
        return
    eos = options.eos_id
    wrapped = 0 if eos is None or eos < 1 << 16 else int(counts.low[eos & 0xFFFF])
    often = wrapped * _FEWEST_FOR_EOS >= counts.tokens and wrapped > 0
    if counts.width == 2 or (often and eos is not None and counts.num_eos == 0):
        evidence = f"expected ids of a vocabulary of {options.vocab_size}, got none above 65535"
        if counts.width == 2:
            evidence += ", as uint16 holds none"
        if often and eos is not None:
            evidence += f"; {eos & 0xFFFF}, which is EOS {eos} less 65536, stands {wrapped} times"
        yield Finding("wrap-16", CERTAIN if often else LIKELY, path, "every token", evidence)


def _runs(counts: TokenCounts, path: str) -> Iterator[Finding]:
    if counts.num_zero_blocks:
        first = counts.zero_blocks[0]
        evidence = (
            f"expected tokens, got {counts.num_zero_blocks} blocks of 4096 zero bytes: parts that were never written, "
            "as by a download whose pieces did not all arrive"
        )
        yield Finding("zero-blocks", LIKELY, first.path, f"token {first.token}", evidence)
    for token, in_runs in sorted(counts.runs.items(), key=lambda one: -one[1])[:3]:
        if token == 0 and counts.num_zero_blocks:
            continue
        share = in_runs / counts.tokens
        if share < 0.01 or in_runs < 4096:
            continue
        where = counts.longest_run
        evidence = (
            f"{share:.1%} of the tokens are {token} in runs of 256 and more; the longest is {where.value}. "
            "A model trains on padding"
        )
        sure = LIKELY if share >= 0.05 else POSSIBLE
        yield Finding("padding", sure, where.path or path, f"token {where.token}", evidence)


def _documents(counts: TokenCounts, path: str) -> Iterator[Finding]:
    eos = counts.options.eos_id
    if eos is None:
        return
    wrapped = eos >= 1 << 16 and counts.maximum < 1 << 16
    if counts.bare is not None:
        evidence = (
            f"expected {eos} (EOS) at each document's end, got {counts.bare.value}; {counts.num_ends_bare} of "
            f"{counts.num_ends} ends are without"
        )
        yield Finding("missing-eos", CERTAIN, counts.bare.path, f"token {counts.bare.token}", evidence)
    elif counts.num_eos == 0 and counts.tokens >= _FEWEST_FOR_EOS and not wrapped:
        evidence = f"expected {eos} (EOS) between documents, got none in {counts.tokens:,} tokens"
        yield Finding("missing-eos", LIKELY, path, "every token", evidence)
    elif counts.longest_gap > _LONG_GAP:
        where = counts.longest_gap_at
        evidence = f"{counts.longest_gap:,} tokens without {eos} (EOS), while {counts.num_eos:,} stand elsewhere"
        yield Finding("missing-eos", POSSIBLE, where.path, f"token {where.token}", evidence)


def _repeats(counts: TokenCounts, path: str) -> Iterator[Finding]:
    same, total = counts.samples.repeated()
    if same:
        evidence = f"{same} of {total} samples of {counts.options.seq_len} tokens stand there before, token for token"
        sure = CERTAIN if same * 1000 >= total else POSSIBLE
        yield Finding("duplicate-samples", sure, path, "samples", evidence)
    same, total = counts.passages.repeated()
    if total >= 64 and same >= total // 20:
        evidence = f"{same / total:.0%} of the passages of 64 tokens stand there before, wherever they begin"
        sure = LIKELY if same >= total // 5 else POSSIBLE
        yield Finding("repeated-passages", sure, path, "passages", evidence)
