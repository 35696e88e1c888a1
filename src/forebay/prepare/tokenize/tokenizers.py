"""A tokenizer by any of its names, as the bytes of its tokenizer.json, with the tokens that begin and end a document.

The bytes are stored in a dataset and hashed in the names of tasks; `kind` says what defines the ids: `json` the
tokenizers library, `bytes` nothing, `own` an object of the user's. `encoders` encodes.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from forebay.arrays import Array, DType
from forebay.base import Json
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import (
    DownloadError,
    PrepareError,
    UnknownDatasetError,
    UsageError,
    did_you_mean,
    error_text,
    listed,
)
from forebay.plugins import check_code, load_plugin, plugins
from forebay.storage.hub import hub_endpoint, missing_packages
from forebay.storage.hub_copies import fetch_tokenizer

SAMPLE_BYTES = 64 << 20  # Text that `train:` learns from, at most: bounds its memory to about 1 GB.
EOS = "<|endoftext|>"
AUTO = "auto"  # For `eos` and `bos`: the vocabulary's own token if it has one, else none.
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]", "[SEP]", "<|im_end|>")
_BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|bos|>", "<|startoftext|>", "[BOS]", "[CLS]")
_MAX_GROWTH = 64
OWN = "own"
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class Tokenizer(Protocol):
    """A tokenizer of the user's: an object, or what an entry point of `forebay.tokenizers` or `module:Name` makes.

    Picklable, as it encodes in the workers.
    """

    name: str
    """Its name in the manifest."""
    data: bytes
    """Bytes that identify it, which a dataset stores as `tokenizer.json`."""
    vocab_size: int
    """Ids are below this."""
    eos_id: int | None
    bos_id: int | None
    """The tokens after and before each document."""

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The ids of each text as unsigned integers, without BOS or EOS."""


ALIASES = {"codegen-350M": "Salesforce/codegen-350M-mono", "gpt-neox-20b": "EleutherAI/gpt-neox-20b"}
"""Common names that are not on the hub."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer: the bytes of its tokenizer.json, ids below `vocab_size`, its EOS and BOS (None: not used)."""

    description: str
    data: bytes
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    kind: str
    tokenizer: Tokenizer | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def dtype(self) -> str:
        """`U16` if every id fits in it, else `U32`."""
        return "U16" if self.vocab_size <= 1 << 16 else "U32"

    @property
    def numpy_dtype(self) -> DType:
        """`dtype` in NumPy, little endian."""
        return TOKEN_DTYPES[self.dtype]


AnyTokenizer: TypeAlias = str | Path | Tokenizer | HubTokenizer | TokenizerFile


def vocab_to_train(spec: str) -> int | None:
    """The vocabulary size of `train:VOCAB`, None for other names; UsageError if it is no number."""
    if not spec.startswith("train:") and spec != "train":
        return None
    text = spec.removeprefix("train:")
    if not text.isascii() or not text.isdigit() or not 257 <= int(text) <= 1 << 24:
        raise UsageError(
            f"tokenizer {spec!r}: expected train:VOCAB with a vocabulary of 257 to 16777216, got {text!r}."
        )
    return int(text)


def name_of(tokenizer: Any) -> str:
    """Return the name of a tokenizer that is an object; the path that a path is."""
    if isinstance(tokenizer, os.PathLike):
        return str(tokenizer)
    return str(getattr(tokenizer, "name", "") or getattr(tokenizer, "name_or_path", "") or "tokenizer")


def _from_object(item: Any, eos: bool | str, bos: bool | str) -> TokenizerFile:
    """A tokenizer of one's own, one of `tokenizers`, or a fast one of `transformers`, with its special tokens."""
    if isinstance(item, TokenizerFile):
        return item
    backend = getattr(item, "backend_tokenizer", item)
    if isinstance(backend, HubTokenizer):
        eos = getattr(item, "eos_token", None) or eos if eos is True else eos
        bos = getattr(item, "bos_token", None) or bos if bos is True else bos
        return _describe(name_of(item), backend.to_str().encode(), eos, bos)
    if missing := [name for name in ("name", "data", "vocab_size", "eos_id", "encode") if not hasattr(item, name)]:
        raise UsageError(
            f"tokenizer: expected a name, a path, a tokenizer of tokenizers or transformers, or an object with "
            f"{', '.join(missing)}, got {type(item).__name__}. Save it as a tokenizer.json, and give its path."
        )
    eos_id, bos_id = (item.eos_id if eos else None), (item.bos_id if bos else None)
    return TokenizerFile(item.name, item.data, item.vocab_size, eos_id, bos_id, OWN, item)


def load_tokenizer(
    spec: AnyTokenizer, *, eos: bool | str = True, bos: bool | str = False, allow_code: bool = False
) -> TokenizerFile:
    """The tokenizer that `spec` names, or is.

    Args:
        spec: A tokenizer as an object, one of `tokenizers` or of `transformers` too; or a name: `bytes`; a
            tokenizer.json; a directory with one, or with GPT-2's pair (vocab.json and merges.txt, or encoder.json and
            vocab.bpe); a name on the hub; an entry point of `forebay.tokenizers`, or `module:Name`.
        eos: Whether a token ends each document: the vocabulary's own, the one of that name, or (`auto`) the
            vocabulary's own if it has one.
        bos: Whether one begins it, likewise.
        allow_code: As of `load_plugin`.
    """
    if isinstance(spec, str) and (spec in plugins("forebay.tokenizers") or check_code(spec, allow_code)):
        loaded = load_plugin("forebay.tokenizers", spec, allow_code=allow_code)
        spec = loaded() if callable(loaded) else loaded
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if not isinstance(spec, str):
        return _from_object(spec, eos, bos)
    if spec == "bytes":
        data = byte_tokenizer().to_str(pretty=True).encode()
        return _describe("bytes", data, eos, bos, kind="bytes")
    path = Path(spec)
    if path.suffix == ".model":
        raise UsageError(
            f"tokenizer {spec!r}: expected a tokenizer.json, got a SentencePiece model. Convert it once: "
            "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(OUT) writes OUT/tokenizer.json."
        )
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        pair = next((p for p in _PAIRS if all((path / name).is_file() for name in p)), None)
        if pair is not None and not (path / "tokenizer.json").is_file():
            return _describe(path.name, _from_pair(path, *pair), eos, bos, folder=folder)
        path = path / "tokenizer.json"
    if path.is_file():
        return _describe(Path(spec).name, path.read_bytes(), eos, bos, folder=folder)
    names = {"bytes", "gpt2", *ALIASES, "train:" + re.sub(r"\D", "", spec)}
    hint = did_you_mean(spec, sorted(names - {spec}))
    if not re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", spec) or spec.endswith(".json"):
        raise UsageError(
            f"tokenizer {spec!r}: expected a tokenizer.json, a directory with one, a hub name, `bytes` "
            f"or, for `forebay prepare`, `train:VOCAB`; there is no such file. Check the path.{hint}"
        )
    return _from_hub(spec, eos, bos, hint)


def _from_hub(spec: str, eos: bool | str, bos: bool | str, hint: str) -> TokenizerFile:
    try:
        folder = fetch_tokenizer(ALIASES.get(spec, spec))
    except UnknownDatasetError as error:
        raise UnknownDatasetError(
            f"Tokenizer {spec!r} not found: there is no such file, and no such model on {hub_endpoint()}. Give a "
            f"tokenizer.json that is on this machine, a model's full name, `bytes`, or `train:VOCAB`.{hint}"
        ) from error
    except DownloadError as error:
        error.args = (f"{error}{hint}",)
        raise
    path = folder / "tokenizer.json"
    if path.is_file():
        return _describe(spec, path.read_bytes(), eos, bos, folder=folder)
    try:
        import transformers
    except ImportError as error:
        raise missing_packages(f"the model {spec} has no tokenizer.json, which they make of its other files") from error
    try:
        data = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
    except Exception as error:  # of many kinds, by model
        reason = f"{type(error).__name__}: {error_text(error)}"
        raise PrepareError(
            f"tokenizer {spec!r}: expected a tokenizer.json or files that transformers makes one of, got {reason}. "
            "Give a tokenizer.json that is on this machine."
        ) from error
    return _describe(spec, data.encode(), eos, bos, folder=folder)


def _from_pair(folder: Path, vocab_name: str, merges_name: str) -> bytes:
    try:
        vocab, merges = models.BPE.read_file(str(folder / vocab_name), str(folder / merges_name))
        model = models.BPE(vocab=vocab, merges=merges)
    except Exception as error:
        raise PrepareError(
            f"tokenizer {folder}: expected GPT-2's {vocab_name} and {merges_name}, got: {error}."
        ) from error
    missing = sum(char not in vocab for char in byte_alphabet())
    if missing:
        raise UsageError(
            f"tokenizer {folder}: expected a byte-level vocabulary as GPT-2's, got one that lacks {missing} of the 256 "
            "bytes. Give the tokenizer.json of that model."
        )
    return _byte_level(model, [name for name in (EOS, "<s>", "</s>") if name in vocab]).to_str(pretty=True).encode()


def _byte_level(model: Any, special: Sequence[str], use_regex: bool = True) -> HubTokenizer:
    tokenizer = HubTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def _describe(
    description: str, data: bytes, eos: bool | str, bos: bool | str, *, kind: str = "json", folder: Path | None = None
) -> TokenizerFile:
    vocab = parse(data, description).get_vocab(with_added_tokens=True)
    if not vocab:
        raise PrepareError(f"tokenizer {description!r}: expected a vocabulary, got an empty one.")
    config = _config(folder / "tokenizer_config.json") if folder else {}

    def token_id(key: str, choice: bool | str, usual: tuple[str, ...]) -> int | None:
        if choice is False:
            return None
        configured = config.get(f"{key}_token")
        configured = configured.get("content") if isinstance(configured, dict) else configured
        names = [choice] if isinstance(choice, str) and choice != AUTO else [configured or "", *usual]
        name = next((name for name in names if name in vocab), None)
        if name is None:
            if choice == AUTO:
                return None
            raise UsageError(
                f"tokenizer {description!r}: expected {key} to be one of {', '.join(filter(None, names))}; the "
                f"vocabulary has {listed(special_names(data)) or 'no special token at all'}. Name one of its "
                f"tokens, or set {key} = false."
            )
        return int(vocab[name])

    eos_id, bos_id = token_id("eos", eos, _EOS_NAMES), token_id("bos", bos, _BOS_NAMES)
    return TokenizerFile(description, data, max(vocab.values()) + 1, eos_id, bos_id, kind)


def _config(path: Path) -> Json:
    try:
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def special_names(data: bytes) -> list[str]:
    """The names of the special tokens in the bytes of a tokenizer.json, by rising id."""
    added = json.loads(data).get("added_tokens") or []
    return [token["content"] for token in sorted(added, key=lambda t: t["id"]) if token.get("special")]


def parse(data: bytes, description: str) -> HubTokenizer:
    """The tokenizer in the bytes of a tokenizer.json, without truncation, padding and BPE dropout.

    A special token's name in a document is ordinary text, so that a document cannot end itself.
    """
    with _named(description, "expected a tokenizer.json"):
        tokenizer = HubTokenizer.from_str(data.decode())
        growth = _growth(json.loads(tokenizer.normalizer.__getstate__())) if tokenizer.normalizer else 1
    if growth > _MAX_GROWTH:
        raise PrepareError(
            f"tokenizer {description!r}: expected a normalizer that about keeps the length of text, got one that makes "
            f"{growth} characters of one. Give another tokenizer."
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextmanager
def _named(description: str, what: str) -> Iterator[None]:
    """Raise PrepareError for anything that the library raises: its PanicException is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise PrepareError(
            f"tokenizer {description!r}: {what}: {str(error).rstrip('.')}. Give the file that the tokenizers library "
            "saved, `bytes`, or `train:VOCAB`."
        ) from error


def encode_batch(tokenizer: HubTokenizer, texts: Sequence[str]) -> list[Any]:
    """The encodings of texts, without special tokens."""
    with _named("tokenizer.json", f"failed on one of {len(texts)} texts"):
        encodings: list[Any] = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return encodings


def _growth(normalizer: Json) -> int:
    growth = max(1, len(normalizer.get("content") or normalizer.get("prepend") or ""))
    for part in normalizer.get("normalizers", ()):
        growth *= _growth(part)
    charsmap = base64.b64decode(normalizer.get("precompiled_charsmap") or "")
    if charsmap:  # a trie, after its size in bytes, and the strings that it leads to
        strings = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        growth *= max(1, max(map(len, strings)) // _MAX_GROWTH)
    return growth


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2): itself where printable, else 256 onwards."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_tokenizer() -> HubTokenizer:
    """Ids are the UTF-8 bytes; 256 ends a document."""
    model = models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[])
    return _byte_level(model, [EOS], use_regex=False)


def train_tokenizer(texts: Iterator[str], vocab: int) -> TokenizerFile:
    """Byte-level BPE trained on these texts: same texts, same bytes, for any number of threads.

    Memory is about 15 times the texts, which are at most about 64 MiB (see `sample_texts`).
    """
    tokenizer = _byte_level(models.BPE(), [])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return _describe(f"train:{vocab}", tokenizer.to_str(pretty=True).encode(), True, False)
