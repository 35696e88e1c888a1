"""A worker's leases: the messages between worker and scheduler, the state of leases, and the fetching of slices.

`scheduler` grants leases; `load` makes batches of their samples.
"""
