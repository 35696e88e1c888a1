"""Runs of chunks, from origins or peers, verified as they come, and cached within a budget of bytes.

Start at `engine.py` (the connections, the choice of a source, verification), `cache.py` (the directory of chunks) and
`feed.py` (what coming steps need: pinned, joined into requests, fetched by first use). Imports `storage` and `order`.
"""
