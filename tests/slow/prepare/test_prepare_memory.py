"""The memory that a whole preparation takes, of each of its processes: bounded, and the same for ten times the input.

Peaks are `VmHWM` of /proc, seen 50 times a second. The figures for 30 and 300 MB of real text are in the documentation.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import whole
from support.shared_data import FOLDER

pytest.importorskip("numba")
pytest.importorskip("resiliparse")
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks of memory are read in /proc")
GIGABYTE = 10**9
GIANT_BYTES = int(os.environ.get("FOREBAY_GIANT_MIB", "8")) << 20
"""Of one document; 31 is the most that is read as one, and takes half a minute of a processor more."""
TOKENIZERS = FOLDER / "tokenizers"
SCRIPT = """
import functools, json, sys
from forebay import prepare_dataset
from forebay.formats import text as lines
from forebay.prepare import load_recipe
from forebay.prepare.dedup import deduplicate as dedup
from forebay.prepare.outputs import tokens as finish
from forebay.prepare.tasks import shuffle

# Constants as much smaller as the input is: it is many splits and many runs.
lines.SPLIT_BYTES = 1 << 19
dedup._RUN_RECORDS = 1 << 16
dedup.deduplicate = functools.partial(dedup.deduplicate, memory_bytes=8 << 20)
finish.shuffle_parts = functools.partial(shuffle.shuffle_parts, bucket_bytes=1 << 20)
if __name__ == "__main__":
    made = prepare_dataset([sys.argv[1]], sys.argv[2], recipe=load_recipe(settings=json.loads(sys.argv[3])), workers=2)
    print(json.dumps([made.documents_in, made.documents_out, made.dropped]))
"""
INFINITE = 10.0**12
LAX = {
    "gopher_repetition": {
        "max_duplicate_paragraphs": INFINITE, "max_duplicate_paragraph_chars": INFINITE,
        "max_duplicate_lines": INFINITE, "max_duplicate_line_chars": INFINITE,
        "top_ngrams": [[2, INFINITE]], "duplicate_ngrams": [[5, INFINITE]],
    },
    "gopher_quality": {
        "min_words": 0, "max_words": 1 << 40, "min_word_chars": 0, "max_word_chars": INFINITE,
        "max_symbols_per_word": INFINITE, "min_alpha_words": 0, "min_stop_words": 0,
    },
}  # fmt: skip


def peaks(folder: Path, source: Path, settings: dict) -> tuple[list[object], list[int]]:
    """What was made, and the peak of each process, the main one first, in bytes."""
    script = folder / "run.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, source, folder / "out", json.dumps(settings)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    result = {process.pid: 0}
    with process:
        while process.poll() is None:
            for pid in whole.session_members(process.pid):
                result[pid] = max(result.get(pid, 0), _peak(pid))
            time.sleep(0.02)
        printed = process.stdout.read()
    assert process.returncode == 0
    return json.loads(printed), list(result.values())


def _peak(pid):
    try:
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        return 0


def test_ten_times_the_input_takes_the_same(tmp_path):
    created = {}
    for name, megabytes in (("small", 2), ("large", 20)):
        folder = tmp_path / name
        folder.mkdir()
        with (folder / "x.jsonl").open("w") as file:
            for seed in range(megabytes * 2):
                for text in whole.texts(600, seed=seed):
                    file.write(json.dumps({"text": text}) + "\n")
        settings = {
            **whole.recipe(folder),
            "read": {},
            "decontaminate": False,
            "dedup": {"exact": True, "minhash": True, "lines": True},
            "tokenize": {"tokenizer": "bytes"},
            "slice": {"bytes": 1 << 20, "shuffle": True},
        }
        created[name] = peaks(folder, folder / "x.jsonl", settings)
    (few, small), (many, large) = created["small"], created["large"]
    assert many[0] == 10 * few[0] and few[1] > 600
    assert max(small + large) < GIGABYTE / 2
    assert large[0] < 1.25 * small[0] and max(large[1:]) < 1.25 * max(small[1:]), [small, large]


@pytest.fixture(scope="module")
def giants(tmp_path_factory) -> Path:
    """Documents of GIANT_BYTES, and lines and a cell of 100 MB between small ones."""
    folder, rng = tmp_path_factory.mktemp("giants") / "in", random.Random(3)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(50_000)]
    folder.mkdir()
    (folder / "words.txt").write_text(
        "".join(" ".join(rng.choices(words, k=20)) + "\n" for _ in range(GIANT_BYTES // 155))
    )
    (folder / "letter.txt").write_text("a" * GIANT_BYTES)
    (folder / "cjk.txt").write_text("".join(map(chr, rng.choices(range(0x4E00, 0x9FA5), k=GIANT_BYTES // 3))))
    (folder / "line.txt").write_text("x" * (100 << 20))
    pq.write_table(pa.table({"text": ["before", "ab cd " * (17 << 20), "after"]}), folder / "cell.parquet")
    with (folder / "line.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ("before", "x" * (100 << 20), "later"))
    return folder


# FOREBAY_TOKENIZER=llama-test-tokenizer.json names another.
def test_giant_documents(tmp_path, giants: Path):
    tokenizer = os.environ.get("FOREBAY_TOKENIZER", "gpt-neo-test-tokenizer.json")
    if not (TOKENIZERS / tokenizer).is_file():
        pytest.skip(f"needs {TOKENIZERS / tokenizer}")
    settings = {
        "name": "g", "max_error_rate": 1.0, "unicode": {}, "pii": {}, "boilerplate": {"menu_lines": 0}, **LAX,
        "tokenize": {"tokenizer": str(TOKENIZERS / tokenizer)}, "slice": {"shuffle": True},
        "dedup": {"exact": True, "lines": True, "minhash": True, "ngram": 1},
    }  # fmt: skip
    (documents_in, retained, dropped), seen = peaks(tmp_path, giants, settings)
    assert (documents_in, retained, dropped) == (10, 6, {"exact_duplicate": 1, "malformed": 3})
    assert max(seen) < GIGABYTE, f"peaks {[peak // 10**6 for peak in seen]} MB"
