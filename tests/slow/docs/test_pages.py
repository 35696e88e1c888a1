"""Every fenced block of README and docs runs, or is `text`, as a user types it: servers are processes at free ports.

A port may be taken by another program between the moment it is chosen and the start of its server.
"""

from collections.abc import Iterator

import pytest

from support.corpora import Corpora
from support.page_settings import IN_PROCESS, page_names, run_page
from support.runner import make_commands

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
