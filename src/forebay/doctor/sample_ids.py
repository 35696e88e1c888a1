"""Sample ids against their tokens: which sample length and which view of the bytes they were computed of.

Hides: the known ways to compute them wrongly, each of which is tried: tokens widened or narrowed first, a .npy with its
header, and 4-byte spans over 2-byte tokens, of which the second half is empty. The id is the 8-byte BLAKE2b of a
sample's bytes, little endian; 0.5 GB/s a thread.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.doctor.report import Options
from forebay.formats.foreign import Bytes8

EMPTY = int.from_bytes(hashlib.blake2b(b"", digest_size=8).digest(), "little")
"""13020603013274838756: the id of no bytes at all."""

_LENGTHS = tuple(1 << n for n in range(5, 18))
Sample = Callable[[int, int], bytes]


@dataclass
class IdCheck:
    """What came of it: `seq_len` 0 if none fits; faults as (fault, place, evidence)."""

    seq_len: int = 0
    view: str = ""
    faults: list[tuple[str, str, str]] = field(default_factory=list)

    def say(self, fault: str, place: str, evidence: str) -> None:
        self.faults.append((fault, place, evidence))


def check(
    memory: Bytes8, start: int, stop: int, dtype: np.dtype[Any], ids: NDArray[np.uint64], options: Options
) -> IdCheck:
    """Compare; of large files some samples at even distances, unless `options.full`."""
    width = dtype.itemsize
    count = (stop - start) // width
    result = IdCheck(options.seq_len)
    if not len(ids):
        result.say("phantom-ids", "sample 0", "expected an id for each sample, got none")
        return result
    views = _views(memory, start, dtype)
    result.seq_len, result.view = _find(views, ids, count, options.seq_len)
    length = result.seq_len
    empty = np.flatnonzero(ids == np.uint64(EMPTY))
    if len(empty):
        evidence = f"{len(empty)} of {len(ids)} ids are {EMPTY}, the id of no bytes at all"
        result.say("phantom-ids", f"sample {int(empty[0])}", evidence)
    elif len(ids) > 1 and bool((ids == ids[0]).all()):
        result.say("phantom-ids", "sample 0", f"all {len(ids)} ids are {int(ids[0])}")
    if not length:
        result.seq_len = options.seq_len or (count // len(ids) if count and count % len(ids) == 0 else 0)
        if not result.faults:
            evidence = f"the ids of {len(ids)} samples fit the {count} tokens {dtype} under no known reading"
            result.say("ids-mismatch", "sample 0", evidence)
        return result
    whole = count // length
    if len(ids) > whole:
        evidence = f"expected {whole} ids for {count} tokens in samples of {length}, got {len(ids)}"
        result.say("phantom-ids", f"sample {whole}", evidence)
    elif len(ids) < whole or count % length:
        evidence = f"expected ids for {count} tokens in samples of {length}: {whole} and {count % length} tokens over, "
        result.say("ids-count", f"sample {min(len(ids), whole)}", evidence + f"got {len(ids)}")
    if result.view != "own":
        result.say("ids-of-another-view", "sample 0", _WHY[result.view])
        return result
    _compare(result, views["own"], ids, whole, len(ids) * length * width, options)
    return result


_WHY = {
    "widened": "the ids are those of the tokens as 4-byte numbers; the file holds 2-byte ones",
    "narrowed": "the ids are those of the tokens as 2-byte numbers; the file holds 4-byte ones",
    "header": "the ids are those of the file read raw from byte 0: NumPy's header was hashed as tokens",
    "double": "each id is of 4 bytes a token, in a file of 2 a token: spans of two samples, and nothing past half",
    "swapped": "the ids are those of the tokens in the other byte order",
}


def _views(memory: Bytes8, start: int, dtype: np.dtype[Any]) -> dict[str, Sample]:
    width = dtype.itemsize

    def raw(begin: int, step: int) -> Sample:
        return lambda i, n: memory[begin + i * n * step : begin + (i + 1) * n * step].tobytes()

    def cast(to: Any) -> Sample:
        def one(i: int, n: int) -> bytes:
            piece = memory[start + i * n * width : start + (i + 1) * n * width]
            return piece[: len(piece) - len(piece) % width].view(dtype).astype(to).tobytes()

        return one

    views = {"own": raw(start, width), "swapped": cast(dtype.newbyteorder(">"))}
    views["widened" if width == 2 else "narrowed"] = cast("<u4" if width == 2 else "<u2")
    if start:
        views["header"] = raw(0, width)
    if width == 2:
        views["double"] = raw(start, 4)
    return views


def _find(views: dict[str, Sample], ids: NDArray[np.uint64], count: int, told: int) -> tuple[int, str]:
    """(tokens of a sample, view) under which some id fits; (0, '') if none does.

    Spans of 4 bytes a token are those of samples twice as long: they are tried at the length that the counts give only.
    """
    guesses = dict.fromkeys([told] if told else [count // len(ids), -(-count // len(ids))])
    tries = [(view, n) for n in guesses for view in views if 0 < n <= count]
    if not told:
        tries += [(view, n) for view in views if view != "double" for n in _LENGTHS if n <= count]
    for i in dict.fromkeys([0, 1, len(ids) // 3, len(ids) // 2]):
        if i >= len(ids) or int(ids[i]) == EMPTY:
            continue
        for view, length in tries:
            if i < count // length and _id(views[view](i, length)) == int(ids[i]):
                return length, view
    return 0, ""


def _compare(
    result: IdCheck, sample: Sample, ids: NDArray[np.uint64], whole: int, num_bytes: int, options: Options
) -> None:
    most = min(len(ids), whole)
    chosen = np.arange(most)
    if not options.full and num_bytes > options.most_bytes:
        chosen = np.unique(np.linspace(0, most - 1, max(2, most * options.most_bytes // num_bytes)).astype(np.int64))
    wrong = [i for i in chosen.tolist() if _id(sample(i, result.seq_len)) != int(ids[i]) and int(ids[i]) != EMPTY]
    if wrong:
        evidence = (
            f"{len(wrong)} of {len(chosen)} samples are not what their ids say, the others are: their tokens were "
            f"changed, such as by a damaged download (samples {', '.join(map(str, wrong[:8]))})"
        )
        result.say("ids-mismatch", f"sample {wrong[0]}", evidence)


def _id(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
