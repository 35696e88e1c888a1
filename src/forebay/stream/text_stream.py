"""Text as it lies on disk or on the hub, tokenized while it is streamed: batches without a dataset of ours.

Memory of a lane: the shuffle buffer (`shuffle_documents`, at most `shuffle_bytes` and one document), one document as
its format holds it, 1 MiB of text being encoded; and `prefetch_batches` + 2 batches in all.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import BOOL, I64
from forebay.base import Json
from forebay.errors import UsageError
from forebay.formats.inputs import ReadOptions
from forebay.load.arguments import batch_sizes, rank_of_world, token_dtype
from forebay.load.batch import IGNORE_INDEX, NumpyTokens, TokenBatch
from forebay.load.batch_source import Batches, Convert, Opened, RunningSource, Take
from forebay.load.prefetch import Prefetcher
from forebay.load.stats import Spent
from forebay.order.step_index import check_integer
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer
from forebay.storage.hub_splits import PREFIX
from forebay.stream.hub import HUB, Records, records_of
from forebay.stream.lane import Lane, Malformed, StreamOptions, TextEncoder
from forebay.stream.records import Share, find_records
from forebay.stream.state import COUNTS, LaneState, StreamState
from forebay.units import as_size, numbered

_MAX_EXCESS = 1.5
_MAX_FACTOR = 1.1  # times that the ranks may fetch the text together
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
        batch_size: Samples of a rank's batch. Or `global_batch_size`: of all ranks' together; exactly one is requested.
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
        rank, world_size = rank_of_world(rank, world_size)
        self._requested, lanes = options, options.lanes or world_size
        check_integer("global_batch_size", global_batch_size, 1)
        size = batch_sizes(batch_size, global_batch_size, world_size).largest
        if lanes > 1 and size % world_size:
            raise UsageError(
                f"global_batch_size: expected a multiple of the world size, {world_size}, with {lanes} "
                f"lanes, got {size}. Give batch_size, or StreamOptions(lanes=1)."
            )
        if lanes > 1 and steps is None and epochs is not None:
            raise UsageError(
                f"steps: expected the number of batches, as {lanes} lanes are not equally long, got None: ranks "
                "that train in step would wait for the others at an epoch's end. Give steps=, or epochs=None for no "
                "end, or StreamOptions(lanes=1), with which every rank reads everything."
            )
        self.tokenizer = load_tokenizer(tokenizer, eos=options.eos, bos=options.bos, allow_code=True)
        self.seq_len, self.seed, self.shuffle = seq_len, int(seed), bool(shuffle)
        self._dtype = token_dtype(options.dtype, self.tokenizer.dtype, self.tokenizer.vocab_size)
        self.vocab_size, self._epochs = self.tokenizer.vocab_size, epochs
        self.num_steps = steps
        """Batches of the run; None without an end."""
        read, paths = ReadOptions(text_key=options.text_key, format=options.format), inputs
        if isinstance(inputs, str | Path):
            paths = [] if str(inputs).startswith((HUB, PREFIX)) else [inputs]
        is_files = isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths)
        self._records: Records = find_records(paths, read) if is_files else records_of(inputs, read)
        self.position = StreamState()
        self.lane_states: dict[int, LaneState] = {}
        """States of lanes that this rank does not read, of this position or an earlier one."""
        self._malformed: list[Malformed] = []
        self._num_received = 0
        self._moves = False  # Between worlds.
        self._set_world(rank, world_size, size, lanes)
        self._inputs, self._times, self.title = inputs, dict.fromkeys(("read_s", "tokenize_s"), 0.0), "text stream"
        self._is_remote = not is_files or any("://" in str(path) for path in paths)
        self._reset()

    def _set_world(self, rank: int, world_size: int, global_batch_size: int, lanes: int) -> None:
        self.rank, self.world_size, self.lanes = rank, world_size, lanes
        self._global_batch, self.global_batch_sizes = global_batch_size, [(0, global_batch_size)]
        requested, share = self._requested, 1 if self._requested.lanes or not self._moves else lanes
        self._is_endless = lanes > 1 or self._epochs is None  # No batch ends with an epoch.
        self.options = replace(
            requested, lanes=lanes, drop_last=bool(requested.drop_last) and not self._is_endless,
            shuffle_documents=-(-requested.shuffle_documents // share) if self.shuffle else 0,
            shuffle_bytes=as_size(requested.shuffle_bytes) // share,
            warmup_documents=None if requested.warmup_documents is None else -(-requested.warmup_documents // share),
        )  # fmt: skip
        # Samples of the rank with most, over the mean; ranks have whole lanes, or parts of one.
        excess = world_size / lanes * (-(-lanes // world_size) if world_size <= lanes else 1 / (world_size // lanes))
        is_near = share > 1 and excess <= _MAX_EXCESS and global_batch_size >= 2 * world_size
        self._by_lane = excess == 1 or is_near
        step = min(world_size, lanes) if self._by_lane else gcd(world_size, lanes)
        self._own_lanes, self._factor = range(rank % step, lanes, step), world_size / step
        self._encoder = TextEncoder(self.tokenizer, len(self._own_lanes))

    def join_world(self, rank: int, world_size: int, global_batch_size: int, samples_taken: int) -> None:
        """Continue at a sample of the run as a rank of another world: the run's samples are the same in all worlds.

        Unless options.lanes is given, the text is divided into as many lanes as its format permits, up to 24, which
        mix `shuffle_documents` together. Where the world size does not divide them, ranks differ by a lane, and their
        batches in size (`weight`); or read lanes of each other, if one rank would read 1.5 times its share. Lanes of
        which no state is known are read again from their beginning, see `read_on`.

        Args:
            rank, world_size: From now on.
            global_batch_size: Samples of all ranks' batches together; a multiple of the world size.
            samples_taken: The run's samples before the next batch.
        """
        self.close()
        lanes = self._requested.lanes or (self.lanes if self._moves else self._records.max_lanes())
        self._moves = True
        self.lane_states |= self.position.lanes
        before, self.position = self._factor, StreamState(samples_taken=samples_taken)
        self._set_world(rank, world_size, global_batch_size, lanes)
        if self._factor > _MAX_FACTOR and self._factor != before:
            _log.warning(
                "stream: %d ranks together fetch the text %.1f times: it has %s that can be read alone. Larger "
                "or more files, or uncompressed ones, have more.", world_size, self._factor, numbered(lanes, "part"),
            )  # fmt: skip

    def learn(self, state: Any) -> None:
        """Keep the lanes of another rank's state as known. Raises StateError."""
        lanes = StreamState.from_dicts(state, self._identity(), (), self.tokenizer.numpy_dtype).lanes
        for number, lane in lanes.items():
            earlier = self.lane_states.get(number)
            if earlier is None or not lane.taken <= earlier.taken <= self._num_taken(self.position, number):
                self.lane_states[number] = lane

    def read_on(self) -> Iterator[int]:
        """Read this rank's lanes on to the position where a state is missing; yields after each part of it."""
        lanes = self._open_lanes(self.position)
        try:
            yield from self._read_on(self.position, lanes)
            self.position = replace(self.position, lanes={number: lane.state for number, lane in lanes.items()})
        finally:
            for lane in lanes.values():
                lane.close()

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
            "ideal_s": self._ideal_s(),
            **counts,
            "batches": position.run_step,
            "samples_taken": position.samples_taken,
        }

    def _num_units(self) -> float:
        return self._num_received

    def state_dict(self) -> Json:
        """Return the state after the last batch that iterating gave out, as plain JSON values; see `stream.state`.

        It has the lanes that this rank reads, or read before `join_world`. With one lane it is the same on every rank,
        and one rank's is enough to keep; else keep that of each. `position` is the same as it is in memory: free to
        take at every step.
        """
        position, step = self.position, 1 + self._global_batch // self.lanes
        if self._is_endless:
            lanes = {**self.lane_states, **position.lanes}
            near = {n: lane for n, lane in lanes.items() if 0 <= self._num_taken(position, n) - lane.taken <= step}
            position = replace(position, lanes=near)
        return position.to_dict(self._identity())

    def load_state_dict(self, state: Json | list[Json]) -> None:
        """Continue from `state`: the next batch is the one that followed it, also of an iteration that is going on.

        Args:
            state: Of this rank; or those of all ranks in a list, for a rank that reads other lanes, as in a world of
                another size.

        Raises:
            StateError: If a state is malformed, or of other inputs or arguments, or lacks a lane.
        """
        position = StreamState.from_dicts(state, self._identity(), self._own_lanes, self.tokenizer.numpy_dtype)
        own = {number: lane for number, lane in position.lanes.items() if number in self._own_lanes}
        self.seek(replace(position, lanes=own))

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
            start = StreamState(lanes={} if self._is_endless else {0: LaneState(epoch)})
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

    def _check_iteration(self, num_workers: int) -> None:
        if num_workers:
            raise UsageError(f"num_workers: expected 0 for a TextStream, got {num_workers}. Leave it out.")
        if self.num_steps is not None and self.step >= self.num_steps:
            _log.warning("stream: all %d steps of the run were given out: no batch is left.", self.num_steps)

    def _open(self, convert: Convert | None, prefetch: int | None, num_workers: int) -> Opened:
        def finish(item: tuple[NumpyTokens, StreamState]) -> tuple[Any, StreamState]:
            return (item[0] if convert is None else convert(item[0])), item[1]

        epochs, times, is_remote = self._epochs, self._times, self._is_remote
        stop_epoch = None if epochs is None else (self.epoch // epochs + 1) * epochs
        depth = self.options.prefetch_batches if prefetch is None else prefetch
        source = Prefetcher(self._batches(self.position, stop_epoch), depth, finish)

        def spent() -> Spent:
            read_s = times["read_s"]
            return 0.0, read_s * is_remote, read_s * (not is_remote), source.convert_s, times["tokenize_s"]

        return source, spent, 0.0

    def _receive(self, item: tuple[Any, StreamState]) -> Any:
        batch, self.position = item
        self._num_received += batch.inputs.size
        return batch

    def _identity(self) -> Json:
        return {
            "inputs": self._records.identity,
            "tokenizer": self.tokenizer.sha256,
            "eos_id": self.tokenizer.eos_id,
            "bos_id": self.tokenizer.bos_id,
            "global_batch_size": None if self._is_endless else self._global_batch,
            **{name: getattr(self, name) for name in ("seq_len", "seed", "shuffle")},
            **{name: getattr(self.options, name) for name in _IDENTITY},
        }

    def _batches(
        self, state: StreamState, stop_epoch: int | None
    ) -> Generator[tuple[NumpyTokens, StreamState], None, None]:
        """The batches after `state`, each with the state after it; of one lane up to an epoch."""
        lanes = self._open_lanes(state)
        try:
            for _ in self._read_on(state, lanes):
                pass
            while (self.num_steps is None or state.run_step < self.num_steps) and (
                self._is_endless or stop_epoch is None or state.epoch < stop_epoch
            ):
                batch, state = self._batch(state, lanes)
                yield batch, state
        finally:
            for lane in lanes.values():
                lane.close()

    def _open_lanes(self, state: StreamState) -> dict[int, Lane]:
        """This rank's lanes at the last known state that is not after `state`."""

        def begin(number: int) -> LaneState:
            states = (state.lanes.get(number), self.lane_states.get(number))
            usable = [lane for lane in states if lane and lane.taken <= self._num_taken(state, number)]
            return max(usable, key=lambda lane: lane.taken, default=LaneState())

        return {
            number: Lane(
                self._records, Share(number, self.lanes), self._encoder, self.options,
                begin(number) if self._is_endless else state.lanes.get(number, LaneState()),
                seq_len=self.seq_len, seed=self.seed, shuffle=self.shuffle,
                malformed=self._malformed, times=self._times,
            )
            for number in self._own_lanes
        }  # fmt: skip

    def _num_taken(self, state: StreamState, number: int) -> int:
        """Samples of a lane among those that were taken."""
        return max(0, -(-(state.samples_taken - number) // self.lanes))

    def _read_on(self, state: StreamState, lanes: dict[int, Lane]) -> Iterator[int]:
        for number, lane in lanes.items() if self._is_endless else ():
            if lane.state.taken < (stop := self._num_taken(state, number)):
                _log.info("stream: lane %d is read again from sample %d to %d", number, lane.state.taken, stop)
            yield from lane.read_to(stop)

    def _is_own(self, first: int, slots: I64) -> BOOL:
        """Which slots of the global batch from sample `first` on are this rank's."""
        numbers = owners = slots if self.lanes == 1 else first + slots
        if self._by_lane:
            turns, lanes = np.divmod(numbers, self.lanes)
            owners = lanes + self.lanes * (turns % np.maximum(1, -((lanes - self.world_size) // self.lanes)))
        own: BOOL = owners % self.world_size == self.rank
        return own

    def _batch(self, state: StreamState, lanes: dict[int, Lane]) -> tuple[NumpyTokens, StreamState]:
        """The next batch: this rank's samples, each next to its lane's slot in the global batch."""
        size, world_size, epoch, first = self._global_batch, self.world_size, state.epoch, state.samples_taken
        places = np.flatnonzero(self._is_own(first, np.arange(size)))
        length = self.seq_len
        rows = np.empty((max(1, len(places)), length + 1), self._dtype)
        for number, lane in lanes.items():
            slot = (number - first) % self.lanes
            while slot < size:
                tokens, count = lane.take(len(range(slot, size, self.lanes)))
                slots = slot + self.lanes * np.arange(count)
                own = np.flatnonzero(self._is_own(first, slots))
                if not (self._is_endless or len(own)):
                    own = np.zeros(1, np.int64)  # The sample of a rank that has none, which does not count.
                targets, stops = np.searchsorted(places, slots[own]), (own + 1) * length
                rows[targets, :length] = tokens[own[:, None] * length + np.arange(length)]
                labels = tokens[np.minimum(stops, len(tokens) - 1)].astype(np.int64)
                rows[targets, length] = np.where(stops < len(tokens), labels, IGNORE_INDEX)  # At an epoch's end.
                slot += count * self.lanes
                if not self._is_endless:  # A batch ends with the epoch.
                    size = slot
        places = places[places < size]
        weight = len(places) * world_size / size
        rows = rows[: len(places) or 1]
        after = StreamState(
            state.step + 1, state.run_step + 1, first + size, {number: lane.state for number, lane in lanes.items()}
        )
        if not self._is_endless and after.epoch > epoch:
            after = StreamState(run_step=after.run_step, lanes=after.lanes)
        batch = TokenBatch(
            inputs=rows[:, :-1], labels=rows[:, 1:], sample_ids=first + places, epoch=epoch, step=state.run_step,
            epoch_step=state.step, weight=weight,
        )  # fmt: skip
        return batch, after
