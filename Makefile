# Everything runs in .venv, which the first target that needs it sets up; a stamp inside says which set-up it has had.

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV := .venv
# The releases to install; `make` takes torch's from a file, so that everyone sees the same numbers.
CONSTRAINTS := constraints.txt
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --quiet

# One thread for each test worker: two workers whose torch starts a thread per core each get in one another's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test quick test-lowest test-gpu check format notebooks clean

help:  ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [WORKERS=4] [ARGS='more arguments for the command']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.stamp-run  ## tune a small GPT on virtual GPUs: no GPU needed
	@$(BIN)/splittune demo $(ARGS)

test: $(VENV)/.stamp-dev  ## the test suite, which needs no GPU
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

quick: $(VENV)/.stamp-dev  ## the tests that take no time, for a first look: under a minute
	$(PYTEST) -n $(WORKERS) -m 'not slow and not gpu and not standin' $(ARGS)

# The oldest Python, and of every dependency the lowest release that pyproject.toml admits, in an environment of its own.
LOWEST := .venv-lowest
LOWEST_PYTHON ?= python3.10

test-lowest:  ## the suite with the oldest Python and dependencies
	@$(MAKE) --no-print-directory test VENV=$(LOWEST) CONSTRAINTS=$(LOWEST)/lowest.txt PYTHON=$(LOWEST_PYTHON)

$(LOWEST)/lowest.txt: $(LOWEST)/.stamp-python pyproject.toml
	@grep -oE '"[a-z-]+>=[0-9.]+"' pyproject.toml | tr -d '"' | sed 's/>=/==/' > $@

test-gpu: $(VENV)/.stamp-dev  ## the tests that need CUDA devices
	$(PYTEST) -m gpu $(ARGS)

check: $(VENV)/.stamp-dev  ## lint, formatting, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) --quiet tests/test_layering.py

format: $(VENV)/.stamp-dev  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.stamp-dev  ## run the notebooks and keep their output
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

clean:  ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find splittune benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-run: $(VENV)/.stamp-python pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV): a few minutes the first time, most of them for torch"
	@$(PIP) install --editable . --constraint $(CONSTRAINTS)
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-python pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV) for development: a few minutes the first time, most of them for torch"
	@$(PIP) install --editable '.[dev]' --constraint $(CONSTRAINTS)
	@touch $(VENV)/.stamp-run $@

# A .venv that is there is kept if it works; one that is broken or too old is made anew.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))

$(VENV)/.stamp-python:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "There is no '$(PYTHON)' here, and splittune needs Python 3.10 or newer." >&2; \
	  echo "Install one, or name yours: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c '$(NEW_ENOUGH)' || { \
	  echo "splittune needs Python 3.10 or newer, but '$(PYTHON)' is $$('$(PYTHON)' --version 2>&1)." >&2; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -c 'import pip; $(NEW_ENOUGH)' 2>/dev/null || '$(PYTHON)' -m venv --clear $(VENV)
	@touch $@
