"""One rank of a run on shared shards, as a process: writes a line of JSON for each batch, and its statistics.

python shard_rank.py OUT '{"steps": 12, ...settings of the manager}'
"""

import hashlib
import json
import logging
import sys
import time
from pathlib import Path

import forebay.load.shard_cache as cache_module
from forebay.load.shards import SharedShardedDatasetManager


def main(out: str, text: str) -> None:
    settings = json.loads(text)
    steps, start = settings.pop("steps", 4), settings.pop("start", 0)
    if settings.pop("apart", False):
        cache_module.MIN_PROCESS_BYTES = 0  # as if the shards were large
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with Path(out).open("a") as file, SharedShardedDatasetManager(**settings) as shards:

        def write(**fields):
            file.write(json.dumps(fields) + "\n")
            file.flush()

        for batch_ in shards.batches(start, start + steps, batch_size=8):
            data = shards.active_dataset
            assert data is not None and batch_.inputs is not None
            kind = data[0].dtype
            own = [
                int.from_bytes(hashlib.blake2b(row.astype(kind).tobytes(), digest_size=8).digest(), "little")
                for row in batch_.inputs
            ]
            assert own == data.sample_ids[batch_.sample_ids].tolist()
            write(step=batch_.step, shard=data.index, ids=own)
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
