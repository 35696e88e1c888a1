"""The names of the package, and its optional packages."""

import sys

import pytest

import forebay
from support.feeding import make_dataset


def test_the_names():
    assert set(forebay.__all__) <= set(dir(forebay))
    for name in forebay.__all__:
        assert getattr(forebay, name) is not None
    assert issubclass(forebay.ForebayError, Exception)
    with pytest.raises(AttributeError, match="no_such_name"):
        forebay.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_missing_package_is_told_with_its_extra(tmp_path, monkeypatch, name: str):
    loader = forebay.Loader(make_dataset(tmp_path / "x", 1, 10, 4), seq_len=4, batch_size=2)
    monkeypatch.delitem(sys.modules, f"forebay.load.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"to_{name} needs {name}\. Install it with: pip install 'forebay\[{name}\]'"
    ):
        getattr(loader, f"to_{name}")()
