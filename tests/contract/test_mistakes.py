"""The commonest mistakes of newcomers: each is answered by one line that names the cause and what to do.

A row is what was done, what the line must have, and for commands (golden/mistakes.toml) the exit code: 2 where the
words of the command are wrong, 1 where a file or a node is.
"""

import os
import pickle
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

import forebay
from forebay import Loader, Mixture, SampleOptions, TextStream, open_dataset, prepare_dataset
from forebay.cli import main
from forebay.formats import open_external
from forebay.network.pki.identity import create_network
from forebay.worker import create_huggingface_dataset
from support.paths import read_cases
from support.preparing import write_jsonl
from support.store import stored

B = {"seq_len": 16, "batch_size": 2}
P = {"tokenizer": "bytes", "workers": 1}
S = {"tokenizer": "bytes", **B}
CALLS = [
    (lambda: Loader("nowhere", **B), "got nothing there"),
    (lambda: Loader("dss", **B), "Did you mean 'ds'"),
    (lambda: Loader("mix.toml", **B), "expected the TOML file of a mixture, got nothing there"),
    (lambda: Loader(Mixture({"a": "ds", "b": "blob.bin"}, {"a": 1}), **B), "the vocabulary of the others, got"),
    (lambda: Loader("rows.jsonl", **B), "got files of another kind. Make one: of text `forebay prepare`"),
    (lambda: Loader("ds/manifest.json", **B), "Did you mean ds?"),
    (lambda: Loader("ds", seq_len=16), "batch size: expected one of batch_size"),
    (lambda: Loader("ds", batch_size=2), "seq_len: expected the tokens of a sample, such as seq_len=2048"),
    (lambda: Loader("ds", seq_len="16", batch_size=2), "seq_len: expected an integer from 1, got '16'"),
    (lambda: Loader(["ds", "ds3"], **B), "got list. Several are read by forebay.Mixture"),
    (lambda: Loader({"a": "ds"}, **B), "got dict. Several are read by forebay.Mixture"),
    (lambda: Loader(np.arange(9), **B), "got ndarray. Write data to a file first"),
    (lambda: Loader(Mixture({"a": "ds", "b": "ds3"}, {"a": 1, "b": 1}), **B), "Prepare b with --tokenizer ds/tokeni"),
    (lambda: Mixture({"a": "ds"}, [1.0]), "expected weights {name: number}"),
    (lambda: Mixture({"a": "ds"}, {"a": "0.7"}), "expected weights {name: number}"),
    (lambda: Mixture({"a": "ds"}, {"b": 1}), "expected weights of a, got b"),
    (lambda: Loader("ds", **B, split="val"), "got 'val'. Did you mean 'validation'?"),
    (lambda: Loader("ds", **B, split="validation"), "samples=forebay.SampleOptions(validation_fraction=0.01)"),
    (lambda: Loader("ds", **B, drop_last=True), "Give it as samples=forebay.SampleOptions(drop_last=...)"),
    (lambda: Loader("ds", **B, num_workers=2), "Give it to loader.to_torch(num_workers=...)"),
    (lambda: Loader("ds", **B, c=1, b=2, a=3), "no argument 'a'"),
    (lambda: Loader("ds", seqlen=16, batch_size=2), "Did you mean 'seq_len'?"),
    (lambda: Loader("ds", **B, packing="bestfit"), "got 'bestfit'. Did you mean 'best_fit'?"),
    (lambda: Loader("ds", **B, cache="/tmp/x"), "got '/tmp/x'. Give a path as cache_dir="),
    (lambda: Loader("ds", **B, samples={"drop_last": True}), "got dict. Use samples=forebay.SampleOptions(...)"),
    (lambda: Loader("ds", seq_len=16, global_batch_size=4, world_size=2), "expected rank= or RANK of the environment"),
    (lambda: Loader("ds", **B).load_state_dict({"step": 3}), "got the keys ['step']"),
    (lambda: Loader("ds", **B).load_state_dict(Loader("ds3", **B).state_dict()), "expected dataset_id"),
    (lambda: Loader("ds", **B).load_state_dict({"d": Loader("ds", **B).state_dict()}), "Did you mean state['d']?"),
    (lambda: Loader("ds", **B).load_state_dict({"dataset_id": "x"}), "expected version"),
    (lambda: TextStream("corpus", **S).load_state_dict(Loader("ds", **B).state_dict()), "Load it into a Loader."),
    (lambda: next(iter(Loader("ds", **B)))[0], "batch[0]: expected one of ['inputs', 'labels']"),
    (lambda: open_dataset(["ds"]), "got list"),
    (lambda: open_external("~nouser/x"), "got nothing there. Check"),
    (lambda: open_external("corpus/1.tx"), "got nothing there. Did you mean 'corpus/1.txt'"),
    (lambda: prepare_dataset({"text": ["a"]}, "d", **P), "inputs: expected paths, URLs or sources, got dict"),
    (lambda: prepare_dataset([{"text": "a"}], "d", **P), "inputs: expected paths, URLs or sources, got dict"),
    (lambda: prepare_dataset("corpus", None, **P), "out: expected a directory or the URL of a bucket, got None"),
    (lambda: prepare_dataset("corpus", "d", tokenizer=300), "or an object with name, data, vocab_size, eos_id, encode"),
    (lambda: prepare_dataset("corpus", "d", filters=[lambda d: True], **P), "got <lambda>. Decorate the function with"),
    (lambda: prepare_dataset("corpus", "d", filters=yes, **P), "expected a call of yes, got itself. Give filters="),
    (lambda: prepare_dataset("corpus", "d", filters=yes(), **P), "expected True or False, got 'yes' (str)"),
    (lambda: prepare_dataset("corpus", "d", filters=single(), **P), "expected an array of 3 booleans, one a document"),
    (lambda: prepare_dataset("corpus", "d", dedup=True, **P), "dedup: expected names or methods, got bool"),
    (lambda: prepare_dataset("corpus", "d", settings="x", **P), "settings: expected {table: {key: value}}, got 'x'"),
    (lambda: prepare_dataset("corpus", "d", tokenizer="bytes", workers="2"), "expected an integer from 1, got '2'"),
    (lambda: prepare_dataset("corpus", "d", to="parqet", **P), "Did you mean 'parquet'?"),
    (lambda: TextStream("nowhere", **S), "got nowhere, which does not exist"),
    (lambda: TextStream("ds", **S), "forebay.Loader reads it"),
    (lambda: create_huggingface_dataset("corpus"), "Did you mean './corpus'?"),
    (lambda: create_huggingface_dataset("corpus/1.txt"), "'./corpus/1.txt'? The hub's is 'hf:corpus/1.txt'"),
    (lambda: create_huggingface_dataset("./corpu"), "got nothing there. Did you mean './corpus'?"),
    (lambda: create_huggingface_dataset("./ds"), "forebay.Loader reads it"),
]  # fmt: skip


def make_world(folder: Path):
    text = "The mill race is full of water, and the wheel turns. "

    (folder / "corpus").mkdir()
    for path in ("half/.work", "lone/slices"):
        (folder / path).mkdir(parents=True)
    for i in range(3):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i} {text * 40}")
    write_jsonl(folder / "rows.jsonl", [{"id": i, "text": f"{i} {text}"} for i in range(20)])
    write_jsonl(folder / "num.jsonl", [{"id": i, "x": i} for i in range(20)])
    write_jsonl(folder / "chats.jsonl", [{"messages": [{"role": "user", "content": text}]}] * 20)
    write_jsonl(folder / "pairs.jsonl", [{"prompt": text, "completion": text}] * 20)
    (folder / "deep.jsonl").write_text('{"a": ' * 900 + "1" + "}" * 900)
    pq.write_table(pa.table({"x": [1, 2]}), folder / "num.parquet")
    (folder / "empty.txt").touch()
    (folder / "num.txt").write_text("one two")
    (folder / "blob.bin").write_bytes(np.random.default_rng(0).bytes(2000))
    (folder / "broken.toml").write_text("[length\n")
    (folder / "own.toml").write_text('[short]\nuse = "myfilters:short"\n')
    (folder / "english.toml").write_text('[language]\nkeep = ["english"]\n')
    create_network(folder / "net", "net")
    for name, tokenizer in (("ds", "bytes"), ("ds3", "train:300"), ("worn", "bytes")):
        prepare_dataset(folder / "corpus", folder / name, tokenizer=tokenizer, workers=1)
    (folder / "worn/tokenizer.json").unlink()
    os.truncate(folder / "worn/slices/000000.safetensors", 90)
    (folder / "worn/slices/1.safetensors").touch()


@forebay.text_filter("any", version="1", per_document=True)
def any_text(document: dict) -> bool:
    return True


@forebay.text_filter("yes", version="1", per_document=True)
def yes(document: dict) -> str:
    return "yes"


@forebay.text_filter("one", version="1")
def single(batch: pa.RecordBatch) -> bool:
    return True


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    shutil.copytree(stored(make_world), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command, line, code", read_cases("mistakes")["commands"])
def test_a_wrong_command_is_answered_in_one_line(command, line, code, world, capsys):
    words = [os.fspath(word) for word in shlex.split(command.replace("{b}", "--tokenizer bytes --workers 1"))]
    try:
        status = main(words)
    except SystemExit as error:
        status = error.code
    lines = [text for text in capsys.readouterr().err.splitlines() if text.startswith("forebay: ")]
    notes = [text for text in lines if text.startswith(("forebay: left out", "forebay: compiling"))]
    assert [line in text for text in lines if text not in notes] == [True] and status == code
    assert not (world / "d" / "manifest.json").exists()


@pytest.mark.parametrize("command, line, code", read_cases("mistakes")["answers"])
def test_what_a_command_prints_says_what_was_done(command, line, code, world, capsys):
    assert main(shlex.split(command)) == code
    assert line in "".join(capsys.readouterr())


@pytest.mark.parametrize("call, line", CALLS)
def test_a_wrong_call_is_named(call, line, world):
    with pytest.raises((forebay.ForebayError, TypeError)) as error:
        call()
    assert line in str(error.value) and not any("concurrent" in str(entry.path) for entry in error.traceback)


def test_rows_that_are_cut_are_counted_and_mix_with_no_tokens(world, capsys):
    turn = {"role": "assistant", "content": "So it is. " * 9}
    write_jsonl(world / "talks.jsonl", [{"messages": [turn]}] * 9)
    settings = "--set read.messages_key=messages --set rows.max_tokens=64 --tokenizer bytes --workers 1"
    assert main(f"prepare talks.jsonl --out rows {settings}".split()) == 0
    assert "9 conversations cut to that length (see rows.too_long)" in capsys.readouterr().out
    with pytest.raises(forebay.ForebayError, match=r"one layout, got tokens of a and rows of b\. Read each with"):
        Loader(Mixture({"a": "ds", "b": "rows"}, {"a": 1}), **B)


def test_settings_without_effect_are_told_once(world, caplog):
    loader = Loader("ds", seq_len=16, batch_size=900, split="train")
    pickle.loads(pickle.dumps(loader)).close()
    split, batch = caplog.messages
    assert "split='train': all samples are read" in split
    assert "got 398 samples of 16 tokens for a global batch of 900. Ask for" in batch


def test_first_guesses_are_taken(world):
    vocabulary = {"[UNK]": 0, "mill": 1, "race": 2, "<|endoftext|>": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (world / "wrong.toml").write_text("[length]\nmax_word = 5\n")
    for index, arguments in enumerate(
        [
            {"tokenizer": words},
            {"filters": any_text(), "dedup": "exact", **P},
            {"recipe": {"dedup": {"exact": True}}, **P},
            {"slice_bytes": "8KB", **P},
        ]
    ):
        result = prepare_dataset("corpus", world / f"d{index}", **{"workers": 1, **arguments})
        assert result.documents_out == 3
        assert sum(batch.inputs.size for batch in Loader(result, **B)) > 0
    assert open_dataset("d0").manifest.vocab_size == len(vocabulary)
    with pytest.raises(forebay.ForebayError, match=r"wrong\.toml: length\.max_word: unknown"):
        prepare_dataset("corpus", "d9", recipe=Path("wrong.toml"), **P)
    split = SampleOptions(validation_fraction=0.5)
    assert len(Loader("ds", **B, split="validation", samples=split)) > 0


def test_a_full_disk_is_the_cause_that_a_cache_names(world, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 12_000, 12_000))
    with pytest.raises(forebay.ForebayError, match=r"expected .* of free space for .*cache, .*got 12 kB.*Make room"):
        Loader("ds", **B, cache_dir=world / "cache")
