"""Text of the hub by name as batches of token ids: `create_huggingface_dataset`.

Hides what a name stands for, its tokenizer, and whether it is streamed or copied first. The first batch comes after
some hundred documents; no sample is padded, and a document longer than a sample continues in the next one.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.errors import DownloadError, MissingPackageError, UnknownDatasetError
from forebay.files import nothing_there
from forebay.order.step_index import check_integer
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer
from forebay.storage.hub_copies import HubCopy, download_hub
from forebay.storage.hub_splits import PREFIX, find_split, parse_url
from forebay.storage.listing import OUTPUT
from forebay.stream.lane import StreamOptions
from forebay.stream.text_stream import TextStream
from forebay.worker.batches import Batches
from forebay.worker.catalog import CatalogEntry, find_entry

WARMUP_DOCUMENTS = 256
"""Documents in the shuffle buffer before the first batch; the buffer grows from there. FineWeb: about 0.8 MB."""
BUFFER_BYTES = 64 << 20

_log = logging.getLogger("forebay.worker")


def create_huggingface_dataset(
    dataset_name: str, rank: int = 0, world_size: int = 1, num_batches: int = 100, batch_size: int = 4,
    seq_len: int | None = None, streaming: bool | None = None, tokenizer_name: str | None = None, seed: int = 42,
    buffer_size: int | None = None, *, lanes: int | None = None, text_key: str | None = None,
) -> "HubDataset":  # fmt: skip
    """One rank's batches of a dataset of the hub, tokenized and packed.

    Sample k of the stream belongs to rank k mod world_size, for any number of ranks and of files. Each rank reads its
    own share of the documents; see `TextStream`. Where num_batches is more than the data has, it is read again in
    another order, with a warning in the log.

    Args:
        dataset_name: A short name (`list_available_datasets`), OWNER/NAME[/CONFIG][:SPLIT] of the hub, or a path of
            local text files, beginning with `.` or `/`.
        seq_len, tokenizer_name, buffer_size, text_key: None: the dataset's own.
        streaming: False copies the files to this machine first; the copy is used without a network later. None:
            streamed if above 10 GB or of unknown size.
        lanes: Shares of the documents; None: world_size, and where ranks change as many as the text permits. The
            samples are those of the same number of lanes in any world.

    Raises:
        UnknownDatasetError: No dataset has that name. It is a FileNotFoundError, too.
        DownloadError: The hub does not respond. It is a ConnectionError, too. In place of `tiny_shakespeare` there
            are then 80 sonnets of the package, tokenized as bytes unless a tokenizer is named, and a warning.
        MissingPackageError: The files are of a kind that needs the package datasets. It is an ImportError, too.
    """
    entry = find_entry(dataset_name)
    check_integer("seq_len", seq_len, 1)
    check_integer("buffer_size", buffer_size, 0)
    is_here = entry.local
    try:
        inputs = _find_inputs(entry, entry.streaming if streaming is None else streaming)
    except DownloadError as error:
        if entry.name != "tiny_shakespeare":
            raise
        _log.warning(
            "tiny_shakespeare: %s In its place: 80 sonnets that come with the package, and tokenizer %s.",
            error, tokenizer_name or "bytes",
        )  # fmt: skip
        inputs = str(Path(__file__).with_name("sonnets.jsonl"))  # public domain
        tokenizer_name = tokenizer_name or "bytes"
        is_here = True
    tokenizer_name = tokenizer_name or entry.tokenizer
    tokenizer = load_tokenizer(tokenizer_name)
    seq_len = seq_len or entry.seq_len
    buffer_size = entry.buffer_size if buffer_size is None else buffer_size
    options = StreamOptions(
        lanes=lanes, shuffle_documents=buffer_size, shuffle_bytes=BUFFER_BYTES,
        warmup_documents=WARMUP_DOCUMENTS, drop_last=True, text_key=text_key or entry.text_key,
    )  # fmt: skip
    stream = partial(
        TextStream, inputs, tokenizer=tokenizer, seq_len=seq_len, seed=seed, shuffle=buffer_size > 0, epochs=None,
        options=options,
    )  # fmt: skip
    how = "kept on this machine" if is_here or isinstance(inputs, HubCopy) else "streamed"
    about = f"{dataset_name}, {how}; tokenizer {tokenizer_name}, {tokenizer.vocab_size:,} ids"
    return HubDataset(dataset_name, about, stream, rank, world_size, num_batches, batch_size)


def _find_inputs(entry: CatalogEntry, streaming: bool) -> Any:
    if entry.local:
        path = Path(entry.repository)
        if path.exists() and not (path / MANIFEST_FILE).exists():
            return entry.repository
        got = f"{OUTPUT}." if path.exists() else nothing_there(entry.name)
        raise UnknownDatasetError(f"Dataset {entry.name!r}: expected a file or directory of text, got {got}")
    name = parse_url(entry.repository)
    folder = f"/{name.config}" if name.config else ""
    url = f"{PREFIX}{name.name}@{quote(name.revision, safe='')}{folder}:{name.split}"
    if not streaming:
        try:
            return download_hub(url)
        except MissingPackageError:
            _log.info("%s: only the package datasets reads its files; they are streamed.", entry.name)
    return find_split(url) or url


class HubDataset(Batches):
    """Batches of tokenized text; made by `create_huggingface_dataset`."""

    @property
    def tokenizer(self) -> TokenizerFile:
        """Encodes text, and decodes tokens."""
        tokenizer: TokenizerFile = self.stream.tokenizer
        return tokenizer

    def stats(self) -> dict[str, int]:
        """Documents, bytes, tokens, malformed records and tails up to now; see `TextStream.stats`."""
        return dict(self.stream.stats())
