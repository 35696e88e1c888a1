"""Batches through PyTorch: the same ones in the same order whatever helpers there are, and a state that is exact."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.calibration import scaled

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from forebay.dataset.import_slices import import_slices  # noqa: E402
from forebay.dataset.slices import write_rows_slice, write_token_slice  # noqa: E402
from forebay.errors import DatasetError, StateError, UsageError  # noqa: E402
from forebay.load.loader import Loader  # noqa: E402
from forebay.load.torch import DataLoader, TokenDataset, dataloader  # noqa: E402

# More helpers than processors is meant; forking beside threads is what is tested.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
SEQ_LEN = 16
ARGUMENTS: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": 4, "seed": 5}
STEPS = 25  # Of an epoch: 97 samples.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for i in range(5):
        tokens = np.arange(i * 400, i * 400 + SEQ_LEN * (20 if i else 17), dtype=np.uint16)
        write_token_slice(folder / f"{i}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    generator = np.random.default_rng(0)
    for i in range(3):
        images = generator.integers(0, 255, (7, 3, 4, 4), dtype=np.uint8)
        write_rows_slice(folder / f"{i}.safetensors", {"images": images, "labels": np.arange(7) + 7 * i})
    import_slices(folder, "rows")
    return folder


def expected(data: Path, epochs: int, **arguments: Any) -> list[dict[str, Any]]:
    """What the Loader gives, copied."""
    batches = Loader(data, epochs=epochs, **{**ARGUMENTS, **arguments})
    return [{"inputs": b.inputs.copy(), "labels": b.labels.copy(), "ids": b.sample_ids.tolist()} for b in batches]


def check(got: Any, requested: dict[str, Any]) -> None:
    assert got["sample_ids"].tolist() == requested["ids"]
    assert got["inputs"].dtype == torch.int64 and got["sample_ids"].dtype == torch.int64
    assert torch.equal(got["inputs"], torch.from_numpy(requested["inputs"]))
    assert torch.equal(got["labels"], torch.from_numpy(requested["labels"]))


def ids(batches: Any) -> list[list[int]]:
    return [item["sample_ids"].tolist() for item in batches]


@pytest.mark.parametrize("helpers", [0, 1, 4])
def test_the_same_order_for_any_number_of_helpers(data: Path, helpers: int) -> None:
    requested = expected(data, 2)
    loader = dataloader(data, num_workers=helpers, epochs=2, **ARGUMENTS)
    assert len(loader) == STEPS and len(requested) == 2 * STEPS
    for epoch in range(2):  # One pass is one epoch; nothing needs to be told which.
        retained = list(loader)  # All at once: what is kept is not written over.
        assert len(retained) == STEPS
        for step, (got, item) in enumerate(zip(retained, requested[epoch * STEPS :])):
            assert (got["epoch"], got["step"], got["run_step"]) == (epoch, step, epoch * STEPS + step)
            check(got, item)


def test_without_helpers_nothing_is_copied_and_with_them_labels_and_inputs_share_memory(data: Path) -> None:
    for helpers in (0, 1):
        for item in islice(dataloader(data, num_workers=helpers, **ARGUMENTS), 3):
            assert item["inputs"].untyped_storage().data_ptr() <= item["labels"].data_ptr()
            assert item["labels"].data_ptr() - item["inputs"].data_ptr() == item["inputs"].element_size()


@pytest.mark.parametrize(("first", "then"), [(0, 3), (3, 0), (2, 1)])
def test_resume_with_another_number_of_helpers(data: Path, first: int, then: int) -> None:
    requested = [item["ids"] for item in expected(data, 2)]
    for stop in (7, 25, 31):
        loader = dataloader(data, num_workers=first, epochs=2, **ARGUMENTS)
        seen = ids(islice(loader, min(stop, STEPS)))
        if stop > STEPS:
            seen += ids(islice(loader, stop - STEPS))
        assert seen == requested[:stop]
        state = loader.state_dict()
        other = dataloader(data, num_workers=then, epochs=2, **ARGUMENTS)
        other.load_state_dict(state)
        assert other.state_dict() == state
        rest = ids(other)
        assert rest == requested[stop : STEPS if stop < STEPS else 2 * STEPS]
        alone = Loader(data, epochs=2, **ARGUMENTS)  # The state is the Loader's own.
        alone.load_state_dict(state)
        assert [b.sample_ids.tolist() for b in alone] == requested[stop:]


@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_a_loop_early_goes_on_with_the_next_batch(data: Path, persistent: bool) -> None:
    requested = [item["ids"] for item in expected(data, 3)]
    loader = dataloader(data, num_workers=2, persistent_workers=persistent, epochs=3, **ARGUMENTS)
    seen: list[list[int]] = []
    for count in (3, 1, 8, 100, 5, 100, 100):
        for item in islice(loader, count):
            seen.append(item["sample_ids"].tolist())
            assert loader.state_dict()["step"] == len(seen)
    assert seen == requested


def test_persistent_helpers_stay_over_epochs_and_the_gap_is_short(tmp_path: Path) -> None:
    write_token_slice(tmp_path / "0.safetensors", np.zeros(1 << 17, np.uint16), np.array([1 << 17], np.uint64))
    import_slices(tmp_path, "larger")
    loader = dataloader(tmp_path, num_workers=2, persistent_workers=True, seq_len=SEQ_LEN, batch_size=256)
    before = {child.pid for child in multiprocessing.active_children()}
    pids, gaps = [], []
    for _ in range(4):
        began = time.perf_counter()
        for step, _one in enumerate(loader):
            if step == 0:
                gaps.append(time.perf_counter() - began)
                pids.append({child.pid for child in multiprocessing.active_children()} - before)
    assert len(pids[0]) == 2 and pids == [pids[0]] * 4
    assert min(gaps[1:]) < scaled(0.05), gaps


def test_a_state_may_be_loaded_while_helpers_persist(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 2)]
    loader = dataloader(data, num_workers=2, persistent_workers=True, **ARGUMENTS)
    list(islice(loader, 9))
    state = loader.state_dict()
    list(islice(loader, 4))
    loader.load_state_dict(state)
    assert ids(loader) == requested[9:STEPS]
    going = iter(loader)
    next(going)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="Iterate again"):
        next(going)


def test_helpers_that_are_spawned(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 1)]
    loader = dataloader(data, num_workers=1, multiprocessing_context="spawn", **ARGUMENTS)
    loader.load_state_dict(Loader(data, **ARGUMENTS).state_at(4))
    assert ids(loader) == requested[4:]


@pytest.mark.parametrize("helpers", [0, 1])
def test_reckoning_with_states_does_not_disturb_a_pass(data: Path, helpers: int) -> None:
    requested = [item["ids"] for item in expected(data, 1)]
    loader = dataloader(data, num_workers=helpers, epochs=1, **ARGUMENTS)
    start, seen = loader.state_dict(), []
    for item in loader:
        seen.append(item["sample_ids"].tolist())
        assert loader.dataset.state_after(start, len(seen)) == loader.state_dict()
        assert len(loader) == STEPS
    assert seen == requested


def test_fork_beside_the_threads_of_a_running_loader(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 1)]
    dataset = TokenDataset(data, prefetch=3, **ARGUMENTS)
    running = iter(dataset)
    seen = ids([next(running)])
    assert ids(DataLoader(TokenDataset(data, **ARGUMENTS), num_workers=2)) == requested
    assert seen + ids(running) == requested


def test_a_dataset_is_pickled_as_arguments_and_state(data: Path) -> None:
    with Loader(data, **ARGUMENTS) as loader:
        for dataset in (
            TokenDataset(data, **ARGUMENTS),
            TokenDataset(loader.dataset, **ARGUMENTS),
        ):
            going = iter(dataset)
            seen = ids([next(going), next(going)])
            going.close()
            copy = pickle.loads(pickle.dumps(dataset))
            assert seen + ids(copy) == seen + ids(dataset) == [item["ids"] for item in expected(data, 1)]
    assert len(pickle.dumps(TokenDataset(data, **ARGUMENTS))) < 80_000


def test_an_error_in_a_helper_comes_with_its_words_after_what_was_good(tmp_path: Path) -> None:
    for i in range(8):
        tokens = np.arange(SEQ_LEN * 16, dtype=np.uint16)
        write_token_slice(tmp_path / f"{i}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(tmp_path, "holed")
    arguments = {**ARGUMENTS, "shuffle": False, "lanes": 1}
    (tmp_path / "5.safetensors").unlink()
    seen = []
    with pytest.raises(DatasetError, match=r"5\.safetensors") as caught:
        for item in dataloader(tmp_path, num_workers=3, **arguments):
            seen.append(item["step"])
    assert "prepare it again" in str(caught.value)
    assert seen == list(range(len(seen))) and 17 <= len(seen) <= 20


def test_rows_come_by_name(rows: Path) -> None:
    for helpers in (0, 2):
        seen = []
        for item in dataloader(rows, num_workers=helpers, batch_size=4, seed=1):
            assert item["images"].dtype == torch.uint8 and item["images"].shape[1:] == (3, 4, 4)
            assert item["labels"].tolist() == item["sample_ids"].tolist()
            seen += item["labels"].tolist()
        assert sorted(seen) == list(range(21))


def test_names_for_transformers(data: Path) -> None:
    for plain, named in zip(
        dataloader(data, **ARGUMENTS), dataloader(data, style="transformers", num_workers=1, **ARGUMENTS)
    ):
        assert set(named) == {"input_ids", "labels"}
        assert torch.equal(named["input_ids"], plain["inputs"])
        # A model scores position i against label i + 1.
        assert torch.equal(named["labels"][:, 1:], plain["labels"][:, :-1])
    masked = next(iter(dataloader(data, style="transformers", document_masks=True, **ARGUMENTS)))
    plain = next(iter(dataloader(data, document_masks=True, **ARGUMENTS)))
    assert torch.equal(masked["labels"][:, 1:], plain["labels"][:, :-1])
    assert torch.equal(masked["position_ids"], plain["position_ids"])


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_in_torchs_own_dataloader_every_pass_is_the_next_epoch(data: Path, helpers: int, persistent: bool) -> None:
    if persistent and not helpers:
        return
    requested = [item["ids"] for item in expected(data, 3)]
    loader = torch.utils.data.DataLoader(
        TokenDataset(data, **ARGUMENTS), batch_size=None, num_workers=helpers, persistent_workers=persistent
    )
    assert len(loader) == STEPS
    for epoch in range(3):
        got = list(loader)
        assert ids(got) == requested[epoch * STEPS : (epoch + 1) * STEPS]
        assert type(got[0]) is dict


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata's own, when it is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_in_torchdatas_stateful_dataloader(data: Path, helpers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    requested = [item["ids"] for item in expected(data, 3)]

    def make() -> Any:
        return stateful.StatefulDataLoader(TokenDataset(data, **ARGUMENTS), batch_size=None, num_workers=helpers)

    for stop in (1, 8, 24):
        loader = make()
        assert ids(loader) == requested[:STEPS]
        assert ids(islice(loader, stop)) == requested[STEPS : STEPS + stop]
        state = loader.state_dict()
        other = make()
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert ids(other) == requested[STEPS + stop : 2 * STEPS]
        assert ids(other) == requested[2 * STEPS :]


def test_fewer_steps_than_helpers_and_runs_that_end(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 1)]
    loader = dataloader(data, num_workers=4, epochs=1, **ARGUMENTS)
    loader.load_state_dict(Loader(data, **ARGUMENTS).state_at(STEPS - 2))
    assert ids(loader) == requested[-2:]
    assert ids(loader) == []
    short = dataloader(data, num_workers=2, steps=5, **ARGUMENTS)
    assert len(short) == 5 and ids(short) == requested[:5] and ids(short) == []


def test_ranks_come_from_the_environment_and_half_of_one_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"seq_len": SEQ_LEN, "global_batch_size": 6}
    full = ids(dataloader(data, **arguments))
    parts = []
    for rank in range(2):
        monkeypatch.setenv("HOROVOD_RANK", str(rank))
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        parts.append(ids(dataloader(data, num_workers=rank, **arguments)))
    monkeypatch.undo()
    assert [a + b for a, b in zip(*parts)] == full
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="expected RANK beside WORLD_SIZE=2"):
        next(iter(dataloader(data, **arguments)))


def test_what_is_wrong_is_refused(data: Path) -> None:
    with pytest.raises(UsageError, match="batches are the dataset's"):
        DataLoader(TokenDataset(data, **ARGUMENTS), shuffle=True)
    with pytest.raises(UsageError, match="style: expected one of"):
        TokenDataset(data, style="other", **ARGUMENTS)
    with pytest.raises(UsageError, match="expected a TokenDataset"):
        DataLoader([1, 2])  # type: ignore[arg-type]
    loader = dataloader(data, num_workers=1, **ARGUMENTS)
    with pytest.raises(StateError, match="seed"):
        loader.load_state_dict(dataloader(data, **{**ARGUMENTS, "seed": 6}).state_dict())
    with pytest.raises(StateError, match=r"got one of worker 0 of 2. Resume with num_workers=2"):
        loader.load_state_dict({"start": {}, "helper": [0, 2], "given": 1})


def _open_descriptors() -> int:
    """How many stay open: torch's queues close their pipes a moment after their loader has gone."""
    counts = []
    for _ in range(20):
        time.sleep(0.02)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return min(counts)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_nothing_is_left_open(data: Path) -> None:
    counts: list[int] = []
    for _ in range(3):
        loader = dataloader(data, num_workers=1, epochs=1, **ARGUMENTS)
        list(loader)
        del loader
        expected = max(counts[1:], default=1 << 20)
        deadline = time.monotonic() + scaled(10)
        while (count := _open_descriptors()) > expected and time.monotonic() < deadline:
            gc.collect()
        counts.append(count)
    assert counts[2] <= counts[1]
