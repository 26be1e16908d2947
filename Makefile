PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS := protos/outrider/v1/inference_pb2.py

.DEFAULT_GOAL := help
.PHONY: help setup demo up test lint protos simulate chaos bench bench-pools clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'up, test, simulate, chaos, bench and bench-pools pass ARGS on: make up ARGS="--num-targets 2"'

setup: $(INSTALLED) $(STUBS) ## Make .venv and install Outrider and its tools into it; done once.

demo: setup ## Start every service on the demo models, generate some text, and stop.
	$(BIN)/outrider demo

up: setup ## Run every service on this machine, until Ctrl-C.
	$(BIN)/outrider up $(ARGS)

test: setup ## Run the tests.
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## Check style, format and types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

protos: $(INSTALLED) ## Generate the Python stubs from protos/.
	$(BIN)/python protos/generate.py

simulate: setup ## Simulate the γ policy over a grid of services; takes most of an hour.
	$(BIN)/python -m tests.benchmarks.gamma_grid $(ARGS)

chaos: setup ## Kill, stop, restart and cut off workers under load, 200 times; takes a quarter of an hour.
	$(BIN)/python -m tests.benchmarks.chaos $(ARGS)

bench: setup ## Measure against transformers; prints two tables for each pair.
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-pools: setup ## Measure pools, KV transfer, prefixes and routing, and what the simulator says of them.
	$(BIN)/python -m tests.benchmarks.pools $(ARGS)

clean: ## Remove generated stubs, caches and benchmark models; .venv stays.
	rm -rf protos/outrider/v1/*_pb2*.py protos/outrider/v1/*_pb2*.pyi tests/benchmarks/pair
	rm -rf .mypy_cache .ruff_cache .pytest_cache build dist
	find protos services shared tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml protos/pyproject.toml .ci/constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Outrider needs Python 3.11 or later, and $(PYTHON) is not: try make setup PYTHON=python3.12' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): a few minutes the first time'
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable protos --editable '.[dev,cpu,nixl]'
	@touch $@

$(STUBS): protos/generate.py $(wildcard protos/outrider/v1/*.proto) | $(INSTALLED)
	$(BIN)/python protos/generate.py
