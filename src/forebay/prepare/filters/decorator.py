"""`text_filter`: a function becomes a filter."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from forebay.errors import UsageError
from forebay.prepare.documents import Stage, StageResult


@dataclasses.dataclass(frozen=True)
class FunctionFilter(Stage):
    """A filter that drops the rows that its function does not keep."""

    function: ClassVar[Callable[..., Any]]
    per_document: ClassVar[bool]

    @property
    def reasons(self) -> tuple[str, ...]:
        return (self.name,)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        settings = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        if self.per_document:
            rows = (dict(zip(batch.schema.names, row)) for row in zip(*batch.to_pydict().values()))
            keep = np.array([bool(self.function(row, **settings)) for row in rows], np.bool_)
        else:
            keep = np.asarray(self.function(batch, **settings), np.bool_)
        return StageResult(batch, np.where(keep, -1, 0).astype(np.int16))


def text_filter(
    name: str, *, version: str, per_document: bool = False
) -> Callable[[Callable[..., Any]], type[FunctionFilter]]:
    """Make a filter of a function; its keyword parameters become the settings of the filter.

        @forebay.text_filter("enough_lines", version="1")
        def enough_lines(batch, min_lines: int = 3):
            return pc.greater_equal(pc.count_substring(batch["text"], "\\n"), min_lines - 1)

        forebay.prepare_dataset(["in"], "out", tokenizer="gpt2", filters=[enough_lines(min_lines=5)])

    Define the function in a module: worker processes import it. A recipe names it by `use = "module:enough_lines"`.

    Args:
        name: In the report, and the reason under which documents are dropped.
        version: Change it with the function, so that its old results are not used: it enters the names of tasks.
        per_document: The function gets the columns of one document as a dict and returns whether to keep it; by
            default it gets a RecordBatch (`text`, `url`, `id`, ...) and returns a keep mask.
    """

    def decorate(function: Callable[..., Any]) -> type[FunctionFilter]:
        hints = typing.get_type_hints(function)
        settings: list[Any] = []
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.default is inspect.Parameter.empty:
                raise UsageError(
                    f"text_filter {name}: expected a default for {parameter.name}, got none. Give every setting one."
                )
            settings.append((parameter.name, hints.get(parameter.name, Any), parameter.default))
        constants = {
            "function": staticmethod(function), "per_document": per_document, "name": name, "version": version,
            "__doc__": function.__doc__, "__module__": function.__module__, "__qualname__": function.__qualname__,
        }  # fmt: skip
        return dataclasses.make_dataclass(
            function.__name__, settings, bases=(FunctionFilter,), namespace=constants, frozen=True
        )

    return decorate
