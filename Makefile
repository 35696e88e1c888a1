# The same by hand and in CI. `make setup` is idempotent; downloads are retried.
VENV    := .venv
PY      := $(VENV)/bin/python
PYTHON  ?= python3
DEMO    ?=
export PYTHONUNBUFFERED := 1

.PHONY: setup demo test lint check bench bench-prepare bench-loader bench-interop test-peers clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml scripts/setup.sh scripts/install.sh scripts/constraints.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

demo: setup
	$(VENV)/bin/forebay demo $(DEMO)

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: lint
	$(PY) -m pytest -n 3 --dist loadgroup

bench: setup
	$(PY) -m benchmarks

# What Forebay is measured against goes into .venv-peers, unless FOREBAY_PEERS names an interpreter that has it.
bench-prepare: setup
	$(PY) -m benchmarks.prepare

# The same for loading: .venv-peers-loaders, unless FOREBAY_LOADER_PEERS names a folder that has its environments.
bench-loader: setup
	$(PY) -m benchmarks.loading
	$(PY) -m benchmarks.loading.remote

# The hub's streaming and conversions beside the libraries of those formats (scripts/peers.sh interop installs them).
bench-interop: setup
	$(PY) -m benchmarks.hub
	$(PY) -m benchmarks.convert

# Files of other projects' own libraries, both ways; FOREBAY_FORMAT_PEERS names interpreters that have them.
test-peers: setup
	$(PY) -m pytest -n0 tests/peers

clean:
	rm -rf $(VENV) .venv-peers .venv-peers-loaders .pytest_cache .mypy_cache .ruff_cache .hypothesis
