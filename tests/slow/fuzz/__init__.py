"""Bytes from strangers against every reader of the network: see engine and targets."""
