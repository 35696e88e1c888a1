"""Every recipe that comes with Forebay, on real pages: it keeps something, says why it drops, and gives the same bytes
for any number of processes."""

import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from forebay import prepare_dataset
from forebay.prepare.config import recipe_names
from support.bert import save_bert
from support.paths import ROOT
from support.preparing import write_jsonl
from support.shared_data import shared_data

pytest.importorskip("numba")
ALL = os.environ.get("FOREBAY_HOSTS") == "all"
PROCESSES = (1, 2, 7) if ALL else (1, 2)
RECIPES = [name for name in recipe_names() if ALL or name in ("code", "dclm", "dolma", "fineweb-2")]
"""The others are run by `make test-all`; tests of their stages run here."""
REASONS = {  # what each must drop of these inputs
    "c4": {"c4_few_sentences"},
    "dclm": {"quality_below_percentile", "gopher_short"},
    "dolma": {"gopher_short"},
    "dolma-3": {"gopher_short", "repeat_none"},
    "fineweb": {"gopher_short"},
    "fineweb-edu": {"gopher_short"},
    "fineweb-2": {"language_other", "gopher_short"},
    "gopher": {"gopher_short"},
    "web": {"gopher_short"},
    "code": {"code_mean_line"},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    web, code, chats, foreign = (folder / name for name in ("web", "code", "chats", "foreign"))
    for path in (web, code, chats, foreign):
        path.mkdir()
    shutil.copy(shared_data("warc/dolma/sample-0000.warc.gz"), web)
    shutil.copy(shared_data("warc/jwarc/cc.warc.gz"), web)
    for path in shared_data("jsonl").glob("cc_en_head-0???.jsonl"):
        shutil.copy(path, web)
    for code_, path in (("de", "de/kafka_verwandlung.txt"), ("en", "gutenberg_en/carroll-alice.txt")):
        text = shared_data(f"books/{path}").read_text("utf-8")
        passages = [text[start : start + length] for start, length in zip(range(0, 90_000, 3000), [200, 3000] * 15)]
        write_jsonl(foreign / f"{code_}.jsonl", passages)
    for path in sorted((ROOT / "src/forebay/order").glob("*.py")):
        shutil.copy(path, code)
    (code / "data.js").write_text("var data = [" + "1234567890, " * 3000 + "]\n")
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"{i} it is."}]}
        for i in range(40)
    ]
    write_jsonl(chats / "chats.jsonl", rows)
    tokenizer = Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _settings(name, folder):
    """What a recipe leaves to its user: models and a tokenizer with its tokens."""
    model = {"use": "fasttext", "model": str(ROOT / "tests/golden/fasttext/0.bin"), "label": "l1"}
    if name == "dclm":
        return {"score": {"quality": {**model, "keep_percentile": [50, 100]}}}
    if name == "dolma-3":
        return {"score": {"quality": model}}
    if name == "nemotron-cc":
        return {"score": {"mixtral": model, "nemotron": model, "dclm": model}}
    if name == "fineweb-edu":
        save_bert(folder / "classifier", 1)
        return {"score": {"edu": {"model": str(folder / "classifier"), "min": -100}}}
    return {"read": {"format": "code"}} if name == "code" else {}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_same_bytes_for_any_number_of_processes(name: str, inputs: Path, tmp_path):
    source = inputs / {"code": "code", "sft": "chats", "fineweb-2": "foreign"}.get(name, "web")
    tokenizer, settings = str(inputs / "tokenizer.json"), _settings(name, inputs)
    results = [
        prepare_dataset(
            [source], tmp_path / str(workers), recipe=name, tokenizer=tokenizer, settings=settings,
            name="same", workers=workers, to="parquet" if name == "nemotron-cc" else "dataset",
        )
        for workers in PROCESSES
    ]  # fmt: skip
    assert results[0].documents_out > 0
    if name == "nemotron-cc":
        texts = [
            {p.relative_to(out): p.read_bytes() for p in out.rglob("*.parquet")} for out in tmp_path.glob("*/text")
        ]
        assert all(files == texts[0] for files in texts)
        assert {"high", "medium", "medium-low", "low"} <= {path.parts[0] for path in texts[0]}
    else:
        assert len({result.id for result in results}) == 1 and results[0].tokens > 0
    dropped = results[0].dropped
    remaining = results[0].documents_in - sum(dropped.values())
    assert results[0].documents_out > remaining if name == "dolma-3" else results[0].documents_out == remaining
    assert REASONS.get(name, set()) <= set(dropped), dropped
