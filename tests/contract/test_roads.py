"""The promises of every road from a dataset to batches: (ranks, origin) x (packing, masks, filter, mixture, cache).

Before the first batch nothing is read of all slices. The samples are the reference's, each once an epoch. The cache
keeps its budget. What is counted is what a server sends, and what is planned is within a fifth of that.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import Loader, Mixture
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import write_token_slice
from forebay.load.options import SampleOptions
from forebay.load.packing import DocumentSubset
from forebay.mirror import mirror
from forebay.order.footprint import num_requests
from forebay.storage.origins import open_remote
from support.origin_server import OriginServer
from support.reference_samples import Sample, samples_of, to_lists, write_slices

SEQ_LEN, BATCH, STEPS = 128, 16, 426  # Steps of the mixture: not to the end, which its streams reach one by one.
SIZES = np.random.default_rng(0).integers(1, 600, 1440).tolist()
SLICES = [(SIZES[48 * i : 48 * i + 48], 2 * (i % 3)) for i in range(30)]  # Some documents continue in the next.
CASES: dict[str, dict] = {
    "concat": {}, "in order": {"shuffle": False}, "masks": {"document_masks": True},
    "split": {"validation_fraction": 0.25, "split": "train"}, "best_fit": {"packing": "best_fit"},
    "min_tokens": {"documents": {"min_tokens": 11}}, "exclude": {"documents": {"exclude": (1, 40, 41, 77)}},
    "mixture": {"names": ["set", "two"]}, "small cache": {"part": 0.45},
}  # fmt: skip
FIRST = {"set": 0, "two": 1 << 20}  # The first token.
ORIGINS = {"in place": 1, "cached": 1, "http": 1, "bucket": 1, "hub": 1, "a data node": 1, "http to 3 nodes": 3}
HUB = "datasets/me/roads/resolve/main/"


@cache
def reference(name: str = "set", packing: str = "concat", **documents: Any) -> dict[int, Sample]:
    return samples_of(to_lists(SLICES, FIRST[name]), SEQ_LEN, packing=packing, **documents)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roads")
    for name in ("set", "two"):
        write_slices(folder / name, SLICES, np.uint32, first=FIRST[name])
        shutil.copytree(folder / name, folder / HUB / name)
    return folder


def open_loader(urls: Mapping[str, Any], spec: Mapping[str, Any], **more: Any) -> Loader:
    documents = DocumentSubset(**spec["documents"]) if "documents" in spec else None
    samples = SampleOptions(documents=documents, validation_fraction=spec.get("validation_fraction", 0.0))
    options = {name: spec[name] for name in ("shuffle", "document_masks", "packing", "split") if name in spec}
    if len(urls) == 1:
        return Loader(urls["set"], seq_len=SEQ_LEN, global_batch_size=BATCH, samples=samples, **options, **more)
    data = Mixture(urls, dict.fromkeys(urls, 1.0))
    return Loader(data, seq_len=SEQ_LEN, global_batch_size=BATCH, samples=samples, steps=STEPS, **options, **more)


def serve(directory: Path, stack: ExitStack, folders: Mapping[str, str]) -> dict[str, Dataset]:
    """The datasets of a network, which one data node serves, as a member finds them."""
    nodes = pytest.importorskip("support.nodes", reason="libtorrent is not installed")
    network = nodes.Network(directory, stack, "reader")
    network.serve(*map(open_dataset, folders.values()))
    own = {"identity": network.identity("reader"), "discovery": network.discovery}
    return {name: open_remote(f"forebay://test/{name}", **own) for name in folders}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_road_keeps_its_promises(folder, origin, case, tmp_path, monkeypatch):
    spec, world = CASES[case], ORIGINS[origin]
    names = spec.get("names", ["set"])
    expected = [reference(name, spec.get("packing", "concat"), **spec.get("documents", {})) for name in names]
    budget = int(spec.get("part", 2.0) * sum(path.stat().st_size for path in folder.glob("*/*.safetensors")))
    first = ["manifest.json", "slices.parquet", *["lengths.zst"][: "documents" in spec or "packing" in spec]]
    prefix = HUB if origin == "hub" else ""
    served = {f"{prefix}{name}/{file}": (folder / name / file).stat().st_size for name in names for file in first}
    read, counts, planned = Counter[tuple[int, int]](), Counter[str](), Counter[str]()
    with OriginServer(folder) as server, ExitStack() as stack:
        for name, value in {**server.s3_environment, "HF_ENDPOINT": server.url}.items():
            monkeypatch.setenv(name, value)
        bases = {"bucket": server.s3_url, "hub": "hf://datasets/me/roads"}
        is_served = origin in bases or origin.startswith("http")
        base = bases.get(origin, server.url) if is_served else folder
        urls = {name: f"{base}/{name}" for name in names}
        if origin == "a data node":
            urls = serve(tmp_path, stack, urls)
        for rank in range(world):
            cached = {} if origin == "in place" else {"cache_dir": tmp_path / str(rank), "cache_bytes": budget}
            loader = open_loader(urls, spec, rank=rank, world_size=world, seed=3, **cached)
            if is_served and not rank:
                assert server.requests == dict.fromkeys(served, 1) and server.bytes_sent == served
            for batch in loader:
                samples = list(zip(batch.dataset_index.tolist(), batch.sample_ids.tolist()))
                assert batch.inputs[: len(samples)].tolist() == [
                    expected[source][number].inputs for source, number in samples
                ]
                read.update(samples)
            stats = loader.stats()
            if cached:
                settings, footprints = loader.plan.cache, loader.plan.footprints(loader.plan.cache)
                counts.update(requests=stats["requests"], bytes=stats["fetched_bytes"])
                requests = num_requests(footprints, budget, settings.neighbour_bytes())
                planned = Counter(
                    requests=sum(requests), bytes=sum(int(of.fetch_ratio(budget) * of.num_bytes) for of in footprints)
                )
                assert sum(512 * path.stat().st_blocks for path in (tmp_path / str(rank)).rglob("*")) <= budget
            loader.close()
        tables = {name: world for name in served if not name.endswith(".zst")}
        if is_served:
            assert counts["requests"] == (Counter(server.requests) - Counter(tables)).total()
            assert counts["bytes"] == sum(server.bytes_sent.values()) - sum(world * served[name] for name in tables)
    assert set(read.values()) == {1}
    num_samples = len(expected[0]) - round(spec.get("validation_fraction", 0) * len(expected[0]))
    assert len(read) == (num_samples if len(names) == 1 else BATCH * STEPS)
    for name in counts:
        assert abs(planned[name] - counts[name]) <= 0.2 * counts[name], name


@pytest.mark.parametrize("origin", [origin for origin in ORIGINS if ORIGINS[origin] == 1 and origin != "cached"])
def test_a_dataset_without_documents_is_copied(origin, tmp_path, monkeypatch):
    """Its file of lengths is empty, so that a server refuses a request for the first byte."""
    source = tmp_path / "served/set"
    source.mkdir(parents=True)
    write_token_slice(source / "0.safetensors", np.arange(99, dtype=np.uint16), np.zeros(0, np.uint64))
    import_slices(source, "set")
    shutil.copytree(source, tmp_path / "served" / HUB / "set")
    with OriginServer(tmp_path / "served") as server, ExitStack() as stack:
        for name, value in {**server.s3_environment, "HF_ENDPOINT": server.url}.items():
            monkeypatch.setenv(name, value)
        bases = {"bucket": server.s3_url, "hub": "hf://datasets/me/roads", "http": server.url}
        url = f"{bases.get(origin, tmp_path / 'served')}/set"
        dataset = serve(tmp_path, stack, {"set": url})["set"] if origin == "a data node" else open_remote(url)
        assert mirror(dataset, tmp_path / "copy").complete
    copied = open_dataset(tmp_path / "copy")
    assert copied.verify().ok and list(map(list, copied.all_document_ends())) == [[]]
