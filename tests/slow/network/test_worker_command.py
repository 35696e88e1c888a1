"""`forebay worker -- COMMAND`: the command's `Loader()` leases; signals, statuses and leases of what died."""

import os
import signal
import sys
from contextlib import ExitStack

import psutil
import pytest

from forebay import Loader
from support.nodes import Network, make_dataset
from support.processes import Process, Start
from support.waiting import until

BATCH, SEQ_LEN, NUM_SLICES, TOKENS = 4, 16, 13, 330
SAMPLES = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
READ_ALL = r"""
import json, os, time
import forebay

loader = forebay.Loader()
for batch in loader:
    os.write(1, json.dumps({"ids": batch.sample_ids.tolist(), "pid": os.getpid()}).encode() + b"\n")
    time.sleep(float(os.environ.get("PAUSE_S", 0)))
"""


@pytest.fixture
def network(tmp_path, stack: ExitStack) -> Network:
    network = Network(tmp_path, stack, "a", "b")
    network.serve(make_dataset(tmp_path / "dataset", NUM_SLICES, TOKENS))
    return network


@pytest.fixture
def work(network, start: Start) -> Start:
    """Start `forebay worker --scheduler … -- python -c PROGRAM`."""

    def run(service, program="", name="a", **environment):
        home = network.homes[name]
        words = f"--scheduler {service.address} --identity {home} --batch-size {BATCH} --cache-bytes 1000000".split()
        words += f"--cache-dir {network.directory}/cache-{name} --listen 127.0.0.1:0 --json".split()
        command = ["--", sys.executable, "-c", program] if program else []
        return start("worker", *words, *command, **environment)

    return run


def finish(process: Process, code: int = 0) -> tuple[list, dict, str]:
    """Return the JSON lines of the command, the worker's report, and its errors."""
    assert process.wait() == code, process.errors
    *lines, last = process.lines
    return lines, last["report"], process.errors


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_loader_without_arguments_leases_what_the_scheduler_has(network, work):
    """A program that closes its loader may leave without the interpreter's end."""
    service = network.schedule(seq_len=SEQ_LEN, packing="best_fit", lease_s=600.0)
    lines, report, _ = finish(work(service, f"{READ_ALL}loader.close()\nos._exit(0)"))
    ids = [sample for line in lines for sample in line["ids"]]
    alone = Loader(network.nodes[0].datasets[0], seq_len=SEQ_LEN, batch_size=1, packing="best_fit")
    assert sorted(ids) == sorted(int(batch.sample_ids[0]) for batch in alone)
    network.assert_used_once(len(ids))
    assert {len(line["ids"]) for line in lines[:3]} == {BATCH}
    assert (report["loaders"], report["samples"], report["batches"]) == (1, len(ids), len(lines))
    assert report["done"] == 1 and report["wasted_samples"] == 0 and 0 <= report["wait_share"] <= 1


def test_arguments_of_the_program_come_before_those_of_the_worker(network, work):
    service = network.schedule(seq_len=SEQ_LEN)
    program = f"""
import json, forebay
loader = forebay.Loader(batch_size=3, network=forebay.NetworkOptions(receipt_s=0.1))
options = loader.config.network
for batch in loader:
    break
print(json.dumps([len(batch), options.receipt_s, options.identity, options.listen, loader.seq_len]))
with forebay.Loader({str(network.directory / "dataset")!r}, seq_len=16, batch_size=5) as other:  # no lease
    print(json.dumps([len(next(iter(other))), other.leases is None]))
"""
    lines, report, _ = finish(work(service, program))
    assert lines == [[3, 0.1, str(network.homes["a"]), "127.0.0.1:0", 16], [5, True]]
    assert service.status()["slices_leased"] == 0, "what a program did not use goes back when it ends"
    assert (report["loaders"], report["samples"]) == (1, 3)


def test_two_ranks_of_a_launcher_lease_each_for_itself(network, work, tmp_path):
    """As torchrun starts them: RANK and WORLD_SIZE are in their environment."""
    service = network.schedule(seq_len=SEQ_LEN, lease_s=600.0)
    # None begins before the other can: else a late one finds nothing left.
    gate = f"""
open({str(tmp_path / "begun-")!r} + os.environ["RANK"], "w").close()
while not all(os.path.exists({str(tmp_path / "begun-")!r} + rank) for rank in "01"):
    time.sleep(0.01)
for batch"""
    launcher = f"""
import os, subprocess, sys
program = {READ_ALL.replace("for batch", gate)!r}
ranks = [subprocess.Popen([sys.executable, "-c", program], env=os.environ | {{
    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}}) for rank in range(2)]
sys.exit(sum(rank.wait() for rank in ranks))
"""
    lines, report, _ = finish(work(service, launcher, PAUSE_S="0.05"))
    assert len({line["pid"] for line in lines}) == 2 == report["loaders"]
    ids = [sample for line in lines for sample in line["ids"]]
    assert len(ids) == len(set(ids)) == report["samples"]
    network.assert_used_once(SAMPLES)


def test_the_status_of_a_command_is_the_workers(network, work):
    service = network.schedule(seq_len=SEQ_LEN, lease_s=600.0)
    failing = "import sys, forebay\nfor batch in forebay.Loader():\n    sys.exit(7)\n"
    _, report, errors = finish(work(service, failing), 7)
    assert "the command ended with status 7" in errors and report["batches"] == 1
    assert service.status()["slices_leased"] == 0
    lines, report, _ = finish(work(service, name="b"))
    assert service.is_done() and report["samples"] == SAMPLES
    assert lines[0]["step"] == 1 and lines[0]["loss"] > 0, "without a command, batches are counted"


def test_the_counting_command_ends_well_when_it_is_stopped(network, work):
    service = network.schedule(seq_len=SEQ_LEN, lease_s=600.0, epochs=100_000)
    process = work(service)
    until(lambda: service.status()["samples_used"] > 400)
    process.end(signal.SIGTERM)
    _, report, errors = finish(process)
    assert "ended with" not in errors and report["loaders"] == 1
    assert service.status()["slices_leased"] == 0
    assert report["samples"] - BATCH <= service.status()["samples_used"] <= report["samples"]  # But for the last batch.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_whole_process_group(network, work, tmp_path, number):
    """The command's own child, too; leases return at once though nothing was closed."""
    service = network.schedule(seq_len=SEQ_LEN, lease_s=600.0)
    program = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
marks = "import signal, sys, time; from pathlib import Path\\n" \\
    "signal.signal({int(number)}, lambda *_: sys.exit(Path({str(tmp_path / "mark")!r}).touch()))\\n" \\
    "print('{{}}', flush=True)\\nwhile True: time.sleep(0.1)"
child = subprocess.Popen([sys.executable, "-c", marks])
{READ_ALL}
"""
    process = work(service, program, PAUSE_S="1.0")
    until(lambda: {} in process.lines and service.status()["samples_used"] > 0)  # The child has its handler, too.
    assert process.end(number) == 128 + number and f"the command ended with {number.name}" in process.errors
    until((tmp_path / "mark").exists)
    assert "report" in process.lines[-1]
    assert service.status()["slices_leased"] == 0


def test_kill_9_of_the_command_or_of_the_worker(network, work):
    service = network.schedule(seq_len=SEQ_LEN, lease_s=600.0)
    killed, orphan = (work(service, READ_ALL, name, PAUSE_S="0.2") for name in ("a", "b"))
    pids = [process.ready()["pid"] for process in (killed, orphan)]
    os.kill(pids[0], signal.SIGKILL)
    assert killed.wait() == 137 and "the command ended with SIGKILL" in killed.errors
    assert killed.lines[-1]["report"] == {"loaders": 0}
    leased = service.status()["workers"]
    assert [worker["leases"] for worker in leased.values() if worker["name"] == "a"] in ([], [0])
    orphan.end()
    until(lambda: has_ended(pids[1]))
    finish(work(service, READ_ALL, "b"))  # On the cache of the one that was killed.
    network.assert_used_once(SAMPLES)


def test_a_command_that_cannot_run_is_named(network, start: Start):
    words = f"worker --scheduler {network.schedule(seq_len=SEQ_LEN).address} --identity {network.homes['a']}".split()
    for command, expected in (
        (["--", "no-such-program"], "worker: cannot run no-such-program: No such file or directory"),
        (["--"], "expected a command behind --"), (["web", "x.py"], "unrecognized arguments: x.py"),
    ):  # fmt: skip
        process = start(*words, "--cache-dir", network.directory / "c", *command)
        assert process.wait() == 2 and expected in process.errors, process.errors
