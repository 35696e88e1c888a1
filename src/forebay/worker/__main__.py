"""The process of `python -m forebay.worker`."""

from forebay.processes import run_command

if __name__ == "__main__":
    run_command("forebay.worker.flags")
