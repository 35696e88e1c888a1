"""The process of the command `forebay`, and of `python -m forebay`."""

from typing import NoReturn

from forebay.processes import run_command


def run() -> NoReturn:
    """Run the command of this process."""
    run_command("forebay.cli")


if __name__ == "__main__":
    run()
