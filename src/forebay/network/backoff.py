"""How long to wait before a request is made again: one rule for all retry loops of the package."""

import contextlib
import random
import re
from email.utils import parsedate_to_datetime


def backoff_s(
    tried: int, first_s: float, max_s: float, asked_s: float = 0.0, chance: random.Random | None = None
) -> float:
    """Seconds to wait after `tried` failed attempts: `first_s`, doubled each time up to `max_s`, with jitter.

    The jitter (a factor from 0.5 to 1.5) spreads clients that failed together. `asked_s`, what a server asked for, is
    the least. `chance` draws the jitter, for those who must draw the same again.
    """
    uniform = random.uniform if chance is None else chance.uniform
    doubled_s = first_s * 2.0 ** min(tried - 1, 60)
    return max(asked_s, min(max_s, doubled_s) * uniform(0.5, 1.5))


def retry_after_s(text: str, now: float) -> float | None:
    """Seconds that a Retry-After header asks to wait, given as seconds or as a date (RFC 9110, 10.2.3); None if it is
    neither. `now` is Unix time."""
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError, IndexError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    return None
