"""Every fenced block of README and docs runs, or is `text`, as a user types it: servers are processes at free ports.

A port may be taken by another program between the moment it is chosen and the start of its server.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from forebay.prepare.progress import read_progress
from support.corpora import Corpora
from support.page_settings import IN_PROCESS, page_names, run_page
from support.runner import ROOT, blocks, make_commands

pytestmark = pytest.mark.xdist_group("docs")  # The pages share their servers.


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Iterator[Corpora]:
    result = Corpora(tmp_path_factory.mktemp("corpora"))
    make_commands(result.root / "bin")
    yield result
    result.close()


@pytest.mark.parametrize("name", [name for name in page_names() if name not in IN_PROCESS])
def test_every_block_runs(name, corpora, tmp_path, monkeypatch):
    run_page(name, corpora, tmp_path, monkeypatch)


def test_the_blocks_of_a_page_are_a_script_with_several_processes(tmp_path):
    """As a reader's file, without a guard: it runs once, though tasks run in processes of their own."""
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        lines = (f'{{"text": "{name} {i} Has Words\\nin lines", "url": "http://{name}.org/{i}"}}\n' for i in range(500))
        (tmp_path / "texts" / f"{name}.jsonl").write_text("".join(lines))
    page = blocks(ROOT / "docs/how-to/extend.md")
    program = "\n\n".join(block.code for block in page if block.language == "python")
    (tmp_path / "page.py").write_text(f'{program}\nprint("the end")\n')
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0 and run.stdout.count("the end") == 1, run.stderr
    records = [read_progress(tmp_path / out) for out in ("filtered", "capitals", "by-url", "own-objects")]
    assert all(record["num_workers"] > 1 and record["tasks"] > 1 for record in records)
