"""Every error that Forebay raises on purpose.

    ForebayError
    ├── DatasetError      a dataset, slice or input file is missing, malformed or not what its hash says
    │   ├── PrepareError  raw input cannot become a dataset
    │   │   ├── CorruptInputError     the bytes of an input are damaged or end early
    │   │   └── UnreadableInputError  nothing of an input can be read
    │   ├── UnknownDatasetError      nothing has that name (also a FileNotFoundError)
    │   └── AccessError              its terms or its owner let nobody in without a token (also a PermissionError)
    ├── NetworkError      a peer cannot be found, reached or trusted
    │   ├── ProtocolViolation   what came over the wire is not what the protocol allows
    │   ├── IntegrityError      bytes from a peer do not match their hash
    │   └── DownloadError       the hub cannot be reached (also a ConnectionError)
    ├── LeaseError        a lease is unknown, expired or somebody else's
    ├── LedgerError       the ledger's chain is broken or does not prove what it should
    ├── StateError        a saved state does not belong to what it is loaded into
    └── UsageError        the caller asked for something that cannot be
        └── MissingPackageError  what was asked needs a package that is not installed (also an ImportError)

A message says what failed, what was expected, what was found and where, and the next step.
"""


class ForebayError(Exception):
    """The root: catch it to catch all of Forebay's own errors."""


class DatasetError(ForebayError):
    """A dataset, slice or input file is missing, malformed or not what its hash says."""


class PrepareError(DatasetError):
    """Raw input cannot become a dataset."""


class CorruptInputError(PrepareError):
    """The bytes of an input are damaged or end early at this place; everything before it was read."""


class UnreadableInputError(PrepareError):
    """Nothing of an input can be read; the other inputs are not affected."""


class UnknownDatasetError(DatasetError, FileNotFoundError):
    """Nothing has that name, here or on the hub; `except FileNotFoundError` catches it, too.

    Attributes:
        dataset: The name. `endpoint`: the hub that was asked.
    """

    dataset: str = ""
    endpoint: str = ""


class AccessError(DatasetError, PermissionError):
    """The hub gives a dataset only to those who accepted its terms; `except PermissionError` catches it, too.

    Attributes:
        dataset: The name. `endpoint`: the hub that was asked.
    """

    dataset: str = ""
    endpoint: str = ""


class NetworkError(ForebayError):
    """A peer cannot be found, reached or trusted."""


class ProtocolViolation(NetworkError):  # noqa: N818 - a violation is what it is, and reads so
    """What came over the wire is not what the protocol allows."""


class IntegrityError(NetworkError):
    """Bytes from a peer do not match their hash."""


class DownloadError(NetworkError, ConnectionError):
    """A dataset cannot be downloaded, as the hub cannot be reached; `except ConnectionError` catches it, too.

    Attributes:
        dataset: The name. `endpoint`: the hub that was asked. `attempts`, `elapsed_s`: how often, for how long.
    """

    dataset: str = ""
    endpoint: str = ""
    attempts: int = 0
    elapsed_s: float = 0.0


class LeaseError(ForebayError):
    """A lease is unknown, expired or somebody else's."""


class LedgerError(ForebayError):
    """The ledger's chain is broken, or does not prove what it should."""


class StateError(ForebayError):
    """A saved state does not belong to what it is loaded into."""


class UsageError(ForebayError):
    """The caller asked for something that cannot be."""


class MissingPackageError(UsageError, ImportError):
    """What was asked needs a package that is not installed; `except ImportError` catches it, too."""


def install_command(extra: str) -> str:
    """A command that installs the packages of `extra`, however this package itself was installed.

    It names the packages, read from the metadata of the installation: `pip install 'pillow>=10'`.
    """
    from importlib import metadata  # slow to import, and needed where something is missing only

    try:
        requirements = metadata.requires("forebay") or []
    except metadata.PackageNotFoundError:
        requirements = []
    marker = f'extra == "{extra}"'
    names = [line.partition(";")[0].strip() for line in requirements if marker in line.replace("'", '"')]
    return f"pip install {' '.join(repr(name) for name in names)}" if names else f"pip install '.[{extra}]'"
