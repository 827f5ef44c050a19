# `make demo` and `make test` need nothing but Python 3.11 or newer, make, and the way to a package index.

PYTHON ?= python3
VENV ?= .venv
# More for pip, such as the small build of torch for machines without a GPU:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
SECONDS ?= 600
# Three files of tests at a time: even on two cores, since much of a test is waiting.
PYTEST_ARGS ?= -n 3 --dist loadfile

BIN := $(abspath $(VENV))/bin
# Touched when the set-up is complete: it is repeated only when what it depends on has changed.
STAMP := $(VENV)/.ckptd-installed

# Ranks are forked from a server of the test process, which tests that play an agent there would collect: two runs of pytest.
RANK_TESTS := tests/shim tests/supervisor/drills
# The fast tests first and those of the whole product last.
TESTS := $(filter-out %/system %/shim %/__pycache__,$(patsubst %/,%,$(wildcard tests/test_*.py tests/*/))) tests/system

.PHONY: help demo setup test check soak clean

help:
	@echo "make demo    run the example job under ckptd, break it twice, see it recover (one to three minutes)"
	@echo "make test    check the code, then run all tests"
	@echo "make check   ruff and mypy only"
	@echo "make soak    fault after fault for SECONDS=600, or as long as you say, and 100 kills in the middle of saves"
	@echo "make clean   remove $(VENV)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ckptd needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`;" \
	    "name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "this Python cannot make a virtual environment: apt install python3-venv make" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# The build back end comes first, from the same lock, so that pip builds with it and fetches no other.
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) --no-build-isolation -e ".[dev]"
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(RANK_TESTS)
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(RANK_TESTS:%=--ignore=%) $(TESTS)

soak: setup
	CKPTD_SOAK_S=$(SECONDS) $(BIN)/python -m pytest -s tests/system/test_soak.py
	CKPTD_KILLS=100 $(BIN)/python -m pytest -s tests/system/test_kills.py

clean:
	rm -rf $(VENV)
