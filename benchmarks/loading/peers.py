"""The peers, each used as its own documentation says: how it writes the corpus, and how it opens a feed of batches.

Libraries are imported within the functions: a peer runs in the interpreter that has its library (`fleet.interpreter`).
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus, load

YARDSTICKS = ("bare", "bare_take")
"""No loaders: they have no helper processes, no state and one order."""
TEXT_SEQ_LEN = 1024
HUB_NAME = "example/web"
DOCUMENT_TOKENS = 1000
SPLITS = 60
"""Of LanceDB: divisible by each world size of the elastic run."""


@dataclass(frozen=True)
class Ask:
    """How a feed is opened.

    Attributes:
        batch: Samples of a rank.
        workers: Helper processes.
        endless: The next epoch follows an epoch.
        remote: A URL of the data in place of the local folder; `cache` is an empty folder.
        buffer, tokenizer: Of a feed of text.
    """

    batch: int = 8
    rank: int = 0
    world: int = 1
    workers: int = 0
    seed: int = 1
    endless: bool = False
    remote: str = ""
    cache: str = ""
    buffer: int = 0
    tokenizer: str = ""


def same(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Feed:
    """`batches()`: those of the (rest of the) epoch. `tokens(batch)`: an array or tensor [B, L]."""

    batches: Callable[[], Iterable[Any]]
    tokens: Callable[[Any], Any] = same
    state: Callable[[], Any] | None = None
    load: Callable[[Any], object] | None = None

    def cast(self, batch: Any) -> Any:
        """The tokens as int64."""
        tokens = self.tokens(batch)
        return tokens.long() if hasattr(tokens, "long") else tokens.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Peer:
    """`data`: the folder of its format; `group`: its environment ("": our own); `modules`: what it imports.

    `elastic`: how its state may be loaded on another world size: that of rank 0, or what `merge` makes of all.
    """

    label: str
    data: str
    open: Callable[[Path, Ask], Feed]
    write: Callable[[Corpus, Path], None]
    modules: tuple[str, ...]
    group: str = "general"
    detail: str = ""
    state: bool = True
    elastic: str = ""
    merge: Callable[[Sequence[Any]], Any] = itemgetter(0)


def stateful(loader: Any, tokens: Callable[[Any], Any] = same) -> Feed:
    return Feed(lambda: loader, tokens, loader.state_dict, loader.load_state_dict)


def join_ranks(ask: Ask) -> None:
    """As torchrun does, for peers that get their rank from torch.distributed."""
    import torch.distributed as dist

    if ask.world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", rank=ask.rank, world_size=ask.world)


# Bare NumPy: the least that any loader must do.


def write_bare(corpus: Corpus, folder: Path) -> None:
    for i, (start, stop) in enumerate(corpus.shards()):
        corpus.tokens[start * SEQ_LEN : stop * SEQ_LEN + 1].tofile(folder / f"{i:06d}.bin")


def open_bare(folder: Path, ask: Ask) -> Feed:
    """A loop of row copies into one reused buffer; every place is known beforehand."""
    maps = [np.memmap(path, "<u2", "r").view(np.ndarray) for path in sorted(folder.glob("*.bin"))]
    positions = [(tokens, start) for tokens in maps for start in range(0, len(tokens) - 1, SEQ_LEN)]
    chosen = np.random.default_rng(ask.seed).permutation(len(positions)).tolist()
    steps = [[positions[i] for i in chosen[k : k + ask.batch]] for k in range(0, len(chosen), ask.batch)]
    buffer = np.empty((ask.batch, SEQ_LEN + 1), np.int64)

    def batches() -> Iterator[NDArray[np.int64]]:
        for step in steps:
            for row, (tokens, start) in enumerate(step):
                buffer[row] = tokens[start : start + SEQ_LEN + 1]
            yield buffer[: len(step)]

    return Feed(batches)


def write_one_file(corpus: Corpus, folder: Path) -> None:
    corpus.tokens.tofile(folder / "tokens.bin")


def open_bare_take(folder: Path, ask: Ask) -> Feed:
    """One fancy index a batch, of one array: no Python for a row."""
    tokens = np.memmap(folder / "tokens.bin", "<u2", "r").view(np.ndarray)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, SEQ_LEN + 1)
    chosen = np.random.default_rng(ask.seed).permutation((len(tokens) - 1) // SEQ_LEN) * SEQ_LEN
    steps = [chosen[k : k + ask.batch] for k in range(0, len(chosen), ask.batch)]
    buffer = np.empty((ask.batch, SEQ_LEN + 1), np.int64)

    def batches() -> Iterator[NDArray[np.int64]]:
        for step in steps:
            buffer[: len(step)] = windows[step]
            yield buffer[: len(step)]

    return Feed(batches)


def write_forebay(corpus: Corpus, folder: Path) -> None:
    from forebay.dataset.import_slices import import_slices
    from forebay.dataset.slices import write_token_slice

    for i, (start, stop) in enumerate(corpus.shards()):
        tokens = np.array(corpus.tokens[start * SEQ_LEN : stop * SEQ_LEN])
        document_ends = np.append(np.arange(1000, len(tokens), 1000, dtype=np.uint64), np.uint64(len(tokens)))
        write_token_slice(folder / f"{i:06d}.safetensors", tokens, document_ends)
    import_slices(folder, "benchmark")


def open_forebay(folder: Path, ask: Ask) -> Feed:
    import forebay

    loader = forebay.Loader(
        ask.remote or folder, seq_len=SEQ_LEN, global_batch_size=ask.batch * ask.world, rank=ask.rank,
        world_size=ask.world, seed=ask.seed, epochs=None if ask.endless else 1, cache_dir=ask.cache or None,
    )  # fmt: skip
    batches = loader.to_torch(num_workers=ask.workers) if ask.workers else loader
    return Feed(lambda: batches, attrgetter("inputs"), loader.state_dict, loader.load_state_dict)


# Megatron's GPTDataset and sampler, written again: its documents stay in order, and its masks are left out.


def write_megatron(corpus: Corpus, folder: Path) -> None:
    write_one_file(corpus, folder)
    np.save(folder / "starts.npy", np.arange(0, len(corpus.tokens), DOCUMENT_TOKENS))


class MegatronSamples:
    """A map-style dataset over the shuffled index: pieces of documents, concatenated, int64, two tensors."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.bytes = memoryview(np.memmap(folder / "tokens.bin", mode="r", order="C"))
        self.starts = np.load(folder / "starts.npy")
        num_tokens = len(self.bytes) // 2
        self.index = np.stack([np.arange(0, num_tokens - 1, SEQ_LEN), np.arange(SEQ_LEN + 1, num_tokens + 1, SEQ_LEN)])
        self.first = np.searchsorted(self.starts, self.index[0], side="right") - 1
        self.last = np.searchsorted(self.starts, self.index[1] - 1, side="right") - 1
        self.shuffle = np.random.default_rng(seed).permutation(self.index.shape[1])

    def __len__(self) -> int:
        return len(self.shuffle)

    def __getitem__(self, i: int) -> dict[str, Any]:
        import torch

        sample = self.shuffle[i]
        start, stop = self.index[:, sample]
        pieces = []
        for document in range(self.first[sample], self.last[sample] + 1):
            begin = max(self.starts[document], start)
            end = min(self.starts[document] + DOCUMENT_TOKENS, stop)
            pieces.append(np.frombuffer(self.bytes, np.uint16, end - begin, 2 * begin))
        text = torch.from_numpy(np.concatenate(pieces).astype(np.int64)).long()
        return {"tokens": text[:-1].contiguous(), "labels": text[1:].contiguous()}


class MegatronSampler:
    """Each rank's part of every global batch, from the consumed samples on."""

    def __init__(self, total: int, ask: Ask) -> None:
        self.total, self.ask, self.consumed = total, ask, 0

    def __iter__(self) -> Iterator[list[int]]:
        size, mine = self.ask.batch * self.ask.world, self.ask.rank * self.ask.batch
        for start in range(self.consumed, self.total - size + 1, size):
            yield list(range(start + mine, start + mine + self.ask.batch))
        self.consumed = 0


def open_megatron(folder: Path, ask: Ask) -> Feed:
    from torch.utils.data import DataLoader

    dataset: Any = MegatronSamples(folder, ask.seed)
    sampler, taken = MegatronSampler(len(dataset), ask), 0
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=ask.workers, persistent_workers=ask.workers > 0
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        nonlocal taken
        for batch in loader:
            taken += ask.batch * ask.world
            yield batch
        taken = 0

    def load_consumed(consumed: int) -> None:
        nonlocal taken
        sampler.consumed = taken = consumed

    return Feed(batches, itemgetter("tokens"), lambda: taken, load_consumed)


def open_nanogpt(folder: Path, ask: Ask) -> Feed:
    """Its `get_batch`, line by line: a new memory map for every batch, positions drawn with replacement."""
    import torch

    if ask.workers:
        raise ValueError("it uses no helper processes")
    torch.manual_seed(ask.seed)

    def batches() -> Iterator[Any]:
        while True:
            data = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
            ix = torch.randint(len(data) - SEQ_LEN, (ask.batch,))
            x = torch.stack([torch.from_numpy((data[i : i + SEQ_LEN]).astype(np.int64)) for i in ix])
            y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + SEQ_LEN]).astype(np.int64)) for i in ix])
            yield x, y

    return Feed(batches, itemgetter(0))


def write_array_record(corpus: Corpus, folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for i, (start, stop) in enumerate(corpus.shards()):
        writer = ArrayRecordWriter(str(folder / f"{i:06d}.array_record"), "group_size:1")
        for record in corpus.records(start, stop):
            writer.write(record.tobytes())
        writer.close()


def to_tokens(record: Any) -> NDArray[np.uint16]:
    return np.frombuffer(record["tokens"] if isinstance(record, dict) else record, np.uint16)


def open_grain(folder: Path, ask: Ask) -> Feed:
    """Without threads, as its documentation says for data in memory, which is also the fastest here."""
    import grain
    from grain.experimental import ElasticIterator
    from grain.sharding import ShardOptions

    source = grain.sources.ArrayRecordDataSource([str(path) for path in sorted(folder.glob("*.array_record"))])
    samples = grain.MapDataset.source(source).seed(ask.seed).shuffle().map(to_tokens)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset: Any
    if ask.world > 1:
        shard = ShardOptions(ask.rank, ask.world)
        dataset = ElasticIterator(samples, ask.batch * ask.world, shard, read_options=options)
    else:
        dataset = (samples.repeat() if ask.endless else samples).batch(ask.batch).to_iter_dataset(options)
    if ask.workers:
        dataset = dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=ask.workers))
    batches = iter(dataset)
    return Feed(lambda: batches, state=batches.get_state, load=batches.set_state)


def declare_operators() -> None:
    """Declare two operators of torchvision, which `streaming` imports.

    Its wheels for GPUs do not import beside a PyTorch for processors alone; the operators are not called here.
    """
    import torch

    if not torch.cuda.is_available():
        library = torch.library.Library("torchvision", "FRAGMENT")
        globals()["_operators"] = library  # They are gone with it.
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def write_mds(corpus: Corpus, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 26) as writer:
        for start, stop in corpus.shards():
            for record in corpus.records(start, stop):
                writer.write({"tokens": record})


def open_mosaic(folder: Path, ask: Ask) -> Feed:
    from streaming import StreamingDataLoader, StreamingDataset

    join_ranks(ask)
    dataset = StreamingDataset(
        remote=ask.remote or None, local=ask.cache or str(folder), shuffle=True, shuffle_seed=ask.seed,
        batch_size=ask.batch, num_canonical_nodes=1,
    )  # fmt: skip
    workers = {"num_workers": ask.workers, "persistent_workers": ask.workers > 0}
    return stateful(StreamingDataLoader(dataset, batch_size=ask.batch, **workers), itemgetter("tokens"))


def shard_records(shard: tuple[int, int], folder: str) -> Iterator[Any]:
    import torch

    for record in load(Path(folder)).records(*shard):
        yield torch.from_numpy(record.copy())


def write_litdata(corpus: Corpus, folder: Path) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        fn=partial(shard_records, folder=str(corpus.folder)), inputs=corpus.shards(), output_dir=str(folder),
        chunk_size=corpus.shard_samples * (SEQ_LEN + 1), item_loader=TokensLoader(block_size=SEQ_LEN + 1),
        num_workers=1,
    )  # fmt: skip


def open_litdata(folder: Path, ask: Ask) -> Feed:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    join_ranks(ask)
    options: dict[str, Any] = {}
    if ask.remote:
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # Its bucket's client accepts https alone.
        options = {"cache_dir": ask.cache, "storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    dataset = StreamingDataset(
        ask.remote or str(folder), item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True,
        drop_last=ask.world > 1, seed=ask.seed, **options,
    )  # fmt: skip
    workers = {"num_workers": ask.workers, "persistent_workers": ask.workers > 0}
    return stateful(StreamingDataLoader(dataset, batch_size=ask.batch, **workers))


def write_arrow(corpus: Corpus, folder: Path) -> None:
    """A column of lists of fixed length, which Arrow reads without copying."""
    import pyarrow as pa
    from datasets import Dataset

    tables = []
    for start, stop in corpus.shards():
        flat = pa.array(np.ascontiguousarray(corpus.records(start, stop)).reshape(-1))
        tables.append(pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN + 1)}))
    Dataset(pa.concat_tables(tables)).save_to_disk(str(folder), num_shards=len(tables))


def open_hf_map(folder: Path, ask: Ask) -> Feed:
    import torch
    from datasets import load_from_disk
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        load_from_disk(str(folder)).with_format("torch"), batch_size=ask.batch, shuffle=True, num_workers=ask.workers,
        generator=torch.Generator().manual_seed(ask.seed), persistent_workers=ask.workers > 0,
    )  # fmt: skip
    return stateful(loader, itemgetter("tokens"))


def open_hf_stream(folder: Path, ask: Ask) -> Feed:
    from datasets import load_dataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = [str(path) for path in sorted(folder.glob("*.arrow"))]
    stream: Any = load_dataset("arrow", data_files=files, split="train", streaming=True)
    stream = stream.shuffle(seed=ask.seed, buffer_size=1000).with_format("torch").batch(ask.batch)
    loader = StatefulDataLoader(
        stream, batch_size=None, num_workers=ask.workers, persistent_workers=ask.workers > 0
    )  # fmt: skip
    epoch = 0

    def batches() -> Iterator[Any]:
        nonlocal epoch
        stream.set_epoch(epoch)
        yield from loader
        epoch += 1

    return Feed(batches, itemgetter("tokens"), loader.state_dict, loader.load_state_dict)


def write_tar(corpus: Corpus, folder: Path) -> None:
    for i, (start, stop) in enumerate(corpus.shards()):
        with tarfile.open(folder / f"{i:06d}.tar", "w") as archive:
            for number, record in enumerate(corpus.records(start, stop), start):
                data = record.tobytes()
                info = tarfile.TarInfo(f"{number:09d}.tokens")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def open_webdataset(folder: Path, ask: Ask) -> Feed:
    """Shards are shuffled, and samples in a buffer of 1000; batched where they are read."""
    import webdataset

    shards = [f"{ask.remote or folder}/{path.name}" for path in sorted(folder.glob("*.tar"))]
    split = webdataset.split_by_node if ask.world > 1 else webdataset.single_node_only
    samples = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=ask.seed, nodesplitter=split).shuffle(1000)
    source: Any = samples.map(to_tokens).batched(ask.batch, collation_fn=np.stack)
    if ask.workers:
        source = webdataset.WebLoader(source, batch_size=None, num_workers=ask.workers, persistent_workers=True)
    return Feed(lambda: source)


def write_lance(corpus: Corpus, folder: Path) -> None:
    import lancedb
    import pyarrow as pa

    kind = pa.list_(pa.uint16(), SEQ_LEN + 1)
    schema = pa.schema([("tokens", kind)])

    def batches() -> Iterator[pa.RecordBatch]:
        for start, stop in corpus.shards():
            values = pa.array(corpus.records(start, stop).ravel())
            yield pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(values, type=kind)], schema=schema)

    lancedb.connect(str(folder)).create_table("tokens", batches(), schema=schema)


def to_rows(batch: Any) -> Any:
    import torch

    return torch.from_numpy(batch.column("tokens").flatten().to_numpy().reshape(-1, SEQ_LEN + 1).copy())


def open_lancedb(folder: Path, ask: Ask) -> Feed:
    """Each epoch is a dataset of its own, as `epoch` is an argument of its constructor."""
    import lancedb
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    table, dataset, epoch = lancedb.connect(str(folder)).open_table("tokens"), None, 0

    def make() -> Any:
        nonlocal dataset
        dataset = StreamingDataset(
            table, num_splits=SPLITS if ask.world > 1 else max(1, ask.workers), shuffle_seed=ask.seed, epoch=epoch,
            rank=ask.rank, world_size=ask.world, transform=to_rows,
        )  # fmt: skip
        return dataset

    def batches() -> Iterator[Any]:
        nonlocal dataset, epoch
        context = "spawn" if ask.workers else None  # Its threads do not survive a fork.
        yield from StreamingDataLoader(
            dataset or make(), batch_size=ask.batch, num_workers=ask.workers, multiprocessing_context=context
        )  # fmt: skip
        epoch, dataset = epoch + 1, None

    return Feed(batches, state=lambda: dataset.state_dict(), load=lambda state: make().load_state_dict(state))


def merge_lance(states: Sequence[Any]) -> Any:
    from lancedb.streaming import StreamingDataset

    return StreamingDataset.merge_state_dicts(list(states))


def write_energon(corpus: Corpus, folder: Path) -> None:
    from megatron.energon.flavors import BaseWebdatasetFactory

    write_tar(corpus, folder)
    names = sorted(path.name for path in folder.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
    text = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(text)


def open_energon(folder: Path, ask: Ask) -> Feed:
    import torch
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        basic_sample_keys,
        edataclass,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    @edataclass
    class Tokens(Sample):
        tokens: torch.Tensor

    @stateless
    def cook(sample: dict[str, Any]) -> Tokens:
        tokens = torch.frombuffer(bytearray(sample["tokens"]), dtype=torch.uint16)
        return Tokens(**basic_sample_keys(sample), tokens=tokens)

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        cookers = (Cooker(cook),)

        @stateless
        def batch(self, samples: list[Tokens]) -> torch.Tensor:
            return torch.stack([sample.tokens for sample in samples])

        @stateless
        def encode_batch(self, batch: torch.Tensor) -> torch.Tensor:
            return batch

    config = WorkerConfig(rank=ask.rank, world_size=ask.world, num_workers=ask.workers, seed_offset=ask.seed)
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=ask.batch, shuffle_buffer_size=1000, max_samples_per_sequence=100,
        task_encoder=Encoder(), repeat=ask.endless,
    )  # fmt: skip
    loader = get_savable_loader(dataset)
    return Feed(lambda: loader, state=loader.save_state_rank, load=loader.restore_state_rank)


# Feeds of text from a hub, for `benchmarks.hub`.


def write_nothing(corpus: Corpus, folder: Path) -> None:
    """The hub has its own corpus."""


def open_text_stream(folder: Path, ask: Ask, lanes: int | None = None) -> Feed:
    import forebay
    from forebay.stream import StreamOptions

    stream = forebay.TextStream(
        f"hf:{HUB_NAME}", tokenizer=ask.tokenizer, seq_len=TEXT_SEQ_LEN, batch_size=ask.batch, rank=ask.rank,
        world_size=ask.world, shuffle=ask.buffer > 0, seed=1, epochs=1 if (lanes or ask.world) == 1 else None,
        options=StreamOptions(lanes=lanes, shuffle_documents=ask.buffer),
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        for batch in stream:
            if batch.epoch:
                return  # This rank's share was read.
            yield batch

    return Feed(batches, attrgetter("inputs"), stream.state_dict, stream.load_state_dict)


def open_guide(folder: Path, ask: Ask) -> Feed:
    from forebay.worker import create_huggingface_dataset

    dataset = create_huggingface_dataset(
        HUB_NAME, ask.rank, ask.world, num_batches=1 << 30, batch_size=ask.batch, seq_len=TEXT_SEQ_LEN, streaming=True,
        tokenizer_name=ask.tokenizer, buffer_size=ask.buffer,
    )  # fmt: skip
    return stateful(dataset, itemgetter(0))


def open_hf_text(folder: Path, ask: Ask) -> Feed:
    """The column of text alone, a batched map with a fast tokenizer, packed as its example for causal models does.

    The map returns NumPy arrays: of lists the torch format makes a tensor for every integer, which is far slower.
    """
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerFast

    coder = PreTrainedTokenizerFast(tokenizer_file=f"{ask.tokenizer}/tokenizer.json", eos_token="<|endoftext|>")

    def pack(rows: dict[str, list[str]]) -> dict[str, Any]:
        documents = coder(rows["text"], return_attention_mask=False)["input_ids"]
        ids = np.fromiter((token for document in documents for token in (*document, coder.eos_token_id)), np.int64)
        return {"input_ids": list(ids[: len(ids) // TEXT_SEQ_LEN * TEXT_SEQ_LEN].reshape(-1, TEXT_SEQ_LEN))}

    dataset: Any = load_dataset(HUB_NAME, split="train", streaming=True, columns=["text"])
    if ask.buffer:
        dataset = dataset.shuffle(seed=1, buffer_size=ask.buffer)
    if ask.world > 1:
        dataset = split_dataset_by_node(dataset, ask.rank, ask.world)
    dataset = dataset.map(pack, batched=True, batch_size=1000, remove_columns=["text"])
    loader = DataLoader(dataset, batch_size=ask.batch)
    return Feed(lambda: loader, itemgetter("input_ids"), dataset.state_dict, dataset.load_state_dict)


DIVISIBLE = "the global batch divisible by the world"
PEERS = {
    "bare": Peer("bare NumPy gather and cast", "bin", open_bare, write_bare, ("numpy",), "", state=False),
    "bare_take": Peer("bare NumPy, one index", "one", open_bare_take, write_one_file, ("numpy",), "", state=False),
    "forebay": Peer(
        "forebay.Loader", "forebay", open_forebay, write_forebay, ("forebay",), "",
        elastic="state of any rank, any world size",
    ),
    "megatron": Peer(
        "Megatron-style", "megatron", open_megatron, write_megatron, ("torch",), detail="masks left out",
        elastic=f"consumed samples; {DIVISIBLE}",
    ),
    "nanogpt": Peer(
        "nanoGPT-style", "nanogpt", open_nanogpt, write_one_file, ("torch",), detail="draws with replacement",
        state=False,
    ),
    "grain": Peer(
        "Grain, ArrayRecord", "array_record", open_grain, write_array_record, ("grain", "array_record"),
        elastic=f"experimental.ElasticIterator; {DIVISIBLE}",
    ),
    "mosaic": Peer(
        "MosaicML Streaming, MDS", "mds", open_mosaic, write_mds, ("streaming", "torch"), "mosaic",
        elastic=f"num_canonical_nodes fixed, {DIVISIBLE}",
    ),
    "litdata": Peer(
        "LitData", "litdata", open_litdata, write_litdata, ("litdata", "torch"), detail="TokensLoader",
        elastic="from the state of a rank",
    ),
    "hf_map": Peer(
        "HF datasets, map-style", "arrow", open_hf_map, write_arrow, ("datasets", "torchdata"), "hf",
        detail="torch format, StatefulDataLoader",
    ),
    "hf_stream": Peer(
        "HF datasets, streaming", "arrow", open_hf_stream, write_arrow, ("datasets", "torchdata"), "hf",
        detail="shuffle(buffer_size=1000)",
    ),
    "webdataset": Peer(
        "WebDataset", "tar", open_webdataset, write_tar, ("webdataset", "torch"), detail="shuffle(1000)", state=False
    ),
    "lancedb": Peer(
        "LanceDB", "lance", open_lancedb, write_lance, ("lancedb", "torch"), merge=merge_lance,
        detail="drops what num_splits does not divide", elastic="states of all ranks merged",
    ),
    "energon": Peer(
        "Energon", "energon", open_energon, write_energon, ("megatron.energon", "torch"),
        detail="shuffle buffer of 1000; a state is of one rank",
    ),
}  # fmt: skip
TEXT_PEERS = {
    "stream": Peer("forebay.TextStream", "", open_text_stream, write_nothing, ("forebay",), ""),
    "one_lane": Peer(
        "forebay.TextStream, lanes=1", "", partial(open_text_stream, lanes=1), write_nothing, ("forebay",), ""
    ),
    "guide": Peer("create_huggingface_dataset", "", open_guide, write_nothing, ("forebay",), ""),
    "datasets": Peer("HF datasets, batched map", "", open_hf_text, write_nothing, ("datasets",), "hf"),
}
