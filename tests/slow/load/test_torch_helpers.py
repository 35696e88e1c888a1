"""Helper processes of a loader: they stay over epochs and end with it, and one that is killed is named."""

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from forebay.errors import ForebayError  # noqa: E402
from forebay.load.loader import Loader  # noqa: E402
from support.feeding import dataset_fixture, list_ids  # noqa: E402

SEQ_LEN = 16


data = dataset_fixture(5, 20, SEQ_LEN)


def num_descriptors() -> int:
    """Sockets and shared memory that this process has open."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]  # noqa: PTH115
    return sum(link.startswith(("socket:", "/memfd:forebay")) for link in links)


def test_helpers_stay_over_epochs_and_end_with_the_loader(data: Path):
    local = Loader(data, seq_len=SEQ_LEN, batch_size=7, epochs=3)
    expected, before = list_ids(local), num_descriptors()
    with Loader(data, seq_len=SEQ_LEN, batch_size=7) as loader:
        seen, pids = [], []
        for _ in range(3):
            seen += list_ids(loader.to_torch(num_workers=2))
            pids.append([helper.process.pid for helper in loader._pool._helpers])
        assert seen == expected and len(pids[0]) == 2 and pids == [pids[0]] * 3
        assert all(os.getpgid(pid) == pid for pid in pids[0])  # a terminal's Ctrl-C is not theirs
    assert loader._pool is None and not any(Path(f"/proc/{pid}").exists() for pid in pids[0])
    assert num_descriptors() == before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_dataloader_stay_and_read_in_order(data: Path, method):
    arguments, options = {"seq_len": SEQ_LEN, "batch_size": 7}, {"num_workers": 2, "multiprocessing_context": method}
    expected, loader = list_ids(Loader(data, epochs=4, **arguments)), Loader(data, **arguments)
    pool = torch.utils.data.DataLoader(loader.to_torch(), persistent_workers=True, **options)
    assert [samples for _ in range(3) for samples in list_ids(pool)] == expected[:45]


def test_a_script_without_a_main_guard_may_use_helpers(data: Path, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, forebay\n"
        f"loader = forebay.Loader({str(data)!r}, seq_len={SEQ_LEN}, batch_size=4)\n"
        "print(sum(len(batch) for batch in loader.to_torch(num_workers=2)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "100\n"), done.stderr


def test_a_helper_that_is_killed_is_named(data: Path):
    with Loader(data, seq_len=SEQ_LEN, batch_size=4, epochs=None) as loader:
        batches = iter(loader.to_torch(num_workers=2, prefetch=0))
        next(batches)
        os.kill(loader._pool._helpers[1].process.pid, signal.SIGKILL)
        with pytest.raises(ForebayError, match="helper process 1 of 2: expected batches, got exit code -9"):
            list(islice(batches, 10_000))
