"""What a loader may be given: a directory, a URL, somebody else's format, an open dataset, or a mixture of them.

Hides how each is opened. A local dataset is read in place unless a cache directory is named (its mount may be slow);
everything else comes by way of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import Dataset, Verify, local_path
from forebay.dataset.reader import open_dataset as open_local
from forebay.errors import DatasetError, UsageError
from forebay.load.packing import DocumentFilter
from forebay.order.mixture import Weights
from forebay.toml import read_toml

Given: TypeAlias = "str | Path | Dataset"
_OPENERS = 16


@dataclass(frozen=True)
class Mixture:
    """Several datasets, drawn from by weights that may change at a step.

    Args:
        datasets: By name: a directory, a URL or an open Dataset. All of one layout and one type of tokens.
        weights: By name, from 0, not all 0; or a list of (run step, weights) with steps rising from 0. A dataset
            that a change does not name has weight 0 from there on.

    Raises:
        UsageError: If a name is unknown, a weight is not a number from 0, or steps do not rise from 0.
    """

    datasets: Mapping[str, Given]
    weights: Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]

    def __post_init__(self) -> None:
        if not self.datasets:
            raise UsageError("mixture: expected at least one dataset, got none.")
        for step, weights in self.changes:
            unknown = sorted(set(weights) - set(self.datasets))
            if unknown:
                raise UsageError(
                    f"mixture: expected weights of {', '.join(self.datasets)} at step {step}, got {', '.join(unknown)}."
                )
        _ = self.plan  # Whose own checks these are.

    @property
    def changes(self) -> list[tuple[int, Mapping[str, float]]]:
        """(run step, weights by name)."""
        return [(0, self.weights)] if isinstance(self.weights, Mapping) else list(self.weights)

    @property
    def plan(self) -> Weights:
        """The weights in the order of `datasets`."""
        return Weights(
            tuple((step, tuple(float(w.get(name, 0.0)) for name in self.datasets)) for step, w in self.changes)
        )

    @classmethod
    def read(cls, path: str | Path) -> Mixture:
        """A mixture from a TOML file.

            [datasets]
            web = "s3://corpora/web"
            books = "books"            # relative to the file

            [[change]]
            step = 0
            weights = { web = 0.8, books = 0.2 }

        Raises:
            UsageError: If the file cannot be read or is not that.
        """
        path = Path(path)
        plain = read_toml(path)
        datasets, changes = plain.get("datasets"), plain.get("change")
        if not isinstance(datasets, dict) or not isinstance(changes, list) or set(plain) - {"datasets", "change"}:
            raise UsageError(f"{path}: expected [datasets] and [[change]] and nothing else, got {sorted(plain)}.")
        try:
            return cls(
                {name: url if "://" in url else path.parent / url for name, url in datasets.items()},
                [(change["step"], change["weights"]) for change in changes],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: expected `step` and `weights` in each [[change]], got {error!r}.") from error


def open_dataset(given: Given, identity: Any = None, *, verify: Verify = "once", from_urls: Any = "") -> Dataset:
    """A dataset wherever it lies and whoever wrote it. Reads its description, no slice.

    Args:
        given: A directory or `file://` URL (Forebay's, or one of `docs/formats.md`), a URL of another scheme, or a
            Dataset, which is given back.
        identity: For `forebay://` URLs: the node's directory.
        from_urls: For `forebay://` URLs: as of `forebay.storage.origins.open_origin`.
        verify: Of a local dataset of Forebay's format, as `forebay.dataset.reader.open_dataset` has it: `once`, `open`
            or `never`. Slices from elsewhere are always hashed.

    Raises:
        DatasetError: If it is no dataset or damaged.
        NetworkError: If it cannot be reached.
        UsageError: If the URL is of an unknown kind.
    """
    if isinstance(given, Dataset):
        return given
    text = str(given)
    if "://" in text and not text.startswith("file://"):
        from forebay.storage.origins import open_remote  # Needs no network package unless a URL asks for it.

        return open_remote(text, identity=identity, from_urls=from_urls)
    folder = local_path(given)
    if not (folder / MANIFEST_FILE).is_file() and folder.exists():
        from forebay.formats import open_external

        found: Dataset | None = open_external(folder)
        if found is not None:
            return found
        if folder.is_file():
            raise DatasetError(
                f"{folder}: expected a dataset, got a file of another kind. Text is read as it is by "
                "forebay.TextStream; `forebay prepare` makes a dataset of it."
            )
    return open_local(given, verify=verify)


def open_all(given: Sequence[Given], identity: Any = None, from_urls: Any = "") -> list[Dataset]:
    """`open_dataset` of each, several at a time: all of one layout and one type of tokens."""
    if len(given) == 1:
        return [open_dataset(given[0], identity, from_urls=from_urls)]
    with ThreadPoolExecutor(min(_OPENERS, len(given))) as pool:
        datasets = list(pool.map(lambda one: open_dataset(one, identity, from_urls=from_urls), given))
    first = datasets[0].manifest
    for dataset in datasets[1:]:
        found = (dataset.manifest.layout, dataset.manifest.dtype)
        if found != (first.layout, first.dtype):
            raise DatasetError(
                f"mixture: expected every dataset of layout {first.layout} {first.dtype} like {datasets[0].name}, got "
                f"{found[0]} {found[1]} of {dataset.name}. Prepare them with one tokenizer."
            )
    return datasets


def places_of(given: Given | Mixture) -> str | Path | Mixture:
    """Where a dataset, or each of a mixture, lies: what another process opens it by."""
    if isinstance(given, Mixture):
        return replace(given, datasets={name: _place_of(one) for name, one in given.datasets.items()})
    return _place_of(given)


def _place_of(given: Given) -> str | Path:
    if not isinstance(given, Dataset):
        return given
    origin = getattr(given, "origin", None)
    return given.path if origin is None else str(origin.url)


def read_mixture(given: Given | Mixture) -> Mixture | None:
    """A mixture, or the mixture in a TOML file; None for anything else."""
    if isinstance(given, Mixture):
        return given
    if isinstance(given, (str, Path)) and str(given).endswith(".toml") and Path(given).is_file():
        return Mixture.read(given)
    return None


def filters_of(
    mixture: Mixture | None, documents: DocumentFilter | Mapping[str, DocumentFilter] | None
) -> list[DocumentFilter | None]:
    """What is left out of each dataset, in the order of a mixture's; of the one, where there is no mixture."""
    if isinstance(documents, Mapping):
        unknown = sorted(set(documents) - set(mixture.datasets if mixture is not None else ()))
        if mixture is None or unknown:
            raise UsageError(f"documents: expected filters by names of a mixture, got {unknown or list(documents)}.")
        return [documents.get(name) for name in mixture.datasets]
    if mixture is not None and documents is not None and len(documents.numbers):
        raise UsageError("documents: expected {name: filter} in a mixture, got numbers without a dataset's name.")
    return [documents] * (1 if mixture is None else len(mixture.datasets))
