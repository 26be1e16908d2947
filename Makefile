PYTHON ?= python3
ARGS ?=
# Of the image; see the Dockerfile.
IMAGE ?= outrider:latest
BASE ?=
TORCH_INDEX ?=
EXTRAS ?= nixl

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS := protos/outrider/v1/inference_pb2.py

.DEFAULT_GOAL := help
.PHONY: help setup demo image secrets up down logs test test-compose test-gpu lint audit protos simulate chaos soak fuzz bench bench-steps bench-growth bench-rounds bench-router bench-peers bench-pools bench-overheads bench-sources bench-gpu clean

COMPOSE = $(shell docker compose version > /dev/null 2>&1 && echo docker compose || echo docker-compose)
# What every target of the container stack begins with.
ENGINE = @docker info > /dev/null 2>&1 || { \
	echo 'This needs a Docker engine, and none answers (docker info). Without one: .venv/bin/outrider up' >&2; exit 1; }; \
	$(COMPOSE) version > /dev/null 2>&1 || { \
	echo 'This needs Docker Compose, version 1.29 or later, and there is none' >&2; exit 1; }

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'All but setup, demo, image, lint, audit, protos and clean pass ARGS on: make up ARGS="--scale decode=3"'

setup: $(INSTALLED) $(STUBS) ## Make .venv and install Outrider and its tools into it; done once.

demo: setup ## Start every service on the demo models, generate some text, and stop.
	$(BIN)/outrider demo

image: ## Build the image (IMAGE, BASE, TORCH_INDEX, EXTRAS; wheels in build/wheels are preferred).
	$(ENGINE)
	@mkdir -p build/wheels
	DOCKER_BUILDKIT=1 docker build --tag $(IMAGE) $(if $(BASE),--build-arg BASE=$(BASE)) \
		--build-arg TORCH_INDEX=$(TORCH_INDEX) --build-arg EXTRAS=$(EXTRAS) \
		--build-arg VERSION=$$(cat protos/VERSION) --build-arg REVISION=$$(git rev-parse HEAD 2> /dev/null) .
	@docker image inspect --format '$(IMAGE): {{.Size}} bytes' $(IMAGE)

secrets: ## Make secrets/ for the container stack, or its certificates anew (ARGS="--host NAME").
	$(ENGINE)
	@docker image inspect $(IMAGE) > /dev/null 2>&1 || $(MAKE) image
	@mkdir -p secrets
	docker run --rm --network none --user $$(id -u):$$(id -g) --volume "$(CURDIR)/secrets:/secrets" $(IMAGE) \
		secrets /secrets $(ARGS)

up: ## Start the container stack, and wait until it serves.
	$(ENGINE)
	@docker image inspect $(IMAGE) > /dev/null 2>&1 || $(MAKE) image
	@test -e secrets/router/key.pem || $(MAKE) secrets ARGS=
	OUTRIDER_IMAGE=$(IMAGE) $(COMPOSE) up --detach $(ARGS)
	@echo 'Waiting until the router serves'
	@OUTRIDER_IMAGE=$(IMAGE) timeout 600 sh -c 'until $(COMPOSE) exec -T router outrider health 127.0.0.1:50061 2> /dev/null; \
		do sleep 2; done' || { echo 'It does not: make logs' >&2; exit 1; }
	@echo 'Try: OUTRIDER_API_KEY=$$(cat secrets/client/api-key) .venv/bin/outrider generate "def main" --ca secrets/client/ca.pem'

down: ## End the container stack; its volumes and secrets/ stay.
	$(ENGINE)
	OUTRIDER_IMAGE=$(IMAGE) $(COMPOSE) --profile monitoring down $(ARGS)

logs: ## Follow the container stack's logs.
	$(ENGINE)
	OUTRIDER_IMAGE=$(IMAGE) $(COMPOSE) logs --follow --tail 100 $(ARGS)

test: setup ## Run the tests.
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-compose: setup ## Test the container stack: build, serve, faults under load; takes ten minutes.
	$(ENGINE)
	$(BIN)/python -m pytest tests/compose -m compose $(ARGS)

test-gpu: setup ## Test kernels, models and services on a CUDA device.
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/gpu -m gpu $(ARGS)

lint: setup ## Check style, format and types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

audit: setup ## Look for known vulnerabilities in the versions that CI runs.
	$(BIN)/python .ci/audit.py

protos: $(INSTALLED) ## Generate the Python stubs from protos/.
	$(BIN)/python protos/generate.py

simulate: setup ## Simulate the γ policy over a grid of services; takes most of an hour.
	$(BIN)/python -m tests.benchmarks.gamma_grid $(ARGS)

chaos: setup ## Kill, stop, restart and cut off workers under load, 200 times; takes a quarter of an hour.
	$(BIN)/python -m tests.benchmarks.chaos $(ARGS)

soak: setup ## Load the container stack for a quarter of an hour, with a fault every 20 seconds.
	$(ENGINE)
	$(BIN)/python -m tests.benchmarks.soak $(ARGS)

fuzz: setup ## Send a million malformed and hostile messages to every method.
	$(BIN)/python -m tests.benchmarks.fuzz $(ARGS)

bench: setup ## Measure against transformers; prints two tables for each pair.
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-steps: setup ## Measure what steps of both models take, beside what memory and arithmetic allow.
	$(BIN)/python -m tests.benchmarks.steps $(ARGS)

bench-growth: setup ## Measure how steps grow with sequences, contexts, vocabulary and the model's shape.
	$(BIN)/python -m tests.benchmarks.growth $(ARGS)

bench-rounds: setup ## Measure where the time of a round goes, from the spans of its three processes.
	$(BIN)/python -m tests.benchmarks.rounds $(ARGS)

bench-router: setup ## Measure what the router takes of a core, by request, token and round.
	$(BIN)/python -m tests.benchmarks.router $(ARGS)

bench-peers: setup ## Measure beside OpenVINO and vLLM; ARGS="--openvino PYTHON --vllm PYTHON" name their interpreters.
	$(BIN)/python -m tests.benchmarks.peers $(ARGS)

bench-pools: setup ## Measure pools, KV transfer, prefixes and routing, and what the simulator says of them.
	$(BIN)/python -m tests.benchmarks.pools $(ARGS)

bench-sources: setup ## Measure who drafts best for which text, and whether the policy knows.
	$(BIN)/python -m tests.benchmarks.sources $(ARGS)

bench-gpu: setup ## Measure what a CUDA device makes of steps, beside what its memory allows.
	$(BIN)/python -m tests.benchmarks.gpu $(ARGS)

bench-overheads: setup ## Measure what encryption and the metrics page cost.
	$(BIN)/python -m tests.benchmarks.overheads $(ARGS)

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
	@$(BIN)/python -m shared.engine.native > /dev/null || echo 'PyTorch serves in their place'
	@touch $@

$(STUBS): protos/generate.py $(wildcard protos/outrider/v1/*.proto) | $(INSTALLED)
	$(BIN)/python protos/generate.py
