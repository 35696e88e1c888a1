"""Errors that Forebay raises on purpose, all of one base class.

A message says what failed, what was expected, what was received, where, and the next step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
"""The exceptions that reading a value of an unexpected shape raises."""


class ForebayError(Exception):
    """Base class of all of Forebay's own errors."""


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


class MissingPackageError(UsageError, ImportError):
    """An optional package is not installed; `except ImportError` catches it, too."""


def install_command(extra: str) -> str:
    """The command that installs the packages of `extra` by name: `pip install 'pillow>=10'`."""
    from importlib import metadata  # slow to import and needed only for this message

    try:
        requirements = metadata.requires("forebay") or []
    except metadata.PackageNotFoundError:
        requirements = []
    marker = f'extra == "{extra}"'
    names = [line.partition(";")[0].strip() for line in requirements if marker in line.replace("'", '"')]
    return f"pip install {' '.join(repr(name) for name in names)}" if names else f"pip install '.[{extra}]'"


@contextmanager
def package_for(user: str, package: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """A block that imports `package`; without it MissingPackageError says who needs it and how it is installed."""
    try:
        yield
    except ImportError as error:
        command = install_command(extra)
        raise MissingPackageError(f"{user} needs {package}. Install it with: {command}{otherwise}") from error
