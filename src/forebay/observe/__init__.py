"""Reports about runs: plans before them, progress during them, and who used what after them.

Reads public interfaces of `load`, `ledger` and `order`; imported by `cli` only.
"""
