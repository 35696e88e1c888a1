"""How a recipe's stages run where scores matter: in segments, with columns that the input has, or as annotation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.prepare.documents import Stage

_CLEANING = frozenset(("empty", "no_text", "malformed"))
"""Reasons of stages that make text and have no opinion of it."""


def segments(stages: Iterable[Stage]) -> list[tuple[Stage, ...]]:
    """The stages in runs: all but the first begin with one that needs percentiles of all documents before it."""
    out: list[list[Stage]] = [[]]
    for stage in stages:
        for step in stage.steps() if hasattr(stage, "steps") else (stage,):
            if getattr(step, "percentiles", None):
                out.append([])
            out[-1].append(step)
    return [tuple(segment) for segment in out]


def recorded_scores(stages: Iterable[Stage]) -> dict[str, Any]:
    """What made each column of scores: the scorer's name, version and settings, as files keep it."""
    scored: dict[str, Any] = {}
    for stage in stages:
        scored |= getattr(stage, "scored", {})
    return scored


def without_scoring(stages: Sequence[Stage], recorded: Mapping[str, Any]) -> tuple[tuple[Stage, ...], list[str]]:
    """The stages without what the input has already, and the names of those whose columns it has from other settings.

    Args:
        recorded: What made each column of the input; None for a field that the recipe itself names.
    """
    out: list[Stage] = []
    other: list[str] = []
    for stage in stages:
        columns = getattr(stage, "scored", {})
        if not columns or any(column not in recorded for column in columns):
            out.append(stage)
        elif any(recorded[column] not in (None, scorer) for column, scorer in columns.items()):
            other.append(stage.name)
            out.append(stage)
        elif hasattr(stage, "from_columns"):
            out.append(stage.from_columns())
    return tuple(out), other


def annotating(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """The stages that clean text or add columns, without those that would drop documents."""
    out: list[Stage] = []
    for stage in stages:
        if hasattr(stage, "annotation"):
            out.append(stage.annotation())
        elif set(stage.reasons) <= _CLEANING:
            out.append(stage)
    return tuple(out)
