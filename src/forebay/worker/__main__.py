"""The process of `python -m forebay.worker`."""

from forebay.processes import run_command


def _command() -> int:
    from forebay.worker.flags import main

    return main()


if __name__ == "__main__":
    run_command(_command)
