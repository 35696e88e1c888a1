"""tiktoken's encodings as a tokenizer.json: its formats and split patterns.

tiktoken merges by the rank of the merged token, the tokenizers library by the rank of the pair: the conversion has the
pairs of every way to cut a token. Source: tiktoken 0.14 (tiktoken_ext/openai_public.py).
"""

import json
from dataclasses import dataclass
from typing import Any

from forebay.errors import PrepareError, UsageError, install_command


@dataclass(frozen=True)
class Family:
    """Encodings that cut text alike: the pattern for tiktoken's engine, and the same for Oniguruma."""

    pattern: str
    plain: str


_O200K_HEAD = r"[^\r\n\p{L}\p{N}]?"
_O200K_UPPER, _O200K_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    [
        _O200K_HEAD + _O200K_UPPER + "*" + _O200K_LOWER + "+" + _O200K_TAIL,
        _O200K_HEAD + _O200K_UPPER + "+" + _O200K_LOWER + "*" + _O200K_TAIL,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Possessive where tiktoken is: faster, and no deep backtracking. `$` means another thing to Oniguruma.
FAMILIES = {
    "gpt2": Family(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "cl100k": Family(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "o200k": Family(_O200K, _O200K),
}


def load_tiktoken(spec: str) -> tuple[bytes, str]:
    """The tokenizer.json of `tiktoken:ENCODING`, and its family."""
    encoding = spec.removeprefix("tiktoken:")
    try:
        import tiktoken
    except ImportError as error:
        raise UsageError(
            f"tokenizer {spec!r}: tiktoken is not installed. Install it: {install_command('tiktoken')}."
        ) from error
    names = tiktoken.list_encoding_names()
    if encoding not in names:
        raise UsageError(f"tokenizer {spec!r}: expected an encoding in {', '.join(names)}, got {encoding!r}.")
    try:
        encoding_ = tiktoken.get_encoding(encoding)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrepareError(
            f"tokenizer {spec!r}: tiktoken could not download its vocabulary: {first} Set TIKTOKEN_CACHE_DIR "
            "to a folder that another machine downloaded it into."
        ) from error
    pattern = encoding_._pat_str
    family = next((name for name, family_ in FAMILIES.items() if pattern in (family_.pattern, family_.plain)), None)
    if family is None:
        raise UsageError(f"tokenizer {spec!r}: this tiktoken cuts its text in a way that is not known here.")
    return _to_json(dict(encoding_._mergeable_ranks), dict(encoding_._special_tokens), family)


def _to_json(ranks: dict[bytes, int], special: dict[str, int], family: str) -> tuple[bytes, str]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    stand_in = byte_alphabet()
    spelled = {token: "".join(stand_in[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known_pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += [(spelled[a], spelled[b]) for a, b in sorted(known_pairs, key=lambda p: (ranks[p[0]], ranks[p[1]]))]
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | special
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    cut: Any = pre_tokenizers.Split(Regex(FAMILIES[family].plain), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer.to_str(pretty=True).encode(), family


def ranks_of(data: bytes) -> dict[bytes, int]:
    """The ranks that a tokenizer.json of `load_tiktoken` was made of."""
    plain = json.loads(data)
    special = {token["content"] for token in plain["added_tokens"]}
    byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
    vocab = plain["model"]["vocab"]
    return {bytes(byte_of[c] for c in name): rank for name, rank in vocab.items() if name not in special}


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2): itself where printable, else 256 onwards."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
