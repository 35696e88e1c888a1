"""Functions for `add_callback` of a Loader or TextStream, which log its metrics as `data/NAME`: one for each logger.

loader.add_callback(forebay.callbacks.wandb(wandb.init()), every_steps=50)
"""

import re
from typing import Any

from forebay.errors import MissingPackageError
from forebay.load.stats import Callback


def wandb(run: Any) -> Callback:
    """Log to a run of Weights & Biases, as `wandb.init()` returns it."""
    return lambda metrics, step: run.log(_named(metrics), step=step)


def tensorboard(writer: Any) -> Callback:
    """Log to a `torch.utils.tensorboard.SummaryWriter`."""
    add_scalar = writer.add_scalar  # What is no writer fails here, not in the loop.

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in _named(metrics).items():
            add_scalar(name, value, step)

    return log


def mlflow() -> Callback:
    """Log to the active run of MLflow, with `_` for characters of a dataset's name that it refuses.

    Raises MissingPackageError without MLflow.
    """
    try:
        import mlflow as module  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingPackageError("mlflow: expected the package mlflow, got none. Run: pip install mlflow") from error
    log_metrics = module.log_metrics

    def log(metrics: dict[str, float], step: int) -> None:
        log_metrics(_named({re.sub(r"[^\w.-]", "_", name): value for name, value in metrics.items()}), step=step)

    return log


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {f"data/{name}": value for name, value in metrics.items()}
