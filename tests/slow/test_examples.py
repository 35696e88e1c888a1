"""Every example runs as its first lines say; when a process of it is killed, the example ends, and names it.

An example that is ended by SIGTERM ends what it has started.
"""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import psutil
import pytest

from support.calibration import scaled
from support.paths import ROOT
from support.waiting import until

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {
    "inference": "libtorrent",
    "hf_trainer": "torch transformers accelerate",
    "jax_train": "jax",
    "leased_ddp": "torch libtorrent",
    "lightning_module": "torch lightning",
    "train_ddp": "torch",
    "train_fsdp": "torch",
    "train_gpt": "torch",
}
Select = Callable[[psutil.Process], bool]


def command(name: str, *arguments: str) -> list[str]:
    """The command of an example; skips the test if the example needs what is not installed."""
    if missing := [package for package in NEEDS.get(name, "").split() if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run(command(path.stem), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def is_rank_1(process: psutil.Process) -> bool:
    return process.environ().get("RANK") == "1"


def is_command(process: psutil.Process, verb: str, node: str = "") -> bool:
    """True for `forebay VERB …` of a node."""
    words = process.cmdline()
    return words[2:4] == ["forebay", verb] and any(word.endswith(node) for word in words)


def is_worker(process: psutil.Process) -> bool:
    return is_command(process, "worker", "dave")


def is_server(verb: str) -> Select:
    """Select a server as soon as a worker runs beside it."""

    def select(process):
        siblings = psutil.Process(process.ppid()).children()
        return is_command(process, verb) and any(is_command(sibling, "worker") for sibling in siblings)

    return select


@pytest.mark.parametrize(
    "name, select, message",
    [
        ("train_ddp", is_rank_1, r"rank +: 1 .*exitcode +: -9"),
        ("train_fsdp", is_rank_1, r"rank +: 1 .*exitcode +: -9"),
        ("leased_ddp", is_rank_1, r"rank +: 1 .*exitcode +: -9.*the worker carol ended with status 1"),
        ("leased_ddp", is_server("scheduler"), r"forebay scheduler ended with status -9, so forebay worker was ended"),
        ("inference", is_worker, r"the worker dave ended with status -9, expected 0"),
        ("inference", is_server("serve"), r"forebay serve ended with status -9, so forebay worker was ended"),
        ("train_ddp", is_rank_1, ""),
        ("leased_ddp", is_rank_1, ""),
        ("inference", is_worker, ""),
    ],
    ids=[
        "train_ddp", "train_fsdp", "leased_ddp-rank", "leased_ddp-scheduler", "inference-worker", "inference-server",
        "train_ddp-itself", "leased_ddp-itself", "inference-itself",
    ],
)  # fmt: skip
def test_an_example_ends_when_a_process_of_it_is_killed(name, select, message, tmp_path):
    """Not after the time-outs of gloo or of a store, which are minutes; and no process of it is left.

    Without a message the example itself is ended.
    """
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(command(name), stdout=file, stderr=file) as example:
        parent = psutil.Process(example.pid)

        victims = []

        def find_victims():
            time.sleep(0.05)  # A look at all processes is dear.
            for child in parent.children(recursive=True):
                with contextlib.suppress(psutil.Error):  # It has ended.
                    victims.extend([child] if select(child) else [])
            return victims

        until(find_victims)
        others = parent.children(recursive=True)
        victims[0].kill() if message else example.terminate()
        status = example.wait(scaled(30))
    assert status != 0
    assert re.search(message, log.read_text(), re.DOTALL), log.read_text()
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in others))


@pytest.mark.parametrize(
    "words",
    [
        "numpy_loop missing",
        "resume_elsewhere missing",
        "sft missing",
        "vision missing",
        "train_ddp missing checkpoint.pt",
        "train_fsdp missing checkpoint",
    ],
)
def test_data_that_is_missing_is_one_line(words, tmp_path):
    done = subprocess.run(command(*words.split()), capture_output=True, text=True, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "missing" in line and "expected" in line
