"""Trains a fastText classifier of good and bad documents, and measures it on documents that were held out.

The model is fastText's own (`supervised`, softmax, word n-grams) and its file is read by fastText. One thread and a
seed: the same documents give the same model. Memory: the documents, at most 256 MiB a side, and the matrices.
Source: Joulin et al. 2016; Li et al. 2024 (DCLM), section 4.4, for word bigrams and two labels.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import F64, Array
from forebay.errors import PrepareError
from forebay.files import atomic_write
from forebay.formats.inputs import ReadOptions
from forebay.prepare.compiled import jit
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.prepare.scores.fasttext_kernels import hash_bytes
from forebay.prepare.scores.fasttext_model import FastTextModel, load_model
from forebay.prepare.settings import Json, Positive, Settings

MODEL_FILE, CURVE_FILE = "model.bin", "curve.json"
LABELS = ("good", "bad")
MAX_SIDE_BYTES = 256 << 20  # Documents of a side beyond this are left out.
_MIN_HELD_OUT = 2
_RECALLS = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class ClassifierSettings(Settings):
    """Settings of a classifier.

    Args:
        held_out: Share of the documents that are not trained on, chosen by a hash of their text.
        dim: Numbers in a vector.
        word_ngrams: Runs of up to so many words are features.
        bucket: Rows for hashed n-grams.
        min_count: Rarer words are no features of their own.
        epochs, lr: Passes over the documents, and the first learning rate, which falls to 0.
        seed: Of the first vectors and the order of the documents.
    """

    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    dim: Annotated[int, Field(ge=1, le=1024)] = 32
    word_ngrams: Annotated[int, Field(ge=1, le=5)] = 2
    bucket: Annotated[int, Field(ge=1, le=1 << 24)] = 1 << 18
    min_count: Positive = 2
    epochs: Positive = 5
    lr: Annotated[float, Field(gt=0)] = 0.5
    seed: int = 0


def train_classifier(
    good_inputs: Sequence[Path | str],
    bad_inputs: Sequence[Path | str],
    out: Path,
    training: ClassifierSettings = ClassifierSettings(),
    read: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
) -> Json:
    """Train on documents of any format of `forebay.formats`; write `model.bin` and `curve.json` to `out`.

    Returns:
        The contents of `curve.json`: documents, ROC AUC, average precision, and for several shares of the good
        documents (recall) the least probability of `good` that keeps them, its precision, and the share of bad ones
        kept.

    Raises:
        PrepareError: If a side has no document to train on, or fewer than two held out.
    """
    sides = [_split(_texts(paths, read), training) for paths in (good_inputs, bad_inputs)]
    for label, (train, held_texts) in zip(LABELS, sides):
        if not train or len(held_texts) < _MIN_HELD_OUT:
            raise PrepareError(
                f"classifier: expected {label} documents to train on, and {_MIN_HELD_OUT} or more held out, "
                f"got {len(train)} and {len(held_texts)}. Give more documents, or raise --held-out."
            )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / MODEL_FILE, _train([train for train, _ in sides], training))
    load_model.cache_clear()  # another may have been read from this path
    model = load_model(str(out / MODEL_FILE))
    curve = {
        "settings": asdict(training),
        "documents": {
            label: {"train": len(train), "held_out": len(held_texts)}
            for label, (train, held_texts) in zip(LABELS, sides)
        },
        **_curve(*(_good_scores(model, held_texts) for _, held_texts in sides)),
    }
    atomic_write(out / CURVE_FILE, json.dumps(curve, indent=1).encode() + b"\n")
    return curve


def _texts(paths: Sequence[Path | str], read: ReadOptions) -> Iterator[bytes]:
    size = 0
    for split in split_files(find_inputs(list(paths), read).files, read):
        for record in read_split(split, read):
            if record.problem or not record.text.strip():
                continue
            text = record.text.encode("utf-8", "replace").replace(b"\0", b" ")
            size += len(text)
            if size > MAX_SIDE_BYTES:
                return
            yield text


def _split(texts: Iterator[bytes], training: ClassifierSettings) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on, and those held out; equal texts are on one side, once."""
    train: list[bytes] = []
    held_texts: list[bytes] = []
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            (held_texts if int.from_bytes(digest[:8], "little") < training.held_out * 2**64 else train).append(text)
    return train, held_texts


def _train(sides: Sequence[Sequence[bytes]], training: ClassifierSettings) -> bytes:
    documents = [(text, label) for label, texts in enumerate(sides) for text in texts]
    counts: Counter[bytes] = Counter()
    for text, _ in documents:
        counts.update(_words(text))
    counts[b"</s>"] = max(len(documents), training.min_count)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    number_of = {word: index for index, (word, _) in enumerate(ordered)}
    num_words = sum(count >= training.min_count for _, count in ordered)
    unsigned = [hash_bytes(np.frombuffer(word, np.uint8), 0, len(word)) for word, _ in ordered]
    hashes = np.array(unsigned, np.uint32).astype(np.int32)
    tokens, offsets = [], [0]
    for text, _ in documents:
        words = [number for word in _words(text) if (number := number_of.get(word)) is not None]
        tokens.append(np.array([*words, number_of[b"</s>"]], np.int32))
        offsets.append(offsets[-1] + len(tokens[-1]))
    rng = np.random.default_rng(training.seed)
    rows = num_words + training.bucket
    inputs = rng.uniform(-1 / training.dim, 1 / training.dim, (rows, training.dim)).astype(np.float32)
    outputs = np.zeros((len(LABELS), training.dim), np.float32)
    labels = np.array([label for _, label in documents], np.int64)
    for epoch in range(training.epochs):
        rates = training.lr * np.array([1 - epoch / training.epochs, 1 - (epoch + 1) / training.epochs])
        order = rng.permutation(len(documents))
        _train_epoch(
            np.array(offsets, np.int64), np.concatenate(tokens), labels, order, hashes, num_words, training.word_ngrams,
            training.bucket, rates, inputs, outputs,
        )  # fmt: skip
    # As the library: the labels are in the order of their frequency.
    ranking = sorted(range(len(LABELS)), key=lambda label: (-len(sides[label]), label))
    entries = [(word, count, 0) for word, count in ordered[:num_words]]
    entries += [(b"__label__" + LABELS[label].encode(), len(sides[label]), 1) for label in ranking]
    return _file(training, entries, inputs, outputs[ranking])


def _words(text: bytes) -> list[bytes]:
    """What the library reads as words: it takes labels out, and ends a text at its own mark."""
    words = text.split()
    stop = words.index(b"</s>") if b"</s>" in words else len(words)
    return [word for word in words[:stop] if not word.startswith(b"__label__")]


@jit()
def _train_epoch(offsets, tokens, labels, order, hashes, num_words, ngrams, bucket, rates, inputs, outputs):  # type: ignore[no-untyped-def]
    dim = inputs.shape[1]
    longest = 0
    for document in range(len(labels)):
        longest = max(longest, offsets[document + 1] - offsets[document])
    rows = np.empty(longest * ngrams, np.int64)
    hidden, gradient = np.empty(dim, np.float32), np.empty(dim, np.float32)
    scores = np.empty(len(outputs), np.float32)
    for step in range(len(order)):
        document = order[step]
        rate = np.float32(rates[0] + (rates[1] - rates[0]) * step / len(order))
        start, stop = offsets[document], offsets[document + 1]
        count = 0
        for i in range(start, stop):
            if tokens[i] < num_words:
                rows[count] = tokens[i]
                count += 1
        for i in range(start, stop):
            gram = np.uint64(np.int64(hashes[tokens[i]]))
            for j in range(i + 1, min(stop, i + ngrams)):
                gram = gram * np.uint64(116049371) + np.uint64(np.int64(hashes[tokens[j]]))
                rows[count] = num_words + np.int64(gram % np.uint64(bucket))
                count += 1
        if count == 0:
            continue
        hidden[:] = 0
        for k in range(count):
            for i in range(dim):
                hidden[i] += inputs[rows[k], i]
        scale = np.float32(1.0 / count)
        total = np.float32(0)
        for i in range(dim):
            hidden[i] *= scale
        for label in range(len(outputs)):
            scores[label] = 0
            for i in range(dim):
                scores[label] += outputs[label, i] * hidden[i]
        largest = scores.max()
        for label in range(len(outputs)):
            scores[label] = np.exp(scores[label] - largest)
            total += scores[label]
        gradient[:] = 0
        for label in range(len(outputs)):
            error = rate * (np.float32(label == labels[document]) - scores[label] / total)
            for i in range(dim):
                gradient[i] += error * outputs[label, i]
                outputs[label, i] += error * hidden[i]
        for k in range(count):
            for i in range(dim):
                inputs[rows[k], i] += gradient[i] * scale


def _file(
    training: ClassifierSettings, entries: Sequence[tuple[bytes, int, int]], inputs: Array, outputs: Array
) -> bytes:
    num_words = sum(kind == 0 for _, _, kind in entries)
    parts = [
        struct.pack("<2i", 793712314, 12),
        struct.pack(
            "<12id", training.dim, 5, training.epochs, training.min_count, 5, training.word_ngrams, 3, 3,
            training.bucket, 0, 0, 100, 1e-4,
        ),
        struct.pack("<iiiqq", len(entries), num_words, len(entries) - num_words, sum(n for _, n, _ in entries), -1),
        *(word + b"\0" + struct.pack("<qb", count, kind) for word, count, kind in entries),
    ]  # fmt: skip
    for matrix in (inputs, outputs):
        parts += [struct.pack("<?qq", False, *matrix.shape), matrix.astype("<f4").tobytes()]
    return b"".join(parts)


def _good_scores(model: FastTextModel, texts: Sequence[bytes]) -> F64:
    column = pa.array([text.decode() for text in texts], pa.large_string())
    return model.probabilities(column)[:, model.label_index(LABELS[0])].astype(np.float64)


def _curve(good: F64, others: F64) -> Json:
    scores = np.concatenate([good, others])
    values, index = np.unique(-scores, return_inverse=True)  # from the highest score down
    kept_good = np.cumsum(np.bincount(index[: len(good)], minlength=len(values)))
    kept_bad = np.cumsum(np.bincount(index[len(good) :], minlength=len(values)))
    recalls, false_rates = np.r_[0, kept_good / len(good)], np.r_[0, kept_bad / len(others)]
    precisions = kept_good / (kept_good + kept_bad)
    points = {}
    for share in _RECALLS:
        point = int(np.searchsorted(kept_good, share * len(good) - 1e-9))
        points[point] = {
            "threshold": float(-values[point]), "precision": float(precisions[point]),
            "recall": float(recalls[point + 1]), "bad_kept": float(false_rates[point + 1]),
        }  # fmt: skip
    areas = [(b - a) * (c + d) / 2 for (a, b), (c, d) in zip(pairwise(false_rates), pairwise(recalls))]
    return {
        "roc_auc": float(sum(areas)),
        "average_precision": float((np.diff(recalls) * precisions).sum()),
        "curve": list(points.values()),
    }
