"""JAX on four devices (of the CPU, if there are no others): global arrays, sharded over the mesh's data axis.

Run: python examples/jax_train.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

try:
    import jax
except ImportError:
    sys.exit("jax_train: jax is not installed. Run: pip install jax")
import jax.numpy as jnp
import numpy as np
from inference import call, exit_on_sigterm
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import forebay

PREPARE = ["prepare", __file__, "--tokenizer", "bytes", "--slice-bytes", "4096"]


@jax.jit
def step(weights: jax.Array, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a bigram model: a table of logits."""

    def loss_of(weights: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(weights[inputs])
        has_label = labels >= 0  # -100: there is no next token.
        picked = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -(picked * has_label).sum() / has_label.sum()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 30 * gradient, loss


def main() -> None:
    exit_on_sigterm()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with tempfile.TemporaryDirectory() as directory:
        dataset = Path(directory) / "dataset"
        call(*PREPARE, "--out", dataset)
        loader = forebay.Loader(dataset, seq_len=32, global_batch_size=8, seed=1, epochs=2)
        weights, losses = jnp.zeros((512, 512)), []
        for batch in loader.to_jax(sharding):
            weights, loss = step(weights, batch.inputs, batch.labels)
            losses.append(loss)
        print(f"{len(jax.devices())} devices, {len(losses)} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"the next epoch is {loader.epoch}, after step {loader.step}")


if __name__ == "__main__":
    main()
