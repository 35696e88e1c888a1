"""What a command prints, without what a terminal would obey: one filter for results, errors, logs and progress.

Names, reasons and error messages come from other members' processes and from files: an escape sequence in one could
rename a window, hide lines or type for the user.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Control characters (C0, C1) but line feed and tab, and unpaired surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNSAFE_BUT_RETURN = re.compile(_UNSAFE.pattern.replace("\x0b-", "\x0b\x0c\x0e-"))


def printable(text: str, *, allow_return: bool = False) -> str:
    """The text with each character that a terminal may obey as its escape: `\\x1b`. With `allow_return` carriage
    returns stay as they are: a progress line begins anew with one."""
    pattern = _UNSAFE_BUT_RETURN if allow_return else _UNSAFE
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Filter:
    """A text stream that writes through `printable`; all else is the stream's own."""

    def __init__(self, stream: TextIO, allow_return: bool) -> None:
        self._stream = stream
        self._allow_return = allow_return

    def write(self, text: str) -> int:
        self._stream.write(printable(text, allow_return=self._allow_return))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def filtered_streams() -> Iterator[None]:
    """While the block runs, stdout and stderr are filtered. Bytes written to their `buffer` are not."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = _Filter(stdout, False)
    sys.stderr = _Filter(stderr, True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
