"""The Loader: batches of a dataset in a reproducible order, resumable at any of them, for NumPy, PyTorch and JAX.

Start at `loader.py`. `options.py` has its settings, `loader_plan.py` plans the run, `batch_planner.py` its steps;
`slices.py` opens or fetches slices, `samples.py` and `packing.py` say which tokens make a sample, `collate.py` builds
arrays; `torch.py` and `jax.py` are the only framework code.
"""
