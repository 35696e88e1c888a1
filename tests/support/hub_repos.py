"""Small real repositories for `hub_server`: the names of the dataset guide, their real columns, files of real formats.

The texts are those that come with Python; the tokenizers are trained on them.
"""

import csv
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from forebay.prepare.tokenize.tokenizers import train_tokenizer
from support.preparing import write_jsonl

_FINEWEB = ("text", "id", "dump", "url", "file_path", "language", "language_score", "token_count")
_DUMPS = ("CC-MAIN-2013-20", "CC-MAIN-2024-10")


def make_hub(directory: Path) -> Path:
    """Write the repositories below `directory` and give it: some 6 MB in a second or two.

    Datasets (rows): winglian/tiny-shakespeare (Parquet; train, validation, test), benchaffe/shakespeare-lines (CSV, a
    line each), HuggingFaceFW/fineweb-edu and HuggingFaceFW/fineweb (two dumps of two Parquet files of 40 rows;
    configurations default, sample-10BT and the dumps), EleutherAI/pile (.jsonl.zst; train, validation, test),
    bigcode/the-stack (Parquet, column `content`, gated: TOKEN opens it), example/pictures (what no reader of ours
    knows). Models with a tokenizer: gpt2, EleutherAI/gpt-neox-20b, Salesforce/codegen-350M-mono; example/no-tokenizer.
    """
    datasets = directory / "datasets"
    _tiny_shakespeare(datasets / "winglian/tiny-shakespeare")
    _lines(datasets / "benchaffe/shakespeare-lines")
    _fineweb(datasets / "HuggingFaceFW/fineweb-edu", ("score", "int_score"))
    _fineweb(datasets / "HuggingFaceFW/fineweb", ("date",))
    _pile(datasets / "EleutherAI/pile")
    _stack(datasets / "bigcode/the-stack")
    _pictures(datasets / "example/pictures")
    _models(directory / "models")
    return directory


@functools.cache
def paragraphs() -> list[str]:
    """Some thousand paragraphs of English."""
    return [part for name in sorted(topics) for part in topics[name].split("\n\n") if part.strip()]


@functools.cache
def texts() -> list[str]:
    """A few hundred documents of English."""
    return ["\n\n".join(paragraphs()[start : start + 12]) for start in range(0, len(paragraphs()), 12)]


def write_repo(repo: Path, card: dict | None = None, settings: dict | None = None) -> Path:
    """An empty repository with a README.md whose head is the card."""
    repo.mkdir(parents=True, exist_ok=True)
    head = f"---\n{yaml.safe_dump(card)}---\n" if card else ""
    (repo / "README.md").write_text(f"{head}# {repo.name}\n")
    if settings:
        (repo / ".hub.json").write_text(json.dumps(settings))
    return repo


def write_parquet(path: Path, rows: Sequence[dict], row_group: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group)


def _configs(paths):
    return {
        "configs": [
            {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in files.items()]}
            for name, files in paths.items()
        ]
    }


def _tiny_shakespeare(repo):
    write_repo(repo, {"license": "mit"})
    rows = [{"text": paragraph} for paragraph in paragraphs()]
    cuts = {"train": rows[: -len(rows) // 10], "validation": rows[-len(rows) // 10 : -50], "test": rows[-50:]}
    for split, part in cuts.items():
        write_parquet(repo / f"data/{split}-00000-of-00001.parquet", part, 1000)


def _lines(repo):
    write_repo(repo)
    lines = [line for part in paragraphs()[:1000] for line in part.splitlines() if line.strip()]
    with (repo / "train.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([line] for line in lines)


def _fineweb(repo, more):
    paths = {"default": {"train": "data/*/*"}, "sample-10BT": {"train": "sample/10BT/*"}}
    write_repo(repo, _configs(paths | {dump: {"train": f"data/{dump}/*"} for dump in _DUMPS}))
    rows = random.Random(repo.name).sample(texts(), len(texts()))
    for number in range(4):
        dump = _DUMPS[number // 2]
        part = [_web_row(rows[(40 * number + i) % len(rows)], number, i, dump, more) for i in range(40)]
        write_parquet(repo / f"data/{dump}/train-{number % 2:05d}-of-00002.parquet", part, 10)
        if number % 2 == 0:
            write_parquet(repo / f"sample/10BT/{number // 2:03d}_00000.parquet", part[:20], 10)


def _web_row(text, number, row, dump, more):
    ident = f"<urn:uuid:{number:08x}-0000-4000-8000-{row:012x}>"
    url, file = f"https://example.org/{number}/{row}", f"s3://commoncrawl/crawl-data/{dump}/{number}.warc.gz"
    values = (text, ident, dump, url, file, "en", 0.95, len(text) // 4)
    extra = {"score": 3.25, "int_score": 3, "date": "2013-05-18T06:00:00Z"}
    return dict(zip(_FINEWEB, values)) | {name: extra[name] for name in more}


def _pile(repo):
    write_repo(repo)
    rows = [{"text": text, "meta": {"pile_set_name": "Pile-CC"}} for text in texts()]
    write_jsonl(repo / "train/00.jsonl.zst", rows[:60])
    write_jsonl(repo / "train/01.jsonl.zst", rows[60:100])
    write_jsonl(repo / "val.jsonl.zst", rows[100:110])
    write_jsonl(repo / "test.jsonl.zst", rows[110:120])


def _stack(repo):
    write_repo(repo, {"license": "other"}, {"gated": "auto"})
    sources = sorted(Path(json.__file__).parent.glob("*.py"))
    for language, paths in (("python", sources), ("toml", [Path(__file__).parents[2] / "pyproject.toml"])):
        rows = [
            {"hexsha": f"{i:040x}", "size": path.stat().st_size, "ext": path.suffix[1:], "lang": language}
            | {"max_stars_repo_name": "example/code", "content": path.read_text("utf-8")}
            for i, path in enumerate(paths)
        ]
        write_parquet(repo / f"data/{language}/train-00000-of-00001.parquet", rows)


def _pictures(repo):
    write_repo(repo)
    (repo / "train").mkdir()
    for number in range(3):
        (repo / f"train/{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(64)))


def _models(models):
    gpt2, neox = (train_tokenizer(iter(texts()[:40]), size).data for size in (1000, 1200))
    for name, data in (("gpt2", gpt2), ("EleutherAI/gpt-neox-20b", neox), ("Salesforce/codegen-350M-mono", gpt2)):
        repo = write_repo(models / name)
        (repo / "tokenizer.json").write_bytes(data)
        config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "tokenizer_class": "GPT2TokenizerFast"}
        (repo / "tokenizer_config.json").write_text(json.dumps(config))
        (repo / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (write_repo(models / "example/no-tokenizer") / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
