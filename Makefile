# One command for each thing one does here; every target makes the environment first where it is missing.
#   make demo     real text from a real model, speculation off and on
#   make test     the tests
#   make check    linters, types and tests: what must be green before a commit
#   make verify   the whole equality matrix (slow); with ENGINE_V1_SPEC_BENCH=question.jsonl also 60 of its prompts
#   make bench-never-slower ARGS="--dataset-path question.jsonl"   the ratio on/off of every kind of load (an hour)
#   make bench    throughput, speculation off and on; `make bench ARGS="--dataset random"` for another load

VENV ?= .venv
PYTHON ?= python3
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint check test-portable verify bench bench-never-slower format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamp is newer than pyproject.toml while the installed dependencies are those it names.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing engine_v1 and its dependencies into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.venv: $(STAMP) ## Make the virtual environment

demo: $(STAMP) ## Generate with the demo model, speculation off and on
	$(BIN)/engine-v1 demo $(ARGS)

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## Run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint test ## Run the linters, then the tests

test-portable: $(STAMP) ## Run what reaches the kernels without AVX512-BF16 and -VNNI, as on a CPU that has none
	ENGINE_V1_DISABLE_BF16_DOT=1 ENGINE_V1_DISABLE_INT8_DOT=1 $(BIN)/python -m pytest tests/v1/kernels tests/v1/worker tests/v1/e2e $(ARGS)

verify: $(STAMP) ## Run the slow tests: the whole equality matrix, every example
	$(BIN)/python -m pytest -m slow -s $(ARGS)

bench: $(STAMP) ## Measure throughput, speculation off and on
	$(BIN)/python benchmarks/benchmark_throughput.py --compare-no-spec $(ARGS)

bench-never-slower: $(STAMP) ## Compare speculation on and off over every kind of load (an hour with --dataset-path)
	$(BIN)/python benchmarks/bench_never_slower.py $(ARGS)

format: $(STAMP) ## Let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove the environment and every cache in the tree
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
