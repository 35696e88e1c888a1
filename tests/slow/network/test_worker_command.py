"""`forebay worker -- COMMAND`: the command's `Loader()` leases; signals, statuses and leases of what died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.scheduler.server import SchedulerService
from slow.load.test_loader_leases import BATCH, Network, assert_used_once, static_samples
from support.calibration import scaled
from support.paths import ROOT

REPOSITORY = ROOT
Start = Callable[..., "subprocess.Popen[str]"]
READ_ALL = r"""
import json, os, sys, time
import forebay
from support.paths import ROOT

loader = forebay.Loader()
for batch in loader:
    os.write(1, json.dumps({"ids": batch.sample_ids.tolist(), "pid": os.getpid()}).encode() + b"\n")
    time.sleep(float(os.environ.get("PAUSE_S", 0)))
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(tmp_path, stack)


@pytest.fixture
def start(tmp_path: Path, network: Network) -> Iterator[Start]:
    """Starts `forebay worker --scheduler … -- COMMAND`, where a text is a Python program."""
    started: list[subprocess.Popen[str]] = []

    def run(service: SchedulerService, *command: str, node: Path | None = None, **environment: str) -> Any:
        words = [sys.executable, "-m", "forebay", "worker", "--scheduler", service.address, "--json"]
        words += ["--identity", str(node or network.node_a), "--batch-size", str(BATCH), "--cache-bytes", "1000000"]
        words += ["--cache-dir", str(tmp_path / f"cache-{(node or network.node_a).name}"), "--listen", "127.0.0.1:0"]
        if command:
            program = tmp_path / f"program-{len(started)}.py"
            program.write_text(command[0])
            words += ["--", sys.executable, str(program), *command[1:]]
        variables = {"PYTHONPATH": str(REPOSITORY / "src"), **environment}
        started.append(
            subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[list[Any], dict[str, Any], str]:
    """The JSON lines of the command, the worker's report, and its errors."""
    out, errors = process.communicate()
    assert process.returncode == code, errors
    *lines, last = map(json.loads, out.splitlines())
    return lines, last["report"], errors


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(30)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_loader_without_arguments_leases_what_the_scheduler_has(network: Network, start: Start) -> None:
    service = network.schedule(packing="best_fit", lease_s=600.0)
    lines, report, _ = finish(start(service, READ_ALL))
    ids = [sample for line in lines for sample in line["ids"]]
    assert sorted(ids) == sorted(static_samples(network.dataset, packing="best_fit"))
    assert_used_once(service, len(ids))
    assert {len(line["ids"]) for line in lines[:3]} == {BATCH}
    assert (report["loaders"], report["samples"], report["batches"]) == (1, len(ids), len(lines))
    assert report["done"] == 1 and report["wasted_samples"] == 0 and 0 <= report["wait_share"] <= 1
    assert report["fetched_slices"] == 12


def test_arguments_of_the_program_come_before_those_of_the_worker(network: Network, start: Start) -> None:
    service = network.schedule()
    program = """
import json, forebay
loader = forebay.Loader(batch_size=3, network=forebay.NetworkOptions(receipt_s=0.1))
options = loader.plan.options.network
for batch in loader:
    break
print(json.dumps([len(batch), options.receipt_s, options.identity, options.listen, loader.seq_len]))
with forebay.Loader("DATASET", seq_len=16, batch_size=5) as other:  # A dataset: nothing of the environment.
    print(json.dumps([len(next(iter(other))), other.leases is None]))
""".replace("DATASET", str(network.dataset.path))
    lines, report, _ = finish(start(service, program))
    assert lines == [[3, 0.1, str(network.node_a), "127.0.0.1:0", 16], [5, True]]
    assert service.status()["slices_leased"] == 0, "what a program did not use goes back when it ends"
    assert (report["loaders"], report["samples"]) == (1, 3)


def test_a_program_that_closes_its_loader_may_leave_without_the_interpreters_end(
    network: Network, start: Start
) -> None:
    service = network.schedule(lease_s=600.0)
    program = "import os, forebay\nwith forebay.Loader() as loader:\n    list(loader)\nos._exit(0)\n"
    _, report, _ = finish(start(service, program))
    samples = len(static_samples(network.dataset))
    assert (report["loaders"], report["samples"]) == (1, samples)
    assert_used_once(service, samples)


def test_two_ranks_of_a_launcher_lease_each_for_itself(network: Network, start: Start, tmp_path: Path) -> None:
    """As torchrun starts them: RANK and WORLD_SIZE are in their environment."""
    service = network.schedule(lease_s=600.0)
    # None begins before the other can: else a late one finds nothing left.
    gate = f"""
open({str(tmp_path / "begun-")!r} + os.environ["RANK"], "w").close()
while not all(os.path.exists({str(tmp_path / "begun-")!r} + rank) for rank in "01"):
    time.sleep(0.01)
"""
    launcher = f"""
import os, subprocess, sys
program = {READ_ALL.replace("for batch", gate + "for batch")!r}
ranks = [subprocess.Popen([sys.executable, "-c", program], env=os.environ | {{
    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}}) for rank in range(2)]
sys.exit(sum(rank.wait() for rank in ranks))
"""
    lines, report, _ = finish(start(service, launcher, PAUSE_S="0.05"))
    assert len({line["pid"] for line in lines}) == 2 == report["loaders"]
    ids = [sample for line in lines for sample in line["ids"]]
    assert len(ids) == len(set(ids)) == report["samples"]
    assert_used_once(service, len(static_samples(network.dataset)))


def test_the_status_of_a_command_is_the_workers(network: Network, start: Start) -> None:
    service = network.schedule(lease_s=600.0)
    failing = "import sys, forebay\nfor batch in forebay.Loader():\n    sys.exit(7)\n"
    _, report, errors = finish(start(service, failing), 7)
    assert "the command ended with status 7" in errors and report["batches"] == 1
    assert service.status()["slices_leased"] == 0
    lines, report, _ = finish(start(service, node=network.node_b))
    assert service.is_done() and report["samples"] == len(static_samples(network.dataset))
    assert lines[0]["step"] == 1 and lines[0]["loss"] > 0, "without a command, batches are counted"


def test_the_counting_command_ends_well_when_it_is_stopped(network: Network, start: Start) -> None:
    service = network.schedule(lease_s=600.0, epochs=100_000)
    process = start(service)
    until(lambda: service.status()["samples_used"] > 400)
    process.send_signal(signal.SIGTERM)
    _, report, errors = finish(process)
    assert "ended with" not in errors and report["loaders"] == 1
    assert service.status()["slices_leased"] == 0
    assert report["samples"] - BATCH <= service.status()["samples_used"] <= report["samples"]  # But for the last batch.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_whole_process_group(
    network: Network,
    start: Start,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    """The command's own child, too; leases return at once though nothing was closed."""
    service = network.schedule(lease_s=600.0)
    program = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
marks = "import signal, sys, time; from pathlib import Path\\n" \\
    "signal.signal({int(number)}, lambda *_: sys.exit(Path({str(tmp_path / "mark")!r}).touch()))\\n" \\
    "print('{{}}', flush=True)\\nwhile True: time.sleep(0.1)"
child = subprocess.Popen([sys.executable, "-c", marks])
{READ_ALL}
"""
    process = start(service, program, PAUSE_S="1.0")
    assert process.stdout is not None
    printed = ""
    while '"ids"' not in printed or "{}\n" not in printed:  # The child has its handler, too.
        printed += process.stdout.readline()
    until(lambda: service.status()["samples_used"] > 0)
    process.send_signal(number)
    out, errors = process.communicate()
    assert process.returncode == 128 + number and f"the command ended with {number.name}" in errors
    until((tmp_path / "mark").exists)
    assert "report" in json.loads(out.splitlines()[-1])
    assert service.status()["slices_leased"] == 0


def test_kill_9_of_the_command_or_of_the_worker(network: Network, start: Start) -> None:
    service = network.schedule(lease_s=600.0)
    killed = start(service, READ_ALL, PAUSE_S="0.2")
    orphan = start(service, READ_ALL, node=network.node_b, PAUSE_S="0.2")
    pids = []
    for process in (killed, orphan):
        assert process.stdout is not None
        pids.append(json.loads(process.stdout.readline())["pid"])
    os.kill(pids[0], signal.SIGKILL)
    _, report, errors = finish(killed, 137)
    assert "the command ended with SIGKILL" in errors and report == {"loaders": 0}
    leased = service.status()["workers"]
    assert [worker["leases"] for worker in leased.values() if worker["name"] == "a"] in ([], [0])
    orphan.kill()
    until(lambda: has_ended(pids[1]))
    finish(start(service, READ_ALL, node=network.node_b))  # On the cache of the one that was killed.
    assert_used_once(service, len(static_samples(network.dataset)))


def test_a_command_that_is_not_there(network: Network, tmp_path: Path) -> None:
    service = network.schedule()
    words = [sys.executable, "-m", "forebay", "worker", "--scheduler", service.address, "--identity"]
    words += [str(network.node_a), "--cache-dir", str(tmp_path / "c")]
    for command, expected in (
        (["--", "no-such-program"], "worker: cannot run no-such-program: No such file or directory"),
        (["--"], "expected a command behind --"), (["web", "x.py"], "unrecognized arguments: x.py"),
    ):  # fmt: skip
        done = subprocess.run([*words, *command], capture_output=True, text=True)
        assert done.returncode == 2 and expected in done.stderr, done.stderr
