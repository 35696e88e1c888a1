"""A small tokenizer of bytes and their pairs with special tokens of its own."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def trained_bpe(path: Path, special: list[str], text: str, vocab_size: int) -> Path:
    """Train it on a text and write it; the ids of the special tokens count from 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 9, trainer)
    tokenizer.save(str(path))
    return path
