"""Contaminated documents: all planted ones are found in real text, in any disguise, and nothing else is."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.prepare.decontaminate import Decontaminate
from forebay.prepare.dedup.kernels import character_table, read_words
from forebay.prepare.documents import text_buffers
from forebay.prepare.report import load_report
from support.batches import to_batch
from support.preparing import prepare, read_lines, write_jsonl

WORDS = [f"word{i}" for i in range(500)]


AFTER_A_SELECTION = {"read": {"columns": {"n": "number"}}, "select": {"column": "n", "keep_percentile": [0, 100]}}


@pytest.mark.parametrize("method, before", [("overlap", {}), ("ngram", {}), ("ngram", AFTER_A_SELECTION)])
def test_planted_documents_are_found_and_no_other(tmp_path, method, before):
    chance = random.Random(7)
    pool = [" ".join(chance.choices(WORDS, k=30)) for _ in range(600)]
    instances = [{"id": f"i{i}", "question": pool[2 * i], "answer": pool[2 * i + 1]} for i in range(60)]
    documents = [
        {"id": f"planted{i}", "text": "\n\n".join([item["question"], *pool[120:130], item["answer"].upper()])}
        for i, item in enumerate(instances)
    ]
    documents += [{"id": f"clean{i}", "text": "\n\n".join(pool[i : i + 12])} for i in range(120, 600, 12)]
    chance.shuffle(documents)
    sets = [write_jsonl(tmp_path / "first.jsonl", instances[:30]), tmp_path / "second.parquet"]
    pq.write_table(pa.Table.from_pylist(instances[30:]), sets[1])
    source, out = write_jsonl(tmp_path / "in.jsonl", ({**item, "n": 1} for item in documents)), tmp_path / "out"
    settings = {**before, "decontaminate": {"sets": list(map(str, sets)), "method": method}}
    result = prepare(source, out, settings=settings, write_ids=tmp_path / "ids")
    assert result.dropped == {"contaminated_first": 30, "contaminated_second": 30}
    assert (tmp_path / "ids").read_text().split() == [d["id"] for d in documents if d["id"].startswith("clean")]
    hits = read_lines(out / "contamination.jsonl")
    assert {hit["id"]: hit["instance"] for hit in hits} == {f"planted{i}": f"i{i}" for i in range(60)}
    assert all(documents[int(hit["where"].rpartition(":")[2]) - 1]["id"] == hit["id"] for hit in hits)
    report = load_report(out)["contamination"]
    shown = [{key: entry[key] for key in ("name", "instances", "too_short", "documents")} for entry in report["sets"]]
    assert shown == [{"name": n, "instances": 30, "too_short": 0, "documents": 30} for n in ("first", "second")]
    assert len(report["hits"]) == 40
    page = (out / "report.html").read_text("utf-8")
    assert "Contaminated documents" in page and f">{hits[0]['instance']}<" in page


def hashed_words(text: str) -> list[int]:
    """The reference's words: their hashes."""
    offsets, data = text_buffers(pa.array([text], pa.large_string()))
    out = pa.array([0]).to_numpy().astype("u8").repeat(len(data) + 2)
    _, have = read_words(data, 0, int(offsets[1]), character_table("words"), out, 0)
    return [int(word) for word in out[:have]]


def is_contaminated(text: str, fields: list[str], ngram: int, min_ratio: float) -> bool:
    """The definition, without an index."""
    words = hashed_words(text)
    grams = {tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)}
    units = [*fields, " ".join(fields)] if len(fields) > 1 else fields
    for unit in map(hashed_words, units):
        covered = [False] * len(unit)
        for i in range(len(unit) - ngram + 1):
            if tuple(unit[i : i + ngram]) in grams:
                covered[i : i + ngram] = [True] * ngram
        if any(covered) and sum(covered) >= min_ratio * len(unit):
            return True
    return False


TEXT = st.lists(st.sampled_from(["a", "b", "c", "d", "東京", "É", "x\u200b", "\u00ad", "-", "\n"]), max_size=14).map(
    " ".join
)


@given(
    records=st.lists(st.lists(TEXT, min_size=1, max_size=3), min_size=1, max_size=4),
    texts=st.lists(TEXT, min_size=1, max_size=6),
    ngram=st.integers(1, 5), min_ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0]), start=st.integers(0, 6),
)  # fmt: skip
def test_decisions_are_those_of_the_definition(
    tmp_path_factory,
    records,
    texts,
    ngram,
    min_ratio,
    start,
):
    path = tmp_path_factory.mktemp("sets") / "set.jsonl"
    rows = [{f"f{i}": field for i, field in enumerate(fields) if field} for fields in records]
    write_jsonl(path, [row for row in rows if row] or [{"f0": "none"}])
    instances = [[field for field in fields if field] for fields in records if any(fields)] or [["none"]]
    stage = Decontaminate(sets=(str(path),), ngram=ngram, min_ratio=min_ratio)
    batch = to_batch(texts)
    try:
        drop = [*stage.apply(batch.slice(0, start)).drop, *stage.apply(batch.slice(start)).drop]
    except PrepareError as error:  # No instance is long enough: the definition finds none, either.
        assert f"an evaluation set of {ngram} words or more" in str(error)
        drop = [1] * len(texts)
    expected = [any(is_contaminated(text, fields, ngram, min_ratio) for fields in instances) for text in texts]
    assert [code == 0 for code in drop] == expected


def test_cut_removes_the_match_and_its_margin(tmp_path):
    instance = "The quick brown fox jumps over the lazy dog while seven wizards watch"
    sets = (str(write_jsonl(tmp_path / "s.jsonl", [{"text": instance}])),)
    stage = Decontaminate(sets=sets, action="cut")
    before, after = "ﬁ" * 500, "ü" * 400
    texts = [f"{before} {instance}. {after}", instance, f"{before * 2} {instance} " * 11 + after, "clean text"]
    result = stage.apply(to_batch(texts))
    cut = result.batch.column("text").to_pylist()
    assert cut[0] == f"{'ﬁ' * 301}\n\n{'ü' * 202}"
    assert result.drop.tolist() == [-1, 0, 0, -1] and cut[3] == "clean text" and dict(result.counts) == {"cut": 1}
    assert [(row, hit["action"]) for row, hit in result.hits] == [(0, "cut"), (1, "dropped"), (2, "dropped")]


def test_fields_are_chosen_and_lists_count(tmp_path):
    rows = [{"q": "alpha beta gamma delta", "choices": {"text": ["one two three", "four five six"]}, "n": 5}]
    path = str(write_jsonl(tmp_path / "s.jsonl", rows))
    texts = ["alpha beta gamma delta", "one two three four five six", "five six"]
    contaminated = {
        fields: [code == 0 for code in Decontaminate((path,), fields, ngram=3).apply(to_batch(texts)).drop]
        for fields in ((), ("q",), ("choices",))
    }
    assert contaminated == {(): [True, True, False], ("q",): [True, False, False], ("choices",): [False, True, False]}


@pytest.mark.parametrize("data", [b"{", b'{"question": 5}\n', b'{"question": "\xff"}\n', b""])
def test_a_damaged_set_is_an_error(tmp_path, data):
    (tmp_path / "set.jsonl").write_bytes(data)
    with pytest.raises(PrepareError, match=r"set\.jsonl"):
        Decontaminate(sets=(str(tmp_path / "set.jsonl"),)).files()
