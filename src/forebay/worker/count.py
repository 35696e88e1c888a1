"""The command of `forebay worker` without another: reads all that it can lease, and counts which token follows which.

Prints {"step", "loss"} of tokens at most twice a second. SIGTERM and SIGINT end it with status 0.
"""

import contextlib
import json
import signal
import sys
import time

from forebay.errors import ForebayError
from forebay.load.batch import TokenBatch
from forebay.load.loader import Loader
from forebay.worker.trainer import CountTrainer

_PRINT_S = 0.5


def main() -> None:
    """Read batches until nothing is left to lease."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), Loader() as loader:
        trainer = CountTrainer(loader.dataset.manifest.vocab_size or 1 << 16)
        printed_at = 0.0
        for batch in loader:
            if isinstance(batch, TokenBatch):
                loss = trainer.step(batch.inputs, batch.labels)
                if time.monotonic() - printed_at > _PRINT_S:
                    printed_at = time.monotonic()
                    print(json.dumps({"step": batch.step + 1, "loss": round(loss, 4)}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        sys.exit(f"forebay: {error}")
