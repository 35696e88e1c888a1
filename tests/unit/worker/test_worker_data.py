"""Dummies and datasets by name: ranks' shares, labels, state, the catalogue."""

import hashlib
import json
import logging
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import DatasetError, PrepareError, StateError, UnknownDatasetError
from forebay.stream.lane import StreamOptions
from forebay.stream.text_stream import TextStream
from forebay.worker import DummyDataset, HubDataset, create_huggingface_dataset, list_available_datasets
from forebay.worker.batches import Batches, dummy_samples
from forebay.worker.catalog import CATALOG, CatalogEntry, find_entry
from support.preparing import write_jsonl

GUIDE = """\
fineweb: FineWeb: 15T tokens from CommonCrawl
fineweb-edu: FineWeb-Edu: 1.3T high-quality educational tokens
pile: The Pile: 825GB diverse dataset (22 sources)
tiny_shakespeare: Tiny Shakespeare: 40K lines for testing
shakespeare: Complete Works of Shakespeare, line-by-line"""


@pytest.fixture
def texts(tmp_path) -> Path:
    """750 documents of some 40 letters in three files, no two alike."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for part in range(3):
        texts = [hashlib.sha256(f"{part}-{i}".encode()).hexdigest()[: i % 44 + 20] for i in range(250)]
        write_jsonl(folder / f"{part}.jsonl", texts)
    return folder


def text_dataset(folder: Path, **settings: object) -> HubDataset:
    arguments = {"tokenizer_name": "bytes", "seq_len": 16, "batch_size": 3, "num_batches": 6, **settings}
    return create_huggingface_dataset(str(folder), **arguments)


def rows_by_id(dataset: Batches) -> dict[int, tuple[bytes, bytes]]:
    """Inputs and labels by sample id."""
    result = {}
    for batch in dataset.batches():
        for sample, inputs, labels in zip(batch.sample_ids.tolist(), batch.inputs, batch.labels):
            assert sample not in result
            result[sample] = (inputs.tobytes(), labels.tobytes())
    return result


def test_the_catalogue_prints_as_the_guide_does():
    result = list_available_datasets()
    assert "\n".join(f"{item['name']}: {item['description']}" for item in result) == GUIDE
    assert [item["size"] for item in result] == ["15T tokens", "1.3T tokens", "825 GB", "1 MB", "~5 MB"]
    assert [item["streaming"] for item in result] == [True, True, True, False, False]
    assert result[2]["num_sources"] == 22
    assert result[0]["size_tokens"] == 15 * 10**12 and result[4]["size_bytes"] == 5 * 10**6


def test_names_and_the_rule_of_streaming():
    custom = find_entry("bigcode/the-stack")
    assert (custom.streaming, custom.buffer_size, custom.tokenizer, custom.seq_len) == (True, 10_000, "gpt2", 512)
    assert custom.text_key == "content"
    assert find_entry("HuggingFaceFW/fineweb-edu") is CATALOG["fineweb-edu"]
    assert find_entry("hf:EleutherAI/pile") is CATALOG["pile"]
    here = find_entry("./texts.jsonl")
    assert here.local and here.repository == str(Path("texts.jsonl").absolute())
    with pytest.raises(FileNotFoundError, match=r"^Dataset 'my-dataset' not found.*full path") as missing:
        find_entry("my-dataset")
    assert isinstance(missing.value, UnknownDatasetError)
    with pytest.raises(UnknownDatasetError, match="Did you mean 'tiny_shakespeare'"):
        find_entry("tiny-shakespear")
    streaming = [CatalogEntry("a", "a/b", size_bytes=size).streaming for size in (None, 10**10, 10**10 + 1)]
    assert streaming == [True, False, True]


def test_dummy_tokens_never_change():
    tokens = dummy_samples(np.arange(8, dtype=np.int64), seed=42, seq_len=32, vocab_size=50257)
    assert tokens.shape == (8, 33)
    assert hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()[:16] == "7c218e3345a8c6c6"


def test_a_dummy_begins_anew_each_time_and_has_a_length():
    data = DummyDataset(num_batches=3)
    first = rows_by_id(data)
    assert len(data) == 3 and len(first) == 12
    next(iter(data))
    assert rows_by_id(data) == first


def test_dummies_as_tensors_leave_the_generator_alone():
    torch = pytest.importorskip("torch")
    before = torch.random.get_rng_state()
    inputs, labels = next(iter(DummyDataset()))
    assert inputs.shape == labels.shape == (4, 32) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("world_size, lanes", [(1, None), (2, None), (3, 1), (4, 6)])
def test_sample_k_goes_to_rank_k_mod_world_size(texts, world_size, lanes):
    alone = rows_by_id(text_dataset(texts, batch_size=2 * world_size, lanes=lanes or world_size))
    parts = [
        rows_by_id(text_dataset(texts, batch_size=2, rank=rank, world_size=world_size, lanes=lanes))
        for rank in range(world_size)
    ]
    for rank, part in enumerate(parts):
        assert sorted(part) == list(range(rank, 12 * world_size, world_size))
        assert part == {sample: alone[sample] for sample in part}
    assert sum(map(len, parts)) == len(alone)


def test_text_in_ids_out_and_no_sample_is_padded(texts):
    data = text_dataset(texts, buffer_size=0, batch_size=4)
    ids = []
    for batch in data.batches():
        assert batch.inputs.shape == (4, 16) and (batch.labels != -100).all()
        assert (batch.inputs[:, 1:] == batch.labels[:, :-1]).all()
        ids += batch.inputs.ravel().tolist()
    rows = [json.loads(line)["text"] for line in (texts / "0.jsonl").read_text().splitlines()]
    assert ids == [byte for row in rows for byte in (*row.encode(), 256)][: len(ids)]
    assert data.vocab_size == 257


def test_a_dataset_that_is_used_up_begins_again_and_says_so(texts, caplog):
    data = text_dataset(texts, seq_len=64, batch_size=100, num_batches=18)
    with caplog.at_level(logging.WARNING, "forebay.worker"):
        epochs = [batch.epoch for batch in data.batches()]
    assert len(epochs) == 18 and epochs[-1] >= 2
    (line,) = [text for text in caplog.messages if "begins" in text]
    assert line.endswith("epoch 2 begins, in another order.")
    assert data.stats()["tail_tokens"] > 0
    with pytest.raises(DatasetError, match="Ask for shorter samples or smaller batches"):
        next(iter(text_dataset(texts, seq_len=1 << 16)))


@pytest.mark.parametrize("kind", ["text", "dummy", "distributed_dummy"])
def test_state_goes_on_with_the_next_batch(texts, kind):
    def fresh():
        if kind == "text":
            return text_dataset(texts)
        return DummyDataset(num_batches=6, batch_size=3, distributed=kind == "distributed_dummy")

    full = [batch.inputs.tobytes() for batch in fresh().batches()]
    data, other = fresh(), fresh()
    result = [batch.inputs.tobytes() for batch in islice(data.batches(), 2)]
    state = json.loads(json.dumps(data.state_dict()))
    other.load_state_dict(state)
    result += [batch.inputs.tobytes() for batch in other.batches()]
    assert result == full
    assert [batch.inputs.tobytes() for batch in other.batches()] == full
    for damaged in ({}, {**state, "given": "x"}, {"given": 1}):
        with pytest.raises(StateError):
            fresh().load_state_dict(damaged)


@pytest.mark.parametrize("kind", ["text", "dummy", "distributed_dummy"])
def test_ranks_may_change_in_the_midst(texts, kind):
    """Two ranks take two steps of two samples each, then three ranks go on: nothing twice, nothing left out."""

    def data(rank, world_size, sample):
        arguments = {"num_batches": 6, "batch_size": 2}
        distributed = kind == "distributed_dummy"
        created = (
            text_dataset(texts, **arguments) if kind == "text" else DummyDataset(distributed=distributed, **arguments)
        )
        created.join_world(rank, world_size, sample)
        return created

    def taken(source, steps):
        batches = source.endless()
        result = [row.tobytes() for _ in range(steps) for row in next(batches).inputs]
        batches.close()
        return result

    ranks = [data(0, 2, 0), data(1, 2, 0)]
    result = [taken(source, 2) for source in ranks]
    ranks.append(data(2, 3, 8))
    for rank, source in enumerate(ranks):
        source.join_world(rank, 3, 8)
    result += [taken(source, 2) for source in ranks]
    assert sorted(row for part in result for row in part) == sorted(taken(data(0, 1, 0), 10))


def test_the_first_batch_waits_for_few_documents(tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("".join(f"line {i:0100}\n" for i in range(12_000)))
    read = []
    for start in (100, None):
        options = StreamOptions(warmup_documents=start, prefetch_batches=0, format="lines")
        stream = TextStream(path, tokenizer="bytes", seq_len=8, batch_size=4, options=options)
        next(iter(stream))
        read.append(stream.position.lanes[0].records)
    assert read[0] < 1500 and read[1] > 10_000


def test_the_first_cause_of_a_librarys_error_is_told():
    def rows():
        yield {"text": "one"}
        try:
            raise ImportError("install 'Pillow'.")
        except ImportError:
            raise RuntimeError("no event loop")  # noqa: B904

    class Texts:
        def __iter__(self):
            return rows()

    stream = TextStream(Texts(), tokenizer="bytes", seq_len=8, batch_size=1)
    with pytest.raises(PrepareError, match=r"after 1 records: ImportError: install 'Pillow'\. Check"):
        next(iter(stream))


def test_text_under_another_name_is_told_with_the_names_there_are(tmp_path):
    path = tmp_path / "body.jsonl"
    path.write_text('{"prose": "some text", "id": 1}\n' * 9)
    reported = r"body\.jsonl: .*got nothing among prose, id, in every record\. Name it with --set read\.text_key"
    with pytest.raises(DatasetError, match=reported):
        next(iter(create_huggingface_dataset(str(path), tokenizer_name="bytes", seq_len=8)))
    inputs, _ = next(iter(create_huggingface_dataset(str(path), tokenizer_name="bytes", seq_len=8, text_key="prose")))
    assert inputs.shape == (4, 8)
