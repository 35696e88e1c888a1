"""The list of shards that whoever publishes them puts beside them: names, sizes and hashes."""

from __future__ import annotations

import json
import re

from forebay.errors import DatasetError

LIST_FILE = "shards.json"
LIST_FORMAT = "forebay shards 2"


def read_list(data: bytes, where: str) -> dict[int, str]:
    """The sha256 of each shard's ids. DatasetError if it is malformed."""
    try:
        body = json.loads(data)
        if body["format"] != LIST_FORMAT:
            raise ValueError(f"expected format {LIST_FORMAT!r}, got {body['format']!r}")
        rows = [(str(row["tokens"]["name"]), str(row["ids"]["sha256"])) for row in body["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{where}: expected a list of shards, got: {error!r}. Publish the shards again.") from error
    return {int(found[1]): sha256 for name, sha256 in rows if (found := re.search(r"_(\d{6})\.npy$", name))}
