"""The loader in plain NumPy: a bigram model by counting, an epoch in one loop, stopped and gone on with in between.

python examples/numpy_loop.py [TEXT…]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import forebay
from forebay import prepare_dataset

SETTINGS: dict[str, Any] = {"seq_len": 64, "batch_size": 8, "seed": 1}


def main(inputs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dataset = Path(directory) / "dataset"
        prepare_dataset(inputs or [__file__, forebay.__file__], dataset, tokenizer="bytes", slice_bytes=4096)
        counts = np.ones((512, 512))
        losses = []
        loader = forebay.Loader(dataset, **SETTINGS)
        length = len(loader)
        for _ in range(2):
            for batch in loader:
                has_label = batch.labels >= 0  # -100: there is no next token.
                pairs = batch.inputs[has_label], batch.labels[has_label]
                losses.append(-np.log(counts[pairs] / counts[pairs[0]].sum(-1)).mean())
                np.add.at(counts, pairs, 1)
                if batch.step == length // 2:
                    break  # Iterating again goes on with the next batch; so does another loader, given the state:
            state = loader.state_dict()
            loader = forebay.Loader(dataset, **SETTINGS)
            loader.load_state_dict(state)
        print(f"{len(losses)} of {length} batches; loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
        if len(losses) != length:
            sys.exit("a batch is missing or came twice")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except forebay.ForebayError as error:
        sys.exit(f"numpy_loop: {error}")
