"""Rules: from the counts of tokens to findings. Each threshold says what a clean file has instead."""

from collections.abc import Iterator

from forebay.doctor.token_counts import TokenCounts
from forebay.formats.report import CERTAIN, LIKELY, POSSIBLE, Finding

_MIN_FOR_EOS = 100_000
_LONG_GAP = 4 << 20  # Tokens: the longest novels have about one million.
_NUMPY = {2: "uint16", 4: "uint32", 8: "int64"}


def find_faults(counts: TokenCounts) -> Iterator[Finding]:
    """Yield the findings on the tokens of one file or dataset."""
    path = str(counts.report.path)
    if not counts.tokens:
        return
    misread = list(_types(counts, path))
    yield from misread
    yield from _header(counts)
    if misread:
        return  # Whatever else the numbers say, they are not the tokens.
    yield from _vocabulary(counts, path)
    if not counts.report.is_rows:
        yield from _runs(counts, path)
        yield from _documents(counts, path)
        yield from _repeats(counts, path)


def _types(counts: TokenCounts, path: str) -> Iterator[Finding]:
    other = counts.types.other_dtype()
    if not other:
        return
    read_as, width = _NUMPY[counts.types.width], int(other[2])
    if other[0] == ">":
        evidence = (
            f"read as little-endian {_NUMPY[width]} the ids are those of no text; with the bytes of each swapped most "
            "are small, as in text: the file is big endian"
        )
        yield Finding("byte-order", LIKELY, path, "every token", evidence)
        return
    reason = {
        ("uint16", "<u4"): "every second number is below 16: the upper half of a 4-byte id",
        ("uint16", "<i8"): "three of four numbers are 0: the upper halves of 8-byte ids",
        ("uint32", "<i8"): "every second number is 0: the upper half of an 8-byte id",
        ("uint32", "<u2"): "most numbers are 1048576 and more: two 2-byte ids in one",
    }[read_as, other]
    evidence = f"read as {read_as}, {reason}. The tokens are {_NUMPY[width]}"
    yield Finding("wrong-dtype", LIKELY, path, "every token", evidence)


def _header(counts: TokenCounts) -> Iterator[Finding]:
    for position in counts.headers[:8]:
        evidence = (
            "expected tokens, got NumPy's header (20115 19797 20569 …): a .npy file was read or appended as raw tokens"
        )
        yield Finding("header-as-tokens", CERTAIN, position.path, f"token {position.token}", evidence)


def _vocabulary(counts: TokenCounts, path: str) -> Iterator[Finding]:
    options = counts.report.options
    if counts.over is not None:
        bound = f"below {options.vocab_size}" if options.vocab_size else "from 0 to 2147483647"
        evidence = f"expected ids {bound}, got {counts.over.value}, and {counts.num_over} such in all"
        yield Finding("vocabulary-overflow", CERTAIN, counts.over.path, f"token {counts.over.token}", evidence)
    if options.vocab_size <= 1 << 16 or counts.maximum >= 1 << 16:
        return
    eos = options.eos_id
    wrapped = 0 if eos is None or eos < 1 << 16 else int(counts.types.low[eos & 0xFFFF])
    often = wrapped * _MIN_FOR_EOS >= counts.tokens and wrapped > 0
    if counts.types.width == 2 or (often and eos is not None and counts.num_eos == 0):
        evidence = f"expected ids of a vocabulary of {options.vocab_size}, got none above 65535"
        if counts.types.width == 2:
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
    for token, in_runs in sorted(counts.runs.items(), key=lambda run: -run[1])[:3]:
        if token == 0 and counts.num_zero_blocks:
            continue
        share = in_runs / counts.tokens
        if share < 0.01 or in_runs < 4096:
            continue
        run = counts.longest_run
        evidence = (
            f"{share:.1%} of the tokens are {token} in runs of 256 and more; the longest is {run.value}. "
            "A model trains on padding"
        )
        confidence = LIKELY if share >= 0.05 else POSSIBLE
        yield Finding("padding", confidence, run.path or path, f"token {run.token}", evidence)


def _documents(counts: TokenCounts, path: str) -> Iterator[Finding]:
    eos = counts.report.options.eos_id
    if eos is None:
        return
    wrapped = eos >= 1 << 16 and counts.maximum < 1 << 16
    if counts.bare is not None:
        evidence = (
            f"expected {eos} (EOS) at each document's end, got {counts.bare.value}; {counts.num_ends_bare} of "
            f"{counts.num_ends} ends are without"
        )
        yield Finding("missing-eos", CERTAIN, counts.bare.path, f"token {counts.bare.token}", evidence)
    elif counts.num_eos == 0 and counts.tokens >= _MIN_FOR_EOS and not wrapped:
        evidence = f"expected {eos} (EOS) between documents, got none in {counts.tokens:,} tokens"
        yield Finding("missing-eos", LIKELY, path, "every token", evidence)
    elif counts.longest_gap > _LONG_GAP:
        position = counts.longest_gap_at
        evidence = f"{counts.longest_gap:,} tokens without {eos} (EOS), while {counts.num_eos:,} stand elsewhere"
        yield Finding("missing-eos", POSSIBLE, position.path, f"token {position.token}", evidence)


def _repeats(counts: TokenCounts, path: str) -> Iterator[Finding]:
    same, total = counts.samples.repeated()
    if same:
        seq_len = counts.report.options.seq_len
        evidence = f"{same} of {total} samples of {seq_len} tokens repeat an earlier one, token for token"
        confidence = CERTAIN if same * 1000 >= total else POSSIBLE
        yield Finding("duplicate-samples", confidence, path, "samples", evidence)
    same, total = counts.passages.repeated()
    if total >= 64 and same >= total // 20:
        evidence = f"{same / total:.0%} of the passages of 64 tokens repeat an earlier one, wherever they begin"
        confidence = LIKELY if same >= total // 5 else POSSIBLE
        yield Finding("repeated-passages", confidence, path, "passages", evidence)
