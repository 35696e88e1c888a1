"""See `millrace.load.shards`."""

from millrace.load.shards import SharedShardedDatasetManager

__all__ = ["SharedShardedDatasetManager"]
