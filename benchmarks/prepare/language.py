"""Languages: who names them right on the Declaration of Human Rights, and MB per CPU second of one process.

    python -m benchmarks.prepare.language

Passages of 60 and of 300 characters in 23 languages. Beside: the fastText library with the same model (what datatrove
and NeMo Curator run), and py3langid. `forebay` is the stage with all that it adds.
"""

from __future__ import annotations

import time
import zipfile
from collections import Counter

from benchmarks.measure import Figure, show
from benchmarks.prepare.batches import to_batches
from benchmarks.prepare.clean import corpora
from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.peers import ask
from forebay.formats.records import Record
from forebay.prepare.filters.language import Language

FILES = {
    "en": "eng", "de": "deu_1901", "fr": "fra", "es": "spa", "it": "ita", "pt": "por_PT", "nl": "nld", "pl": "pol",
    "ru": "rus", "uk": "ukr", "cs": "ces", "sv": "swe", "da": "dan", "fi": "fin", "hu": "hun", "ro": "ron",
    "tr": "tur", "el": "ell_monotonic", "ar": "arb", "he": "heb", "hi": "hin", "zh": "cmn_hans", "ja": "jpn",
}  # fmt: skip
PEER = """
import fasttext, py3langid
texts, speed_texts, path = request
fasttext.FastText.eprint = lambda *a: None
model = fasttext.load_model(path)
library = lambda text: model.predict(text.replace("\\n", " "))[0][0].removeprefix("__label__")
answer = {}
for name, label in (("fastText library", library), ("py3langid", lambda text: py3langid.classify(text)[0])):
    labels = [label(text) for text in texts]
    start = time.process_time()
    for text in speed_texts: label(text)
    answer[name] = [labels, time.process_time() - start]
"""


def passages(length: int) -> list[tuple[str, str]]:
    """Language and text."""
    out = []
    with zipfile.ZipFile(data_folder() / "lang/udhr2.zip") as archive:
        for code, name in FILES.items():
            text = " ".join(archive.read(f"udhr2/{name}.txt").decode("utf-8", "replace").split())[500:]
            out += [(code, text[i : i + length]) for i in range(0, min(len(text) - length, 60 * length), length)]
    return out


def ours(texts: list[str]) -> tuple[list[str], float]:
    """Labels, and CPU seconds."""
    batches = list(to_batches([Record(i, text=text) for i, text in enumerate(texts)]))
    stage = Language()
    stage.apply(batches[0].slice(0, 1))
    started = time.process_time()
    labels = [label for batch in batches for label in stage.apply(batch).batch["language"].to_pylist()]
    return labels, time.process_time() - started


def measure() -> list[Figure]:
    """The table, printed, and the ratios."""
    path = str(data_folder() / "lid/lid.176.ftz")
    sets = {length: passages(length) for length in (60, 300)}
    texts = [text for rows in sets.values() for _, text in rows]
    speed_texts = [text for part in corpora(data_folder()).values() for text in part[: len(part) // 4]]
    size = sum(len(text.encode()) for text in speed_texts) / 1e6
    labels, spent = ours(texts)[0], ours(speed_texts)[1]
    engines = {"forebay": (labels, spent), **(ask(PEER, [texts, speed_texts, path]) or {})}
    print(
        f"{'':20}" + "".join(f"{f'{n} characters':>18}" for n in sets) + f"{'MB/CPU s':>10}  languages below 0.95 at 60"
    )
    for name, (predicted, cpu_s) in engines.items():
        shares, start, weak = [], 0, []
        for length, rows in sets.items():
            right = Counter(code for (code, _), label in zip(rows, predicted[start:]) if label == code)
            total = Counter(code for code, _ in rows)
            shares.append(right.total() / len(rows))
            if length == 60:
                weak = [f"{code} {right[code] / n:.2f}" for code, n in total.items() if right[code] < 0.95 * n]
            start += len(rows)
        print(f"{name:20}" + "".join(f"{share:18.4f}" for share in shares) + f"{size / cpu_s:10.1f}  {', '.join(weak)}")
    if "fastText library" in engines:
        same = sum(a == b for a, b in zip(labels, engines["fastText library"][0]))
        print(f"labels equal to the library's: {same} of {len(texts)}")
    return [Figure(f"language / {n}", cost / spent, "x CPU") for n, (_, cost) in engines.items() if n != "forebay"]


if __name__ == "__main__":
    show("languages", measure())
