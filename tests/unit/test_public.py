"""The names of the package."""

import pytest

import forebay


def test_the_names():
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
