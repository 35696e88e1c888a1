"""See `millrace.worker.client`; `python -m worker.client` is `python -m millrace.worker`."""

import sys

from millrace.worker.client import TrainingReport, WorkerClient

__all__ = ["TrainingReport", "WorkerClient"]

if __name__ == "__main__":
    from millrace.worker.__main__ import main

    sys.exit(main())
