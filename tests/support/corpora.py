"""Files and servers that the pages of the documentation use: small, created at the first use."""

import contextlib
import functools
import gzip
import json
import shutil
from pathlib import Path

import numpy as np

from forebay.coordinator.server import Coordinator
from forebay.dataset.import_slices import import_slices
from forebay.formats.shard_writer import write_shards
from forebay.prepare.tokenize.tokenizers import byte_tokenizer
from support import nodes, whole
from support.archives import tar_bytes
from support.hub_server import TOKEN, HubServer, make_hub
from support.origin_server import OriginServer
from support.preparing import write_jsonl
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

SEQ_LEN = 2048  # of shared shards
TOKENS = 60_003  # of a slice


class Corpora:
    """Servers and files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._servers = contextlib.ExitStack()

    def close(self) -> None:
        self._servers.close()

    @functools.cached_property
    def tokens(self) -> Path:
        """A dataset of 1.26 M tokens in 22 slices."""
        return nodes.make_dataset(self.root / "tokens", 22, TOKENS).path

    @functools.cached_property
    def shards(self) -> Path:
        """Three shared shards of 64 samples."""
        folder = self.root / "buckets" / "dataset" / "remote" / "tokenized"
        chance = np.random.default_rng(1)
        tokens = [chance.integers(0, 50_000, 64 * SEQ_LEN).astype(np.uint16) for _ in range(3)]
        write_shards(tokens, folder, seq_len=SEQ_LEN, shard_tokens=64 * SEQ_LEN, generation="bin")
        return folder

    @functools.cached_property
    def hub(self) -> HubServer:
        """The hub of the tests; its gpt2 is a vocabulary of bytes, as GPT-2's own costs a hundred times the steps."""
        folder = make_hub(self.root / "hub")
        (folder / "models/gpt2/tokenizer.json").write_text(byte_tokenizer().to_str())
        shutil.copytree(self.tokens, folder / "datasets/OWNER/NAME")
        return self._servers.enter_context(HubServer(folder))

    @property
    def hub_environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    @functools.cached_property
    def s3(self) -> S3Server:
        """Buckets `corpora`, `theirs` (with datasets), `dataset` (shared shards), `mine`, `bucket`."""
        for bucket in ("corpora/wiki", "corpora/web", "corpora/books", "theirs/web"):
            shutil.copytree(self.tokens, self.root / "buckets" / bucket)
        for bucket in ("mine", "bucket/dir"):
            (self.root / "buckets" / bucket).mkdir(parents=True)
        (self.root / "buckets/bucket/dir/big.npy").write_bytes(bytes(100_000))
        assert self.shards.is_dir()
        return self._servers.enter_context(S3Server(self.root / "buckets"))

    @property
    def s3_environment(self) -> dict[str, str]:
        return {
            **self.s3.environment("remote/tokenized/"), **self.s3.aws_environment(),
            "R2_DATASET_WRITE_ACCESS_KEY_ID": ACCESS_KEY, "R2_DATASET_WRITE_SECRET_ACCESS_KEY": SECRET_KEY,
        }  # fmt: skip

    @functools.cached_property
    def coordinator(self) -> str:
        return self._servers.enter_context(Coordinator("127.0.0.1", 0)).address

    @functools.cached_property
    def dht(self) -> list[tuple[str, int]]:
        """Addresses of DHT nodes to start from."""
        bootstrap = nodes.Bootstrap(5)
        self._servers.callback(bootstrap.close)
        return bootstrap.addresses

    @functools.cached_property
    def quiet_dht(self) -> list[tuple[str, int]]:
        """The same, for a client that asks each node once: in `dht` pages leave nodes that are dead."""
        bootstrap = nodes.Bootstrap(5)
        self._servers.callback(bootstrap.close)
        return bootstrap.addresses

    @functools.cached_property
    def web(self) -> str:
        """Address of a web server: `web` and `wiki` are datasets, `shards` shared shards."""
        folder = self.root / "www"
        folder.mkdir()
        for name, target in [("web", self.tokens), ("wiki", self.tokens), ("shards", self.shards)]:
            (folder / name).symlink_to(target)
        return self._servers.enter_context(OriginServer(folder)).url

    def copy(self, *to: Path) -> None:
        """Copy the dataset of tokens to other names; each further one lacks a slice, so that its id is its own."""
        for missing, path in enumerate(to):
            shutil.copytree(self.tokens / "slices", path / "slices")
            for item in sorted((path / "slices").iterdir())[:missing]:
                item.unlink()
            import_slices(path, path.name)


def write_texts(directory: Path) -> None:
    """Inputs of `forebay prepare`: texts/, more.jsonl.zst, table.parquet, crawl/, books/, dumps/."""
    import bz2

    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    created = whole.texts(320)
    for folder, part in [("texts", created[:60]), ("books", created[60:100])]:
        (directory / folder).mkdir()
        for i, text in enumerate(part):
            (directory / folder / f"{i:03d}.txt").write_text(text)
    lines = "".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(created[100:160]))
    (directory / "more.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    pq.write_table(pa.table({"text": created[160:200]}), directory / "table.parquet")
    (directory / "crawl").mkdir()
    warc = b"".join(whole.page(f"http://example.org/{i}", text) for i, text in enumerate(created[200:260]))
    (directory / "crawl" / "0001.warc.gz").write_bytes(gzip.compress(warc))
    (directory / "dumps").mkdir()
    articles = "".join(
        f"<page><title>Article {i}</title><ns>0</ns><id>{i}</id><revision><id>{i}</id><model>wikitext</model>"
        f"<format>text/x-wiki</format><text>{text}</text></revision></page>\n"
        for i, text in enumerate(created[260:], 1)
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">\n{articles}</mediawiki>\n'
    (directory / "dumps" / "enwiki-pages-articles.xml.bz2").write_bytes(bz2.compress(dump.encode()))


def write_rows(directory: Path) -> None:
    """Inputs of `forebay convert`: train.parquet, mnist.npz, photos/, chats.jsonl, shards/, train.bin."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    chance = np.random.default_rng(2)
    pq.write_table(pa.table({"x": chance.random(50), "y": list(range(50))}), directory / "train.parquet")
    images, labels = chance.integers(0, 256, (20, 1, 28, 28), np.uint8), chance.integers(0, 10, 20, np.uint8)
    np.savez(directory / "mnist.npz", images=images, labels=labels)
    for label in ("cat", "dog"):
        (directory / "photos" / label).mkdir(parents=True)
        for i in range(3):
            picture = Image.fromarray(chance.integers(0, 256, (32, 32, 3), np.uint8))
            picture.save(directory / "photos" / label / f"{i}.png")
    chats = [{"input_ids": list(range(3, 9 + i)), "labels": list(range(3, 9 + i))} for i in range(10)]
    write_jsonl(directory / "chats.jsonl", chats)
    (directory / "shards").mkdir()
    np.save(directory / "shards" / "train_000000.npy", chance.integers(0, 50_000, 20_000).astype(np.uint16))
    tokens = np.concatenate([[262, 11, 1049], chance.integers(0, 50_000, 19_997)]).astype(np.uint16)
    np.save(directory / "train.npy", tokens)
    (directory / "train.npy").rename(directory / "train.bin")


def write_archives(directory: Path) -> None:
    """Inputs of the pages on other loaders: shards/ and pictures/, WebDataset archives of texts and of images."""
    import io

    from PIL import Image

    created, chance = whole.texts(60), np.random.default_rng(3)
    for folder in ("shards", "pictures"):
        (directory / folder).mkdir()
    for i in range(2):
        texts = {f"{i}{j:03d}.txt": text.encode() for j, text in enumerate(created[30 * i : 30 * i + 30])}
        (directory / "shards" / f"{i:06d}.tar").write_bytes(tar_bytes(texts))
        members = {}
        for j in range(8):
            picture = io.BytesIO()
            Image.fromarray(chance.integers(0, 256, (32, 32, 3), np.uint8)).save(picture, "JPEG")
            members |= {f"{i}{j:03d}.jpg": picture.getvalue(), f"{i}{j:03d}.cls": b"%d" % (j % 3)}
        (directory / "pictures" / f"{i:06d}.tar").write_bytes(tar_bytes(members))
