"""The process of `python -m forebay.worker`."""

from forebay.__main__ import run

if __name__ == "__main__":
    run("forebay.worker.flags")
