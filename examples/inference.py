"""Inference over a dataset: three ranks read each input once, one of them is killed and goes on where it was.

    python examples/inference.py

A rank appends its outputs, each with its sample's number, and then saves how far it is: the loader's state and the
size of the outputs that belong to it. What a killed rank wrote beyond that is cut off when it comes back, so that no
input has two outputs and none is left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import forebay
from forebay.convert import convert
from forebay.formats.conversion import ConvertOptions

RANKS = 3
INPUTS = 500


def run(dataset: Path, rank: int) -> None:
    """One rank: read on from its state, if there is one, to the end."""
    outputs, saved = dataset.parent / f"outputs-{rank}.jsonl", dataset.parent / f"state-{rank}.json"
    loader = forebay.Loader(dataset, batch_size=4, shuffle=False, rank=rank, world_size=RANKS)
    size = 0
    if saved.exists():
        state = json.loads(saved.read_text())
        loader.load_state_dict(state["loader"])
        size = state["bytes"]
    with outputs.open("ab") as file:
        file.truncate(size)
        for batch in loader:
            results = np.where(batch["attention_mask"], batch.inputs, 0).sum(1)  # The model.
            for sample, result in zip(batch.sample_ids.tolist(), results.tolist()):
                file.write(json.dumps({"sample": sample, "output": result}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            temporary = saved.with_suffix(".tmp")
            temporary.write_text(json.dumps({"loader": loader.state_dict(), "bytes": file.tell()}))
            temporary.replace(saved)
            time.sleep(0.005)


def start(dataset: Path, rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, str(dataset), str(rank)])


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prompts = [list(range(index % 13 + 1)) for index in range(INPUTS)]
        lines = "".join(json.dumps({"input_ids": prompt}) + "\n" for prompt in prompts)
        (folder / "prompts.jsonl").write_text(lines)
        options = ConvertOptions(seq_len=16, tensors={"input_ids": "u16"})
        convert(folder / "prompts.jsonl", folder / "dataset", "safetensors", options)

        ranks = [start(folder / "dataset", rank) for rank in range(RANKS)]
        saved = folder / "state-1.json"
        while not saved.exists() or json.loads(saved.read_text())["loader"]["samples_taken"] < 100:
            time.sleep(0.01)
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait()
        done = json.loads(saved.read_text())["loader"]["samples_taken"]
        ranks[1] = start(folder / "dataset", 1)
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed")

        rows = [
            json.loads(line)
            for rank in range(RANKS)
            for line in (folder / f"outputs-{rank}.jsonl").read_text().splitlines()
        ]
        outputs = {row["sample"]: row["output"] for row in rows}
        print(f"{len(rows)} outputs of {INPUTS} inputs; rank 1 was killed when {done} of all samples were taken")
        if len(rows) != INPUTS or outputs != {index: sum(prompt) for index, prompt in enumerate(prompts)}:
            sys.exit("an input has no output, two, or a wrong one")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
