"""A process with a Loader over leases: prints each batch in a line, before it asks for the next."""

from __future__ import annotations

import json
import sys
import time

from forebay import Loader, NetworkOptions


def main() -> None:
    settings = json.loads(sys.argv[1])
    network = NetworkOptions(settings["node"], receipt_s=settings["receipt_s"], patience_s=30.0)
    with Loader(
        settings["url"], seq_len=settings["seq_len"], batch_size=settings["batch_size"],
        scheduler=settings["scheduler"], network=network, cache_dir=settings["cache"],
        cache_bytes=1 << 20, packing=settings.get("packing", "concat"), document_masks=True,
    ) as loader:  # fmt: skip
        for batch in loader:
            print(
                json.dumps([batch.sample_ids.tolist(), batch.inputs.tolist(), batch.document_ids.tolist()]), flush=True
            )
            time.sleep(settings.get("pause_s", 0.0))
    print(json.dumps("done"), flush=True)


if __name__ == "__main__":
    main()
