"""Preparation beside its peers: `python -m benchmarks.prepare [NAME…]`; each part is a program of its own as well."""
