"""Formats of other packages: the example is found by its entry point; what cannot be loaded or clashes is an error."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.formats import base as registry
from forebay.formats.detect import detect
from forebay.plugins import plugins
from support.paths import ROOT
from support.preparing import read_records

PAGE = "---\ntitle: A page\nurl: https://example.org/a\n---\nThe text of it.\n"


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder on the path in which a package with entry points can be put."""
    examples = ROOT / "examples"
    for folder in (examples, tmp_path / "site"):
        monkeypatch.syspath_prepend(str(folder))

    def forget():
        plugins.cache_clear()
        registry.get_format.cache_clear()
        importlib.invalidate_caches()

    forget()
    yield tmp_path / "site"
    forget()
    sys.modules.pop("markdown_format", None)


def install(site: Path, *lines: str):
    for i, line in enumerate(lines):
        info = site / f"package{i}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package{i}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{line}\n")
    plugins.cache_clear()
    importlib.invalidate_caches()


def test_the_example_is_detected_and_read(installed, tmp_path):
    install(installed, "markdown = markdown_format:Markdown")
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.md").write_text(PAGE)
    (data / "b.mdoc").write_text(PAGE.replace("A page", "Another").replace("\n---\n", "\n"))
    (data / "c.txt").write_text("plain text")
    assert registry.format_names()[-1] == "markdown"
    assert detect(data / "a.md").format == "markdown"
    assert [(record.text, record.url, record.problem) for record in read_records(data)] == [
        ("A page\n\nThe text of it.", "https://example.org/a", ""),
        ("", "", "front matter without an end"),
        ("plain text", "", ""),
    ]
    with pytest.raises(UsageError, match="format markdown: expected one that can be written from a table"):
        registry.get_format("markdown").write_rows(None, None, None)


@pytest.mark.parametrize(
    "lines, message",
    [
        (["markdown = no_such_module:Markdown"], "cannot import 'markdown': ModuleNotFoundError"),
        (["other = markdown_format:Markdown"], "of that name, got Markdown 'markdown'"),
    ],
)
def test_a_package_that_does_not_fit_is_named(installed, lines, message):
    install(installed, *lines)
    with pytest.raises(UsageError, match=message):
        [*registry.formats()]


def test_an_unknown_format_names_those_there_are():
    with pytest.raises(UsageError, match="expected one of megatron, npy"):
        registry.get_format("excel")
