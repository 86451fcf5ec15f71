# make demo: the whole loop on this machine. make test: every check. make help: the rest.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ITERATIONS ?=
SEED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help env demo test check lint format clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/'

env: $(VENV)/.ready ## .venv from the pinned constraints

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; set PYTHON=path of a Python 3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: env ## post-train the embedded tiny model; ITERATIONS=, SEED=
	$(BIN)/pyflyte run workflows/dit_grpo.py train --dataset geneval $(if $(ITERATIONS),--iterations $(ITERATIONS)) --seed $(SEED)

test: env check ## everything that CI runs

check: lint ## ruff, mypy --strict, import-linter, pytest
	$(BIN)/python -m pytest

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and caches, keep run outputs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
