"""Whole runs of a loader: mixtures, batches that grow, splits, packings, any world size, pickling."""

import pickle
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.errors import DatasetError, StateError, UsageError
from forebay.load.loader import Loader
from forebay.load.options import SampleOptions
from forebay.load.packing import DocumentSubset
from forebay.load.sources import Mixture, open_dataset

SEQ_LEN = 16


def make_tokens(folder: Path, first: int, slices: int = 6, samples: int = 20, document: int = 37) -> Path:
    """Slices whose tokens count up from `first`, so that a token tells its place."""
    folder.mkdir()
    for i in range(slices):
        length = samples * SEQ_LEN + i
        tokens = np.arange(first, first + length, dtype=np.uint32)
        stops = np.append(np.arange(document, length, document), length).astype(np.uint64)
        write_token_slice(folder / f"{i}.safetensors", tokens, stops)
        first += length
    import_slices(folder, folder.name)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sources")
    sizes = {"web": (0, 6), "books": (100_000, 3), "code": (200_000, 2)}
    return {name: make_tokens(base / name, first, slices) for name, (first, slices) in sizes.items()}


def sample_keys(loader: Iterable, num_batches: int | None = None) -> list[list[tuple[int, int]]]:
    """(source, sample id) of each sample of each batch."""
    return [list(zip(batch.dataset_index.tolist(), batch.sample_ids.tolist())) for batch in islice(loader, num_batches)]


def test_weights_may_change_later_than_a_state_but_not_before(folders):
    def loader(changes):
        return Loader(Mixture(folders, changes), seq_len=SEQ_LEN, batch_size=8, steps=40)

    first = loader([(0, {"web": 1, "books": 1})])
    done = sample_keys(first, 10)
    state = first.state_dict()
    changed = loader([(0, {"web": 1, "books": 1}), (10, {"code": 1})])
    changed.load_state_dict(state)
    assert {source for source, _ in chain(*sample_keys(changed))} == {2}
    again = loader([(0, {"web": 1, "books": 1}), (10, {"code": 1})])
    assert sample_keys(again, 10) == done
    with pytest.raises(StateError, match="weights until step 10"):
        loader([(0, {"web": 1, "books": 1}), (5, {"code": 1})]).load_state_dict(state)
    # Batch sizes, too: the order of the state goes on, whatever the defaults of larger batches are.
    larger = Loader(Mixture(folders, {"web": 1, "books": 1}), seq_len=SEQ_LEN, global_batch_size=[(0, 8), (12, 56)])
    larger.load_state_dict(state)
    first.load_state_dict(state)
    assert sample_keys(larger, 2) == sample_keys(first, 2) and len(sample_keys(larger, 1)[0]) == 56
    with pytest.raises(StateError, match="dataset_id"):
        Loader(folders["web"], seq_len=SEQ_LEN, batch_size=8).load_state_dict(state)


def test_a_state_is_of_a_mixture_with_its_datasets_in_one_order(folders):
    """Another order of the names is another order of the samples, also where all weights are equal."""
    loaders = [
        Loader(Mixture({name: folders[name] for name in names}, dict.fromkeys(names, 1)), seq_len=SEQ_LEN, batch_size=7)
        for names in (("web", "books"), ("books", "web"))
    ]
    with pytest.raises(StateError, match=r"expected datasets \['books', 'web'\], got .* in that order"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_a_mixture_in_a_file(folders, tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text(
        f'[datasets]\nweb = "{folders["web"]}"\nbooks = "{folders["books"]}"\n'
        "[[change]]\nstep = 0\nweights = { web = 3, books = 1 }\n"
        "[[change]]\nstep = 5\nweights = { books = 1 }\n"
    )
    loader = Loader(path, seq_len=SEQ_LEN, batch_size=8, steps=10)
    sources = [source for source, _ in chain(*sample_keys(loader))]
    assert sources.count(0) == 30 and set(sources[40:]) == {1}
    for text in ("", "[datasets]\n", '[datasets]\na="b"\n[[change]]\nstep=0\n', "no toml ="):
        path.write_text(text)
        with pytest.raises(UsageError):
            Loader(path, seq_len=SEQ_LEN, batch_size=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"datasets": {}, "weights": {}},
        {"weights": {"web": 0.0}},
        {"weights": {"web": -1.0}},
        {"weights": [(1, {"web": 1.0})]},
        {"weights": [(0, {"web": 1.0}), (0, {"web": 2.0})]},
        {"weights": [(0, 0.7)]},
        {"datasets": ["a", "b"]},
    ],
)
def test_wrong_mixtures(folders, wrong):
    with pytest.raises(UsageError, match=r"mixture|weights"):
        Mixture(**{"datasets": folders, "weights": {"web": 1.0}, **wrong})


@pytest.mark.parametrize(
    "recorded, differing",  # Of datasets a, b, c: the type, the hash of the tokenizer, vocab_size, eos_id.
    [
        ("U32 - 0 -|U32 - 0 -", ""),
        (
            "U16 - 0 -|U32 - 0 -",
            "dtype, got U16 of a and U32 of b. Widen that of U16: .*--to forebay --dtype uint32",
        ),
        ("U32 1 9 0|U32 1 9 0", ""),
        ("U32 1 0 -|U32 2 0 -", "tokenizer, got 111111111111 of a and 222222222222 of b.*--tokenizer /.*/a/tokenizer"),
        ("U32 - 0 -|U32 1 0 0", ""),
        ("U32 1 0 -|U32 - 0 -|U32 2 0 -", "tokenizer, got 111111111111 of a and 222222222222 of c"),
        ("U32 - 9 -|U32 - 0 -|U32 - 8 -", "vocab_size, got 9 of a and 8 of c"),
        ("U32 - 0 0|U32 - 0 2", "eos_id, got 0 of a and 2 of b"),
        ("U32 - 0 0|U32 1 0 -", "eos_id, got 0 of a and none of b"),
    ],
)
def test_datasets_of_a_mixture_agree_in_what_they_record(recorded, differing, tmp_path):
    """What is not recorded agrees with everything, and a mixture may allow what differs."""
    texts, table = recorded.split("|"), "[datasets]\n"
    for name, text in zip("abc", texts):
        dtype, tokenizer, vocab_size, eos_id = text.split()
        path = tmp_path / name / "0.safetensors"
        path.parent.mkdir()
        write_token_slice(path, np.zeros(400, f"uint{dtype[1:]}"), np.array([400], np.uint64))
        lineage = {"files": {} if tokenizer == "-" else {"tokenizer.json": tokenizer * 64}}
        manifest = replace(import_slices(path.parent, name).manifest, lineage=lineage, vocab_size=int(vocab_size))
        data = replace(manifest, eos_id=None if eos_id == "-" else int(eos_id)).to_json()
        path.with_name("manifest.json").write_bytes(data)
        table += f"{name} = '{name}'\n"
    for allowed in ("", "allow_different_tokenizers = true\n"):
        (tmp_path / "mix.toml").write_text(allowed + table + "[[change]]\nstep=0\nweights={a=1}")
        if differing and ("dtype" in differing or not allowed):
            with pytest.raises(DatasetError, match=differing):
                Loader(tmp_path / "mix.toml", seq_len=SEQ_LEN, batch_size=4)
        else:
            loader = Loader(tmp_path / "mix.toml", seq_len=SEQ_LEN, batch_size=4)
            assert loader.vocab_size == (9 if "9" in recorded else 0)


def test_filters_of_a_mixture_are_by_name(folders):
    mixture = Mixture(folders, {"web": 1, "books": 1})
    gone = DocumentSubset(exclude=np.array([0, 1]))
    arguments = {"dataset": mixture, "seq_len": SEQ_LEN, "batch_size": 8, "steps": 40}
    loader = Loader(**arguments, samples=SampleOptions(documents={"web": gone}))
    tokens = {int(token) for batch in loader if batch.inputs is not None for token in batch.inputs.flat}
    assert not tokens & set(range(74)) and tokens >= set(range(100_000, 100_074))
    with pytest.raises(StateError, match="documents"):
        Loader(**arguments).load_state_dict(loader.state_dict())
    for wrong in (gone, {"absent": gone}):
        with pytest.raises(UsageError, match="documents"):
            Loader(**arguments, samples=SampleOptions(documents=wrong))
    with pytest.raises(UsageError, match="documents"):
        Loader(folders["web"], seq_len=SEQ_LEN, batch_size=8, samples=SampleOptions(documents={"web": gone}))


def test_pickling_carries_arguments_and_state(folders):
    loader = Loader(folders["web"], seq_len=SEQ_LEN, batch_size=7, seed=2)
    sample_keys(loader, 4)
    other = pickle.loads(pickle.dumps(loader))
    assert other.state_dict() == loader.state_dict() and sample_keys(other) == sample_keys(loader)
    datasets = {name: open_dataset(path) for name, path in folders.items()}
    mixed = Loader(Mixture(datasets, {"web": 1, "code": 2}), seq_len=SEQ_LEN, batch_size=7, steps=9)
    assert sample_keys(pickle.loads(pickle.dumps(mixed))) == sample_keys(mixed)
