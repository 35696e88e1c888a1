"""Text as it lies on disk or on the hub, tokenized while it is streamed: batches without a dataset of ours.

    for batch in forebay.TextStream("corpus/*.jsonl.zst", tokenizer="gpt2", seq_len=2048, batch_size=8): ...

Documents are mixed in a buffer, encoded, joined with EOS between them, and cut into samples of seq_len tokens, whose
labels are the next tokens. Prefer a dataset (`forebay prepare`, then `Loader`) where the text is read more than once:
it costs no tokenizing while training, mixes the whole and not a buffer, and its state is a few bytes.

Memory: the shuffle buffer (`shuffle_buffer` documents, at most `buffer_bytes` and one document), one document as
its format holds it (at most `max_document_bytes`, 32 MiB), 1 MiB of text being encoded (100 MB in the tokenizers
library, 200 MB in gigatoken) and prefetch + 2 batches.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import DatasetError, UsageError
from forebay.formats.inputs import ReadOptions
from forebay.load.arguments import batch_sizes, check_choice, rank_of_world, token_dtype
from forebay.load.background import prefetch_in_thread
from forebay.load.batch import IGNORE_INDEX, Batch
from forebay.order.bijection import derive_key
from forebay.order.step_index import check_integer
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer
from forebay.stream.buffer import ShuffleBuffer
from forebay.stream.documents import Documents, Malformed, Tally, TextEncoder
from forebay.stream.hub import HUB, records_of
from forebay.stream.moments import Moment
from forebay.stream.records import FileRecords, Records

_HUB_URL = "hf://datasets/"


class TextStream:
    """Batches of one rank out of text files or somebody's streaming dataset, as an iterable.

    Iterating goes on from the stream's state and ends after the last epoch; leaving the loop early and iterating again
    goes on with the next batch. One iteration at a time. Same arguments, same batches, on any machine.

    With partition "samples" every rank reads and encodes everything, forms the same samples, and takes those of number
    rank, rank + world_size, … of each global batch: the global batch of a step is the same for every world size, all
    ranks have as many steps, and the state of any rank may be loaded by any rank of any world. With "records" a rank
    encodes the records of number rank, rank + world_size, … alone: 1/world_size of the work, but its state is its own
    rank's, and ranks may come to an epoch's end some steps apart (set `steps`, or `epochs=None`, where they wait for
    each other).

    Args:
        inputs: Paths, directories, globs, URLs, of any format that `forebay prepare` reads, compressed or not; or
            `hf:NAME[/CONFIG][:SPLIT]`; or an object: a dataset of Hugging Face, WebDataset or MosaicML Streaming, or
            any iterable of mappings (or strings; but a list of strings is paths) that begins anew each time.
        tokenizer: As `forebay prepare --tokenizer` names it, or one that was loaded.
        seq_len: Tokens of a sample, L.
        batch_size: Samples of a rank's batch. Or `global_batch_size`: of all ranks' together; exactly one is given.
        rank, world_size: By default the environment's RANK and WORLD_SIZE, or 0 and 1.
        seed: Any integer; fixes the order of files and documents.
        shuffle_buffer: Documents that are mixed; the order of files is mixed, too. 0 keeps the order of the input.
        shuffle_start: Documents after which the first goes out, for an early first batch; the buffer then grows by
            one with each that does. None: all of shuffle_buffer is filled first.
        buffer_bytes: The buffer holds fewer if they are longer than this together.
        epochs: How many in all; None for no end. Samples do not reach over an epoch's end.
        steps: End after so many batches, if sooner.
        drop_last: Leave out the short batch at an epoch's end.
        partition: "samples" or "records", as above.
        text_key: The field or column with the text.
        format: Of all files, if they should not be sniffed.
        follow_links: Also read what links in directories lead to elsewhere.
        eos, bos: Whether a token ends and begins each document; or its name.
        dtype: int64 or int32, of `inputs` and `labels`.
        prefetch: Batches made ahead by a thread; 0 makes them in the caller's.

    Raises:
        UsageError: If an argument is missing or out of range.
        PrepareError: If an input or the tokenizer cannot be read; also while iterating. A malformed record is no error:
            it is passed over, counted in `stats()`, and told in `malformed`.
    """

    def __init__(
        self,
        inputs: Any,
        *,
        tokenizer: str | TokenizerFile,
        seq_len: int,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle_buffer: int = 10_000,
        shuffle_start: int | None = None,
        buffer_bytes: int = 256 << 20,
        epochs: int | None = 1,
        steps: int | None = None,
        drop_last: bool = False,
        partition: str = "samples",
        text_key: str = "text",
        format: str = "auto",
        follow_links: bool = False,
        eos: bool | str = True,
        bos: bool | str = False,
        dtype: Any = np.int64,
        prefetch: int = 2,
    ) -> None:
        for name, value in (("seq_len", seq_len), ("epochs", epochs), ("steps", steps)):
            check_integer(name, value, 1)
        for name, value in (("shuffle_buffer", shuffle_buffer), ("buffer_bytes", buffer_bytes), ("prefetch", prefetch)):
            check_integer(name, value, 0)
        check_integer("shuffle_start", shuffle_start, 0)
        check_choice("partition", partition, ("samples", "records"))
        self.rank, self.world_size = rank_of_world(rank, world_size)
        self._global_batch = _global_batch(batch_size, global_batch_size, self.world_size, partition)
        self.tokenizer = load_tokenizer(tokenizer, eos=eos, bos=bos) if isinstance(tokenizer, str) else tokenizer
        self.seq_len, self.partition, self.seed = seq_len, partition, int(seed)
        self._dtype = token_dtype(dtype, self.tokenizer.dtype, self.tokenizer.vocab_size)
        self._shuffle_buffer, self._shuffle_start, self._buffer_bytes = shuffle_buffer, shuffle_start, buffer_bytes
        self._epochs, self._steps, self._drop_last, self._prefetch = epochs, steps, bool(drop_last), prefetch
        self._text_key = text_key
        self._records = _records(inputs, ReadOptions(text_key=text_key, format=format), follow_links)
        self._encoder = TextEncoder(self.tokenizer)
        self._moment = Moment(tokens=np.zeros(0, self.tokenizer.numpy_dtype))
        self._malformed: list[Malformed] = []
        self._turn = 0
        self._source: Generator[tuple[Batch, Moment], None, None] | None = None

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self.tokenizer.vocab_size

    @property
    def effective_batch_size(self) -> int:
        """Samples of all ranks' batches together."""
        return self._global_batch

    @property
    def malformed(self) -> tuple[Malformed, ...]:
        """The first malformed records that this stream has passed over (also those a little ahead of the batches)."""
        return tuple(self._malformed)

    def stats(self) -> dict[str, int]:
        """Counts of the run up to the last batch given out and what was encoded with it.

        `documents`, `text_bytes` and `tokens` that were encoded here; `empty` documents among them; `malformed`
        records passed over; `tail_tokens` at epochs' ends, fewer than a sample (a batch, with drop_last); `batches`,
        `samples_taken` (of the epoch).
        """
        moment = self._moment
        return {**moment.counts, "batches": moment.run_step, "samples_taken": moment.samples_taken}

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: after the last batch that iterating gave out. Plain JSON values; see `moments`.

        With partition "samples" it is the same on every rank, and one rank's is enough to keep.
        """
        return self._moment.to_dict(self._identity())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken: the next batch is the one that followed it then.

        An iteration that is going on continues from there.

        Raises:
            StateError: If the state is malformed, or of other inputs or arguments.
        """
        self.go_to(Moment.from_dict(state, self._identity(), self.tokenizer.numpy_dtype))

    @property
    def moment(self) -> Moment:
        """What `state_dict` writes down, as it lies in memory: free to take at every step."""
        return self._moment

    def go_to(self, moment: Moment) -> None:
        """Go to a moment of this stream, or of one that differs in batch size, rank or world size alone.

        The samples that follow are those that followed then; unlike a state, nothing is checked.
        """
        self.close()
        self._moment = moment

    def close(self) -> None:
        """End the thread that makes batches ahead, close files. The state stays; iterating goes on from it."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._turn += 1
        turn = self._turn
        try:
            while True:
                if turn != self._turn:
                    raise UsageError("TextStream: this iteration ended when another began. Open another for two.")
                if self._source is None:
                    made = self._made(self._moment)
                    self._source = prefetch_in_thread(made, self._prefetch) if self._prefetch else made
                found = next(self._source, None)
                if found is None:
                    return
                batch, self._moment = found
                yield batch
        finally:
            if turn == self._turn:
                self.close()

    def _identity(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "inputs": self._records.identity,
            "text_key": self._text_key,
            "tokenizer": self.tokenizer.sha256,
            "eos_id": self.tokenizer.eos_id,
            "bos_id": self.tokenizer.bos_id,
            "seq_len": self.seq_len,
            "global_batch_size": self._global_batch,
            "seed": self.seed,
            "shuffle_buffer": self._shuffle_buffer,
            "buffer_bytes": self._buffer_bytes,
            "drop_last": self._drop_last,
            "partition": self.partition,
        }
        if self._shuffle_start is not None:
            facts["shuffle_start"] = self._shuffle_start
        if self.partition == "records":
            facts.update(rank=self.rank, world_size=self.world_size)
        return facts

    def _made(self, moment: Moment) -> Generator[tuple[Batch, Moment], None, None]:
        """Batches from a moment on, each with the moment after it."""
        while (self._epochs is None or moment.epoch < self._epochs) and moment.run_step < (self._steps or 1 << 62):
            documents, tally = self._open(moment)
            try:
                for batch, after in self._epoch(moment, documents, tally):
                    moment = after
                    yield batch, moment
                    if self._steps is not None and moment.run_step >= self._steps:
                        return
            finally:
                documents.close()

    def _open(self, moment: Moment) -> tuple[Documents, Tally]:
        key = derive_key(self.seed, "stream", "files", moment.epoch) if self._shuffle_buffer else None
        reading = self._records.open(moment.epoch, key, moment.place)
        key = derive_key(self.seed, "stream", "documents", moment.epoch)
        buffer = ShuffleBuffer(
            self._shuffle_buffer, self._buffer_bytes, key, moment.draws, moment.held, self._shuffle_start
        )
        tally = Tally(dict(moment.counts), self._malformed)
        share = (self.rank, self.world_size) if self.partition == "records" else (0, 1)
        return Documents(reading, buffer, tally, share, moment.records), tally

    def _epoch(self, moment: Moment, documents: Documents, tally: Tally) -> Iterator[tuple[Batch, Moment]]:
        size = self._global_batch
        if self.partition == "records":
            size = len(range(self.rank, size, self.world_size))
        # One sample more than the batch (one batch, with drop_last), so that the last is known for the last.
        wanted = (size + (size if self._drop_last else 1)) * self.seq_len
        more = True
        while more:
            if len(moment.tokens) - moment.at < wanted:
                moment = self._filled(moment, documents, tally, wanted)
            left = len(moment.tokens) - moment.at
            count = min(size, left // self.seq_len)
            if not count or (self._drop_last and count < size):
                raise DatasetError(
                    f"stream: expected at least one batch an epoch, got {left} tokens of {moment.records} records for "
                    f"{size} samples of {self.seq_len}. {self._advice(tally)}"
                )
            more = left >= wanted
            batch = self._batch(moment, count)
            rest = left - count * self.seq_len
            if not more:  # Nothing is left to read.
                more = rest >= self.seq_len * (size if self._drop_last else 1)
            if more:
                moment = replace(
                    moment,
                    step=moment.step + 1,
                    run_step=moment.run_step + 1,
                    samples_taken=moment.samples_taken + count,
                    at=moment.at + count * self.seq_len,
                )
            else:
                counts = {**moment.counts, "tail_tokens": moment.counts["tail_tokens"] + rest}
                empty = moment.tokens[:0]
                moment = Moment(moment.epoch + 1, run_step=moment.run_step + 1, tokens=empty, counts=counts)
            yield batch, moment

    @staticmethod
    def _advice(tally: Tally) -> str:
        if not tally.malformed:
            return "Ask for shorter samples or smaller batches."
        first = tally.malformed[0]
        return (
            f"{tally.counts['malformed']} records were skipped, the first at {first.location} of {first.name}: "
            f"{first.problem}. Name the column with the text (text_key, --text-key), or look at the file."
        )

    def _filled(self, moment: Moment, documents: Documents, tally: Tally, wanted: int) -> Moment:
        """The moment with at least `wanted` tokens, or all that are left of the epoch."""
        parts = [moment.tokens[moment.at :]]
        num_tokens = len(parts[0])
        while num_tokens < wanted and (texts := documents.take(self._encoder.next_bytes)):
            parts.append(self._encoder.encode(texts, tally.counts))
            num_tokens += len(parts[-1])
        return replace(
            moment,
            records=documents.records,
            draws=documents.buffer.draws,
            place=documents.reading.place(),
            held=documents.buffer.held(),
            tokens=np.concatenate(parts),
            at=0,
            counts=dict(tally.counts),
        )

    def _batch(self, moment: Moment, count: int) -> Batch:
        """This rank's part of the next `count` samples."""
        tokens, length = moment.tokens[moment.at :], self.seq_len
        rank, world_size = (self.rank, self.world_size) if self.partition == "samples" else (0, 1)
        mine = np.arange(rank, count, world_size)
        buffer = np.empty((len(mine), length + 1), self._dtype)
        buffer[:, :length] = tokens[: count * length].reshape(count, length)[rank::world_size]
        ends = (mine + 1) * length
        inside = ends < len(tokens)  # Not so for the last sample of an epoch without a tail.
        buffer[inside, length] = tokens[ends[inside]]
        buffer[~inside, length] = IGNORE_INDEX
        ids = moment.samples_taken + mine
        if self.partition == "records":
            ids = ids * self.world_size + self.rank
        inputs, labels = buffer[:, :-1], buffer[:, 1:]
        return Batch(inputs, labels, ids, moment.epoch, moment.step, run_step=moment.run_step)


def _records(inputs: Any, options: ReadOptions, follow_links: bool) -> Records:
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    if isinstance(inputs, str) and inputs.startswith((HUB, _HUB_URL)):
        return records_of(inputs, options)
    if isinstance(given, Sequence) and given and all(isinstance(one, str | Path) for one in given):
        return FileRecords(given, options, follow_links=follow_links)
    return records_of(inputs, options)


def _global_batch(batch_size: int | None, global_batch_size: int | None, world_size: int, partition: str) -> int:
    check_integer("global_batch_size", global_batch_size, 1)
    size = batch_sizes(batch_size, global_batch_size, world_size).largest
    if partition == "records" and size < world_size:
        raise UsageError(
            f"global_batch_size: expected a sample or more for each of {world_size} ranks where they part the records, "
            f"got {size}."
        )
    return size
