"""The tokenizer of a run: the one that is named, the parent's, or one that is trained on the documents."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.metadata import version

from forebay.dataset.agreement import TOKENIZER_FILE
from forebay.dataset.reader import Dataset
from forebay.errors import ForebayError, UsageError
from forebay.prepare.engines.base import TICK_S
from forebay.prepare.extend import check_extension, parent_tokenizer
from forebay.prepare.outputs.base import Output
from forebay.prepare.outputs.tokens import DatasetOutput
from forebay.prepare.recipe import Recipe
from forebay.prepare.run import PrepareRun
from forebay.prepare.sampling import TRAINING
from forebay.prepare.stats import Usage
from forebay.prepare.tasks import keys
from forebay.prepare.tasks.encode import sample_texts
from forebay.prepare.tasks.text import TextResult
from forebay.prepare.tokenize import tokenizers
from forebay.units import format_bytes

_READ_SHARE = 0.75  # Of the time of a training: while its texts are read; then it merges.


def open_tokenizer(
    recipe: Recipe,
    own: tokenizers.AnyTokenizer | None,
    output: Output,
    document_ids: bool,
    parent: Dataset | None,
    notify: Callable[[str], None],
) -> tuple[Recipe, tokenizers.TokenizerFile | None]:
    """The recipe with the tokenizer that it takes, and that tokenizer, None if the run trains it.

    Raises UsageError for settings that the output, or the dataset that is extended, does not have.
    """
    if output.name == "report" and not recipe.tokenize.tokenizer:
        recipe = _with_tokenizer(recipe, "bytes")
    spec = recipe.tokenize.tokenizer
    # None is named, or one to train as the parent's run trained it.
    of_parent = parent is not None and (not spec or (spec.startswith("train:") and spec == parent.manifest.tokenizer))
    if parent is not None and of_parent:
        recipe = _with_tokenizer(recipe, parent.manifest.tokenizer)
    if output.needs_tokenizer and not recipe.tokenize.tokenizer:
        raise UsageError(
            "prepare: expected a tokenizer (--tokenizer or [tokenize] tokenizer): a tokenizer.json, a hub name, "
            "`bytes` or `train:VOCAB`; got none."
        )
    output.check(recipe, document_ids)
    if parent is not None and not isinstance(output, DatasetOutput):
        raise UsageError(f"prepare --extend: expected --to dataset, got {output.name}. Leave out --extend.")
    if not output.needs_tokenizer:
        recipe = _with_tokenizer(recipe, "bytes")
    is_trained = own is None and tokenizers.vocab_to_train(recipe.tokenize.tokenizer) is not None
    try:
        loaded = parent_tokenizer(parent, recipe) if parent is not None and of_parent else None
        if loaded is None and not is_trained:
            loaded = _load_tokenizer(recipe, own)
    except ForebayError as error:
        if output.name != "report":
            raise
        notify(f"{error} Bytes are counted in place of tokens.")
        recipe = _with_tokenizer(recipe, "bytes")
        loaded = _load_tokenizer(recipe)
    if parent is not None:
        check_extension(parent, recipe, loaded, document_ids)
    return recipe, loaded


def _with_tokenizer(recipe: Recipe, name: str) -> Recipe:
    return dataclasses.replace(recipe, tokenize=dataclasses.replace(recipe.tokenize, tokenizer=name))


def _load_tokenizer(recipe: Recipe, spec: tokenizers.AnyTokenizer | None = None) -> tokenizers.TokenizerFile:
    policy = recipe.tokenize
    return tokenizers.load_tokenizer(spec or policy.tokenizer, eos=policy.eos, bos=policy.bos, allow_code=True)


def train(run: PrepareRun, texts: Sequence[TextResult]) -> tokenizers.TokenizerFile:
    seed, vocab = run.recipe.slice.seed, tokenizers.vocab_to_train(run.recipe.tokenize.tokenizer) or 0
    parts = [result.part for result in texts]
    key = keys.hash_json([vocab, seed, version("tokenizers"), [part.name for part in parts]])
    name = f"trained-{key}/{TOKENIZER_FILE}"
    if not run.work.exists(name):
        size = min(tokenizers.SAMPLE_BYTES, sum(text.bytes_out for text in texts))
        run.progress.begin("tokenizer", {"": size}, "B", 1)
        run.on_message(f"training a tokenizer of {vocab:,} tokens on {format_bytes(size)} of text")
        read, is_ended = 0, False

        def sample() -> Iterator[str]:
            nonlocal read
            for text in sample_texts(run.work, parts, seed):
                if is_ended:
                    raise InterruptedError
                read += len(text.encode())
                yield text

        started = time.process_time()
        with ThreadPoolExecutor(1) as pool:  # so that the time can be shown meanwhile
            training = pool.submit(tokenizers.train_tokenizer, sample(), vocab)
            try:
                while not wait([training], TICK_S).done:
                    run.progress.tick(int(_READ_SHARE * read))
            finally:
                is_ended = True
        run.work.create(name, training.result().data)
        run.progress.add(usage := Usage({TRAINING: time.process_time() - started}), None)
        run.usage.add(usage)
        run.progress.advance(size)
    with run.work.scratch() as folder:
        (path := folder / TOKENIZER_FILE).write_bytes(run.work.read(name))
        loaded = _load_tokenizer(run.recipe, str(path))
    return dataclasses.replace(loaded, description=run.recipe.tokenize.tokenizer)
