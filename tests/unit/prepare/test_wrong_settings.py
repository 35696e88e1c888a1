"""Settings of stages and of deduplication that cannot be: each is named."""

import pkgutil

import pytest

from forebay.errors import UsageError
from support.paths import read_cases


@pytest.mark.parametrize(
    "kind, settings, message",
    [(kind, *case) for kind, cases in read_cases("wrong_settings").items() for case in cases],
)
def test_a_setting_that_cannot_be_is_named(kind, settings, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        pkgutil.resolve_name(kind)(**settings)
