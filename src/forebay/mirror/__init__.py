"""Copy a dataset or its shards to a directory or a bucket: verified, resumable, whole or in part.

`dataset.py` copies datasets (from any origin or from a swarm), `shards.py` foreign token shards. Imported by
`cli` only.
"""
