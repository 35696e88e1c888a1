"""Batches through PyTorch: the same ones in the same order whatever helpers there are, and a state that is exact."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.calibration import scaled

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from forebay.dataset.import_slices import import_slices  # noqa: E402
from forebay.dataset.slices import write_rows_slice, write_token_slice  # noqa: E402
from forebay.errors import DatasetError, ForebayError, StateError, UsageError  # noqa: E402
from forebay.load.batch import RowBatch, TokenBatch  # noqa: E402
from forebay.load.loader import Loader  # noqa: E402
from forebay.load.options import OrderOptions, SampleOptions  # noqa: E402
from forebay.load.shared_memory import SegmentReader  # noqa: E402

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
    batches: Any = Loader(data, epochs=epochs, **{**ARGUMENTS, **arguments})
    return [{"inputs": b.inputs.copy(), "labels": b.labels.copy(), "ids": b.sample_ids.tolist()} for b in batches]


def check(batch: Any, requested: dict[str, Any]) -> None:
    assert isinstance(batch, TokenBatch) and batch.sample_ids.tolist() == requested["ids"]
    assert batch.inputs.dtype == torch.int64 and isinstance(batch.sample_ids, np.ndarray)
    assert torch.equal(batch.inputs, torch.from_numpy(requested["inputs"]))
    assert torch.equal(batch.labels, torch.from_numpy(requested["labels"]))
    assert batch.num_labels == (requested["labels"] != -100).sum()


def ids(batches: Any) -> list[list[int]]:
    return [(b["sample_ids"] if isinstance(b, dict) else b.sample_ids).tolist() for b in batches]


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 2), (1, 2), (3, 0)])
def test_the_same_order_for_any_number_of_helpers(data: Path, workers: int, prefetch: int, device: str | None) -> None:
    requested = expected(data, 2)
    with Loader(data, **ARGUMENTS) as loader:
        batches = loader.to_torch(device, prefetch=prefetch, num_workers=workers)
        assert len(batches) == STEPS and len(requested) == 2 * STEPS
        for epoch in range(2):
            retained = list(batches)  # All at once: what is kept is not written over.
            assert len(retained) == STEPS and loader.step == (epoch + 1) * STEPS
            for step, (batch, item) in enumerate(zip(retained, requested[epoch * STEPS :])):
                assert (batch.epoch, batch.epoch_step, batch.step) == (epoch, step, epoch * STEPS + step)
                check(batch, item)


@pytest.mark.parametrize("workers", [0, 1])
def test_labels_and_inputs_share_memory_also_from_a_helper(data: Path, workers: int) -> None:
    with Loader(data, **ARGUMENTS) as loader:
        for batch in islice(loader.to_torch(num_workers=workers), 3):
            assert batch.inputs.untyped_storage().data_ptr() <= batch.labels.data_ptr()
            assert batch.labels.data_ptr() - batch.inputs.data_ptr() == batch.inputs.element_size()


@pytest.mark.parametrize(("first", "then"), [(0, 3), (3, 0), (2, 1)])
def test_the_state_is_the_loaders_and_resumes_with_other_helpers(data: Path, first: int, then: int) -> None:
    requested = [item["ids"] for item in expected(data, 2)]
    for stop in (7, 25, 31):
        with Loader(data, **ARGUMENTS) as loader, Loader(data, **ARGUMENTS) as other:
            batches, seen = loader.to_torch(num_workers=first), []
            while len(seen) < stop:
                for batch in batches:
                    seen.append(batch.sample_ids.tolist())
                    assert loader.state_dict()["step"] == len(seen) == batches.state_dict()["step"]
                    if len(seen) == stop:
                        break
            assert seen == requested[:stop]
            other.load_state_dict(loader.state_dict())
            assert ids(other.to_torch(num_workers=then)) == requested[stop : STEPS if stop < STEPS else 2 * STEPS]


def test_leaving_a_loop_early_continues_with_the_next_batch(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 3)]
    with Loader(data, **ARGUMENTS) as loader:
        seen: list[list[int]] = []
        for count in (3, 1, 8, 100, 5, 100, 100):
            for batch in islice(loader.to_torch(num_workers=2), count):
                seen.append(batch.sample_ids.tolist())
                assert loader.step == len(seen)
        assert seen == requested


def test_helpers_stay_over_epochs_and_the_gap_is_short(tmp_path: Path) -> None:
    write_token_slice(tmp_path / "0.safetensors", np.zeros(1 << 17, np.uint16), np.array([1 << 17], np.uint64))
    import_slices(tmp_path, "larger")
    with Loader(tmp_path, seq_len=SEQ_LEN, batch_size=256) as loader:
        pids, gaps = [], []
        for _ in range(4):
            started_at = time.perf_counter()
            for step, _batch in enumerate(loader.to_torch(num_workers=2)):
                if step == 0:
                    gaps.append(time.perf_counter() - started_at)
            pids.append(loader.helper_pids)
        assert len(pids[0]) == 2 and pids == [pids[0]] * 4
        assert min(gaps[1:]) < scaled(0.05), gaps
        assert all(Path(f"/proc/{pid}").exists() for pid in pids[0])
    assert loader.helper_pids == [] and not any(Path(f"/proc/{pid}").exists() for pid in pids[0])


def test_a_state_may_be_loaded_while_helpers_run(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 1)]
    with Loader(data, **ARGUMENTS) as loader:
        batches = loader.to_torch(num_workers=2)
        list(islice(batches, 9))
        state = loader.state_dict()
        list(islice(batches, 4))
        loader.load_state_dict(state)
        assert ids(batches) == requested[9:]
        loader.load_state_dict(state)
        running = iter(batches)
        next(running)
        loader.load_state_dict(state)
        assert next(running).sample_ids.tolist() == requested[9]
        next(iter(batches))
        with pytest.raises(UsageError, match="another began"):
            next(running)


def test_a_script_without_a_main_guard_may_use_helpers(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, forebay\n"
        f"loader = forebay.Loader({str(data)!r}, seq_len={SEQ_LEN}, batch_size=4, seed=5)\n"
        "print(sum(len(batch) for batch in loader.to_torch(num_workers=2)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "97\n"), done.stderr


def test_an_error_in_a_helper_comes_with_its_words_after_what_was_good(tmp_path: Path) -> None:
    for i in range(8):
        tokens = np.arange(SEQ_LEN * 16, dtype=np.uint16)
        write_token_slice(tmp_path / f"{i}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(tmp_path, "holed")
    (tmp_path / "5.safetensors").unlink()
    seen = []
    with Loader(tmp_path, **ARGUMENTS, shuffle=False, order=OrderOptions(lanes=1)) as loader:
        with pytest.raises(DatasetError, match=r"5\.safetensors") as caught:
            for batch in loader.to_torch(num_workers=3):
                seen.append(batch.step)
        assert "Fetch or prepare it again" in str(caught.value)
        assert seen == list(range(len(seen))) and 17 <= len(seen) <= 20


def test_a_helper_that_is_killed_is_named(data: Path) -> None:
    with Loader(data, epochs=None, **ARGUMENTS) as loader:
        batches = iter(loader.to_torch(num_workers=2, prefetch=0))
        next(batches)
        os.kill(loader.helper_pids[1], signal.SIGKILL)
        with pytest.raises(ForebayError, match="helper process 1 of 2: expected batches, got exit code -9"):
            for _ in range(10_000):
                next(batches)


def test_a_helper_that_is_killed_amid_a_message_has_ended() -> None:
    """After the message and before the descriptor of the segment in which its batches are."""
    ours, theirs = socket.socketpair()
    with ours, Connection(theirs.detach()) as connection:
        reader = SegmentReader(ours)
        connection.send(("head", [1 << 16], 0, 64, []))
        connection.close()
        with pytest.raises(EOFError):
            reader.receive()
        reader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_by_name(rows: Path, workers: int) -> None:
    seen = []
    with Loader(rows, batch_size=4, seed=1) as loader:
        for batch in loader.to_torch(num_workers=workers):
            assert isinstance(batch, RowBatch) and batch["images"].dtype == torch.uint8
            assert batch["images"].shape[1:] == (3, 4, 4)
            assert batch.labels.tolist() == batch.sample_ids.tolist()
            seen += batch.labels.tolist()
        for item in loader.to_torch(style="plain", num_workers=workers):
            assert item["labels"].tolist() == item["sample_ids"].tolist()
    assert sorted(seen) == list(range(21))


def test_names_for_transformers(data: Path) -> None:
    plain = list(Loader(data, **ARGUMENTS).to_torch(style="plain"))
    with Loader(data, **ARGUMENTS) as loader:
        for item, named in zip(plain, loader.to_torch(style="transformers", num_workers=1), strict=True):
            assert set(named) == {"input_ids", "labels"}
            assert torch.equal(named["input_ids"], item["inputs"])
            # A model scores position i against label i + 1.
            assert torch.equal(named["labels"][:, 1:], item["labels"][:, :-1])
    arguments: dict[str, Any] = {**ARGUMENTS, "document_masks": True}
    masked = next(iter(Loader(data, **arguments).to_torch(style="transformers")))
    batch = next(iter(Loader(data, **arguments).to_torch()))
    assert torch.equal(masked["labels"][:, 1:], batch.labels[:, :-1])
    assert torch.equal(masked["position_ids"], batch.position_ids)
    assert torch.equal(masked["cu_seq_lens_q"], batch.cu_seqlens) and masked["max_length_k"] == batch.max_seqlen
    assert torch.equal(batch.as_dict("transformers")["labels"], masked["labels"])


def test_cu_seqlens_of_a_fixed_length(data: Path) -> None:
    arguments = {**ARGUMENTS, "document_masks": True, "samples": SampleOptions(max_documents=9)}
    shapes = {tuple(batch.cu_seqlens.shape) for batch in Loader(data, **arguments).to_torch()}
    assert shapes == {(10,)}


def test_in_ones_own_dataloader_and_views(data: Path) -> None:
    requested = [item["ids"] for item in expected(data, 2)]
    loader = Loader(data, **ARGUMENTS)
    own = torch.utils.data.DataLoader(loader.to_torch(), batch_size=None)
    assert len(own) == STEPS and ids(own) == requested[:STEPS] and loader.step == STEPS
    named = torch.utils.data.DataLoader(loader.to_torch(style="plain"), batch_size=None)
    assert ids(named) == requested[STEPS:]
    with pytest.raises(UsageError, match=r"Use loader.to_torch\(num_workers=...\)"):
        next(iter(torch.utils.data.DataLoader(loader.to_torch(), batch_size=None, num_workers=1)))
    fresh = Loader(data, **ARGUMENTS)
    view = fresh.take(3).to_torch("cpu")
    assert ids(view) == ids(view) == requested[:3] and len(view) == 3 and fresh.step == 0
    with pytest.raises(UsageError, match="num_workers: expected 0"):
        next(iter(fresh.take(3).to_torch(num_workers=1)))


def test_waiting_for_tensors_is_counted(data: Path) -> None:
    loader = Loader(data, **ARGUMENTS)
    list(loader.to_torch(prefetch=0))
    stats = loader.stats()
    assert 0 < stats["device_s"] < stats["wait_s"] and stats["batches"] == STEPS


class FakeCuda:
    """Streams and events of a device that is the CPU, which record what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        fake = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = threading.current_thread().name

            def wait_event(self, event: Any) -> None:
                fake.calls.append("wait")

        class Event:
            def record(self, stream: Stream) -> None:
                fake.calls.append("record")

        import contextlib

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
def test_copies_to_a_device_are_ordered_by_streams(data: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int) -> None:
    requested = expected(data, 1)
    cuda = FakeCuda(monkeypatch)
    batches = list(Loader(data, **ARGUMENTS).to_torch("cuda", prefetch=prefetch))
    for batch, item in zip(batches, requested, strict=True):
        check(batch, item)
    # Inputs and labels cross as one array.
    assert [cuda.calls.count(name) for name in ("copy", "record", "wait", "use")] == [STEPS] * 4
    masked = list(Loader(data, document_masks=True, **ARGUMENTS).to_torch("cuda", prefetch=prefetch))
    assert masked[0].cu_seqlens[-1] == masked[0].inputs.numel() and masked[0].num_labels > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 2), (1, 2)])
def test_batches_on_a_gpu(data: Path, workers: int, prefetch: int) -> None:
    requested = expected(data, 2)
    with Loader(data, epochs=2, **ARGUMENTS) as loader:
        sums = []
        for batch in loader.to_torch("cuda", prefetch=prefetch, num_workers=workers):
            assert batch.inputs.device.type == "cuda" and batch.labels.is_cuda
            sums.append((batch.inputs * 3 + batch.labels).sum())  # Queued on the loop's stream; not waited for.
        assert [int(value) for value in sums] == [int((i["inputs"] * 3 + i["labels"]).sum()) for i in requested]


def test_a_loader_is_pickled_as_arguments_and_state(data: Path) -> None:
    with Loader(data, **ARGUMENTS) as loader:
        seen = ids(islice(loader.to_torch(), 2))
        copy = pickle.loads(pickle.dumps(loader.to_torch()))
        assert seen + ids(copy) == [item["ids"] for item in expected(data, 1)]
        assert len(pickle.dumps(loader.to_torch())) < 80_000


def test_what_is_wrong_is_refused(data: Path) -> None:
    loader = Loader(data, **ARGUMENTS)
    for wrong, named in (
        ({"style": "other"}, "style: expected one of"),
        ({"prefetch": -1}, "prefetch"),
        ({"num_workers": 1.5}, "num_workers"),
        ({"device": "nowhere"}, "device: expected a device of PyTorch"),
    ):
        with pytest.raises(UsageError, match=named):
            loader.to_torch(**wrong)  # type: ignore[call-overload]
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA"):
            loader.to_torch("cuda")
    with pytest.raises(StateError, match="seed"):
        loader.to_torch().load_state_dict(Loader(data, **{**ARGUMENTS, "seed": 6}).state_dict())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_nothing_is_left_open(data: Path) -> None:
    counts: list[int] = []
    for _ in range(3):
        with Loader(data, **ARGUMENTS) as loader:
            list(loader.to_torch(num_workers=1))
        del loader
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[2] <= counts[1] and threading.active_count() < 20
