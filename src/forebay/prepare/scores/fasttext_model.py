"""fastText classifiers (`.bin` and the quantised `.ftz`) from their files, without the library.

A file is data of strangers: every size is checked against the file before anything is allocated, every index before it
is used. Dense matrices are mapped, so that the processes of a machine share them. Losses: softmax, hierarchical
softmax, one-vs-all and negative sampling.
"""

import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from forebay.arrays import F32, I64, U8, Array
from forebay.base import Json
from forebay.errors import UsageError, error_text, listed
from forebay.prepare.documents import text_buffers
from forebay.prepare.scores import fasttext_kernels as kernels

_MAGIC, _VERSIONS = 793712314, (11, 12)
_SUPERVISED = 3
_LOSSES = {1: kernels.HIERARCHICAL, 2: kernels.SIGMOID, 3: kernels.SOFTMAX, 4: kernels.SIGMOID}
_MAX_DIM, _MAX_GRAM = 1 << 14, 64
_MAX_DENSE_BYTES = 256 << 20  # A quantised matrix that is no larger is unpacked: adding rows is then 4 times as fast.
_NOT_QUANTISED = {
    "codes": np.zeros((0, 0), np.uint8), "centroids": np.zeros(0, np.float32), "norms": np.zeros(0, np.float32),
    "width": 0,
}  # fmt: skip
_PREFIX = b"__label__"


class FastTextModel:
    """A classifier; `labels` are without the prefix `__label__`."""

    def __init__(self, labels: tuple[str, ...], loss: int, net: kernels.Network, output: Any, tree: Any) -> None:
        self.labels = labels
        self._loss, self._net, self._output, self._tree = loss, net, output, tree

    def probabilities(self, texts: pa.Array, max_chars: int = 0) -> F32:
        """float32 [texts, labels], as the library's `predict` gives them for the text as one line, but at most 1.

        NaN for a text without words. `max_chars`: only so many characters of a text count; 0: all.
        """
        offsets, data = text_buffers(texts)
        stops = offsets[1:]
        if max_chars:
            stops = np.empty(len(texts), np.int64)
            kernels.clip_chars(offsets, data, max_chars, stops)
            stops.flags.writeable = False
        hidden = np.empty((len(texts), self._output.shape[1]), np.float32)
        kernels.average_rows(self._net, offsets, stops, data, hidden)
        out = np.empty((len(texts), len(self.labels)), np.float32)
        kernels.score_labels(self._loss, hidden, self._output, self._tree, out)
        return out

    def label_index(self, label: str) -> int:
        """The column of a label, with or without its prefix. Raises UsageError if there is none."""
        name = label.removeprefix(_PREFIX.decode())
        if name not in self.labels:
            raise UsageError(f"label: expected one of the model's labels ({listed(self.labels)}), got {label!r}")
        return self.labels.index(name)


@lru_cache(8)
def load_model(path: str) -> FastTextModel:
    """The model in a file; a few are kept a process. Raises UsageError if there is none, or it is damaged."""
    try:
        with Path(path).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UsageError(f"model: expected a fastText model, got no file at {path} ({error_text(error)})") from error
    return _Parser(path, np.frombuffer(data, np.uint8)).model()


class _Parser:
    def __init__(self, path: str, data: U8) -> None:
        self._path, self._data, self._pos = path, data, 0

    def _fail(self, message: str) -> NoReturn:
        raise UsageError(f"model: expected a fastText model at {self._path}, got {message}")

    def _read(self, layout: str) -> Any:
        size = struct.calcsize("<" + layout)
        if size > len(self._data) - self._pos:
            self._fail("a file that ends too early")
        values = struct.unpack("<" + layout, self._data[self._pos : self._pos + size].tobytes())
        self._pos += size
        return values if len(values) > 1 else values[0]

    def _array(self, kind: str, *shape: int) -> Array:
        count = int(np.prod([int(size) for size in shape], dtype=object))
        size = count * np.dtype(kind).itemsize
        if min(shape) < 0 or size > len(self._data) - self._pos:
            self._fail("a file that ends too early")
        array = np.frombuffer(self._data, kind, count, self._pos).reshape(shape)
        self._pos += size
        return array

    def model(self) -> FastTextModel:
        if len(self._data) < 8 or self._read("i") != _MAGIC:
            self._fail("a file of another kind")
        version = self._read("i")
        if version not in _VERSIONS:
            self._fail(f"version {version} of the format, of which {_VERSIONS} are known")
        dim, _, _, _, _, ngrams, loss, kind, bucket, minn, maxn, _, _ = self._read("12id")
        if kind != _SUPERVISED or loss not in _LOSSES:
            self._fail("word vectors or an unknown loss: a classifier is needed (`fasttext supervised`)")
        if version == _VERSIONS[0]:
            maxn = 0  # such models were trained without subwords, whatever they say
        in_range = 1 <= dim <= _MAX_DIM and bucket >= 0 and all(0 <= n <= _MAX_GRAM for n in (ngrams, minn, maxn))
        if not in_range or ((maxn > 0 or ngrams > 1) and bucket == 0):
            self._fail(f"settings out of range (dim {dim}, bucket {bucket}, n-grams {ngrams}, {minn} to {maxn})")
        starts, stops, counts, num_words, prune = self._dictionary()
        labels = tuple(
            bytes(self._data[a:b]).removeprefix(_PREFIX).decode("utf-8", "replace")
            for a, b in zip(starts[num_words:], stops[num_words:])
        )
        quantised = self._read("?")
        matrix = self._matrix(quantised, dim)
        rows = max(len(matrix["codes"]), len(matrix["dense"]))
        hashes = maxn > 0 or ngrams > 1
        if rows < num_words or (hashes and prune is None and rows < num_words + bucket):
            self._fail("matrices that do not fit its dictionary")
        hashed: Json = {"present": np.zeros(0, np.uint64), "ranks": np.zeros(0, np.int32)}
        if hashes and prune is not None:
            hashed = self._hashed(prune, num_words, bucket, matrix)
        output = self._matrix(self._read("?") and quantised, dim)["dense"]
        if len(output) != len(labels):
            self._fail("matrices that do not fit its dictionary")
        slots = np.full(1 << max(4, int(len(starts) * 2 - 1).bit_length()), -1, np.int32)
        kernels.index_entries(self._data, starts, stops, slots)
        sizes = num_words, bucket, max(1, minn), maxn, ngrams, matrix.pop("width")
        net = kernels.Network(self._data, starts, stops, slots, sizes, **hashed, **matrix)
        tree = _tree(counts[num_words:]) if _LOSSES[loss] == kernels.HIERARCHICAL else np.zeros((0, 2), np.int64)
        return FastTextModel(labels, _LOSSES[loss], net, output, tree)

    def _dictionary(self) -> tuple[Any, Any, Any, int, dict[int, int] | None]:
        entries, num_words, num_labels, _, num_pruned = self._read("iiiqq")
        if not (num_words >= 0 and num_labels > 0 and entries == num_words + num_labels):
            self._fail("a damaged dictionary")
        if entries * 10 > len(self._data) or num_pruned * 8 > len(self._data):
            self._fail("a file that ends too early")
        starts, stops, counts = (np.empty(entries, np.int64) for _ in range(3))
        types = np.empty(entries, np.uint8)
        self._pos = int(kernels.parse_entries(self._data, self._pos, starts, stops, counts, types))
        if self._pos < 0:
            self._fail("a file that ends too early")
        if types[:num_words].any() or (types[num_words:] != 1).any():
            self._fail("a damaged dictionary: words come before labels")
        if num_pruned < 0:
            return starts, stops, counts, num_words, None
        pairs = self._array("<i4", num_pruned, 2).tolist() if num_pruned else []
        return starts, stops, counts, num_words, dict(pairs)

    def _hashed(self, prune: dict[int, int], num_words: int, bucket: int, matrix: Json) -> Json:
        """Which features have rows; the rows of `matrix` are put in the order of the features."""
        features, targets = (np.array(list(values), np.int64) for values in (prune.keys(), prune.values()))
        rows = max(len(matrix["codes"]), len(matrix["dense"])) - num_words
        if len(prune) and not (0 <= features.min() <= features.max() < bucket and targets.min() >= 0):
            self._fail("a damaged dictionary")
        if len(prune) and targets.max() >= rows:
            self._fail("matrices that do not fit its dictionary")
        present = np.zeros(bucket // 64 + 1, np.uint64)
        np.bitwise_or.at(present, features >> 6, np.uint64(1) << (features & 63).astype(np.uint64))
        order = np.concatenate([np.arange(num_words), num_words + targets[np.argsort(features)]])
        for name in ("dense", "codes", "norms"):
            if len(matrix[name]):
                matrix[name] = matrix[name][order]
        return {"present": present, "ranks": np.cumsum([0, *np.bitwise_count(present)[:-1]]).astype(np.int32)}

    def _matrix(self, quantised: bool, dim: int) -> Json:
        if not quantised:
            rows, columns = self._read("qq")
            if columns != dim:
                self._fail(f"rows of {columns} numbers where its settings say {dim}")
            return {"dense": self._array("<f4", rows, columns), **_NOT_QUANTISED}
        has_norms = self._read("?")
        rows, columns, size = self._read("qqi")
        if columns != dim or rows < 0:
            self._fail(f"rows of {columns} numbers where its settings say {dim}")
        if rows == 0 or size % rows:
            self._fail("a damaged matrix")
        codes = self._array("u1", rows, size // rows)
        centroids, parts, width = self._quantiser(dim)
        if parts != size // rows:
            self._fail("a damaged matrix")
        norms = np.ones(rows, np.float32)
        if has_norms:
            norm_codes = self._array("u1", rows)
            norms = np.ascontiguousarray(self._quantiser(1)[0][norm_codes])
        quantised_matrix = {"codes": codes, "centroids": centroids, "norms": norms, "width": width}
        if rows * dim * 4 > _MAX_DENSE_BYTES:
            return {"dense": np.zeros((0, dim), np.float32), **quantised_matrix}
        dense = np.empty((rows, dim), np.float32)
        for part in range(parts):
            size = min(width, dim - part * width)
            table = centroids[part * 256 * width :][: 256 * size].reshape(256, size)
            dense[:, part * width : part * width + size] = table[codes[:, part]]
        with np.errstate(all="ignore"):
            dense *= norms[:, None]
        return {"dense": dense, **_NOT_QUANTISED}

    def _quantiser(self, dim: int) -> tuple[F32, int, int]:
        size, parts, width, last = self._read("4i")
        if size != dim or parts < 1 or width < 1 or not 1 <= last <= width or (parts - 1) * width + last != dim:
            self._fail("a damaged quantiser")
        return self._array("<f4", dim * 256).astype(np.float32), parts, width


def _tree(counts: I64) -> I64:
    """The children of each node of the Huffman tree of labels, which are nodes 0 to labels - 1, by falling counts."""
    labels = len(counts)
    nodes = [*counts.tolist(), *[10**15] * (labels - 1)]
    tree = np.full((2 * labels - 1, 2), -1, np.int64)
    leaf, node = labels - 1, labels
    for parent in range(labels, 2 * labels - 1):
        for side in range(2):
            if leaf >= 0 and (node >= len(nodes) or nodes[leaf] < nodes[node]):
                tree[parent, side], leaf = leaf, leaf - 1
            else:
                tree[parent, side], node = node, node + 1
        nodes[parent] = nodes[tree[parent, 0]] + nodes[tree[parent, 1]]
    return tree
