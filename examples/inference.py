"""Inference by lease: workers write an output for each row; one is killed (SIGKILL); each row has one output, in order.

    python examples/inference.py                                                          runs all of it here
    forebay worker prompts --identity carol -- python examples/inference.py OUTPUTS       a worker of yours

A worker writes a batch's outputs to the disk before the batch counts as used. So a row that counts as used has an
output; one whose worker was killed in between has two, by the worker and by the next that leases it: `collect` takes
the smaller text of the two, whatever files come first. A line that was cut off by a kill is left out.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

import forebay

INPUTS = 300
FOREBAY = [sys.executable, "-m", "forebay"]


def write_outputs(folder: Path) -> None:
    """The command of a worker: outputs of the rows that it leases, keyed by their sample ids, in a file of its own."""
    folder.mkdir(exist_ok=True)
    loader = forebay.Loader()
    with (folder / f"{secrets.token_hex(8)}.jsonl").open("xb") as file:
        for batch in loader:
            results = np.where(batch["attention_mask"], batch["input_ids"], 0).sum(1)  # The model.
            for sample, result in zip(batch.sample_ids.tolist(), results.tolist()):
                file.write(json.dumps({"sample": sample, "output": result}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            if loader.step == int(os.environ.get("KILLED_AT_STEP", "-1")):
                os.kill(os.getpid(), signal.SIGKILL)
            loader.commit()  # From here on nobody else gets these rows.


def collect(folder: Path, num_rows: int) -> list[Any]:
    """The output of each row, in the order of rows."""
    lines: dict[int, bytes] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                sample = json.loads(line)["sample"]
                lines[sample] = min(line, lines.get(sample, line))
    if missing := [row for row in range(num_rows) if row not in lines]:
        sys.exit(f"{len(missing)} rows have no output, first row {missing[0]}: is the job done?")
    return [json.loads(lines[row])["output"] for row in range(num_rows)]


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program as an error does: `with` and `finally` end the processes that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end(process: subprocess.Popen[Any]) -> None:
    """End a process, which ends those that it has started; SIGKILL if that takes more than 20 s."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()
    process.wait()


def call(*words: object) -> None:
    """Run a command of Forebay; if it fails, it says why, and this program ends."""
    command = [*FOREBAY, *map(str, words)]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"forebay {words[0]} ended with status {status}")


class Servers(ExitStack):
    """Servers of Forebay, which end with the `with` block; when one ends before, the command that runs ends, too."""

    def __init__(self) -> None:
        super().__init__()
        self.servers: dict[object, subprocess.Popen[str]] = {}

    def start(self, *words: object) -> str:
        """Start a server; its address."""
        command = [*FOREBAY, *map(str, words), "--json"]
        self.servers[words[0]] = server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.enter_context(server)
        self.callback(end, server)
        assert server.stdout is not None
        if not (line := server.stdout.readline()):
            sys.exit(f"forebay {words[0]} ended with status {server.wait()}")
        return str(json.loads(line)["address"])

    def run(self, *words: object, **environment: str) -> int:
        """Run a command of Forebay to its end; its status."""
        command = subprocess.Popen([*FOREBAY, *map(str, words)], env=os.environ | environment)
        try:
            while command.poll() is None:
                for name, server in self.servers.items():
                    if (status := server.poll()) is not None:
                        sys.exit(f"forebay {name} ended with status {status}, so forebay {words[0]} was ended")
                time.sleep(0.1)
        finally:
            end(command)
        return command.returncode


def start_network(servers: Servers, folder: Path, dataset: Path, *settings: object) -> str:
    """A network of four members, a data node, and a scheduler with `settings`, whose address is returned."""
    dht = servers.start("dht", "--listen", "127.0.0.1:0", "--nodes", 4)
    call("network", "init", folder / "network", "--bootstrap", dht)
    for name, role in (("alice", "data"), ("bob", "scheduler"), ("carol", "worker"), ("dave", "worker")):
        call("network", "join", folder / "network", folder / name, "--name", name, "--role", role)
    servers.start("serve", dataset, "--identity", folder / "alice")
    state = ["--state", folder / "state", "--lease-timeout", 5]
    return servers.start("scheduler", dataset.name, "--identity", folder / "bob", *state, *settings)


def main() -> None:
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as directory, Servers() as servers:
        folder = Path(directory)
        prompts = [list(range(index % 13 + 1)) for index in range(INPUTS)]
        lines = "".join(json.dumps({"input_ids": prompt}) + "\n" for prompt in prompts)
        (folder / "prompts.jsonl").write_text(lines)
        rows = ["--to", "forebay", "--seq-len", 16, "--set", "tensors.input_ids=u16", "--slice-bytes", 2000]
        call("convert", folder / "prompts.jsonl", folder / "prompts", *rows)

        scheduler = start_network(servers, folder, folder / "prompts")
        for name, killed_at, expected in (("carol", "3", 137), ("dave", "-1", 0)):
            worker = ["worker", "--scheduler", scheduler, "--identity", folder / name, "--batch-size", 4]
            command = ["--cache-dir", folder / f"cache-{name}", "--", sys.executable, __file__, folder / "outputs"]
            if (status := servers.run(*worker, *command, KILLED_AT_STEP=killed_at)) != expected:
                sys.exit(f"inference: the worker {name} ended with status {status}, expected {expected}")
        call("ledger", "verify", folder / "state" / "ledger.jsonl")
        outputs = collect(folder / "outputs", INPUTS)
        written = sum(path.read_bytes().count(b"\n") for path in (folder / "outputs").iterdir())
        print(
            f"{len(outputs)} outputs of {INPUTS} rows, {written} were written, by two workers, one of which was killed"
        )
        if outputs != [sum(prompt) for prompt in prompts] or written <= INPUTS:
            sys.exit("expected one output for each row, in order")


if __name__ == "__main__":
    if "FOREBAY_LOADER" in os.environ:
        write_outputs(Path(sys.argv[1]))
    else:
        main()
