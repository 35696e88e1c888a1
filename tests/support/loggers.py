"""A mixture and a text stream whose figures go to a real logger without a network, and what it then has on disk.

Run as a program: `python loggers.py wandb|tensorboard|mlflow FOLDER` prints {"loader": {step: {name: value}}, …}.
"""

import json
import struct
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import forebay
from forebay.load.sources import Mixture
from support.feeding import make_dataset
from support.preparing import write_jsonl

Steps = dict[int, dict[str, float]]


def sources(folder: Path) -> dict:
    write_jsonl(folder / "text.jsonl", [f"line {i} of text" for i in range(400)])
    first, second = (make_dataset(folder / name, 1, 400, 10) for name in "ab")
    mixture = Mixture({"s3://bucket/a b": first, "b": second}, {"s3://bucket/a b": 3, "b": 1})
    return {
        "loader": forebay.Loader(mixture, seq_len=10, batch_size=8, steps=20),
        "stream": forebay.TextStream(folder / "text.jsonl", tokenizer="bytes", seq_len=16, batch_size=4, steps=20),
    }


def run(source: Any, callback: forebay.callbacks.Callback) -> None:
    source.measure_mfu(6e6, 1e12)
    source.add_callback(callback, every_steps=10)
    for _ in source:
        pass
    source.close()


def with_wandb(source: Any, folder: Path) -> Steps:
    import wandb
    from wandb.proto import wandb_internal_pb2

    with wandb.init(mode="offline", dir=str(folder), project="test") as run_:
        run(source, forebay.callbacks.wandb(run_))
    wandb.teardown()  # Its service has then written the file to its end.
    steps = {}
    for record in _records((next(folder.glob("wandb/offline-run-*/*.wandb"))).read_bytes()):
        message = wandb_internal_pb2.Record.FromString(record)
        if message.HasField("history"):
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in message.history.item}
            steps[int(items.pop("_step"))] = {name: v for name, v in items.items() if name.startswith("data/")}
    return steps


def _records(data):
    """The records of LevelDB's log format, in blocks of 32 KiB, after W&B's 7 bytes."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        if 32768 - offset % 32768 < 7 or kind == 0:
            offset += 32768 - offset % 32768
            continue
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # The whole record, or its last part.
            yield record
            record = b""


def with_tensorboard(source: Any, folder: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        run(source, forebay.callbacks.tensorboard(writer))
    events = EventAccumulator(str(folder)).Reload()
    steps = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps[event.step][tag] = event.value
    return steps


def with_mlflow(source: Any, folder: Path) -> Steps:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("test")
    with mlflow.start_run() as run_:
        run(source, forebay.callbacks.mlflow())
    client, steps = mlflow.MlflowClient(), defaultdict[int, dict[str, float]](dict)
    for name in client.get_run(run_.info.run_id).data.metrics:
        for metric in client.get_metric_history(run_.info.run_id, name):
            steps[metric.step][name] = metric.value
    return steps


if __name__ == "__main__":
    logger, root = globals()[f"with_{sys.argv[1]}"], Path(sys.argv[2])
    result = {}
    for kind, source in sources(root).items():
        (root / kind).mkdir()
        result[kind] = logger(source, root / kind)
    print(json.dumps(result))
