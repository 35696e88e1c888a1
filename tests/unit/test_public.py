"""The public door: its names, and how little opening it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forebay


def test_the_names() -> None:
    assert set(forebay.__all__) == {
        "CacheOptions", "DocumentSubset", "ForebayError", "Loader", "Mixture", "NetworkOptions", "OrderOptions",
        "RowBatch", "SampleOptions", "SharedShardedDatasetManager", "TextStream", "TokenBatch", "__version__",
        "callbacks", "open_dataset", "prepare_dataset", "serve_dashboard", "text_filter",
    }  # fmt: skip
    assert set(forebay.__all__) <= set(dir(forebay))
    for name in forebay.__all__:
        assert getattr(forebay, name) is not None
    assert issubclass(forebay.ForebayError, Exception)
    with pytest.raises(AttributeError, match="no_such_name"):
        forebay.no_such_name  # noqa: B018


def test_importing_is_light() -> None:
    code = (
        "import sys, time; began = time.process_time(); import forebay; took = time.process_time() - began\n"
        "heavy = {'numpy', 'pyarrow', 'torch', 'tokenizers', 'libtorrent', 'cryptography'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(took)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5  # CPU seconds: about 10 ms; a clock on the wall tells how busy the machine is.
