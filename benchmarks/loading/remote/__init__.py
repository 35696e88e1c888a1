"""The loader from a remote origin: `python -m benchmarks.loading.remote [PART…]`; each part is a module."""
