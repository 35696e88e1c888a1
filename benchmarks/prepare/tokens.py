"""ENCODE, SHUFFLE and SLICE against `tokenizers` and tiktoken alone, in CPU seconds of one process, with peak memory.

The corpus is real prose (`corpus.py`); the vocabulary GPT-2's, from FOREBAY_TEST_DATA. All that is compared reads the
same Arrow file of kept documents and runs in a fresh process with one thread; a process's own start and the loading of
its tokenizer are not counted. The libraries alone write nothing; ours writes tokens and ends. tiktoken runs with the
interpreter in FOREBAY_PEERS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measure import Figure, median, show
from benchmarks.prepare.corpus import data_folder, make_corpus

PEERS = os.environ.get("FOREBAY_PEERS", ".venv-peers/bin/python")
TEXT_BYTES = 10 << 20
_HEAD = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import pyarrow as pa
folder, kind = sys.argv[1:]
def batches():
    with pa.OSFile(folder + "/part.arrow") as source:
        reader = pa.ipc.open_file(source)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i).column("text").to_pylist()
"""
_TAIL = """
cpu = time.process_time() - begin
# Not ru_maxrss, which a process inherits from the one that started it.
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
print(json.dumps([cpu, int(peak)]))
"""
_LIBRARY = """
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
begin, total = time.process_time(), 0
for texts in batches():
    for start in range(0, len(texts), 300):
        encodings = tokenizer.encode_batch_fast(texts[start:start + 300], add_special_tokens=False)
        total += sum(len(encoding) for encoding in encodings)
"""
_TIKTOKEN = """
import tiktoken
byte_of = {char: byte for byte, char in enumerate(json.load(open(folder + "/metadata.json"))["alphabet"])}
vocab = json.load(open(folder + "/tokenizer.json"))["model"]["vocab"]
ranks = {bytes(byte_of[c] for c in name): rank for name, rank in vocab.items() if name != "<|endoftext|>"}
pattern = r"'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s"
encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
begin, total = time.process_time(), 0
for texts in batches():
    total += sum(len(encoding.encode_ordinary(text)) for text in texts)
"""
_OURS = """
from forebay.prepare.tokenize.encoders import EncoderSpec, encoder_for
from forebay.storage.store import open_store
from forebay.prepare.tasks.encode import EncodeTask, TextPart, encode
from forebay.prepare.tasks.shuffle import Shuffle, plan_shuffle, shuffle
from forebay.prepare.tasks.slicing import plan_slices, write_slice
if kind == "reference":
    os.environ["FOREBAY_CODER"] = "reference"
metadata = json.load(open(folder + "/metadata.json"))
spec = EncoderSpec(open_store(folder), metadata["sha256"], "json", "U16", 50256)
store, out = open_store(folder), open_store(folder + "/" + kind)
print(encoder_for(spec).name, file=sys.stderr)
begin = time.process_time()
part = TextPart("part.arrow", metadata["documents"], "part")
encoded = encode(EncodeTask(part, spec, store, shuffle=Shuffle(1) if kind == "sliced" else None)).part
if kind == "sliced":
    parts = [shuffle(task) for task in plan_shuffle([encoded], store, 16 << 20)]
    for task in plan_slices(parts, store, slice_bytes=16 << 20).tasks(store, out):
        write_slice(task)
store.remove([*store.sizes("tokens/"), *store.sizes("plans/"), *store.sizes(kind + "/")])
"""


def _make(folder: Path) -> int:
    """The Arrow part, the tokenizer and the metadata; bytes of text."""
    from forebay.prepare.tokenize.tokenizers import byte_alphabet, load_tokenizer

    documents = make_corpus(folder / "text.jsonl", TEXT_BYTES)
    with (folder / "text.jsonl").open(encoding="utf-8") as file:
        texts = pa.array([json.loads(line)["text"] for line in file], pa.large_string())
    with pa.OSFile(str(folder / "part.arrow"), "wb") as sink:
        schema = pa.schema([("text", pa.large_string())])
        with pa.ipc.new_file(sink, schema) as writer:
            for start in range(0, documents, 1000):
                writer.write(pa.record_batch([pa.array(texts[start : start + 1000])], schema=schema))
    tokenizer = load_tokenizer(str(data_folder() / "tokenizers/gpt2"))
    (folder / "tokenizer.json").write_bytes(tokenizer.data)
    metadata = {"documents": documents, "sha256": tokenizer.sha256, "alphabet": list(byte_alphabet())}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return int(pc.sum(pc.binary_length(texts)).as_py())


def measure(rounds: int = 3) -> list[Figure]:
    """The figures. Takes about a minute."""
    what = {
        "tokenizers alone": (_LIBRARY, ""),
        "tiktoken alone": (_TIKTOKEN, ""),
        "encode, tokenizers as coder": (_OURS, "reference"),
        "encode": (_OURS, "encoded"),
        "encode, shuffle, slice": (_OURS, "sliced"),
    }
    if not Path(PEERS).exists():
        print(f"tiktoken is not measured: expected an interpreter with it at {PEERS} (FOREBAY_PEERS).")
        what.pop("tiktoken alone")
    costs: dict[str, list[list[float]]] = {name: [] for name in what}
    with tempfile.TemporaryDirectory() as name:
        size = _make(Path(name))
        for _ in range(rounds):
            for case, (script, kind) in what.items():
                python = PEERS if script == _TIKTOKEN else sys.executable
                command = [python, "-c", _HEAD + script + _TAIL, name, kind]
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
                costs[case].append(json.loads(done.stdout))
    cpu = {case: median([cost[0] for cost in runs]) for case, runs in costs.items()}
    figures = [
        Figure(case, size / cpu[case] / 1e6, "MB/CPU s", f"peak {max(cost[1] for cost in costs[case]) / 1024:.0f} MiB")
        for case in what
    ]
    for case in ("encode, tokenizers as coder", "encode", "encode, shuffle, slice"):
        figures.append(Figure(f"{case} / tokenizers", cpu["tokenizers alone"] / cpu[case], "x speed"))
    return figures


if __name__ == "__main__":
    show("prepare: tokenize", measure())
