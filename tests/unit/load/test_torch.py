"""Batches through PyTorch: the same ones in the same order whatever helpers there are, and a state that is exact."""

import contextlib
import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
from itertools import islice, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from forebay.errors import DatasetError, StateError, UsageError  # noqa: E402
from forebay.load import helpers  # noqa: E402
from forebay.load.batch import TokenBatch  # noqa: E402
from forebay.load.loader import Loader  # noqa: E402
from forebay.load.options import OrderOptions, SampleOptions  # noqa: E402
from forebay.load.shared_memory import SegmentReader  # noqa: E402
from support.feeding import ROW_DTYPES, dataset_fixture, make_dataset, write_typed_rows  # noqa: E402

SEQ_LEN = 16
ARGUMENTS = {"seq_len": SEQ_LEN, "batch_size": 4, "seed": 5}
STEPS = 25  # Of an epoch: 97 samples.


class HelperThread:
    """A helper that runs in a thread, whose name is the number of its socket, instead of in a process."""

    def __init__(self, command: list[str], pass_fds: list[int], **_: Any):
        self.pid = os.dup(pass_fds[0])
        self._thread = threading.Thread(target=helpers.main, name=str(self.pid), daemon=True)
        self._thread.start()

    def terminate(self):
        """Its connection is closed: it ends."""

    def poll(self):
        """It has no exit code."""

    def wait(self, timeout: float | None = None):
        self._thread.join(timeout)


@pytest.fixture(autouse=True)
def helpers_in_threads(monkeypatch):
    """Real processes: tests/slow/load/test_torch_helpers.py."""

    class System:
        path, executable = sys.path, sys.executable

        @property
        def argv(self):
            return ["", threading.current_thread().name]

    threads = SimpleNamespace(Popen=HelperThread, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(helpers, "subprocess", threads)
    monkeypatch.setattr(helpers, "sys", System())


data = dataset_fixture(5, 20, SEQ_LEN, first_samples=17)


def read_plain(data: Path, epochs: int, **arguments: Any) -> list[dict]:
    """The batches of the Loader, copied."""
    batches = Loader(data, epochs=epochs, **{**ARGUMENTS, **arguments})
    return [{"inputs": b.inputs.copy(), "labels": b.labels.copy(), "ids": b.sample_ids.tolist()} for b in batches]


def check(batch: Any, expected: dict):
    assert isinstance(batch, TokenBatch) and batch.sample_ids.tolist() == expected["ids"]
    assert batch.inputs.dtype == torch.int64 and isinstance(batch.sample_ids, np.ndarray)
    assert torch.equal(batch.inputs, torch.from_numpy(expected["inputs"]))
    assert torch.equal(batch.labels, torch.from_numpy(expected["labels"]))
    assert batch.num_labels == (expected["labels"] != -100).sum()


def ids(batches: Any) -> list[list[int]]:
    return [(b["sample_ids"] if isinstance(b, dict) else b.sample_ids).tolist() for b in batches]


@pytest.mark.parametrize("workers, prefetch, device", [(0, 0, None), (0, 2, "cpu"), (1, 2, None), (3, 0, "cpu")])
def test_the_same_order_for_any_number_of_helpers(data: Path, workers, prefetch, device):
    expected = read_plain(data, 2)
    with Loader(data, **ARGUMENTS) as loader:
        batches = loader.to_torch(device, prefetch=prefetch, num_workers=workers)
        assert len(batches) == STEPS and len(expected) == 2 * STEPS
        for epoch in range(2):
            retained = list(batches)  # All at once: what is kept is not written over.
            assert len(retained) == STEPS and loader.step == (epoch + 1) * STEPS
            for step, (batch, item) in enumerate(zip(retained, expected[epoch * STEPS :])):
                assert (batch.epoch, batch.epoch_step, batch.step) == (epoch, step, epoch * STEPS + step)
                check(batch, item)
                assert batch.labels.data_ptr() - batch.inputs.data_ptr() == batch.inputs.element_size()
        stats = loader.stats()
        assert stats["batches"] == 2 * STEPS and (stats["device_s"] > 0 or workers or prefetch)


@pytest.mark.parametrize("first, then", [(0, 3), (2, 1)])
def test_the_state_is_the_loaders_and_resumes_with_other_helpers(data: Path, first, then):
    expected = [item["ids"] for item in read_plain(data, 2)]
    for stop in (7, 25, 31):
        with Loader(data, **ARGUMENTS) as loader, Loader(data, **ARGUMENTS) as other:
            batches, seen = loader.to_torch(num_workers=first), []
            while len(seen) < stop:
                for batch in batches:
                    seen.append(batch.sample_ids.tolist())
                    assert loader.state_dict()["step"] == len(seen) == batches.state_dict()["step"]
                    if len(seen) == stop:
                        break
            assert seen == expected[:stop]
            other.load_state_dict(loader.state_dict())
            assert ids(other.to_torch(num_workers=then)) == expected[stop : STEPS if stop < STEPS else 2 * STEPS]


def test_a_state_may_be_loaded_while_helpers_run(data: Path):
    expected = [item["ids"] for item in read_plain(data, 1)]
    with Loader(data, **ARGUMENTS) as loader:
        batches = loader.to_torch(num_workers=2)
        list(islice(batches, 9))
        state = loader.state_dict()
        list(islice(batches, 4))
        loader.load_state_dict(state)
        assert ids(batches) == expected[9:]
        loader.load_state_dict(state)
        running = iter(batches)
        next(running)
        loader.load_state_dict(state)
        assert next(running).sample_ids.tolist() == expected[9]
        next(iter(batches))
        with pytest.raises(UsageError, match="another began"):
            next(running)


def test_an_error_in_a_helper_comes_with_its_words_after_what_was_good(tmp_path):
    data, seen = make_dataset(tmp_path / "holed", 8, 16, SEQ_LEN), []
    (data / "0005.safetensors").unlink()
    with Loader(data, **ARGUMENTS, shuffle=False, order=OrderOptions(lanes=1)) as loader:
        with pytest.raises(DatasetError, match=r"0005\.safetensors.*Fetch or prepare it again"):
            for batch in loader.to_torch(num_workers=3):
                seen.append(batch.step)
        assert seen == list(range(len(seen))) and 17 <= len(seen) <= 20


def test_a_helper_that_is_killed_amid_a_message_has_ended():
    """After the message and before the descriptor of the segment in which its batches are."""
    ours, theirs = socket.socketpair()
    with ours, Connection(theirs.detach()) as connection:
        reader = SegmentReader(ours)
        connection.send(("head", [1 << 16], 0, 64, []))
        connection.close()
        with pytest.raises(EOFError):
            reader.receive()
        reader.close()


@pytest.mark.parametrize("style", ["batch", "plain", "transformers"])
def test_a_batch_is_used_as_it_comes(style, data: Path, tmp_path):
    """Ids, labels, masks and positions are int64, whatever their stored type: a model takes them without a cast."""
    write_typed_rows(tmp_path)
    for workers in (0, 1):
        with Loader(tmp_path, batch_size=4) as loader:
            (batch,) = loader.to_torch(num_workers=workers, style=style)
            assert {name: str(batch[name].dtype).removeprefix("torch.") for name in ROW_DTYPES} == ROW_DTYPES
            assert torch.nn.Embedding(9, 2)(batch["input_ids"]).shape == (4, 3, 2)
            assert torch.nn.functional.cross_entropy(torch.zeros(4, 9), batch["label"]) > 0
    masked = next(iter(Loader(data, document_masks=True, **ARGUMENTS).to_torch(style=style)))
    fields = masked.arrays() if style == "batch" else masked
    kinds = {(str(v.dtype), name[:2] == "cu") for name, v in fields.items() if isinstance(v, torch.Tensor)}
    assert kinds == {("torch.int64", False), ("torch.int32", True)}


def test_names_for_transformers(data: Path):
    arguments = {**ARGUMENTS, "document_masks": True, "samples": SampleOptions(max_documents=9)}
    batches = Loader(data, **arguments).to_torch()
    with Loader(data, **arguments) as loader:
        for named, batch in zip(loader.to_torch(style="transformers", num_workers=1), batches, strict=True):
            # A model scores position i against label i + 1.
            assert torch.equal(named["labels"][:, 1:], batch.labels[:, :-1])
            assert torch.equal(named["input_ids"], batch.inputs)
            assert torch.equal(named["position_ids"], batch.position_ids)
            assert torch.equal(named["cu_seq_lens_q"], batch.cu_seqlens) and batch.cu_seqlens.shape == (10,)
            assert named["max_length_k"] == batch.max_seqlen
            assert torch.equal(batch.as_dict("transformers")["labels"], named["labels"])


def test_in_ones_own_dataloader_and_views(data: Path, monkeypatch):
    expected = [item["ids"] for item in read_plain(data, 2)]
    loader = Loader(data, **ARGUMENTS)
    own = torch.utils.data.DataLoader(loader.to_torch(), batch_size=None)
    assert len(own) == STEPS and ids(own) == expected[:STEPS] and loader.step == STEPS
    named = torch.utils.data.DataLoader(loader.to_torch(style="plain"))
    assert ids(named) == expected[STEPS:]
    with pytest.raises(UsageError, match="expected batch_size=None, as these are batches, got 4"):
        next(iter(torch.utils.data.DataLoader(loader.to_torch(), batch_size=4)))
    fresh = Loader(data, **ARGUMENTS)
    view = fresh.take(3).to_torch("cpu")
    assert ids(view) == ids(view) == expected[:3] and len(view) == 3 and fresh.step == 0
    with pytest.raises(UsageError, match="num_workers: expected 0"):
        next(iter(fresh.take(3).to_torch(num_workers=1)))
    with pytest.raises(TypeError, match=r"DataLoader\(loader.to_torch\(\), batch_size=None\)"):
        next(iter(torch.utils.data.DataLoader(loader)))
    monkeypatch.setattr("forebay.load.torch.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    with pytest.raises(UsageError, match="got 1: one process makes their batches"):
        next(iter(view))


def test_workers_of_a_dataloader_make_its_batches_in_turn_pass_after_pass(data: Path):
    """Copies of the loader stand for the processes; real ones: tests/slow/load/test_torch_helpers.py."""
    expected, loader = [item["ids"] for item in read_plain(data, 2)], Loader(data, **ARGUMENTS)
    assert len(copy.deepcopy(loader.to_torch())) == len(loader)
    workers = [pickle.loads(pickle.dumps(loader)) for _ in range(4)]

    def read(index: int, worker: Loader) -> Any:
        return worker.iterate_share(lambda batch: batch, loader.readers, (index, 3))

    for start in (0, STEPS):
        rows = zip_longest(*(read(index, worker) for index, worker in enumerate(workers[:3])))
        assert ids(batch for row in rows for batch in row if batch) == expected[start : start + STEPS]
    for use in (loader.state_dict, lambda: next(iter(loader)), lambda: next(read(0, workers[3]))):
        with pytest.raises(UsageError, match=r"persistent_workers=True.*loader.state_at\(batch.step \+ 1\)"):
            use()
    assert len(ids(loader.take(2))) == 2
    loader.load_state_dict(loader.state_at(STEPS + 5))
    with pytest.raises(UsageError, match="make a new DataLoader"):
        next(read(0, workers[0]))
    assert ids(loader) == expected[STEPS + 5 :]


class FakeCuda:
    """Streams and events of a device that is the CPU, which record the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = []
        fake = self

        class Stream:
            def __init__(self, device=None):
                self.name = threading.current_thread().name

            def wait_event(self, event):
                fake.calls.append("wait")

        class Event:
            def record(self, stream):
                fake.calls.append("record")

        self.current = Stream()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: self.copy(tensor))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.calls.append("use"))

    def copy(self, tensor: Any) -> Any:
        self.calls.append("copy")
        return tensor.clone()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_copies_to_a_device_are_ordered_by_streams(data: Path, monkeypatch, prefetch):
    expected = read_plain(data, 1)
    cuda = FakeCuda(monkeypatch)
    batches = list(Loader(data, **ARGUMENTS).to_torch("cuda", prefetch=prefetch))
    for batch, item in zip(batches, expected, strict=True):
        check(batch, item)
    # Inputs and labels cross as one array.
    assert [cuda.calls.count(name) for name in ("copy", "record", "wait", "use")] == [STEPS] * 4
    masked = list(Loader(data, document_masks=True, **ARGUMENTS).to_torch("cuda", prefetch=prefetch))
    assert masked[0].cu_seqlens[-1] == masked[0].inputs.numel() and masked[0].num_labels > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers, prefetch", [(0, 0), (0, 2), (1, 2)])
def test_batches_on_a_gpu(data: Path, workers, prefetch):
    expected = read_plain(data, 2)
    with Loader(data, epochs=2, **ARGUMENTS) as loader:
        sums = []
        for batch in loader.to_torch("cuda", prefetch=prefetch, num_workers=workers):
            assert batch.inputs.device.type == "cuda" and batch.labels.is_cuda
            sums.append((batch.inputs * 3 + batch.labels).sum())  # Queued on the loop's stream; not waited for.
        assert [int(value) for value in sums] == [int((i["inputs"] * 3 + i["labels"]).sum()) for i in expected]


def test_wrong_arguments_are_refused(data: Path):
    loader = Loader(data, **ARGUMENTS)
    for wrong, named in (
        ({"style": "other"}, "style: expected one of"),
        ({"prefetch": -1}, "prefetch"),
        ({"num_workers": 1.5}, "num_workers"),
        ({"device": "nowhere"}, "device: expected a device of PyTorch"),
    ):
        with pytest.raises(UsageError, match=named):
            loader.to_torch(**wrong)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA"):
            loader.to_torch("cuda")
    with pytest.raises(StateError, match="seed"):
        loader.to_torch().load_state_dict(Loader(data, **{**ARGUMENTS, "seed": 6}).state_dict())
