"""What a loader does over a whole run: mixtures, batches that grow, splits, packings, any world size, pickling."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice, write_token_slice
from forebay.errors import DatasetError, StateError, UsageError
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions, SampleOptions
from forebay.load.packing import DocumentSubset
from forebay.load.sources import Mixture, open_dataset
from support.calibration import scaled

SEQ_LEN = 16
WORLDS = (1, 2, 3, 7, 12)


def make_tokens(folder: Path, first: int, slices: int = 6, samples: int = 20, document: int = 37) -> Path:
    """Slices whose tokens count up from `first`, so that a token tells where it lies."""
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sources")
    sizes = {"web": (0, 6), "books": (100_000, 3), "code": (200_000, 2)}
    return {name: make_tokens(base / name, first, slices) for name, (first, slices) in sizes.items()}


def of(loader: Iterable[Any], most: int | None = None) -> list[list[tuple[int, int]]]:
    """(source, sample id) of each sample of each batch."""
    result = []
    for batch in loader:
        result.append(list(zip(batch.dataset_index.tolist(), batch.sample_ids.tolist())))
        if len(result) == most:
            break
    return result


def ranks_of(arguments: dict[str, Any], world: int, state: dict[str, Any] | None) -> list[Loader[Any]]:
    loaders = [Loader(rank=rank, world_size=world, **arguments) for rank in range(world)]
    for loader in loaders if state is not None else []:
        assert state is not None
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


@pytest.mark.parametrize("kind", ["one", "warm-up", "mixture"])
def test_a_checkpoint_of_any_world_resumes_on_any_other(folders: dict[str, Path], kind: str) -> None:
    arguments: dict[str, Any] = {"seq_len": SEQ_LEN, "seed": 5, "global_batch_size": 12}
    match kind:
        case "one":
            arguments |= {"dataset": folders["web"], "epochs": 2}
        case "warm-up":
            changes = [(0, 3), (4, 7), (9, 12), (16, 40)]
            arguments |= {"dataset": folders["web"], "epochs": 2, "global_batch_size": changes}
        case "mixture":
            weights = [(0, {"web": 3, "books": 1}), (9, {"web": 1, "books": 1, "code": 2})]
            arguments |= {"dataset": Mixture(folders, weights), "steps": 20}
    full = of(Loader(**arguments, rank=0, world_size=1))
    stop = len(full) // 2 + 1
    worlds = [world for world in WORLDS if kind != "warm-up" or world <= 3]  # No more than the smallest batch.
    for before in worlds:
        first = ranks_of(arguments, before, None)
        parts = [of(loader, stop) for loader in first]
        assert [list(chain(*batch)) for batch in zip(*parts)] == full[:stop]
        states = [loader.state_dict() for loader in first]
        assert all(state == states[0] for state in states) and len(json.dumps(states[0])) < 1000
        for after in worlds:
            parts = [of(loader) for loader in ranks_of(arguments, after, states[0])]
            assert [list(chain(*batch)) for batch in zip(*parts)] == full[stop:]


@pytest.mark.parametrize(("world", "assignment"), [(7, "global"), (3, "owned")])
def test_every_rank_has_a_sample_at_every_step_and_weights_make_up(
    folders: dict[str, Path], world: int, assignment: Literal["global", "owned"]
) -> None:
    num_samples = Loader(folders["web"], rank=0, world_size=1, seq_len=SEQ_LEN, batch_size=1).order.num_samples
    size = (
        next(size for size in range(1, 20) if 0 < num_samples % (world * size) < world) if assignment == "global" else 1
    )
    order = OrderOptions(assignment=assignment)
    value: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": size, "order": order, "epochs": 2}
    ranks = [list(Loader(folders["web"], rank=rank, world_size=world, **value)) for rank in range(world)]
    seen: dict[int, list[int]] = {0: [], 1: []}
    for batches in zip(*ranks, strict=True):
        samples = sum(map(len, batches))
        for batch in batches:
            assert len(batch.inputs) == max(1, len(batch)) and batch.weight == len(batch) * world / samples
            assert (batch.labels >= 0).any()  # A mean over its labels is a number, also of a stand-in.
            seen[batch.epoch] += batch.sample_ids.tolist()
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(num_samples))
    if assignment == "global":
        assert any(batch.weight == 0 for batches in ranks for batch in batches)
    with pytest.raises(UsageError, match="at least a sample for each of 7 ranks, got 6"):
        Loader(folders["web"], seq_len=SEQ_LEN, global_batch_size=6, rank=0, world_size=7)


def test_a_second_loop_over_a_finished_run_is_warned_of(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader(folders["web"], seq_len=SEQ_LEN, batch_size=4, steps=40)
    assert len(loader) == 30 and len(list(loader)) == 30
    assert len(loader) == 10 and len(list(loader)) == 10 and not caplog.records
    assert list(loader) == [] and "this loop gets no batch. Give more steps=" in caplog.text


def test_four_then_three_then_five_ranks_are_exactly_an_epoch(folders: dict[str, Path]) -> None:
    arguments = {"dataset": folders["web"], "seq_len": SEQ_LEN, "global_batch_size": 11}
    state, seen = None, []
    for world, steps in ((4, 3), (3, 4), (5, None)):
        loaders = ranks_of(arguments, world, state)
        parts = [of(loader, steps) for loader in loaders]
        seen += [list(chain(*batch)) for batch in zip(*parts)]
        state = loaders[-1].state_dict()
    assert seen == of(Loader(**arguments))  # type: ignore[arg-type]
    assert sorted(chain(*seen)) == [(0, i) for i in range(120)]


def test_a_mixture_reads_each_source_in_its_own_epochs(folders: dict[str, Path]) -> None:
    weights = {"web": 0.5, "books": 0.3, "code": 0.2}
    loader = Loader(Mixture(folders, weights), seq_len=SEQ_LEN, batch_size=10, steps=100)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for batch in loader:
        for source, sample, row in zip(batch.dataset_index.tolist(), batch.sample_ids.tolist(), batch.inputs):
            seen[source].append(sample)
            slice_index, within = divmod(sample, 20)
            lengths = sum(20 * SEQ_LEN + i for i in range(slice_index))
            assert row[0] == 100_000 * source + lengths + within * SEQ_LEN
    assert [len(seen[i]) for i in range(3)] == [500, 300, 200]
    for source, size in ((0, 120), (1, 60), (2, 40)):
        for start in range(0, len(seen[source]) - size + 1, size):
            assert sorted(seen[source][start : start + size]) == list(range(size))


def test_weights_may_change_later_than_a_state_but_not_before(folders: dict[str, Path]) -> None:
    def loader(changes: list[tuple[int, dict[str, float]]]) -> Loader[Any]:
        return Loader(Mixture(folders, changes), seq_len=SEQ_LEN, batch_size=8, steps=40)

    first = loader([(0, {"web": 1, "books": 1})])
    done = of(first, 10)
    state = first.state_dict()
    changed = loader([(0, {"web": 1, "books": 1}), (10, {"code": 1})])
    changed.load_state_dict(state)
    assert {source for source, _ in chain(*of(changed))} == {2}
    again = loader([(0, {"web": 1, "books": 1}), (10, {"code": 1})])
    assert of(again, 10) == done
    with pytest.raises(StateError, match="weights until step 10"):
        loader([(0, {"web": 1, "books": 1}), (5, {"code": 1})]).load_state_dict(state)
    with pytest.raises(StateError, match="dataset_id"):
        Loader(folders["web"], seq_len=SEQ_LEN, batch_size=8).load_state_dict(state)


def test_a_state_is_of_a_mixture_with_its_datasets_in_one_order(folders: dict[str, Path]) -> None:
    """Another order of the names is another order of the samples, also where all weights are equal."""
    loaders = [
        Loader(Mixture({name: folders[name] for name in names}, dict.fromkeys(names, 1)), seq_len=SEQ_LEN, batch_size=7)
        for names in (("web", "books"), ("books", "web"))
    ]
    with pytest.raises(StateError, match=r"expected datasets \['books', 'web'\], got .* in that order"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_a_mixture_in_a_file(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(
        f'[datasets]\nweb = "{folders["web"]}"\nbooks = "{folders["books"]}"\n'
        "[[change]]\nstep = 0\nweights = { web = 3, books = 1 }\n"
        "[[change]]\nstep = 5\nweights = { books = 1 }\n"
    )
    loader = Loader(path, seq_len=SEQ_LEN, batch_size=8, steps=10)
    sources = [source for source, _ in chain(*of(loader))]
    assert sources.count(0) == 30 and set(sources[40:]) == {1}
    for text in ("", "[datasets]\n", '[datasets]\na="b"\n[[change]]\nstep=0\n', "no toml ="):
        path.write_text(text)
        with pytest.raises(UsageError):
            Loader(path, seq_len=SEQ_LEN, batch_size=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"datasets": {}, "weights": {}},
        {"weights": {"nobody": 1.0}},
        {"weights": {"web": 0.0}},
        {"weights": {"web": -1.0}},
        {"weights": [(1, {"web": 1.0})]},
        {"weights": [(0, {"web": 1.0}), (0, {"web": 2.0})]},
    ],
)
def test_wrong_mixtures(folders: dict[str, Path], wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Mixture(**{"datasets": folders, "weights": {"web": 1.0}, **wrong})


def test_datasets_of_a_mixture_are_alike(folders: dict[str, Path], tmp_path: Path) -> None:
    write_token_slice(tmp_path / "0.safetensors", np.zeros(400, np.uint16), np.array([400], np.uint64))
    import_slices(tmp_path, "narrow")
    with pytest.raises(DatasetError, match="U16"):
        Loader(Mixture({"web": folders["web"], "narrow": tmp_path}, {"web": 1.0}), seq_len=SEQ_LEN, batch_size=4)


def test_a_hundred_datasets_open_quickly(tmp_path: Path) -> None:
    tokens, stops = np.arange(800, dtype=np.uint16), np.array([800], np.uint64)
    for i in range(100):
        (tmp_path / f"{i}").mkdir()
        write_token_slice(tmp_path / f"{i}" / "0.safetensors", tokens, stops)
        import_slices(tmp_path / f"{i}", f"d{i}")
    mixture = Mixture({f"d{i}": tmp_path / f"{i}" for i in range(100)}, {f"d{i}": 1 + i % 3 for i in range(100)})
    began = time.process_time()
    batch = next(iter(Loader(mixture, seq_len=SEQ_LEN, batch_size=64)))
    assert time.process_time() - began < scaled(2) and len(batch) == 64


def test_a_batch_that_grows(folders: dict[str, Path]) -> None:
    loader = Loader(folders["web"], seq_len=SEQ_LEN, global_batch_size=[(0, 4), (5, 10), (8, 32)], epochs=2)
    length, batches = len(loader), list(loader)
    assert [len(batch) for batch in batches[:10]] == [4] * 5 + [10] * 3 + [32, 32]
    assert [batch.step for batch in batches] == list(range(length)) and batches[-1].epoch == 1
    for epoch in (0, 1):
        ids = chain(*(batch.sample_ids.tolist() for batch in batches if batch.epoch == epoch))
        assert sorted(ids) == list(range(120))


def test_splits_share_nothing_and_are_everything(folders: dict[str, Path]) -> None:
    def ids(split: str, seed: int = 0) -> set[int]:
        loader = Loader(
            folders["web"], seq_len=SEQ_LEN, batch_size=7, split=split, seed=seed,
            order=OrderOptions(lanes=2, window_bytes=9 * SEQ_LEN * 4), samples=SampleOptions(validation_fraction=0.2),
        )  # fmt: skip
        return {sample for _, sample in chain(*of(loader))}

    train, validation = ids("train"), ids("validation")
    assert len(validation) == 24 and len(train) == 96 and train | validation == set(range(120))
    assert ids("validation", seed=9) == validation


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_documents_that_are_left_out_never_come(
    folders: dict[str, Path], packing: Literal["concat", "best_fit"], prefetch: int
) -> None:
    gone = [0, 3, 4, 20]
    loader = Loader(
        folders["web"], seq_len=SEQ_LEN, batch_size=4, packing=packing, document_masks=True,
        samples=SampleOptions(
            documents=DocumentSubset(exclude=np.array(gone)), pad_id=999_999, prefetch_batches=prefetch
        ),
    )  # fmt: skip
    dataset = loader.dataset
    documents: list[range] = []
    for index in range(dataset.num_slices):
        item = dataset.open_slice(index)
        starts = [0, *item.document_ends.tolist()[:-1]]
        first = int(item.tokens[0])
        documents += [range(first + a, first + b) for a, b in zip(starts, item.document_ends.tolist())]
    forbidden = set(chain(*(documents[i] for i in gone)))
    seen: set[int] = set()
    for batch in loader:
        assert batch.inputs is not None and batch.labels is not None and batch.document_ids is not None
        real = batch.inputs[batch.inputs != 999_999]
        seen |= set(real.tolist())
        learnt = batch.labels != -100
        assert np.array_equal(batch.labels[learnt], batch.inputs[learnt] + 1)
        assert batch.cu_seqlens is not None and batch.cu_seqlens[-1] == batch.inputs.size
    assert not seen & forbidden
    assert len(seen) == sum(map(len, documents)) - len(forbidden) - (loader.tail_tokens if packing == "concat" else 0)


def test_filters_of_a_mixture_are_by_name(folders: dict[str, Path]) -> None:
    mixture = Mixture(folders, {"web": 1, "books": 1})
    gone = DocumentSubset(exclude=np.array([0, 1]))
    arguments: dict[str, Any] = {"dataset": mixture, "seq_len": SEQ_LEN, "batch_size": 8, "steps": 40}
    loader = Loader(**arguments, samples=SampleOptions(documents={"web": gone}))
    tokens = {int(token) for batch in loader if batch.inputs is not None for token in batch.inputs.flat}
    assert not tokens & set(range(74)) and tokens >= set(range(100_000, 100_074))
    with pytest.raises(StateError, match="documents"):
        Loader(**arguments).load_state_dict(loader.state_dict())
    for wrong in (gone, {"nobody": gone}):
        with pytest.raises(UsageError, match="documents"):
            Loader(**arguments, samples=SampleOptions(documents=wrong))
    with pytest.raises(UsageError, match="documents"):
        Loader(folders["web"], seq_len=SEQ_LEN, batch_size=8, samples=SampleOptions(documents={"web": gone}))


def test_rows_of_different_lengths_are_padded_and_masked(tmp_path: Path) -> None:
    for i, length in enumerate((5, 9)):
        ids = np.full((4, length), i + 1, np.uint16)
        mask = np.ones((4, length), np.uint8)
        mask[:, -1] = 0
        write_rows_slice(tmp_path / f"{i}.safetensors", {"input_ids": ids, "attention_mask": mask})
    import_slices(tmp_path, "rows")
    for batch in Loader(tmp_path, batch_size=8):
        assert batch.labels is not None and batch.inputs is not None
        assert batch.inputs.shape == (8, 9)
        assert np.array_equal(batch.labels == -100, batch.tensors["attention_mask"] == 0)
        assert (batch.tensors["attention_mask"].sum(1) == np.where(batch.sample_ids < 4, 4, 8)).all()


@pytest.mark.parametrize("helpers", [1, 2, 3, 5])
def test_helpers_make_every_nth_step(folders: dict[str, Path], helpers: int) -> None:
    arguments: dict[str, Any] = {"dataset": folders["web"], "seq_len": SEQ_LEN, "batch_size": 7, "epochs": 2}
    full = of(Loader(**arguments))
    for start in (0, 3):
        loader = Loader(**arguments)
        parts = [of(loader.raw_batches(start, len(full), (k, helpers))) for k in range(helpers)]
        turns = [parts[i % helpers][i // helpers] for i in range(len(full) - start)]
        assert turns == full[start:]


def test_pickling_carries_arguments_and_state(folders: dict[str, Path]) -> None:
    loader = Loader(folders["web"], seq_len=SEQ_LEN, batch_size=7, seed=2)
    of(loader, 4)
    other = pickle.loads(pickle.dumps(loader))
    assert other.state_dict() == loader.state_dict() and of(other) == of(loader)
    opened = Loader(loader.dataset, seq_len=SEQ_LEN, batch_size=7, seed=2)
    assert of(pickle.loads(pickle.dumps(opened))) == of(opened)
    datasets = {name: open_dataset(path) for name, path in folders.items()}
    mixed = Loader(Mixture(datasets, {"web": 1, "code": 2}), seq_len=SEQ_LEN, batch_size=7, steps=9)
    assert of(pickle.loads(pickle.dumps(mixed))) == of(mixed)


def test_at_most_so_many_steps(folders: dict[str, Path]) -> None:
    loader = Loader(folders["web"], seq_len=SEQ_LEN, batch_size=7, epochs=None, steps=50)
    assert len(loader) == 50 and len(of(loader)) == 50 and of(loader) == []


def test_a_file_of_text_is_told_from_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DatasetError, match="TextStream"):
        Loader(tmp_path / "a.jsonl", seq_len=8, batch_size=1)
