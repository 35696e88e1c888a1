"""Rows of tokens out of many open maps by one call: what a loop of row copies does in a third more time.

Hides a NumPy view over the addresses of the whole process, whose row i is the L + 1 tokens that begin at byte i of it.
Fancy indexing copies the rows of a batch in one C call, whichever maps they lie in and however these are aligned:
8 x 2048 U16 tokens to int64 in 9 us, where a Python loop over rows takes 11 and over cold objects 14. Nothing is read
but rows whose every byte was checked to lie inside an open array, and whoever holds indexes must hold the arrays
(`Gather.arrays`). Rows that the view cannot give (no next token at a slice's end, another type than the first array's,
an address out of reach) are copied one by one, 2 us each.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.load.batch import IGNORE_INDEX

I64 = NDArray[np.int64]

_ADDRESS = (1 << 57) - 1  # The bits of an address; no processor's user space reaches further.
_SLOW = 1 << 61  # Copied on its own: the other bits are an address, a type and whether a next token is there.
_ENDS = 1 << 60
_KIND_SHIFT = 57  # Three bits: eight types at once.
_MOST_BYTES = 1 << 62  # NumPy's bound on the size of an array is 2**63.
_FIRST_BYTE = 4096  # No array begins at the null page, and NumPy takes address 0 for none.


class _At:
    """An array interface to memory at an address."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any]):
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": dtype.str,
            "shape": shape,
            "strides": strides,
        }


def array_at(address: int, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Read-only `dtype` [length] at an address. The caller vouches for the memory, and holds it."""
    return np.asarray(_At(address, (length,), None, dtype))


class Span:
    """The rows of `width` items that begin at each byte of a stretch of addresses round `near`.

    Args:
        near: An address; the stretch reaches 2**61 / row bytes to both sides (2**48 for 4096 bytes).
        width: Items in a row, from 1.
        dtype: Of an item.

    Attributes:
        base: The address of row 0.
        rows: dtype [reach, width]; index it with arrays of addresses - base. An index that is too large raises
            IndexError, and nothing is read.
    """

    __slots__ = ("base", "rows")

    def __init__(self, near: int, width: int, dtype: np.dtype[Any]) -> None:
        reach = min(_ADDRESS, _MOST_BYTES // (width * dtype.itemsize))
        self.base = max(_FIRST_BYTE, near - reach // 2)
        self.rows: NDArray[Any] = np.asarray(_At(self.base, (reach, width), (1, dtype.itemsize), dtype))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Span: expected to stay in its process, got a copy or pickle of it. Open the slices anew there."
        )

    def holds(self, array: NDArray[Any]) -> bool:
        """Whether every row that begins in `array` is within reach."""
        return self.base <= array.ctypes.data and array.ctypes.data + array.nbytes - self.base < len(self.rows)


class Flat:
    """Single items of one type anywhere in memory, by address. The caller vouches for each, and holds its array."""

    __slots__ = ("_aligned", "_bytes", "_width")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        reach = _ADDRESS - _FIRST_BYTE
        self._width = dtype.itemsize
        self._aligned: NDArray[Any] = array_at(_FIRST_BYTE, reach // self._width, dtype)
        self._bytes: NDArray[Any] = np.asarray(_At(_FIRST_BYTE, (reach,), (1,), dtype))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Flat: expected to stay in its process, got a copy or pickle of it. Open the slices anew there."
        )

    def aligned(self, addresses: I64) -> bool:
        """Whether all of these are multiples of an item's bytes."""
        return not (addresses % self._width).any()

    def places(self, addresses: I64, aligned: bool) -> I64:
        """What `take` wants for items at these addresses: counted in items where they are aligned, else in bytes."""
        return (addresses - _FIRST_BYTE) // (self._width if aligned else 1)

    def take(self, places: I64, aligned: bool) -> NDArray[Any]:
        """The items at places [n]. Where they are aligned 1 ns each, else 4."""
        return self._aligned.take(places) if aligned else self._bytes[places]


class Gather:
    """Samples of seq_len tokens and the next one, out of arrays added by key. For one thread at a time.

    Args:
        seq_len: L.
        dtype: Of the batches: int64 or int32.
    """

    def __init__(self, seq_len: int, dtype: Any = np.int64) -> None:
        self.seq_len = seq_len
        self.dtype = np.dtype(dtype)
        self._arrays: dict[int, NDArray[Any]] = {}
        self._kinds: list[np.dtype[Any]] = []
        self._span: Span | None = None
        # By key: address (0: not open), samples, the sample without a next token or -1, bytes a sample, _SLOW and kind.
        self._table = np.zeros((5, 64), np.int64)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The open arrays. Indexes are of use as long as somebody holds those they point into."""
        return tuple(self._arrays.values())

    def add(self, key: int, tokens: NDArray[Any]) -> None:
        """Open `tokens` [T], integers, under a key from 0. Not copied if contiguous. A key may be added again."""
        tokens = np.ascontiguousarray(tokens)
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not tokens.dtype.isnative:
            raise DatasetError(f"tokens of slice {key}: expected integers [T], got {tokens.dtype} {tokens.shape}.")
        if tokens.dtype not in self._kinds:
            self._kinds.append(tokens.dtype)
        if self._span is None:
            self._span = Span(tokens.ctypes.data, self.seq_len + 1, tokens.dtype)
        while key >= self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        kind = self._kinds.index(tokens.dtype)
        slow = 0 if kind == 0 and self._span.holds(tokens) else _SLOW | kind << _KIND_SHIFT
        samples, rest = divmod(len(tokens), self.seq_len)
        sample_bytes = self.seq_len * tokens.itemsize
        self._arrays[key] = tokens
        self._table[:, key] = tokens.ctypes.data, samples, -1 if rest else samples - 1, sample_bytes, slow

    def drop(self, key: int) -> None:
        """Close a key; its array lives as long as somebody else holds it. A key that is not open is no error."""
        if self._arrays.pop(key, None) is not None:
            self._table[:, key] = 0

    def indexes(self, keys: I64, samples: I64) -> I64:
        """What `take` wants for sample `samples[i]` of the array under `keys[i]`: int64 [K].

        Raises:
            DatasetError: If a key is not open, or a sample is not inside its array.
        """
        if not len(keys):
            return np.empty(0, np.int64)
        if int(keys.max()) >= self._table.shape[1] or int(keys.min()) < 0:
            raise self._outside(keys, samples)
        addresses, counts, last, sample_bytes, slow = (row.take(keys) for row in self._table)
        if bool(((samples < 0) | (samples >= counts)).any()):
            raise self._outside(keys, samples)
        assert self._span is not None
        found: I64 = samples * sample_bytes
        found += addresses
        ends = samples == last
        alone = np.flatnonzero(ends | (slow != 0))
        special = found[alone] | slow[alone] | _SLOW | np.where(ends[alone], _ENDS, 0)
        found -= self._span.base
        found[alone] = special
        return found

    def _outside(self, keys: I64, samples: I64) -> DatasetError:
        for key, sample in zip(keys.tolist(), samples.tolist()):
            array = self._arrays.get(key)
            if array is None:
                return DatasetError(f"sample {sample} of slice {key}: expected an open slice. Open it first.")
            if not 0 <= sample < len(array) // self.seq_len:
                got = max(0, len(array) - sample * self.seq_len)
                return DatasetError(
                    f"sample {sample} of slice {key}: expected {self.seq_len} tokens, got {got} of a slice of "
                    f"{len(array)}. The dataset changed while it was open; verify it."
                )
        raise AssertionError("every key and sample is inside")

    def take(self, indexes: I64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The samples at `indexes` [B] of `indexes()`, each with its next token, or -100 if its array ends there.

        Args:
            out: [B, L + 1] of the gather's dtype to fill; by default a new array.

        Returns:
            dtype [B, L + 1].
        """
        if self._span is None:
            return self._take_apart(indexes, out)
        try:
            if out is None:
                return self._span.rows[indexes].astype(self.dtype)
            np.copyto(out, self._span.rows[indexes], casting="unsafe")
            return out
        except IndexError:  # Some row is not in the view.
            return self._take_apart(indexes, out)

    def _take_apart(self, indexes: I64, out: NDArray[Any] | None) -> NDArray[Any]:
        if out is None:
            out = np.empty((len(indexes), self.seq_len + 1), self.dtype)
        alone = indexes >= _SLOW
        if self._span is not None:
            out[~alone] = self._span.rows[indexes[~alone]]
        for row in np.flatnonzero(alone).tolist():
            index = int(indexes[row])
            length = self.seq_len + (not index & _ENDS)
            out[row, self.seq_len] = IGNORE_INDEX
            out[row, :length] = array_at(index & _ADDRESS, length, self._kinds[index >> _KIND_SHIFT & 7])
        return out
