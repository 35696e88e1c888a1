"""Train on three ranks, stop, and go on with two: the global batches stay what they would have been.

    python examples/resume_elsewhere.py [TEXT…]

Ranks are loops here; in a real run each is a process, and the state is saved with the checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import forebay
from forebay import prepare_dataset

SETTINGS: dict[str, Any] = {"seq_len": 64, "global_batch_size": 24, "seed": 11}


def global_batches(
    dataset: Path, world_size: int, state: dict[str, Any] | None, steps: int | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """The sample ids of each global batch, put together from all ranks' shares; and where they stopped."""
    batches: list[list[int]] = []
    states = []
    for rank in range(world_size):
        with forebay.Loader(dataset, rank=rank, world_size=world_size, **SETTINGS) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for step, batch in enumerate(loader):
                if step == len(batches):
                    batches.append([])
                batches[step] += batch.sample_ids.tolist()
                if step + 1 == steps:
                    break
            states.append(loader.state_dict())
    return [sorted(batch) for batch in batches], states[0]


def main(inputs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dataset = Path(directory) / "dataset"
        prepare_dataset(inputs or [__file__, forebay.__file__], dataset, tokenizer="bytes", slice_bytes=4096)
        unbroken, _ = global_batches(dataset, world_size=1, state=None, steps=None)
        before, state = global_batches(dataset, world_size=3, state=None, steps=len(unbroken) // 2)
        after, _ = global_batches(dataset, world_size=2, state=state, steps=None)
        print(f"{len(before)} steps on 3 ranks, then {len(after)} on 2; state: {state['samples_taken']} samples taken")
        if before + after != unbroken:
            sys.exit("the batches differ from those of one rank that never stopped")
        print("the same global batches as one rank that never stopped")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except forebay.ForebayError as error:
        sys.exit(f"resume_elsewhere: {error}")
