"""What a preparation would do, from the first bytes of each file: inputs, tasks, stages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.formats.inputs import InputSplit
from forebay.prepare.engines.local import cores
from forebay.prepare.inputs import find_inputs, split_files
from forebay.prepare.recipe import Recipe
from forebay.storage.listing import Skipped, count_reasons, describe_skipped
from forebay.units import format_bytes


def sampled(splits: list[InputSplit], fraction: float) -> tuple[list[InputSplit], float]:
    """About that share of the splits, spread evenly, and the share of their documents that makes it exact."""
    if fraction >= 1 or not splits:
        return splits, 1.0
    count = min(len(splits), max(1, round(len(splits) * fraction + 0.5)))
    chosen = [splits[index * len(splits) // count] for index in range(count)]
    return chosen, min(1.0, fraction * len(splits) / count)


@dataclass(frozen=True)
class PreparePlan:
    """What `prepare_dataset` would do."""

    inputs: dict[str, tuple[int, int]]
    skipped: tuple[Skipped, ...]
    splits: int
    sample: float
    recipe: Recipe
    workers: int

    @property
    def bytes(self) -> int:
        """Bytes of input, as they are stored."""
        return int(sum(size for _, size in self.inputs.values()) * self.sample)

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": {name: {"files": files, "bytes": size} for name, (files, size) in self.inputs.items()},
            "skipped": count_reasons(self.skipped),
            "tasks": self.splits,
            "bytes": self.bytes,
            "workers": self.workers,
            "recipe": self.recipe.to_json(),
        }

    def to_text(self) -> str:
        lines = [f"{name}: {files:,} files, {format_bytes(size)}" for name, (files, size) in self.inputs.items()]
        lines += describe_skipped(self.skipped)
        lines.append(f"{format_bytes(self.bytes)} in {self.splits:,} tasks over {self.workers} processes")
        recipe = self.recipe.to_json()
        lines += [f"{name}: {json.dumps(settings, ensure_ascii=False)}" for name, settings in recipe.pop("stages")]
        return "\n".join([*lines, *(f"{name}: {json.dumps(table)}" for name, table in recipe.items() if table)])


def plan(
    inputs: Sequence[str | Path], recipe: Recipe, *, workers: int | None = None, follow_links: bool = False
) -> PreparePlan:
    """The plan of `prepare_dataset` with these arguments."""
    sources = find_inputs(inputs or recipe.inputs, recipe.read, follow_links=follow_links)
    splits, _ = sampled(split_files(sources.files, recipe.read), recipe.sample)
    by_format: dict[str, tuple[int, int]] = {}
    for source in sources.files:
        files, size = by_format.get(source.format, (0, 0))
        by_format[source.format] = files + 1, size + source.bytes
    return PreparePlan(by_format, sources.skipped, len(splits), recipe.sample, recipe, workers or cores())
