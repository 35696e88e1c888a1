"""A small corpus of many formats and a recipe with everything on: what the tests of whole preparations share.

Run as a program it prepares: `python whole.py INPUTS OUT WORKERS [ENGINE]` prints the dataset id. Pieces, slices and
buckets are small, so that each phase has several tasks.
"""

import gzip
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.calibration import scaled

MODEL, EXAM = "model.arpa", "exam.jsonl"
NUM_DOCUMENTS = 600


def texts(count: int = NUM_DOCUMENTS, seed: int = 5) -> list[str]:
    """Made-up prose that the usual filters keep; one in ten a copy, one in ten nearly."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(3, 9))) for _ in range(3000)]
    common = ["the", "be", "to", "of", "and", "that", "have", "with"]
    created = []
    for _ in range(count):
        draw = rng.random()
        if created and draw < 0.1:
            created.append(rng.choice(created))
            continue
        if created and draw < 0.2:
            created.append(rng.choice(created) + " And so it ends here.")
            continue
        lines = []
        for _ in range(rng.randint(4, 12)):
            line = " ".join(rng.choices(words, k=10) + rng.choices(common, k=6)).capitalize()
            lines.append(line + rng.choice([".", ".", "!", " at 10.1.2.3.", " by someone@example.com."]))
        created.append("\n".join(lines))
    return created


def session_members(session: int) -> list[int]:
    """The processes of a session that are not zombies."""
    result = []
    for path in Path("/proc").iterdir():
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split() if path.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[3]) == session and fields[0] != "Z":
            result.append(int(path.name))
    return result


def wait_for_none(session: int) -> None:
    """Fail unless all processes of a session end within 20 s."""
    deadline = time.monotonic() + scaled(20)
    while remaining := session_members(session):
        assert time.monotonic() < deadline, f"processes {remaining} outlived the prepare that started them"
        time.sleep(0.02)


def make_inputs(folder: Path) -> Path:
    """JSON lines (two files alike), plain text, Parquet, packed lines with damage, and a WARC of pages.

    Some share lines, sentences or words. Beside the folder is an evaluation set of lines that they have.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    created = texts()
    for i in range(30, 300, 5):
        lines = created[i - 20].split("\n")
        shared = ["\n".join(lines[:4]), " ".join(lines[:4]), " ".join(lines[:4])[40:400]][i // 5 % 3]
        created[i] = f"{shared}\n{created[i][: 2000 if i % 15 else 100]}"
    urls = [f"http://x.org/{i // 2 if i % 50 < 2 else i}" for i in range(len(created))]
    lines = [
        json.dumps({"id": f"d{i}", "text": text, "url": urls[i], "edu": i % 7}) + "\n" for i, text in enumerate(created)
    ]
    exam = [{"id": text[:9], "question": text.split("\n")[2], "answer": "Some words."} for text in created[5::60]]
    (folder.parent / EXAM).write_text("".join(json.dumps(instance) + "\n" for instance in exam))
    (folder / "a.jsonl").write_text("".join(lines[:300]))
    (folder / "b.jsonl").write_text("".join(lines[200:300]))
    (folder / "c.jsonl").write_text("".join(lines[200:300]))
    for i, text in enumerate(created[300:360]):
        (folder / f"t{i:02d}.txt").write_text(text)
    pq.write_table(pa.table({"text": created[360:420]}), folder / "p.parquet", row_group_size=20)
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(("".join(lines[420:500]) + "no JSON\n{}\n").encode(), mtime=0))
    (folder / "pages.warc").write_bytes(
        b"".join(page(f"http://y.org/{i}", text) for i, text in enumerate(created[500:]))
    )
    return folder


def page(url: str, text: str) -> bytes:
    """A WARC record of a page with that text and a menu."""
    paragraphs = "".join(f"<p>{line}</p>" for line in text.split("\n"))
    body = f"<html><head><title>x</title></head><body><nav><a href='/'>Home</a></nav>{paragraphs}</body></html>"
    http = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n{body}".encode()
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:{hashlib.md5(url.encode()).hexdigest()}>\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
    )
    return head.encode() + http + b"\r\n\r\n"


def make_model(path: Path) -> Path:
    """A small language model."""
    from forebay.prepare.kneser_ney import train_lm

    train_lm(texts(60, seed=9), path, order=2)
    return path


def recipe(folder: Path) -> dict:
    """Settings with everything on that the corpus survives; the folder has the evaluation set, and may have a model."""
    stages = {
        "extract": {}, "unicode": {}, "pii": {}, "boilerplate": {}, "gopher_repetition": {}, "gopher_quality": {},
        "c4": {"terminal_punctuation": False}, "fineweb": {},
    }  # fmt: skip
    if (folder / MODEL).exists():
        stages["perplexity"] = {"model": str(folder / MODEL)}
        stages["select"] = {"column": "perplexity", "keep_percentile": [5, 95]}
    methods = dict.fromkeys(("exact", "url", "minhash", "lines", "sentences", "substring", "overlap"), True)
    return {
        "name": "whole", "max_error_rate": 0.2, **stages, "tokenize": {"tokenizer": "train:600"},
        "read": {"columns": {"edu": "number"}}, "decontaminate": {"sets": [str(folder / EXAM)]},
        "dedup": {**methods, "min_words": 20, "max_cut_share": 0.6, "keep": "best", "score": "edu"},
        "slice": {"bytes": 1 << 14, "shuffle": True},
    }  # fmt: skip


def small_tasks() -> None:
    """Small pieces and buckets, in this process, which plans."""
    from forebay.formats import text as lines
    from forebay.prepare import inputs as sources
    from forebay.prepare.outputs import tokens as finish
    from forebay.prepare.tasks import shuffle

    sources.GROUP_BYTES = lines.SPLIT_BYTES = 1 << 15
    finish.plan_shuffle = lambda parts, folder: shuffle.plan_shuffle(parts, folder, 1 << 16)


def command(inputs: Path, out: Path, workers: int, engine: str = "local") -> list[str]:
    """What prepares in a process of its own."""
    return [sys.executable, __file__, str(inputs), str(out), str(workers), engine]


def run(inputs: Path, out: Path, workers: int, engine: str = "local", **environment: str) -> str:
    """Prepare in a process of its own; the dataset id."""
    done = subprocess.run(
        command(inputs, out, workers, engine),
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Unlucky:
    """Runs a task, but one in sixteen kills its worker when first tried, and one runs out of memory.

    The file of WHOLE_UNLUCKY has a byte for each first try. Names would not do: they are other hashes in each folder.
    """

    def __init__(self, run: Any) -> None:
        self.__wrapped__ = run

    def __call__(self, task: Any, scale: int) -> Any:
        if scale == 0 and multiprocessing.parent_process() is not None:
            with Path(os.environ["WHOLE_UNLUCKY"]).open("ab", buffering=0) as tries:
                tries.write(b".")
                number = tries.tell() % 16
            if number == 1:
                raise MemoryError("none left")
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.__wrapped__(task, scale)


def main(inputs: str, out: str, workers: str, engine: str = "local") -> int:
    """Prepare; the rest lies beside the inputs. With WHOLE_UNLUCKY, a file, by workers that die."""
    from forebay import prepare_dataset
    from forebay.errors import ForebayError
    from forebay.prepare import driver as pipeline
    from forebay.prepare import load_recipe
    from forebay.prepare.outputs import tokens as finish

    small_tasks()
    if "WHOLE_UNLUCKY" in os.environ:
        for module, name in (
            (pipeline, "process_split"),
            (pipeline, "process_segment"),
            (finish, "encode"),
            (finish, "write_slice"),
        ):
            setattr(module, name, Unlucky(getattr(module, name)))
    settings = recipe(Path(inputs).parent)

    def report(message):
        print(message, file=sys.stderr, flush=True)

    try:
        created = prepare_dataset(
            [inputs], out, recipe=load_recipe(settings=settings), workers=int(workers), engine=engine,
            write_ids=Path(f"{out}.ids"), on_message=report, on_progress=lambda p: report(f"{p.stage} {p.done}"),
        )  # fmt: skip
    except ForebayError as error:
        report(f"forebay: {error}")
        return 1
    print(created.id)
    return 0


if __name__ in ("__main__", "__mp_main__"):  # here and in the workers
    # A process that is killed loses nothing that it wrote, and a thousand small files would take ten seconds.
    os.fsync = lambda file: None
if __name__ == "__main__":
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork")  # as the command does
    sys.exit(main(*sys.argv[1:]))
