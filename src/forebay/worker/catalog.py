"""The catalogue: datasets with a short name, and their settings; any other name is the hub's. Sends no request."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.errors import UnknownDatasetError, did_you_mean
from forebay.toml import read_toml

STREAM_ABOVE_BYTES = 10 * 10**9
"""Larger datasets, and those of unknown size, are streamed; smaller ones are copied to this machine."""
_PATH_STARTS = (".", "/", "~")  # ./corpus, /data/text.jsonl, ~/books


@dataclass(frozen=True)
class CatalogEntry:
    """A dataset of the hub, and its default settings."""

    name: str  # short, or the hub's OWNER/NAME
    repository: str  # the hub's OWNER/NAME; or a path here
    size: str = "unknown"  # for people
    description: str = ""
    size_tokens: int | None = None  # None where it is not known
    size_bytes: int | None = None  # of text; where it follows from tokens, about 4 each
    num_sources: int | None = None  # of which it was made, if that is known
    buffer_size: int = 10_000  # documents of the shuffle buffer
    tokenizer: str = "gpt2"  # as `forebay prepare --tokenizer` names it
    seq_len: int = 512  # tokens of a sample
    text_key: str = "text"  # the column with the text

    @property
    def streaming(self) -> bool:
        """Whether it is streamed by default."""
        return self.size_bytes is None or self.size_bytes > STREAM_ABOVE_BYTES

    @property
    def local(self) -> bool:
        """Whether it is a path on this machine."""
        return self.repository.startswith(_PATH_STARTS)


_FILE = Path(__file__).with_name("catalog.toml")
CATALOG = {name: CatalogEntry(name, **entry) for name, entry in read_toml(_FILE).items()}
_TEXT_KEYS = {"bigcode/the-stack": "content", "bigcode/the-stack-dedup": "content", "bigcode/starcoderdata": "content"}


def list_available_datasets() -> list[dict[str, Any]]:
    """The catalogue: a dict for each dataset, with `name`, `description`, sizes, `streaming` and its defaults."""
    return [{**asdict(entry), "streaming": entry.streaming} for entry in CATALOG.values()]


def find_entry(name: str) -> CatalogEntry:
    """The entry of a short name, a hub's OWNER/NAME, or a path (it begins with `.`, `/` or `~`).

    UnknownDatasetError, with the nearest names, for one without a slash that is not in the catalogue.
    """
    if name in CATALOG:
        return CATALOG[name]
    plain = name.removeprefix("hf://datasets/").removeprefix("hf:")
    if plain.startswith(_PATH_STARTS):
        path = Path(plain).expanduser().absolute()  # without a `./` it would look like a name of the hub
        return CatalogEntry(name, str(path), size_bytes=0)
    for entry in CATALOG.values():
        if plain == entry.repository:
            return entry
    if Path(name).exists():
        raise UnknownDatasetError(
            f"Dataset {name!r}: expected a path that begins with `.` or `/`, or a name of the hub, got what may be "
            f"either. Did you mean './{name}'? The hub's is 'hf:{name}'."
        )
    if "/" in plain.strip("/"):
        return CatalogEntry(name, plain, text_key=_TEXT_KEYS.get("/".join(plain.split("/")[:2]), "text"))
    raise UnknownDatasetError(
        f"Dataset {name!r} not found: expected one of {', '.join(CATALOG)}, a full path OWNER/NAME of the hub, or a "
        f"path here that begins with `.` or `/`.{did_you_mean(name.casefold(), CATALOG)}"
    )
