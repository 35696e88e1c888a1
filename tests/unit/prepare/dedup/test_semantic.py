"""Similar embeddings: against the definition, and the same for any parts, memory and scale."""

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.prepare.dedup.deduplicate import deduplicate
from forebay.prepare.dedup.methods import Dedup
from forebay.storage.store import open_store
from support.dedup_bench import Bench, drop_codes


def vectors(rng: np.random.Generator, rows: int, width: int = 30) -> NDArray[np.float32]:
    """Random directions; a third is near an earlier one."""
    out = rng.standard_normal((rows, width)).astype(np.float32)
    for row in range(1, rows):
        if rng.random() < 0.33:
            out[row] = 3 * out[rng.integers(row)] + rng.choice([0.1, 0.6, 1.5]) * rng.standard_normal(width)
    return out


def column(values: NDArray[np.float32]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def similar_to_better(values: NDArray[np.float32], scores: NDArray[np.float64], similarity: float) -> list[int]:
    """The definition: 1 for a row whose cosine with a better row is `similarity` or more."""
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    cosines = unit @ unit.T
    better = (scores[None, :] > scores[:, None]) | (
        (scores[None, :] == scores[:, None]) & (np.arange(len(values))[None, :] < np.arange(len(values))[:, None])
    )
    return [int(row) for row in ((cosines >= similarity) & better).any(axis=1)]


def gap_near(values: NDArray[np.float32], similarity: float) -> float:
    """A similarity in the middle of the widest gap between cosines near that one: rounding decides nothing there."""
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    cosines = np.unique(unit @ unit.T)
    cosines = cosines[np.abs(cosines - similarity) < 0.05]
    widest = int(np.diff(cosines).argmax())
    assert cosines[widest + 1] - cosines[widest] > 0.002
    return float(cosines[widest : widest + 2].mean())


@pytest.mark.parametrize("keep", ["first", "best"])
def test_decisions_are_those_of_the_definition(bench: Bench, keep, monkeypatch):
    monkeypatch.setattr("forebay.prepare.dedup.deduplicate.MAX_CLUSTERS", 1)
    rng = np.random.default_rng(1)
    values = vectors(rng, 300)
    scores = rng.integers(0, 4, 300).astype(np.float64) if keep == "best" else np.zeros(300)
    score = "edu" if keep == "best" else ""
    similarity = gap_near(values, 0.9)
    config = Dedup(semantic=True, dimension=30, similarity=similarity, keep=keep, score=score)
    parts = [
        bench.sign([""] * len(rows), config, embedding=column(values[rows]), edu=pa.array(scores[rows]))
        for rows in np.array_split(np.arange(300), 3)
    ]
    for memory_bytes in (1 << 14, 64 << 20):
        result = bench.deduplicate(parts, config, memory_bytes)
        codes = drop_codes(result)
        assert codes == similar_to_better(values, scores, similarity)
        assert 30 < result.dropped[0] == sum(codes)


def test_the_same_bytes_for_any_parts_and_scale(bench: Bench, tmp_path):
    values = vectors(np.random.default_rng(3), 900)
    config = Dedup(semantic=True, dimension=30, exact=True, similarity=0.9)
    texts = [f"text {i % 800}" for i in range(900)]
    full = bench.sign(texts, config, embedding=column(values))
    parts = [bench.sign(texts[i : i + 250], config, embedding=column(values[i : i + 250])) for i in range(0, 900, 250)]
    contents = []
    for name, prefixes, scale in (("a", [full], 0), ("b", [full], 2), ("c", parts, 0)):
        result = deduplicate(
            prefixes,
            config,
            open_store(tmp_path / name),
            lambda run, tasks, scale=scale: [run(task, scale) for task in tasks],
            memory_bytes=1 << 16,
        )
        contents.append(drop_codes(result))
    assert contents[0] == contents[1] == contents[2] and {0, 1, 2} == set(contents[0])


def test_documents_without_an_embedding_stay(bench: Bench):
    values = [[1.0, 0.0], None, [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], None, [float("nan"), 1.0], [1e30, 0.0]]
    config = Dedup(semantic=True, dimension=2, similarity=1.0)
    part = bench.sign([""] * 8, config, embedding=pa.array(values, pa.list_(pa.float64())))
    assert bench.deduplicate([part], config).drop[0].load().tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


def test_other_embeddings_are_refused(bench: Bench):
    config = Dedup(semantic=True, dimension=3)
    with pytest.raises(
        PrepareError, match=r"dedup\.embedding: expected a column 'embedding' of lists of floats, got columns text"
    ):
        bench.sign(["a"], config)
    with pytest.raises(PrepareError, match=r"dedup\.dimension: expected embeddings of 3 numbers, got one of 2"):
        bench.sign(["a"], config, embedding=pa.array([[1.0, 2.0]]))
