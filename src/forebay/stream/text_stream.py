"""Text as it lies on disk or on the hub, tokenized while it is streamed: batches without a dataset of ours.

Documents are mixed in a buffer, encoded, joined with EOS between them, and cut into samples of seq_len tokens, whose
labels are the next tokens. Memory: the shuffle buffer (`shuffle_buffer` documents, at most `buffer_bytes` and one
document), one document as its format holds it, 1 MiB of text being encoded and prefetch + 2 batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.closing import Closing
from forebay.errors import DatasetError, UsageError
from forebay.formats.inputs import ReadOptions
from forebay.load.arguments import batch_sizes, check_choice, rank_of_world, token_dtype
from forebay.load.batch import IGNORE_INDEX, NumpyTokens, TokenBatch
from forebay.load.batch_source import BatchSource
from forebay.load.prefetch import Prefetcher
from forebay.order.bijection import derive_key
from forebay.order.step_index import check_integer
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer
from forebay.stream.documents import DocumentSequence, Malformed, ShuffleBuffer, TextEncoder
from forebay.stream.hub import HUB, Records, records_of
from forebay.stream.records import FileRecords
from forebay.stream.state import StreamState

_HUB_URL = "hf://datasets/"


class TextStream(Closing, BatchSource[NumpyTokens]):
    """Batches of one rank out of text files or somebody's streaming dataset, as an iterable.

    One `for` gives what remains of the current pass of `epochs` epochs. After a full pass the next `for` begins the
    next epoch; after `break` or `load_state_dict` it continues with the next batch. One iteration at a time. Same
    arguments, same batches, on any machine.

    With partition "samples" every rank reads and encodes everything and takes its samples of each global batch: the
    state of any rank may be loaded by any rank of any world. With "records" a rank encodes every world_size-th record:
    1/world_size of the work, but its state is its own rank's, and ranks may end an epoch some steps apart.

    Args:
        inputs: Paths, directories, globs, URLs, of any format that `forebay prepare` reads, compressed or not; or
            `hf:NAME[/CONFIG][:SPLIT]`; or an object: a dataset of Hugging Face, WebDataset or MosaicML Streaming, or
            any iterable of mappings (or strings; but a list of strings is paths) that starts again each time.
        tokenizer: As `forebay prepare --tokenizer` names it, or one that was loaded.
        seq_len: Tokens of a sample, L.
        batch_size: Samples of a rank's batch. Or `global_batch_size`: of all ranks' together; exactly one is given.
        rank, world_size: By default the environment's RANK and WORLD_SIZE, or 0 and 1.
        seed: Any integer; fixes the order of files and documents.
        shuffle_buffer: Documents that are mixed; the order of files is mixed, too. 0 keeps the order of the input.
        shuffle_start: Documents after which the first goes out, for an early first batch; the buffer then grows by
            one with each that does. None: all of shuffle_buffer is filled first.
        buffer_bytes: The buffer holds fewer if they are longer than this together.
        epochs: Epochs of a pass, which is one `for`; None for no end. Samples do not reach over an epoch's end.
        drop_last: Leave out the short batch at an epoch's end.
        partition: "samples" or "records", as above.
        text_key: The field or column with the text.
        format: Of all files, if they should not be sniffed.
        eos, bos: Whether a token ends and begins each document; or its name.
        dtype: int64 or int32, of `inputs` and `labels`.
        prefetch: Batches made ahead by a thread; 0 makes them in the caller's.

    Raises:
        UsageError: If an argument is missing or out of range.
        PrepareError: If an input or the tokenizer cannot be read; also while iterating. A malformed record is no error:
            it is skipped, counted in `stats()`, and listed in `malformed`.
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
        drop_last: bool = False,
        partition: str = "samples",
        text_key: str = "text",
        format: str = "auto",
        eos: bool | str = True,
        bos: bool | str = False,
        dtype: Any = np.int64,
        prefetch: int = 2,
    ) -> None:
        for name, value in (("seq_len", seq_len), ("epochs", epochs)):
            check_integer(name, value, 1)
        for name, value in (("shuffle_buffer", shuffle_buffer), ("buffer_bytes", buffer_bytes), ("prefetch", prefetch)):
            check_integer(name, value, 0)
        check_integer("shuffle_start", shuffle_start, 0)
        check_choice("partition", partition, ("samples", "records"))
        self.rank, self.world_size = rank_of_world(rank, world_size)
        check_integer("global_batch_size", global_batch_size, 1)
        self._global_batch = batch_sizes(batch_size, global_batch_size, self.world_size).largest
        if partition == "records" and self._global_batch < self.world_size:
            raise UsageError(
                f"global_batch_size: expected a sample or more for each of {self.world_size} ranks where they part the "
                f"records, got {self._global_batch}."
            )
        self.tokenizer = load_tokenizer(tokenizer, eos=eos, bos=bos) if isinstance(tokenizer, str) else tokenizer
        self.seq_len, self.partition, self.seed = seq_len, partition, int(seed)
        self._dtype = token_dtype(dtype, self.tokenizer.dtype, self.tokenizer.vocab_size)
        self._shuffle_buffer, self._shuffle_start, self._buffer_bytes = shuffle_buffer, shuffle_start, buffer_bytes
        self._epochs, self._drop_last, self._prefetch = epochs, bool(drop_last), prefetch
        self._text_key = text_key
        options, paths = ReadOptions(text_key=text_key, format=format), inputs
        if isinstance(inputs, str | Path):
            paths = [] if str(inputs).startswith((HUB, _HUB_URL)) else [inputs]
        is_files = isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths)
        self._records: Records = FileRecords(paths, options) if is_files else records_of(inputs, options)
        self._encoder = TextEncoder(self.tokenizer)
        self.position = StreamState(tokens=np.zeros(0, self.tokenizer.numpy_dtype))
        self._malformed: list[Malformed] = []
        self._turn = 0
        self._source: Prefetcher[tuple[Any, StreamState]] | None = None

    @property
    def step(self) -> int:
        """Steps of the run so far: of batches that iterating returned."""
        return self.position.run_step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self.position.epoch

    @property
    def global_batch_sizes(self) -> list[tuple[int, int]]:
        return [(0, self._global_batch)]

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self.tokenizer.vocab_size

    @property
    def malformed(self) -> tuple[Malformed, ...]:
        """The first malformed records that this stream has skipped (also those a little ahead of the batches)."""
        return tuple(self._malformed)

    def stats(self) -> dict[str, int]:
        """Return counts of the run up to the last batch given out and what was encoded with it.

        `documents`, `text_bytes` and `tokens` that were encoded here; `empty` documents among them; `malformed`
        records that were skipped; `tail_tokens` at epochs' ends, fewer than a sample (a batch, with drop_last);
        `batches`, `samples_taken` (of the epoch).
        """
        position = self.position
        return {**position.counts, "batches": position.run_step, "samples_taken": position.samples_taken}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that iterating gave out, as plain JSON values; see `stream.state`.

        With partition "samples" it is the same on every rank, and one rank's is enough to keep. `position` is the same
        as it is in memory: free to take at every step.
        """
        return self.position.to_dict(self._identity())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`: the next batch is the one that followed it, also of an iteration that is going on.

        Raises:
            StateError: If the state is malformed, or of other inputs or arguments.
        """
        self.seek(StreamState.from_dict(state, self._identity(), self.tokenizer.numpy_dtype))

    def seek(self, position: StreamState) -> None:
        """Continue from the `position` of this stream, or of one that differs in batch size, rank or world size alone.

        The samples that follow are those that followed then; unlike a state, nothing is checked.
        """
        self.close()
        self.position = position

    def close(self) -> None:
        """End the thread that makes batches ahead, close files. The state stays; iterating goes on from it."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def iterate(
        self, convert: Callable[[Any], Any] | None = None, prefetch: int | None = None, num_workers: int = 0
    ) -> Generator[Any, None, None]:
        if num_workers:
            raise UsageError(f"num_workers: expected 0 for a TextStream, got {num_workers}. Leave it out.")
        self.close()
        self._turn += 1
        turn, depth = self._turn, self._prefetch if prefetch is None else prefetch

        def finish(item: tuple[NumpyTokens, StreamState]) -> tuple[Any, StreamState]:
            return (item[0] if convert is None else convert(item[0])), item[1]

        try:
            while True:
                if turn != self._turn:
                    raise UsageError("TextStream: this iteration ended when another began. Open another for two.")
                if self._source is None:
                    self._source = Prefetcher(self._batches(self.position), depth, finish)
                item = next(self._source, None)
                if item is None:
                    return
                batch, self.position = item
                yield batch
        finally:
            if turn == self._turn:
                self.close()

    def _identity(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
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
            "shuffle_start": self._shuffle_start,
            "drop_last": self._drop_last,
            "partition": self.partition,
        }
        if self.partition == "records":
            fields.update(rank=self.rank, world_size=self.world_size)
        return fields

    def _batches(self, state: StreamState) -> Generator[tuple[NumpyTokens, StreamState], None, None]:
        stop = None if self._epochs is None else (state.epoch // self._epochs + 1) * self._epochs
        while stop is None or state.epoch < stop:
            documents = self._open(state)
            try:
                for batch, state in self._epoch(state, documents):  # noqa: B020 - each goes on from the one before
                    yield batch, state
            finally:
                documents.close()

    def _open(self, state: StreamState) -> DocumentSequence:
        key = derive_key(self.seed, "stream", "files", state.epoch) if self._shuffle_buffer else None
        reading = self._records.open(state.epoch, key, state.position)
        key = derive_key(self.seed, "stream", "documents", state.epoch)
        buffer = ShuffleBuffer(
            self._shuffle_buffer, self._buffer_bytes, key, state.draws, state.buffered, self._shuffle_start
        )
        share = (self.rank, self.world_size) if self.partition == "records" else (0, 1)
        return DocumentSequence(reading, buffer, dict(state.counts), self._malformed, share, state.records)

    def _epoch(self, state: StreamState, documents: DocumentSequence) -> Iterator[tuple[NumpyTokens, StreamState]]:
        size = self._global_batch
        if self.partition == "records":
            size = len(range(self.rank, size, self.world_size))
        # One sample more than the batch (one batch, with drop_last), so that the last is known for the last.
        required = (size + (size if self._drop_last else 1)) * self.seq_len
        is_last = False
        while not is_last:
            if len(state.tokens) - state.offset < required:
                state = self._fill(state, documents, required)
            num_tokens = len(state.tokens) - state.offset
            count = min(size, num_tokens // self.seq_len)
            if not count or (self._drop_last and count < size):
                advice = "Ask for shorter samples or smaller batches."
                for record in self._malformed[:1]:
                    advice = (
                        f"{documents.counts['malformed']} records were skipped, the first at {record.location} of "
                        f"{record.name}: {record.problem}. Name the column of text (text_key), or look at the file."
                    )
                raise DatasetError(
                    f"stream: expected at least one batch an epoch, got {num_tokens} tokens of {state.records} records "
                    f"for {size} samples of {self.seq_len}. {advice}"
                )
            batch = self._batch(state, count)
            tail = num_tokens - count * self.seq_len
            is_last = num_tokens < required and tail < self.seq_len * (size if self._drop_last else 1)
            if is_last:
                counts = {**state.counts, "tail_tokens": state.counts["tail_tokens"] + tail}
                run_step = state.run_step + 1
                state = StreamState(state.epoch + 1, run_step=run_step, tokens=state.tokens[:0], counts=counts)
            else:
                state = replace(
                    state,
                    step=state.step + 1,
                    run_step=state.run_step + 1,
                    samples_taken=state.samples_taken + count,
                    offset=state.offset + count * self.seq_len,
                )
            yield batch, state

    def _fill(self, state: StreamState, documents: DocumentSequence, required: int) -> StreamState:
        parts = [state.tokens[state.offset :]]
        num_tokens = len(parts[0])
        while num_tokens < required and (texts := documents.take(self._encoder.next_bytes)):
            parts.append(self._encoder.encode(texts, documents.counts))
            num_tokens += len(parts[-1])
        return replace(
            state, records=documents.records, draws=documents.buffer.draws, position=documents.reading.position(),
            buffered=tuple(documents.buffer.texts), tokens=np.concatenate(parts), offset=0,
            counts=dict(documents.counts),
        )  # fmt: skip

    def _batch(self, state: StreamState, count: int) -> NumpyTokens:
        tokens, length = state.tokens[state.offset :], self.seq_len
        rank, world_size = (self.rank, self.world_size) if self.partition == "samples" else (0, 1)
        numbers = np.arange(rank, count, world_size)
        buffer = np.empty((len(numbers), length + 1), self._dtype)
        buffer[:, :length] = tokens[: count * length].reshape(count, length)[rank::world_size]
        stops = (numbers + 1) * length
        inside = stops < len(tokens)  # Not so for the last sample of an epoch without a tail.
        buffer[inside, length] = tokens[stops[inside]]
        buffer[~inside, length] = IGNORE_INDEX
        ids = state.samples_taken + numbers
        if self.partition == "records":
            ids = ids * self.world_size + self.rank
        inputs, labels = buffer[:, :-1], buffer[:, 1:]
        return TokenBatch(
            inputs=inputs, labels=labels, sample_ids=ids, epoch=state.epoch, step=state.run_step, epoch_step=state.step
        )
