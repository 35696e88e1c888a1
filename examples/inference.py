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
from contextlib import ExitStack
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


def call(*words: object) -> None:
    subprocess.run([*FOREBAY, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def start(stack: ExitStack, *words: object) -> str:
    """A server of Forebay; its address."""
    server = subprocess.Popen([*FOREBAY, *map(str, words), "--json"], stdout=subprocess.PIPE, text=True)
    stack.enter_context(server)
    stack.callback(server.terminate)
    assert server.stdout is not None
    return str(json.loads(server.stdout.readline())["address"])


def start_network(stack: ExitStack, folder: Path, dataset: Path, *settings: object) -> str:
    """A network of four members, a data node, and a scheduler with `settings`, whose address is returned."""
    dht = start(stack, "dht", "--listen", "127.0.0.1:0", "--nodes", 4)
    call("network", "init", folder / "network", "--bootstrap", dht)
    for name, role in (("alice", "data"), ("bob", "scheduler"), ("carol", "worker"), ("dave", "worker")):
        call("network", "join", folder / "network", folder / name, "--name", name, "--role", role)
    start(stack, "serve", dataset, "--identity", folder / "alice")
    state = ["--state", folder / "state", "--lease-timeout", 5]
    return start(stack, "scheduler", dataset.name, "--identity", folder / "bob", *state, *settings)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory)
        prompts = [list(range(index % 13 + 1)) for index in range(INPUTS)]
        lines = "".join(json.dumps({"input_ids": prompt}) + "\n" for prompt in prompts)
        (folder / "prompts.jsonl").write_text(lines)
        rows = ["--to", "forebay", "--seq-len", 16, "--set", "tensors.input_ids=u16", "--slice-bytes", 2000]
        call("convert", folder / "prompts.jsonl", folder / "prompts", *rows)

        scheduler = start_network(stack, folder, folder / "prompts")
        codes = []
        for name, killed_at in (("carol", "3"), ("dave", "-1")):
            worker = ["worker", "--scheduler", scheduler, "--identity", folder / name, "--batch-size", 4]
            command = ["--cache-dir", folder / f"cache-{name}", "--", sys.executable, __file__, folder / "outputs"]
            environment = os.environ | {"KILLED_AT_STEP": killed_at}
            done = subprocess.run(
                [*FOREBAY, *map(str, [*worker, *command])], env=environment, stdout=subprocess.DEVNULL
            )
            codes.append(done.returncode)
        call("ledger", "verify", folder / "state" / "ledger.jsonl")
        outputs = collect(folder / "outputs", INPUTS)
        written = sum(path.read_bytes().count(b"\n") for path in (folder / "outputs").iterdir())
        print(f"{len(outputs)} outputs of {INPUTS} rows, {written} were written; statuses of the workers: {codes}")
        if codes != [137, 0] or outputs != [sum(prompt) for prompt in prompts] or written <= INPUTS:
            sys.exit("expected one output for each row, in order, of a worker that was killed and one that was not")


if __name__ == "__main__":
    if "FOREBAY_LOADER" in os.environ:
        write_outputs(Path(sys.argv[1]))
    else:
        main()
