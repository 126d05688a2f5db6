# `make bench` runs the main job and `make test` the tests, each from nothing: both make the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: bench test test-long clean

bench: $(VENV)/.installed
	$(BIN)/python run_bench.py --method f3crec --backbone fedmf

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m long

$(BIN)/python:
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info[:2] <= (3, 12) or sys.exit("fedcl_bench needs Python 3.10, 3.11 or 3.12, and \"$(PYTHON)\" is %d.%d; name another: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python setup.cfg setup.py constraints.txt $(wildcard fedcl_bench/ops/kernels*.[ch])
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info fedcl_bench/ops/*.so
