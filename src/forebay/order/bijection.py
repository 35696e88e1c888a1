"""A keyed bijection on [0, n), and the counter-based random generator that it uses; 64-bit integer arithmetic only.

A generalised Feistel network over Z_a x Z_b, a = ceil(sqrt n), b = ceil(n / a), with cycle walking for the values of
the grid that are >= n. tests/golden/order_v5.json fixes it. Cost: no memory per element, about 0.1 us an index. This is
a shuffle and not a cipher. Sources: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"; Steele, Lea and
Flood 2014, SplitMix64, with Stafford's mix 13.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.arrays import U64
from forebay.errors import UsageError

ROUNDS = 8  # Eight pass the tests of position and of pairs for n from 2 up; six fail them for n from 5 to 10.
MAX_N = 1 << 62  # So that a round's sum and a 32 x 32 bit product stay below 2**64.
_CHUNK = 1 << 14  # Elements at once: 128 KiB an array, so that the rounds stay in the processor's cache.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(s) for s in (27, 30, 31, 32))


def derive_key(seed: int, *parts: int | str) -> bytes:
    """A 16-byte key for a seed and a purpose: BLAKE2b of their unambiguous spelling.

    Integers of any size and sign are allowed; 1 and "1" give different keys.
    """
    spelled = (f"s{len(part)}:{part};" if isinstance(part, str) else f"i{int(part)};" for part in (seed, *parts))
    text = "forebay-order-v3;" + "".join(spelled)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def mix64(z: U64) -> U64:
    """SplitMix64's finaliser: a bijection of 64-bit words; each input bit changes half of the output bits on average.

    Works in place on `z` (an array with at least one dimension) and returns it.
    """
    z ^= z >> _S30
    z *= _MIX_1
    z ^= z >> _S27
    z *= _MIX_2
    z ^= z >> _S31
    return z


def random_words(key: bytes, counter: U64) -> U64:
    """Word number `counter` (of any shape but 0-d) of the stream under a 16-byte key: uniform uint64, any order."""
    k0, k1 = _halves(key)
    z = mix64(counter * _GOLDEN + k0)
    z ^= k1
    return mix64(z)


def subkeys(key: bytes, a: U64, b: U64) -> U64:
    """One 64-bit key (uint64) for each pair (a[i], b[i]) under a 16-byte key: what `permute_each` takes."""
    return mix64(random_words(key, a) + (b + np.uint64(1)) * _GOLDEN)


def permute(index: U64, n: int, key: bytes) -> U64:
    """The image of each index under a keyed bijection on [0, n), n from 1 to 2**62: uint64, values in [0, n).

    A pure function of its arguments. Each key (16 bytes) gives another order.

    Source: Black and Rogaway 2002. Cost: O(len(index)), no state.
    """
    return _permute_flat(index, n, key, is_inverse=False)


def inverse(index: U64, n: int, key: bytes) -> U64:
    """The inverse of `permute`: inverse(permute(i, n, key), n, key) == i. Same arguments."""
    return _permute_flat(index, n, key, is_inverse=True)


def permute_each(index: U64, n: U64, keys: U64) -> U64:
    """`permute` with one domain and one key per element, vectorized.

    All uint64 [K]: index[i] and the result are in [0, n[i]) (not checked); n[i] from 1 to 2**62; `keys` are from
    `subkeys`.
    """
    out = np.empty(len(index), np.uint64)
    for start in range(0, len(index), _CHUNK):
        part = slice(start, start + _CHUNK)
        words = [mix64(keys[part] + np.uint64((r + 1) * int(_GOLDEN) % 2**64)) for r in range(ROUNDS)]
        out[part] = _walk(index[part], n[part], words, is_inverse=False)
    return out


def _permute_flat(index: U64, n: int, key: bytes, *, is_inverse: bool) -> U64:
    if not 1 <= n <= MAX_N:
        raise UsageError(f"permute: expected n from 1 to 2**62, got {n}.")
    indexes = np.asarray(index)
    flat = np.ascontiguousarray(indexes, dtype=np.uint64).reshape(-1)
    if len(flat) and int(flat.max()) >= n:
        raise UsageError(f"permute: expected indexes in [0, {n}), got {int(flat.max())}.")
    words = np.split(random_words(key, np.arange(ROUNDS, dtype=np.uint64)), ROUNDS)
    out = np.empty(len(flat), np.uint64)
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = _walk(flat[part], np.array([n], np.uint64), words, is_inverse=is_inverse)
    return out.reshape(indexes.shape)


def _walk(index: U64, n: U64, words: Sequence[U64], *, is_inverse: bool) -> U64:
    """The network, repeated for values outside of the domain. n and each of the ROUNDS words: [K], or [1] for all."""
    a = _ceil_sqrt(n)
    b = (n + a - np.uint64(1)) // a

    def pass_network(x: U64, rows: Any) -> U64:
        size_a, size_b, *round_words = (v if len(v) == 1 else v[rows] for v in (a, b, *words))
        left: U64 = x // size_b
        right: U64 = x - left * size_b
        for r in reversed(range(ROUNDS)) if is_inverse else range(ROUNDS):
            moved, other, size = (left, right, size_a) if r % 2 == 0 else (right, left, size_b)
            change = mix64(round_words[r] + other * _GOLDEN)  # Its high 32 bits, scaled to [0, size).
            change >>= _S32
            change *= size
            change >>= _S32
            if is_inverse:
                moved -= change
                np.minimum(moved, moved + size, out=moved)  # Below zero wraps to a greater word.
            else:
                moved += change
                np.minimum(moved, moved - size, out=moved)
        left *= size_b
        left += right
        return left

    out = pass_network(index, slice(None))
    outside = np.flatnonzero(out >= n)
    while len(outside):
        out[outside] = pass_network(out[outside], outside)
        outside = outside[out[outside] >= (n if len(n) == 1 else n[outside])]
    return out


def _ceil_sqrt(n: U64) -> U64:
    root: U64 = np.sqrt(n.astype(np.float64)).astype(np.uint64)
    unit = np.uint64(1)
    root -= (root * root > n).astype(np.uint64)
    root += ((root + unit) * (root + unit) <= n).astype(np.uint64)
    root += (root * root < n).astype(np.uint64)
    return root


def _halves(key: bytes) -> tuple[np.uint64, np.uint64]:
    if len(key) != 16:
        raise UsageError(f"order key: expected 16 bytes, got {len(key)}. Make it with derive_key.")
    return np.uint64(int.from_bytes(key[:8], "little")), np.uint64(int.from_bytes(key[8:], "little"))
