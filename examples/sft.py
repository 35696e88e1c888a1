"""Fine-tuning: conversations to rows in which only the assistant's words are learnt.

    python examples/sft.py [CHATS.jsonl]

Each line is {"messages": [{"role": …, "content": …}, …]}. The same from the command line:
forebay prepare chats.jsonl --out ds --recipe sft --tokenizer tokenizer.json --set rows.max_tokens=1024
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import forebay
from forebay import prepare_dataset
from forebay.prepare import load_recipe

ANSWERS = {"a cat says": "meow", "a dog says": "woof", "a cow says": "moo"}
SETTINGS = {"rows": {"max_tokens": 64, "template": "plain"}, "tokenize": {"tokenizer": "bytes"}}


def write_chats(path: Path, num_chats: int = 600) -> Path:
    asked = list(ANSWERS)
    with path.open("w") as file:
        for index in range(num_chats):
            question = asked[index % len(asked)]
            turns = [("user", f"{index}: {question}"), ("assistant", ANSWERS[question])]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return path


def main(inputs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        chats = Path(inputs[0]) if inputs else write_chats(Path(directory) / "chats.jsonl")
        dataset = Path(directory) / "dataset"
        prepare_dataset([chats], dataset, recipe=load_recipe("sft", settings=SETTINGS), slice_bytes=64 << 10)
        counts = np.full((512, 512), 0.01)
        losses, learnt, tokens = [], 0, 0
        for batch in forebay.Loader(dataset, batch_size=32, seed=1, epochs=2):
            # Labels stand at their token's own place, as models of Hugging Face want them: the model shifts.
            before, targets = batch.inputs[:, :-1], batch.labels[:, 1:]
            is_learnt = targets >= 0
            pairs = before[is_learnt], targets[is_learnt]
            losses.append(-np.log(counts[pairs] / counts[pairs[0]].sum(-1)).mean())
            np.add.at(counts, pairs, 1)
            learnt += int(is_learnt.sum())
            tokens += int(batch["attention_mask"].sum())
        print(f"{learnt} of {tokens} tokens are learnt; loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
        if not 0 < learnt < tokens or losses[-1] >= losses[0]:
            sys.exit("either nothing is masked or nothing was learnt")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except forebay.ForebayError as error:
        sys.exit(f"sft: {error}")
