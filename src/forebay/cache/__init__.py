"""A directory of verified slices within a disk budget, and the plan of what to fetch and evict.

Start at `cache.py` (the directory) and `prefetch.py` (the thread that fetches what a run needs next); `planner.py`
decides and has no thread. Imported by `load` and `worker`; imports `storage`.
"""
