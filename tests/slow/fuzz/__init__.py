"""Bytes from strangers against every reader of the network: see engine, targets and `python -m tests.slow.fuzz`."""
