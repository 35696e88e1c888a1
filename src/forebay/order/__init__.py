"""The order of samples: (seed, epoch, step) -> samples, as pure functions of integers. NumPy only, no input or output.

Start at `plan.py` (`Order`: one dataset), then `run.py` (`Run`: epochs, batch sizes and mixtures of several).
`bijection.py` is the keyed permutation under both.
"""
