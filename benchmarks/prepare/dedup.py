"""Signatures against datasketch, rensa and datatrove on the same texts; the steps after them; and the S-curve.

    python -m benchmarks.prepare.dedup                    the table (about 40 s)
    python -m benchmarks.prepare.dedup --curve FILE.svg   the S-curve against theory, as a table and as a picture

CPU seconds of one process each, all with 112 hashes over 5-grams of words. The peers run with the interpreter in
FOREBAY_PEERS, which has them installed. datasketch and rensa take their 5-grams as strings, joined by Python: each is
shown with that (a user's cost), and with strings that are there already, which ours never makes (its line is from
text all the same). The last lines compare the min-wise hashes alone, of shingle hashes that are there already.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measure import Figure
from benchmarks.prepare.cuts import cpu, print_cuts
from forebay.prepare.dedup import kernels
from forebay.prepare.dedup.deduplicate import Signer, deduplicate
from forebay.prepare.dedup.methods import Dedup, MinHash, Signed
from forebay.prepare.documents import text_column
from forebay.storage.store import Store, open_store

CONFIG = Dedup(minhash=True)
METHOD = MinHash()
PEERS = os.environ.get("FOREBAY_PEERS", ".venv-peers/bin/python")

PEER = r"""
import json, logging, os, re, sys, time
import numpy as np
logging.disable(logging.CRITICAL)
texts = json.load(open(sys.argv[1]))
found = {}
def timed(name, make, texts=texts):
    start = time.process_time()
    out = make()
    spent = time.process_time() - start
    found[name] = spent / sum(len(t.encode()) for t in texts)
    return out
WORD = re.compile(r"[^\W_]+")
def grams(texts):
    out = []
    for text in texts:
        words = WORD.findall(text.lower())
        out.append([" ".join(words[i : i + 5]) for i in range(max(len(words) - 4, 1))])
    return out
shingles = timed("shingles", lambda: grams(texts))
import rensa
def updates(kind):
    for one in shingles:
        sketch = kind(112, 1)
        sketch.update(one)
        sketch.digest()
timed("rensa R-MinHash, update", lambda: updates(rensa.RMinHash))
timed("rensa R-MinHash, bulk", lambda: rensa.RMinHash.digest_matrix_from_token_sets(shingles, 112, 1))
timed("rensa C-MinHash, update", lambda: updates(rensa.CMinHash))
timed("rensa C-MinHash, bulk", lambda: rensa.CMinHash.digests_from_token_sets(shingles, 112, 1))
hashes = rensa.RMinHash.hash_token_sets(shingles)
timed("rensa R-MinHash, hashes", lambda: rensa.RMinHash.digest_matrix_from_token_hash_sets(hashes, 112, 1))
from datasketch import MinHash
some, few = len(texts) // 8, len(texts) // 16
def sketch():
    for one in shingles[:some]:
        minhash = MinHash(num_perm=112)
        minhash.update_batch([s.encode() for s in one])
timed("datasketch", sketch, texts[:some])
try:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    signer = MinhashDedupSignature("/tmp", MinhashConfig())
    signer.get_signature(signer.get_shingles(texts[0]))
    timed("datatrove", lambda: [signer.get_signature(signer.get_shingles(t)) for t in texts[:few]], texts[:few])
    from datatrove.data import Document
    from datatrove.pipeline.dedup.sentence_dedup import SentDedupConfig, SentenceDedupSignature
    spans = SentenceDedupSignature("/tmp", config=SentDedupConfig())
    spans.get_hashes(Document(text=texts[0], id="0"), 0)
    timed("sentences", lambda: [spans.get_hashes(Document(text=t, id="0"), 0) for t in texts[:few]], texts[:few])
except ImportError as error:
    print(error, file=sys.stderr)
print(json.dumps(found))
"""


def corpus(megabytes: int) -> list[str]:
    """Documents of about 3 KB: English books if the test data is there, else words drawn by a Zipf-like law."""
    test_data = os.environ.get("FOREBAY_TEST_DATA")
    folder = (Path(test_data) if test_data else Path(__file__).parents[2] / "../shared/data") / "books/gutenberg_en"
    text = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.txt")))
    if not text:
        rng = np.random.default_rng(0)
        drawn = (20_000 ** rng.random(megabytes * 170_000)).astype(np.int64)
        text = " ".join(f"w{i}" for i in drawn.tolist())
    text = text[: megabytes << 20]
    return [text[i : i + 3000] for i in range(0, len(text), 3000)]


def seconds_a_byte(texts: Sequence[str], rounds: int = 3) -> dict[str, float]:
    """Ours: everything from UTF-8 text, and the min-wise hashes alone of ready shingles."""
    column = pa.array(texts, pa.large_string())
    shingles = np.random.default_rng(0).integers(0, 1 << 32, 448, dtype=np.uint32)  # of about 3 KB of English
    lowest = np.full(112, 0xFFFFFFFF, np.uint32)
    factors, terms = METHOD.hash_functions()

    def alone() -> None:
        for _ in texts:
            kernels.take_lowest(shingles, len(shingles), factors, terms, lowest)

    results = {}
    for name, run in (("text", lambda: METHOD.sign_texts(column)), ("hashes", alone)):
        run()
        results[name] = min(cpu(run) for _ in range(rounds)) / pc.sum(pc.binary_length(column)).as_py()
    return results


def run_peers(texts: Sequence[str]) -> dict[str, float]:
    """Processor seconds a byte of text by name; empty if their interpreter is missing."""
    if not Path(PEERS).exists():
        print(f"No peers: expected an interpreter with datasketch, rensa and datatrove at {PEERS} (FOREBAY_PEERS).")
        return {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(texts), file)
        file.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        done = subprocess.run([PEERS, "-c", PEER, file.name], capture_output=True, text=True, env=environment)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def print_signatures(texts: Sequence[str]) -> list[Figure]:
    """The table of signatures, printed, and what the targets are set for; nothing without the peers."""
    ours, theirs = seconds_a_byte(texts), run_peers(texts)
    print(f"MinHash signatures, {sum(map(len, texts)) / 1e6:.1f} MB in {len(texts)} documents, one core")
    print(f"{'':40}{'MB/s':>10}{'forebay is':>14}")

    def line(name: str, cost: float, base: float) -> None:
        print(f"{name:40}{1e-6 / cost:10.2f}{cost / base:13.1f}x")

    line("forebay, from text", ours["text"], ours["text"])
    shingles = theirs.pop("shingles", 0.0)
    sentences = theirs.pop("sentences", None)
    hashes = theirs.pop("rensa R-MinHash, hashes", None)
    for name, cost in theirs.items():
        if name == "datatrove":
            line("datatrove, from text", cost, ours["text"])
        else:
            line(f"{name}, from text", cost + shingles, ours["text"])
            line(f"{name}, its 5-grams given", cost, ours["text"])
    line("forebay, shingle hashes given", ours["hashes"], ours["hashes"])
    if hashes:
        line("rensa R-MinHash, shingle hashes given", hashes, ours["hashes"])
    print_cuts(texts, sentences)
    if "datasketch" not in theirs:
        return []
    fastest = min(cost + shingles for name, cost in theirs.items() if name.startswith("rensa"))
    return [
        Figure("MinHash / datasketch", (theirs["datasketch"] + shingles) / ours["text"], "x CPU", "from text"),
        Figure("MinHash / rensa", fastest / ours["text"], "x CPU", "its fastest, from text"),
        Figure("MinHash / rensa, hashes given", (hashes or 0.0) / ours["hashes"], "x CPU", "min-wise hashes alone"),
    ]


def print_steps(documents: int = 200_000) -> None:
    """What comes after the signatures, on documents of which a fifth are copies or nearly."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 30, (documents, 12))
    copies = rng.random(documents) < 0.2
    words[copies] = words[rng.integers(0, documents, int(copies.sum()))]
    texts = pa.array([" ".join(map(str, row)) for row in words.tolist()], pa.large_string())
    config = Dedup(exact=True, minhash=True)
    with tempfile.TemporaryDirectory() as name:
        store, signed = open_store(name), []
        signing = cpu(lambda: signed.append(_sign(store, texts, config)))
        signed_bytes = sum(store.sizes().values())
        peak_bytes = 0

        def run(function: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[Any]:
            nonlocal peak_bytes
            done = [function(task, 0) for task in tasks]
            peak_bytes = max(peak_bytes, sum(store.sizes("dedup/").values()))
            return done

        cpu_used = cpu(lambda: deduplicate(signed[:1], config, store, run))
        final_bytes = sum(store.sizes("dedup/").values())
    print(f"\nAfter the signatures, {documents} documents, a fifth of them copies (exact, then 14 bands of 8)")
    ratio = cpu_used / signing
    print(f"{'sort, merge, resolve':40}{documents / cpu_used:10.0f} documents/s, one core ({ratio:.2f}x signing)")
    for what, size in (
        ("signatures on disk", signed_bytes),
        ("steps' files at their most", peak_bytes),
        ("what stays", final_bytes),
    ):
        print(f"{what:40}{size / documents:10.1f} bytes a document")


def _sign(store: Store, texts: pa.LargeStringArray, config: Dedup) -> Signed:
    with Signer(store, "part", config) as signer:
        for start in range(0, len(texts), 4096):
            signer.add(pa.record_batch({"text": texts.slice(start, 4096)}))
    return signer.signed


SHAPES = ((14, 8), (16, 7), (20, 5))


def measure_curve(pairs: int = 4000) -> list[tuple[float, list[tuple[float, float]]]]:
    """[(J, [(theory, measured) by shape])]: the share of pairs of known similarity that meet in a band."""
    rng = np.random.default_rng(1)
    results = []
    for percent in (40, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95):
        shingles = 180
        shared = round(2 * shingles * percent / (100 + percent))
        jaccard = shared / (2 * shingles - shared)
        words = rng.integers(97, 123, (pairs, 2, shingles + 4, 9), dtype=np.uint8)
        words[..., 8] = 32
        words[:, 1, : shared + 4] = words[:, 0, : shared + 4]
        data = words.reshape(-1)
        offsets = np.arange(2 * pairs + 1, dtype=np.int64) * ((shingles + 4) * 9)
        row = []
        for bands, rows in SHAPES:
            signatures = MinHash(bands, rows).sign_texts(text_column(offsets, data))
            met = float((signatures[::2] == signatures[1::2]).any(axis=1).mean())
            row.append((1 - (1 - jaccard**rows) ** bands, met))
        results.append((jaccard, row))
    return results


def print_curve(curve: Sequence[tuple[float, list[tuple[float, float]]]]) -> None:
    print("| J | " + " | ".join(f"{b} x {r} theory | measured" for b, r in SHAPES) + " |")
    print("|" + "---:|" * (1 + 2 * len(SHAPES)))
    for jaccard, row in curve:
        print(f"| {jaccard:.3f} | " + " | ".join(f"{theory:.4f} | {met:.4f}" for theory, met in row) + " |")


def draw_curve(curve: Sequence[tuple[float, list[tuple[float, float]]]], path: Path) -> None:
    """Theory as lines, what was measured as dots."""
    colours = ("#0b6e99", "#c2571a", "#5b7f1e")

    def to_point(x: float, y: float) -> tuple[float, float]:
        return round(50 + (x - 0.3) / 0.7 * 520, 1), round(290 - y * 260, 1)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 340" font-family="sans-serif" font-size="12">',
        '<rect width="600" height="340" fill="#fff"/>',
    ]
    for tick in range(0, 11, 2):
        (x0, y), (x1, _) = to_point(0.3, tick / 10), to_point(1, 0)
        parts.append(
            f'<path d="M{x0} {y}H{x1}" stroke="#ddd"/><text x="42" y="{y + 4}" text-anchor="end">{tick / 10}</text>'
        )
    for tick in range(3, 11):
        x, y = to_point(tick / 10, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{tick / 10}</text>')
    parts.append('<text x="310" y="332" text-anchor="middle">Jaccard similarity of the sets of 5-grams</text>')
    for k, (bands, rows) in enumerate(SHAPES):
        line = " ".join(
            f"{x},{y}" for x, y in (to_point(j / 200, 1 - (1 - (j / 200) ** rows) ** bands) for j in range(60, 201))
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[k]}" stroke-width="1.5"/>')
        for jaccard, row in curve:
            x, y = to_point(jaccard, row[k][1])
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colours[k]}"/>')
        parts.append(f'<text x="64" y="{46 + 18 * k}" fill="{colours[k]}">{bands} bands of {rows}</text>')
    parts.append('<text x="64" y="104" fill="#555">lines: theory; dots: measured</text></svg>')
    path.write_text("\n".join(parts) + "\n")


def main() -> None:
    """Print the table, or measure and draw the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", type=Path, metavar="FILE.svg")
    arguments = parser.parse_args()
    if arguments.curve:
        curve = measure_curve()
        print_curve(curve)
        draw_curve(curve, arguments.curve)
        return
    measure()


def measure() -> list[Figure]:
    """Both tables, printed, and the ratios."""
    figures = print_signatures(corpus(4))
    print_steps()
    return figures


if __name__ == "__main__":
    main()
