"""Run the fast tests many times, each time in another order, on a machine that is made busy or that stands still.

Usage: python scripts/stress_tests.py [--runs 30] [--busy 3] [--stops] [--seed 1] [-- PYTEST ARGUMENTS]

--busy N runs N loops beside every second run; --stops sends SIGSTOP to a random process of the tests every few seconds,
and SIGCONT after 0.3 to 6 s. Prints the closing line of each run and the tests that failed; exits with 1 if any did.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

# It ends with us, even if we are killed.
BUSY_LOOP = f"import os\nwhile os.getppid() == {os.getpid()}: pass"


def stop_at_random(process: "subprocess.Popen[str]", ended: threading.Event, chance: random.Random) -> None:
    """Stop processes of the tests, one at a time, until `ended`."""
    while not ended.wait(chance.uniform(0.5, 4.0)):
        with suppress(psutil.NoSuchProcess, IndexError):
            chosen = chance.choice(psutil.Process(process.pid).children(recursive=True))
            chosen.send_signal(signal.SIGSTOP)
            ended.wait(chance.uniform(0.3, 6.0))
            chosen.send_signal(signal.SIGCONT)


def run(seed: int, busy: int, stops: bool, arguments: list[str]) -> tuple[str, int, list[str]]:
    """Return the closing line of one run, its exit code, and the lines about its failures."""
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=loadgroup", "--ignore=tests/slow"]
    command += ["--random-order-bucket=global", f"--random-order-seed={seed}", *arguments]
    ended = threading.Event()
    with ExitStack() as stack:
        for _ in range(busy):
            loop = subprocess.Popen([sys.executable, "-c", BUSY_LOOP])
            stack.callback(loop.kill)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if stops:
            thread = threading.Thread(target=stop_at_random, args=(process, ended, random.Random(seed)))
            thread.start()
            stack.callback(thread.join)
            stack.callback(ended.set)
        output = process.communicate()[0]
    Path(f"out/stress-{seed}.log").write_text(output)
    failures = [line for line in output.splitlines() if re.match(r"(FAILED|ERROR) |.* of .* failed: ", line)]
    return output.rstrip().rpartition("\n")[2], process.returncode, failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the fast tests in many orders on a machine that is disturbed.")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--busy", type=int, default=3)
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs: expected at least 1, got {options.runs}")
    Path("out").mkdir(exist_ok=True)
    status = 0
    for index in range(options.runs):
        busy = options.busy if index % 2 and not options.stops else 0
        line, code, failures = run(options.seed + index, busy, options.stops, options.arguments)
        print(f"seed {options.seed + index}, {busy} loops{', stopped at random' * options.stops}: {line}", flush=True)
        if code or failures:
            status = 1
            print("\n".join([*failures, f"pytest ended with exit code {code}"]), flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
