"""The fenced blocks of pages that need no process run, one after another. `slow/docs` runs all other pages."""

from collections.abc import Iterator

import pytest

from support.corpora import Corpora
from support.page_settings import IN_PROCESS, run_page

pytestmark = pytest.mark.xdist_group("docs")  # The pages share their servers.


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Iterator[Corpora]:
    result = Corpora(tmp_path_factory.mktemp("corpora"))
    yield result
    result.close()


@pytest.mark.parametrize("name", IN_PROCESS)
def test_every_block_runs(name, corpora, tmp_path, monkeypatch):
    run_page(name, corpora, tmp_path, monkeypatch)
