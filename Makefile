# `make bench` runs the main job and `make test` the tests, each from nothing: both make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' fedcl_bench/core/version.py)

.PHONY: bench lint test test-long coverage docs archive clean

bench: $(VENV)/.installed
	$(BIN)/python run_bench.py --method f3crec --backbone fedmf

# Settings of both, and what is checked, in pyproject.toml.
lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

test: lint
	$(BIN)/python -m pytest

test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m long

# The share of lines that `make test` runs, worker processes and child processes counted.
coverage: $(VENV)/.installed-test
	$(BIN)/python -m pytest --cov --cov-report=
	$(BIN)/python -m coverage report

# The pages as a site, in the order of mkdocs.yml; links lead to the same files as in the repository.
docs: $(VENV)/.installed-docs
	rm -rf build/pages build/site
	mkdir -p build/pages/results/published build/pages/benchmarks
	cp README.md CHANGELOG.md CONTRIBUTING.md build/pages
	cp -r docs build/pages
	cp -r results/pages results/audits results/bases results/central results/domains results/leaderboard results/sensitivity build/pages/results
	$(BIN)/python -c 'from pathlib import Path; from fedcl_bench.leaderboard.board import write_pages; write_pages(Path("build/pages/results/leaderboard"))'
	cp results/ambiguities.md results/attacks.md results/fcucr.md results/newer-methods.md results/tutorial.md build/pages/results
	cp results/published/README.md build/pages/results/published
	cp -r results/published/ffmsr-pilot build/pages/results/published
	cp -r benchmarks/README.md benchmarks/results build/pages/benchmarks
	cp -r examples build/pages
	$(BIN)/python -m mkdocs build --strict

# What a DOI is given to: all that is committed, as Zenodo takes it with CITATION.cff.
ARCHIVE ?= build/fedcl_bench-$(VERSION).zip
archive:
	@git diff --quiet HEAD || { echo "make archive: commit your changes first; the archive holds what is committed"; exit 2; }
	@git tag --points-at HEAD | grep -qx "v$(VERSION)" || echo "make archive: this commit has no tag v$(VERSION), as that of a release has"
	mkdir -p $(dir $(ARCHIVE))
	git archive --format=zip --prefix=fedcl_bench-$(VERSION)/ -o $(ARCHIVE) HEAD

$(BIN)/python:
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info[:2] <= (3, 14) or sys.exit("fedcl_bench needs Python 3.10 to 3.14, and \"$(PYTHON)\" is %d.%d; name another: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python setup.cfg setup.py constraints.txt $(wildcard fedcl_bench/kernels/kernels*.[ch])
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info fedcl_bench/kernels/*.so .coverage* .mypy_cache .ruff_cache
