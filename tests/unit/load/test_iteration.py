"""The batches of one `for` over a loader: the rest of a pass, the next pass, a view that moves nothing."""

import threading
from pathlib import Path

import pytest

from forebay import Loader, Mixture, SampleOptions
from forebay.errors import UsageError
from forebay.load.prefetch import Prefetcher
from support.feeding import dataset_fixture, list_ids
from support.waiting import until

SEQ_LEN = 8
ARGUMENTS = {"seq_len": SEQ_LEN, "batch_size": 7, "seed": 3}
SAMPLES = 50  # 8 steps an epoch.


data = dataset_fixture(5, SAMPLES // 5, SEQ_LEN)


def test_steps_bound_the_run_and_a_loop_beyond_warns(data: Path, caplog):
    loader = Loader(data, steps=11, **ARGUMENTS)
    assert [len(list_ids(loader)), len(loader), len(list_ids(loader))] == [8, 3, 3] and not caplog.records
    assert list_ids(loader) == [] and "all 11 steps of the run are done" in caplog.text
    assert len(Loader(data, steps=11, epochs=None, **ARGUMENTS)) == 11


def test_a_length_is_exact_or_a_type_error(data: Path):
    assert len(Loader(data, epochs=2, **ARGUMENTS)) == len(list_ids(Loader(data, epochs=2, **ARGUMENTS))) == 16
    growing = Loader(data, seq_len=SEQ_LEN, global_batch_size=[(0, 5), (4, 10), (9, 25)], epochs=1)
    for _ in range(3):
        assert len(growing) == len(list_ids(growing))
    endless = Loader(data, epochs=None, **ARGUMENTS)
    assert len(list_ids(endless, 30)) == 30 and endless.epoch == 3
    mixture = Mixture({"a": data, "b": data}, {"a": 1, "b": 2})
    for loader in (endless, Loader(mixture, **ARGUMENTS)):
        with pytest.raises(TypeError, match="Give steps="):
            len(loader)
    with pytest.raises(TypeError, match="no epochs"):
        _ = Loader(mixture, **ARGUMENTS).steps_per_epoch
    with pytest.raises(UsageError, match="epochs=2 is not supported with a mixture"):
        Loader(mixture, epochs=2, **ARGUMENTS)


def test_take_gives_the_same_batches_and_moves_nothing(data: Path):
    before = set(threading.enumerate())  # Another test's loader may wait for the garbage collector.
    full = list_ids(Loader(data, epochs=2, **ARGUMENTS))
    loader = Loader(data, samples=SampleOptions(prefetch_batches=2), **ARGUMENTS)
    first = loader.take(3)
    assert list_ids(first) == list_ids(first) == full[:3] and len(first) == 3 and loader.step == 0
    seen = []
    for batch in loader:
        seen.append(batch.sample_ids.tolist())
        if len(seen) < 8:  # After the last batch the loader is at the next epoch.
            assert list_ids(loader.take(2)) == full[:2]
    assert seen == full[:8]
    assert list_ids(loader.take()) == list_ids(loader.take(100)) == full[8:] and list_ids(loader) == full[8:]
    mixed = Loader(Mixture({"a": data, "b": data}, {"a": 1, "b": 2}), **ARGUMENTS)
    assert list_ids(mixed.take(4)) == list_ids(mixed, 4)
    with pytest.raises(TypeError, match="Give n"):
        mixed.take()
    assert not [t for t in threading.enumerate() if t.name == "forebay-loader" and t not in before]


def test_a_pass_fetches_nothing_of_the_next(data: Path, tmp_path):
    loader = Loader(data, cache_dir=tmp_path, cache_bytes=1 << 20, **ARGUMENTS)
    list_ids(loader)
    fetched = loader.stats()["fetched_bytes"]
    assert fetched == loader.dataset.table.bytes.sum() and loader.stats()["refetched_bytes"] == 0
    list_ids(loader)
    assert loader.stats()["fetched_bytes"] == fetched and loader.stats()["slices_opened"] >= 10


def test_ranks_of_a_process_group(data: Path, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    for name, value in {"is_available": True, "is_initialized": True, "get_rank": 2, "get_world_size": 4}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": 8}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # Of the machines, as some launchers set it: the group decides.
    loader = Loader(data, **sizes)
    assert (loader.rank, loader.world_size) == (2, 4)
    tensor_parallel = Loader(data, rank=1, world_size=2, **sizes)  # An axis of the group.
    assert (tensor_parallel.rank, tensor_parallel.world_size) == (1, 2)
    for wrong in ({"rank": 1, "world_size": 4}, {"rank": 0, "world_size": 3}, {"rank": 0, "world_size": 8}):
        with pytest.raises(UsageError, match="those of the process group, 2 of 4"):
            Loader(data, **wrong, **sizes)


def _numbers(count, produced):
    for i in range(count):
        produced.append(i)
        yield i


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetched_items_are_those_of_the_source_in_order(depth):
    produced = []
    prefetcher = Prefetcher((n for n in _numbers(50, produced)), depth, lambda n: 10 * n)
    got = []
    for item in prefetcher:
        got.append(item)
        if depth and item % 70 == 0:
            until(lambda: prefetcher._ready)  # The caller is busy: the thread works ahead.
    assert got == list(range(0, 500, 10))
    prefetcher.close()


def test_a_thread_works_ahead_of_a_busy_caller_by_its_depth():
    produced = []
    prefetcher = Prefetcher((n for n in _numbers(50, produced)), 3, int)
    assert next(prefetcher) == 0
    until(lambda: prefetcher._is_full and len(prefetcher._ready) >= 3)
    assert produced == [0, 1, 2, 3] and [next(prefetcher) for _ in range(5)] == [1, 2, 3, 4, 5]
    prefetcher.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_close_ends_what_another_thread_waits_for(depth):
    is_making, is_closed, items = threading.Event(), threading.Event(), []

    def make():
        is_making.set()
        is_closed.wait()
        yield 1

    prefetcher = Prefetcher(make(), depth, int, is_closed.set)
    thread = threading.Thread(target=lambda: items.extend(prefetcher))
    thread.start()
    is_making.wait()
    prefetcher.close()
    thread.join()
    assert items == []


def test_a_loop_that_python_ends_last_closes_without_modules(data: Path, monkeypatch):
    batches = iter(Loader(data, **ARGUMENTS))
    next(batches)
    monkeypatch.setattr("forebay.load.batch_source.math", None)  # As at the end of Python, once modules are cleared.
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)
