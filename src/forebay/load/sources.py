"""Opens what a loader reads: a directory, a URL, a dataset of another format, an open dataset, or a mixture of them."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE
from forebay.dataset.reader import Dataset, Verify, local_path
from forebay.dataset.reader import open_dataset as open_local
from forebay.errors import DatasetError, ForebayError, PrintableUrl, UsageError
from forebay.files import nothing_there
from forebay.load.packing import DocumentSubset
from forebay.order.mixture import Weights

DatasetSource: TypeAlias = "str | Path | Dataset"
_log = logging.getLogger("forebay")
_NUM_CHECKED = 1 << 20  # Tokens of a dataset without a vocabulary.
_OPENERS = 16  # Threads that open the datasets of a mixture.


@dataclass(frozen=True)
class Mixture:
    """Several datasets, sampled by weights that may change at a step.

    Args:
        datasets: By name: a directory, a URL or an open Dataset. All of one layout and one type of tokens.
        weights: By name, at least 0 and not all 0; or a list of (run step, weights), steps ascending from 0. A dataset
            that a change does not name has weight 0 from there on.
        allow_different_tokenizers: Mix datasets whose tokenizers, vocabularies or ends of documents differ.

    Raises:
        UsageError: If a name is unknown, a weight is negative or no number, or steps do not ascend from 0.
    """

    datasets: Mapping[str, DatasetSource]
    weights: Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
    allow_different_tokenizers: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, Mapping) or not self.datasets:
            raise UsageError(
                f"mixture: expected datasets by name, {{name: dataset}}, got {type(self.datasets).__name__}."
            )
        vars(self)["datasets"] = {name: named(source) for name, source in self.datasets.items()}
        try:
            if unknown := sorted({name for _, weights in self.changes for name in weights} - set(self.datasets)):
                raise UsageError(f"mixture: expected weights of {', '.join(self.datasets)}, got {', '.join(unknown)}.")
            _ = self.plan  # Checks the weights.
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"mixture: expected weights {{name: number}}, or [(step, {{name: number}})], got {self.weights!r:.200}."
            ) from error

    @property
    def changes(self) -> list[tuple[int, Mapping[str, float]]]:
        """(run step, weights by name)."""
        return [(0, self.weights)] if isinstance(self.weights, Mapping) else list(self.weights)

    @property
    def plan(self) -> Weights:
        """The weights in the order of `datasets`."""
        return Weights(
            tuple((step, tuple(0.0 + w.get(name, 0.0) for name in self.datasets)) for step, w in self.changes)
        )

    def _repr_html_(self) -> str:
        """The datasets, and their weights by step."""
        weights = {f"from step {step:,}": ", ".join(f"{k} {v:g}" for k, v in by.items()) for step, by in self.changes}
        from forebay import html

        return html.card("Mixture", {**self.datasets, **weights})

    @classmethod
    def from_toml(cls, path: str | Path) -> "Mixture":
        """Read a mixture from a TOML file.

            [datasets]
            web = "s3://corpora/web"
            books = "books"            # relative to the file

            [[change]]
            step = 0
            weights = { web = 0.8, books = 0.2 }

        Raises:
            UsageError: If the file cannot be read or has other contents.
        """
        from forebay.toml import read_toml

        path = Path(path)
        config = read_toml(path)
        try:
            datasets = {
                name: url if "://" in url else path.parent / url for name, url in config.pop("datasets").items()
            }
            changes = [(change["step"], change["weights"]) for change in config.pop("change")]
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: expected [datasets], and `step` and `weights` in each [[change]], got a file without one of "
                f"them: {error}."
            ) from error
        allow = config.pop("allow_different_tokenizers", False)
        if config or type(allow) is not bool:
            raise UsageError(f"{path}: expected [datasets] and [[change]] and nothing else, got {config or allow!r}.")
        return cls(datasets, changes, allow)


def open_dataset(
    source: DatasetSource, identity: Any = None, *, verify: Verify = "once", from_urls: Any = ""
) -> Dataset:
    """Open a dataset of any format and location. Reads its description, no slice.

    Args:
        source: A directory or `file://` URL (in Forebay's format, or one of `docs/reference/formats.md`; of that, also
            a file, a pattern, or the path that Megatron's two files share), a URL of another scheme, or a Dataset,
            which is returned as it is.
        identity: For `forebay://` URLs: the node's directory.
        from_urls: For `forebay://` URLs: as in `forebay.storage.origins.open_origin`.
        verify: For a local dataset in Forebay's format: `once` or `never`, as in
            `forebay.dataset.reader.open_dataset`. Remote slices are always verified.

    Raises:
        DatasetError: If it is no dataset or damaged.
        NetworkError: If it cannot be reached.
        UsageError: If the scheme of the URL is unknown.
    """
    if isinstance(source, Dataset):
        return source
    _check_source(source)
    text = str(source)
    if "://" in text and not text.startswith("file://"):
        from forebay.storage.origins import open_remote  # A local dataset needs no network packages.

        return open_remote(source, identity=identity, from_urls=from_urls)
    path = local_path(source)
    # Without a file at the path it may be a pattern, or what Megatron's two files share.
    if not (path / MANIFEST_FILE).is_file():
        from forebay.formats import GUESSED, open_external

        external = open_external(path, dtype=GUESSED)
        if external is not None:
            if external.left_out:
                _log.warning("%s: columns left out beside the tokens: %s", path, ", ".join(external.left_out))
            return external
        if (path / ".work").is_dir() and not (path / "report.html").exists():
            raise DatasetError(f"{path}: it is an unfinished preparation. Run the same `forebay prepare` again.")
        if (path / TABLE_FILE).is_file() or (path / "slices").is_dir():
            raise DatasetError(
                f"{path}: expected a dataset, got slices without {MANIFEST_FILE}. `forebay mirror GOOD_COPY {path}` "
                f"fetches it; without a copy, `forebay import {path}` makes one without the tokenizer."
            )
        is_inside = (path.parent / MANIFEST_FILE).is_file()
        if not is_inside and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
            raise DatasetError(
                f"{path}: expected a dataset, got files of another kind. Make one: of text `forebay prepare`, of "
                "tables, tokens and images `forebay convert`. forebay.TextStream reads text as it is."
            )
    return open_local(source, verify=verify)


def call_in_threads(call: Callable[[str], Any], names: Collection[str]) -> dict[str, Any]:
    """Return the results by name. An error has the traceback of the caller: the frames of a pool explain nothing."""
    with ThreadPoolExecutor(min(_OPENERS, len(names))) as pool:
        try:
            return dict(zip(names, pool.map(call, names)))
        except ForebayError as error:
            raise error.with_traceback(None) from None


def open_datasets(
    sources: Mapping[str, DatasetSource], identity: Any, from_urls: Any = "", verify: Verify = "once", *,
    allow_different_tokenizers: bool = False,
) -> dict[str, Dataset]:  # fmt: skip
    """Open several datasets, in threads, by name. Raises DatasetError unless they agree in what their tokens mean."""

    def open_one(name: str) -> Dataset:
        return open_dataset(sources[name], identity, verify=verify, from_urls=from_urls)

    datasets = call_in_threads(open_one, sources)
    if len(datasets) < 2:
        return datasets
    from forebay.dataset.agreement import TOKENIZER_FILE, differences, token_traits

    for trait, first, expected, name, got in differences({n: token_traits(d.manifest) for n, d in datasets.items()}):
        if trait in ("layout", "dtype") or not allow_different_tokenizers:
            advice = {
                "layout": "Read each with a Loader of its own.",
                "dtype": "Widen that of U16: forebay convert DATASET OUT --to forebay --dtype uint32.",
            }.get(
                trait,
                f"Prepare {name} with --tokenizer {datasets[first].url}/{TOKENIZER_FILE}. Where that is meant: "
                "allow_different_tokenizers=True of the Mixture (= true in its file).",
            )
            raise DatasetError(
                f"mixture: expected datasets of one {trait}, got {expected} of {first} and {got} of {name}. {advice}"
            )
    if not allow_different_tokenizers:
        _check_ids(datasets)
    return datasets


def _check_ids(datasets: Mapping[str, Dataset]) -> None:
    """Warn of datasets without a known vocabulary beside others; DatasetError if their first ids are outside it."""
    size = max(dataset.manifest.vocab_size for dataset in datasets.values())
    for name, dataset in datasets.items():
        if dataset.manifest.vocab_size or not size:
            continue
        _log.warning("mixture: %s records no tokenizer: its ids are taken for those of the others.", name)
        is_here = dataset.is_local and not dataset.has_hashes
        largest = dataset.read_slice(0).tokens[:_NUM_CHECKED].max(initial=0) if is_here else 0
        if largest >= size:
            raise DatasetError(
                f"mixture: expected ids below {size:,}, the vocabulary of the others, got {largest:,} in {name}. "
                "Prepare it with their tokenizer. Where that is meant: allow_different_tokenizers=True of the Mixture."
            )


def _check_source(source: object) -> None:
    """Raise UsageError unless `open_dataset` may take it."""
    if not isinstance(source, (str, os.PathLike, Dataset)):
        example = "forebay.Mixture({'web': 'a', 'books': 'b'}, {'web': 0.7, 'books': 0.3})"
        is_list = isinstance(source, (list, tuple, Mapping))
        advice = f"Several are read by {example}" if is_list else "Write data to a file first"
        raise UsageError(f"dataset: expected a path, a URL or an open dataset, got {type(source).__name__}. {advice}.")


def named(source: Any) -> Any:
    """Return a source as a path, a URL whose `repr` has no secret, or what it is."""
    if isinstance(source, os.PathLike) and not isinstance(source, Path):
        source = os.fspath(source)
    return PrintableUrl(source) if isinstance(source, str) else source


def as_mixture(source: object) -> Mixture | None:
    """A mixture, or the one in a TOML file; None for one dataset. Raises UsageError for several without weights."""
    if not isinstance(source, Mixture):
        _check_source(source)
    if isinstance(source, (str, Path)) and str(source).endswith(".toml") and "://" not in str(source):
        if not Path(source).exists():
            raise UsageError(f"{source}: expected the TOML file of a mixture, got {nothing_there(source)}")
        return None if Path(source).is_dir() else Mixture.from_toml(source)
    return source if isinstance(source, Mixture) else None


def subsets_of(
    names: Collection[str], documents: DocumentSubset | Mapping[str, DocumentSubset] | None
) -> list[DocumentSubset | None]:
    """The document subset of each of these datasets of a mixture; one dataset has the name ""."""
    if isinstance(documents, Mapping):
        if unknown := sorted(set(documents) - set(names)):
            raise UsageError(f"documents: expected names of a mixture's datasets, got {unknown}.")
        return [documents.get(name) for name in names]
    if documents is not None and "" not in names and len(documents.numbers):
        raise UsageError("documents: expected {name: DocumentSubset} for a mixture, got numbers without a name.")
    return [documents] * len(names)
