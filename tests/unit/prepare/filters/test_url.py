"""Addresses on lists."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from forebay.errors import PrepareError, UsageError
from forebay.prepare.documents import SCHEMA
from forebay.prepare.filters.url import Url


def reasons(stage: Url, urls: list[str]) -> list[str]:
    count = len(urls)
    columns = [list(range(count)), [""] * count, urls, [False] * count, ["text"] * count]
    batch = pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA)
    return ["" if i < 0 else stage.reasons[i] for i in stage.apply(batch).drop]


def test_hosts_and_words(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# bad ones\nbad.org\nEvil.example.  # too\n\n")
    (tmp_path / "words").write_text("casino\n")
    stage = Url(hosts=(str(tmp_path / "hosts"),), words=(str(tmp_path / "words"),))
    urls = {
        "https://bad.org/x": "url_host",
        "http://www.BAD.org:8080/": "url_host",
        "https://notbad.org/": "",
        "https://evil.example./": "url_host",
        "https://good.org/the-Casino_offers": "url_word",
        "https://good.org/casinos": "",
        "": "",
        "http://[broken": "",
        "https://" + "a." * 100_000 + "org": "",
    }
    assert reasons(stage, list(urls)) == list(urls.values())
    assert stage.files() == (str(tmp_path / "hosts"), str(tmp_path / "words"))


def test_wrong_lists(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hosts: expected files"):
        Url()
    with pytest.raises(PrepareError, match="none: expected a list"):
        reasons(Url(hosts=(str(tmp_path / "none"),)), ["https://a.b"])
