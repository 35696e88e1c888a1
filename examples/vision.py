"""Images to slices to a model: pixels U8 become F16, labels I64; a classifier learns them in plain NumPy.

    python examples/vision.py [IMAGES…]

IMAGES: a .npz of images and labels, or a folder of classes (which needs pillow). Without, drawn here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from inference import exit_on_sigterm

import forebay

CONVERT = [sys.executable, "-m", "forebay", "convert", "--to", "forebay", "--slice-bytes", "128KiB"]
CONVERT += ["--set", "tensors.images=f16", "--set", "tensors.labels=i64"]


def draw(folder: Path, num_images: int = 2000) -> Path:
    """A .npz of images in which one of four bars is lit, under noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, num_images).astype(np.uint8)
    images = rng.integers(0, 120, (num_images, 1, 12, 12), dtype=np.uint8)
    for image, label in zip(images, labels):
        image[..., 3 * label : 3 * label + 3] += 100
    np.savez(folder / "drawn.npz", images=images, labels=labels)
    return folder / "drawn.npz"


def main(inputs: list[str]) -> None:
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as directory:
        source = Path(inputs[0]) if inputs else draw(Path(directory))
        dataset = Path(directory) / "dataset"
        if status := subprocess.run([*CONVERT, source, dataset], stdout=subprocess.DEVNULL).returncode:
            sys.exit(status)  # It said why.
        weights = np.zeros(())
        accuracies: list[float] = []
        for batch in forebay.Loader(dataset, batch_size=50, seed=1, epochs=2):
            pixels = batch.inputs.reshape(len(batch), -1).astype(np.float32) / 255 - 0.5
            if not weights.ndim:
                weights = np.zeros((pixels.shape[1], 1000), np.float32)
            scores = pixels @ weights
            odds = np.exp(scores - scores.max(1, keepdims=True))
            odds /= odds.sum(1, keepdims=True)
            accuracies.append(float((scores.argmax(1) == batch.labels).mean()))
            odds[np.arange(len(batch)), batch.labels] -= 1
            weights -= 0.5 * pixels.T @ odds / len(batch)
        images = forebay.open_dataset(dataset)
        print(f"{len(images)} images of {source.name} in {images.num_slices} slices")
        print(f"accuracy {accuracies[0]:.2f} at first, {accuracies[-1]:.2f} at last")
        if accuracies[-1] < 0.9 and not inputs:
            sys.exit("the classifier did not learn its four bars")


if __name__ == "__main__":
    main(sys.argv[1:])
