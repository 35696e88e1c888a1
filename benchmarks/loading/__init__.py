"""The loader beside its peers: `python -m benchmarks.loading [PART…]`; each part is a module with `measure`."""
