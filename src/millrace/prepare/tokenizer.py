"""A tokenizer by any of its names, as the bytes of its tokenizer.json.

Hides: where it comes from (a file, the hub, the input itself, none at all) and what its end-of-document token is.
The bytes are what a dataset carries along and what a task is named by.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from millrace.errors import PrepareError, UsageError
from millrace.prepare.inputs import Piece, read

SAMPLE_BYTES = 64 << 20
"""Text that `train:` learns from, at most: bounds its memory to about 1 GB."""
_PIECE_SAMPLE_BYTES = 4 << 20
EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]", "<|im_end|>")


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer: its description, the bytes of its tokenizer.json, ids below `vocab_size`, and its EOS."""

    description: str
    data: bytes
    vocab_size: int
    eos_id: int | None

    @property
    def sha256(self) -> str:
        """Hash of the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def dtype(self) -> str:
        """`U16` if every id fits in it, else `U32`."""
        return "U16" if self.vocab_size <= 1 << 16 else "U32"


def vocab_to_train(spec: str) -> int | None:
    """The vocabulary that `train:VOCAB` asks for, None for others; UsageError if it is no number."""
    if not spec.startswith("train:"):
        return None
    text = spec.removeprefix("train:")
    if not text.isascii() or not text.isdigit() or not 257 <= int(text) <= 1 << 24:
        raise UsageError(
            f"tokenizer {spec!r}: expected train:VOCAB with a vocabulary of 257 to 16777216, got {text!r}."
        )
    return int(text)


def load_tokenizer(spec: str) -> TokenizerFile:
    """The tokenizer that `spec` names: `bytes`, a tokenizer.json, a directory that holds one, or a hub name.

    Raises:
        UsageError: If nothing has that name.
        PrepareError: If its file is no tokenizer, or the hub does not give it.
    """
    if spec == "bytes":
        return TokenizerFile("bytes", byte_tokenizer().to_str(pretty=True).encode(), 257, 256)
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return _describe(Path(spec).name, path.read_bytes(), path.parent / "tokenizer_config.json")
    if not re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", spec) or spec.endswith(".json"):
        raise UsageError(
            f"tokenizer {spec!r}: expected a tokenizer.json, a directory with one, a hub name, `bytes` or "
            "`train:VOCAB`; there is no such file. Check the path."
        )
    return _from_hub(spec)


def _from_hub(spec: str) -> TokenizerFile:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            f"tokenizer {spec!r}: there is no such file, and names on the hub need `pip install millrace[hf]`."
        ) from error
    # Its retries speak on stderr; what matters of them is in our one line.
    huggingface_hub.logging.set_verbosity(huggingface_hub.logging.CRITICAL)
    try:
        path = Path(huggingface_hub.hf_hub_download(spec, "tokenizer.json"))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrepareError(
            f"tokenizer {spec!r}: there is no such file, and the hub did not give one: {first} "
            "Give a tokenizer.json that is on this machine, `bytes`, or `train:VOCAB`."
        ) from error
    return _describe(spec, path.read_bytes(), path.parent / "tokenizer_config.json")


def _describe(description: str, data: bytes, config: Path) -> TokenizerFile:
    tokenizer = parse(data, description)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise PrepareError(f"tokenizer {description!r}: expected a vocabulary, got an empty one.")
    names: list[str] = list(_EOS_NAMES)
    if config.is_file():
        try:
            named: Any = json.loads(config.read_bytes()).get("eos_token")
        except (ValueError, AttributeError):
            named = None
        named = named.get("content") if isinstance(named, dict) else named
        names = [named, *names] if isinstance(named, str) else names
    eos = next((vocab[name] for name in names if name in vocab), None)
    return TokenizerFile(description, data, max(vocab.values()) + 1, eos)


def parse(data: bytes, description: str) -> Tokenizer:
    """The tokenizer in the bytes of a tokenizer.json, set to read text as text.

    Nothing is cut off or padded, and a special token's name in a document is ordinary text: a document cannot
    end itself.

    Raises:
        PrepareError: If they hold none.
    """
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:
        raise PrepareError(
            f"tokenizer {description!r}: expected a tokenizer.json: {str(error).rstrip('.')}. "
            "Give the file that the tokenizers library saved, `bytes`, or `train:VOCAB`."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Ids are the UTF-8 bytes; 256 ends a document."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2): itself where printable, else 256 onwards."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def train_tokenizer(pieces: Sequence[Piece], text_key: str, vocab: int, seed: int) -> TokenizerFile:
    """Byte-level BPE trained on a sample of the input.

    The sample is at most 64 MiB: pieces in the order of a keyed hash, at most 4 MiB (or an equal share, if that
    is more) from the beginning of each. Same input and seed, same bytes, for any number of threads.

    Raises:
        PrepareError: If the input holds no text, or too little for that vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(pieces, text_key, seed), trainer=trainer)
    return _describe(f"train:{vocab}", tokenizer.to_str(pretty=True).encode(), Path("/nonexistent"))


def _sample(pieces: Sequence[Piece], text_key: str, seed: int) -> Iterator[str]:
    def key(piece: Piece) -> bytes:
        names = "".join(source.sha256 for source in piece.sources)
        return hashlib.sha256(f"millrace sample {seed} {piece.start} {piece.stop} {names}".encode()).digest()

    share = max(_PIECE_SAMPLE_BYTES, SAMPLE_BYTES // max(1, len(pieces)))
    left = SAMPLE_BYTES
    for piece in sorted(pieces, key=key):
        here = min(share, left)
        for record in read(piece, text_key):
            text = record.text.encode("utf-8", "ignore")[:here].decode("utf-8", "ignore")
            size = len(text.encode())
            here -= size
            left -= size
            if text:
                yield text
            if here <= 3:
                break
        if left <= 3:
            return
