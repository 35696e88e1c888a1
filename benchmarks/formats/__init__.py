"""One corpus in each format: `python -m benchmarks.formats`."""
