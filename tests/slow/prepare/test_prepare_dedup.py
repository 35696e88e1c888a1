"""Deduplication and decontamination from the command line: every kind, any number of processes."""

import json
import random
from pathlib import Path

import pytest

from support.outputs import content
from support.processes import run_command

RECIPE = """
[decontaminate]
sets = ["SETS"]

[read.columns]
edu = "number"

[dedup]
exact = true
url = true
minhash = true
lines = true
sentences = true
substring = true
overlap = true
min_words = 20
max_cut_share = 0.6
keep = "best"
score = "edu"
"""


def write_documents(folder: Path) -> tuple[list[dict], list[dict[str, str]]]:
    """Documents in two files, of which each kind of deduplication finds some, and instances of an evaluation set."""
    chance = random.Random(1)
    instances = [
        {
            "question": " ".join(f"ask{chance.randrange(10**6)}" for _ in range(14)),
            "answer": f"answer {i} in a few words",
        }
        for i in range(10)
    ]
    documents = []
    for i in range(300):
        sentences = [
            " ".join(f"w{chance.randrange(10**5)}" for _ in range(chance.randrange(6, 14))) + "." for _ in range(24)
        ]
        if documents and i % 3 == 0:
            source = chance.choice(documents)["text"]
            start = chance.randrange(len(source) // 2)
            sentences[chance.randrange(24)] += " " + source[start : start + chance.choice([100, 300, 900])]
        text = "\n".join(" ".join(sentences[k : k + 4]) for k in range(0, 24, 4))
        if i % 20 == 1:
            text = text[:400] + " " + instances[i // 20 % 10]["question"].upper() + " " + text[400:]
        if documents and i % 25 == 2:
            text = chance.choice(documents)["text"]
        if documents and i % 25 == 4:
            text = "\n".join([*chance.choice(documents)["text"].split("\n")[:5], text[:100]])
        documents.append(
            {"id": str(i), "text": text, "url": f"http://a.org/{i // 2 if i % 50 < 2 else i}", "edu": i % 7}
        )
    for name, part in (("a", documents[:200]), ("b", documents[200:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return documents, instances


@pytest.mark.timeout(600)
def test_every_kind_at_once_gives_the_same_bytes_for_any_number_of_processes(tmp_path: Path) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    _, instances = write_documents(inputs)
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in instances))
    (tmp_path / "all.toml").write_text(RECIPE.replace("SETS", str(tmp_path / "exam.jsonl")))
    results = []
    for workers in (1, 2, 7):
        out = tmp_path / f"out{workers}"
        done = run_command(
            *f"prepare --tokenizer bytes --json --quiet --name x --workers {workers} --out".split(), out, inputs,
            "--config", tmp_path / "all.toml",
        )  # fmt: skip
        result = json.loads(done.stdout.splitlines()[-1])
        report = content(out / "report.html")
        results.append(
            (result, report, (out / "contamination.jsonl").read_bytes(), (out / "manifest.json").read_bytes())
        )
    assert results[0] == results[1] == results[2]
    result, report, hits, _ = results[0]
    assert set(result["dropped"]) >= {"contaminated_exam", "exact_duplicate", "url_duplicate", "mostly_duplicate"}
    assert result["dropped"]["contaminated_exam"] == len(hits.splitlines()) >= 15
    for label in (b"lines cut", b"spans of 3 sentences cut", b"spans of 20 words cut"):
        assert label in report
