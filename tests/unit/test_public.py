"""The names of the package, every option of it, and its optional packages."""

import inspect
import runpy
import sys
from pathlib import Path

import pytest

import forebay
from forebay.errors import UsageError
from forebay.stream import StreamOptions
from support.feeding import make_dataset
from support.preparing import prepare

ROOT = Path(__file__).resolve().parents[2]


def test_the_names():
    assert set(forebay.__all__) <= set(dir(forebay))
    for name in forebay.__all__:
        assert getattr(forebay, name) is not None
    assert issubclass(forebay.ForebayError, Exception)
    with pytest.raises(AttributeError, match="no_such_name"):
        forebay.no_such_name  # noqa: B018


def test_each_option_has_an_entry_that_says_what_it_serves():
    script = runpy.run_path(str(ROOT / "scripts/options.py"))
    options, served = script["places"](), script["served"]()
    assert {path: set(names) for path, names in served.items()} == {path: set(names) for path, names in options.items()}
    assert all(need for needs in served.values() for need in needs.values())


SIZES = {
    (kind, name)
    for kind in (*(getattr(forebay, name) for name in forebay.__all__), StreamOptions)
    if inspect.isclass(kind) or inspect.isfunction(kind)
    for name in (
        () if issubclass(type(kind), type) and issubclass(kind, Exception) else inspect.signature(kind).parameters
    )
    if "_bytes" in name
}


def test_each_size_may_be_text(tmp_path):
    names = {(kind.__name__, name) for kind, name in SIZES}
    assert names >= {("Loader", "cache_bytes"), ("prepare_dataset", "slice_bytes"), ("StreamOptions", "shuffle_bytes")}
    (tmp_path / "a.txt").write_text("some text " * 20_000)
    out = tmp_path / "d"
    assert prepare([tmp_path / "a.txt"], out, slice_bytes="64KiB").slices == 7
    for kind, name in SIZES:
        if kind is forebay.prepare_dataset:
            continue
        arguments = {"dataset": str(out), "batch_size": 1, "seq_len": 8, "cache_dir": tmp_path / "c"}
        arguments = arguments if kind is forebay.Loader else {}
        created = kind(**arguments, **{name: "96 MiB"})
        assert getattr(created, name) == 96 << 20
        with pytest.raises(UsageError, match=f"{name}: 'much' is not a size"):
            kind(**arguments, **{name: "much"})


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_missing_package_is_told_with_its_extra(tmp_path, monkeypatch, name):
    loader = forebay.Loader(make_dataset(tmp_path / "x", 1, 10, 4), seq_len=4, batch_size=2)
    monkeypatch.delitem(sys.modules, f"forebay.load.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"to_{name} needs {name}\. Install it with: pip install 'forebay\[{name}\]'"
    ):
        getattr(loader, f"to_{name}")()
