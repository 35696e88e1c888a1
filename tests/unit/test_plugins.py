"""Plug-ins: found by entry point or by module and name, with an error that names what is missing."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import plugins
from forebay.errors import UsageError
from forebay.storage.origins import open_origin


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Path]:
    """An installed package with one plug-in, as `pip install` leaves it."""
    (tmp_path / "my_plugins.py").write_text(
        "class Mine:\n    pass\n\nbroken = 1\n\ndef open_mine(url, timeouts, **settings):\n    return url, settings\n"
    )
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    metadata = tmp_path / "my_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[forebay.filters]\nmine=my_plugins:Mine\nbroken=my_broken:x\n[forebay.origins]\nmine=my_plugins:open_mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins.plugins.cache_clear()
    yield tmp_path
    plugins.plugins.cache_clear()
    for name in ("my_plugins", "my_broken"):
        sys.modules.pop(name, None)


def test_a_plug_in_is_found_by_its_entry_point_or_by_module_and_name(package):
    assert plugins.load_plugin("forebay.filters", "mine").__name__ == "Mine"
    assert plugins.load_plugin("forebay.filters", "my_plugins:Mine.__name__", allow_code=True) == "Mine"
    assert plugins.load_plugin("forebay.dedup", "json:loads", allow_code=True) is json.loads
    assert open_origin("mine://x", identity="y") == ("mine://x", {"identity": "y"})


@pytest.mark.parametrize(
    "name, message",
    [
        ("none", r"expected an entry point of forebay\.filters \(broken, mine\)"),
        ("broken", "cannot import 'broken': ZeroDivisionError"),
        ("my_plugins:Other", "expected module:Name, got 'my_plugins:Other'"),
        ("no.such:Thing", "cannot import 'no.such:Thing': ModuleNotFoundError"),
    ],
)
def test_a_wrong_name_is_named(package, name, message):
    with pytest.raises(UsageError, match=message):
        plugins.load_plugin("forebay.filters", name, allow_code=True)
