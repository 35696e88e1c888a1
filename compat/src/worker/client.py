"""See `forebay.worker.client`; `python -m worker.client` is `python -m forebay.worker`."""

import sys

from forebay.worker.client import TrainingReport, WorkerClient

__all__ = ["TrainingReport", "WorkerClient"]

if __name__ == "__main__":
    from forebay.worker.__main__ import main

    sys.exit(main())
