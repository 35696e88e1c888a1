# The same by hand and in CI. `make setup` is idempotent; downloads are retried.
VENV    := .venv
PY      := $(VENV)/bin/python
PYTHON  ?= python3
DEMO    ?=
TESTS   ?=
WORKERS ?= -n 2 --dist loadgroup
export PYTHONUNBUFFERED := 1
# Most of a short process is the compilation of what it imports, unless that is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-slow test-all test-long test-stress coverage mutants lint types rules bench bench-prepare bench-loader bench-interop test-peers pages docs release clean

setup: $(VENV)/.ready $(VENV)/.kernels

$(VENV)/.ready: pyproject.toml scripts/setup.sh scripts/install.sh scripts/constraints.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

# Kernels are compiled here, once: else each process of the tests compiles those that it needs.
$(VENV)/.kernels: $(VENV)/.ready $(shell find src/forebay/prepare -name '*.py')
	@$(VENV)/bin/forebay warm --quiet
	@touch $@

demo: setup
	$(VENV)/bin/forebay demo $(DEMO)

# Types take as long as all the rest: both at once.
lint: setup
	@$(MAKE) --no-print-directory -j 2 types rules

types:
	$(VENV)/bin/mypy

rules:
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(PY) scripts/check_names.py src benchmarks examples tests docs README.md CONTRIBUTING.md CHANGELOG.md
	$(PY) scripts/check_size.py
	$(PY) scripts/check_sources.py
	$(PY) scripts/check_pages.py
	$(PY) scripts/check_files.py

# Before each commit: lint, and every test but tests/slow.
test: setup lint
	$(PY) -m pytest $(WORKERS) --ignore tests/slow $(TESTS)

# Processes, clusters, kills, real time; three at a time on two cores, as many wait for what is slow, dead or silent.
test-slow: setup
	HYPOTHESIS_PROFILE=ci $(PY) -m pytest -n 3 --dist loadgroup $(or $(TESTS),tests/slow)

# Both, with what they skip elsewhere: other frameworks, other projects' readers, hosts with networks of their own (root, nftables).
test-all: lint
	@PYTHON="$(PYTHON)" VENV=.venv-all bash scripts/setup.sh all
	HYPOTHESIS_PROFILE=ci FOREBAY_HOSTS=all FOREBAY_SCHEMATHESIS=.venv-all/bin/python \
	  FOREBAY_FORMAT_PEERS=$(CURDIR)/.venv-all/peers/bin/python:$(CURDIR)/.venv-all/peers-formats/bin/python \
	  .venv-all/bin/python -m pytest -n 3 --dist loadgroup $(TESTS)

# Which lines and branches the tests run, and which tests run each line; `mutants` then changes core modules at random.
coverage: setup
	$(PY) -m pytest $(WORKERS) --cov --cov-context=test --cov-report=term:skip-covered $(or $(TESTS),--ignore tests/slow)

# Thirty runs of the fast tests, each in another order, half of them beside three busy loops; ten whose processes are stopped at random.
test-stress: setup
	$(PY) scripts/stress_tests.py
	$(PY) scripts/stress_tests.py --runs 10 --stops --seed 101

mutants: setup
	$(PY) scripts/mutation_score.py $(MUTANTS)

# Laws with random examples, twenty times as many; what is found comes with the line that repeats it.
test-long: setup
	HYPOTHESIS_PROFILE=long $(PY) -m pytest -o faulthandler_timeout=18000 -n 3 --dist loadgroup tests/unit tests/slow/fuzz

bench: setup
	$(PY) -m benchmarks

# What Forebay is measured against goes into .venv-peers, unless FOREBAY_PEERS names an interpreter that has it.
bench-prepare: setup
	$(PY) -m benchmarks.prepare

# The same for loading: .venv-peers-loaders, unless FOREBAY_LOADER_PEERS names a folder that has its environments.
bench-loader: setup
	$(PY) -m benchmarks.loading
	$(PY) -m benchmarks.loading.remote

# The hub's streaming and conversions, beside datasets (scripts/peers.sh loaders installs it), pyarrow and safetensors.
bench-interop: setup
	$(PY) -m benchmarks.hub
	$(PY) -m benchmarks.convert

# Files of other projects' own libraries, both ways; FOREBAY_FORMAT_PEERS names interpreters that have them.
test-peers: setup
	$(PY) -m pytest -n0 tests/slow/peers

# Packages in dist/, lock file, bill of materials and checksums in out/release/, all checked; nothing is published.
# TAG in the environment, if any, must name the version.
release:
	@PYTHON="$(PYTHON)" bash scripts/release.sh

# The tables of the reference, in the pages themselves, from the parser and the settings.
pages: setup
	$(PY) scripts/docs_site.py --pages

# The documentation site, in site/: without warnings, or not at all.
docs: $(VENV)-docs/.ready
	$(VENV)-docs/bin/python scripts/docs_site.py site
	@echo "docs: open site/index.html"

$(VENV)-docs/.ready: pyproject.toml scripts/install.sh scripts/constraints.txt
	@PYTHON="$(PYTHON)" bash -ec '. scripts/install.sh; make_venv $(VENV)-docs; retry install -c scripts/constraints.txt -e ".[docs]"' docs
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-docs site .venv-all .venv-peers .venv-peers-extract .venv-peers-loaders .pytest_cache .mypy_cache .ruff_cache .hypothesis
