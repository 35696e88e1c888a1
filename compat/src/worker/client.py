"""See `forebay.worker.client`; `python -m worker.client` is `python -m forebay.worker`."""

from forebay.worker.client import TrainingReport, WorkerClient

__all__ = ["TrainingReport", "WorkerClient"]

if __name__ == "__main__":
    from forebay.processes import run_command
    from forebay.worker.flags import main

    run_command(main)
