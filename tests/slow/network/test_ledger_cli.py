"""The ledger's commands on a dataset that was prepared and a ledger that a real job wrote: nodes, leases, receipts."""

import json
from contextlib import ExitStack

from forebay import prepare_dataset
from forebay.cli import main
from forebay.dataset.reader import open_dataset
from forebay.network.pki.identity import create_network
from support.nodes import Network
from support.preparing import write_jsonl


def test_a_ledger_is_verified_exported_and_read_from_a_step_to_a_document_and_back(tmp_path, stack: ExitStack, capsys):
    texts = [f"Document {i} tells of {i} things. " + "More of it. " * (i % 5 + 2) for i in range(40)]
    rows = [{"id": f"doc-{i}", "text": text} for i, text in enumerate(texts)]
    write_jsonl(tmp_path / "in.jsonl", rows)
    options = {"tokenizer": "bytes", "slice_bytes": 4096, "document_ids": True, "workers": 1}
    prepare_dataset([tmp_path / "in.jsonl"], tmp_path / "tiny", **options)
    network, dataset = Network(tmp_path, stack, "w1"), open_dataset(tmp_path / "tiny")
    network.serve(dataset)
    service, seen = network.schedule(seq_len=16), []
    network.work("w1", service, on_batch=lambda batch: seen.append(batch.sample_ids.tolist()))
    service.stop()
    path, of_dataset = service.ledger_path, ("--dataset", dataset.path)

    def run(verb, *arguments, code=0):
        capsys.readouterr()
        assert main(["ledger", verb, str(path), *map(str, arguments)]) == code
        return capsys.readouterr().out

    report = json.loads(run("verify", "--samples", "--json"))
    samples = sum(map(len, seen))
    assert report["ok"] and report["epochs"] == [{"epoch": 0, "samples": samples, "missing": 0, "repeated": 0}]
    create_network(tmp_path / "other", "test")
    assert not report["certified"] and report["scheduler"] == service.identity.peer_id
    for code, root in enumerate((network.directory / "network", tmp_path / "other")):
        assert json.loads(run("verify", "--json", "--identity", root, code=code))["certified"]
    run("verify", "--key", "11" * 32, code=1)
    assert "keys were not checked against a network" in run("verify")
    assert "workers are certified" in run("verify", "--identity", network.homes["data"])
    for step in (1, len(seen)):
        (part,) = json.loads(run("blame", "--step", step, "--worker", "w1", *of_dataset, "--json"))["parts"]
        assert part["samples"] == seen[step - 1] and part["exact"]
        piece = part["documents"][0]
        assert piece["id"].startswith("doc-") and piece["source"] == "in.jsonl" and piece["text"]
        back = json.loads(run("blame", "--document", piece["id"], *of_dataset, "--json"))
        assert any(use["first_step"] == step and use["name"] == "w1" for use in back["uses"])
    shown = run("blame", "--step", 1, *of_dataset)
    assert "doc-" in shown and "w1" in shown
    run("blame", code=2)
    run("export", "--out", tmp_path / "uses.jsonl", "--sample-ids")
    assert (tmp_path / "uses.jsonl").read_text().startswith('{"entry": ')
