"""`forebay prepare` with one worker against the tokenizer's own library alone on the same text, in CPU seconds.

The text is deterministic, Zipf-like words in documents of a few hundred; the tokenizer is trained on a part of it.
The yardstick reads the same file, decodes its JSON lines and calls `encode_batch_fast`; it writes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.measure import Figure, interleaved, median, show

TEXT_BYTES = 50 << 20
_BARE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
total, texts = 0, []
def encode():
    global total
    total += sum(len(e) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    texts.clear()
for line in open(sys.argv[2], encoding="utf-8"):
    texts.append(json.loads(line)["text"])
    if len(texts) == 1000:
        encode()
encode()
print(total)
"""


def make_text(path: Path, num_bytes: int = TEXT_BYTES) -> None:
    """JSON lines of documents of made-up words, the same every time."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(30_000)])
    written, number = 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            picked = words[np.minimum(rng.zipf(1.3, rng.integers(100, 700)), len(words)) - 1]
            written += file.write(json.dumps({"id": str(number), "text": " ".join(picked) + "."}) + "\n")
            number += 1


def measure(rounds: int = 3) -> list[Figure]:
    """The figures. Takes a minute or two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, saved = folder / "text.jsonl", folder / "tokenizer.json"
        make_text(text)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        with text.open(encoding="utf-8") as file:
            sample = [json.loads(line)["text"] for _, line in zip(range(2000), file)]
        trainer = trainers.BpeTrainer(
            vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        tokenizer.train_from_iterator(sample, trainer)
        tokenizer.save(str(saved))
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        outs = iter(range(rounds + 1))

        def run(*command: str) -> None:
            subprocess.run([sys.executable, *command], check=True, env=env, stdout=subprocess.DEVNULL)

        def ours() -> None:
            out = str(folder / f"out-{next(outs)}")
            run(
                "-m", "forebay", "prepare", str(text), "--out", out, "--tokenizer", str(saved),
                "--workers", "1", "--json",
            )  # fmt: skip

        def bare() -> None:
            run("-c", _BARE, str(saved), str(text))

        costs = interleaved(rounds, ours, bare)
        size = text.stat().st_size
    wall = [median([cost.wall_s for cost in row]) for row in costs]
    cpu = [median([cost.cpu_s for cost in row]) for row in costs]
    return [
        Figure("tokenizers alone", size / cpu[1] / 1e6, "MB/CPU s", f"{wall[1]:.1f} s wall"),
        Figure("forebay prepare", size / cpu[0] / 1e6, "MB/CPU s", f"{wall[0]:.1f} s wall, one worker"),
        Figure("prepare/tokenizers CPU", cpu[0] / cpu[1], "x CPU", "both from start to exit of a process"),
    ]


if __name__ == "__main__":
    show("prepare", measure())
