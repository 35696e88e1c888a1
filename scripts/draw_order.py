"""Draw which samples which steps of an epoch read: `draw_order.py OUT.svg`, the figure of docs/explanation/loader.md.

A dot is a sample: across, its place in the dataset; down, the step that reads it; its colour is the rank. Drawn of the
order itself, for a dataset of 12 slices of 24 samples, batches of 8, 8 lanes with windows of 9, on 4 ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from forebay.order.plan import Order
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes

SLICES, SAMPLES, BATCH, WINDOW, RANKS = 12, 24, 8, 9, 4
X, Y, LEFT, TOP = 2.6, 11, 56, 44
LIGHT = ("#00796b", "#c2571a", "#5b4fb3", "#a3861a")
DARK = ("#4db6ac", "#f0965a", "#a79df2", "#e0c25a")


def main() -> None:
    order = Order(np.full(SLICES, SAMPLES), seed=7, global_batch=BATCH, lanes=BATCH, window=WINDOW)
    run = Run([order], BatchSizes.of(BATCH))
    width, height = LEFT + X * order.num_samples + 16, TOP + Y * order.steps_per_epoch + 44
    parts = [
        f'<rect class="{"s" if s % 2 else "t"}" x="{LEFT + X * SAMPLES * s:.1f}" y="{TOP - 6}" '
        f'width="{X * SAMPLES:.1f}" height="{Y * order.steps_per_epoch + 8}"/>'
        f'<text x="{LEFT + X * SAMPLES * (s + 0.5):.1f}" y="{TOP - 12}" text-anchor="middle">slice {s}</text>'
        for s in range(SLICES)
    ]
    for step in range(order.steps_per_epoch):
        if step % 6 == 0:
            parts.append(f'<text x="{LEFT - 8}" y="{TOP + Y * step + 8}" text-anchor="end">step {step}</text>')
        for rank in range(RANKS):
            y = TOP + Y * step + 4
            read = run.steps(step, step + 1, rank, RANKS)
            for sample in order.sample_ids_of(read.slices, read.samples).tolist():
                parts.append(f'<circle class="r{rank}" cx="{LEFT + X * (sample + 0.5):.1f}" cy="{y}" r="3"/>')
    for rank in range(RANKS):
        x = LEFT + 90 * rank
        parts.append(f'<circle class="r{rank}" cx="{x + 6}" cy="{height - 16}" r="5"/>')
        parts.append(f'<text x="{x + 17}" y="{height - 12}">rank {rank}</text>')
    colors = "".join(f".r{rank}{{fill:{color}}}" for rank, color in enumerate(LIGHT))
    dark = "".join(f".r{rank}{{fill:{color}}}" for rank, color in enumerate(DARK))
    Path(sys.argv[1]).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        f"<title>The samples of an epoch of {order.num_samples}, by step and rank: "
        "each rank goes through slices of its own, a window at a time</title>\n"
        "<style>text{font:11px system-ui,sans-serif;fill:#16202b}.page{fill:#fff}.s{fill:#eef1f4}.t{fill:#fafbfc}"
        f"{colors}@media (prefers-color-scheme:dark){{text{{fill:#e4e9ef}}.page{{fill:#15191f}}.s{{fill:#242b34}}"
        f".t{{fill:#1c2129}}{dark}}}</style>\n"
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n",
        "utf-8",
    )


if __name__ == "__main__":
    main()
