"""What each page of the documentation needs before its blocks run: files, servers, names and replacements."""

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import corpora, crawl, nodes
from support.corpora import Corpora
from support.runner import ROOT, Page, blocks, pages


def consume(*_: Any) -> None:
    """Replaces a training step of the reader."""


def readme(page: Page, servers: Corpora) -> None:
    corpora.write_texts(page.directory)
    corpora.write_rows(page.directory)
    page.environment |= servers.hub_environment | servers.s3_environment
    page.names |= {"step": consume}
    page.replace |= {
        r"--num-steps 100": "--num-steps 2 --trainer count",
        r"--workers 1000 --slices 10000": "--workers 20 --slices 200",
        r"PEER_ID": r"$(forebay network show lab | grep -o '[a-z2-7]\\{32\\}' | head -1)",
    }


def getting_started(page: Page, servers: Corpora) -> None:
    shutil.copytree(ROOT / "docs", page.directory / "docs")


def loading(page: Page, servers: Corpora) -> None:
    servers.copy(page.directory / "wiki", page.directory / "books")
    page.environment |= servers.s3_environment
    page.names |= {"step": lambda inputs, labels: float(inputs.shape[0]), "evaluate": list, "device": "cpu"}
    page.replace |= {r"https://data.example": servers.web, r"examples/": f"{ROOT}/examples/"}


def dataset_guide(page: Page, servers: Corpora) -> None:
    page.environment |= servers.hub_environment | {"FOREBAY_COORDINATOR": servers.coordinator}
    page.names |= {"train": consume}
    page.replace |= {
        r"num_steps=[\d_]+": "num_steps=2",
        r"--num-steps 1000?": "--num-steps 2",
        r"(?m)--seq-len 1024$": "--seq-len 1024 --num-steps 2 --trainer count",
        r"--distributed": "--distributed --num-steps 2 --trainer count",
        r"--min-workers 4": "--min-workers 1",
    }


def shared_shards(page: Page, servers: Corpora) -> None:
    servers.copy(page.directory / "my-dataset")
    page.environment |= servers.s3_environment
    page.names |= {"rank": 0, "world_size": 1, "step": 0, "num_steps": 2, "steps": 2, "batch_size": 8, "train": consume}
    page.names |= {"uid": 7, "window": 1, "sample_ids": np.arange(64, dtype=np.uint64)}
    page.replace |= {r"/data/": "data/", r"inner_steps=30": "inner_steps=2", r"batch_size=1024": "batch_size=8"}


def streaming(page: Page, servers: Corpora) -> None:
    (page.directory / "corpus").mkdir()
    text = b"".join(b'{"text": "%d %s"}\n' % (i, b"mill race " * 500) for i in range(40))
    (page.directory / "corpus" / "a.jsonl").write_bytes(text)
    page.environment |= servers.hub_environment
    page.names |= {"step": consume}


def preparing(page: Page, servers: Corpora) -> None:
    corpora.write_texts(page.directory)
    page.environment |= servers.hub_environment


def programming(page: Page, servers: Corpora) -> None:
    for folder in ("src/forebay/formats", "LICENSE"):
        target = page.directory / "projects" / "forebay" / folder
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / folder).is_dir() else shutil.copy)(ROOT / folder, target)


def crawling(page: Page, servers: Corpora) -> None:
    mirror = page.directory / "mirror"
    crawl.write_mirror(mirror)
    page.environment |= servers.hub_environment | {"FOREBAY_COMMONCRAWL_URL": str(mirror)}
    page.replace |= {r"https://data\.commoncrawl\.org": str(mirror)}


def rows(page: Page, servers: Corpora) -> None:
    corpora.write_rows(page.directory)
    page.environment |= servers.s3_environment | servers.hub_environment


def formats(page: Page, servers: Corpora) -> None:
    servers.copy(page.directory / "wiki")
    page.shell("forebay convert wiki megatron --to megatron", "formats")
    for path in (page.directory / "megatron").glob("*_text_document.*"):
        path.rename(path.with_name("my_corpus_text_document" + path.suffix))


def doctor(page: Page, servers: Corpora) -> None:
    corpora.write_rows(page.directory)


def mirroring(page: Page, servers: Corpora) -> None:
    page.environment |= servers.s3_environment | servers.hub_environment
    page.replace |= {r"https://host": servers.web, r"/data/": "data/", r"0:1000": "0:10"}


def loader_explained(page: Page, servers: Corpora) -> None:
    servers.copy(page.directory / "wiki")


def planning(page: Page, servers: Corpora) -> None:
    page.environment |= servers.s3_environment


def members(page: Page, servers: Corpora, *names: str) -> None:
    """Create directories of members in a network with a DHT in this process; serve datasets `books`, `code`, `web`."""
    nodes.make_network(page.directory, ["data-node", *names], servers.dht)
    servers.copy(*(page.directory / name for name in ("books", "code", "web")))
    page.shell("forebay serve books code web --identity data-node &", "setup")


def leasing(page: Page, servers: Corpora) -> None:
    members(page, servers, "scheduler", "worker-1", "worker-2", "admin")
    page.replace |= {r"(forebay worker .*(worker-\d))": r"\1 --cache-dir cache-\2"}
    (page.directory / "train.py").write_text("import forebay\nfor batch in forebay.Loader():\n    pass\n")


def observing(page: Page, servers: Corpora) -> None:
    operating(page, servers)
    servers.copy(page.directory / "wiki")
    page.names |= {"step": consume}
    page.replace |= {"--record run &": f"--record run --listen {page.address('127.0.0.1:7480')} &"}


FOREIGN = ROOT / "tests" / "golden" / "foreign"  # Written by the other projects' own libraries.


def migrating(page: Page, servers: Corpora) -> None:
    for name, copy in {"mds_raw": "mds-train", "litdata": "chunks", "arrow": "hf-tokens"}.items():
        shutil.copytree(FOREIGN / name, page.directory / copy)
    corpora.write_archives(page.directory)
    page.environment |= servers.hub_environment | servers.s3_environment
    page.names |= {"step": consume}


def migrating_pipelines(page: Page, servers: Corpora) -> None:
    corpora.write_texts(page.directory)
    for name in ("corpus", "code"):
        for suffix in (".bin", ".idx"):
            file = FOREIGN / "megatron_u16" / f"text_document{suffix}"
            shutil.copy(file, page.directory / f"{name}_text_document{suffix}")
    (page.directory / "dt-output").mkdir()
    (page.directory / "more.jsonl.zst").rename(page.directory / "dt-output" / "00000.jsonl.zst")
    np.arange(20_000, dtype=np.uint16).__mod__(257).tofile(page.directory / "tokens.ds")
    page.environment |= servers.hub_environment
    page.names |= {"step": consume}
    page.replace |= {"seq_len=128": "seq_len=16"}


def operating(page: Page, servers: Corpora) -> None:
    members(page, servers, "leases", "node")
    page.shell(f"forebay scheduler books --identity leases --listen {page.address('10.0.0.2:7420')} &", "setup")
    servers.copy(page.directory / "acme-web")
    page.replace |= {"PEER_ID": "$(forebay network join net lost --name lost --role data | grep -o '[a-z2-7]\\{32\\}')"}


def monitoring(page: Page, servers: Corpora) -> None:
    servers.copy(page.directory / "wiki")
    operating(page, servers)


def http_api(page: Page, servers: Corpora) -> None:
    members(page, servers, "scheduler")
    page.shell(f"forebay scheduler books --identity scheduler --listen {page.address('10.0.0.2:7420')} &", "setup")


def routes(page: Page, servers: Corpora) -> None:
    nodes.make_network(page.directory, ["data-node", "worker-1"], servers.quiet_dht)
    servers.copy(page.directory / "books")
    page.shell("forebay serve books --identity data-node &", "setup")


def ledger(page: Page, servers: Corpora) -> None:
    members(page, servers, "scheduler", "gpu-3")
    page.shell(
        "forebay scheduler web --identity scheduler --state state --seq-len 512 &\n"
        "forebay worker web --identity gpu-3\n"
        "mkdir data; mv web data/web; cp state/ledger.jsonl .",
        "setup",
    )


def readers(page: Page, servers: Corpora) -> None:
    """Datasets in several slices, whose documents go on from one slice to the next."""
    corpora.write_texts(page.directory)
    nodes.make_network(page.directory, ["data-node", "scheduler", "worker-1"], servers.dht)
    page.shell(
        "forebay prepare texts books --out web --tokenizer train:400 --slice-bytes 4KiB --document-ids\n"
        "forebay serve web --identity data-node &\n"
        "forebay scheduler web --identity scheduler --state state --seq-len 16 --samples validation_fraction=0.2 "
        "--samples split=train &\n"
        "forebay worker web --identity worker-1\n"
        "cp state/ledger.jsonl .",
        "setup",
    )


SETTINGS = {
    "README.md": readme,
    "compat/README.md": dataset_guide,
    "docs/explanation/loader.md": loader_explained,
    "docs/how-to/code-mail-books.md": programming,
    "docs/how-to/commoncrawl.md": crawling,
    "docs/how-to/convert.md": rows,
    "docs/how-to/coordinate.md": dataset_guide,
    "docs/how-to/decontaminate.md": preparing,
    "docs/how-to/doctor.md": doctor,
    "docs/how-to/extend.md": preparing,
    "docs/how-to/frameworks.md": loading,
    "docs/how-to/grow.md": preparing,
    "docs/how-to/lease.md": leasing,
    "docs/how-to/load.md": loading,
    "docs/how-to/look.md": preparing,
    "docs/how-to/metrics.md": monitoring,
    "docs/how-to/migrate-pipelines.md": migrating_pipelines,
    "docs/how-to/migrate.md": migrating,
    "docs/how-to/mirror.md": mirroring,
    "docs/how-to/network.md": operating,
    "docs/how-to/observe.md": observing,
    "docs/how-to/plan.md": planning,
    "docs/how-to/prepare.md": preparing,
    "docs/how-to/scores.md": preparing,
    "docs/how-to/shared-shards.md": shared_shards,
    "docs/how-to/stream.md": streaming,
    "docs/how-to/train-by-name.md": dataset_guide,
    "docs/reference/formats.md": formats,
    "docs/reference/http-api.md": http_api,
    "docs/reference/ledger.md": ledger,
    "docs/reference/readers.md": readers,
    "docs/reference/routes.md": routes,
    "docs/tutorial/getting-started.md": getting_started,
}

IN_PROCESS = ("docs/explanation/loader.md", "docs/how-to/extend.md", "docs/how-to/load.md", "docs/how-to/stream.md")
"""Pages whose blocks start no process and choose no port."""


def page_names() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in pages() if blocks(path)]


def run_page(name: str, servers: Corpora, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all blocks of a page in a directory."""
    environment = {
        "PATH": f"{servers.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "src", ROOT / "compat/src", ROOT / "tests/support/unflushed"])),
        "HF_HOME": str(directory / ".hf"),
    }
    page = Page(ROOT / name, directory, environment=environment)
    if setting := SETTINGS.get(name):
        setting(page, servers)
    for variable, value in page.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(ROOT / "compat" / "src"))
    try:
        page.assert_runs()
    finally:
        if any(block.language == "python" for block in blocks(page.path)):
            page.names.clear()  # What it opened closes here, not in a later test.
            gc.collect()
        page.close()
