"""See `forebay.load.shards`."""

from forebay.load.shards import SharedShardedDatasetManager

__all__ = ["SharedShardedDatasetManager"]
