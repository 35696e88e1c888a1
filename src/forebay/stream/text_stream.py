"""Text as it lies on disk or on the hub, tokenized while it is streamed: batches without a dataset of ours.

Memory of a lane: the shuffle buffer (`shuffle_documents`, at most `shuffle_bytes` and one document), one document as
its format holds it, 1 MiB of text being encoded; and `prefetch_batches` + 2 batches in all.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import UsageError
from forebay.formats.inputs import ReadOptions
from forebay.load.arguments import batch_sizes, rank_of_world, token_dtype
from forebay.load.batch import IGNORE_INDEX, NumpyTokens, TokenBatch
from forebay.load.batch_source import Batches, Convert, Opened, RunningSource, Take
from forebay.load.prefetch import Prefetcher
from forebay.load.stats import Spent
from forebay.order.step_index import check_integer
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer
from forebay.stream.documents import Malformed, TextEncoder
from forebay.stream.hub import HUB, Records, records_of
from forebay.stream.lane import Lane, MakingTimes, StreamOptions
from forebay.stream.records import Share, find_records
from forebay.stream.state import COUNTS, LaneState, StreamState

_HUB_URL = "hf://datasets/"
_IDENTITY = ("lanes", "text_key", "shuffle_documents", "shuffle_bytes", "warmup_documents", "drop_last")
_log = logging.getLogger("forebay.stream")


class TextStream(RunningSource[NumpyTokens]):
    """Batches of one rank out of text files or somebody's streaming dataset, as an iterable.

    The documents are divided into lanes: disjoint, together everything, and others in each epoch. Each lane is a run
    of samples, and sample k of the stream is the next one of lane k mod lanes. A global batch is the next
    global_batch_size samples, of which rank r of W takes every W-th from number r. A rank reads the lanes of its
    samples: where W divides `lanes`, 1 / W of all bytes and tokenizing; with one lane everything.

    The samples and their order depend on inputs, tokenizer, seq_len, seed, shuffling and `lanes`; not on world size,
    batch size, machine or time. `lanes` is the world size by default: set it where worlds of several sizes (its
    divisors) shall read the same samples.

    One `for` gives what is left of the current pass; after `break` or `load_state_dict` the next continues. A stream of
    one lane has passes of `epochs` epochs: after one the next `for` begins another, and all ranks have equally many
    batches. Several lanes are not equally long, and each begins its next epoch by itself; so the pass is the run, of
    `steps` batches on every rank, all of them full. One iteration at a time.

    Args:
        inputs: Paths, directories, globs, URLs, of any format that `forebay prepare` reads, compressed or not; or
            `hf:NAME[/CONFIG][:SPLIT]`; or an object: a dataset of Hugging Face, WebDataset or MosaicML Streaming, or
            any iterable of mappings (or strings; but a list of strings is paths) that starts again each time.
        tokenizer: As `forebay prepare --tokenizer` names it, or one that was loaded.
        seq_len: Tokens of a sample, L.
        batch_size: Samples of a rank's batch. Or `global_batch_size`: of all ranks' together; exactly one is given.
        rank, world_size: By default the environment's RANK and WORLD_SIZE, or 0 and 1.
        seed: Any integer; fixes the order of files and documents.
        shuffle: Whether files and documents are mixed; else they come in the order of the input.
        epochs: Of a pass through one lane; None for no end.
        steps: Batches of the run at most. Necessary with several lanes, unless `epochs` is None: no end.
        options: Rarer settings.

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
        shuffle: bool = True,
        epochs: int | None = 1,
        steps: int | None = None,
        options: StreamOptions | None = None,
    ) -> None:
        for name, value in (("seq_len", seq_len), ("epochs", epochs), ("steps", steps)):
            check_integer(name, value, 1)
        options = options or StreamOptions()
        self.rank, self.world_size = rank_of_world(rank, world_size)
        self.lanes = lanes = options.lanes or self.world_size
        self.options = options = replace(
            options, lanes=lanes, drop_last=bool(options.drop_last) and lanes == 1,
            shuffle_documents=options.shuffle_documents if shuffle else 0,
        )  # fmt: skip
        check_integer("global_batch_size", global_batch_size, 1)
        self._global_batch = size = batch_sizes(batch_size, global_batch_size, self.world_size).largest
        self.global_batch_sizes = [(0, size)]
        if self.lanes > 1 and size % self.world_size:
            raise UsageError(
                f"global_batch_size: expected a multiple of the world size, {self.world_size}, with {self.lanes} "
                f"lanes, got {size}. Give batch_size, or StreamOptions(lanes=1)."
            )
        if self.lanes > 1 and steps is None and epochs is not None:
            raise UsageError(
                f"steps: expected the number of batches, as {self.lanes} lanes are not equally long, got None: ranks "
                "that train in step would wait for the others at an epoch's end. Give steps=, or epochs=None for no "
                "end, or StreamOptions(lanes=1), with which every rank reads everything."
            )
        self.tokenizer = (
            load_tokenizer(tokenizer, eos=options.eos, bos=options.bos) if isinstance(tokenizer, str) else tokenizer
        )
        self.seq_len, self.seed, self.shuffle = seq_len, int(seed), bool(shuffle)
        self._dtype = token_dtype(options.dtype, self.tokenizer.dtype, self.tokenizer.vocab_size)
        self.vocab_size, self._epochs = self.tokenizer.vocab_size, epochs
        self.num_steps = steps
        """Batches of the run; None without an end."""
        self._own_lanes = range(
            self.rank % gcd(self.world_size, self.lanes), self.lanes, gcd(self.world_size, self.lanes)
        )
        read, paths = ReadOptions(text_key=options.text_key, format=options.format), inputs
        if isinstance(inputs, str | Path):
            paths = [] if str(inputs).startswith((HUB, _HUB_URL)) else [inputs]
        is_files = isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths)
        self._records: Records = find_records(paths, read) if is_files else records_of(inputs, read)
        self._encoder = TextEncoder(self.tokenizer)
        self.position = StreamState()
        self._malformed: list[Malformed] = []
        self._inputs, self._times, self.title = inputs, MakingTimes(), "text stream"
        self._is_remote = not is_files or any("://" in str(path) for path in paths)
        self._reset()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0; of several lanes the lowest."""
        return self.position.epoch

    @property
    def step(self) -> int:  # type: ignore[override]
        """Batches given out since the run began."""
        return self.position.run_step

    def pass_of(self, step: int) -> tuple[int, int | None]:
        return 0, self.num_steps

    @property
    def malformed(self) -> tuple[Malformed, ...]:
        """The first malformed records that this stream has skipped (also those a little ahead of the batches)."""
        return tuple(self._malformed)

    def stats(self) -> dict[str, float]:
        """Return counts of the run up to the last batch given out and what was encoded with it, and times.

        `wait_s`, `busy_s`, `waiting_s` and the causes of waiting are as in `Loader.stats`, since the stream was made:
        reading counts as `network_s` or `disk_s`, encoding as `tokenize_s`.
        `documents`, `text_bytes` and `tokens` that were encoded here; `empty` documents among them; `malformed`
        records that were skipped; `tail_tokens` at epochs' ends, fewer than a sample (a batch, with drop_last);
        `batches`, `samples_taken` (by all ranks, of the epoch; with several lanes, of the run).
        """
        position = self.position
        counts = {name: sum(lane.counts[name] for lane in position.lanes.values()) for name in COUNTS}
        return {
            **self.waits.to_dict(),
            **counts,
            "batches": position.run_step,
            "samples_taken": position.samples_taken,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that iterating gave out, as plain JSON values; see `stream.state`.

        It has the lanes that this rank reads. With one lane it is the same on every rank, and one rank's is enough to
        keep; else keep that of each. `position` is the same as it is in memory: free to take at every step.
        """
        return self.position.to_dict(self._identity())

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue from `state`: the next batch is the one that followed it, also of an iteration that is going on.

        Args:
            state: Of this rank; or those of all ranks in a list, for a rank that reads other lanes, as in a world of
                another size.

        Raises:
            StateError: If a state is malformed, or of other inputs or arguments, or lacks a lane.
        """
        self.seek(StreamState.from_dicts(state, self._identity(), self._own_lanes, self.tokenizer.numpy_dtype))

    def seek(self, position: StreamState) -> None:
        """Continue from the `position` of this stream, or of one that differs in batch size, rank or world size alone.

        The samples that follow are those that followed then; unlike a state, nothing is checked.
        """
        self.close()
        self.position = position

    def take(self, count: int | None = None) -> Take[NumpyTokens]:
        """Return the first `count` batches of the current epoch (of several lanes: of the run), from its beginning.

        They can be iterated again and do not move the stream: for a look at the data, or an evaluation that is the same
        each time. None: all of the epoch; with several lanes, of `steps`.
        """
        check_integer("count", count, 1)
        epoch = self.epoch

        def open_batches(convert: Convert | None, prefetch: int | None) -> Batches:
            self.close()  # One iteration at a time: a running `for` goes on from its position.
            start = StreamState(lanes={0: LaneState(epoch)} if self.lanes == 1 else {})
            for batch, _ in islice(self._batches(start, epoch + 1), count):
                yield batch if convert is None else convert(batch)

        return Take(self, open_batches, None)

    def helper(self, index: int, count: int) -> TextStream:
        """Return the stream of one of `count` processes that make this rank's batches in turn, as a DataLoader's do.

        Batch t of helper h is the rank's batch t * count + h. Together they read this rank's share of the input,
        divided into `count` times as many lanes; the state is the helper's own.
        """
        check_integer("index", index, 0)
        if index >= min(count, self.num_steps or count):
            raise UsageError(
                f"helper: expected an index below {count} and a step for each, got {index} and steps={self.num_steps}. "
                "Use fewer processes."
            )
        return TextStream(
            self._inputs, tokenizer=self.tokenizer, seq_len=self.seq_len, seed=self.seed, shuffle=self.shuffle,
            epochs=self._epochs, global_batch_size=self._global_batch * count,
            rank=self.rank + self.world_size * index, world_size=self.world_size * count,
            steps=None if self.num_steps is None else len(range(index, self.num_steps, count)),
            options=replace(self.options, lanes=self.lanes * count),
        )  # fmt: skip

    def close(self) -> None:
        """End the thread that makes batches ahead, close files. The state stays; iterating goes on from it."""
        self._pause()

    def iterate(self, convert: Convert | None = None, prefetch: int | None = None, num_workers: int = 0) -> Batches:
        if num_workers:
            raise UsageError(f"num_workers: expected 0 for a TextStream, got {num_workers}. Leave it out.")
        if self.num_steps is not None and self.step >= self.num_steps:
            _log.warning("stream: all %d steps of the run were given out: no batch is left.", self.num_steps)
        return super().iterate(convert, prefetch)

    def _open(self, convert: Convert | None, prefetch: int | None, num_workers: int) -> Opened:
        def finish(item: tuple[NumpyTokens, StreamState]) -> tuple[Any, StreamState]:
            return (item[0] if convert is None else convert(item[0])), item[1]

        epochs, times, is_remote = self._epochs, self._times, self._is_remote
        stop_epoch = None if epochs is None else (self.epoch // epochs + 1) * epochs
        depth = self.options.prefetch_batches if prefetch is None else prefetch
        source = Prefetcher(self._batches(self.position, stop_epoch), depth, finish)

        def spent() -> Spent:
            read_s = times.read_s
            return 0.0, read_s * is_remote, read_s * (not is_remote), source.convert_s, times.tokenize_s

        return source, spent, 0.0

    def _receive(self, item: tuple[Any, StreamState]) -> Any:
        batch, self.position = item
        return batch

    def _identity(self) -> dict[str, Any]:
        return {
            "inputs": self._records.identity,
            "tokenizer": self.tokenizer.sha256,
            "eos_id": self.tokenizer.eos_id,
            "bos_id": self.tokenizer.bos_id,
            "global_batch_size": self._global_batch,
            **{name: getattr(self, name) for name in ("seq_len", "seed", "shuffle")},
            **{name: getattr(self.options, name) for name in _IDENTITY},
        }

    def _batches(
        self, state: StreamState, stop_epoch: int | None
    ) -> Generator[tuple[NumpyTokens, StreamState], None, None]:
        """The batches after `state`, each with the state after it; of one lane up to an epoch."""
        lanes = {
            number: Lane(
                self._records, Share(number, self.lanes), self._encoder, self.options,
                state.lanes.get(number, LaneState()), seq_len=self.seq_len, seed=self.seed, shuffle=self.shuffle,
                malformed=self._malformed, times=self._times,
            )
            for number in self._own_lanes
        }  # fmt: skip
        try:
            while (self.num_steps is None or state.run_step < self.num_steps) and (
                self.lanes > 1 or stop_epoch is None or state.epoch < stop_epoch
            ):
                batch, state = self._batch(state, lanes)
                yield batch, state
        finally:
            for lane in lanes.values():
                lane.close()

    def _batch(self, state: StreamState, lanes: dict[int, Lane]) -> tuple[NumpyTokens, StreamState]:
        """The next batch: this rank's samples, each next to its lane's slot in the global batch."""
        size, world_size, epoch = self._global_batch, self.world_size, state.epoch
        rows = np.empty((max(1, len(range(self.rank, size, world_size))), self.seq_len + 1), self._dtype)
        for number, lane in lanes.items():
            slot = (number - state.samples_taken) % self.lanes
            while slot < size:
                tokens, count = lane.take(len(range(slot, size, self.lanes)))
                self._fill(rows, slot, count, tokens)
                slot += count * self.lanes
                if self.lanes == 1:  # A batch ends with the epoch.
                    size = slot
        places = np.arange(self.rank, size, world_size)
        weight = len(places) * world_size / size
        # A rank without a sample in an epoch's last step gets another one, which does not count.
        rows = rows[: len(places) or 1]
        after = StreamState(
            state.step + 1, state.run_step + 1, state.samples_taken + size,
            {number: lane.state for number, lane in lanes.items()},
        )  # fmt: skip
        if self.lanes == 1 and after.epoch > epoch:
            after = StreamState(run_step=after.run_step, lanes=after.lanes)
        ids = state.samples_taken + places
        batch = TokenBatch(
            inputs=rows[:, :-1], labels=rows[:, 1:], sample_ids=ids, epoch=epoch, step=state.run_step,
            epoch_step=state.step, weight=weight,
        )  # fmt: skip
        return batch, after

    def _fill(self, rows: Any, slot: int, count: int, tokens: Any) -> None:
        """Write this rank's samples of a lane, which has every `lanes`-th slot of a global batch from `slot` on."""
        slots, length = slot + self.lanes * np.arange(count), self.seq_len
        own = np.flatnonzero(slots % self.world_size == self.rank)
        if self.lanes == 1 and not len(own):
            own = np.zeros(1, np.int64)  # the sample of a rank that has none
        targets, stops = slots[own] // self.world_size, (own + 1) * length
        rows[targets, :length] = tokens[: count * length].reshape(count, length)[own]
        labels = tokens[np.minimum(stops, len(tokens) - 1)].astype(np.int64)
        rows[targets, length] = np.where(stops < len(tokens), labels, IGNORE_INDEX)  # an epoch's end without a tail
