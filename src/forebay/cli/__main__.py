"""`python -m forebay.cli` is `forebay`."""

import forebay.__main__  # noqa: F401
