"""Check that datasets of a mixture, or a dataset and its extension, mean the same by the same ids."""

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.dataset.manifest import Manifest

TOKENIZER_FILE = "tokenizer.json"


def token_traits(manifest: Manifest) -> dict[str, Any]:
    """Return what decides the meaning of a dataset's tokens, by name; None for what it does not record.

    `tokenizer` begins the SHA-256 of its file. Of a dataset with a tokenizer, `eos_id` "none" is that none is used.
    """
    tokenizer = manifest.listed_files.get(TOKENIZER_FILE)
    return {
        "layout": manifest.layout,
        "dtype": manifest.dtype or None,
        "tokenizer": tokenizer and tokenizer[:12],
        "vocab_size": manifest.vocab_size or None,
        "eos_id": "none" if tokenizer and manifest.eos_id is None else manifest.eos_id,
    }


def differences(traits: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any, str, Any]]:
    """Yield what differs between datasets: (trait, name and value of the first that has it, name and value of another).

    None agrees with everything.
    """
    first_values: dict[str, tuple[str, Any]] = {}
    for name, values in traits.items():
        for trait, value in values.items():
            if value is not None:
                first, expected = first_values.setdefault(trait, (name, value))
                if value != expected:
                    yield trait, first, expected, name, value
