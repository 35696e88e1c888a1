"""The process of the command `forebay`, and of `python -m forebay`."""

from typing import NoReturn

from forebay.processes import run_command


def _command() -> int:
    from forebay.cli import main

    return main()


def run() -> NoReturn:
    """Run the command of this process."""
    run_command(_command)


if __name__ == "__main__":
    run()
