"""Makes the models of this folder and `scores.json` with fastText's own library: `pip install fasttext-wheel`."""

import json
import random
from pathlib import Path

import fasttext

CASES = [
    {"loss": "softmax", "wordNgrams": 2},
    {"loss": "softmax", "minn": 2, "maxn": 4, "dim": 7},
    {"loss": "hs", "minn": 1, "maxn": 3, "wordNgrams": 3},
    {"loss": "ova", "minn": 3, "maxn": 5},
    {"loss": "ns"},
]
LABELS = 5
TEXTS = [
    "w1é w2é w50é", "w1é\nw2é", "unknown words only", "é", "w3é" * 50, "__label__l1 w100é", "__label__none w7é",
    "a </s> w9é", "w1é w2é w3é w1é " * 200, "日本語のテキスト w120é", "x\0y w5é",
    "\N{NO-BREAK SPACE}w5é\u3000w6é", "< > <w1é>", "w1é w99é\r\nw20é\tw30é\vw33é\fw2é",
]  # fmt: skip


def main():
    """Train, quantise, and record what the library predicts."""
    folder, rng, scores = Path(__file__).parent, random.Random(1), {}
    lines = []
    for number in range(400):
        label = number % LABELS if number < 50 else rng.randrange(LABELS)
        words = [f"w{rng.randrange(label * 60, label * 60 + 150)}é" for _ in range(rng.randrange(3, 30))]
        lines.append(f"__label__l{label} {' '.join(words)}\n")
    train = folder / "train.txt"
    train.write_text("".join(lines), "utf-8")
    for number, case in enumerate(CASES):
        for ending, quantise in (("bin", {}), ("ftz", {"cutoff": 280, "qnorm": True}), ("all.ftz", {"dsub": 3})):
            options = {"thread": 1, "epoch": 8, "lr": 0.2, "bucket": 400, "verbose": 0, "seed": 3, "dim": 6, **case}
            model = fasttext.train_supervised(str(train), **options)
            if quantise:
                model.quantize(str(train), retrain=False, **quantise)
            path = folder / f"{number}.{ending}"
            model.save_model(str(path))
            model = fasttext.load_model(str(path))
            scores[path.name] = [
                {label.removeprefix("__label__"): min(score, 1.0) for score, label in pairs}
                for pairs in (model.f.predict(text.replace("\n", " ") + "\n", -1, 0.0, "replace") for text in TEXTS)
            ]
    train.unlink()
    expected = {"texts": TEXTS, "scores": scores}
    (folder / "scores.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
