"""The benchmarks are programs of their own; what they import must exist."""

import importlib
import pkgutil

import benchmarks


def test_every_module_of_the_benchmarks_can_be_imported():
    failed = {}
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # One of the peers that are measured beside ours.
            if (error.name or "").split(".")[0] in ("forebay", "benchmarks", "support"):
                failed[module.name] = str(error)
        except ImportError as error:
            failed[module.name] = str(error)
    assert not failed
