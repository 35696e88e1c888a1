"""How to install what an extra of this package brings: the one place that hints in messages come from."""

from importlib import metadata


def install_command(extra: str) -> str:
    """A command that installs the packages of `extra`, however this package itself was installed.

    It names the packages, read from the metadata of the installation: `pip install 'pillow>=10'`.
    """
    try:
        requirements = metadata.requires("forebay") or []
    except metadata.PackageNotFoundError:
        requirements = []
    marker = f'extra == "{extra}"'
    names = [line.partition(";")[0].strip() for line in requirements if marker in line.replace("'", '"')]
    return f"pip install {' '.join(repr(name) for name in names)}" if names else f"pip install '.[{extra}]'"
