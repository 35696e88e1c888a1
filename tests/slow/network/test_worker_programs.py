"""Workers with PyTorch: processes of one machine share it; a list imports none of it."""

import os

import pytest

from support.processes import Process


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, ["PASSIVE", None]),
        ({"LOCAL_WORLD_SIZE": "1000"}, ["PASSIVE", "1"]),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, [None, "1"]),
    ],
)
def test_workers_of_one_machine_do_not_spin_for_each_other(environment, expected, monkeypatch):
    pytest.importorskip("torch")
    code = """if True:
        import json, os
        from forebay.worker.training import trainer_class
        trainer_class("gpt")
        import torch
        print(json.dumps([*map(os.environ.get, ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")), torch.get_num_threads()]))"""
    for name in [name for name in os.environ if name.startswith("OMP_")]:
        monkeypatch.delenv(name)
    program = Process("-c", code, **environment)
    *variables, threads = program.ready()
    assert program.wait() == 0
    assert variables == expected and (expected[1] is None or threads == int(expected[1]))


def test_listing_costs_no_framework():
    code = (
        "import sys, forebay.worker as w; w.list_available_datasets(); w.WorkerConfig(dataset_name='pile')\n"
        "assert not {'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    program = Process("-c", code)
    assert program.wait() == 0, program.errors
